"""Metrics of requests by model: their values agree with those that the results report."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import aio
from mpool.runtime import request_metrics
from mpool.runtime.request_metrics import BOUNDS, HISTOGRAMS, RequestMetrics
from waiting import until

TEXT: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "temperature": 0}


def of(pool: mpool.Pool, model: Path) -> dict[str, Any]:
    return pool.metrics()["models"][str(model)]


def test_times_of_a_completion(llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.load(llama)
        found = pool.generate("abc", llama, **TEXT)
        model, took = of(pool, llama), found.timings
        assert {name: model[name]["count"] for name in HISTOGRAMS} == dict.fromkeys(HISTOGRAMS, 1)
        assert model["queue_seconds"]["sum"] == pytest.approx(took.queued)
        assert model["time_per_output_token_seconds"]["sum"] == pytest.approx(
            took.generation / (found.usage.completion_tokens - 1))
        first, whole = model["time_to_first_token_seconds"]["sum"], model["request_seconds"]["sum"]
        assert took.queued + took.prompt <= first == pytest.approx(whole - took.generation)
        assert whole == pytest.approx(pool.history()[-1].duration)
        for name in HISTOGRAMS:
            (bound,) = [bound for bound, count in model[name]["histogram"] if count]
            assert model[name]["sum"] <= bound and (bound == BOUNDS[0] or
                                                    model[name]["sum"] > BOUNDS[BOUNDS.index(bound) - 1])
        pool.generate("abc", llama, **{**TEXT, "max_tokens": 1})  # its only token is the first one
        model = of(pool, llama)
        assert model["time_to_first_token_seconds"]["count"] == 2
        assert model["time_per_output_token_seconds"]["count"] == 1


@pytest.mark.parametrize("how", ["call", "async", "job", "iterator", "outputs"])
def test_every_way_to_embed_is_counted(how: str, bert: Path) -> None:
    """A blocking call for one slice has no ticket, so its time in the queue is unknown."""
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        if how == "call":
            pool.embed(["a", "b"], bert)
        elif how == "async":
            async def embed() -> None:
                await aio.embed(["a", "b"], pool.get(bert))

            asyncio.run(embed())
        elif how == "job":
            pool.submit("text_embedding", inputs=["a", "b"], model=bert).result()
        elif how == "iterator":
            assert len(list(pool.embed_iter(["a", "b"], bert))) == 2
        else:
            pool.embed_tokens(["a", "b"], bert)
        model = of(pool, bert)
        assert model["request_seconds"]["count"] == 1 and model["queue_seconds"]["count"] == (how != "call")
        assert model["time_to_first_token_seconds"]["count"] == 0 and model["failed"] == {}


def test_prompt_tokens_of_the_prefix_cache(llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)) as pool:
        prompt = "abc " * 60
        cached = [pool.generate(prompt, llama, **TEXT).usage.cached_tokens for _ in range(3)]
        assert of(pool, llama)["prefix_tokens"] == sum(cached) > 0


def test_errors_by_name(llama: Path, bert: Path) -> None:
    """An error before the model is found has no model, whatever name the request gave."""
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.embed("a", bert)
        for model in ("no-such-model", "no-such-other"):
            with pytest.raises(mpool.UnknownModel):
                pool.embed("a", model)
        with pytest.raises(mpool.InvalidArgument):
            pool.generate("a", llama, temperature=-3)
        with pytest.raises(mpool.Timeout):
            pool.generate("a", llama, max_tokens=4000, ignore_eos=True, timeout=0.05)

        def texts() -> Any:
            yield "a"
            raise OSError("a file of the program")

        with pytest.raises(OSError):
            list(pool.embed_iter(texts(), bert))
        found = pool.metrics()
        assert found["failed"] == {"UNKNOWN_MODEL": 2, "INVALID_ARGUMENT": 1}
        assert set(found["models"]) == {str(bert), str(llama)}
        assert found["models"][str(llama)]["failed"] == {"TIMEOUT": 1}
        assert found["models"][str(bert)]["failed"] == {"OTHER": 1}
        assert 'error="UNKNOWN_MODEL",model=""} 2' in pool.metrics("prometheus")
        assert "such" not in pool.metrics("prometheus")


NONE = dict.fromkeys(("keep_alive", "memory", "call", "fault", "changed_files"), 0)


def test_unloads_by_reason(bert: Path, llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, keep_alive=-1)) as pool:
        pool.load(bert)
        pool.unload(bert)
        assert of(pool, bert)["evictions"] == dict(NONE, call=1)
        pool.load(bert, keep_alive="50ms")
        until(lambda: of(pool, bert)["evictions"]["keep_alive"] == 1)
    for limit in range(7_000_000, 4_000_000, -50_000):  # from room for both models to room for either
        with mpool.Pool(mpool.PoolConfig(threads=1, keep_alive=-1, memory_bytes=limit)) as pool:
            pool.load(bert)
            pool.load(llama)
            found = of(pool, bert)["evictions"]
        if any(found.values()):
            break
    assert found == dict(NONE, memory=1)


def test_a_request_that_ends_in_the_end_of_another_is_counted() -> None:
    """A finalizer or a signal handler may end a request while its thread counts another one."""
    found = RequestMetrics()

    def count() -> None:
        with request_metrics._lock:
            found.completed("m", 1.0, 0.0, None, False)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and found.rows(["m"])["m"].histograms["request_seconds"].sum == 1.0


def test_models_that_are_gone_are_forgotten() -> None:
    found = RequestMetrics()
    for at in range(1000):
        found.failed(f"m{at}", "TIMEOUT")
    assert len(found._models) == 256
    assert set(found.rows(["m999", "other"])) == {"", "m999", "other"} and set(found._models) == {"m999"}
    assert found.rows(["m999"])["m999"].failed == {"TIMEOUT": 1} and found.rows([]).keys() == {""}


def test_an_error_that_names_a_model_counts_for_it() -> None:
    """A client may have chosen the name, so only models that had requests count."""
    found = RequestMetrics()
    found.waited("m", 0.0)
    for name in ("m", "chosen by a client", None):
        found.failed("", "CONTEXT_OVERFLOW", name)
    assert {key: one.failed for key, one in found.rows(["m", "chosen by a client"]).items()} == {
        "": {"CONTEXT_OVERFLOW": 2}, "m": {"CONTEXT_OVERFLOW": 1}, "chosen by a client": {}}
