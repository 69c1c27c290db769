"""``config.json`` of transformers, translated into GGUF's hyper-parameters.

Here the row is found; what a family reads stands in its file, what families share in ``families/reading.py``.
"""

from __future__ import annotations

from ..errors import FormatError, UnsafeFormat
from . import architectures
from .architectures import Architecture
from .fields import Fields
from .spec import Value


def refuse_remote_code(config: Fields) -> None:
    """Raises UnsafeFormat if a configuration asks for the repository's own Python code to be run."""
    for key in ("auto_map", "trust_remote_code", "custom_pipelines"):
        if config.get(key):
            raise UnsafeFormat(f"{config.file}: {key} asks to run code from the model's repository, which mpool "
                               "never does", hint="Use a .gguf file of the model, or one that transformers loads "
                                                  "without trust_remote_code, in safetensors")


def find_architecture(config: Fields) -> Architecture:
    """The row for a config.json, from its ``model_type``, or its ``architectures`` if that is missing.

    Raises:
        UnsafeFormat: the configuration asks for remote code.
        FormatError: an architecture, or a head, that mpool does not know.
    """
    refuse_remote_code(config)
    classes = config.list("architectures", [], of=str, limit=16)
    name = config.str("model_type", None)
    if name is None:
        known = [row.name for row in architectures.ARCHITECTURES.values() if set(row.classes) & set(classes)]
        if not known:
            config.fail("model_type", "missing", ", ".join(sorted(architectures.ARCHITECTURES)))
        name = known[0]
    row = architectures.find(name, file=config.file, field="model_type")
    unknown = [cls for cls in classes if cls not in row.classes]
    if unknown:
        config.fail("architectures", unknown[0], ", ".join(row.classes))
    return row


def read_config(config: Fields) -> tuple[Architecture, dict[str, Value], bool, int]:
    """A config.json as hyper-parameters.

    Returns:
        (architecture, hyper-parameters under GGUF's names, whether the output layer is the embedding, token types).

    Raises:
        FormatError: a key is missing, of the wrong type, or has a value that mpool does not know.
        Unsupported: a key asks for a computation that mpool does not have; the message names it.
        UnsafeFormat: the configuration asks for code of its own to be run.
    """
    row = find_architecture(config)
    found = row.read(config, row)
    return row, found.kv, found.tied, found.token_types


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
