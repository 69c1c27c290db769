"""Fewer token vectors per document: hierarchical clustering, as in "Reducing the Footprint of Multi-Vector Retrieval
with Minimal Performance Impact via Token Pooling" (arXiv:2409.14683) and PyLate.

Clustering takes the square of a document's tokens in memory and more in time, so a long document is clustered in blocks
of consecutive tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..checks import integer, refuse, shown
from ..errors import InvalidArgument
from ..host.resources import typed
from .late_interaction import PackedTokens, dense, ragged, refuse_faults

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from .late_interaction import _Ragged

#: Maximum number of tokens that are clustered together: 32 MB of distances.
_BLOCK = 2048


@typed
def pool_tokens(documents: ArrayLike | Sequence[ArrayLike] | _Ragged, *, factor: int | None = None,
                budget: int | None = None, protected: int = 1) -> PackedTokens:
    """Reduce the token vectors of each document: those of a cluster of similar tokens become their mean.

    Clusters are those of Ward's method on the tokens' cosine distances, as in PyLate since 1.5.0 and in
    sentence-transformers' ``HierarchicalTokenPooling`` with ``normalize_embeddings=False``. The vectors are expected to
    be normalised. The means are not normalised. Documents of more than 2,048 tokens are clustered in blocks of
    consecutive tokens.

    This function computes on the calling thread, about a second for 10,000 tokens in documents of 100 to 200. From a
    coroutine, call it by ``asyncio.to_thread``.

    Args:
        documents: token vectors in the forms of :func:`mpool.maxsim`.
        factor: keep one token in ``factor``, at least 1; PyLate's ``pool_factor``.
        budget: in place of ``factor``: maximum number of tokens to keep of each document, with the protected ones.
            Exactly one of ``factor`` and ``budget`` is required.
        protected: number of first tokens of each document that stay as they are (``[CLS]``, markers), 0 or more;
            PyLate's ``protected_tokens``.

    Returns:
        :class:`PackedTokens` with float32 ``values``: of each document the protected tokens, then the means, in the
        order of the first token of each.

    Raises:
        InvalidArgument: a shape or an option is not allowed, a number is NaN or infinite, or ``budget`` is too small.

    Example:
        >>> mpool.search.pool_tokens([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]], factor=2, protected=1).values.tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    if (factor is None) == (budget is None):
        got = f"factor={shown(factor)}, budget={shown(budget)}"
        raise InvalidArgument(f"exactly one of `factor` and `budget` must be given, got {got}", param="factor", got=got,
                              allowed="exactly one of factor and budget")
    kept, keep = integer(protected), integer(factor if budget is None else budget)
    if kept is None or kept < 0:
        refuse("protected", protected, "an integer of at least 0")
    name, low = ("factor", 1) if budget is None else ("budget", kept + 1)
    if keep is None or keep < low:
        refuse(name, factor if budget is None else budget, f"an integer of at least {low:,}"
               + ("" if budget is None else ", more than the protected tokens"))
    store, _ = ragged("documents", documents)
    rows = dense(store)
    refuse_faults("documents", store, rows)
    parts: list[NDArray[np.float32]] = []
    for document, (begin, end) in enumerate(zip(store.offsets[:-1].tolist(), store.offsets[1:].tolist())):
        fixed, tokens = rows[begin:end][:kept], rows[begin:end][kept:]
        most = max(1, len(tokens) // keep) if budget is None else keep - len(fixed)
        blocks = -(-len(tokens) // _BLOCK)
        if most < blocks:
            raise InvalidArgument(param=name, got=f"{keep:,}, which leaves {most:,}",
                                  allowed=f"an integer that leaves at least {blocks:,} tokens of document {document:,} "
                                          f"with {end - begin:,} tokens")
        parts.append(np.concatenate([fixed, *_pooled(tokens, most, blocks)]))
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return PackedTokens(np.concatenate([rows[:0], *parts]), offsets)


def _pooled(tokens: NDArray[np.float32], most: int, blocks: int) -> list[NDArray[np.float32]]:
    """Pool the tokens of a document to `most`, block by block."""
    if len(tokens) <= most:
        return [tokens]
    ends = [len(tokens) * b // blocks for b in range(blocks + 1)]
    shares = [most * b // blocks for b in range(blocks + 1)]
    return [_means(tokens[ends[b]:ends[b + 1]], shares[b + 1] - shares[b]) for b in range(blocks)]


def _means(tokens: NDArray[np.float32], most: int) -> NDArray[np.float32]:
    if len(tokens) <= most:
        return tokens
    labels = clusters(tokens, most)
    means = np.zeros((int(labels.max()) + 1, tokens.shape[1]))
    np.add.at(means, labels, tokens)
    return (means / np.bincount(labels)[:, None]).astype(np.float32)


def clusters(tokens: NDArray[np.float32], most: int) -> NDArray[np.int64]:
    """Return the number of each token's cluster, of at most `most` clusters, in the order of their first tokens.

    The distances of Ward's method are the cosine distances, as in PyLate since 1.5.0 and in sentence-transformers.
    PyLate 1.4.0 and older use the Euclidean distances between the rows of the matrix of cosine distances. Merges of
    equal height are made together, so there may be fewer clusters.
    """
    count = len(tokens)
    exact = tokens.astype(np.float64)
    heights, pairs = _ward(np.square(np.maximum(1.0 - exact @ exact.T, 0.0)))
    limit = np.sort(heights)[count - most - 1]
    root = np.arange(count)

    def find(at: int) -> int:
        while root[at] != at:
            root[at] = at = root[root[at]]
        return at

    for first, second in pairs[heights <= limit].tolist():
        first, second = sorted((find(first), find(second)))
        root[second] = first
    roots = np.array([find(at) for at in range(count)])
    return np.unique(roots, return_inverse=True)[1].astype(np.int64)


def _ward(distances: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the squared height of each merge, and a member of each of the two clusters that it joins.

    ``distances``: the squared distances of all pairs, which this function overwrites.

    The chain of nearest neighbours finds pairs that are nearest to each other (Murtagh 1983): at most 3 n steps of n
    operations each.
    """
    count = len(distances)
    np.fill_diagonal(distances, np.inf)
    sizes = np.ones(count)
    active = np.ones(count, bool)
    heights, pairs = np.empty(count - 1), np.empty((count - 1, 2), np.int64)
    chain: list[int] = []
    for merge in range(count - 1):
        if not chain:
            chain.append(int(active.argmax()))
        while True:
            row = distances[chain[-1]]
            nearest = int(row.argmin())
            if len(chain) > 1 and row[chain[-2]] <= row[nearest]:
                break
            chain.append(nearest)
        second, first = chain.pop(), chain.pop()
        height = distances[first, second]
        heights[merge], pairs[merge] = height, (first, second)
        a, b = sizes[first], sizes[second]
        joined = ((a + sizes) * distances[first] + (b + sizes) * distances[second] - sizes * height) / (a + b + sizes)
        joined[[first, second]] = np.inf
        distances[first], distances[:, first] = np.inf, np.inf
        distances[second], distances[:, second] = joined, joined
        active[first] = False
        sizes[second] = a + b
    return heights, pairs


__all__ = ["pool_tokens"]
