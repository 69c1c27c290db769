"""Selection of the replica for a request, and of the number of replicas.

Ray copies this module to its controller, so it imports only Ray. Replicas report once a second
(:meth:`mpool.integrations.ray.pools.Pools.record_routing_stats`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from ray.serve.request_router import RequestRouter

#: Queued and running requests in a replica's pool, from which on requests also go to other replicas.
CALLS = 8.0
#: Name of the metric with which replicas report their queued and running requests.
DEPTH = "mpool_calls"


def ranks(replicas: Iterable[Any], model: str, calls: float = CALLS) -> list[list[Any]]:
    """Select replicas for a request: first among those that have the model loaded or loading and fewer than ``calls``
    requests, then among all.

    Args:
        replicas: objects with ``routing_stats``, the value of ``Pools.record_routing_stats``.
        model: name of the model in the request; "": unknown.
        calls: requests in a replica's pool, from which on requests also go to other replicas.

    Returns:
        two lists of up to two random replicas each; empty lists are left out. Ray chooses the replica with fewer
        running requests from the first list, or from the second if no replica of the first list accepts the request.
    """
    every = list(replicas)
    warm = [replica for replica in every if model and model in replica.routing_stats.get("models", ())
            and replica.routing_stats.get("calls", 0) < calls]
    return [random.sample(group, min(2, len(group))) for group in (warm, every) if group]


class WarmRouter(RequestRouter):
    """Selects the less loaded of two random replicas (power of two choices), preferring replicas that have the model
    loaded."""

    calls = CALLS

    def initialize_state(self, calls: float = CALLS) -> None:
        """Initialise the router with ``request_router_kwargs``. For ``calls`` see :func:`ranks`."""
        self.calls = calls

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Select replicas with :func:`ranks`. Called by Ray Serve."""
        model = "" if pending_request is None else pending_request.metadata.multiplexed_model_id
        return ranks(candidate_replicas, model, self.calls)


class CallsPolicy:
    """Autoscaling policy: the number of requests in all pools, divided by the target per replica. Ray applies the
    bounds and delays.

    Args:
        calls: target number of requests per replica.
    """

    def __init__(self, calls: float = CALLS) -> None:
        self.calls = calls

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas and an empty state. ``context`` is an ``AutoscalingContext`` of Ray Serve."""
        depths = (context.aggregated_metrics or {}).get(DEPTH, {})
        if len(depths) < context.current_num_replicas:
            return context.target_num_replicas, {}  # a new replica has not reported yet
        return max(1, math.ceil(sum(depths.values()) / self.calls)), {}


__all__ = ["CALLS", "DEPTH", "CallsPolicy", "WarmRouter", "ranks"]
