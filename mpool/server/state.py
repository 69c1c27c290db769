"""The state that all requests of a server share."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from .errors import Refusal
from .models import Models
from .settings import Settings

if TYPE_CHECKING:
    from ..pool import Pool


class Running:
    """A request in flight that names a model.

    Attributes:
        begun: ``time.monotonic()`` when the body was complete.
        pieces: stream chunks sent; None: the response is not streamed, or not yet.
        task: the task that :meth:`cancel` cancels; None: the request does work that must not be interrupted.
        cancelled: :meth:`cancel` was called.
    """

    __slots__ = ("id", "path", "model", "begun", "pieces", "task", "cancelled")

    def __init__(self, id: str, path: str, model: str, task: asyncio.Task[object] | None) -> None:
        self.id, self.path, self.model, self.task = id, path, model, task
        self.begun, self.cancelled = time.monotonic(), False
        self.pieces: int | None = None

    def cancel(self) -> None:
        """Cancel the request: the client gets an error. Idempotent."""
        self.cancelled = True
        task, self.task = self.task, None
        if task is not None:
            task.cancel()


class State:
    """Shared by all requests. Must be used on the thread of the server's loop only.

    Attributes:
        hosts: accepted values of the header Host, in lower case; None: :class:`mpool.server.guard.Door` derives them
            from the address at which a request arrived.
        streams: number of responses that are being streamed.
        running: id -> request in flight that names a model.
        stopping: the server accepts no further requests.
        started: ``time.monotonic()`` when the state was made.
    """

    def __init__(self, settings: Settings, pool: Pool, models: Iterable[str | os.PathLike[str]] = (),
                 catalogue: bool = True, compute: str = "auto") -> None:
        self.settings, self.pool = settings, pool
        self.models = Models(pool, models, catalogue, compute)
        self.hosts: frozenset[str] | None = settings.hosts(settings.port)
        self.streams, self.stopping, self.started = 0, False, time.monotonic()
        self.running: dict[str, Running] = {}
        self._prefix, self._numbers = secrets.token_hex(4), itertools.count(1)

    def new_id(self) -> str:
        """Make a unique request id."""
        return f"{self._prefix}{next(self._numbers):08x}"

    def begin_stream(self) -> None:
        """Count a response that is about to be streamed.

        Raises:
            Refusal: ``max_streams`` responses are being streamed already.
        """
        if self.streams >= self.settings.max_streams:
            raise Refusal("too_many_streams")
        self.streams += 1

    def end_stream(self) -> None:
        """Count one streamed response less."""
        self.streams -= 1


__all__ = ["Running", "State"]
