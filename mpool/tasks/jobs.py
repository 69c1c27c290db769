"""Jobs: requests that were started and not waited for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Generator
from typing import TYPE_CHECKING, Any

from ..errors import MpoolError, NumericError, Timeout
from ..runtime import threads as _threads
from ..runtime.awaiting import Waiter

if TYPE_CHECKING:
    from .. import _core
    from .steps import VectorRequest
    from .streams import StreamIterator, TicketStream


class Job:
    """A request in flight. Made by :func:`mpool.submit`.

    ``result()`` waits for it, in any thread; in a coroutine, ``await job`` does. One that generates text or
    pictures can be iterated over, with ``for`` or ``async for``, and gives its text piece by piece, or steps. Dropping
    it cancels it.

    Any number of threads and tasks, in loops of several threads too, may wait for one job. Cancelling a task that
    awaits a job cancels the job only if no other waits for it; :meth:`cancel` always does.

    Attributes:
        capability: capability of the request.
        model: key of the model.
    """

    def __init__(self, capability: str, model: str) -> None:
        self.capability, self.model = capability, model

    @property
    def _ticket(self) -> _core.Ticket | None:
        raise NotImplementedError

    def _finish(self) -> Any:
        """The result of a ticket that is done."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the result: what :func:`mpool.embed` or :func:`mpool.generate` return.

        Args:
            timeout: seconds to wait; 0: not at all; None: as long as it takes. The job goes on when they are over.

        Raises:
            InvalidArgument: the timeout is no number of seconds.
            Timeout: it is not done yet.
            Cancelled: it was cancelled.
            MpoolError: it failed.
        """
        seconds = _threads.seconds_of(timeout, zero=True)
        ticket = self._ticket
        if ticket is not None and not ticket.done():
            with Waiter(ticket):
                done = ticket.wait(seconds) if seconds is None or seconds > 0 else ticket.done()
            if not done:
                raise Timeout(f"the job is not done after {seconds:g} s; it goes on", key=self.model)
        return self._finish()

    def _recovers(self) -> bool:
        """True if the result of the finished ticket needs more computation."""
        return False

    def done(self) -> bool:
        """True once there is a result or an error."""
        return self._ticket is None or self._ticket.done()

    def cancel(self) -> bool:
        """Stops it, within a layer or a token if it runs. Returns False if it was done already."""
        if self.done():
            return False
        assert self._ticket is not None
        self._ticket.cancel()
        return True

    def position(self) -> int:
        """Requests ahead of it in the queue; -1 once it runs or is done."""
        return -1 if self._ticket is None else self._ticket.position()

    def eta(self) -> float | None:
        """Predicted seconds until it is done; 0.0 when it is; None: unknown, as for a model that is not loaded."""
        if self.done():
            return 0.0
        assert self._ticket is not None
        return self._ticket.eta() or None

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Any:
        import asyncio

        from ..runtime.watching import watcher

        if self._ticket is not None:
            await watcher().done(self._ticket)
            if self._recovers():
                return await asyncio.to_thread(self._finish)
        return self._finish()

    def __repr__(self) -> str:
        return f"<mpool.Job of {self.model}, {self.capability}, {'done' if self.done() else 'running'}>"


class VectorJob(Job):
    """A job whose result is vectors or scores."""

    def __init__(self, capability: str, request: VectorRequest) -> None:
        from . import vectors

        super().__init__(capability, request.plan.entry.key)
        self._request, self._told = request, False
        kind, plan, call = request.kind, request.plan, request.call
        self._pack = kind.pack(plan, request.inputs, 0, request.single, call)
        # None if no input is good
        self._started = vectors.submit(kind, plan, self._pack, call, vectors.lane_of(len(request.inputs)), True)

    @property
    def _ticket(self) -> _core.Ticket | None:
        return self._started

    def _recovers(self) -> bool:
        if self._started is None or not self._request.plan.null:
            return False
        try:
            self._started.check()
        except NumericError:
            return True
        except MpoolError:
            pass
        return False

    def _finish(self) -> Any:
        from . import vectors

        request = self._request
        rows = vectors.landed(request.kind, request.plan, self._pack, self._started, request.call)
        if not self._told:
            self._told = True
            vectors.tell(request.kind, request.plan, self._pack, rows)
        return request.finish(rows)


class StreamJob(Job):
    """A job whose result is text or images; its pieces can be iterated over."""

    def __init__(self, capability: str, stream: TicketStream[Any]) -> None:
        super().__init__(capability, stream._key)
        self._stream: Any = stream

    @property
    def _ticket(self) -> _core.Ticket:
        ticket: _core.Ticket = self._stream._ticket
        return ticket

    def _finish(self) -> Any:
        return self._stream.result()

    def __iter__(self) -> StreamIterator[Any]:
        return iter(self._stream)

    def __aiter__(self) -> AsyncIterator[Any]:
        from .async_streams import AsyncTicketStream

        return AsyncTicketStream._from_job(self._stream).__aiter__()
