"""Walks the parts of JSON schemas, and finds those that no finite value matches because they refer to themselves.

llguidance reports such a schema with the name of an internal state, or accepts it and then never lets a completion end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidArgument

#: Maximum number of characters of a JSON pointer in an error message, and of pointers before and after its "...".
_POINTER, _FIRST, _LAST = 60, 3, 2
#: Types of JSON values.
TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
#: Keywords whose value is a dict, name -> schema; keywords whose value is data and not a schema.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DATA = ("const", "enum", "default", "examples")


def with_parts(schema: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a JSON schema whose parts are changed by a function: the items of a list, the values of keywords
    and the schemas of properties and definitions. Data, such as ``enum``, stay as they are."""
    if isinstance(schema, list):
        return list(map(change, schema))
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _NAMED and isinstance(value, Mapping):
            found[name] = {key: change(one) for key, one in value.items()}
        else:
            found[name] = value if name in _DATA else change(value)
    return found


def without_nulls(schema: Any) -> Any:
    """Return a schema without the keywords that are null, which serialisers write for what is not set."""
    found = with_parts(schema, without_nulls)
    return {name: value for name, value in found.items() if value is not None or name in _DATA} \
        if isinstance(found, dict) else found


def moved(schema: Any, where: str) -> Any:
    """Return a schema for the position ``where`` of another document, with its references adjusted."""
    found = with_parts(schema, lambda part: moved(part, where))
    reference = found.get("$ref") if isinstance(found, dict) else None
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        found["$ref"] = where + reference[1:]
    return found


@dataclass(slots=True, eq=False)
class _Part:
    """The schema, or a part that a value may have to match.

    Attributes:
        pointer: its JSON pointer, up to ``_POINTER`` characters.
        content: the JSON schema.
        needs: what a value of the part requires.
        needed_by: the needs that this part can meet.
        unmet: number of ``needs`` that no part is known to meet. 0: the part has a finite value.
    """

    pointer: str
    content: Any
    needs: list[_Need] = field(default_factory=list)
    needed_by: list[_Need] = field(default_factory=list)
    unmet: int = 0


@dataclass(slots=True, eq=False)
class _Need:
    """A requirement of a part: one of ``options`` must have a finite value, because of ``keyword``."""

    part: _Part
    keyword: str
    options: list[_Part]
    met: bool = False


def check(schema: Any, param: str) -> None:
    """Check that a schema has a finite value as far as its references are concerned.

    Only references within the document (``#``, ``#/...``) are followed; llguidance reports all others.

    Args:
        schema: the schema, which is JSON and not nested too deeply.
        param: the caller's parameter, for the error message.

    Raises:
        InvalidArgument: the schema, or a part that every value must contain, requires itself.
    """
    parts = _solve(schema)
    if parts[0].unmet:
        keyword, path = _cycle(parts[0])
        raise InvalidArgument(f"`{param}`: {keyword} of the JSON schema refers to itself ({' -> '.join(path)}), so no "
                              "finite value matches", param=param,
                              hint="End the recursion: make the property optional, or add an alternative with anyOf")


def prune(schema: Any) -> None:
    """Change the parts of a schema that no finite value matches, in place: they then match no value at all, so that a
    completion cannot begin one. The schema must have passed :func:`check`."""
    for part in _solve(schema)[1:]:
        if part.unmet and isinstance(part.content, dict):
            part.content.clear()
            part.content["anyOf"] = []


def _solve(schema: Any) -> list[_Part]:
    """Return the schema and its parts; ``unmet`` of those that a finite value matches is 0."""
    parts = _read_parts(schema)
    finite = [part for part in parts if not part.needs]
    while finite:
        for need in finite.pop().needed_by:
            if not need.met:
                need.met = True
                need.part.unmet -= 1
                if not need.part.unmet:
                    finite.append(need.part)
    return parts


def _read_parts(schema: Any) -> list[_Part]:
    """Return the schema and every part that a value may match, with what a value of it requires."""
    parts = {id(schema): _Part("#", schema)}
    waiting = [schema]
    while waiting:
        content = waiting.pop()
        part = parts[id(content)]
        for pointer, option in _optional(part.pointer, content) if isinstance(content, Mapping) else ():
            if id(option) not in parts:
                parts[id(option)] = _Part(pointer, option)
                waiting.append(option)
        for keyword, options in _needed(schema, part.pointer, content) if isinstance(content, Mapping) else ():
            need = _Need(part, keyword, [])
            for pointer, option in options:
                if id(option) not in parts:
                    parts[id(option)] = _Part(pointer, option)
                    waiting.append(option)
                need.options.append(parts[id(option)])
                need.options[-1].needed_by.append(need)
            part.needs.append(need)
        part.unmet = len(part.needs)
    return list(parts.values())


def _optional(at: str, part: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return pointer and content of the parts that some value of a part has; a value may also require them."""
    found = []
    for keyword in ("properties", "patternProperties"):
        named = part.get(keyword)
        if isinstance(named, Mapping):
            found += [(_pointer(at, (keyword, name)), inner) for name, inner in named.items()]
    for keyword in ("additionalProperties", "items"):
        if isinstance(part.get(keyword), Mapping):
            found.append((_pointer(at, (keyword,)), part[keyword]))
    items = part.get("prefixItems")
    if isinstance(items, list):
        found += [(_pointer(at, ("prefixItems", str(index))), item) for index, item in enumerate(items)]
    return found


def _needed(schema: Any, at: str, part: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Any]]]]:
    """Return the requirements of a part: keyword, and pointer and content of the parts of which a value matches one."""
    needed: list[tuple[str, list[tuple[str, Any]]]] = []
    reference = part.get("$ref")
    if isinstance(reference, str) and (target := target_of(schema, reference)) is not None:
        needed.append(("$ref", [target]))
    for keyword in ("allOf", "anyOf", "oneOf"):
        options = part.get(keyword)
        if isinstance(options, list) and options:
            members = [(_pointer(at, (keyword, str(index))), option) for index, option in enumerate(options)]
            needed += [(keyword, [member]) for member in members] if keyword == "allOf" else [(keyword, members)]
    kind = part.get("type")
    properties, required = part.get("properties"), part.get("required")
    if kind in ("object", ["object"]) and isinstance(properties, Mapping) and isinstance(required, list):
        needed += [("properties", [(_pointer(at, ("properties", name)), properties[name])]) for name in required
                   if isinstance(name, str) and name in properties]
    least = part.get("minItems")
    if kind in ("array", ["array"]) and isinstance(least, int) and least > 0:
        given = part.get("prefixItems")
        heads = given[:least] if isinstance(given, list) else []
        needed += [("prefixItems", [(_pointer(at, ("prefixItems", str(index))), item)])
                   for index, item in enumerate(heads)]
        if len(heads) < least and "items" in part:
            needed.append(("items", [(_pointer(at, ("items",)), part["items"])]))
    return needed


def _pointer(at: str, steps: Iterable[str]) -> str:
    """Return a JSON pointer with more steps, up to ``_POINTER`` characters."""
    for step in steps:
        if len(at) >= _POINTER:
            break
        at += "/" + step[:_POINTER].replace("~", "~0").replace("/", "~1")
    return at[:_POINTER]


def target_of(schema: Any, reference: str) -> tuple[str, Any] | None:
    """Return the normalised pointer and the part that ``reference`` names; None: not in this document."""
    if reference in ("#", "#/"):
        return "#", schema
    if not reference.startswith("#/"):
        return None
    part, names = schema, [step.replace("~1", "/").replace("~0", "~") for step in reference[2:].split("/")]
    for name in names:
        if isinstance(part, Mapping) and name in part:
            part = part[name]
        elif isinstance(part, list) and name.isdecimal() and len(name) < 10 and int(name) < len(part):
            part = part[int(name)]
        else:
            return None
    return _pointer("#", names), part


def _cycle(schema: _Part) -> tuple[str, list[str]]:
    """Return the keyword and the pointers of a cycle of unmet requirements that can be reached from the schema."""
    path: dict[_Part, str] = {}  # part -> keyword of its first unmet requirement
    part = schema
    while part not in path:
        need = next(need for need in part.needs if not need.met)
        path[part] = need.keyword
        part = need.options[0]
    parts = list(path)
    cycle = parts[parts.index(part):]
    keywords = [path[one] for one in cycle]
    shown = [one.pointer for one in (*cycle, part)]
    if len(shown) > _FIRST + _LAST + 1:
        shown[_FIRST:-_LAST] = ["..."]
    return "$ref" if "$ref" in keywords else keywords[0], shown


__all__ = ["TYPES", "check", "moved", "prune", "target_of", "with_parts", "without_nulls"]
