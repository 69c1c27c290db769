"""Search for the invalid field of a request body: its name, its value, and the allowed values.

msgspec describes an invalid field only in the text of its message. This module does not parse messages. It decodes the
body again, one level at a time, and descends into the first part that its type rejects. Valid requests do not pay for
this.
"""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from msgspec import inspect

from ..checks import shown

_UNIONS = (Union, types.UnionType)
_WORDS: dict[type[inspect.Type], str] = {
    inspect.BoolType: "true or false", inspect.NoneType: "null", inspect.StructType: "an object",
    inspect.DictType: "an object", inspect.AnyType: "any value"}


class Fault(NamedTuple):
    """Reason why a struct rejects a body.

    Attributes:
        kind: ``"unknown"``: the struct has no such field; ``"missing"``: a required field is absent; ``"value"``: the
            value is not allowed.
        path: Name of the field, such as ``messages[0].content``; "": the body itself.
        allowed: Allowed values, as words that follow "must be".
        got: Value, shortened.
    """

    kind: Literal["unknown", "missing", "value"]
    path: str
    allowed: str = ""
    got: str = ""


def find_fault(data: bytes | msgspec.Raw, kind: Any, path: str = "") -> Fault:
    """Find the first invalid field of a body, in the order of its text.

    Args:
        data: JSON that ``kind`` rejects.
        kind: Struct, or other type that msgspec decodes.
        path: Name of the field whose value is ``data``; "": the body itself.
    """
    head = bytes(data).lstrip()[:1]
    structs = sum(map(_is_struct, _members(kind)))
    for one in _members(kind):
        found = None
        try:
            if _is_struct(one) and head == b"{":
                found = _fault_in_struct(data, one, path, structs > 1)
            elif get_origin(one) is list and head == b"[":
                found = _fault_in_list(data, one, path)
            elif get_origin(one) is dict and head == b"{":
                found = _fault_in_dict(data, one, path)
        except RecursionError:  # nested too deeply to descend: report the value as a whole
            pass
        if found is not None:
            return found
    tagged = [one for one in _members(kind) if _is_struct(one) and one.__struct_config__.tag_field is not None]
    if tagged and head == b"{":  # no member of the union has this tag
        name = tagged[0].__struct_config__.tag_field
        tag = msgspec.json.decode(data, type=dict[str, msgspec.Raw])[name]
        return Fault("value", join_path(path, name), _words(inspect.LiteralType(tuple(
            one.__struct_config__.tag for one in tagged))), _shown(tag))
    return Fault("value", path, _allowed(kind), _shown(data))


def _fault_in_struct(data: bytes | msgspec.Raw, kind: Any, path: str, in_union: bool) -> Fault | None:
    parts = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    config = kind.__struct_config__
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    if config.tag_field is not None:
        tag = parts.pop(config.tag_field, None)
        if tag is None:
            if in_union:  # msgspec requires the tag only where it selects a struct
                return Fault("missing", join_path(path, config.tag_field))
        elif _rejects(tag, Literal[config.tag]):
            return None  # the tag belongs to another member of the union, or to none
    for name, part in parts.items():
        if name not in fields:
            if config.forbid_unknown_fields:
                return Fault("unknown", join_path(path, name))
        elif _rejects(part, fields[name].type):
            return find_fault(part, fields[name].type, join_path(path, name))
    missing = next((name for name, field in fields.items() if field.required and name not in parts), None)
    return None if missing is None else Fault("missing", join_path(path, missing))


def _fault_in_list(data: bytes | msgspec.Raw, kind: Any, path: str) -> Fault | None:
    (item,) = get_args(kind)
    for at, part in enumerate(msgspec.json.decode(data, type=list[msgspec.Raw])):
        if _rejects(part, item):
            return find_fault(part, item, f"{path}[{at}]")
    return None  # all items are valid: the list has the wrong length


def _fault_in_dict(data: bytes | msgspec.Raw, kind: Any, path: str) -> Fault | None:
    _, item = get_args(kind)
    for part in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).values():
        if _rejects(part, item):
            return find_fault(part, item, f"{path}[...]")  # omit the key: the client chose it, so it may be long
    return None  # all values are valid: the object has the wrong number of keys


def _rejects(data: msgspec.Raw, kind: Any) -> bool:
    try:
        msgspec.json.decode(data, type=kind)
    except (msgspec.ValidationError, RecursionError):
        return True
    return False


def _members(kind: Any) -> list[Any]:
    """Return the member types of a union without their constraints; for any other type, the type itself."""
    while get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    return [part for one in get_args(kind) for part in _members(one)] if get_origin(kind) in _UNIONS else [kind]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def join_path(path: str, name: str) -> str:
    """Return the path of a field ``name`` within ``path``, which is empty at the top."""
    return f"{path}.{name}" if path else name


def _shown(data: bytes | msgspec.Raw) -> str:
    try:
        value = msgspec.json.decode(data)
    except msgspec.ValidationError:  # a number beyond the range of a float
        return "a number out of range"
    except RecursionError:
        return "a value that is nested too deeply"
    if isinstance(value, (list, dict)):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value):,}"
    if isinstance(value, (bool, type(None))):
        return bytes(data).decode().strip()
    return shown(value)


def _allowed(kind: Any) -> str:
    return " or ".join(dict.fromkeys(_words(part) for part in _types(inspect.type_info(kind))))


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


__all__ = ["Fault", "find_fault"]
