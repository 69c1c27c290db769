"""The number of CPUs; threads that do not start; the bare errors of Python turned into errors of mpool.

When memory, threads or file descriptors run out, Python itself raises ``MemoryError``, ``ImportError`` (a shared
library that cannot be mapped), ``RuntimeError`` (a thread that cannot start) or ``OSError``, at any line. Every public
function is decorated with :func:`typed` or :func:`typed_async`, which raise the matching
:class:`~mpool.errors.MpoolError` from the original error. No other place needs to translate an error of the system,
except to name the file or the step that failed.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import logging
import os
import re
import shlex
import signal
import threading
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import unquote

from ..checks import invalid_call, with_plain_bools
from ..errors import FileError, MemoryExhausted, MpoolError, ShuttingDown, SpawnFailed, Unsupported
from ..records import logger

E = TypeVar("E", bound=Exception)
F = TypeVar("F", bound=Callable[..., Any])
_log = logger("mpool")

#: Classes of the errors that :func:`error_of` examines.
_BARE = (MemoryError, ImportError, RuntimeError, OSError)
_NO_MEMORY = ("cannot allocate memory", "failed to map segment", "cannot map zero-fill", "can't allocate lock")
_FREE_MEMORY = "Free memory, or raise the limit of the process on its address space (ulimit -v)"
#: Number of an error of the operating system -> what to do about it.
HINTS = {errno.EMFILE: "Raise the limit on open files (ulimit -n)",
         errno.ENFILE: "Raise the limit on open files (ulimit -n)",
         errno.ENOSPC: "Free space on the disk"}


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on macOS
        return os.cpu_count() or 1


def error_of(error: BaseException) -> MpoolError | None:
    """Return the error of mpool that reports an exhausted resource or a failed call of the operating system.

    Returns:
        None if ``error`` reports no such thing. Errors that a caller's own code raised (inside of :func:`of_caller`, or
        in a handler of signals) keep their class, unless they report an exhausted resource.
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
        if "more than once per process" in text:  # NumPy
            hint = "Restart Python if an import of NumPy was interrupted; subinterpreters cannot import NumPy"
        else:
            hint = f"Reinstall mpool with its dependencies: pip install --force-reinstall {_origin()}"
        return Unsupported(f"a module could not be imported: {text}", hint=hint)
    if isinstance(error, OSError):
        full = error.errno in (errno.EMFILE, errno.ENFILE)
        return _system_error(error) if full or not _is_callers(error) else None
    if "can't start new thread" in text:
        return _no_thread(text)
    if "cannot schedule new futures" in text:
        return ShuttingDown("the interpreter is shutting down")
    return None


def _origin() -> str:
    """Return what pip installs mpool from: the folder that it was installed from, or the name of the package."""
    try:
        from importlib.metadata import distribution

        found = json.loads(distribution("mpool").read_text("direct_url.json") or "{}").get("url", "")
        return shlex.quote(unquote(found[7:])) if found.startswith("file://") else "mpool"
    except (*_BARE, ValueError, AttributeError):  # not installed, or there is no memory to find out
        return "mpool"


def install_hint(extra: str) -> str:
    """Return the hint that installs the packages of an extra.

    It names the packages and not ``mpool[extra]``, which pip finds only if a package index has mpool.

    Args:
        extra: name in ``[project.optional-dependencies]``.
    """
    packages = _packages_of(extra)
    if packages:
        return f"Run: pip install {' '.join(packages)} (the extra {extra} of mpool)"
    return f"Run this in the clone of mpool: pip install \".[{extra}]\""


@contextmanager
def importing(extra: str) -> Iterator[None]:
    """Add the command that installs an extra to the error of an import that needs it.

    Args:
        extra: name in ``[project.optional-dependencies]``.

    Raises:
        ModuleNotFoundError: an import in the block failed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "mpool").partition(".")[0] == "mpool":
            raise
        raise ModuleNotFoundError(f"{error.msg}. {install_hint(extra)}", name=error.name) from error


def _packages_of(extra: str) -> list[str]:
    """Return the requirements of an extra, quoted for a shell; [] if mpool is not installed."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("mpool") or []
    except PackageNotFoundError:
        return []
    found: list[str] = []
    for line in lines:
        requirement, _, marker = line.partition(";")
        if re.fullmatch(rf"""\s*extra\s*==\s*['"]{re.escape(extra)}['"]\s*""", marker):
            inner = re.fullmatch(r"mpool\[([\w,-]+)\]", requirement.strip())
            found += [one for name in inner[1].split(",") for one in _packages_of(name)] if inner \
                else [f'"{requirement.strip()}"']
    return list(dict.fromkeys(found))


def _system_error(error: OSError) -> FileError:
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, (str, bytes)) else ""
    return FileError(where + (error.strerror or str(error)), hint=HINTS.get(error.errno or 0))


def _is_callers(error: OSError) -> bool:
    """Return True if a caller's own code raised the error, and not the operating system in a call of the package."""
    return error.errno is None or getattr(error, "_of_caller", False) or _from_signal_handler(error)


def _from_signal_handler(error: OSError) -> bool:
    """Return True if the error passed through a handler of signals, which Python calls between any two operations: no
    call in this package could mark its errors."""
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: Any) -> Any:
    """Return the code of a handler of signals: a function, a method, a partial or an object that can be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not callable(handler):
        return None
    return getattr(handler, "__code__", None) or getattr(type(handler).__call__, "__code__", None)


@contextmanager
def of_caller() -> Iterator[None]:
    """Mark the OSErrors of a caller's own code, which the block calls: they keep their class."""
    try:
        yield
    except OSError as error:
        error._of_caller = True  # type: ignore[attr-defined]
        raise


def list_of_caller(items: Iterable[Any]) -> list[Any]:
    """Return the items of a caller's iterable as a list. An OSError that the iterable raises keeps its class."""
    with of_caller():
        return list(items)


def items_of_caller(items: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of a caller's iterable. An OSError that the iterable raises (an open file) keeps its class."""
    with of_caller():
        yield from items


async def aitems_of_caller(items: AsyncIterable[Any]) -> AsyncIterator[Any]:
    """Like :func:`items_of_caller`, for an asynchronous iterable."""
    with of_caller():
        async for item in items:
            yield item


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


def _error_of_call(error: BaseException, function: Callable[..., Any], args: Sequence[Any],
                   keywords: Iterable[str]) -> MpoolError | None:
    """Return the error of mpool to raise for an error of a call; None: the call keeps its error."""
    return invalid_call(inspect.unwrap(function), args, keywords) if isinstance(error, TypeError) else error_of(error)


def shortened(error: E) -> E:
    """Return an error without the frames of this package in its traceback and those of its causes: they say nothing to
    a caller, who reads the message. Frames of other code stay, such as that of a caller's iterable. An internal error,
    which is a fault of this package, keeps its frames; for others, the log has them at the level DEBUG. Errors that are
    not mpool's stay as they are."""
    if not isinstance(error, MpoolError) or error.name == MpoolError.name:
        return error
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("a call failed", exc_info=error)
    one: BaseException | None = error
    for _ in range(10):
        if one is None:
            break
        one.__traceback__ = _of_others(one.__traceback__)
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
    return error


def _of_others(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this package."""
    kept = []
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0] != "mpool":
            kept.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for one in reversed(kept):
        found = TracebackType(found, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return found


def typed(function: F) -> F:
    """Decorate a function: errors of the system, and TypeErrors of arguments that do not match the parameters, become
    errors of mpool. An error of the system is their cause. Bools of NumPy in keyword arguments become Python's.
    Tracebacks have no frames of this package below the function."""
    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **with_plain_bools(keywords))
        except MpoolError as error:
            raise shortened(error)  # noqa: B904 - the same error
        except (*_BARE, TypeError) as error:
            found = _error_of_call(error, function, args, keywords)
            if found is None:
                raise
            found.__cause__ = None if isinstance(error, TypeError) else error
            raise shortened(found) from found.__cause__

    return checked  # type: ignore[return-value]


def typed_async(function: F) -> F:
    """Decorate a coroutine function as :func:`typed` decorates a function."""
    @functools.wraps(function)
    async def checked(*args: Any, **keywords: Any) -> Any:
        try:
            return await function(*args, **with_plain_bools(keywords))
        except MpoolError as error:
            raise shortened(error)  # noqa: B904
        except (*_BARE, TypeError) as error:
            found = _error_of_call(error, function, args, keywords)
            if found is None:
                raise
            found.__cause__ = None if isinstance(error, TypeError) else error
            raise shortened(found) from found.__cause__

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


__all__ = ["HINTS", "aitems_of_caller", "error_of", "install_hint", "items_of_caller", "list_of_caller", "of_caller",
           "shortened", "start_thread", "typed", "typed_async"]
