"""The functions of ``sentence_transformers.util`` that compare and search vectors, computed by mpool.

``from mpool.integrations.sentence_transformers import util`` gives this module. Functions return arrays; those that
compare vectors return a tensor if an argument is a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..checks import refuse
from ..search import semantic_search as _search
from ..search import similarity as _similarity
from ._tensors import array_of, has_tensor, tensor_of

#: Function of the library -> what to use instead.
_INSTEAD = {
    "community_detection": "use mpool.search.community_detection(vectors)",
    "paraphrase_mining": "use mpool.search.paraphrase_mining(model.encode(sentences))",
    "paraphrase_mining_embeddings": "use mpool.search.paraphrase_mining(vectors)",
    "euclidean_sim": 'use mpool.similarity(a, b, metric="euclidean")',
    "manhattan_sim": 'use mpool.similarity(a, b, metric="manhattan")',
    "normalize_embeddings": "pass normalize_embeddings=True to encode",
}


def cos_sim(a: Any, b: Any) -> Any:
    """Return the cosine similarity of every vector of ``a`` to every vector of ``b``, shape ``(n, m)``."""
    return _compared(a, b, "cosine", False)


def dot_score(a: Any, b: Any) -> Any:
    """Return the dot product of every vector of ``a`` with every vector of ``b``, shape ``(n, m)``."""
    return _compared(a, b, "dot", False)


def pairwise_cos_sim(a: Any, b: Any) -> Any:
    """Return the cosine similarity of row i of ``a`` to row i of ``b``, shape ``(n,)``."""
    return _compared(a, b, "cosine", True)


def pairwise_dot_score(a: Any, b: Any) -> Any:
    """Return the dot product of row i of ``a`` with row i of ``b``, shape ``(n,)``."""
    return _compared(a, b, "dot", True)


def semantic_search(query_embeddings: Any, corpus_embeddings: Any, query_chunk_size: int = 100,
                    corpus_chunk_size: int = 500_000, top_k: int = 10,
                    score_function: Callable[[Any, Any], Any] = cos_sim) -> list[list[dict[str, Any]]]:
    """Find the vectors of a corpus that are nearest to each query.

    Args:
        query_embeddings: vectors, or one vector.
        corpus_embeddings: vectors.
        query_chunk_size, corpus_chunk_size: without effect; mpool chooses the chunks.
        top_k: maximum number of results for each query.
        score_function: :func:`cos_sim` or :func:`dot_score`, of this module or of sentence-transformers.

    Returns:
        For each query a list of dicts with ``corpus_id`` and ``score``, the highest score first.

    Raises:
        InvalidArgument: another score function, or as for :func:`mpool.semantic_search`.
    """
    name = getattr(score_function, "__name__", "")
    if name not in ("cos_sim", "dot_score"):
        refuse("score_function", score_function, "util.cos_sim or util.dot_score",
               hint="mpool.similarity has other metrics, and compares all pairs")
    found = _search(np.atleast_2d(array_of(query_embeddings)), array_of(corpus_embeddings), top_k=top_k,
                    metric="cosine" if name == "cos_sim" else "dot")
    return [[{"corpus_id": at, "score": score} for at, score in zip(*row)]
            for row in zip(found.indices.tolist(), found.scores.tolist())]


def truncate_embeddings(embeddings: Any, truncate_dim: int | None) -> Any:
    """Return the leading components of vectors, an array or a tensor. ``truncate_dim``: their number; None: all."""
    return embeddings[..., :truncate_dim]


def _compared(a: Any, b: Any, metric: Any, pairwise: bool) -> Any:
    left, right = (np.atleast_2d(array_of(value)) for value in (a, b))
    found = np.atleast_1d(_similarity(left, right, metric=metric, pairwise=pairwise))
    return tensor_of(found) if has_tensor(a) or has_tensor(b) else found


def __getattr__(name: str) -> Any:
    use = _INSTEAD.get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}" + (f"; {use}" if use else ""), name=name)


__all__ = ["cos_sim", "dot_score", "pairwise_cos_sim", "pairwise_dot_score", "semantic_search",
           "truncate_embeddings"]
