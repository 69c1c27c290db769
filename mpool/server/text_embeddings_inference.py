"""Routes of text-embeddings-inference: ``/embed``, ``/embed_sparse``, ``/embed_all``, ``/rerank`` and ``/similarity``.

``/predict`` is in :mod:`mpool.server.classifying`. Fields, responses and errors are those of
https://huggingface.github.io/text-embeddings-inference; ``model`` and ``task`` are extensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.responses import Response

from ..host import native_calls
from ..search import cosines
from ..tasks.running import counted
from ..tasks.verbs import EMBED, EMBED_SPARSE, RERANK
from .computing import token_vectors
from .errors import Refusal
from .fields import Fields, Name, Token
from .models import embedding_of
from .openai.vectors import texts_or_ids
from .operations import MAX_RESPONSE, NUMBER_BYTES, Context, Operation, check_response, json_response, large_response

if TYPE_CHECKING:
    from .models import ServedModel

#: Bytes of a weight with its index, in JSON and in arrays.
_WEIGHT_BYTES, _WEIGHT_ARRAY_BYTES = 50, 8
#: Maximum number of inputs that a body can have; the pool's limit of texts is lower.
_MAX = Meta(max_length=1_000_000)
#: A text, its token ids, or a list of either.
Inputs = str | Annotated[list[str | Token | list[Token]], _MAX]
Direction = Literal["Left", "left", "Right", "right"]
Task = Literal["query", "document"]


class EmbedAllRequest(Fields, kw_only=True):
    """Texts, or lists of token ids. ``truncate``: default true. ``truncation_direction``: only ``Right``.
    ``prompt_name``: name of one of the model's prompts; without it, the model's default prompt is used, if it has one.
    ``model`` (an extension) may be omitted if the server was started with one suitable model. ``task`` (an extension):
    whether texts are queries or documents, for models that compute these differently."""

    inputs: Inputs
    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    prompt_name: str | None = None
    task: Task | None = None
    model: Name | None = None


class EmbedSparseRequest(EmbedAllRequest, kw_only=True):
    """Same fields as :class:`EmbedAllRequest`."""


class EmbedRequest(EmbedAllRequest, kw_only=True):
    """Same fields as :class:`EmbedAllRequest`. ``normalize``: scale vectors to length 1. ``dimensions``: number of
    components."""

    normalize: bool = True
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class SparseValue(Struct):
    """A weight of a sparse vector. ``index``: token of the vocabulary."""

    index: int
    value: float


class TextsRequest(Fields, kw_only=True):
    """Texts to rank by relevance to a query, also under the name ``documents``. ``raw_scores``: return logits instead
    of their logistic function. ``truncation_direction``: only ``Right``. ``model`` (an extension) may be omitted if the
    server was started with one reranker."""

    query: str
    texts: Annotated[list[str], _MAX] | None = None
    documents: Annotated[list[str], _MAX] | None = None
    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    raw_scores: bool = False
    return_text: bool = False
    model: Name | None = None


class Rank(Struct, omit_defaults=True):
    """A text with its score. ``index``: position of the text in the request."""

    index: int
    score: float
    text: str | None = None


class SimilarityInput(Fields, kw_only=True):
    """A text, and texts to compare it with."""

    source_sentence: str
    sentences: Annotated[list[str], _MAX]


class SimilarityParameters(Fields, kw_only=True):
    """Options as in :class:`EmbedRequest`."""

    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    prompt_name: str | None = None


class SimilarityRequest(Fields, kw_only=True):
    """Texts to compare. ``model`` (an extension) may be omitted if the server was started with one embedding model."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None
    model: Name | None = None


def check_direction(direction: str) -> None:
    """Refuse truncation at the beginning of a text."""
    if direction.lower() == "left":
        raise Refusal("unsupported_parameter", "`truncation_direction` must be Right.", "truncation_direction")


def _check_filled(context: Context, texts: list[str], name: str) -> None:
    """Refuse an empty list, too many texts, an empty text and a text that is too long."""
    context.check_inputs(texts, name, context.state.max_inputs)
    if not texts or not all(texts):
        raise Refusal("empty_input", f"`{name}` must have at least one text, and no empty text.", name)


def _arguments(context: Context, body: EmbedAllRequest, served: ServedModel) -> dict[str, Any]:
    """Return the arguments of the library for a request.

    Raises:
        Refusal: There is no input, there are too many, or an input is empty, too long, or of another kind than the
            first one.
    """
    check_direction(body.truncation_direction)
    found = texts_or_ids(context, body.inputs, "inputs")
    inputs = [found] if isinstance(found, str) else found
    if not inputs or not all(inputs):
        raise Refusal("empty_input", "`inputs` must have at least one text, and no empty text.", "inputs")
    if isinstance(inputs[0], list) and (body.prompt_name is not None or body.task is not None):
        raise Refusal("invalid_value", "`prompt_name` and `task` require texts, got token ids.", "inputs")
    return {"inputs": inputs, **served.target, "truncate": body.truncate is not False,
            "prompt_name": body.prompt_name, "task": body.task}


async def embed(context: Context, body: EmbedRequest) -> Response:
    """Embed texts or token ids."""
    served = await context.model_or_only(body.model, "dense", "model of dense vectors")
    given = _arguments(context, body, served)
    settings = await embedding_of(served)
    width = body.dimensions or (0 if settings is None else settings.truncate_dim or settings.output_size)
    check_response(NUMBER_BYTES * width * len(given["inputs"]), "inputs")
    rows, _ = await counted(EMBED, context.state.pool, {**given, "normalize": body.normalize,
                                                        "dimensions": body.dimensions})
    return await large_response(rows.tolist, rows.size)


async def embed_sparse(context: Context, body: EmbedSparseRequest) -> Response:
    """Compute sparse vectors of texts or token ids."""
    served = await context.model_or_only(body.model, "sparse", "model of sparse vectors")
    found, _ = await counted(EMBED_SPARSE, context.state.pool, _arguments(context, body, served),
                             MAX_RESPONSE // _WEIGHT_BYTES * _WEIGHT_ARRAY_BYTES)

    def made() -> list[list[SparseValue]]:
        return [[SparseValue(*one) for one in zip(ids.tolist(), values.tolist())] for ids, values in found]

    return await large_response(made, 2 * len(found.values))


async def embed_all(context: Context, body: EmbedAllRequest) -> Response:
    """Compute the vectors of all tokens of texts or token ids."""
    served = await context.model_or_only(body.model, "vectors", "embedding model")
    found, _ = await token_vectors(context, _arguments(context, body, served), "inputs")
    return await large_response(lambda: [rows.tolist() for rows in found], found.values.size)


async def rerank(context: Context, body: TextsRequest) -> Response:
    """Rank texts by relevance to a query."""
    served = await context.model_or_only(body.model, "scores", "reranker")
    check_direction(body.truncation_direction)
    _check_filled(context, [body.query], "query")
    name = "texts" if body.texts is not None else "documents"
    texts = getattr(body, name)
    if texts is None or body.texts is not None and body.documents is not None:
        raise Refusal("invalid_value", "One of `texts` and `documents` is required.", "texts")
    _check_filled(context, texts, name)
    ranking, _ = await counted(RERANK, context.state.pool, {
        "query": body.query, "documents": texts, **served.target, "truncate": body.truncate is not False,
        "function_to_apply": "none" if body.raw_scores else "sigmoid"})

    def made() -> list[Rank]:
        return [Rank(one.index, one.score, one.text if body.return_text else None) for one in ranking.results]

    chars = sum(map(len, texts)) if body.return_text else 0
    return await large_response(made, len(texts) + chars // NUMBER_BYTES)


async def similarity(context: Context, body: SimilarityRequest) -> Response:
    """Return the cosine of each sentence to the source sentence."""
    served = await context.model_or_only(body.model, "dense", "model of dense vectors")
    options = body.parameters or SimilarityParameters()
    check_direction(options.truncation_direction)
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    _check_filled(context, texts[:1], "inputs.source_sentence")
    _check_filled(context, texts[1:], "inputs.sentences")
    rows, _ = await counted(EMBED, context.state.pool, {
        "inputs": texts, **served.target, "truncate": options.truncate is not False,
        "prompt_name": options.prompt_name})
    return json_response(await native_calls.REQUESTS.arun(cosines, rows[:1], rows[1:]))


OPERATIONS = (
    Operation("POST", "/embed", embed, EmbedRequest, list[list[float]], "Embed texts or token ids", name="embed"),
    Operation("POST", "/embed_sparse", embed_sparse, EmbedSparseRequest, list[list[SparseValue]],
              "Compute sparse vectors", name="embed_sparse"),
    Operation("POST", "/embed_all", embed_all, EmbedAllRequest, list[list[list[float]]],
              "Compute the vectors of all tokens", name="embed_all"),
    Operation("POST", "/rerank", rerank, TextsRequest, list[Rank], "Rank texts by relevance to a query",
              name="rank"),
    Operation("POST", "/similarity", similarity, SimilarityRequest, list[float], "Compare texts with a text",
              name="similarity"),
)

__all__ = ["OPERATIONS", "Direction", "check_direction"]
