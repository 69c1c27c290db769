"""Child processes for work that must be killable: models' chat templates and regular expressions are not trusted.

Such work can take any time and any memory, often inside a single call of C code that nothing in its own process can
interrupt::

    run ── an idle child, or a new one ── socket pair ── child_main.py ── a program: load a source (kept), handle
     │                                                    SIGPROF and RLIMIT_AS end or fail what exceeds a limit
     └── retried once with another child if this one died for another reason

A child ends after a time without work, and when this process ends, because its socket is closed. Forked processes start
children of their own.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import marshal
import os
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import OrderedDict
from contextlib import suppress
from importlib.util import find_spec
from typing import Any, NamedTuple

from ..errors import MpoolError, ShuttingDown, SpawnFailed, Timeout
from ..records import logger
from . import interpreter
from .resources import HINTS, start_thread

log = logger("mpool.host")

#: Time within which a new child must be ready. Imports from a cold disk take seconds.
START_SECONDS = 30.0
#: A request may take this much elapsed time in addition to four times its limit of CPU time: the CPU may be busy.
GRACE_SECONDS = 5.0
#: Time to wait for the end of a child that was killed, or that closed its connection.
END_SECONDS = 1.0
#: Seconds between two searches for children that ended or are idle.
TIDY_SECONDS = 1.0

#: Variables of the environment that a child gets: libraries of the interpreter, and the time zone.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "TZ", "TZDIR")
_MAIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child_main.py")


class Program(NamedTuple):
    """A program of child processes: the path of its code, which ``child_main.py`` runs, and options of processes."""

    file: str
    #: Packages that it imports besides the standard library.
    packages: tuple[str, ...]
    #: Task of the program, as an infinitive for error messages.
    what: str
    #: Maximum number of processes, and of sources that each keeps loaded.
    most: int
    kept: int = 1
    #: A process ends after this many seconds without work, or when it has grown by this many resident bytes.
    idle: float = 60.0
    worn: int = 64 << 20


class Limits(NamedTuple):
    """Limits of a request.

    Attributes:
        seconds: CPU seconds to handle the request.
        loading: CPU seconds to load its source.
        memory: bytes of memory beyond those that the process used after its start.
        response: maximum length of the response in bytes.
    """

    seconds: float
    loading: float
    memory: int
    response: int


class Source:
    """Text that a program loads once, as a template or a tokenizer, and its hash."""

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class _Child:
    """A child process. Used by one thread at a time. Must be created with ``_launching`` held.

    Raises:
        SpawnFailed: the process could not be started.
    """

    def __init__(self, program: Program, command: list[str]) -> None:
        self.program = program
        self.loaded: OrderedDict[bytes, None] = OrderedDict()
        self.since = time.monotonic()
        self.ready = False
        ours = theirs = None
        try:
            ours, theirs = (_above_stdio(end) for end in socket.socketpair())
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/",
                env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                start_new_session=True)  # Ctrl-C in a terminal does not reach it
        except (OSError, subprocess.SubprocessError, MemoryError) as error:
            if ours is not None:
                ours.close()
            raise SpawnFailed(f"no process could be started to {program.what}: {error}",
                              hint=HINTS.get(getattr(error, "errno", 0)) or "Raise the limit on processes (ulimit -u, "
                              "pids.max of the cgroup) or on memory (ulimit -v)") from error
        finally:
            if theirs is not None:
                theirs.close()
        self.socket: socket.socket = ours

    def wait_ready(self, deadline: float | None) -> None:
        """Wait until the process has imported its modules.

        Raises:
            SpawnFailed: it was not ready in time.
            Timeout: the deadline has passed; the process keeps starting.
        """
        if self.ready:
            return
        end = self.since + START_SECONDS
        try:
            status = self._receive(end if deadline is None else min(end, deadline), 1 << 10)[0]
        except TimeoutError:
            check(deadline)
            raise SpawnFailed(f"the process to {self.program.what} was not ready after {START_SECONDS:.0f} s") from None
        if status != "ready":
            raise ValueError("it did not report that it is ready")
        self.ready = True

    def exchange(self, request: tuple[Any, ...], limits: Limits, source: Source | None,
                 deadline: float | None) -> tuple[str, bytes, bool]:
        """Send a request and wait for the response. Returns status and data, and True if the child ends now.

        Raises:
            OSError, EOFError: the child closed its connection.
            ValueError: its response is malformed or too long; the message says which.
            TimeoutError: it did not respond in time, although it had CPU time left.
            Timeout: the deadline has passed. The caller must end the child.
        """
        digest, text, evicted, allowed = None, None, None, limits.seconds
        if source is not None:
            digest = source.digest
            if digest not in self.loaded:
                text, allowed = source.text, allowed + limits.loading
                if len(self.loaded) >= self.program.kept:
                    evicted = self.loaded.popitem(last=False)[0]
        body = marshal.dumps((digest, text, evicted, limits[:3], request), 2)
        self.since = time.monotonic()
        # The child limits its own CPU time. This limit of elapsed time is for a child that does not run at all.
        end = self.since + GRACE_SECONDS + 4 * allowed
        end = end if deadline is None else min(end, deadline)
        try:
            self.socket.settimeout(max(end - self.since, 1e-3))
            self.socket.sendall(len(body).to_bytes(8, "little") + body)
            status, data, flags = self._receive(end, limits.response)
        except TimeoutError:
            check(deadline)
            raise
        if digest is not None and flags & 2:
            self.loaded[digest] = None
            self.loaded.move_to_end(digest)
        return status, data, bool(flags & 1)

    def _receive(self, end: float, most: int) -> tuple[str, bytes, int]:
        """Return status, data and flags of a frame."""
        data = bytearray()
        size = 8
        while len(data) < size:
            self.socket.settimeout(max(end - time.monotonic(), 1e-3))
            part = self.socket.recv(min(max(size - len(data), 1 << 16), 1 << 20))
            if not part:
                raise EOFError
            data += part
            if size == 8 and len(data) >= 8:
                size = 8 + int.from_bytes(data[:8], "little")
                if size > most + 64:
                    raise ValueError("its response is longer than allowed")
        zero = data.find(0, 9, 64)
        status = bytes(data[9:max(zero, 9)])
        if len(data) != size or not status.isalpha():
            raise ValueError("its response is malformed")
        return status.decode(), bytes(memoryview(data)[zero + 1:]), data[8]

    def fate(self, seconds: float) -> str:
        """Wait for the process, which has closed its socket, and describe its end. ``"time"``: it exceeded its limit of
        CPU time in seconds."""
        try:
            code = self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        # an application that ignores SIGCHLD loses the exit status: Popen then reports 0
        if self.ready and (code == -signal.SIGPROF or code == 0 and time.monotonic() - self.since >= seconds):
            return "time"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def end(self) -> None:
        """Kill the process, and wait for its end."""
        self.socket.close()
        self.process.kill()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            _unreaped.append(self.process)  # it becomes a zombie soon
            _tidy_later()


def _above_stdio(end: socket.socket) -> socket.socket:
    """Return a socket whose descriptor is none of the standard streams, which may be closed in this process."""
    if end.fileno() > 2:
        return end
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _command(program: Program) -> list[str]:
    """Return the command of a child.

    Raises:
        SpawnFailed: the Python executable is unknown or another program, or a package is not installed.
    """
    path, reason = interpreter.find()
    if reason:
        raise SpawnFailed(f"no process can be started to {program.what}: {reason}",
                          hint="Set the path of a Python of this version with multiprocessing.set_executable(path)")
    found = []
    for name in program.packages:
        spec = find_spec(name)  # does not import it
        if spec is None or spec.origin is None:
            raise SpawnFailed(f"{name} is not installed", hint=f"Run: pip install {name}")
        found.append(os.path.dirname(os.path.dirname(os.path.abspath(spec.origin))))
    return [os.path.abspath(path), "-I", "-S", "-B", _MAIN, program.file, f"{program.idle * 1500:.0f}",
            str(program.worn), *dict.fromkeys(found)]


def check(deadline: float | None) -> None:
    """Raise Timeout if the deadline of a request has passed."""
    if deadline is not None and time.monotonic() >= deadline:
        raise Timeout("the request did not complete within its timeout", hint="Raise `timeout`")


def wait(changed: threading.Condition, deadline: float | None) -> None:
    """Wait for a change, at most for a second. Raises Timeout if the deadline has passed."""
    changed.wait(1.0 if deadline is None else max(min(1.0, deadline - time.monotonic()), 0.0))
    check(deadline)


class Children:
    """The processes of a program. They start on demand, and end with this object. Thread-safe; usable after fork."""

    _all: list[_Child] = []
    _idle: list[_Child] = []

    def __init__(self, program: Program) -> None:
        self.program = program
        self.renew()
        with _tidying:
            _live.add(self)

    def renew(self) -> None:
        """Forget all processes: in a forked child, they belong to the parent."""
        for child in self._all:
            child.socket.close()
            child.process.returncode = child.process.returncode or 0
        self._changed = threading.Condition(threading.Lock())
        self._starting = 0
        self._all, self._idle = [], []

    def run(self, request: tuple[Any, ...], limits: Limits, source: Source | None = None,
            deadline: float | None = None) -> tuple[str, bytes]:
        """Let a child handle a request. If it dies, as by an OOM killer, another one gets the request.

        Args:
            request: plain data for the program.
            limits: limits of this request.
            source: text that the program must have loaded.
            deadline: ``time.monotonic()`` at which the request ends; None: only the limits apply.

        Returns:
            A status and data, or a detail of a failure. The status is a word of the program, or ``"memory"`` (the limit
            of memory), ``"time"`` (the limit of CPU time), ``"died"`` (the child ended twice), ``"silent"`` (it did not
            respond twice).

        Raises:
            SpawnFailed: no process could be started.
            ShuttingDown: the interpreter is shutting down.
            Timeout: the deadline has passed.
        """
        for attempt in (1, 2):
            child, last = self._take(source, deadline), True
            try:
                child.wait_ready(deadline)
                status, data, last = child.exchange(request, limits, source, deadline)
                return status, data
            except Timeout:
                last = child.ready  # one that is still starting can be used later
                raise
            except TimeoutError:
                failed = "silent", b""
            except (OSError, EOFError, ValueError) as error:
                fate = str(error) if isinstance(error, ValueError) else child.fate(limits.seconds)
                if fate == "time":
                    return "time", b"%.3g" % limits.seconds
                failed = "died", fate.encode()
                log.warning("The process to %s died; requests retried: %d, failed: %d; cause: %s", self.program.what,
                            attempt == 1, attempt == 2, fate)
                if attempt == 2 and not child.ready:
                    raise SpawnFailed(f"the process to {self.program.what} ended while it started: {fate}") from None
            finally:
                self._give_back(child, last)
        return failed

    def start(self) -> None:
        """Start a child unless there is one, and do not wait for it. Errors appear when a child is needed."""
        with self._changed:
            if self._all or self._starting:
                return
            self._starting += 1
        try:
            self._give_back(self._new())
        except (SpawnFailed, ShuttingDown):
            pass

    def _take(self, source: Source | None, deadline: float | None) -> _Child:
        """Return a child that is idle, if possible one that has loaded the source, or a new one."""
        with self._changed:
            while not self._idle:
                if len(self._all) + self._starting < self.program.most:
                    self._starting += 1
                    break
                wait(self._changed, deadline)
            else:
                known = [at for at, one in enumerate(self._idle) if source is not None and source.digest in one.loaded]
                return self._idle.pop(known[-1] if known else -1)
        return self._new()

    def _new(self) -> _Child:
        """Start a child that was counted in ``_starting``."""
        try:
            command = _command(self.program)
            # A fork in another thread would copy descriptors, which then remain open in the forked process: this one
            # would wait in vain for the end of its child's stream.
            with _launching:
                if _exiting:
                    raise ShuttingDown("the interpreter is shutting down")
                child = _Child(self.program, command)
                self._all.append(child)
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify_all()
        try:
            _tidy_later()
        except BaseException:
            self._give_back(child)
            raise
        return child

    def _give_back(self, child: _Child, last: bool = False) -> None:
        """Let others use a child, or end it if that was its last request."""
        try:
            if last:
                child.end()
            elif child.ready:
                child.since = time.monotonic()
        finally:  # whatever failed: a child that is neither idle nor removed would take the place of another
            with self._changed:
                (self._all.remove if last else self._idle.append)(child)
                self._changed.notify_all()

    def tidy(self) -> None:
        """End children that are idle for long, and reap those that ended."""
        with self._changed:
            oldest = time.monotonic() - self.program.idle
            over = [one for one in self._idle if one.since < oldest or one.process.poll() is not None]
            self._idle = [one for one in self._idle if one not in over]
        while over:
            with suppress(Exception):  # an error of one child does not keep the others
                self._give_back(over.pop(), last=True)

    def __del__(self) -> None:
        for child in self._all:
            child.end()


# ---- this process ----------------------------------------------------------------------------------------------------

_live: weakref.WeakSet[Children] = weakref.WeakSet()
#: Held while descriptors of a child are created, and by a fork.
_launching = threading.RLock()
#: Must be held for ``_live`` and ``_tidier``.
_tidying = threading.RLock()  # the garbage collector may end children within a section that holds it
_tidier: threading.Thread | None = None
_exiting = False
#: Killed processes that had not ended in time.
_unreaped: list[subprocess.Popen[bytes]] = []


def _tidy_later() -> None:
    """Start the thread that ends idle children and reaps killed ones, unless it runs. Without it, a child ends itself
    after 1.5 times ``Program.idle``."""
    global _tidier
    with _tidying:
        if _tidier is None or not _tidier.is_alive():
            try:
                _tidier = start_thread(_tidy, "mpool-children")
            except MpoolError:  # no further thread; the next child tries again
                pass


def _tidy() -> None:
    global _tidier
    while True:
        time.sleep(TIDY_SECONDS)
        with _tidying:
            for process in list(_unreaped):  # other threads append meanwhile
                if process.poll() is not None:
                    _unreaped.remove(process)
            found = [one for one in _live if one._all]
            if not found and not _unreaped:
                _tidier = None
                return
        while found:
            found.pop().tidy()  # no reference to an object remains here


def _at_exit() -> None:
    global _exiting
    _exiting = True
    with _launching:
        for child in [child for children in list(_live) for child in list(children._all)]:
            child.process.kill()
            child.process.returncode = child.process.poll() or 0  # Popen warns of processes without a known end


def _after_fork_in_child() -> None:
    global _launching, _tidying, _tidier
    _launching, _tidying, _tidier = threading.RLock(), threading.RLock(), None
    for process in _unreaped:
        process.returncode = 0
    _unreaped.clear()
    for children in list(_live):
        children.renew()


def _after_fork_in_parent() -> None:
    try:
        _launching.release()
    except RuntimeError:  # this module was imported after the fork had begun, which waits for imports (_forks.py)
        pass


atexit.register(_at_exit)
os.register_at_fork(before=lambda: _launching.acquire(), after_in_parent=_after_fork_in_parent,
                    after_in_child=_after_fork_in_child)

__all__ = ["Children", "Limits", "Program", "Source", "check", "wait"]
