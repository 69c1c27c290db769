"""Jobs: handles of requests that :func:`mpool.submit` started without waiting for the result."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import Timeout
from ..host import native_calls
from ..host.resources import typed, typed_async
from ..runtime import deadlines as _deadlines

if TYPE_CHECKING:
    from .. import _core
    from ..runtime.history import TrackedRequest
    from .streams import StreamIterator, TicketStream


class Job:
    """Handle of a request in flight, returned by :func:`mpool.submit`.

    :meth:`result` waits for the result in any thread; a coroutine uses ``await job``. A job that generates text or
    images can be iterated over with ``for`` or ``async for``, which yields stream chunks or image steps. Dropping the
    last reference to a job cancels the request.

    Any number of threads and asyncio tasks, also of several event loops, may wait for one job. If a task that awaits a
    job is cancelled, the request is cancelled only if no other thread or task waits for it; :meth:`cancel` always
    cancels it.

    A vision model's vectors and scores are one request of the queue per input. If the queue has no room for all inputs
    of a job, the rest start while a thread or task waits for the job or calls :meth:`done`.

    Attributes:
        capability: capability of the request.
        model: key of the model.
    """

    def __init__(self, capability: str, model: str, running: TrackedRequest) -> None:
        self.capability, self.model, self._running = capability, model, running

    @property
    def _ticket(self) -> _core.Ticket | None:
        """The ticket of the request; of several tickets, the first that is not done, else the last."""
        raise NotImplementedError

    def _joined(self) -> AbstractContextManager[None]:
        """Return a context in which the caller waits for :attr:`_ticket` and those after it."""
        return nullcontext()

    def _finish(self) -> Any:
        """Return the result of the finished ticket."""
        raise NotImplementedError

    def _tokens(self) -> int:
        """Return the number of tokens of the request, for its record in the history."""
        return 0

    def _collect(self) -> Any:
        """Return the result of the finished ticket. Records the end of the request."""
        try:
            found = self._finish()
        except BaseException as error:
            self._running.failed(error)
            raise
        self._running.completed(self._tokens())
        return found

    @typed
    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result.

        Args:
            timeout: seconds to wait; 0: return or raise at once; None: wait until the job is done. After the
                timeout, the job continues.

        Returns:
            The result of the corresponding function, such as :func:`mpool.embed` or :func:`mpool.generate`.

        Raises:
            InvalidArgument: ``timeout`` is not a number of seconds.
            Timeout: the job is not done after ``timeout`` seconds.
            Cancelled: the job was cancelled.
            MpoolError: the request failed with this error.
        """
        seconds = _deadlines.seconds_of(timeout, zero=True)
        end = None if seconds is None else time.monotonic() + seconds
        while (ticket := self._ticket) is not None and not ticket.done():
            left = None if end is None else end - time.monotonic()
            with self._joined(), ticket.join():
                done = ticket.wait(left) if left is None or left > 0 else ticket.done()
            if not done:
                raise Timeout(f"the job is not done after {seconds:g} s; it continues", key=self.model)
        return self._collect()

    def _finish_blocks(self) -> bool:
        """Return True if :meth:`_finish` computes inputs again or copies large outputs: too long for an event loop."""
        return False

    @typed
    def done(self) -> bool:
        """Return True once the job has a result or an error."""
        done = self._ticket is None or self._ticket.done()
        if done:
            self._running.finished(self._tokens())
        return done

    @typed
    def cancel(self) -> bool:
        """Cancel the request. A running request stops after its current layer or token.

        Returns:
            True: :meth:`result` will raise, usually :class:`mpool.errors.Cancelled`, even if the model finishes its
            work at that moment. False: the request had already ended, and its result or error stays.
        """
        cancelled = self._ticket is not None and self._ticket.cancel()
        if cancelled:
            self._running.cancelled()
        return cancelled

    @typed
    def position(self) -> int:
        """Return the number of requests ahead of this one in the queue; -1 once it runs or is done."""
        return -1 if self._ticket is None else self._ticket.position()

    @typed
    def eta(self) -> float | None:
        """Return the predicted number of seconds until the job is done.

        Returns:
            0.0 if it is done; None if no prediction is possible, such as for a model that is not loaded.
        """
        if self.done():
            return 0.0
        assert self._ticket is not None
        return self._ticket.eta() or None

    def __await__(self) -> Generator[Any, None, Any]:
        return self._wait_async().__await__()

    @typed_async
    async def _wait_async(self) -> Any:
        from ..runtime.watching import watcher

        while (ticket := self._ticket) is not None and not ticket.done():
            with self._joined():
                await watcher().done(ticket)
        if self._ticket is not None and self._finish_blocks():
            return await native_calls.REQUESTS.arun(self._collect)
        return self._collect()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Job cannot be pickled: pickle its result()")

    def __repr__(self) -> str:
        return f"<mpool.Job of {self.model}, {self.capability}, {'done' if self.done() else 'running'}>"


class StreamJob(Job):
    """A job whose result is text or images. Iterating over it yields stream chunks or image steps."""

    def __init__(self, capability: str, stream: TicketStream[Any]) -> None:
        super().__init__(capability, stream._key, stream._running)
        self._stream: Any = stream

    @property
    def _ticket(self) -> _core.Ticket:
        ticket: _core.Ticket = self._stream._ticket
        return ticket

    def _finish_blocks(self) -> bool:
        return bool(self._stream._is_outdated())

    def _finish(self) -> Any:
        return self._stream.result()

    def __iter__(self) -> StreamIterator[Any]:
        return iter(self._stream)

    def __aiter__(self) -> AsyncIterator[Any]:
        from .async_streams import AsyncTicketStream

        return AsyncTicketStream._from_job(self._stream).__aiter__()
