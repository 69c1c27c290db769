"""The state that all requests of a server share."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..stores import STORES
from .body_memory import BodyMemory
from .errors import Refusal
from .event_list import EventList
from .http_metrics import HttpMetrics
from .models import Models
from .request_history import RequestHistory, RunningRequest
from .response_memory import ResponseMemory
from .series import Series
from .settings import Settings

if TYPE_CHECKING:
    from ..pool import Pool
    from .guard import Scope

#: Number of ignored fields that the log names; clients choose the names.
_MAX_IGNORED = STORES["ignored"].entries or 0
#: Maximum number of inputs of a request, unless ``PoolConfig.max_embed_inputs`` sets another.
MAX_INPUTS = 10_000


class State:
    """State that all requests share. Must be used only on the thread of the server's event loop.

    Attributes:
        settings: Settings of the server.
        pool: Pool that runs the requests.
        models: Served models.
        hosts: Accepted values of the Host header in lower case; None: :class:`mpool.server.guard.HostGuard` derives
            them from the local address of each request.
        streams: Number of responses that are being streamed.
        running: Request id -> request in flight, for requests with a field ``model``.
        history: The last of these requests that ended.
        http: Counts of all requests by route and status.
        series: Rates, latency, queues and memory of the last 12 hours.
        events: Loads, unloads, deaths of workers, downloads and refused requests.
        bodies: Memory of the bodies of all requests.
        responses: Conversations that ``/v1/responses`` can continue.
        stopping: True if the server accepts no further requests.
        started: ``time.monotonic()`` when the server was created.
    """

    def __init__(self, settings: Settings, pool: Pool, models: Iterable[str | os.PathLike[str]] = (),
                 catalogue: bool = True, compute: str = "auto", adapters: Iterable[str] = ()) -> None:
        self.settings, self.pool = settings, pool
        self.models = Models(pool, models, catalogue, compute, adapters)
        self.hosts: frozenset[str] | None = settings.hosts(settings.port)
        self.streams, self.stopping, self.started = 0, False, time.monotonic()
        self.running: dict[str, RunningRequest] = {}
        self.history, self.http = RequestHistory(), HttpMetrics()
        self.series = Series(pool)
        self.events = EventList(pool)
        self.responses = ResponseMemory()
        self.bodies = BodyMemory(settings.body_memory)
        self._ignored: set[tuple[str, str]] = set()
        self._prefix, self._numbers = secrets.token_hex(4), itertools.count(1)

    @property
    def max_inputs(self) -> int:
        """Maximum number of inputs of a request."""
        given = self.pool.config.max_embed_inputs
        return MAX_INPUTS if given is None else given

    def begin(self) -> None:
        """Start the history of the pool and the list of its events, on the event loop. Idempotent."""
        self.series.start()
        self.events.start()

    def refused(self, refusal: Refusal, scope: Scope, model: str | None = None) -> None:
        """Add a refused or failed request to the events."""
        client = scope.get("client")
        self.events.refused(refusal, scope["path"], client[0] if client else None, model)

    def new_id(self) -> str:
        """Return a unique request id."""
        return f"{self._prefix}{next(self._numbers):08x}"

    def is_new(self, path: str, field: str) -> bool:
        """Return True for the first request to a path with an ignored field; always False after 1,000 fields."""
        if (path, field) in self._ignored or len(self._ignored) >= _MAX_IGNORED:
            return False
        self._ignored.add((path, field))
        return True

    def begin_stream(self) -> None:
        """Add one to the number of streamed responses.

        Raises:
            Refusal: ``max_streams`` responses are already being streamed.
        """
        if self.streams >= self.settings.max_streams:
            raise Refusal("too_many_streams")
        self.streams += 1

    def end_stream(self) -> None:
        """Subtract one from the number of streamed responses."""
        self.streams -= 1


__all__ = ["State"]
