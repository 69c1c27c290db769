"""Arguments of function calls as Gemma 4 writes them: ``{city:<|"|>Rome<|"|>,days:2,parts:[<|"|>wind<|"|>]}``.

Names stand without quotes, except names that could not be read so. Strings and those names are between two marks and
have no escape sequences, so they cannot contain the mark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .python_calls import NUMBER, WORDS, Cursor, number_of

#: Mark before and after a string.
QUOTE = '<|"|>'
#: Maximum number of lists and objects within each other.
_MAX_DEPTH = 64
_KEY = re.compile(r"\s*([^\s:,{}\[\]<][^:,{}\[\]<]{0,255}?)\s*:")
_STOP = re.compile(r"[\[\]{}]|" + re.escape(QUOTE))
_WORD = re.compile(r"\w+")


class QuotedExtent:
    """Finds the bracket that ends the arguments of a call, in a text that grows. Scans each character once.

    Args:
        start: index after the opening bracket.
    """

    def __init__(self, start: int) -> None:
        self.at, self._depth, self._inside = start, 1, False

    def end(self, text: str) -> int:
        """Return the index after the closing bracket, or -1 if ``text`` ends before it."""
        while True:
            if self._inside:
                found = text.find(QUOTE, self.at)
            else:
                stop = _STOP.search(text, self.at)
                found = -1 if stop is None else stop.start()
            if found < 0:  # the text may end within a mark
                self.at = max(self.at, len(text) - len(QUOTE) + 1)
                return -1
            if text.startswith(QUOTE, found):
                self._inside = not self._inside
                self.at = found + len(QUOTE)
                continue
            self._depth += 1 if text[found] in "[{" else -1
            self.at = found + 1
            if not self._depth:
                return self.at


def parse(text: str) -> dict[str, Any]:
    """Parse the arguments of a call, up to the bracket that ends them, which is the last character.

    Raises:
        ValueError: the text is malformed, or names an argument twice.
    """
    reader = _Reader(text)
    found = reader.object(0)
    if reader.at != len(text):
        reader.fail()
    return found


class _Reader(Cursor):
    """Reads values."""

    def _separated(self, end: str) -> None:
        """Skip the comma after an item, which may be missing before ``end``."""
        if not self.skips(",") and not self._text.startswith(end, self.at):
            self.fail()

    def _string(self) -> str:
        end = self._text.find(QUOTE, self.at)
        if end < 0:
            self.fail()
        found = self._text[self.at:end]
        self.at = end + len(QUOTE)
        return found

    def _key(self) -> str:
        if self.skips(QUOTE):
            found = self._string()
            if not self.skips(":"):
                self.fail()
            return found
        key = _KEY.match(self._text, self.at)
        if key is None:
            self.fail()
        self.at = key.end()
        return key[1]

    def object(self, depth: int) -> dict[str, Any]:
        """Return the object whose opening bracket was read."""
        found: dict[str, Any] = {}
        while not self.skips("}"):
            key = self._key()
            if key in found:
                self.fail()
            found[key] = self._value(depth + 1)
            self._separated("}")
        return found

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            self.fail()
        if self.skips(QUOTE):
            return self._string()
        if self.skips("{"):
            return self.object(depth)
        if self.skips("["):
            found = []
            while not self.skips("]"):
                found.append(self._value(depth + 1))
                self._separated("]")
            return found
        number = NUMBER.match(self._text, self.at)
        if number is not None:
            self.at = number.end()
            return number_of(number[0])
        word = _WORD.match(self._text, self.at)
        if word is None or word[0] not in WORDS:
            self.fail()
        self.at = word.end()
        return WORDS[word[0]]


def spelled(name: str) -> str:
    """Return a name as it stands in a call: between marks if it has characters that end a name, such as brackets."""
    key = _KEY.fullmatch(name + ":")
    return name if key is not None and key[1] == name else QUOTE + name + QUOTE


def write(value: Any) -> str:
    """Return a value as Gemma 4 writes it."""
    if isinstance(value, str):
        return QUOTE + value + QUOTE
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{spelled(name)}:{write(one)}" for name, one in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(write, value)) + "]"
    return json.dumps(value)


__all__ = ["QuotedExtent", "parse", "spelled", "write"]
