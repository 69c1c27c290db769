"""Streams for asyncio: the common base, streams of text, and streams of image generation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..errors import Cancelled
from ..results import Chunk, Completion
from ..runtime import awaiting as _awaiting
from ..runtime.watching import Followed, watcher
from . import options as _options
from .images_result import ImageStep
from .text_to_text import unread

if TYPE_CHECKING:
    from typing_extensions import Self

    from .. import _core
    from .images_result import GeneratedImages
    from .options import Call
    from .streams import Flow, Reads
    from .text_to_image import Reader as PictureReader
    from .text_to_text import Reader

P = TypeVar("P")


class Starts(Protocol[P]):
    """A request that is ready for the core, as streams use it."""

    @property
    def core_key(self) -> str:
        """Key of the model whose queue the stream waits for."""

    def submit(self, call: Call | None, fail_fast: bool | None = None, again: bool = False) -> _core.Ticket:
        """Starts it. ``fail_fast``, ``again``: as of Call.keywords."""

    def reader(self, ticket: _core.Ticket) -> Reads[P]:
        """The reader of the request's ticket."""


class AsyncFlow(Generic[P]):
    """Iterates over the pieces of a call, which it starts when it is first asked; to be awaited, too.

    A start that fails raises the same error on every use. Several tasks may read one stream:
    each piece goes to one of them, and the work is cancelled with the last of them.
    """

    def __init__(self, make: Callable[[], Awaitable[Starts[P]]], call: Call) -> None:
        self._make: Callable[[], Awaitable[Starts[P]]] | None = make
        self._call: Call | None = call
        self._ticket: _core.Ticket | None = None
        self._reader: Reads[P] | None = None
        self._followed: Followed | None = None
        self._error: Exception | None = None
        self._turn, self._starters = asyncio.Lock(), 0
        self._ready: deque[P] = deque()
        self._over = self._left = False

    @classmethod
    def _of_job(cls, stream: Flow[P]) -> Self:
        """Over what a job's own stream reads."""
        self = cls.__new__(cls)
        self._make, self._call, self._ticket, self._reader = None, None, stream._ticket, stream._reader
        self._followed, self._error, self._turn, self._starters = None, None, asyncio.Lock(), 0
        self._ready, self._over, self._left = stream._ready, stream._over, stream._left
        return self

    async def _start(self) -> Self:
        """One of the waiting tasks starts the request; if that task is cancelled, the next one does."""
        if self._ticket is None and not self._left:
            self._starters += 1
            try:
                async with self._turn:
                    if self._ticket is None and self._error is None and not self._left:
                        await self._begin()
            except asyncio.CancelledError:
                if self._starters == 1:
                    self._leave()
                raise
            finally:
                self._starters -= 1
        if self._error is not None:
            raise self._error
        return self

    async def _begin(self) -> None:
        assert self._make is not None
        try:
            request = await self._make()
            if self._left:
                return
            call = self._call or _options.PLAIN
            wait = not call.fail_fast
            ticket = await watcher().enter(request.core_key, lambda: request.submit(call, True, wait), wait)
        except Exception as error:
            self._error, self._over, self._make = error, True, None
            return
        self._make = None
        if self._left:  # it was closed while it waited for its turn
            ticket.cancel()
        self._reader, self._ticket = request.reader(ticket), ticket

    def __await__(self) -> Generator[Any, None, Self]:
        return self._start().__await__()

    def __aiter__(self) -> _AsyncIteration[P]:
        return _AsyncIteration(self)

    async def __anext__(self) -> P:
        if not self._ready and (not self._over or self._error is not None):
            await self._start()
            if not self._over:
                await self._more()
        if not self._ready:
            raise StopAsyncIteration
        return self._ready.popleft()

    async def _more(self) -> None:
        """Until there are pieces, or no more."""
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
            if not isinstance(error, asyncio.CancelledError) or not _awaiting.others(ticket):
                self._leave()
            raise
        if not self._ready:
            self._over, self._followed = True, None
            if not self._left:
                reader.check()

    def _leave(self) -> None:
        if self._ticket is None:
            self._left = self._left or self._error is None
        elif not self._ticket.done():
            self._left = True
            self._ticket.cancel()
        self._over = True
        self._ready.clear()

    async def aclose(self) -> None:
        """Cancels what is not done. Idempotent."""
        self._leave()

    async def __aenter__(self) -> Self:
        return await self._start()

    async def __aexit__(self, *error: object) -> None:
        self._leave()


class _AsyncIteration(Generic[P]):
    """The iterator that an ``async for`` holds. Dropping it before the end cancels the stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: AsyncFlow[P]) -> None:
        self._stream = stream

    def __aiter__(self) -> _AsyncIteration[P]:
        return self

    async def __anext__(self) -> P:
        return await self._stream.__anext__()

    def __del__(self) -> None:
        if not self._stream._over:
            self._stream._leave()


class AsyncStream(AsyncFlow[Chunk]):
    """Pieces of a text, as they are decided. Made by ``generate(..., stream=True)`` and ``chat(..., stream=True)``.

    Iterating (``async for``) gives :class:`mpool.Chunk` s; the work starts with the first of them. Leaving early, by
    ``break``, ``aclose()``, the end of an ``async with``, or by dropping it, cancels the work; what was written till
    then stays readable in :meth:`result`, which is empty if it never started. ``await`` of the stream starts the work
    and gives the stream itself. A start that fails raises the same error on every use. Several
    tasks may read one stream: each piece goes to one of them, and the work is cancelled with the last of them.
    """

    _reader: Reader | None

    async def result(self) -> Completion:
        """Waits for the end and gives all of it, whatever was iterated over before.

        Raises:
            MpoolError: the call failed, the same error each time. A stream that was left early does not fail: its
                ``finish_reason`` is ``"cancelled"``.
        """
        await self._start()
        if self._ticket is None or self._reader is None:
            return unread()
        await watcher().done(self._ticket)
        if not self._left:
            self._reader.check()
        return self._reader.completion()


class AsyncImageStream(AsyncFlow[ImageStep]):
    """Steps of images in the making. Made by ``generate_image(..., stream=True)``.

    As :class:`AsyncStream`, but iterating gives :class:`mpool.ImageStep` s, and :meth:`result` of a stream that was
    left early raises Cancelled.
    """

    _reader: PictureReader | None

    async def result(self) -> GeneratedImages:
        """Waits for the images, regardless of what was iterated over before.

        Raises:
            Cancelled: the stream was left early.
            MpoolError: the call failed, the same error each time.
        """
        await self._start()
        if self._ticket is not None:
            await watcher().done(self._ticket)
        if self._left or self._ticket is None or self._reader is None:
            raise Cancelled("the stream was left before its pictures were done")
        return self._reader.result()


def __getattr__(name: str) -> Any:
    from .._renamed import of_module

    return of_module(__name__, name)
