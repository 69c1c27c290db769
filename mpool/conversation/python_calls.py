"""Arguments of function calls in Python's syntax: ``city="Rome", days=2, parts=["wind"]``. Nothing is evaluated.

Only literals are values: strings, numbers, ``True``, ``False``, ``None`` (also as JSON writes them), lists, tuples and
dicts. Templates write strings between quotes without escaping the quotes inside. A quote therefore ends a string only
if a comma, a colon or a closing bracket follows, as after every string of Python in such a place.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

#: Maximum number of lists and dicts within each other.
_MAX_DEPTH = 64
_BLANK = re.compile(r"\s*")
#: Name of an argument. It is a property of a schema and need not be a name of Python, such as ``filter[status]``.
_KEY = re.compile(r"\s*([^\s=,()\[\]{}'\"][^=,(){}'\"]{0,255}?)\s*=")
#: Blanks after a quote. More of them do not delay the decision whether it ends the string.
_AFTER = re.compile(r"\s{0,32}")
#: A number, as Python and JSON write it.
NUMBER = re.compile(r"[+-]?(?:(?:0|[1-9]\d*)(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
#: Quote -> expression for it, and for the start of an escape sequence.
_STOPS = {quote: re.compile(rf"{quote}|\\") for quote in ("'", '"', "'''", '"""')}
_WORD = re.compile(r"\w+")
#: Words for values, as Python and JSON write them.
WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE = re.compile(r"\\(u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")


class ArgumentsExtent:
    """Finds the bracket that ends the arguments of a call, in a text that grows. Scans each character once.

    Args:
        start: index after the opening bracket.
    """

    _outside = re.compile(r"[\"'()\[\]{}]")

    def __init__(self, start: int) -> None:
        self.at, self._depth, self._quote = start, 1, ""

    def end(self, text: str) -> int:
        """Return the index after the closing bracket, or -1 if ``text`` ends before it."""
        while True:
            if self._quote:
                self.at, closed = _to_quote(text, self.at, self._quote)
                if not closed:
                    return -1
                self._quote = ""
            found = self._outside.search(text, self.at)
            if found is None:
                self.at = len(text)
                return -1
            if found[0] in "\"'":
                self._quote = _quote_at(text, found.start())
                self.at = found.start()
                if not self._quote:
                    return -1
                self.at += len(self._quote)
                continue
            self.at = found.end()
            self._depth += 1 if found[0] in "([{" else -1
            if not self._depth:
                return self.at


def _quote_at(text: str, at: int) -> str:
    """Return the quote at an index: one character, or three; empty if the text ends too early to tell."""
    quote = text[at] * 3
    if text.startswith(quote, at):
        return quote
    return "" if quote.startswith(text[at:]) else text[at]


def _to_quote(text: str, at: int, quote: str) -> tuple[int, bool]:
    """Return the index after the quote that ends a string, and True; or the index to continue at, and False."""
    while True:
        found = _STOPS[quote].search(text, at)
        if found is None:
            return max(at, len(text) - len(quote) + 1), False
        if found[0] == "\\":
            if found.end() == len(text):
                return found.start(), False
            at = found.end() + 1
            continue
        after = _AFTER.match(text, found.end()).end()  # type: ignore[union-attr]
        if after == len(text):
            return found.start(), False
        if text[after] in ",:)]}" or text[after].isspace():
            return found.end(), True
        at = found.start() + 1


def parse(text: str) -> dict[str, Any]:
    """Parse the arguments of a call, up to the bracket that ends them, which is the last character.

    Raises:
        ValueError: an argument has no name, or its name is not the first with it, or its value is not a literal.
    """
    reader, found = _Reader(text), dict[str, Any]()
    while not reader.skips(")"):
        name = _KEY.match(text, reader.at)
        if name is None or name[1] in found:
            reader.fail()
        reader.at = name.end()
        found[name[1]] = reader.value(0)
        reader.separated(")")
    if reader.at != len(text):
        reader.fail()
    return found


class Cursor:
    """A place in a text. ``at``: index of the next character."""

    def __init__(self, text: str) -> None:
        self._text, self.at = text, 0

    def fail(self) -> NoReturn:
        raise ValueError(self._text[self.at:self.at + 20])

    def skips(self, words: str) -> bool:
        """Skip blanks, then these characters if they follow. Returns True if they do."""
        self.at = _BLANK.match(self._text, self.at).end()  # type: ignore[union-attr]
        found = self._text.startswith(words, self.at)
        self.at += len(words) * found
        return found


class _Reader(Cursor):
    """Reads literals."""

    def separated(self, end: str) -> None:
        """Skip the comma after an item, which may be missing before ``end``."""
        if not self.skips(",") and not self._text.startswith(end, self.at):
            self.fail()

    def value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            self.fail()
        for start, end in ("[]", "()"):
            if self.skips(start):
                return self._list(end, depth)
        if self.skips("{"):
            return self._dict(depth)
        if self._text[self.at:self.at + 1] in ("'", '"'):
            return self._string()
        number = NUMBER.match(self._text, self.at)
        if number is not None:
            self.at = number.end()
            return number_of(number[0])
        word = _WORD.match(self._text, self.at)
        if word is None or word[0] not in WORDS:
            self.fail()
        self.at = word.end()
        return WORDS[word[0]]

    def _list(self, end: str, depth: int) -> list[Any]:
        found = []
        while not self.skips(end):
            found.append(self.value(depth + 1))
            self.separated(end)
        return found

    def _dict(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self.skips("}"):
            key = self.value(depth + 1)
            if not isinstance(key, str) or not self.skips(":"):
                self.fail()
            found[key] = self.value(depth + 1)
            self.separated("}")
        return found

    def _string(self) -> str:
        quote = _quote_at(self._text, self.at) or self._text[self.at]
        start = self.at + len(quote)
        self.at, closed = _to_quote(self._text, start, quote)
        if not closed:
            self.fail()
        found = _ESCAPE.sub(_unescape, self._text[start:self.at - len(quote)])
        return _PAIR.sub(lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), found)


def _unescape(found: re.Match[str]) -> str:
    code = found[1]
    if len(code) == 1:
        return _ESCAPED.get(code, found[0])
    number = int(code[1:], 16)
    return chr(number) if number < 0x110000 else found[0]


def number_of(text: str) -> int | float:
    """Return the number that a text is. Raises ValueError if JSON cannot express it."""
    if text.lstrip("+-").isdecimal():
        return int(text)
    value = float(text)
    if math.isinf(value):  # JSON has no infinity
        raise ValueError(text)
    return value


def write(arguments: Mapping[str, Any]) -> str:
    """Return arguments as Python writes them, without the brackets around them."""
    return ", ".join(f"{name}={_literal(value)}" for name, value in arguments.items())


def _literal(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


__all__ = ["NUMBER", "WORDS", "ArgumentsExtent", "number_of", "parse", "write"]
