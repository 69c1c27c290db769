"""The door: whose requests get to a route at all."""

from __future__ import annotations

import base64
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
    """A refusal as a response."""
    headers = {"retry-after": str(refusal.row.retry_after)} if refusal.row.retry_after else {}
    if refusal.row.status == 401:
        # browsers ask for a password where a page is refused, and nowhere else
        headers["www-authenticate"] = 'Basic realm="mpool", charset="UTF-8"' if path == "/" else "Bearer"
    return Response(error_body(refusal, path), refusal.row.status, headers, "application/json")


def header(scope: Scope, name: bytes) -> bytes | None:
    """A header of a request; None: it has none. Of several the first."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def _given(value: bytes) -> bytes:
    """The token out of a header ``Authorization``: that of a bearer, or the password of any user, which is how browsers
    send what they were told for a page. Empty, which no token is: there is none."""
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
    """What the guards ask for; :class:`mpool.server.state.State` is one."""

    @property
    def settings(self) -> Settings:
        """Whom to let in."""

    @property
    def hosts(self) -> frozenset[str]:
        """Values of the header Host that are answered, in lower case."""

    @property
    def stopping(self) -> bool:
        """Whether no further requests are taken."""


class _Guard:
    """ASGI middleware that answers what it refuses itself."""

    def __init__(self, app: App, gate: Gate) -> None:
        self.app, self.gate = app, gate

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        refusal = self._refused(scope)
        await (self.app if refusal is None else answer(refusal, scope["path"]))(scope, receive, send)

    def _refused(self, scope: Scope) -> Refusal | None:
        raise NotImplementedError


class Door(_Guard):
    """The server that is meant, and pages that may call it. It stands before CORS."""

    def _refused(self, scope: Scope) -> Refusal | None:
        host = header(scope, b"host")
        if host is None or host.decode("latin-1").lower() not in self.gate.hosts:
            return Refusal("misdirected")
        origin = header(scope, b"origin")
        if origin is not None and not self._may_call(origin.decode("latin-1").lower()):
            return Refusal("forbidden_origin")
        return None

    def _may_call(self, origin: str) -> bool:
        scheme, _, host = origin.partition("://")
        return scheme in ("http", "https") and host in self.gate.hosts \
            or origin in self.gate.settings.allowed_origins


class Lock(_Guard):
    """The token, and whether the server still takes requests. It stands behind CORS."""

    def _refused(self, scope: Scope) -> Refusal | None:
        if scope["path"] == "/health":
            return None
        token = self.gate.settings.token
        if token is not None:
            if not same_token(_given(header(scope, b"authorization") or b""), token):
                return Refusal("invalid_api_key")
        return Refusal("shutting_down") if self.gate.stopping else None


__all__ = ["Door", "Gate", "Lock", "answer", "header"]
