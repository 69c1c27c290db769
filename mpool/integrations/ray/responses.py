"""A response that is held back until it has begun, so that another process can still give it."""

from __future__ import annotations

from typing import Any

from ...server.errors import Refusal
from ...server.guard import Scope, format_of, header, refusal_response
from ...server.streaming import EVENTS, LINES, event, line


class HeldResponse:
    """Passes the messages of a response on to the client, as soon as the response has begun.

    A response has begun when the first byte of its body exists: a stream that waits for its first token has not
    begun. Until then, nothing is sent, and another process can still give the response.

    Args:
        scope, receive, send: those of ASGI.
        whole: True: hold back a response that is not streamed until it is complete.

    Attributes:
        started: a part of the response was sent.
        ended: the whole response was sent.
    """

    def __init__(self, scope: Scope, receive: Any, send: Any, whole: bool) -> None:
        self._scope, self._receive, self._send, self._whole = scope, receive, send, whole
        self._held: list[dict[str, Any]] = []
        self._media_type = ""
        self.started = self.ended = False

    def begins_with(self, message: dict[str, Any]) -> bool:
        """Return True if the response begins with ``message``, its next message: from then on, nothing is held back."""
        return not self.started and message["type"] == "http.response.body" and (
            not message.get("more_body", False) or bool(message.get("body")) and (self._streamed or not self._whole))

    async def handle_message(self, message: dict[str, Any]) -> None:
        """Hold a message back, or send it and all messages held back before."""
        if message["type"] == "http.response.start":
            content_type = header(message, b"content-type") or b""
            self._media_type = content_type.decode("latin-1").partition(";")[0]
        self.started |= self.begins_with(message)
        self._held.append(message)
        if self.started:
            held, self._held = self._held, []
            for held_message in held:
                await self._send(held_message)
            self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def fail(self, refusal: Refusal) -> None:
        """Send an error: as the whole response, or as the last message of a stream. A response that has begun and is
        not a stream stays incomplete, so the server closes the connection."""
        if not self.started:
            await refusal_response(refusal, self._scope)(self._scope, self._receive, self._send)
        elif self._streamed:
            found = format_of(self._scope)
            data = found.encode(refusal)
            last = event(data, found.event) if self._media_type == EVENTS else line(data)
            await self._send({"type": "http.response.body", "body": last, "more_body": False})

    @property
    def _streamed(self) -> bool:
        return self._media_type in (EVENTS, LINES)


__all__ = ["HeldResponse"]
