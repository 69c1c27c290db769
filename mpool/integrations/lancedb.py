"""An embedding function and a reranker for LanceDB (extra ``lancedb``)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..checks import items_of
from ..host.resources import importing
from . import _requests as requests

with importing("lancedb"):
    import pyarrow
    from lancedb.embeddings import TextEmbeddingFunction, register
    from lancedb.rerankers import Reranker
    from pydantic import ConfigDict, Field, PrivateAttr

if TYPE_CHECKING:
    from ..model import Model

#: Column of a result with the relevance of its row, as LanceDB names it.
_SCORE = "_relevance_score"


@register("mpool")
class MpoolEmbeddings(TextEmbeddingFunction):  # type: ignore[misc]
    """A LanceDB embedding function that runs :func:`mpool.embed`, with the model's prompts for queries and documents.

    Create it with ``get_registry().get("mpool").create(...)`` or ``MpoolEmbeddings.create(...)``. LanceDB stores the
    name ``mpool`` and the arguments with a table. A process that imports this module can open the table and search it.
    The vector of a missing text (None) is missing.

    Args:
        model: a key, a path or a reference, as for :func:`mpool.embed`; None: all-MiniLM-L6-v2.
        options: further options of :func:`mpool.embed` that JSON can hold, such as ``dimensions`` or ``compute``.
        max_retries: number of further attempts after an error. 0, because a pool repeats requests after worker faults
            by itself.

    Raises:
        ValidationError: an argument is unknown or of another type; a :class:`mpool.Model` cannot be stored.
        MpoolError: a request fails as in :func:`mpool.embed`.

    Example:
        >>> from mpool.integrations.lancedb import MpoolEmbeddings
        >>> MpoolEmbeddings.create().ndims()
        384

    Source:
        https://lancedb.github.io/lancedb/embeddings/custom_embedding_function/
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    max_retries: int = 0
    _ndims: int | None = PrivateAttr(default=None)

    def ndims(self) -> int:
        """Return the number of components of a vector. The first call embeds a text."""
        if self._ndims is None:
            self._ndims = len(self.generate_embeddings(["x"])[0])
        return self._ndims

    def compute_query_embeddings(self, query: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the vectors of queries: float32 ``(d,)`` each."""
        return self._vectors(self.sanitize_input(query), "query")

    def generate_embeddings(self, texts: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Return the vectors of documents: float32 ``(d,)`` each, or None for None."""
        return self._vectors(texts, "document")

    def _vectors(self, texts: Any, task: requests.Task) -> list[Any]:
        given = list(items_of("texts", texts, "a list of str"))
        present = [text for text in given if text is not None]
        rows = iter(requests.embed(self.model, present, task, self.options) if present else ())
        return [None if text is None else next(rows) for text in given]


class MpoolReranker(Reranker):  # type: ignore[misc]
    """A LanceDB reranker that runs :func:`mpool.rerank`: for vector, full-text and hybrid search.

    Args:
        model: a reranker: a key, a path, a reference or a :class:`mpool.Model`; None: ms-marco-MiniLM-L6-v2.
        column: name of the column with the texts; a missing text is scored as an empty one.
        return_score: ``"relevance"``: results have ``_relevance_score`` only; ``"all"``: the scores of the searches
            too.
        options: further options of :func:`mpool.rerank`, such as ``compute``.

    Raises:
        MpoolError: a request fails as in :func:`mpool.rerank`; constructing the object reads no files.

    Example:
        >>> from mpool.integrations.lancedb import MpoolReranker
        >>> str(MpoolReranker(column="content"))
        'MpoolReranker(model=None)'

    Source:
        https://lancedb.github.io/lancedb/reranking/custom_reranker/
    """

    def __init__(self, model: str | os.PathLike[str] | Model | None = None, *, column: str = "text",
                 return_score: str = "relevance", options: dict[str, Any] | None = None) -> None:
        super().__init__(return_score)
        self.model, self.column, self.options = model, column, dict(options or {})

    def __str__(self) -> str:
        return f"MpoolReranker(model={requests.name_of(self.model)})"

    def rerank_vector(self, query: str, vector_results: pyarrow.Table) -> pyarrow.Table:
        """Return the results of a vector search with their relevance, the best first."""
        return self._reranked(query, vector_results)

    def rerank_fts(self, query: str, fts_results: pyarrow.Table) -> pyarrow.Table:
        """Return the results of a full-text search with their relevance, the best first."""
        return self._reranked(query, fts_results)

    def rerank_hybrid(self, query: str, vector_results: pyarrow.Table, fts_results: pyarrow.Table) -> pyarrow.Table:
        """Return the results of both searches, without duplicates, with their relevance, the best first."""
        # If both results are empty, LanceDB's merge with scores loses their columns.
        if self.score == "all" and len(vector_results) + len(fts_results):
            return self._reranked(query, self._merge_and_keep_scores(vector_results, fts_results))
        return self._reranked(query, self.merge_results(vector_results, fts_results))

    def _reranked(self, query: str, results: pyarrow.Table) -> pyarrow.Table:
        texts = [text or "" for text in results[self.column].to_pylist()]
        scores = requests.scores(self.model, query, texts, self.options)
        order = pyarrow.array(scores.best(), type=pyarrow.int64())
        found = results.append_column(_SCORE, pyarrow.array(scores.values)).take(order)
        return self._keep_relevance_score(found)


__all__ = ["MpoolEmbeddings", "MpoolReranker"]
