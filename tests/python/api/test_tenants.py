"""Tenants share no cached result: an input that another tenant has sent takes the work of a new one, by counters.

Cached prefixes are tested in ``test_prefix.py``, tables of the core in ``tests/c``.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import imagemodels
import numpy as np
import pytest
from poolcalls import WAYS, awaited

import mpool
from mpool import tenants
from mpool.conversation import grammar
from mpool.tasks import options

#: Vectors of equal inputs are kept for 0.1 s.
KEPT = 0.1
TENANTS: list[dict[str, Any]] = [{}, {"tenant": "one"}, {"tenant": "two"}, {"tenant": 1}, {"tenant": 2**32 + 1}]


def number_of(tenant: Any) -> int:
    found: int = options.CallOptions(tenant=tenant).core()["tenant"]
    return found


def test_numbers_of_tenants_are_keyed_hashes() -> None:
    """The numbers differ in another process: a caller cannot choose names whose numbers are equal."""
    names = ["alice", "bob", "1", 1, 2, 2**32 + 1, 2**64 - 1]
    numbers = [number_of(name) for name in names]
    assert len(set(numbers)) == len(names) and [number_of(name) for name in names] == numbers
    assert all(0 < number < 2**64 for number in numbers) and max(numbers) >= 2**32
    code = "from mpool.tasks.options import CallOptions; print(CallOptions(tenant='alice').core()['tenant'])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(found) != numbers[0]


def repeats(pool: mpool.Pool, send: Callable[[dict[str, Any]], Any]) -> list[bool | None]:
    """Send an input for each tenant, twice. Returns for each request whether it reused a vector; None: it followed too
    late on the one that could have made it."""
    ends: dict[int, float] = {}
    found: list[bool | None] = []
    for index in [*range(len(TENANTS))] * 2:
        began = ends.get(index, time.monotonic())
        before = pool.metrics()["dedup_hits"]
        send(TENANTS[index])
        reused = pool.metrics()["dedup_hits"] > before
        found.append(reused if reused or time.monotonic() - began < KEPT or index not in ends else None)
        ends[index] = time.monotonic()
    return found


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_vectors(bert: Path, isolation: str) -> None:
    count = len(TENANTS)
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1, isolation=isolation)) as pool:
        want = pool.embed("An input.", bert)
        time.sleep(2 * KEPT)

        def send(tenant: dict[str, Any]) -> None:
            assert np.array_equal(pool.embed("An input.", bert, **tenant), want)

        found = repeats(pool, send)
        assert found[:count] == [False] * count and all(one is not False for one in found[count:])
        jobs = [pool.submit("text_embedding", inputs="Another input.", model=bert, **tenant) for tenant in TENANTS]
        before = pool.metrics()["dedup_hits"]
        assert len({job.result().tobytes() for job in jobs}) == 1 and pool.metrics()["dedup_hits"] == before


def test_vectors_of_images(dino: Path) -> None:
    image, count = imagemodels.image(1, 40, 50), len(TENANTS)
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        want = pool.embed_image(image, dino)
        time.sleep(2 * KEPT)

        def send(tenant: dict[str, Any]) -> None:
            assert np.array_equal(pool.embed_image(image, dino, **tenant), want)

        found = repeats(pool, send)
        assert found[:count] == [False] * count and all(one is not False for one in found[count:])


@pytest.mark.parametrize("kind", ["bert", "dino"])
def test_workers_share_recent_vectors(request: pytest.FixtureRequest, kind: str) -> None:
    """An immediate repeat is never computed again, whichever of two workers gets it."""
    model = request.getfixturevalue(kind)
    with mpool.Pool(mpool.PoolConfig(threads=2, policy="p2c")) as pool:
        def send(number: int) -> int:
            if kind == "bert":
                pool.embed(" ".join("the" if number >> bit & 1 else "cat" for bit in range(6)), model)
            else:
                pool.embed_image(imagemodels.image(number, 40, 50), model)
            return int(pool.metrics()["dedup_hits"])

        pool.load(model)
        missed = counted = after = 0
        for number in range(60):
            began = time.monotonic()  # a vector is kept from its computation on, not from the end of its request
            found, before, after = after, send(number), send(number)
            assert before == found  # the first one is computed: no earlier input equals it
            if time.monotonic() - began < KEPT:
                counted, missed = counted + 1, missed + (after == before)
        assert missed == 0
        if not counted:
            pytest.skip("the machine is too busy: every pair of requests took longer than a vector is kept")


#: Ways whose requests have equal inputs: how many share a vector depends on the steps.
EQUAL = ("slices", "aio.embed_image, many")


@pytest.mark.sample(16)
@pytest.mark.parametrize("way", [way for way in WAYS if not way.endswith(EQUAL)])
def test_every_request_takes_the_work_of_a_new_one(request: pytest.FixtureRequest, way: str) -> None:
    kind, call = WAYS[way]
    model = request.getfixturevalue(kind)
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)) as pool:
        work = []
        for tenant in ("one", "two", 1):
            before = pool.metrics()
            call(pool, str(model), {"tenant": tenant})
            after = pool.metrics()
            work.append({name: after[name] - before[name] for name in ("dedup_hits", "prefix_tokens", "rows")})
        assert work[0] == work[1] == work[2]


def test_formats_are_compiled_for_each_tenant(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []
    compile = grammar._Compiler._compile

    def counted(self: Any, *args: Any) -> Any:
        compiled.append(tenants.current())
        return compile(self, *args)

    monkeypatch.setattr(grammar._Compiler, "_compile", counted)
    options: dict[str, Any] = {"max_tokens": 2, "response_format": {"type": "regex", "regex": "[a-f]{2}tenants"}}
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        for _ in range(2):
            pool.generate("x", llama, **options)
            for name in ("one", "two"):
                pool.submit("text_to_text", prompt="x", model=llama, tenant=name, **options).result()
                pool.generate("x", llama, tenant=name, **options)
                asyncio.run(awaited(mpool.aio.generate("x", llama, tenant=name, pool=pool, **options)))
    assert compiled == [0, number_of("one"), number_of("two")]


def test_prompts_are_prepared_for_each_tenant(bert: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.embed("x", bert)
        plans = pool._find(bert, "text_embedding").plans
        sizes = []
        asked = {"prompt": "find: "}
        given: list[dict[str, Any]] = [{}, {"tenant": "one"}, asked, {**asked, "tenant": "one"},
                                       {**asked, "tenant": "two"}, {**asked, "tenant": "one"}]
        for options in given:
            pool.embed("x", bert, **options)
            sizes.append(len(plans))
    assert [size - sizes[0] for size in sizes] == [0, 0, 1, 2, 3, 3]
