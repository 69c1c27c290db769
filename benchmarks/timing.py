"""Clocks and threads of the benchmarks."""

import statistics
import threading
import time
from collections.abc import Callable, Sequence


def seconds_of(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def percentile(values: list[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def spread(values: Sequence[float]) -> str:
    """Format the median, the minimum and the maximum."""
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def together(count: int, body: Callable[[int], None]) -> float:
    """Run ``body`` in ``count`` threads at the same time; return the seconds until all have ended.

    Raises:
        BaseException: the first exception of a thread.
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
