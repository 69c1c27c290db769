"""``/v1/score``, as in vLLM: scores of pairs of texts or images."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from starlette.responses import Response

from ..errors import MpoolError
from ..host import native_calls
from ..search import cosines
from ..tasks.running import counted
from ..tasks.verbs import EMBED, RERANK
from .errors import Refusal
from .fields import Fields, Name, Text
from .models import embedding_of, is_missing
from .openai.structs import InputObject, InputUsage
from .openai.text import run_concurrently
from .openai.vectors import with_objects
from .operations import Context, Operation, json_response

if TYPE_CHECKING:
    from .models import ServedModel

Inputs = Text | InputObject | Annotated[list[Text | InputObject], Meta(min_length=1, max_length=10_000)]
#: Maximum number of queries that are scored at the same time.
_CONCURRENT = 16


class ScoreRequest(Fields, kw_only=True):
    """Pairs of texts, or of images or both together if the model reads images. ``text_1`` is one text, which is paired
    with every text of ``text_2``, or a list as long as ``text_2``. ``data_1`` and ``queries``, ``data_2``,
    ``documents`` and ``items`` are other names of the two. ``prompt`` (an extension) and ``instruction`` are the
    instruction of rerankers that are language models. ``user`` is ignored."""

    model: Name
    text_1: Inputs | None = None
    text_2: Inputs | None = None
    data_1: Inputs | None = None
    data_2: Inputs | None = None
    queries: Inputs | None = None
    documents: Inputs | None = None
    items: Inputs | None = None
    prompt: str | None = None
    instruction: str | None = None
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


def _given(body: ScoreRequest, *names: str) -> str:
    """Return the name of the one field that the client gave."""
    given = [name for name in names if getattr(body, name) is not None]
    if len(given) != 1:
        raise Refusal("invalid_value", f"One of {' and '.join(f'`{name}`' for name in names)} is required.",
                      (given or names)[0])
    return given[0]


async def score(context: Context, body: ScoreRequest) -> Response:
    """Score pairs of texts or images."""
    served = await context.model(body.model)
    one, two = _given(body, "text_1", "data_1", "queries"), _given(body, "text_2", "data_2", "documents", "items")
    counts = [len(given) if isinstance(given, list) else 1 for given in (getattr(body, name) for name in (one, two))]
    if counts[0] not in (1, counts[1]):
        raise Refusal("invalid_value", f"`{one}` must have one text or as many as `{two}`, got {counts[0]:,} and "
                                       f"{counts[1]:,}.", one)
    if body.prompt is not None and body.instruction is not None:
        raise Refusal("invalid_value", "`prompt` and `instruction` exclude each other.", "instruction")
    prompt = body.prompt
    if body.instruction is not None:
        prompt, context.names["prompt"] = body.instruction, "instruction"
    first, second = (given if isinstance(given, list) else [given] for given in await with_objects(
        context, **{name: getattr(body, name) for name in (one, two)}))
    for name, inputs in ((one, first), (two, second)):
        if isinstance(getattr(body, name), list):
            context.check_inputs(inputs, name, context.state.max_inputs)
        elif isinstance(inputs[0], str):
            context.check_text(inputs[0], name)
    context.names |= {"documents": two, "inputs": two, one: one, two: two}  # errors of both functions have these names
    settings = await embedding_of(served)
    scored = _ranked if is_missing(served) or settings is not None and settings.scores else _cosines
    places = tuple([f"{name}[{at}]" for at in range(count)] if isinstance(getattr(body, name), list) else [name]
                   for name, count in zip((one, two), counts))
    scores, tokens = await scored(context, served, places, first, second, prompt)
    return json_response(ScoreResponse(f"score-{context.id}", int(time.time()), body.model,
                                       [Score(at, value) for at, value in enumerate(scores)],
                                       InputUsage(tokens, tokens)))


async def _ranked(context: Context, served: ServedModel, names: tuple[list[str], ...], queries: list[Any],
                  documents: list[Any], prompt: str | None) -> tuple[list[float], int]:
    """Score pairs with a reranker. Returns the scores, and the number of prompt tokens. ``names``: those of the inputs
    of both sides, for errors."""
    places: dict[Any, tuple[Any, list[int]]] = {}
    for at in range(len(documents)):
        query = queries[at % len(queries)]
        places.setdefault(query if isinstance(query, str) else id(query), (query, []))[1].append(at)

    async def ranked(query: Any, found: list[int]) -> tuple[Any, int]:
        try:
            return await counted(RERANK, context.state.pool, {
                "query": query, "documents": [documents[at] for at in found], **options})
        except MpoolError as error:  # the documents of a query have another order than those of the client
            error.rename({"query": names[0][found[0] % len(queries)],
                          **{f"documents[{at}]": names[1][place] for at, place in enumerate(found)}})
            raise

    options = {**served.target, **({} if prompt is None else {"prompt": prompt})}
    scores, total, waiting = [0.0] * len(documents), 0, list(places.values())
    for begin in range(0, len(waiting), _CONCURRENT):
        part = waiting[begin:begin + _CONCURRENT]
        done = await run_concurrently([ranked(query, found) for query, found in part])
        for (_, found), (ranking, tokens) in zip(part, done):
            total += tokens
            for one in ranking.results:
                scores[found[one.index]] = one.score
    return scores, total


async def _cosines(context: Context, served: ServedModel, names: tuple[list[str], ...], first: list[Any],
                   second: list[Any], prompt: str | None) -> tuple[list[float], int]:
    """Compare embeddings. Returns the cosines, and the number of prompt tokens. ``names``: as for :func:`_ranked`."""
    if prompt is not None:
        field = context.field_of("prompt")
        raise Refusal("unsupported_parameter", f"`{field}` requires a reranker.", field)
    try:
        rows, tokens = await counted(EMBED, context.state.pool, {
            "inputs": first + second, "max_inputs": len(first) + len(second), **served.target})  # each side was checked
    except MpoolError as error:
        error.rename({f"inputs[{at}]": name for at, name in enumerate([*names[0], *names[1]])})
        raise
    return await native_calls.REQUESTS.arun(cosines, rows[:len(first)], rows[len(first):]), tokens


OPERATIONS = (
    Operation("POST", "/v1/score", score, ScoreRequest, ScoreResponse, "Score pairs of texts or images", name="score"),
)

__all__ = ["OPERATIONS"]
