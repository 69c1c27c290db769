"""Metrics of a pool as a dict."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING, Any

from .. import _core
from ..host import native_calls
from . import health as _health
from .events import dropped
from .latency import BOUNDS, counts_of, quantiles

if TYPE_CHECKING:
    from .hosts import Host
    from .request_metrics import ModelRequests

#: Gauges of the whole pool: name -> help.
GAUGES = {
    "memory_limit": "maximum bytes for models, caches and queues together",
    "memory_used": "bytes used by models, caches and queues",
    "memory_pressure": "memory_used in four levels: 0 low, 1 normal, 2 high, 3 critical",
    "compute_threads": "compute threads",
    "compute_threads_leased": "compute threads in use",
}
#: Counters of the process, in addition to the core's: name -> help.
COUNTERS = {
    "threads_created": "threads started by the process",
    "threads_joined": "started threads that have ended",
    "events_dropped": "events dropped because callbacks were too slow",
}
#: Levels of the memory pressure; ``memory_pressure`` is an index.
PRESSURES = ("low", "normal", "high", "critical")
#: Gauges of a model: name -> help.
MODEL_GAUGES = {
    "workers": "serving workers", "busy": "busy workers", "dead": "abandoned workers",
    "queued": "waiting requests", "running": "running requests", "model_bytes": "bytes of weights",
    "engine_bytes": "bytes of scratch and caches",
    "state_bytes": "bytes of the states of running sequences, of models with recurrent layers",
    "snapshot_bytes": "bytes of snapshots: copies of states, from which later prompts continue",
    "snapshots": "snapshots of states",
    "arrivals": "requests per second that the forecast expects; 0: predictive_scaling is off",
    "predicted_workers": "workers that the forecast keeps; 0: predictive_scaling is off",
}
#: Counters of a model: name -> help. The units are those of completed requests.
MODEL_COUNTERS = {
    "calls": "accepted requests", "errors": "accepted requests that failed",
    "units_in": "tokens and images of inputs", "units_out": "tokens and images generated",
    "rows": "tokens of all passes: prompt, decode and draft tokens",
    "queue_full_seconds": "seconds for which a queue of the model was full, added over its two queues",
}
#: Counters of a model by reason: name -> help, key in a row of the core, reasons that occur.
REASONS = {
    "worker_deaths": ("workers that failed or were abandoned, by reason", "deaths",
                      ("killed", "crashed", "stalled", "internal", "changed_files")),
    "retries": ("requests retried or continued after a fault of their worker or a lack of memory, by reason", "retries",
                ("killed", "crashed", "stalled", "internal", "changed_files", "model", "memory")),
    "evictions": ("unloads of the model, by reason", "evictions",
                  ("keep_alive", "memory", "call", "fault", "changed_files")),
}
#: Counters of a worker: name -> help. A worker's label is its position among the model's workers, 0 to 15, and not its
#: number: the numbers of workers that come and go would add series without end. It keeps the position for its life.
WORKER_COUNTERS = {"served": "requests that ended on the worker", "busy_seconds": "seconds in steps"}
#: Gauges of a worker: name -> help.
WORKER_GAUGES = {"running": "active requests", "engine_bytes": "bytes of its scratch and caches"}


_lock = threading.Lock()


def stats(pool: Host) -> dict[str, Any]:
    """Return the core's counters and gauges of the pool; zeros for a pool that was closed before its first use."""
    registry = pool._registry
    if registry is None and not pool._closed:
        registry = pool.registry
    if registry is not None:
        return registry.stats()
    return {**{name: 0 for name, _ in _core.metrics()}, **dict.fromkeys((*GAUGES, *COUNTERS), 0),
            "pressure": "low", "bytes_by_tag": {}}


def collect(pool: Host) -> dict[str, Any]:
    """See :func:`mpool.metrics`."""
    found = stats(pool)
    found["bytes_by_kind"] = found.pop("bytes_by_tag")
    found["events_dropped"] = dropped()
    found["memory_pressure"] = PRESSURES.index(found["pressure"])
    rows = pool._registry.entries() if pool._registry else []
    requests = pool._history.metrics.rows(row["key"] for row in rows)
    found["models"] = {row["key"]: _model(pool, row, requests[row["key"]]) for row in rows}
    found["failed"] = requests[""].failed
    found["native_calls"] = {name: {"threads": calls.threads, "running": calls.running, "waiting": calls.waiting,
                                    "stuck": calls.stuck} for name, calls in native_calls.statuses().items()}
    found["queue_depths"] = {name: one.queue_depth for name, one in pool.pools.items()}
    return found


def sample(pool: Host) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the core's counters and gauges, and one row per model, both as the registry gives them.

    Cheaper than :func:`collect`: about 30 us for three models. Does not start a pool that was not used yet.
    """
    registry = pool._registry
    return (stats(pool), registry.entries()) if registry is not None else ({}, [])


def _model(pool: Host, row: dict[str, Any], requests: ModelRequests) -> dict[str, Any]:
    latency = dict(row["latency"])
    counts = counts_of(latency)
    latency |= {**quantiles(latency), "histogram": [(bound, counts.get(at, 0)) for at, bound in enumerate(BOUNDS)]}
    del latency["buckets"]
    return {"capability": row["capability"], "state": row["state"], "breaker": row["breaker"],
            "healthy": int(not any(_health.complaints(pool, row))),
            "per_worker": [{"position": at, **{name: worker[name] for name in (*WORKER_COUNTERS, *WORKER_GAUGES)}}
                           for at, worker in _by_position(pool, row)],
            **{name: row[name] for name in (*MODEL_GAUGES, *MODEL_COUNTERS)}, "latency": latency,
            **{name: {reason: row[key][reason] for reason in reasons} for name, (_, key, reasons) in REASONS.items()},
            "prefix_tokens": requests.prefix_tokens, "failed": requests.failed,
            **{name: one.as_dict() for name, one in requests.histograms.items()}}


def _by_position(pool: Host, row: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """Return the workers of a model by position. A new worker takes the lowest position that is free."""
    workers = {int(worker["id"]): worker for worker in row["worker"]}
    with _lock:
        held = pool._worker_positions.setdefault(row["key"], {})
        for gone in held.keys() - workers.keys():
            del held[gone]
        for number in sorted(workers.keys() - held.keys()):
            held[number] = next(at for at in itertools.count() if at not in held.values())
        return sorted(((at, workers[number]) for number, at in held.items()), key=lambda one: one[0])


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
