"""One watcher per event loop wakes coroutines when their tickets progress, without a thread per request."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from .. import _core
from ..errors import Overloaded, Timeout

T = TypeVar("T")

#: Seconds between attempts to enter a queue, in addition to attempts after a request of this loop finished.
_RETRY = 0.02
#: Times the duration of an attempt that found no memory, until the next one: an attempt copies the request.
_REST = 9
#: Seconds between two attempts that count at most. A longer time means that the loop or the process was stopped.
_COUNTED = 1.0
_FEWER = "Send fewer requests at once, or raise `request_timeout`"


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class _Line:
    """Coroutines that wait for room in one queue, or for memory. The first of them retries.

    Attributes:
        turn: held by the first of the line.
        length: number of coroutines in the line.
        short: seconds in which the first found no memory, since a request of the line was accepted.
    """

    def __init__(self) -> None:
        self.turn, self.length, self.short = asyncio.Lock(), 0, 0.0


async def _take_turn(line: _Line, deadline: float | None) -> bool:
    """Wait until the coroutine is the first of its line, and return True; return False once the deadline has passed."""
    if deadline is None:
        return await line.turn.acquire()
    taking = asyncio.ensure_future(line.turn.acquire())
    try:
        await asyncio.wait({taking}, timeout=deadline - time.monotonic())
    except asyncio.CancelledError:
        if not taking.cancel():  # it has the turn already
            line.turn.release()
        raise
    return not taking.cancel()


class Followed:
    """A ticket that coroutines of one loop wait for, with its number in the notifier and the futures to wake.

    A stream keeps this object between chunks: binding again for each chunk would cost one wake-up per chunk.
    """

    __slots__ = ("ticket", "number", "bound", "parked", "__weakref__")

    def __init__(self, ticket: _core.Ticket, number: int) -> None:
        self.ticket, self.number, self.bound = ticket, number, False
        self.parked: list[asyncio.Future[None]] = []


class Watcher:
    """Wakes the coroutines of one event loop when their tickets progress. Use only in the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.notifier = _core.Notifier()
        self._numbers = itertools.count(1)
        # weak references: a waiting coroutine keeps its Followed alive, which keeps its ticket alive
        self._tickets: weakref.WeakValueDictionary[int, Followed] = weakref.WeakValueDictionary()  # by identity
        self._followed: weakref.WeakValueDictionary[int, Followed] = weakref.WeakValueDictionary()  # by number
        self._lines: dict[str, _Line] = {}
        self._room: dict[asyncio.Future[None], None] = {}  # the first of each line, in the order of their last attempts
        loop.add_reader(self.notifier.fileno(), self._wake_waiters)

    def _wake_waiters(self) -> None:
        for number in self.notifier.take():
            followed = self._followed.get(number)
            if followed is not None:
                parked, followed.parked = followed.parked, []
                for future in parked:
                    _wake(future)

    def following(self, ticket: _core.Ticket) -> Followed:
        """Return the argument of :meth:`follow`, shared by all coroutines that wait for the ticket."""
        found = self._tickets.get(id(ticket))
        if found is None:
            found = self._tickets[id(ticket)] = Followed(ticket, next(self._numbers))
            self._followed[found.number] = found
        return found

    async def follow(self, followed: Followed, ready: Callable[[], T | None]) -> T:
        """Call ``ready()`` whenever the ticket progresses, until it returns a value. Returns the value.

        Cancellation also cancels the ticket, unless it has other waiters, in any loop or thread.
        """
        ticket = followed.ticket
        if (found := ready()) is not None:
            if ticket.done():
                self._wake_line()
            return found
        loop = asyncio.get_running_loop()
        try:
            with ticket.join():
                while (found := ready()) is None:
                    if not followed.bound:
                        ticket.bind(self.notifier, followed.number)
                        followed.bound = True
                    future = loop.create_future()
                    followed.parked.append(future)
                    await future
            return found
        finally:
            if ticket.done():
                self._wake_line()

    async def done(self, ticket: _core.Ticket) -> None:
        """Wait until the ticket is done."""
        await self.follow(self.following(ticket), lambda: ticket.done() or None)

    async def enter(self, key: str, submit: Callable[[], T], wait: bool = True,
                    deadline: float | None = None, patience: float | None = None) -> T:
        """Submit a request. While the queue is full, or running requests, loads or evictions hold the memory that the
        request needs, wait behind the other coroutines with the same key.

        Args:
            key: key of the queue.
            submit: submits the request; raises Timeout once the deadline has passed.
            wait: True: wait while the queue is full or memory is short; False: raise Overloaded.
            deadline: deadline of the request on the clock of :func:`time.monotonic`; None: none.
            patience: maximum seconds without memory for any request with the key; None: no limit.

        Raises:
            Overloaded: the queue is full or memory is short, and ``wait`` is False.
            Timeout: the deadline or the patience ended before there was room and memory.
        """
        if not wait or key not in self._lines:
            try:
                return submit()
            except Overloaded as error:
                if not wait or error.param:  # an option of the request names threads that are stuck
                    raise
        line = self._lines.setdefault(key, _Line())
        line.length += 1
        try:
            first = await _take_turn(line, deadline)
            try:
                while True:
                    began = time.monotonic()
                    if first:
                        await self._room_or_timer()
                    tried = time.monotonic()
                    try:
                        accepted = submit()
                        line.short = 0.0
                        return accepted
                    except Overloaded as error:
                        if error.param:
                            raise
                        if error._of_memory:
                            await asyncio.sleep(min(_REST * (time.monotonic() - tried), _COUNTED))
                            line.short += min(time.monotonic() - began, _COUNTED)
                            if patience is not None and line.short >= patience:
                                raise Timeout("no memory was free until the time limit of the request", hint=_FEWER,
                                              key=error.key) from error
                        first = first or await _take_turn(line, deadline)
            finally:
                if first:
                    line.turn.release()
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[key]

    async def _room_or_timer(self) -> None:
        """Wait until a request of this loop has ended, or :data:`_RETRY` seconds have passed.

        Uses a timer instead of :func:`asyncio.wait_for`, which before Python 3.12 loses a cancellation that arrives
        when its future is already done.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._room[future] = None
        timer = loop.call_later(_RETRY, _wake, future)
        try:
            await future
        finally:
            timer.cancel()
            del self._room[future]

    def _wake_line(self) -> None:
        for future in self._room:
            _wake(future)


_watchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Watcher] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def watcher() -> Watcher:
    """Return the watcher of the running event loop, creating it if necessary."""
    loop = asyncio.get_running_loop()
    found = _watchers.get(loop)
    if found is None:
        with _lock:
            for old in [old for old in _watchers if old.is_closed()]:
                _watchers.pop(old).notifier.close()
            found = _watchers[loop] = Watcher(loop)
    return found


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _watchers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
