"""ASGI middleware that refuses requests with a foreign Host or Origin, with a repeated header that decides about
access, or without the token, and that lets pages of allowed origins read the responses (CORS)."""

from __future__ import annotations

import base64
import functools
import ipaddress
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response

from .errors import ErrorFormat, Refusal, error_format
from .interfaces import is_address
from .request_log import log_refused
from .settings import same_token

if TYPE_CHECKING:
    from .settings import Settings

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]
Header = tuple[bytes, bytes]

#: Headers that a request may contain once. Programs that read different lines of a repeated header, such as a proxy and
#: this server, would decide differently about the same request.
_SINGLE = frozenset((b"host", b"origin", b"authorization", b"x-api-key", b"content-type", b"content-encoding"))
#: Response headers that a page can always read, or never.
_UNEXPOSED = frozenset((b"cache-control", b"content-language", b"content-length", b"content-type", b"expires",
                        b"last-modified", b"pragma", b"vary", b"set-cookie"))
#: Methods that a page may use. The routes decide: their status 405 tells a page more than a refused preflight does.
_METHODS = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT"
#: Seconds that a browser may keep the response to a preflight.
_PREFLIGHT_AGE = "600"


def format_of(scope: Scope) -> ErrorFormat:
    """Return the format of the errors that the client of a request expects."""
    return error_format(scope["path"], is_anthropic(scope))


def is_anthropic(scope: Scope) -> bool:
    """Return True if a client of Anthropic's API sent a request: on every route, its requests have this header."""
    return header(scope, b"anthropic-version") is not None


def refusal_response(refusal: Refusal, scope: Scope) -> Response:
    """Return the HTTP response for an error, in the format that the client expects."""
    headers = {"retry-after": str(refusal.row.retry_after)} if refusal.row.retry_after else {}
    found = format_of(scope)
    if refusal.row.status == 401:
        # Basic makes a browser show a password dialog: only for the page itself, not for its background requests.
        headers["www-authenticate"] = 'Basic realm="mpool", charset="UTF-8"' if scope["path"] == "/" else "Bearer"
    return Response(found.encode(refusal), found.status(refusal.code), headers, "application/json")


def header(scope: Scope, name: bytes) -> bytes | None:
    """Return the value of the first header with a name in lower case; None: the request has none."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def may_be_browser(scope: Scope) -> bool:
    """Return True if a browser may have sent a request that has a body.

    Browsers send ``Origin`` with every such request to another origin, and ``Sec-Fetch-Site`` to addresses of loopback.
    ``Referer`` and the beginning of ``User-Agent`` identify browsers from before 2020.
    """
    for name, value in scope["headers"]:
        if name in (b"origin", b"referer") or name.startswith(b"sec-") or name == b"user-agent" and \
                value.lstrip().lower().startswith(b"mozilla/"):
            return True
    return False


def _repeated(scope: Scope) -> bytes | None:
    """Return the name of a header of :data:`_SINGLE` that a request contains more than once; None: there is none."""
    names = [key for key, _ in scope["headers"] if key in _SINGLE]
    return None if len(names) == len(set(names)) else next(name for name in names if names.count(name) > 1)


def _token_in(value: bytes) -> bytes:
    """Return the token in an ``Authorization`` header, or an empty value, which is never a valid token.

    The token is either a bearer token or the password of basic authentication with any user name. Browsers send the
    content of their password dialog in the second way.
    """
    scheme, _, rest = value.partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except ValueError:
            pass
    return b""


class GuardState(Protocol):
    """State that the guards read. :class:`mpool.server.state.State` implements it."""

    @property
    def settings(self) -> Settings:
        """Settings with the token and the allowed hosts and origins."""

    @property
    def hosts(self) -> frozenset[str] | None:
        """Accepted values of the Host header in lower case; None: derived from the local address of each request."""

    @property
    def stopping(self) -> bool:
        """True if the server accepts no further requests."""

    def refused(self, refusal: Refusal, scope: Scope) -> None:
        """Called for every request that a guard refuses."""


@functools.lru_cache(maxsize=64)
def _hosts_of_port(settings: Settings, port: int) -> frozenset[str]:
    return settings.hosts(port)


def _hosts_at(settings: Settings, scope: Scope) -> frozenset[str]:
    """Return the accepted values of the Host header for the local address at which a request arrived."""
    port = (scope.get("server") or ("", None))[1]
    if port is None or port == 443 and scope.get("scheme") == "https":
        port = 80  # clients omit the default port from the Host header
    return _hosts_of_port(settings, port)


def _is_remote(scope: Scope) -> bool:
    """Return True if a request arrived at an address that other machines can reach. A Unix socket is local.

    Some ASGI servers state a name, which a client may have chosen by its Host header: it is local only as localhost.
    """
    host, port = scope.get("server") or ("", None)
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return port is not None and host != "localhost"  # a Unix socket has a path and no port


def cross_origin_headers(settings: Settings, request: Iterable[Header], response: Iterable[Header]) -> list[Header]:
    """Return the headers that let the page that sent a request read the response with all its headers.

    Args:
        settings: Settings with the allowed origins.
        request: Headers of the request, with names in lower case.
        response: Headers of the response, with names in lower case.

    Returns:
        Only ``Vary`` if the origin of the request is not allowed, or the request has none; empty if no origin is.
    """
    if not settings.allowed_origins:
        return []
    found = [(b"vary", b"Origin")]  # a cache between must not return the response to another origin
    origin = next((value for name, value in request if name == b"origin"), None)
    if origin is not None and settings.allows_origin(origin.decode("latin-1")):
        found.append((b"access-control-allow-origin", origin))
        exposed = sorted({name for name, _ in response} - _UNEXPOSED)
        if exposed:
            found.append((b"access-control-expose-headers", b", ".join(exposed)))
    return found


class CrossOrigin:
    """Answer the preflights of allowed origins, and let their pages read every response, also that of a refusal.

    Runs before the guards. A preflight grants every header that it asks for: an allowed origin is trusted, and the
    clients of OpenAI's, Anthropic's and Ollama's APIs add headers from version to version.
    """

    def __init__(self, app: App, gate: GuardState) -> None:
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        settings = self.gate.settings
        if not settings.allowed_origins:
            await self.app(scope, receive, send)
            return
        if scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method") is not None \
                and settings.allows_origin((header(scope, b"origin") or b"").decode("latin-1")):
            await Response(headers=_preflight_headers(scope))(scope, receive, self._readable(scope, send))
            return
        await self.app(scope, receive, self._readable(scope, send))

    def _readable(self, scope: Scope, send: Any) -> Any:
        async def send_readable(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = list(message.get("headers", ()))
                more = cross_origin_headers(self.gate.settings, scope["headers"], own)
                message = {**message, "headers": own + more}
            await send(message)

        return send_readable


def _preflight_headers(scope: Scope) -> dict[str, str]:
    found = {"access-control-allow-methods": _METHODS, "access-control-max-age": _PREFLIGHT_AGE}
    wanted = header(scope, b"access-control-request-headers")
    if wanted is not None:  # the value * would not include Authorization
        found["access-control-allow-headers"] = wanted.decode("latin-1")
    if header(scope, b"access-control-request-private-network") is not None:  # a public page, a server on loopback
        found["access-control-allow-private-network"] = "true"
    return found


class _Guard:
    """Base of the guards: sends the error response of a refused request, and passes on every other request."""

    def __init__(self, app: App, gate: GuardState) -> None:
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
            return
        response = refusal_response(refusal, scope)
        self.gate.refused(refusal, scope)
        log_refused(scope, refusal, response.status_code)
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> Refusal | None:
        raise NotImplementedError


class HostGuard(_Guard):
    """Check the headers Host (protection against DNS rebinding) and Origin, and refuse requests that repeat a header
    that decides about access or decoding."""

    def _refusal(self, scope: Scope) -> Refusal | None:
        repeated = _repeated(scope)
        if repeated is not None:
            return Refusal("bad_request", f"The header {repeated.decode().title()} must occur once.")
        hosts = self.gate.hosts
        if hosts is None:
            hosts = _hosts_at(self.gate.settings, scope)
        host = (header(scope, b"host") or b"").decode("latin-1").lower()
        if host not in hosts:
            # DNS rebinding needs a host name: a page whose origin is an IP address was sent by that address itself
            if not self.gate.settings.on_all_addresses or not is_address(host):
                return Refusal("misdirected")
            hosts = frozenset((host,))
        origin = header(scope, b"origin")
        if origin is not None and not self._may_call(origin.decode("latin-1").lower(), hosts):
            return Refusal("forbidden_origin")
        return None

    def _may_call(self, origin: str, hosts: frozenset[str]) -> bool:
        scheme, _, host = origin.partition("://")
        return scheme in ("http", "https") and host in hosts or self.gate.settings.allows_origin(origin)


class TokenGuard(_Guard):
    """Check the token, and refuse requests during shutdown. Preflights do not arrive here: they have no token."""

    def _refusal(self, scope: Scope) -> Refusal | None:
        if scope["path"] == "/health":
            return None
        token = self.gate.settings.token
        if token is not None:
            if not same_token(_token_in(header(scope, b"authorization") or b""), token) \
                    and not same_token(header(scope, b"x-api-key") or b"", token):  # clients of Anthropic's API
                return Refusal("invalid_api_key")
        elif self.gate.hosts is None and _is_remote(scope):
            return Refusal("token_required")
        return Refusal("shutting_down") if self.gate.stopping else None


__all__ = ["CrossOrigin", "GuardState", "HostGuard", "TokenGuard", "cross_origin_headers", "format_of", "header",
           "is_anthropic", "may_be_browser", "refusal_response"]
