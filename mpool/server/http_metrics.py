"""Requests of a server by route and status. The labels come from the table of routes and from the server's own status
codes, never from a client: a path without a route is counted without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..runtime.prometheus import counter, histogram
from ..runtime.request_metrics import Histogram

if TYPE_CHECKING:
    from .guard import App, Scope

#: Status of a request whose client disconnected before the response began; the number is nginx's.
_DISCONNECTED = 499


class HttpMetrics:
    """Counts of requests. Must be used only on the thread of the server's event loop."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        self._times: dict[str, Histogram] = {}

    def add(self, route: str, status: int, seconds: float) -> None:
        """Count a request that ended.

        Args:
            route: path of its operation, such as ``/v1/models/{id}``; "": it has none.
            status: HTTP status.
            seconds: time from its head to the end of its response.
        """
        self._counts[route, status] = self._counts.get((route, status), 0) + 1
        times = self._times.get(route)
        if times is None:
            times = self._times[route] = Histogram()
        times.add(seconds)

    def refused(self, status: int) -> None:
        """Count a request that was refused before its head was complete, or whose connection was refused."""
        self.add("", status, 0.0)

    def lines(self) -> Iterator[str]:
        """Return the lines in Prometheus' text format."""
        yield from counter("http_requests", "HTTP requests that ended, by route and status; 499: the client "
                           "disconnected before the response began; without a route: the path has none, or the "
                           "connection refused the request",
                           [({"route": route, "status": str(status)}, count)
                            for (route, status), count in sorted(self._counts.items())])
        yield from histogram("http_request_seconds", "seconds from the head of a request to the end of its response",
                             [({"route": route}, one.as_dict()) for route, one in sorted(self._times.items())])


class Counted:
    """ASGI middleware that counts each request, also those that the guards refuse.

    Args:
        app: Application.
        route: Function from the path of a request to its route, "" if it has none.
        metrics: Counts of the server.
    """

    def __init__(self, app: App, route: Callable[[str], str], metrics: HttpMetrics) -> None:
        self._app, self._route, self._metrics = app, route, metrics

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        began, status = time.monotonic(), 0

        async def send_counted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        except Exception:
            status = status or 500  # the response that the server sends
            raise
        finally:
            refused = scope.get("mpool.refusal")  # by the connection, while the application waited for the body
            self._metrics.add(self._route(scope["path"]), status or (refused.row.status if refused else _DISCONNECTED),
                              time.monotonic() - began)


__all__ = ["Counted", "HttpMetrics"]
