"""Fetches images from http and https URLs, with limits on time and bytes.

This is off by default: a program that forwards URLs from its users lets them reach every host that this machine can
reach.

One deadline covers the whole fetch: name resolution, connections, TLS, proxies, headers, redirects and bodies. Every
wait for a socket is limited to the remaining time, so a server cannot extend the fetch by sending single bytes.

With ``public``, a fetch uses https only, ignores proxies, and connects only to public addresses. The check follows the
resolution, and the connection goes to the checked address, so a name that resolves differently each time does not help.
"""

from __future__ import annotations

import functools
import http.client
import io
import ipaddress
import socket
import ssl
import time
import urllib.error
import urllib.request
from typing import Any

from ..errors import DownloadError, InvalidArgument, MpoolError
from ..host.resources import start_thread

#: Maximum duration of a fetch in seconds, unless the request's timeout is shorter.
SECONDS = 30.0
_CHUNK = 1 << 16
#: The addresses of the internet: IPv4, and what IANA assigns to it of IPv6 (ipv6-address-space).
_INTERNET = (ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("2000::/3"))
#: Networks in them that do not belong to the internet, from IANA's iana-ipv4-special-registry and
#: iana-ipv6-special-registry, and multicast. Python's ``is_global`` differs between its versions, which omit 3fff::/20
#: or fec0::/10. 192.0.0.0/24 and 2001::/23 are refused whole although single addresses in them are public: no image has
#: these anycast addresses.
_SPECIAL = tuple(map(ipaddress.ip_network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/4", "240.0.0.0/4", "2001::/23", "2001:db8::/32", "3fff::/20")))
#: Prefix of IPv6 addresses whose last 32 bits are an IPv4 address (RFC 6052). The prefixes of RFC 8215 (64:ff9b:1::/48)
#: are those of private networks.
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")

class _Deadline:
    """Deadline of a fetch."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds

    def left(self) -> float:
        """Return the remaining seconds.

        Raises:
            TimeoutError: the deadline has passed.
        """
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("no response in time")
        return left


def _resolve(host: str, port: int, deadline: _Deadline) -> list[Any]:
    """Return the addresses of a host. The system's resolver has no timeout, so it runs on a thread that is abandoned at
    the deadline."""
    found: list[Any] = []

    def look_up() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    thread = start_thread(look_up, "mpool-resolver")
    thread.join(deadline.left())
    if not found:
        raise TimeoutError("no response in time")
    if isinstance(found[0], Exception):
        raise found[0]
    addresses: list[Any] = found[0]
    return addresses


def is_public(address: str) -> bool:
    """Return True if an IP address belongs to the internet, and not to this machine or a private network.

    An IPv6 address that contains IPv4 addresses (mapped, 6to4, NAT64, Teredo) is public if these are.
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = [one for one in (found.ipv4_mapped, found.sixtofour, *(found.teredo or ())) if one is not None]
        if found in _NAT64:
            inner.append(ipaddress.IPv4Address(int(found) & 0xFFFFFFFF))
        if inner:
            return all(is_public(str(one)) for one in inner)
    return any(found in network for network in _INTERNET) and not any(found in network for network in _SPECIAL)


def _connect(host: str, port: int, deadline: _Deadline, public: bool) -> socket.socket:
    failure: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in _resolve(host, port, deadline):
        if public and not is_public(address[0]):
            failure = OSError(f"{host} has an address that is not public")
            continue
        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            failure = error
            continue
        try:
            sock.settimeout(deadline.left())
            sock.connect(address)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    raise failure


class _DeadlineReader(io.RawIOBase):
    """Reads from a socket until the deadline."""

    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self._sock, self._deadline, self._raw = sock, deadline, sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(self._deadline.left())
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _DeadlineSocket:
    """The methods of a socket that http.client uses; each wait ends at the deadline."""

    def __init__(self, sock: socket.socket, deadline: _Deadline) -> None:
        self.sock, self._deadline = sock, deadline

    def sendall(self, data: Any) -> None:
        self.sock.settimeout(self._deadline.left())
        self.sock.sendall(data)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_DeadlineReader(self.sock, self._deadline))

    def close(self) -> None:
        self.sock.close()


class _HttpConnection(http.client.HTTPConnection):
    def __init__(self, host: str, *, deadline: _Deadline, public: bool, **rest: Any) -> None:
        super().__init__(host, **rest)
        self._deadline, self._public = deadline, public

    def connect(self) -> None:
        self.sock: Any = _DeadlineSocket(_connect(self.host, self.port, self._deadline, self._public),
                                         self._deadline)
        if self._tunnel_host:  # type: ignore[attr-defined]
            self._tunnel()  # type: ignore[attr-defined]


class _HttpsConnection(_HttpConnection):
    default_port = http.client.HTTPS_PORT

    def connect(self) -> None:
        super().connect()
        sock, name = self.sock.sock, self._tunnel_host or self.host  # type: ignore[attr-defined]
        sock.settimeout(self._deadline.left())
        try:
            secured = ssl.create_default_context().wrap_socket(sock, server_hostname=name)
        except BaseException:
            sock.close()
            raise
        self.sock = _DeadlineSocket(secured, self._deadline)


class _HttpHandler(urllib.request.HTTPHandler):
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__()
        self._connection: Any = functools.partial(_HttpConnection, deadline=deadline, public=False)

    def http_open(self, req: Any) -> Any:
        return self.do_open(self._connection, req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, deadline: _Deadline, public: bool) -> None:
        super().__init__()
        self._connection: Any = functools.partial(_HttpsConnection, deadline=deadline, public=public)

    def https_open(self, req: Any) -> Any:
        return self.do_open(self._connection, req)


class _RedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows redirects to the allowed schemes only, five at most."""

    max_redirections = 5

    def __init__(self, schemes: tuple[str, ...]) -> None:
        self._schemes = schemes

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        fp.close()  # else urllib would read the body of the redirect, however large it is
        if not newurl.lower().startswith(self._schemes):
            raise urllib.error.HTTPError(newurl, code, "redirected to another scheme", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(url: str, name: str, most: int, timeout: float | None = None, public: bool = False) -> bytes:
    """Fetch the content of a URL.

    Args:
        url: an http or https URL.
        name: name of the image, for error messages.
        most: maximum number of bytes.
        timeout: maximum duration in seconds, redirects included. ``SECONDS`` is the default and the maximum.
        public: True: connect to public addresses only, with https and without proxies.

    Raises:
        DownloadError: the server cannot be reached, responds with an error, or does not finish in time.
        InvalidArgument: the content has more than ``most`` bytes.
    """
    deadline = _Deadline(SECONDS if timeout is None else min(timeout, SECONDS))
    handlers: list[Any] = [_HttpsHandler(deadline, public)]
    if public:
        if not url.lower().startswith("https://"):
            raise InvalidArgument(param=name, got="another URL", allowed="an https URL")
        handlers += [_RedirectHandler(("https://",)), urllib.request.ProxyHandler({})]
    else:
        handlers += [_RedirectHandler(("http://", "https://")), _HttpHandler(deadline)]
    opener = urllib.request.build_opener(*handlers)
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "mpool", "Accept": "image/*"})
        with opener.open(request) as response:
            found = bytearray()
            while chunk := response.read1(_CHUNK):
                found += chunk
                if len(found) > most:
                    raise InvalidArgument(param=name, got=f"more than {most:,} bytes",
                                          allowed=f"at most {most:,} bytes")
            return bytes(found)
    except MpoolError:
        raise
    except urllib.error.HTTPError as error:
        raise DownloadError(f"`{name}` could not be fetched: the server responded with status {error.code}",
                            param=name) from None
    except (OSError, http.client.HTTPException, ValueError, UnicodeError) as error:
        why = "no response in time" if isinstance(error, TimeoutError) or isinstance(
            getattr(error, "reason", None), TimeoutError) else "the server cannot be reached"
        raise DownloadError(f"`{name}` could not be fetched: {why}", param=name) from None
