"""Every model that the server can serve, in memory or not, and the actions on them: load, unload, pin.

Downloads use ``POST /api/pull``. Clients that may use a model may also load, unload and pin it: a request with
Ollama's ``keep_alive`` does the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from starlette.responses import Response

from ... import aio
from ...errors import MpoolError
from ...host import native_calls
from ...models.catalogue import Row, estimate
from ...models.catalogue import load as load_catalogue
from .. import ollama_models
from ..fields import Fields, Name
from ..operations import Context, Operation, json_response

if TYPE_CHECKING:
    from ..models import ServedModel
    from ..state import State


class DownloadState(Struct):
    """A download in progress: bytes so far, and all bytes, null if their number is unknown."""

    done: int
    total: int | None


class ServableModel(Struct):
    """A model that the server can serve.

    ``local``: the files are on this machine; otherwise, the values are those of the catalogue. ``keys``: keys of its
    parts in the snapshot, one for each capability and compute type that was used. ``names``: other names for clients:
    aliases, and its name with each of its adapters. ``parameters``: number of parameters as a text, such as ``135M``.
    ``context``: tokens. ``files``: bytes of its files. ``needed``: estimated bytes of memory with one worker.
    """

    name: str
    local: bool
    keys: list[str]
    names: list[str]
    capabilities: list[str]
    parameters: str | None
    quantisation: str | None
    context: int | None
    files: int | None
    needed: int | None
    license: str | None
    download: DownloadState | None


class ServableModels(Struct):
    """The models that the server can serve. ``pull_refusal``: why clients cannot download models, null if they can."""

    models: list[ServableModel]
    pull_refusal: str | None


async def servable(context: Context, body: None) -> Response:
    """List the models that the server can serve: those of ``/v1/models``, then the rest of the catalogue."""
    state = context.state
    listed = await state.models.listed()
    rows = load_catalogue().rows.values() if state.models.catalogue else ()
    models = await native_calls.REQUESTS.arun(lambda: [*_local(listed), *_remote(rows, listed, state)])
    return json_response(ServableModels(models, ollama_models.pull_refusal(state)))


def _local(listed: list[ServedModel]) -> list[ServableModel]:
    found: dict[str, ServableModel] = {}
    for served in listed:  # a model comes before its adapters and aliases
        first = found.get(served.model.key)
        if first is None:
            found[served.model.key] = _describe(served)
        else:
            first.names.append(served.name)
    return list(found.values())


def _describe(served: ServedModel) -> ServableModel:
    model = ServableModel(served.name, True, list(served.model.core_keys), [], list(served.capabilities), None, None,
                          None, None, None, None, None)
    with suppress(MpoolError, OSError):  # the files were moved or changed: the next request reports it
        known, description = ollama_models.describe(served), served.model.description
        model.parameters, model.quantisation = known.details["parameter_size"], known.details["quantization_level"]
        model.context, model.files, model.license = known.context_length, known.size, known.license or None
        model.needed = (description.est_memory_allocation_mb or estimate(description)) * 10**6
    return model


def _remote(rows: Iterable[Row], listed: list[ServedModel], state: State) -> list[ServableModel]:
    local, found = {served.model.key for served in listed}, []
    for row in rows:
        if row.key in local:
            continue
        download = state.models.downloads.get(row.key)
        found.append(ServableModel(
            row.key, False, [], [], [row.capability],
            None if row.parameters is None else ollama_models.parameter_size(row.parameters), None, None,
            row.download_bytes, row.est_memory_allocation_mb * 10**6, row.license,
            None if download is None else DownloadState(download.done, download.total)))
    return found


# ---- actions ---------------------------------------------------------------------------------------------------------

class LoadRequest(Fields):
    """The model to load."""

    model: Name


class UnloadRequest(Fields):
    """The model to unload, even if it is pinned. Its requests in flight complete first."""

    model: Name


class PinRequest(Fields):
    """The model to pin, or not to pin any more. A pinned model is loaded, and is not unloaded to make room for others
    or because it is idle."""

    model: Name
    pinned: bool


class ActionResponse(Struct):
    """The state of the model after the action."""

    model: str
    state: Literal["loaded", "unloaded"]
    pinned: bool


def _response(name: str, served: ServedModel, state: State) -> Response:
    keys = served.model.core_keys
    rows = [row for row in state.pool.registry.entries() if row["key"] in keys]
    loaded = any(row["state"] in ("loading", "ready", "busy") for row in rows)
    return json_response(ActionResponse(name, "loaded" if loaded else "unloaded", any(row["pinned"] for row in rows)))


async def load(context: Context, body: LoadRequest) -> Response:
    """Load a model; respond once it can serve requests. Does not download it."""
    served = await context.model(body.model)
    await aio.load(served.model, pool=context.state.pool, progress=False)
    return _response(body.model, served, context.state)


async def unload(context: Context, body: UnloadRequest) -> Response:
    """Unload a model; respond once its memory is free. The next request loads it again."""
    served = await context.model(body.model)
    await aio.unload(served.model, pool=context.state.pool)
    return _response(body.model, served, context.state)


async def pin(context: Context, body: PinRequest) -> Response:
    """Pin a model, which loads it if necessary; or unpin it, which keeps it loaded."""
    served, pool = await context.model(body.model), context.state.pool
    if body.pinned or context.missing is not None:
        await aio.load(served.model, pool=pool, progress=False, pin=True)
        return _response(body.model, served, context.state)

    def unpin() -> None:
        keys = served.model.core_keys
        for row in pool.registry.entries():
            if row["key"] in keys:
                pool.registry.keep_alive(row["key"], row["keep_alive"], pin=False)

    await native_calls.REQUESTS.arun(unpin)
    return _response(body.model, served, context.state)


OPERATIONS = (
    Operation("GET", "/api/mpool/servable", servable, None, ServableModels, "Every model that can be served",
              name="mpool_servable"),
    Operation("POST", "/api/mpool/load", load, LoadRequest, ActionResponse, "Load a model", name="mpool_load"),
    Operation("POST", "/api/mpool/unload", unload, UnloadRequest, ActionResponse, "Unload a model",
              name="mpool_unload"),
    Operation("POST", "/api/mpool/pin", pin, PinRequest, ActionResponse, "Pin a model, or unpin it",
              name="mpool_pin"),
)

__all__ = ["OPERATIONS"]
