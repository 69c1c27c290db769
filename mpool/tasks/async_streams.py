"""Streams for asyncio: the common base, text streams and image streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from ..checks import missing_attribute
from ..completions import Chunk, Completion
from ..errors import Cancelled
from ..host.resources import error_of, shortened, typed_async
from ..runtime import tally
from ..runtime.swapping import afor_current, ended_outdated
from ..runtime.watching import Followed, watcher
from . import options as _options
from .images_result import ImageStep
from .text_to_text import cancelled_completion

if TYPE_CHECKING:
    from typing_extensions import Self

    from .. import _core
    from ..runtime.entry import Entry
    from ..runtime.history import TrackedRequest
    from .images_result import GeneratedImages
    from .options import Call
    from .streams import TicketReader, TicketStream
    from .text_to_image import Reader as ImageReader
    from .text_to_text import Reader

T = TypeVar("T")


class StreamRequest(Protocol[T]):
    """A validated request that a stream can submit."""

    @property
    def entry(self) -> Entry:
        """The model."""

    @property
    def core_key(self) -> str:
        """Key of the core's model; requests wait for space in this model's queue, and for memory."""

    def submit(self, call: Call | None, fail_fast: bool | None = None, uncounted: bool = False) -> _core.Ticket:
        """Submit the request; ``fail_fast`` and ``uncounted`` are those of :meth:`Call.keywords`."""

    def reader(self, ticket: _core.Ticket) -> TicketReader[T]:
        """Return a reader for the ticket of this request."""


class AsyncTicketStream(Generic[T]):
    """Iterates over the items of a request that it submits on first use. Awaiting it only submits the request.

    If the submission fails, every use raises the same error. Several tasks may read one stream: each item goes to one
    of them, and the request is cancelled when the last of them is cancelled or leaves its loop.
    """

    #: Stream of the job that this stream reads. If nothing else held it, dropping it would end the request in the
    #: history.
    _of_job: TicketStream[T] | None = None
    #: Number of loops that wait for an item, and of those between two items.
    _waiting_loops = _busy_loops = 0

    def __init__(self, make: Callable[[], Awaitable[StreamRequest[T]]], call: Call, running: TrackedRequest) -> None:
        self._running = running
        self._make: Callable[[], Awaitable[StreamRequest[T]]] | None = make
        self._make_again: Callable[[], Awaitable[StreamRequest[T]]] | None = make  # None: an item was read
        self._call: Call | None = call
        self._request: StreamRequest[T] | None = None
        self._ticket: _core.Ticket | None = None
        self._reader: TicketReader[T] | None = None
        self._followed: Followed | None = None
        self._error: Exception | None = None
        self._start_lock, self._starting_tasks = asyncio.Lock(), 0
        self._ready: deque[T] = deque()
        self._exhausted = self._cancelled = False

    @classmethod
    def _from_job(cls, stream: TicketStream[T]) -> Self:
        """Return an asynchronous stream that shares the ticket and the unread items of a job's stream."""
        self = cls.__new__(cls)
        self._make, self._call, self._ticket, self._reader = None, None, stream._ticket, stream._reader
        self._running, self._make_again, self._request = stream._running, None, None
        self._of_job = stream
        self._followed, self._error, self._start_lock, self._starting_tasks = None, None, asyncio.Lock(), 0
        self._ready, self._exhausted, self._cancelled = stream._ready, stream._exhausted, stream._cancelled
        return self

    if not TYPE_CHECKING:  # a type checker still reports unknown attributes
        __getattr__ = missing_attribute

        def __getitem__(self, key: object) -> NoReturn:
            # Python also calls this for a `for` loop. With __iter__, frameworks would take the stream for an iterable.
            raise TypeError(f"{type(self).__name__!r} object is not iterable with `for`: use `async for`, or a stream "
                            "of mpool instead of mpool.aio")

    async def _start(self) -> Self:
        """Submit the request once. If the submitting task is cancelled, the next waiting task submits the request."""
        if self._ticket is None and not self._cancelled:
            self._starting_tasks += 1
            try:
                async with self._start_lock:
                    if self._ticket is None and self._error is None and not self._cancelled:
                        await self._submit()
            except asyncio.CancelledError:
                if self._starting_tasks == 1:
                    self._cancel()
                    self._running.cancelled()
                raise
            finally:
                self._starting_tasks -= 1
        if self._error is not None:
            raise self._error
        return self

    async def _submit(self) -> None:
        make = self._make
        assert make is not None
        call = self._call or _options.PLAIN

        async def enter(request: StreamRequest[T]) -> tuple[StreamRequest[T], _core.Ticket] | None:
            if self._cancelled:
                return None
            wait = not call.fail_fast
            submit = partial(request.submit, call, True, wait)
            patience = request.entry.pool.config.request_timeout
            return request, await watcher().enter(request.core_key, submit, wait, call.deadline, patience)

        try:
            entered = await afor_current(make, enter)
        except Exception as error:
            found = error_of(error)
            if found is not None:
                found.__cause__ = error
            self._error, self._exhausted, self._make = shortened(found or error), True, None
            self._running.failed(self._error)
            return
        if entered is None:
            self._running.cancelled()
            return
        request, ticket = entered
        self._make = None
        self._running.follow(ticket, self)
        if self._cancelled:  # closed while it waited for space in the queue
            ticket.cancel()
            self._running.cancelled()
        tally.add_ticket(ticket)
        self._request, self._reader, self._ticket = request, request.reader(ticket), ticket

    def _begins_again(self, ticket: _core.Ticket) -> bool:
        """Return True if the next :meth:`_start` submits the request again, for the files of now: the core refused to
        load the model, because its files had changed, and no item was read."""
        if self._ticket is not ticket:  # another task has found it
            return not self._cancelled
        if self._make_again is None or self._cancelled or not ended_outdated(self._request, ticket):
            return False
        self._make, self._ticket = self._make_again, None
        return True

    async def _wait_done(self) -> None:
        """Submit the request unless it was submitted, and wait until it has ended."""
        while True:
            await self._start()
            ticket = self._ticket
            if ticket is None:
                return
            await watcher().done(ticket)
            if not self._begins_again(ticket):
                return

    def __await__(self) -> Generator[Any, None, Self]:
        return self._start().__await__()

    def __aiter__(self) -> _AsyncStreamIterator[T]:
        return _AsyncStreamIterator(self)

    async def __anext__(self) -> T:
        if not self._ready and (not self._exhausted or self._error is not None):
            await self._start()
            if not self._exhausted:
                await self._wait_for_items()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    @typed_async
    async def _wait_for_items(self) -> None:
        """Wait until there are unread items or the ticket is finished."""
        ticket, reader = self._ticket, self._reader
        assert ticket is not None and reader is not None

        def ready() -> bool | None:
            done = ticket.done()
            self._ready.extend(reader.take())
            return True if self._ready or done else None

        watch = watcher()
        self._followed = followed = watch.following(ticket)
        try:
            await watch.follow(followed, ready)
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError) or not ticket.waiters():
                self._cancel()
            raise
        if self._ready:
            self._make_again = None
        elif self._begins_again(ticket):
            await self._start()
            if not self._exhausted:
                await self._wait_for_items()
        else:
            self._exhausted, self._followed = True, None
            if not self._cancelled:
                self._check(reader)

    def _check(self, reader: TicketReader[T]) -> None:
        """Raise the error of the finished ticket, if it has one. Records the end of the request."""
        try:
            reader.check()
        except BaseException as error:
            self._running.failed(error)
            raise
        self._running.completed()

    def _cancel(self) -> None:
        if self._ticket is None:
            self._cancelled = self._cancelled or self._error is None
        elif not self._ticket.done():
            self._cancelled = True
            self._ticket.cancel()
            self._running.cancelled()
        else:
            self._running.finished()
        self._exhausted = True
        self._ready.clear()

    def __reduce__(self) -> NoReturn:
        raise TypeError("a stream cannot be pickled: pickle its result")

    async def aclose(self) -> None:
        """Cancels the request unless it is finished. Idempotent."""
        self._cancel()

    async def __aenter__(self) -> Self:
        return await self._start()

    async def __aexit__(self, *error: object) -> None:
        self._cancel()


class _AsyncStreamIterator(Generic[T]):
    """The iterator of an ``async for`` loop. Dropping the last one of a stream before the end cancels the stream.

    If a task is cancelled while it waits, ``_wait_for_items`` decides whether others still read the stream. A loop
    between two items counts as a waiter of the ticket.
    """

    __slots__ = ("_is_busy", "_stream", "_waiter")

    def __init__(self, stream: AsyncTicketStream[T]) -> None:
        self._stream = stream
        self._waiter: _core.Waiter | None = None
        self._join()

    def __aiter__(self) -> _AsyncStreamIterator[T]:
        return self

    async def __anext__(self) -> T:
        stream = self._stream
        self._leave()
        stream._waiting_loops += 1
        try:
            item = await stream.__anext__()
        finally:
            stream._waiting_loops -= 1
        self._join()
        return item

    def _join(self) -> None:
        self._is_busy = True
        self._stream._busy_loops += 1
        if self._stream._ticket is not None:
            self._waiter = self._stream._ticket.join()

    def _leave(self) -> None:
        self._stream._busy_loops -= self._is_busy
        self._is_busy = False
        if self._waiter is not None:
            self._waiter.leave(False)
            self._waiter = None

    def __del__(self) -> None:
        stream = self._stream
        if self._is_busy:
            self._leave()
            if not (stream._exhausted or stream._busy_loops or stream._waiting_loops):
                stream._cancel()


class AsyncStream(AsyncTicketStream[Chunk]):
    """Chunks of a completion while it is generated. Returned by ``generate(..., stream=True)`` and
    ``chat(..., stream=True)``.

    Iterating (``async for``) yields :class:`mpool.Chunk` s; the first iteration submits the request. ``await stream``
    submits it without reading and returns the stream itself. Leaving the loop early, ``aclose()``, the end of an
    ``async with`` block and dropping the stream cancel the request; :meth:`result` then returns the text generated so
    far, or an empty completion if the request was never submitted. If the submission fails, every use raises the same
    error. Several tasks may read one stream: each chunk goes to one of them, and the request is cancelled when the last
    of them is cancelled or leaves its loop.
    """

    _reader: Reader | None

    @property
    def prompt_tokens(self) -> int | None:
        """Number of tokens of the prompt; None before the request is submitted (``await stream``)."""
        return None if self._reader is None else len(self._reader.request.prompt)

    @typed_async
    async def result(self) -> Completion:
        """Waits for the end and returns the whole completion, including chunks that were already read.

        Raises:
            MpoolError: the request failed; every call raises the same error. A stream that was closed early does not
                fail: its ``finish_reason`` is ``"cancelled"``.
        """
        await self._wait_done()
        if self._ticket is None or self._reader is None:
            return cancelled_completion()
        if not self._cancelled:
            self._check(self._reader)
        return self._reader.completion()


class AsyncImageStream(AsyncTicketStream[ImageStep]):
    """Steps of images while they are generated. Returned by ``generate_image(..., stream=True)``.

    Like :class:`AsyncStream`, except that iterating yields :class:`mpool.results.ImageStep` s, and that :meth:`result`
    raises Cancelled after the stream was closed early.
    """

    _reader: ImageReader | None

    @typed_async
    async def result(self) -> GeneratedImages:
        """Waits for the images and returns them, even if steps were already read.

        Raises:
            Cancelled: the stream was closed early.
            MpoolError: the request failed; every call raises the same error.
        """
        await self._wait_done()
        if self._cancelled or self._ticket is None or self._reader is None:
            raise Cancelled("the stream was closed before its images were complete")
        self._check(self._reader)
        return self._reader.result()
