"""HTTP/1.1 on a hardened connection: an optional protocol class for uvicorn, which ``mpool serve`` installs.

httptools (llhttp, the parser of Node.js) refuses conflicting lengths and malformed heads and chunks. This class adds:

- exactly one Host header, limits on the size and the lines of a head, and trailers that are dropped;
- ``chunked`` as the only transfer coding, and a limit on tiny chunks;
- a limit on connections;
- unchunked responses to HTTP/1.0;
- HTTP/1.1 responses to requests that ask for an upgrade, such as h2c;
- responses to half-closed clients, with detection of clients that are gone;
- limits on the time that a request takes to arrive, a response takes to be read, and a connection is idle.

One timer per server checks the time limits of all connections, once a second: no request costs a timer.

The application runs without this class. To harden another uvicorn server::

    uvicorn.Config(create_app(settings=settings), http=hardened(settings), interface="asgi3", ws="none")

uvicorn documents ``http`` as a class but not what the class may use. This module uses ``HttpToolsProtocol`` and
``RequestResponseCycle``; `tests/python/server/test_server_versions.py` pins the version of uvicorn they were seen in.
"""

from __future__ import annotations

import asyncio
import http
import logging
import re
import socket
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .errors import Refusal, error_body
from .settings import Settings
from .streaming import EVENTS, LINES

log = logging.getLogger("mpool.server")

#: Number of chunks per body that may be tiny; beyond it, chunks must hold this many bytes on average.
_FREE_CHUNKS, _CHUNK = 1024, 64
#: Bytes parsed in one go, at most a few hundred requests: the parser stops behind a request that waits for its turn.
#: Unparsed bytes above which the connection pauses reading.
_PIECE, _UNREAD = 8 << 10, 64 << 10
#: Filler without meaning between two chunks of a stream, by media type.
_BLANKS = {EVENTS.encode(): b":\n\n", LINES.encode(): b" "}
#: Seconds between two probes of a half-closed client: first value, factor, highest value.
_FIRST, _TIMES, _LATER = 0.005, 10, 5.0
#: State of a socket that its peer has reset (tcp_states.h of Linux).
_TCP_CLOSE = 7
#: State of a connection: what it receives next.
_BETWEEN, _HEAD, _BODY = range(3)
#: Longest pause in seconds between two checks of the time limits.
_SWEEP = 1.0
#: Bytes that no header value may have: control characters other than the tab.
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
                 for status in http.HTTPStatus}


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


class _Log:
    """The logger that uvicorn's classes get: a client's mistake is logged at INFO, not as a warning."""

    level = logging.INFO
    warning, error, log = log.info, log.error, log.log


class _Cycle(RequestResponseCycle):
    """A request and its response.

    A response of unknown length is chunked; to HTTP/1.0, which has no chunks, it ends with the connection. The head is
    written together with the first bytes of the body, so that the client wakes once for both. Every later stream chunk
    is written at once: joining the writes of one turn of the loop would delay each by a turn.
    """

    _held = b""  # the head, until it is written
    _blank: bytes | None = None  # filler that may stand between two stream chunks

    async def send(self, message: Any) -> None:
        """Send a message of the application. Waits while the client does not read.

        Raises:
            RuntimeError: the messages are no valid response; the connection ends.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._begin(message["status"], message["headers"])
        elif not self.response_complete:
            self._continue(message["body"], message.get("more_body", False))
        else:
            raise RuntimeError("the application sent a message after the end of its response")

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False  # the client may send the body or leave it out
        self.response_started, self.waiting_for_100_continue = True, False
        self._empty = self.scope["method"] == "HEAD" or status in (204, 304)
        self._rest: int | None = None  # bytes to come, if the length is known
        parts = [_status_line(status)]
        for name, value in (*self.default_headers, *headers):
            if _CONTROL.search(value):  # the server chooses every name, but a value may come from a client
                raise RuntimeError(f"the header {name!r} must have no control character, got {value!r}")
            if name == b"content-length":
                self._rest = int(value)
            elif name == b"content-type":
                self._blank = _BLANKS.get(value.partition(b";")[0])
            parts += name, b": ", value, b"\r\n"
        self.chunked_encoding = self._rest is None and not self._empty and self.scope["http_version"] != "1.0"
        if self.chunked_encoding:
            parts.append(b"transfer-encoding: chunked\r\n")
        elif self._rest is None and not self._empty:
            self.keep_alive = False
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self._held = b"".join(parts)
        if self._rest is None:  # the first stream chunk may take a while: send the head in the next turn of the loop
            asyncio.get_running_loop().call_soon(self._write, b"")

    def _write(self, data: bytes) -> None:
        held, self._held = self._held, b""
        if held or data:
            self.transport.write(held + data)

    def knock(self) -> bool:
        """Write filler, to which the system of a client that is gone replies with a reset.

        Returns:
            False if no filler is possible: to HTTP/1.0 before the response, or inside a response of known length.
        """
        if not self.response_started:
            if self.scope["http_version"] == "1.0":
                return False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # every client skips it
        elif self._held:
            self._write(b"")
        elif self._blank is None or self._rest is not None or self._empty:
            return False
        elif not self.flow.write_paused:
            self._write(b"%x\r\n%b\r\n" % (len(self._blank), self._blank) if self.chunked_encoding else self._blank)
        return True

    def _continue(self, body: bytes, more: bool) -> None:
        if self._rest is not None and not self._empty:
            self._rest -= len(body)
            if self._rest < 0 or self._rest and not more:
                raise RuntimeError("the body's length differs from the response's Content-Length")
        if self._empty:
            body = b""
        elif self.chunked_encoding:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
        self._write(body)
        if not more:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class _Sweep:
    """The timer that checks the time limits of all connections of a server.

    It runs only while there are connections, so it needs neither a start nor an end.
    """

    def __init__(self, settings: Settings) -> None:
        self._pause = min(_SWEEP, *(getattr(settings, name) / 4 for name in
                                    ("header_timeout", "body_timeout", "write_timeout", "idle_timeout")))
        self._runs = False

    def begin(self, loop: asyncio.AbstractEventLoop, connections: Collection[Any]) -> None:
        """Run as long as there are connections. Idempotent."""
        if not self._runs:
            self._runs = True
            loop.call_later(self._pause, self._check, loop, connections)

    def _check(self, loop: asyncio.AbstractEventLoop, connections: Collection[Any]) -> None:
        now = loop.time()
        for connection in list(connections):
            try:
                connection.check_times(now)
            except Exception:
                log.exception("The time limits of a connection could not be checked")
        self._runs = False
        if connections:
            self.begin(loop, connections)


def hardened(settings: Settings) -> type[Connection]:
    """Make the protocol class for one uvicorn server, as the option ``http`` of ``uvicorn.Config``."""
    return type("Connection", (Connection,), {"settings": settings, "sweep": _Sweep(settings)})


class Connection(HttpToolsProtocol):
    """One connection. Pipelined requests are parsed together and served one after the other.

    Attributes:
        left: set by the request that is being served, called when the connection is lost. The scope holds the
            connection as ``mpool.connection``.
        arrive_by, read_by, idle_by: times of the loop until which the request must arrive, the response must be read,
            and another request must begin; None: no limit applies now.
        refusal: the reason why nothing more is read; None: reading goes on.
    """

    settings: Settings  # set by hardened()
    sweep: _Sweep  # set by hardened()

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.logger = _Log  # type: ignore[assignment]
        self.arrive_by: float | None = None
        self.read_by: float | None = None
        self.idle_by: float | None = None
        self.left: Callable[[], object] | None = None
        self.refusal: Refusal | None = None
        self._place = _BETWEEN
        #: The headers with the body's length of a request that asks for an upgrade, while it is parsed again.
        self._wish: bytes | None = None
        self._active: _Cycle | None = None  # the request that is being served, or the last one
        self._unread = b""  # received and not parsed yet
        self._ended = False  # the client has half-closed the connection
        #: Counts of the request that is being received: bytes of its head, bytes of its unfinished line, bytes of its
        #: body with and without the framing, chunks.
        self._head = self._loose = self._sent = self._bytes = self._chunks = 0

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.sweep.begin(self.loop, self.connections)
        self.arrive_by = self.loop.time() + self.settings.header_timeout
        if len(self.connections) > self.settings.max_connections:
            self._refuse(Refusal("too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
        left, self.left = self.left, None
        if left is not None:
            left()

    def pause_writing(self) -> None:
        """The client does not read: the response waits."""
        super().pause_writing()
        if self.read_by is None:
            self.read_by = self.loop.time() + self.settings.write_timeout

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self.read_by = None

    # ---- receiving ----

    def data_received(self, data: bytes) -> None:
        if self.refusal is not None:
            return
        self.idle_by = None
        if self.arrive_by is None and self._place == _BETWEEN:
            self.arrive_by = self.loop.time() + self.settings.header_timeout
        self._unread = self._unread + data if self._unread else data
        self._parse()
        if len(self._unread) > _UNREAD:
            self.flow.pause_reading()

    def _parse(self) -> None:
        """Parse the received bytes, up to the first request that has to wait for its turn."""
        data, at, self._unread = self._unread, 0, b""
        try:
            while at < len(data) and not self.pipeline:
                piece = data[at:at + _PIECE]
                at += len(piece)
                if self._place == _BODY:
                    self._sent += len(piece)
                self._loose += len(piece)
                if self._sent > 2 * self.settings.max_body:
                    # the rest of a body that is too long is read and dropped, up to this limit
                    raise self._refused("bad_request")
                while piece:
                    try:
                        self.parser.feed_data(piece)
                        piece = b""
                    except httptools.HttpParserUpgrade as found:
                        # httptools takes the rest for another protocol: feed it the head again without the upgrade
                        piece = b"POST / HTTP/1.1\r\n%b\r\n%b" % (self._wish or b"", piece[found.args[0]:])
                if self._place == _HEAD and self._head + self._loose > self.settings.max_header:
                    raise self._refused("headers_too_large")
            self._unread = data[at:]
        except (httptools.HttpParserError, _Refused) as error:
            if isinstance(error, httptools.HttpParserCallbackError) and self.refusal is None \
                    and not isinstance(error.__context__, httptools.HttpParserError):
                log.error("A request could not be parsed", exc_info=error.__context__)
            self._refuse(self.refusal or Refusal("bad_request"))

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client has half-closed the connection, or is gone. Only a write tells the two apart: the system of a
        client that is gone replies with a reset.

        Returns:
            True if the connection stays open for its responses.
        """
        active = self._active
        if active is None or active.response_complete or not self._busy() or not active.knock():
            return False
        self._ended = True
        self._watch(_FIRST)
        return True

    def _watch(self, pause: float) -> None:
        """Abort the connection after a reset, which is unnoticed while the server neither reads nor writes. A proxy may
        report that its client is gone only at the second write, so probe repeatedly."""
        if self.transport.is_closing():
            return
        found = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if found == _TCP_CLOSE:
            self.transport.abort()
        else:
            self.loop.call_later(pause, self._knock, min(_TIMES * pause, _LATER))

    def _knock(self, pause: float) -> None:
        if self._active is not None and not self._active.response_complete and not self.transport.is_closing():
            self._active.knock()
            self._watch(pause)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._wish is not None:
            return
        super().on_message_begin()
        self.scope["mpool.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._place, self._head, self._loose = _HEAD, 0, 0
        if self.arrive_by is None:  # it came with the end of another one
            self.arrive_by = self.loop.time() + self.settings.header_timeout

    def on_url(self, url: bytes) -> None:
        """A part of the request's target."""
        if self._wish is not None:
            return
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line of the head, or a trailer after the last chunk, which is dropped."""
        self._measure(len(name) + len(value) + 4)
        if self._place != _HEAD or self._wish is not None:
            return
        if len(self.headers) >= self.settings.max_header_count:
            raise self._refused("headers_too_large")
        super().on_header(name, value.strip(b" \t"))

    def _measure(self, size: int) -> None:
        self._head += size
        self._loose = 0
        if self._head > self.settings.max_header:
            raise self._refused("headers_too_large")

    def on_headers_complete(self) -> None:
        """Start the application, unless earlier requests of the connection are still being served."""
        if self._wish is not None:
            self._wish = None
            return
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        hosts = names.count(b"host")
        if version not in ("1.0", "1.1") or hosts > 1 or not hosts and version != "1.0":
            raise self._refused("bad_request")
        if b"transfer-encoding" in names and (
                version == "1.0" or b"content-length" in names
                or [value.lower() for name, value in self.headers if name == b"transfer-encoding"] != [b"chunked"]):
            raise self._refused("bad_request")
        url = httptools.parse_url(self.url)
        if url.path is None or not url.path.isascii() or b"#" in self.url:
            raise self._refused("bad_request")
        if url.schema is not None:  # an absolute target overrides the header Host (RFC 9112, 3.2.2)
            host = re.split(rb"[/?]", self.url.partition(b"://")[2], maxsplit=1)[0]
            self.headers[:] = [*(line for line in self.headers if line[0] != b"host"), (b"host", host)]
        path = url.path.decode("ascii")
        scope: Any = self.scope
        scope.update(method=self.parser.get_method().decode("ascii"), http_version=version, path=unquote(path),
                     raw_path=url.path, query_string=url.query or b"")
        cycle = self.cycle = _Cycle(
            scope=self.scope, transport=self.transport, flow=self.flow, logger=self.logger,  # type: ignore[arg-type]
            access_logger=self.access_logger, access_log=False, default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(), expect_100_continue=self.expect_100_continue and version == "1.1",
            keep_alive=version == "1.1" and self.parser.should_keep_alive(), on_response=self.on_response_complete)
        if self._active is None or self._active.response_complete:
            self._start(cycle)
        else:
            self.pipeline.appendleft((cycle, self.app))
        self._place, self._sent, self._bytes, self._chunks = _BODY, 0, 0, 0
        self.arrive_by = self.loop.time() + self.settings.body_timeout
        if self.parser.should_upgrade():
            self._wish = b"".join(b"%b: %b\r\n" % line for line in self.headers
                                  if line[0] in (b"content-length", b"transfer-encoding"))

    def _start(self, cycle: _Cycle) -> None:
        self._active = cycle
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._bytes += len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """The end of a chunk of the body."""
        self._chunks += 1
        if self._chunks > _FREE_CHUNKS and self._bytes < self._chunks * _CHUNK:
            raise self._refused("bad_request")

    def on_message_complete(self) -> None:
        """The last byte of the request."""
        if self._wish is not None:
            return
        super().on_message_complete()
        self._place, self.arrive_by = _BETWEEN, None

    # ---- sending ----

    def on_response_complete(self) -> None:
        """A response is complete: start the next request."""
        self.server_state.total_requests += 1
        now = self.loop.time()
        if self.transport.is_closing():
            self.read_by = now + self.settings.write_timeout  # for the bytes that are not sent yet
            return
        if self.arrive_by is not None:  # the next request had to wait: its time begins now
            self.arrive_by = now + (self.settings.body_timeout if self._place == _BODY
                                    else self.settings.header_timeout)
        if self.pipeline:
            self._start(self.pipeline.pop()[0])  # type: ignore[arg-type]
        if self.pipeline:
            return
        if self.refusal is None and self._unread:
            self._parse()
        busy = self._active is not None and not self._active.response_complete
        if self.refusal is not None:
            if not busy:
                self._refuse(self.refusal)
        elif busy:
            self.flow.resume_reading()
        elif self._ended:
            self.transport.close()
        else:
            self.flow.resume_reading()
            self.idle_by = now + self.settings.idle_timeout

    def _refused(self, code: str) -> _Refused:
        self.refusal = Refusal(code)
        return _Refused(code)

    def _busy(self) -> bool:
        """True while a request before the one that is being received is being served."""
        active = self._active
        return active is not None and not active.response_complete \
            and (self._place != _BODY or active is not self.cycle)

    def _refuse(self, refusal: Refusal) -> None:
        """Refuse the request that is being received, after the responses to earlier ones, and close the connection.
        If its response has begun, only close."""
        self.refusal, self.arrive_by = refusal, None
        if self.transport.is_closing():
            return
        if self._busy():
            self.flow.pause_reading()
            if self._place == _BODY:
                self.pipeline.popleft()
                self._place = _HEAD  # the refusal is its response
            return
        self.read_by = self.loop.time() + self.settings.write_timeout
        if self._place == _BODY and self.cycle.response_started:
            self.transport.abort()
            return
        body, status = error_body(refusal, ""), refusal.row.status
        self.transport.write(_status_line(status) + b"content-type: application/json\r\ncontent-length: %d\r\n"
                             b"connection: close\r\n\r\n%b" % (len(body), body))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application waits for a body that never comes
            self.cycle.message_event.set()
        self.transport.close()

    def check_times(self, now: float) -> None:
        """End the connection if a time limit has passed."""
        if self.read_by is not None and now >= self.read_by:
            self.transport.abort()
        elif self.transport.is_closing():
            if self.read_by is None:
                self.read_by = now + self.settings.write_timeout
        elif self.idle_by is not None and now >= self.idle_by:
            self.transport.close()
        elif self.arrive_by is not None and now >= self.arrive_by and not self._busy():
            if self._place == _BETWEEN or self._place == _BODY and self.cycle.response_started:
                self.arrive_by, self.read_by = None, now + self.settings.write_timeout
                self.transport.close()
            else:
                self._refuse(Refusal("request_timeout"))


class _Refused(Exception):
    """A request that httptools accepts and this class does not; :attr:`Connection.refusal` holds the reason."""


__all__ = ["Connection", "hardened"]
