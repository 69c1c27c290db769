"""A wait for an idle pool."""

from __future__ import annotations

import time

import mpool


def idle(pool: mpool.Pool) -> None:
    """Wait until a pool has no running and no queued request; fail after 5 s."""
    for _ in range(500):
        if not any(row.running or row.queued for row in pool.ps()):
            return
        time.sleep(0.01)
    raise AssertionError(f"requests still run:\n{pool.ps()}")
