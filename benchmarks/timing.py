"""Clocks and threads of the measurements."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence


def seconds_of(call: Callable[[], object]) -> float:
    """What a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def percentile(values: list[float], share: float) -> float:
    """The value below which that share of the values lies."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def spread(values: Sequence[float]) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def together(count: int, body: Callable[[int], None]) -> float:
    """Seconds that so many threads take together.

    Raises:
        BaseException: what one of them raised.
    """
    gate = threading.Barrier(count + 1)
    raised: list[BaseException] = []

    def run(number: int) -> None:
        gate.wait()
        try:
            body(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    gate.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
    return time.perf_counter() - begin
