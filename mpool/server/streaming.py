"""Streamed responses: server-sent events and lines of JSON.

A client that stays connected gets exactly one end: the last event of its request, or one event with an error. Nothing
piles up here for a slow client: unread chunks stay with the request. The connection cuts off a client that leaves its
response unread for too long (:mod:`mpool.server.protocol`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from sse_starlette.event import ServerSentEvent
from starlette.responses import Response

from .errors import Refusal, refusal_of

if TYPE_CHECKING:
    from ..tasks.async_streams import AsyncTicketStream
    from .state import State

#: Seconds that a response's head waits for the first chunk: a request that fails until then gets an error status.
HEAD_WAITS = 0.5

EVENTS, LINES = "text/event-stream", "application/x-ndjson"


def event(data: bytes | str, name: str | None = None) -> bytes:
    """Encode a server-sent event."""
    return ServerSentEvent(data if isinstance(data, str) else data.decode(), event=name, sep="\n").encode()


def line(data: bytes) -> bytes:
    """End a line of JSON."""
    return data + b"\n"


_PING = ServerSentEvent(comment="ping", sep="\n").encode()


class Streamed(Response):
    """A streamed response.

    Args:
        state: of the server.
        request: id of the request, for the log and for cancellation.
        pieces: the stream chunks: whole events or lines, encoded.
        failed: makes the chunk that ends the stream after an error.
        kind: :data:`EVENTS` or :data:`LINES`.
        close: called exactly once, when the stream has ended in any way.
        end: sent after the last chunk, unless the request fails.
    """

    def __init__(self, state: State, request: str, pieces: AsyncIterator[bytes], failed: Callable[[Refusal], bytes],
                 kind: str, close: Callable[[], None], end: bytes = b"") -> None:
        self.state, self.request, self.pieces, self.failed, self.close = state, request, pieces, failed, close
        self.end = end
        self.status_code, self.background, self.media_type, self.charset = 200, None, kind, "utf-8"
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._pings = kind == EVENTS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._sent = 0
        running = self.state.running.get(self.request)
        closed, end = False, self.end
        pinging = asyncio.create_task(self._ping(send)) if self._pings else None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                if running is not None:
                    if running.cancelled:
                        raise Refusal("cancelled")
                    running.pieces, running.task = 0, asyncio.current_task()
                async for piece in self.pieces:
                    self._sent += 1
                    if running is not None:
                        running.pieces = self._sent
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                if running is not None:
                    running.task = None  # the stream has its end: cancellation must not add another
            except BaseException as error:
                if running is not None:
                    running.task = None
                if isinstance(error, asyncio.CancelledError):
                    if running is None or not running.cancelled:
                        raise
                    error = Refusal("cancelled")
                closed, end = True, b""  # close first: sending the end may wait for a client that does not read
                self.close()
                last = self.failed(refusal_of(error, self.request))
                await send({"type": "http.response.body", "body": last, "more_body": True})
            if pinging is not None:
                pinging.cancel()
            await send({"type": "http.response.body", "body": end, "more_body": False})
        finally:
            if pinging is not None:
                pinging.cancel()
            if not closed:
                self.close()

    async def _ping(self, send: Any) -> None:
        """Send comments while there are no events: a proxy may cut a silent connection."""
        while True:
            sent = self._sent
            await asyncio.sleep(self.state.settings.ping)
            if sent == self._sent:
                await send({"type": "http.response.body", "body": _PING, "more_body": True})


class Pieces:
    """Chunks of one or several streams of the library in the order of their arrival: (number of the stream, chunk).

    Counts as one stream of the server from :meth:`begin` until :meth:`close`.
    """

    def __init__(self, state: State, streams: Sequence[AsyncTicketStream[Any]]) -> None:
        self._state, self._streams = state, streams
        self._steps: dict[asyncio.Task[Any], int] = {}
        self._counted = False

    async def begin(self) -> None:
        """Start the requests, and wait up to ``HEAD_WAITS`` seconds for the first chunk.

        Raises:
            MpoolError: a request failed in that time.
            Refusal: too many responses are being streamed.
        """
        try:
            self._state.begin_stream()
            self._counted = True
            for stream in self._streams:
                await stream
            self._steps = {asyncio.ensure_future(_step(stream)): at for at, stream in enumerate(self._streams)}
            done, _ = await asyncio.wait(self._steps, timeout=HEAD_WAITS, return_when=asyncio.FIRST_COMPLETED)
            for step in done:
                step.result()
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        steps, streams = self._steps, self._streams
        while steps:
            done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in done:
                at = steps.pop(step)
                piece = step.result()
                if piece is None:
                    continue
                yield at, piece
                if not steps and len(done) == 1:  # one stream is left: read it without a task per chunk
                    async for piece in _rest(streams[at]):
                        yield at, piece
                else:
                    steps[asyncio.ensure_future(_step(streams[at]))] = at

    def close(self) -> None:
        """Cancel the streams that have not ended. Idempotent."""
        for step in self._steps:
            if not step.cancel() and not step.cancelled():
                step.exception()  # mark the exception as retrieved
        for stream in self._streams:
            stream._cancel()
        if self._counted:
            self._counted = False
            self._state.end_stream()


async def _step(stream: AsyncTicketStream[Any]) -> Any:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


async def _rest(stream: AsyncTicketStream[Any]) -> AsyncIterator[Any]:
    while True:
        try:
            piece = await stream.__anext__()
        except StopAsyncIteration:
            return
        yield piece


__all__ = ["EVENTS", "LINES", "Pieces", "Streamed", "event", "line"]
