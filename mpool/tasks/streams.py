"""Streams of results: the common base, and text streams."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from ..checks import missing_attribute
from ..completions import Chunk, Completion
from ..host.resources import typed
from ..runtime.swapping import ended_outdated
from .text_to_text import Reader, Request

if TYPE_CHECKING:
    from typing_extensions import Self

    from .. import _core
    from ..runtime.history import TrackedRequest
    from .options import Call

T = TypeVar("T")


class StreamRequest(Protocol):
    """A request that was submitted for a stream."""

    @property
    def entry(self) -> Any:
        """Entry of the model."""


class TicketReader(Protocol[T]):
    """Converts the progress of a ticket to the items of a stream."""

    def take(self) -> list[T]:
        """Return the items that were produced since the last call."""

    def check(self) -> None:
        """Raise the error of a finished ticket, if it has one."""

    @property
    def ended(self) -> bool:
        """True if no more items will follow, even if the ticket is not finished."""


class TicketStream(Generic[T]):
    """Iterates over the items of a running request. Subclasses add the submission and ``result()``.

    Args:
        ticket: ticket of the request.
        reader: reader of the ticket.
        request: the request.
        running: records its end in the history.
        again: makes the same stream anew; None: the request is not made again.
    """

    def __init__(self, ticket: _core.Ticket, reader: TicketReader[T], request: StreamRequest, running: TrackedRequest,
                 again: Callable[[], TicketStream[T]] | None) -> None:
        self._ticket, self._reader, self._key = ticket, reader, request.entry.key
        self._request, self._running, self._again = request, running, again
        running.follow(ticket, self)
        self._ready: deque[T] = deque()
        self._seen = 0
        self._exhausted = self._cancelled = False

    if not TYPE_CHECKING:  # a type checker still reports unknown attributes
        __getattr__ = missing_attribute

    def __iter__(self) -> StreamIterator[T]:
        return _OpenIterator(self)

    @typed
    def __next__(self) -> T:
        while not self._ready:
            if self._exhausted:
                raise StopIteration
            done = self._ticket.done()
            self._ready.extend(self._reader.take())
            if self._ready:
                self._again = None
                break
            if done and self._begins_again():
                continue
            if done or self._reader.ended:
                self._exhausted = True
                if not self._cancelled:
                    self._ticket.wait()
                    self._check()
                raise StopIteration
            self._wait()
        return self._ready.popleft()

    def _check(self) -> None:
        """Raise the error of the finished ticket, if it has one. Records the end of the request."""
        try:
            self._reader.check()
        except BaseException as error:
            self._running.failed(error)
            raise
        self._running.completed()

    def _wait(self) -> None:
        try:
            with self._ticket.join():
                self._seen = self._ticket.wait_progress(self._seen)
        except BaseException:
            self.close()
            raise

    def _is_outdated(self) -> bool:
        """Return True if the core refused to load the model, because its files changed, and no item was read."""
        return self._again is not None and not self._cancelled and ended_outdated(self._request, self._ticket)

    def _begins_again(self) -> bool:
        """If the model's files changed before the core loaded them, submit the request for the files of now."""
        if not self._is_outdated():
            return False
        assert self._again is not None
        fresh = self._again()
        self._ticket, self._reader, self._request, self._seen = fresh._ticket, fresh._reader, fresh._request, 0
        self._running.follow(self._ticket, self)
        return True

    def _wait_done(self) -> None:
        """Wait until the request has ended."""
        while True:
            with self._ticket.join():
                self._ticket.wait()
            if not self._begins_again():
                return

    def close(self) -> None:
        """Cancels the request unless it is finished. Idempotent."""
        if not self._ticket.done():
            self._cancelled = True
            self._ticket.cancel()
            self._running.cancelled()
        else:
            self._running.finished()
        self._exhausted = True
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream cannot be pickled: pickle its result()")

    def __repr__(self) -> str:
        state = "cancelled" if self._cancelled else "done" if self._ticket.done() else "running"
        return f"<mpool.{type(self).__name__} of {self._key}, {state}>"


class StreamIterator(Generic[T]):
    """The iterator of a ``for`` loop over a stream, and its class after the end of the stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: TicketStream[T]) -> None:
        self._stream = stream

    def __iter__(self) -> StreamIterator[T]:
        return self

    def __next__(self) -> T:
        return self._stream.__next__()  # not next(): `typed` does not convert a MemoryError of that call


class _OpenIterator(StreamIterator[T]):
    """An iterator before the end of its stream. Dropping it (``break``, an exception) cancels the stream.

    At the end of the stream it becomes a StreamIterator, which has no ``__del__``. Python prints and drops a
    KeyboardInterrupt that it raises in a ``__del__``, and every ``for`` loop to the end of a stream would call one.
    """

    __slots__ = ()

    def __next__(self) -> T:
        try:
            return self._stream.__next__()
        except BaseException:
            if self._stream._exhausted:
                self.__class__ = StreamIterator  # type: ignore[assignment]
            raise

    def __del__(self) -> None:
        if not self._stream._exhausted:
            self._stream.close()


class Stream(TicketStream[Chunk]):
    """Chunks of a completion while it is generated. Returned by ``generate(..., stream=True)`` and
    ``chat(..., stream=True)``.

    Iterating yields :class:`mpool.Chunk` s; the last chunk of each choice has its ``finish_reason``. Leaving the loop
    early, ``close()``, the end of a ``with`` block and dropping the stream cancel the request; :meth:`result` then
    returns the text generated so far. The request is submitted when the stream is created, not at the first iteration,
    and generation does not wait for a slow reader. Only one thread at a time may iterate.

    Example:
        >>> stream = mpool.generate("Once upon a time", temperature=0, max_tokens=5, stream=True)
        >>> "".join(chunk.text for chunk in stream) == stream.result().text
        True
    """

    _reader: Reader

    def __init__(self, request: Request, call: Call | None, running: TrackedRequest, fail_fast: bool | None = None,
                 again: Callable[[], Stream] | None = None) -> None:
        ticket = request.submit(call, fail_fast)
        super().__init__(ticket, request.reader(ticket), request, running, again)

    @typed
    def result(self) -> Completion:
        """Waits for the end and returns the whole completion, including chunks that were already read.

        Raises:
            MpoolError: the request failed. A stream that was closed early does not fail: its ``finish_reason`` is
                ``"cancelled"``.
        """
        self._wait_done()
        if not self._cancelled:
            self._check()
        return self._reader.completion()
