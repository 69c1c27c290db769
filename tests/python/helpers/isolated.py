"""Pools with worker processes, and functions that list and signal these processes."""

import os
from pathlib import Path
from typing import Any

from pooloptions import wide as wide

import mpool

CALM: dict[str, Any] = dict(threads=1, max_workers_per_model=1, isolation="process", breaker_threshold=0)


def pool_of(**options: Any) -> mpool.Pool:
    return mpool.Pool(mpool.PoolConfig(**{**CALM, **options}))


def children() -> list[tuple[int, str]]:
    """Return the process id and state of each worker process of this process, including zombies."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text()
            except OSError:
                continue
            name, _, rest = stat.partition("(")[2].rpartition(")")
            if name == "mpool-worker" and int(rest.split()[1]) == os.getpid():
                found.append((int(entry), rest.split()[0]))
    return found


def processes(pool: mpool.Pool) -> tuple[int, ...]:
    return tuple(pid for row in pool.ps() for pid in row.processes)


def signal_all(pool: mpool.Pool, number: int) -> tuple[int, ...]:
    found = processes(pool)
    for pid in found:
        os.kill(pid, number)
    return found
