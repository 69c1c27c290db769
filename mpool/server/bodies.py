"""Bodies of requests: read with a cap, then parsed strictly into a struct.

msgspec refuses NaN, numbers out of range, ``true`` for an integer, lone surrogates, invalid UTF-8, and nesting beyond
its depth; a second pass by the standard library's parser finds keys that stand twice. Null is as if nothing were said.
"""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from ..runtime import threads as _threads
from .errors import Refusal
from .guard import header

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

#: Bodies of so many bytes are parsed on a thread that tokenises: the loop has others to serve.
_LONG = 1 << 16
_PLACE = re.compile(r" - at `(.*)`$")
_UNKNOWN = re.compile(r"unknown field `(.*)`")
_MISSING = re.compile(r"missing required field `(.*)`")


class Gone(Exception):
    """The client left before its request was complete."""


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
    """The body of a request.

    Args:
        receive: of ASGI.
        declared: bytes by ``Content-Length``; None: chunked.
        most: bytes allowed.

    Raises:
        Refusal: larger than allowed.
        Gone: the client left.
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
        raise Refusal("invalid_json", "A key stands twice in one object.")


#: Values are thrown away as they are read: only their keys matter.
_keys = json.JSONDecoder(object_pairs_hook=_once, parse_float=len, parse_int=len).decode


@functools.lru_cache(maxsize=64)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=True)


def parse(data: bytes, kind: type[T]) -> T:
    """A body as a struct.

    Raises:
        Refusal: not strict JSON, a field is unknown, of the wrong type, out of range or missing.
    """
    try:
        decoder: msgspec.json.Decoder[T] = _decoder(kind)  # type: ignore[arg-type]
        try:
            found = decoder.decode(data)
        except msgspec.ValidationError as error:
            if b"null" not in data:
                raise
            found = _without_nulls(data, decoder, error)
        _keys(data.decode())
        return found
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from None
    except (msgspec.DecodeError, ValueError):
        raise Refusal("invalid_json") from None
    except RecursionError:
        raise Refusal("invalid_json", "It is nested too deeply.") from None


def _without_nulls(data: bytes, decoder: msgspec.json.Decoder[T], error: msgspec.ValidationError) -> T:
    """As the decoder, but null is as if it were left out, also for parameters that there are not: clients send it for
    all that they were not told. ``error``: what is wrong with the body as it is.

    Raises:
        msgspec.ValidationError: it is wrong without them, too.
    """
    try:
        shape = _shape(decoder.type)  # type: ignore[arg-type]
        rest = msgspec.json.encode(_told(msgspec.json.decode(data), shape))
    except (OverflowError, msgspec.EncodeError):  # numbers that only Python has
        raise error from None
    return decoder.decode(rest)


@functools.lru_cache(maxsize=64)
def _shape(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _told(value: Any, *kinds: inspect.Type) -> Any:
    """A value without the nulls that stand in structs; what is free, such as a JSON schema, stays as it is."""
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


def _refused(text: str) -> Refusal:
    """A refusal that names the parameter, from what msgspec says."""
    place, unknown = _PLACE.search(text), _UNKNOWN.search(text)
    path = place.group(1).removeprefix("$").lstrip(".") if place else ""
    what = _PLACE.sub("", text)
    if unknown is not None:
        name = f"{path}.{unknown.group(1)}" if path else unknown.group(1)
        return Refusal("unsupported_parameter", f"There is no parameter {name[:100]}.", name[:100])
    missing = _MISSING.search(text)
    if missing is not None:
        name = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return Refusal("invalid_value", f"{name[:100]} is missing.", name[:100])
    return Refusal("invalid_value", f"{path or 'The body'}: {what}."[:300], path[:100] or None)


async def parse_body(data: bytes, kind: type[T]) -> T:
    """As :func:`parse`; a long one leaves the loop's thread."""
    if len(data) < _LONG:
        return parse(data, kind)
    return await asyncio.get_running_loop().run_in_executor(_threads.executor(), parse, data, kind)


__all__ = ["Gone", "declared_length", "parse", "parse_body", "read"]
