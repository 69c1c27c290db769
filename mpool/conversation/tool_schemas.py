"""Converts tools to OpenAI's dicts: dicts of OpenAI clients, Python functions, pydantic classes.

The schema of a Python function is built from its signature and its docstring (Google style). An annotation that has no
JSON schema is an error.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..checks import refuse, shown
from ..errors import InvalidArgument, LimitError
from ..host.resources import of_caller
from . import schema_references
from .response_formats import check_nesting, plain_value
from .schema_references import TYPES

#: Maximum number of tools, and of characters of all tools as JSON.
MAX_TOOLS, MAX_CHARS = 128, 1 << 18
#: Maximum number of characters of a function's name.
MAX_NAME = 128
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME}}}")
_ALLOWED = ('a dict {"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}, a '
            "function with annotations, or a pydantic class")
_SCALARS = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_ENTRY = re.compile(r"^(\s*)\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class ToolFields(NamedTuple):
    """Names of the fields of a tool in a protocol, for error messages.

    Attributes:
        function: suffix of the field that contains the function's name and schema; "": the tool itself contains them.
        schema: name of the field with the JSON schema.
    """

    function: str = ".function"
    schema: str = "parameters"


def read(tools: Any, fields: ToolFields = ToolFields()) -> list[dict[str, Any]]:  # noqa: B008 - immutable
    """Convert tools to OpenAI's dicts.

    Args:
        tools: the caller's tools.
        fields: names in error messages.

    Raises:
        InvalidArgument: an element is not a tool, two tools have the same name, or a function's signature lacks
            annotations or cannot be called with keywords.
        LimitError: there are too many tools, or their JSON is too long or nested too deeply.
    """
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        refuse("tools", tools, "a list of tools", hint=f"A tool is {_ALLOWED}")
    if len(tools) > MAX_TOOLS:
        raise LimitError(param="tools", got=f"{len(tools):,} tools", allowed=f"at most {MAX_TOOLS} tools")
    found, names, chars = [], set(), 0
    for at, tool in enumerate(tools):
        where = f"tools[{at}]"
        function = _from_dict(where, tool, fields) if isinstance(tool, Mapping) else _from_callable(where, tool)
        name, openai_tool = function["name"], {"type": "function", "function": function}
        if name in names:
            raise InvalidArgument(param=f"{where}{fields.function}.name", allowed="unique among the tools",
                                  got=f"{name!r}, which is the name of another tool")
        names.add(name)
        text = _json(where, openai_tool)
        openai_tool = json.loads(text)  # a copy of plain data
        if '"$ref"' in text:
            schema_references.check(openai_tool["function"]["parameters"],
                                    f"{where}{fields.function}.{fields.schema}")
        chars += len(text)
        if chars > MAX_CHARS:
            raise LimitError(param="tools", got="more", allowed=f"at most {MAX_CHARS:,} characters as JSON in total")
        found.append(openai_tool)
    return found


def _json(where: str, value: Any) -> str:
    check_nesting(value, where, "tools")
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, default=plain_value)
        text.encode()
        return text
    except (TypeError, ValueError) as error:
        raise InvalidArgument(param=where, got=f"a value that is not JSON: {error}", allowed="plain JSON") from None


def _from_dict(where: str, tool: Mapping[str, Any], fields: ToolFields) -> dict[str, Any]:
    """Validate a tool in OpenAI's format, or only its ``function``."""
    kind, function = tool.get("type", "function"), tool.get("function")
    if function is None and "name" in tool:
        function = {key: value for key, value in tool.items() if key != "type"}
    if kind != "function" or not isinstance(function, Mapping):
        got = shown(kind) if kind != "function" else "no function"
        raise InvalidArgument(param=where, got=got, allowed=_ALLOWED)
    where += fields.function
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        refuse(f"{where}.name", name, f"1 to {MAX_NAME} letters, digits, _, - and .")
    if description is not None and not isinstance(description, str):
        refuse(f"{where}.description", description, "a string")
    if strict is not None and not isinstance(strict, bool):
        refuse(f"{where}.strict", strict, "True or False")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    elif parameters is True:
        parameters = {}
    elif not isinstance(parameters, Mapping) or not _may_be_object(parameters.get("type")):
        refuse(f"{where}.{fields.schema}", parameters,
               'the JSON schema of an object, {"type": "object", "properties": {...}}')
    for key, kind, allowed in (("properties", Mapping, "a dict, name -> JSON schema"), ("required", list, "a list")):
        if parameters.get(key) is not None and not isinstance(parameters[key], kind):
            refuse(f"{where}.{fields.schema}.{key}", parameters[key], allowed)
    # a template writes "" where a tool without the key has no line
    found = {**function, "parameters": parameters}
    if description is None:
        found.pop("description", None)
    return found


def _may_be_object(kind: Any) -> bool:
    """Return True if a value of ``type`` allows objects, or is no JSON type: what it means is then unknown."""
    kinds = kind if isinstance(kind, list) else [kind]
    return "object" in kinds or not any(one in TYPES for one in kinds if isinstance(one, str))


# ---- Python functions and classes ------------------------------------------------------------------------------------

def _from_callable(where: str, tool: Any) -> dict[str, Any]:
    name = getattr(tool, "__name__", None)
    if not callable(tool) or not isinstance(name, str) or not _NAME.fullmatch(name):
        hint = "Pass a function without a name as a dict" if callable(tool) else None
        raise InvalidArgument(param=where, got=name if callable(tool) and name else shown(tool), allowed=_ALLOWED,
                              hint=hint)
    if isinstance(tool, type):
        if not hasattr(tool, "model_json_schema"):
            raise InvalidArgument(param=where, got=f"the class {name}", allowed=_ALLOWED)
        with of_caller():
            schema = tool.model_json_schema()
        return _with_description(name, inspect.cleandoc(tool.__doc__ or ""), schema)
    return _from_signature(f"{where}, {name}", name, tool)


def _from_signature(where: str, name: str, function: Callable[..., Any]) -> dict[str, Any]:
    try:
        signature, hints = inspect.signature(function), typing.get_type_hints(function, include_extras=True)
    except (TypeError, ValueError, NameError) as error:
        raise InvalidArgument(f"{where}: the signature cannot be read: {error}", param="tools") from None
    description, described = _docstring(function.__doc__)
    properties: dict[str, Any] = {}
    required = []
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise InvalidArgument(f"{where}: parameter {parameter} must be one that can be passed by name",
                                  param="tools", got=str(parameter), allowed="a parameter that can be passed by name")
        if parameter.name not in hints:
            raise InvalidArgument(f"{where}: parameter {parameter.name} must have a type annotation", param="tools",
                                  got=parameter.name, allowed="annotated")
        schema = _schema(f"{where}: parameter {parameter.name}", hints[parameter.name])
        if parameter.name in described and "description" not in schema:
            schema["description"] = described[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        elif isinstance(parameter.default, (str, int, float, bool, type(None))):
            schema["default"] = parameter.default
        properties[parameter.name] = schema
    return _with_description(name, description, {"type": "object", "properties": properties, "required": required})


def _with_description(name: str, text: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return a function of OpenAI's format; without a text it has no description."""
    return {"name": name, **({"description": text} if text else {}), "parameters": schema}


def _docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """Return the text of a docstring before its sections, and the description of each parameter."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, indent, current = "", -1, ""
    for line in inspect.cleandoc(text or "").splitlines():
        if re.fullmatch(r"(Args|Arguments|Parameters|Returns?|Yields|Raises|Examples?|Notes?|Source):", line):
            section, indent = line, -1
        elif not section:
            summary.append(line)
        elif section in ("Args:", "Arguments:", "Parameters:") and line.strip():
            found = _ENTRY.match(line)
            if found is not None and (indent < 0 or len(found[1]) <= indent):
                indent, current = len(found[1]), found[2]
                described[current] = found[3].strip()
            elif current:
                described[current] = f"{described[current]} {line.strip()}".strip()
    return "\n".join(summary).strip(), described


def _schema(where: str, hint: Any) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        schema = _schema(where, args[0])
        text = next((note for note in args[1:] if isinstance(note, str)), None)
        text = text or next((note.description for note in args[1:] if isinstance(getattr(note, "description", None),
                                                                                 str)), None)
        return {**schema, "description": text} if text else schema
    if hint in (Any, inspect.Parameter.empty):
        return {}
    if isinstance(hint, type) and hint in _SCALARS:
        return {"type": _SCALARS[hint]}
    if origin is typing.Literal:
        return {"enum": list(args)}
    if origin in (typing.Union, types.UnionType):
        return _union([_schema(where, arg) for arg in args])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"enum": [member.value for member in hint]}
    if typing.is_typeddict(hint):
        hints = typing.get_type_hints(hint, include_extras=True)
        return _object(where, hints, [name for name in hints if name in hint.__required_keys__])
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = [field for field in dataclasses.fields(hint) if field.init]
        return _object(where, {field.name: hints[field.name] for field in fields},
                       [field.name for field in fields if field.default is dataclasses.MISSING
                        and field.default_factory is dataclasses.MISSING])
    if hasattr(hint, "model_json_schema"):
        with of_caller():
            schema = hint.model_json_schema()
        return _inline_references(where, schema)
    return _collection(where, hint, origin or hint, args)


def _collection(where: str, hint: Any, kind: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    if kind in (list, set, frozenset, Sequence, typing.Sequence) or kind is tuple and len(args) == 2 and args[1] is ...:
        found: dict[str, Any] = {"type": "array", **({"items": _schema(where, args[0])} if args else {})}
        return {**found, "uniqueItems": True} if kind in (set, frozenset) else found
    if kind is tuple and args:
        return {"type": "array", "prefixItems": [_schema(where, arg) for arg in args], "minItems": len(args),
                "maxItems": len(args)}
    if kind in (dict, Mapping, typing.Mapping) and (not args or args[0] is str):
        return {"type": "object", **({"additionalProperties": _schema(where, args[1])} if args else {})}
    raise InvalidArgument(f"{where} is of type {getattr(hint, '__name__', hint)}, which has no JSON schema",
                          param="tools", got=str(getattr(hint, "__name__", hint)),
                          hint="Use str, int, float, bool, None, list, dict, tuple, Literal, enums, unions, "
                               "TypedDicts, dataclasses or pydantic classes, or pass the tool as a dict")


def _union(options: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = [option["type"] for option in options if set(option) == {"type"}]
    return {"type": kinds} if len(kinds) == len(options) else {"anyOf": options}


def _object(where: str, hints: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": {name: _schema(f"{where}.{name}", hint) for name, hint in hints.items()},
            "required": required, "additionalProperties": False}


def _inline_references(where: str, schema: Any) -> Any:
    """Replace the references in a schema with their targets: inside another schema they would not resolve."""
    shared = schema.get("$defs", {})

    def walk(value: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [walk(item, inside) for item in value]
        if not isinstance(value, dict):
            return value
        name = str(value.get("$ref", "")).removeprefix("#/$defs/")
        if name in inside:
            raise InvalidArgument(f"{where} must not contain itself ({name})", param="tools",
                                  hint="Pass the tool as a pydantic class or a dict")
        if name in shared:
            own = {key: item for key, item in value.items() if key != "$ref"}
            return {**walk(shared[name], (*inside, name)), **own}
        return {key: walk(item, inside) for key, item in value.items() if key != "$defs"}

    return walk(schema, ())
