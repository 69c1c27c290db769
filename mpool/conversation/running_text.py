"""Mask reuse: positions in a completion where the allowed tokens are known without computing a mask."""

from __future__ import annotations

from collections.abc import Callable


class RunningText:
    """Follows one answer through its text: where no part of the text can belong to a marker, the mask equals the last
    one computed in that state, and is reused.

    Args:
        marks, leads: as of :class:`mpool.conversation.tool_grammar.Grammar`, as bytes.
        bytes_of: a token's.
    """

    def __init__(self, marks: tuple[bytes, ...], leads: tuple[str, ...], bytes_of: Callable[[int], bytes]) -> None:
        self._marks, self._bytes_of = marks, bytes_of
        self._leads = tuple(lead.encode() for lead in leads)
        self._keep = max(map(len, marks), default=1)
        self._tail = b""
        self._begun = self._over = False
        self._mask: bytes | None = None
        self._here = False

    def known(self, ids: list[int]) -> bytes | None:
        """The mask behind these tokens; None: it has to be computed, and :meth:`keep` is to be told."""
        self._here = False
        if self._over:
            return None
        text = self._tail + b"".join(map(self._bytes_of, ids))
        if not self._begun:  # the start of a completion has a meaning of its own inside the text
            self._tail = text
            start = text.lstrip()
            squeezed = b"".join(text.split())
            self._over = squeezed.startswith(self._leads) if self._leads else False
            if not start or self._over or any(mark.startswith(start) for mark in self._marks) \
                    or any(lead.startswith(squeezed) for lead in self._leads):
                return None
            self._begun = True
        found = next((at for at, mark in enumerate(self._marks) if mark in text), None)
        if found is not None:
            self._over = found == 0
            self._tail, self._begun, self._mask = b"", False, None
            return None
        self._tail = text[-self._keep:]
        if any(text.endswith(mark[:size]) for mark in self._marks for size in range(1, len(mark))) or _is_cut(text):
            return None
        self._here = True
        return self._mask

    def keep(self, mask: bytes) -> None:
        """The mask that was computed behind the tokens that it was asked about last."""
        if self._here:
            self._mask = mask


def _is_cut(text: bytes) -> bool:
    """The text ends inside a UTF-8 character."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
