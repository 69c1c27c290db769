"""Rows of `Pool.ps` for tests."""

from typing import Any


def row(**changes: Any) -> dict[str, Any]:
    return {"key": "m", "capability": "text_embedding", "state": "ready", "workers": 1, "queued": 0, "running": 0,
            "busy": 0, "dead": 0, "breaker": "closed", "policy": "p2c", "keep_alive": 300.0, "last_error": "",
            "pinned": False, "model_bytes": 5_000_000, "engine_bytes": 0,
            "state_bytes": 0, "snapshot_bytes": 0, "snapshots": 0, "calls": 3, "errors": 1, "idle_seconds": 7.0,
            "facts": {"compute": "float32"}, "worker": [], **changes}
