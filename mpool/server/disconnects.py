"""Notice of a client that disconnects, from ASGI's ``receive``.

The connections of ``mpool serve`` give this notice themselves (:class:`mpool.server.protocol.Connection`), which saves
a task per request. Every other ASGI server gives it as the message ``http.disconnect``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class Disconnects:
    """Calls ``left`` once the client has disconnected.

    Attributes:
        left: called at most once; None: nothing is called.
    """

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self.left: Callable[[], object] | None = None
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to wait. Must follow the last read of the body: only one reader may call ``receive``."""
        self._task = asyncio.create_task(self._wait())

    def stop(self) -> None:
        """Wait no longer. Idempotent."""
        self.left = None
        if self._task is not None:
            self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        left, self.left = self.left, None
        if left is not None:
            left()


__all__ = ["Disconnects"]
