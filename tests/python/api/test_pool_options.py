"""Each option of PoolConfig has a row here that shows its effect."""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import _core
from mpool.runtime.logs import wait_for_events
from poolstates import LONG, TEXT, broken as broken
from pooloptions import Models, held, load_once, pool_of, raised, texts, wide as wide
from waiting import until


def threads(m: Models) -> None:
    for count in (1, 2):
        with pool_of(threads=count) as pool:
            assert pool.metrics()["compute_threads"] == count


def memory_bytes(m: Models) -> None:
    with pool_of(memory_bytes=4) as pool, pytest.raises(mpool.MemoryExhausted, match=r"but the memory limit is 4 B"):
        pool.embed("a", m.bert)
    with pool_of(memory_bytes=300_000_000) as pool:
        assert pool.embed("a", m.bert).shape == (32,) and pool.health().memory.limit == 300_000_000


def load_timeout(m: Models) -> None:
    error = raised(mpool.SpawnTimeout, 10, lambda: load_once(m.wide, load_timeout=0.01))
    assert "no progress" in str(error) and error.hint == "Raise `load_timeout` of PoolConfig"
    load_once(m.wide)


def load_ceiling(m: Models) -> None:
    for _ in range(20):
        error = raised(mpool.SpawnTimeout, 20, lambda: load_once(m.wide, load_timeout=0.02, load_ceiling=0.01))
        if "no progress" not in str(error):  # on a busy machine, both limits may pass before a check
            break
    assert "the load did not end within 0.01 s" in str(error)
    assert error.hint == "Raise `load_ceiling` of PoolConfig"


def stall_timeout(m: Models) -> None:
    for limit in (0.05, 0.25):
        with pool_of(stall_timeout=limit, chaos="stall=1") as pool, pytest.raises(mpool.RecvError) as caught:
            pool.embed("a", m.bert)
        assert f"made no progress for {limit:.2f} s" in str(caught.value)


def shutdown_grace(m: Models) -> None:
    pool = pool_of(shutdown_grace=0.0)
    job = pool.submit("text_to_text", model=pool.load(m.llama), **{**LONG, "n": 4})  # ends within the default grace
    until(lambda: job.position() == -1)
    pool.close()
    with pytest.raises(mpool.ShuttingDown):
        job.result()
    pool = pool_of(shutdown_grace=60.0)
    short = pool.submit("text_to_text", model=pool.load(m.llama), prompt="a", max_tokens=300, ignore_eos=True)
    pool.close()
    assert short.result().usage.completion_tokens == 300


def request_timeout(m: Models) -> None:
    with pool_of(request_timeout=1.0, policy="sequential") as pool:
        job = held(pool, m.llama)
        began = time.monotonic()
        with pytest.raises(mpool.Timeout, match="no progress for 1.000 s"):
            pool.generate("a", m.llama, **TEXT)
        assert time.monotonic() - began > 0.9
        assert not job.done()  # it makes progress, so it does not time out
        job.cancel()
    assert "request_timeout" not in pool_of(request_timeout=None).config._registry_options()
    for limit in (None, 1.0):  # the same wait is within the one limit and beyond the other
        with pool_of(request_timeout=limit, policy="sequential") as pool:
            job = held(pool, m.llama)
            waiting = pool.submit("text_to_text", model=m.llama, prompt="a", **TEXT)
            time.sleep(1.5)
            if limit is None:
                assert not waiting.done()
            else:
                until(waiting.done)
                with pytest.raises(mpool.Timeout):
                    waiting.result()
            job.cancel()
            if limit is None:
                assert waiting.result(60).usage.completion_tokens == TEXT["max_tokens"]


def keep_alive(m: Models) -> None:
    for value, state in ((0.05, "cold"), ("50ms", "cold"), (-1, "ready")):
        with pool_of(keep_alive=value) as pool:
            pool.embed("a", m.bert)
            if state == "cold":
                until(lambda: pool.ps()[0].state == "cold")
            else:
                assert pool.ps()[0].keep_alive == math.inf
                time.sleep(0.3)
                assert pool.ps()[0].state == "ready"


def maintenance_interval(m: Models) -> None:
    def reports() -> int:
        return sum(record.message.startswith("Memory:") for record in m.caplog.records)

    with m.caplog.at_level(logging.INFO, logger="mpool.pool"):
        for seconds in (0.02, 60.0):
            wait_for_events(60)  # the records of the first pool are delivered
            m.caplog.clear()
            with pool_of(maintenance_interval=seconds) as pool:
                pool.embed("a", m.bert)
                pool.init_maintenance()  # sweeps now, and then once per interval
                if seconds < 1:
                    until(lambda: reports() >= 4)
                else:
                    time.sleep(0.6)
                    assert reports() <= 1


def max_workers_per_model(m: Models) -> None:
    for most in (1, 2):
        with pool_of(threads=2, max_workers_per_model=most) as pool:
            pool.embed("a", m.bert)
            until(lambda: pool.ps()[0].workers == most)


def policy(m: Models) -> None:
    for name in ("shared", "pack", "p2c", "sequential"):
        with pool_of(policy=name) as pool:
            pool.embed("a", m.bert)
            assert pool.ps()[0].policy == pool.pools["text_embedding"].policy == pool.pools["vision"].policy == name
    with pool_of(policy={"text_embedding": "p2c"}) as pool:
        pool.embed("a", m.bert), pool.generate("a", m.llama, **TEXT)
        assert {row.capability: row.policy for row in pool.ps()} == {"text_embedding": "p2c", "text_to_text": "pack"}
    for name in ("sequential", "pack"):  # two requests on one worker: one starts when the other ends, or before
        with pool_of(policy=name) as pool:
            jobs = [held(pool, m.llama), pool.submit("text_to_text", model=m.llama, prompt="a", **TEXT)]
            if name == "pack":
                jobs[1].result(60)
                assert not jobs[0].done()
            jobs[0].cancel()
            jobs[1].result(60)
            until(jobs[0].done)
            (_, _, ended), (_, began, _) = (job._ticket.times() for job in jobs)  # type: ignore[union-attr]
            assert (began >= ended) is (name == "sequential")


def predictive_scaling(m: Models) -> None:
    def both() -> bool:
        pool.load(m.wide)  # again: a worker may leave before the other one has started
        return pool.ps()[0].workers == 2

    for predictive in (False, True):  # one caller keeps one of two workers almost always busy
        with pool_of(predictive_scaling=predictive, threads=2, max_workers_per_model=2, keep_alive=0.3) as pool:
            until(both)
            # The other worker leaves, or is predicted for three seconds in a row; other programs may delay either.
            dice, since, end = random.Random(7), time.monotonic(), time.monotonic() + 120
            while time.monotonic() < (min(since + 3, end) if predictive else end):
                pool.embed([" ".join(dice.choices(["one", "two"], k=40)) for _ in range(25)], m.wide)
                time.sleep(0.002)  # short compared to a request
                until(lambda: pool.registry.entries()[0]["busy"] == 0)  # the idle worker gets the next one
                row = pool.registry.entries()[0]
                if not predictive and row["workers"] == 1:
                    break
                if predictive and not row["workers"] == row["predicted_workers"] == 2:
                    since = time.monotonic()
            assert row["workers"] == row["predicted_workers"] == 2 if predictive else row["workers"] == 1
            assert row["arrivals"] > 0 if predictive else row["arrivals"] == row["predicted_workers"] == 0


def scale_timeout(m: Models) -> None:
    """Behind a request that runs for minutes, another one waits for ``request_timeout``, or for ten times as long."""
    for scale, patience in ((False, "0.200"), (True, "2.000")):
        with pool_of(scale_timeout=scale, policy="sequential", request_timeout=0.2) as pool:
            pool.load(m.llama)
            pool.generate("a", m.llama, timeout=60, **TEXT)  # waits are predicted from requests that have ended
            ahead = held(pool, m.llama)
            # on a fast machine one request ahead is too short: its predicted time is 0.6 s, a third of the longest wait
            more = [pool.submit("text_to_text", model=m.llama, **LONG) for _ in range(2)]
            waiting = pool.submit("text_to_text", model=m.llama, **LONG)
            own = pool.submit("text_to_text", model=m.llama, timeout=0.15, **LONG)  # never scaled
            with pytest.raises(mpool.Timeout, match=f"no progress for {patience} s .*still queued"):
                waiting.result()
            with pytest.raises(mpool.Timeout, match=r"no result within the timeout, .* \S+ s .*still queued") as late:
                own.result()
            found = re.search(r"ended (\S+) s", str(late.value))
            assert found and float(found[1]) <= 0.15  # less by what the request took to reach the queue
            assert not ahead.done()
            for job in (ahead, *more):
                job.cancel()


def batch_wait(m: Models) -> None:
    def least(pool: mpool.Pool) -> float:
        """The least latency so far, after another request."""
        pool.embed(f"{next(numbers)}", m.bert)
        (model,) = pool.metrics()["models"].values()
        return float(model["latency"]["min"])

    numbers = itertools.count()
    with pool_of(batch_wait=0.002) as pool:
        assert min(least(pool) for _ in range(30)) >= 0.002
    with pool_of(batch_wait=0.0) as pool:
        until(lambda: least(pool) < 0.002)  # a loaded machine delays most requests, but not every one


def _capacity(field: str, service_class: int, capability: str) -> Callable[[Models], None]:
    def row(m: Models) -> None:
        with pool_of(policy="sequential", **{field: 3}) as pool:
            found = pool.pools[capability].queue_capacity
            assert found[service_class] == 3
            if capability == "text_to_text":
                job = held(pool, m.llama)
                waiting = [pool.submit("text_to_text", model=m.llama, **LONG) for _ in range(3)]
                with pytest.raises(mpool.Overloaded, match=field):
                    pool.submit("text_to_text", model=m.llama, **LONG)
                for one in (job, *waiting):
                    one.cancel()
            elif capability == "text_embedding":
                model, jobs = pool.load(m.wide), []  # type: mpool.Model, list[mpool.Job]
                inputs = (lambda: texts(len(jobs))) if service_class else (lambda: texts(len(jobs), 1)[0])
                with pytest.raises(mpool.Overloaded, match=field):
                    while len(jobs) < 5000:
                        jobs.append(pool.submit("text_embedding", inputs=inputs(), model=model))
                assert pool.registry.entries()[0]["capacity"][service_class] == 3
                for one in jobs:
                    one.cancel()
            else:
                words = f"`queue_capacity` of {capability} must be 1 to .*got 0"
                with pytest.raises(mpool.InvalidArgument, match=words):
                    _core.Registry(queue_capacity={capability: 0})
                _fill_by_images(field, capability)

    return row


def _fill_by_images(field: str, capability: str) -> None:
    """Fill the queue of a demo model whose process is stopped."""
    images = [np.full((8, 8, 3), 10 * at, np.uint8) for at in range(5)]
    ref, given = {
        "vision": ("digits-llava", lambda at: {"images": images[at], "prompt": "Which digit?", **TEXT}),
        "image_embedding": ("digits-clip", lambda at: {"images": images[at]}),
        "text_to_image": ("digits-sd3", lambda at: {"prompt": str(at), "num_inference_steps": 1}),
    }[capability]
    with pool_of(policy="sequential", isolation="process", **{field: 3}) as pool:
        model = pool.load(ref)

        def submit(at: int) -> mpool.Job:
            return pool.submit(capability, model=model, **given(at))

        submit(0).result(60)
        process, = pool.ps()[0].processes
        os.kill(process, signal.SIGSTOP)
        try:
            jobs = [submit(0)]
            until(lambda: jobs[0].position() == -1)
            jobs += [submit(at) for at in (1, 2, 3)]
            assert [job.position() for job in jobs] == [-1, 0, 1, 2]
            for _ in range(2):
                with pytest.raises(mpool.Overloaded, match=field) as caught:
                    submit(4)
                assert caught.value.key == model.key
        finally:
            os.kill(process, signal.SIGCONT)
        for job in jobs:  # those that were accepted are computed
            job.result(60)


def _fault(pool: mpool.Pool, m: Models) -> None:
    with pytest.raises(mpool.NumericError):
        pool.embed(m.broken[1], m.broken[0])


def breaker_threshold(m: Models) -> None:
    with pool_of(breaker_threshold=2) as pool:
        for _ in range(2):
            _fault(pool, m)
        with pytest.raises(mpool.CircuitOpen):
            pool.embed("a", m.broken[0])
    with pool_of(breaker_threshold=0) as pool:
        for _ in range(10):
            _fault(pool, m)
        assert pool.embed("a", m.broken[0]).shape == (32,)


def breaker_window(m: Models) -> None:
    for window, state in ((0.05, "closed"), (60.0, "open")):
        with pool_of(breaker_threshold=2, breaker_window=window) as pool:
            _fault(pool, m)
            time.sleep(0.15)
            _fault(pool, m)
            assert pool.ps()[0].breaker == state


def breaker_rest(m: Models) -> None:
    def served() -> bool:
        try:
            return pool.embed("a", m.broken[0]).shape == (32,)
        except mpool.CircuitOpen:
            return False

    with pool_of(breaker_threshold=1, breaker_rest=0.3) as pool:
        _fault(pool, m)
        until(served, 30)  # the default is 60 s
    with pool_of(breaker_threshold=1, breaker_rest=60.0) as pool:
        _fault(pool, m)
        time.sleep(0.4)
        with pytest.raises(mpool.CircuitOpen):
            pool.embed("a", m.broken[0])


def fail_fast(m: Models) -> None:
    for fast, error in ((True, mpool.Overloaded), (False, mpool.Timeout)):
        with pool_of(fail_fast=fast, policy="sequential", prompt_queue_capacity=1) as pool:
            jobs = [held(pool, m.llama), pool.submit("text_to_text", model=m.llama, **LONG)]
            with pytest.raises(error):
                pool.generate("a", m.llama, timeout=60 if fast else 0.3, **TEXT)
            for job in jobs:
                job.cancel()


def max_embed_inputs(m: Models) -> None:
    with pool_of(max_embed_inputs=2) as pool:
        assert pool.embed(["a", "b"], m.bert).shape == (2, 32)
        with pytest.raises(mpool.LimitError, match="at most 2"):
            pool.embed(["a", "b", "c"], m.bert)


def offline(m: Models) -> None:
    with pool_of(offline=True) as pool, pytest.raises(mpool.errors.OfflineError):
        pool.embed("a", "nobody-at-all/no-such-model")


def model_folders(m: Models) -> None:
    with tempfile.TemporaryDirectory() as place:
        stored, folder = Path(place, "stored"), Path(place, "model")
        shutil.copytree(m.bert, stored)
        folder.mkdir()
        for file in stored.iterdir():
            (folder / file.name).symlink_to(file)
        with pool_of() as pool, pytest.raises(mpool.errors.FormatError, match=r"PoolConfig\(model_folders=\[...\]\)"):
            pool.embed("a", folder)
        with pool_of(model_folders=[stored]) as pool:
            assert np.array_equal(pool.embed("a", folder), pool.embed("a", m.bert))


def chaos(m: Models) -> None:
    def run(rules: Any) -> tuple[list[str], dict[str, Any]]:
        found = []
        with pool_of(chaos=rules, breaker_threshold=0) as pool:
            for number in range(40):
                try:
                    found.append(str(pool.embed(f"{number}", m.bert).shape))
                except (mpool.ModelError, mpool.MemoryExhausted) as error:
                    found.append(type(error).__name__)
            return found, pool.metrics()

    quiet, metrics = run(None)
    assert set(quiet) == {"(32,)"} and metrics["chaos_faults"] == 0
    # All pools share one memory budget: a refused request first frees the caches of idle models in other pools.
    run("seed=7,fail=0.4,memory=0.3")
    wild, metrics = run("seed=7,fail=0.4,memory=0.3")
    assert {"(32,)", "ModelError", "MemoryExhausted"} == set(wild)
    assert metrics["chaos_faults"] > 10 and metrics["retries"] > 0 and metrics["errors"] == len(
        [one for one in wild if one != "(32,)"])
    assert run({"memory": 0.3, "fail": 0.4, "seed": 7})[0] == wild != run("seed=8,fail=0.4,memory=0.3")[0]
    # a short limit only where the step stalls: on a busy machine, a worker may take longer to die
    for rules, limit, error in (("die=1", {}, mpool.InternalError),
                                ("stall=1", {"stall_timeout": 0.1}, mpool.RecvError)):
        with pool_of(chaos=rules, breaker_threshold=0, **limit) as pool, pytest.raises(error):
            pool.embed("a", m.bert)


def isolation(m: Models) -> None:
    for where, count in (("thread", 0), ("process", 1)):
        with pool_of(isolation=where) as pool:
            assert pool.embed("a", m.bert).shape == (32,)
            row, = pool.ps()
            assert row.isolation == where and len(row.processes) == count


def weights(m: Models) -> None:
    for where in ("packed", "mapped"):
        with pool_of(weights=where) as pool:
            assert pool.embed("a", m.bert).shape == (32,)
            row, = pool.ps()
            assert row.weights == where


def background(m: Models) -> None:
    """Workers and compute threads have a higher nice value and the policy SCHED_BATCH; other threads keep theirs."""
    def priorities(pid: int | str) -> dict[str, set[tuple[int, int]]]:
        found: dict[str, set[tuple[int, int]]] = {}
        for task in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError):  # the thread has ended
                name = Path(f"/proc/{pid}/task/{task}/comm").read_text().strip()
                found.setdefault(name, set()).add((os.sched_getscheduler(int(task)),
                                                   os.getpriority(os.PRIO_PROCESS, int(task))))
        return found

    own = os.getpriority(os.PRIO_PROCESS, 0)
    usual, lower = (os.SCHED_OTHER, own), (os.SCHED_BATCH, min(own + 10, 19))
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    with pool_of(threads=2) as other, pool_of(background=True, threads=2) as pool:
        before = priorities("self")
        assert lower not in before.get("mpool-worker", set()) | before.get("mpool-compute", set())
        other.embed(["a b c"] * 200, m.bert)
        pool.embed(["a b c"] * 200, m.bert)
        found = priorities("self")
        assert found["mpool-worker"] >= {usual, lower} and found["mpool-compute"] >= {usual, lower}
        assert all(kinds == {usual} for name, kinds in found.items() if name not in ("mpool-worker", "mpool-compute"))
    with pool_of(background=True, isolation="process") as pool:
        assert pool.embed("a", m.bert).shape == (32,)
        pids = [worker["process"] for row in pool.registry.entries() for worker in row["worker"] if worker["process"]]
        assert pids and all(kinds == {lower} for pid in pids for kinds in priorities(pid).values())
    with pool_of(background=True) as pool, pool_of() as shared:
        assert pool.metrics()["compute_threads"] == shared.metrics()["compute_threads"]


def kv_dtype(m: Models) -> None:
    for kind, expected in (("auto", {"int16", "float32"}), ("int8", {"int8"})):
        with pool_of(kv_dtype=kind) as pool:
            assert pool.generate("a", m.llama, **TEXT).text and pool.embed("a", m.bert).shape == (32,)
            rows = {row.capability: row.kv_dtype for row in pool.ps()}
            assert rows["text_to_text"] in expected and rows["text_embedding"] is None


def process_memory(m: Models) -> None:
    most = 3_000_000
    with pool_of(isolation="process", process_memory=most) as pool:
        assert pool.generate("a", m.llama, **TEXT).text
        with pytest.raises(mpool.MemoryExhausted):
            pool.generate("a", m.llama, max_tokens=1900, n=128, timeout=60)
    with pool_of(isolation="process", process_memory=300_000_000, memory_bytes=200_000_000) as pool:
        with pytest.raises(mpool.MemoryExhausted):  # the memory is reserved when the process starts
            pool.load(m.llama)


ROWS: dict[str, Callable[[Models], None]] = {
    **{row.__name__: row for row in (
        threads, memory_bytes, load_timeout, load_ceiling, stall_timeout, shutdown_grace, request_timeout,
        keep_alive, maintenance_interval, max_workers_per_model, policy, batch_wait, breaker_threshold, breaker_window,
        breaker_rest, fail_fast, max_embed_inputs, offline, chaos, predictive_scaling, scale_timeout, isolation,
        weights, process_memory, kv_dtype, model_folders, background)},
    "embed_queue_capacity": _capacity("embed_queue_capacity", 0, "text_embedding"),
    "batch_queue_capacity": _capacity("batch_queue_capacity", 1, "text_embedding"),
    "prompt_queue_capacity": _capacity("prompt_queue_capacity", 0, "text_to_text"),
    "image_gen_queue_capacity": _capacity("image_gen_queue_capacity", 0, "text_to_image"),
    "vision_queue_capacity": _capacity("vision_queue_capacity", 0, "vision"),
    "image_embed_queue_capacity": _capacity("image_embed_queue_capacity", 0, "image_embedding")}


def test_every_option_has_a_row() -> None:
    assert set(ROWS) == {field.name for field in fields(mpool.PoolConfig)}


@pytest.mark.parametrize("rules, why", [
    ("", "'' is not name=number"), ("fail", "'fail' is not name=number"), ("fail=0.1,", "'' is not name=number"),
    ("fail=a", "`fail` must be a probability from 0 to 1, got 'a'"),
    ("fail=2", "`fail` must be a probability from 0 to 1, got 2"),
    ("fail=-0.1", "`fail` must be a probability from 0 to 1, got -0.1"),
    ("fail=nan", "`fail` must be a probability from 0 to 1, got nan"), ("crash=0.1", "'crash' is unknown"),
    ("fail=0.1,fail=0.2", "'fail' is given twice"),
    ("seed=1.5,fail=0.1", "`seed` must be an integer from 0 to 2**64 - 1, got 1.5"),
    ("seed=-1,fail=0.1", "`seed` must be an integer from 0 to 2**64 - 1, got -1"), ("seed=7", "every probability is 0"),
    ("fail=0.6,die=0.6", "sum of the probabilities must be at most 1, got 1.2"),
    ({"fail": True}, "`fail` must be a probability from 0 to 1, got True"),
    ({"fail": "0.1"}, "`fail` must be a probability from 0 to 1, got '0.1'"),
    ({1: 0.5}, "1 is unknown"), ({}, "every probability is 0"), (0.5, "neither a string nor a mapping")])
def test_invalid_chaos_rules_are_refused(rules: Any, why: str) -> None:
    with pytest.raises(mpool.InvalidArgument) as error:
        mpool.PoolConfig(chaos=rules)
    assert why in str(error.value) and "seed=7,fail=0.01" in str(error.value) and error.value.param == "chaos"


@pytest.mark.sample(4)
@pytest.mark.parametrize("option", ROWS)
def test_an_option_changes_behaviour(option: str, bert: Path, llama: Path, wide: Path, broken: tuple[Path, str],
                                     caplog: pytest.LogCaptureFixture) -> None:
    ROWS[option](Models(bert, llama, wide, broken, caplog))
