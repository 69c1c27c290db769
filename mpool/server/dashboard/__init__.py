"""The dashboard at ``/``: a page that shows the state of the pool, and the routes that the page uses.

The page consists of plain HTML, CSS and JavaScript, and loads nothing from other servers. It fetches a
:class:`~mpool.server.dashboard.snapshot.Snapshot` once a second while it is visible. Its playground uses the public
routes of the server.

If the server has a token, the browser asks for it as a password (any user name works) when the server refuses ``/``.
The browser keeps the password while the tab is open and sends it with every request of the page. Therefore the files
of the page require the token like every route except ``/health``. mpool does not store the token in the browser: all
ports of a machine would share a cookie, and a script could read other storage.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import parse_qs

from msgspec import Meta, Struct
from starlette.responses import Response

from ... import aio
from ...checks import shown
from ...host import native_calls
from ...runtime.history import KEPT
from ..errors import Refusal
from ..event_list import KEPT as EVENTS
from ..event_list import ServerEvent
from ..fields import Fields, Name
from ..openai.structs import Embedding, EmbeddingsResponse, InputUsage
from ..operations import Context, Operation, json_response, large_response
from ..request_history import PastRequest
from ..series import RINGS, columns
from . import model_table
from .snapshot import Snapshot, snapshot

if TYPE_CHECKING:
    from ..models import ServedModel

_SCRIPTS = ("page", "answers", "components", "conversation", "dom", "events", "formats", "highlight", "hints", "images",
            "markdown", "models", "picture", "playground", "plots", "requests", "results", "series", "snippets", "tabs")
#: Path -> (file, media type).
FILES = {"/": ("page.html", "text/html"), "/dashboard/page.css": ("page.css", "text/css"),
         "/dashboard/playground.css": ("playground.css", "text/css"),
         **{f"/dashboard/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS}}
#: Content security policy: no resources of other servers, no inline scripts or styles, no framing; images may be data.
_POLICY = ("default-src 'none'; script-src 'self'; style-src 'self'; img-src data: blob:; connect-src 'self'; "
           "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
_HEADERS = {
    "content-security-policy": _POLICY, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin", "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@functools.cache
def _read(name: str) -> bytes:
    return resources.files(__name__).joinpath(name).read_bytes()


def _file(name: str, kind: str) -> Callable[[Context, Any], Awaitable[Response]]:
    async def send(context: Context, body: None) -> Response:
        return Response(_read(name), headers=_HEADERS, media_type=kind)

    return send


# ---- requests in flight ----------------------------------------------------------------------------------------------

class CancelRequest(Fields):
    """The request to cancel. ``id``: an ``id`` in ``requests`` of the snapshot, or the header ``x-request-id``."""

    id: Annotated[str, Meta(min_length=1, max_length=64)]


class CancelResponse(Struct):
    """Result of a cancellation. ``cancelled`` is false if the request has already ended or never existed."""

    id: str
    cancelled: bool


async def cancel(context: Context, body: CancelRequest) -> Response:
    """Cancel a request in flight: its client receives the error ``cancelled``. Idempotent."""
    running = context.state.running.get(body.id)
    if running is not None:
        running.cancel()
    return json_response(CancelResponse(body.id, running is not None))


async def state(context: Context, body: None) -> Response:
    """Return a snapshot of the pool. Never waits for other requests."""
    return json_response(snapshot(context.state))


# ---- requests that ended ---------------------------------------------------------------------------------------------

class HistoryResponse(Struct):
    """The last requests that named a model, the latest first. ``limit``: number of requests that the server keeps."""

    limit: int
    requests: list[PastRequest]


async def history(context: Context, body: None) -> Response:
    """Return the last requests. Contains neither prompts nor results."""
    return json_response(HistoryResponse(KEPT, list(reversed(context.state.history))))


# ---- events ----------------------------------------------------------------------------------------------------------

class EventsResponse(Struct):
    """The last events, the latest first. ``limit``: number of refusals, and of other events, that the server keeps."""

    limit: int
    events: list[ServerEvent]


async def events(context: Context, body: None) -> Response:
    """Return the last loads, unloads, deaths of workers, downloads and refusals."""
    return json_response(EventsResponse(EVENTS, context.state.events.latest()))


# ---- history of the pool ---------------------------------------------------------------------------------------------

class ModelSeries(Struct):
    """History of a model: one value per point, null where there is none. ``failed``: failed requests per second;
    ``tokens``: tokens of all passes of language models, and of completed requests of other models, per second;
    ``images``: images per second; ``memory``: bytes; ``p50``, ``p99``: latency in seconds."""

    key: str
    capability: str
    values: dict[str, list[float | None]]


class SeriesResponse(Struct):
    """Points of one ring, the oldest first.

    ``last``: number of the newest point. ``time``: seconds since 1970 at which that point ended. ``started``: seconds
    since 1970 at which the history began; point 0 begins there. ``step``: seconds per point of this ring. ``steps``,
    ``sizes``: seconds per point and number of points of every ring. ``pool``: values of the whole pool, named as those
    of a model, except that ``threads`` (compute threads in use) replaces ``workers``.
    """

    started: float
    step: int
    steps: list[int]
    sizes: list[int]
    last: int
    time: float
    pool: dict[str, list[float | None]]
    models: list[ModelSeries]


async def series(context: Context, body: None) -> Response:
    """Return the history of the pool. ``?step=1``, ``10`` or ``120``: seconds per point; ``after=N``: only points with
    a number above N."""
    query = {name: values[-1] for name, values in
             parse_qs(context.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True).items()}
    step, after = query.get("step", "1"), query.get("after", "-1")
    if step not in map(str, RINGS):
        raise Refusal("invalid_value", f"`step` must be one of {', '.join(map(str, RINGS))}, got {shown(step)}.",
                      "step")
    if not re.fullmatch("-1|[0-9]{1,12}", after):
        raise Refusal("invalid_value", f"`after` must be the number of a point, or -1, got {shown(after)}.", "after")
    found = context.state.series.points(int(step), int(after))

    def made() -> SeriesResponse:
        models = [ModelSeries(key, part[0], columns(part)) for key, part in found["models"].items()]
        return SeriesResponse(**{**found, "pool": columns(found["pool"]), "models": models})

    return await large_response(made, sum(len(part[2]) for part in (found["pool"], *found["models"].values())))


# ---- models of the playground ----------------------------------------------------------------------------------------

class UsableModel(Struct):
    """A model that clients can use. ``tasks``: what the playground can do with it: ``chat``, ``vision`` (chat with
    images), ``embed``, ``rerank``, ``embed_image``, ``image``."""

    name: str
    tasks: list[str]


class UsableModels(Struct):
    """The models that clients can use. ``token``: true if the server requires a token."""

    models: list[UsableModel]
    token: bool


#: Capability -> task of the playground.
_TASKS = {"text_to_text": "chat", "vision": "vision", "image_embedding": "embed_image", "text_to_image": "image"}


def _tasks(served: ServedModel) -> list[str]:
    found = [_TASKS[name] for name in served.capabilities if name in _TASKS]
    if "text_embedding" in served.capabilities:
        settings = served.model.description.embedding
        if settings is None or "vectors" in settings.outputs and "dense" in settings.embeddings:
            found.append("embed")
        elif settings.scores:
            found.append("rerank")
    return found


async def models(context: Context, body: None) -> Response:
    """List the models that clients can use, and the tasks of the playground for which each is fit."""
    listed = await context.state.models.listed()
    found = await native_calls.REQUESTS.arun(lambda: [UsableModel(one.name, _tasks(one)) for one in listed])
    return json_response(UsableModels(found, context.state.settings.token is not None))


# ---- images ----------------------------------------------------------------------------------------------------------

class ImagesToEmbed(Fields):
    """Images to embed, each as a file in base64 or as ``data:image/png;base64,...``."""

    model: Name
    images: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=256)]


async def embed_images(context: Context, body: ImagesToEmbed) -> Response:
    """Embed images. Neither OpenAI's nor Ollama's protocol has a route for this."""
    served = await context.model(body.model)
    files = await context.converted(
        lambda: [context.image_file(text, f"images[{at}]").image for at, text in enumerate(body.images)])
    rows = await aio.embed_image(files, served.model, pool=context.state.pool)

    def made() -> EmbeddingsResponse:
        return EmbeddingsResponse([Embedding(at, row.tolist()) for at, row in enumerate(rows)], body.model,
                                InputUsage(0, 0))

    return await large_response(made, rows.size)


OPERATIONS = (
    *(Operation("GET", path, _file(name, kind), None, None, f"The dashboard: {name}", media_type=kind,
                name="dashboard_" + name.replace(".", "_")) for path, (name, kind) in FILES.items()),
    Operation("GET", "/api/mpool/state", state, None, Snapshot, "State of the pool", name="mpool_state"),
    Operation("GET", "/api/mpool/history", history, None, HistoryResponse, "The last requests", name="mpool_history"),
    Operation("GET", "/api/mpool/events", events, None, EventsResponse, "The last events", name="mpool_events"),
    Operation("GET", "/api/mpool/series", series, None, SeriesResponse, "History of the pool", name="mpool_series"),
    Operation("GET", "/api/mpool/models", models, None, UsableModels, "Models and their tasks", name="mpool_models"),
    Operation("POST", "/api/mpool/cancel", cancel, CancelRequest, CancelResponse, "Cancel a request in flight",
              name="mpool_cancel"),
    Operation("POST", "/api/mpool/embed_images", embed_images, ImagesToEmbed, EmbeddingsResponse, "Embed images",
              name="mpool_embed_images"),
    *model_table.OPERATIONS,
)

__all__ = ["FILES", "OPERATIONS"]
