"""The iterator that :func:`mpool.embed_iter` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from ..errors import InvalidArgument
from ..host.resources import typed
from ..runtime.history import TrackedRequest
from .steps import IterRequest, drive_each


class EmbedIterator(Iterator[Any]):
    """Iterator over the results of texts, in order, returned by :func:`mpool.embed_iter`. Also a context manager.

    Closing the iterator cancels the requests in flight: with ``close()``, at the end of a ``with`` block, or when the
    last reference to it is dropped. Only one thread at a time may iterate; any thread may close the iterator.

    Attributes:
        done: number of texts processed so far.
        failed: number of texts among them without a result (rows of NaN; only with ``output="dense"`` and
            ``on_error="null"``).
    """

    def __init__(self, request: IterRequest, running: TrackedRequest) -> None:
        self._request, self._rows = request, drive_each(request, running)

    @property
    def done(self) -> int:
        return self._request.done

    @property
    def failed(self) -> int:
        return self._request.failed

    def __iter__(self) -> EmbedIterator:
        return self

    @typed
    def __next__(self) -> Any:
        try:
            return next(self._rows)
        except ValueError as error:
            if not _is_running(error):
                raise
            raise InvalidArgument("the iterator of embed_iter is already in use by another thread, or by the texts "
                                  "that it reads", hint="Hold a lock around next(), or call embed_iter once per "
                                                        "thread") from None

    def __enter__(self) -> EmbedIterator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an EmbedIterator cannot be pickled: pickle the vectors that it yields")

    @typed
    def close(self) -> None:
        """Cancel the requests in flight. The iterator then yields no more results.

        The loop of another thread that waits for a result ends once the slice of texts in progress is computed, or the
        iterable has returned its next text.
        """
        self._request.closed = True
        try:
            self._rows.close()  # type: ignore[attr-defined]
        except ValueError as error:
            if not _is_running(error):
                raise
            return  # the running generator closes itself and the progress bar
        self._request.bar.close()


def _is_running(error: ValueError) -> bool:
    """Return True for Python's error for a generator that is running; an error from inside it has further frames."""
    trace = error.__traceback__
    return type(error) is ValueError and trace is not None and trace.tb_next is None
