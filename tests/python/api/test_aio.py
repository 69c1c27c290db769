"""mpool.aio: coroutines and asynchronous iterators, on small seeded checkpoints. Each event loop has one watcher."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.runtime import watching as _watching
from mpool import aio, models
from mpool.runtime.history import PoolHistory, TrackedRequest

from waiting import until

TEXTS = ["A cat sat on the mat.", "The dog barked.", "Numbers 1 2 3."]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 16000, "ignore_eos": True}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def idle(pool: mpool.Pool) -> None:
    for _ in range(3000):
        if not any(row.running or row.queued for row in pool.ps()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"requests still run:\n{pool.ps()}")


def test_coroutines_return_the_same_results_as_functions(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]

    async def work() -> list[Any]:
        return [await aio.embed(TEXTS[0], bert, pool=pool), await aio.embed(TEXTS, bert, pool=pool, dimensions=5),
                await aio.generate("The", llama, pool=pool, **GREEDY), await aio.chat(chat, llama, pool=pool, **GREEDY),
                await aio.embed([], bert, pool=pool)]

    one, many, text, chatted, none = run(work())
    assert np.array_equal(one, pool.embed(TEXTS[0], bert)) and none.shape == (0, 32)
    assert np.array_equal(many, pool.embed(TEXTS, bert, dimensions=5))
    assert text.token_ids == pool.generate("The", llama, **GREEDY).token_ids
    assert chatted.token_ids == pool.chat(chat, llama, **GREEDY).token_ids


def test_many_texts_and_iterators(pool: mpool.Pool, bert: Path) -> None:
    texts = [f"Text number {number}." for number in range(3000)]
    seen: list[tuple[int, int | None]] = []

    async def source() -> AsyncIterator[str]:
        for text in texts:
            yield text

    async def work() -> list[Any]:
        whole = await aio.embed(texts, bert, pool=pool, progress=lambda done, total: seen.append((done, total)))
        plain = [vector async for vector in aio.embed_iter(iter(texts), bert, pool=pool)]
        lazily = [batch async for batch in aio.embed_iter(source(), bert, pool=pool, batch_size=700)]
        return [whole, np.stack(plain), np.concatenate(lazily)]

    want = pool.embed(texts, bert)
    for got in run(work()):
        assert np.array_equal(got, want)
    assert seen[-1] == (3000, 3000)


def test_streams(pool: mpool.Pool, llama: Path) -> None:
    async def work() -> None:
        want = pool.generate("The", llama, **GREEDY)
        stream = aio.generate("The", llama, pool=pool, stream=True, **GREEDY)
        chunks = [chunk async for chunk in stream]
        assert "".join(map(str, chunks)) == want.text and chunks[-1].finish_reason == "length"
        assert (await stream.result()).token_ids == want.token_ids
        assert [chunk async for chunk in stream] == []
        # A stream can also be awaited or used as a context manager.
        again = await aio.generate("The", llama, pool=pool, stream=True, **GREEDY)
        assert "".join([str(chunk) async for chunk in again]) == want.text
        async with aio.chat([{"role": "user", "content": "Hi"}], llama, pool=pool, stream=True, **GREEDY) as open_:
            assert (await open_.__anext__()).text

    run(work())


@pytest.mark.parametrize("leave", ["break", "break with a reference", "del", "aclose", "with", "never started",
                                   "cancel"])
def test_leaving_a_stream_early_frees_the_slot(pool: mpool.Pool, llama: Path, leave: str) -> None:
    async def work() -> None:
        stream = aio.generate("The", llama, pool=pool, stream=True, **ENDLESS)
        if leave == "break":
            async for _ in aio.generate("The", llama, pool=pool, stream=True, **ENDLESS):
                break
        elif leave == "break with a reference":
            async for _ in stream:
                break
            assert (await stream.result()).finish_reason == "cancelled"
        elif leave == "del":
            await stream.__anext__()
            del stream
        elif leave == "aclose":
            await stream.__anext__()
            await stream.aclose()
        elif leave == "with":
            async with stream:
                await stream.__anext__()
        elif leave == "cancel":
            async def read() -> None:
                async for _ in stream:
                    pass

            task = asyncio.create_task(read())
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(StopAsyncIteration):
                await stream.__anext__()
        else:
            del stream
        gc.collect()
        await idle(pool)

    run(work())


def test_cancelling_a_task_cancels_its_request(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    async def work() -> None:
        calls = [aio.generate("The", llama, pool=pool, **ENDLESS) for _ in range(5)]
        calls += [aio.embed([f"Some text to embed. {i} " * 10 for i in range(9000)], bert, pool=pool)]
        await aio.generate("The", llama, pool=pool, **GREEDY)
        before, tasks = pool.metrics()["steps"], [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0.05)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in done), done
        await idle(pool)
        assert pool.metrics()["steps"] - before < ENDLESS["max_tokens"]  # no request was completed

    run(work())


def test_wait_for_is_a_timeout(pool: mpool.Pool, llama: Path) -> None:
    async def work() -> None:
        await aio.generate("The", llama, pool=pool, **GREEDY)
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(aio.generate("The", llama, pool=pool, **ENDLESS), 0.05)
        with pytest.raises(mpool.Timeout):
            await aio.generate("The", llama, pool=pool, timeout=0.05, **ENDLESS)
        await idle(pool)

    run(work())


def test_coroutines_raise_the_same_errors_as_functions(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    async def work() -> None:
        for call, kind in ((lambda: aio.embed(["a", None], bert, pool=pool), mpool.InvalidArgument),
                           (lambda: aio.embed("a", llama, pool=pool), mpool.WrongCapability),
                           (lambda: aio.embed("a", "all-MiniLM-L6-v9", pool=pool), mpool.UnknownModel),
                           (lambda: aio.embed("a", bert, pool=pool, dimensions=99), mpool.InvalidArgument),
                           (lambda: aio.embed("a", bert, pool=pool, tusk=1), mpool.InvalidArgument),
                           (lambda: aio.generate("", llama, pool=pool), mpool.InvalidArgument),
                           (lambda: aio.generate("a", llama, pool=pool, temprature=1), mpool.InvalidArgument),
                           (lambda: aio.chat([], llama, pool=pool), mpool.InvalidArgument)):
            with pytest.raises(kind):
                await call()
        with pytest.raises(mpool.InvalidArgument):
            aio.generate("a", llama, pool=pool, stream="yes")
        with pytest.raises(mpool.InvalidArgument):
            async for _ in aio.embed_iter(["a"], bert, pool=pool, precision="int8"):
                pass
        rows = await aio.embed(["a", ""], bert, pool=pool, on_error="null")
        assert np.isnan(rows[:, 0]).tolist() == [False, True]

    run(work())


def test_jobs_can_be_awaited(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    async def work() -> None:
        vectors = pool.submit("text_embedding", inputs=TEXTS, model=bert)
        text = pool.submit("text_to_text", prompt="The", model=llama, **GREEDY)
        assert np.array_equal(await vectors, pool.embed(TEXTS, bert))
        assert (await text).token_ids == pool.generate("The", llama, **GREEDY).token_ids
        again = pool.submit("text_to_text", prompt="The", model=llama, **GREEDY)
        assert "".join([str(chunk) async for chunk in again]) == (await text).text
        nothing = pool.submit("text_embedding", inputs=[""], model=bert, on_error="null")
        assert np.isnan(await nothing).all()

    run(work())


def test_a_full_queue_does_not_block_the_loop(llama: Path) -> None:
    async def work(own: mpool.Pool) -> None:
        await aio.generate("The", llama, pool=own, **GREEDY)
        tasks = [asyncio.ensure_future(aio.generate("The", llama, pool=own, **ENDLESS)) for _ in range(200)]
        await asyncio.sleep(0)  # each task runs once
        # In a loop that waited for the queue, all requests would have entered it now.
        assert sum(row.running + row.queued for row in own.ps()) < 100
        await asyncio.sleep(0.1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not _watching.watcher()._lines
        await idle(own)
        assert (await aio.generate("The", llama, pool=own, **GREEDY)).text

    with mpool.Pool(mpool.PoolConfig(prompt_queue_capacity=1)) as own:
        run(work(own))


def test_file_reads_and_tokenization_do_not_block_the_loop(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(own: mpool.Pool) -> None:
        beats, over = 0, asyncio.Event()

        async def beat() -> None:
            nonlocal beats
            while not over.is_set():
                await asyncio.sleep(0.001)
                beats += 1

        def watched(function: Any) -> Any:
            """The function begins once the loop has run on."""
            def call(*args: Any, **options: Any) -> Any:
                before = beats
                until(lambda: beats > before + 2)
                watches.append(function.__name__)
                return function(*args, **options)
            return call

        watches: list[str] = []
        monkeypatch.setattr("mpool.runtime.model_files.describe", watched(models.describe))
        monitor = asyncio.create_task(beat())
        await aio.load(bert, pool=own)
        assert watches == ["describe"]
        tokens = own.get(bert)
        threads: set[str] = set()
        tokenizer = tokens.tokenizer
        original = tokenizer.encode_batch

        def recorded(*args: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return original(*args, **options)

        tokenizer.encode_batch = watched(recorded)  # type: ignore[method-assign]
        await aio.embed(["word " * 10_000] * 20, bert, pool=own)
        tokenizer.encode_batch = recorded  # type: ignore[method-assign]
        assert threads and all(name.startswith("mpool-text") for name in threads)
        threads.clear()
        await aio.embed("short", bert, pool=own)
        assert threads == {"MainThread"}
        over.set()
        await monitor

    with mpool.Pool() as own:
        run(work(own))


def test_finished_event_loops_leave_no_file_descriptors(pool: mpool.Pool, bert: Path) -> None:
    import os

    run(aio.embed("x", bert, pool=pool))
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        run(aio.embed("x", bert, pool=pool))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


# ---- several waiters for one request --------------------------------------------------------------------------------

def long_job(pool: mpool.Pool, llama: Path, tokens: int = 4000) -> mpool.Job:
    return pool.submit("text_to_text", prompt="The", model=llama, **{**GREEDY, "max_tokens": tokens})


def test_several_tasks_await_one_job(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    async def work() -> None:
        job, vectors = long_job(pool, llama), pool.submit("text_embedding", inputs=TEXTS * 50, model=bert)

        async def wait(it: Any) -> Any:
            return await it

        done = await asyncio.gather(*(wait(job) for _ in range(5)), *(wait(vectors) for _ in range(5)))
        assert len({result.token_ids for result in done[:5]}) == 1 and len(done[0].token_ids) == 4000
        assert all(np.array_equal(result, done[5]) for result in done[6:])
        stream = aio.generate("The", llama, pool=pool, stream=True, **GREEDY)
        first, second = await asyncio.gather(stream.result(), stream.result())
        assert first == second and first.finish_reason == "length"
        watcher = _watching.watcher()
        assert not watcher._tickets and not watcher._followed

    run(work())


def test_a_job_is_cancelled_only_when_its_last_waiter_leaves(pool: mpool.Pool, llama: Path) -> None:
    async def work() -> None:
        job = long_job(pool, llama)

        async def wait() -> Any:
            return await job

        async def until_waiting(count: int) -> None:
            while job._ticket is None or job._ticket.waiters() != count:
                await asyncio.sleep(0.001)

        first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
        await until_waiting(2)
        first.cancel()
        assert len((await second).token_ids) == 4000 and first.cancelled()
        # A waiting thread counts too.
        job = long_job(pool, llama)
        thread = asyncio.create_task(asyncio.to_thread(job.result))
        only = asyncio.create_task(wait())
        await until_waiting(2)
        only.cancel()
        assert len((await thread).token_ids) == 4000
        # The job is cancelled together with its last waiter.
        job = pool.submit("text_to_text", prompt="The", model=llama, **ENDLESS)
        first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
        await until_waiting(2)
        first.cancel()
        await until_waiting(1)
        assert not job.done()
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        with pytest.raises(mpool.Cancelled):
            job.result(10)
        await idle(pool)

    run(work())


@pytest.mark.parametrize("way", ["cancelled while it waits", "cancelled between chunks", "leaves its loop"])
def test_one_of_several_readers_stops(pool: mpool.Pool, llama: Path, way: str) -> None:
    """The others read on; the request is cancelled when the last of them stops."""
    async def work() -> None:
        stream = await aio.generate("The", llama, pool=pool, stream=True, **{**GREEDY, "max_tokens": 4000})
        chunks: list[Any] = []
        began = asyncio.Event()

        async def read() -> None:
            async for chunk in loops.pop():
                chunks.append(chunk)

        async def stop() -> None:
            async for chunk in loops.pop():
                chunks.append(chunk)
                began.set()
                if way == "leaves its loop":
                    break
                if way == "cancelled between chunks":
                    await asyncio.sleep(60)

        async def end(task: asyncio.Task[None]) -> None:
            if way != "leaves its loop":
                task.cancel()
            found = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(found, asyncio.CancelledError) == (way != "leaves its loop")

        loops = [aiter(stream), aiter(stream)]  # one task may stop before the other has begun
        stopped = asyncio.create_task(stop())
        await began.wait()
        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        await end(stopped)
        del stopped  # with the traceback, which has the iterator
        await reader
        done = await stream.result()
        assert done.finish_reason == "length" and "".join(chunk.text for chunk in chunks) == done.text

        if way == "cancelled between chunks":  # and the other way round: one waits and is cancelled, the other is busy
            stream = await aio.generate("The", llama, pool=pool, stream=True, **{**GREEDY, "max_tokens": 4000})
            loops = [aiter(stream), aiter(stream)]
            reader = asyncio.create_task(read())
            await asyncio.sleep(0.01)
            await end(reader)
            del reader
            assert [chunk async for chunk in loops.pop()]
            assert (await stream.result()).finish_reason == "length"

        stream = await aio.generate("The", llama, pool=pool, stream=True, **ENDLESS)
        chunks.clear()
        loops = [aiter(stream), aiter(stream)]
        both = [asyncio.create_task(stop()) for _ in range(2)]
        while len(chunks) < 2:
            await asyncio.sleep(0.001)
        for task in both:
            await end(task)
        assert (await stream.result()).finish_reason == "cancelled"
        await idle(pool)

    run(work())


# ---- streams that do not start --------------------------------------------------------------------------------------

def test_a_failed_start_raises_for_every_waiter(pool: mpool.Pool, llama: Path) -> None:
    async def work() -> None:
        stream = aio.generate("", llama, pool=pool, stream=True)
        for _ in range(2):
            with pytest.raises(mpool.InvalidArgument):
                await stream.result()
            with pytest.raises(mpool.InvalidArgument):
                async for _ in stream:
                    pass
            with pytest.raises(mpool.InvalidArgument):
                await stream
        got = await asyncio.gather(*(stream.result() for _ in range(3)), return_exceptions=True)
        assert got[0] is got[1] is got[2] and isinstance(got[0], mpool.InvalidArgument)

    run(work())


def test_a_stream_closed_before_it_starts_never_starts() -> None:
    calls = 0

    async def make() -> Any:
        nonlocal calls
        calls += 1

    async def work() -> None:
        stream = aio.AsyncStream(make, None, TrackedRequest(PoolHistory(), "generate", {}))
        await stream.aclose()
        for _ in range(2):
            result = await stream.result()
            assert (result.text, result.finish_reason, result.token_ids) == ("", "cancelled", ())
            assert [chunk async for chunk in stream] == []
        assert await stream is stream

    run(work())
    assert calls == 0


def test_a_start_continues_if_one_of_its_waiters_is_cancelled(llama: Path) -> None:
    async def work(own: mpool.Pool) -> None:
        stream = aio.generate("The", llama, pool=own, stream=True, **GREEDY)
        first, second = asyncio.create_task(stream.result()), asyncio.create_task(stream.result())
        await asyncio.sleep(0)
        first.cancel()
        assert len((await second).token_ids) == 20 and first.cancelled()
        alone = aio.AsyncStream(lambda: asyncio.sleep(60), None,  # type: ignore[arg-type, return-value]
                                TrackedRequest(PoolHistory(), "generate", {}))
        task = asyncio.create_task(alone.result())
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await alone.result()).finish_reason == "cancelled"
        left = aio.AsyncStream(lambda: asyncio.sleep(60), None,  # type: ignore[arg-type, return-value]
                                TrackedRequest(PoolHistory(), "generate", {}))
        waiters = [asyncio.create_task(left.result()) for _ in range(2)]
        for waiter in waiters:  # the last waiter that leaves cancels the request
            assert not left._cancelled
            await asyncio.sleep(0.01)
            waiter.cancel()
            await asyncio.gather(waiter, return_exceptions=True)
        assert (await left.result()).finish_reason == "cancelled"

    with mpool.Pool() as own:
        run(work(own))
