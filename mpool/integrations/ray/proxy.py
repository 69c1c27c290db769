"""Middleware in Ray Serve's proxies: it repeats a request whose front died.

Ray's proxy holds the client's connection, and forwards each request to a front. If the front dies, the proxy gives up
without a response (HTTP 500). With this middleware, it forwards the request to another front.

Ray loads the middleware where :data:`ENVIRONMENT` was set when Ray was started. ``mpool ray serve`` sets it when it
starts Ray; on a cluster, set it for ``ray start`` on every machine. It applies to all applications of that cluster.
"""

from __future__ import annotations

from typing import Any

from starlette.middleware import Middleware

from ...records import logger
from ...server.errors import Refusal
from .responses import HeldResponse

log = logger("mpool.server")

#: Environment variables of Ray's processes.
ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mpool.integrations.ray.proxy.middlewares",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    # Ray kills a proxy that is not ready after three times this value. Its default of 5 is too short for the imports of
    # a proxy on a busy machine.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    # Without gRPC, a replica that responds to a front on a lost node hangs until Ray knows that the node is lost, which
    # takes more than 10 s.
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}
#: Maximum number of fronts that get a request, one after the other.
MAX_ATTEMPTS = 3
#: Maximum size in bytes of a body that can be sent again, and of all such bodies.
MAX_BODY, MAX_BODIES = 32 << 20, 512 << 20


class _Replay:
    """An ASGI ``receive`` that can start again at the first message of the body."""

    def __init__(self, receive: Any, max_body: int, left: list[int]) -> None:
        self._receive, self._room, self._left, self._held = receive, max_body, left, 0
        self._kept: list[dict[str, Any]] = []
        self._at = 0
        self.disconnected = False

    async def receive(self) -> dict[str, Any]:
        if self._at < len(self._kept):
            self._at += 1
            return self._kept[self._at - 1]
        message: dict[str, Any] = await self._receive()
        if message["type"] == "http.disconnect":
            self.disconnected = True
            return message
        size = len(message.get("body", b""))
        self._room = self._room - size if size <= self._left[0] else -1
        if self._room >= 0:
            self._held, self._left[0] = self._held + size, self._left[0] - size
            self._kept.append(message)
            self._at += 1
        else:
            self.drop()
        return message

    def drop(self) -> None:
        """Keep no body any more."""
        self._kept.clear()
        self._left[0] += self._held
        self._held = 0

    def rewind(self) -> bool:
        """Start again at the first message; return False if the body was too large to be kept."""
        self._at = 0
        return self._room >= 0


class Repeat:
    """An ASGI application that repeats a request if the wrapped application ends without a response.

    Args:
        app: the wrapped application.
        max_attempts: maximum number of times that ``app`` is called.
        max_body: maximum size in bytes of a body that can be sent again.
    """

    def __init__(self, app: Any, max_attempts: int = MAX_ATTEMPTS, max_body: int = MAX_BODY) -> None:
        self._app, self._max_attempts, self._max_body = app, max_attempts, max_body
        self._left = [MAX_BODIES]  # bytes that are free for further bodies

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        replay = _Replay(receive, self._max_body, self._left)
        try:
            await self._repeat(replay, scope, receive, send)
        finally:
            replay.drop()

    async def _repeat(self, replay: _Replay, scope: Any, receive: Any, send: Any) -> None:
        for _ in range(self._max_attempts):
            response = HeldResponse(scope, receive, send, whole=False)
            await self._app(dict(scope), replay.receive, response.handle_message)
            if response.ended or replay.disconnected:
                return
            log.warning("A front was lost")
            if response.started or not replay.rewind():
                break
        await response.fail(Refusal("worker_lost"))


def middlewares() -> list[Middleware]:
    """Return the middleware. Called by Ray Serve, see :data:`ENVIRONMENT`."""
    return [Middleware(Repeat)]


__all__ = ["ENVIRONMENT", "Repeat", "middlewares"]
