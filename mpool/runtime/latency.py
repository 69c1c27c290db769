"""Latencies of completed requests: the buckets of the core (csrc/registry/histogram.h), and quantiles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

#: Upper bounds of the buckets of every latency histogram, in seconds.
BOUNDS = (*(1e-6 * 2**i for i in range(27)), math.inf)


def counts_of(latency: Mapping[str, Any]) -> dict[int, int]:
    """Return the number of requests by bucket, as an index in :data:`BOUNDS`, for ``latency`` of an entry of the core.
    Buckets without requests are left out."""
    return {len(BOUNDS) - 1 if math.isinf(bound) else round(math.log2(bound * 1e6)): count
            for bound, count in latency["buckets"] if count}


def quantile(counts: Mapping[int, int], share: float, longest: float = BOUNDS[-2]) -> float:
    """Return an estimate of a quantile in seconds, as if the requests of a bucket were spread evenly in it; ``longest``
    for those of the last bucket. NaN: there are no requests."""
    wanted = share * sum(counts.values())
    for bucket, count in sorted(counts.items()):
        if count >= wanted:
            if bucket >= len(BOUNDS) - 1:
                return longest
            low, high = BOUNDS[bucket - 1] if bucket else 0.0, BOUNDS[bucket]
            return low + (high - low) * wanted / count if count else high
        wanted -= count
    return math.nan


def quantiles(latency: Mapping[str, Any]) -> dict[str, float]:
    """Return ``p50`` and ``p99`` of an entry of the core, within its minimum and maximum; 0 without requests."""
    counts, most = counts_of(latency), latency["max"]
    return {name: min(max(quantile(counts, share, most), latency["min"]), most) if counts else 0.0
            for name, share in (("p50", 0.5), ("p99", 0.99))}


__all__ = ["BOUNDS", "counts_of", "quantile", "quantiles"]
