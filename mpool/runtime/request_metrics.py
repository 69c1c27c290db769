"""Histograms of the requests of a pool, by model, and the errors that ended them.

Counted in Python when a request ends: about 2 us. The core's own histogram (``latency`` of an entry) covers the time
from submission to completion only.
"""

from __future__ import annotations

import math
import os
import threading
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .. import _core

#: Upper bounds of the buckets in seconds. A label with more buckets costs one series each.
BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0,
          math.inf)
#: Histograms of a model: name -> help.
HISTOGRAMS = {
    "request_seconds": "seconds from the call to its result, of completed requests",
    "queue_seconds": "seconds from submission to the first step, which include the load of the model",
    "time_to_first_token_seconds": "seconds from the call to the first token of its completion",
    "time_per_output_token_seconds": "mean seconds per token of a completion, after its first token",
}
#: Maximum number of models; the one that was added first makes room for another.
_MODELS = 256

_NO_USAGE = (0, 0, 0, 0.0, 0.0, 0.0)
_lock = threading.RLock()  # reentrant: a finalizer or a signal handler may end a request in the middle of another's end


class Histogram:
    """Counts and sum of a histogram. ``counts`` has one number per bucket of :data:`BOUNDS`, not cumulative."""

    __slots__ = ("counts", "sum")

    def __init__(self) -> None:
        self.counts, self.sum = [0] * len(BOUNDS), 0.0

    def add(self, seconds: float) -> None:
        """Count a value, which must not be negative. Must not run on two threads at the same time."""
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def as_dict(self) -> dict[str, Any]:
        """Return ``count``, ``sum`` and ``histogram``: (upper bound, count) of each bucket."""
        return {"count": sum(self.counts), "sum": self.sum, "histogram": list(zip(BOUNDS, self.counts))}


class ModelRequests:
    """Requests of a model.

    Attributes:
        histograms: name -> histogram, for each name of :data:`HISTOGRAMS`.
        failed: name of the error -> requests that were refused or failed.
        prefix_tokens: tokens of the prompts of completed requests that were found in the prefix cache.
    """

    __slots__ = ("failed", "histograms", "prefix_tokens")

    def __init__(self) -> None:
        self.histograms = {name: Histogram() for name in HISTOGRAMS}
        self.failed: dict[str, int] = {}
        self.prefix_tokens = 0


class RequestMetrics:
    """The requests of a pool. Thread-safe."""

    __slots__ = ("_models",)

    def __init__(self) -> None:
        self._models: dict[str, ModelRequests] = {}

    def _of(self, key: str) -> ModelRequests:
        found = self._models.get(key)
        if found is None:
            if len(self._models) >= _MODELS:
                del self._models[next(iter(self._models))]
            found = self._models[key] = ModelRequests()
        return found

    def waited(self, key: str, seconds: float) -> None:
        """Add the time that a part of a request waited in the queue of a model."""
        with _lock:
            self._of(key).histograms["queue_seconds"].add(seconds)

    def completed(self, key: str, seconds: float, began: float, ticket: _core.Ticket | None, generates: bool) -> None:
        """Add a request that was completed.

        Args:
            key: key of the model.
            seconds: time from the call to the end.
            began: ``time.monotonic()`` of the call.
            ticket: its ticket; None: the request had none, or several, which :meth:`waited` counts.
            generates: True if the ticket counts tokens.
        """
        submitted, started, finished = (0.0, 0.0, 0.0) if ticket is None else ticket.times()
        _, tokens, cached, _, _, generation = ticket.usage() if ticket is not None and generates else _NO_USAGE
        with _lock:
            found = self._of(key)
            histograms = found.histograms
            histograms["request_seconds"].add(seconds)
            if started:
                histograms["queue_seconds"].add(started - submitted)
            if tokens:
                found.prefix_tokens += cached
                histograms["time_to_first_token_seconds"].add(finished - generation - began)
            if tokens > 1:
                histograms["time_per_output_token_seconds"].add(generation / (tokens - 1))

    def failed(self, key: str, error: str, named: str | None = None) -> None:
        """Add a request that was refused or failed.

        Args:
            key: key of the model; "": the request ended before its model was found.
            error: name of the error as in :attr:`mpool.MpoolError.name`, or of the class of another exception.
            named: key that the error names if ``key`` is "". A client may have chosen it, so it counts only if the
                model had requests before.
        """
        if not error.isupper():  # the name of a class, which a program may choose: the iterable of embed_iter raised it
            error = "OTHER"
        with _lock:
            if not key and named in self._models:
                key = named
            found = self._of(key).failed
            found[error] = found.get(error, 0) + 1

    def rows(self, keys: Iterable[str]) -> dict[str, ModelRequests]:
        """Return copies for these models and for "", and forget every other model."""
        wanted, found = {"", *keys}, {}
        with _lock:
            for key in self._models.keys() - wanted:
                del self._models[key]
            for key in wanted:
                copy = found[key] = ModelRequests()
                one = self._models.get(key)
                if one is not None:
                    copy.failed, copy.prefix_tokens = dict(one.failed), one.prefix_tokens
                    for name, histogram in one.histograms.items():
                        copy.histograms[name].counts, copy.histograms[name].sum = list(histogram.counts), histogram.sum
        return found


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["BOUNDS", "HISTOGRAMS", "Histogram", "ModelRequests", "RequestMetrics"]
