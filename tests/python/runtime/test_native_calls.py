"""Threads for native calls: limits of time, replacement of stuck threads, refusals, and their state."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mpool.host import native_calls
from mpool.errors import Overloaded, ShuttingDown, SpawnFailed, Timeout
from mpool.host.native_calls import ThreadGroup

from processes import script_result
from waiting import until


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ThreadGroup]]:
    """Makes groups that are forgotten at the end. A call whose caller left counts as stuck soon; the limit of a call
    without progress is far above what the calls of these tests need on a loaded machine."""
    monkeypatch.setattr(native_calls, "SOON", 0.05)
    monkeypatch.setattr(native_calls, "SPARE", 2)
    monkeypatch.setattr(native_calls, "_TICK", 0.02)
    monkeypatch.setattr(native_calls, "_groups", {})
    monkeypatch.setattr(native_calls, "_reports", {})
    yield lambda threads=1, seconds=60.0: ThreadGroup("test", "test calls", threads, seconds)


@pytest.fixture
def impatient(group: Any) -> Any:
    """Makes groups whose calls are abandoned soon. A call that has to end itself needs another limit."""
    return lambda threads: group(threads, 0.3)


class Gate:
    """A call that blocks until it is opened, like a decoder that does not return."""

    def __init__(self) -> None:
        self.event, self.entered = threading.Event(), threading.Semaphore(0)

    def __call__(self, *values: Any) -> Any:
        self.entered.release()
        assert self.event.wait(30)
        return values


def test_results_and_errors(group: Any) -> None:
    threads = group(2)
    assert [threads.run(divmod, at, 3) for at in range(20)] == [divmod(at, 3) for at in range(20)]
    error = ValueError("of the call")
    with pytest.raises(ValueError) as caught:
        threads.run(_fail, error)
    assert caught.value is error

    async def work() -> list[Any]:
        with pytest.raises(ValueError):
            await threads.arun(_fail, error)
        return await asyncio.gather(*(threads.arun(divmod, at, 3) for at in range(20)))

    assert asyncio.run(work()) == [divmod(at, 3) for at in range(20)]
    found = threads.status()
    assert 1 <= found.threads <= 2 and (found.running, found.waiting, found.stuck) == (0, 0, 0) and not found.starved


def _fail(error: Exception) -> None:
    raise error


def test_a_call_of_the_same_group_runs_on_its_thread(group: Any) -> None:
    """Else a group of one thread would wait for itself."""
    threads = group(1)
    names = threads.run(lambda: (threading.current_thread().name, threads.run(lambda: threading.current_thread().name)))
    assert names[0] == names[1] and names[0].startswith("mpool-test-")


def test_the_deadline_ends_the_wait(group: Any) -> None:
    """The gate would close after 30 s with another error."""
    threads, gate = group(1), Gate()
    for limit in ("argument", "block"):
        began = time.monotonic()
        with pytest.raises(Timeout, match="within its timeout"), \
                native_calls.limited(began + 0.1 if limit == "block" else None):
            threads.run(gate, deadline=began + 0.1 if limit == "argument" else None)
        assert time.monotonic() - began >= 0.1

    async def work() -> None:
        with pytest.raises(Timeout):
            await threads.arun(gate, deadline=time.monotonic() + 0.1)

    asyncio.run(work())
    gate.event.set()


def test_the_state_counts_a_call_whose_caller_left(group: Any) -> None:
    """The caller is gone and no other call follows: ``status`` alone finds that the call is stuck."""
    threads, gate = group(1), Gate()
    with pytest.raises(Timeout, match="within its timeout"):
        threads.run(gate, deadline=time.monotonic() + 0.05)
    until(lambda: threads.status().stuck == 1)
    gate.event.set()
    until(lambda: threads.status().stuck == 0)


def test_a_call_without_progress_is_abandoned(impatient: Any) -> None:
    threads, gate = impatient(1), Gate()
    with pytest.raises(Timeout, match="no progress for 0.3 s"):
        threads.run(gate)
    threads.seconds = 60.0
    found = threads.status()
    assert found.stuck == 1 and found.starved and "beyond" in native_calls.reasons({"test": found})[0]
    assert threads.run(divmod, 7, 2) == (3, 1), "another thread replaces the stuck one"
    assert threads.status().threads == 2
    gate.event.set()
    until(lambda: threads.status().threads == 1, 20)
    assert threads.status().stuck == 0 and threads.run(divmod, 7, 2) == (3, 1)


def test_progress_renews_the_limit(group: Any) -> None:
    """The call takes twice the limit, in parts of a hundredth of it."""
    threads, ended = group(1, 1.0), []

    def parts(seconds: float) -> str:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.01)
            native_calls.progress()
        ended.append(seconds)
        return "done"

    assert threads.run(parts, 2.0) == "done"
    with pytest.raises(Timeout):
        threads.run(parts, 600.0, deadline=time.monotonic() + 0.15)
    until(lambda: threads.status().running == 0, 20)  # the call ends at its next part, because its caller left
    assert ended == [2.0]


def test_refused_when_all_threads_are_stuck(impatient: Any) -> None:
    threads, gate = impatient(1), Gate()
    for _ in range(3):  # one thread and two replacements
        with pytest.raises(Timeout):
            threads.run(gate)
    threads.seconds = 60.0
    with pytest.raises(Overloaded, match="all 3 threads"):
        threads.run(divmod, 7, 2)
    assert threads.status().threads == 3
    gate.event.set()
    until(lambda: threads.status().stuck == 0, 20)
    assert threads.run(divmod, 7, 2) == (3, 1)


def test_waiting_callers_are_refused_too(impatient: Any) -> None:
    """Calls that wait when the last thread gets stuck do not wait forever."""
    threads, gate, errors = impatient(1), Gate(), []

    def ask(at: int) -> None:
        try:
            threads.run(gate, at)
        except Exception as error:
            errors.append(type(error))

    callers = [threading.Thread(target=ask, args=(at,)) for at in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20)
    assert sorted(errors, key=str) == [Overloaded] * 5 + [Timeout] * 3
    gate.event.set()


def test_cancelled_callers_leave_their_call(group: Any) -> None:
    threads, gate = group(1), Gate()

    async def work() -> None:
        first = asyncio.ensure_future(threads.arun(gate))
        second = asyncio.ensure_future(threads.arun(gate))
        await asyncio.sleep(0)
        assert gate.entered.acquire(timeout=10) and threads.status().waiting == 1
        first.cancel()
        second.cancel()
        found = await asyncio.gather(first, second, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in found)
        assert await threads.arun(divmod, 7, 2) == (3, 1), "the call that was left is replaced at once"

    asyncio.run(work())
    assert threads.status().stuck == 1
    gate.event.set()
    until(lambda: threads.status().running == 0, 20)
    assert not gate.entered.acquire(blocking=False), "the waiting call never ran"


def test_the_collector_ends_a_waiting_coroutine_within_a_section(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs in any section that allocates, and ends the tasks of an event loop that was closed
    while they waited."""
    threads, gate = group(1), Gate()
    loop = asyncio.new_event_loop()
    gc.disable()
    try:
        task = loop.create_task(threads.arun(gate))
        loop.run_until_complete(asyncio.sleep(0))
        assert gate.entered.acquire(timeout=10)
        waiting = weakref.ref(task)
        loop.close()
        gate.event.set()
        until(lambda: threads.status().running == 0, 20)
        del task, loop
        monkeypatch.setattr(ThreadGroup, "_mark_stuck", lambda self, now: gc.collect())
        found: list[Any] = []
        caller = threading.Thread(target=lambda: found.append(threads.run(divmod, 7, 2)), daemon=True)
        caller.start()
        caller.join(20)
        assert found == [(3, 1)] and waiting() is None
    finally:
        gc.enable()


def test_coordinating_groups_have_no_limit(group: Any) -> None:
    threads, gate = group(1, math.inf), Gate()
    caller = threading.Thread(target=threads.run, args=(gate,))
    caller.start()
    assert gate.entered.acquire(timeout=10)
    time.sleep(0.5)
    assert caller.is_alive() and threads.status().stuck == 0
    gate.event.set()
    caller.join(20)


def test_a_server_refuses_callers_of_its_loop(group: Any) -> None:
    threads, gate = group(1), Gate()

    async def work() -> None:
        tasks = [asyncio.ensure_future(threads.arun(gate)) for _ in range(2)]
        await asyncio.sleep(0)
        threads.refuse_callers(asyncio.get_running_loop(), ShuttingDown("the server is shutting down"))
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, ShuttingDown)

    asyncio.run(work())
    gate.event.set()


def test_no_thread_can_be_started(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, start = group(2), threading.Thread.start

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(SpawnFailed, match="could not be started.*ulimit -u.*ulimit -v"):
        threads.run(divmod, 7, 2)
    threads.later(lambda: None)  # its caller does not wait, and gets no error
    monkeypatch.setattr(threading.Thread, "start", start)
    assert threads.run(divmod, 7, 2) == (3, 1)


def test_a_forked_child_has_its_own_threads(group: Any) -> None:
    threads = group(1)
    assert threads.run(os.getpid) == os.getpid()
    child = os.fork()
    if not child:
        signal.alarm(20)
        os._exit(0 if threads.run(os.getpid) == os.getpid() and threads.status().threads == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_ctrl_c_and_the_exit_wait_for_no_call() -> None:
    """A call that never returns, on the main thread of a process that is interrupted and then exits."""
    found = script_result("""
import ctypes
from mpool.host import native_calls
usleep = ctypes.CDLL(None).usleep
began = time.monotonic()
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    native_calls.TEXTS.run(usleep, 100_000_000)
except KeyboardInterrupt:
    print(json.dumps([time.monotonic() - began, time.time()]), flush=True)
""", *["none"] * 2)
    waited, ended = found
    assert 0.3 <= waited < 60 and time.time() - ended < 60  # the call takes 100 s


def test_a_call_that_has_ended_is_not_refused(group: Any) -> None:
    """The caller gets the result even if the deadline has passed meanwhile, or the call was counted as stuck."""
    threads = group()
    call = native_calls._Call(divmod, (7, 2), threads, time.monotonic() - 1, lambda: None)
    with pytest.raises(Timeout, match="within its timeout"):
        threads._check(call)
    call.ended = True
    threads._check(call)
    other = native_calls._Call(divmod, (7, 2), threads, None, lambda: None)
    other.stuck = True
    with pytest.raises(Timeout, match="made no progress"):
        threads._check(other)
    other.ended = True
    threads._check(other)


def test_a_pending_call_whose_result_is_not_needed(group: Any) -> None:
    """The call does not run if it still waits for a thread."""
    threads, gate, ran = group(), Gate(), []
    first = threads.begin(gate)
    assert gate.entered.acquire(timeout=20)
    second, third = threads.begin(ran.append, 2), threads.begin(ran.append, 3)
    second.leave()
    assert len(threads._waiting) == 1
    gate.event.set()
    assert first.result() == () and third.result() is None and ran == [3]
