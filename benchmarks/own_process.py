"""Helpers for a process that measures one engine: read a task as JSON from standard input, print its result as the last
line.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def run_task(parts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]], by: str = "what") -> None:
    """Run the function in ``parts`` that the task's key ``by`` names, print its result, and end the process."""
    task = json.loads(sys.stdin.read())
    found = parts[task[by]](task)
    sys.stdout.flush()
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # skip the libraries' exit handlers: they are not measured, and may hang


def rss() -> float:
    """Return the peak resident memory of this process in units of 10**6 bytes; 0 if the system does not report it."""
    try:  # getrusage would include the memory of the parent process before exec
        with open("/proc/self/status") as status:
            return next((int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmHWM")), 0.0)
    except OSError:
        return 0.0


class Mpool:
    """mpool with a model from a folder. The variant is a compute type."""

    def __init__(self, variant: str) -> None:
        self.compute = variant or "auto"

    def load(self, folder: str, threads: int, **config: Any) -> None:
        """Open a pool with ``threads`` compute threads."""
        import mpool

        self.pool, self.folder = mpool.Pool(mpool.PoolConfig(threads=threads, **config)), folder
