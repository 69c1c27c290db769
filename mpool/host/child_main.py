"""Main program of a child process of :mod:`mpool.host.child_processes`.

It runs as a script, outside the package. Descriptor 0 is one end of a socket pair, from which it reads requests and to
which it writes responses, each with its length before it. Arguments: the file of the program, milliseconds without work
after which the process ends, growth in resident bytes with which it ends, and folders of packages.

The program defines two functions. ``load(text, *request)`` returns an object that stands for a source, or a status and
a detail (bytes) if the text is refused. ``handle(loaded, *request)`` returns a status and data (bytes).

Programs run untrusted work. Work that exceeds a limit ends this process or is reported as an error. No limit relies on
the cooperation of the untrusted code. After the start, the process can neither open files nor start processes.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any

_SOCKET = 0


def _read(size: int) -> bytearray | None:
    """Read ``size`` bytes; None if the parent closed its end."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.readv(_SOCKET, [view])
        if not count:
            return None
        view = view[count:]
    return data


def _requests(idle: int) -> Iterator[tuple[Any, ...]]:
    """Yield the requests of the parent, until it closes its end or sends none for ``idle`` milliseconds."""
    poll = select.poll()
    poll.register(_SOCKET, select.POLLIN)
    while poll.poll(idle):
        head = _read(8)
        body = None if head is None else _read(int.from_bytes(head, "little"))
        if body is None:
            return
        yield marshal.loads(body)


def _send(status: str, data: bytes, last: bool = False, loaded: bool = False) -> None:
    body = b"%c%s\0%s" % (last + 2 * loaded, status.encode(), data)
    view = memoryview(len(body).to_bytes(8, "little") + body)
    while view:
        view = view[os.write(_SOCKET, view):]


def _memory(file: int) -> tuple[int, int]:
    """Return the bytes of the address space, and the resident bytes. The maximum that getrusage returns includes the
    parent's memory at the time of the fork."""
    if file < 0:
        return 0, 0
    mapped, resident = os.pread(file, 64, 0).split()[:2]
    return int(mapped) * resource.getpagesize(), int(resident) * resource.getpagesize()


def _limit(what: int, value: int) -> None:
    """Lower both limits of a resource; a limit that is lower already stays."""
    hard = resource.getrlimit(what)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (value, value))


def main(path: str, idle: str, worn: str, *folders: str) -> None:
    """Handle requests until the parent closes its end."""
    sys.path += folders
    # signal masks and ignored signals pass to child processes; a blocked SIGPROF would disable the time limit
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGPROF, signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    _limit(resource.RLIMIT_CORE, 0)
    names: dict[str, Any] = {"__name__": "program", "__file__": path}
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec", dont_inherit=True), names)
    load, handle = names["load"], names["handle"]
    kept: dict[bytes | None, Any] = {}
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    try:
        status_file = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # not Linux: RLIMIT_AS would count the libraries that all processes share
        status_file = -1
    mapped, resident = _memory(status_file)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    _limit(resource.RLIMIT_NOFILE, 1)  # no further descriptor beyond 0
    _send("ready", b"")
    for digest, text, evicted, (seconds, loading, max_bytes), request in _requests(int(idle)):
        if status_file >= 0:
            limit = mapped + max_bytes
            limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        try:
            found = None
            if text is not None:
                kept.pop(evicted, None)
                # The default action of SIGPROF ends the process, whatever it runs.
                signal.setitimer(signal.ITIMER_PROF, loading)
                made = load(text, *request)
                if isinstance(made, tuple):
                    found = made
                else:
                    kept[digest] = made
            if found is None:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                found = handle(kept.get(digest), *request)
        except MemoryError:
            found = "memory", b""
        if status_file >= 0:
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        signal.setitimer(signal.ITIMER_PROF, 0)
        last = found[0] == "memory" or _memory(status_file)[1] > resident + int(worn)
        _send(found[0], found[1], last, digest in kept)
        if last:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
