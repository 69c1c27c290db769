"""Memory that the bodies of all requests take together, finished or not, with the values parsed out of them.

Each request charges its share while its body arrives and while it is parsed, and gives it back when it ends. Bodies of
more than :data:`SMALL` bytes can fill three quarters of the limit: slow senders of large bodies cannot keep out small
ones. The time limit of a body (``Settings.body_timeout``) gives back the share of a sender that does not go on.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading

from ..host import native_calls
from .errors import Refusal

#: Maximum size in bytes of the share of a small body.
SMALL = 1 << 16
#: Shares of at least this many bytes are returned to the system after the request: seconds until then, so that one call
#: serves many requests.
_LARGE, _PAUSE = 1 << 20, 0.5
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the C library may be another one than glibc


class BodyMemory:
    """The limit, and the shares of all requests. Thread-safe.

    Attributes:
        most: Maximum number of bytes of all shares.
        bytes: Bytes of all shares.
    """

    def __init__(self, most: int) -> None:
        self.most, self.bytes = most, 0
        self._lock = threading.Lock()
        self._trimming = False

    def share(self) -> Share:
        """Return the empty share of a request."""
        return Share(self)

    def _add(self, size: int, share: int) -> None:
        most = self.most if share + size <= SMALL else self.most * 3 // 4
        if share + size > most:
            raise Refusal("request_too_large", f"A body and its values must take at most {most:,} bytes of memory.")
        with self._lock:
            if self.bytes + size > most:
                raise Refusal("too_many_bodies")
            self.bytes += size

    def _remove(self, share: int) -> None:
        with self._lock:
            self.bytes -= share
        if share >= _LARGE and not self._trimming:
            self._trimming = True
            asyncio.get_running_loop().call_later(_PAUSE, self._trim)

    def _trim(self) -> None:
        self._trimming = False
        native_calls.BODIES.later(trim)


class Share:
    """The memory of one request's body.

    Attributes:
        bytes: Its size.
    """

    __slots__ = ("bytes", "_memory")

    def __init__(self, memory: BodyMemory) -> None:
        self._memory, self.bytes = memory, 0

    def add(self, size: int) -> None:
        """Charge bytes.

        Raises:
            Refusal: The body alone would exceed the limit (413), or all bodies together (503).
        """
        self._memory._add(size, self.bytes)
        self.bytes += size

    def close(self) -> None:
        """Give the memory back. Call it on the event loop, when the request ends. Idempotent."""
        share, self.bytes = self.bytes, 0
        if share:
            self._memory._remove(share)


def trim() -> None:
    """Return free memory of the process to the system. The C library keeps what large bodies leave behind."""
    if _malloc_trim is not None:
        _malloc_trim(0)


__all__ = ["SMALL", "BodyMemory", "Share", "trim"]
