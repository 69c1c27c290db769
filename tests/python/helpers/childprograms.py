"""Programs of child processes, written by tests."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpool.host.child_processes import Children, Limits, Program

LIMITS = Limits(seconds=20.0, loading=20.0, memory=256 << 20, response=1 << 20)

_CODE = """
import os, signal, time

def kill(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)

def frame(status, data=b"", flags=0):
    body = bytes([flags]) + status + b"\\0" + data
    return len(body).to_bytes(8, "little") + body

def first(path={first!r}):
    # True in one process only. No file can be opened, but a file can be removed.
    try:
        os.unlink(path)
        return True
    except FileNotFoundError:
        return False

def until(path):
    while not os.path.exists(path):
        time.sleep(0.002)

{start}

def load(text, *request):
    {load}
    return text

def handle(loaded, value=b""):
    {handle}
    return "text", (loaded or "").encode() + value
"""


def program(folder: Path, start: str = "", load: str = "pass", handle: str = "pass", **options: Any) -> Program:
    """Write a program that responds with its source and the value of the request, after these statements.

    ``first()`` in them is true once, ``frame()`` returns a response, ``kill()`` kills the process.
    """
    path, once = folder / "program.py", folder / "first"
    once.touch()
    path.write_text(_CODE.format(start=start, load=load, handle=handle, first=str(once)))
    return Program(**{"file": str(path), "packages": (), "what": "test", "most": 1} | options)  # type: ignore[arg-type]


def pids(children: Children) -> list[int]:
    """Return the process ids of the children."""
    return [child.process.pid for child in children._all]


def end(children: Children) -> None:
    """End all children. Those that do not end in time are reaped later."""
    for child in list(children._all):  # the tidying thread removes those that ended
        child.end()
    children._all.clear()
    children._idle.clear()


def states(parent: int | None = None) -> dict[int, str]:
    """Return the state of each child process of a process by its process id; "Z" is a zombie."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == (parent or os.getpid()):
            found[int(entry)] = fields[0]
    return found


def alive(pid: int) -> bool:
    """Return True if a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def forked(function: Callable[[], object]) -> bool:
    """Return True if a function returns True or None in a forked process."""
    child = os.fork()
    if not child:
        try:
            os._exit(0 if function() in (True, None) else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
