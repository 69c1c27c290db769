"""Renders chat templates in renderers: child processes that can be killed.

A template is part of a model, and models are not trusted. A template can take any time and any memory, also while it is
compiled, and often inside a single call of C code that nothing in its own process can interrupt. So no template is
compiled or rendered in this process::

    ask ── a free renderer, or a new one ── socket pair ── renderer.py: compile (cached), render, answer
     │                                                       SIGPROF and RLIMIT_AS end or fail what exceeds a limit
     └── retried once with another renderer if this one died for another reason

At most ``MOST`` renderers exist. A template that has not rendered yet, or whose last render exceeded a limit, gets one
renderer at a time; any template leaves one to the others. After ``STRIKES`` such renders in a row, a template is
refused for a while. Without a renderer, nothing is rendered.

A renderer has about 20 MB of resident memory. It ends after ``IDLE_SECONDS`` without work, and when this process ends,
because its socket is closed.
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
from collections import OrderedDict
from importlib.util import find_spec
from typing import Any, NamedTuple

from .. import interpreter
from ..errors import SpawnFailed, Timeout
from ..tokenizers import limits

#: Renderers of this process.
MOST = 4
#: Time without work after which a renderer is ended.
IDLE_SECONDS = 60.0
#: Renders in a row that exceed a limit, after which a template is refused for a while.
STRIKES = 3
#: Compiled templates that a renderer keeps.
COMPILED = 32

#: Time within which a new renderer must answer. Imports from a cold disk take seconds.
_START_SECONDS = 30.0
#: Longest time for which a template is refused.
_REFUSED_SECONDS = 60.0
#: Templates whose history is kept.
_RECORDS = 1024
#: Limits grow with the caller's data: characters of output, bytes of memory and seconds for each byte.
_CHARS_PER_BYTE, _BYTES_PER_BYTE, _SECONDS_PER_BYTE = 32, 64, 1e-6
#: Variables of the environment that a renderer gets: libraries of the interpreter, and the time zone.
_ENVIRONMENT = ("LD_LIBRARY_PATH", "TZ", "TZDIR")

#: Statuses of templates that were not compiled.
_NOT_COMPILED = frozenset(("nodes", "forbidden", "syntax", "nested", "uncompilable"))
#: Statuses of renders that exceeded a limit, or ended their renderer.
_EXCEEDED = frozenset(("time", "memory", "size", "died", "silent"))
_HINT = "Chat templates are rendered in processes of their own, never in this one"


class Source:
    """Text of a template.

    Attributes:
        text: the template, in Jinja.
        digest: hash of the text.
    """

    __slots__ = ("digest", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class Answer(NamedTuple):
    """Answer to a request.

    Attributes:
        status: ``"text"``, or a word for what failed: those of ``renderer.py``, and ``"time"`` (the limit of CPU time),
            ``"died"`` (the renderer ended twice), ``"silent"`` (it did not answer twice).
        text: the text, or a detail of the failure.
        refused: seconds for which the template is refused because of this status; 0: the template was rendered.
    """

    status: str
    text: str
    refused: float = 0.0


class _Died(Exception):
    """The renderer ended for another reason than a limit; the message states its exit status."""


class _Silent(Exception):
    """The renderer did not answer in time, although it had CPU time left."""


class _Renderer:
    """A child process that runs ``renderer.py``. Used by one thread at a time.

    Raises:
        SpawnFailed: the process could not be started.
    """

    def __init__(self) -> None:
        self.compiled: OrderedDict[bytes, None] = OrderedDict()
        self.since = time.monotonic()
        self.ready = False
        command = _command()
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
            raise SpawnFailed(f"no process could be started to render the chat template: {error}", hint=_HINT) \
                from error
        finally:
            if theirs is not None:
                theirs.close()
        self.socket: socket.socket = ours

    def wait_ready(self, deadline: float | None) -> None:
        """Wait until the process has imported jinja2.

        Raises:
            SpawnFailed: it ended, or was not ready in time.
            Timeout: the deadline has passed; the process keeps starting.
        """
        if self.ready:
            return
        end = self.since + _START_SECONDS
        try:
            status, _, _ = self._receive(end if deadline is None else min(end, deadline), 1 << 10)
        except _Silent:
            _check(deadline)
            raise SpawnFailed(f"the process that renders chat templates was not ready after {_START_SECONDS:.0f} s",
                              hint=_HINT) from None
        if status != "ready":
            raise _Died("it sent no greeting")
        self.ready = True

    def ask(self, source: Source, kind: str, data: bytes, deadline: float | None) -> tuple[str, str, bool]:
        """Send a request and wait for the answer. Returns the status, the text, and True if the renderer ends now.

        Raises:
            _Died, _Silent: see there.
            Timeout: the deadline has passed. The caller must end the renderer.
        """
        known = source.digest in self.compiled
        evicted = None
        if kind == "render" and not known and len(self.compiled) >= COMPILED:
            evicted = self.compiled.popitem(last=False)[0]
        seconds = max(limits.max_template_seconds + len(data) * _SECONDS_PER_BYTE, 1e-3)
        chars = limits.max_template_text + len(data) * _CHARS_PER_BYTE
        memory = limits.max_template_memory + len(data) * _BYTES_PER_BYTE
        body = marshal.dumps((kind, source.digest, None if known and kind == "render" else source.text, evicted,
                              limits.max_template_nodes, seconds, memory, chars, data), 2)
        began = time.monotonic()
        # The renderer limits its own CPU time. This limit of elapsed time is for a renderer that does not run at all.
        end = began + 5 + 4 * seconds
        end = end if deadline is None else min(end, deadline)
        try:
            self.socket.settimeout(max(end - began, 1e-3))
            try:
                self.socket.sendall(len(body).to_bytes(8, "little") + body)
            except TimeoutError:
                raise _Silent from None
            except OSError:
                raise _Died(self.fate()) from None
            status, answer, last = self._receive(end, 4 * chars + (1 << 16))
        except _Silent:
            _check(deadline)
            raise
        except _Died:
            # an application that ignores SIGCHLD loses the exit status: Popen then reports 0
            code = self.process.returncode
            if code == -signal.SIGPROF or code == 0 and time.monotonic() - began >= seconds:
                return "time", f"{seconds:.3g}", True
            raise
        if kind == "render" and status not in _NOT_COMPILED:
            self.compiled[source.digest] = None
            self.compiled.move_to_end(source.digest)
        return status, answer, last

    def _receive(self, end: float, most: int) -> tuple[str, str, bool]:
        data = bytearray()
        size = 8
        while len(data) < size:
            left = end - time.monotonic()
            try:
                self.socket.settimeout(max(left, 1e-3))
                part = self.socket.recv(min(max(size - len(data), 1 << 16), 1 << 20))
            except TimeoutError:
                if left <= 0:
                    raise _Silent from None
                continue
            except OSError:
                part = b""
            if not part:
                raise _Died(self.fate())
            data += part
            if size == 8 and len(data) >= 8:
                size = 8 + int.from_bytes(data[:8], "little")
                if size > most:
                    raise _Died("it sent more than the limit of text")
        status, _, text = bytes(memoryview(data)[9:]).partition(b"\0")
        return status.decode("ascii", "replace"), text.decode("utf-8", "replace"), data[8] == 1

    def fate(self) -> str:
        """Wait for the process, which has closed its socket, and describe its end."""
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"signal {-code}" if code < 0 else f"exit status {code}"

    def end(self, seconds: float = 0.5) -> bool:
        """Kill the process. Returns True if it ended within ``seconds``; if not, it becomes a zombie soon."""
        self.socket.close()
        self.process.kill()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True


def _above_stdio(end: socket.socket) -> socket.socket:
    """Return a socket whose descriptor is none of the standard streams, which may be closed in this process."""
    if end.fileno() > 2:
        return end
    with end:
        return socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))


def _command() -> list[str]:
    """Return the command of a renderer.

    Raises:
        SpawnFailed: the Python executable is unknown or another program, or jinja2 is not installed.
    """
    path, what = interpreter.find()
    if what:
        raise SpawnFailed(f"no process can be started to render the chat template: {what}",
                          hint="Set the path of a Python of this version with multiprocessing.set_executable(path)")
    found = []
    for name in ("jinja2", "markupsafe"):
        spec = find_spec(name)  # does not import it
        if spec is None or spec.origin is None:
            raise SpawnFailed(f"{name} is not installed", hint=f"Run: pip install {name}")
        found.append(os.path.dirname(os.path.dirname(os.path.abspath(spec.origin))))
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "renderer.py")
    return [os.path.abspath(path), "-I", "-S", "-B", program, *dict.fromkeys(found)]


def _check(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise Timeout("the request did not complete within its timeout", hint="Increase timeout")


class _Record:
    """History of a template in this process.

    Attributes:
        active: renders in progress.
        proven: True if the last render stayed within its limits.
        strikes: renders in a row that exceeded a limit.
        until: time until which the template is refused, in ``time.monotonic()``.
        answer: status and text of the last render that exceeded a limit.
    """

    __slots__ = ("active", "answer", "proven", "strikes", "until")

    def __init__(self) -> None:
        self.active = self.strikes = 0
        self.proven = False
        self.until = 0.0
        self.answer = Answer("time", "")

    def note(self, answer: Answer) -> None:
        """Record the outcome of a render."""
        self.proven = answer.status not in _EXCEEDED
        if self.proven:
            self.strikes = 0
            return
        self.strikes, self.answer = self.strikes + 1, answer
        if self.strikes >= STRIKES:
            self.until = time.monotonic() + min(2.0 ** (self.strikes - STRIKES), _REFUSED_SECONDS)


class Renderers:
    """The renderers of this process. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._all: list[_Renderer] = []
        self._idle: list[_Renderer] = []
        self._starting = 0
        self._unreaped: list[_Renderer] = []
        self._records: OrderedDict[bytes, _Record] = OrderedDict()
        self._tidying: threading.Thread | None = None

    def ask(self, source: Source, kind: str, variables: dict[str, Any] | None = None,
            deadline: float | None = None) -> Answer:
        """Let a renderer process a template.

        Args:
            source: the template.
            kind: ``"render"``, or ``"variables"`` for the names of its undeclared variables, one per line.
            variables: plain data that the template reads.
            deadline: ``time.monotonic()`` at which the request ends; None: only the limits apply.

        Raises:
            SpawnFailed: no renderer could be started.
            Timeout: the deadline has passed.
        """
        data = b"" if variables is None else marshal.dumps(variables, 2)
        record, answer = self._enter(source, deadline)
        if answer is not None:
            return answer
        try:
            answer = self._try(source, kind, data, deadline)
            return answer
        finally:
            with self._changed:
                if answer is not None:
                    record.note(answer)
                record.active -= 1
                self._changed.notify_all()

    def exceeded(self, source: Source) -> bool:
        """Return True if the last render of a template exceeded a limit."""
        record = self._records.get(source.digest)
        return record is not None and record.strikes > 0

    def start(self) -> None:
        """Start a renderer unless there is one, and do not wait for it. Errors appear when a renderer is needed."""
        with self._changed:
            if self._all or self._starting:
                return
            self._starting += 1
        try:
            self._release(self._new())
        except SpawnFailed:
            pass

    def _enter(self, source: Source, deadline: float | None) -> tuple[_Record, Answer | None]:
        """Wait until this template may use a renderer. Returns an answer if it is refused."""
        with self._changed:
            while True:
                record = self._records.setdefault(source.digest, _Record())
                self._records.move_to_end(source.digest)
                if record.strikes >= STRIKES:
                    left = record.until - time.monotonic()
                    if left > 0 or record.active:  # one request at a time finds out if the template works again
                        return record, record.answer._replace(refused=max(left, limits.max_template_seconds))
                if record.active < (MOST - 1 if record.proven else 1):
                    break
                self._wait(deadline)
            record.active += 1
            if len(self._records) > _RECORDS:
                for digest in [digest for digest, old in self._records.items() if not old.active][:_RECORDS // 4]:
                    del self._records[digest]
            return record, None

    def _wait(self, deadline: float | None) -> None:
        """Wait for a change. Must hold ``_changed``."""
        self._changed.wait(1.0 if deadline is None else max(min(1.0, deadline - time.monotonic()), 0.0))
        _check(deadline)

    def _try(self, source: Source, kind: str, data: bytes, deadline: float | None) -> Answer:
        """Return the answer of a renderer. If it dies, as by an OOM killer, the next one gets the request."""
        for attempt in (1, 2):
            renderer, last = self._take(source, deadline), True
            try:
                renderer.wait_ready(deadline)
                status, text, last = renderer.ask(source, kind, data, deadline)
                return Answer(status, text)
            except _Died as error:
                failed = Answer("died", str(error))
                if attempt == 2 and not renderer.ready:
                    raise SpawnFailed("the process that renders chat templates ended while it started: "
                                      f"{error}", hint=_HINT) from None
            except _Silent:
                failed = Answer("silent", "")
            except Timeout:
                last = renderer.ready  # one that is still starting can be used later
                raise
            finally:
                self._discard(renderer) if last else self._release(renderer)
        return failed

    def _take(self, source: Source, deadline: float | None) -> _Renderer:
        """Return a renderer that is idle, if possible one that has compiled the template, or a new one."""
        with self._changed:
            while not self._idle:
                if len(self._all) + self._starting < MOST:
                    self._starting += 1
                    break
                self._wait(deadline)
            else:
                known = [at for at, renderer in enumerate(self._idle) if source.digest in renderer.compiled]
                return self._idle.pop(known[-1] if known else -1)
        return self._new()

    def _new(self) -> _Renderer:
        """Start a renderer that was counted in ``_starting``."""
        renderer = None
        try:
            renderer = _Renderer()
        finally:
            with self._changed:
                self._starting -= 1
                if renderer is not None:
                    self._all.append(renderer)
                self._changed.notify_all()
        self._tidy_later()
        return renderer

    def _release(self, renderer: _Renderer) -> None:
        with self._changed:
            renderer.since = time.monotonic() if renderer.ready else renderer.since
            self._idle.append(renderer)
            self._changed.notify_all()

    def _discard(self, renderer: _Renderer) -> None:
        reaped = renderer.end()
        with self._changed:
            self._all.remove(renderer)
            if not reaped:
                self._unreaped.append(renderer)
            self._changed.notify_all()

    # ---- the end of renderers ----

    def _tidy_later(self) -> None:
        """Start the thread that ends idle renderers. Without it, they end by themselves after 90 s."""
        global _at_exit_registered
        with self._changed:
            if not _at_exit_registered:
                atexit.register(_at_exit)
                _at_exit_registered = True
            if self._tidying is None:
                self._tidying = threading.Thread(target=self._tidy, name="mpool-templates", daemon=True)
                try:
                    self._tidying.start()
                except RuntimeError:  # no further thread; the next renderer tries again
                    self._tidying = None

    def _tidy(self) -> None:
        while True:
            time.sleep(1.0)
            with self._changed:
                oldest = time.monotonic() - IDLE_SECONDS
                over = [one for one in self._idle if one.since < oldest or one.process.poll() is not None]
                self._idle = [one for one in self._idle if one not in over]
                self._unreaped = [one for one in self._unreaped if one.process.poll() is None]
                if not self._all and not self._starting and not self._unreaped:
                    self._tidying = None
                    return
            for renderer in over:
                self._discard(renderer)

    def kill(self) -> None:
        """Kill all renderers and do not wait for their ends."""
        for renderer in (*self._all, *self._unreaped):
            renderer.process.kill()
            renderer.process.poll()
            self._disown(renderer)

    def leave(self) -> None:
        """Close the connections in a forked child, whose parent keeps the renderers."""
        for renderer in self._all:
            renderer.socket.close()
            self._disown(renderer)

    @staticmethod
    def _disown(renderer: _Renderer) -> None:
        if renderer.process.returncode is None:
            renderer.process.returncode = 0  # Popen warns of a child that was not waited for


_renderers = Renderers()
_at_exit_registered = False


def renderers() -> Renderers:
    """Return the renderers of this process."""
    return _renderers


def _at_exit() -> None:
    _renderers.kill()


def _after_fork_in_child() -> None:
    global _renderers
    inherited, _renderers = _renderers, Renderers()
    inherited.leave()


os.register_at_fork(after_in_child=_after_fork_in_child)
