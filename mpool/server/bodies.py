"""Request bodies: reading up to a size limit, and strict parsing into a struct.

msgspec refuses NaN, numbers out of range, ``true`` for an integer, lone surrogates, invalid UTF-8, and nesting beyond
its maximum depth. A second pass with the standard library's parser finds duplicate keys. A field that is null is
equivalent to an absent field. Structs of requests derive from :class:`mpool.server.fields.Fields`, which forbids
unknown fields. :func:`parse` removes unknown fields first, unless the server is strict.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from .. import native_calls
from .errors import Refusal
from .guard import header
from .invalid import Fault, find_fault

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

#: Minimum size in bytes of a body that is parsed on another thread, so that the loop keeps serving other requests.
_LONG = 1 << 16
#: Maximum number of unknown fields that are reported for a body, and the pattern of names that may be reported.
MAX_UNKNOWN, _FIELD = 16, re.compile("[A-Za-z0-9_-]{1,64}")
_TOO_DEEP = "The body is nested too deeply."
#: Maximum number of lists and objects in a body, and of values: to decode a million lists in one call takes seconds,
#: during which no other thread of the process runs Python.
_MAX_CONTAINERS, _MAX_VALUES = 50_000, 2_000_000
#: Number of bytes that :func:`check_size` examines in one call of the standard library: less than 5 ms.
_SLICE = 1 << 16
_OTHERS = bytes(sorted({*range(256)} - {*b'"[{,'}))
_STRINGS = re.compile(b'"[^"]*"')
#: A whole number with a decimal point, such as ``8192.0``.
_WHOLE = re.compile(rb"(-?[0-9]{1,19})\.0+")


class ClientDisconnected(Exception):
    """Raised when the client disconnects before its request is complete."""


def declared_length(scope: Any) -> int | None:
    """Return the ``Content-Length`` of a request in bytes; None: the request has no such header.

    Raises:
        Refusal: The value is not a number.
    """
    value = header(scope, b"content-length")
    if value is None:
        return None
    if not value.isdigit():
        raise Refusal("bad_request")
    return int(value)


async def read(receive: Receive, declared: int | None, most: int) -> bytes:
    """Read the body of a request.

    Args:
        receive: ``receive`` of ASGI.
        declared: ``Content-Length`` in bytes; None: the body is chunked.
        most: Maximum size in bytes.

    Raises:
        Refusal: The body is larger than allowed.
        ClientDisconnected: The client disconnected.
    """
    if declared is not None and declared > most:
        raise Refusal("request_too_large", f"A body must have at most {most:,} bytes.")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise Refusal("request_too_large", f"A body must have at most {most:,} bytes.")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) != len(pairs):
        raise Refusal("invalid_json", "An object has a duplicate key.")


#: Decoder that only checks a body for duplicate keys.
_check_keys = json.JSONDecoder(object_pairs_hook=_refuse_duplicates, parse_float=len, parse_int=len).decode


def check_size(data: bytes) -> None:
    """Check the number of lists, objects and values of a body before it is decoded.

    The check is exact for valid JSON: it ignores the contents of strings. It holds the interpreter's lock for less than
    5 ms at a time.

    Args:
        data: Body as JSON, valid or not.

    Raises:
        Refusal: The body has more than 50,000 lists and objects, or more than 2,000,000 values.
    """
    at = containers = values = 0
    in_string = False
    while at < len(data):
        part = data[at:at + _SLICE]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # do not separate an escaped character from its backslash
            part = data[at:at + _SLICE + 1]
        at += len(part)
        marks = part.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS).replace(b'""', b"")
        marks = b'"' + marks if in_string else marks
        in_string = marks.count(b'"') % 2 == 1
        outside = _STRINGS.sub(b"", marks + b'"' if in_string else marks)
        containers += outside.count(b"[") + outside.count(b"{")
        values += outside.count(b",")
        if containers > _MAX_CONTAINERS:
            raise Refusal("request_too_large", f"A body must have at most {_MAX_CONTAINERS:,} lists and objects.")
        if values + containers > _MAX_VALUES:
            raise Refusal("request_too_large", f"A body must have at most {_MAX_VALUES:,} values.")


@functools.lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=True)


def parse(data: bytes, kind: type[T], ignored: list[str] | None = None) -> T:
    """Parse a body into a struct.

    Args:
        data: Body as JSON.
        kind: Struct that forbids unknown fields.
        ignored: List that receives the names of unknown fields, such as ``messages[].x``, which then have no effect. At
            most 16 names are added, and only names of 1 to 64 letters, digits, ``_`` and ``-``: clients choose them,
            and they become part of the log and of a response header. None: unknown fields are errors.

    Raises:
        Refusal: The body is not strict JSON, or a field is unknown, missing, of the wrong type or out of range.
    """
    found: T = parse_part(data, kind, "", ignored)
    try:
        _check_keys(data.decode())
    except ValueError:
        raise Refusal("invalid_json") from None
    except RecursionError:
        raise Refusal("invalid_json", _TOO_DEEP) from None
    return found


def parse_part(data: bytes, kind: Any, path: str, ignored: list[str] | None = None) -> Any:
    """Parse a part of a body, as :func:`parse` does, but without the search for duplicate keys.

    Args:
        data: Part of the body as JSON.
        kind: Struct, or union of tagged structs.
        path: Name of the part in the body.
        ignored: As for :func:`parse`.

    Raises:
        Refusal: As for :func:`parse`.
    """
    decoder = _decoder(kind)
    try:
        return decoder.decode(data)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, ValueError):
        raise Refusal("invalid_json") from None
    except RecursionError:
        raise Refusal("invalid_json", _TOO_DEEP) from None
    try:
        # msgspec refuses a value of the wrong type before it has read the rest: check that all of it is JSON
        raw = msgspec.json.decode(data, type=msgspec.Raw)
        cleaned = msgspec.json.encode(_cleaned(raw, (_shape(kind),), re.sub(r"\[\d+\]", "[]", path), ignored))
        try:
            return decoder.decode(cleaned)
        except msgspec.ValidationError:
            raise _refused(find_fault(cleaned, kind, path)) from None
    except (msgspec.DecodeError, ValueError):
        raise Refusal("invalid_json") from None
    except RecursionError:
        raise Refusal("invalid_json", _TOO_DEEP) from None


@functools.lru_cache(maxsize=64)
def _shape(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _cleaned(data: msgspec.Raw, kinds: tuple[inspect.Type, ...], path: str, ignored: list[str] | None) -> Any:
    """Return JSON without the fields of structs that are null, and without unknown fields if they are ignored.

    Some clients send null for every unset option, also for options that the server does not have. Others write whole
    numbers as ``8192.0``: where a field must be an integer, they become integers. Free-form values, such as JSON
    schemas, stay as they are.

    Args:
        data: JSON.
        kinds: Types that the value may have.
        path: Name of the value in the body.
        ignored: As for :func:`parse`.

    Returns:
        A value that msgspec encodes as the JSON.
    """
    kinds = tuple(part for kind in kinds for part in _parts(kind))
    head = bytes(data).lstrip()[:1]
    if head == b"[":
        items = tuple(kind.item_type for kind in kinds if isinstance(kind, inspect.ListType))
        if not any(map(_has_fields, items)):
            return data
        return [_cleaned(item, items, f"{path}[]", ignored)
                for item in msgspec.json.decode(data, type=list[msgspec.Raw])]
    structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    if head != b"{" or not structs:
        whole = _WHOLE.fullmatch(bytes(data)) if any(isinstance(kind, inspect.IntType) for kind in kinds) else None
        return data if whole is None or any(isinstance(kind, inspect.FloatType) for kind in kinds) \
            else msgspec.Raw(whole[1])
    parts = {name: part for name, part in msgspec.json.decode(data, type=dict[str, msgspec.Raw]).items()
             if bytes(part) != b"null"}
    chosen = next((kind for kind in structs if _has_tag(parts, kind)), None)
    if chosen is None:
        return data
    fields = {field.encode_name: field.type for field in chosen.fields}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        where = f"{path}.{name}" if path else name
        if name in fields:
            found[name] = _cleaned(part, (fields[name],), where, ignored)
        elif name == chosen.tag_field or ignored is None:
            found[name] = part
        elif len(ignored) < MAX_UNKNOWN and _FIELD.fullmatch(name) and where not in ignored:
            ignored.append(where)
    return found


def _has_fields(kind: inspect.Type) -> bool:
    """Return True if values of a type may be structs, or lists of structs."""
    parts = _parts(kind)
    return any(isinstance(part, inspect.StructType) for part in parts) \
        or any(_has_fields(part.item_type) for part in parts if isinstance(part, inspect.ListType))


def _has_tag(parts: dict[str, msgspec.Raw], kind: inspect.StructType) -> bool:
    """Return True if an object has the tag of a struct, or if the struct has none."""
    if kind.tag_field is None:
        return True
    tag = parts.get(kind.tag_field)
    try:
        return tag is None or msgspec.json.decode(tag, type=str) == kind.tag
    except msgspec.DecodeError:
        return False


def _parts(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return tuple(part for one in kind.types for part in _parts(one)) if isinstance(kind, inspect.UnionType) else (kind,)


def _refused(fault: Fault) -> Refusal:
    """Return the error that names the invalid field."""
    path = fault.path[:100]
    if fault.kind == "unknown":
        return Refusal("unsupported_parameter", f"`{path}` is not a parameter of this route.", path)
    if fault.kind == "missing":
        return Refusal("invalid_value", f"`{path}` is required.", path)
    name = f"`{path}`" if path else "The body"
    return Refusal("invalid_value", f"{name} must be {fault.allowed}, got {fault.got}."[:300], path or None)


def parse_bounded(data: bytes, kind: type[T], ignored: list[str] | None) -> T:
    """Parse a body as :func:`parse` does, after :func:`check_size` if it is long.

    Raises:
        Refusal: As for :func:`parse` and :func:`check_size`.
    """
    if len(data) >= _LONG:
        check_size(data)
    return parse(data, kind, ignored)


async def parse_body(data: bytes, kind: type[T], ignored: list[str] | None) -> T:
    """As :func:`parse_bounded`, on another thread if the body is long."""
    if len(data) < _LONG:
        return parse_bounded(data, kind, ignored)
    return await native_calls.BODIES.arun(parse_bounded, data, kind, ignored)


__all__ = ["MAX_UNKNOWN", "ClientDisconnected", "check_size", "declared_length", "parse", "parse_body", "parse_bounded",
           "parse_part", "read"]
