"""Events of workers and requests, delivered to callbacks by the thread that also drains the log."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..checks import one_of
from ..errors import InvalidArgument, ShuttingDown
from . import logs as _logging
from .hosts import hosts

if TYPE_CHECKING:
    from .hosts import Host

Kind = Literal["spawn", "ready", "evict", "fail", "request_start", "request_complete", "request_fail"]
KINDS = ("spawn", "ready", "evict", "fail", "request_start", "request_complete", "request_fail")


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """An event of a worker or request. See :meth:`mpool.Pool.on`.

    Attributes:
        event: ``"spawn"`` (a worker begins to load), ``"ready"``, ``"evict"`` (the worker was stopped: to free
            memory, after ``keep_alive``, or because the model was unloaded or the pool closed), ``"fail"`` (the worker
            could not start, failed, or was abandoned); ``"request_start"`` (the first step of a request),
            ``"request_complete"``, ``"request_fail"`` (the request ended in an error, or was refused).
        model: key of the model.
        worker_id: number of the worker; None: the event concerns no single worker.
        request: 64-bit number of the request, equal in its start and end, and never used again in this process; None
            for worker events, and for requests that were refused before they had a number.
        status: ``"OK"``, or the name of the error.
        timestamp: seconds of ``time.monotonic()``.
    """

    event: str
    model: str
    worker_id: int | None
    request: int | None
    status: str
    timestamp: float


_lock = threading.Lock()


def subscribe(pool: Host, event: Any, callback: Any) -> Callable[[], None]:
    """See :meth:`mpool.Pool.on`."""
    if not isinstance(event, str) or event not in KINDS:
        one_of("event", event, KINDS)
    if not callable(callback):
        raise InvalidArgument(param="callback", got=type(callback).__name__,
                              allowed="a function with one parameter, a PoolEvent")
    entry = (event, callback)
    with _lock:
        if pool._closed:
            raise ShuttingDown("the pool is closed: it will have no further events", hint="Create a new mpool.Pool")
        pool._callbacks = (*pool._callbacks, entry)

    def remove() -> None:
        with _lock:
            pool._callbacks = tuple(other for other in pool._callbacks if other is not entry)

    def unsubscribe() -> None:
        """Remove the callback. Idempotent. Does not interrupt a callback that is running."""
        remove()
        _enable_wanted()

    try:
        _logging.deliver = deliver
        _enable_wanted()
        _logging.start()
    except BaseException:  # such as MemoryError: the caller gets no function that removes the callback
        remove()
        raise
    return unsubscribe


def _enable_wanted() -> None:
    """Enable the events that have callbacks in the core, which records no others."""
    from .. import _core

    with _lock:
        wanted = 0
        for pool in hosts():
            for event, _ in pool._callbacks:
                wanted |= 1 << KINDS.index(event)
        _core.want_events(wanted)
    _logging.hurry(bool(wanted))


def deliver() -> None:
    """Call the callbacks of all recorded events. Runs on the drain thread."""
    from .. import _core

    rows = _core.drain_events()
    if not rows:
        return
    pools = {pool._registry.number(): pool for pool in hosts() if pool._registry is not None}
    for number, kind, key, worker, request, status, seconds in rows:
        pool = pools.get(number)
        if pool is None:
            continue
        found = PoolEvent(KINDS[kind], key, worker or None, request or None, status, seconds)
        for event, callback in pool._callbacks:
            if event == found.event:
                try:
                    callback(found)
                except BaseException:  # also SystemExit, which would end the thread that drains the log
                    _logging.pool_log.exception("A callback for the event %s raised", event)


def dropped() -> int:
    """Return the number of events dropped because callbacks were too slow."""
    from .. import _core

    return _core.events_dropped()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
