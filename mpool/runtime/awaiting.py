"""Counts of the waiters of tickets: only the last waiter that gives up cancels the ticket."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import _core

_lock = threading.Lock()
#: ``id`` of a ticket -> number of its waiters. The waiters keep the ticket alive.
_counts: dict[int, int] = {}


class Waiter:
    """Context manager that counts one waiter of a ticket, in any thread or event loop, while its block runs."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: _core.Ticket) -> None:
        self._ticket = ticket

    def __enter__(self) -> Waiter:
        with _lock:
            _counts[id(self._ticket)] = _counts.get(id(self._ticket), 0) + 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.leave(kind is not None and not issubclass(kind, Exception))

    def leave(self, gave_up: bool) -> None:
        """Stop waiting. Cancels the ticket if this waiter gave up (cancelled or interrupted) and was the last."""
        key = id(self._ticket)
        with _lock:
            left = _counts.pop(key) - 1
            if left:
                _counts[key] = left
        if gave_up and not left:
            self._ticket.cancel()


def others(ticket: _core.Ticket) -> bool:
    """Return True if the ticket has waiters."""
    with _lock:
        return id(ticket) in _counts


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _counts.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
