"""Waiters of tickets in threads and event loops: each wakes, and only the last one cancels."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mpool
from mpool import _core
from mpool.runtime import watching
from waiting import until


class Ticket:
    """A ticket whose progress the test makes."""

    def __init__(self) -> None:
        self.ended = 0
        self.bound: list[tuple[Any, int]] = []

    def join(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    def done(self) -> bool:
        return bool(self.ended)

    def bind(self, notifier: Any, number: int) -> None:
        self.bound.append((notifier, number))


@pytest.fixture()
def ticket() -> Any:
    return Ticket()


@pytest.fixture()
def running(llama: Path) -> Iterator[_core.Ticket]:
    """The ticket of a request that takes several seconds."""
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        ticket = pool.submit("text_to_text", prompt="w1", model=llama, max_tokens=2000, n=64, ignore_eos=True)._ticket
        assert ticket is not None
        yield ticket
        ticket.cancel()


def was_cancelled(ticket: _core.Ticket) -> bool:
    """Return True if a long request ends now, because it was cancelled."""
    if not ticket.wait(1):
        return False
    with pytest.raises(mpool.Cancelled):
        ticket.check()
    return True


# ---- threads -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ways, cancels", [
    ([False], 0), ([True], 1), ([False, False], 0), ([True, True], 1), ([True, False], 0), ([False, True], 1)])
def test_the_last_waiter_that_gives_up_cancels(running: _core.Ticket, ways: list[bool], cancels: int) -> None:
    waiters = [running.join() for _ in ways]
    for left, (waiter, gave_up) in enumerate(zip(waiters, ways), 1):
        waiter.leave(gave_up)
        waiter.leave(True)  # it has left already
        assert running.waiters() == len(ways) - left
    assert was_cancelled(running) == bool(cancels)


@pytest.mark.parametrize("error, cancels", [(None, 0), (ValueError(), 0), (mpool.Timeout("late"), 0),
                                            (KeyboardInterrupt(), 1), (asyncio.CancelledError(), 1)])
def test_an_error_is_no_reason_to_cancel_but_an_interruption_is(running: _core.Ticket, error: Any,
                                                                cancels: int) -> None:
    with pytest.raises(type(error)) if error else pytest.MonkeyPatch.context(), running.join():
        assert running.waiters() == 1
        if error:
            raise error
    assert running.waiters() == 0 and was_cancelled(running) == bool(cancels)


def test_a_waiter_that_is_dropped_has_left(running: _core.Ticket) -> None:
    kept = running.join()
    running.join()
    assert running.waiters() == 1
    del kept
    assert running.waiters() == 0 and not was_cancelled(running)


class Tracer:
    """Calls a function, as a signal handler would run, before an instruction of the functions that wait.

    Args:
        at: the instruction, as (code, offset); None: only `seen` is filled.
    """

    def __init__(self, at: tuple[Any, int] | None, act: Callable[[], object]) -> None:
        self.at, self.act, self.acted = at, act, False
        self.seen = set[tuple[Any, int]]()

    def __call__(self, frame: Any, event: str, argument: object) -> Any:
        if frame.f_code.co_name not in ("_wait", "_wait_done", "result") or "mpool" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return self.step

    def step(self, frame: Any, event: str, argument: object) -> Any:
        if event == "opcode":
            self.seen.add((frame.f_code, frame.f_lasti))
            if self.at == (frame.f_code, frame.f_lasti) and not self.acted:
                self.acted = True
                self.act()
        return self.step


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("kind", ["stream", "job"])
@pytest.mark.parametrize("handler", ["raises", "waits"])
def test_signal_handlers_between_any_two_instructions_of_a_wait(llama: Path, kind: str, handler: str) -> None:
    """A handler that raises leaves no waiter, and one that waits for a request of its own gets it. In both cases, other
    threads can wait afterwards."""
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        options: dict[str, Any] = dict(model=llama, max_tokens=64, ignore_eos=True, temperature=0)
        failures, missed = list[str](), list[int]()

        def generate() -> str:
            return pool.generate("w1", **options).text

        def wait(tracer: Tracer) -> tuple[str, Any]:
            waited: Any = (pool.generate("w1", stream=True, **options) if kind == "stream"
                           else pool.submit("text_to_text", prompt="w1", **options))
            sys.settrace(tracer)
            try:
                return "".join(part.text for part in waited) if kind == "stream" else waited.result().text, waited
            except KeyboardInterrupt:
                return expected, waited
            finally:
                sys.settrace(None)

        def run() -> None:
            for instruction in instructions:
                for _ in range(10):  # a request that has ended is not waited for
                    tracer = Tracer(instruction, interrupt if handler == "raises" else generate)
                    found, waited = wait(tracer)
                    if found != expected:
                        failures.append(f"{instruction}: {found!r}")
                    if waited._ticket.waiters():
                        failures.append(f"{instruction}: a waiter is left")
                    if tracer.acted:
                        break
                else:
                    missed.append(instruction[1])

        expected, watcher = generate(), Tracer(None, generate)
        until(lambda: wait(watcher) and len(watcher.seen) > 10)
        instructions = sorted(watcher.seen, key=lambda at: (at[0].co_name, at[1]))
        for call in (run, generate):
            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(120)
            assert not thread.is_alive(), "a thread waits for a lock that no other thread releases"
    assert not failures and not missed


# ---- event loops ---------------------------------------------------------------------------------------------------

def progress(watcher: watching.Watcher, *numbers: int) -> None:
    """Let tickets progress, as the notifier does."""
    class Notifier:
        def take(self) -> tuple[int, ...]:
            return numbers

    real = watcher.notifier
    watcher.notifier = Notifier()  # type: ignore[assignment]
    try:
        watcher._wake_waiters()
    finally:
        watcher.notifier = real


def test_coroutines_share_what_they_follow(ticket: Any) -> None:
    async def run() -> None:
        watcher, other = watching.watcher(), Ticket()
        assert watching.watcher() is watcher
        followed = watcher.following(ticket)
        assert watcher.following(ticket) is followed and followed.ticket is ticket
        second = watcher.following(other)  # type: ignore[arg-type]
        assert second is not followed and second.number != followed.number
        ready: list[str] = []
        tasks = [asyncio.ensure_future(watcher.follow(followed, lambda: ready[0] if ready else None)) for _ in range(3)]
        await asyncio.sleep(0)
        assert ticket.bound == [(watcher.notifier, followed.number)]  # bound once for all of them
        progress(watcher, second.number, 999)
        await asyncio.sleep(0)
        assert len(followed.parked) == 3 and not any(task.done() for task in tasks)
        progress(watcher, followed.number)  # progress without a result: they wait again
        await asyncio.sleep(0)
        assert len(followed.parked) == 3 and not any(task.done() for task in tasks)
        ready.append("text")
        progress(watcher, followed.number)
        assert await asyncio.gather(*tasks) == ["text"] * 3 and len(ticket.bound) == 1
        assert await watcher.follow(followed, lambda: "at once") == "at once"
        ticket.ended = 1
        assert await watcher.done(ticket) is None
        number = followed.number
        del followed, tasks
        gc.collect()
        assert number not in watcher._followed

    asyncio.run(run())


def test_a_cancelled_coroutine_cancels_its_ticket_unless_another_waits(running: _core.Ticket) -> None:
    async def run() -> None:
        watcher = watching.watcher()
        followed = watcher.following(running)
        tasks = [asyncio.ensure_future(watcher.follow(followed, lambda: None)) for _ in range(2)]
        await asyncio.sleep(0)
        for left, task in zip((1, 0), tasks):
            assert not running.done()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert running.waiters() == left
        assert was_cancelled(running)

    asyncio.run(run())


def test_a_full_queue_is_entered_in_order(ticket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of a line retries after every request that ends; others wait behind it. A timer replaces no wake-up."""
    monkeypatch.setattr(watching, "_RETRY", 1000.0)

    async def run() -> None:
        watcher, tried, room = watching.watcher(), [], 0

        def submit(name: str) -> Any:
            def call() -> str:
                nonlocal room
                tried.append(name)
                if room == 0:
                    raise mpool.Overloaded("full")
                room -= 1
                return name
            return call

        with pytest.raises(mpool.Overloaded):
            await watcher.enter("m", submit("impatient"), wait=False)
        tasks = [asyncio.ensure_future(watcher.enter("m", submit(name))) for name in ("a", "b")]
        for _ in range(5):
            await asyncio.sleep(0)
        assert tried == ["impatient", "a"] and len(watcher._room) == 1
        with pytest.raises(mpool.Overloaded):
            await watcher.enter("m", submit("impatient"), wait=False)
        ticket.ended = 1
        await watcher.follow(watcher.following(ticket), lambda: 1)  # a request of this loop has ended
        for _ in range(5):
            await asyncio.sleep(0)
        assert tried[3:] == ["a"] and not tasks[0].done()  # the queue was full still: it waits again
        room = 2
        await watcher.done(ticket)
        assert await tasks[0] == "a"
        for _ in range(5):
            await asyncio.sleep(0)
        await watcher.done(ticket)
        assert await tasks[1] == "b" and tried[4:] == ["a", "b"]
        assert not watcher._lines and not watcher._room
        room = 1
        assert await watcher.enter("m", submit("c")) == "c"

    asyncio.run(run())


def test_a_deadline_ends_a_place_in_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coroutine leaves the line at its deadline, also behind one that waits without a limit."""
    monkeypatch.setattr(watching, "_RETRY", 1000.0)

    async def run() -> None:
        watcher, deadline = watching.watcher(), time.monotonic() + 0.05

        def full() -> None:
            raise mpool.Timeout("late") if time.monotonic() >= deadline else mpool.Overloaded("full")

        def always_full() -> None:
            raise mpool.Overloaded("full")

        first = asyncio.ensure_future(watcher.enter("m", always_full))
        await asyncio.sleep(0)
        with pytest.raises(mpool.Timeout):
            await watcher.enter("m", full, deadline=deadline)
        assert not first.done() and watcher._lines["m"].length == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert not watcher._lines

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_line_waits_for_memory_as_long_as_some_request_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience begins anew with each request that is accepted. It leaves out time in which the loop stood still,
    and a full queue, which moves."""
    monkeypatch.setattr(watching, "_RETRY", 0.0)
    monkeypatch.setattr(watching, "_REST", 0)

    async def run() -> None:
        watcher, clock, refusals = watching.watcher(), [0.0], list[tuple[float, bool]]()
        monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock[0]))

        def submit() -> float:
            """Raise the next refusal, after its seconds."""
            if not refusals:
                return clock[0]
            seconds, of_memory = refusals.pop(0)
            clock[0] += seconds
            error = mpool.Overloaded("none", key="m")
            error._of_memory = of_memory
            raise error

        async def enter(*given: tuple[float, bool], patience: float | None = 3.0) -> float:
            refusals[:] = given
            return await watcher.enter("m", submit, patience=patience)

        short, full, stopped = (0.9, True), (0.9, False), (1000.0, True)
        assert await enter(*[short] * 4) == pytest.approx(3.6)  # the first found the shortage, three waited for 2.7 s
        with pytest.raises(mpool.Timeout, match="no memory was free"):
            await enter(*[short] * 5)
        await enter(*[full] * 50)
        await enter(*[short] * 50, patience=None)
        await enter(stopped, stopped, stopped)  # they count 2 s
        tasks = [asyncio.ensure_future(enter(*[short] * 4)) for _ in range(3)]
        for _ in range(3):  # one after the other is accepted after 2.7 s
            refusals[:] = [short] * 3
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            tasks = [task for task in tasks if not task.done()]
        assert not tasks and not watcher._lines

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("steps", range(7))
def test_a_cancelled_place_in_the_line_is_passed_on(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Also if its coroutine is cancelled at the moment in which it becomes the first."""
    monkeypatch.setattr(watching, "_RETRY", 0.001)

    async def run() -> None:
        watcher, room = watching.watcher(), 0

        def submit() -> bool:
            if not room:
                raise mpool.Overloaded("full")
            return True

        deadline = time.monotonic() + 1000
        first, second, third = (asyncio.ensure_future(watcher.enter("m", submit, deadline=limit))
                                for limit in (None, deadline, deadline))
        await asyncio.sleep(0.01)
        first.cancel()
        for _ in range(steps):
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert first.cancelled() and second.cancelled() and watcher._lines["m"].length == 1
        room = 1
        assert await third and not watcher._lines

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_timer_retries_a_full_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of other loops and threads leave the queue, too."""
    async def run() -> None:
        found = []

        def submit() -> int:
            found.append(1)
            if len(found) < 3:
                raise mpool.Overloaded("full")
            return len(found)

        assert await watching.watcher().enter("m", submit) == 3

    assert watching._RETRY == 0.02
    asyncio.run(asyncio.wait_for(run(), 60))


# ---- pools of the process ------------------------------------------------------------------------------------------
