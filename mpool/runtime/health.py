"""Health of a pool: pings, an overall status, a deep check, and a view per capability."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from .hosts import Host

#: Seconds after which a queue that is still full counts as persistently full.
STAYS = 0.5
#: Slow worker: its time per request exceeds this multiple of the median of the model's other workers, each with this
#: many requests.
SLOW, SLOW_CALLS = 4.0, 8


@dataclass(frozen=True, slots=True)
class Pong:
    """A worker's response to :func:`mpool.ping`. Busy workers respond too.

    Attributes:
        model: key of its model.
        worker_id: its number, unique in the process.
        state: ``"spawning"``, ``"loading"``, ``"ready"``, ``"processing"``, ``"idle"``, ``"evicting"``.
        busy: it has a request.
        queue_depth: requests waiting for its model.
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
    """Counts of workers: serving, busy, idle; dead are those abandoned because they made no progress."""

    total: int
    busy: int
    idle: int
    dead: int


@dataclass(frozen=True, slots=True)
class Memory:
    """The governor's bytes.

    Attributes:
        used, limit, available: bytes.
        pressure: ``"low"``, ``"normal"``, ``"high"``, ``"critical"``: used below 50, 70, 85 percent of the limit, and
            above.
        utilisation: used of limit, 0 to 1.
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
        state: as of :class:`mpool.debug.show.ModelRow`.
        breaker: ``"closed"``, ``"open"``, ``"half-open"``.
        queue_depth, queue_capacity: waiting requests, and the capacity, of the queue that is fullest.
        p50, p99: seconds from submission to response, an upper bound; None: no request was completed yet.
        error_rate: failed requests as a fraction of all, 0 to 1; timeouts and cancellations do not count.
        last_error: name of the last error, or None.
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


@dataclass(frozen=True, slots=True)
class Health:
    """Result of :func:`mpool.health`.

    Attributes:
        status: ``"healthy"``; ``"degraded"``: it serves, but see ``reasons``; ``"unhealthy"``: it does not.
        reasons: why it is not healthy, in words.
        workers, memory: all together.
        models: key -> its health.
    """

    status: Literal["healthy", "degraded", "unhealthy"]
    reasons: tuple[str, ...]
    workers: Workers
    memory: Memory
    models: Mapping[str, ModelHealth]


def pongs(pool: Host, key: Any) -> tuple[Pong, ...]:
    """See :func:`mpool.ping`."""
    keys = None if key is None else _core_keys(pool, key)
    registry = pool._registry
    rows = registry.entries() if registry is not None else []
    now = time.monotonic()
    return tuple(Pong(row["key"], worker["id"], worker["state"], worker["running"] > 0, row["queued"], now)
                 for row in rows if keys is None or row["key"] in keys for worker in row["worker"])


def _core_keys(pool: Host, key: Any) -> list[str]:
    """Keys of a model in the core, without reading files for a model that was used before or is in the catalogue."""
    found = pool._known(key, None) if key is not None else None
    if found is not None:
        return found.core_keys()
    return pool._find(key).core_keys()


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
        reasons += _complaints(pool, row)
        failed += row["state"] == "failed"
    used, limit = stats["memory_used"], stats["memory_limit"]
    memory = Memory(used, limit, max(limit - used, 0), stats["pressure"], used / limit if limit else 0.0)
    if memory.pressure == "critical":
        reasons.append(f"memory: {used / 1e6:,.0f} MB of {limit / 1e6:,.0f} MB are in use")
    total = Workers(*(sum(getattr(model.workers, name) for model in models.values())
                      for name in ("total", "busy", "idle", "dead")))
    status: Literal["healthy", "degraded", "unhealthy"] = "degraded" if reasons else "healthy"
    used_models = sum(row["state"] != "cold" for row in rows)
    if pool._closed:
        status, reasons = "unhealthy", ["the pool is closed or shutting down", *reasons]
    elif failed and failed == used_models:
        status = "unhealthy"
    return Health(status, tuple(reasons), total, memory, models)


def _model(row: Mapping[str, Any]) -> ModelHealth:
    latency, calls = row["latency"], row["calls"]
    known = latency["count"] > 0
    depth, capacity = max(zip(row["waiting"], row["capacity"]), key=lambda kind: kind[0] / kind[1])
    return ModelHealth(
        row["state"], row["breaker"], Workers(row["workers"], row["busy"], row["workers"] - row["busy"], row["dead"]),
        row["queued"], capacity, latency["p50"] if known else None, latency["p99"] if known else None,
        min(1.0, row["errors"] / calls) if calls else float(row["errors"] > 0), row["last_error"] or None)


def _complaints(pool: Host, row: Mapping[str, Any]) -> Iterator[str]:
    key, now = row["key"], time.monotonic()
    if row["state"] == "failed":
        yield f"{key}: failed" + (f" ({row['last_error']})" if row["last_error"] else "")
    if row["breaker"] != "closed":
        yield f"{key}: its breaker is {row['breaker']}" + (f" ({row['last_error']})" if row["last_error"] else "")
    if row["dead"]:
        yield f"{key}: {row['dead']} workers made no progress and were abandoned"
    if any(waiting >= most for waiting, most in zip(row["waiting"], row["capacity"])):
        since = pool._full_since.setdefault(key, now)
        if now - since >= STAYS:
            yield f"{key}: its queue stays full ({row['queued']} requests wait)"
    else:
        pool._full_since.pop(key, None)
    paces = {worker["id"]: worker["busy_seconds"] / worker["served"] for worker in row["worker"]
             if worker["served"] >= SLOW_CALLS}
    for worker, pace in paces.items():
        mates = [other for number, other in paces.items() if number != worker]
        if mates and pace > SLOW * median(mates):
            yield f"{key}: worker {worker} takes {pace / median(mates):.0f} times as long per request as the others"


_asked = itertools.count()


def check(pool: Host, key: Any, timeout: float | None) -> float:
    """See :func:`mpool.check`."""
    entry = pool._find(key)
    began = time.monotonic()
    if entry.capability == "text_embedding":
        # a text of its own each time: equal ones are computed once
        pool.embed(f"check {next(_asked)}", key, priority="critical", timeout=timeout)
    elif entry.capability in ("text_to_text", "vision"):
        pool.generate("check", key, max_tokens=1, temperature=0, priority="critical", timeout=timeout)
    elif entry.capability == "image_embedding":
        import numpy as np

        side = max(entry.describe().image.image_size, 32)  # type: ignore[union-attr]
        pool.embed_image(np.zeros((side, side, 3), dtype=np.uint8), key, priority="critical", timeout=timeout)
    else:
        raise InvalidArgument(f"is a {entry.capability} model; check() does not support this capability",
                              param="key", key=entry.key)
    return time.monotonic() - began


# ---- capabilities --------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class CapabilityPool:
    """Snapshot of all models of a capability. See :data:`mpool.pools`.

    Attributes:
        capability: its name.
        policy: how a worker is chosen, unless the model or request sets another policy.
        models: keys of those that are or were in use.
        workers: counts.
        queue_depth, running: waiting and running requests.
        queue_capacity: maximum waiting requests of a model: of one input, of many.
    """

    capability: str
    policy: str
    models: tuple[str, ...]
    workers: Workers
    queue_depth: int
    running: int
    queue_capacity: tuple[int, int]


class CapabilityPools(Mapping[str, CapabilityPool]):
    """Capability -> a snapshot of its pool."""

    def __init__(self, pool: Callable[[], Host]) -> None:
        self._pool = pool

    def __getitem__(self, capability: str) -> CapabilityPool:
        from .. import _core

        pool = self._pool()
        policies = {name: policy for name, _, policy in _core.capabilities()}
        if capability not in policies:
            raise KeyError(f"there is no capability {capability!r}, only " + ", ".join(policies))
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
        from .. import _core

        return iter([name for name, _, _ in _core.capabilities()])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return "\n".join(repr(found) for found in self.values())
