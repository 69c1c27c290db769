"""Request bodies: reading up to a size limit, and strict parsing into a struct.

msgspec refuses NaN, numbers out of range, ``true`` for an integer, lone surrogates, invalid UTF-8, and nesting beyond
its maximum depth. A second pass with the standard library's parser finds duplicate keys. A field that is null is
equivalent to an absent field.
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
#: Number of unknown fields of a body that are reported, and the names that are.
_MAX_UNKNOWN, _FIELD = 16, re.compile("[A-Za-z0-9_-]{1,64}")


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


@functools.lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=True)


def parse(data: bytes, kind: type[T]) -> T:
    """Parse a body into a struct.

    Raises:
        Refusal: The body is not strict JSON, or a field is unknown, missing, of the wrong type or out of range.
    """
    without_nulls = data
    try:
        decoder: msgspec.json.Decoder[T] = _decoder(kind)  # type: ignore[arg-type]
        try:
            found = decoder.decode(data)
        except msgspec.ValidationError as error:
            if b"null" not in data:
                raise
            without_nulls = _without_nulls(data, decoder, error)
            found = decoder.decode(without_nulls)
        _check_keys(data.decode())
        return found
    except msgspec.ValidationError:
        if not _is_json(data):  # msgspec refuses a value of the wrong type before it has read the rest
            raise Refusal("invalid_json") from None
        raise _refused(find_fault(without_nulls, kind)) from None
    except (msgspec.DecodeError, ValueError):
        raise Refusal("invalid_json") from None
    except RecursionError:
        raise Refusal("invalid_json", "The body is nested too deeply.") from None


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    except RecursionError:  # a value that is nested too deeply: the error names its field
        pass
    return True


def _without_nulls(data: bytes, decoder: msgspec.json.Decoder[Any], error: msgspec.ValidationError) -> bytes:
    """Remove the fields that are null, including unknown ones: some clients send null for every unset option.

    Args:
        data: Body as JSON.
        decoder: Decoder of the struct.
        error: Exception to raise if the body cannot be encoded again.
    """
    try:
        shape = _shape(decoder.type)  # type: ignore[arg-type]
        return msgspec.json.encode(_drop_nulls(msgspec.json.decode(data), shape))
    except (OverflowError, msgspec.EncodeError):  # msgspec cannot encode integers of more than 64 bits
        raise error from None


@functools.lru_cache(maxsize=64)
def _shape(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _drop_nulls(value: Any, *kinds: inspect.Type) -> Any:
    """Return a value without the fields of structs that are null. Free-form values, such as JSON schemas, keep nulls.

    Args:
        value: Decoded JSON.
        kinds: Types that the value may have.
    """
    kinds = tuple(part for kind in kinds for part in _parts(kind))
    if isinstance(value, list):
        items = tuple(kind.item_type for kind in kinds if isinstance(kind, inspect.ListType))
        return [_drop_nulls(item, *items) for item in value] if items else value
    structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    if not isinstance(value, dict) or not structs:
        return value
    fields: dict[str, list[inspect.Type]] = {}
    for kind in structs:
        for field in kind.fields:
            fields.setdefault(field.encode_name, []).append(field.type)
    return {name: _drop_nulls(part, *fields.get(name, ())) for name, part in value.items() if part is not None}


def convert(value: Any, kind: Any, path: str) -> Any:
    """Convert a free-form part of a body to a struct, or to one of several. A field that is null counts as absent.

    Args:
        value: Decoded JSON.
        kind: Struct, or union of tagged structs.
        path: Name of the part in the body.

    Raises:
        Refusal: A field is missing, of the wrong type or out of range.
    """
    value = _drop_nulls(value, _shape(kind))
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise _refused(find_fault(msgspec.json.encode(value), kind, path)) from None


async def unknown_fields(data: bytes, kind: Any) -> list[str]:
    """Return the names of the fields of a valid body that its struct does not have, such as ``messages[].x``.

    Returns at most 16 names, and only names of 1 to 64 letters, digits, ``_`` and ``-``: clients choose them, and they
    become part of the log and of a response header.
    """
    if len(data) < _LONG:
        return _unknown_fields(data, kind)
    return await native_calls.BODIES.arun(_unknown_fields, data, kind)


def _unknown_fields(data: bytes, kind: Any) -> list[str]:
    found: dict[str, None] = {}
    _add_unknown(msgspec.json.decode(data), (_shape(kind),), "", found)
    return list(found)


def _add_unknown(value: Any, kinds: tuple[inspect.Type, ...], path: str, found: dict[str, None]) -> None:
    kinds = tuple(part for kind in kinds for part in _parts(kind))
    if isinstance(value, list):
        items = tuple(kind.item_type for kind in kinds if isinstance(kind, inspect.ListType))
        for item in value if items else ():
            _add_unknown(item, items, f"{path}[]", found)
    elif isinstance(value, dict):
        structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)
                   and (kind.tag_field is None or value.get(kind.tag_field) == kind.tag)]
        for kind in structs[:1]:
            fields = {field.encode_name: field.type for field in kind.fields}
            for name, part in value.items():
                where = f"{path}.{name}" if path else name
                if name in fields:
                    _add_unknown(part, (fields[name],), where, found)
                elif name != kind.tag_field and len(found) < _MAX_UNKNOWN and _FIELD.fullmatch(name):
                    found[where] = None


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


async def parse_body(data: bytes, kind: type[T]) -> T:
    """Parse a body as :func:`parse` does, on another thread if it is long."""
    if len(data) < _LONG:
        return parse(data, kind)
    return await native_calls.BODIES.arun(parse, data, kind)


__all__ = ["ClientDisconnected", "convert", "declared_length", "parse", "parse_body", "read", "unknown_fields"]
