"""Reader of transformers' ``config.json``, which translates it into GGUF's hyper-parameters.

This module finds the row of the architecture. Each family's own reader is in its module of ``families``, and the code
that families share is in ``families/reading.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...errors import FormatError, UnsafeFormat
from .. import architectures
from ..families.rows import Architecture, Config
from ..families.table import ROWS
from ..fields import Fields


def refuse_remote_code(config: Fields, row: Architecture | None = None) -> None:
    """Raise UnsafeFormat if a configuration requires Python code from the model's repository.

    An architecture whose repository code mpool reimplements (``row.remote``) passes.
    """
    if row is not None and row.remote:
        return
    for key in ("auto_map", "trust_remote_code", "custom_pipelines"):
        if config.get(key):
            raise UnsafeFormat(f"{config.file}: {key} requires code from the model's repository, which mpool never "
                               "runs", hint="Use a .gguf file of the model, or a safetensors version that "
                                            "transformers loads without trust_remote_code")


def find_architecture(config: Fields, embeds: bool = False,
                      names: Callable[[], Iterable[str]] = tuple) -> Architecture:
    """Return the architecture row of a config.json, found by ``model_type``, else by ``architectures``.

    Args:
        config: the configuration.
        embeds: True if the folder is an embedding model of sentence-transformers.
        names: function that returns the names of the model's tensors; called only if they distinguish several rows.

    Raises:
        UnsafeFormat: the configuration requires code from the model's repository.
        FormatError: mpool does not support the architecture or its head.
    """
    classes = config.list("architectures", [], of=str, limit=16)
    name = config.str("model_type", None)
    if name is None:
        known = [row.in_config[0] for row in ROWS if row.in_config and set(row.classes) & set(classes)]
        if not known:
            config.fail("model_type", "missing", ", ".join(sorted(architectures.IN_CONFIG)))
        name = known[0]
    if name not in architectures.IN_CONFIG:
        refuse_remote_code(config)
    rows = architectures.find(architectures.IN_CONFIG, name, file=config.file, field="model_type")
    rows = architectures.filter_by_capability(rows, embeds)
    rows = [row for row in rows if set(classes) <= set(row.classes)] or rows
    row = architectures.filter_by_marker(rows, names, gguf=False)[0]
    refuse_remote_code(config, row)
    unknown = [cls for cls in classes if cls not in row.classes]
    if unknown:
        config.fail("architectures", unknown[0], ", ".join(row.classes))
    return row


def read_config(config: Fields, embeds: bool = False,
                names: Callable[[], Iterable[str]] = tuple) -> tuple[Architecture, Config]:
    """Return the architecture row of a config.json and the hyper-parameters; arguments as for
    :func:`find_architecture`.

    Raises:
        FormatError: a key is missing, has the wrong type, or has an unknown value.
        Unsupported: a key selects a computation that mpool does not implement; the message names the key.
        UnsafeFormat: the configuration requires code from the model's repository.
    """
    row = find_architecture(config, embeds, names)
    return row, row.read(config, row)


def special_ids(config: Fields, key: str, vocabulary: int) -> list[int]:
    """Return the token ids under ``key``, which is one id, a list or absent.

    Raises:
        FormatError: an id is not below the vocabulary size.
    """
    value = config.get(key)
    if value is None:
        return []
    ids = config.list(key, of=int, limit=64) if isinstance(value, list) else [config.int(key)]
    for i in ids:
        if not 0 <= i < vocabulary:
            raise FormatError(file=config.file, field=config.name(key), got=i, allowed=f"0 to {vocabulary - 1}")
    return ids
