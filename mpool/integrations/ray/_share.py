"""Ray as mpool starts it, and what a pool on a machine with other pools may take: its CPUs, their share of memory."""

from __future__ import annotations

import os

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # before Ray looks: what mpool starts tells nobody

import ray  # noqa: E402

from ...config import PoolConfig  # noqa: E402
from ...pool import Pool  # noqa: E402

#: Bytes of Ray's store for objects, where mpool starts Ray: bodies of requests go through it, and names of files.
_STORE = 256 << 20


def connect(address: str | None) -> None:
    """Joins the cluster at an address; None: starts Ray here, for as long as this process lives."""
    if address is not None:
        ray.init(address=address, log_to_driver=False, logging_level="WARNING")
    else:
        ray.init(include_dashboard=False, object_store_memory=_STORE, log_to_driver=False, logging_level="WARNING")


def config(cpus: int, memory_mb: int, offline: bool | None, grace: float = 5.0) -> PoolConfig:
    """Limits of a pool inside an actor of Ray.

    Args:
        cpus: of the actor; so many threads compute.
        memory_mb: for models, caches and queues, in megabytes; 0: of what one pool would take on this machine, the
            part that ``cpus`` are of the CPUs that Ray has here. Actors with other pools cannot take more together,
            for Ray places no more of them than there are CPUs.
        offline: see :class:`mpool.PoolConfig`.
        grace: seconds that calls in flight get when the pool is closed.
    """
    limit = memory_mb << 20 if memory_mb else _limit() * cpus // max(_cpus_here(), cpus)
    return PoolConfig(threads=cpus, memory_bytes=limit, offline=offline, shutdown_grace=grace)


def _limit() -> int:
    with Pool() as pool:
        pool.registry  # noqa: B018 - makes it: it knows the limit
        return pool.health().memory.limit


def _cpus_here() -> int:
    here = ray.get_runtime_context().get_node_id()
    return int(next((node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == here), 1))


__all__ = ["config", "connect"]
