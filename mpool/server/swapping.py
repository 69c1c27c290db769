"""The route that replaces a served model by another without failing a request."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.responses import Response

from .. import aio, records
from ..errors import FormatError, InvalidArgument, LimitError, Unsupported
from ..models.references import parse as parse_reference
from .errors import Refusal
from .fields import Fields, Name
from .models import ServedModel, is_missing
from .operations import Context, Operation, json_response

log = records.logger("mpool.server")


class SwapRequest(Fields):
    """The model to replace.

    ``model``: name that ``--model`` gave to a path or a reference. It keeps its adapters and settings. ``source``: name
    of another model that clients can use; ``model`` then serves its files. Without ``source``, the reference of
    ``model`` is resolved and read again, which finds a newer revision of a repository. ``timeout``: seconds for
    loading.
    """

    model: Name
    source: Name | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None


class SwapResponse(Struct):
    """Result of a swap. ``swapped`` is true: other results are errors."""

    model: str
    swapped: bool


async def swap(context: Context, body: SwapRequest) -> Response:
    """Replace a model; respond once the new one takes all requests for the name. See :func:`mpool.swap`."""
    state = context.state
    served = await _model(context, body.model, "model")
    if not state.models.is_registered(served):
        raise Refusal("invalid_value", "Only a model that was given with --model as a path or a reference can be "
                                       "swapped, not a model of the catalogue.", "model")
    ref = served.model.ref
    if body.source is not None:
        ref = (await _model(context, body.source, "source")).model.ref
    try:
        await aio.swap(served.model, ref, timeout=body.timeout, pool=state.pool)
    except (FormatError, InvalidArgument, LimitError, Unsupported) as error:
        log.warning("%s: load_failed: %s", context.id, error)
        if error._kept and body.source is not None:
            raise Refusal("invalid_value", f"The model of `source` does not fit a setting that `model` keeps: "
                                           f"{', '.join(error._kept)}.", "source") from error
        raise Refusal("load_failed") from error  # their texts are about files, not about the request
    return json_response(SwapResponse(body.model, True))


async def _model(context: Context, name: str, field: str) -> ServedModel:
    """Return the model that a field names; a missing one, see :meth:`Context.model`.

    Raises:
        Refusal: The name has an adapter, or it is a malformed reference, which no model can have as its name.
    """
    served = await context.model(name)
    if is_missing(served):
        try:
            parse_reference(name)
        except InvalidArgument:
            raise Refusal("invalid_value", f"`{field}` must be the name of a model, or a reference with a valid form.",
                          field) from None
    if "adapter" in served.defaults:
        raise Refusal("invalid_value", f"`{field}` must be the name of a model without an adapter.", field)
    return served


OPERATIONS = (Operation("POST", "/api/mpool/swap", swap, SwapRequest, SwapResponse, "Replace a model by another",
                        name="mpool_swap", owner_only=True),)

__all__ = ["OPERATIONS"]
