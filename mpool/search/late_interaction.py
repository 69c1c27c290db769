"""Late interaction: exact scores of queries and documents that are matrices of token vectors, as of ColBERT models.

The C core computes the scores on the compute threads of the default pool. A score depends on its query and document
only: it has the same bits alone or among others, with any number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .. import _core
from ..api.functions import default_pool
from ..checks import integer, refuse
from ..errors import InvalidArgument
from ..host.resources import typed
from ..tasks.embedding_results import refuse_results
from .nearest import Neighbours, queries_at_once
from .similarities import array_of, refuse_wide

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_SHAPE = ("matrices of finite numbers of shape (tokens, d) with equal d: one array, a sequence of arrays, an array of "
          "shape (n, tokens, d), or an object with the attributes values and offsets")
#: Maximum number of query tokens that are compared at once.
_TOKENS = 1024
#: Maximum number of tokens of a query.
_QUERY = 1 << 20
#: Components that are converted to float32 at once.
_BLOCK = 1 << 24


class PackedTokens(NamedTuple):
    """Token vectors of many texts, one text after the other.

    Attributes:
        values: token vectors, float32 or int8 of shape ``(tokens, d)``.
        offsets: the first token of each text, and the end, int64 of shape ``(n + 1,)``.
        scales: factor of each token, float32 of shape ``(tokens,)``, or ``None``.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]
    scales: NDArray[np.float32] | None = None


class _Ragged(Protocol):
    """Token vectors of many texts with an optional attribute ``scales``; see :class:`PackedTokens`."""

    @property
    def values(self) -> Any: ...
    @property
    def offsets(self) -> Any: ...


@typed
def maxsim(query: ArrayLike | Sequence[ArrayLike] | _Ragged, documents: ArrayLike | Sequence[ArrayLike] | _Ragged, *,
           top_k: int | None = None) -> NDArray[np.float32] | Neighbours:
    """Scores documents against queries by late interaction, exactly.

    The score is the sum, over the query's tokens, of the largest dot product with a token of the document. For cosine
    similarity, pass normalised vectors.

    Args:
        query: token vectors of one query, of shape ``(tokens, d)``, or of several: a sequence of such arrays, an array
            of shape ``(n, tokens, d)``, or an object with ``values`` and ``offsets``, such as
            :class:`mpool.search.PackedTokens`. Every query needs a token.
        documents: token vectors of documents in the same forms. float32 and int8 are used as they are, without a
            copy; other types are converted block by block. With ``scales``, a token's vector is ``values[i] *
            scales[i]``: see :func:`mpool.search.quantize_tokens`. A document without tokens scores ``-inf``. For int8
            documents, each query token is rounded to 24 bits, with an error of at most 1.004 * 2^-23 of its largest
            absolute component; the products are exact.
        top_k: ``None``, or the number of best documents to return for each query, at least 1.

    Returns:
        float32 of shape ``(queries, documents)``. With ``top_k``, :class:`mpool.search.Neighbours` of shape ``(queries,
        min(top_k, documents))``, best first, equal scores by index. For one query of shape ``(tokens, d)``, without
        the first dimension.

    Raises:
        InvalidArgument: shapes do not match, a number is NaN or infinite, a product exceeds float32, or one document
            is too large for its queries (query tokens x document tokens x d above 2^35).

    Example:
        >>> query = [[1.0, 0.0], [0.0, 1.0]]
        >>> mpool.maxsim(query, [[[1.0, 0.0]], [[0.6, 0.8], [1.0, 0.0]]]).tolist()
        [1.0, 1.7999999523162842]
    """
    queries, single = ragged("query", query)
    store, _ = ragged("documents", documents)
    if queries.values.shape[1] != store.values.shape[1]:
        raise InvalidArgument(param="documents", got=f"vectors of {store.values.shape[1]:,} components",
                              allowed=f"vectors of {queries.values.shape[1]:,} components, like query")
    tokens = dense(queries)
    refuse_faults("query", queries, tokens, empty=True)
    longest = int(np.diff(queries.offsets).max(initial=0))
    if longest > _QUERY:
        raise InvalidArgument(param="query", got=f"a text of {longest:,} tokens",
                              allowed=f"texts of at most {_QUERY:,} tokens")
    number = None if top_k is None else integer(top_k)
    if top_k is not None and (number is None or number < 1):
        refuse("top_k", top_k, "None, or an integer of at least 1")
    count, total = len(queries.offsets) - 1, len(store.offsets) - 1
    most = min(number or 0, total)
    scores = np.empty((count, most if number else total), np.float32)
    indices = np.empty((count, most), np.int64)
    for start, stop in _groups(queries.offsets, most):
        begin, end = queries.offsets[start], queries.offsets[stop]
        search = _core.MaxSim(default_pool().registry, tokens[begin:end], queries.offsets[start:stop + 1] - begin, most)
        _add(search, store, None if number else scores[start:stop])
        if number:
            indices[start:stop], scores[start:stop] = search.nearest()
    if number is None:
        return scores[0] if single else scores
    return Neighbours(indices[0], scores[0]) if single else Neighbours(indices, scores)


@typed
def quantize_tokens(documents: ArrayLike | Sequence[ArrayLike] | _Ragged) -> PackedTokens:
    """Quantises token vectors to int8, with a scale per token: a quarter of the memory of float32.

    Args:
        documents: token vectors in the forms of :func:`mpool.maxsim`.

    Returns:
        :class:`PackedTokens` with int8 ``values`` and float32 ``scales``. ``values[i] * scales[i]`` differs from the
        vector by at most half of its scale, which is its largest absolute component / 127.

    Raises:
        InvalidArgument: a shape is not allowed, or a number is NaN or infinite.

    Example:
        >>> mpool.search.quantize_tokens([[[1.0, -0.5]]]).values.tolist()
        [[127, -64]]
    """
    store, _ = ragged("documents", documents)
    values, scales = np.empty(store.values.shape, np.int8), np.empty(len(store.values), np.float32)
    step = max(1, _BLOCK // store.values.shape[1])
    for start in range(0, len(values), step):
        part = slice(start, start + step)
        rows = dense(PackedTokens(store.values[part], store.offsets, None if store.scales is None
                                  else store.scales[part]))
        top = np.abs(rows).max(axis=1)
        if not np.isfinite(top).all():
            refuse_faults("documents", store, dense(store))
        scales[part] = np.maximum(top / np.float32(127), np.finfo(np.float32).tiny)
        values[part] = np.rint(rows / scales[part, None])
    return PackedTokens(values, store.offsets, scales)


# ---- arguments ----

def ragged(name: str, given: Any) -> tuple[PackedTokens, bool]:
    """Return token vectors as one array with offsets, and True if they are of one text of shape (tokens, d)."""
    if hasattr(given, "values") and hasattr(given, "offsets"):
        return _packed(name, given), False
    refuse_results(name, given, _SHAPE)
    array = _array(name, given) if isinstance(given, np.ndarray) else None
    if array is None:
        try:
            parts = [_array(name, part) for part in given]
        except TypeError:
            refuse(name, given, _SHAPE)
        if parts and all(part.ndim == 1 for part in parts):
            array = _array(name, given)
        elif any(part.ndim != 2 or part.shape[1:] != parts[0].shape[1:] for part in parts) or not parts:
            raise InvalidArgument(param=name, got=", ".join(map(str, sorted({part.shape for part in parts})[:4])) or
                                  f"an empty {type(given).__name__}", allowed=_SHAPE)
        else:
            offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
            return _checked(name, PackedTokens(np.concatenate(parts), offsets)), False
    if array.ndim not in (1, 2, 3):
        raise InvalidArgument(param=name, got=f"shape {array.shape}", allowed=_SHAPE)
    if array.ndim == 3:
        offsets = np.arange(0, len(array) + 1, dtype=np.int64) * array.shape[1]
        return _checked(name, PackedTokens(array.reshape(-1, array.shape[2]), offsets)), False
    return _checked(name, PackedTokens(array, np.array([0, len(array)], np.int64))), array.ndim == 2


def _array(name: str, value: Any) -> NDArray[Any]:
    array = array_of(name, value, _SHAPE)
    if array.dtype.kind not in "fiu":
        raise InvalidArgument(param=name, got=f"dtype {array.dtype}", allowed=_SHAPE)
    return array


def _packed(name: str, given: Any) -> PackedTokens:
    offsets = _array(name, given.offsets)
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or not len(offsets):
        raise InvalidArgument(param=name, got=f"offsets of {offsets.dtype} and shape {offsets.shape}",
                              allowed="an object whose `offsets` are integers of shape (n + 1,)")
    scales = getattr(given, "scales", None)
    if scales is not None:
        scales = _array(name, scales).astype(np.float32, copy=False)
    return _checked(name, PackedTokens(_array(name, given.values), offsets.astype(np.int64, copy=False), scales))


def _checked(name: str, store: PackedTokens) -> PackedTokens:
    values, offsets, scales = store
    if values.ndim != 2 or values.shape[1] == 0:
        raise InvalidArgument(param=name, got=f"shape {values.shape}", allowed=_SHAPE)
    refuse_wide(name, values.shape[1])
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if offsets[0] != 0 or offsets[-1] != len(values) or len(falls):
        first, last = (offsets[falls[0]], offsets[falls[0] + 1]) if len(falls) else (offsets[0], offsets[-1])
        got = f"offsets that {'descend ' if len(falls) else 'go '}from {first:,} to {last:,}"
        raise InvalidArgument(param=name, got=got,
                              allowed=f"an object whose `offsets` ascend from 0 to {len(values):,}, the number "
                                      "of tokens")
    if scales is not None and scales.shape != (len(values),):
        raise InvalidArgument(param=name, got=f"scales of shape {scales.shape}",
                              allowed=f"vectors with one scale per token, an array of shape ({len(values)},)")
    return store


def dense(store: PackedTokens) -> NDArray[np.float32]:
    """Return the vectors as float32, multiplied by their scales."""
    with np.errstate(over="ignore"):  # infinite numbers are refused later
        rows = np.ascontiguousarray(store.values, np.float32)
        return rows if store.scales is None else rows * store.scales[:, None]


def refuse_faults(name: str, store: PackedTokens, rows: NDArray[np.float32], *, empty: bool = False) -> None:
    """Raise InvalidArgument for the first text with a number that is not finite; with ``empty``, or without tokens."""
    lengths = np.diff(store.offsets)
    if empty and not lengths.all():
        raise InvalidArgument(param=name, got=f"text {int(lengths.argmin()):,} without tokens",
                              allowed="at least one token for each text")
    bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
    if len(bad):
        text = int(np.searchsorted(store.offsets, bad[0], "right")) - 1
        raise InvalidArgument(param=name, got=f"NaN, infinity or a number beyond float32 in text {text:,}",
                              allowed=_SHAPE)


# ---- scoring ----

def _groups(offsets: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of queries that are compared at once: as many as the limits of tokens and results allow, at
    least one."""
    step = queries_at_once(most)
    start, count = 0, len(offsets) - 1
    while start < count:
        fit = int(np.searchsorted(offsets, offsets[start] + _TOKENS, "right")) - 1
        stop = max(start + 1, min(count, fit, start + step))
        yield start, stop
        start = stop


def _add(search: _core.MaxSim, store: PackedTokens, scores: NDArray[np.float32] | None) -> None:
    """Compare the queries of a search with all documents, and write all scores to ``scores`` unless it is None."""
    count = len(store.offsets) - 1
    direct = store.values.dtype in (np.float32, np.int8) and store.values.flags.c_contiguous
    budget = max(1, _BLOCK // store.values.shape[1])
    start = 0
    while start < count:
        stop = count if direct else int(np.searchsorted(store.offsets, store.offsets[start] + budget, "right")) - 1
        stop = max(start + 1, stop)
        begin, end = store.offsets[start], store.offsets[stop]
        values = store.values[begin:end]
        with np.errstate(over="ignore"):
            part = values if direct else np.ascontiguousarray(values, np.float32)
        whole = start == 0 and stop == count
        out = None if scores is None else scores if whole else np.empty((len(scores), stop - start), np.float32)
        try:
            search.add(part, store.offsets[start:stop + 1] - begin,
                       None if store.scales is None else store.scales[begin:end], out)
        except InvalidArgument as error:
            raise InvalidArgument(str(error), param="documents") from None
        if scores is not None and out is not None and not whole:
            scores[:, start:stop] = out
        start = stop


__all__ = ["PackedTokens", "maxsim", "quantize_tokens"]
