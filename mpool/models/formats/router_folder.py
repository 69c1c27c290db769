"""Reader of asymmetric models of sentence-transformers: a Router module with an encoder for queries and another one for
documents (https://sbert.net/docs/package_reference/base/modules.html). Before version 5 the module was called Asym.

``router_config.json`` (``config.json`` of Asym) lists the modules of each route. Each side is read as a model of its
own, as if ``modules.json`` listed the modules of its route and then those that follow the Router. The default route
becomes the model, and the other side one of its ``networks``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...errors import FormatError, Unsupported
from ..fields import Fields, describe
from ..files import Folder, Overlay, check_relative
from ..json_strict import Json, shorten
from ..layout import MODEL_CONFIG, MODULES_NAME, ROUTER_CONFIGS
from ..spec import ModelDescription
from . import hf_embedding, sentence_folder

#: Routes that mpool supports: the tasks of a request.
SIDES = ("query", "document")
_MAX_MODULES = 2 * sentence_folder.MAX_MODULES


def describe_router(folder: Folder, describe_side: Callable[[Folder], ModelDescription]) -> ModelDescription | None:
    """Describe an asymmetric model; None if the folder has no Router, or one with a query table (``hf_embedding``).

    Args:
        folder: the model folder.
        describe_side: function that describes a folder without a Router.

    Returns:
        The description of the default route, with that of the other side in ``networks``.

    Raises:
        FormatError: a file is malformed, or the vectors of the two sides differ in size.
        Unsupported: the Router has other routes than query and document, or no default route; or a side is no model
            that embeds texts.
    """
    rows = folder.json(MODULES_NAME) if folder.has(MODULES_NAME) else None
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        return None
    path = folder.shown(MODULES_NAME)
    first = Fields.of(rows[0], file=path, at="[0]")
    if _kind(first.get("type")) != "Router":
        return None
    if first.get("kwargs") not in (None, [], ["task"]):
        first.fail("kwargs", describe(first.get("kwargs")), 'none, or ["task"]')
    place = first.str("path", "")
    router = folder.sub(place, declared_in=path, field=first.name("path"))
    config = router.fields(next((one for one in ROUTER_CONFIGS if router.has(one)), ROUTER_CONFIGS[0]))
    config.only({"types", "structure", "parameters"})
    types, structure = config.section("types"), config.section("structure")
    routes = {side: structure.list(side, of=str, limit=_MAX_MODULES) for side in structure}
    names = [name for modules in routes.values() for name in modules]
    for name in names:
        sentence_folder.module_class(types, name)
    if any(_kind(types.get(name)) in ("SparseStaticEmbedding", "IDF") for name in names):
        _check_type(folder, config.file)
        return None
    if set(routes) != set(SIDES) or not all(routes.values()):
        raise Unsupported(f"{config.file}: structure has the routes "
                          + "; ".join(f"{shorten(side)}: {len(modules)} modules" for side, modules in routes.items())
                          + "; mpool supports query and document, each with one or more modules")
    default = _default_route(config, tuple(routes))
    sides = {}
    for side, modules in routes.items():
        try:
            sides[side] = describe_side(Overlay(
                folder, {MODULES_NAME: _rows_of(place, modules, types, rows[1:])}, config.file))
        except Unsupported as error:  # its message may not name the field that lists the modules
            raise Unsupported(f"{config.file}: {structure.name(side)}: {error.message}", hint=error.hint) from error
    for side, found in sides.items():
        if found.embedding is None or "vectors" not in found.embedding.outputs or found.networks:
            raise Unsupported(f"{config.file}: the route {side} is {found.spec.architecture}, which embeds no texts; "
                              "mpool supports routes with encoders")
    _check_sizes(config, sides)
    other = next(side for side in SIDES if side != default)
    return replace(sides[default], networks=(replace(sides[other], task=other),))


def _check_type(folder: Folder, router: str) -> None:
    """Raise FormatError unless the folder states its type, as :mod:`.hf_embedding` needs it for a query table.

    ``router``: file that lists the table, for the error.
    """
    kind = folder.fields(MODEL_CONFIG, missing_ok=True).get("model_type")
    if kind not in hf_embedding.MODEL_TYPES:
        raise FormatError(file=folder.shown(MODEL_CONFIG), field="model_type",
                          got="missing" if kind is None else describe(kind),
                          allowed=f"'SparseEncoder', because {router} has a query table",
                          hint="Save the model again with SparseEncoder of sentence-transformers, or set "
                               f'"model_type": "SparseEncoder" in {MODEL_CONFIG}')


def _kind(name: Any) -> str:
    """Return the kind of a module from its class; "" for a value of another type."""
    return sentence_folder.CLASSES.get(name, name.rpartition(".")[2]) if isinstance(name, str) else ""


def _default_route(config: Fields, routes: tuple[str, ...]) -> str:
    """Return the route for texts without a task, as in sentence-transformers: the default route, or else the first."""
    parameters = config.section("parameters")
    parameters.only({"default_route", "allow_empty_key", "route_mappings"})
    if parameters.get("route_mappings"):
        raise Unsupported(f"{config.file}: {parameters.name('route_mappings')} is "
                          f"{describe(parameters.get('route_mappings'))}; mpool supports none, because the task of a "
                          "request names the route")
    default: str | None = parameters.str("default_route", None, choices=routes)
    if default is None and not parameters.bool("allow_empty_key", True):
        raise Unsupported(f"{config.file}: parameters state no default_route and forbid texts without a task; mpool "
                          "supports routers with a default route")
    return default or routes[0]


def _rows_of(place: str, modules: list[str], types: Fields, after: list[Json]) -> list[Json]:
    """Return the rows of ``modules.json`` for a route.

    Args:
        place: folder of the Router, relative to the model's folder; empty: it is the model's folder.
        modules: names of the route's modules, which are their folders.
        types: class of each module by name.
        after: rows of the modules after the Router.
    """
    rows: list[dict[str, Any]] = []
    for name in modules:
        check_relative(name, file=types.file, field=types.name(name))
        rows.append({"name": str(len(rows)), "path": os.path.join(place, name), "type": types.str(name)})
    rows += [dict(row) if isinstance(row, dict) else {"type": row} for row in after]
    return [{**row, "idx": at} for at, row in enumerate(rows)]


def _check_sizes(config: Fields, sides: dict[str, ModelDescription]) -> None:
    """Raise FormatError unless the dense vectors of both sides have one size: they are compared with each other."""
    sizes = {side: found.embedding.truncate_dim or found.embedding.output_size
             for side, found in sides.items() if found.embedding is not None and "dense" in found.embedding.embeddings}
    if len(set(sizes.values())) > 1 or len(sizes) == 1:
        raise FormatError(file=config.file, field="structure", allowed="routes whose vectors have the same size",
                          got=", ".join(f"{side} with {sizes.get(side, 'no')} components" for side in sides))
