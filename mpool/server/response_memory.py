"""Conversations that ``previous_response_id`` continues, in bounded memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..conversation.messages import NamedImage

#: Maximum number of conversations, and of bytes of their texts and images.
_MAX_CONVERSATIONS, _MAX_BYTES = 1000, 64 << 20
#: Estimated bytes of a message without its texts and images.
_MESSAGE = 500


class ResponseMemory:
    """Keeps the conversations of the latest responses. The least recently used ones are dropped first.

    Attributes:
        bytes: Estimated size of all conversations.
    """

    def __init__(self, most: int = _MAX_CONVERSATIONS, most_bytes: int = _MAX_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, tuple[list[dict[str, Any]], int]] = OrderedDict()
        self.bytes = 0

    def get(self, id: str) -> list[dict[str, Any]] | None:
        """Return the messages of a conversation up to a response; None: they are not kept."""
        found = self._kept.get(id)
        if found is None:
            return None
        self._kept.move_to_end(id)
        return list(found[0])

    def put(self, id: str, messages: list[dict[str, Any]]) -> None:
        """Keep the messages of a conversation. A conversation that exceeds the limit alone is not kept."""
        size = sum(_MESSAGE + _size(message) for message in messages)
        if size > self._most_bytes:
            return
        self._kept[id] = messages, size
        self.bytes += size
        while len(self._kept) > self._most or self.bytes > self._most_bytes:
            self.bytes -= self._kept.popitem(last=False)[1][1]


def _size(message: dict[str, Any]) -> int:
    """Return the bytes of the texts and images of a message. Without recursion: clients choose how deep it nests."""
    found, parts = 0, [message]  # type: int, list[Any]
    while parts:
        value = parts.pop()
        if isinstance(value, dict):
            parts += value.values()
        elif isinstance(value, list):
            parts += value
        elif isinstance(value, NamedImage):
            parts.append(value.image)
        elif isinstance(value, (str, bytes)):
            found += (4 if isinstance(value, str) else 1) * len(value)
    return found


__all__ = ["ResponseMemory"]
