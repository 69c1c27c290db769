"""Options of every request: their checks, and that every public function passes them to the core."""

from __future__ import annotations

import asyncio
import inspect
import time
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import _core, aio
from mpool.tasks import options as _options
from mpool.tasks.verbs import VERBS
from poolcalls import TEXT, WAYS, awaited

GIVEN: dict[str, Any] = dict(timeout=50, priority="high", tenant="alice", keep_alive="2m", policy="p2c", fail_fast=True)
CORE = dict(priority=1, keep_alive=120.0, policy="p2c")


class Spy:
    """A proxy of a registry that records the options of requests."""

    def __init__(self, registry: _core.Registry) -> None:
        self.registry, self.seen = registry, []  # type: _core.Registry, list[dict[str, Any]]

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.registry, name)
        if name not in ("embed", "submit_embed", "submit_text", "embed_images", "submit_images",
                        "submit_image_generation"):
            return method

        def recorded(*args: Any, **keywords: Any) -> Any:
            self.seen.append(keywords)
            return method(*args, **keywords)

        return recorded


@pytest.mark.sample(4)
@pytest.mark.parametrize("way", WAYS)
def test_call_options_reach_the_core_from_every_function(way: str, request: pytest.FixtureRequest) -> None:
    kind, call = WAYS[way]
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        model = str(request.getfixturevalue(kind))
        spy = Spy(pool.registry)
        pool._registry = spy  # type: ignore[assignment]
        try:
            call(pool, model, {})
            plain = list(spy.seen)
            assert plain and not any({"priority", "tenant", "keep_alive", "policy"} & set(one) for one in plain)
            assert all(one["timeout"] is None for one in plain)
            spy.seen.clear()
            call(pool, model, GIVEN)
        finally:
            pool._registry = spy.registry
        tenant = _options.CallOptions(tenant="alice").core()["tenant"]
        assert len(spy.seen) == len(plain)
        for at, one in enumerate(spy.seen):
            assert {name: one[name] for name in CORE} == CORE and one["tenant"] == tenant
            assert 0 < one["timeout"] <= 50
            waits = at > 0 and not way.startswith("aio")  # later slices of a request whose first slice was accepted
            assert bool(one["fail_fast"]) is not waits
            if kind not in ("llama", "llava", "flux"):
                single = way in ("embed", "submit embed", "Model.embed", "aio.embed", "Model.batch_embed",
                                 "embed_image", "submit images", "Model.embed_image", "aio.embed_image", "Model.rerank",
                                 "Model.classify", "submit texts", "aio.classify", "Model.embed_sparse",
                                 "Model.embed_tokens", "Model.embed_all", "Model.classify_tokens", "submit spans")
                assert one["service_class"] == (0 if single else 1)
        row = next(row for row in pool.registry.entries())
        assert row["keep_alive"] == pytest.approx(120)


def test_every_verb_has_its_ways() -> None:
    """Functions of a pool, methods of a model, and aio. describe_image and describe_url call vision."""
    for verb in set(VERBS) - {"describe_image", "describe_url"}:
        missing = {verb, f"Model.{verb}", f"aio.{verb}"} - set(WAYS)
        assert not missing, missing


def test_signatures_list_every_call_option() -> None:
    for function in (mpool.embed, mpool.embed_iter, mpool.Pool.embed):
        names = inspect.signature(function).parameters
        assert {"task", "precision", "progress", *_options.CALL} <= set(names)
        assert "options" not in names and names["precision"].default == "float32"


def _fill(pool: mpool.Pool, model: Any) -> list[Any]:
    """Submit long requests until the queue is full. The first of them runs."""
    def start() -> mpool.Job:
        return pool.submit("text_to_text", prompt="a", model=model, max_tokens=1900, n=64, ignore_eos=True)

    jobs = [start()]
    while jobs[0].position() >= 0:
        time.sleep(0.001)
    with pytest.raises(mpool.Overloaded):
        while len(jobs) < 500:
            jobs.append(start())
    return jobs


def test_fail_fast_or_wait(llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, prompt_queue_capacity=2, max_workers_per_model=1,
                                     policy="sequential", fail_fast=True)) as pool:
        model = pool.load(llama)
        jobs = _fill(pool, model)
        with pytest.raises(mpool.Overloaded) as refused:  # by PoolConfig.fail_fast
            model.generate("a", **TEXT)
        with pytest.raises(mpool.Overloaded):
            asyncio.run(awaited(aio.generate("a", model, pool=pool, **TEXT)))
        assert refused.value.key == model.key
        with pytest.raises(mpool.Timeout):  # the request overrides it, waits, and times out
            model.generate("a", fail_fast=False, timeout=0.3, **TEXT)

        async def beats() -> int:
            """Count iterations of the loop while a request waits for space in the queue."""
            call = asyncio.ensure_future(awaited(aio.generate("a", model, pool=pool, fail_fast=False, **TEXT)))
            count = 0
            before = pool.metrics()
            while count < 20:
                await asyncio.sleep(0.005)
                count += 1
            assert not call.done()
            after = pool.metrics()  # its repeated attempts count neither as requests nor as rejections
            assert after["total_requests"] == before["total_requests"]
            assert after["queue_full_rejections"] == before["queue_full_rejections"]
            for job in jobs:
                job.cancel()
            await asyncio.wait_for(call, 60)
            return count

        assert asyncio.run(beats()) == 20


def test_requests_are_served_by_priority(llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1, policy="sequential")) as pool:
        model = pool.load(llama)
        first = pool.submit("text_to_text", prompt="a", model=model, max_tokens=1900, n=64, ignore_eos=True)
        while first.position() >= 0:
            time.sleep(0.001)
        waiting = {name: pool.submit("text_to_text", prompt="a", model=model, priority=name, **TEXT)
                   for name in ("batch", "low", "normal", "high", "critical")}
        assert [waiting[name].position() for name in ("critical", "high", "normal", "low", "batch")] == [0, 1, 2, 3, 4]
        first.cancel()
        ends = {name: (job.result(60), job._ticket.times()[1])[1] for name, job in waiting.items()}
        assert sorted(ends, key=ends.__getitem__) == ["critical", "high", "normal", "low", "batch"]
