"""Answers that are written while they are made: server-sent events, and lines of JSON.

Whatever happens, a client that stays sees exactly one end: the last event of what was asked for, or one with an error.
The work goes no faster than the client reads only in that nothing piles up here: what is not read stays with the call,
and a client that leaves its answer unread for too long is cut off by the connection (protocol.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from sse_starlette.event import ServerSentEvent
from starlette.responses import Response

from .errors import Refusal, refusal_of

if TYPE_CHECKING:
    from ..tasks.async_streams import AsyncFlow
    from .state import State

#: Seconds for which the head of an answer waits for its first piece: what fails until then has a status of its own.
HEAD_WAITS = 0.5

EVENTS, LINES = "text/event-stream", "application/x-ndjson"


def event(data: bytes | str, name: str | None = None) -> bytes:
    """A server-sent event."""
    return ServerSentEvent(data if isinstance(data, str) else data.decode(), event=name, sep="\n").encode()


def line(data: bytes) -> bytes:
    """A line of JSON."""
    return data + b"\n"


_PING = ServerSentEvent(comment="ping", sep="\n").encode()


class Streamed(Response):
    """An answer in pieces.

    Args:
        state: of the server; the stream counts until it ends.
        request: id of the request, for the log and for who cancels it.
        pieces: bytes as they are to be sent, whole events or lines.
        failed: the piece that is the end instead when something fails.
        kind: :data:`EVENTS` or :data:`LINES`.
        close: called once, when nothing more will be read, however it ends.
        end: behind the last piece, unless something fails; empty: that piece is the end.
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
                    running.task = None  # the end is out: there cannot be another one
            except BaseException as error:
                if running is not None:
                    running.task = None
                if isinstance(error, asyncio.CancelledError):
                    if running is None or not running.cancelled:
                        raise
                    error = Refusal("cancelled")
                closed, end = True, b""  # before the end is sent: that may have to wait for a client that does not read
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
        """Comments, while there are no events: what stands between may take a silent connection for a dead one."""
        while True:
            sent = self._sent
            await asyncio.sleep(self.state.settings.ping)
            if sent == self._sent:
                await send({"type": "http.response.body", "body": _PING, "more_body": True})


class Pieces:
    """Pieces of one or several streams of the library, as they come: (number of the stream, piece).

    Counts as a stream of the server from :meth:`begin` on until :meth:`close`.
    """

    def __init__(self, state: State, streams: Sequence[AsyncFlow[Any]]) -> None:
        self._state, self._streams = state, streams
        self._steps: dict[asyncio.Task[Any], int] = {}
        self._counted = False

    async def begin(self) -> None:
        """Starts the work, and waits a little for the first piece.

        Raises:
            MpoolError: what failed until then.
            Refusal: there are too many streams.
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
                if not steps and len(done) == 1:  # the last one, or the only one: no task for each piece
                    async for piece in _rest(streams[at]):
                        yield at, piece
                else:
                    steps[asyncio.ensure_future(_step(streams[at]))] = at

    def close(self) -> None:
        """Cancels what is not done. Idempotent."""
        for step in self._steps:
            if not step.cancel() and not step.cancelled():
                step.exception()  # nobody asks for it any more
        for stream in self._streams:
            stream._leave()
        if self._counted:
            self._counted = False
            self._state.end_stream()


async def _step(stream: AsyncFlow[Any]) -> Any:
    try:
        return await stream.__anext__()
    except StopAsyncIteration:
        return None


async def _rest(stream: AsyncFlow[Any]) -> AsyncIterator[Any]:
    while True:
        try:
            piece = await stream.__anext__()
        except StopAsyncIteration:
            return
        yield piece


__all__ = ["EVENTS", "LINES", "Pieces", "Streamed", "event", "line"]
