"""Health, pings, metrics and snapshots of capabilities, for made-up statistics of the core: the exact value of every
field, at every limit."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

import mpool
from mpool import _core
from mpool.host import native_calls
from mpool.host.native_calls import NativeCalls
from mpool.runtime import events, health, metrics, prometheus
from mpool.runtime.history import PoolHistory
from mpool.runtime.latency import BOUNDS


def worker(number: int = 7, **fields: Any) -> dict[str, Any]:
    return {"id": number, "state": "ready", "running": 0, "served": 3, "busy_seconds": 0.5, "engine_bytes": 11} | fields


#: Reasons of the core.
REASONS = ("killed", "crashed", "stalled", "internal", "changed_files", "model", "memory", "keep_alive", "call",
           "fault")


#: The median of the latency of :func:`row`: a quarter of its second bucket.
P50 = pytest.approx(1.25 * 2**19 * 1e-6)


def row(key: str = "m", **fields: Any) -> dict[str, Any]:
    """An entry of the core. The numbers of its fields differ from one another."""
    return {"key": key, "capability": "text_embedding", "state": "ready", "breaker": "closed", "last_error": "",
            "workers": 5, "busy": 2, "dead": 0, "waiting": (1, 4), "capacity": (100, 50), "queued": 6, "running": 9,
            "calls": 40, "errors": 10, "model_bytes": 12, "engine_bytes": 13, "units_in": 14, "units_out": 15,
            "state_bytes": 20, "snapshot_bytes": 21, "snapshots": 22,
            "arrivals": 18.5, "predicted_workers": 19, "rows": 16, "queue_full_seconds": 17.5,
            **{name: {reason: 100 * at + number for number, reason in enumerate(REASONS)}
               for at, name in enumerate(("deaths", "retries", "evictions"))},
            "worker": [worker()], "pinned": False, "keep_alive": 1.0,
            "latency": {"count": 3, "sum": 0.75, "min": 0.25, "max": 0.9,
                        "buckets": [(BOUNDS[2], 1), (BOUNDS[20], 2)]}} | fields


def host(*rows: dict[str, Any], closed: bool = False, **stats: Any) -> Any:
    """A pool with these entries."""
    numbers = {"memory_used": 30, "memory_limit": 100, "pressure": "low", "bytes_by_tag": {"kv": 21, "misc": 22}}
    numbers |= {name: 1000 + at for at, (name, _) in enumerate(_core.metrics())}
    numbers |= {name: 2000 + at for at, name in enumerate((*metrics.GAUGES, *metrics.COUNTERS))
                if name not in ("memory_used", "memory_limit")}
    numbers |= stats
    registry = SimpleNamespace(entries=lambda: list(rows), stats=lambda: dict(numbers))
    found = SimpleNamespace(_registry=registry, _closed=closed, _full_since={}, _worker_positions={}, registry=registry,
                            _stats=lambda: dict(numbers), config=mpool.PoolConfig(), _history=PoolHistory())
    found.pools = health.CapabilityPools(found)
    return found


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the clock of the health reports."""
    found = SimpleNamespace(now=50.0)
    monkeypatch.setattr(health, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


# ---- problems of a model -------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fields, wanted", [
    ({}, []),
    ({"state": "failed"}, ["m: failed"]),
    ({"state": "failed", "last_error": "IO"}, ["m: failed (IO)"]),
    ({"breaker": "open"}, ["m: its circuit breaker is open"]),
    ({"breaker": "half-open", "last_error": "NUMERIC"}, ["m: its circuit breaker is half-open (NUMERIC)"]),
    ({"dead": 2}, ["m: 2 workers made no progress and were abandoned"]),
    ({"state": "failed", "breaker": "open", "dead": 1}, [
        "m: failed", "m: its circuit breaker is open", "m: 1 workers made no progress and were abandoned"])])
def test_problems_of_a_model(fields: dict[str, Any], wanted: list[str]) -> None:
    assert list(health.complaints(host(), row(**fields))) == wanted


@pytest.mark.parametrize("waiting, is_full", [((100, 0), True), ((0, 50), True), ((101, 0), True), ((99, 49), False)])
def test_a_queue_is_a_problem_once_it_stayed_full(clock: Any, waiting: tuple[int, int], is_full: bool) -> None:
    pool, entry = host(), row(waiting=waiting)
    assert list(health.complaints(pool, entry)) == []
    clock.now += 0.49
    assert list(health.complaints(pool, entry)) == []
    clock.now = 50.5
    assert list(health.complaints(pool, entry)) == [f"m: its queue stays full ({max(waiting)} requests wait)"] * is_full
    assert list(health.complaints(pool, row())) == [] and pool._full_since == {}
    assert list(health.complaints(pool, entry)) == []  # the time begins again


@pytest.mark.parametrize("paces, slow", [
    ([(8, 1.0), (8, 1.0), (8, 4.001)], (3, 4)), ([(8, 1.0), (8, 1.0), (8, 4.0)], None),
    ([(8, 1.0), (8, 1.0), (7, 9.0)], None), ([(7, 1.0), (8, 9.0), (8, 1.0)], (2, 9)),
    ([(8, 1.0), (8, 10.4)], (2, 10)), ([(8, 9.0)], None), ([(8, 1.0), (8, 2.0), (8, 3.0), (16, 16.0)], None),
    ([(8, 1.0), (8, 2.0), (8, 3.0), (16, 160.0)], (4, 40)), ([], None)])
def test_a_worker_is_slow_beside_the_median_of_the_others(paces: list[tuple[int, float]], slow: Any) -> None:
    workers = [worker(at, served=served, busy_seconds=seconds) for at, (served, seconds) in enumerate(paces, 1)]
    found = list(health.complaints(host(), row(worker=workers)))
    assert found == ([] if slow is None else [
        f"m: worker {slow[0]} takes {slow[1]} times as long per request as the others"])


def test_the_first_problem_of_each_model() -> None:
    rows = row("good"), row("bad", state="failed", breaker="open")
    assert health.problems(host(*rows)) == {"bad": "bad: failed"}
    assert health.problems(host(*rows, closed=True)) == {}
    assert health.problems(SimpleNamespace(_registry=None, _closed=False)) == {}


# ---- health --------------------------------------------------------------------------------------------------------

def test_every_field_of_health() -> None:
    failed = row("b", state="failed", workers=3, busy=3, dead=1, last_error="IO", waiting=(50, 20),
                 deaths={"killed": 2, "stalled": 1})
    found = health.health(host(row("a", deaths={"killed": 0}), failed))
    assert found.models["a"] == health.ModelHealth("ready", "closed", health.Workers(5, 2, 3, 0), 4, 50, P50, 0.9, 0.25,
                                                  None)
    assert found.models["b"] == health.ModelHealth("failed", "closed", health.Workers(3, 3, 0, 1), 50, 100, P50, 0.9,
                                                  0.25, "IO", 3)
    assert found.workers == health.Workers(8, 5, 3, 1)
    assert found.memory == health.Memory(30, 100, 70, "low", 0.3)
    assert found.status == "degraded" and found.reasons == (
        "b: failed (IO)", "b: 1 workers made no progress and were abandoned")


@pytest.mark.parametrize("fields, rate, latency", [
    ({"calls": 0, "errors": 0}, 0.0, True), ({"calls": 0, "errors": 3}, 1.0, True),
    ({"calls": 2, "errors": 3}, 1.0, True), ({"calls": 1, "errors": 1}, 1.0, True),
    ({"calls": 8, "errors": 1, "latency": row()["latency"] | {"count": 0}}, 0.125, False)])
def test_rates_of_errors_and_unknown_latencies(fields: dict[str, Any], rate: float, latency: bool) -> None:
    found = health.health(host(row(**fields))).models["m"]
    wanted = (P50, 0.9) if latency else (None, None)
    assert found.error_rate == rate and (found.p50, found.p99) == wanted


@pytest.mark.parametrize("rows, options, status, reasons", [
    ((), {}, "healthy", ()),
    ((row(),), {}, "healthy", ()),
    ((row(state="failed"),), {}, "unhealthy", ("m: failed",)),
    ((row(state="failed"), row("other", state="cold")), {}, "unhealthy", ("m: failed",)),
    ((row(state="failed"), row("other")), {}, "degraded", ("m: failed",)),
    ((row(state="failed", deaths={"killed": 2, "changed_files": 1, "crashed": 0}),), {}, "degraded", ("m: failed",)),
    ((row(state="failed", last_error="MEMORY_EXHAUSTED"),), {}, "degraded", ("m: failed (MEMORY_EXHAUSTED)",)),
    ((row(breaker="open"),), {"closed": True}, "unhealthy", (
        "the pool is closed or shutting down", "m: its circuit breaker is open")),
    ((), {"pressure": "critical", "memory_used": 7_654_000_000, "memory_limit": 8_000_400_000}, "degraded", (
        "memory is critical: 7,654 MB of 8,000 MB are in use",)),
    ((), {"pressure": "high"}, "healthy", ())])
def test_status_of_a_pool(rows: Any, options: dict[str, Any], status: str, reasons: tuple[str, ...]) -> None:
    found = health.health(host(*rows, **options))
    assert (found.status, found.reasons) == (status, reasons)


@pytest.mark.parametrize("used, limit, memory", [(120, 100, (120, 100, 0, 1.2)), (5, 0, (5, 0, 0, 0.0))])
def test_memory_beyond_its_limit(used: int, limit: int, memory: tuple[Any, ...]) -> None:
    found = health.health(host(memory_used=used, memory_limit=limit)).memory
    assert (found.used, found.limit, found.available, found.utilisation) == memory


def test_health_names_native_calls_that_starve(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"images": NativeCalls(4, 3, 2, 1, True), "texts": NativeCalls(1, 1, 0, 0, False)}
    monkeypatch.setattr(native_calls, "statuses", lambda: state)
    found = health.health(host())
    assert found.status == "degraded" and found.native_calls == state and len(found.reasons) == 1
    assert found.reasons[0].endswith("are slow: 3 run on 4 threads, 1 of them beyond their time limit, and 2 wait")


def test_every_field_of_a_ping() -> None:
    pool = host(row("a", worker=[worker(1), worker(2, running=1, state="processing")]),
                row("b", worker=[worker(3)], queued=8))
    everything = (health.Pong("a", 1, "ready", False, 6, 50.0), health.Pong("a", 2, "processing", True, 6, 50.0),
                  health.Pong("b", 3, "ready", False, 8, 50.0))
    assert health.pongs(pool, None) == everything
    pool._known = lambda key, capability: SimpleNamespace(core_keys=lambda: ["b"]) if key == "known" else None
    pool._find = lambda key: SimpleNamespace(core_keys=lambda: ["a"])
    assert health.pongs(pool, "known") == everything[2:] and health.pongs(pool, "new") == everything[:2]
    assert health.pongs(SimpleNamespace(_registry=None), None) == ()


# ---- capabilities --------------------------------------------------------------------------------------------------

def test_every_field_of_a_snapshot_of_a_capability() -> None:
    texts = row("a", dead=3), row("b", workers=10, busy=4, dead=1, queued=60, running=90)
    pools = host(*texts, row("c", capability="vision")).pools
    assert pools["text_embedding"] == health.CapabilityPool(
        "text_embedding", "p2c", ("a", "b"), health.Workers(15, 6, 9, 4), 66, 99, (100, 50))
    assert pools["vision"] == health.CapabilityPool(
        "vision", "pack", ("c",), health.Workers(5, 2, 3, 0), 6, 9, (50, 50))
    assert list(pools) == [name for name, _, _ in _core.capabilities()] and len(pools) == len(list(pools))
    assert repr(pools).splitlines() == [repr(pools[name]) for name in pools]
    with pytest.raises(KeyError, match="'audio' is not a capability; the capabilities are text_embedding, "):
        pools["audio"]


# ---- metrics -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("number, level", [*enumerate(("low", "normal", "high", "critical"))])
def test_memory_pressure_is_a_number(number: int, level: str) -> None:
    found = metrics.collect(host(row("a"), pressure=level))
    assert (found["memory_pressure"], found["pressure"]) == (number, level)


def test_every_metric_has_its_own_value() -> None:
    """Each number of the made-up statistics appears under its name, in the dict and as a series of Prometheus."""
    pool = host(row("a", dead=8), row("b", capability="vision", state="failed", queued=60))
    found = metrics.collect(pool)
    plain = pool._stats()
    assert {name: found[name] for name in plain if name != "bytes_by_tag"} == {
        name: value for name, value in plain.items() if name != "bytes_by_tag"} | {
        "events_dropped": found["events_dropped"], "memory_pressure": found["memory_pressure"]}
    assert found["bytes_by_kind"] == plain["bytes_by_tag"] and "bytes_by_tag" not in found
    assert found["queue_depths"] == {name: {"text_embedding": 6, "vision": 60}.get(name, 0) for name in pool.pools}
    model = found["models"]["a"]
    for name in (*metrics.MODEL_GAUGES, *metrics.MODEL_COUNTERS):
        assert model[name] == row(dead=8)[name]
    assert (model["capability"], model["state"], model["breaker"]) == ("text_embedding", "ready", "closed")
    assert model["healthy"] == 0 and found["models"]["b"]["healthy"] == 0
    assert metrics.collect(host(row()))["models"]["m"]["healthy"] == 1
    assert model["per_worker"] == [{"position": 0, "served": 3, "busy_seconds": 0.5, "running": 0, "engine_bytes": 11}]
    assert [count for _, count in model["latency"]["histogram"]] == [0, 0, 1, *[0] * 17, 2, *[0] * 7]
    assert [bound for bound, _ in model["latency"]["histogram"]] == [*(1e-6 * 2**i for i in range(27)), math.inf]
    assert "buckets" not in model["latency"] and model["latency"]["sum"] == 0.75

    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    series = {(one.name, *sorted(one.labels.items())): one.value
              for family in text_string_to_metric_families(prometheus.prometheus(pool)) for one in family.samples}
    for name, _ in _core.metrics():
        assert series[f"mpool_{name}_total",] == plain[name]
    for name in metrics.GAUGES:
        unit = "_bytes" if name in ("memory_limit", "memory_used") else ""
        assert series[f"mpool_{name}{unit}",] == found[name]
    for name in metrics.COUNTERS:
        assert series[f"mpool_{name}_total",] == found[name]
    labels = ("capability", "text_embedding"), ("model", "a")
    assert series["mpool_memory_pressure",] == 0
    assert [series[(f"mpool_model_{name}", *labels)] for name in ("arrivals", "predicted_workers")] == [18.5, 19]
    for name in metrics.MODEL_GAUGES:
        assert series[(f"mpool_model_{name}", *labels)] == model[name]
    for name in metrics.MODEL_COUNTERS:
        assert series[(f"mpool_model_{name}_total", *labels)] == model[name]
    for at, (name, (_, _, reasons)) in enumerate(metrics.REASONS.items()):
        for reason in reasons:
            assert series[(f"mpool_model_{name}_total", *labels, ("reason", reason))] \
                == 100 * at + REASONS.index(reason) == model[name][reason]
    assert series[("mpool_model_healthy", *labels)] == 0
    for name, suffix in [*((name, "_total") for name in metrics.WORKER_COUNTERS),
                         *((name, "") for name in metrics.WORKER_GAUGES)]:
        assert series[f"mpool_worker_{name}{suffix}", ("model", "a"), ("worker", "0")] == model["per_worker"][0][name]
    assert series["mpool_queue_depth", ("capability", "vision")] == 60
    assert {kind: series["mpool_bytes", ("kind", kind)] for kind in ("kv", "misc")} == found["bytes_by_kind"]
    for kind, counts in found["native_calls"].items():
        for state, count in counts.items():
            assert series["mpool_native_calls", ("kind", kind), ("state", state)] == count
    for name in ("min", "max", "p50", "p99"):
        assert series[(f"mpool_latency_{name}_seconds", *labels)] == model["latency"][name]
    assert series[("mpool_latency_seconds_sum", *labels)] == 0.75
    assert series[("mpool_latency_seconds_count", *labels)] == 3
    buckets = {name[2]: value for name, value in (((key[0], key[1:3], dict(key[1:]).get("le")), value)
                                                  for key, value in series.items() if ("model", "a") in key)
               if name[0] == "mpool_latency_seconds_bucket"}
    assert [buckets[le] for le in sorted(buckets, key=float)] == [0, 0, *[1] * 18, *[3] * 8]


@pytest.mark.parametrize("key", ['a"b', "a\\b", "a\nb", 'a\\"\n', "a\\n", "caf\u00e9 {x=1}, y"])
def test_labels_of_prometheus_are_escaped(key: str) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    families = parser.text_string_to_metric_families(prometheus.prometheus(host(row(key))))
    assert {sample.labels["model"] for family in families for sample in family.samples
            if "model" in sample.labels} == {key}


def test_positions_of_workers() -> None:
    """A worker keeps its position; a new one takes the lowest that is free, in the order of their numbers."""
    pool = host()

    def positions(*numbers: int, key: str = "m") -> dict[int, int]:
        found = metrics._by_position(pool, row(key, worker=[worker(number) for number in numbers]))
        assert [at for at, _ in found] == sorted(at for at, _ in found)
        return {one["id"]: at for at, one in found}

    assert positions(12, 10, 11) == {10: 0, 11: 1, 12: 2}
    assert positions(10, 12) == {10: 0, 12: 2}
    assert positions(14, 12, 10, 13) == {10: 0, 13: 1, 12: 2, 14: 3}
    assert positions(14) == {14: 3} and positions(15, 14) == {15: 0, 14: 3}
    assert positions(14, key="other") == {14: 0}


def test_statistics_of_a_pool_without_a_registry() -> None:
    closed = SimpleNamespace(_registry=None, _closed=True, pools={}, _history=PoolHistory())
    found = metrics.stats(closed)
    assert {value for name, value in found.items() if name not in ("pressure", "bytes_by_tag")} == {0}
    assert found["pressure"] == "low" and found["bytes_by_tag"] == {}
    assert set(found) == {*(name for name, _ in _core.metrics()), "pressure", "bytes_by_tag",
                          *metrics.GAUGES, *metrics.COUNTERS}
    assert metrics.collect(closed)["models"] == {} and metrics.sample(closed) == ({}, [])
    used = host(row(), total_requests=77)
    unused = SimpleNamespace(_registry=None, _closed=False, registry=used.registry)
    assert metrics.stats(unused)["total_requests"] == 77 and metrics.sample(unused) == ({}, [])
    assert metrics.sample(used) == (used._stats(), [row()])


def test_events_of_other_registries_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool may be gone when its events are delivered. Each callback gets the fields of the events of its kind."""
    seen = list[Any]()
    callbacks = ((events.KINDS[1], seen.append),)
    pool: Any = SimpleNamespace(_registry=SimpleNamespace(number=lambda: 7), _callbacks=callbacks)
    idle: Any = SimpleNamespace(_registry=None, _callbacks=callbacks)
    monkeypatch.setattr(events, "hosts", lambda: [idle, pool])
    monkeypatch.setattr(events, "_deliver_health", lambda: None)
    monkeypatch.setattr("mpool._core.drain_events", lambda: [
        (6, 1, "gone", 1, 2, "OK", 3.0, ""), (7, 1, "m", 4, 0, "OK", 5.0, ""), (7, 0, "other", 1, 2, "OK", 3.0, ""),
        (7, 1, "n", 0, 6, "TIMEOUT", 8.0, "a cause")])
    events.deliver()
    assert seen == [events.PoolEvent(events.KINDS[1], "m", 4, None, "OK", 5.0),
                    events.PoolEvent(events.KINDS[1], "n", None, 6, "TIMEOUT", 8.0, "a cause")]
