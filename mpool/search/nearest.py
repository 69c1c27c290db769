"""Exact search in arrays of vectors, in the C core, on the compute threads of the default pool.

The scores of a query and a vector do not depend on the other queries and vectors, nor on the number of threads, and
equal scores are ordered by index. Memory use grows with the number of results, not with the number of vectors: arrays
of other types than float32 are converted block by block, so that a ``numpy.memmap`` can be larger than the memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .. import _core
from ..api.functions import default_pool
from ..checks import integer, one_of, real, refuse
from ..errors import InvalidArgument
from ..host.resources import typed
from .similarities import refuse_mixed, refuse_wide, vectors_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

_METRICS = ("cosine", "dot")
_SHAPE = "an array of finite numbers of shape (n, d)"
#: Components that are converted to float32 at once.
_BLOCK = 1 << 24
#: Bytes of results that all compute threads of a search keep together, and the maximum number of queries in a search.
_KEPT, _QUERIES = 256 << 20, 1024
#: Bytes of one result: its score and its number.
_RESULT = 12
#: Maximum number of pairs that paraphrase_mining returns.
_MAX_PAIRS = 100_000_000


class Neighbours(NamedTuple):
    """The nearest vectors of each query, best first, as :func:`mpool.semantic_search` returns them.

    Attributes:
        indices: numbers of the vectors in the corpus, int64 of shape ``(queries, k)``, or ``(k,)`` for one query.
        scores: their scores, float32 of the same shape.
    """

    indices: NDArray[np.int64]
    scores: NDArray[np.float32]


@typed
def semantic_search(queries: ArrayLike, corpus: ArrayLike, *, top_k: int = 10,
                    metric: Literal["cosine", "dot"] = "cosine") -> Neighbours:
    """Find the vectors of a corpus that are nearest to each query, exactly.

    Vectors of bits (``precision="ubinary"``) are refused; the guide shows how to search them. int8 vectors are compared
    as numbers, so the bits of ``precision="binary"``, which are int8, must not be passed.

    Args:
        queries: vectors of shape ``(q, d)``, or one of shape ``(d,)``.
        corpus: vectors of shape ``(n, d)``.
        top_k: maximum number of results for each query, at least 1.
        metric: ``"cosine"`` or ``"dot"``; the cosine similarity of a zero vector to any vector is 0.

    Returns:
        Two arrays, ``indices`` and ``scores``, of shape ``(q, min(top_k, n))``, best first; for one query of shape
        ``(d,)`` of shape ``(min(top_k, n),)``.

    Raises:
        InvalidArgument: the shapes do not match, vectors are of bytes (uint8) or int8 beside floats, a component is
            NaN or infinite, or an option is out of range.

    Example:
        >>> found = mpool.semantic_search([1.0, 0.1], [[0.0, 1.0], [1.0, 0.0], [0.6, 0.8]], top_k=2)
        >>> found.indices.tolist()
        [1, 2]
    """
    given = vectors_of("queries", queries, _SHAPE + " or (d,)")
    single = given.ndim == 1
    rows, vectors = np.atleast_2d(given), _matrix("corpus", corpus)
    refuse_mixed("queries", rows, "corpus", vectors)
    if rows.shape[1] != vectors.shape[1]:
        raise InvalidArgument(param="corpus", got=f"vectors of {vectors.shape[1]:,} components",
                              allowed=f"vectors of {rows.shape[1]:,} components, like queries")
    one_of("metric", metric, _METRICS)
    most = min(_at_least("top_k", top_k, 1), len(vectors))
    indices = np.empty((len(rows), most), np.int64)
    scores = np.empty((len(rows), most), np.float32)
    for start, stop in _groups(len(rows), most):
        indices[start:stop], scores[start:stop] = _search(
            "queries", rows[start:stop], start, "corpus", vectors, most, metric).nearest()
    return Neighbours(indices[0], scores[0]) if single else Neighbours(indices, scores)


@typed
def paraphrase_mining(vectors: ArrayLike, *, top_k: int = 100, max_pairs: int = 500_000,
                      metric: Literal["cosine", "dot"] = "cosine") -> list[tuple[float, int, int]]:
    """Find the most similar pairs of vectors, exactly.

    Args:
        vectors: vectors of shape ``(n, d)``.
        top_k: number of nearest other vectors that are considered for each vector, at least 1.
        max_pairs: maximum number of pairs, 1 to 100 million.
        metric: ``"cosine"`` or ``"dot"``.

    Returns:
        Tuples ``(score, i, j)`` with i < j, best first. A pair is listed if one of its vectors is among the ``top_k``
        nearest ones of the other.

    Raises:
        InvalidArgument: a component is NaN or infinite, or an option is out of range.

    Example:
        >>> [(i, j) for _, i, j in mpool.search.paraphrase_mining([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]], max_pairs=1)]
        [(0, 2)]
    """
    rows = _matrix("vectors", vectors)
    one_of("metric", metric, _METRICS)
    most = min(_at_least("top_k", top_k, 1), max(1, len(rows) - 1))
    room = _at_least("max_pairs", max_pairs, 1, _MAX_PAIRS)
    best: list[NDArray[Any]] = [np.empty(0, np.float32), np.empty(0, np.int64), np.empty(0, np.int64)]
    if len(rows) > 1:
        for start, stop in _groups(len(rows), most + 1):
            found = _search("vectors", rows[start:stop], start, "vectors", rows, most + 1, metric).nearest()
            best = _best_pairs(best, _pairs(*found, start, most), room)
    return list(zip(*(part.tolist() for part in best)))


@typed
def community_detection(vectors: ArrayLike, *, threshold: float = 0.75,
                        min_community_size: int = 10) -> list[list[int]]:
    """Groups vectors around central vectors, by cosine similarity.

    The vector with the most others at a similarity of at least ``threshold`` is the centre of the first community. Its
    community is removed, and so on.

    Args:
        vectors: vectors of shape ``(n, d)``.
        threshold: minimum cosine similarity of a member to the centre, -1 to 1.
        min_community_size: minimum number of members, with the centre; at least 1.

    Returns:
        Communities of indices, largest first. The first index of each is its centre; the others follow by descending
        similarity to it.

    Raises:
        InvalidArgument: a component is NaN or infinite, or an option is out of range.

    Example:
        >>> mpool.search.community_detection([[1.0, 0.0], [0.0, 1.0], [1.0, 0.1]], min_community_size=2)
        [[0, 2]]
    """
    rows = _matrix("vectors", vectors)
    least = real(threshold)
    if least is None or not -1.0 <= least <= 1.0:
        refuse("threshold", threshold, "a number from -1 to 1")
    smallest = _at_least("min_community_size", min_community_size, 1)
    counts = np.zeros(len(rows), np.int64)
    for start, stop in _groups(len(rows), 1):
        counts[start:stop] = _search("vectors", rows[start:stop], start, "vectors", rows, 0, "cosine", least).counts()
    used = np.zeros(len(rows), bool)
    found = []
    for centre, members in _communities(rows, counts, smallest, used):
        left = members[~used[members]]
        if used[centre] or len(left) < smallest:
            continue
        community = [centre, *left[left != centre].tolist()]
        used[community] = True
        found.append(community)
    return sorted(found, key=len, reverse=True)


# ---- arguments ----

def _matrix(name: str, value: Any) -> NDArray[Any]:
    array = vectors_of(name, value, _SHAPE, (2,))
    refuse_wide(name, array.shape[1])
    return array


def _at_least(name: str, value: Any, low: int, high: int | None = None) -> int:
    number = integer(value)
    if number is None or number < low or (high is not None and number > high):
        refuse(name, value, f"an integer of at least {low:,}" + (f" and at most {high:,}" if high else ""))
    return number


# ---- searching ----

def queries_at_once(most: int) -> int:
    """Return the number of queries that are searched at once, for at most ``most`` results of each."""
    threads = int(default_pool().registry.stats()["compute_threads"])
    return max(1, min(_QUERIES, _KEPT // (threads * _RESULT * max(1, most))))


def _groups(count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of queries that are searched at once."""
    step = queries_at_once(most)
    for start in range(0, count, step):
        yield start, min(count, start + step)


def _search(name: str, queries: NDArray[Any], first: int, corpus_name: str, corpus: NDArray[Any], most: int,
            metric: str, least: float | None = None) -> _core.Search:
    """Compare queries with a corpus. ``first``: index of the first query, for the error."""
    try:
        search = _core.Search(default_pool().registry, _float32(queries), most, metric == "cosine", least)
    except InvalidArgument:
        _refuse_infinite(name, queries, first)
        raise
    step = max(1, _BLOCK // corpus.shape[1])
    for start in range(0, len(corpus), step):
        block = corpus[start:start + step]
        try:
            search.add(_float32(block))
        except InvalidArgument:
            _refuse_infinite(corpus_name, block, start)
            raise
    return search


def _float32(array: NDArray[Any]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # the search refuses infinite components
        return np.ascontiguousarray(array, np.float32)


def _refuse_infinite(name: str, block: NDArray[Any], first: int) -> None:
    bad = np.flatnonzero(~np.isfinite(_float32(block)).all(axis=1))
    if len(bad):
        raise InvalidArgument(param=name, got=f"NaN, infinity or a number beyond float32 in vector {first + bad[0]:,}",
                              allowed=_SHAPE) from None


# ---- pairs and communities ----

def _pairs(indices: NDArray[np.int64], scores: NDArray[np.float32], first: int, most: int) -> list[NDArray[Any]]:
    """Return score, lower and higher index of each vector's nearest ``most`` other vectors."""
    own = np.arange(first, first + len(indices))[:, None]
    other = indices != own
    other &= np.cumsum(other, axis=1) <= most
    query = np.broadcast_to(own, indices.shape)[other]
    found = indices[other]
    return [scores[other], np.minimum(query, found), np.maximum(query, found)]


def _best_pairs(kept: list[NDArray[Any]], more: list[NDArray[Any]], room: int) -> list[NDArray[Any]]:
    """Return the best pairs of both lists, each once, best first and equal ones by index."""
    score, low, high = (np.concatenate(both) for both in zip(kept, more))
    order = np.lexsort((high, low, -score))
    score, low, high = score[order], low[order], high[order]
    # A pair that was found from both sides has equal scores, so its two rows are neighbours.
    first = np.ones(len(score), bool)
    first[1:] = (low[1:] != low[:-1]) | (high[1:] != high[:-1])
    return [part[first][:room] for part in (score, low, high)]


def _communities(rows: NDArray[Any], counts: NDArray[np.int64], smallest: int,
                 used: NDArray[np.bool_]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield centres in the order of the size of their communities, the largest first, each with its community by
    descending similarity. Vectors that are in ``used`` when a group of centres is searched are left out."""
    order = np.argsort(-counts, kind="stable")
    order = order[counts[order] >= smallest]
    while len(order := order[~used[order]]):
        _, step = next(_groups(len(order), int(counts[order[0]])))
        centres, order = order[:min(step, 32)], order[min(step, 32):]
        indices, _ = _search("vectors", rows[centres], 0, "vectors", rows, int(counts[centres[0]]), "cosine").nearest()
        for centre, found in zip(centres.tolist(), indices):
            yield centre, found[:counts[centre]]


__all__ = ["Neighbours", "community_detection", "paraphrase_mining", "semantic_search"]
