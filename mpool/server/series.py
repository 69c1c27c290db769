"""History of a pool for plots: rates, latency, queues and memory, sampled once a second, in bounded memory.

Three rings keep 5 minutes at 1 s, 1 hour at 10 s and 12 hours at 2 minutes per point. A value of a point is the mean of
its samples. Its latency quantiles cover the requests that completed during the point. A sample costs about 0.1 ms.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..records import logger
from ..runtime import metrics
from ..runtime.latency import counts_of, quantile
from ..stores import STORES

if TYPE_CHECKING:
    from ..runtime.hosts import Host

log = logger("mpool.server")

#: The rings: seconds per point -> number of points.
RINGS = {1: 300, 10: 360, 120: 360}
#: Maximum number of models with a history. Another model takes the place of the one that was idle for longest.
MODELS = STORES["series"].entries or 0
#: Maximum number of seconds that one sample stands for, if samples before it are missing. More seconds become a gap.
_STALL = 10
#: Seconds that the longest ring covers.
_LONGEST = max(step * most for step, most in RINGS.items())
#: Values of a point of the pool, and of a model: rates per second, seconds of latency, counts, bytes.
POOL = ("requests", "failed", "tokens", "images", "queued", "running", "threads", "memory", "p50", "p99")
MODEL = ("requests", "failed", "tokens", "images", "queued", "running", "workers", "memory", "p50", "p99")
#: Number of quantiles, the last values of a point.
_QUANTILES = 2
_FAILED = ("errors", "timeouts", "queue_full_rejections", "circuit_rejections")
_DECODERS, _IMAGES = ("text_to_text", "vision"), ("text_to_image", "image_embedding")


class Reading:
    """Counters and gauges of the pool or of a model at one time.

    Attributes:
        counters: values whose rates are plotted: completed requests, failed requests, tokens, images.
        gauges: values that are plotted as they are.
        latency: number of completed requests per bucket of the latency histogram: index of the bucket -> number.
    """

    __slots__ = ("counters", "gauges", "latency")

    def __init__(self, counters: Sequence[float], gauges: Sequence[float], latency: dict[int, int]) -> None:
        self.counters, self.gauges, self.latency = counters, gauges, latency


class _Track:
    """The history of the pool or of one model in all rings.

    Attributes:
        active: tick at which a counter last changed.
        seen: tick at which the model was last in the pool.
        points: seconds per point -> values of all points, NaN where there are none.
    """

    def __init__(self, names: tuple[str, ...], capability: str, tick: int) -> None:
        self.names, self.capability, self.active, self.seen = names, capability, tick, tick
        self.points = {step: array("d") for step in RINGS}
        self._last: Reading | None = None
        self._values: list[float] | None = None
        self._sums = {step: [0.0] * (len(names) - _QUANTILES) for step in RINGS}
        self._counts = dict.fromkeys(RINGS, 0)
        self._latency: dict[int, dict[int, int]] = {step: {} for step in RINGS}

    @property
    def is_begun(self) -> bool:
        """True after the first reading, which gives no rates yet."""
        return self._last is not None

    def read(self, tick: int, reading: Reading | None, seconds: float) -> None:
        """Take a reading, ``seconds`` after the one before. None: the model is not in the pool."""
        last, self._last, self._values = self._last, reading, None
        if reading is not None:
            self.seen = tick
        if reading is None or last is None:
            return
        rates = [max(0.0, now - before) / seconds for now, before in zip(reading.counters, last.counters)]
        if any(rates):
            self.active = tick
        self._values = [*rates, *reading.gauges]
        if reading.latency != last.latency:
            for bucket, count in reading.latency.items():
                new = count - last.latency.get(bucket, 0)
                if new > 0:
                    for held in self._latency.values():
                        held[bucket] = held.get(bucket, 0) + new

    def add(self) -> None:
        """Add the values of the last reading to the unfinished point of each ring. A reading stands for one second."""
        if self._values is not None:
            for step in RINGS:
                self._sums[step] = [total + value for total, value in zip(self._sums[step], self._values)]
                self._counts[step] += 1

    def end(self, step: int, points: int = 1) -> None:
        """End a point of a ring, and add ``points - 1`` without values."""
        count, sums, held = self._counts[step], self._sums[step], self._latency[step]
        width, most, kept = len(self.names), RINGS[step], self.points[step]
        if count:
            kept.extend(total / count for total in sums)
            kept.extend(quantile(held, share) for share in (0.5, 0.99))
        else:
            kept.extend([math.nan] * width)
        if points > 1:
            kept.extend([math.nan] * (width * min(points - 1, most)))
        if len(kept) > width * most:
            del kept[:len(kept) - width * most]
        self._sums[step], self._counts[step], self._latency[step] = [0.0] * len(sums), 0, {}


class Series:
    """History of a pool. Must be used only on the thread of the server's event loop.

    Args:
        pool: Pool whose history is kept.

    Attributes:
        started: seconds since 1970 at which the history began. Points are counted from there.
    """

    def __init__(self, pool: Host) -> None:
        self._pool, self.started = pool, time.time()
        self._origin = self._at = time.monotonic()
        self._tick = 0
        self._ended = dict.fromkeys(RINGS, 0)  # number of points of each ring that have ended
        self._whole = _Track(POOL, "", 0)
        self._models: dict[str, _Track] = {}
        self._known: Iterable[str] = ()  # models in the pool at the last sample
        self._loop: asyncio.AbstractEventLoop | None = None

    # ---- samples -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Sample once a second on the running event loop, until the pool is closed. Idempotent."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._sample, loop)

    def _sample(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is not loop or self._pool.closed:
            return
        now = time.monotonic()
        try:
            self.add(*metrics.sample(self._pool), now)
        except Exception:  # the history must never end the server
            log.exception("The history for the dashboard lacks a sample")
        loop.call_later(max(0.05, 1.0 - (now - self._origin) % 1.0), self._sample, loop)

    def add(self, stats: dict[str, Any], rows: list[dict[str, Any]], now: float) -> None:
        """Add a sample.

        Args:
            stats: counters and gauges of the pool, of :func:`mpool.runtime.metrics.sample`.
            rows: one row per model.
            now: ``time.monotonic()``.
        """
        tick, seconds = int(now - self._origin + 0.5), now - self._at
        passed = tick - self._tick
        if passed < 1 and self._whole.is_begun:
            return
        self._at = now
        if passed > _STALL:
            self._end(tick - 1)
        self._read(stats, rows, tick, max(seconds, 1e-3))
        for at in range(self._tick + 1, tick + 1):
            for track in (self._whole, *self._models.values()):
                track.add()
            self._end(at)

    def _end(self, tick: int) -> None:
        """End the points that are complete at a tick."""
        self._tick = tick
        for step, ended in self._ended.items():
            if tick // step > ended:
                self._ended[step] = tick // step
                for track in (self._whole, *self._models.values()):
                    track.end(step, tick // step - ended)

    def _read(self, stats: dict[str, Any], rows: list[dict[str, Any]], tick: int, seconds: float) -> None:
        readings = {row["key"]: _model_reading(row) for row in rows}
        for row in rows:
            if row["key"] not in self._models and self._has_place(tick, row):
                track = self._models[row["key"]] = _Track(MODEL, row["capability"], tick)
                if self._whole.is_begun and row["key"] not in self._known:  # its counters began at 0
                    track.read(tick, Reading((0, 0, 0, 0), (), {}), seconds)
        self._known = readings.keys()
        for key, track in list(self._models.items()):
            track.read(tick, readings.get(key), seconds)
            if tick - track.seen > _LONGEST:
                del self._models[key]
        latency: dict[int, int] = {}
        for reading in readings.values():
            for bucket, count in reading.latency.items():
                latency[bucket] = latency.get(bucket, 0) + count
        tokens, images = (sum(reading.counters[at] for reading in readings.values()) for at in (2, 3))
        self._whole.read(tick, Reading(
            (stats.get("completed", 0), sum(stats.get(name, 0) for name in _FAILED), tokens, images),
            (sum(row["queued"] for row in rows), sum(row["running"] for row in rows),
             stats.get("compute_threads_leased", 0), stats.get("memory_used", 0)), latency), seconds)

    def _has_place(self, tick: int, row: dict[str, Any]) -> bool:
        """Return True if a model can be added. A model in use may take the place of the one that was idle for longest.
        """
        if len(self._models) < MODELS:
            return True
        key = min(self._models, key=lambda one: self._models[one].active)
        if row["idle_seconds"] > _STALL or self._models[key].active >= tick - _STALL:
            return False
        del self._models[key]
        return True

    # ---- points ------------------------------------------------------------------------------------------------------

    def points(self, step: int, after: int = -1) -> dict[str, Any]:
        """Return a copy of a ring, which :func:`columns` converts on any thread.

        Args:
            step: seconds per point, a key of :data:`RINGS`.
            after: number of the last point that is not wanted.

        Returns:
            Fields of :class:`mpool.server.dashboard.SeriesResponse`, with arrays for :func:`columns` for values.
        """
        last = self._ended[step] - 1
        count = max(0, min(last - after, RINGS[step], last + 1))
        return {"started": self.started, "step": step, "steps": list(RINGS), "sizes": list(RINGS.values()),
                "last": last, "time": self.started + (last + 1) * step, "pool": _newest(self._whole, step, count),
                "models": {key: _newest(track, step, count) for key, track in self._models.items()}}


def _model_reading(row: dict[str, Any]) -> Reading:
    capability, latency = row["capability"], row["latency"]
    units = row["units_in"] + row["units_out"]
    tokens = row["rows"] if capability in _DECODERS else 0 if capability in _IMAGES else units
    images = row["units_out"] if capability == "text_to_image" else row["units_in"] if capability in _IMAGES else 0
    return Reading((latency["count"], row["errors"], tokens, images),
                   (row["queued"], row["running"], row["workers"], row["model_bytes"] + row["engine_bytes"]),
                   counts_of(latency))


def _newest(track: _Track, step: int, count: int) -> tuple[str, tuple[str, ...], array[float], int]:
    width = len(track.names)
    kept = track.points[step]
    return track.capability, track.names, kept[max(0, len(kept) - width * count):], count


def columns(part: tuple[str, tuple[str, ...], array[float], int]) -> dict[str, list[float | None]]:
    """Convert values of :meth:`Series.points` to one list per name, oldest first, None where there is no value."""
    _, names, values, count = part
    width = len(names)
    missing: list[float | None] = [None] * (count - len(values) // width)
    return {name: missing + [None if math.isnan(value) else float(f"{value:.5g}") for value in values[at::width]]
            for at, name in enumerate(names)}


__all__ = ["MODEL", "MODELS", "POOL", "RINGS", "Series", "columns"]
