"""``/v1/score``, as in vLLM: scores of pairs of texts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from starlette.responses import Response

from ..host import native_calls
from ..search import cosines
from ..tasks.running import counted
from ..tasks.verbs import EMBED, RERANK
from .errors import Refusal
from .fields import Fields, Name, Text
from .models import embedding_of, is_missing
from .openai.structs import InputUsage
from .openai.text import run_concurrently
from .operations import Context, Operation, json_response

if TYPE_CHECKING:
    from .models import ServedModel

Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=10_000)]
#: Maximum number of queries that are scored at the same time.
_CONCURRENT = 16


class ScoreRequest(Fields, kw_only=True):
    """Pairs of texts. ``text_1`` is one text, which is paired with every text of ``text_2``, or a list as long as
    ``text_2``. ``queries`` and ``documents`` are other names of the two. ``prompt`` (an extension) is the instruction
    of rerankers that are language models. ``user`` is ignored."""

    model: Name
    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    prompt: str | None = None
    user: str | None = None


class Score(Struct):
    """The score of a pair: that of a reranker, or the cosine of two embeddings."""

    index: int
    score: float
    object: str = "score"


class ScoreResponse(Struct):
    """One score per pair."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: InputUsage
    object: str = "list"


def _given(body: ScoreRequest, *names: str) -> tuple[str, list[str]]:
    """Return the name of the one field that the client gave, and its texts."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise Refusal("invalid_value", f"One of {' and '.join(f'`{name}`' for name in names)} is required.",
                      (given or names)[0])
    texts = getattr(body, given[0])
    return given[0], texts if isinstance(texts, list) else [texts]


async def score(context: Context, body: ScoreRequest) -> Response:
    """Score pairs of texts."""
    served = await context.model(body.model)
    (one, first), (two, second) = _given(body, "text_1", "queries"), _given(body, "text_2", "documents")
    for name, texts in ((one, first), (two, second)):
        context.check_inputs(texts, name, context.state.max_inputs)
    if len(first) not in (1, len(second)):
        raise Refusal("invalid_value", f"`{one}` must have one text or as many as `{two}`, got {len(first):,} and "
                                       f"{len(second):,}.", one)
    settings = await embedding_of(served)
    if is_missing(served) or settings is not None and settings.scores:
        scores, tokens = await _ranked(context, served, first * (len(second) // len(first)), second, body.prompt)
    else:
        scores, tokens = await _cosines(context, served, first, second, body.prompt)
    return json_response(ScoreResponse(f"score-{context.id}", int(time.time()), body.model,
                                       [Score(at, value) for at, value in enumerate(scores)],
                                       InputUsage(tokens, tokens)))


async def _ranked(context: Context, served: ServedModel, queries: list[str], documents: list[str],
                  prompt: str | None) -> tuple[list[float], int]:
    """Score pairs with a reranker. Returns the scores, and the number of prompt tokens."""
    places: dict[str, list[int]] = {}
    for at, query in enumerate(queries):
        places.setdefault(query, []).append(at)
    options = {**served.target, **({} if prompt is None else {"prompt": prompt})}
    scores, total, waiting = [0.0] * len(documents), 0, list(places.items())
    for begin in range(0, len(waiting), _CONCURRENT):
        part = waiting[begin:begin + _CONCURRENT]
        done = await run_concurrently([counted(RERANK, context.state.pool, {
            "query": query, "documents": [documents[at] for at in found], **options}) for query, found in part])
        for (_, found), (ranking, tokens) in zip(part, done):
            total += tokens
            for one in ranking.results:
                scores[found[one.index]] = one.score
    return scores, total


async def _cosines(context: Context, served: ServedModel, first: list[str], second: list[str],
                   prompt: str | None) -> tuple[list[float], int]:
    """Compare embeddings. Returns the cosines, and the number of prompt tokens."""
    if prompt is not None:
        raise Refusal("unsupported_parameter", "`prompt` requires a reranker.", "prompt")
    rows, tokens = await counted(EMBED, context.state.pool, {"inputs": first + second, **served.target})
    return await native_calls.REQUESTS.arun(cosines, rows[:len(first)], rows[len(first):]), tokens


OPERATIONS = (
    Operation("POST", "/v1/score", score, ScoreRequest, ScoreResponse, "Score pairs of texts", name="score"),
)

__all__ = ["OPERATIONS"]
