"""Threads that tokenise long texts and read images, so that event loops and Ctrl-C are not blocked."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")

#: Minimum number of characters of a text that is tokenised on another thread: about 20 ms of work.
LONG = 1 << 16

_lock = threading.Lock()
_executor: ThreadPoolExecutor | None = None


def executor() -> ThreadPoolExecutor:
    """Return the executor with two threads, created on first use."""
    global _executor
    if _executor is None:
        from concurrent.futures import ThreadPoolExecutor

        with _lock:
            if _executor is None:
                _executor = ThreadPoolExecutor(2, thread_name_prefix="mpool-text")
    return _executor


def interruptible(function: Callable[..., T], *args: Any, chars: int) -> T:
    """Return ``function(*args)``. On the main thread, work on ``LONG`` characters or more runs on another thread, so
    that Ctrl-C is handled at once."""
    if chars < LONG or threading.current_thread() is not threading.main_thread():
        return function(*args)
    try:
        future = executor().submit(function, *args)
    except RuntimeError:  # no thread can be started: the result matters more than a fast Ctrl-C
        return function(*args)
    try:
        return future.result()
    finally:
        future.cancel()  # has no effect once the function runs


def later(function: Callable[[], object]) -> None:
    """Run ``function()`` on one of the threads and ignore its exceptions. Does nothing during interpreter shutdown."""
    try:
        executor().submit(function)
    except RuntimeError:
        pass


def _after_fork_in_child() -> None:
    global _lock, _executor
    _lock, _executor = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork_in_child)
