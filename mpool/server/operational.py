"""How the server is: health, metrics, and what it can do."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.responses import Response

from .operations import Context, Operation, json_answer


class HealthAnswer(msgspec.Struct):
    """How the pool is, see :func:`mpool.health`; ``streams``: answers that are being streamed."""

    status: str
    uptime: float
    streams: int


async def health(context: Context, body: None) -> Response:
    """Waits for no work; needs no token, and so says little."""
    state = context.state
    found = "unhealthy" if state.stopping else state.pool.health().status
    return json_answer(HealthAnswer(found, round(time.monotonic() - state.started, 3), state.streams),
                       503 if found == "unhealthy" else 200)


async def metrics(context: Context, body: None) -> Response:
    """Prometheus' text format."""
    return Response(context.state.pool.metrics("prometheus"), media_type="text/plain; version=0.0.4; charset=utf-8")


async def openapi(context: Context, body: None) -> Response:
    """Made once."""
    from .openapi import document

    return Response(document(), media_type="application/json")


OPERATIONS = (
    Operation("GET", "/health", health, None, HealthAnswer, "How the server is", name="health"),
    Operation("GET", "/metrics", metrics, None, None, "Counters for Prometheus", name="metrics"),
    Operation("GET", "/openapi.json", openapi, None, dict[str, Any], "This document", name="openapi"),
)

__all__ = ["OPERATIONS", "HealthAnswer"]
