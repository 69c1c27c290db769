"""HTTP/1.1 on a connection: uvicorn's, by httptools, with what they leave open closed.

httptools (llhttp, the parser of Node.js) refuses conflicting lengths and malformed heads and chunks. Added here: one
Host, caps on heads, ``chunked`` as the only transfer coding, no tiny chunks without end, trailers that nobody sees, a
cap on connections, answers without chunks to HTTP/1.0, requests that ask for another protocol answered in this one, and
limits on the time that a request takes to arrive, an answer takes to be read, and a connection is idle. The latter are
looked at once a second for all connections together, so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .errors import Refusal, error_body
from .settings import Settings

log = logging.getLogger("mpool.server")

#: So many chunks may be tiny; further ones have to hold so many bytes on average.
_FREE_CHUNKS, _CHUNK = 1024, 64
#: Where a connection is: what it receives next.
_BETWEEN, _HEAD, _BODY = range(3)


class _Log:
    """uvicorn's messages about connections: what clients send wrongly is nothing to warn of."""

    level = logging.INFO
    warning, error, log = log.info, log.error, log.log


class _Cycle(RequestResponseCycle):
    """A request and its answer. One of unknown length goes in chunks; to HTTP/1.0, which knows none, it goes as it is,
    and ends with the connection. Its head goes with its first bytes, so that the client wakes once for both; what
    follows goes at once: to join what is written in one turn of the loop takes a turn more for each piece."""

    _held = b""  # the head, if it has not gone yet

    async def send(self, message: Any) -> None:
        """Takes a message of the application. It waits while the client does not read.

        Raises:
            RuntimeError: an answer that is none, which ends the connection.
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
            raise RuntimeError("a message after the end of an answer")

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.response_started, self.waiting_for_100_continue = True, False
        self._empty = self.scope["method"] == "HEAD" or status in (204, 304)
        self._rest: int | None = None  # bytes of a length that is known
        parts = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            if HEADER_VALUE_RE.search(value):  # names are the server's own; values can be what a client sent
                raise RuntimeError(f"the header {name!r} cannot be {value!r}")
            if name == b"content-length":
                self._rest = int(value)
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
        if self._rest is None:  # what follows may not be here for a while
            asyncio.get_running_loop().call_soon(self._write, b"")

    def _write(self, data: bytes) -> None:
        held, self._held = self._held, b""
        if held or data:
            self.transport.write(held + data)

    def _continue(self, body: bytes, more: bool) -> None:
        if self._rest is not None and not self._empty:
            self._rest -= len(body)
            if self._rest < 0 or self._rest and not more:
                raise RuntimeError("the length of an answer is not the one that it states")
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


class Connection(HttpToolsProtocol):
    """One connection. Requests that come together are read together and answered one after the other.

    Attributes:
        left: called when the connection is lost, by the request that is being answered; it stands in the scope as
            ``mpool.connection``.
        arrive_by, read_by, idle_by: times of the loop at which the request has to be here, the answer to be taken, and
            another request to begin; None: nothing is waited for.
        refusal: why nothing more is read; None: it is.
    """

    settings: Settings  # of the class that serve() makes

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.logger = _Log  # type: ignore[assignment]
        self.arrive_by: float | None = None
        self.read_by: float | None = None
        self.idle_by: float | None = None
        self.left: Callable[[], object] | None = None
        self.refusal: Refusal | None = None
        self._place = _BETWEEN
        self._wish: bytes | None = None  # of one that asks for another protocol, until that is forgotten: its length
        self._active: RequestResponseCycle | None = None  # the request that is being answered, or was last
        #: Of the request that is being read: bytes of its head, those of a line without an end yet, bytes of its body
        #: as it is sent and as it is, and chunks.
        self._head = self._loose = self._sent = self._bytes = self._chunks = 0

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
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
        """The client does not read: the answer waits."""
        super().pause_writing()
        if self.read_by is None:
            self.read_by = self.loop.time() + self.settings.write_timeout

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        if not self.transport.is_closing():
            self.read_by = None

    # ---- what comes ----

    def data_received(self, data: bytes) -> None:
        if self.refusal is not None:
            return
        self.idle_by = None
        if self.arrive_by is None and self._place == _BETWEEN:
            self.arrive_by = self.loop.time() + self.settings.header_timeout
        if self._place == _BODY:
            self._sent += len(data)
        self._loose += len(data)
        try:
            if self._sent > 2 * self.settings.max_body:
                # what is refused by its length is read and dropped, but not without end
                raise self._refused("bad_request")
            while data:
                try:
                    self.parser.feed_data(data)
                    data = b""
                except httptools.HttpParserUpgrade as found:
                    # it takes what follows for another protocol: it is told the head again, without that wish
                    data = b"POST / HTTP/1.1\r\n%b\r\n%b" % (self._wish or b"", data[found.args[0]:])
            if self._place == _HEAD and self._head + self._loose > self.settings.max_header:
                raise self._refused("headers_too_large")
        except (httptools.HttpParserError, _Refused) as error:
            if isinstance(error, httptools.HttpParserCallbackError) and self.refusal is None \
                    and not isinstance(error.__context__, httptools.HttpParserError):
                log.error("A request could not be read", exc_info=error.__context__)
            self._refuse(self.refusal or Refusal("bad_request"))

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        if self._wish is not None:
            return
        super().on_message_begin()
        self.scope["mpool.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._place, self._head, self._loose = _HEAD, 0, 0

    def on_url(self, url: bytes) -> None:
        """A part of its target."""
        if self._wish is not None:
            return
        self._measure(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A line of its head, or of what stands after its last chunk, which nobody asks for."""
        self._measure(len(name) + len(value) + 4)
        if self._place != _HEAD or self._wish is not None:
            return
        if len(self.headers) >= self.settings.max_header_count:
            raise self._refused("headers_too_large")
        super().on_header(name, value)

    def _measure(self, size: int) -> None:
        self._head += size
        self._loose = 0
        if self._head > self.settings.max_header:
            raise self._refused("headers_too_large")

    def on_headers_complete(self) -> None:
        """The application begins, unless it has others to answer first."""
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
        if url.path is None or not url.path.isascii():
            raise self._refused("bad_request")
        path = url.path.decode("ascii")
        scope: Any = self.scope
        scope.update(method=self.parser.get_method().decode("ascii"), http_version=version, path=unquote(path),
                     raw_path=url.path, query_string=url.query or b"")
        self.cycle = _Cycle(
            scope=self.scope, transport=self.transport, flow=self.flow, logger=self.logger,  # type: ignore[arg-type]
            access_logger=self.access_logger, access_log=False, default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(), expect_100_continue=self.expect_100_continue,
            keep_alive=version == "1.1" and self.parser.should_keep_alive(), on_response=self.on_response_complete)
        if self._active is None or self._active.response_complete:
            self._start(self.cycle)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))
        self._place, self._sent, self._bytes, self._chunks = _BODY, 0, 0, 0
        self.arrive_by = self.loop.time() + self.settings.body_timeout
        if self.parser.should_upgrade():
            self._wish = b"".join(b"%b: %b\r\n" % line for line in self.headers
                                  if line[0] in (b"content-length", b"transfer-encoding"))

    def _start(self, cycle: RequestResponseCycle) -> None:
        self._active = cycle
        task = self.loop.create_task(cycle.run_asgi(self.app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._bytes += len(body)
        super().on_body(body)

    def on_chunk_complete(self) -> None:
        """A chunk of it."""
        self._chunks += 1
        if self._chunks > _FREE_CHUNKS and self._bytes < self._chunks * _CHUNK:
            raise self._refused("bad_request")

    def on_message_complete(self) -> None:
        """Its last byte."""
        if self._wish is not None:
            return
        super().on_message_complete()
        self._place, self.arrive_by = _BETWEEN, None

    # ---- what goes ----

    def on_response_complete(self) -> None:
        """An answer is out: the next request's turn."""
        self.server_state.total_requests += 1
        now = self.loop.time()
        if self.transport.is_closing():
            self.read_by = now + self.settings.write_timeout  # for what is not sent yet
        elif self.pipeline:
            self._start(self.pipeline.pop()[0])
        elif self.refusal is not None:
            self._refuse(self.refusal)
        else:
            self.flow.resume_reading()
            self.idle_by = now + self.settings.idle_timeout

    def _refused(self, code: str) -> _Refused:
        self.refusal = Refusal(code)
        return _Refused(code)

    def _busy(self) -> bool:
        """Whether requests before the one that is being read are not answered."""
        active = self._active
        return active is not None and not active.response_complete \
            and (self._place != _BODY or active is not self.cycle)

    def _refuse(self, refusal: Refusal) -> None:
        """Answers what is being read, after what came before it, and closes; where its answer has begun, it only
        closes."""
        self.refusal, self.arrive_by = refusal, None
        if self.transport.is_closing():
            return
        if self._busy():
            self.flow.pause_reading()
            if self._place == _BODY:
                self.pipeline.popleft()
                self._place = _HEAD  # and its answer is this one
            return
        self.read_by = self.loop.time() + self.settings.write_timeout
        if self._place == _BODY and self.cycle.response_started:
            self.transport.abort()
            return
        body, status = error_body(refusal, ""), refusal.row.status
        self.transport.write(STATUS_LINE[status] + b"content-type: application/json\r\ncontent-length: %d\r\n"
                             b"connection: close\r\n\r\n%b" % (len(body), body))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # the application waits for a body that will not come
            self.cycle.message_event.set()
        self.transport.close()

    def look(self, now: float) -> None:
        """Ends what takes too long."""
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
    """Of what httptools lets pass; the connection's refusal says why."""


__all__ = ["Connection"]
