"""The state of one HTTP connection: its time limits on a made-up clock, when it reads, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from uvicorn.server import ServerState  # noqa: E402

from mpool.server import protocol  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402

SETTINGS = Settings(header_timeout=10.0, body_timeout=20.0, write_timeout=30.0, idle_timeout=40.0, max_body=1024,
                    max_connections=2)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\n"
ESTABLISHED, CLOSED = 1, 7


class Transport:
    """Notes what the connection does with its socket."""

    def __init__(self) -> None:
        self.sent, self.calls, self.state, self.closing = b"", list[str](), ESTABLISHED, False

    def write(self, data: bytes) -> None:
        self.sent += data

    def is_closing(self) -> bool:
        return self.closing

    def get_extra_info(self, name: str) -> Any:
        place = lambda: ("127.0.0.1", 1)  # noqa: E731
        return SimpleNamespace(getsockopt=lambda *_: bytes([self.state]), getsockname=place,
                               getpeername=place) if name == "socket" else None

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def close(self) -> None:
        self.calls.append("close")
        self.closing = True

    def abort(self) -> None:
        self.calls.append("abort")
        self.closing = True


class Wire:
    """A connection, its transport, a clock, and an application that responds when the test says so."""

    def __init__(self, settings: Settings = SETTINGS, others: int = 0) -> None:
        self.now, self.later = 100.0, list[tuple[float, Any]]()
        real = asyncio.get_running_loop()
        loop: Any = SimpleNamespace(time=lambda: self.now, create_task=real.create_task, call_later=self._call_later)
        self.requests: list[tuple[dict[str, Any], asyncio.Future[bytes]]] = []
        self.state = ServerState()
        self.state.connections.update(object() for _ in range(others))  # type: ignore[misc]
        config = uvicorn.Config(self._app, http=protocol.hardened(settings), ws="none", lifespan="off", log_config=None,
                                interface="asgi3", proxy_headers=False)
        config.load()
        self.at: Any = config.http_protocol_class(config, self.state, {}, loop)  # type: ignore[call-arg]
        self.transport = Transport()
        self.at.connection_made(self.transport)

    def _call_later(self, delay: float, call: Any, *args: Any) -> None:
        self.later.append((delay, lambda: call(*args)))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        response = asyncio.get_running_loop().create_future()
        self.requests.append((scope, response))
        while (await receive()).get("more_body"):
            pass
        body = await response
        await send({"type": "http.response.start", "status": 200,
                    "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def feed(self, data: bytes, at: float | None = None) -> Wire:
        self.now = self.now if at is None else at
        self.at.data_received(data)
        return await self.run_ready()

    async def respond(self, number: int = -1, at: float | None = None) -> Wire:
        self.now = self.now if at is None else at
        self.requests[number][1].set_result(b"ok")
        return await self.run_ready()

    async def run_ready(self) -> Wire:
        for _ in range(8):
            await asyncio.sleep(0)
        return self

    @property
    def limits(self) -> tuple[float | None, float | None, float | None]:
        return self.at.receive_deadline, self.at.write_deadline, self.at.idle_deadline

    def taken(self) -> list[str]:
        """Return the calls since the last time."""
        found, self.transport.calls = self.transport.calls, []
        return found


def driven(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))  # type: ignore[arg-type]


# ---- time limits ---------------------------------------------------------------------------------------------------

def test_limits_of_one_request_after_another() -> None:
    async def run() -> None:
        wire = Wire()
        assert wire.limits == (110, None, None)
        assert (await wire.feed(HEAD[:9], 101)).limits == (110, None, None)
        assert (await wire.feed(HEAD[9:], 102)).limits == (122, None, None)
        assert (await wire.feed(b"ab", 103)).limits == (122, None, None)
        assert (await wire.feed(b"cd", 104)).limits == (None, None, None)
        assert (await wire.respond(at=105)).limits == (None, None, 145)
        assert (await wire.feed(b"\r\n", 106)).limits == (116, None, None)
        assert (await wire.feed(GET, 107)).limits == (None, None, None)
        assert (await wire.respond(at=108)).limits == (None, None, 148)
        assert wire.transport.sent.count(b"200 OK") == 2 and not wire.transport.closing
        assert wire.state.total_requests == 2

    driven(run)


@pytest.mark.parametrize("begun, limit", [(b"", None), (HEAD[:9], 115.0), (HEAD, 125.0)])
def test_limits_of_a_request_that_waited(begun: bytes, limit: float | None) -> None:
    """The time limit of a pipelined request starts with the end of the response before it."""
    async def run() -> None:
        wire = await Wire().feed(GET + begun, 101)
        assert wire.limits == ({b"": None, HEAD[:9]: 111.0, HEAD: 121.0}[begun], None, None)
        assert len(wire.requests) == 1
        await wire.respond(0, at=105)
        assert wire.at.receive_deadline == limit and len(wire.requests) == 1 + (begun == HEAD)
        if begun == HEAD:
            await wire.feed(b"abcd", 106)
            assert (await wire.respond(1, at=107)).limits == (None, None, 147)

    driven(run)


@pytest.mark.parametrize("name, calls", [("write_deadline", ["abort"]), ("idle_deadline", ["close"])])
def test_an_expired_limit_ends_the_connection(name: str, calls: list[str]) -> None:
    async def run() -> None:
        wire = Wire()
        setattr(wire.at, name, 105.0)
        wire.at.check_deadlines(104.9)
        assert wire.taken() == []
        wire.at.check_deadlines(105.0)
        assert wire.taken() == calls

    driven(run)


@pytest.mark.parametrize("data, sent, limits", [
    (b"", b"", (None, 140.0, None)),  # nothing was received
    (HEAD[:9], b"HTTP/1.1 408 ", (None, 130.0, None)), (HEAD, b"HTTP/1.1 408 ", (None, 130.0, None))])
def test_a_request_that_takes_too_long(data: bytes, sent: bytes, limits: tuple[float | None, ...]) -> None:
    async def run() -> None:
        wire = Wire()
        if data:
            await wire.feed(data)
        due = wire.at.receive_deadline
        wire.taken()
        wire.at.check_deadlines(due - 0.1)
        assert wire.taken() == [] and wire.transport.sent == b""
        wire.at.check_deadlines(due)
        assert wire.taken() == ["close"] and wire.transport.sent[:13] == sent and wire.limits == limits
        wire.at.check_deadlines(due + 1)
        assert wire.taken() == [] and wire.limits == limits
        await wire.run_ready()
        for _, response in wire.requests:
            response.cancel()

    driven(run)


def test_no_limit_while_an_earlier_response_is_due() -> None:
    async def run() -> None:
        wire = await Wire().feed(GET + HEAD)
        wire.taken()
        wire.at.check_deadlines(1000.0)
        assert wire.taken() == [] and wire.limits == (120, None, None)
        await wire.respond(0)
        wire.at.check_deadlines(1000.0)
        assert wire.taken() == ["close"]

    driven(run)


def test_a_closing_connection_gets_a_limit_for_its_last_bytes() -> None:
    async def run() -> None:
        wire = Wire()
        wire.transport.closing = True
        wire.at.check_deadlines(103.0)
        assert wire.limits == (110, 133, None)
        wire.at.check_deadlines(120.0)
        assert wire.limits == (110, 133, None) and wire.taken() == []
        wire.at.check_deadlines(133.0)
        assert wire.taken() == ["abort"]

    driven(run)


def test_a_client_that_does_not_read() -> None:
    async def run() -> None:
        wire = Wire()
        wire.at.pause_writing()
        assert wire.limits == (110, 130, None) and wire.at.flow.write_paused
        wire.now = 105.0
        wire.at.pause_writing()
        assert wire.limits == (110, 130, None)
        wire.at.resume_writing()
        assert wire.limits == (110, None, None) and not wire.at.flow.write_paused
        wire.at.pause_writing()
        wire.transport.closing = True
        wire.at.resume_writing()
        assert wire.limits == (110, 135, None)

    driven(run)


@pytest.mark.parametrize("name", ["header_timeout", "body_timeout", "write_timeout", "idle_timeout"])
@pytest.mark.parametrize("seconds, interval", [(2.0, 0.5), (4.0, 1.0), (100.0, 1.0)])
def test_how_often_the_limits_are_checked(name: str, seconds: float, interval: float) -> None:
    """Four times in the shortest limit, and at least once a second."""
    limits = dict.fromkeys(("header_timeout", "body_timeout", "write_timeout", "idle_timeout"), 1000.0)
    assert protocol._TimeoutTimer(Settings(**{**limits, name: seconds}))._interval == interval  # type: ignore[arg-type]


def test_one_timer_checks_all_connections(caplog: pytest.LogCaptureFixture) -> None:
    """An error of one connection does not keep the others from being checked; without connections the timer stops."""
    checked, later = list[tuple[str, float]](), list[tuple[float, Any]]()

    def broken(now: float) -> None:
        checked.append(("broken", now))
        raise ValueError

    loop: Any = SimpleNamespace(time=lambda: 7.0, call_later=lambda delay, call, *args: later.append(
        (delay, lambda: call(*args))))
    timer = protocol._TimeoutTimer(SETTINGS)
    found = [SimpleNamespace(check_deadlines=broken),
             SimpleNamespace(check_deadlines=lambda now: checked.append(("sound", now)))]
    timer.start(loop, found)
    timer.start(loop, found)
    assert [delay for delay, _ in later] == [1.0]
    with caplog.at_level(logging.ERROR, "mpool.server"):
        later.pop()[1]()
    assert checked == [("broken", 7.0), ("sound", 7.0)] and len(caplog.records) == 1
    assert [delay for delay, _ in later] == [1.0]
    found.clear()
    later.pop()[1]()
    assert later == [] and len(checked) == 2
    timer.start(loop, found)
    assert len(later) == 1


# ---- reading -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("size, calls", [(64 << 10, []), ((64 << 10) + 1, ["pause"])])
def test_reading_stops_while_requests_wait(size: int, calls: list[str]) -> None:
    """At most 64 KiB are kept unparsed behind a request that waits for its turn."""
    async def run() -> None:
        wire = await Wire().feed(GET + GET)
        assert len(wire.requests) == 1 and len(wire.at.pipeline) == 1
        wire.taken()
        rest = (GET * (size // len(GET) + 1))[:size]
        await wire.feed(rest)
        assert wire.taken() == calls and len(wire.at._unparsed) == size
        wire.at.body_is_read()
        assert wire.taken() == []  # it is not paused, or has too much
        await wire.respond(0)
        assert len(wire.requests) == 2 and wire.at.pipeline and len(wire.at._unparsed) < size
        assert wire.taken() == (["resume"] if calls else [])  # the application of the second request reads
        wire.at.connection_lost(None)
        for _, response in wire.requests:
            response.cancel()
        await wire.run_ready()

    driven(run)


@pytest.mark.parametrize("refused, closing, unparsed, resumed", [
    (False, False, 64 << 10, True), (False, False, (64 << 10) + 1, False), (True, False, 0, False),
    (False, True, 0, False)])
def test_reading_continues_after_a_whole_body(refused: bool, closing: bool, unparsed: int, resumed: bool) -> None:
    async def run() -> None:
        wire = Wire()
        wire.at.flow.pause_reading()
        wire.at._unparsed, wire.transport.closing = b"x" * unparsed, closing
        wire.at.refusal = protocol.Refusal("bad_request") if refused else None
        wire.at.body_is_read()
        assert wire.taken() == ["pause"] + ["resume"] * resumed

    driven(run)


def test_reading_continues_after_a_response() -> None:
    async def run() -> None:
        wire = await Wire().feed(GET)
        wire.at.flow.pause_reading()
        await wire.respond()
        assert wire.taken()[-2:] == ["pause", "resume"]

    driven(run)


# ---- ends ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("others, refused", [(1, False), (2, True)])
def test_connections_above_the_limit(others: int, refused: bool) -> None:
    async def run() -> None:
        wire = Wire(others=others)
        assert wire.taken() == ["close"] * refused
        assert wire.transport.sent.startswith(b"HTTP/1.1 503 Service Unavailable\r\n") is refused
        assert (b"\r\nretry-after: 1\r\n" in wire.transport.sent) is refused
        assert wire.limits == ((None, 130, None) if refused else (110, None, None))
        assert (b"\r\nconnection: close\r\n" in wire.transport.sent) is refused

    driven(run)


def test_a_refused_request_after_one_that_is_served() -> None:
    """The refusal is sent after the earlier response, and further input is ignored."""
    async def run() -> None:
        wire = await Wire().feed(GET)
        wire.taken()
        await wire.feed(HEAD + b"abcdnonsense\r\n\r\n")
        assert wire.transport.sent == b"" and len(wire.requests) == 1
        await wire.respond(0)
        assert len(wire.requests) == 2
        await wire.respond(1)
        assert wire.transport.sent.count(b"HTTP/1.1 200") == 2 and wire.transport.sent.count(b"HTTP/1.1 400") == 1
        assert wire.taken()[-1] == "close"
        sent = wire.transport.sent
        await wire.feed(GET)
        assert wire.transport.sent == sent and len(wire.requests) == 2

    driven(run)


def test_a_refused_body_takes_its_request_along() -> None:
    """A request whose body is refused while it waits for its turn never reaches the application."""
    async def run() -> None:
        wire = await Wire().feed(GET + HEAD)
        wire.taken()
        assert len(wire.at.pipeline) == 1 and wire.at._phase == protocol._BODY
        wire.at._refuse(protocol.Refusal("bad_request"))
        assert wire.taken() == ["pause"] and not wire.at.pipeline and wire.at._phase == protocol._HEAD
        assert wire.transport.sent == b"" and wire.limits == (None, None, None)
        await wire.respond(0, at=103)
        assert wire.transport.sent.count(b"HTTP/1.1 400") == 1 and len(wire.requests) == 1
        assert wire.taken() == ["close"] and wire.limits == (None, 133, None)

    driven(run)


@pytest.mark.parametrize("size, refused", [(2 * SETTINGS.max_body, False), (2 * SETTINGS.max_body + 1, True)])
def test_a_body_is_read_up_to_twice_its_limit(size: int, refused: bool) -> None:
    async def run() -> None:
        wire = await Wire().feed(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n")
        await wire.feed(b"x" * size)
        assert (wire.transport.sent.startswith(b"HTTP/1.1 400 "), "close" in wire.taken()) == (refused, refused)
        if refused:  # the application learns that the rest of the body will not arrive
            assert wire.at.cycle.disconnected
        for _, response in wire.requests:
            response.cancel()
        wire.at.connection_lost(None)
        await wire.run_ready()

    driven(run)


def test_a_refusal_after_the_response_began_aborts() -> None:
    async def run() -> None:
        wire = await Wire().feed(HEAD)
        wire.at.cycle.response_started = True
        wire.taken()
        wire.at._refuse(protocol.Refusal("request_timeout"))
        assert wire.taken() == ["abort"] and wire.transport.sent == b"" and wire.limits == (None, 130, None)
        wire.at.connection_lost(None)
        await wire.run_ready()
        for _, response in wire.requests:
            response.cancel()

    driven(run)


def test_a_half_closed_client_gets_its_response() -> None:
    """Probes follow after 5 ms, 50 ms, 0.5 s, and then every 5 s, until the response is complete."""
    async def run() -> None:
        wire = await Wire().feed(GET)
        assert wire.at.eof_received() is True and wire.taken() == []
        pauses = []
        for _ in range(6):
            delay, probe = wire.later.pop()
            pauses.append(delay)
            probe()
        assert pauses == pytest.approx([0.005, 0.05, 0.5, 5.0, 5.0, 5.0])
        assert wire.transport.sent == b"HTTP/1.1 100 Continue\r\n\r\n" * 7
        await wire.respond()
        assert wire.transport.sent.endswith(b"ok") and wire.taken() == ["close"] and wire.limits == (None, None, None)
        count = len(wire.later)
        wire.later.pop()[1]()
        assert len(wire.later) == count - 1  # no further probe

    driven(run)


def test_a_client_that_went_away() -> None:
    """A socket that the client reset is aborted with the first probe that shows it; its request learns of that."""
    async def run() -> None:
        wire = await Wire().feed(GET)
        called = list[int]()
        wire.at.on_disconnect = lambda: called.append(1)
        assert wire.at.eof_received() is True
        wire.transport.state = CLOSED
        wire.later.pop()[1]()
        assert wire.taken() == ["abort"] and len(wire.later) <= 1
        cycle = wire.at._active
        wire.at.connection_lost(ConnectionResetError())
        assert called == [1] and wire.at.on_disconnect is None and cycle.disconnected
        wire.at.connection_lost(ConnectionResetError())
        assert called == [1]
        wire.requests[0][1].cancel()
        await wire.run_ready()

    driven(run)


def test_nothing_is_written_to_a_lost_connection(caplog: pytest.LogCaptureFixture) -> None:
    """The connection reports its loss one iteration of the event loop after the write that failed. Until then, asyncio
    logs "socket.send() raised exception." for each write after the fifth."""
    async def run() -> None:
        made: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        class Kept(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                made.set_result(transport)

        server = await asyncio.get_running_loop().create_server(Kept, "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            transport = await made
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with a reset
        wire = await Wire().feed(GET)
        cycle = wire.at._active
        cycle.transport = transport
        transport.pause_reading()  # only a write shows the reset
        cycle._start_response(200, [(b"content-type", b"text/event-stream")])
        for _ in range(50):
            cycle._send_body(b"data: x\n\n", True)
            assert cycle.probe()
        assert transport.is_closing()
        transport.abort()
        server.close()
        wire.requests[0][1].cancel()
        await wire.run_ready()

    driven(run)
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_a_lost_connection_disconnects_the_request_that_is_served() -> None:
    """The next request, which the client sent at the same time, has been parsed and waits."""
    async def run() -> None:
        wire = await Wire().feed(GET + GET)
        served = wire.at._active
        assert served is not None and served is not wire.at.cycle and not served.disconnected
        wire.at.connection_lost(None)
        assert served.disconnected
        wire.requests[0][1].cancel()
        await wire.run_ready()

    driven(run)


@pytest.mark.parametrize("data, responded", [(b"", False), (HEAD[:9], False), (HEAD, False), (GET, True)])
def test_the_end_of_input_closes_a_connection_that_owes_nothing(data: bytes, responded: bool) -> None:
    async def run() -> None:
        wire = Wire()
        if data:
            await wire.feed(data)
        if responded:
            await wire.respond()
        assert wire.at.eof_received() is False and not wire.at._half_closed
        wire.at.connection_lost(None)
        for _, response in wire.requests:
            response.cancel()
        await wire.run_ready()

    driven(run)
