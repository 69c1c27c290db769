"""What a process has that measures one engine: a task as JSON on standard input, its result as the last line; mpool."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any


def answer(parts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]], by: str = "what") -> None:
    """Does the task that is asked for, by the part that its key ``by`` names, and ends the process."""
    asked = json.loads(sys.stdin.read())
    found = parts[asked[by]](asked)
    sys.stdout.flush()
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # what libraries do on their way out is nobody's measure, and may hang


def rss() -> float:
    """Most memory that this process held, in units of 10**6 bytes; 0 where the system does not tell."""
    try:  # getrusage would tell of the process that started this one, too
        with open("/proc/self/status") as status:
            return next((int(line.split()[1]) * 1024 / 1e6 for line in status if line.startswith("VmHWM")), 0.0)
    except OSError:
        return 0.0


class Mpool:
    """mpool, with a model of a folder. The variant is a class of arithmetic."""

    def __init__(self, variant: str) -> None:
        self.compute = variant or "auto"

    def load(self, folder: str, threads: int, **config: Any) -> None:
        """In a pool with so many threads."""
        import mpool

        self.pool, self.folder = mpool.Pool(mpool.PoolConfig(threads=threads, **config)), folder
