"""Metrics of a pool in Prometheus' text format, version 0.0.4.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from .. import _core
from .metrics import (
    COUNTERS,
    GAUGES,
    MODEL_COUNTERS,
    MODEL_GAUGES,
    REASONS,
    WORKER_COUNTERS,
    WORKER_GAUGES,
    collect,
)
from .request_metrics import HISTOGRAMS

if TYPE_CHECKING:
    from .hosts import Host

#: A sample of a series: its labels, and its value.
Sample = tuple[dict[str, str], float]
#: Gauges whose name lacks the unit that a series has -> the suffix.
_UNITS = {"memory_limit": "_bytes", "memory_used": "_bytes"}
#: Capabilities whose requests generate tokens.
_GENERATES = ("text_to_text", "vision")
_NO_MODEL = {"model": "", "capability": ""}
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
        yield from counter(name, meaning, [({}, found[name])])
    for name, meaning in COUNTERS.items():
        yield from counter(name, meaning, [({}, found[name])])
    for name, meaning in GAUGES.items():
        yield from _gauge(name + _UNITS.get(name, ""), meaning, [({}, found[name])])
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
        yield from counter(f"model_{name}", meaning, [(labels, model[name]) for labels, model in models.values()])
    yield from _gauge("model_healthy", "1: no problem was found; 0: the model is degraded",
                      [(labels, model["healthy"]) for labels, model in models.values()])
    for name, meaning in WORKER_COUNTERS.items():
        yield from counter(f"worker_{name}", meaning, [(labels, worker[name]) for labels, worker in workers])
    for name, meaning in WORKER_GAUGES.items():
        yield from _gauge(f"worker_{name}", meaning, [(labels, worker[name]) for labels, worker in workers])
    for name, (meaning, _, _) in REASONS.items():
        yield from counter(f"model_{name}", meaning,
                           [({**labels, "reason": reason}, count) for labels, model in models.values()
                            for reason, count in model[name].items()])
    yield from counter("model_prefix_tokens", "prompt tokens of completed requests found in the prefix cache",
                       [(labels, model["prefix_tokens"]) for labels, model in models.values()])
    yield from counter("request_errors", "requests that were refused or failed, by the name of the error; without a "
                       "model if the request named none that was found",
                       [({**labels, "error": error}, count) for labels, one in (*models.values(), (_NO_MODEL, found))
                        for error, count in one["failed"].items()])
    yield from histogram("latency_seconds", "seconds from submission to completion",
                         [(labels, model["latency"]) for labels, model in models.values()])
    for name, meaning in HISTOGRAMS.items():
        yield from histogram(name, meaning, [(labels, model[name]) for labels, model in models.values()
                                             if "token" not in name or model["capability"] in _GENERATES])
    for name in ("min", "max", "p50", "p99"):
        yield from _gauge(f"latency_{name}_seconds", f"{name} of the seconds from submission to completion",
                          [(labels, model["latency"][name]) for labels, model in models.values()])


def _head(name: str, kind: str, meaning: str) -> list[str]:
    return [f"# HELP mpool_{name} {meaning.translate(_HELP)}", f"# TYPE mpool_{name} {kind}"]


def counter(name: str, meaning: str, samples: Iterable[Sample]) -> list[str]:
    """Return the lines of a counter, whose name gets the ending ``_total``."""
    name += "_total"
    return [*_head(name, "counter", meaning), *(_sample(name, *one) for one in samples)]


def _gauge(name: str, meaning: str, samples: Iterable[Sample]) -> list[str]:
    return [*_head(name, "gauge", meaning), *(_sample(name, *one) for one in samples)]


def histogram(name: str, meaning: str, rows: Iterable[tuple[dict[str, str], dict[str, Any]]]) -> Iterator[str]:
    """Return the lines of a histogram: of each row, its labels and a dict with ``histogram`` and ``sum``."""
    yield from _head(name, "histogram", meaning)
    for labels, found in rows:
        total = 0
        for bound, count in found["histogram"]:
            total += count  # each bucket includes those before it
            yield _sample(f"{name}_bucket", {**labels, "le": _number(bound)}, total)
        yield _sample(f"{name}_count", labels, total)
        yield _sample(f"{name}_sum", labels, found["sum"])


def _sample(name: str, labels: dict[str, str], value: float) -> str:
    shown = ",".join(f'{label}="{text.translate(_LABEL)}"' for label, text in sorted(labels.items()))
    return f"mpool_{name}{f'{{{shown}}}' if shown else ''} {_number(value)}"


def _number(value: float) -> str:
    """Return a number as Go's ``ParseFloat`` reads it."""
    value = float(value)
    return "NaN" if math.isnan(value) else ("+Inf" if value > 0 else "-Inf") if math.isinf(value) else repr(value)


__all__ = ["counter", "histogram", "prometheus"]
