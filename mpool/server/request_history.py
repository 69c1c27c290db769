"""The last requests of a server that named a model, in bounded memory. Neither prompts nor results are kept."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from msgspec import Struct

from ..runtime.history import NAME, History

if TYPE_CHECKING:
    from ..runtime.tally import Tally
    from .state import RunningRequest


class PastRequest(Struct):
    """A request that ended.

    ``client``: address that sent it, null for a Unix socket. ``ended``: seconds since 1970. ``seconds``: from the end
    of its body to the end of the response. ``prompt_tokens``, ``completion_tokens``: as counted until it ended.
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
    status: int
    outcome: str


class RequestHistory(History[PastRequest]):
    """The last HTTP requests; :meth:`mpool.Pool.history` has the calls of the library that they made."""

    __slots__ = ()

    def add(self, running: RunningRequest, tally: Tally, client: str | None, status: int, outcome: str) -> None:
        """Add a request that ended."""
        prompt, completion = tally.tokens()
        self.append(PastRequest(running.id, running.path, running.model[:NAME], tally.capability, client, time.time(),
                                max(0.0, time.monotonic() - running.started), prompt, completion, status, outcome))


__all__ = ["PastRequest", "RequestHistory"]
