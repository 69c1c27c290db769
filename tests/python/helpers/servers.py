"""A server for tests: on a free port of loopback, over small models, in a thread of this process or a process of its
own; and how it is spoken to."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("sse_starlette")
pytest.importorskip("msgspec")

import mpool  # noqa: E402
from mpool.server.serving import Serving  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402


@contextmanager
def serving(models: list[str], config: mpool.PoolConfig | None = None, catalogue: bool = False,
            **settings: Any) -> Iterator[Serving]:
    """A server that runs for as long as the ``with`` lasts, and then has ended as it should."""
    pool = mpool.Pool(config or mpool.PoolConfig(shutdown_grace=1.0, offline=True))
    server = Serving(Settings(**{"port": 0, **settings}), pool, models, catalogue)
    with running(server.run, server.stop):
        yield server


@contextmanager
def running(run: Callable[[Callable[[], object]], None], stop: Callable[[], None]) -> Iterator[None]:
    """``run(ready)`` on a thread of its own, that is ready; at the end it has ended because of ``stop()``."""
    up = threading.Event()
    thread = threading.Thread(target=run, args=(up.set,), name="server")
    thread.start()
    try:
        assert up.wait(30)
        yield
    finally:
        stop()
        thread.join(30)
        assert not thread.is_alive(), "it does not end"


class Process:
    """``mpool COMMAND`` as a process of its own, from when it can be asked on; ``port``: where it is. ``more``: of
    Popen."""

    def __init__(self, command: str, *arguments: str, **more: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mpool", command, "--port", "0", *arguments], text=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more})
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " on http://127.0.0.1:" in line, (line, self.process.stderr and self.process.stderr.read())
        self.port = int(line.rsplit(":", 1)[1])

    def end(self) -> tuple[int, str]:
        """Waits until it has ended: its exit code, and what it said on standard error."""
        _, said = self.process.communicate(timeout=60)
        return self.process.returncode, said

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


async def streamed(port: int, body: dict[str, Any]) -> tuple[str, str]:
    """Text of a streamed chat, and how it ended; by a plain socket, so that the load comes from the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = json.dumps({**body, "stream": True}).encode()
    writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
                 f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
    text, end = "", ""
    try:
        async for line in reader:
            if line.startswith(b"data: [DONE]"):
                end += "done"
            elif line.startswith(b"data: "):
                piece = json.loads(line[6:])
                if "error" in piece:
                    end += piece["error"]["code"]
                elif piece["choices"]:
                    text += piece["choices"][0]["delta"].get("content", "")
    finally:
        writer.close()
    return text, end


class Raw:
    """A socket to a server, to say what no client library says."""

    def __init__(self, server: Serving | Process, timeout: float = 20.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout)
        self.host = f"127.0.0.1:{server.port}"
        self.rest = b""  # what came behind an answer

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> Raw:
        """Writes; a server that has closed already is no error."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass
        return self

    def request(self, path: str, body: bytes | None = None, *lines: str, method: str = "", host: str | None = None,
                length: int | None = None, kind: str = "application/json") -> Raw:
        """Writes a request."""
        head = [f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1", f"Host: {host or self.host}"]
        if body is not None:
            head += [f"Content-Type: {kind}", f"Content-Length: {len(body) if length is None else length}"]
        return self.send("\r\n".join([*head, *lines, "", ""]).encode("latin-1") + (body or b""))

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of one answer of a stated length, or chunked."""
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

    def _read(self) -> bytes:
        try:
            return self.socket.recv(1 << 16)
        except ConnectionResetError:
            return b""

    def closed(self, within: float = 20.0) -> bool:
        """Whether the server closes the connection, whatever it says before."""
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
    """Status and parsed answer of a request on a connection of its own."""
    with Raw(server) as raw:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        status, _, found = raw.request(path, data, *lines).answer()
    return status, json.loads(found)


def idle(server: Serving, seconds: float = 10.0) -> None:
    """Waits until nothing is computed, nothing streamed and no request in flight: its client may have its answer."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        state = server.state
        if not state.streams and not state.running and not any(row.running or row.queued for row in state.pool.ps()):
            return
        time.sleep(0.005)
    raise AssertionError(f"something still runs: {server.state.streams} streams\n{server.state.pool.ps()}")
