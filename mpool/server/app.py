"""The ASGI application: routes of all protocols behind one door."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from . import ollama, operational
from .errors import Refusal, refusal_of
from .guard import Door, Lock, answer
from .openai import OPERATIONS as OPENAI
from .operations import Endpoint, Operation

if TYPE_CHECKING:
    from .state import State

#: Everything that the server does, in the order of the OpenAPI document.
OPERATIONS: tuple[Operation, ...] = (*operational.OPERATIONS, *OPENAI, *ollama.OPERATIONS)


def make_app(state: State, operations: tuple[Operation, ...] = OPERATIONS) -> Starlette:
    """The application of a server.

    Args:
        state: what its requests share.
        operations: what it does.
    """
    middleware = [Middleware(Door, state=state)]  # type: ignore[arg-type]
    if state.settings.allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        middleware.append(Middleware(CORSMiddleware, allow_origins=state.settings.allowed_origins,
                                     allow_methods=("GET", "POST"), allow_headers=("authorization", "content-type")))
    middleware.append(Middleware(Lock, state=state))  # type: ignore[arg-type]
    routes = [Route(operation.path, Endpoint(operation, state), methods=[operation.method])
              for operation in operations]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={404: _http, 405: _http, Exception: _any})
    app.router.redirect_slashes = False  # a redirect would name the host that the client sent
    app.state.server = state
    return app


async def _http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    response = answer(Refusal({404: "not_found", 405: "method_not_allowed"}.get(status, "internal")), request.url.path)
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response


async def _any(request: Request, error: Exception) -> Response:
    return answer(refusal_of(error, "a request"), request.url.path)


__all__ = ["OPERATIONS", "make_app"]
