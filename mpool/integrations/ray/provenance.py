"""The record of a column of vectors in a Parquet file: model, revision, adapter, options and version that computed it.

The metadata of the file has it as JSON under the key ``mpool.COLUMN``. Vectors of two models cannot
be compared, and nothing else tells them apart: :func:`mpool.integrations.ray.parquet.embed_parquet` compares the
records before it continues in a folder with files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ..._version import __version__
from ...checks import one_of, refuse
from ...config import PoolConfig
from ...models import load_catalogue, resolve
from ...models.formats.adapters import read_adapter
from ...tasks.options import CALL, parse_options
from ...tasks.output_table import OUTPUTS
from ...tasks.running import VERBS, check

if TYPE_CHECKING:
    from ...models import ModelDescription

#: Options that do not change vectors.
_NO_EFFECT = ("progress", "max_inputs")


def check_options(options: Mapping[str, Any], vectors: str, model: str | None) -> None:
    """Check the kind of vectors and the options, before Ray is started and a model is read.

    Args:
        options: options of the function that computes the vectors.
        vectors: kind of vectors, one of :data:`mpool.tasks.output_table.OUTPUTS`.
        model: the model; None: the default model.

    Raises:
        InvalidArgument: the kind or an option does not exist, or has an invalid value; or the kind needs a model.
    """
    options_of(options, vectors)
    function = OUTPUTS[vectors].function
    check(function, PoolConfig(), {VERBS[function].positional[0].name: [], **options,
                                   "model": default_model(model, vectors)})


def options_of(options: Mapping[str, Any], vectors: str = "dense") -> dict[str, Any]:
    """Return all options that determine vectors, with their defaults.

    Args:
        options: options of the function that computes the vectors.
        vectors: kind of vectors, one of :data:`mpool.tasks.output_table.OUTPUTS`.

    Raises:
        InvalidArgument: the kind or an option does not exist, or has an invalid value.
    """
    one_of("vectors", vectors, tuple(OUTPUTS))
    output = OUTPUTS[vectors]
    given = {name: value for name, value in options.items() if name not in CALL}
    found = parse_options(output.options, output.function, given)
    values = {one.name: getattr(found, one.name) for one in fields(found) if one.name not in _NO_EFFECT}
    # lists of labels, as the JSON of a record has them
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def default_model(model: str | None, vectors: str = "dense") -> str:
    """Return the model that an argument selects. Raises InvalidArgument if the kind of vectors has no default model."""
    needed = OUTPUTS[vectors].needs
    if model is None and needed is not None:
        refuse("model", None, needed, hint=f"vectors={vectors!r} has no default model: pass a folder or reference")
    return load_catalogue().default("text_embedding").key if model is None else model


def record_of(description: ModelDescription, column: str, options: Mapping[str, Any],
              vectors: str = "dense", adapters: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the record of the vectors that a model computes of a column.

    Args:
        description: the model.
        column: the column of texts.
        options: options of the function that computes the vectors.
        vectors: kind of vectors, one of :data:`mpool.tasks.output_table.OUTPUTS`.
        adapters: adapters that are loaded with the model, by name: absolute paths or references.

    Raises:
        InvalidArgument: the model has no adapter of the name in ``options``.
        MpoolError: the adapter cannot be read, or does not fit the model.
    """
    revision = description.revision or _digest({*description.stamps, *description.spec.files})
    chosen = options_of(options, vectors)
    return {"vectors": vectors, "model": description.ref, "revision": revision, "column": column, "options": chosen,
            "adapter": _adapter_digest(description, chosen["adapter"], adapters or {}), "mpool": __version__}


def _adapter_digest(description: ModelDescription, name: Any, adapters: Mapping[str, str]) -> str | None:
    """Return the hash of the files of an adapter; None: no adapter, or one in the model's files."""
    if name is None:
        return None
    own = description.embedding.adapters if description.embedding is not None else ()
    place = adapters.get(name) if isinstance(name, str) else None
    if place is None:
        if name not in own:
            names = (*own, *adapters)
            refuse("adapter", name, f"{', '.join(names)} or None" if names else "None: the model has no adapters",
                   hint="Add it with adapters={name: path}, or --adapter NAME=PATH", key=description.key)
        return None
    path = place if os.path.isabs(place) else resolve(place, listed=False).path
    return _digest(read_adapter(path, description).stamps)


def _digest(files: Iterable[str]) -> str:
    """Return the hash of the contents of local files, which have no revision."""
    found = hashlib.sha256()
    for path in sorted(files, key=lambda path: (os.path.basename(path), path)):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                found.update(f"{os.path.basename(path)}\0{os.path.getsize(path)}\0".encode())
                while data := file.read(1 << 20):
                    found.update(data)
    return f"sha256:{found.hexdigest()}"


def key_of(output: str) -> bytes:
    """Return the key of the metadata for a column of vectors."""
    return b"mpool." + output.encode()


def with_record(metadata: Mapping[bytes, bytes] | None, output: str, record: Mapping[str, Any]) -> dict[bytes, bytes]:
    """Return the metadata of a file with the record of one column of vectors added."""
    return {**(metadata or {}), key_of(output): json.dumps(record, sort_keys=True).encode()}


def difference(metadata: Mapping[bytes, bytes] | None, output: str, record: Mapping[str, Any]) -> str | None:
    """Return what differs between the record of a file and the expected one, as a phrase; None: nothing does."""
    data = (metadata or {}).get(key_of(output))
    if data is None:
        return f"it has no record of the model of its column {output!r}"
    try:
        found = json.loads(data)
        found.setdefault("vectors", "dense")  # earlier versions wrote no other vectors
        options = found.get("options")
        if isinstance(options, dict) and options.get("on_error") == "raise" and "on_error" in record["options"]:
            options["on_error"] = record["options"]["on_error"]  # no text failed: any setting writes the same file
        differing = [name for name in record if found.get(name) != record[name]]
    except (ValueError, AttributeError):
        return f"the record of its column {output!r} is malformed"
    if "model" in differing and "revision" not in differing and str(record["revision"]).startswith("sha256:"):
        differing.remove("model")  # the same files in another folder
    if not differing:
        return None
    if "options" in differing and isinstance(found.get("options"), dict):
        name = next((name for name in record["options"] if found["options"].get(name) != record["options"][name]), None)
        if differing[0] == "options" and name is not None:
            return f"its {name} is {found['options'].get(name)!r}, not {record['options'][name]!r}"
    name = differing[0]
    if name == "vectors":
        return f"its vectors are {found[name]}, not {record[name]}"
    about = {"mpool": "version of mpool", "adapter": "hash of the adapter"}.get(name, name)
    return f"its {about} is {found.get(name)!r}, not {record[name]!r}"


__all__ = ["check_options", "default_model", "difference", "key_of", "options_of", "record_of", "with_record"]
