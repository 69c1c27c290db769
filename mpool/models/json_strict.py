"""A strict JSON parser for untrusted files; its running time is linear in the length of the text.

The standard parser accepts duplicate keys, ``NaN``, lone surrogates and integers of any length, and recurses once for
each level of nesting. This parser refuses all of these, and its errors state the byte offset. Every text that it
accepts has the same value as with ``json.loads`` (https://www.rfc-editor.org/rfc/rfc8259).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from ..errors import FormatError

#: Result type of :func:`loads`.
Json = None | bool | int | float | str | list[Any] | dict[str, Any]

MAX_BYTES = 64 << 20
MAX_DEPTH = 64
MAX_VALUES = 4_000_000
MAX_NUMBER_LENGTH = 48
MIN_INT = -(1 << 63)
MAX_INT = (1 << 64) - 1

# these two expressions also match the empty text, so they never return None
_SPACE: Callable[..., re.Match[str]] = re.compile(r"[ \t\n\r]*").match  # type: ignore[assignment]
_NUMBER_LIKE: Callable[..., re.Match[str]] = re.compile(r"[-+.0-9A-Za-z]*").match  # type: ignore[assignment]
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?").match
_PLAIN_INT = re.compile(r"(?:0|[1-9][0-9]{0,17})(?=[,\]}])").match
_BLANK = frozenset(" \t\n\r")
# Not `from json.decoder import`, which can fail while another thread imports json.
_scan_string = json.decoder.scanstring  # type: ignore[attr-defined]
_SURROGATE = re.compile("[\ud800-\udfff]").search
_LITERALS: dict[str, tuple[str, Any]] = {"t": ("true", True), "f": ("false", False), "n": ("null", None)}


class _Parser:
    """State of one parse: the text and its location, the limits, and the containers that are not yet closed."""

    def __init__(self, text: str, file: str, base: int, max_depth: int, max_values: int, wide_ints: bool,
                 infinite: bool) -> None:
        self.text, self.file, self.base = text, file, base
        self.max_depth, self.max_values, self.wide_ints = max_depth, max_values, wide_ints
        self.literals = {**_LITERALS, "I": ("Infinity", float("inf"))} if infinite else _LITERALS
        self.open: list[dict[str, Any] | list[Any]] = []
        self.keys: list[str | None] = []

    def fail(self, at: int, got: object, allowed: object) -> NoReturn:
        offset = at if self.text.isascii() else len(self.text[:at].encode("utf-8"))
        raise FormatError(file=self.file, offset=self.base + offset, field=self.path(), got=got, allowed=allowed)

    def path(self) -> str:
        """Return the path of the value that is being parsed, such as ``weights.data_offsets[1]``."""
        parts: list[str] = []
        for container, key in zip(self.open, self.keys):
            if isinstance(container, list):
                parts.append(f"[{len(container)}]")
            elif key is not None:
                parts.append(f".{shorten(key)}" if parts else shorten(key))
            if len(parts) > 8:
                parts.append("...")
                break
        return "".join(parts) or "JSON"

    def number(self, at: int) -> tuple[int | float, int]:
        match = _NUMBER(self.text, at)
        if match is None:
            self.fail(at, shorten(_NUMBER_LIKE(self.text, at).group()), "a number")
        end = match.end()
        if end - at > MAX_NUMBER_LENGTH:
            self.fail(at, f"a number of {end - at} characters", f"at most {MAX_NUMBER_LENGTH} characters")
        word = match.group()
        if match.group(1) is None and match.group(2) is None:
            value = int(word)
            if not self.wide_ints and not MIN_INT <= value <= MAX_INT:
                self.fail(at, word, "a 64-bit integer")
            return value, end
        real = float(word)
        if real in (float("inf"), float("-inf")):
            self.fail(at, word, "a number in the range of a 64-bit float")
        return real, end

    def string(self, at: int) -> tuple[str, int]:
        try:
            value, end = _scan_string(self.text, at + 1, True)
        except json.JSONDecodeError as error:
            self.fail(min(error.pos, len(self.text)), error.msg, "a JSON string")
        if not value.isascii() and _SURROGATE(value) is not None:
            self.fail(at, "half of a surrogate pair", "Unicode characters")
        return value, end

    def scalar(self, at: int) -> tuple[Any, int]:
        text = self.text
        first = text[at:at + 1]
        if first == '"':
            return self.string(at)
        if first == "-" or first.isdigit():
            return self.number(at)
        word, value = self.literals.get(first, ("", None))
        if word and text.startswith(word, at):
            return value, at + len(word)
        if not first:
            self.fail(at, "the end of the text", "a JSON value")
        self.fail(at, shorten(_NUMBER_LIKE(text, at).group() or first), "a JSON value")

    def key(self, at: int) -> int:
        """Parse ``"key" :`` of the innermost object, and return the index where its value starts."""
        text, container = self.text, self.open[-1]
        if text[at:at + 1] != '"':
            self.fail(at, shorten(text[at:at + 1]) or "the end of the text", "a key in double quotes")
        name, end = self.string(at)
        self.keys[-1] = name
        if name in container:
            self.fail(at, "a duplicate key", "each key once")
        if text.startswith(':"', end):
            return end + 1
        end = _SPACE(text, end).end()
        if text[end:end + 1] != ":":
            self.fail(end, shorten(text[end:end + 1]) or "the end of the text", "':' after the key")
        return _SPACE(text, end + 1).end()

    def run(self) -> tuple[Json, int]:
        """Parse one value, and return it with the index of its end. Nesting uses an explicit stack, not recursion."""
        text, stack, keys, plain_int = self.text, self.open, self.keys, _PLAIN_INT
        values = 0
        at = _SPACE(text, 0).end()
        while True:
            values += 1
            if values > self.max_values:
                self.fail(at, f"more than {self.max_values} values", f"at most {self.max_values} values")
            first = text[at:at + 1]
            if first == "{" or first == "[":
                if len(stack) >= self.max_depth:
                    self.fail(at, f"nesting deeper than {self.max_depth}", f"at most {self.max_depth} levels")
                value: Any = {} if first == "{" else []
                after = _SPACE(text, at + 1).end()
                if text[after:after + 1] != ("}" if first == "{" else "]"):
                    stack.append(value)
                    keys.append(None)
                    at = self.key(after) if first == "{" else after
                    continue
                at = after + 1
            elif (match := plain_int(text, at)) is not None:
                value, at = int(match.group()), match.end()
            else:
                value, at = self.scalar(at)
            while True:
                if not stack:
                    return value, at
                container: Any = stack[-1]
                is_list = isinstance(container, list)
                if is_list:
                    container.append(value)
                else:
                    container[keys[-1]] = value
                mark = text[at:at + 1]
                if mark in _BLANK:
                    at = _SPACE(text, at).end()
                    mark = text[at:at + 1]
                if mark == ",":
                    at += 1
                    if text[at:at + 1] in _BLANK:
                        at = _SPACE(text, at).end()
                    if not is_list:
                        at = self.key(at)
                    break
                if mark != ("]" if is_list else "}"):
                    self.fail(at, shorten(mark) or "the end of the text",
                              "',' or ']'" if is_list else "',' or '}'")
                value = stack.pop()
                keys.pop()
                at += 1


def shorten(text: object, limit: int = 80) -> str:
    """Return a value as one line of text for an error message, cut to ``limit`` characters plus ``...``."""
    line = str(text)[:limit + 1].encode("unicode_escape").decode("ascii") if not str(text).isascii() else str(text)
    line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line[:limit + 1])
    return line if len(line) <= limit else line[:limit] + "..."


def decode_utf8(data: bytes, *, file: str, offset: int = 0, field: str = "JSON") -> str:
    """Decode UTF-8. Raises :class:`~mpool.errors.FormatError`, which states the offset of the first invalid byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(file=file, offset=offset + error.start, field=field,
                          got=f"byte 0x{data[error.start]:02x}", allowed="UTF-8") from None


def loads(data: bytes, *, file: str, offset: int = 0, max_bytes: int = MAX_BYTES, max_depth: int = MAX_DEPTH,
          max_values: int = MAX_VALUES, wide_ints: bool = False, infinite: bool = False) -> Json:
    """Parse a JSON text.

    Args:
        data: JSON text in UTF-8, without a byte-order mark. Only white space may surround the value.
        file: path named in errors.
        offset: position of ``data`` in ``file`` in bytes, added to the offsets in errors.
        max_bytes: largest length of ``data`` in bytes.
        max_depth: largest nesting depth.
        max_values: largest number of values.
        wide_ints: True to accept integers beyond 64 bits, of at most 48 digits (transformers writes 10**30 to
            ``tokenizer_config.json`` for "no limit").
        infinite: True to accept ``Infinity``, which older versions of transformers write to ``config.json``.

    Returns:
        parsed value.

    Raises:
        FormatError: the text is not JSON or not UTF-8, has a duplicate key, ``NaN``, ``Infinity`` unless ``infinite``,
            an integer beyond 64 bits or half of a surrogate pair, or exceeds a limit. ``field`` is a path such as
            ``weights.data_offsets[1]``.
    """
    if len(data) > max_bytes:
        raise FormatError(file=file, offset=offset, field="size", got=f"{len(data)} bytes",
                          allowed=f"at most {max_bytes} bytes")
    text = decode_utf8(data, file=file, offset=offset)
    parser = _Parser(text, file, offset, max_depth, max_values, wide_ints, infinite)
    value, end = parser.run()
    end = _SPACE(text, end).end()
    if end != len(text):
        parser.fail(end, shorten(text[end:end + 20]), "nothing after the value")
    return value
