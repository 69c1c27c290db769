"""Request bodies: reading up to a size limit, and strict parsing into a struct.

The standard library's parser reads a body once: it finds duplicate keys, and refuses NaN and nesting beyond Python's
maximum depth. msgspec then converts the values to a struct. It refuses ``true`` for an integer, and says where a value
is invalid. A field that is null is equivalent to an absent field. Structs of requests derive from
:class:`mpool.server.fields.Fields`, which forbids unknown fields. :func:`parse` removes them, unless the server is
strict.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from ..host import native_calls
from .body_memory import Share
from .errors import Refusal
from .guard import header
from .invalid import (
    Part,
    Place,
    fields_of,
    is_whole,
    item_of,
    join_path,
    parts_at,
    place_of,
    refusal_of,
    struct_of,
    structs_of,
)

T = TypeVar("T")
Receive = Callable[[], Awaitable[Any]]

#: Minimum size in bytes of a body that is parsed on another thread, so that the loop keeps serving other requests.
_LONG = 1 << 16
#: Minimum size in bytes of a body that is counted before it is parsed. A smaller one has at most 2,000 lists.
_COUNTED = 1 << 12
#: Bytes of a value in memory, at most, without its text: a pointer and a string. In addition, those of a list or an
#: object with one value, and of a field.
_VALUE_BYTES, _CONTAINER_BYTES, _FIELD_BYTES = 64, 200, 80
#: Report of the ignored parts of a body: maximum number of parts, characters that are removed from their names, and
#: maximum length of a name.
MAX_UNKNOWN, _UNSAFE, _MAX_NAME = 16, re.compile(r"[^A-Za-z0-9_.\[\]-]"), 100
_TOO_DEEP = "The body is nested too deeply."
#: Maximum number of lists and objects in a body, of fields, and of values: to decode a million lists or fields in one
#: call takes seconds, during which no other thread of the process runs Python.
_MAX_CONTAINERS, _MAX_FIELDS, _MAX_VALUES = 50_000, 100_000, 2_000_000
#: Number of bytes that :class:`Counts` examines in one call of the standard library: less than 5 ms.
_SLICE = 1 << 16
_OTHERS = bytes(sorted({*range(256)} - {*b'"[{,:'}))
_STRINGS = re.compile(b'"[^"]*"')
#: Maximum number of places of a body that are changed before it is refused.
_MAX_ROUNDS = 64


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


async def read(receive: Receive, declared: int | None, most: int, share: Share) -> bytes:
    """Read the body of a request.

    Args:
        receive: ``receive`` of ASGI.
        declared: ``Content-Length`` in bytes; None: the body is chunked.
        most: Maximum size in bytes.
        share: Memory of the body; it is charged as the parts arrive.

    Raises:
        Refusal: The body is larger than allowed, or the bodies of all requests are.
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
        share.add(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class Counts:
    """Number of lists, objects, fields and values of a body, and of the JSON texts in its strings, such as arguments of
    function calls: the limits hold for all of them together.

    Args:
        share: Memory of the body, which is charged with that of its values; None: none is charged.
    """

    __slots__ = ("_containers", "_fields", "_share", "_values")

    def __init__(self, share: Share | None = None) -> None:
        self._containers = self._fields = self._values = 0
        self._share = share

    def add(self, data: bytes) -> None:
        """Count a body, or a JSON text in it, before it is decoded.

        The count is exact for valid JSON: it ignores the contents of strings. It holds the interpreter's lock for less
        than 5 ms at a time.

        Args:
            data: JSON, valid or not.

        Raises:
            Refusal: There are more than 50,000 lists and objects, 100,000 fields or 2,000,000 values, or they take more
                memory than is left for bodies.
        """
        at, before = 0, self._bytes()
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
            self._containers += outside.count(b"[") + outside.count(b"{")
            self._fields += outside.count(b":")
            self._values += outside.count(b",")
            if self._containers > _MAX_CONTAINERS:
                raise Refusal("request_too_large", f"A body must have at most {_MAX_CONTAINERS:,} lists and objects.")
            if self._fields > _MAX_FIELDS:
                raise Refusal("request_too_large", f"A body must have at most {_MAX_FIELDS:,} fields.")
            if self._values + self._containers > _MAX_VALUES:
                raise Refusal("request_too_large", f"A body must have at most {_MAX_VALUES:,} values.")
        if self._share is not None:
            self._share.add(len(data) + self._bytes() - before)

    def _bytes(self) -> int:
        return _VALUE_BYTES * self._values + _CONTAINER_BYTES * self._containers + _FIELD_BYTES * self._fields


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Refusal("invalid_json", "It has a number out of range.")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Refusal("invalid_json", "An object has a duplicate key.")
    return made


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


#: Parser of bodies. msgspec's does not find duplicate keys.
_read = json.JSONDecoder(object_pairs_hook=_object, parse_float=_number, parse_constant=_refuse_constant).decode
#: Escapes of surrogates, which need not be in pairs.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
#: Errors of msgspec that name the place.
_MALFORMED = re.compile(r"JSON is malformed: (?P<reason>.+) \(byte (?P<at>\d+)\)")


def _not_json(data: bytes) -> Refusal | None:
    """Return the error of a body that is not JSON, as msgspec names it; None: msgspec finds none."""
    if not data:
        return Refusal("invalid_json", "It is empty.")
    try:
        try:
            msgspec.json.decode(data)
        except msgspec.ValidationError:  # a number out of range: the rest was not read
            msgspec.json.decode(data, type=msgspec.Raw)
        return None
    except RecursionError:
        return Refusal("invalid_json", _TOO_DEEP)
    except (msgspec.DecodeError, ValueError) as error:
        found = _MALFORMED.fullmatch(str(error))
    if found is not None:
        return Refusal("invalid_json", f"At byte {found['at']}, counted from 0: {found['reason']}.")
    try:
        data.decode()
    except UnicodeDecodeError:
        return Refusal("invalid_json", "It is not UTF-8.")
    # msgspec also calls a text truncated if it has half of a surrogate pair
    return Refusal("invalid_json", "It ends too early, or has half of a surrogate pair.")


def parse(data: bytes, kind: type[T], ignored: list[str] | None = None) -> T:
    """Parse a body into a struct.

    Args:
        data: Body as JSON.
        kind: Struct that forbids unknown fields.
        ignored: List that receives the names of unknown fields, such as ``messages[].x``, which then have no effect
            (:func:`add_ignored`). None: unknown fields are errors.

    Raises:
        Refusal: The body is not strict JSON, or a field is unknown, missing, of the wrong type or out of range.
    """
    data = data.removeprefix(codecs.BOM_UTF8)  # RFC 8259 lets a parser skip it; programs of Windows write it
    try:
        text = data.decode()
        value = _read(text)
    except ValueError:
        raise _not_json(data) or Refusal("invalid_json") from None
    except RecursionError:
        raise Refusal("invalid_json", _TOO_DEEP) from None
    if _SURROGATE.search(text) is not None and (refusal := _not_json(data)) is not None:
        raise refusal
    del text
    found: T = parse_part(value, kind, "", ignored)
    return found


def parse_part(value: Any, kind: Any, path: str, ignored: list[str] | None = None) -> Any:
    """Convert a part of a body to a struct, as :func:`parse` does.

    Some clients send null for every unset option, also for options that the server does not have. Others write whole
    numbers as ``8192.0``. An error of msgspec names a field of a struct. All structs at that place, such as those of
    one list, then lose their fields that are null or ignored, and get integers where they need them, and msgspec
    converts the values again. Free-form values, such as JSON schemas, stay as they are.

    Args:
        value: The part, which may be changed.
        kind: Struct, or union of tagged structs.
        path: Name of the part in the body.
        ignored: As for :func:`parse`.

    Raises:
        Refusal: As for :func:`parse`.
    """
    try:
        for _ in range(_MAX_ROUNDS):
            try:
                return msgspec.convert(value, kind, str_keys=True)
            except msgspec.ValidationError as error:
                place = place_of(error)
            if not _mend(value, kind, place, path, ignored):
                break
        raise refusal_of(value, kind, place, path)
    except RecursionError:
        raise Refusal("invalid_json", _TOO_DEEP) from None


def _mend(value: Any, kind: Any, place: Place, path: str, ignored: list[str] | None) -> bool:
    """Change all structs at the place of an error. Returns False if nothing was to change."""
    if place.kind == "missing":
        return False
    steps = place.steps if place.kind == "unknown" else place.steps[:-1]
    changed = False
    for found in parts_at(value, kind, steps, re.sub(r"\[\d+\]", "[]", path)):
        if isinstance(found.value, dict):
            changed |= _mend_object(found, ignored)
        elif isinstance(found.value, list):
            changed |= _mend_list(found)
    if not changed and ignored is not None and steps and isinstance(steps[-1], int):
        for found in parts_at(value, kind, steps[:-1], re.sub(r"\[\d+\]", "[]", path)):
            changed |= _leave_out_others(found, ignored)
    return changed


def _mend_object(found: Part, ignored: list[str] | None) -> bool:
    struct = struct_of(found.kind, found.value)
    if struct is None:
        return False
    given, fields, changed = found.value, fields_of(struct), False
    for name, part in list(given.items()):
        if part is None:
            del given[name]
        elif name in fields:
            if not _is_to_be_whole(part, fields[name]):
                continue
            given[name] = int(part)
        elif ignored is not None and name != struct.__struct_config__.tag_field:
            del given[name]
            if len(ignored) < MAX_UNKNOWN:
                add_ignored(ignored, join_path(found.path, name))
        else:
            continue
        changed = True
    return changed


def _mend_list(found: Part) -> bool:
    kind, changed = item_of(found.kind, list), False
    for at, part in enumerate(found.value):
        if _is_to_be_whole(part, kind):
            found.value[at], changed = int(part), True
    return changed


def _is_to_be_whole(value: Any, kind: Any) -> bool:
    """Return True for a number such as ``8192.0`` where an integer is needed. A larger float may be another integer."""
    return isinstance(value, float) and value.is_integer() and abs(value) <= 2**53 and is_whole(kind)


def _leave_out_others(found: Part, ignored: list[str]) -> bool:
    """Leave out the items of a list whose tag matches the class attribute ``OTHERS`` of its structs."""
    structs = structs_of(item_of(found.kind, list))
    others = getattr(structs[0], "OTHERS", None) if structs else None
    if others is None or not isinstance(found.value, list):
        return False
    known = {struct.__struct_config__.tag for struct in structs}
    kept = []
    for item in found.value:
        tag = item.get(structs[0].__struct_config__.tag_field) if isinstance(item, dict) else None
        if isinstance(tag, str) and tag not in known and others.fullmatch(tag):
            add_ignored(ignored, join_path(f"{found.path}[]", tag))
        else:
            kept.append(item)
    changed = len(kept) < len(found.value)
    found.value[:] = kept
    return changed


def add_ignored(ignored: list[str], name: str) -> None:
    """Add the name of a part of a body that has no effect, unless it is there or there are :data:`MAX_UNKNOWN`.

    Clients choose names, and they become part of the log and of a response header. Characters other than letters,
    digits, ``_``, ``-``, ``.`` and brackets are therefore left out, and so is the middle of a name of more than 100
    characters.
    """
    name = _UNSAFE.sub("", name)
    if len(name) > _MAX_NAME:
        name = f"{name[:_MAX_NAME // 2 - 2]}...{name[-_MAX_NAME // 2 + 1:]}"
    if name and name not in ignored and len(ignored) < MAX_UNKNOWN:
        ignored.append(name)


def parse_bounded(data: bytes, kind: type[T], ignored: list[str] | None, counts: Counts) -> T:
    """Parse a body as :func:`parse` does, after it was counted unless it is short. ``counts``: receives the counts.

    Raises:
        Refusal: As for :func:`parse` and :meth:`Counts.add`.
    """
    if len(data) >= _COUNTED:
        counts.add(data)
    return parse(data, kind, ignored)


async def parse_body(data: bytes, kind: type[T], ignored: list[str] | None, counts: Counts) -> T:
    """Parse a body as :func:`parse_bounded` does, on another thread if the body is long."""
    if len(data) < _LONG:
        return parse_bounded(data, kind, ignored, counts)
    return await native_calls.BODIES.arun(parse_bounded, data, kind, ignored, counts)


__all__ = ["MAX_UNKNOWN", "ClientDisconnected", "Counts", "add_ignored", "declared_length", "parse", "parse_body",
           "parse_bounded", "parse_part", "read"]
