"""What the server can be told, and the token that lets clients in."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import secrets
import stat
from dataclasses import dataclass

from ..errors import FileError, InvalidArgument

#: Field -> (lowest, highest).
_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535), "max_body": (1024, 1 << 30), "max_text": (1, 1_000_000), "max_header": (1024, 1 << 20),
    "max_header_count": (8, 1000), "max_connections": (1, 100_000), "max_streams": (1, 100_000),
    "max_n": (1, 128), "max_tokens": (1, 2**31 - 1), "header_timeout": (0.05, 3600.0), "body_timeout": (0.05, 3600.0),
    "write_timeout": (0.05, 3600.0), "idle_timeout": (0.05, 3600.0), "ping": (0.05, 3600.0), "grace": (0.0, 3600.0),
}
_WHOLE = ("port", "max_body", "max_text", "max_header", "max_header_count", "max_connections", "max_streams", "max_n",
          "max_tokens")
_MAX_TOKEN = 4096


@dataclass(frozen=True)
class Settings:
    """Where the server listens, whom it lets in, and what one client may take. Immutable; checked when made.

    Attributes:
        host: address to listen on. Another than a loopback address needs a ``token``.
        port: 0: one that is free.
        token: what clients have to send as ``Authorization: Bearer TOKEN``, or browsers as a password, on every route
            but ``/health``; None: nothing, on loopback.
        allowed_hosts: further values of the header ``Host`` that are answered, beside the address itself and, on
            loopback or all addresses, ``localhost``: the name by which other machines reach the server, or what a proxy
            in front is called; with the port unless that is 80 or 443.
        allowed_origins: origins (``https://page.example``) whose pages may call the server from a browser; none is the
            default, and then no CORS header is ever sent.
        max_body: bytes of a request's body.
        max_text: characters of one text in it.
        max_header, max_header_count: bytes and lines of a request's head.
        max_connections: connections at once; further ones get 503.
        max_streams: answers that are being streamed at once; further ones get 503.
        max_n: answers or pictures a request.
        max_tokens: tokens that one answer may have; what is asked for beyond is cut.
        header_timeout, body_timeout: seconds for a request's head, and for its body, to arrive.
        write_timeout: seconds for which a client may leave an answer unread; then it is cut off.
        idle_timeout: seconds for which a connection may stay open without a request.
        ping: seconds without an event after which a stream of events gets a comment.
        grace: seconds that requests get to end when the server is stopped.

    Raises:
        InvalidArgument: a value is out of range, or another address than a loopback one has no token.
    """

    host: str = "127.0.0.1"
    port: int = 11435
    token: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body: int = 32 << 20
    max_text: int = 1_000_000
    max_header: int = 16 << 10
    max_header_count: int = 64
    max_connections: int = 2048
    max_streams: int = 512
    max_n: int = 16
    max_tokens: int = 16384
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    write_timeout: float = 30.0
    idle_timeout: float = 75.0
    ping: float = 15.0
    grace: float = 5.0

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            kinds = (int,) if name in _WHOLE else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
                what = "an integer" if name in _WHOLE else "seconds"
                raise InvalidArgument(f"{name} is {value!r}, allowed: {what} from {low} to {high}")
        if not isinstance(self.host, str) or not self.host:
            raise InvalidArgument(f"host is {self.host!r}, allowed: an address")
        if self.token is not None:
            check_token(self.token)
        elif not is_loopback(self.host):
            raise InvalidArgument(f"host is {self.host}, which other machines can reach, and there is no token",
                                  hint="Give one, or listen on 127.0.0.1")
        for origin in self.allowed_origins:
            scheme, _, rest = origin.partition("://")
            if scheme not in ("http", "https") or not rest or "/" in rest or "*" in rest:
                raise InvalidArgument(f"allowed_origins has {origin!r}, allowed: as https://page.example")

    def hosts(self, port: int) -> frozenset[str]:
        """Values of the header ``Host``, in lower case, that are answered by a server on this port."""
        names = {f"[{self.host}]" if ":" in self.host else self.host}
        if is_loopback(self.host):
            names |= {"localhost", "127.0.0.1", "[::1]"}
        elif self.host in ("0.0.0.0", "::"):
            names |= {"localhost", "127.0.0.1", "[::1]"}
        found = {f"{name}:{port}" for name in names} | (names if port == 80 else set())
        return frozenset(name.lower() for name in (*found, *self.allowed_hosts))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---- the token -----------------------------------------------------------------------------------------------------

def check_token(token: str) -> str:
    """The token, if it is one.

    Raises:
        InvalidArgument: shorter than 16 characters, longer than 4,096, or not visible ASCII.
    """
    if not isinstance(token, str) or not 16 <= len(token) <= _MAX_TOKEN or not token.isascii() \
            or any(not 33 <= ord(char) < 127 for char in token):
        raise InvalidArgument("the token is not of 16 to 4,096 visible ASCII characters",
                              hint="Leave its file out to have a random one made")
    return token


def same_token(given: bytes, token: str) -> bool:
    """Whether they are the same, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, token.encode())


def token_of(path: str | os.PathLike[str]) -> str:
    """The token that a file holds; a file that is not there is made, with a random one, for its owner alone (0600).

    Raises:
        InvalidArgument: what it holds is no token, or others may read it.
        FileError: it cannot be read or made.
    """
    name = os.fspath(path)
    try:
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        return _read_token(name)
    except OSError as error:
        raise FileError(f"{name}: the token's file cannot be made: {error.strerror}") from None
    token = secrets.token_urlsafe(32)
    try:
        with os.fdopen(made, "w", encoding="ascii") as file:
            os.fchmod(made, 0o600)  # whatever the umask
            file.write(token + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name)  # else the next one would find no token in it
        raise FileError(f"{name}: the token's file cannot be written: {error.strerror}") from None
    return token


def _read_token(name: str) -> str:
    try:
        with open(name, "rb") as file:
            mode = os.fstat(file.fileno())
            held = file.read(_MAX_TOKEN + 2)
    except OSError as error:
        raise FileError(f"{name}: the token's file cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode.st_mode) or mode.st_mode & 0o077:
        raise InvalidArgument(f"{name} is not a file that its owner alone may read", hint=f"chmod 600 {name}")
    return check_token(held.decode("ascii", "replace").strip())


def new_token_file() -> tuple[str, str]:
    """A file in the cache with a new random token, and the token."""
    from ..models import cache_dir
    from ..models.store import make_folder

    name = os.path.join(make_folder(cache_dir()), "server-token")
    try:
        os.unlink(name)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise FileError(f"{name}: the token's file cannot be replaced: {error.strerror}") from None
    return name, token_of(name)


__all__ = ["Settings", "check_token", "is_loopback", "new_token_file", "same_token", "token_of"]
