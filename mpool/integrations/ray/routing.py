"""Which replica gets a request, and how many replicas there should be.

Ray sends this module to its controller as it is, so it needs nothing but Ray. Replicas report once a second
(:meth:`mpool.integrations.ray.pools.Pools.record_routing_stats`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import RequestRouter

#: Calls in a replica's pool, those that wait and those that run, at which another replica is worth having.
CALLS = 8.0
#: Name of the figure that replicas report for it.
DEPTH = "mpool_calls"


def ranks(replicas: Iterable[Any], model: str, calls: float = CALLS) -> list[list[Any]]:
    """Replicas for a request, best first: those where its model is loaded or loading and that have fewer than
    ``calls``, then all.

    Args:
        replicas: each with ``routing_stats``.
        model: the name in the request; "": it names none.
        calls: in a replica's pool, at which others are asked too.

    Returns:
        lists of up to two, drawn at random, of which the one with fewer requests under way is to be taken; the second
        list is for when those of the first can take no more.
    """
    every = list(replicas)
    warm = [replica for replica in every if model and model in replica.routing_stats.get("models", ())
            and replica.routing_stats.get("calls", 0) < calls]
    return [random.sample(some, min(2, len(some))) for some in (warm, every) if some]


class WarmRouter(RequestRouter):
    """Ray's way to choose the less loaded of two replicas, among those where the model is warm."""

    calls = CALLS

    def initialize_state(self, calls: float = CALLS) -> None:
        """``request_router_kwargs``: see :func:`ranks`."""
        self.calls = calls

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """See :func:`ranks`."""
        model = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        return ranks(candidate_replicas, model, self.calls)


class CallsPolicy:
    """How many replicas there should be: the calls in all pools over those that one is to have. Bounds and delays are
    Ray's.

    Args:
        calls: that one replica is to have.
    """

    def __init__(self, calls: float = CALLS) -> None:
        self.calls = calls

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """The number, and no state; ``context``: an ``AutoscalingContext`` of Ray Serve."""
        depths = (context.aggregated_metrics or {}).get(DEPTH, {})
        if len(depths) < context.current_num_replicas:
            return context.target_num_replicas, {}  # one that has not reported yet is about to
        return max(1, math.ceil(sum(depths.values()) / self.calls)), {}


__all__ = ["CALLS", "DEPTH", "CallsPolicy", "WarmRouter", "ranks"]
