"""Servers for tests on a free port of the loopback address, in a thread or a separate process, and their clients."""

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("sse_starlette")
pytest.importorskip("msgspec")

import mpool  # noqa: E402
from mpool.server.serving import Serving  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402

from waiting import busy, until  # noqa: E402


@contextmanager
def serving(models: list[str], config: mpool.PoolConfig | None = None, catalogue: bool = False,
            adapters: Sequence[str] = (), **settings: Any) -> Iterator[Serving]:
    """Run a server inside a ``with`` block, and check that it stops at the end."""
    pool = mpool.Pool(config or mpool.PoolConfig(shutdown_grace=1.0, offline=True))
    server = Serving(Settings(**{"port": 0, **settings}), pool, models, catalogue, adapters=adapters)
    with running(server.run, server.stop):
        yield server


@contextmanager
def limits(server: Serving, **seconds: float) -> Iterator[None]:
    """Change time limits of a server inside a ``with`` block: limits that begin there. A client that a busy machine
    delays needs the usual limits before and after it."""
    settings = server.state.settings
    before = {name: getattr(settings, name) for name in seconds}
    for name, value in seconds.items():
        object.__setattr__(settings, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(settings, name, value)


@contextmanager
def running(run: Callable[[Callable[[], object]], None], stop: Callable[[], None]) -> Iterator[None]:
    """Call ``run(ready)`` in a thread and wait for ``ready()``. At the end of the block, call ``stop()`` and check that
    the thread ends."""
    up = threading.Event()
    thread = threading.Thread(target=run, args=(up.set,), name="server")
    thread.start()
    try:
        assert up.wait(30)
        yield
    finally:
        stop()
        thread.join(30)
        assert not thread.is_alive(), "the server does not stop within 30 s"


class Process:
    """``mpool COMMAND`` in a separate process. The constructor returns once the server accepts connections.

    Attributes:
        port: port of the server.
    """

    def __init__(self, command: str, *arguments: str, **more: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpool", command, "--port", "0", *arguments], text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " on http://127.0.0.1:" in line, (line, self.process.stderr and self.process.stderr.read())
        self.port = int(line.rsplit(":", 1)[1])

    def end(self) -> tuple[int, str]:
        """Wait for the end of the process. Returns its exit code and standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


async def streamed(port: int, body: dict[str, Any], begun: Callable[[], None] = lambda: None) -> tuple[str, str]:
    """Return the text of a streamed chat completion, and its end: "done" or an error code. Calls `begun` when the
    response begins.

    Uses a plain socket, so that the client adds little load.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({**body, "stream": True}).encode()
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                 f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    text, end = "", ""
    try:
        async for line in reader:
            if line.startswith(b"HTTP/1.1 200"):
                begun()
            elif line.startswith(b"data: [DONE]"):
                end += "done"
            elif line.startswith(b"data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    end += chunk["error"]["code"]
                elif chunk["choices"]:
                    text += chunk["choices"][0]["delta"].get("content", "")
    finally:
        writer.close()
    return text, end


class Raw:
    """A socket to a server, for requests that no client library sends."""

    def __init__(self, server: Serving | Process, timeout: float = 20.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout)
        self.host = f"127.0.0.1:{server.port}"
        self.rest = b""  # bytes received after a response

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> "Raw":
        """Send bytes. A connection that the server has closed is not an error."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return self

    def request(self, path: str, body: bytes | None = None, *lines: str, method: str = "", host: str | None = None,
                length: int | None = None, kind: str = "application/json") -> "Raw":
        """Send a request."""
        head = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", f"Host: {host or self.host}"]
        if body is not None:
            head += [f"Content-Type: {kind}", f"Content-Length: {len(body) if length is None else length}"]
        return self.send("\r\n".join([*head, *lines, "", ""]).encode("latin-1") + (body or b""))

    def response(self) -> tuple[int, dict[str, str], bytes]:
        """Receive a response, chunked or with a content length. Returns status, headers and body."""
        data, self.rest = self.rest, b""
        while b"\r\n\r\n" not in data:
            part = self._read()
            if not part:
                raise ConnectionError(f"closed after {data!r}")
            data += part
        head, _, body = data.partition(b"\r\n\r\n")
        first, *rest = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        if headers.get("transfer-encoding") == "chunked":
            while not body.endswith(b"0\r\n\r\n"):
                part = self._read()
                if not part:
                    raise ConnectionError(f"closed after {body!r}")
                body += part
            return int(first.split()[1]), headers, _unchunked(body)
        length = int(headers.get("content-length", 0))
        while len(body) < length:
            part = self._read()
            if not part:
                raise ConnectionError(f"closed after {body!r}")
            body += part
        body, self.rest = body[:length], body[length:]
        return int(first.split()[1]), headers, body

    answer = response

    def drip(self, wanted: bytes) -> bytes:
        """Send single bytes until the server has sent ``wanted``. Returns what it has sent."""
        def more() -> bool:
            self.send(b"a")
            try:
                part = self.socket.recv(1 << 16)
                assert part or wanted in self.rest, f"closed after {self.rest!r}"
                self.rest += part
            except TimeoutError:
                pass
            return wanted in self.rest

        self.socket.settimeout(0.05)
        until(more)
        return self.rest

    def _read(self) -> bytes:
        try:
            return self.socket.recv(1 << 16)
        except ConnectionResetError:
            return b""

    def closed(self, within: float = 20.0) -> bool:
        """Return True if the server closes the connection within this time. Discards received bytes."""
        self.socket.settimeout(within)
        try:
            while self.socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True


def _unchunked(data: bytes) -> bytes:
    out = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            return out
        out, data = out + data[:count], data[count + 2:]


def ask(server: Serving | Process, path: str, body: Any = None, *lines: str) -> tuple[int, Any]:
    """Send a request on a new connection. Returns the status and the parsed JSON response."""
    with Raw(server) as raw:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        status, _, found = raw.request(path, data, *lines).response()
    return status, json.loads(found)


def server_idle(server: Serving, seconds: float = 10.0) -> None:
    """Wait until the server has no running request or stream. A client may get its response slightly earlier."""
    state = server.state
    until(lambda: not (state.streams or state.running or busy(state.pool)), seconds,
          lambda: f"{state.streams} streams\n{state.pool.ps()}")
