"""A replica: a pool with its own limits, and the server's routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from ...errors import ShuttingDown
from ...pool import Pool
from ...records import to_standard_error
from ...server import dashboard, swapping
from ...server.application import OPERATIONS, Routes
from ...server.disconnects import DisconnectReports
from ...server.settings import Settings
from ...server.state import State
from .race import HEARTBEAT
from .routing import DEPTH


def operations() -> tuple[Any, ...]:
    """Return the operations of a replica: those of ``mpool serve`` except ``/metrics``, the dashboard and swaps, which
    concern a single pool."""
    own = {operation.path for operation in (*dashboard.OPERATIONS, *swapping.OPERATIONS)} | {"/metrics"}
    return tuple(operation for operation in OPERATIONS if operation.path not in own)


class Pools:
    """A replica. Ray Serve constructs it in a process of its own.

    Args:
        models, catalogue, compute, adapters: see :class:`mpool.server.models.Models`.
        settings: limits of requests.
        load: load the models before the first request.
        cpus, memory_mb, offline, weights, keep_alive, kv_dtype, queue_capacity, pool: see
            :func:`mpool.integrations.ray._share.config`.
    """

    def __init__(self, models: Sequence[str], catalogue: bool, compute: str, settings: Settings, load: bool, cpus: int,
                 memory_mb: int, offline: bool | None, weights: str = "auto", adapters: Sequence[str] = (),
                 keep_alive: str = "5m", kv_dtype: str = "auto", queue_capacity: int | None = None,
                 pool: Mapping[str, Any] = {}) -> None:
        from . import _share

        to_standard_error()  # Ray keeps it in the log of the replica, and shows it where the application was started
        self.pool = Pool(_share.config(cpus, memory_mb, offline, settings.grace, weights, keep_alive, kv_dtype,
                                       queue_capacity, pool))
        self.state = State(settings, self.pool, models, catalogue, compute, adapters)
        self._app = Routes(operations(), self.state)
        self._gauges: dict[str, Any] = {}
        if load:
            for served in self.state.models.all():
                self.pool.load(served.model)

    async def respond(self, scope: Mapping[str, Any], body: bytes) -> AsyncIterator[list[dict[str, Any]]]:
        """Serve a request.

        Args:
            scope: the plain data of an ASGI scope.
            body: the complete body.

        Yields:
            lists of ASGI messages, and empty lists as heartbeats: one when the replica has accepted the request,
            and one every :data:`mpool.integrations.ray.race.HEARTBEAT` seconds.
        """
        yield []
        loop = asyncio.get_running_loop()
        messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        connection, received = DisconnectReports(), False
        timer: asyncio.TimerHandle

        async def receive() -> dict[str, Any]:
            nonlocal received
            if received:
                await asyncio.Event().wait()  # the end of this generator reports a disconnect
            received = True
            return {"type": "http.request", "body": body, "more_body": False}

        def beat() -> None:
            nonlocal timer
            messages.put_nowait({})
            timer = loop.call_later(HEARTBEAT, beat)

        timer = loop.call_later(HEARTBEAT, beat)
        task = asyncio.ensure_future(self._app({**scope, "mpool.connection": connection}, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            more = True
            while more:
                ready = [await messages.get()]
                while not messages.empty():
                    ready.append(messages.get_nowait())
                more = ready[-1] is not None
                batch = [message for message in ready if message]
                if more or batch:
                    yield batch
            await task  # raises the application's exception
        finally:
            timer.cancel()
            if not task.done():
                (connection.on_disconnect or task.cancel)()
                await asyncio.wait([task])

    def _request_counts(self) -> tuple[int, int]:
        """Return the numbers of queued and running requests."""
        rows = self.pool.ps()
        return sum(row.queued for row in rows), sum(row.running for row in rows)

    def resident(self) -> list[str]:
        """Return the names of the models that are loaded or loading."""
        resident = {row.model for row in self.pool.ps() if row.state in ("loading", "ready")}
        return [served.name for served in self.state.models.all()
                if resident.intersection(served.model.core_keys)]

    async def record_routing_stats(self) -> dict[str, Any]:
        """Update Ray's metrics and return the statistics for :class:`mpool.integrations.ray.routing.WarmRouter`. Ray
        Serve calls this once a second."""
        queued, running = self._request_counts()
        models = self.resident()
        self._measure("mpool_calls_waiting", "Requests queued in the pool", queued)
        self._measure("mpool_calls_running", "Requests running in the pool", running)
        self._measure("mpool_models_resident", "Models that are loaded or loading", len(models))
        self._measure("mpool_memory_used_bytes", "Bytes of models, caches and queues", self.pool.health().memory.used)
        return {"models": models, "calls": queued + running}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of requests in the pool for :class:`mpool.integrations.ray.routing.CallsPolicy`. HTTP
        requests that wait outside the pool do not count."""
        return {DEPTH: float(sum(self._request_counts()))}

    def _measure(self, name: str, description: str, value: float) -> None:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description)
        self._gauges[name].set(value)

    async def check_health(self) -> None:
        """Check that the replica can serve. Ray Serve replaces the replica if this raises.

        Raises:
            ShuttingDown: the pool was closed.
        """
        if self.pool.closed:
            raise ShuttingDown("the pool is closed")

    def __del__(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()


__all__ = ["Pools", "operations"]
