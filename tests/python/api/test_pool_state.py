"""The state that a pool reports (ps, metrics, health, pings, checks, events), and its life cycle."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import mpool
from mpool import _core
from mpool.runtime import events as _events, metrics as _metrics
from poolstates import LONG, TEXT, broken as broken, row_of
from waiting import until


# ---- loading, jobs, ps

def test_load_with_keep_alive(bert: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        model = pool.load(bert, keep_alive="200ms")
        assert row_of(pool).keep_alive == pytest.approx(0.2)
        until(lambda: row_of(pool).state == "cold")
        model.embed("a", keep_alive=-1)
        time.sleep(0.5)
        assert row_of(pool).state == "ready" and row_of(pool).keep_alive == math.inf
        for bad in ("soon", True, float("nan")):
            with pytest.raises(mpool.InvalidArgument, match="keep_alive"):
                pool.load(bert, keep_alive=bad)


def test_pinned_models_stay_loaded(bert: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, keep_alive=0.05)) as pool:
        pool.load(bert, pin=True)
        time.sleep(0.4)
        assert row_of(pool).pinned and row_of(pool).state == "ready"


@pytest.mark.parametrize("before", [(False, 300.0), (True, 1234.0)])
def test_a_load_that_fails_changes_no_setting(before: tuple[bool, float]) -> None:
    """Memory suffices for one of the model's two networks."""
    with mpool.Pool(mpool.PoolConfig(max_workers_per_model=1)) as pool:
        pool.load("digits-clip")
        asked = [row["predicted_bytes"] + row["worker"][0]["predicted_bytes"] for row in pool.registry.entries()]
    with mpool.Pool(mpool.PoolConfig(memory_bytes=max(asked) + 10_000, max_workers_per_model=1)) as pool:
        for part in pool.get("digits-clip")._entry.parts():
            pool.registry.keep_alive(part.core_key(), before[1], pin=before[0])
        for _ in range(2):
            with pytest.raises(mpool.MemoryExhausted):
                pool.load("digits-clip", pin=True, keep_alive=77)
            rows = pool.registry.entries()
            assert len(rows) == len(asked) == 2 and {(row["pinned"], row["keep_alive"]) for row in rows} == {before}


def test_a_load_that_times_out_leaves_the_pin(llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(memory_bytes=6_000_000, max_workers_per_model=1)) as pool:
        for name in ("one", "two"):
            pool.register(name, llama)
        with pool.generate("a", "two", stream=True, max_tokens=15000, ignore_eos=True) as stream:
            next(stream)
            with pytest.raises(mpool.Timeout):
                pool.load("one", pin=True, keep_alive=77, timeout=0.1)
        until(lambda: [row.model for row in pool.ps() if row.state == "ready"] == ["one"])
        (row,) = (row for row in pool.ps() if row.model == "one")
        assert (row.pinned, row.keep_alive) == (False, 300.0)


def test_jobs_report_their_position(llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1, policy="sequential")) as pool:
        model = pool.load(llama)
        model.generate("a", max_tokens=50, ignore_eos=True)
        jobs = [pool.submit("text_to_text", model=model, **LONG)]
        until(lambda: jobs[0].position() == -1)
        jobs += [pool.submit("text_to_text", model=model, **LONG) for _ in range(2)]
        assert [job.position() for job in jobs] == [-1, 0, 1]
        etas = [until(job.eta) for job in jobs]
        assert etas[0] < etas[1] < etas[2]
        for job in jobs:
            job.cancel()
        until(lambda: all(job.done() for job in jobs))
        assert [job.eta() for job in jobs] == [0.0] * 3 and jobs[0].position() == -1


def test_ps_shows_workers_breaker_and_keep_alive(llama: Path, broken: tuple[Path, str]) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1, keep_alive="1h")) as pool:
        job = pool.submit("text_to_text", model=pool.load(llama), **LONG)
        until(lambda: row_of(pool).busy)
        row = row_of(pool)
        assert (row.workers, row.busy, row.dead, row.breaker, row.policy) == (1, 1, 0, "closed", "pack")
        shown = repr(pool.ps())
        assert "WORKERS" in shown and "1/1" in shown and "breaker" not in shown
        job.cancel()
        until(lambda: row_of(pool).state == "ready")
        assert re.search(r"\b0/1\b.* s of 60 min", repr(pool.ps()))
    with mpool.Pool(mpool.PoolConfig(threads=1, breaker_threshold=1)) as pool:
        with pytest.raises(mpool.NumericError):
            pool.embed(broken[1], broken[0])
        row = row_of(pool)
        assert (row.breaker, row.last_error) == ("open", "NUMERIC") and "breaker open" in repr(pool.ps())
        assert "<td" in pool.ps()._repr_html_() and "breaker open" in pool.ps()._repr_html_()


# ---- metrics

NAMES = ["total_requests", "completed", "errors", "timeouts", "cancelled", "queue_full_rejections",
         "circuit_rejections", "retries", "worker_faults", "units_in", "units_out", "steps", "step_items",
         "batches_of_all", "batches_of_budget", "passes", "rows", "prefix_tokens", "draft_tokens",
         "accepted_draft_tokens", "dedup_hits", "preemptions", "loads", "load_failures", "evictions",
         "workers_spawned", "workers_evicted", "workers_dead", "spawn_failures", "chaos_faults", "illegal_transitions"]
KINDS = ["misc", "spec", "weights", "kv", "scratch", "request", "pool"]
CAPABILITIES = ["text_embedding", "text_to_text", "image_embedding", "vision", "text_to_image"]
DEFAULTS = dict(
    threads=0, memory_bytes=0, load_timeout=30.0, load_ceiling=600.0, stall_timeout=30.0,
    shutdown_grace=5.0, request_timeout=30.0, keep_alive="5m", maintenance_interval=60.0, max_workers_per_model=4,
    policy=None, batch_wait=0.0, embed_queue_capacity=100, batch_queue_capacity=50, prompt_queue_capacity=100,
    image_gen_queue_capacity=20, vision_queue_capacity=50, image_embed_queue_capacity=50, breaker_threshold=5,
    breaker_window=60.0, breaker_rest=60.0, fail_fast=False, max_embed_inputs=None, offline=None,
    chaos=None, predictive_scaling=False, scale_timeout=False, isolation="thread", weights="auto",
    process_memory=0,
    kv_dtype="auto", model_folders=(), background=False)


def test_reported_engine_bytes_are_measured(bert: Path, llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)) as pool:
        held = []
        for texts in (["one"], ["one two three " * 10 + str(number) for number in range(64)]):
            pool.embed(texts, bert)
            held.append(row_of(pool).engine_bytes)
        assert 0 < held[0] < held[1] < pool.registry.entries()[0]["worker"][0]["predicted_bytes"]
        pool.generate("one " * 100, llama, **TEXT)
        held = [row.engine_bytes for row in pool.ps() if row.model == str(llama)]
        pool.generate("two " * 900, llama, **TEXT)  # more blocks, which stay in the prefix cache
        assert 0 < held[0] < next(row.engine_bytes for row in pool.ps() if row.model == str(llama))


def test_names_and_defaults_are_pinned() -> None:
    """Metric names and defaults are public: changing one requires a change of this list."""
    assert [name for name, _ in _core.metrics()] == NAMES and all(meaning for _, meaning in _core.metrics())
    assert vars(mpool.PoolConfig()) == DEFAULTS
    assert _core.capabilities() == [
        ("text_embedding", (100, 50), "p2c"), ("text_to_text", (100, 100), "pack"),
        ("image_embedding", (50, 50), "shared"), ("vision", (50, 50), "pack"), ("text_to_image", (20, 20), "pack")]
    with mpool.Pool() as pool:
        found = pool.metrics()
        assert set(found) == {*NAMES, *_metrics.GAUGES, *_metrics.COUNTERS, "pressure", "bytes_by_kind", "queue_depths",
                              "models", "failed", "native_calls"}
        assert list(found["bytes_by_kind"]) == KINDS and list(found["queue_depths"]) == CAPABILITIES
    assert list(_events.KINDS) == _core.event_names()


def test_metrics_count(bert: Path, llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        assert pool.metrics()["total_requests"] == 0 and pool.metrics()["models"] == {}
        pool.embed(["a", "b"], bert)
        pool.generate("a", llama, **TEXT)
        found = pool.metrics()
        assert (found["total_requests"], found["completed"], found["loads"]) == (2, 2, 2)
        assert found["units_out"] >= 2 and found["units_in"] >= 3 and found["bytes_by_kind"]["weights"] > 0
        assert found["compute_threads"] == 1
        assert found["memory_used"] > 0 and len(found["models"]) == 2
        for model in found["models"].values():
            assert 0 < model["units_in"] < found["units_in"]
            latency = model["latency"]
            assert latency["count"] == 1 and 0 < latency["min"] == latency["max"] == pytest.approx(latency["sum"])
            assert sum(count for _, count in latency["histogram"]) == 1 and len(latency["histogram"]) == 28
            bound = next(bound for bound, count in latency["histogram"] if count)
            assert latency["max"] <= bound and 0 < latency["p50"] <= latency["p99"] <= latency["max"]
        for name in ("units_in", "units_out"):  # the values of the models add up to the total
            assert sum(model[name] for model in found["models"].values()) == found[name]
        pool.unload(bert)  # metrics of an unloaded model stay
        assert pool.metrics()["models"] != {} and sum(
            model["units_in"] for model in pool.metrics()["models"].values()) == found["units_in"]
    assert pool.metrics()["completed"] == 2  # also after the pool is closed
    with mpool.Pool() as unused:
        pass
    assert unused.metrics()["total_requests"] == 0
    with pytest.raises(mpool.InvalidArgument, match="`format` must be one of dict, prometheus, got 'xml'"):
        pool.metrics("xml")  # type: ignore[call-overload]


def test_pools_share_the_memory_budget_unless_one_sets_its_own(bert: Path) -> None:
    own_limit = 1 << 28
    with mpool.Pool() as first, mpool.Pool() as second, mpool.Pool(mpool.PoolConfig(memory_bytes=own_limit)) as own:
        first.load(bert)
        shared, separate = second.health().memory, own.health().memory
        assert shared.used == first.health().memory.used > 0 and shared.limit == first.health().memory.limit
        assert separate.limit == own_limit and separate.used == 0


def test_prometheus(bert: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.embed("a", bert)
        models = pool.metrics()["models"]
        families = {family.name: family for family in parser.text_string_to_metric_families(
            pool.metrics("prometheus"))}
    meanings = dict(_core.metrics())
    for name in NAMES:
        assert families[f"mpool_{name}"].type == "counter" and families[f"mpool_{name}"].documentation == meanings[name]
    assert families["mpool_total_requests"].samples[0].value == 1
    assert {sample.labels["kind"] for sample in families["mpool_bytes"].samples} == set(KINDS)
    assert {sample.labels["capability"] for sample in families["mpool_queue_depth"].samples} == set(CAPABILITIES)
    assert all(name.startswith("mpool_") for name in families)
    for name in ("units_in", "units_out"):
        (sample,) = families[f"mpool_model_{name}"].samples
        assert families[f"mpool_model_{name}"].type == "counter" and sample.labels["model"] == str(bert)
        assert sample.value == models[str(bert)][name]
    latency = families["mpool_latency_seconds"]
    buckets = [sample.value for sample in latency.samples if sample.name.endswith("_bucket")]
    assert latency.type == "histogram" and len(buckets) == 28 and buckets == sorted(buckets) and buckets[-1] == 1


# ---- health

def test_healthy_and_unhealthy(bert: Path) -> None:
    pool = mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1))
    assert pool.health().status == "healthy" and pool.health().workers.total == 0
    pool.embed("a", bert)
    found = pool.health()
    assert found.status == "healthy" and found.reasons == () and found.memory.used > 0
    assert found.memory.limit == found.memory.used + found.memory.available
    assert found.memory.utilisation == pytest.approx(found.memory.used / found.memory.limit)
    assert (found.workers.total, found.workers.busy, found.workers.idle, found.workers.dead) == (1, 0, 1, 0)
    (model,) = found.models.values()
    assert model.p50 is not None and model.error_rate == 0.0 and model.last_error is None and model.breaker == "closed"
    with pytest.raises(AttributeError):
        found.status = "unhealthy"  # type: ignore[misc]
    pool.begin_shutdown()
    assert pool.health().status == "unhealthy"
    pool.close()
    assert pool.health().status == "unhealthy" and "closed" in pool.health().reasons[0]


def test_a_failed_load_is_degraded(bert: Path, tmp_path: Path) -> None:
    """Also if no other model is in use: the process itself can serve."""
    folder = tmp_path / "cut"
    shutil.copytree(bert, folder)
    with mpool.Pool(mpool.PoolConfig(memory_bytes=20_000)) as pool:  # the request fits, the model does not
        with pytest.raises(mpool.MemoryExhausted):
            pool.embed("a", folder)
        found = until(lambda: (one := pool.health()).reasons and one)
        assert "failed" in found.reasons[0] and found.status == "degraded"


# ---- ping, check

def test_ping_does_not_wait_and_does_not_extend_keep_alive(llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)) as pool:
        model = pool.get(llama)
        assert pool.ping() == pool.ping(model) == () and len(pool.ps()) == 0  # a ping loads no model
        pool.load(model, keep_alive=600)
        (pong,) = pool.ping(model)
        assert pong.model == model.key and pong.worker_id > 0 and not pong.busy and pong.queue_depth == 0
        assert abs(pong.timestamp - time.monotonic()) < 5
        job = pool.submit("text_to_text", model=model, **LONG)
        until(lambda: pool.ping(model)[0].busy)
        for _ in range(100):
            pool.ping(model)
        assert not job.done()  # no ping waited for the request
        job.cancel()
        pool.load(model, keep_alive=0.4)
        until(lambda: not pool.ping(model), 20)  # continuous pings do not keep the model loaded
        assert row_of(pool).state in ("cold", "evicting")
        with pytest.raises(mpool.UnknownModel):
            pool.ping("no-such-model")


def test_check_runs_one_request(bert: Path, llama: Path, dino: Path, llava: Path, flux: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        for count, model in enumerate((bert, llama, dino, llava, flux), 1):
            for _ in range(2):
                assert 0 < pool.check(model, timeout=60) < 60
            assert pool.metrics()["total_requests"] == 2 * count == pool.metrics()["completed"]
            row = pool.metrics()["models"][pool.get(model).key]
            if model is llava:  # the prompt has the rows of the image
                assert row["units_in"] > 2 * len(pool.tokenize("check", llava)) + 16
            if model is flux:
                assert row["units_out"] == 2
    with pytest.raises(mpool.ShuttingDown):
        pool.check(bert)


# ---- events

def test_events_of_workers_and_requests(bert: Path, broken: tuple[Path, str]) -> None:
    seen: list[mpool.results.PoolEvent] = []
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)) as pool, mpool.Pool() as other:
        stops = [pool.on(event, seen.append) for event in _events.KINDS]  # type: ignore[arg-type]
        other.embed("a", bert)  # another pool: no events here
        pool.embed("a", bert)
        pool.unload(bert)
        with pytest.raises(mpool.NumericError):
            pool.embed(broken[1], broken[0])
        until(lambda: sum(event.event.startswith("request") for event in seen) == 4)
        kinds = [event.event for event in seen if event.model == str(bert)]
        assert kinds == ["spawn", "ready", "request_start", "request_complete", "evict"]
        begun, ended = [event for event in seen if event.model == str(bert) and event.event.startswith("request")]
        assert begun.request == ended.request is not None and ended.status == "OK" and begun.worker_id
        assert begun.timestamp <= ended.timestamp
        failed = next(event for event in seen if event.event == "request_fail")
        assert failed.status == "NUMERIC" and failed.model == str(broken[0])
        for stop in (*stops, *stops):
            stop()
        count = len(seen)
        pool.embed("again", bert)
        time.sleep(0.3)
        assert len(seen) == count


def test_models_that_degrade_and_recover_have_events(broken: tuple[Path, str], bert: Path) -> None:
    seen: list[mpool.results.PoolEvent] = []
    with mpool.Pool(mpool.PoolConfig(threads=1, breaker_threshold=2, breaker_rest=0.2)) as pool:
        stops = [pool.on(kind, seen.append) for kind in ("degraded", "recovered")]  # type: ignore[arg-type]
        pool.embed("a", bert)
        for _ in range(2):
            with pytest.raises(mpool.NumericError):
                pool.embed(broken[1], broken[0])
        key = pool.get(broken[0]).key
        assert pool.metrics()["models"][key]["healthy"] == 0 and pool.metrics()["models"][str(bert)]["healthy"] == 1
        until(lambda: bool(seen))
        assert (seen[0].event, seen[0].model, seen[0].worker_id, seen[0].request) == ("degraded", key, None, None)
        assert seen[0].reason is not None and "circuit breaker" in seen[0].reason

        def recovers() -> bool:
            try:
                pool.embed("fine", broken[0])
            except mpool.CircuitOpen:
                pass
            return len(seen) > 1

        until(recovers)
        assert [(event.event, event.model) for event in seen] == [("degraded", key), ("recovered", key)]
        assert seen[1].reason is None and pool.metrics()["models"][key]["healthy"] == 1
        for stop in stops:
            stop()
    with pytest.raises(mpool.InvalidArgument, match="recovered"):
        mpool.Pool().on("degrade", seen.append)  # type: ignore[arg-type]


def test_refused_requests_have_an_event(bert: Path, llama: Path) -> None:
    seen: list[mpool.results.PoolEvent] = []
    config = mpool.PoolConfig(threads=1, max_workers_per_model=1, policy="sequential", prompt_queue_capacity=1)
    with mpool.Pool(config) as pool:
        pool.on("request_fail", seen.append)
        model = pool.load(llama)
        jobs = [pool.submit("text_to_text", model=model, **LONG)]
        until(lambda: jobs[0].position() == -1)
        jobs.append(pool.submit("text_to_text", model=model, **LONG))
        with pytest.raises(mpool.Overloaded):
            pool.generate("a", model, fail_fast=True, **TEXT)
        for job in jobs:
            job.cancel()
        until(lambda: len(seen) == 3)
        assert [event.status for event in seen] == ["OVERLOADED", "CANCELLED", "CANCELLED"]
        assert {event.model for event in seen} == {str(llama)} and {event.worker_id for event in seen} == {None}


def test_a_failed_load_has_an_event(bert: Path) -> None:
    seen: list[mpool.results.PoolEvent] = []
    with mpool.Pool(mpool.PoolConfig(memory_bytes=20_000)) as pool:  # the request fits, the model does not
        pool.on("fail", seen.append)
        with pytest.raises(mpool.MemoryExhausted):
            pool.embed("a", bert)
        (event,) = until(lambda: list(seen))
        assert event.status == "MEMORY_EXHAUSTED" and event.request is None


def test_close_delivers_the_last_events(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks have returned when close returns, also slow ones; one that closes the pool does not wait for itself."""
    monkeypatch.setattr("mpool.pool.EVENT_SECONDS", 600)
    for _ in range(3):
        seen: list[str] = []

        def record(event: mpool.results.PoolEvent) -> None:
            time.sleep(0.1)
            seen.append(event.event)

        pool = mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1))
        pool.on("request_complete", record)
        pool.on("evict", record)
        pool.embed("a", bert)
        pool.close()
        assert seen == ["request_complete", "evict"]

    pool, closed = mpool.Pool(mpool.PoolConfig(threads=1)), threading.Event()

    def close(event: mpool.results.PoolEvent) -> None:
        pool.close()
        closed.set()

    pool.on("request_complete", close)
    pool.embed("a", bert)
    assert closed.wait(60)


# ---- life

def test_maintenance_is_started_once(bert: Path) -> None:
    with mpool.Pool() as pool:
        before = pool.metrics()["threads_created"]
        for _ in range(3):
            pool.init_maintenance()
        assert pool.metrics()["threads_created"] == before + 1
        pool.embed("a", bert)
    assert pool.metrics()["threads_created"] >= before + 1
    with pytest.raises(mpool.ShuttingDown), mpool.Pool() as closed:
        closed.close()
        closed.init_maintenance()


ENDING = """
import sys
import mpool
mpool.init_maintenance()
mpool.init_maintenance()
job = mpool.submit("text_embedding", inputs="a", model=sys.argv[1])
mpool.begin_shutdown()
mpool.begin_shutdown()
print(job.result(60).shape, mpool.health().status)
for call in (lambda: mpool.embed("a", sys.argv[1]), lambda: mpool.get(sys.argv[1]).check(),
             lambda: mpool.submit("text_embedding", inputs="a", model=sys.argv[1])):
    try:
        call()
        print("served")
    except mpool.ShuttingDown:
        print("refused")
"""


def test_begin_shutdown_is_permanent(bert: Path) -> None:
    done = subprocess.run([sys.executable, "-c", ENDING, str(bert)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["(32,) unhealthy", "refused", "refused", "refused"], done.stderr
