"""Routing of requests to replicas, and the number of replicas.

Ray copies this module to its controller, so it imports only Ray. Replicas report once a second
(:meth:`mpool.integrations.ray.pools.Pools.record_routing_stats`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import RequestRouter

#: Queued and running requests in a replica's pool, from which on another replica helps.
CALLS = 8.0
#: Name under which replicas report this number.
DEPTH = "mpool_calls"


def ranks(replicas: Iterable[Any], model: str, calls: float = CALLS) -> list[list[Any]]:
    """Rank the replicas for a request: first those with fewer than ``calls`` requests that have the model loaded or
    loading, then all.

    Args:
        replicas: each with ``routing_stats``.
        model: the name in the request; "": none.
        calls: requests in a replica's pool, from which on other replicas are used too.

    Returns:
        two lists of up to two replicas, chosen at random. Ray takes the replica with fewer requests in flight, from the
        second list if those of the first accept no more.
    """
    every = list(replicas)
    warm = [replica for replica in every if model and model in replica.routing_stats.get("models", ())
            and replica.routing_stats.get("calls", 0) < calls]
    return [random.sample(some, min(2, len(some))) for some in (warm, every) if some]


class WarmRouter(RequestRouter):
    """Ray's choice of the less loaded of two replicas, among those that have the model loaded."""

    calls = CALLS

    def initialize_state(self, calls: float = CALLS) -> None:
        """``request_router_kwargs``: see :func:`ranks`."""
        self.calls = calls

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """See :func:`ranks`."""
        model = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        return ranks(candidate_replicas, model, self.calls)


class CallsPolicy:
    """Autoscaling policy: the requests in all pools, divided by the target for one. Ray applies bounds and delays.

    Args:
        calls: target number of requests per replica.
    """

    def __init__(self, calls: float = CALLS) -> None:
        self.calls = calls

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas and no state. ``context`` is an ``AutoscalingContext`` of Ray Serve."""
        depths = (context.aggregated_metrics or {}).get(DEPTH, {})
        if len(depths) < context.current_num_replicas:
            return context.target_num_replicas, {}  # a new replica has not reported yet
        return max(1, math.ceil(sum(depths.values()) / self.calls)), {}


__all__ = ["CALLS", "DEPTH", "CallsPolicy", "WarmRouter", "ranks"]
