"""Two threads that tokenise what is long, so that neither an event loop nor Ctrl-C waits for it; deadlines."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from .errors import InvalidArgument, Timeout

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")

#: Characters from which on a text is tokenised on a thread of its own: some 20 ms of work.
LONG = 1 << 16

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None


def executor() -> ThreadPoolExecutor:
    """The threads, started on first use."""
    global _executor
    if _executor is None:
        from concurrent.futures import ThreadPoolExecutor

        with _lock:
            if _executor is None:
                _executor = ThreadPoolExecutor(2, thread_name_prefix="mpool-text")
    return _executor


def interruptible(function: Callable[..., T], *args: Any, chars: int) -> T:
    """``function(*args)``; on the main thread, a long one runs elsewhere, so that Ctrl-C is seen at once."""
    if chars < LONG or threading.current_thread() is not threading.main_thread():
        return function(*args)
    future = executor().submit(function, *args)
    try:
        return future.result()
    finally:
        future.cancel()  # unless it has begun


def deadline_of(timeout: float | None) -> float | None:
    """``time.monotonic()`` at which a call that starts now has run out of time; None: never.

    Raises:
        InvalidArgument: not a number of seconds, or not above 0.
    """
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise InvalidArgument(f"timeout is {timeout!r}, allowed: seconds above 0, or None")
    return None if timeout > 1e9 else time.monotonic() + timeout


def remaining(deadline: float | None, key: str | None = None) -> float | None:
    """Seconds left until ``deadline``, above 0.

    Raises:
        Timeout: there are none.
    """
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise Timeout("no answer within the time allowed", hint="Raise timeout", key=key)
    return left


def _after_fork_in_child() -> None:
    global _lock, _executor
    _lock, _executor = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork_in_child)
