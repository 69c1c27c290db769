"""Arguments of a wrong type raise InvalidArgument with the allowed values, never an error from inside the package."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import aio

TEXT: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
HUGE = 10**400
def refused(call: Callable[[], Any], match: str, param: str | None = None) -> mpool.InvalidArgument:
    """Check that ``call`` raises InvalidArgument with this text and parameter, and return the error."""
    with pytest.raises(mpool.InvalidArgument, match=match) as caught:
        call()
    assert param is None or caught.value.param == param
    return caught.value


def test_numpy_scalars_are_accepted_as_numbers(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    assert pool.embed("a", bert, dimensions=np.int64(5), timeout=np.float32(60)).shape == (5,)  # type: ignore[arg-type]
    batches = pool.embed_iter(["a", "b", "c"], bert, batch_size=np.int64(2))  # type: ignore[arg-type]
    assert [len(batch) for batch in batches] == [2, 1]
    options: Any = {"temperature": np.float32(0), "max_tokens": np.int32(4), "top_k": np.int8(3), "ignore_eos": True}
    assert len(pool.generate("a", llama, **options).token_ids) == 4
    for flag in (True, np.True_, np.float64("nan"), "3", HUGE, -1, 0):
        refused(lambda: pool.embed("a", bert, timeout=flag),  # type: ignore[arg-type]
                "`timeout` must be .*, got", "timeout")
    stopped = pool.generate("a", llama, stop_token_ids=np.arange(3), **TEXT)  # type: ignore[arg-type]
    assert stopped.token_ids == pool.generate("a", llama, stop_token_ids=[0, 1, 2], **TEXT).token_ids
    ids: Any = [np.array([5, 6, 7]), np.array([8])]
    assert np.array_equal(pool.embed(ids, bert), pool.embed([[5, 6, 7], [8]], bert))  # type: ignore[list-item]
    assert np.array_equal(pool.embed([(5, 6, 7), (8,)], bert), pool.embed(ids, bert))  # type: ignore[list-item]
    assert np.array_equal(list(pool.embed_iter(ids, bert)), pool.embed(ids, bert))
    for wrong in (np.zeros((1, 1), dtype=int), np.array(3), np.array([1.0]), np.array(["a"]), memoryview(b"ab"),
                  bytearray(b"ab")):
        refused(lambda: pool.generate("a", llama, stop_token_ids=wrong),  # type: ignore[arg-type]
                "`stop_token_ids` must be")


def test_numpy_values_in_stops_and_schemas(pool: mpool.Pool, llama: Path) -> None:
    """They mean the same as Python's values."""
    schema: Any = {"enum": np.array([7, 8]), "minimum": np.int64(8)}
    plain = {"enum": [7, 8], "minimum": 8}
    texts = [pool.generate("a", llama, temperature=0, response_format=one).text for one in (schema, plain)]
    assert texts[0] == texts[1] == "8"
    text = pool.generate("a", llama, **TEXT).text
    stops = np.array([text[1:2], "none"])
    assert pool.generate("a", llama, stop=stops, **TEXT).text == text[:1]  # type: ignore[arg-type]
    for wrong in (np.array([1, 2]), np.array(["a"])[0:0].reshape(0, 1), np.array("a")):
        refused(lambda: pool.generate("a", llama, stop=wrong), "`stop` must be", "stop")  # type: ignore[arg-type]


def test_options_are_checked_also_for_a_single_text(pool: mpool.Pool, bert: Path) -> None:
    for call in (lambda **options: pool.embed("a", bert, **options),
                 lambda **options: asyncio.run(aio.embed("a", bert, pool=pool, **options))):
        refused(lambda: call(max_inputs=0), "`max_inputs` must be")
        refused(lambda: call(progress=3), "`progress` must be True, False, None or a function .*, got 3", "progress")
    refused(lambda: pool.embed_iter(["a"], bert, progress=3), "got 3", "progress")  # type: ignore[arg-type]


def test_an_invalid_prompt_is_named_in_the_error(pool: mpool.Pool, bert: Path) -> None:
    error = refused(lambda: pool.embed("fine", bert, prompt="ab\ud800"),
                    "`prompt` must be Unicode text, got half of a surrogate pair", "prompt")
    assert "the text" not in str(error) and error.key == str(bert)


def test_asynchronous_iterables_need_aio(pool: mpool.Pool, bert: Path) -> None:
    async def texts() -> AsyncIterator[str]:
        yield "a"

    for call in (pool.embed_iter, mpool.embed_iter):
        error = refused(lambda: call(texts(), bert),  # type: ignore[arg-type]
                        "`texts` must be an iterable of str, got async_generator", "texts")
        assert error.hint == "mpool.aio.embed_iter accepts asynchronous iterables"


def test_a_pool_for_aio_is_a_pool(bert: Path, llama: Path) -> None:
    async def one(wrong: Any) -> None:
        for call in (lambda: aio.embed("a", bert, pool=wrong), lambda: aio.embed_iter(["a"], bert, pool=wrong),
                     lambda: aio.generate("a", llama, stream=True, pool=wrong), lambda: aio.load(bert, pool=wrong),
                     lambda: aio.unload(bert, pool=wrong), lambda: aio.swap("a", bert, pool=wrong)):
            with pytest.raises(mpool.InvalidArgument, match="`pool` must be an mpool.Pool or None, got") as caught:
                await call()  # type: ignore[misc]
            assert caught.value.param == "pool"

    for wrong in (3, "x", False, np.zeros(2)):
        asyncio.run(one(wrong))


@pytest.mark.parametrize("error", [TypeError("Got unsupported ScalarType BFloat16"),
                                   RuntimeError("Can't call numpy() on Tensor that requires grad.")], ids=repr)
def test_tensors_that_numpy_cannot_convert(error: Exception) -> None:
    class Tensor:
        def __array__(self, *_: Any, **__: Any) -> Any:
            raise error

    calls: list[tuple[Callable[[Any], Any], str]] = [
        (lambda bad: mpool.similarity(bad, [1.0]), "a"), (lambda bad: mpool.similarity([1.0], [bad]), "b"),
        (lambda bad: mpool.semantic_search(bad, [[1.0]]), "queries"), (mpool.search.paraphrase_mining, "vectors"),
        (mpool.search.community_detection, "vectors"), (lambda bad: mpool.maxsim([[1.0]], [bad]), "documents"),
        (lambda bad: mpool.search.pool_tokens([bad], factor=2), "documents"),
        (lambda bad: mpool.search.quantize_tokens([bad]), "documents")]
    for call, param in calls:
        found = refused(lambda: call(Tensor()), "got a value that NumPy cannot convert ", param)
        assert str(error) in str(found) and found.__cause__ is error
        assert found.hint == "Convert tensors first: tensor.detach().float().cpu().numpy()"
    none: Any = np.zeros(0)
    refused(lambda: mpool.SparseVectors(Tensor(), none, none, (0, 5), str),  # type: ignore[arg-type]
            "`indptr` must be an array of integers .*, got Tensor", "indptr")


@pytest.mark.parametrize("name", ["image.xyz", "image.xbm", "image.fli", "image", "i\0.png", "i\0.jpg", "\ud800.png"])
def test_images_are_written_only_to_formats_that_pillow_writes(tmp_path: Path, name: str) -> None:
    image = mpool.results.GeneratedImage(np.zeros((8, 8, 3), np.float32), np.zeros((1, 1, 1), np.float32), {})
    refused(lambda: image.save(f"{tmp_path}/{name}"), "`path` must be a path ", "path")
    refused(lambda: image.save(None), "`path` must be a path, got None", "path")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


# ---- jobs

def test_timeouts_of_job_results(pool: mpool.Pool, llama: Path) -> None:
    job = pool.submit("text_to_text", prompt="The", model=llama, temperature=0, max_tokens=16000, ignore_eos=True)
    with pytest.raises(mpool.Timeout, match="after 0 s"):
        job.result(timeout=0)
    assert not job.done()
    for wrong in (-1, float("nan"), "x", HUGE, np.array([1.0]), True):
        refused(lambda: job.result(wrong), "`timeout` must be a number of seconds from 0, or None")
    job.cancel()
    with pytest.raises(mpool.Cancelled):
        job.result(np.float32(60))
    with pytest.raises(mpool.Cancelled):
        job.result(timeout=0)


def test_a_job_with_invalid_inputs_logs_one_warning(pool: mpool.Pool, bert: Path,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mpool"):
        job = pool.submit("text_embedding", inputs=["a", "", None], model=bert, on_error="null")
        assert np.isnan(job.result()[:, 0]).tolist() == [False, True, True]
        job.result()
    assert len(caplog.records) == 1 and "2 of 3 texts have no vector" in caplog.records[0].getMessage()


def test_submit_does_not_wait_for_a_full_queue(llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(prompt_queue_capacity=2)) as own:
        own.generate("x", llama, **TEXT)
        jobs = []
        with pytest.raises(mpool.Overloaded, match="prompt_queue_capacity") as caught:
            for _ in range(2000):
                jobs.append(own.submit("text_to_text", prompt="The", model=llama,
                                       **{**TEXT, "max_tokens": 2000, "n": 8}))
        assert jobs and caught.value.hint
        for job in jobs:
            job.cancel()


# ---- memory

def test_loading_a_model_unloads_idle_models_unless_they_are_pinned(bert: Path, llama: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(max_workers_per_model=1)) as own:
        own.embed("a", bert), own.generate("a", llama, **TEXT)
        rows = own.registry.entries()
    # enough memory for either model and its worker, but not for both models
    limit = max(row["model_bytes"] + row["worker"][0]["predicted_bytes"] for row in rows) + min(
        row["model_bytes"] for row in rows) // 2
    calls = (lambda own: own.load(llama), lambda own: own.generate("a", llama, **TEXT),
             lambda own: own.submit("text_to_text", prompt="a", model=llama, **TEXT).result(),
             lambda own: asyncio.run(aio.generate("a", llama, pool=own, **TEXT)))
    for call in calls:
        with mpool.Pool(mpool.PoolConfig(memory_bytes=limit, max_workers_per_model=1)) as own:
            own.embed("a", bert)
            call(own)
            assert [row.model for row in own.ps() if row.state in ("ready", "busy")] == [str(llama)]
    with mpool.Pool(mpool.PoolConfig(memory_bytes=limit, max_workers_per_model=1)) as own:
        own.load(bert, pin=True)
        own.embed("a", bert)
        for call in calls:
            with pytest.raises(mpool.MemoryExhausted) as caught:
                call(own)
            hint = "These models are pinned and idle, and unload() frees their memory: "
            assert str(caught.value).count(hint + str(bert)) == 1
        assert own.embed("a", bert).shape == (32,)


def test_an_embedding_that_finds_no_memory_names_pinned_models(bert: Path, tmp_path: Path) -> None:
    other = shutil.copytree(bert, tmp_path / "other")
    with mpool.Pool(mpool.PoolConfig(max_workers_per_model=1)) as own:
        own.embed("a", bert)
        row, = own.registry.entries()
    limit = row["predicted_bytes"] + row["worker"][0]["predicted_bytes"] + row["predicted_bytes"] // 2
    calls = (lambda own: own.embed("a", other), lambda own: own.embed(["a", "b"], other),
             lambda own: own.submit("text_embedding", inputs=["a"] * 9000, model=other).result(),  # many slices
             lambda own: asyncio.run(aio.embed(["a"], other, pool=own)),
             lambda own: next(own.embed_iter(["a"], other)), lambda own: own.embed_tokens("a", other),
             lambda own: asyncio.run(aio.embed_tokens("a", other, pool=own)))
    hint = "These models are pinned and idle, and unload() frees their memory: "
    for call in calls:  # only the first request of a pool waits for the load
        with mpool.Pool(mpool.PoolConfig(memory_bytes=limit, max_workers_per_model=1)) as own:
            own.load(bert, pin=True)
            own.embed("a", bert)
            for _ in range(2):
                with pytest.raises(mpool.MemoryExhausted) as caught:
                    call(own)
                assert str(caught.value).count(hint + str(bert)) == 1, str(caught.value)
