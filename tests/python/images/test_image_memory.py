"""The limit of the memory that all decoded images of the process take together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import mpool
from mpool import native_calls
from mpool.images import memory


def test_decoded_images_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoded image waits until the others leave enough of the budget; one that exceeds all of it runs alone."""
    budget = memory._Budget()
    monkeypatch.setattr(memory, "_budget", budget)
    monkeypatch.setattr(memory, "MAX", 10 * memory.BYTES_PER_PIXEL)
    turns: list[str] = []

    def left() -> None:
        turns.append("waits")
        if len(turns) == 3:
            raise mpool.Timeout("the caller has left")

    monkeypatch.setattr(native_calls, "check_caller", left)
    with memory.reserved(11):
        assert budget.used == 11 * memory.BYTES_PER_PIXEL
    with memory.reserved(4), memory.reserved(6):  # exactly the whole budget
        assert turns == []
        with pytest.raises(mpool.Timeout), memory.reserved(1):
            raise AssertionError("there was no memory for this image")
        assert len(turns) == 3 and budget.used == memory.MAX
    assert budget.used == 0
    with pytest.raises(KeyError), memory.reserved(1):
        raise KeyError
    assert budget.used == 0


def test_a_waiting_image_goes_on_when_another_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the other image is a sign of progress, which keeps the wait from counting as stuck."""
    budget, waits, moved = memory._Budget(), threading.Event(), threading.Event()
    monkeypatch.setattr(memory, "_budget", budget)
    monkeypatch.setattr(memory, "MAX", 10 * memory.BYTES_PER_PIXEL)
    monkeypatch.setattr(memory, "_TICK", 60.0)
    monkeypatch.setattr(native_calls, "progress", moved.set)
    wait = budget.changed.wait
    monkeypatch.setattr(budget.changed, "wait", lambda seconds: waits.set() or wait(seconds))

    def second() -> bool:
        with memory.reserved(5):
            return moved.is_set()

    with ThreadPoolExecutor(1) as threads:
        with memory.reserved(6):
            found = threads.submit(second)
            assert waits.wait(50) and not found.done()
        assert found.result(50)
