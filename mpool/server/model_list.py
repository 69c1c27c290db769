"""``/v1/models`` and ``/v1/models/{id}``, which the protocols of OpenAI and Anthropic share.

A request with the header ``anthropic-version`` gets Anthropic's format: Anthropic's client sends it with every request.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from starlette.responses import Response

from ..checks import shown
from ..host import native_calls
from .anthropic.structs import AnthropicModel, AnthropicModels
from .errors import Refusal
from .guard import is_anthropic
from .openai.structs import ModelCard, ModelList
from .operations import Context, Operation, json_response

if TYPE_CHECKING:
    from .models import ServedModel

_PATH = "/v1/models/"
#: Capabilities of the models that Anthropic's clients can use.
_CHAT = {"text_to_text", "vision"}
#: Anthropic's default and maximum number of models on a page.
_PAGE, _MAX_PAGE = 20, 1000


async def models(context: Context, body: None) -> Response:
    """List the models that clients can use."""
    listed = await context.state.models.listed()
    if not is_anthropic(context.scope):
        return json_response(ModelList(await native_calls.REQUESTS.arun(lambda: list(map(_card, listed)))))
    query = {name: values[-1] for name, values in
             parse_qs(context.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True).items()}
    found = [served for served in listed if _CHAT.intersection(served.capabilities)]
    return json_response(await native_calls.REQUESTS.arun(_page, found, query))


async def model(context: Context, body: None) -> Response:
    """Describe a model. The id may contain slashes."""
    served = await context.model(context.scope["path"].removeprefix(_PATH))
    describe = _anthropic_model if is_anthropic(context.scope) else _card
    return json_response(await native_calls.REQUESTS.arun(describe, served))


def _card(served: ServedModel) -> ModelCard:
    return ModelCard(served.name, served.since, list(served.capabilities), served.parent or served.name, served.parent,
                     _context_length(served))


def _context_length(served: ServedModel) -> int | None:
    generation = served.model.description.generation
    return None if generation is None else generation.context_length


def _anthropic_model(served: ServedModel) -> AnthropicModel:
    created = datetime.fromtimestamp(served.since, timezone.utc).isoformat().replace("+00:00", "Z")
    return AnthropicModel(served.name, served.name, created, _context_length(served))


def _page(found: list[ServedModel], query: dict[str, str]) -> AnthropicModels:
    """Return a page of models.

    Args:
        found: All models.
        query: Parameters of the URL: ``limit``, and ``after_id`` or ``before_id``.

    Raises:
        Refusal: A parameter is not valid.
    """
    limit = query.get("limit", str(_PAGE))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 4 and 1 <= int(limit) <= _MAX_PAGE):
        raise Refusal("invalid_value", f"`limit` must be an integer from 1 to {_MAX_PAGE:,}, got {shown(limit)}.",
                      "limit")
    names, most = [served.name for served in found], int(limit)
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in names:
            raise Refusal("invalid_value", f"`{name}` must be the id of a model, got {shown(query[name])}.", name)
    first = names.index(query["after_id"]) + 1 if "after_id" in query else 0
    last = names.index(query["before_id"]) if "before_id" in query else len(names)
    backwards = "before_id" in query and "after_id" not in query
    page = found[first:last][-most:] if backwards else found[first:last][:most]
    return AnthropicModels(list(map(_anthropic_model, page)), len(found[first:last]) > most,
                           page[0].name if page else None, page[-1].name if page else None)


OPERATIONS = (
    Operation("GET", "/v1/models", models, None, (ModelList, AnthropicModels), "List the models that clients can use",
              name="models"),
    Operation("GET", _PATH + "{id}", model, None, (ModelCard, AnthropicModel), "Describe a model", name="model"),
)

__all__ = ["OPERATIONS"]
