"""Conversion of each protocol's response format and tools to options of the library.

:mod:`mpool.conversation.grammar` constrains the completion to them.
"""

from __future__ import annotations

from typing import Any

from ..conversation import grammar, tool_schemas
from ..conversation.tool_schemas import ToolFields
from ..errors import MpoolError, sentence
from .errors import Refusal, with_schema_field

_OLLAMA = "format"
#: Names of the fields of a tool in chat completions, and in ``/v1/responses``.
OPENAI_TOOL, FLAT_TOOL = ToolFields(), ToolFields("")


def openai_format(value: dict[str, Any] | None, name: str = "response_format", flat: bool = False) -> dict[str, Any]:
    """Convert OpenAI's response format to options of the library.

    Args:
        value: Object with the ``type`` text, json_object or json_schema; None: free text.
        name: Field of the request, for the error message.
        flat: The object itself has the field ``schema``; False: its field ``json_schema`` has it.

    Raises:
        Refusal: The type is unknown, the schema is missing, or the schema exceeds the limits.
    """
    if value is None or value.get("type") == "text":
        return {}
    if value.get("type") not in ("json_object", "json_schema"):
        raise Refusal("unsupported_parameter", f"`{name}.type` must be one of text, json_object, json_schema.", name)
    if value["type"] == "json_schema":
        outer = value if flat else value.get("json_schema")
        if not isinstance(outer, dict) or not isinstance(outer.get("schema"), dict):
            where = f"{name}.schema" if flat else f"{name}.json_schema.schema"
            raise Refusal("invalid_value", f"`{where}` must be a JSON schema.", name)
        value = {"type": "json_schema", "json_schema": outer}
    return _response_format(value, name)


def ollama_format(value: str | dict[str, Any] | None) -> dict[str, Any]:
    """Convert Ollama's ``format`` to options of the library.

    Args:
        value: ``"json"``, or a JSON schema; None or "": free text.

    Raises:
        Refusal: The value is neither, or the schema exceeds the limits.
    """
    if value in (None, ""):
        return {}
    if value == "json":
        return {"response_format": {"type": "json_object"}}
    if not isinstance(value, dict):
        raise Refusal("unsupported_parameter", '`format` must be "json" or a JSON schema.', _OLLAMA)
    return schema_format(value, _OLLAMA)


def schema_format(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Convert a JSON schema to options of the library.

    Args:
        schema: JSON schema that the completion must match.
        name: Field of the request, for the error message.

    Raises:
        Refusal: The schema exceeds the limits.
    """
    return _response_format({"type": "json_schema", "json_schema": {"schema": schema}}, name)


def _response_format(wanted: dict[str, Any], name: str) -> dict[str, Any]:
    try:
        grammar.check(wanted)
    except MpoolError as error:
        raise Refusal("invalid_value", sentence(with_schema_field(error.message[:200], name)), name) from None
    return {"response_format": wanted}


def tool_options(tools: list[dict[str, Any]] | None, choice: Any = None,
                 parallel: bool | None = None, fields: ToolFields = OPENAI_TOOL) -> dict[str, Any]:
    """Convert the tools of a request to options of the library.

    Args:
        tools: Tools in OpenAI's format; None or empty: no tools.
        choice: ``tool_choice`` of the request.
        parallel: ``parallel_tool_calls`` of the request.
        fields: Names of the fields of a tool in the request, for error messages.

    Raises:
        Refusal: A tool is not valid, or the tools exceed the limits.
    """
    if not tools:
        return {}
    try:
        tool_schemas.read(tools, fields)
    except MpoolError as error:
        raise Refusal("invalid_value", sentence(error.message[:300]), "tools") from None
    found = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel}
    return {name: value for name, value in found.items() if value is not None}
