"""The thread that delivers log records and events, step by step: its starts, its rounds and its end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mpool import _core
from mpool.runtime import logs


@pytest.fixture()
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of the thread: levels passed to the core, reads of the ring, deliveries of events. The thread that
    earlier pools of this process started calls the same functions; its steps are not recorded."""
    found: list[Any] = []
    earlier = logs._drain.thread

    def record(step: Any) -> list[Any]:
        if threading.current_thread() is not earlier:
            found.append(step)
        return []

    monkeypatch.setattr(_core, "set_log_level", lambda level: record(("level", level)))
    monkeypatch.setattr(_core, "drain_log", lambda: record("flush"))
    monkeypatch.setattr(logs, "deliver", lambda: record("deliver"))
    return found


@pytest.fixture()
def drain(monkeypatch: pytest.MonkeyPatch) -> Iterator[logs._Drain]:
    made = logs._Drain()
    monkeypatch.setattr(logs, "_drain", made)
    yield made
    made.stop()


def test_a_round_waits_and_delivers(steps: list[Any], drain: logs._Drain) -> None:
    """The usual period ends early once events have callbacks; the short one does not."""
    waits: list[Any] = []
    drain.hurried.wait = lambda seconds: waits.append(("hurried", seconds)) or True  # type: ignore[method-assign]
    drain.stopping.wait = lambda seconds: waits.append(("stopping", seconds)) or False  # type: ignore[method-assign]
    drain.hurried.set()
    drain.round()
    assert (waits, drain.rounds) == ([("hurried", 0.25)], 1) and not drain.hurried.is_set()
    level = logging.getLogger("mpool.pool").getEffectiveLevel()
    assert steps == [("level", level), "flush", "deliver"]
    logs.hurry(True)
    assert drain.hurried.is_set()
    drain.round()
    assert waits[1:] == [("stopping", 0.02)] and drain.rounds == 2
    assert steps[3:] == ["flush", "deliver"]  # the level is passed only when it changed
    logs.hurry(False)
    drain.round()
    assert waits[2:] == [("hurried", 0.25)]


def test_the_level_of_the_logger_is_passed(steps: list[Any], drain: logs._Drain) -> None:
    pool_log = logging.getLogger("mpool.pool")
    before = pool_log.level
    try:
        for level in (logging.DEBUG, logging.DEBUG, logging.ERROR):
            pool_log.setLevel(level)
            logs.update_level()
    finally:
        pool_log.setLevel(before)
    assert steps == [("level", logging.DEBUG), ("level", logging.ERROR)]


def test_records_keep_their_level_and_a_failed_handler_loses_one(drain: logs._Drain, monkeypatch: pytest.MonkeyPatch,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(_core, "drain_log", lambda: [(logging.INFO, "100 %"), (logging.ERROR, "two"),
                                                     (logging.WARNING, "three")])
    caplog.set_level(logging.INFO, "mpool.pool")
    real = logs.pool_log.log

    def log(level: int, *given: Any) -> None:
        if level == logging.ERROR:
            raise RuntimeError("the handler")
        real(level, *given)

    monkeypatch.setattr(logs.pool_log, "log", log)
    logs.flush()
    assert [(one.name, one.levelno, one.getMessage()) for one in caplog.records] == [
        ("mpool.pool", logging.INFO, "100 %"), ("mpool.pool", logging.WARNING, "three")]


@pytest.mark.parametrize("missing", [False, True])
def test_a_flush_delivers_events_if_the_thread_is_missing(steps: list[Any], drain: logs._Drain, missing: bool) -> None:
    drain.missing = missing
    logs.flush()
    assert steps == ["flush", *["deliver"] * missing]


def test_a_delivery_that_fails_is_logged(drain: logs._Drain, monkeypatch: pytest.MonkeyPatch,
                                         caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ValueError("lost")

    monkeypatch.setattr(logs, "deliver", fail)
    drain.deliver()
    assert [one.getMessage() for one in caplog.records] == ["Events were lost"] and caplog.records[0].exc_info
    monkeypatch.setattr(logs, "deliver", None)
    drain.deliver()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("stops", [False, True])
def test_a_thread_whose_start_was_interrupted_takes_its_place(steps: list[Any], drain: logs._Drain,
                                                              stops: bool) -> None:
    """A signal can interrupt ``start`` after the thread exists and before it is recorded."""
    seen: list[Any] = []

    def round_() -> None:
        seen.append((drain.thread, drain.missing))
        drain.stopping.set()

    drain.missing, drain.round = True, round_  # type: ignore[method-assign]
    if stops:
        drain.stopping.set()
    thread = threading.Thread(target=drain.run)
    thread.start()
    thread.join(10)
    assert seen == ([] if stops else [(thread, False)])
    assert (drain.thread, drain.missing) == ((None, True) if stops else (thread, False))
    drain.thread = None


def test_nothing_starts_after_the_end(steps: list[Any], drain: logs._Drain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "start_thread", lambda *given: pytest.fail("a thread was started"))
    drain.missing = True
    logs.stop()
    assert steps == ["flush", "deliver"] and not drain.missing
    assert drain.stopping.is_set() and drain.hurried.is_set()
    drain.start()
    assert drain.thread is None


def test_the_thread_runs_until_it_is_stopped(steps: list[Any], drain: logs._Drain) -> None:
    """Rounds that fail do not end it. Waiters return once two rounds are over, or the thread has ended."""
    fails = iter([MemoryError(), RuntimeError()])
    flush = drain.flush

    def failing() -> None:
        error = next(fails, None)
        if error is not None:
            raise error
        flush()

    drain.flush = failing  # type: ignore[method-assign]
    logs.hurry(True)
    logs.start()
    thread = drain.thread
    assert thread is not None and thread.name == "mpool-log" and thread.daemon
    for _ in range(2):
        before = drain.rounds
        logs.wait_for_events(60)
        assert drain.rounds >= before + 2 and thread.is_alive()
    drain.stop()
    assert not thread.is_alive() and drain.thread is None and not drain.missing
    assert steps[-2:] == ["flush", "deliver"]
    rounds = drain.rounds
    logs.wait_for_events(60)  # no thread: it returns at once
    assert drain.rounds == rounds


def test_a_callback_does_not_wait_for_itself(drain: logs._Drain) -> None:
    drain.thread = threading.current_thread()
    logs.wait_for_events(60)
    drain.thread = None
