"""Deadlines of requests."""

from __future__ import annotations

import math
import time
from typing import Any

from ..checks import real, refuse
from ..errors import Timeout


def deadline_of(timeout: float | None) -> float | None:
    """Return the deadline, in ``time.monotonic()``, of a request that starts now; None: no deadline.

    Raises:
        InvalidArgument: the timeout is not a number of seconds above 0.
    """
    seconds = seconds_of(timeout)
    return None if seconds is None else time.monotonic() + seconds


def seconds_of(timeout: Any, zero: bool = False) -> float | None:
    """Return a timeout in seconds; None: no limit, or a limit above 1e9 seconds.

    Args:
        timeout: number of seconds, also as a NumPy scalar.
        zero: allow 0.

    Raises:
        InvalidArgument: the timeout is not a number of seconds in the allowed range.
    """
    if timeout is None:
        return None
    found = real(timeout)
    seconds = math.nan if found is None or (math.isinf(found) and isinstance(timeout, int)) else found
    if not (seconds > 0 or (zero and seconds == 0)):
        allowed = "a number of seconds from 0" if zero else "a number of seconds above 0"
        refuse("timeout", timeout, f"{allowed}, or None")
    return None if seconds > 1e9 else seconds


def remaining(deadline: float | None, key: str | None = None) -> float | None:
    """Return the seconds until ``deadline``, above 0; None: no deadline.

    Raises:
        Timeout: the deadline has passed.
    """
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise Timeout("the request did not complete within its timeout", hint="Raise `timeout`", key=key)
    return left
