"""Deadlines of requests, and the threads for long work (:mod:`mpool.tokenizers.threads`)."""

from __future__ import annotations

import math
import time
from typing import Any

from ..checks import real, refuse
from ..errors import Timeout
from ..tokenizers.threads import LONG as LONG
from ..tokenizers.threads import executor as executor
from ..tokenizers.threads import interruptible as interruptible
from ..tokenizers.threads import later as later


def deadline_of(timeout: float | None) -> float | None:
    """Deadline, in ``time.monotonic()``, of a request that starts now; None: never.

    Raises:
        InvalidArgument: not a number of seconds, or not above 0.
    """
    seconds = seconds_of(timeout)
    return None if seconds is None else time.monotonic() + seconds


def seconds_of(timeout: Any, zero: bool = False) -> float | None:
    """A timeout as seconds; None: no limit, or one of decades.

    Raises:
        InvalidArgument: not a number of seconds (a NumPy scalar is one), or not above 0 (``zero``: or below).
    """
    if timeout is None:
        return None
    found = real(timeout)
    seconds = math.nan if found is None or (math.isinf(found) and isinstance(timeout, int)) else found
    if not (seconds > 0 or (zero and seconds == 0)):
        allowed = "seconds from 0" if zero else "seconds above 0"
        refuse("timeout", timeout, f"{allowed}, or None")
    return None if seconds > 1e9 else seconds


def remaining(deadline: float | None, key: str | None = None) -> float | None:
    """Seconds until ``deadline``, above 0.

    Raises:
        Timeout: there are none.
    """
    if deadline is None:
        return None
    left = deadline - time.monotonic()
    if left <= 0:
        raise Timeout("no answer within the time allowed", hint="Raise timeout", key=key)
    return left
