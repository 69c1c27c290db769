"""Waiting until a pool is idle."""

from __future__ import annotations

import time

import mpool


def idle(pool: mpool.Pool) -> None:
    """Waits until nothing runs or waits in a pool; fails if that never comes."""
    for _ in range(500):
        if not any(row.running or row.queued for row in pool.ps()):
            return
        time.sleep(0.01)
    raise AssertionError(f"something still runs:\n{pool.ps()}")
