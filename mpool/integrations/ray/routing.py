"""Selection of the replica for a request, and of the number of replicas.

Ray copies this module to its controller, so it imports only Ray. Replicas report once a second
(:meth:`mpool.integrations.ray.pools.Pools.record_routing_stats`).
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable
from typing import Any

from ray.serve.request_router import RequestRouter

#: Number of queued and running requests in a replica's pool from which requests also go to other replicas.
CALLS = 8.0
#: Name of the metric with which replicas report their queued and running requests.
DEPTH = "mpool_calls"


#: Seconds after which a request that a replica has not accepted makes the replica a suspect. Less than
#: :attr:`mpool.integrations.ray.race.Limits.patience`, so that the next attempt goes to another replica.
PATIENCE = 0.75
#: Seconds for which a suspect gets no requests unless there is no other replica.
SUSPICION = 5.0
#: Number of replicas whose last accepted request is kept.
_MAX_REPLICAS = 1000
#: Keys of the scope of a request: the id of the attempt, and the ids of earlier attempts whose replica is silent.
ATTEMPT, SILENT = "mpool.attempt", "mpool.silent"


def ranks(replicas: Iterable[Any], model: str, calls: float = CALLS, suspects: Container[Any] = ()) -> list[list[Any]]:
    """Select replicas for a request: first among those that have the model loaded or loading and fewer than ``calls``
    requests, then among all. Suspects are left out unless there is no other replica: Ray would wait for a response from
    each one.

    Args:
        replicas: objects with ``replica_id`` and ``routing_stats``, the value of ``Pools.record_routing_stats``.
        model: name of the model in the request; "": unknown.
        calls: number of requests in a replica's pool from which requests also go to other replicas.
        suspects: ids of replicas that may be dead.

    Returns:
        two lists of up to two random replicas each; empty lists are left out.
    """
    every = list(replicas)
    every = [replica for replica in every if replica.replica_id not in suspects] or every
    warm = [replica for replica in every if model and model in replica.routing_stats.get("models", ())
            and replica.routing_stats.get("calls", 0) < calls]
    return [random.sample(group, min(2, len(group))) for group in (warm, every) if group]


class RequestTracker:
    """Requests that replicas have not accepted yet, requests that they work on, and failures. It tells which replicas
    may be dead.

    A replica is a *suspect* while it has accepted no request for more than :data:`PATIENCE` seconds after one was sent
    to it, and for :data:`SUSPICION` seconds after it failed. It stops being a suspect when it accepts a request.

    Ray calls the methods from several threads, so each change of a dictionary is a single operation.

    Args:
        clock: function that returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[str, tuple[Any, float]] = {}  # request: replica, time
        self._working: dict[str, tuple[Any, str]] = {}  # request: replica, attempt
        self._accepted: dict[Any, float] = {}  # replica: time
        self._failed: dict[Any, float] = {}  # replica: time

    def sent(self, request: str, replica: Any) -> None:
        """Record that a request is sent to a replica."""
        self._sent[request] = replica, self._clock()

    def accepted(self, request: str, replica: Any, attempt: str) -> None:
        """Record that a replica accepted a request."""
        if len(self._accepted) > _MAX_REPLICAS:
            self._accepted.clear()  # most of them ended long ago
        self._accepted[replica] = self._clock()
        self._failed.pop(replica, None)
        if self._sent.pop(request, None) is not None:  # otherwise the request has ended before this was reported
            self._working[request] = replica, attempt

    def completed(self, request: str) -> None:
        """Record that a request has ended, for any reason."""
        self._sent.pop(request, None)
        self._working.pop(request, None)

    def failed(self, replica: Any) -> None:
        """Record that a replica cannot be reached."""
        self._failed[replica] = self._clock()

    def silent(self, attempts: Container[str]) -> None:
        """Record that the replicas that accepted these attempts are silent."""
        for replica, attempt in list(self._working.values()):
            if attempt in attempts:
                self.failed(replica)

    def loads(self) -> Counter[Any]:
        """Return the number of requests that each replica works on."""
        return Counter(replica for replica, _ in list(self._working.values()))

    def suspects(self) -> set[Any]:
        """Return the replicas that may be dead."""
        now = self._clock()
        for replica, at in list(self._failed.items()):
            if now - at > SUSPICION:
                self._failed.pop(replica, None)
        found = set(self._failed)
        for request, (replica, at) in list(self._sent.items()):
            if now - at > SUSPICION:
                self._sent.pop(request, None)
            elif now - at > PATIENCE and at > self._accepted.get(replica, -math.inf):
                found.add(replica)
        return found


class WarmRouter(RequestRouter):
    """Selects the less loaded of two random replicas (power of two choices), preferring replicas that have the model
    loaded, and avoiding replicas that may be dead."""

    calls = CALLS

    def initialize_state(self, calls: float = CALLS) -> None:
        """Initialise the router with ``request_router_kwargs``. For ``calls`` see :func:`ranks`."""
        self.calls = calls
        self.tracker = RequestTracker()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Select replicas with :func:`ranks`, one per list, so that it is known which one gets the request. Called by
        Ray Serve."""
        request, model = "", ""
        if pending_request is not None:
            request = pending_request.metadata.internal_request_id
            model = pending_request.metadata.multiplexed_model_id
            self.tracker.silent(_scope(pending_request).get(SILENT, ()))
        loads, chosen = self.tracker.loads(), list[Any]()
        for group in ranks(candidate_replicas, model, self.calls, self.tracker.suspects()):
            group.sort(key=lambda replica: loads[replica.replica_id])
            chosen += [replica for replica in group if replica not in chosen]
        if request and chosen:
            self.tracker.sent(request, chosen[0].replica_id)
        return [[replica] for replica in chosen]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Record that a replica accepted a request. Called by Ray Serve."""
        self.tracker.accepted(pending_request.metadata.internal_request_id, replica_id,
                              _scope(pending_request).get(ATTEMPT, ""))

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Record that a request has ended. Called by Ray Serve."""
        self.tracker.completed(internal_request_id)

    def on_replica_actor_unavailable(self, replica_id: Any) -> None:
        """Record that a replica cannot be reached. Called by Ray Serve."""
        super().on_replica_actor_unavailable(replica_id)
        self.tracker.failed(replica_id)


def _scope(pending_request: Any) -> dict[str, Any]:
    """Return the first argument of ``Pools.respond``."""
    found = pending_request.args[0] if pending_request.args else {}
    return found if isinstance(found, dict) else {}


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


__all__ = ["CALLS", "DEPTH", "CallsPolicy", "RequestTracker", "WarmRouter", "ranks"]
