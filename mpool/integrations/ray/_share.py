"""Connection to Ray, and the CPU and memory limits of pools that share a machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray is imported

import ray  # noqa: E402

from ...config import PoolConfig, same_queue_capacities  # noqa: E402
from ...pool import Pool  # noqa: E402

#: Bytes of Ray's object store when mpool starts Ray. The store has only request bodies and file names.
_STORE = 256 << 20


def connect(address: str | None) -> None:
    """Connect to the cluster at an address; None: start Ray on this machine until this process ends."""
    if address is not None:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    else:
        ray.init(include_dashboard=False, object_store_memory=_STORE, log_to_driver=False, logging_level="WARNING")


def config(cpus: int, memory_mb: int, offline: bool | None, grace: float = 5.0,
           weights: str = "auto", keep_alive: str = "5m", kv_dtype: str = "auto",
           queue_capacity: int | None = None, pool: Mapping[str, Any] = {}) -> PoolConfig:
    """Return the configuration of a pool in a Ray actor.

    Args:
        cpus: number of CPUs of the actor, and of compute threads of its pool.
        memory_mb: memory for models, caches and queues in MiB; 0: the default memory of one pool, divided in
            proportion to ``cpus`` and Ray's CPUs on this machine. All actors together then stay within the default,
            because Ray places no more actors than there are CPUs.
        offline: see :class:`mpool.PoolConfig`.
        grace: seconds that running requests have to complete when the pool is closed.
        weights, keep_alive, kv_dtype: see :class:`mpool.PoolConfig`.
        queue_capacity: maximum queued requests per model, for every capability; None: the defaults.
        pool: further fields of :class:`mpool.PoolConfig`.
    """
    limit = memory_mb << 20 if memory_mb else _limit() * cpus // max(_cpus_here(), cpus)
    return PoolConfig(threads=cpus, memory_bytes=limit, offline=offline, shutdown_grace=grace, weights=weights,
                      keep_alive=keep_alive, kv_dtype=kv_dtype, **{**same_queue_capacities(queue_capacity), **pool})


def _limit() -> int:
    with Pool() as pool:
        pool.registry  # noqa: B018 - creates the registry, which has the limit
        return pool.health().memory.limit


def _cpus_here() -> int:
    here = ray.get_runtime_context().get_node_id()
    return int(next((node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == here), 1))


__all__ = ["config", "connect"]
