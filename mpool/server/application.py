"""The ASGI application: the routes of every protocol behind the guards.

The application needs nothing of the server that runs it: uvicorn, hypercorn and httpx's ``ASGITransport`` do.
``mpool serve`` adds a protocol class for uvicorn that hardens the socket (:mod:`mpool.server.protocol`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from . import dashboard, ollama, operational
from .errors import Refusal
from .guard import App, Door, Gate, Lock, Scope, answer
from .openai import OPERATIONS as OPENAI
from .operations import Endpoint, Operation
from .settings import Settings
from .state import State

if TYPE_CHECKING:
    from ..pool import Pool

#: Every operation of the server, in the order of the OpenAPI document.
OPERATIONS: tuple[Operation, ...] = (*operational.OPERATIONS, *OPENAI, *ollama.OPERATIONS,
                                     *dashboard.OPERATIONS)


class Routes:
    """The endpoints by path and method.

    No path has a variable part, so one dictionary lookup finds the endpoint. Each endpoint turns its own errors into
    responses, so no middleware surrounds it: Starlette's application and router added 20 us to a request of 240 us.
    """

    def __init__(self, operations: tuple[Operation, ...], state: State) -> None:
        self._endpoints: dict[str, dict[str, Endpoint]] = {}
        for operation in operations:
            methods = self._endpoints.setdefault(operation.path, {})
            methods[operation.method] = Endpoint(operation, state)
            if operation.method == "GET":
                methods["HEAD"] = methods["GET"]

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        methods = self._endpoints.get(scope["path"])
        endpoint = methods.get(scope["method"]) if methods is not None else None
        if endpoint is not None:
            await endpoint(scope, receive, send)
            return
        response = answer(Refusal("not_found" if methods is None else "method_not_allowed"), scope["path"])
        if methods is not None:
            response.headers["allow"] = ", ".join(methods)
        await response(scope, receive, send)


class Application:
    """An ASGI application: HTTP to the guarded routes, lifespan events, and no WebSockets.

    Args:
        app: takes the requests of type ``http``.
        shutdown: awaited at the lifespan event ``shutdown``.
    """

    def __init__(self, app: App, shutdown: Callable[[], Awaitable[object]] | None = None) -> None:
        self._app, self._shutdown = app, shutdown

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            root = scope.get("root_path")
            if root and scope["path"].startswith(root + "/"):  # mounted under a prefix of another application
                scope = {**scope, "path": scope["path"][len(root):]}
            await self._app(scope, receive, send)
        elif scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1000})

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        try:
            if self._shutdown is not None:
                await self._shutdown()
        except Exception as error:
            await send({"type": "lifespan.shutdown.failed", "message": str(error)})
        else:
            await send({"type": "lifespan.shutdown.complete"})


def create_app(models: Iterable[str | os.PathLike[str]] | None = None, *, pool: Pool | None = None,
               settings: Settings | None = None, catalogue: bool = True, compute: str = "auto") -> Application:
    """The server as an ASGI application, for any ASGI server or as a part of another application.

    ``uvicorn mpool.server:app --factory`` calls it without arguments. The environment then says what is served:
    ``MPOOL_SERVER_MODELS`` (references, each also as ``NAME=REF``, separated by commas), ``MPOOL_SERVER_TOKEN_FILE``,
    ``MPOOL_SERVER_ALLOW_HOSTS`` and ``MPOOL_SERVER_ALLOW_ORIGINS`` (separated by commas).

    The ASGI server owns the socket, so ``host``, ``port``, ``max_header``, ``max_header_count``, ``max_connections``
    and the four timeouts of ``settings`` have no effect here. Without a token, the application serves only requests
    that reached the machine at a loopback address or a Unix socket.

    Args:
        models: models to serve; None: those of ``MPOOL_SERVER_MODELS``. See :class:`mpool.server.models.Models`.
        pool: computes. None: a new pool, which the lifespan event ``shutdown`` closes. The caller closes its own pool.
        settings: token, hosts, origins and limits; None: the defaults with what the environment says.
        catalogue: also serve the catalogue's models whose files are on this machine.
        compute: compute type of all models.

    Raises:
        InvalidArgument: a setting or a model's name is not allowed.
        and what :func:`mpool.register` raises.
    """
    from ..config import PoolConfig
    from ..pool import Pool

    if settings is None:
        settings = _settings_of_environment()
    if models is None:
        models = _list_of("MPOOL_SERVER_MODELS")
    own = pool is None
    used = Pool(PoolConfig(shutdown_grace=settings.grace)) if pool is None else pool
    try:
        state = State(settings, used, models, catalogue, compute)
    except BaseException:
        if own:
            used.close()
        raise
    state.hosts = None  # the port is the ASGI server's

    async def shutdown() -> None:
        state.stopping = True
        if own:
            await asyncio.to_thread(used.close)

    return make_app(state, shutdown=shutdown)


def _list_of(name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in os.environ.get(name, "").split(",") if part.strip())


def _settings_of_environment() -> Settings:
    from .settings import token_of

    path = os.environ.get("MPOOL_SERVER_TOKEN_FILE")
    return Settings(token=token_of(path) if path else None, allowed_hosts=_list_of("MPOOL_SERVER_ALLOW_HOSTS"),
                    allowed_origins=_list_of("MPOOL_SERVER_ALLOW_ORIGINS"))


def make_app(state: State, operations: tuple[Operation, ...] = OPERATIONS,
             shutdown: Callable[[], Awaitable[object]] | None = None) -> Application:
    """The application of a server.

    Args:
        state: shared by all requests.
        operations: the routes.
        shutdown: awaited at the lifespan event ``shutdown``.
    """
    return Application(guarded(Routes(operations, state), state), shutdown)


def guarded(app: App, gate: Gate) -> App:
    """An application behind the server's guards: Host and Origin, then CORS, then the token."""
    app = Lock(app, gate)
    origins = gate.settings.allowed_origins
    if origins:
        from starlette.middleware.cors import CORSMiddleware

        app = CORSMiddleware(app, allow_origins=origins, allow_methods=("GET", "POST"),
                             allow_headers=("authorization", "content-type"))
    return Door(app, gate)


__all__ = ["OPERATIONS", "Application", "Routes", "create_app", "guarded", "make_app"]
