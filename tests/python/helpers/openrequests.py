"""Counts of open requests in the tables of the Python layer: a leak of one entry per request is seen here."""

from mpool.host import child_processes, native_calls
from mpool.conversation import grammar, rendering

from waiting import until


def opened() -> dict[str, int]:
    """Return the number of open requests in each table that has any."""
    groups = native_calls._groups.items()
    children = list(child_processes._live)
    found = {
        "requests of mask threads": sum(len(thread.requests) for thread in grammar._mask_threads),
        **{f"native calls of {name}": len(group._waiting) + len(group._running) for name, group in groups},
        "starting or busy child processes": sum(len(one._all) - len(one._idle) + one._starting for one in children),
        "active renders": sum(record.active for record in rendering._renderers._records.values()),
    }
    return {name: count for name, count in found.items() if count}


def check_all_ended(before: dict[str, int], seconds: float = 10.0) -> None:
    """Wait until no more is open than `before`: threads take notice of the end of a request after its caller."""
    until(lambda: not any(count > before.get(name, 0) for name, count in opened().items()), seconds, opened)
