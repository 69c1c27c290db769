"""The history of a pool: one record for every request, however it ends, and the last 1,000 of them."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import aio
from mpool.runtime.history import PoolHistory, TrackedRequest
from poolstates import LONG, broken as broken
from waiting import until


@pytest.fixture
def own() -> Any:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)) as made:
        yield made


def last(pool: mpool.Pool) -> mpool.results.RequestRecord:
    return pool.history()[-1]


def summary(pool: mpool.Pool) -> tuple[Any, ...]:
    found = last(pool)
    return found.verb, found.state, found.error


def test_the_last_thousand_requests_are_kept(own: mpool.Pool, bert: Path) -> None:
    for number in range(1005):
        own.embed("a", bert, tenant=number + 1)
    found = own.history()
    assert [one.tenant for one in found] == list(range(6, 1006))
    assert all(before.time <= after.time for before, after in zip(found, found[1:]))


def test_what_a_record_says(own: mpool.Pool, bert: Path, llama: Path) -> None:
    assert own.history() == []
    began = time.time()
    own.embed("a", bert)  # the first request loads the model
    own.embed(["alpha", "beta"], bert, tenant="alice")
    assert len(own.history()) == 2
    found = last(own)
    assert (found.verb, found.state, found.error) == ("embed", "completed", None)
    assert (found.model, found.tenant) == (own.get(bert).key, "alice")
    assert found.tokens == own.count_tokens("alpha", bert) + own.count_tokens("beta", bert)
    assert began <= found.time <= time.time() and 0 < found.duration < time.time() - began
    done = own.generate("The", llama, max_tokens=5, ignore_eos=True)
    found = last(own)
    assert (found.model, found.verb, found.tenant) == (own.get(llama).key, "generate", None)
    assert found.tokens == done.usage.prompt_tokens + 5
    own.submit("text_embedding", inputs=["a"] * 3, model=bert).result()
    assert last(own).verb == "embed" and last(own).tokens == 3 * own.count_tokens("a", bert)
    assert list(own.embed_iter(["a"] * 3, bert)) and last(own).verb == "embed_iter"
    assert last(own).tokens == 3 * own.count_tokens("a", bert) and len(own.history()) == 5
    secret = "xyzzy plugh"
    own.embed(secret, bert, tenant="alice")
    assert secret not in repr(own.history())


def test_streams_end_with_their_computation(own: mpool.Pool, llama: Path) -> None:
    stream = own.generate("The", llama, max_tokens=5, ignore_eos=True, stream=True)
    assert own.history() == []
    for _ in stream:
        pass
    done = stream.result()
    assert [(one.verb, one.state) for one in own.history()] == [("generate", "completed")]
    assert last(own).tokens == done.usage.prompt_tokens + 5
    late = own.generate("The", llama, max_tokens=5, ignore_eos=True, stream=True)
    until(late._ticket.done)
    ended = late._ticket.times()[2]
    until(lambda: time.monotonic() > ended + 0.05)
    now, here = time.time(), time.monotonic()
    late.close()  # the end is the time of the last token, not the time at which the program looked
    assert summary(own) == ("generate", "completed", None) and last(own).time < now - (here - ended) + 0.04


ENDS: dict[str, Callable[[mpool.Pool, Any], Any]] = {
    "close": lambda pool, model: pool.generate(model=model, stream=True, **LONG).close(),
    "break": lambda pool, model: next(iter(pool.generate(model=model, stream=True, **LONG))),
    "drop": lambda pool, model: pool.generate(model=model, stream=True, **LONG) and None,
    "job cancel": lambda pool, model: pool.submit("text_to_text", model=model, **LONG).cancel(),
    "job drop": lambda pool, model: pool.submit("text_to_text", model=model, **LONG) and None,
}


@pytest.mark.parametrize("how", ENDS)
def test_cancelled_requests_are_recorded(how: str, own: mpool.Pool, llama: Path) -> None:
    own.load(llama)
    ENDS[how](own, llama)
    assert [(one.verb, one.state, one.error) for one in own.history()] == [("generate", "cancelled", "CANCELLED")]


def test_failed_and_refused_requests_are_recorded(bert: Path, llama: Path, broken: tuple[Path, str]) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1, policy="sequential",
                                     prompt_queue_capacity=1)) as pool:
        def ends(state: str, name: str, call: Callable[[], Any], verb: str = "generate") -> None:
            count = len(pool.history())
            with pytest.raises(mpool.MpoolError) as caught:
                call()
            assert summary(pool) == (verb, state, name) and caught.value.name == name
            assert len(pool.history()) == count + 1

        ends("refused", "UNKNOWN_MODEL", lambda: pool.embed("a", "no-such-model"), "embed")
        assert last(pool).model == "no-such-model"
        ends("refused", "INVALID_ARGUMENT", lambda: pool.embed("a", bert, dimensions=-1), "embed")
        ends("refused", "INVALID_ARGUMENT", lambda: pool.generate("a", llama, stream=3), "generate")  # type: ignore
        ends("refused", "INVALID_ARGUMENT", lambda: asyncio.run(aio.generate(
            "a", llama, pool=pool, stream=3)))  # type: ignore[call-overload]
        ends("refused", "INVALID_ARGUMENT", lambda: pool.submit(
            "text_embedding", inputs="a", model=bert, dimensions=-1), "embed")
        ends("failed", "NUMERIC", lambda: pool.embed(broken[1], broken[0]), "embed")
        ends("failed", "NUMERIC", lambda: asyncio.run(aio.embed(broken[1], broken[0], pool=pool)), "embed")
        ends("failed", "TIMEOUT", lambda: pool.generate(model=llama, timeout=0.3, **LONG))
        runs = pool.submit("text_to_text", model=llama, **LONG)
        until(lambda: runs.position() == -1)
        waits = pool.submit("text_to_text", model=llama, **LONG)
        ends("refused", "OVERLOADED", lambda: pool.generate("a", llama, fail_fast=True))
        ends("refused", "OVERLOADED", lambda: list(pool.generate("a", llama, fail_fast=True, stream=True)))
        ends("refused", "OVERLOADED", lambda: pool.submit("text_to_text", prompt="a", model=llama))
        ends("refused", "OVERLOADED", lambda: asyncio.run(aio.generate("a", llama, fail_fast=True, pool=pool)))
        assert not waits.done() and runs.cancel() and waits.cancel()
        pool.begin_shutdown()
        ends("refused", "SHUTTING_DOWN", lambda: pool.embed("a", bert), "embed")


def test_requests_of_event_loops_are_recorded(own: mpool.Pool, bert: Path, llama: Path) -> None:
    short: dict[str, Any] = dict(max_tokens=3, ignore_eos=True)

    async def work() -> None:
        await aio.embed(["a", "b"], bert, pool=own, tenant="bob")
        assert (*summary(own), last(own).tenant) == ("embed", "completed", None, "bob")
        await aio.generate("The", llama, pool=own, **short)
        assert summary(own) == ("generate", "completed", None)
        async for _ in aio.chat([{"role": "user", "content": "a"}], llama, pool=own, stream=True, **short):
            pass
        assert summary(own) == ("chat", "completed", None) and last(own).tokens > 3
        assert [row async for row in aio.embed_iter(["a"] * 3, bert, pool=own)]
        assert summary(own) == ("embed_iter", "completed", None)
        assert await own.submit("text_to_text", prompt="The", model=llama, **short)
        assert len(own.history()) == 5
        async for _ in own.submit("text_to_text", prompt="The", model=llama, **short):  # drops the job at once
            assert len(own.history()) == 5
        assert summary(own) == ("generate", "completed", None) and len(own.history()) == 6
        async for _ in (stream := aio.generate(model=llama, pool=own, stream=True, **LONG)):
            break
        await stream.aclose()
        assert summary(own) == ("generate", "cancelled", "CANCELLED")
        task = asyncio.ensure_future(aio.generate(model=llama, pool=own, **LONG))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert summary(own) == ("generate", "cancelled", "CANCELLED") and len(own.history()) == 8

    asyncio.run(work())


def test_records_of_threads_are_not_lost() -> None:
    history = PoolHistory()

    def record() -> None:
        for _ in range(200):
            request = TrackedRequest(history, "embed", {})
            request.completed()
            request.failed(ValueError())  # the first end counts

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert all(one[3] == "completed" for one in history)
    assert len(list(history)) == 800


def test_a_signal_handler_may_record_a_request() -> None:
    """The handler interrupts the recording thread: a lock that the thread holds would block it for ever."""
    history = PoolHistory()
    before = signal.signal(signal.SIGALRM, lambda *_: TrackedRequest(history, "in handler", {}).completed())
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        until(lambda: TrackedRequest(history, "embed", {}).completed() or
              sum(one[2] == "in handler" for one in history) >= 20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
