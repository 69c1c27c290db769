"""Child processes with limits of time and memory that leave no process behind."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GIB = 1 << 30
UNLIMITED = resource.RLIM_INFINITY
_running: set[int] = set()
_lock = threading.Lock()


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    output: str
    """Standard output and standard error, the last 20,000 characters."""
    late: bool
    """It was killed at its limit of wall time."""


def descendants(root: int) -> list[int]:
    """Return the processes below ``root``, and those of its session."""
    parents: dict[int, int] = {}
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry)] = int(fields[1])
            if int(fields[3]) == root and int(entry) != root:
                found.append(int(entry))
    below = {root}
    grew = True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in below} - below
        grew = bool(more)
        below |= more
    return sorted((below | set(found)) - {root})


def end(pid: int) -> None:
    """Kill a process and everything that it started."""
    for other in (pid, *descendants(pid)):
        try:
            os.kill(other, signal.SIGKILL)
        except ProcessLookupError:
            pass


def end_all() -> None:
    """Kill every process that :func:`run` is waiting for; its callers see a failed process."""
    with _lock:
        pids = list(_running)
    for pid in pids:
        end(pid)


def run(command: Sequence[str | Path], cwd: Path, env: Mapping[str, str], wall: float, cpu: float,
        memory: int = 12 * GIB) -> Ended:
    """Run a command in a session of its own.

    Args:
        command: program and arguments.
        cwd: working directory.
        env: the whole environment.
        wall: seconds after which it is killed with its children.
        cpu: seconds of CPU time of each of its processes, after which the kernel kills that process.
        memory: bytes of address space of each of its processes; UNLIMITED for sanitizers, which reserve terabytes.
    """
    child = subprocess.Popen([str(word) for word in command], cwd=cwd, env=dict(env), stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    with _lock:
        _running.add(child.pid)
    try:
        seconds = max(1, round(cpu + 0.5))
        resource.prlimit(child.pid, resource.RLIMIT_CPU, (seconds, seconds + 1))
        resource.prlimit(child.pid, resource.RLIMIT_AS, (memory, memory))
        resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, 0))
    except ProcessLookupError:
        pass
    late = False
    try:
        output, _ = child.communicate(timeout=wall)
    except subprocess.TimeoutExpired:
        late = True
        end(child.pid)
        output = _drain(child)
    except BaseException:
        end(child.pid)
        raise
    finally:
        with _lock:
            _running.discard(child.pid)
        for pid in descendants(child.pid):  # processes of its session that outlived it
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    return Ended(child.returncode, output.decode(errors="replace")[-20000:], late)


def _drain(child: subprocess.Popen[bytes]) -> bytes:
    """Return what a killed process has printed. A process that left the session may keep the pipe open."""
    try:
        return child.communicate(timeout=5)[0]
    except subprocess.TimeoutExpired:
        if child.stdout:
            child.stdout.close()
        child.wait()
        return b""
