"""Request bodies: reading up to a size limit, and strict parsing into a struct.

msgspec refuses NaN, numbers out of range, ``true`` for an integer, lone surrogates, invalid UTF-8, and nesting beyond
its maximum depth. A second pass with the standard library's parser finds duplicate keys. A field that is null is
equivalent to an absent field. Structs of requests derive from :class:`mpool.server.fields.Fields`, which forbids
unknown fields. :func:`parse` removes unknown fields first, unless the server is strict.
"""

from __future__ import annotations

import codecs
import functools
import json
import operator
import re
from collections.abc import Awaitable, Callable, Iterable
from types import GenericAlias
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from .. import native_calls
from .body_memory import Share
from .errors import Refusal
from .guard import header
from .invalid import Fault, find_fault, join_path

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


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    if len(pairs) > 1 and len({key for key, _ in pairs}) != len(pairs):
        raise Refusal("invalid_json", "An object has a duplicate key.")


#: Decoder that only checks a body for duplicate keys.
_check_keys = json.JSONDecoder(object_pairs_hook=_refuse_duplicates, parse_float=len, parse_int=len).decode


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


@functools.cache  # the routes have a fixed number of structs
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, strict=True)


#: Errors of msgspec that name the place.
_MALFORMED = re.compile(r"JSON is malformed: (?P<reason>.+) \(byte (?P<at>\d+)\)")


def _not_json(data: bytes, error: Exception, path: str) -> Refusal:
    """Return the error of a body, or of a part of it, that is not JSON. Bytes of parts are not counted."""
    found = _MALFORMED.fullmatch(str(error))
    if path:
        return Refusal("invalid_json")
    if not data:
        return Refusal("invalid_json", "It is empty.")
    if found is None:
        try:
            data.decode()
        except UnicodeDecodeError:
            return Refusal("invalid_json", "It is not UTF-8.")
        # msgspec also calls a text truncated if it has half of a surrogate pair
        return Refusal("invalid_json", "It ends too early, or has half of a surrogate pair.")
    return Refusal("invalid_json", f"At byte {found['at']}, counted from 0: {found['reason']}.")


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
    fault = None
    data = data.removeprefix(codecs.BOM_UTF8)  # RFC 8259 lets a parser skip it; programs of Windows write it
    try:
        _check_keys(data.decode())  # first, because its values are dropped before msgspec makes those of the struct
    except Refusal as refusal:
        fault = refusal
    except ValueError:
        fault = Refusal("invalid_json")
    except RecursionError:
        fault = Refusal("invalid_json", _TOO_DEEP)
    found: T = parse_part(data, kind, "", ignored)  # its errors name the place
    if fault is not None:
        raise fault
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
    except (msgspec.DecodeError, ValueError) as error:
        raise _not_json(data, error, path) from None
    except RecursionError:
        raise Refusal("invalid_json", _TOO_DEEP) from None
    try:
        # msgspec refuses a value of the wrong type before it has read the rest: check that all of it is JSON
        raw = msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, ValueError) as error:
        raise _not_json(data, error, path) from None
    except RecursionError:
        raise Refusal("invalid_json", _TOO_DEEP) from None
    try:
        cleaned = msgspec.json.encode(_cleaned(raw, _shape(kind), re.sub(r"\[\d+\]", "[]", path), ignored))
        try:
            return decoder.decode(cleaned)
        except msgspec.ValidationError:
            raise _refused(find_fault(cleaned, kind, path)) from None
    except (msgspec.DecodeError, ValueError):
        raise Refusal("invalid_json") from None
    except RecursionError:
        raise Refusal("invalid_json", _TOO_DEEP) from None


class _StructShape:
    """A struct of a body: its tag, and the fields whose values :func:`_cleaned` may change."""

    def __init__(self, kind: inspect.StructType) -> None:
        self._kind, self.tag = kind, kind.tag
        self._fields: dict[str, _Shape | None] | None = None
        self.tag_field, self._tag = kind.tag_field, msgspec.Raw(msgspec.json.encode(kind.tag))
        #: Tags of other items of a list that are ignored; None: there are none.
        self.others: re.Pattern[str] | None = getattr(kind.cls, "OTHERS", None)

    @property
    def fields(self) -> dict[str, _Shape | None]:
        """Shape of each field; None: its value stays as it is.

        Made at the first use, because a struct may contain itself. Two threads may both make it: a lock, as that of
        ``functools.cached_property``, could be held during a fork.
        """
        if self._fields is None:
            shapes = {field.encode_name: _Shape((field.type,)) for field in self._kind.fields}
            self._fields = {name: shape if shape.has_fields or shape.is_whole else None
                            for name, shape in shapes.items()}
        return self._fields

    def fits(self, parts: dict[str, msgspec.Raw]) -> bool:
        """Return True if an object has the tag of the struct, or if the struct has none."""
        if self.tag_field is None:
            return True
        tag = parts.get(self.tag_field)
        try:
            return tag is None or tag == self._tag or msgspec.json.decode(tag, type=str) == self._kind.tag
        except msgspec.DecodeError:
            return False


class _Shape:
    """Types that a value of a body may have, as far as :func:`_cleaned` needs them. Made once for each field.

    Attributes:
        structs: Structs.
        items: Shape of the items, if the value may be a list that contains structs; else None.
        is_whole: True if a number must be an integer.
        has_fields: True if the value may be a struct, or a list that contains structs.
    """

    def __init__(self, kinds: Iterable[inspect.Type]) -> None:
        parts = [part for kind in kinds for part in _parts(kind)]
        self.structs = [_StructShape(part) for part in parts if isinstance(part, inspect.StructType)]
        items = _Shape(part.item_type for part in parts if isinstance(part, inspect.ListType))  \
            if any(isinstance(part, inspect.ListType) for part in parts) else None
        self.items: _Shape | None = items if items is not None and items.has_fields else None
        self.is_whole = any(isinstance(part, inspect.IntType) for part in parts) \
            and not any(isinstance(part, inspect.FloatType) for part in parts)
        self.has_fields: bool = bool(self.structs) or self.items is not None
        classes = [part.cls for part in parts if isinstance(part, inspect.StructType)]
        self._list = GenericAlias(list, functools.reduce(operator.or_, classes)) \
            if classes and len(classes) == len(parts) else None

    def other_tag(self, data: msgspec.Raw) -> str | None:
        """Return the tag of an item that the structs ignore; None: they do not."""
        first = self.structs[0] if self.structs else None
        if first is None or first.others is None or first.tag_field is None or \
                bytes(memoryview(data)[:1]) != b"{":  # type: ignore[arg-type]
            return None
        try:
            tag = msgspec.json.decode(_OBJECT.decode(data).get(first.tag_field, _NULL), type=str)
        except msgspec.ValidationError:
            return None
        known = any(tag == struct.tag for struct in self.structs)
        return tag if not known and first.others.fullmatch(tag) else None

    def is_valid_list(self, data: msgspec.Raw) -> bool:
        """Return True if a list certainly is valid with these items, so that there is nothing to change in it."""
        if self._list is None:
            return False
        try:
            _decoder(self._list).decode(data)
            return True
        except msgspec.ValidationError:
            return False


@functools.cache
def _shape(kind: Any) -> _Shape:
    return _Shape((inspect.type_info(kind),))


#: Decoders of one level of a value, and the JSON of null.
_LIST, _OBJECT = msgspec.json.Decoder(list[msgspec.Raw]), msgspec.json.Decoder(dict[str, msgspec.Raw])
_NULL = msgspec.Raw(b"null")


def _cleaned(data: msgspec.Raw, shape: _Shape, path: str, ignored: list[str] | None) -> Any:
    """Return JSON without the fields of structs that are null. If unknown fields are ignored, it has none of them, and
    no items of lists whose tag matches the class attribute ``OTHERS`` of the structs.

    Some clients send null for every unset option, also for options that the server does not have. Others write whole
    numbers as ``8192.0``: where a field must be an integer, they become integers. Free-form values, such as JSON
    schemas, stay as they are.

    Args:
        data: JSON, without white space at its start.
        shape: Types that the value may have.
        path: Name of the value in the body.
        ignored: As for :func:`parse`.

    Returns:
        A value that msgspec encodes as the JSON.
    """
    head = bytes(memoryview(data)[:1])  # type: ignore[arg-type]
    if head == b"[":
        items = shape.items
        if items is None or items.is_valid_list(data):
            return data
        found, path = [], f"{path}[]"
        for item in _LIST.decode(data):
            tag = None if ignored is None else items.other_tag(item)
            if tag is None or ignored is None:
                found.append(_cleaned(item, items, path, ignored))
            else:
                add_ignored(ignored, join_path(path, tag))
        return found
    if head != b"{" or not shape.structs:
        whole = _WHOLE.fullmatch(bytes(data)) if shape.is_whole else None
        return data if whole is None else msgspec.Raw(whole[1])
    parts = {name: part for name, part in _OBJECT.decode(data).items() if part != _NULL}
    chosen = next((struct for struct in shape.structs if struct.fits(parts)), None)
    if chosen is None:
        return data
    fields, kept = chosen.fields, {}
    for name, part in parts.items():
        if name in fields:
            inner = fields[name]
            kept[name] = part if inner is None else _cleaned(part, inner, join_path(path, name), ignored)
        elif name == chosen.tag_field or ignored is None:
            kept[name] = part
        elif len(ignored) < MAX_UNKNOWN and (where := join_path(path, name)) not in ignored:
            add_ignored(ignored, where)
    return kept


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
