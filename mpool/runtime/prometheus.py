"""Metrics of a pool in Prometheus' text format, through ``prometheus_client``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import Unsupported
from ..resources import install_hint
from .metrics import FORMER_COUNTERS, GAUGES, MODEL_COUNTERS, MODEL_GAUGES, WORKER_COUNTERS, WORKER_GAUGES, collect

if TYPE_CHECKING:
    from .hosts import Host


def prometheus(pool: Host) -> str:
    """Return the metrics of the pool in Prometheus' text format.

    Raises:
        Unsupported: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ModuleNotFoundError:
        raise Unsupported("Prometheus metrics need the package prometheus_client", hint=install_hint("server")) \
            from None
    registry = CollectorRegistry()
    registry.register(_Source(collect(pool)))  # type: ignore[arg-type]
    return generate_latest(registry).decode()


class _Source:
    """Collector for ``prometheus_client``."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        return _families(self._found)


def _families(found: dict[str, Any]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for name, meaning in _core.metrics():
        yield CounterMetricFamily(f"mpool_{name}", meaning, value=found[name])
    for former, name in FORMER_COUNTERS.items():
        yield CounterMetricFamily(f"mpool_{former}", f"former name of mpool_{name}_total", value=found[name])
    for name, meaning in GAUGES.items():
        yield GaugeMetricFamily(f"mpool_{name}", meaning, value=found[name])
    kinds = GaugeMetricFamily("mpool_bytes", "bytes of the process by kind", labels=["kind"])
    for kind, count in found["bytes_by_kind"].items():
        kinds.add_metric([kind], count)
    yield kinds
    native = GaugeMetricFamily("mpool_native_calls", "native calls of the process and their threads, by kind and state",
                               labels=["kind", "state"])
    for kind, counts in found["native_calls"].items():
        for state, count in counts.items():
            native.add_metric([kind, state], count)
    yield native
    depths = GaugeMetricFamily("mpool_queue_depth", "waiting requests by capability", labels=["capability"])
    for capability, count in found["queue_depths"].items():
        depths.add_metric([capability], count)
    yield depths
    for name, meaning in MODEL_GAUGES.items():
        family = GaugeMetricFamily(f"mpool_model_{name}", meaning, labels=["model", "capability"])
        for key, model in found["models"].items():
            family.add_metric([key, model["capability"]], model[name])
        yield family
    for name, meaning in MODEL_COUNTERS.items():
        counter = CounterMetricFamily(f"mpool_model_{name}", meaning, labels=["model", "capability"])
        for key, model in found["models"].items():
            counter.add_metric([key, model["capability"]], model[name])
        yield counter
    health = GaugeMetricFamily("mpool_model_healthy", "1: no problem was found; 0: the model is degraded",
                               labels=["model", "capability"])
    for key, model in found["models"].items():
        health.add_metric([key, model["capability"]], model["healthy"])
    yield health
    for kind, names in ((CounterMetricFamily, WORKER_COUNTERS), (GaugeMetricFamily, WORKER_GAUGES)):
        for name, meaning in names.items():
            workers = kind(f"mpool_worker_{name}", meaning, labels=["model", "worker"])
            for key, model in found["models"].items():
                for worker in model["per_worker"]:
                    workers.add_metric([key, str(worker["position"])], worker[name])
            yield workers
    latency = HistogramMetricFamily("mpool_latency_seconds", "seconds from submission to completion",
                                     labels=["model", "capability"])
    for key, model in found["models"].items():
        total, buckets = 0, []
        for bound, count in model["latency"]["histogram"]:
            total += count
            buckets.append(("+Inf" if math.isinf(bound) else repr(bound), total))
        latency.add_metric([key, model["capability"]], buckets, model["latency"]["sum"])
    yield latency
    for name in ("min", "max", "p50", "p99"):
        family = GaugeMetricFamily(f"mpool_latency_{name}_seconds",
                                   f"{name} of the seconds from submission to completion",
                                   labels=["model", "capability"])
        for key, model in found["models"].items():
            family.add_metric([key, model["capability"]], model["latency"][name])
        yield family
