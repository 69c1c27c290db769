"""Two threads that tokenise what is long, so that neither an event loop nor Ctrl-C waits for it; deadlines."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import InvalidArgument, Timeout

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


def later(function: Callable[[], object]) -> None:
    """``function()`` on one of the threads; what it raises is lost. Nothing when the interpreter ends."""
    try:
        executor().submit(function)
    except RuntimeError:
        pass


def deadline_of(timeout: float | None) -> float | None:
    """``time.monotonic()`` at which a call that starts now has run out of time; None: never.

    Raises:
        InvalidArgument: not a number of seconds, or not above 0.
    """
    seconds = seconds_of(timeout)
    return None if seconds is None else time.monotonic() + seconds


def seconds_of(timeout: Any, zero: bool = False) -> float | None:
    """A timeout as seconds; None: no limit, or one of decades.

    Raises:
        InvalidArgument: not a number of seconds (a NumPy scalar is one), or not above 0 (``zero``: or below).
    """
    if timeout is None:
        return None
    from ..checks import real, shown

    found = real(timeout)
    seconds = math.nan if found is None or (math.isinf(found) and isinstance(timeout, int)) else found
    if not (seconds > 0 or (zero and seconds == 0)):
        allowed = "seconds from 0" if zero else "seconds above 0"
        raise InvalidArgument(f"timeout is {shown(timeout)}, allowed: {allowed}, or None")
    return None if seconds > 1e9 else seconds


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
