"""Counts of the waiters of tickets: only the last waiter that gives up cancels the ticket."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import _core

_lock = threading.Lock()
#: ``id`` of a ticket -> number of its waiters. The waiters keep the ticket alive.
_counts: dict[int, int] = {}
#: Waiters that left and are still counted: (ticket, gave up). A waiter leaves without waiting for the lock, because the
#: garbage collector may end a waiting coroutine in a section of the same thread that holds the lock.
_leaving: deque[tuple[_core.Ticket, bool]] = deque()


class Waiter:
    """Context manager that counts one waiter of a ticket, in any thread or event loop, while its block runs."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: _core.Ticket) -> None:
        self._ticket = ticket

    def __enter__(self) -> Waiter:
        with _lock:
            _counts[id(self._ticket)] = _counts.get(id(self._ticket), 0) + 1
        _apply_leaving()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.leave(kind is not None and not issubclass(kind, Exception))

    def leave(self, gave_up: bool) -> None:
        """Stop waiting. Cancels the ticket if this waiter gave up (cancelled or interrupted) and was the last."""
        _leaving.append((self._ticket, gave_up))
        _apply_leaving()


def _apply_leaving() -> None:
    """Count the waiters that left. If another thread, or an outer section of this one, holds the lock, that one counts
    them after its section."""
    while _leaving and _lock.acquire(blocking=False):
        try:
            unwanted = _uncount()
        finally:
            _lock.release()
        for ticket in unwanted:
            ticket.cancel()


def _uncount() -> list[_core.Ticket]:
    """Count the waiters that left. Returns the tickets whose last waiter gave up. Must hold the lock."""
    unwanted = []
    while _leaving:
        ticket, gave_up = _leaving.popleft()
        left = _counts.pop(id(ticket), 1) - 1  # default 1: a forked child has not counted its parent's waiters
        if left:
            _counts[id(ticket)] = left
        elif gave_up:
            unwanted.append(ticket)
    return unwanted


def others(ticket: _core.Ticket) -> bool:
    """Return True if the ticket has waiters."""
    with _lock:
        unwanted = _uncount()
        found = id(ticket) in _counts
    for one in unwanted:
        one.cancel()
    _apply_leaving()
    return found


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _counts.clear()
    _leaving.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
