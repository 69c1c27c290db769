"""Metrics of a pool in Prometheus' text format, version 0.0.4.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .. import _core
from .metrics import GAUGES, MODEL_COUNTERS, MODEL_GAUGES, WORKER_COUNTERS, WORKER_GAUGES, collect

if TYPE_CHECKING:
    from .hosts import Host

#: A sample of a series: its labels, and its value.
Sample = tuple[dict[str, str], float]
_LABEL = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


def prometheus(pool: Host) -> str:
    """Return the metrics of the pool in Prometheus' text format."""
    return "".join(f"{line}\n" for line in _lines(collect(pool)))


def _lines(found: dict[str, Any]) -> Iterator[str]:
    models = {key: ({"model": key, "capability": model["capability"]}, model)
              for key, model in found["models"].items()}
    workers = [({"model": key, "worker": str(worker["position"])}, worker)
               for key, model in found["models"].items() for worker in model["per_worker"]]
    for name, meaning in _core.metrics():
        yield from _counter(name, meaning, [({}, found[name])])
    for name, meaning in GAUGES.items():
        yield from _gauge(name, meaning, [({}, found[name])])
    yield from _gauge("bytes", "bytes of the process by kind",
                      [({"kind": kind}, count) for kind, count in found["bytes_by_kind"].items()])
    yield from _gauge("native_calls", "native calls of the process and their threads, by kind and state",
                      [({"kind": kind, "state": state}, count) for kind, counts in found["native_calls"].items()
                       for state, count in counts.items()])
    yield from _gauge("queue_depth", "waiting requests by capability",
                      [({"capability": name}, count) for name, count in found["queue_depths"].items()])
    for name, meaning in MODEL_GAUGES.items():
        yield from _gauge(f"model_{name}", meaning, [(labels, model[name]) for labels, model in models.values()])
    for name, meaning in MODEL_COUNTERS.items():
        yield from _counter(f"model_{name}", meaning, [(labels, model[name]) for labels, model in models.values()])
    yield from _gauge("model_healthy", "1: no problem was found; 0: the model is degraded",
                      [(labels, model["healthy"]) for labels, model in models.values()])
    for name, meaning in WORKER_COUNTERS.items():
        yield from _counter(f"worker_{name}", meaning, [(labels, worker[name]) for labels, worker in workers])
    for name, meaning in WORKER_GAUGES.items():
        yield from _gauge(f"worker_{name}", meaning, [(labels, worker[name]) for labels, worker in workers])
    yield from _head("latency_seconds", "histogram", "seconds from submission to completion")
    for labels, model in models.values():
        yield from _histogram("latency_seconds", labels, model["latency"])
    for name in ("min", "max", "p50", "p99"):
        yield from _gauge(f"latency_{name}_seconds", f"{name} of the seconds from submission to completion",
                          [(labels, model["latency"][name]) for labels, model in models.values()])


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP mpool_{name} {meaning.translate(_HELP)}", f"# TYPE mpool_{name} {kind}"]


def _counter(name: str, meaning: str, samples: Iterable[Sample]) -> list[str]:
    name += "_total"
    return [*_head(name, "counter", meaning), *(_sample(name, *one) for one in samples)]


def _gauge(name: str, meaning: str, samples: Iterable[Sample]) -> list[str]:
    return [*_head(name, "gauge", meaning), *(_sample(name, *one) for one in samples)]


def _histogram(name: str, labels: dict[str, str], latency: dict[str, Any]) -> Iterator[str]:
    total = 0
    for bound, count in latency["histogram"]:
        total += count  # each bucket includes those before it
        yield _sample(f"{name}_bucket", {**labels, "le": _number(bound)}, total)
    yield _sample(f"{name}_count", labels, total)
    yield _sample(f"{name}_sum", labels, latency["sum"])


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{text.translate(_LABEL)}"' for label, text in sorted(labels.items()))
    return f"mpool_{name}{f'{{{shown}}}' if shown else ''} {_number(value)}"


def _number(value: float) -> str:
    """Return a number as Go's ``ParseFloat`` reads it."""
    value = float(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)


__all__ = ["prometheus"]
