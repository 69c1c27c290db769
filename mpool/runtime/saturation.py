"""The numbers of compute threads that saturate the memory of this machine, kept in a file between processes.

The core measures them while language models decode (csrc/models/threads.h). They only tell a new model with how many
threads to begin. A file that is missing, malformed or out of date costs a second, and none of its errors reaches a
caller.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

from .. import _core
from ..errors import MpoolError
from ..models import store
from ..records import logger

log = logger("mpool.runtime")

#: Keys of the file: rows per pass of each class.
ROWS = ("1", "2-3", "4-7")

_known: tuple[int, ...] | None = None  # the numbers that this process read or wrote last


def _machine() -> dict[str, Any]:
    """Return what the numbers depend on: CPU, cores that this process may use, and compute threads."""
    found = _core.machine()
    cores = [[group["cores"], group["cpus"], round(group["speed"], 2)] for group in found["cores"]["classes"]]
    return {"cpu": found["cpu_name"], "cores": cores, "threads": found["compute_threads"]}


def _path(machine: dict[str, Any]) -> str:
    """Return the path of a machine's file: a home folder may be shared by several machines."""
    return os.path.join(store.cache_dir(), "threads", hashlib.sha256(repr(machine).encode()).hexdigest()[:16] + ".json")


def _read() -> tuple[int, ...]:
    machine = _machine()
    found, most = store.read_json(_path(machine)) or {}, sum(cpus for _, cpus, _ in machine["cores"])
    numbers = (found.get(rows) for rows in ROWS)
    return tuple(number if type(number) is int and 0 < number <= most else 0 for number in numbers)


def recall() -> None:
    """Tell the core what earlier processes measured. Only the first call of a process has an effect. Thread-safe."""
    global _known
    if _known is not None:
        return
    _known = (0,) * len(ROWS)
    try:
        _known = _read()
    except (MpoolError, OSError) as error:
        log.debug("cannot read the numbers of threads of earlier processes: %s", error)
        return
    _core.set_learned_threads(_known)


def remember() -> None:
    """Write what this process measured, if that differs from what it read. Called when the process ends."""
    global _known
    measured = _core.learned_threads()
    if measured == (_known or (0,) * len(ROWS)):
        return
    try:
        machine = _machine()
        store.write_json(_path(machine), {**machine, **{rows: n for rows, n in zip(ROWS, measured) if n}})
    except (MpoolError, OSError) as error:
        log.debug("cannot write the measured numbers of threads: %s", error)
        return
    _known = measured


def shown() -> dict[str, dict[str, Any]]:
    """Return the numbers by rows per pass, with their origin, ``"measured"`` or ``"file"``, for ``show_config``."""
    recall()
    return {rows: {"threads": number, "from": "file" if number == old else "measured"}
            for rows, number, old in zip(ROWS, _core.learned_threads(), _known or ()) if number}
