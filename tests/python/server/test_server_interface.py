"""Every route, field and error of the server, compared with a committed snapshot: names, types, limits, defaults,
statuses.

``python tests/python/server/test_server_interface.py`` writes the snapshot again after a wanted change.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

msgspec = pytest.importorskip("msgspec")
pytest.importorskip("starlette")
pytest.importorskip("sse_starlette")

from mpool.server import errors, worker  # noqa: E402
from mpool.server.application import OPERATIONS  # noqa: E402
from mpool.server.openapi import describe  # noqa: E402
from mpool.server.operations import Operation  # noqa: E402

SNAPSHOT = Path(__file__).with_name("interface.json")
_PATHS = {"openai": "/v1/models", "anthropic": "/v1/messages", "ollama": "/api/chat", "inference": "/embed",
          "worker": "/execute"}


def _schema(found: Any) -> Any:
    """Leave out the texts of a schema, and name references by their last part."""
    if isinstance(found, dict):
        if "$ref" in found:
            return found["$ref"].rpartition("/")[2]
        return {name: _schema(value) for name, value in found.items()
                if name not in ("description", "title") or not isinstance(value, str)}
    return [_schema(one) for one in found] if isinstance(found, list) else found


def _settings(operation: Operation) -> list[Any]:
    """Return what the OpenAPI document does not show, or shows only by its effect."""
    settings = {field.name: getattr(operation, field.name) for field in dataclasses.fields(operation)
                if isinstance(field.default, (bool, str)) and getattr(operation, field.name) != field.default}
    return [operation.handler.__name__, operation.summary, operation.streams, settings]


def _operation(operation: Operation, document: dict[str, Any]) -> list[Any]:
    """Return a route's settings and its entry of the document."""
    shown = document["paths"][operation.path][operation.method.lower()]
    content = {name: list(part["content"]) for name, part in shown["responses"].items()}
    schema = shown["responses"]["200"]["content"].get("application/json", {}).get("schema")
    body = shown.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    return [*_settings(operation), _schema(body), _schema(schema), content.pop("200"), [*content],
            shown.get("parameters", []), shown.get("security", "as all")]


def _error(code: str) -> dict[str, Any]:
    """Return an error's row and its response in each format."""
    refusal = errors.Refusal(code)
    found: dict[str, Any] = dict(errors.TABLE[code]._asdict())
    for name, path in _PATHS.items():
        form = errors.error_format(path)
        found[name] = [form.status(code), _without_message(json.loads(form.encode(refusal)))]
    return found


def _without_message(error: Any) -> Any:
    """The message is that of the row in all formats but one."""
    if isinstance(error, dict):
        return {name: _without_message(value) for name, value in error.items() if name not in ("message", "code")
                or name == "code" and value.isupper()}
    return "" if isinstance(error, str) and error.endswith(".") else error


def described() -> dict[str, dict[str, Any]]:
    """Describe the whole interface: that of ``mpool serve``, and the routes of ``mpool worker``."""
    document = describe(OPERATIONS, True)
    of_worker = worker.Worker._operations(object.__new__(worker.Worker))
    kinds = [kind for one in of_worker for kind in (one.body, one.response) if kind is not None]
    components = msgspec.json.schema_components([*kinds, errors.WorkerError])[1]
    return {
        "routes": {f"{one.method} {one.path}": _operation(one, document) for one in OPERATIONS},
        "worker": {f"{one.method} {one.path}": [*_settings(one), *(getattr(kind, "__name__", None) for kind in (
            one.body, one.response))] for one in of_worker},
        "fields": {name: _schema(value) for name, value in document["components"]["schemas"].items()},
        "fields of the worker": {name: _schema(value) for name, value in components.items()},
        "errors": {code: _error(code) for code in errors.TABLE}}


@pytest.mark.parametrize("part", ["routes", "worker", "fields", "fields of the worker", "errors"])
def test_interface_matches_the_snapshot(part: str) -> None:
    """A changed route, limit, default, status or text of an error is a change of the protocols, and is intended."""
    wanted, found = json.loads(SNAPSHOT.read_text())[part], json.loads(json.dumps(described()[part]))
    assert list(found) == list(wanted)
    for name, value in found.items():
        assert value == wanted[name], name


def test_only_the_strict_document_refuses_unknown_fields() -> None:
    """A client reads from ``additionalProperties`` if unknown fields are errors."""
    strict, lenient = (describe(OPERATIONS, how)["components"]["schemas"] for how in (True, False))
    refusing = {name for name, schema in strict.items() if schema.get("additionalProperties") is False}
    assert refusing and not any(schema.get("additionalProperties") is False for schema in lenient.values())
    for name in refusing:
        del strict[name]["additionalProperties"]
    assert strict == lenient


if __name__ == "__main__":
    parts = [f'"{part}": {{\n' + ",\n".join(f"{json.dumps(name)}: {json.dumps(value, separators=(', ', ':'))}"
                                            for name, value in rows.items()) + "\n}"
             for part, rows in described().items()]
    SNAPSHOT.write_text("{" + ",\n".join(parts) + "}\n")
