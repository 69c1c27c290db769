"""Child processes that can be killed: their deaths, wrong responses, limits, failed starts, forks, and their ends."""

from __future__ import annotations

import errno
import gc
import multiprocessing.spawn
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mpool.host import child_processes
from mpool.host.child_processes import Children, Source
from mpool.errors import SpawnFailed, Timeout

import waiting
from childprograms import LIMITS, alive, end, forked, pids, program, states

ENDLESS = "while True: pass"


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Children]]:
    """Makes the children of a program from statements. None remains at the end, neither process nor descriptor."""
    monkeypatch.setattr(child_processes, "TIDY_SECONDS", 0.01)
    monkeypatch.setattr(child_processes, "_live", weakref.WeakSet())  # children of other tests may be idle
    made: list[Children] = []
    before, files = set(states()), set(os.listdir("/proc/self/fd"))

    def make(**options: Any) -> Children:
        made.append(Children(program(tmp_path, **options)))
        return made[-1]

    yield make
    for one in made:
        end(one)
    for process in [*child_processes._unreaped]:
        process.wait(30)
    until(lambda: set(states()) <= before)
    until(lambda: len(os.listdir("/proc/self/fd")) <= len(files))


def until(met: Callable[[], Any], seconds: float = 30.0) -> None:
    waiting.until(met, seconds, states)


def ask(made: Children, value: bytes = b"v", source: Source | None = None, deadline: float | None = None,
        **changed: Any) -> tuple[str, bytes]:
    return made.run((value,), LIMITS._replace(**changed), source, deadline)


class Thread(threading.Thread):
    """A thread that keeps the result or the error of a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        super().__init__(daemon=True)
        self._call, self.result, self.error = (function, arguments), None, None  # type: Any, Any, Any
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call[0](*self._call[1])
        except Exception as error:
            self.error = error

    def ended(self, seconds: float = 60.0) -> Thread:
        self.join(seconds)
        assert not self.is_alive()
        return self


# ---- death -----------------------------------------------------------------------------------------------------------

FRAME = "whole = frame(b'text', b'x' * 50000)"
POINTS = {
    "start": {"start": "if first(): kill()"},
    "loading": {"load": "if first(): kill()"},
    "handling": {"handle": "if first(): kill()"},
    "handling, SIGSEGV": {"handle": "if first(): kill(signal.SIGSEGV)"},
    "handling, exit": {"handle": "if first(): os._exit(3)"},
    "half of the length": {"handle": f"{FRAME}\n    if first(): os.write(0, whole[:4]); kill()"},
    "length": {"handle": f"{FRAME}\n    if first(): os.write(0, whole[:8]); kill()"},
    "status": {"handle": f"{FRAME}\n    if first(): os.write(0, whole[:11]); kill()"},
    "half of the response": {"handle": f"{FRAME}\n    if first(): os.write(0, whole[:25000]); kill()"},
    "all but a byte": {"handle": f"{FRAME}\n    if first(): os.write(0, whole[:-1]); kill()"},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("point", POINTS)
def test_child_killed_at_a_point_of_the_exchange(children: Any, point: str) -> None:
    """The request goes to a new child, and no zombie remains."""
    made = children(**POINTS[point])
    before = set(states())
    assert ask(made, source=Source("source ")) == ("text", b"source v")
    assert set(states()) - before == set(pids(made)) and len(pids(made)) == 1


def test_child_killed_while_idle(children: Any) -> None:
    made = children()
    for _ in range(3):
        assert ask(made) == ("text", b"v")
        (pid,) = pids(made)
        os.kill(pid, signal.SIGKILL)
        assert ask(made) == ("text", b"v")
        assert pids(made) != [pid] and pid not in states()


def test_child_killed_after_its_response(children: Any) -> None:
    made = children(handle="os.write(0, frame(b'text', b'sent', 2)); kill()")
    assert ask(made, source=Source("")) == ask(made, source=Source("")) == ("text", b"sent")


def test_child_killed_while_the_request_is_sent(children: Any) -> None:
    """A stopped child leaves the socket full, so the request cannot be sent to its end."""
    made = children()
    ask(made)
    (pid,) = pids(made)
    os.kill(pid, signal.SIGSTOP)
    value = b"x" * 30_000_000
    work = Thread(lambda: ask(made, value, response=1 << 28))
    until(lambda: not made._idle)
    assert work.is_alive()
    os.kill(pid, signal.SIGKILL)
    assert work.ended().result == ("text", value)


@pytest.mark.parametrize(("handle", "fate"), [("kill(signal.SIGSEGV)", b"signal 11"), ("os._exit(3)", b"exit status 3"),
                                              ("os.close(0); time.sleep(60)", b"it closed its connection")])
def test_child_that_dies_twice(children: Any, monkeypatch: pytest.MonkeyPatch, handle: str, fate: bytes,
                               caplog: pytest.LogCaptureFixture) -> None:
    """Each death is one warning with its cause."""
    if fate.startswith(b"it"):
        monkeypatch.setattr(child_processes, "END_SECONDS", 0.05)
    made = children(handle=f"if value == b'v': {handle}")
    assert ask(made) == ("died", fate)
    first, second = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "retried: 1, failed: 0" in first and "retried: 0, failed: 1" in second and fate.decode() in first
    assert not pids(made) and ask(made, b"other") == ("text", b"other")


# ---- wrong responses -------------------------------------------------------------------------------------------------

GARBAGE = {
    "empty": ("bytes(8)", b"malformed"),
    "one byte": ("(1).to_bytes(8, 'little') + b'x'", b"malformed"),
    "no end of the status": ("(5).to_bytes(8, 'little') + b'\\1text'", b"malformed"),
    "long status": ("frame(b'x' * 100)", b"malformed"),
    "no status": ("frame(b'', b'x')", b"malformed"),
    "status of other bytes": ("frame(b'\\xff\\xfe', b'x')", b"malformed"),
    "more than a response": ("frame(b'text', b'x') * 2", b"malformed"),
    "text": ("b'Traceback (most recent call last):\\n'", b"longer than allowed"),
    "too long": ("frame(b'text', b'x' * (2 << 20))", b"longer than allowed"),
    "too long, only its length": ("(1 << 62).to_bytes(8, 'little')", b"longer than allowed"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", GARBAGE)
def test_wrong_response(children: Any, kind: str) -> None:
    """A malformed response counts as a death: its child is killed, and another child gets the request."""
    data, message = GARBAGE[kind]
    made = children(handle=f"if value == b'lie' or first(): os.write(0, {data}); time.sleep(60)")
    assert ask(made) == ("text", b"v")
    status, detail = ask(made, b"lie")
    assert status == "died" and message in detail and not pids(made)


def test_half_a_response_and_silence(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits of elapsed time apply: that of the request, else that for a child that does not run."""
    made = children(handle="if value == b'v': os.write(0, frame(b'text', b'abc')[:12]); time.sleep(60)")
    ask(made, b"other")
    with pytest.raises(Timeout, match="Raise `timeout`"):
        ask(made, deadline=time.monotonic() + 0.05)
    assert not pids(made)
    monkeypatch.setattr(child_processes, "GRACE_SECONDS", 0.05)
    assert ask(made, seconds=0.01) == ("silent", b"") and not pids(made)


def test_stopped_child(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request waits for a stopped child until its deadline. Without a deadline, another child responds."""
    made = children(handle="if first(): kill(signal.SIGSTOP)")
    made.start()
    before, take = pids(made), made._take

    def taken(*args: Any) -> Any:
        monkeypatch.setattr(child_processes, "GRACE_SECONDS", 0.1 if pids(made) == before else 60.0)
        return take(*args)

    made._take = taken  # type: ignore[method-assign]
    assert ask(made, seconds=0.01) == ("text", b"v") and not alive(before[0])
    (pid,) = pids(made)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(Timeout):
        ask(made, deadline=time.monotonic() + 0.05)
    assert not alive(pid) and ask(made) == ("text", b"v")


# ---- limits ----------------------------------------------------------------------------------------------------------

def test_limits(children: Any) -> None:
    """CPU time of loading and of handling, memory, and the length of the response; one request that exceeds a limit is
    not tried again, and the next one succeeds."""
    made = children(load=f"if text == 'endless':\n        {ENDLESS}",
                    handle=f"if value == b'endless':\n        {ENDLESS}\n"
                    "    if value == b'memory': bytes(1 << 30)\n    if value == b'long': value = b'x' * (2 << 20)")
    source = Source("")
    assert ask(made, b"endless", source, seconds=0.05) == ("time", b"0.05")
    assert ask(made, b"v", Source("endless"), loading=0.05)[0] == "time"
    assert ask(made, b"memory", source) == ("memory", b"") and not pids(made)
    assert ask(made, b"long", source)[0] == "died"
    assert ask(made, b"v", source, seconds=0.05) == ("text", b"v")


def test_deadline_during_the_start_keeps_the_child(children: Any, tmp_path: Path) -> None:
    made = children(start=f"until({str(tmp_path / 'gate')!r})")
    with pytest.raises(Timeout):
        ask(made, deadline=time.monotonic() + 0.001)
    (pid,) = pids(made)
    (tmp_path / "gate").touch()
    assert ask(made) == ("text", b"v") and pids(made) == [pid]


def test_inherited_by_a_child(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPOOL_SECRET", "secret")
    made = children()
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        ask(made)
    (pid,) = pids(made)
    links = {int(fd): os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    assert links.pop(0).startswith("socket:") and {links.pop(1), links.pop(2)} == {"/dev/null"}
    assert set(links.values()) <= {f"/proc/{pid}/statm"}
    assert b"secret" not in Path(f"/proc/{pid}/environ").read_bytes()
    assert os.readlink(f"/proc/{pid}/cwd") == "/"
    assert os.getsid(pid) != os.getsid(0)  # Ctrl-C in a terminal does not reach it
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    allowed = {line[:26].strip(): line[26:].split()[:2] for line in lines}
    assert allowed["Max open files"] == ["1", "1"] and allowed["Max core file size"] == ["0", "0"]
    assert allowed["Max processes"] == ["0", "0"] and allowed["Max file size"] == ["0", "0"]


def test_child_that_uses_much_memory_ends_after_its_response(children: Any) -> None:
    made = children(start="kept = []", handle="kept.append(b'x' * (10 << 20))", worn=5 << 20)
    assert ask(made) == ("text", b"v") and not pids(made)


# ---- start -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("start", "message"), [
    ("raise SystemExit(7)", "the process to test ended while it started: exit status 7"),
    ("kill()", "ended while it started: signal 9"), ("import jinja2", "ended while it started: exit status 1"),
    ("os.write(0, frame(b'hello'))", "ended while it started: (it did not report|its response is malformed)"),
    ("os.write(0, b'x' * 100)", "ended while it started: its response is longer")])
def test_program_that_does_not_start(children: Any, start: str, message: str) -> None:
    made = children(start=start)
    with pytest.raises(SpawnFailed, match=message):
        ask(made)
    assert not pids(made)


def test_program_that_never_starts(children: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = children(start=f"until({str(tmp_path / 'gate')!r})")
    with pytest.raises(Timeout):
        ask(made, deadline=time.monotonic() + 0.05)
    assert len(pids(made)) == 1  # it may become ready
    monkeypatch.setattr(child_processes, "START_SECONDS", 0.1)
    with pytest.raises(SpawnFailed, match="was not ready after"):
        ask(made)
    assert not pids(made)
    monkeypatch.setattr(child_processes, "START_SECONDS", 30.0)
    (tmp_path / "gate").touch()
    assert ask(made) == ("text", b"v")


def test_no_process_and_no_descriptor(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the failures uses up a place or a descriptor."""
    made = children()
    for module, name, code, limits in ((subprocess, "Popen", errno.EAGAIN, {"-u", "-v"}),
                                       (socket, "socketpair", errno.EMFILE, {"-n"})):
        def refused(*args: Any, **options: Any) -> Any:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(module, name, refused)
            files = len(os.listdir("/proc/self/fd"))
            made.start()  # silent: the error appears when a child is needed
            for _ in range(3):
                with pytest.raises(SpawnFailed, match="no process could be started.*" + os.strerror(code)) as caught:
                    ask(made)
                assert set(re.findall(r"ulimit (-.)", caught.value.hint or "")) == limits
            assert len(os.listdir("/proc/self/fd")) == files
    assert ask(made) == ("text", b"v")


def test_application_is_not_started_as_a_child(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    python = multiprocessing.spawn.get_executable()
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    multiprocessing.set_executable("/usr/bin/uwsgi")
    try:
        with pytest.raises(SpawnFailed, match="does not look like a Python"):
            ask(children())
    finally:
        multiprocessing.set_executable(python)


# ---- threads ---------------------------------------------------------------------------------------------------------

def test_two_threads_use_two_children_at_once(children: Any, tmp_path: Path) -> None:
    """Each waits for the other one; with one child at most, one after the other."""
    meet = "os.mkdir(value); until(value[:-1] + bytes([97 + 98 - value[-1]]))"
    made = children(handle=meet, most=2)
    names = [os.fsencode(tmp_path / "meet_") + end for end in (b"a", b"b")]
    for work in [Thread(ask, made, name) for name in names]:
        assert work.ended().result is not None
    assert len(pids(made)) == 2


def test_threads_share_one_child(children: Any) -> None:
    made = children()
    threads = [Thread(lambda at=at: [ask(made, b"%d %d" % (at, i)) for i in range(40)]) for at in range(8)]
    for at, thread in enumerate(threads):
        assert thread.ended().result == [("text", b"%d %d" % (at, i)) for i in range(40)]
    assert len(pids(made)) == 1


def test_wait_for_a_child_ends_with_the_deadline(children: Any, tmp_path: Path) -> None:
    made = children(handle="if value != b'v': until(value)")
    work = Thread(ask, made, os.fsencode(tmp_path / "gate"))
    until(lambda: made._all and not made._idle)
    with pytest.raises(Timeout):
        ask(made, deadline=time.monotonic() + 0.05)
    (tmp_path / "gate").touch()
    assert work.ended().result is not None and ask(made) == ("text", b"v")


# ---- ends ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("idle", [0.05, 600.0])
def test_idle_and_dead_children_leave_no_zombie(children: Any, idle: float) -> None:
    made = children(idle=600.0)
    ask(made)
    (pid,) = pids(made)
    made.program = made.program._replace(idle=idle)  # not told to the child, which would end by itself
    if idle > 1:
        os.kill(pid, signal.SIGKILL)
    until(lambda: not made._all and pid not in states())
    assert ask(made) == ("text", b"v")


def test_children_end_with_their_object(children: Any, tmp_path: Path) -> None:
    made = Children(children(most=2).program)
    ask(made)
    process = made._all[0].process
    assert forked(made.__del__)
    assert process.poll() is None and ask(made) == ("text", b"v")
    del made
    gc.collect()
    until(lambda: process.poll() is not None)


# ---- forks -----------------------------------------------------------------------------------------------------------

def test_fork_during_a_call(children: Any, tmp_path: Path) -> None:
    """The forked process has children of its own, and the call of its parent goes on."""
    made = children(handle="if value != b'v': until(value)", most=2)
    ask(made)
    work = Thread(ask, made, os.fsencode(tmp_path / "gate"))
    until(lambda: not made._idle)
    before = pids(made)

    def call() -> bool:
        fine = not pids(made) and ask(made) == ("text", b"v") and pids(made) != before
        made.__del__()
        return fine

    with made._changed:  # as if another thread held it
        assert forked(call)
    (tmp_path / "gate").touch()
    assert work.ended().result is not None and pids(made) == before


def test_fork_during_a_start(children: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork waits until the child has started. Otherwise the forked process would hold the child's end of the
    connection open, and the parent would not notice the child's death."""
    pair, forked = socket.socketpair, []

    def slow() -> Any:
        made = pair()
        forked.append(Thread(fork))
        time.sleep(0.1)
        return made

    def fork() -> int:
        child = os.fork()
        if not child:
            time.sleep(600)
            os._exit(0)
        return child

    monkeypatch.setattr(socket, "socketpair", slow)
    made = children(handle="if first(): kill()")
    try:
        assert Thread(ask, made).ended().result == ("text", b"v")
    finally:
        for thread in forked:
            os.kill(thread.ended().result, signal.SIGKILL)
            os.waitpid(thread.result, 0)


# ---- scripts ---------------------------------------------------------------------------------------------------------

HEAD = f"import sys\nsys.path.append({str(Path(__file__).resolve().parents[1] / 'helpers')!r})\n"
START = """
import os, signal, socket, sys, threading, time
from pathlib import Path
from mpool.host import child_processes
from childprograms import LIMITS, pids, program
made = child_processes.Children(program(Path({folder!r}), handle="if value == b'endless':\\n        while True: pass"))
def ask(value=b"v"): return made.run((value,), LIMITS._replace(seconds=600.0))
"""


def run(code: str, folder: Path, status: int = 0, script: bool = False, **options: Any) -> str:
    """Run a script and return its output. Fails if it writes to standard error."""
    code = HEAD + START.format(folder=str(folder)) + code
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", *(["-"] if script else ["-c", code])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, **{"cwd": "/"} | options,
                          **{"input": code} if script else {})
    assert done.returncode == status and not done.stderr, (done.returncode, done.stdout, done.stderr)
    return done.stdout


@pytest.mark.parametrize(("end", "seconds"), [
    ("", 600.0), ("sys.exit(0)", 600.0), ("os._exit(0)", 0.2), ("os.kill(os.getpid(), 9)", 0.2)])
def test_exit_during_a_call(tmp_path: Path, end: str, seconds: float) -> None:
    """The exit waits for no call and kills the child. If it cannot, the child ends at its limit of CPU time."""
    code = f"""
ask()
threading.Thread(target=made.run, args=((b"endless",), LIMITS._replace(seconds={seconds})), daemon=True).start()
while made._idle: time.sleep(0.001)
print(*pids(made), flush=True)
{end}
"""
    pid = run(code, tmp_path, -9 if "kill" in end else 0)  # the call may take 600 s, the script 60 s
    until(lambda: not alive(int(pid)))


def test_call_during_the_exit(tmp_path: Path) -> None:
    """A call after the exit began is refused, and the exit does not wait for a start in progress."""
    code = """
import atexit
from mpool.errors import ShuttingDown
def late():
    made.__del__()
    made.renew()
    try: ask()
    except ShuttingDown: print("refused", flush=True)
atexit.unregister(child_processes._at_exit)
atexit.register(late)
atexit.register(child_processes._at_exit)
ask()
"""
    assert run(code, tmp_path) == "refused\n"


@pytest.mark.parametrize("closed", [(0,), (1,), (0, 1, 2), (2,)], ids=str)
def test_closed_standard_streams(closed: tuple[int, ...], tmp_path: Path) -> None:
    """Text that the program prints does not reach a child."""
    code = (f"for fd in {closed}: os.close(fd)\n"
            "assert ask() == ('text', b'v')\n"
            "assert min(one.socket.fileno() for one in made._all) > 2\n"
            f"for fd in {closed}:\n"
            "    try: os.write(fd, b'x' * 100)\n    except OSError: pass\n"
            "assert ask() == ('text', b'v')\n"
            f"open({str(tmp_path / 'fine')!r}, 'w').close(); os._exit(0)\n")
    run(code, tmp_path, stdin=subprocess.DEVNULL)
    assert (tmp_path / "fine").exists()


def test_limit_of_time_survives_the_signals_of_the_parent(tmp_path: Path) -> None:
    """Blocked and ignored signals pass to child processes; with SIGCHLD ignored, exit codes are lost."""
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF, signal.SIGTERM])
signal.signal(signal.SIGPROF, signal.SIG_IGN); signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print(made.run((b"endless",), LIMITS._replace(seconds=0.1)), ask())
"""
    assert run(code, tmp_path) == "('time', b'0.1') ('text', b'v')\n"


def test_interrupt_ends_a_call(tmp_path: Path) -> None:
    """Ctrl-C raises KeyboardInterrupt at once, and the child is not used again."""
    code = """
ask()
before = pids(made)
signal.signal(signal.SIGINT, signal.default_int_handler)
def interrupt():
    while made._idle: time.sleep(0.001)
    time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt, daemon=True).start()
try: ask(b"endless")
except KeyboardInterrupt: print("interrupted")
print(ask(), pids(made) != before)
"""
    assert run(code, tmp_path) == "interrupted\n('text', b'v') True\n"


def test_script_on_standard_input(tmp_path: Path) -> None:
    """There is no main module that could be imported again, as in a notebook."""
    assert run("print(ask())", tmp_path, script=True) == "('text', b'v')\n"


def test_multiprocessing(tmp_path: Path) -> None:
    """A forked process has a child of its own, which its parent's exit handlers do not know; so has a spawned one."""
    path = tmp_path / "work.py"
    path.write_text(HEAD + START.format(folder=str(tmp_path)) + """
if __name__ == "__main__":
    import multiprocessing
    print(ask())
    before = pids(made)
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, pool.apply(ask))
    assert ask() == ("text", b"v") and pids(made) == before
""")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60, cwd="/")
    wanted = [f"{method}('text', b'v')" for method in ("", "fork ", "spawn ", "forkserver ")]
    assert done.stdout.splitlines() == wanted and not done.stderr, done
