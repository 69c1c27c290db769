"""Routes for operators: health, metrics and the OpenAPI document."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.responses import Response

from .operations import Context, Operation, json_answer


class HealthAnswer(msgspec.Struct):
    """Health of the pool, see :func:`mpool.health`; ``streams``: number of responses that are being streamed."""

    status: str
    uptime: float
    streams: int


async def health(context: Context, body: None) -> Response:
    """Report the health. Never waits for requests. Needs no token, so it reveals little."""
    state = context.state
    found = "unhealthy" if state.stopping else state.pool.health().status
    return json_answer(HealthAnswer(found, round(time.monotonic() - state.started, 3), state.streams),
                       503 if found == "unhealthy" else 200)


async def metrics(context: Context, body: None) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(context.state.pool.metrics("prometheus"), media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(context: Context, body: None) -> Response:
    """Return the OpenAPI document, which is made once."""
    from .openapi import document

    return Response(document(), media_type="application/json")


OPERATIONS = (
    Operation("GET", "/health", health, None, HealthAnswer, "Health of the server", name="health"),
    Operation("GET", "/metrics", metrics, None, None, "Counters for Prometheus", name="metrics"),
    Operation("GET", "/openapi.json", openapi, None, dict[str, Any], "This document", name="openapi"),
)

__all__ = ["OPERATIONS", "HealthAnswer"]
