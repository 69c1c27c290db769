"""Health of a pool: pings, an overall status, a deep check, and a view per capability."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import _core
from ..host import native_calls
from ..host.native_calls import NativeCalls
from . import deadlines as _deadlines
from .latency import quantiles

if TYPE_CHECKING:
    from .hosts import Host

#: Seconds after which a queue that is still full counts as persistently full.
STAYS = 0.5
#: A worker is slow if its time per request exceeds this multiple of the median of the model's other workers. Only
#: workers that served at least this many requests count.
SLOW, SLOW_CALLS = 4.0, 8


@dataclass(frozen=True, slots=True)
class Pong:
    """A worker's response to :meth:`mpool.Pool.ping`. Busy workers respond too.

    Attributes:
        model: key of the worker's model.
        worker_id: number of the worker, unique in the process.
        state: ``"spawning"``, ``"loading"``, ``"ready"``, ``"processing"``, ``"idle"`` or ``"evicting"``.
        busy: the worker has an active request.
        queue_depth: requests that wait for its model.
        timestamp: seconds of ``time.monotonic()``.
    """

    model: str
    worker_id: int
    state: str
    busy: bool
    queue_depth: int
    timestamp: float


@dataclass(frozen=True, slots=True)
class Workers:
    """Counts of workers.

    Attributes:
        total: workers that serve requests, or are being evicted.
        busy: workers with an active request.
        idle: workers without one.
        dead: workers that were abandoned because they made no progress.
    """

    total: int
    busy: int
    idle: int
    dead: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a pool.

    Attributes:
        used, limit, available: bytes.
        pressure: ``"low"``, ``"normal"``, ``"high"`` or ``"critical"``: ``used`` is below 50, 70, 85 percent of the
            limit, or above that.
        utilisation: ``used`` as a fraction of ``limit``, 0 to 1.
    """

    used: int
    limit: int
    available: int
    pressure: str
    utilisation: float


@dataclass(frozen=True, slots=True)
class ModelHealth:
    """Health of a model that is or was in use.

    Attributes:
        state: as in :class:`mpool.debug.ModelRow`.
        breaker: state of the circuit breaker: ``"closed"``, ``"open"``, ``"half-open"``.
        workers: counts of the model's workers.
        queue_depth, queue_capacity: waiting requests, and their maximum, of the fullest service class (requests of one
            input, or of several).
        p50, p99: estimates of the median and the 99th percentile of the latency, in seconds from submission to
            completion; None: no request has completed yet.
        error_rate: failed requests as a fraction of the accepted ones, 0 to 1. Timeouts and cancellations do not count
            as failures.
        last_error: name of the error of the last request without a result, also ``"TIMEOUT"`` and ``"CANCELLED"``;
            None: every request had a result.
        deaths: workers that died: that failed, were killed or were abandoned.
    """

    state: str
    breaker: str
    workers: Workers
    queue_depth: int
    queue_capacity: int
    p50: float | None
    p99: float | None
    error_rate: float
    last_error: str | None
    deaths: int = 0


@dataclass(frozen=True, slots=True)
class Health:
    """Result of :func:`mpool.health`.

    Attributes:
        status: ``"healthy"``; ``"degraded"``: the pool serves requests, but with the problems in ``reasons``;
            ``"unhealthy"``: the pool is closed, or every model in use has failed because its workers died again and
            again. A model that could not be loaded makes the pool ``"degraded"``.
        reasons: problems that were found, as texts.
        workers, memory: totals of all models.
        models: health of each model by key.
        native_calls: state of the threads of the process that decode images (``"images"``), tokenize long texts
            (``"texts"``), compile grammars (``"grammars"``), and so on, as far as they were used.
    """

    status: Literal["healthy", "degraded", "unhealthy"]
    reasons: tuple[str, ...]
    workers: Workers
    memory: Memory
    models: Mapping[str, ModelHealth]
    native_calls: Mapping[str, NativeCalls]


def pongs(pool: Host, model: Any) -> tuple[Pong, ...]:
    """See :meth:`mpool.Pool.ping`."""
    keys = None if model is None else _core_keys(pool, model)
    registry = pool._registry
    rows = registry.entries() if registry is not None else []
    now = time.monotonic()
    return tuple(Pong(row["key"], worker["id"], worker["state"], worker["running"] > 0, row["queued"], now)
                 for row in rows if keys is None or row["key"] in keys for worker in row["worker"])


def _core_keys(pool: Host, model: Any) -> list[str]:
    """Return the core keys of a model. Reads no files if the model was used before or is in the catalogue."""
    return (pool._known(model, None) or pool._find(model)).core_keys()


def health(pool: Host) -> Health:
    """See :func:`mpool.health`."""
    registry = pool._registry
    rows = registry.entries() if registry is not None else []
    stats = pool._stats()
    models: dict[str, ModelHealth] = {}
    reasons: list[str] = []
    failed = 0
    for row in rows:
        models[row["key"]] = _model(row)
        reasons += complaints(pool, row)
        failed += _is_broken(row)
    used, limit = stats["memory_used"], stats["memory_limit"]
    memory = Memory(used, limit, max(limit - used, 0), stats["pressure"], used / limit if limit else 0.0)
    if memory.pressure == "critical":
        reasons.append(f"memory is critical: {used / 1e6:,.0f} MB of {limit / 1e6:,.0f} MB are in use")
    native = native_calls.statuses()
    reasons += native_calls.reasons(native)
    total = Workers(*(sum(getattr(model.workers, name) for model in models.values())
                      for name in ("total", "busy", "idle", "dead")))
    status: Literal["healthy", "degraded", "unhealthy"] = "degraded" if reasons else "healthy"
    used_models = sum(row["state"] != "cold" for row in rows)
    if pool._closed:
        status, reasons = "unhealthy", ["the pool is closed or shutting down", *reasons]
    elif failed and failed == used_models:
        status = "unhealthy"
    return Health(status, tuple(reasons), total, memory, models, native)


def _is_broken(row: Mapping[str, Any]) -> bool:
    """Return True if a model failed because its workers died. A model that could not be loaded, for
    example for lack of memory, does not make the process useless: a new process could not load it either.
    """
    return (row["state"] == "failed" and row["last_error"] != "MEMORY_EXHAUSTED"
            and any(count for reason, count in row["deaths"].items() if reason not in ("killed", "changed_files")))


def _fullest(row: Mapping[str, Any]) -> tuple[int, int]:
    """Return the waiting requests and the capacity of the service class whose queue is fullest."""
    return max(zip(row["waiting"], row["capacity"]), key=lambda queue: queue[0] / queue[1])


def _model(row: Mapping[str, Any]) -> ModelHealth:
    latency, calls = row["latency"], row["calls"]
    known: dict[str, float] = quantiles(latency) if latency["count"] else {}
    return ModelHealth(
        row["state"], row["breaker"], Workers(row["workers"], row["busy"], row["workers"] - row["busy"], row["dead"]),
        *_fullest(row), known.get("p50"), known.get("p99"),
        min(1.0, row["errors"] / calls) if calls else float(row["errors"] > 0), row["last_error"] or None,
        sum(row["deaths"].values()))


def complaints(pool: Host, row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of a model, as texts. ``row`` is one of the core's entries."""
    key, now = row["key"], time.monotonic()
    if row["state"] == "failed":
        yield f"{key}: failed" + (f" ({row['last_error']})" if row["last_error"] else "")
    if row["breaker"] != "closed":
        reason = f" ({row['last_error']})" if row["last_error"] else ""
        yield f"{key}: its circuit breaker is {row['breaker']}{reason}"
    if row["dead"]:
        yield f"{key}: {row['dead']} workers made no progress and were abandoned"
    waiting, most = _fullest(row)
    if waiting >= most:
        since = pool._full_since.setdefault(key, now)
        if now - since >= STAYS:
            yield f"{key}: its queue stays full ({waiting} requests wait)"
    else:
        pool._full_since.pop(key, None)
    paces = {worker["id"]: worker["busy_seconds"] / worker["served"] for worker in row["worker"]
             if worker["served"] >= SLOW_CALLS}
    if len(paces) < 2:
        return

    for worker, pace in paces.items():
        mates = [other for number, other in paces.items() if number != worker]
        if pace > SLOW * float(np.median(mates)):
            yield f"{key}: worker {worker} takes {pace / np.median(mates):.0f} times as long per request as the others"


def problems(pool: Host) -> dict[str, str]:
    """Return the first problem of every model that has one, by key."""
    registry = pool._registry
    if registry is None or pool._closed:
        return {}
    found = {row["key"]: next(complaints(pool, row), None) for row in registry.entries()}
    return {key: reason for key, reason in found.items() if reason is not None}


_checks = itertools.count()
#: Minimum height and width of the image that :func:`check` makes.
_SIDE = 32


def check(pool: Host, model: Any, timeout: float | None) -> float:
    """See :meth:`mpool.Pool.check`."""
    _deadlines.seconds_of(timeout)  # raises for an invalid timeout before files are read
    entry = pool._find(model)
    began = time.monotonic()
    if entry.capability == "text_embedding":
        # a different text each time, because requests with equal texts share one computation
        pool.embed(f"check {next(_checks)}", model, priority="critical", timeout=timeout)
    elif entry.capability == "text_to_text":
        pool.generate("check", model, max_tokens=1, temperature=0, priority="critical", timeout=timeout)
    elif entry.capability == "text_to_image":
        side = 2 * entry.describe().pipeline.scale  # the smallest image
        pool.generate_image("check", model, width=side, height=side, num_inference_steps=1, seed=0, priority="critical",
                            timeout=timeout)
    else:
        image = entry.describe().image
        side = max(_SIDE if image is None else image.image_size, _SIDE)
        # a different image each time: the prefix cache keeps the rows of images in prompts
        pixels = np.full((side, side, 3), next(_checks) % 256, dtype=np.uint8)
        if entry.capability == "vision":
            pool.vision(pixels, "check", model, max_tokens=1, temperature=0, priority="critical", timeout=timeout)
        else:
            pool.embed_image(pixels, model, priority="critical", timeout=timeout)
    return time.monotonic() - began


# ---- capabilities --------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class CapabilityPool:
    """Snapshot of all models of a capability. See :attr:`mpool.Pool.pools`.

    Attributes:
        capability: name of the capability.
        policy: default policy that chooses the worker of a request.
        models: keys of the models that are or were in use.
        workers: counts of their workers.
        queue_depth, running: waiting and active requests.
        queue_capacity: maximum waiting requests per model: requests of one input, requests of several inputs.
    """

    capability: str
    policy: str
    models: tuple[str, ...]
    workers: Workers
    queue_depth: int
    running: int
    queue_capacity: tuple[int, int]


class CapabilityPools(Mapping[str, CapabilityPool]):
    """Mapping from a capability to a snapshot of its models. Each look-up takes a new snapshot."""

    def __init__(self, pool: Host) -> None:
        self._pool = pool

    def __getitem__(self, capability: str) -> CapabilityPool:
        pool = self._pool
        policies = {name: policy for name, _, policy in _core.capabilities()}
        if capability not in policies:
            raise KeyError(f"{capability!r} is not a capability; the capabilities are " + ", ".join(policies))
        registry = pool._registry
        rows = [row for row in (registry.entries() if registry is not None else ()) if row["capability"] == capability]
        busy, total = sum(row["busy"] for row in rows), sum(row["workers"] for row in rows)
        options = pool.config._registry_options()
        capacity = options["queue_capacity"][capability]
        return CapabilityPool(
            capability, options["policy"].get(capability, policies[capability]), tuple(row["key"] for row in rows),
            Workers(total, busy, total - busy, sum(row["dead"] for row in rows)), sum(row["queued"] for row in rows),
            sum(row["running"] for row in rows), capacity if isinstance(capacity, tuple) else (capacity, capacity))

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _, _ in _core.capabilities()])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return "\n".join(repr(found) for found in self.values())
