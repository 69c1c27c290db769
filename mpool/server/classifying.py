"""``/classify`` as in vLLM, and ``/predict`` as in text-embeddings-inference: labels of texts and of pairs of texts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from starlette.responses import Response

from ..tasks.verbs import CLASSIFY
from .computing import computed
from .errors import Refusal
from .fields import Fields, Name, Text
from .models import embedding_of
from .openai.structs import InputUsage
from .operations import MAX_RESPONSE, Context, Operation, large_response
from .text_embeddings_inference import Direction, check_direction

if TYPE_CHECKING:
    from .models import ServedModel

#: Bytes of a score in JSON, without its label.
_SCORE_BYTES = 40

Texts = Text | Annotated[list[Text], Meta(min_length=1, max_length=10_000)]


class ClassifyRequest(Fields, kw_only=True):
    """Texts to classify. If ``use_activation`` (formerly ``activation``) is false, the scores are logits. ``user`` is
    ignored."""

    model: Name
    input: Texts
    use_activation: bool | None = None
    activation: bool | None = None
    user: str | None = None


class Classified(Struct):
    """The labels of a text: the best one, and the scores of all in the order of the model's labels."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyResponse(Struct):
    """One result per text."""

    id: str
    created: int
    model: str
    data: list[Classified]
    usage: InputUsage
    object: str = "list"


class PredictRequest(Fields, kw_only=True):
    """Inputs to classify: a text; a pair ``[text, text]``; or a batch of lists, each with a text or a pair.

    ``raw_scores``: return logits. ``truncation_direction``: only ``Right``. ``model`` (an extension) may be omitted if
    the server was started with one classifier.
    """

    inputs: Text | Annotated[list[Text | Annotated[list[Text], Meta(min_length=1, max_length=2)]],
                             Meta(min_length=1, max_length=10_000)]
    truncate: bool | None = None
    truncation_direction: Direction = "Right"
    raw_scores: bool = False
    model: Name | None = None


class Prediction(Struct):
    """A label and its score."""

    score: float
    label: str


async def _classified(context: Context, served: ServedModel, inputs: list[Any], raw: bool, field: str,
                      truncate: bool = True) -> tuple[Any, int]:
    """Classify texts, or pairs of texts, of a field. Returns the library's result, and the number of prompt tokens."""
    return await computed(context, CLASSIFY, {
        "texts": inputs, **served.target, "truncate": truncate,
        "function_to_apply": "none" if raw else None}, field)


async def _check_size(served: ServedModel, field: str, inputs: int, *, labels: bool) -> int:
    """Return the size of the scores of a response, in bytes of JSON.

    Args:
        served: the classifier.
        field: name of the inputs in the request.
        inputs: their number.
        labels: True if each score has its label, False if only the best label of an input is named.

    Raises:
        Refusal: the size exceeds the limit.
    """
    settings = await embedding_of(served)
    names = () if settings is None or settings.classifier is None else settings.classifier.labels
    size = _SCORE_BYTES * len(names) + (sum(len(name.encode()) for name in names) if labels else 0)
    if inputs * size > MAX_RESPONSE:
        raise Refusal("request_too_large", f"The response of `{field}` would have {inputs * size:,} bytes, for "
                                           f"{inputs:,} inputs and {len(names):,} labels; at most {MAX_RESPONSE:,} are "
                                           "allowed. Send fewer inputs per request.", field)
    return inputs * size


async def classify(context: Context, body: ClassifyRequest) -> Response:
    """Classify texts, as vLLM does."""
    served = await context.model(body.model)
    given = body.input if isinstance(body.input, list) else [body.input]
    context.check_inputs(given, "input", context.state.max_inputs)
    size = await _check_size(served, "input", len(given), labels=False)
    found, tokens = await _classified(context, served, given, False in (body.use_activation, body.activation),
                                      "input")

    def made() -> ClassifyResponse:
        data = [Classified(at, one.label, one.scores.tolist(), len(one.labels)) for at, one in enumerate(found)]
        return ClassifyResponse(f"classify-{context.id}", int(time.time()), body.model, data,
                                InputUsage(tokens, tokens))

    return await large_response(made, size // _SCORE_BYTES)


async def predict(context: Context, body: PredictRequest) -> Response:
    """Classify texts and pairs of texts, as text-embeddings-inference does."""
    served = await context.model_or_only(body.model, "labels", "classifier")
    check_direction(body.truncation_direction)
    inputs, single = _inputs(context, body.inputs)
    length = await _check_size(served, "inputs", len(inputs), labels=True)
    rows: list[Any] = [None] * len(inputs)
    for size in (1, 2):  # a request of the library has texts or pairs
        places = [at for at, one in enumerate(inputs) if len(one) == size]
        if places:
            part: list[Any] = [inputs[at][0] if size == 1 else tuple(inputs[at]) for at in places]
            found, _ = await _classified(context, served, part, body.raw_scores, "inputs",
                                         body.truncate is not False)
            for at, one in zip(places, found):
                rows[at] = one

    def made() -> Any:
        lists = [[Prediction(each.score, each.label) for each in one] for one in rows]
        return lists[0] if single else lists

    return await large_response(made, length // _SCORE_BYTES)


def _inputs(context: Context, given: Any) -> tuple[list[list[str]], bool]:
    """Return the inputs as lists of one or two texts, and True if the request has one input and no batch.

    Raises:
        Refusal: texts and lists are mixed, there are more than two texts, or a text is too long.
    """
    single = isinstance(given, str) or isinstance(given[0], str)
    if single:
        one = [given] if isinstance(given, str) else given
        if len(one) > 2 or not all(isinstance(text, str) for text in one):
            raise Refusal("invalid_value", "`inputs` must be a text, a pair [text, text], or a list of lists with one "
                                           "or two texts.", "inputs")
        return [[context.check_text(text, "inputs") for text in one]], True
    context.check_inputs(given, "inputs", context.state.max_inputs)
    for at, part in enumerate(given):
        if isinstance(part, str):
            raise Refusal("invalid_value", f"`inputs[{at}]` must be a list with one or two texts, as the first one.",
                          "inputs")
        for text in part:
            context.check_text(text, f"inputs[{at}]")
    return given, False


OPERATIONS = (
    Operation("POST", "/classify", classify, ClassifyRequest, ClassifyResponse, "Classify texts", name="classify"),
    Operation("POST", "/predict", predict, PredictRequest, (list[Prediction], list[list[Prediction]]),
              "Classify texts and pairs of texts", name="predict"),
)

__all__ = ["OPERATIONS"]
