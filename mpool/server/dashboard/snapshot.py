"""The data of the dashboard as one struct: state of the pool and requests in flight."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING

from msgspec import Struct

from ... import __version__, _core
from ...runtime.latency import BOUNDS

if TYPE_CHECKING:
    from ..state import State


class WorkerState(Struct):
    """State of a worker; see :class:`mpool.results.Pong`. ``served``: requests that ended on it. ``memory``: bytes of
    its caches and working memory."""

    id: int
    state: str
    busy: bool
    served: int
    memory: int


class WorkerFault(Struct):
    """Why a worker died or could not start. ``time``: seconds since 1970. ``code``: name of the error."""

    worker: int
    time: float
    code: str
    reason: str


class ModelState(Struct):
    """State of a model that is or was in use; see :func:`mpool.ps` and :func:`mpool.health`.

    ``keep_alive``: seconds, null if the model is never unloaded. ``p50``, ``p99``: latency in seconds, null if no
    request was completed yet. ``latency``: number of completed requests per bucket; ``latency_bounds`` of the snapshot
    are the upper bounds of the buckets. ``first_token``: median time to the first token in seconds, of the last
    completions of the model, null if there is none. ``needed``: bytes of memory that it was expected to need before it
    was loaded. ``state_bytes``, ``snapshot_bytes``, ``snapshots``, ``prefix_tokens``: as in
    :class:`mpool.debug.ModelRow`. ``load_seconds``: duration of the load. ``faults``: the last faults of its workers,
    the latest first.
    """

    key: str
    capability: str
    state: str
    compute: str | None
    isolation: str
    workers: list[WorkerState]
    dead: int
    queued: int
    queue_capacity: int
    running: int
    breaker: str
    policy: str
    pinned: bool
    keep_alive: float | None
    idle_seconds: float
    model_bytes: int
    engine_bytes: int
    state_bytes: int
    snapshot_bytes: int
    snapshots: int
    prefix_tokens: int
    calls: int
    errors: int
    last_error: str
    p50: float | None
    p99: float | None
    latency: list[int]
    first_token: float | None
    needed: int
    load_seconds: float
    faults: list[WorkerFault]


class PoolState(Struct):
    """State of all models with a capability; see :attr:`mpool.Pool.pools`."""

    capability: str
    policy: str
    models: int
    workers: int
    busy: int
    dead: int
    queue_depth: int
    running: int


class MemoryState(Struct):
    """Memory in bytes; see :class:`mpool.Health`. ``by_kind``: bytes by purpose of the memory."""

    used: int
    limit: int
    available: int
    pressure: str
    by_kind: dict[str, int]


class RequestState(Struct):
    """A request in flight that uses a model.

    ``seconds``: time since the body was complete. ``chunks``: number of stream chunks sent, null if no stream has
    started.
    """

    id: str
    path: str
    model: str
    seconds: float
    chunks: int | None


class Snapshot(Struct):
    """State of the pool at one time.

    ``time``: seconds of a monotonic clock, for the computation of rates. ``counters``: counters since the creation of
    the pool, with the names of :func:`mpool.metrics`. ``latency_bounds``: upper bounds of the latency buckets in
    seconds, null for unbounded.
    """

    version: str
    time: float
    uptime: float
    status: str
    reasons: list[str]
    compute_threads: int
    compute_threads_leased: int
    streams: int
    memory: MemoryState
    pools: list[PoolState]
    models: list[ModelState]
    requests: list[RequestState]
    counters: dict[str, int]
    latency_bounds: list[float | None]


_BOUNDS: list[float | None] = [bound if math.isfinite(bound) else None for bound in BOUNDS]


#: Maximum number of faults of a model, and of completions whose time to the first token counts.
_FAULTS, _COMPLETIONS = 4, 50
_GENERATING = ("text_to_text", "vision")


def snapshot(state: State) -> Snapshot:
    """Return the state of a server's pool and of its requests in flight."""
    pool, now = state.pool, time.monotonic()
    health, found = pool.health(), pool.metrics()
    rows = {row["key"]: row for row in pool.registry.entries()} if found["models"] else {}
    deaths, first_tokens = state.events.deaths(), _first_tokens(state)
    models = []
    for row in pool.ps():
        known, counted, core = health.models.get(row.model), found["models"].get(row.model), rows.get(row.model)
        if known is None or counted is None or core is None:  # the model was added between the reads
            continue
        workers = [WorkerState(one["id"], one["state"], one["running"] > 0, one["served"], one["engine_bytes"])
                   for one in core["worker"]]
        faults = [WorkerFault(one.worker or 0, one.time, one.code or "", one.reason)
                  for one in deaths.get(row.model, ())[:_FAULTS]]
        models.append(ModelState(
            row.model, row.capability, row.state, row.compute, row.isolation, workers, row.dead,
            known.queue_depth, known.queue_capacity, row.running, row.breaker, row.policy, row.pinned,
            row.keep_alive if math.isfinite(row.keep_alive) else None, row.idle_seconds, row.model_bytes,
            row.engine_bytes, row.state_bytes, row.snapshot_bytes, row.snapshots, row.prefix_tokens, row.calls,
            row.errors, row.last_error, known.p50, known.p99,
            [count for _, count in counted["latency"]["histogram"]],
            first_tokens.get(row.model) if row.capability in _GENERATING else None,
            core["predicted_bytes"], core["load_seconds"], faults))
    memory = health.memory
    return Snapshot(
        __version__, now, time.monotonic() - state.started, "unhealthy" if state.stopping else health.status,
        list(health.reasons), found["compute_threads"], found["compute_threads_leased"], state.streams,
        MemoryState(memory.used, memory.limit, memory.available, memory.pressure, found["bytes_by_kind"]),
        [PoolState(one.capability, one.policy, len(one.models), one.workers.total, one.workers.busy, one.workers.dead,
                   one.queue_depth, one.running) for one in pool.pools.values()],
        models,
        [RequestState(one.id, one.path, one.model, max(0.0, now - one.started), one.chunks)
         for one in state.running.values()],
        {name: found[name] for name, _ in _core.metrics()}, _BOUNDS)


def _first_tokens(state: State) -> dict[str, float]:
    """Return the median time to the first token of the last completions, by the keys of the model in the pool."""
    by_name: dict[str, list[float]] = {}
    for request in reversed(state.history):
        times = by_name.setdefault(request.model, [])
        if request.first_token is not None and len(times) < _COMPLETIONS:
            times.append(request.first_token)
    by_key: dict[str, list[float]] = {}
    for name, times in by_name.items():
        served = state.models.known(name) if times else None
        for key in () if served is None else served.model.core_keys:
            by_key.setdefault(key, []).extend(times)
    return {key: statistics.median(times) for key, times in by_key.items()}


__all__ = ["Snapshot", "snapshot"]
