"""The ASGI application: routes of all protocols behind one door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import dashboard, ollama, operational
from .errors import Refusal
from .guard import App, Door, Gate, Lock, Scope, answer
from .openai import OPERATIONS as OPENAI
from .operations import Endpoint, Operation

if TYPE_CHECKING:
    from .state import State

#: Everything that the server does, in the order of the OpenAPI document.
OPERATIONS: tuple[Operation, ...] = (*operational.OPERATIONS, *OPENAI, *ollama.OPERATIONS,
                                     *dashboard.OPERATIONS)


class Routes:
    """The endpoints by path and method. No path has a part that varies, so that one look finds it; and an endpoint
    answers for all its errors itself, so that nothing stands around it: Starlette's own application and router took
    20 us more of a request, of 240 in all."""

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


def make_app(state: State, operations: tuple[Operation, ...] = OPERATIONS) -> App:
    """The application of a server.

    Args:
        state: what its requests share.
        operations: what it does.
    """
    return guarded(Routes(operations, state), state)


def guarded(app: App, gate: Gate) -> App:
    """An application behind the server's guards: Host and Origin, then CORS, then the token."""
    app = Lock(app, gate)
    origins = gate.settings.allowed_origins
    if origins:
        from starlette.middleware.cors import CORSMiddleware

        app = CORSMiddleware(app, allow_origins=origins, allow_methods=("GET", "POST"),
                             allow_headers=("authorization", "content-type"))
    return Door(app, gate)


__all__ = ["OPERATIONS", "Routes", "guarded", "make_app"]
