"""Waits for a condition, for an idle pool, and for threads."""

import threading
import time
from collections.abc import Callable
from typing import Any

import mpool


def until(met: Callable[[], Any], seconds: float = 30.0, state: Callable[[], Any] | None = None) -> Any:
    """Wait until `met` returns a true value, and return it. After `seconds`, fail with the value of `state`."""
    end = time.monotonic() + seconds
    while not (found := met()):
        assert time.monotonic() < end, f"the condition was still false after {seconds} s: {state and state()}"
        time.sleep(0.002)
    return found


def busy(pool: mpool.Pool) -> bool:
    """Return True if the pool has a running or queued request."""
    return any(row.running or row.queued for row in pool.ps())


def idle(pool: mpool.Pool, seconds: float = 5.0) -> None:
    """Wait until the pool has no running and no queued request."""
    until(lambda: not busy(pool), seconds, pool.ps)


def together(work: list[Callable[[], None]], seconds: float = 120) -> None:
    """Run functions in threads and raise their first error. A function that does not end in time is an error."""
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,), daemon=True) for function in work]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]
