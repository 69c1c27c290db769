"""Values of a wrong kind, in every argument: an mpool error that says what was allowed, never one from the inside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import aio

USER = [{"role": "user", "content": "Hi"}]
TEXT: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
HUGE = 10**400
CAPABILITY = "`capability` must be one of .*, got an array"
ARRAYS = (np.array([1, 2]), np.array(10), np.array([10]), np.array(["a", "b"]))


def refused(call: Callable[[], Any], match: str = "must be|allowed") -> mpool.InvalidArgument:
    with pytest.raises(mpool.InvalidArgument, match=match) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("value", ARRAYS, ids=repr)
@pytest.mark.parametrize("name", ["dimensions", "task", "prompt", "prompt_name", "normalize", "precision", "truncate",
                                  "on_error", "progress", "timeout", "max_inputs"])
def test_arrays_as_options_of_embed(pool: mpool.Pool, bert: Path, name: str, value: Any) -> None:
    for inputs in ("a", ["a", "b"]):
        assert name in str(refused(lambda: pool.embed(inputs, bert, **{name: value})))
        with pytest.raises(mpool.InvalidArgument, match=name):
            asyncio.run(aio.embed(inputs, bert, pool=pool, **{name: value}))


@pytest.mark.parametrize("value", ARRAYS, ids=repr)
@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                                  "frequency_penalty", "max_tokens", "min_tokens", "n", "seed", "ignore_eos", "stop",
                                  "logit_bias", "logprobs", "top_logprobs", "num_predict", "parse_special", "timeout",
                                  "stream"])
def test_arrays_as_options_of_generate(pool: mpool.Pool, llama: Path, name: str, value: Any) -> None:
    refused(lambda: pool.generate("a", llama, **{name: value}))


def test_scalars_of_numpy_are_numbers(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    assert pool.embed("a", bert, dimensions=np.int64(5), timeout=np.float32(60)).shape == (5,)  # type: ignore[arg-type]
    batches = pool.embed_iter(["a", "b", "c"], bert, batch_size=np.int64(2))  # type: ignore[arg-type]
    assert [len(batch) for batch in batches] == [2, 1]
    options: Any = {"temperature": np.float32(0), "max_tokens": np.int32(4), "top_k": np.int8(3), "ignore_eos": True}
    assert len(pool.generate("a", llama, **options).token_ids) == 4
    for flag in (True, np.True_, np.float64("nan"), "3", HUGE, -1, 0):
        refused(lambda: pool.embed("a", bert, timeout=flag))  # type: ignore[arg-type]
    stopped = pool.generate("a", llama, stop_token_ids=np.arange(3), **TEXT)  # type: ignore[arg-type]
    assert stopped.token_ids == pool.generate("a", llama, stop_token_ids=[0, 1, 2], **TEXT).token_ids
    for wrong in (np.zeros((1, 1), dtype=int), np.array(3), np.array([1.0]), np.array(["a"])):
        refused(lambda: pool.generate("a", llama, stop_token_ids=wrong))  # type: ignore[arg-type]


def test_one_text_is_checked_as_many_are(pool: mpool.Pool, bert: Path) -> None:
    refused(lambda: pool.embed("a", bert, max_inputs=0), "max_inputs is 0, allowed: 1 or more")
    refused(lambda: pool.embed("a", bert, progress=3), "progress is 3, allowed")  # type: ignore[arg-type]
    refused(lambda: asyncio.run(aio.embed("a", bert, pool=pool, max_inputs=0)), "max_inputs is 0")
    refused(lambda: asyncio.run(aio.embed("a", bert, pool=pool, progress=3)), "progress is 3")  # type: ignore[arg-type]
    refused(lambda: pool.embed_iter(["a"], bert, progress=3), "progress is 3")  # type: ignore[arg-type]


def test_a_wrong_prompt_is_called_one(pool: mpool.Pool, bert: Path) -> None:
    error = refused(lambda: pool.embed("fine", bert, prompt="ab\ud800"), "prompt has half of a surrogate pair")
    assert "the text" not in str(error) and error.key == str(bert)


def test_errors_of_options_name_the_model(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    for call in (lambda: pool.embed("a", bert, precision="int4"),  # type: ignore[arg-type]
                 lambda: pool.embed("a", bert, on_error="null", precision="binary")):
        assert refused(call).key == str(bert)
    for call in (lambda: pool.generate("a", llama, temperature=-1), lambda: pool.generate([-1], llama),
                 lambda: pool.chat(USER, llama, top_p=2), lambda: pool.detokenize([-1], llama)):
        assert refused(call).key == str(llama)


def test_token_functions(pool: mpool.Pool, bert: Path) -> None:
    for ids in (np.array([[1]]), np.array(3), np.array([1.5]), np.array(["a"]), np.array([True])):
        refused(lambda: pool.detokenize(ids, bert), "ids is an array of shape")
    assert pool.detokenize(np.array([], dtype=float), bert) == ""
    for name in ("tokenize", "count_tokens"):
        error = refused(lambda: getattr(pool, name)("x" * 1_000_001, bert), "1,000,001 characters, allowed: at most")
        assert error.key == str(bert)
    for name in ("add_special", "parse_special"):
        refused(lambda: pool.tokenize("x", bert, **{name: 1}), f"{name} is 1")


def test_models_and_messages(pool: mpool.Pool, llama: Path) -> None:
    for ref in (None, 3, [], b"x", np.array(["x"])):
        refused(lambda: pool.register("x", ref),  # type: ignore[arg-type]
                "`ref` must be a key, a reference or a path, got")
    refused(lambda: pool.get(llama, np.array(["a", "b"])), CAPABILITY)  # type: ignore[arg-type]
    for role in (np.array(["user", "user"]), [], None, 3):
        refused(lambda: pool.chat([{"role": role, "content": "x"}], llama), "role` must be one of")
    refused(lambda: pool.chat(USER, llama, template_options=np.array([1, 2])))  # type: ignore[arg-type]
    with pytest.raises(mpool.Unsupported, match="images"):
        pool.chat([{**USER[0], "images": np.zeros((2, 2))}], llama)
    assert pool.chat([{**USER[0], "images": []}], llama, tools=[], template_options=None, **TEXT).text is not None
    refused(lambda: mpool.similarity([1.0], [1.0], metric=np.array(["dot", "dot"])))  # type: ignore[arg-type]
    refused(lambda: pool.generate(np.array("text"), llama), "0-d array")  # type: ignore[arg-type]


# ---- jobs

def test_waiting_for_a_job(pool: mpool.Pool, llama: Path) -> None:
    job = pool.submit("text_to_text", prompt="The", model=llama, temperature=0, max_tokens=16000, ignore_eos=True)
    start = time.monotonic()
    with pytest.raises(mpool.Timeout, match="after 0 s"):
        job.result(timeout=0)
    assert time.monotonic() - start < 1
    for wrong in (-1, float("nan"), "x", HUGE, np.array([1.0]), True):
        refused(lambda: job.result(wrong), "`timeout` must be a number of seconds from 0, or None")
    job.cancel()
    with pytest.raises(mpool.Cancelled):
        job.result(np.float32(60))
    with pytest.raises(mpool.Cancelled):
        job.result(timeout=0)


def test_options_that_submit_does_not_take(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    refused(lambda: pool.submit("text_embedding", inputs="x", model=bert, progress=True), "progress is not an option")
    refused(lambda: pool.submit("text_to_text", prompt="x", model=llama, stream=True), "stream is not an option")
    refused(lambda: pool.submit(np.array(["a", "b"])), CAPABILITY)  # type: ignore[arg-type]


def test_a_job_without_some_vectors_says_so_once(pool: mpool.Pool, bert: Path,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mpool"):
        job = pool.submit("text_embedding", inputs=["a", "", None], model=bert, on_error="null")
        assert np.isnan(job.result()[:, 0]).tolist() == [False, True, True]
        job.result()
    assert [record.getMessage() for record in caplog.records if "2 of 3 texts have no vector" in record.getMessage()] \
        == [record.getMessage() for record in caplog.records] and len(caplog.records) == 1


def test_submit_does_not_wait_for_a_full_queue(llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(prompt_queue_capacity=2)) as own:
        own.generate("x", llama, **TEXT)
        jobs, start = [], time.monotonic()
        with pytest.raises(mpool.Overloaded, match="prompt_queue_capacity") as caught:
            for _ in range(2000):
                jobs.append(own.submit("text_to_text", prompt="The", model=llama,
                                       **{**TEXT, "max_tokens": 2000, "n": 8}))
        assert jobs and time.monotonic() - start < 30 and caught.value.hint
        for job in jobs:
            job.cancel()


# ---- memory

def test_a_model_that_does_not_fit_makes_others_go_unless_they_are_pinned(bert: Path, llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(max_workers_per_model=1)) as own:
        own.embed("a", bert), own.generate("a", llama, **TEXT)
        rows = own.registry.entries()
    # room for either and what it works with, but not for both
    limit = max(row["model_bytes"] + row["worker"][0]["predicted_bytes"] for row in rows) + min(
        row["model_bytes"] for row in rows) // 2
    calls = (lambda own: own.load(llama), lambda own: own.generate("a", llama, **TEXT),
             lambda own: own.submit("text_to_text", prompt="a", model=llama, **TEXT).result(),
             lambda own: asyncio.run(aio.generate("a", llama, pool=own, **TEXT)))
    for call in calls:
        with mpool.Pool(mpool.PoolConfig(memory_bytes=limit, max_workers_per_model=1)) as own:
            own.embed("a", bert)
            call(own)
            assert [row.key for row in own.ps() if row.state in ("ready", "busy")] == [str(llama)]
    with mpool.Pool(mpool.PoolConfig(memory_bytes=limit, max_workers_per_model=1)) as own:
        own.load(bert, pin=True)
        own.embed("a", bert)
        for call in calls:
            with pytest.raises(mpool.MemoryExhausted) as caught:
                call(own)
            hint = "These models are pinned and idle, and unload() frees their memory: "
            assert str(caught.value).count(hint + str(bert)) == 1
        assert own.embed("a", bert).shape == (32,)
