"""``/pooling``, as in vLLM: vectors, or scores of labels, of texts or of their tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.responses import Response

from ..tasks.verbs import CLASSIFY, EMBED, TOKEN_SCORES
from .computing import computed, token_vectors
from .errors import Refusal
from .fields import Fields, Name
from .models import embedding_of
from .openai.structs import Inputs as TextsOrIds
from .openai.structs import InputUsage
from .openai.vectors import encoded_one, texts_or_ids
from .operations import MAX_NUMBERS, NUMBER_BYTES, Context, Operation, check_response, large_response

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .models import ServedModel


#: Task -> output and kind of its models, as for :meth:`Context.model_or_only`.
_KINDS = {"embed": ("vectors", "embedding model"), "token_embed": ("vectors", "embedding model"),
          "classify": ("labels", "classifier"), "token_classify": ("spans", "token classifier")}


class PoolingRequest(Fields, kw_only=True):
    """Texts, or lists of token ids. ``task``: ``embed`` (one vector per text), ``token_embed`` (one vector per token,
    the default for embedding models), ``classify`` (scores of all labels) or ``token_classify`` (scores of all labels
    for each token). If ``use_activation`` is false, vectors are not normalised and scores are logits.
    ``truncate_prompt_tokens``: only -1, the default. ``user`` is ignored."""

    input: TextsOrIds
    model: Name | None = None
    task: Literal["embed", "token_embed", "classify", "token_classify"] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: Literal[-1] | None = None
    allow_token_ids: bool | None = None
    user: str | None = None


class Pooled(Struct):
    """The result for a text: numbers, one list of numbers per token, or base64 of little-endian float32."""

    index: int
    data: list[float | list[float]] | str
    object: str = "pooling"


class PoolingResponse(Struct):
    """One result per text."""

    id: str
    created: int
    model: str
    data: list[Pooled]
    usage: InputUsage
    object: str = "list"


async def pooling(context: Context, body: PoolingRequest) -> Response:
    """Compute vectors or scores of texts, as vLLM does."""
    served = await context.model_or_only(body.model, *_KINDS[body.task or "embed"])
    found = texts_or_ids(context, body.input)
    inputs = [found] if isinstance(found, str) else found
    settings = await embedding_of(served)
    if body.task is None and settings is not None and "vectors" not in settings.outputs:
        allowed = "token_classify" if "spans" in settings.outputs else "classify"
        raise Refusal("invalid_value", f"`task` must be {allowed} for this model.", "task")
    task = body.task or "token_embed"
    if body.dimensions is not None and task != "embed":
        raise Refusal("unsupported_parameter", "`dimensions` requires the task embed.", "dimensions")
    width = body.dimensions or 0
    if settings is not None:
        labels = 0 if settings.classifier is None else len(settings.classifier.labels)
        width = labels if task == "classify" else width or settings.truncate_dim or settings.output_size
    if not task.startswith("token_"):
        check_response(NUMBER_BYTES * width * len(inputs), "input")
    rows, tokens = await _computed(context, served, task, inputs, body)

    def made() -> PoolingResponse:
        data = [Pooled(at, encoded_one(values, body.encoding_format)) for at, values in enumerate(rows)]
        return PoolingResponse(f"pool-{context.id}", int(time.time()), served.name, data, InputUsage(tokens, tokens))

    return await large_response(made, sum(values.size for values in rows))


async def _computed(context: Context, served: ServedModel, task: str, inputs: list[Any],
                    body: PoolingRequest) -> tuple[list[NDArray[Any]], int]:
    """Run a request. Returns the array of each text, and the number of prompt tokens."""
    ids = isinstance(inputs[0], list)
    if task == "classify":
        if ids:
            raise Refusal("unsupported_parameter", "`input` must be texts for the task classify.", "input")
        found, tokens = await computed(context, CLASSIFY, {
            "texts": inputs, **served.target,
            "function_to_apply": "none" if body.use_activation is False else None}, "input")
        return [one.scores for one in found], tokens
    if task == "token_classify":
        if ids:
            raise Refusal("unsupported_parameter", "`input` must be texts for the task token_classify.", "input")
        found, tokens = await computed(context, TOKEN_SCORES, {
            "inputs": inputs, **served.target,
            "function_to_apply": "none" if body.use_activation is False else "softmax"}, "input", MAX_NUMBERS)
        return list(found), tokens
    allowed = bool(body.allow_token_ids or context.state.settings.allow_token_ids)
    if task == "embed":
        found, tokens = await computed(context, EMBED, {
            "inputs": inputs, **served.target, "dimensions": body.dimensions, "normalize": body.use_activation,
            "allow_token_ids": allowed}, "input")
        return list(found), tokens
    if body.use_activation is not None:
        raise Refusal("unsupported_parameter", "`use_activation` requires the task embed, classify or "
                      "token_classify.",
                      "use_activation")
    if ids and not allowed:
        raise Refusal("invalid_value", "`input` must be texts: token ids are valid only in the vocabulary that they "
                                       "are from. If they are this model's, set `allow_token_ids`.", "input")
    found, tokens = await token_vectors(context, {"inputs": inputs, **served.target}, "input")
    return list(found), tokens


OPERATIONS = (
    Operation("POST", "/pooling", pooling, PoolingRequest, PoolingResponse, "Compute vectors or scores of texts",
              name="pooling", names={"input": "input", "dimensions": "dimensions"}),
)

__all__ = ["OPERATIONS"]
