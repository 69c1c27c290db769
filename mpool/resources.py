"""The number of CPUs; threads that do not start; the bare errors of Python turned into errors of mpool.

When memory, threads or file descriptors run out, Python itself raises ``MemoryError``, ``ImportError`` (a shared
library that cannot be mapped), ``RuntimeError`` (a thread that cannot start) or ``OSError``, at any line. Every public
function is decorated with :func:`typed` or :func:`typed_async`, which raise the matching
:class:`~mpool.errors.MpoolError` from the original error.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import FileError, MemoryExhausted, MpoolError, ShuttingDown, SpawnFailed, Unsupported

F = TypeVar("F", bound=Callable[..., Any])

#: Classes of the errors that :func:`error_of` examines.
_BARE = (MemoryError, ImportError, RuntimeError, OSError)
_NO_MEMORY = ("cannot allocate memory", "failed to map segment", "cannot map zero-fill", "can't allocate lock")
_FREE_MEMORY = "Free memory, or raise the limit of the process on its address space (ulimit -v)"


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS
        return os.cpu_count() or 1


def error_of(error: BaseException) -> MpoolError | None:
    """Return the error of mpool that reports an exhausted resource; None: ``error`` reports no such thing.

    Errors that a caller's own code raised keep their class unless they report an exhausted resource, too.
    """
    text = str(error)
    if isinstance(error, MpoolError) or not isinstance(error, _BARE):
        return None
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM \
            or any(words in text.lower() for words in _NO_MEMORY) \
            or (isinstance(error, ImportError) and _follows_memory_error(error)):
        about = f": {text}" if text else ""
        return MemoryExhausted(f"Python could not allocate memory{about}", hint=_FREE_MEMORY)
    if isinstance(error, ImportError):
        if error.name == "mpool._core":
            return None  # sources that are not built: the package itself cannot be imported
        return Unsupported(f"a module could not be imported: {text}",
                           hint="Reinstall mpool with its dependencies: pip install --force-reinstall mpool")
    if isinstance(error, OSError):
        full = error.errno in (errno.EMFILE, errno.ENFILE)
        return FileError(text, hint="Raise the limit on open files (ulimit -n)") if full else None
    if "can't start new thread" in text:
        return _no_thread(text)
    if "cannot schedule new futures" in text:
        return ShuttingDown("the interpreter is shutting down")
    return None


def _follows_memory_error(error: BaseException) -> bool:
    """Return True if a MemoryError is among the causes of an error."""
    seen: BaseException | None = error
    for _ in range(10):
        seen = None if seen is None else seen.__cause__ or seen.__context__
        if isinstance(seen, MemoryError):
            return True
    return False


def _no_thread(text: str, name: str | None = None) -> SpawnFailed:
    return SpawnFailed(f"the thread {name} could not be started: {text}" if name else
                       f"a thread could not be started: {text}",
                       hint="Raise the limit on threads (ulimit -u, pids.max of the cgroup) or on memory (ulimit -v)")


def typed(function: F) -> F:
    """Decorate a function: errors of exhausted resources become errors of mpool, with the original as their cause."""
    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except _BARE as error:
            found = error_of(error)
            if found is None:
                raise
            raise found from error

    return checked  # type: ignore[return-value]


def typed_async(function: F) -> F:
    """Decorate a coroutine function as :func:`typed` decorates a function."""
    @functools.wraps(function)
    async def checked(*args: Any, **keywords: Any) -> Any:
        try:
            return await function(*args, **keywords)
        except _BARE as error:
            found = error_of(error)
            if found is None:
                raise
            raise found from error

    return checked  # type: ignore[return-value]


def start_thread(run: Callable[[], object], name: str) -> threading.Thread:
    """Start a daemon thread and return it.

    Raises:
        SpawnFailed: the system starts no further thread.
        MemoryExhausted: there is no memory for it.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except MemoryError as error:
        raise MemoryExhausted(f"the thread {name} could not be started", hint=_FREE_MEMORY) from error
    except RuntimeError as error:
        raise _no_thread(str(error), name) from error
    return thread


__all__ = ["error_of", "start_thread", "typed", "typed_async"]
