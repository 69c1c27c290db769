"""Events of workers and requests, delivered to callbacks by the thread that also drains the log."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .. import _core
from ..checks import one_of
from ..errors import InvalidArgument, ShuttingDown
from . import health as _health
from . import logs as _logging
from .hosts import hosts

if TYPE_CHECKING:
    from .hosts import Host

Kind = Literal["spawn", "ready", "evict", "fail", "request_start", "request_complete", "request_fail", "degraded",
               "recovered"]
#: Events of the core.
KINDS = ("spawn", "ready", "evict", "fail", "request_start", "request_complete", "request_fail")
#: Events of the drain thread, which checks the health of models while such events have callbacks.
HEALTH_KINDS = ("degraded", "recovered")
#: Seconds between two checks.
HEALTH_PERIOD = 0.5


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """An event of a worker or request. See :meth:`mpool.Pool.on`.

    Attributes:
        event: ``"spawn"`` (a worker begins to load), ``"ready"``, ``"evict"`` (the worker was stopped: to free
            memory, after ``keep_alive``, or because the model was unloaded or the pool closed), ``"fail"`` (the worker
            could not start, failed, or was abandoned); ``"request_start"`` (the first step of a request),
            ``"request_complete"``, ``"request_fail"`` (the request ended in an error, or was refused);
            ``"degraded"`` (:func:`mpool.health` has a problem of the model), ``"recovered"`` (it has none any more).
        model: key of the model.
        worker_id: number of the worker; None: the event concerns no single worker.
        request: 64-bit number of the request, equal in its start and end, and never used again in this process; None
            for worker events, and for requests that were refused before they had a number.
        status: ``"OK"``, or the name of the error.
        timestamp: seconds of ``time.monotonic()``.
        reason: text for people: the problem, for ``"degraded"``; the cause, for ``"fail"``; else None.
    """

    event: str
    model: str
    worker_id: int | None
    request: int | None
    status: str
    timestamp: float
    reason: str | None = None


_lock = threading.Lock()
_checked = 0.0


def subscribe(pool: Host, event: Any, callback: Any) -> Callable[[], None]:
    """See :meth:`mpool.Pool.on`."""
    if not isinstance(event, str) or event not in (*KINDS, *HEALTH_KINDS):
        one_of("event", event, (*KINDS, *HEALTH_KINDS))
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
    except BaseException:  # such as MemoryError: the caller does not get `unsubscribe`, so remove the callback here
        remove()
        raise
    return unsubscribe


def _enable_wanted() -> None:
    """Enable the events that have callbacks in the core, which records no others."""
    with _lock:
        wanted = 0
        for pool in hosts():
            for event, _ in pool._callbacks:
                wanted |= 1 << KINDS.index(event) if event in KINDS else 0
        _core.want_events(wanted)
    _logging.hurry(bool(wanted))


def deliver() -> None:
    """Call the callbacks of all recorded events. Runs on the drain thread."""
    _deliver_health()
    rows = _core.drain_events()
    if not rows:
        return
    pools = {pool._registry.number(): pool for pool in hosts() if pool._registry is not None}
    for number, kind, key, worker, request, status, seconds, cause in rows:
        pool = pools.get(number)
        if pool is None:
            continue
        _call(pool, PoolEvent(KINDS[kind], key, worker or None, request or None, status, seconds,
                              cause or None))


def _call(pool: Host, found: PoolEvent) -> None:
    for event, callback in pool._callbacks:
        if event == found.event:
            try:
                callback(found)
            except BaseException:  # also SystemExit, which would end the thread that drains the log
                _logging.pool_log.exception("A callback for the event %s raised", event)


def _deliver_health() -> None:
    """Report the models whose health changed, at most every :data:`HEALTH_PERIOD` seconds."""
    global _checked
    now = time.monotonic()
    if now - _checked < HEALTH_PERIOD:
        return
    _checked = now
    for pool in hosts():
        if not any(event in HEALTH_KINDS for event, _ in pool._callbacks):
            pool._degraded = {}
            continue
        before, found = pool._degraded, _health.problems(pool)
        pool._degraded = found
        for key in found.keys() - before.keys():
            _call(pool, PoolEvent("degraded", key, None, None, "OK", now, found[key]))
        if not pool._closed:
            for key in before.keys() - found.keys():
                _call(pool, PoolEvent("recovered", key, None, None, "OK", now))


def dropped() -> int:
    """Return the number of events dropped because callbacks were too slow."""
    return _core.events_dropped()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
