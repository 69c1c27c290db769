"""Replays the recorded passes of one compute thread with more threads.

`trace.c` records a *region* (a parallel region of one pass), and in it *segments*: the work of a thread between two
barriers, and into how many units it can be split. A replay gives each segment to `n` threads. It takes as long as the
thread with the most units, slower where the threads want more of the memory's bandwidth than it has, and ends with a
barrier. Time between regions stays as it is: one thread plans and samples there.

Nothing here reads a clock, so the same trace always gives the same table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

#: One event, as in trace.c.
EVENT = np.dtype([("ns", "<u8"), ("units", "<i8"), ("region", "<u4"), ("kind", "u1"), ("index", "u1"), ("count", "u1"),
                  ("thread", "u1")])
BEGIN, SPLIT, PRODUCT, ARRIVE, LEAVE, END = range(6)


@dataclass(frozen=True)
class Segment:
    """Work between two barriers.

    Attributes:
        seconds: time of one thread.
        units: into how many parts it can be split; 0: one thread does all of it.
    """

    seconds: float
    units: int


@dataclass(frozen=True)
class Trace:
    """Passes of one thread.

    Attributes:
        regions: the segments of each parallel region.
        serial: seconds outside regions.
        one: GB/s at which the core read memory.
    """

    regions: tuple[tuple[Segment, ...], ...]
    serial: float
    one: float

    @property
    def work(self) -> float:
        """Seconds inside of regions."""
        return sum(segment.seconds for region in self.regions for segment in region)


@dataclass(frozen=True)
class Machine:
    """A machine to replay on. Rates are in GB/s, times in nanoseconds.

    Attributes:
        cores: cores of one socket.
        sockets: number of sockets. The weights lie on one of them.
        one: rate at which one core reads memory.
        all: rate at which the cores of a socket read its memory together.
        barrier: time of a barrier without the share of each thread.
        each: time that each thread adds to a barrier, because all count on one cache line.
        far: time that a barrier across sockets adds.
        tree: 0: one counter for all threads; n: a counter for every n threads and one for these groups, from 2 n
            threads on (csrc/base/team.c).
        remote: rate of another socket's memory, as a part of that of the own.
    """

    cores: int
    sockets: int
    one: float
    all: float
    barrier: float = 50.0
    each: float = 60.0
    far: float = 400.0
    tree: int = 0
    remote: float = 0.5

    def sockets_of(self, threads: int) -> int:
        """Return how many sockets this number of threads needs."""
        return math.ceil(threads / self.cores)

    def reading(self, threads: int) -> float:
        """Return how much longer a thread takes to read its part of the weights than one thread alone."""
        used = self.sockets_of(threads)
        own = threads * self.one / (used * self.all)
        # the threads of other sockets read over the link
        return max(1.0, own) * (1 + (used - 1) / used * (1 / self.remote - 1))

    def meeting(self, threads: int) -> float:
        """Return the seconds that a barrier of this number of threads takes."""
        if threads == 1:
            return 0.0
        counted = threads if not self.tree or threads < 2 * self.tree else self.tree + math.ceil(threads / self.tree)
        levels = 1 if counted == threads else 2
        return 1e-9 * (levels * self.barrier + self.each * counted + self.far * (self.sockets_of(threads) - 1))


def share(units: int, threads: int) -> float:
    """Return the part of a segment that its busiest thread does."""
    return math.ceil(units / threads) / units if units else 1.0


def seconds(trace: Trace, machine: Machine, threads: int, memory: float) -> float:
    """Return the seconds of a trace with a number of threads.

    Args:
        memory: the part of the work that waits for memory, 0 to 1: bytes read / rate of the core / seconds of the work.
    """
    slower = 1 - memory + memory * trace.one / machine.one * machine.reading(threads)
    total = trace.serial
    for region in trace.regions:
        total += sum(one.seconds * share(one.units, threads) * (slower if one.units else 1.0) for one in region)
        total += len(region) * machine.meeting(threads)  # the last one ends the region
    return total


def best(trace: Trace, machine: Machine, memory: float) -> tuple[int, float]:
    """Return the number of threads that takes the least time, and that time."""
    times = [(seconds(trace, machine, threads, memory), threads)
             for threads in range(1, machine.cores * machine.sockets + 1)]
    least, threads = min(times)
    return threads, least


# ---- the number of threads that the core takes ----

#: Constants of csrc/models/threads.c and threads.h.
BYTES, OPERATIONS, BARRIER_NS, THREADS_MIN, THREADS_MAX, FASTER = 20, 100, 100, 8, 256, 0.98


def threads_worth(weights: float, parameters: float, rows: float, barriers: float) -> int:
    """Return the number of threads that `mp_threads_worth` gives to a pass by assumed rates.

    Args:
        weights: bytes of the model's weights.
        parameters: parameters of the model.
        rows: rows of the pass.
        barriers: barriers of the pass.
    """
    work = max(weights / BYTES, 2 * parameters * rows / OPERATIONS)
    return max(1, min(THREADS_MAX, int(math.sqrt(work / (BARRIER_NS * barriers)))))


def neighbour(threads: int, up: bool) -> int:
    """Return the number of threads that a tuner compares with this one."""
    numbers = [THREADS_MIN * part // 2 << double for double in range(5) for part in (2, 3)] + [THREADS_MAX]
    if up:
        return next((number for number in numbers if 4 * number >= 5 * threads), THREADS_MAX)
    return max([THREADS_MIN, *(number for number in numbers if 5 * number <= 4 * threads)])


def tuned(worth: int, most: int, time: Callable[[int], float]) -> int:
    """Return the number of threads that a tuner (csrc/models/threads.h) settles on.

    Args:
        worth: the number by assumed rates.
        most: threads of the machine.
        time: the time of a pass with a number of threads.
    """
    now = min(worth, most)
    for up in (False, True):
        while now > THREADS_MIN:
            trial = min(most, neighbour(now, up))
            if trial == now or not time(trial) < FASTER * time(now):
                break
            now = trial
    return now


# ---- traces ----

def read(path: str | Path, windows: Sequence[tuple[int, int]], one: float) -> Trace:
    """Return what thread 0 did in these spans of CLOCK_MONOTONIC, in nanoseconds. A region belongs to the span in which
    it begins: a result can be there before its region ends. ``one``: see :class:`Trace`.

    A region that has no end is left out: the process ended in it.

    Raises:
        ValueError: a region has several threads.
    """
    events: NDArray[np.void] = np.fromfile(path, EVENT)
    if (events["count"] != 1).any():
        raise ValueError(f"{path} must be the trace of one compute thread, got regions of several threads")
    # events are ordered by thread, and a thread is in one region at a time
    borders = np.flatnonzero((events["kind"] == BEGIN) | (events["kind"] == END))
    found = [(first, last) for first, last in zip(borders, borders[1:]) if events["kind"][first] == BEGIN
             and events["kind"][last] == END and events["thread"][first] == events["thread"][last]]
    regions, serial = [], 0
    for begin, end in windows:
        serial += end - begin
        for first, last in found:
            if begin <= events["ns"][first] < end:
                regions.append(_segments(events[first:last + 1]))
                serial -= min(int(events["ns"][last]), end) - int(events["ns"][first])
    return Trace(tuple(regions), serial / 1e9, one)


def _segments(rows: NDArray[np.void]) -> tuple[Segment, ...]:
    """Return the segments of a region. Where a segment is split by hand, products are parts of the parts. Without that,
    threads share the panels of its products."""
    found, since, parts, panels = [], int(rows["ns"][0]), 0, 0
    for ns, units, kind in zip(rows["ns"].tolist(), rows["units"].tolist(), rows["kind"].tolist()):
        if kind == SPLIT:
            parts = max(parts, units)
        elif kind == PRODUCT:
            panels += units
        elif kind in (ARRIVE, END):
            found.append(Segment((ns - since) / 1e9, parts if parts > 1 else max(parts, panels)))
            parts = panels = 0
        elif kind == LEAVE:
            since = ns
    return tuple(found)


def table(rows: Iterable[tuple[str, Trace, float, float]], machines: Sequence[tuple[int, Machine]],
          tree: int) -> list[list[str]]:
    """Return a table of rates: a row per trace (name, trace, results in it, memory), a column per number of threads.
    With ``tree``, a cell has two rates if a tree of counters changes the rate by a percent or more."""
    made = []
    for name, trace, count, memory in rows:
        cells = [name]
        for threads, machine in machines:
            plain = count / seconds(trace, machine, threads, memory)
            with_tree = count / seconds(trace, replace(machine, tree=tree), threads, memory)
            cells.append(f"{plain:,.0f}" if abs(with_tree / plain - 1) < 0.01 else f"{plain:,.0f} ({with_tree:,.0f})")
        made.append(cells)
    return made
