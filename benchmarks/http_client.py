"""HTTP client on loopback with a bounded number of requests. Plain sockets keep the client's share of the time
small.
"""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


def request(port: int, path: str, body: dict[str, Any]) -> bytes:
    """Encode a request; the connection stays open."""
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


def length_of(head: bytes) -> int:
    """Return the length of the body that the head of a response announces."""
    return int(head.lower().partition(b"content-length:")[2].split()[0])


class Loading(RuntimeError):
    """The server accepts connections, but still loads its model (HTTP 503)."""


class Connection:
    """One connection, used by one blocking thread."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = port

    def post(self, path: str, body: dict[str, Any]) -> tuple[float, bytes]:
        """Send a request. Return the seconds from its first byte to the response's last byte, and the response body.

        Raises:
            Loading: the status is 503.
            RuntimeError: the status is another one than 200.
        """
        sent = request(self._port, path, body)
        began = time.perf_counter()
        self._socket.sendall(sent)
        data = self._socket.recv(1 << 16)
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, rest = data.partition(b"\r\n\r\n")
        length = length_of(head)
        while len(rest) < length:
            rest += self._more()
        spent = time.perf_counter() - began
        if not head.startswith(b"HTTP/1.1 200"):
            refused = Loading if head.startswith(b"HTTP/1.1 503") else RuntimeError
            raise refused(rest.decode(errors="replace"))
        return spent, rest

    def stream(self, path: str, body: dict[str, Any]) -> list[float]:
        """Send a streaming request. Return the arrival time of every event, in seconds after the request.

        Raises:
            RuntimeError: the status is not 200.
        """
        sent = request(self._port, path, {**body, "stream": True})
        began = time.perf_counter()
        self._socket.sendall(sent)
        times: list[float] = []
        last = b""
        while b"data: [DONE]" not in last:
            data = self._more()
            now = time.perf_counter() - began
            if not times and not last and not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(data.decode(errors="replace"))
            seen = last[-16:]
            times += [now] * ((seen + data).count(b"data: {") - seen.count(b"data: {"))
            last = seen + data
        while not last.endswith(b"0\r\n\r\n"):
            last = last[-16:] + self._more()
        return times

    def _more(self) -> bytes:
        data = self._socket.recv(1 << 16)
        if not data:
            raise RuntimeError("the server closed the connection")
        return data

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@dataclass(frozen=True)
class Load:
    """Result of concurrent clients, each of which sends one request after the other.

    Attributes:
        seconds: time from the first request to the end of the last response.
        responses: number of responses.
        first: seconds from each request to its first chunk.
    """

    seconds: float
    responses: int
    first: list[float]


async def load(port: int, path: str, bodies: list[list[dict[str, Any]]], seconds: float) -> Load:
    """Run one client per list of bodies. Each client sends at least one request, and starts no further request after
    ``seconds`` seconds.

    Raises:
        RuntimeError: a status is not 200, a response is incomplete, or a client ran out of bodies.
    """
    began = time.perf_counter()
    first: list[float] = []

    async def client(own: list[dict[str, Any]]) -> None:
        for at, body in enumerate(own):
            if at and time.perf_counter() - began >= seconds:
                return
            first.append(await _stream_once(port, path, body))
        raise RuntimeError("a client ran out of prompts: lower --seconds or raise --tokens")

    await asyncio.gather(*(client(own) for own in bodies))
    return Load(time.perf_counter() - began, len(first), first)


async def repeat(port: int, path: str, bodies: list[Iterator[dict[str, Any]]],
                 seconds: float) -> tuple[float, list[float]]:
    """Run one client per iterator of bodies, each on one connection, until ``seconds`` seconds have passed.

    Returns:
        the seconds from the first request to the end of the last response, and the seconds of each request.

    Raises:
        RuntimeError: a status is not 200.
    """
    began = time.perf_counter()
    spent: list[float] = []

    async def client(own: Iterator[dict[str, Any]]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while time.perf_counter() - began < seconds:
                sent = request(port, path, next(own))
                start = time.perf_counter()
                writer.write(sent)
                head = await reader.readuntil(b"\r\n\r\n")
                rest = await reader.readexactly(length_of(head))
                spent.append(time.perf_counter() - start)
                if not head.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(rest.decode(errors="replace"))
        finally:
            writer.close()

    await asyncio.gather(*(client(own) for own in bodies))
    return time.perf_counter() - began, spent


async def _stream_once(port: int, path: str, body: dict[str, Any]) -> float:
    """Send a request on a new connection and read its whole response. Return the seconds to the first chunk."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(request(port, path, {**body, "stream": True}))
    head = await reader.readuntil(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError((head + await reader.read(4096)).decode(errors="replace"))
    found, ends = 0.0, False
    try:
        async for line in reader:
            if line.startswith(b"data: {"):
                found = found or time.perf_counter() - began
                if b'"finish_reason"' in line and json.loads(line[6:])["choices"][0]["finish_reason"] == "length":
                    ends = True
            elif line.startswith(b"data: [DONE]"):
                break
    finally:
        writer.close()
    if not ends:
        raise RuntimeError("a response ended before it had all tokens")
    return found
