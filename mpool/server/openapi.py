"""The OpenAPI document, made from the structs that parse requests."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from .. import __version__
from .errors import TABLE, ErrorAnswer, PlainError
from .operations import Operation

#: Statuses that every operation may return.
_ANYWHERE = (400, 401, 403, 421, 431, 500, 503)
_WITH_BODY = (404, 408, 413, 415, 504)


@functools.lru_cache(maxsize=1)
def document() -> bytes:
    """The OpenAPI document of all operations, as JSON."""
    from .application import OPERATIONS

    return msgspec.json.encode(describe(OPERATIONS))


def describe(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Make an OpenAPI 3.1 document from operations."""
    kinds: list[Any] = [ErrorAnswer, PlainError]
    for operation in operations:
        kinds += [kind for kind in (operation.body, operation.answer) if kind is not None and kind not in kinds]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(map(repr, kinds), schemas))
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(operation, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mpool", "version": __version__,
                 "description": "Pools of models on a CPU with OpenAI's and Ollama's protocols."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {
            "token": {"type": "http", "scheme": "bearer"}, "password": {"type": "http", "scheme": "basic"}}},
        "security": [{}, {"token": []}, {"password": []}],
    }


def _operation(operation: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": schema_of[repr(operation.answer)]}
    else:
        content[operation.kind] = {"schema": {"type": "string"}}
    if operation.streams is not None:
        content[operation.streams] = {"schema": {"type": "string"}}
    found: dict[str, Any] = {
        "operationId": operation.name, "summary": operation.summary,
        "responses": {"200": {"description": "Done", "content": content}},
    }
    statuses = {*_ANYWHERE}
    if operation.body is not None:
        statuses |= {*_WITH_BODY}
        found["requestBody"] = {"required": True,
                                "content": {"application/json": {"schema": schema_of[repr(operation.body)]}}}
    shape = schema_of[repr(PlainError if operation.path.startswith("/api/") else ErrorAnswer)]
    for status in sorted(statuses):
        texts = [row.text for row in TABLE.values() if row.status == status]
        found["responses"][str(status)] = {"description": " ".join(texts),
                                           "content": {"application/json": {"schema": shape}}}
    if operation.path == "/health":
        found["security"] = []
        found["responses"]["503"]["content"] = content
    return found


__all__ = ["describe", "document"]
