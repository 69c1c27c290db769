"""HTTP/1.1 on a connection: uvicorn's, by httptools, with what they leave open closed.

httptools (llhttp, the parser of Node.js) refuses conflicting lengths and malformed heads and chunks. Added here: one
Host, caps on heads, ``chunked`` as the only transfer coding, no tiny chunks without end, trailers that nobody sees, a
cap on connections, answers without chunks to HTTP/1.0, requests that ask for another protocol answered in this one,
answers to clients that only say that they ask nothing more, and limits on the time that a request takes to arrive, an
answer takes to be read, and a connection is idle. The latter are looked at once a second for all connections together,
so that a request costs no timer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HEADER_VALUE_RE, STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .errors import Refusal, error_body
from .settings import Settings
from .streaming import EVENTS, LINES

log = logging.getLogger("mpool.server")

#: So many chunks may be tiny; further ones have to hold so many bytes on average.
_FREE_CHUNKS, _CHUNK = 1024, 64
#: Bytes that are parsed together, some hundred requests at most: while one waits, nothing behind them is parsed.
#: So many may be here and wait for that.
_PIECE, _UNREAD = 8 << 10, 64 << 10
#: What says nothing within an answer of a kind, between two of its pieces.
_BLANKS = {EVENTS.encode(): b":\n\n", LINES.encode(): b" "}
#: Seconds until a client that asks nothing more is written to again: from, times, to.
_FIRST, _TIMES, _LATER = 0.005, 10, 5.0
#: State of a socket that its other side has reset (tcp_states.h of Linux).
_TCP_CLOSE = 7
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
    _blank: bytes | None = None  # what can be written between two pieces

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
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False  # whether its body comes now nobody can say
        self.response_started, self.waiting_for_100_continue = True, False
        self._empty = self.scope["method"] == "HEAD" or status in (204, 304)
        self._rest: int | None = None  # bytes of a length that is known
        parts = [STATUS_LINE[status]]
        for name, value in (*self.default_headers, *headers):
            if HEADER_VALUE_RE.search(value):  # names are the server's own; values can be what a client sent
                raise RuntimeError(f"the header {name!r} cannot be {value!r}")
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
        if self._rest is None:  # what follows may not be here for a while
            asyncio.get_running_loop().call_soon(self._write, b"")

    def _write(self, data: bytes) -> None:
        held, self._held = self._held, b""
        if held or data:
            self.transport.write(held + data)

    def knock(self) -> bool:
        """Writes what says nothing. Whether there is such a thing: a client of HTTP/1.0 has to wait for its answer, and
        what has a length goes at once."""
        if not self.response_started:
            if self.scope["http_version"] == "1.0":
                return False
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # clients skip it, asked for or not
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
        self._active: _Cycle | None = None  # the request that is being answered, or was last
        self._unread = b""  # what came and is not parsed yet
        self._ended = False  # the client sends nothing more
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
        self._unread = self._unread + data if self._unread else data
        self._parse()
        if len(self._unread) > _UNREAD:
            self.flow.pause_reading()

    def _parse(self) -> None:
        """Parses what is here, but nothing behind requests that wait."""
        data, at, self._unread = self._unread, 0, b""
        try:
            while at < len(data) and not self.pipeline:
                piece = data[at:at + _PIECE]
                at += len(piece)
                if self._place == _BODY:
                    self._sent += len(piece)
                self._loose += len(piece)
                if self._sent > 2 * self.settings.max_body:
                    # what is refused by its length is read and dropped, but not without end
                    raise self._refused("bad_request")
                while piece:
                    try:
                        self.parser.feed_data(piece)
                        piece = b""
                    except httptools.HttpParserUpgrade as found:
                        # it takes what follows for another protocol: it is told the head again, without that wish
                        piece = b"POST / HTTP/1.1\r\n%b\r\n%b" % (self._wish or b"", piece[found.args[0]:])
                if self._place == _HEAD and self._head + self._loose > self.settings.max_header:
                    raise self._refused("headers_too_large")
            self._unread = data[at:]
        except (httptools.HttpParserError, _Refused) as error:
            if isinstance(error, httptools.HttpParserCallbackError) and self.refusal is None \
                    and not isinstance(error.__context__, httptools.HttpParserError):
                log.error("A request could not be read", exc_info=error.__context__)
            self._refuse(self.refusal or Refusal("bad_request"))

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends nothing more. One that has left altogether says no more than that, either, but answers what
        is written to it with a reset. Whether the connection stays for its answers."""
        active = self._active
        if active is None or active.response_complete or not self._busy() or not active.knock():
            return False
        self._ended = True
        self._watch(_FIRST)
        return True

    def _watch(self, pause: float) -> None:
        """Ends the connection once it was reset, which nobody would notice who neither reads nor writes; what stands
        between may pass on only the second time that the client has left."""
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
        super().on_header(name, value.strip(b" \t"))

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
        if url.path is None or not url.path.isascii() or b"#" in self.url:
            raise self._refused("bad_request")
        if url.schema is not None:  # it is this that says which server is meant
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
            return
        if self.arrive_by is not None:  # until now it had to wait
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
