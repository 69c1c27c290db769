"""A function of the module that gets a ``Model`` uses the pool of that model, and never the process-wide pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.api import functions
from mpool import aio
from mpool.tasks import running
from mpool.tasks.verbs import VERBS


class Reached(Exception):
    """Raised in place of the request; its argument is the pool that would run it."""


@pytest.fixture(scope="module")
def other() -> Iterator[mpool.Pool]:
    """A pool beside the process-wide one."""
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        yield pool


@pytest.fixture
def no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every use of the process-wide pool an error."""
    def refuse() -> None:
        raise AssertionError("the process-wide pool was used")

    monkeypatch.setattr(functions, "default_pool", refuse)
    monkeypatch.setattr(aio, "default_pool", refuse, raising=False)


def arguments(name: str) -> dict[str, Any]:
    """Return one value for each required parameter of a verb except ``model``."""
    return {one.name: "x" for one in VERBS[name].positional if one.name != "model"}


@pytest.mark.parametrize("by_name", [True, False], ids=["keyword", "position"])
@pytest.mark.parametrize("name", sorted(VERBS))
def test_verbs_run_in_the_pool_of_their_model(name: str, by_name: bool, other: mpool.Pool, bert: Path,
                                              no_default: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(verb: Any, pool: Any, given: Any) -> Any:
        raise Reached(pool)

    monkeypatch.setattr(running, "_begin", reached)
    model = other.get(bert)
    given = arguments(name)
    names = [one.name for one in VERBS[name].positional]
    if name.startswith("describe_"):
        given[names[0]] = "http://x/" if name == "describe_url" else "x.png"
    if by_name:
        positional, keywords = [], {**given, "model": model}
    else:
        positional, keywords = [given.get(one, model) for one in names[:names.index("model") + 1]] \
            if "model" in names else [], {}
        if "model" not in names:
            positional, keywords = list(given.values()), {"model": model}
        else:
            keywords = {one: given[one] for one in names[names.index("model") + 1:]}
    with pytest.raises(Reached) as blocking:
        getattr(mpool, name)(*positional, **keywords)
    assert blocking.value.args[0] is other

    async def run() -> None:
        started = getattr(aio, name)(*positional, **keywords)
        if hasattr(started, "__anext__"):
            await anext(started)
        else:
            await started

    with pytest.raises(Reached) as awaited:
        asyncio.run(run())
    assert awaited.value.args[0] is other


@pytest.mark.parametrize("name", ["load", "swap"])
def test_loads_run_in_the_pool_of_their_draft_model(name: str, other: mpool.Pool, llama: Path, no_default: None,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    def reached(self: mpool.Pool, *args: Any, **keywords: Any) -> Any:
        raise Reached(self)

    blocking, model, values = getattr(mpool, name), other.get(llama), ["x", "y"][:1 + (name == "swap")]
    monkeypatch.setattr(mpool.Pool, name, reached)
    for call in (lambda: blocking(*values, draft=model),
                 lambda: asyncio.run(getattr(aio, name)(*values, draft=model))):
        with pytest.raises(Reached) as caught:
            call()
        assert caught.value.args[0] is other


def test_requests_count_in_the_pool_of_the_model(other: mpool.Pool, bert: Path, no_default: None) -> None:
    model = other.get(bert)
    before = other.metrics()["total_requests"]
    vector = mpool.embed("a", model)
    job = mpool.submit("text_embedding", inputs="b", model=model)
    assert job.result(60).shape == vector.shape
    assert [row.shape for row in mpool.embed_iter(["c"], model)] == [vector.shape]

    async def run() -> Any:
        return await aio.embed("d", model)

    assert asyncio.run(run()).shape == vector.shape
    assert other.metrics()["total_requests"] == before + 4


def test_other_functions_use_the_pool_of_the_model(other: mpool.Pool, bert: Path, no_default: None) -> None:
    model = other.get(bert)
    ids = mpool.tokenize("a cat", model)
    assert mpool.count_tokens("a cat", model=model) == len(ids)
    assert mpool.detokenize(ids, model)
    assert mpool.get(model) == model and mpool.get(model=model).pool is other
    assert mpool.load(model).pool is other
    assert model.check(timeout=60) > 0
    assert model.ping()
    mpool.unload(model)
    assert not any(row.workers for row in other.ps())

    async def run() -> None:
        assert (await aio.load(model)).pool is other
        await aio.unload(model)

    asyncio.run(run())
    assert not any(row.workers for row in other.ps())


def test_an_explicit_pool_of_aio_wins(other: mpool.Pool, bert: Path, no_default: None) -> None:
    async def run(pool: mpool.Pool) -> Any:
        return await aio.embed("a", other.get(bert), pool=pool)

    with mpool.Pool(mpool.PoolConfig(threads=1)) as mine:
        asyncio.run(run(mine))
        assert mine.metrics()["total_requests"] >= 1 and len(mine.ps()) == 1


def test_a_closed_pool_of_a_model_is_not_replaced(bert: Path, no_default: None) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        model = pool.get(bert)
    with pytest.raises(mpool.ShuttingDown):
        mpool.embed("a", model)
