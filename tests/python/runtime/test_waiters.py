"""Waiters of tickets in threads and event loops, with made-up tickets: each wakes, and only the last one cancels."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

import mpool
from mpool.runtime import awaiting, hosts, watching


class Ticket:
    """A ticket whose progress the test makes."""

    def __init__(self) -> None:
        self.cancelled = self.ended = 0
        self.bound: list[tuple[Any, int]] = []

    def cancel(self) -> None:
        self.cancelled += 1

    def done(self) -> bool:
        return bool(self.ended)

    def bind(self, notifier: Any, number: int) -> None:
        self.bound.append((notifier, number))


@pytest.fixture()
def ticket() -> Iterator[Any]:
    made = Ticket()
    yield made
    assert id(made) not in awaiting._counts and not awaiting._leaving


# ---- threads -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("ways, cancels", [
    ([False], 0), ([True], 1), ([False, False], 0), ([True, True], 1), ([True, False], 0), ([False, True], 1)])
def test_the_last_waiter_that_gives_up_cancels(ticket: Any, ways: list[bool], cancels: int) -> None:
    waiters = [awaiting.Waiter(ticket).__enter__() for _ in ways]
    for left, (waiter, gave_up) in enumerate(zip(waiters, ways), 1):
        assert awaiting.others(ticket) and ticket.cancelled == 0
        waiter.leave(gave_up)
        assert awaiting.others(ticket) == (left < len(ways))
    assert ticket.cancelled == cancels


@pytest.mark.parametrize("error, cancels", [(None, 0), (ValueError(), 0), (mpool.Timeout("late"), 0),
                                            (KeyboardInterrupt(), 1), (asyncio.CancelledError(), 1)])
def test_an_error_is_no_reason_to_cancel_but_an_interruption_is(ticket: Any, error: Any, cancels: int) -> None:
    with pytest.raises(type(error)) if error else pytest.MonkeyPatch.context(), awaiting.Waiter(ticket):
        assert awaiting.others(ticket)
        if error:
            raise error
    assert ticket.cancelled == cancels


@pytest.mark.parametrize("section", ["enter", "others"])
def test_a_waiter_that_leaves_while_the_lock_is_held_is_counted_by_the_next(ticket: Any, section: str) -> None:
    waiter = awaiting.Waiter(ticket).__enter__()
    with awaiting._lock:
        waiter.leave(True)  # does not wait for the lock
        assert len(awaiting._leaving) == 1 and ticket.cancelled == 0
    other: Any = Ticket()
    if section == "enter":
        awaiting.Waiter(other).__enter__().leave(False)
    else:
        assert not awaiting.others(other)
    assert ticket.cancelled == 1


def test_a_forked_child_has_no_waiters(ticket: Any) -> None:
    waiter = awaiting.Waiter(ticket).__enter__()
    awaiting._leaving.append((ticket, True))
    awaiting._after_fork_in_child()  # as in a child
    assert awaiting._counts == {} and not awaiting._leaving
    waiter.leave(False)  # it was not counted there
    assert ticket.cancelled == 0


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
        assert await asyncio.gather(*tasks) == ["text"] * 3 and len(ticket.bound) == 1 and ticket.cancelled == 0
        assert await watcher.follow(followed, lambda: "at once") == "at once"
        ticket.ended = 1
        assert await watcher.done(ticket) is None
        number = followed.number
        del followed, tasks
        gc.collect()
        assert number not in watcher._followed

    asyncio.run(run())


def test_a_cancelled_coroutine_cancels_its_ticket_unless_another_waits(ticket: Any) -> None:
    async def run() -> None:
        watcher = watching.watcher()
        followed = watcher.following(ticket)
        tasks = [asyncio.ensure_future(watcher.follow(followed, lambda: None)) for _ in range(2)]
        await asyncio.sleep(0)
        for cancels, task in enumerate(tasks):
            assert ticket.cancelled == 0
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert ticket.cancelled == cancels

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


def test_watchers_of_closed_loops_are_closed() -> None:
    async def one() -> Any:
        return watching.watcher()

    loop = asyncio.new_event_loop()
    first = loop.run_until_complete(one())
    assert watching._watchers[loop] is first
    second = asyncio.run(one())
    assert second is not first and loop in watching._watchers  # it is still open
    loop.close()
    asyncio.run(one())
    assert loop not in watching._watchers
    with pytest.raises((ValueError, OSError, mpool.MpoolError)):
        first.notifier.fileno()
    watching._watchers[loop] = first
    watching._after_fork_in_child()
    assert not watching._watchers


# ---- pools of the process ------------------------------------------------------------------------------------------

def test_pools_are_found_by_identity_while_they_exist() -> None:
    class Host:
        pass

    made: Any = Host()
    hosts.register("test-identity", made)
    assert hosts.find("test-identity") is made and made in hosts.hosts()
    assert hosts.find("other") is None
    del made
    gc.collect()
    assert hosts.find("test-identity") is None
