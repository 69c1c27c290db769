"""``/classify_tokens``: labelled parts of texts, in the format of Hugging Face's token classification."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.responses import Response

from ..host import native_calls
from ..tasks.verbs import CLASSIFY_TOKENS
from .computing import computed
from .fields import Fields, Name, Text
from .operations import MAX_RESPONSE, Context, Operation, check_response, large_response

if TYPE_CHECKING:
    from ..tasks.token_labels import TokenClassifications

#: Bytes of a span in JSON without its texts; maximum bytes of a character of these texts (an escape).
_SPAN_BYTES, _CHAR_BYTES = 128, 12
#: Number of spans from which their size is computed on another thread: it takes milliseconds.
_MANY = 1 << 13


class TokenParameters(Fields, kw_only=True):
    """How labels of tokens become labels of spans: see ``mpool.classify_tokens``."""

    aggregation_strategy: Literal["none", "simple", "first", "average", "max"] = "simple"
    ignore_labels: Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=1000)] | None = None
    stride: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None


class ClassifyTokensRequest(Fields, kw_only=True):
    """A text, or a list of texts. ``model`` may be omitted if the server was started with one token classifier."""

    inputs: Text | Annotated[list[Text], Meta(min_length=1, max_length=10_000)]
    parameters: TokenParameters | None = None
    truncate: bool | None = None
    model: Name | None = None


class Span(Struct, omit_defaults=True):
    """A part of a text. ``start`` and ``end`` count characters (code points). Without aggregation, a span is one token:
    ``entity`` is its label and ``index`` its position. With aggregation, ``entity_group`` is the label."""

    score: float
    word: str
    start: int
    end: int
    entity_group: str | None = None
    entity: str | None = None
    index: int | None = None


async def classify_tokens(context: Context, body: ClassifyTokensRequest) -> Response:
    """Label parts of texts, as the inference API of Hugging Face does."""
    served = await context.model_or_only(body.model, "spans", "token classifier")
    single, given = isinstance(body.inputs, str), body.parameters or TokenParameters()
    inputs = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if single:
        context.check_text(inputs[0], "inputs")
    else:
        context.check_inputs(inputs, "inputs", context.state.max_inputs)
    ignored = ["O"] if given.ignore_labels is None else given.ignore_labels
    found, _ = await computed(context, CLASSIFY_TOKENS, {
        "texts": inputs, **served.target, "truncate": body.truncate is not False,
        "aggregation": given.aggregation_strategy, "ignore_labels": ignored, "stride": given.stride,
        "max_inputs": context.state.max_inputs}, "inputs",
        MAX_RESPONSE)
    count = sum(map(len, found))
    check_response(_SPAN_BYTES * count, "inputs")
    size = await native_calls.REQUESTS.arun(_size, found) if count >= _MANY else _size(found)
    check_response(size, "inputs")
    field = "entity" if given.aggregation_strategy == "none" else "entity_group"

    def made() -> Any:
        rows = [[Span(one.score, one.word, one.start, one.end, index=one.index, **{field: one.label})
                 for one in spans] for spans in found]
        return rows[0] if single else rows

    return await large_response(made, size // _SPAN_BYTES)


def _size(found: TokenClassifications) -> int:
    """Return the maximum size of a response in bytes of JSON."""
    return sum(_SPAN_BYTES + _CHAR_BYTES * (len(one.label) + len(one.word)) for spans in found for one in spans)


OPERATIONS = (
    Operation("POST", "/classify_tokens", classify_tokens, ClassifyTokensRequest, (list[Span], list[list[Span]]),
              "Label parts of texts", name="classify_tokens"),
)

__all__ = ["OPERATIONS"]
