"""The invalid field of a request body: its name, its value, and the allowed values.

msgspec names the first invalid field in the text of its error, and nothing else does. :func:`place_of` reads that path;
the types along it give the allowed values.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from ..checks import shown
from .errors import Refusal

_UNIONS = (Union, types.UnionType)
_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false", inspect.NoneType: "null", inspect.StructType: "an object",
    inspect.DictType: "an object", inspect.AnyType: "any value"}
#: Steps of a path of msgspec: a field, an item of a list, any value of an object without fixed keys.
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<at>\d+)\]|\[\.\.\.\]")
_KINDS = {"Object contains unknown field `": "unknown", "Object missing required field `": "missing"}


class Place(NamedTuple):
    """Place of an error.

    Attributes:
        kind: ``"unknown"``: a struct has no such field; ``"missing"``: a required field is absent; ``"value"``: the
            value is not allowed.
        steps: steps from the body to the value, or to the object whose field is unknown or missing: the name of a
            field, the index of an item, None for any value of an object without fixed keys.
        name: unknown or missing field.
    """

    kind: Literal["unknown", "missing", "value"]
    steps: tuple[str | int | None, ...]
    name: str = ""


class Part(NamedTuple):
    """A value of a body, its declared type, and its name, such as ``messages[].content``."""

    value: Any
    kind: Any
    path: str


def place_of(error: msgspec.ValidationError) -> Place:
    """Return the place that an error of msgspec states. Clients choose the names of unknown fields: the place may be
    one that the body does not have."""
    text, _, path = str(error).rpartition(" - at `$")
    if not text:
        text, path = str(error), "`"
    steps = tuple(one["name"] or (None if one["at"] is None else int(one["at"])) for one in _STEP.finditer(path))
    for start, kind in _KINDS.items():
        if text.startswith(start):
            return Place(kind, steps, text[len(start):-1])  # type: ignore[arg-type]
    return Place("value", steps)


def refusal_of(value: Any, kind: Any, place: Place, path: str = "") -> Refusal:
    """Return the error that names the invalid field at a place.

    Args:
        value: Body, or part of it.
        kind: Struct, or other type that rejects the value.
        place: Place of the error in the value.
        path: Name of the value in the body; "": it is the body itself.
    """
    for step in place.steps:
        if step is None:
            inner = value.values() if isinstance(value, dict) else ()
            kind = item_of(kind, dict)
            value = next((one for one in inner if _rejects(one, kind)), None)
            path += "[...]"  # omit the key: the client chose it, so it may be long
        elif isinstance(step, int):
            value = value[step] if isinstance(value, list) and step < len(value) else None
            kind, path = item_of(kind, list), f"{path}[{step}]"
        else:
            kind, value = _field(kind, value, step), value.get(step) if isinstance(value, dict) else None
            path = join_path(path, step)
    param = (join_path(path, place.name) if place.kind != "value" else path)[:100]
    if place.kind == "unknown":
        return Refusal("unsupported_parameter", f"`{param}` is not a parameter of this route.", param)
    if place.kind == "missing":
        return Refusal("invalid_value", f"`{param}` is required.", param)
    name = f"`{param}`" if param else "The body"
    return Refusal("invalid_value", f"{name} must be {_allowed(kind)}, got {_shown(value)}."[:300], param or None)


def parts_at(value: Any, kind: Any, steps: tuple[str | int | None, ...], path: str = "") -> Iterator[Part]:
    """Yield the values at a place: an index stands for all items of the list."""
    if not steps:
        yield Part(value, kind, path)
    elif isinstance(steps[0], int):
        kind = item_of(kind, list)
        for one in value if isinstance(value, list) else ():
            yield from parts_at(one, kind, steps[1:], f"{path}[]")
    elif steps[0] is None:
        kind = item_of(kind, dict)
        for one in value.values() if isinstance(value, dict) else ():
            yield from parts_at(one, kind, steps[1:], f"{path}[...]")
    elif isinstance(value, dict) and steps[0] in value:
        yield from parts_at(value[steps[0]], _field(kind, value, steps[0]), steps[1:], join_path(path, steps[0]))


def _field(kind: Any, value: Any, name: str) -> Any:
    """Return the type of a field of an object; that of a tag has the tags of all structs."""
    struct = struct_of(kind, value)
    if struct is not None and name in fields_of(struct):
        return fields_of(struct)[name]
    tags = tuple(one.__struct_config__.tag for one in structs_of(kind)
                 if one.__struct_config__.tag_field == name)
    return inspect.LiteralType(tags) if tags else Any


def struct_of(kind: Any, value: Any) -> Any:
    """Return the struct among the members of a type that has the tag of a value, or None."""
    for struct in structs_of(kind):
        config = struct.__struct_config__
        if config.tag_field is None or isinstance(value, dict) and value.get(config.tag_field) in (None, config.tag):
            return struct
    return None


def structs_of(kind: Any) -> tuple[Any, ...]:
    """Return the structs among the members of a type."""
    return tuple(one for one in _members(kind) if isinstance(one, type) and issubclass(one, msgspec.Struct))


@functools.cache
def fields_of(struct: Any) -> dict[str, Any]:
    """Return the types of the fields of a struct, by their names in JSON."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(struct)}


def item_of(kind: Any, container: type) -> Any:
    """Return the type of the items of a list, or of the values of a dict, among the members of a type."""
    return next((get_args(one)[-1] for one in _members(kind) if get_origin(one) is container), Any)


@functools.cache
def is_whole(kind: Any) -> bool:
    """Return True if a number of this type must be an integer."""
    return int in _members(kind) and float not in _members(kind)


def _rejects(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError:
        return True
    return False


def _members(kind: Any) -> tuple[Any, ...]:
    """Return the member types of a union without their constraints; for any other type, the type itself."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return tuple(part for one in get_args(kind) for part in _members(one)) if get_origin(kind) in _UNIONS else (kind,)


def join_path(path: str, name: str) -> str:
    """Return the path of a field ``name`` within ``path``, which is empty at the top."""
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    if isinstance(value, (bool, type(None))):
        return {None: "null", True: "true", False: "false"}[value]
    return shown(value)


def _allowed(kind: Any) -> str:
    known = kind if isinstance(kind, inspect.Type) else inspect.type_info(kind)
    return " or ".join(dict.fromkeys(map(_words, _types(known))))


def _types(kind: inspect.Type) -> list[inspect.Type]:
    """Return the member types of a union without null: a null is equivalent to an absent field."""
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    parts = [part for one in kind.types for part in _types(one)] if isinstance(kind, inspect.UnionType) else [kind]
    return [part for part in parts if not isinstance(part, inspect.NoneType)] or parts


def _words(kind: inspect.Type) -> str:
    if isinstance(kind, (inspect.IntType, inspect.FloatType)):
        return ("an integer" if isinstance(kind, inspect.IntType) else "a number") + _range(kind)
    if isinstance(kind, inspect.StrType):
        return "a string" + _length(kind, "characters") + (f" that matches {kind.pattern}" if kind.pattern else "")
    if isinstance(kind, inspect.ListType):
        return "a list" + _length(kind, "items")
    if isinstance(kind, inspect.DictType):
        return "an object" + _length(kind, "keys")
    if isinstance(kind, inspect.LiteralType):
        return "one of " + ", ".join(map(str, kind.values))
    return _WORDS.get(type(kind), "another value")


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low, high = kind.ge if kind.ge is not None else kind.gt, kind.le if kind.le is not None else kind.lt
    if low is not None and high is not None:
        return f" above {low} and at most {high}" if kind.gt is not None else f" from {low} to {high}"
    return "" if low is None else f" above {low}" if kind.gt is not None else f", {low} or more"


def _length(kind: inspect.StrType | inspect.ListType | inspect.DictType, unit: str) -> str:
    low, high = kind.min_length, kind.max_length
    if low and high is not None:
        return f" of {low:,} to {high:,} {unit}"
    return f" of at least {low} {unit.removesuffix('s') if low == 1 else unit}" if low \
        else "" if high is None else f" of at most {high:,} {unit}"


__all__ = ["Part", "Place", "fields_of", "is_whole", "item_of", "join_path", "parts_at",
           "place_of", "refusal_of", "struct_of", "structs_of"]
