"""The OpenAPI document, generated from the structs that parse requests."""

from __future__ import annotations

from typing import Any

import msgspec

from .. import __version__
from .errors import ANTHROPIC, INFERENCE, OLLAMA, OPENAI, TABLE, error_format
from .operations import Operation

#: Error statuses that every operation may return, and further ones of operations with a body.
_COMMON = (400, 401, 403, 421, 431, 500, 503)
_WITH_BODY = (404, 408, 413, 415, 504)


def describe(operations: tuple[Operation, ...], strict: bool) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of operations. ``strict``: unknown fields of requests are errors."""
    kinds: list[Any] = [found.body for found in (OPENAI, OLLAMA, ANTHROPIC, INFERENCE)]
    for operation in operations:
        kinds += [kind for kind in (operation.body, *_responses(operation)) if kind is not None and kind not in kinds]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    if not strict:
        for component in components.values():
            if component.get("additionalProperties") is False:
                del component["additionalProperties"]
    schema_of = dict(zip(map(repr, kinds), schemas))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mpool", "version": __version__,
                 "description": "Transformer models on a CPU, through the protocols of OpenAI, Anthropic and Ollama."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {
            "token": {"type": "http", "scheme": "bearer"}, "password": {"type": "http", "scheme": "basic"}}},
        "security": [{}, {"token": []}, {"password": []}],
    }


def _responses(operation: Operation) -> tuple[Any, ...]:
    return operation.response if isinstance(operation.response, tuple) else (operation.response,)


def _operation(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.response is not None:
        schemas = [schema_of[repr(kind)] for kind in _responses(operation)]
        content["application/json"] = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
    else:
        content[operation.media_type] = {"schema": {"type": "string"}}
    if operation.streams is not None:
        content[operation.streams] = {"schema": {"type": "string"}}
    found: dict[str, Any] = {
        "operationId": operation.name, "summary": operation.summary,
        "responses": {"200": {"description": "Success", "content": content}},
    }
    statuses = {*_COMMON}
    if operation.path.endswith("{id}"):
        statuses.add(404)
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if operation.body is not None:
        statuses |= {*_WITH_BODY}
        found["requestBody"] = {"required": True,
                                "content": {"application/json": {"schema": schema_of[repr(operation.body)]}}}
    errors = error_format(operation.path)
    statuses |= {*errors.statuses.values()}
    schema = schema_of[repr(errors.body)]
    for status in sorted(statuses):
        texts = [row.text for code, row in TABLE.items() if errors.status(code) == status]
        found["responses"][str(status)] = {"description": " ".join(texts),
                                           "content": {"application/json": {"schema": schema}}}
    if operation.path == "/health":
        found["security"] = []
        found["responses"]["503"]["content"] = content
    return found


__all__ = ["describe"]
