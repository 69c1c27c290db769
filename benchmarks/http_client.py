"""A bounded generator of requests on loopback: plain sockets, so that what is measured is the server."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from dataclasses import dataclass
from typing import Any


def request(port: int, path: str, body: dict[str, Any]) -> bytes:
    """A request as bytes; the connection stays open."""
    data = json.dumps(body).encode()
    return (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


class Connection:
    """One connection, and one thread that waits for its answers."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._port = port

    def post(self, path: str, body: dict[str, Any]) -> tuple[float, bytes]:
        """Seconds from the request's first byte to the answer's last, and the answer's body.

        Raises:
            RuntimeError: the status is not 200.
        """
        sent = request(self._port, path, body)
        began = time.perf_counter()
        self._socket.sendall(sent)
        data = self._socket.recv(1 << 16)
        while b"\r\n\r\n" not in data:
            data += self._more()
        head, _, rest = data.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        while len(rest) < length:
            rest += self._more()
        spent = time.perf_counter() - began
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(rest.decode(errors="replace"))
        return spent, rest

    def stream(self, path: str, body: dict[str, Any]) -> list[float]:
        """When pieces of a streamed answer came, in seconds after the request; as many as there were events in all.

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
        """Leaves."""
        self._socket.close()


@dataclass(frozen=True)
class Load:
    """What clients saw that asked at the same time, each for one answer after the other.

    Attributes:
        seconds: from the first request to the last answer.
        answers: how many there were.
        first: seconds from each request to its first piece.
    """

    seconds: float
    answers: int
    first: list[float]


async def load(port: int, path: str, bodies: list[list[dict[str, Any]]], seconds: float) -> Load:
    """One client a list of bodies: each asks at least once, and begins no further answer after so many seconds.

    Raises:
        RuntimeError: a status is not 200, an answer has no end, or a client ran out of bodies.
    """
    began = time.perf_counter()
    first: list[float] = []

    async def client(own: list[dict[str, Any]]) -> None:
        for at, body in enumerate(own):
            if at and time.perf_counter() - began >= seconds:
                return
            first.append(await _answer(port, path, body))
        raise RuntimeError("a client has asked everything that it had to ask: fewer seconds, or longer answers")

    await asyncio.gather(*(client(own) for own in bodies))
    return Load(time.perf_counter() - began, len(first), first)


async def _answer(port: int, path: str, body: dict[str, Any]) -> float:
    """Seconds to the first piece of an answer, which is read to its end; on a connection of its own."""
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
        raise RuntimeError("an answer ended before it had all tokens")
    return found
