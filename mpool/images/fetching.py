"""Images from URLs: http and https, limited in time and bytes. Only on request: a program that forwards URLs of others
lets them reach every host that this machine reaches.

One deadline holds for all of a fetch: names, connections, TLS, proxies, headers, redirects, bodies. Each wait for a
socket gets the remaining time, so a server that sends single bytes gains none.
"""

from __future__ import annotations

import functools
import http.client
import io
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from typing import Any

from ..errors import DownloadError, InvalidArgument, MpoolError

#: Seconds in which an image has to come, unless the call has less.
SECONDS = 30.0
_CHUNK = 1 << 16


class _Deadline:
    """When a fetch has to be over."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until then.

        Raises:
            TimeoutError: there are none.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return left


def _resolved(host: str, port: int, deadline: _Deadline) -> list[Any]:
    """Addresses of a host. The system's resolver has no timeout: a thread waits for it and is abandoned at the
    deadline."""
    found: list[Any] = []

    def ask() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = threading.Thread(target=ask, name="mpool-resolver", daemon=True)
    thread.start()
    thread.join(deadline.left())
    if not found:
        raise TimeoutError("no answer in time")
    if isinstance(found[0], Exception):
        raise found[0]
    addresses: list[Any] = found[0]
    return addresses


def _connected(host: str, port: int, deadline: _Deadline) -> socket.socket:
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in _resolved(host, port, deadline):
        try:
            line = socket.socket(family, kind, protocol)
        except OSError as error:
            failure = error
            continue
        try:
            line.settimeout(deadline.left())
            line.connect(address)
            return line
        except OSError as error:
            line.close()
            failure = error
    raise failure


class _Reads(io.RawIOBase):
    """Reads a socket until the deadline."""

    def __init__(self, line: socket.socket, deadline: _Deadline) -> None:
        self._line, self._deadline, self._raw = line, deadline, line.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._line.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Line:
    """The part of a socket that http.client uses; each wait ends at the deadline."""

    def __init__(self, line: socket.socket, deadline: _Deadline) -> None:
        self.line, self._deadline = line, deadline

    def sendall(self, data: Any) -> None:
        self.line.settimeout(self._deadline.left())
        self.line.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Reads(self.line, self._deadline))

    def close(self) -> None:
        self.line.close()


class _Plain(http.client.HTTPConnection):
    def __init__(self, host: str, *, deadline: _Deadline, **rest: Any) -> None:
        super().__init__(host, **rest)
        self._deadline = deadline

    def connect(self) -> None:
        self.sock: Any = _Line(_connected(self.host, self.port, self._deadline), self._deadline)
        if self._tunnel_host:  # type: ignore[attr-defined]
            self._tunnel()  # type: ignore[attr-defined]


class _Secure(_Plain):
    default_port = http.client.HTTPS_PORT

    def connect(self) -> None:
        super().connect()
        line, name = self.sock.line, self._tunnel_host or self.host  # type: ignore[attr-defined]
        line.settimeout(self._deadline.left())
        try:
            secured = ssl.create_default_context().wrap_socket(line, server_hostname=name)
        except BaseException:
            line.close()
            raise
        self.sock = _Line(secured, self._deadline)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._connection: Any = functools.partial(_Plain, deadline=deadline)

    def http_open(self, req: Any) -> Any:
        return self.do_open(self._connection, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._connection: Any = functools.partial(_Secure, deadline=deadline)

    def https_open(self, req: Any) -> Any:
        return self.do_open(self._connection, req)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to http and https only."""

    max_redirections = 5

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        fp.close()  # else all that comes with the answer, however much it is, would be read
        if not newurl.lower().startswith(("http://", "https://")):
            raise urllib.error.HTTPError(newurl, code, "redirected elsewhere", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(url: str, name: str, most: int, timeout: float | None = None) -> bytes:
    """The bytes behind a URL.

    Raises:
        DownloadError: it could not be had in time, all redirects included.
        InvalidArgument: it has more than ``most`` bytes.
    """
    deadline = _Deadline(SECONDS if timeout is None else min(timeout, SECONDS))
    opener = urllib.request.build_opener(_Redirects(), _Http(deadline), _Https(deadline))
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "mpool", "Accept": "image/*"})
        with opener.open(request) as answer:
            found = bytearray()
            while chunk := answer.read1(_CHUNK):
                found += chunk
                if len(found) > most:
                    raise InvalidArgument(param=name, got=f"more than {most:,} bytes",
                                          allowed=f"at most {most:,} bytes")
            return bytes(found)
    except MpoolError:
        raise
    except urllib.error.HTTPError as error:
        raise DownloadError(f"{name} could not be fetched: the server answers {error.code}") from None
    except (OSError, http.client.HTTPException, ValueError, UnicodeError) as error:
        why = "no answer in time" if isinstance(error, TimeoutError) or isinstance(
            getattr(error, "reason", None), TimeoutError) else "the server cannot be reached"
        raise DownloadError(f"{name} could not be fetched: {why}") from None
