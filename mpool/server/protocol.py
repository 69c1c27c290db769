"""Hardened HTTP/1.1 connections: an optional protocol class for uvicorn, which ``mpool serve`` installs.

httptools (llhttp, the parser of Node.js) rejects conflicting lengths and malformed heads and chunks. This class adds:

- exactly one Host header, limits on the bytes and the number of header lines, and trailers that are dropped;
- ``chunked`` as the only transfer coding, and a limit on the number of tiny chunks;
- a limit on the number of connections;
- responses without chunked encoding for HTTP/1.0 clients;
- HTTP/1.1 responses to requests that ask for a protocol upgrade, such as h2c;
- complete responses for clients that half-close their connection, and detection of clients that have disconnected;
- time limits for receiving a request, for a client that does not read its response, and for idle connections.

One timer per server checks the time limits of all connections once a second, so that no request needs its own timer.

The application also runs without this class. To harden another uvicorn server::

    uvicorn.Config(create_app(settings=settings), http=hardened(settings), interface="asgi3", ws="none")

uvicorn documents that ``http`` may be a class, but not the base classes that such a class may use. This module uses
``HttpToolsProtocol`` and ``RequestResponseCycle``; `tests/python/server/test_server_versions.py` pins the version of
uvicorn in which they were checked.
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

from ..records import logger
from .disconnects import DisconnectReports
from .errors import Refusal, openai_error
from .guard import cross_origin_headers
from .request_log import log_refused
from .settings import Settings
from .streaming import EVENTS, LINES

log = logger("mpool.server")

#: Number of chunks per body that may have any size; minimum average size in bytes of the chunks of a longer body.
_SMALL_CHUNKS, _MIN_CHUNK = 1024, 64
#: ``_PARSE_SIZE``: bytes passed to the parser at once. Parsing stops after a request that must wait for an earlier
#: response, so this limits the number of pipelined requests that are parsed ahead to a few hundred.
#: ``_MAX_UNPARSED``: number of unparsed bytes above which the connection pauses reading.
_PARSE_SIZE, _MAX_UNPARSED = 8 << 10, 64 << 10
#: Media type of a stream -> bytes that clients ignore between two of its events or lines.
_FILLERS = {EVENTS.encode(): b":\n\n", LINES.encode(): b" "}
#: Pause between two probes of a half-closed client: first pause in seconds, growth factor, longest pause in seconds.
_FIRST_PAUSE, _PAUSE_FACTOR, _MAX_PAUSE = 0.005, 10, 5.0
#: TCP state of a socket that the peer has reset (Linux, tcp_states.h).
_TCP_CLOSE = 7
#: Phases of a connection: between two requests, receiving a head, receiving a body.
_IDLE, _HEAD, _BODY = range(3)
#: Longest interval in seconds between two checks of the time limits.
_MAX_CHECK_INTERVAL = 1.0
#: Bytes that a header value must not contain: control characters other than the tab.
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_STATUS_LINES = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
                 for status in http.HTTPStatus}


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status


class _ClientLog:
    """Logger for uvicorn's classes. It logs errors of clients at INFO instead of WARNING."""

    level = logging.INFO
    warning, error, log = log.info, log.error, log.log


class _Cycle(RequestResponseCycle):
    """A request and its response.

    A response of unknown length uses chunked encoding. HTTP/1.0 has no chunked encoding, so there the end of the
    connection marks the end of the response. The head is written together with the first bytes of the body, so that
    the client wakes once for both. Every later stream chunk is written immediately: batching the writes of one
    iteration of the event loop would delay each of them by an iteration.
    """

    _pending_head = b""  # the head, until it is written
    _filler: bytes | None = None  # bytes that clients ignore between two stream chunks

    async def send(self, message: Any) -> None:
        """Send an ASGI message of the application. Waits while the client does not read.

        Raises:
            RuntimeError: The messages do not form a valid response. The connection is closed.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self._start_response(message["status"], message["headers"])
        elif not self.response_complete:
            self._send_body(message["body"], message.get("more_body", False))
        else:
            raise RuntimeError("the application sent a message after the end of its response")

    def _start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False  # the client may still send the body, or skip it
        self.response_started, self.waiting_for_100_continue = True, False
        self._bodiless = self.scope["method"] == "HEAD" or status in (204, 304)
        self._remaining: int | None = None  # body bytes not yet sent, if the length is known
        parts = [_status_line(status)]
        for name, value in (*self.default_headers, *headers):
            if _CONTROL.search(value):  # header names are constants, but a value may come from a client
                raise RuntimeError(f"header {name!r} must not contain control characters, got {value!r}")
            if name == b"content-length":
                self._remaining = int(value)
            elif name == b"content-type":
                self._filler = _FILLERS.get(value.partition(b";")[0])
            parts += name, b": ", value, b"\r\n"
        self.chunked_encoding = self._remaining is None and not self._bodiless and self.scope["http_version"] != "1.0"
        if self.chunked_encoding:
            parts.append(b"transfer-encoding: chunked\r\n")
        elif self._remaining is None and not self._bodiless:
            self.keep_alive = False
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"\r\n")
        self._pending_head = b"".join(parts)
        if self._remaining is None:  # the first stream chunk may take long: send the head in the next loop iteration
            asyncio.get_running_loop().call_soon(self._write, b"")

    def _write(self, data: bytes) -> None:
        held, self._pending_head = self._pending_head, b""
        # asyncio drops what is written to a lost connection, and logs a warning for each write after the fifth
        if (held or data) and not self.transport.is_closing():
            self.transport.write(held + data)

    def probe(self) -> bool:
        """Write bytes that a client ignores. If the client has disconnected, its system replies with a TCP reset.

        Returns:
            False if no such bytes exist: before the response to an HTTP/1.0 request, or inside a response of known
            length.
        """
        if not self.response_started:
            if self.scope["http_version"] == "1.0":
                return False
            if not self.transport.is_closing():
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # every client ignores it
        elif self._pending_head:
            self._write(b"")
        elif self._filler is None or self._remaining is not None or self._bodiless:
            return False
        elif not self.flow.write_paused:
            self._write(b"%x\r\n%b\r\n" % (len(self._filler), self._filler) if self.chunked_encoding else self._filler)
        return True

    def _send_body(self, body: bytes, more: bool) -> None:
        if self._remaining is not None and not self._bodiless:
            self._remaining -= len(body)
            if self._remaining < 0 or self._remaining and not more:
                raise RuntimeError("the length of the body differs from the response's Content-Length")
        if self._bodiless:
            body = b""
        elif self.chunked_encoding:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"" if more else b"0\r\n\r\n")
        self._write(body)
        if not more:
            self.response_complete = True
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class _TimeoutTimer:
    """Timer that checks the time limits of all connections of a server.

    The timer is scheduled only while connections are open, so nothing has to stop it.
    """

    def __init__(self, settings: Settings) -> None:
        self._interval = min(_MAX_CHECK_INTERVAL, *(getattr(settings, name) / 4 for name in
                                    ("header_timeout", "body_timeout", "write_timeout", "idle_timeout")))
        self._scheduled = False

    def start(self, loop: asyncio.AbstractEventLoop, connections: Collection[Any]) -> None:
        """Run the timer until no connection is open. Idempotent."""
        if not self._scheduled:
            self._scheduled = True
            loop.call_later(self._interval, self._check, loop, connections)

    def _check(self, loop: asyncio.AbstractEventLoop, connections: Collection[Any]) -> None:
        now = loop.time()
        for connection in list(connections):
            try:
                connection.check_deadlines(now)
            except Exception:
                log.exception("The time limits of a connection could not be checked")
        self._scheduled = False
        if connections:
            self.start(loop, connections)


def hardened(settings: Settings, refused: Callable[[int], object] = lambda status: None) -> type[Connection]:
    """Create the protocol class for one uvicorn server, for the option ``http`` of ``uvicorn.Config``.

    Args:
        settings: Settings of the server.
        refused: Function that counts a request which the application does not see, by its status.
    """
    return type("Connection", (Connection,), {"settings": settings, "refused": staticmethod(refused),
                                              "timeout_timer": _TimeoutTimer(settings)})


class Connection(HttpToolsProtocol, DisconnectReports):
    """One connection. Pipelined requests are parsed ahead and served one after the other.

    Attributes:
        receive_deadline: Loop time by which the rest of the current head or body must arrive; None: no limit applies
            now.
        write_deadline: Loop time by which the client must have read the response; None: no limit applies now.
        idle_deadline: Loop time by which the next request must begin; None: no limit applies now.
        refusal: Reason why the connection ignores further input; None: input is processed.
    """

    settings: Settings  # set by hardened()
    refused: Callable[[int], object]  # set by hardened()
    timeout_timer: _TimeoutTimer  # set by hardened()

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        DisconnectReports.__init__(self)
        self.logger = _ClientLog  # type: ignore[assignment]
        self.receive_deadline: float | None = None
        self.write_deadline: float | None = None
        self.idle_deadline: float | None = None
        self.refusal: Refusal | None = None
        self._phase = _IDLE
        #: Content-Length and Transfer-Encoding lines of a request that asks for an upgrade, while it is parsed again.
        self._length_headers: bytes | None = None
        self._active: _Cycle | None = None  # the request that is being served, or the last one that was
        self._unparsed = b""  # bytes received but not parsed yet
        self._half_closed = False  # the client has half-closed the connection
        #: Counters of the request that is being received. Bytes of its head; of the header line that is not complete
        #: yet; of its body with chunk framing; of its body without. Number of complete chunks, and body bytes in them.
        self._head_bytes = self._line_bytes = self._framed_bytes = self._body_bytes = 0
        self._chunk_count = self._chunk_bytes = 0

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_timer.start(self.loop, self.connections)
        self.receive_deadline = self.loop.time() + self.settings.header_timeout
        if len(self.connections) > self.settings.max_connections:
            self._refuse(Refusal("too_many_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None:
            callback()

    def pause_writing(self) -> None:
        """Start the time limit for a client that does not read its response."""
        super().pause_writing()
        if self.write_deadline is None:
            self.write_deadline = self.loop.time() + self.settings.write_timeout

    def resume_writing(self) -> None:
        """Clear the time limit: the client reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self.write_deadline = None

    # ---- receiving ----

    def data_received(self, data: bytes) -> None:
        if self.refusal is not None:
            return
        self.idle_deadline = None
        if self.receive_deadline is None and self._phase == _IDLE:
            self.receive_deadline = self.loop.time() + self.settings.header_timeout
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()
        if len(self._unparsed) > _MAX_UNPARSED:
            self.flow.pause_reading()

    def _parse(self) -> None:
        """Parse the received bytes, up to the first request that must wait for an earlier response."""
        data, at, self._unparsed = self._unparsed, 0, b""
        try:
            while at < len(data) and not self.pipeline:
                part = data[at:at + _PARSE_SIZE]
                at += len(part)
                if self._phase == _BODY:
                    self._framed_bytes += len(part)
                self._line_bytes += len(part)
                if self._framed_bytes > 2 * self.settings.max_body:
                    # the remainder of a body that is too long is read and dropped, up to this limit
                    raise self._refusal_error("bad_request")
                while part:
                    try:
                        self.parser.feed_data(part)
                        part = b""
                    except httptools.HttpParserUpgrade as found:
                        # httptools treats the remainder as another protocol: parse the head again without the upgrade
                        part = b"POST / HTTP/1.1\r\n%b\r\n%b" % (self._length_headers or b"", part[found.args[0]:])
                if self._phase == _HEAD and self._head_bytes + self._line_bytes > self.settings.max_header:
                    raise self._refusal_error("headers_too_large")
            self._unparsed = data[at:]
        except (httptools.HttpParserError, _RequestRefused) as error:
            if isinstance(error, httptools.HttpParserCallbackError) and self.refusal is None \
                    and not isinstance(error.__context__, httptools.HttpParserError):
                log.error("A request could not be parsed", exc_info=error.__context__)
            self._refuse(self.refusal or Refusal("bad_request"))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle the end of the client's data: the client has half-closed the connection, or has disconnected.

        Only a write distinguishes the two: the system of a disconnected client replies with a TCP reset.

        Returns:
            True if the connection stays open for the responses that are still due.
        """
        active = self._active
        if active is None or active.response_complete or not self._is_serving_earlier() or not active.probe():
            return False
        self._half_closed = True
        self._abort_if_reset(_FIRST_PAUSE)
        return True

    def _abort_if_reset(self, pause: float) -> None:
        """Abort the connection if the client has reset it, and otherwise schedule the next probe.

        asyncio does not report a reset while the server neither reads nor writes. A proxy may report only after the
        second write that its client has disconnected, so one probe is not enough.
        """
        if self.transport.is_closing():
            return
        found = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if found == _TCP_CLOSE:
            self.transport.abort()
        else:
            self.loop.call_later(pause, self._probe, min(_PAUSE_FACTOR * pause, _MAX_PAUSE))

    def _probe(self, pause: float) -> None:
        if self._active is not None and not self._active.response_complete and not self.transport.is_closing():
            self._active.probe()
            self._abort_if_reset(pause)

    def on_message_begin(self) -> None:
        """Start receiving a request: httptools has parsed its first byte."""
        if self._length_headers is not None:
            return
        super().on_message_begin()
        self.scope["mpool.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._phase, self._head_bytes, self._line_bytes = _HEAD, 0, 0
        if self.receive_deadline is None:  # the request arrived in the same packet as the end of the previous one
            self.receive_deadline = self.loop.time() + self.settings.header_timeout

    def on_url(self, url: bytes) -> None:
        """Append to the request target."""
        if self._length_headers is not None:
            return
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header line. A trailer after the last chunk is dropped."""
        self._measure(len(name) + len(value) + 4)
        if self._phase != _HEAD or self._length_headers is not None:
            return
        if len(self.headers) >= self.settings.max_header_count:
            raise self._refusal_error("headers_too_large")
        super().on_header(name, value.strip(b" \t"))

    def _measure(self, size: int) -> None:
        self._head_bytes += size
        self._line_bytes = 0
        if self._head_bytes > self.settings.max_header:
            raise self._refusal_error("headers_too_large")

    def on_headers_complete(self) -> None:
        """Start the application, unless earlier requests of the connection are still being served."""
        if self._length_headers is not None:
            self._length_headers = None
            return
        version, names = self.parser.get_http_version(), [name for name, _ in self.headers]
        hosts = names.count(b"host")
        if version not in ("1.0", "1.1") or hosts > 1 or not hosts and version != "1.0":
            raise self._refusal_error("bad_request")
        if b"transfer-encoding" in names and (
                version == "1.0" or b"content-length" in names
                or [value.lower() for name, value in self.headers if name == b"transfer-encoding"] != [b"chunked"]):
            raise self._refusal_error("bad_request")
        url = httptools.parse_url(self.url)
        if url.path is None or not url.path.isascii() or b"#" in self.url:
            raise self._refusal_error("bad_request")
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
            self._serve(cycle)
        else:
            self.pipeline.appendleft((cycle, self.app))
        self._phase, self._framed_bytes, self._body_bytes, self._chunk_count, self._chunk_bytes = _BODY, 0, 0, 0, 0
        self.receive_deadline = self.loop.time() + self.settings.body_timeout
        if self.parser.should_upgrade():
            self._length_headers = b"".join(b"%b: %b\r\n" % line for line in self.headers
                                  if line[0] in (b"content-length", b"transfer-encoding"))

    def _serve(self, cycle: _Cycle) -> None:
        self._active = cycle
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        """Append to the body."""
        self._body_bytes += len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Count a chunk of the body, except the empty one that ends it, and reject a body of tiny chunks."""
        if self._body_bytes == self._chunk_bytes:
            return
        self._chunk_bytes = self._body_bytes
        self._chunk_count += 1
        if self._chunk_count > _SMALL_CHUNKS and self._body_bytes < self._chunk_count * _MIN_CHUNK:
            raise self._refusal_error("bad_request")

    def on_message_complete(self) -> None:
        """End the request: its last byte has been parsed."""
        if self._length_headers is not None:
            return
        super().on_message_complete()
        self._phase, self.receive_deadline = _IDLE, None

    # ---- sending ----

    def on_response_complete(self) -> None:
        """Start the next request after a complete response."""
        self.server_state.total_requests += 1
        now = self.loop.time()
        if self.transport.is_closing():
            self.write_deadline = now + self.settings.write_timeout  # for the bytes that are still buffered
            return
        if self.receive_deadline is not None:  # the next request had to wait: its time limit starts now
            self.receive_deadline = now + (self.settings.body_timeout if self._phase == _BODY
                                    else self.settings.header_timeout)
        if self.pipeline:
            self._serve(self.pipeline.pop()[0])  # type: ignore[arg-type]
        if self.pipeline:
            return
        if self.refusal is None and self._unparsed:
            self._parse()
        busy = self._active is not None and not self._active.response_complete
        if self.refusal is not None:
            if not busy:
                self._refuse(self.refusal)
        elif busy:
            self.flow.resume_reading()
        elif self._half_closed:
            self.transport.close()
        else:
            self.flow.resume_reading()
            self.idle_deadline = now + self.settings.idle_timeout

    def _refusal_error(self, code: str) -> _RequestRefused:
        self.refusal = Refusal(code)
        return _RequestRefused(code)

    def body_is_read(self) -> None:
        """Resume reading once the application has the whole body, so that a lost connection is noticed.

        uvicorn pauses a connection while it keeps more than 64 KiB of a body. If the application takes the end of the
        body in that state, no later call resumes it.
        """
        if self.refusal is None and len(self._unparsed) <= _MAX_UNPARSED and not self.transport.is_closing():
            self.flow.resume_reading()

    def _is_serving_earlier(self) -> bool:
        """Return True while the connection serves a request that precedes the one being received."""
        active = self._active
        return active is not None and not active.response_complete \
            and (self._phase != _BODY or active is not self.cycle)

    def _refuse(self, refusal: Refusal) -> None:
        """Refuse the request that is being received, after the responses to earlier requests, and close the connection.

        If the response to that request has begun, only close the connection.
        """
        self.refusal, self.receive_deadline = refusal, None
        if self.transport.is_closing():
            return
        if self._is_serving_earlier():
            self.flow.pause_reading()
            if self._phase == _BODY:
                self.pipeline.popleft()
                self._phase = _HEAD  # the refusal is its response
            return
        self.write_deadline = self.loop.time() + self.settings.write_timeout
        if self._phase == _BODY and self.cycle.response_started:
            self.transport.abort()
            return
        body, row = openai_error(refusal), refusal.row
        retry = b"retry-after: %d\r\n" % row.retry_after if row.retry_after else b""
        headers: Any = self.headers or ()  # those that have arrived; None before the first request
        readable = cross_origin_headers(self.settings, headers, [(b"retry-after", b"")] if retry else [])
        self.transport.write(_status_line(row.status) + b"content-type: application/json\r\ncontent-length: %d\r\n%b%b"
                             b"connection: close\r\n\r\n%b" % (
                                 len(body), retry, b"".join(b"%b: %b\r\n" % line for line in readable), body))
        if self.cycle is not None and not self.cycle.response_complete:
            scope: Any = self.cycle.scope
            scope["mpool.refusal"] = refusal  # for the record of the request
            self.cycle.disconnected = True  # the application waits for the body, which will not arrive
            self.cycle.message_event.set()
        else:
            path = getattr(self, "url", b"").partition(b"?")[0].decode("latin-1") if self._phase == _HEAD else ""
            log_refused({"method": "-", "path": path or "-", "client": self.client}, refusal, row.status)
            self.refused(row.status)
        self.transport.close()

    def check_deadlines(self, now: float) -> None:
        """Close the connection if a deadline has passed."""
        if self.write_deadline is not None and now >= self.write_deadline:
            self.transport.abort()
        elif self.transport.is_closing():
            if self.write_deadline is None:
                self.write_deadline = now + self.settings.write_timeout
        elif self.idle_deadline is not None and now >= self.idle_deadline:
            self.transport.close()
        elif self.receive_deadline is not None and now >= self.receive_deadline and not self._is_serving_earlier():
            if self._phase == _IDLE or self._phase == _BODY and self.cycle.response_started:
                self.receive_deadline, self.write_deadline = None, now + self.settings.write_timeout
                self.transport.close()
            else:
                self._refuse(Refusal("request_timeout"))


class _RequestRefused(Exception):
    """A request that httptools accepts and :class:`Connection` refuses; :attr:`Connection.refusal` is the reason."""


__all__ = ["Connection", "hardened"]
