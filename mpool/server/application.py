"""The ASGI application: the routes of every protocol behind the guards.

Any ASGI server can run the application; it is tested with uvicorn, hypercorn and httpx's ``ASGITransport``.
``mpool serve`` adds a protocol class for uvicorn that hardens the connections (:mod:`mpool.server.protocol`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from ..checks import refuse
from ..config import PoolConfig
from ..host import native_calls
from ..pool import Pool
from . import (
    classifying,
    dashboard,
    labelling,
    model_list,
    ollama,
    operational,
    pooling,
    scoring,
    swapping,
    text_embeddings_inference,
    tokens,
)
from .anthropic.messages import OPERATIONS as ANTHROPIC
from .configuring import configure
from .errors import Refusal
from .guard import App, CrossOrigin, GuardState, HostGuard, Scope, TokenGuard, refusal_response
from .http_metrics import Counted
from .openai.table import OPERATIONS as OPENAI
from .openapi import describe
from .operations import Context, Endpoint, Operation
from .request_log import log_refused
from .state import State

if TYPE_CHECKING:
    from ..config import PoolConfig
    from ..pool import Pool
    from .settings import Settings


@functools.lru_cache(maxsize=2)
def _document(strict: bool) -> bytes:
    return msgspec.json.encode(describe(OPERATIONS, strict))


async def openapi(context: Context, body: None) -> Response:
    """Return the OpenAPI document, which is generated once and then cached."""
    return Response(_document(context.state.settings.strict), media_type="application/json")


#: All operations of the server, in the order of the OpenAPI document.
OPERATIONS: tuple[Operation, ...] = (
    *operational.OPERATIONS,
    Operation("GET", "/openapi.json", openapi, None, dict[str, Any], "This document", name="openapi"),
    *model_list.OPERATIONS, *OPENAI, *scoring.OPERATIONS, *classifying.OPERATIONS, *pooling.OPERATIONS,
    *text_embeddings_inference.OPERATIONS, *labelling.OPERATIONS, *tokens.OPERATIONS, *ANTHROPIC, *ollama.OPERATIONS,
    *swapping.OPERATIONS, *dashboard.OPERATIONS)


class Routes:
    """ASGI application that selects the endpoint by path and method.

    One dictionary lookup finds the endpoint of a path without a variable part; a path that ends with ``{id}`` is found
    by its beginning. Each endpoint converts its own errors to responses, so no middleware is needed: Starlette's
    application and router added 20 us to a request of 240 us.
    """

    def __init__(self, operations: tuple[Operation, ...], state: State) -> None:
        self._state = state
        self._endpoints: dict[str, dict[str, Endpoint]] = {}
        for operation in operations:
            methods = self._endpoints.setdefault(operation.path, {})
            methods[operation.method] = Endpoint(operation, state)
            if operation.method == "GET":
                methods["HEAD"] = methods["GET"]
        self._prefixes = [(path.removesuffix("{id}"), self._endpoints.pop(path)) for path in tuple(self._endpoints)
                          if path.endswith("{id}")]
        self._paths = "GET /openapi.json lists the paths. The base URL of OpenAI's clients ends in /v1, that of " \
            "Anthropic's and Ollama's does not." if "/openapi.json" in self._endpoints else \
            "The paths are " + ", ".join(f"{operation.method} {operation.path}" for operation in operations) + "."

    def _find(self, path: str) -> dict[str, Endpoint] | None:
        found = self._endpoints.get(path)
        if found is None:
            found = next((methods for prefix, methods in self._prefixes
                          if path.startswith(prefix) and len(path) > len(prefix)), None)
        return found

    def route(self, path: str) -> str:
        """Return the path of the operations that serve a path, with its variable part; "": there are none."""
        methods = self._find(path)
        return "" if methods is None else next(iter(methods.values())).operation.path

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        methods = self._find(scope["path"])
        endpoint = methods.get(scope["method"]) if methods is not None else None
        if endpoint is not None:
            await endpoint(scope, receive, send)
            return
        refusal = Refusal("not_found", self._paths) if methods is None else Refusal("method_not_allowed")
        response = refusal_response(refusal, scope)
        self._state.refused(refusal, scope)
        log_refused(scope, refusal, response.status_code)
        if methods is not None:
            response.headers["allow"] = ", ".join(methods)
        await response(scope, receive, send)


class Application:
    """ASGI application that forwards HTTP requests, handles lifespan events, and closes WebSockets.

    Args:
        app: Application for connections of type ``http``.
        shutdown: Coroutine function for the lifespan event ``shutdown``.
        begin: Idempotent function, called on the event loop by every request and lifespan event; None: there is none.
    """

    def __init__(self, app: App, shutdown: Callable[[], Awaitable[object]] | None = None,
                 begin: Callable[[], object] | None = None) -> None:
        self._app, self._shutdown, self._begin = app, shutdown, begin

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if self._begin is not None:
            self._begin()
        if scope["type"] == "http":
            root = scope.get("root_path")
            if root and scope["path"].startswith(root + "/"):  # another application mounts this one under a prefix
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


def create_app(models: Iterable[str | os.PathLike[str]] | None = None, *, pool: Pool | PoolConfig | None = None,
               settings: Settings | None = None, catalogue: bool = True, compute: str = "auto",
               adapters: Iterable[str] | None = None) -> Application:
    """Create the server as an ASGI application, to be run by an ASGI server or mounted in another application.

    ``uvicorn mpool.server:app --factory`` calls this function without arguments. Environment variables then configure
    the server, as for ``mpool serve``: ``MPOOL_SERVER_MODELS`` (separated by commas), ``MPOOL_SERVER_MEMORY`` and those
    of its other options, or ``MPOOL_SERVER_CONFIG``, the path of a file with them.

    The ASGI server owns the socket, so ``host``, ``port``, ``max_header``, ``max_header_count``, ``max_connections``
    and the four timeouts of ``settings`` have no effect here. Without a token, the application serves only requests
    that arrive at a loopback address or a Unix socket.

    Args:
        models: Models to serve, as for :class:`mpool.server.models.Models`; None: those of ``MPOOL_SERVER_MODELS``.
        pool: A :class:`mpool.Pool` that runs the requests, and that the caller closes; or the
            :class:`mpool.PoolConfig` of a new pool, which the lifespan event ``shutdown`` closes; None: a new pool with
            the defaults, and with ``settings.grace`` as its ``shutdown_grace``. Starlette and FastAPI send no lifespan
            events to an application that they mount: pass a pool, and close it in the lifespan of the outer one.
        settings: Token, hosts, origins and limits; None: the defaults and the environment variables.
        catalogue: Serve also the models of the catalogue whose files are on this machine.
        compute: Compute type of all models.
        adapters: Adapters of the models, as for :class:`mpool.server.models.Models`; None: those of
            ``MPOOL_SERVER_ADAPTERS``.

    Raises:
        InvalidArgument: A setting or the name of a model is not allowed. ``pool`` is of another type.
        MpoolError: A model cannot be registered; see :func:`mpool.register`. An adapter cannot be read.

    Example:
        >>> from mpool.server import create_app
        >>> app = create_app(["all-MiniLM-L6-v2"], pool=mpool.PoolConfig(threads=2, memory_bytes=4 << 30))
    """
    if not isinstance(pool, (Pool, PoolConfig, type(None))):
        refuse("pool", pool, "a Pool, a PoolConfig or None")
    given = configure()
    if settings is None:
        settings, file = given.settings()
        if file is not None:
            file.write()
    if models is None:
        models = given.get("models", ())
        catalogue = catalogue and not given.get("only", False)
    if adapters is None:
        adapters = given.get("adapters", ())
    if compute == "auto":
        compute = given.get("compute", "auto")
    own = not isinstance(pool, Pool)
    used = pool if isinstance(pool, Pool) else Pool(pool or given.pool_config(shutdown_grace=settings.grace))
    try:
        state = State(settings, used, models, catalogue, compute, adapters)
    except BaseException:
        if own:
            used.close()
        raise
    state.hosts = None  # the ASGI server chooses the port: accept the local address of each request

    async def shutdown() -> None:
        state.stopping = True
        if own:
            await native_calls.CLOSING.arun(used.close)

    return make_app(state, shutdown=shutdown)


def make_app(state: State, operations: tuple[Operation, ...] = OPERATIONS,
             shutdown: Callable[[], Awaitable[object]] | None = None) -> Application:
    """Create the guarded application of a server.

    Args:
        state: State that all requests share.
        operations: Routes.
        shutdown: Coroutine function for the lifespan event ``shutdown``.
    """
    routes = Routes(operations, state)
    return Application(Counted(guarded(routes, state), routes.route, state.http), shutdown, state.begin)


def guarded(app: App, gate: GuardState) -> App:
    """Wrap an application in CORS for the allowed origins, and in the guards: Host and Origin, then the token."""
    return CrossOrigin(HostGuard(TokenGuard(app, gate), gate), gate)


__all__ = ["OPERATIONS", "Application", "Routes", "create_app", "guarded", "make_app"]
