"""Runs calls of native libraries that a request can make slow: image decoding, tokenizing, grammar compilation.

Such a call cannot be interrupted. It runs on a daemon thread of a :class:`ThreadGroup`, and its caller waits at most
until the deadline of the request or until the call has made no progress for the seconds of its group. A call whose
caller left keeps its thread; the group starts a replacement, up to a bound. If all threads of a group are stuck, the
group refuses further calls. The interpreter's exit waits at most :data:`EXIT_SECONDS` for these threads. Neither
:mod:`concurrent.futures` nor asyncio's default executor, which join their threads at exit, is used in mpool.

Groups whose limit is infinite only read files and wait: for the calls of other groups, or for the core.
"""

from __future__ import annotations

import atexit
import contextvars
import itertools
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from ..errors import MemoryExhausted, Overloaded, SpawnFailed, Timeout
from .resources import cpus, start_thread

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

#: Minimum number of characters that are tokenized on another thread: about 10 ms of work. On an event loop, which must
#: serve other requests meanwhile, the minimum is smaller.
LONG, LONG_ON_LOOP = 1 << 15, 1 << 14
#: Minimum number of characters of a text that :data:`LONG_TEXTS` tokenizes.
_VERY_LONG = 1 << 17
#: Seconds that a call may run without progress if its request has no earlier deadline; the default of
#: ``PoolConfig.request_timeout``.
SECONDS = 30.0
#: Seconds after which a call that still runs though its caller left counts as stuck, and a group in which a call still
#: waits for a thread counts as starved.
SOON = 2.0
#: Number of stuck threads of a group that are replaced. If more are stuck, the group has fewer threads for other calls.
SPARE = 4
#: Seconds that the interpreter's exit waits for running calls: a library in Rust that returns to Python while the
#: interpreter is finalized crashes the process before Python 3.14.
EXIT_SECONDS = 0.25
#: Seconds between two checks of a waiting caller for stuck threads.
_TICK = 0.5
#: Seconds that a thread waits before it takes a call again after there was no memory to take one.
_PAUSE = 0.01


@dataclass(frozen=True, slots=True)
class NativeCalls:
    """State of the threads that run one kind of native call. See :func:`mpool.health`.

    Attributes:
        threads: threads of this kind, including stuck ones; they start on first use.
        running: running calls.
        waiting: calls that wait for a thread.
        stuck: running calls whose caller no longer waits, because they exceeded their time limit.
        starved: True if calls wait for seconds, or are stuck.
    """

    threads: int
    running: int
    waiting: int
    stuck: int
    starved: bool


class _Local(threading.local):
    """State of one thread.

    Attributes:
        call: call that the thread runs, if it belongs to a group.
        deadline: deadline of the calls that the thread starts, in ``time.monotonic()``; None: none.
    """

    call: _Call | None = None
    deadline: float | None = None


_local = _Local()


class _Call:
    """One call: waiting, then running, then ended.

    Attributes:
        until: ``time.monotonic()`` after which it counts as stuck; infinite while it waits.
        left: True if no caller waits for it any more.
        loop: event loop of the caller; None: the caller is a thread.
        refusal: error that ends the caller's wait early.
        stuck: True if it was counted as stuck.
    """

    __slots__ = ("function", "args", "group", "deadline", "wake", "queued", "until", "left", "stuck",
                 "ended", "result", "error", "loop", "refusal", "context")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], group: ThreadGroup,
                 deadline: float | None, wake: Callable[[], object]) -> None:
        self.function: Callable[..., Any] | None = function
        self.args, self.group, self.deadline, self.wake = args, group, deadline, wake
        self.context = contextvars.copy_context()  # includes the tenant of the caller's request
        self.queued = time.monotonic()
        self.until = math.inf
        self.left = self.stuck = self.ended = False
        self.loop: asyncio.AbstractEventLoop | None = None
        self.refusal: Exception | None = None
        self.result: Any = None
        self.error: BaseException | None = None

    def outcome(self) -> Any:
        """Return the result of an ended call, or raise its error. Call it once: the call gives its result away."""
        if self.error is None:
            found, self.result = self.result, None
            return found
        try:
            raise self.error
        finally:
            self.error = None  # no cycle of the exception, its traceback and this frame
            del self

    def raise_refusal(self) -> None:
        """Raise the error that ends the caller's wait, if there is one."""
        error, self.refusal = self.refusal, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # as in outcome()


class Pending(Generic[T]):
    """A call that :meth:`ThreadGroup.begin` has started."""

    __slots__ = ("_group", "_call", "_done")

    def __init__(self, group: ThreadGroup, call: _Call, done: threading.Lock) -> None:
        self._group, self._call, self._done = group, call, done

    def result(self) -> T:
        """Wait for the call, and return its result or raise its error. Call it once; see :meth:`ThreadGroup.run`."""
        group, call = self._group, self._call
        try:
            while not self._done.acquire(timeout=group._pause(call)):
                group._check(call)
        except BaseException:
            group._leave(call)
            raise
        found: T = call.outcome()
        return found

    def leave(self) -> None:
        """Stop waiting: the result is not needed. A running call keeps its thread until it ends."""
        self._group._leave(self._call)


class ThreadGroup:
    """A bounded number of daemon threads for one kind of call. Thread-safe; usable after fork.

    Args:
        name: key of the group in :attr:`mpool.Health.native_calls`.
        what: calls of this group, in the plural, for messages.
        threads: maximum number of threads that are not stuck.
        seconds: seconds that a call may run without progress. Infinite for calls that wait for others; their callers
            have deadlines.
    """

    def __init__(self, name: str, what: str, threads: int, seconds: float = SECONDS) -> None:
        self.name, self._what, self._size, self.seconds = name, what, threads, seconds
        self._numbers = itertools.count(1)
        self.renew()
        _groups[name] = self
        report(name, what, self.status)

    def renew(self) -> None:
        """Forget all threads and calls: in a forked child none of them exists."""
        # Reentrant: the garbage collector may run in any section that holds the lock, and may then end a coroutine of a
        # closed event loop that waits in arun(): that calls _leave().
        self._lock = threading.RLock()
        self._queue: SimpleQueue[_Call] = SimpleQueue()
        self._threads = self._stuck = 0
        self._waiting: dict[_Call, None] = {}
        self._running: dict[_Call, None] = {}

    # ---- callers -----------------------------------------------------------------------------------------------------

    def run(self, function: Callable[..., T], *args: Any, deadline: float | None = None) -> T:
        """Return ``function(*args)``, run on a thread of the group, or on this thread if it belongs to the group.

        Ctrl-C interrupts the wait at once.

        Args:
            function: function to run.
            args: its arguments.
            deadline: ``time.monotonic()`` until which to wait; None: the deadline of :func:`limited`.

        Raises:
            Timeout: the deadline has passed, or the call made no progress for the seconds of the group.
            Overloaded: all threads of the group are stuck.
            SpawnFailed: no thread could be started.
        """
        outer = _local.call
        if outer is not None and outer.group is self:
            return function(*args)
        return self.begin(function, *args, deadline=deadline).result()

    def begin(self, function: Callable[..., T], *args: Any, deadline: float | None = None) -> Pending[T]:
        """Start a call as :meth:`run` does, and return without waiting for it. The caller must take its result, or
        leave it. Must not be called by a thread of the group.

        Raises:
            Overloaded, SpawnFailed: as for :meth:`run`.
        """
        done = threading.Lock()
        done.acquire()
        call = _Call(function, args, self, _earlier(deadline, _local.call), done.release)
        try:
            self._submit(call)
        except BaseException:
            self._leave(call)
            raise
        return Pending(self, call, done)

    async def arun(self, function: Callable[..., T], *args: Any, deadline: float | None = None) -> T:
        """Run a function as :meth:`run` does, without blocking the event loop. Cancellation ends the wait at once."""
        import asyncio

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        call = _Call(function, args, self, _earlier(deadline, None), lambda: _wake_soon(loop, future))

        call.loop = loop
        timers: list[asyncio.TimerHandle] = []

        try:
            self._submit(call)
            timers.append(loop.call_later(self._pause(call), self._tick, call, future, timers))
            await future
            call.raise_refusal()
        except BaseException:
            self._leave(call)
            raise
        finally:
            for timer in timers:
                timer.cancel()
        found: T = call.outcome()
        return found

    def _tick(self, call: _Call, future: asyncio.Future[None], timers: list[asyncio.TimerHandle]) -> None:
        """Check a call of :meth:`arun` again and again until ``timers`` are cancelled."""
        try:
            self._check(call)
            timers[:] = [future.get_loop().call_later(self._pause(call), self._tick, call, future, timers)]
        except (Timeout, Overloaded) as error:
            call.refusal = error
            if not future.done():
                future.set_result(None)

    def later(self, function: Callable[[], object]) -> None:
        """Run ``function()`` without waiting, and ignore its exceptions and a lack of threads."""
        try:
            self._submit(_Call(function, (), self, None, _nothing))
        except (Overloaded, SpawnFailed, MemoryExhausted):
            pass

    def status(self) -> NativeCalls:
        """Return the state of the group's threads."""
        now = time.monotonic()
        with self._lock:
            self._mark_stuck(now)
            first = next(iter(self._waiting), None)
            starved = self._stuck > 0 or (first is not None and now - first.queued > SOON)
            return NativeCalls(self._threads, len(self._running), len(self._waiting), self._stuck, starved)

    def refuse_callers(self, loop: asyncio.AbstractEventLoop, error: Exception) -> None:
        """End the waits of an event loop's callers with an error. Call it in the loop's thread."""
        with self._lock:
            found = [call for call in (*self._waiting, *self._running) if call.loop is loop and not call.left]
        for call in found:
            call.refusal = error
            call.wake()

    # ---- the life of a call ------------------------------------------------------------------------------------------

    def _submit(self, call: _Call) -> None:
        with self._lock:
            self._mark_stuck(time.monotonic())
            self._refuse_if_stuck()
            if len(self._waiting) >= self._threads - len(self._running) and self._threads < self._capacity():
                self._start_thread()
            self._waiting[call] = None
        self._queue.put(call)

    def _capacity(self) -> int:
        return self._size + min(self._stuck, SPARE)

    def _refuse_if_stuck(self) -> None:
        if self._stuck >= self._size + SPARE:
            raise Overloaded(f"{self._what} are refused: all {self._stuck} threads are busy with calls that exceeded "
                             "their time limit", hint="Try again later; mpool.health() shows native_calls")

    def _start_thread(self) -> None:
        """Start a thread. If the system refuses, existing threads serve the call later."""
        try:
            start_thread(partial(self._work, self._queue), f"mpool-{self.name}-{next(self._numbers)}")
        except (SpawnFailed, MemoryExhausted):
            if not self._threads:
                raise
            return
        self._threads += 1
        _wait_at_exit()

    def _mark_stuck(self, now: float) -> None:
        """Count running calls that exceeded their limit. Must hold the lock."""
        for call in self._running:
            if not call.stuck and call.until < now:
                call.stuck = True
                self._stuck += 1
        while self._waiting and self._threads < self._capacity() \
                and len(self._waiting) > self._threads - len(self._running):
            before = self._threads
            self._start_thread()
            if self._threads == before:
                break

    def _pause(self, call: _Call) -> float:
        """Return the seconds until the caller must check the call again."""
        if call.deadline is None:
            return _TICK
        return min(_TICK, max(call.deadline - time.monotonic(), 0.0) + 0.001)

    def _check(self, call: _Call) -> None:
        """Raise the error of a caller that must not wait longer."""
        now = time.monotonic()
        if call.ended:
            return
        if call.deadline is not None and now >= call.deadline:
            raise Timeout("the request did not complete within its timeout", hint="Raise `timeout`")
        with self._lock:
            self._mark_stuck(now)
            if call.ended:
                return
            if call.stuck:
                raise Timeout(f"{self._what}: the call made no progress for {self.seconds:g} s and was abandoned")
            if call in self._waiting:
                self._refuse_if_stuck()

    def _leave(self, call: _Call) -> None:
        """Record that the caller no longer waits. A running call keeps its thread until it ends."""
        now = time.monotonic()
        with self._lock:
            call.left = True
            self._waiting.pop(call, None)
            if math.isfinite(self.seconds):  # it counts as stuck soon, not at the end of its own limit
                call.until = min(call.until, now + SOON)

    def _work(self, queue: SimpleQueue[_Call]) -> None:
        while True:
            try:
                call = queue.get()
            except MemoryError:  # the next call is still in the queue
                time.sleep(_PAUSE)
                continue
            try:
                wanted = self._begin(call)
            except MemoryError as error:
                call.function, call.args, call.error = None, (), error
                last = self._end(call)
            else:
                last = self._run(call) if wanted else self._drop(call)
            del call  # else the result stays alive until the next call
            if last:
                return

    def _begin(self, call: _Call) -> bool:
        """Let the time of a call begin. Returns False if its caller has left."""
        with self._lock:
            if self._waiting.pop(call, 0) == 0:
                return False
            call.until = time.monotonic() + self.seconds
            self._running[call] = None
            return True

    def _drop(self, call: _Call) -> bool:
        """Drop a call whose caller has left. Returns True if the thread must end."""
        call.function = None
        with self._lock:
            return self._surplus()

    def _run(self, call: _Call) -> bool:
        """Run a call. Returns True if the thread must end."""
        function, args = call.function, call.args
        call.function, call.args = None, ()
        assert function is not None
        _local.call = call
        try:
            call.result = call.context.run(function, *args)
        except BaseException as error:
            call.error = error
        finally:
            _local.call = None
        del function, args
        return self._end(call)

    def _end(self, call: _Call) -> bool:
        """Wake the caller, which takes the result or the error. Returns True if the thread must end."""
        with self._lock:
            self._running.pop(call, None)  # absent if the call had no memory to begin
            self._stuck -= call.stuck
            call.ended = True
            last = self._surplus()
        call.wake()
        return last

    def _surplus(self) -> bool:
        """Return True if there are more threads than needed, because a stuck one has returned: then the calling thread
        must end, and is no longer counted. The caller must hold the lock."""
        if self._threads <= self._capacity():
            return False
        self._threads -= 1
        return True


def _earlier(deadline: float | None, outer: _Call | None) -> float | None:
    """Return the earlier one of a deadline and that of the request that this thread serves."""
    other = _local.deadline if outer is None else outer.deadline
    return other if deadline is None or other is not None and other < deadline else deadline


def _nothing() -> None:
    """Wake no caller."""


def _wake_soon(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Complete the future of another thread's loop, unless the loop was closed."""
    def complete() -> None:
        if not future.done():
            future.set_result(None)

    try:
        loop.call_soon_threadsafe(complete)
    except RuntimeError:
        pass


@contextmanager
def limited(deadline: float | None) -> Iterator[None]:
    """Set the deadline of the calls that this thread starts inside the block."""
    before = _local.deadline
    _local.deadline = deadline
    try:
        yield
    finally:
        _local.deadline = before


def tokenized(chars: int, function: Callable[..., T], *args: Any, deadline: float | None = None) -> T:
    """Return ``function(*args)``, which tokenizes ``chars`` characters: here, or on a thread of :data:`TEXTS` if they
    are many, or of :data:`LONG_TEXTS`."""
    if chars < LONG:
        return function(*args)
    return (TEXTS if chars < _VERY_LONG else LONG_TEXTS).run(function, *args, deadline=deadline)


def converted(values: Any, function: Callable[..., T], *args: Any) -> T:
    """Return ``function(*args)``, which converts nested plain data with Python code: here, or on a thread of
    :data:`BODIES` if the data are many. Many threads that run Python code at once delay the event loop by 5 ms each."""
    return BODIES.run(function, *args) if are_many(values) else function(*args)


def are_many(values: Any) -> bool:
    """Return True if nested plain data have :data:`LONG_ON_LOOP` characters and values, of 16 characters each."""
    left, parts = LONG_ON_LOOP, [values]
    while parts:
        part = parts.pop()
        left -= len(part) if isinstance(part, str) else 16
        if left <= 0 or isinstance(part, (Mapping, list, tuple)) and 16 * len(part) >= left:
            return True
        if isinstance(part, Mapping):
            parts += part.keys()
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            parts += part
    return False


def check_caller() -> None:
    """Raise Timeout if the caller of the call that this thread runs has left. Does nothing outside a call."""
    call = _local.call
    if call is not None and (call.left or call.stuck):
        raise Timeout("the caller no longer waits")


def progress() -> None:
    """Renew the time limit of the running call, between two of its parts. Does nothing outside a call.

    Raises:
        Timeout: the caller has left, so the remaining parts are not needed.
    """
    call = _local.call
    if call is None:
        return
    with call.group._lock:
        check_caller()
        call.until = time.monotonic() + call.group.seconds


def refuse_callers(loop: asyncio.AbstractEventLoop, error: Exception) -> None:
    """End the waits of an event loop's callers for the preparation of requests, which cannot be submitted any more."""
    for group in (IMAGES, IMAGE_REQUESTS, REQUESTS, TEXTS):
        group.refuse_callers(loop, error)


def end_process_if_busy(status: int) -> None:
    """End the process at once if native calls still run. Call this as the last statement of a program.

    The interpreter's exit does not wait for native calls either, but a library in Rust that returns to Python while the
    interpreter is finalized crashes the process.
    """
    if running():
        _at_exit()
    if running():
        end_process(status)


def end_process(status: int) -> NoReturn:
    """End the process at once, whatever still runs in it. Log records and output so far are written."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def running() -> int:
    """Return the number of calls that run on threads of all groups."""
    return sum(len(group._running) for group in _groups.values())


def report(name: str, what: str, status: Callable[[], NativeCalls]) -> None:
    """Add threads to :func:`statuses`.

    Args:
        name: their key.
        what: their calls, in the plural, for messages.
        status: function that returns their state.
    """
    _reports[name] = (what, status)


def statuses() -> dict[str, NativeCalls]:
    """Return the state of all threads that were used, by the name of their group."""
    return {name: found for name, (_, status) in list(_reports.items()) if (found := status()).threads}


def reasons(found: Mapping[str, NativeCalls]) -> list[str]:
    """Return one line about each starved group of :func:`statuses`."""
    return [f"{_reports[name][0]} are slow: {state.running} run on {state.threads} threads, {state.stuck} of them "
            f"beyond their time limit, and {state.waiting} wait" for name, state in found.items() if state.starved]


_groups: dict[str, ThreadGroup] = {}
_reports: dict[str, tuple[str, Callable[[], NativeCalls]]] = {}
_registered = False


def _wait_at_exit() -> None:
    """Register the wait at the interpreter's exit, once."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(_at_exit)


def _at_exit() -> None:
    end = time.monotonic() + EXIT_SECONDS
    while running() and time.monotonic() < end:
        time.sleep(0.005)


_MANY = min(max(cpus(), 2), 16)

#: Tokenizing long texts; building tokenizers.
TEXTS = ThreadGroup("texts", "tokenizer calls", _MANY)
#: Tokenizing a text takes up to 400 bytes per character: two threads for the longest ones.
LONG_TEXTS = ThreadGroup("long_texts", "tokenizer calls of very long texts", 2)
#: Decoding, resizing and encoding images.
IMAGES = ThreadGroup("images", "image decodings", _MANY)
#: Compiling grammars.
GRAMMARS = ThreadGroup("grammars", "grammar compilations", _MANY)
#: Parsing and encoding large bodies of the server, and converting long conversations. All of it is Python code that
#: holds the interpreter's lock, linear in its input: two threads, because an event loop that waits for the lock waits
#: 5 ms for each.
BODIES = ThreadGroup("bodies", "conversions of request and response bodies", 2)
#: Requests that event loops prepare on a thread: model files, templates, long prompts.
REQUESTS = ThreadGroup("requests", "preparations of requests", 32, math.inf)
#: As ``REQUESTS``, for requests with images, which a slow host can delay.
IMAGE_REQUESTS = ThreadGroup("image_requests", "preparations of requests with images", 32, math.inf)
#: Swaps of models, which wait for loads: they must not occupy the threads that prepare requests.
SWAPS = ThreadGroup("swaps", "swaps of models", 4, math.inf)

#: Closing pools when a server stops.
CLOSING = ThreadGroup("closing", "shutdowns of pools", 4, math.inf)


def _after_fork_in_child() -> None:
    _local.call, _local.deadline = None, None
    for group in _groups.values():
        group.renew()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["BODIES", "CLOSING", "GRAMMARS", "IMAGES", "IMAGE_REQUESTS", "LONG", "LONG_ON_LOOP", "LONG_TEXTS",
           "REQUESTS", "SWAPS", "TEXTS", "NativeCalls", "ThreadGroup", "are_many", "check_caller", "converted",
           "end_process_if_busy", "limited", "progress", "reasons", "refuse_callers", "report", "running", "statuses",
           "tokenized"]
