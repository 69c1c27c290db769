"""Reranking: a cross-encoder scores pairs of a query and a document.

Requests are computed like those for text embedding; a score is a vector of one component.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import integer, refuse, surrogate_of
from ..errors import InvalidArgument
from . import text_embedding as embedding
from .vectors import activate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..models.spec import EmbeddingSettings
    from ..runtime.entry import Entry
    from .text_embedding import Plan


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document in a ranking. ``str()`` returns its text.

    Attributes:
        index: index of the document in the request.
        score: relevance to the query. The model's files define the scale: usually 0 to 1, for some models a logit.
        text: the document; the text of a document with images, "" if it has none.
    """

    index: int
    score: float
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents in order of relevance to a query, the best first. Supports iteration, indexing and ``len()``.

    Attributes:
        results: the best ``top_k`` documents, or all of them, in the order of their logits: scores of high logits are
            rounded to 1. Documents with equal logits keep their order.
        scores: scores of all documents, in the order of the request.
        model: key of the model that computed the scores.
    """

    results: tuple[RankedDocument, ...]
    scores: tuple[float, ...]
    model: str

    def __iter__(self) -> Iterator[RankedDocument]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, at: int) -> RankedDocument:
        return self.results[at]


def check(query: Any, documents: Any, top_k: Any, most: int) -> tuple[list[Any], int]:
    """Validate the arguments of :func:`mpool.rerank` that do not depend on the model.

    Args:
        query: argument of the caller.
        documents: argument of the caller.
        top_k: argument of the caller.
        most: maximum number of documents.

    Returns:
        The documents as a list, and the number of documents to return.

    Raises:
        InvalidArgument: an argument is invalid.
        LimitError: there are more than ``most`` documents.
    """
    fault = None if isinstance(query, Mapping) else embedding.fault_of(query, "query") or surrogate_of(query, "query")
    if fault is not None:
        raise fault
    if isinstance(documents, str):
        raise InvalidArgument(param="documents", got="one str", allowed="a list of str")
    texts = embedding.texts_of(documents, most, "documents")
    count = len(texts) if top_k is None else integer(top_k)
    if count is None or (top_k is not None and count < 1):
        refuse("top_k", top_k, "an integer of 1 or more, or None for all documents")
    return texts, count


def plan_of(plan: Plan, query: str) -> Plan:
    """Return the plan of one request: the cached plan of its options, with its query."""
    return replace(plan, query=query)


def function_of(settings: EmbeddingSettings) -> str:
    """Return the function that turns the logits of a reranker into scores, as its files say; see
    :func:`mpool.tasks.vectors.activate`."""
    return "sigmoid" if settings.score_activation == "sigmoid" else "none"


def ranking(entry: Entry, documents: list[Any], rows: NDArray[Any], count: int,
            function: str | None = None) -> Ranking:
    """Return the result of a request.

    Args:
        entry: the model.
        documents: the documents.
        rows: logits, float32 ``(n, 1)``.
        count: maximum number of documents in ``results``.
        function: option ``function_to_apply``.
    """
    settings = entry.describe().embedding
    assert settings is not None
    scores = tuple(activate(rows, function or function_of(settings))[:, 0].tolist())
    # by logits: scores of different logits are equal where the sigmoid saturates
    order = np.argsort(-rows[:, 0], kind="stable")[:count].tolist()
    return Ranking(tuple(RankedDocument(at, scores[at], _text_of(documents[at])) for at in order), scores, entry.key)


def _text_of(document: Any) -> str:
    """Return the text of a document; of one with images, its texts, one after another."""
    if isinstance(document, str):
        return document
    given = document.get("text")
    return given if isinstance(given, str) else "".join(given or ())
