"""Incremental scanner for the end of a JSON object in streamed text."""

from __future__ import annotations

import re


class JsonExtent:
    """Finds the end of a JSON object in a text that grows. Scans each character once.

    Args:
        start: index at which the object begins.

    Attributes:
        at: index of the next character to scan.
    """

    _outside, _inside = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')

    def __init__(self, start: int) -> None:
        self.at = start
        self._depth, self._quoted = 0, False

    def end(self, text: str) -> int:
        """Return the index after the object's end, or -1 if ``text`` ends before the object."""
        while self.at < len(text):
            found = (self._inside if self._quoted else self._outside).search(text, self.at)
            if found is None:
                self.at = len(text)
                break
            self.at = found.end()
            if found[0] == "\\":
                self.at += 1  # skip the escaped character, even if it is not in the text yet
            elif found[0] == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    return self.at
        return -1
