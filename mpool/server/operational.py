"""Routes for operators: health and metrics."""

from __future__ import annotations

import time

import msgspec
from starlette.responses import Response

from .errors import Refusal
from .operations import Context, Operation, json_response


class HealthResponse(msgspec.Struct):
    """Health of the pool.

    Attributes:
        status: Status as in :func:`mpool.health`.
        uptime: Seconds since the server started.
        streams: Number of responses that are being streamed.
        worker_deaths: Number of workers that died since the server started.
        starved: Kinds of native calls whose threads are starved, such as ``images``; see :func:`mpool.health`.
    """

    status: str
    uptime: float
    streams: int
    worker_deaths: int
    starved: list[str]


async def health(context: Context, body: None) -> Response:
    """Report the health. Never waits for other requests. Requires no token, so the response contains few facts."""
    state = context.state
    seen = state.pool.health()
    found = "unhealthy" if state.stopping else seen.status
    if found == "unhealthy":  # for the log
        context.refused = Refusal("shutting_down" if state.stopping or state.pool.closed else "circuit_open",
                                  cause="; ".join(seen.reasons) or "the server is stopping")
    starved = [name for name, calls in seen.native_calls.items() if calls.starved]
    uptime, deaths = round(time.monotonic() - state.started, 3), sum(one.deaths for one in seen.models.values())
    return json_response(HealthResponse(found, uptime, state.streams, deaths, starved),
                       503 if found == "unhealthy" else 200)


async def metrics(context: Context, body: None) -> Response:
    """Return the metrics in Prometheus' text format."""
    state = context.state
    text = state.pool.metrics("prometheus") + "".join(f"{line}\n" for line in state.http.lines())
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


OPERATIONS = (
    Operation("GET", "/health", health, None, HealthResponse, "Health of the server", name="health"),
    Operation("GET", "/metrics", metrics, None, None, "Metrics in Prometheus' text format", name="metrics"),
)

__all__ = ["OPERATIONS", "HealthResponse"]
