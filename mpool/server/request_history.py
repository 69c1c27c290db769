"""The last requests of a server that named a model, in bounded memory. Neither prompts nor results are kept."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from ..stores import STORES

if TYPE_CHECKING:
    from ..runtime.tally import Tally
    from .state import RunningRequest

#: Number of requests that the history keeps, and maximum length of a model's name in it.
REQUESTS, NAME = STORES["history"].entries or 0, 256


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


class RequestHistory:
    """The last :data:`REQUESTS` requests."""

    def __init__(self) -> None:
        self._past: deque[PastRequest] = deque(maxlen=REQUESTS)

    def add(self, running: RunningRequest, tally: Tally, client: str | None, status: int, outcome: str) -> None:
        """Add a request that ended."""
        prompt, completion = tally.tokens()
        self._past.append(PastRequest(running.id, running.path, running.model[:NAME], tally.capability, client,
                                      time.time(), max(0.0, time.monotonic() - running.started), prompt, completion,
                                      status, outcome))

    def __iter__(self) -> Iterator[PastRequest]:
        """Iterate over the requests, the latest first."""
        return iter(list(reversed(self._past)))


__all__ = ["PastRequest", "REQUESTS", "RequestHistory"]
