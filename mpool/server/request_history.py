"""The requests of a server that name a model: one in flight, and the last ones that ended, in bounded memory. Neither
prompts nor results are kept.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import Struct

from ..runtime.history import NAME, History

if TYPE_CHECKING:
    import asyncio

    from ..runtime.tally import Tally


class RunningRequest:
    """A request in flight with a field ``model``.

    Attributes:
        id: Request id.
        path: Path of the route.
        model: Model name in the request.
        started: ``time.monotonic()`` when the body was complete.
        chunks: Number of stream chunks sent; None: no stream has started.
        task: Task that :meth:`cancel` cancels; None: the request must not be interrupted at the moment.
        cancelled: True after a call of :meth:`cancel`.
        error: Code of the error with which it ended; None: none yet.
    """

    __slots__ = ("id", "path", "model", "started", "chunks", "task", "cancelled", "error")

    def __init__(self, id: str, path: str, model: str, task: asyncio.Task[object] | None) -> None:
        self.id, self.path, self.model, self.task = id, path, model, task
        self.started, self.cancelled = time.monotonic(), False
        self.chunks: int | None = None
        self.error: str | None = None

    def cancel(self) -> None:
        """Cancel the request: the client receives the error ``cancelled``. Idempotent."""
        self.cancelled = True
        task, self.task = self.task, None
        if task is not None:
            task.cancel()


class PastRequest(Struct):
    """A request that ended.

    ``client``: address that sent it, null for a Unix socket. ``ended``: seconds since 1970. ``seconds``: from the end
    of its body to the end of the response. ``prompt_tokens``, ``completion_tokens``: as counted until it ended.
    ``first_token``: seconds from the end of the body to the first token of a completion, null if there was none.
    ``status``: HTTP status, 0 if no response was sent. ``outcome``: ``completed``, ``disconnected`` (by the client),
    the code of the error, such as ``cancelled``, or ``failed`` if the response was not sent to its end.
    """

    id: str
    path: str
    model: str
    capability: str | None
    client: str | None
    ended: float
    seconds: float
    prompt_tokens: int
    completion_tokens: int
    first_token: float | None
    status: int
    outcome: str


class RequestHistory(History[PastRequest]):
    """The last HTTP requests; :meth:`mpool.Pool.history` has the calls of the library that they made."""

    __slots__ = ()

    def add(self, running: RunningRequest, tally: Tally, client: str | None, status: int, outcome: str) -> None:
        """Add a request that ended."""
        prompt, completion = tally.tokens()
        self.append(PastRequest(running.id, running.path, running.model[:NAME], tally.capability, client, time.time(),
                                max(0.0, time.monotonic() - running.started), prompt, completion,
                                tally.first_token(running.started), status, outcome))


__all__ = ["PastRequest", "RequestHistory", "RunningRequest"]
