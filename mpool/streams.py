"""A text as it is being written."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from ._awaiting import Waiter
from .generation import Reader, Request
from .results import Chunk, Completion

if TYPE_CHECKING:
    from . import _core
    from ._options import Call


class Stream:
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

    def __init__(self, request: Request, call: Call | None, fail_fast: bool | None = None) -> None:
        self._ticket: _core.Ticket = request.submit(call, fail_fast)
        self._reader = Reader(request, self._ticket)
        self._ready: deque[Chunk] = deque()
        self._seen = 0
        self._over = self._left = False

    def __iter__(self) -> _Iteration:
        return _Iteration(self)

    def __next__(self) -> Chunk:
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

    def close(self) -> None:
        """Cancels what is not done. Idempotent."""
        if not self._ticket.done():
            self._left = True
            self._ticket.cancel()
        self._over = True
        self._ready.clear()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "cancelled" if self._left else "done" if self._ticket.done() else "running"
        return f"<mpool.Stream of {self._reader.request.entry.key}, {state}>"


class _Iteration:
    """What a ``for`` holds: when it is dropped before the end, by ``break`` or an exception, the stream is left."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Chunk:
        return next(self._stream)

    def __del__(self) -> None:
        if not self._stream._over:
            self._stream.close()


