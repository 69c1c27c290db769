"""``config.json`` of transformers, translated into GGUF's hyper-parameters.

Here the row is found; what a family reads stands in its file, what families share in ``families/reading.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...errors import FormatError, UnsafeFormat
from .. import architectures
from ..families import ROWS, Architecture, Config
from ..fields import Fields


def refuse_remote_code(config: Fields, row: Architecture | None = None) -> None:
    """Raises UnsafeFormat if a configuration asks for the repository's own Python code to be run, unless mpool
    reimplements that code for ``row``."""
    if row is not None and row.remote:
        return
    for key in ("auto_map", "trust_remote_code", "custom_pipelines"):
        if config.get(key):
            raise UnsafeFormat(f"{config.file}: {key} asks to run code from the model's repository, which mpool "
                               "never does", hint="Use a .gguf file of the model, or one that transformers loads "
                                                  "without trust_remote_code, in safetensors")


def find_architecture(config: Fields, embeds: bool = False,
                      names: Callable[[], Iterable[str]] = tuple) -> Architecture:
    """The row for a config.json, from its ``model_type``, or its ``architectures`` if that is missing; ``embeds``: what
    stands around the network makes vectors of its states; ``names``: those of its tensors, where rows differ in them.

    Raises:
        UnsafeFormat: the configuration asks for remote code.
        FormatError: an architecture, or a head, that mpool does not know.
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
    rows = architectures.of_capability(rows, embeds)
    rows = [row for row in rows if set(classes) <= set(row.classes)] or rows
    row = architectures.marked(rows, names, gguf=False)[0]
    refuse_remote_code(config, row)
    unknown = [cls for cls in classes if cls not in row.classes]
    if unknown:
        config.fail("architectures", unknown[0], ", ".join(row.classes))
    return row


def read_config(config: Fields, embeds: bool = False,
                names: Callable[[], Iterable[str]] = tuple) -> tuple[Architecture, Config]:
    """A config.json as an architecture and its hyper-parameters; arguments as of :func:`find_architecture`.

    Raises:
        FormatError: a key is missing, of the wrong type, or has a value that mpool does not know.
        Unsupported: a key asks for a computation that mpool does not have; the message names it.
        UnsafeFormat: the configuration asks for code of its own to be run.
    """
    row = find_architecture(config, embeds, names)
    return row, row.read(config, row)


def special_ids(config: Fields, key: str, vocabulary: int) -> list[int]:
    """Token ids under ``key`` (one or a list), each checked against the vocabulary."""
    value = config.get(key)
    if value is None:
        return []
    ids = config.list(key, of=int, limit=64) if isinstance(value, list) else [config.int(key)]
    for i in ids:
        if not 0 <= i < vocabulary:
            raise FormatError(file=config.file, field=config.name(key), got=i, allowed=f"0 to {vocabulary - 1}")
    return ids
