"""What all requests of a server share."""

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
        begun: ``time.monotonic()`` at which its body was here.
        pieces: sent of a streamed answer; None: there is none yet.
        task: the one that :meth:`cancel` is to wake; None: it is at something that must not be cut in two.
        cancelled: :meth:`cancel` was called.
    """

    __slots__ = ("id", "path", "model", "begun", "pieces", "task", "cancelled")

    def __init__(self, id: str, path: str, model: str, task: asyncio.Task[object] | None) -> None:
        self.id, self.path, self.model, self.task = id, path, model, task
        self.begun, self.cancelled = time.monotonic(), False
        self.pieces: int | None = None

    def cancel(self) -> None:
        """Ends it: the client gets an error. Idempotent."""
        self.cancelled = True
        task, self.task = self.task, None
        if task is not None:
            task.cancel()


class State:
    """Used on the thread of the server's loop only.

    Attributes:
        hosts: values of the header Host that are answered, in lower case.
        streams: answers that are being streamed.
        running: id -> request in flight that names a model.
        stopping: the server takes no further requests.
        started: ``time.monotonic()`` at which it was made.
    """

    def __init__(self, settings: Settings, pool: Pool, models: Iterable[str | os.PathLike[str]] = (),
                 catalogue: bool = True, compute: str = "auto") -> None:
        self.settings, self.pool = settings, pool
        self.models = Models(pool, models, catalogue, compute)
        self.hosts = settings.hosts(settings.port)
        self.streams, self.stopping, self.started = 0, False, time.monotonic()
        self.running: dict[str, Running] = {}
        self._prefix, self._numbers = secrets.token_hex(4), itertools.count(1)

    def new_id(self) -> str:
        """An id that no other request has."""
        return f"{self._prefix}{next(self._numbers):08x}"

    def begin_stream(self) -> None:
        """Counts an answer that is going to be streamed.

        Raises:
            Refusal: there are as many as may be.
        """
        if self.streams >= self.settings.max_streams:
            raise Refusal("too_many_streams")
        self.streams += 1

    def end_stream(self) -> None:
        """Counts it no longer."""
        self.streams -= 1


__all__ = ["Running", "State"]
