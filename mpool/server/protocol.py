"""HTTP/1.1 on a connection: uvicorn's, by h11, with what they leave open closed.

h11 refuses conflicting lengths, malformed heads and chunks, and heads beyond their size. Added here: a length stated
twice or beside ``Transfer-Encoding``, many header lines, bodies cut into tiny chunks, a cap on connections, and limits
on the time that a request takes to arrive and an answer takes to be read. The latter are looked at once a second for
all connections together, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from .errors import Refusal, error_body
from .settings import Settings

log = logging.getLogger("mpool.server")

#: So many chunks may be tiny; further ones have to hold so many bytes on average.
_FREE_CHUNKS, _CHUNK = 1024, 64
#: Bytes that are written at once, at the latest.
_CORK = 16 << 10


class StrictConnection(h11.Connection):
    """h11's server side, which refuses what no client has reason to send."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size=settings.max_header)
        self.settings = settings
        self.refusal = Refusal("bad_request")
        self._chunks = self._bytes = 0

    def next_event(self) -> Any:
        """As h11's."""
        if self.their_state is h11.IDLE:
            self._check_head(self.trailing_data[0].partition(b"\r\n\r\n")[0])
        try:
            event: Any = super().next_event()
        except h11.RemoteProtocolError as error:
            self.refusal = Refusal("headers_too_large" if error.error_status_hint == 431 else "bad_request")
            raise
        kind = type(event)
        if kind is h11.Data:
            self._chunks += event.chunk_end
            self._bytes += len(event.data)
            # what is refused by its length is read and dropped, but not without end
            if self._bytes > 2 * self.settings.max_body \
                    or self._chunks > _FREE_CHUNKS and self._bytes < self._chunks * _CHUNK:
                raise self._refused("bad_request")
        elif kind is h11.Request:
            self._chunks = self._bytes = 0
            self._check(event)
        return event

    def _check_head(self, head: bytes) -> None:
        """What h11 lets pass: a large head that came whole, and a length stated twice, if both say the same."""
        if len(head) > self.settings.max_header:
            raise self._refused("headers_too_large")
        if head.lower().count(b"\ncontent-length:") > 1:
            raise self._refused("bad_request")

    def _check(self, request: h11.Request) -> None:
        if len(request.headers) > self.settings.max_header_count:
            raise self._refused("headers_too_large")
        names = [name for name, _ in request.headers]
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version != b"1.1"):
            raise self._refused("bad_request")

    def _refused(self, code: str) -> h11.RemoteProtocolError:
        self.refusal = Refusal(code)
        return h11.RemoteProtocolError("refused", error_status_hint=self.refusal.row.status)


class _Log:
    """uvicorn's messages about connections: what clients send wrongly is nothing to warn of."""

    level = logging.INFO
    warning, error, log = log.info, log.error, log.log


class _Corked:
    """A transport that joins what is written in one turn of the loop: the head of an answer and its body, or events
    that were ready together, go out in one packet and wake the client once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        """Holds it until the loop's next turn, or until there is much."""
        if not data:
            return
        if not self._held:
            self._loop.call_soon(self._flush)
        self._held.append(data)
        self._size += len(data)
        if self._size >= _CORK:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            held, self._held, self._size = self._held, [], 0
            self._transport.write(b"".join(held))

    def close(self) -> None:
        """After what is held."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """One connection.

    Attributes:
        left: called when the connection is lost, by the request that is being answered; it stands in the scope as
            ``mpool.connection``.
        arrive_by, read_by: times of the loop at which the request has to be here, and the answer to be taken; None:
            nothing is waited for.
    """

    settings: Settings  # of the class that serve() makes

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.logger = _Log  # type: ignore[assignment]
        self.conn: Any = StrictConnection(self.settings)
        self.arrive_by: float | None = None
        self.read_by: float | None = None
        self.left: Callable[[], object] | None = None
        app: Any = self.app

        def entered(scope: Any, receive: Any, send: Any) -> Any:
            scope["mpool.connection"] = self
            return app(scope, receive, send)

        self.app = entered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Corked(transport, self.loop))  # type: ignore[arg-type]
        self.arrive_by = self.loop.time() + self.settings.header_timeout
        if len(self.connections) > self.settings.max_connections:
            self._refuse(Refusal("too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        left, self.left = self.left, None
        if left is not None:
            left()

    def data_received(self, data: bytes) -> None:
        if self.arrive_by is None and self.conn.their_state is h11.IDLE:
            self.arrive_by = self.loop.time() + self.settings.header_timeout
        super().data_received(data)

    def handle_events(self) -> None:
        before = self.conn.their_state
        super().handle_events()
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            if before is not state:
                self.arrive_by = self.loop.time() + self.settings.body_timeout
        elif state is not h11.IDLE or before is not state:
            self.arrive_by = None

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self.read_by = self.loop.time() + self.settings.write_timeout  # for what is not sent yet

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for every fault of the protocol."""
        self._refuse(self.conn.refusal)

    def _refuse(self, refusal: Refusal) -> None:
        """Answers and closes, unless an answer has begun: then it only closes."""
        if self.transport.is_closing():
            return
        self.arrive_by, self.read_by = None, self.loop.time() + self.settings.write_timeout
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        body = error_body(refusal, "")
        status = refusal.row.status
        head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)),
                (b"connection", b"close")]
        parts = (h11.Response(status_code=status, headers=head, reason=STATUS_PHRASES[status]), h11.Data(data=body),
                 h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(part) for part in parts))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application waits for a body that will not come
            self.cycle.message_event.set()
        self.transport.close()

    def pause_writing(self) -> None:
        """The client does not read: the answer waits."""
        super().pause_writing()
        if self.read_by is None:
            self.read_by = self.loop.time() + self.settings.write_timeout

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self.read_by = None

    def look(self, now: float) -> None:
        """Ends what takes too long."""
        if self.read_by is not None and now >= self.read_by:
            self.transport.abort()
        elif self.arrive_by is not None and now >= self.arrive_by:
            self.arrive_by = None
            state = self.conn.their_state
            silent = state is h11.IDLE and not self.conn.trailing_data[0]
            if silent or self.transport.is_closing() or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
                self.read_by = now + self.settings.write_timeout
                self.transport.close()
            else:
                self._refuse(Refusal("request_timeout"))
        elif self.transport.is_closing() and self.read_by is None:
            self.read_by = now + self.settings.write_timeout


__all__ = ["Connection", "StrictConnection"]
