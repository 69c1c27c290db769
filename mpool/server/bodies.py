"""Request bodies: read up to a limit, then parsed strictly into a struct.

msgspec refuses NaN, numbers out of range, ``true`` for an integer, lone surrogates, invalid UTF-8, and nesting beyond
its depth. A second pass by the standard library's parser finds duplicate keys. A null equals a field that is left out.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from ..runtime import threads as _threads
from .errors import Refusal
from .guard import header
from .invalid import Fault, find_fault

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

#: Bytes from which on a body is parsed on a tokenizer thread, so that the loop keeps serving other requests.
_LONG = 1 << 16


class Gone(Exception):
    """The client disconnected before its request was complete."""


def declared_length(scope: Any) -> int | None:
    """The request's ``Content-Length``; None: it has none.

    Raises:
        Refusal: it is not a number.
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
        receive: ASGI's ``receive``.
        declared: ``Content-Length`` in bytes; None: the body is chunked.
        most: bytes allowed.

    Raises:
        Refusal: the body is larger than allowed.
        Gone: the client disconnected.
    """
    if declared is not None and declared > most:
        raise Refusal("request_too_large", f"Allowed: {most:,} bytes.")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise Refusal("request_too_large", f"Allowed: {most:,} bytes.")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _once(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) != len(pairs):
        raise Refusal("invalid_json", "An object has a duplicate key.")


#: Parses a body for its keys alone and drops the values.
_keys = json.JSONDecoder(object_pairs_hook=_once, parse_float=len, parse_int=len).decode


@functools.lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=True)


def parse(data: bytes, kind: type[T]) -> T:
    """Parse a body into a struct.

    Raises:
        Refusal: the body is not strict JSON, or a field is unknown, missing, of the wrong type or out of range.
    """
    told = data
    try:
        decoder: msgspec.json.Decoder[T] = _decoder(kind)  # type: ignore[arg-type]
        try:
            found = decoder.decode(data)
        except msgspec.ValidationError as error:
            if b"null" not in data:
                raise
            told = _without_nulls(data, decoder, error)
            found = decoder.decode(told)
        _keys(data.decode())
        return found
    except msgspec.ValidationError:
        raise _refused(find_fault(told, kind)) from None
    except (msgspec.DecodeError, ValueError):
        raise Refusal("invalid_json") from None
    except RecursionError:
        raise Refusal("invalid_json", "The body is nested too deeply.") from None


def _without_nulls(data: bytes, decoder: msgspec.json.Decoder[Any], error: msgspec.ValidationError) -> bytes:
    """The body without its nulls, also those of unknown fields: some clients send null for every option that is unset.

    Args:
        data: the body.
        decoder: of its struct.
        error: raised if the body cannot be encoded again.
    """
    try:
        shape = _shape(decoder.type)  # type: ignore[arg-type]
        return msgspec.json.encode(_told(msgspec.json.decode(data), shape))
    except (OverflowError, msgspec.EncodeError):  # integers that only Python has
        raise error from None


@functools.lru_cache(maxsize=64)
def _shape(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _told(value: Any, *kinds: inspect.Type) -> Any:
    """A value without the nulls that are fields of structs. Free-form values, such as a JSON schema, keep theirs."""
    kinds = tuple(part for kind in kinds for part in _parts(kind))
    if isinstance(value, list):
        items = tuple(kind.item_type for kind in kinds if isinstance(kind, inspect.ListType))
        return [_told(item, *items) for item in value] if items else value
    structs = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    if not isinstance(value, dict) or not structs:
        return value
    fields: dict[str, list[inspect.Type]] = {}
    for kind in structs:
        for field in kind.fields:
            fields.setdefault(field.encode_name, []).append(field.type)
    return {name: _told(part, *fields.get(name, ())) for name, part in value.items() if part is not None}


def _parts(kind: inspect.Type) -> tuple[inspect.Type, ...]:
    while isinstance(kind, inspect.Metadata):
        kind = kind.type
    return tuple(part for one in kind.types for part in _parts(one)) if isinstance(kind, inspect.UnionType) else (kind,)


def _refused(fault: Fault) -> Refusal:
    """The refusal that names the field at fault."""
    path = fault.path[:100]
    if fault.kind == "unknown":
        return Refusal("unsupported_parameter", f"There is no parameter `{path}`.", path)
    if fault.kind == "missing":
        return Refusal("invalid_value", f"`{path}` is missing.", path)
    name = f"`{path}`" if path else "The body"
    return Refusal("invalid_value", f"{name} must be {fault.allowed}, got {fault.got}."[:300], path or None)


async def parse_body(data: bytes, kind: type[T]) -> T:
    """Parse as :func:`parse` does; a long body on another thread."""
    if len(data) < _LONG:
        return parse(data, kind)
    return await asyncio.get_running_loop().run_in_executor(_threads.executor(), parse, data, kind)


__all__ = ["Gone", "declared_length", "parse", "parse_body", "read"]
