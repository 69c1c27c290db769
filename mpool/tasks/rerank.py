"""Reranking: a cross-encoder scores a query with each document. It takes the path of embedding, with vectors of one
component."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..checks import integer, shown
from ..errors import InvalidArgument
from . import text_embedding as embedding

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .text_embedding import Plan


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document in a ranking.

    Attributes:
        index: its place among the documents of the request.
        score: relevance to the query as the model's files define it: mostly 0 to 1, for some models a logit.
        text: the document.
    """

    index: int
    score: float
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents in order of relevance to a query, the best first. It is a sequence of its ``results``.

    Attributes:
        results: the best ``top_k`` documents, or all. Equal scores stay in the order of the call.
        scores: of every document, in the order of the call.
        model: key of the model that scored them.
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
    """The documents, and how many are to be named.

    Raises:
        InvalidArgument: an argument is not as :func:`mpool.rerank` describes it.
        LimitError: more documents than ``most``.
    """
    fault = embedding.fault_of(query, "query")
    if fault is None:
        fault = embedding.surrogate_of(query, "query")
    if fault is not None:
        fault.hint = None
        raise fault
    if isinstance(documents, str):
        raise InvalidArgument("documents is one str, allowed: a list of str")
    texts = embedding.texts_of(documents, most, "documents")
    count = len(texts) if top_k is None else integer(top_k)
    if count is None or (top_k is not None and count < 1):
        raise InvalidArgument(f"top_k is {shown(top_k)}, allowed: 1 or more, or None for all")
    return texts, count


def plan_of(plan: Plan, query: str) -> Plan:
    """The plan of one call."""
    return replace(plan, query=query)


def ranking(plan: Plan, texts: list[Any], rows: NDArray[Any], count: int) -> Ranking:
    """The result, from scores ``(n, 1)``."""
    scores = tuple(rows[:, 0].tolist())
    order = sorted(range(len(scores)), key=lambda at: -scores[at])[:count]
    return Ranking(tuple(RankedDocument(at, scores[at], texts[at]) for at in order), scores, plan.entry.key)
