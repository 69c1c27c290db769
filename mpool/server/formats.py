"""Conversion of each protocol's response format and tools to options of the library.

:mod:`mpool.conversation.grammar` constrains the completion to them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..checks import shown
from ..conversation import grammar, tool_schemas
from ..conversation.tool_schemas import ToolFields
from ..conversation.tools import arguments_of
from ..errors import MpoolError, sentence
from .errors import Refusal, renamed
from .fields import ConstraintFields

if TYPE_CHECKING:
    from .operations import Context

_OLLAMA, _INDEX = "format", re.compile(r"\[\d+\]")
#: Names of the fields of a tool in chat completions, and in ``/v1/responses``.
OPENAI_TOOL, FLAT_TOOL = ToolFields(), ToolFields("")
#: Arguments of an earlier tool call that are not the JSON text of an object become one argument with this name.
INVALID_ARGUMENTS = "invalid_json"
#: Types of a response format that constrain the completion.
_TYPES = ("json_object", "json_schema", "regex", "grammar")
#: Fields of a request that constrain the completion: OpenAI's, those of llama.cpp's server, and those of vLLM.
_CONSTRAINTS = tuple(ConstraintFields.__annotations__)
#: Keys of vLLM's ``structured_outputs`` that constrain the completion. Its other keys choose how spaces are written.
_STRUCTURED = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_STYLES = ("disable_fallback", "disable_any_whitespace", "whitespace_pattern")


def openai_format(value: dict[str, Any] | None, name: str = "response_format", flat: bool = False) -> dict[str, Any]:
    """Convert OpenAI's response format to options of the library.

    Args:
        value: Object with the ``type`` text, json_object, json_schema, regex or grammar; None: free text.
        name: Field of the request, for the error message.
        flat: The object itself has the field ``schema``; False: its field ``json_schema`` has it.

    Raises:
        Refusal: The type is unknown, the schema is missing, or the schema exceeds the limits.
    """
    if value is None:
        return {}
    if value.get("type") == "text":
        _response_format(value, name)
        return {}
    if value.get("type") not in _TYPES:
        raise Refusal("unsupported_parameter", f"`{name}.type` must be one of text, {', '.join(_TYPES)}, got "
                                               f"{shown(value.get('type'))}.", name)
    if value["type"] == "json_object" and value.get("schema") is not None:  # as llama.cpp's server and Together read it
        _response_format(value, name)
        return schema_format(value["schema"], name)
    if value["type"] == "json_schema":
        outer = value if flat else value.get("json_schema")
        if not isinstance(outer, dict) or not isinstance(outer.get("schema"), (dict, bool)):
            where = f"{name}.schema" if flat else f"{name}.json_schema.schema"
            raise Refusal("invalid_value", f"`{where}` must be a JSON schema.", name)
        _response_format(value, name)
        inner = {key: part for key, part in outer.items() if key != "type"}
        # as in OpenAI's API, keywords that cannot be enforced are errors only if the format is strict
        value = {"type": "json_schema", "json_schema": {**inner, "strict": inner.get("strict") is True}}
    return _response_format(value, name)


def constraint(context: Context, body: ConstraintFields) -> dict[str, Any]:
    """Convert the field of a request that constrains the completion, if any, to options of the library.

    Raises:
        Refusal: The request has several of these fields, or the value is not valid or exceeds the limits.
    """
    given = {name: value for name in _CONSTRAINTS if (value := getattr(body, name)) is not None}
    if given.get("response_format", {}).get("type") == "text":
        openai_format(given.pop("response_format"))
    if not given:
        return {}
    name, *others = given
    if others:
        raise Refusal("invalid_value", f"A request has one constraint of the completion, got `{name}` and "
                                       f"`{others[0]}`.", others[0])
    value, context.names["response_format"] = given[name], name
    if name == "response_format":
        return openai_format(value)
    if name == "json_schema":
        return schema_format(value, name)
    if name != "structured_outputs":
        return _guided(context, name.rpartition("_")[2], value, name)
    unknown = next((key for key in value if key not in _STRUCTURED and key not in _STYLES), None)
    if unknown is not None:
        raise Refusal("unsupported_parameter", f"`{name}` has the unknown key {shown(unknown)}; the keys are "
                                               f"{', '.join((*_STRUCTURED[:-1], *_STYLES))}.", name)
    kinds = [kind for kind in _STRUCTURED if value.get(kind) not in (None, False)]
    if len(kinds) != 1 or kinds[0] == "structural_tag":
        raise Refusal("invalid_value", f"`{name}` must have one of json, regex, choice, grammar, json_object, got "
                                       f"{', '.join(kinds) or 'none of them'}.", name)
    return _guided(context, kinds[0], value[kinds[0]], f"{name}.{kinds[0]}")


def _guided(context: Context, kind: str, value: Any, name: str) -> dict[str, Any]:
    """Convert a constraint of vLLM or of llama.cpp's server: ``json``, ``regex``, ``choice``, ``grammar`` or
    ``json_object``."""
    if kind == "json_object":
        return _response_format({"type": "json_object"}, name)
    if kind == "json":
        if isinstance(value, str):
            context.counts.add(context.check_text(value, name).encode())
        try:
            value = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, (dict, bool)):
            raise Refusal("invalid_value", f"`{name}` must be a JSON schema.", name)
        return schema_format(value, name)
    if kind == "choice":
        if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
            raise Refusal("invalid_value", f"`{name}` must be a list of texts that are not empty.", name)
        kind, value = "regex", "|".join(map(re.escape, value))
    if not isinstance(value, str):
        raise Refusal("invalid_value", f"`{name}` must be a string, got {shown(value)}.", name)
    return _response_format({"type": kind, kind: value}, name)


def anthropic_format(value: dict[str, Any], name: str) -> dict[str, Any]:
    """Convert Anthropic's ``output_config.format`` to options of the library.

    Args:
        value: Object with the ``type`` json_schema and a ``schema``.
        name: Field of the request, for the error message.

    Raises:
        Refusal: The type is another, a key is unknown, the schema is missing or exceeds the limits.
    """
    unknown = next((key for key in value if key not in ("type", "schema")), None)
    if unknown is not None:
        raise Refusal("unsupported_parameter", f"`{name}` has the unknown key {shown(unknown)}; the keys are type and "
                                               "schema.", name)
    if value.get("type") != "json_schema":
        raise Refusal("invalid_value", f"`{name}.type` must be json_schema, got {shown(value.get('type'))}.",
                      f"{name}.type")
    if not isinstance(value.get("schema"), (dict, bool)):
        raise Refusal("invalid_value", f"`{name}.schema` must be a JSON schema.", f"{name}.schema")
    return schema_format(value["schema"], name)


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


def schema_format(schema: dict[str, Any] | bool, name: str) -> dict[str, Any]:
    """Convert a JSON schema to options of the library. Keywords that a grammar cannot enforce are left out.

    Args:
        schema: JSON schema that the completion must match.
        name: Field of the request, for the error message.

    Raises:
        Refusal: The schema exceeds the limits.
    """
    return _response_format({"type": "json_schema", "json_schema": {"schema": schema, "strict": False}}, name)


def _response_format(wanted: dict[str, Any], name: str) -> dict[str, Any]:
    try:
        grammar.check(wanted)
    except MpoolError as error:
        raise Refusal("invalid_value", sentence(renamed(error, {"response_format": name})), name) from None
    return {"response_format": wanted}


def earlier_arguments(context: Context, text: str, where: str) -> Mapping[str, Any]:
    """Return the arguments of a call of an earlier message.

    A model may have written invalid JSON, or a completion may have ended within it. Clients send such a call back with
    every further request, together with a result that reports the error. The chat template then receives the text as
    the only argument, :data:`INVALID_ARGUMENTS`: templates need an object, and the model should see what it wrote.

    Args:
        text: Arguments as JSON text, valid or not.
        where: Field of the request, for the error message.

    Raises:
        Refusal: The text is too long, the body has too many values, or the server is strict and the text is not the
            JSON of an object.
    """
    context.counts.add(context.check_text(text, where).encode())
    found = arguments_of(text)
    if found is not None:
        return found
    context.ignore(_INDEX.sub("[]", where), f"`{where}` must be the JSON text of an object, got {shown(text)}.",
                   where, "invalid_value")
    return {INVALID_ARGUMENTS: text}


def functions_of(context: Context, tools: list[dict[str, Any]] | None, first: int = 0,
                 path: str = "tools") -> list[dict[str, Any]]:
    """Return the tools that are functions. Tools of other types, most of which OpenAI's servers run, are ignored.

    Args:
        tools: Tools of the request, or a part of them.
        first: Index of the first of these tools in the field ``path``.
        path: Field of the request that has the tools.

    Raises:
        Refusal: A tool has another type, and the server is strict.
    """
    found = []
    for at, tool in enumerate(tools or (), first):
        kind = tool.get("type", "function")
        if kind == "function" or not isinstance(kind, str):
            found.append(tool)
        else:
            context.ignore(f"{_INDEX.sub('[]', path)}[].{kind}", f"`{path}[{at}].type` must be function, got "
                                                                  f"{shown(kind)}.", f"{path}[{at}].type")
    return found


def allowed_tools(tools: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], Any]:
    """Apply a ``tool_choice`` of the type allowed_tools, in the form of chat completions or of ``/v1/responses``.

    Args:
        tools: Tools of the request.
        choice: ``tool_choice`` of the request.

    Returns:
        The tools that the model may call, and the remaining choice.

    Raises:
        Refusal: The choice is not valid, or names a tool that the request does not have.
    """
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return tools, choice
    inner = choice.get("allowed_tools", choice)
    allowed = inner.get("tools") if isinstance(inner, dict) else None
    names = [name_of(one) for one in allowed] if isinstance(allowed, list) else []
    known = {name_of(tool) for tool in tools} - {None}
    if not names or inner.get("mode") not in ("auto", "required") or not all(name in known for name in names):
        raise Refusal("invalid_value", "`tool_choice` of the type allowed_tools must have the `mode` auto or required, "
                                       "and `tools` that the request has.", "tool_choice")
    return [tool for tool in tools if name_of(tool) in names], inner["mode"]


def name_of(tool: Any) -> Any:
    """Return the name of a function, in the form of chat completions or of ``/v1/responses``; None: it has none."""
    if not isinstance(tool, dict):
        return None
    function = tool.get("function", tool)
    return function.get("name") if isinstance(function, dict) and isinstance(function.get("name"), str) else None


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
