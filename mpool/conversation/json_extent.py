"""Incremental scanner for the end of a JSON object in streamed text."""

from __future__ import annotations

import re


class JsonExtent:
    """Finds the end of a JSON object in a text that grows; each character is looked at once."""

    _outside, _inside = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')

    def __init__(self, start: int) -> None:
        self.at = start
        self._depth, self._quoted = 0, False

    def end(self, text: str) -> int:
        """Index after the object's end; -1: the end has not come yet."""
        while self.at < len(text):
            found = (self._inside if self._quoted else self._outside).search(text, self.at)
            if found is None:
                self.at = len(text)
                break
            self.at = found.end()
            if found[0] == "\\":
                self.at += 1  # whatever it is, here or not
            elif found[0] == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth <= 0:
                    return self.at
        return -1
