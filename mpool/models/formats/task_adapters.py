"""Reader of the low-rank adapters that a model's own files contain, one per task (jina-embeddings-v3 and v5).

The adapters become part of the model's spec, as ``csrc/models/nn/adapter.h`` describes, so all of them are loaded with
the model and every text of a batch may use another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from ...errors import FormatError
from ..families.rows import TaskAdapters
from ..files import Folder
from ..json_strict import shorten
from ..layout import OWN_ADAPTERS_FOLDER
from ..spec import OWN_ADAPTERS, Adapter, LowRank, ModelDescription, TensorEntry
from . import adapters as lora

#: Name of a tensor with one matrix per task.
_STORED = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<side>[AB])")
#: Embeddings, whose A has one row per row of the table -> name in the core.
_EMBEDDINGS = {"embeddings.word_embeddings": "token_embd", "embeddings.token_type_embeddings": "token_types"}


def add_task_adapters(model: ModelDescription, tasks: TaskAdapters | None, folder: Folder,
                      stored: Mapping[str, TensorEntry]) -> ModelDescription:
    """Return a model with its adapters.

    Args:
        model: the model without them.
        tasks: adapters that the configuration names; None: none.
        folder: folder of the encoder.
        stored: all tensors of the weight files by name.

    Raises:
        FormatError: an adapter is missing, the files have adapters that the configuration does not name, or a matrix
            has a wrong shape or rank.
        LimitError: a rank is too large.
        Unsupported: an adapter updates a module that adapters of mpool cannot update.
    """
    inside = [name for name in stored if _STORED.fullmatch(name)]
    settings = model.embedding
    if tasks is None or not tasks.rank:
        if inside:
            raise FormatError(file=model.spec.files[0], field="tensors", got=shorten(inside[0]),
                              allowed="no adapters, because config.json has no lora_adaptations")
        if tasks is None:
            return model
    assert settings is not None, "only embedding models have adapters for tasks"
    if tasks.rank:
        found = _read_stored(model, tasks, {name: stored[name] for name in inside})
    else:
        parent = folder.sub(OWN_ADAPTERS_FOLDER, declared_in=folder.path, field=OWN_ADAPTERS_FOLDER)
        found = [lora.read_folder(parent.sub(name, declared_in=folder.path, field="task_names"), model)
                 for name in tasks.names]
    prompts = {**tasks.instructions, **settings.prompts}
    return replace(model, spec=model.spec.with_adapters(enumerate(found, OWN_ADAPTERS)), embedding=replace(
        settings, adapters=tasks.names, task_adapters=tasks.by_task, prompts=prompts,
        default_adapter=tasks.default or None))


def _read_stored(model: ModelDescription, tasks: TaskAdapters, stored: Mapping[str, TensorEntry]) -> list[Adapter]:
    """Return one adapter per task from tensors whose first dimension is the task."""
    paths, count = model.spec.files, len(tasks.names)
    slices: list[dict[str, dict[str, TensorEntry]]] = [{} for _ in range(count)]
    for name, entry in stored.items():
        match = _STORED.fullmatch(name)
        assert match is not None
        if ("." + match["module"]).endswith(".pooler.dense"):  # embeddings do not use the pooler
            continue
        if len(entry.shape) != 3 or entry.shape[0] != count or min(entry.shape) < 1:
            raise FormatError(file=paths[entry.file], offset=entry.offset, field=f"shape of {shorten(name)}",
                              got=list(entry.shape), allowed=f"[{count}, *, *], one matrix per task")
        for task in range(count):
            size = entry.nbytes // count
            slices[task].setdefault(match["module"], {})[match["side"].lower()] = replace(
                entry, name=f"{name}[{task}]", shape=entry.shape[1:], offset=entry.offset + task * size, nbytes=size)
    return [Adapter((), (*_embeddings(model, tasks, modules), *lora.updates_of(paths, modules, model, tasks)))
            for modules in slices]


def _embeddings(model: ModelDescription, tasks: TaskAdapters,
                modules: dict[str, dict[str, TensorEntry]]) -> list[LowRank]:
    """Return the updates of the embeddings, which are removed from ``modules``."""
    shapes = {entry.name: entry.shape for entry in model.spec.tensors}
    found = []
    for module in list(modules):
        layer = next((core for name, core in _EMBEDDINGS.items() if ("." + module).endswith("." + name)), None)
        if layer is None:
            continue
        sides = modules.pop(module)
        (_, pair), = lora.pairs_of(model.spec.files, {module: sides}, across=True)
        rows, width = shapes.get(f"{layer}.weight", (0, 0))
        for entry, allowed in ((pair.a, (rows, tasks.rank)), (pair.b, (tasks.rank, width))):
            if entry.shape != allowed:
                raise FormatError(file=model.spec.files[entry.file], offset=entry.offset,
                                  field=f"shape of {shorten(entry.name)}", got=list(entry.shape),
                                  allowed=f"{list(allowed)}, with the lora_rank of config.json")
        found.append(LowRank(layer, pair.a, pair.b, tasks.scale))
    return found


__all__ = ["add_task_adapters"]
