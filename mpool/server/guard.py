"""The guards: they refuse a request before it reaches a route."""

from __future__ import annotations

import base64
import functools
import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

from starlette.responses import Response

from .errors import Refusal, error_body
from .settings import same_token

if TYPE_CHECKING:
    from .settings import Settings

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


def answer(refusal: Refusal, path: str) -> Response:
    """Make the response of a refusal."""
    headers = {"retry-after": str(refusal.row.retry_after)} if refusal.row.retry_after else {}
    if refusal.row.status == 401:
        # A browser asks for a password only where the page itself is refused.
        headers["www-authenticate"] = 'Basic realm="mpool", charset="UTF-8"' if path == "/" else "Bearer"
    return Response(error_body(refusal, path), refusal.row.status, headers, "application/json")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of a name; None: the request has none."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def _given(value: bytes) -> bytes:
    """The token in a header ``Authorization``: a bearer token, or the password of any user, which is how browsers send
    what was typed. Empty if there is none; no token is empty."""
    scheme, _, rest = value.partition(b" ")
    if scheme.lower() == b"bearer":
        return rest.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(rest.strip(), validate=True).partition(b":")[2]
        except ValueError:
            pass
    return b""


class Gate(Protocol):
    """The interface that the guards need; :class:`mpool.server.state.State` has it."""

    @property
    def settings(self) -> Settings:
        """Token, allowed hosts and origins."""

    @property
    def hosts(self) -> frozenset[str] | None:
        """Accepted values of the header Host, in lower case; None: they follow from the address of the request."""

    @property
    def stopping(self) -> bool:
        """True: no further requests are accepted."""


@functools.lru_cache(maxsize=64)
def _hosts_of_port(settings: Settings, port: int) -> frozenset[str]:
    return settings.hosts(port)


def _hosts_at(settings: Settings, scope: Scope) -> frozenset[str]:
    """Accepted values of the header Host for the address at which the ASGI server got a request."""
    port = (scope.get("server") or ("", None))[1]
    if port is None or port == 443 and scope.get("scheme") == "https":
        port = 80  # a client leaves the default port out of the header
    return _hosts_of_port(settings, port)


def _is_remote(scope: Scope) -> bool:
    """True if a request arrived at an address that other machines can reach. A Unix socket is local."""
    host = (scope.get("server") or ("", None))[0]
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Guard:
    """ASGI middleware that sends the response of a refused request itself."""

    def __init__(self, app: App, gate: Gate) -> None:
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        refusal = self._refused(scope)
        await (self.app if refusal is None else answer(refusal, scope["path"]))(scope, receive, send)

    def _refused(self, scope: Scope) -> Refusal | None:
        raise NotImplementedError


class Door(_Guard):
    """Check the headers Host (against DNS rebinding) and Origin. Runs before CORS."""

    def _refused(self, scope: Scope) -> Refusal | None:
        hosts = self.gate.hosts
        if hosts is None:
            hosts = _hosts_at(self.gate.settings, scope)
        host = header(scope, b"host")
        if host is None or host.decode("latin-1").lower() not in hosts:
            return Refusal("misdirected")
        origin = header(scope, b"origin")
        if origin is not None and not self._may_call(origin.decode("latin-1").lower(), hosts):
            return Refusal("forbidden_origin")
        return None

    def _may_call(self, origin: str, hosts: frozenset[str]) -> bool:
        scheme, _, host = origin.partition("://")
        return scheme in ("http", "https") and host in hosts or origin in self.gate.settings.allowed_origins


class Lock(_Guard):
    """Check the token, and refuse requests while the server stops. Runs after CORS."""

    def _refused(self, scope: Scope) -> Refusal | None:
        if scope["path"] == "/health":
            return None
        token = self.gate.settings.token
        if token is not None:
            if not same_token(_given(header(scope, b"authorization") or b""), token):
                return Refusal("invalid_api_key")
        elif self.gate.hosts is None and _is_remote(scope):
            return Refusal("token_required")
        return Refusal("shutting_down") if self.gate.stopping else None


__all__ = ["Door", "Gate", "Lock", "answer", "header"]
