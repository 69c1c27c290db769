"""Reuse of token masks in free text, where every position allows the same tokens."""

from __future__ import annotations

from collections.abc import Callable


class MaskReuse:
    """Follows one completion and reuses masks.

    Where no part of the text can belong to a marker, every position allows the same tokens, so the last mask computed
    at such a position is valid again.

    Args:
        markers, prefixes: as in :class:`mpool.conversation.tool_grammar.Grammar`; ``markers`` are encoded as UTF-8.
        bytes_of: function that returns the bytes of a token.
        call_markers: number of markers, from the first on, after which no mask is reused: calls may follow.
    """

    def __init__(self, markers: tuple[bytes, ...], prefixes: tuple[str, ...], bytes_of: Callable[[int], bytes],
                 call_markers: int = 1) -> None:
        self._markers, self._bytes_of, self._call_markers = markers, bytes_of, call_markers
        self._prefixes = tuple(prefix.encode() for prefix in prefixes)
        #: Bytes of the text to keep: all but the last of a marker, or of a UTF-8 character, may already be there.
        self._keep = max(max(map(len, markers), default=1) - 1, 3)
        self._tail = b""  # last bytes of the text
        self._in_text = self._in_calls = False
        self._mask: bytes | None = None
        self._reusable = False  # the current position is free text, so its mask can be reused

    def lookup(self, ids: list[int]) -> bytes | None:
        """Return the mask after these tokens, or None if it must be computed and passed to :meth:`store`.

        Args:
            ids: tokens sampled since the last call.
        """
        self._reusable = False
        if self._in_calls:
            return None
        text = self._tail + b"".join(map(self._bytes_of, ids))
        if not self._in_text:  # the grammar treats the start of a completion differently
            self._tail = text
            start = text.lstrip()
            squeezed = b"".join(text.split())
            self._in_calls = squeezed.startswith(self._prefixes) if self._prefixes else False
            if not start or self._in_calls or any(marker.startswith(start) for marker in self._markers) \
                    or any(prefix.startswith(squeezed) for prefix in self._prefixes):
                return None
            self._in_text = True
        found = next((at for at, marker in enumerate(self._markers) if marker in text), None)
        if found is not None:
            self._in_calls = found < self._call_markers
            self._tail, self._in_text, self._mask = b"", False, None
            return None
        self._tail = text[-self._keep:]
        if any(text.endswith(marker[:size]) for marker in self._markers for size in range(1, len(marker))) \
                or _is_cut(text):
            return None
        self._reusable = True
        return self._mask

    def store(self, mask: bytes) -> None:
        """Store the mask that was computed after the tokens of the last :meth:`lookup`, if it can be reused."""
        if self._reusable:
            self._mask = mask


class ReasoningReuse(MaskReuse):
    """Follows one completion and reuses masks inside its reasoning, where all text is allowed.

    Args:
        start: text with which the reasoning begins, after white space; empty: the prompt has begun it.
        end: text that ends the reasoning.
        bytes_of: function that returns the bytes of a token.
    """

    def __init__(self, start: bytes, end: bytes, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__((end,), (), bytes_of)
        self._start, self._head = start, b""

    def lookup(self, ids: list[int]) -> bytes | None:
        if not self._start:
            return super().lookup(ids)
        self._head += b"".join(map(self._bytes_of, ids))
        head = self._head.lstrip()
        if head.startswith(self._start):
            self._tail, self._start = head[len(self._start):], b""
        elif not self._start.startswith(head):
            self._start, self._in_calls = b"", True  # there is no reasoning
        return None


def _is_cut(text: bytes) -> bool:
    """Return True if the text ends inside a UTF-8 character."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte & 0xC0 != 0x80:
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return True
