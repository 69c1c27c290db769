"""Settings of the server, and the file with the token that clients must send."""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import re
import secrets
import stat
from dataclasses import dataclass, field

from ..checks import refuse, shown
from ..errors import FileError, InvalidArgument
from ..host.lazy import cached_property
from ..models.store import cache_dir, make_folder

#: Field -> (minimum, maximum).
_RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535), "max_body": (1024, 1 << 30), "max_bodies": (1024, 1 << 40),
    "max_text": (1, 1_000_000), "max_header": (1024, 1 << 20),
    "max_header_count": (8, 1000), "max_connections": (1, 100_000), "max_streams": (1, 100_000),
    "max_n": (1, 128), "max_tokens": (1, 2**31 - 1), "default_max_tokens": (1, 2**31 - 1),
    "header_timeout": (0.05, 3600.0), "body_timeout": (0.05, 3600.0),
    "write_timeout": (0.05, 3600.0), "idle_timeout": (0.05, 3600.0), "ping": (0.05, 3600.0), "grace": (0.0, 3600.0),
}
_WHOLE = ("port", "max_body", "max_bodies", "max_text", "max_header", "max_header_count", "max_connections",
          "max_streams", "max_n", "max_tokens", "default_max_tokens")
_SWITCHES = ("allow_token_ids", "allow_image_urls", "strict")
_MAX_TOKEN = 4096
#: The header ``Host``. Clients send other names in their ASCII form (``xn--``).
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[(?P<six>[0-9A-Fa-f:.]+)\])(?::(?P<port>[0-9]{1,5}))?")
#: Origins that the pages of every site can have: any, and the one of a page in a sandboxed frame.
_EVERY_SITE = ("*", "null")
#: Schemes of origins are those of URLs (RFC 3986, 3.1), without those that no page has.
_SCHEME, _NO_PAGES = re.compile(r"[a-z][a-z0-9+.-]*"), ("ftp", "ws", "wss")
_PORT, _DEFAULT_PORT = re.compile(r":[0-9]+\Z"), re.compile(r"(http://.*):80|(https://.*):443")


@dataclass(frozen=True)
class Settings:
    """Address, access control and limits of the server. Immutable; validated on construction.

    Attributes:
        host: Address to listen on. An address other than loopback requires a ``token``.
        port: Port to listen on; 0: a free port.
        token: Token that clients must send on every route except ``/health``, as ``Authorization: Bearer TOKEN``, as
            ``x-api-key: TOKEN`` or, from a browser, as the password; None: no token, which is allowed on loopback only.
        allowed_hosts: Further accepted values of the ``Host`` header: the name by which other machines reach the
            server, or the name of a proxy in front of it, with the port unless that is 80 or 443. The address itself
            is always accepted, and so is ``localhost`` when the server listens on loopback or on all addresses. A
            server that listens on all addresses accepts every IP address: those of its interfaces, and those of a
            machine that forwards connections to it, such as the host of a container.
        allowed_origins: Origins (``https://page.example``) whose pages may call the server from a browser. By default
            there are none, and the server sends no CORS header. ``http://localhost:*`` stands for every port of a host,
            ``app://*`` for every origin of a scheme other than http and https. ``*`` stands for all origins, and
            ``null`` for pages without one, such as files: both need a ``token``, because every site can send them.
        max_body: Maximum size of a request body in bytes.
        max_bodies: Maximum size in bytes of all request bodies in memory, finished or not, with the values parsed out
            of them; further ones receive HTTP 503. A value below four times ``max_body`` counts as that.
        max_text: Maximum length in characters of one text in a body.
        max_header: Maximum size in bytes of the request line and headers.
        max_header_count: Maximum number of header lines.
        max_connections: Maximum number of concurrent connections; further ones receive HTTP 503.
        max_streams: Maximum number of concurrent streamed responses; further ones receive HTTP 503.
        max_n: Maximum number of completions or images per request.
        max_tokens: Maximum number of tokens per completion; a request for more is reduced to this.
        default_max_tokens: Maximum number of tokens per completion of a request without a limit of its own. A value
            above ``max_tokens`` counts as ``max_tokens``.
        allow_token_ids: Accept token ids as input of ``/v1/embeddings`` and ``/pooling`` for every model; False: only
            if the request sets ``allow_token_ids``, or the model's vocabulary is OpenAI's cl100k_base.
        allow_image_urls: Fetch images at https URLs in chat messages, from public addresses only; False: accept images
            only in the body.
        strict: Refuse fields of a request that the server does not have; False: ignore them, name each once in the log,
            and name those of a request in the response header ``x-mpool-ignored``.
        header_timeout: Seconds within which the head of a request must arrive.
        body_timeout: Seconds within which the body of a request must arrive.
        write_timeout: Seconds after which the connection of a client that does not read its response is closed.
        idle_timeout: Seconds after a response until a connection without a further request is closed. A connection
            that has sent no request yet is closed after ``header_timeout``.
        ping: Seconds without an event, at least, after which the server sends a comment in an event stream; at most
            twice as many.
        grace: Seconds that requests have to complete when the server stops.

    Raises:
        InvalidArgument: A value is out of range, or an address other than loopback has no token.
    """

    host: str = "127.0.0.1"
    port: int = 11435
    token: str | None = field(default=None, repr=False)  # no traceback and no log may have it
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body: int = 32 << 20
    max_bodies: int = 512 << 20
    max_text: int = 1_000_000
    max_header: int = 16 << 10
    max_header_count: int = 64
    max_connections: int = 2048
    max_streams: int = 512
    max_n: int = 16
    max_tokens: int = 16384
    default_max_tokens: int = 4096
    allow_token_ids: bool = False
    allow_image_urls: bool = False
    strict: bool = False
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
                refuse(name, value, f"{'an integer' if name in _WHOLE else 'a number of seconds'} from {low} to {high}")
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                refuse(name, getattr(self, name), "True or False")
        if not isinstance(self.host, str) or not self.host:
            refuse("host", self.host, "an IP address or host name")
        if self.token is not None:
            check_token(self.token)
        elif not is_loopback(self.host):
            refuse("host", self.host, "a loopback address unless there is a token",
                   hint="Set a token, or listen on 127.0.0.1")
        for name in ("allowed_hosts", "allowed_origins"):
            values = getattr(self, name)
            if not isinstance(values, (tuple, list)) or not all(isinstance(value, str) for value in values):
                refuse(name, values, "a tuple of strings",
                       hint=f"Pass ({shown(values)},)" if isinstance(values, str) else None)
            object.__setattr__(self, name, tuple(values))  # a list cannot be hashed
        for host in self.allowed_hosts:
            if not _is_host(host):
                refuse("allowed_hosts", host, "names or addresses, each with a port unless it is 80 or 443, such as "
                                              "models.example, models.example:11435 or [fd00::1]:11435")
        for origin in self.allowed_origins:
            if origin in _EVERY_SITE and self.token is not None or _is_origin(origin):
                continue
            refuse("allowed_origins", origin, "origins such as https://page.example",
                   hint="Set a token: every site can send requests with this origin" if origin in _EVERY_SITE else None)

    @property
    def body_memory(self) -> int:
        """The limit for all bodies that is in force: a single body of the maximum size always fits."""
        return max(self.max_bodies, 4 * self.max_body)

    def completion_tokens(self, wanted: int | None) -> int:
        """Return the limit of tokens for a completion. ``wanted``: the limit of the request; None: it has none; -1: the
        largest one."""
        if wanted == -1:
            return self.max_tokens
        return min(self.default_max_tokens if wanted is None else wanted, self.max_tokens)

    @property
    def on_all_addresses(self) -> bool:
        """True if the server listens on all addresses of the machine."""
        return self.host in ("0.0.0.0", "::")

    @cached_property
    def _origins(self) -> frozenset[str]:
        """The allowed origins as browsers write them: in lower case, without the default port of http and https."""
        found = (origin.lower() for origin in self.allowed_origins)
        return frozenset(one[:one.rindex(":")] if _DEFAULT_PORT.fullmatch(one) else one for one in found)

    def allows_origin(self, origin: str) -> bool:
        """Return True if ``allowed_origins`` has the value of a header ``Origin``."""
        origin = origin.lower()
        scheme, has_scheme, _ = origin.partition("://")
        if not has_scheme and origin != "null":
            return False
        names = {"*", origin, f"{_PORT.sub('', origin)}:*", f"{scheme}://*"} if has_scheme else {"*", origin}
        return not self._origins.isdisjoint(names)

    def hosts(self, port: int) -> frozenset[str]:
        """Return the values of the ``Host`` header, in lower case, that a server on this port accepts."""
        names = {f"[{self.host}]" if ":" in self.host else self.host}
        if is_loopback(self.host) or self.on_all_addresses:
            names |= {"localhost", "127.0.0.1", "[::1]"}
        found = {f"{name}:{port}" for name in names} | (names if port == 80 else set())
        return frozenset(name.lower() for name in (*found, *self.allowed_hosts))


def _is_origin(text: str) -> bool:
    """Return True if a text is an origin that a browser or an application sends, or stands for several of them."""
    scheme, found, host = text.lower().partition("://")
    if not found or not _SCHEME.fullmatch(scheme) or scheme in _NO_PAGES:
        return False
    return _is_host(host.removesuffix(":*")) or scheme not in ("http", "https") and host in ("", "*")


def _is_host(text: str) -> bool:
    """Return True if a client can send a text as the header ``Host``: a name or an address, and a port."""
    found = _HOST.fullmatch(text)
    if found is None or found["port"] and not 1 <= int(found["port"]) <= 65535:
        return False
    try:
        return found["six"] is None or ipaddress.ip_address(found["six"]).version == 6
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# ---- the token -----------------------------------------------------------------------------------------------------

def check_token(token: str) -> str:
    """Return a token unchanged after checking it.

    Raises:
        InvalidArgument: The token does not consist of 16 to 4,096 visible ASCII characters.
    """
    if not isinstance(token, str) or not _is_token(token):
        raise _no_token("`token` must have",
                        "Name a token file that does not exist: mpool creates it with a random token")
    return token


def _is_token(text: str) -> bool:
    return 16 <= len(text) <= _MAX_TOKEN and all(33 <= ord(char) < 127 for char in text)


def _no_token(what: str, hint: str) -> InvalidArgument:
    """Return the error of an invalid token. Its message does not show the token."""
    allowed = "16 to 4,096 visible ASCII characters"
    return InvalidArgument(f"{what} {allowed}", param="token", allowed=allowed, hint=hint)


def same_token(given: bytes, token: str) -> bool:
    """Compare two tokens in constant time."""
    return hmac.compare_digest(given, token.encode())


def token_of(path: str | os.PathLike[str]) -> str:
    """Read the token from a file. If the file does not exist, create it with a random token and mode 0600.

    Raises:
        InvalidArgument: The file contains no valid token, or other users can read it.
        FileError: The file cannot be read or created.
    """
    name, token = os.fspath(path), secrets.token_urlsafe(32)
    try:
        _create(name, token)
    except FileExistsError:
        return read_token(name)
    return token


def _create(name: str, token: str) -> None:
    """Create a token file of mode 0600.

    Raises:
        FileExistsError: There is a file of this name.
        FileError: The file cannot be created.
    """
    try:
        made = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    except FileExistsError:
        raise
    except OSError as error:
        raise _cannot_create(name, error.errno) from None
    try:
        with os.fdopen(made, "w", encoding="ascii") as file:
            os.fchmod(made, 0o600)  # independent of the umask
            file.write(token + "\n")
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(name)  # the next start would refuse an empty file
        raise FileError(f"{name}: the token file cannot be written: {error.strerror}") from None


def _cannot_create(name: str, number: int | None) -> FileError:
    return FileError(f"{name}: the token file cannot be created: {os.strerror(number or 0)}")


def read_token(path: str | os.PathLike[str]) -> str:
    """Read the token from a file that exists, for a server or for its client.

    Raises:
        InvalidArgument: The file contains no valid token, or other users can read it.
        FileError: The file cannot be read.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            mode = os.fstat(file.fileno())
            held = file.read(_MAX_TOKEN + 2)
    except OSError as error:
        raise FileError(f"{name}: the token file cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(mode.st_mode) or mode.st_mode & 0o077:
        raise InvalidArgument(f"the token file {name} must be a regular file that only its owner can read",
                              hint=f"Run chmod 600 {name}")
    token = held.decode("ascii", "replace").strip()
    if not _is_token(token):
        raise _no_token(f"the token file {name} must contain one token of",
                        "`mpool serve` creates a token file that does not exist. Other commands read a copy of it")
    return token


def default_token_file() -> str:
    """Return the path of the token file of a server that other machines can reach, if no other is named."""
    return os.path.join(cache_dir(), "server-token")


@dataclass(frozen=True)
class TokenFile:
    """The token of a server, and its file. A new token is in no file before :meth:`write`, which a server calls when it
    accepts connections: a server that cannot start leaves the token file of another one as it is.

    Attributes:
        path: Path of the file.
        token: The token.
        is_new: The token is random, and not yet in the file.
        replaces: :meth:`write` replaces a file of this name.
    """

    path: str
    token: str = field(repr=False)
    is_new: bool = True
    replaces: bool = False

    @classmethod
    def named(cls, path: str | os.PathLike[str]) -> TokenFile:
        """Read the token from a file. If the file does not exist, choose a random token for it.

        Raises:
            InvalidArgument: The file contains no valid token, or other users can read it.
            FileError: The file cannot be read, or the folder allows no new file.
        """
        name = os.fspath(path)
        if os.path.lexists(name):
            return cls(name, read_token(name), is_new=False)
        folder = os.path.dirname(name) or "."
        if not os.path.isdir(folder):
            raise _cannot_create(name, errno.ENOENT)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise _cannot_create(name, errno.EACCES)
        return cls(name, secrets.token_urlsafe(32))

    @classmethod
    def default(cls) -> TokenFile:
        """Choose a random token for the default file, whose folder is created.

        Raises:
            FileError: The folder cannot be created.
        """
        name = default_token_file()
        make_folder(os.path.dirname(name))
        return cls(name, secrets.token_urlsafe(32), replaces=True)

    def write(self) -> None:
        """Write a new token to the file.

        Raises:
            FileError: The file cannot be written, or has been created since :meth:`named` looked for it.
        """
        if not self.is_new:
            return
        name = f"{self.path}.{secrets.token_hex(8)}.part" if self.replaces else self.path
        try:
            _create(name, self.token)
            if self.replaces:
                os.replace(name, self.path)
        except FileExistsError:
            raise FileError(f"{self.path}: another process has created the token file meanwhile",
                            hint="Start the server again: it uses the token in this file") from None
        except FileError:
            raise
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise FileError(f"{self.path}: the token file cannot be replaced: {error.strerror}") from None


__all__ = ["Settings", "TokenFile", "check_token", "default_token_file", "is_loopback", "read_token", "same_token",
           "token_of"]
