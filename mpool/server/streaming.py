"""Streamed responses: server-sent events and JSON lines.

A client that stays connected receives exactly one final event: the last event of its request, or one event with an
error. The server buffers nothing for a slow client: it takes the next chunk from the library only after the client has
read enough. :mod:`mpool.server.protocol` closes the connection of a client that stops reading for too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from sse_starlette.event import ServerSentEvent
from starlette.responses import Response

from .errors import Refusal

if TYPE_CHECKING:
    from ..tasks.async_streams import AsyncTicketStream
    from .operations import Context
    from .state import State

#: Seconds that the head of a response waits for the first chunk. A request that fails within this time receives an HTTP
#: error status instead of an error event.
HEAD_TIMEOUT = 0.5

EVENTS, LINES = "text/event-stream", "application/x-ndjson"


def event(data: bytes | str, name: str | None = None) -> bytes:
    """Encode a server-sent event."""
    return ServerSentEvent(data if isinstance(data, str) else data.decode(), event=name, sep="\n").encode()


def line(data: bytes) -> bytes:
    """Encode a line of JSON: append the newline."""
    return data + b"\n"


_PING = ServerSentEvent(comment="ping", sep="\n").encode()


class StreamedResponse(Response):
    """A streamed response.

    Args:
        context: Context of the request.
        chunks: Encoded stream chunks, each one or more complete events or lines.
        encode_error: Function that encodes the error event or line that ends the stream after a failure.
        media_type: :data:`EVENTS` or :data:`LINES`.
        close: Callback, called exactly once after the stream has ended for any reason.
        end: Bytes to send after the last chunk, unless the request fails.
    """

    def __init__(self, context: Context, chunks: AsyncIterator[bytes], encode_error: Callable[[Refusal], bytes],
                 media_type: str, close: Callable[[], None], end: bytes = b"") -> None:
        self.context, self.chunks = context, chunks
        self.encode_error, self.close, self.end = encode_error, close, end
        self.status_code, self.background, self.media_type, self.charset = 200, None, media_type, "utf-8"
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no"})
        self._pings = media_type == EVENTS

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._sent = 0
        running = self.context.state.running.get(self.context.id)
        closed, end = False, self.end
        ping_task = asyncio.create_task(self._ping(send)) if self._pings else None
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                if running is not None:
                    if running.cancelled:
                        raise Refusal("cancelled")
                    running.chunks, running.task = 0, asyncio.current_task()
                async for chunk in self.chunks:
                    self._sent += 1
                    if running is not None:
                        running.chunks = self._sent
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if running is not None:
                    running.task = None  # the final event is sent: cancellation must not add another one
            except BaseException as error:
                if running is not None:
                    running.task = None
                if isinstance(error, asyncio.CancelledError):
                    if running is None or not running.cancelled:
                        raise
                    error = Refusal("cancelled")
                closed, end = True, b""  # close first: sending the final event may wait for a client that does not read
                self.close()
                refusal = self.context.refusal(error)
                if running is not None:
                    running.error = refusal.code
                last = self.encode_error(refusal)
                await send({"type": "http.response.body", "body": last, "more_body": True})
            if ping_task is not None:
                ping_task.cancel()
            await send({"type": "http.response.body", "body": end, "more_body": False})
        finally:
            if ping_task is not None:
                ping_task.cancel()
            if not closed:
                self.close()

    async def _ping(self, send: Any) -> None:
        """Send a comment when no event was sent between two looks, ``Settings.ping`` seconds apart: proxies may close
        silent connections.
        """
        while True:
            sent = self._sent
            await asyncio.sleep(self.context.state.settings.ping)
            if sent == self._sent:
                await send({"type": "http.response.body", "body": _PING, "more_body": True})


class MergedStreams:
    """Iterator over the chunks of one or more streams of the library, in order of arrival.

    Each item is a tuple of the index of the stream and its chunk. The iterator counts as one stream of the server from
    :meth:`start` until :meth:`close`.
    """

    def __init__(self, state: State, streams: Sequence[AsyncTicketStream[Any]]) -> None:
        self._state, self._streams = state, streams
        self._pending: dict[asyncio.Task[Any], int] = {}
        self._counted = False

    async def start(self) -> None:
        """Start the requests, and wait up to ``HEAD_TIMEOUT`` seconds for the first chunk.

        Raises:
            MpoolError: A request failed within that time.
            Refusal: The limit of streamed responses is reached.
        """
        try:
            self._state.begin_stream()
            self._counted = True
            for stream in self._streams:
                await stream
            self._pending = {asyncio.ensure_future(_next_chunk(stream)): at for at, stream in enumerate(self._streams)}
            done, _ = await asyncio.wait(self._pending, timeout=HEAD_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except BaseException:
            self.close()
            raise

    async def __aiter__(self) -> AsyncIterator[tuple[int, Any]]:
        pending, streams = self._pending, self._streams
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at = pending.pop(task)
                chunk = task.result()
                if chunk is None:
                    continue
                yield at, chunk
                if not pending and len(done) == 1:  # only one stream is left: read it without a task per chunk
                    async for chunk in _remaining_chunks(streams[at]):
                        yield at, chunk
                else:
                    pending[asyncio.ensure_future(_next_chunk(streams[at]))] = at

    def close(self) -> None:
        """Cancel the streams that have not ended yet. Idempotent."""
        for task in self._pending:
            if not task.cancel() and not task.cancelled():
                task.exception()  # mark the exception as retrieved
        for stream in self._streams:
            stream._cancel()
        if self._counted:
            self._counted = False
            self._state.end_stream()


async def _next_chunk(stream: AsyncTicketStream[Any]) -> Any:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


async def _remaining_chunks(stream: AsyncTicketStream[Any]) -> AsyncIterator[Any]:
    while True:
        try:
            chunk = await stream.__anext__()
        except StopAsyncIteration:
            return
        yield chunk


__all__ = ["EVENTS", "LINES", "MergedStreams", "StreamedResponse", "event", "line"]
