"""The iterator that :func:`mpool.embed_iter` returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..resources import typed
from .steps import IterRequest, drive_each


class EmbedIterator(Iterator[Any]):
    """Iterator over the vectors of texts, in order, returned by :func:`mpool.embed_iter`. Also a context manager.

    Closing the iterator cancels the requests in flight: with ``close()``, at the end of a ``with`` block, or when the
    last reference to it is dropped.

    Attributes:
        done: number of texts processed so far.
        failed: number of texts among them without a vector (rows of NaN; only with ``on_error="null"``).
    """

    def __init__(self, request: IterRequest) -> None:
        self._request, self._rows = request, drive_each(request.steps())

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
        return next(self._rows)

    def __enter__(self) -> EmbedIterator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @typed
    def close(self) -> None:
        """Cancel the requests in flight. The iterator then yields no more vectors."""
        self._rows.close()  # type: ignore[attr-defined]
        self._request.bar.close()
