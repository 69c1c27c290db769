"""Conversations that ``previous_response_id`` continues, in bounded memory.

A conversation is kept as bytes, so that its size is known: the objects of parsed JSON have up to 30 times its size.
"""

from __future__ import annotations

import marshal
from collections import OrderedDict
from typing import Any

from ..conversation.messages import NamedImage
from ..stores import STORES

#: Bytes of the objects that keep a conversation, in addition to its own.
_ENTRY = 500


def encoded(messages: list[dict[str, Any]]) -> bytes | None:
    """Return messages of the library as bytes; None: they are nested too deeply to be kept."""
    try:
        return marshal.dumps([_without_images(message) for message in messages], 2)
    except ValueError:
        return None


def decoded(data: bytes | None) -> list[dict[str, Any]]:
    """Return the messages of :func:`encoded`, as new objects; None: no messages."""
    found: list[dict[str, Any]] = [] if data is None else marshal.loads(data)
    for message in found:
        if isinstance(message.get("content"), list):
            message["content"] = [{**part, "image": NamedImage(*part["image"])} if part.get("type") == "image" else part
                                  for part in message["content"]]
    return found


def _without_images(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose images are pairs of the file and the name of its field."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [
        {**part, "image": (part["image"].image, part["image"].name)} if part.get("type") == "image" else part
        for part in content]}


class ResponseMemory:
    """Keeps the conversations of the latest responses. The least recently used ones are dropped first.

    Attributes:
        bytes: Size of all conversations.
    """

    def __init__(self, most: int | None = None, most_bytes: int | None = None) -> None:
        limits = STORES["responses"]
        self._most = most or limits.entries or 0
        self._most_bytes = most_bytes or limits.bytes or 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, id: str) -> bytes | None:
        """Return the conversation up to a response, from :func:`encoded`; None: it is not kept."""
        found = self._kept.get(id)
        if found is not None:
            self._kept.move_to_end(id)
        return found

    def put(self, id: str, conversation: bytes | None) -> None:
        """Keep the result of :func:`encoded`. A conversation that exceeds the limit alone is not kept."""
        if conversation is None or len(conversation) + _ENTRY > self._most_bytes:
            return
        self._kept[id] = conversation
        self.bytes += len(conversation) + _ENTRY
        while len(self._kept) > self._most or self.bytes > self._most_bytes:
            self.bytes -= len(self._kept.popitem(last=False)[1]) + _ENTRY


__all__ = ["ResponseMemory", "decoded", "encoded"]
