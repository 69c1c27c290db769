"""Threads that tokenise long texts and read images, so that neither an event loop nor Ctrl-C waits for them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")

#: Minimum characters of a text that is tokenised on another thread: about 20 ms of work.
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
    """Runs ``function(*args)``. A long one called on the main thread runs on another, so that Ctrl-C is handled at
    once."""
    if chars < LONG or threading.current_thread() is not threading.main_thread():
        return function(*args)
    future = executor().submit(function, *args)
    try:
        return future.result()
    finally:
        future.cancel()  # unless it has begun


def later(function: Callable[[], object]) -> None:
    """Runs ``function()`` on one of the threads and ignores its exceptions. Does nothing while the interpreter
    exits."""
    try:
        executor().submit(function)
    except RuntimeError:
        pass


def _after_fork_in_child() -> None:
    global _lock, _executor
    _lock, _executor = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork_in_child)
