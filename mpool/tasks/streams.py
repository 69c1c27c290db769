"""Streams of results: the common base, and streams of text."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ..results import Chunk, Completion
from ..runtime.awaiting import Waiter
from .text_to_text import Reader, Request

if TYPE_CHECKING:
    from typing_extensions import Self

    from .. import _core
    from .options import Call

P = TypeVar("P")


class Reads(Protocol[P]):
    """The reader of a ticket, as streams use it."""

    def take(self) -> list[P]:
        """Pieces that were decided since it was asked last."""

    def check(self) -> None:
        """Raises the error of a ticket that is done, if it has one."""

    @property
    def ended(self) -> bool:
        """There is nothing more to come, though the ticket may not be done."""


class Flow(Generic[P]):
    """Iterates over the pieces of a call that runs. Each kind of stream adds how it is started and its ``result()``."""

    def __init__(self, ticket: _core.Ticket, reader: Reads[P], key: str) -> None:
        self._ticket, self._reader, self._key = ticket, reader, key
        self._ready: deque[P] = deque()
        self._seen = 0
        self._over = self._left = False

    def __iter__(self) -> Iteration[P]:
        return Iteration(self)

    def __next__(self) -> P:
        while not self._ready:
            if self._over:
                raise StopIteration
            done = self._ticket.done()
            self._ready.extend(self._reader.take())
            if self._ready:
                break
            if done or self._reader.ended:
                self._over = True
                if not self._left:
                    self._ticket.wait()
                    self._reader.check()
                raise StopIteration
            self._wait()
        return self._ready.popleft()

    def _wait(self) -> None:
        try:
            with Waiter(self._ticket):
                self._seen = self._ticket.wait_progress(self._seen)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Cancels what is not done. Idempotent."""
        if not self._ticket.done():
            self._left = True
            self._ticket.cancel()
        self._over = True
        self._ready.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "cancelled" if self._left else "done" if self._ticket.done() else "running"
        return f"<mpool.{type(self).__name__} of {self._key}, {state}>"


class Iteration(Generic[P]):
    """The iterator that a ``for`` holds. Dropping it before the end, by ``break`` or an exception, cancels the
    stream."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Flow[P]) -> None:
        self._stream = stream

    def __iter__(self) -> Iteration[P]:
        return self

    def __next__(self) -> P:
        return next(self._stream)

    def __del__(self) -> None:
        if not self._stream._over:
            self._stream.close()


class Stream(Flow[Chunk]):
    """Pieces of a text, as they are decided. Made by ``generate(..., stream=True)`` and ``chat(..., stream=True)``.

    Iterating gives :class:`mpool.Chunk` s; the last of each choice carries its ``finish_reason``. Leaving early, by
    ``break``, ``close()``, the end of a ``with``, or by dropping the stream, cancels the work; what was written till
    then stays readable in :meth:`result`. The work starts with the call, not with the first iteration, and does not
    wait for a slow reader. One thread at a time may iterate.

    Example:
        >>> stream = mpool.generate("Once upon a time", temperature=0, max_tokens=5, stream=True)
        >>> "".join(chunk.text for chunk in stream) == stream.result().text
        True
    """

    _reader: Reader

    def __init__(self, request: Request, call: Call | None, fail_fast: bool | None = None) -> None:
        ticket = request.submit(call, fail_fast)
        super().__init__(ticket, request.reader(ticket), request.entry.key)

    def result(self) -> Completion:
        """Waits for the end and gives all of it, whatever was iterated over before.

        Raises:
            MpoolError: the call failed. A stream that was left early does not fail: its ``finish_reason`` is
                ``"cancelled"``.
        """
        with Waiter(self._ticket):
            self._ticket.wait()
        if not self._left:
            self._reader.check()
        return self._reader.completion()
