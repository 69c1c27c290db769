"""One request, sent to one replica after the other until one of them responds.

A replica that dies ends its attempt with an error from Ray, and the request goes to another replica at once unless
another attempt is still running. A replica whose machine was switched off or cut from the network gives no error: it is
silent. Live replicas send an empty batch when they accept a request and then every :data:`HEARTBEAT` seconds, so
silence for :attr:`Limits.patience` seconds means that the request must go to another replica too. The silent attempt is
not cancelled: if the replica was only slow, its next batch ends the attempts that were started after it. A wrong
suspicion therefore costs computing time, and never a request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    RayActorError,
    RpcError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from ...records import logger
from ...server.errors import Refusal
from .responses import HeldResponse

log = logger("mpool.server")

#: Seconds between two heartbeats of a replica that works on a request.
HEARTBEAT = 0.5
_LOST = (RayActorError, ActorUnavailableError, NodeDiedError, ObjectLostError, RpcError, WorkerCrashedError,
         ReplicaUnavailableError, DeploymentUnavailableError, grpc.RpcError)


@dataclass(frozen=True)
class Limits:
    """Limits of the attempts of one request.

    Attributes:
        max_attempts: maximum number of replicas that get the request.
        patience: seconds of silence after which the request goes to a further replica.
        accept_timeout: seconds of silence of all replicas after which the request is refused with ``overloaded``.
        lost_after: seconds of silence after which a response that has begun is given up. More than ``patience``,
            because such a request cannot go to another replica.
    """

    max_attempts: int = 3
    patience: float = 2 * HEARTBEAT
    accept_timeout: float = 60.0
    lost_after: float = 20 * HEARTBEAT


@dataclass(eq=False)
class _Attempt:
    id: str
    batches: Any
    response: HeldResponse
    pump: asyncio.Task[None] = field(init=False)
    stopped: bool = False


class Race:
    """Gives one response.

    Args:
        send: sends the request to a replica, given the id of the attempt and the ids of earlier attempts that are
            silent. Returns an asynchronous iterator over batches of ASGI messages, with a method ``cancel``.
        respond: returns a response to the client that has not begun.
        limits: limits of the attempts.
    """

    def __init__(self, send: Callable[[str, list[str]], Any], respond: Callable[[], HeldResponse],
                 limits: Limits) -> None:
        self._send, self._respond, self._limits = send, respond, limits
        self._attempts: list[_Attempt] = []  # in the order of their start
        self._count = 0
        self._begun: HeldResponse | None = None
        # (attempt, batch, error), or None after silence. At most one item, so that a slow client slows its replica down
        self._news: asyncio.Queue[tuple[_Attempt, list[dict[str, Any]] | None, Exception | None] | None] = \
            asyncio.Queue(1)
        self._waiting_since: float | None = None

    async def run(self) -> None:
        """Send the request, and the response or an error."""
        self._loop = asyncio.get_running_loop()
        self._watch()
        try:
            refusal = await self._response_or_refusal()
        finally:
            self._timer.cancel()
            self._stop(self._attempts)
        if refusal is not None:
            await (self._begun or self._respond()).fail(refusal)

    async def _response_or_refusal(self) -> Refusal | None:
        self._start()
        while True:
            self._waiting_since = self._loop.time()
            news = await self._news.get()
            self._waiting_since = None
            if news is None:
                if self._begun is not None:
                    log.warning("A replica was silent for %g s within a response", self._limits.lost_after)
                    return Refusal("worker_lost")
                if not self._start():
                    return Refusal("overloaded")
                continue
            attempt, batch, error = news
            if attempt.stopped:
                continue
            if batch is not None:
                await self._pass_on(attempt, batch)
                continue
            self._stop([attempt])
            if error is None and attempt.response.ended:
                return None
            if error is None or isinstance(error, _LOST):
                log.warning("A replica was lost: %s", type(error).__name__)
                if self._begun is not None or not (self._attempts or self._start()):
                    return Refusal("worker_lost")
            elif not self._attempts:
                if isinstance(error, BackPressureError):
                    return Refusal("overloaded")
                log.error("A replica failed", exc_info=error)
                return Refusal("internal")

    def _watch(self) -> None:
        """Put None into the queue after silence. One timer repeats, because a timer per wait would cost more than the
        rest of a batch."""
        delay, since = self._limits.patience, self._waiting_since
        if since is not None and self._news.empty():
            left = since + self._timeout() - self._loop.time()
            if left <= 0:
                self._news.put_nowait(None)
            else:
                delay = min(left, delay)
        self._timer = self._loop.call_later(delay, self._watch)

    def _timeout(self) -> float:
        if self._begun is not None:
            return self._limits.lost_after
        return self._limits.patience if self._count < self._limits.max_attempts else self._limits.accept_timeout

    async def _pass_on(self, attempt: _Attempt, batch: list[dict[str, Any]]) -> None:
        """Handle a batch, which is also a heartbeat, and send its messages."""
        later = self._attempts[self._attempts.index(attempt) + 1:]
        self._stop(later)
        self._count -= len(later)
        for message in batch:
            if attempt.response.begins_with(message):
                self._begun = attempt.response
                self._stop([other for other in self._attempts if other is not attempt])
            await attempt.response.handle_message(message)

    def _start(self) -> bool:
        """Start an attempt; return False if the maximum is reached."""
        if self._count == self._limits.max_attempts:
            return False
        self._count += 1
        name, silent = uuid.uuid4().hex, [attempt.id for attempt in self._attempts]
        attempt = _Attempt(name, self._send(name, silent), self._respond())
        attempt.pump = asyncio.ensure_future(self._pump(attempt))
        self._attempts.append(attempt)
        return True

    async def _pump(self, attempt: _Attempt) -> None:
        error: Exception | None = None
        try:
            async for batch in attempt.batches:
                await self._news.put((attempt, batch, None))
        except asyncio.CancelledError:
            if attempt.stopped:
                raise
            error = RayActorError()
        except Exception as caught:
            error = caught
        await self._news.put((attempt, None, error))

    def _stop(self, attempts: list[_Attempt]) -> None:
        for attempt in attempts[:]:
            attempt.stopped = True
            self._attempts.remove(attempt)
            attempt.pump.cancel()
            attempt.batches.cancel()


__all__ = ["HEARTBEAT", "Limits", "Race"]
