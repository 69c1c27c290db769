"""Detection of clients that disconnect, through ASGI's ``receive``.

The connections of ``mpool serve`` report a disconnect directly (:class:`mpool.server.protocol.Connection`), which saves
a task per request. Every other ASGI server reports it with the message ``http.disconnect``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


class DisconnectReports:
    """A connection that reports its loss. An operation finds it in its scope as ``mpool.connection``.

    Attributes:
        on_disconnect: Callback for a lost connection. The request that is being served sets it; None: no callback.
    """

    def __init__(self) -> None:
        self.on_disconnect: Callable[[], object] | None = None

    def body_is_read(self) -> None:
        """Called when the operation has the whole body."""


class DisconnectListener:
    """Calls ``on_disconnect`` when the client disconnects.

    Attributes:
        on_disconnect: Callback, called at most once; None: no callback.
    """

    def __init__(self, receive: Callable[[], Awaitable[Any]]) -> None:
        self.on_disconnect: Callable[[], object] | None = None
        self._receive = receive
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start waiting. Must follow the last read of the body: only one task may call ``receive``."""
        self._task = asyncio.create_task(self._wait())

    def stop(self) -> None:
        """Stop waiting. Idempotent."""
        self.on_disconnect = None
        if self._task is not None:
            self._task.cancel()

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        callback, self.on_disconnect = self.on_disconnect, None
        if callback is not None:
            callback()


__all__ = ["DisconnectListener", "DisconnectReports"]
