"""Reading of the parts that all Hugging Face folders share: weights, tokenizer, chat template, generation settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn

from ...errors import FormatError, Unsupported
from ...records import logger
from .. import architectures, layout
from ..families.rows import Architecture
from ..fields import Fields
from ..files import Folder, close, note, open_regular, read_exactly, refuse_missing_weights
from ..spec import (
    GenerationSettings,
    TensorEntry,
    TokenizerSource,
    Value,
)
from ..tokenizer_classes import normalizer_settings
from . import hf_config, hf_quantised, safetensors_header
from .chat_templates import HARMONY_ENDS, TOOL_USE, template

log = logger("mpool.models")

CONFIG_NAME = "config.json"
#: File that lists the parts of a diffusers pipeline.
PIPELINE_NAME = "model_index.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
#: Sampling parameters of generation_config.json that become the model's defaults.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def refuse_weights(folder: Folder) -> NoReturn:
    """Raise an error for a model folder without weights (:func:`mpool.models.files.refuse_missing_weights`)."""
    refuse_missing_weights(folder, f"{layout.SINGLE_NAME} or {layout.INDEX_NAME}")


def weights(folder: Folder, row: Architecture, size: dict[str, int], tied: bool, paths: tuple[str, ...],
            found: hf_quantised.Quantised) -> tuple[list[str], list[TensorEntry]]:
    """Select the tensors of a network from the stored ones and check their shapes and dtypes.

    Args:
        folder: the model folder.
        row: the network's architecture.
        size: sizes of the network by letter (:mod:`mpool.models.architectures`).
        tied: True if the output layer shares its weights with the token embedding.
        paths: paths of the weight files.
        found: the stored tensors by name.

    Returns:
        The paths as a list, and the entries under the core's names.

    Raises:
        FormatError: a tensor is missing, unknown, or has a wrong shape.
        Unsupported: a tensor has a dtype that mpool does not support for weights.
    """
    def same(a: TensorEntry, b: TensorEntry) -> bool:
        """Return True if two tied tensors are identical; log a warning otherwise."""
        equal = a.dtype == b.dtype and a.shape == b.shape and _same_bytes(a, b, paths)
        if not equal:
            log.warning("%s: config.json ties the output layer to the embedding, but the files have two different "
                        "tensors; mpool uses both", folder.path)
        return equal

    tensors = architectures.map_folder(row, size, found.entries, paths, file=paths[0], tied=tied, same=same)
    packed = [entry.name.endswith((".codes", ".scales")) for entry in tensors]
    for entry, is_packed in zip(tensors, packed):
        if entry.dtype in hf_quantised.DTYPES and found.companions:
            continue
        if not is_packed:
            safetensors_header.require_weight_dtype(entry, paths[entry.file])
        elif entry.dtype != "U8":
            raise FormatError(file=paths[entry.file], offset=entry.offset, field=f"type of {entry.name}",
                              got=entry.dtype, allowed="U8")
    # The core has one dtype for packed bytes, I8.
    stored = [replace(entry, dtype="I8") if is_packed else entry for entry, is_packed in zip(tensors, packed)]
    return list(paths), [one for entry in stored
                         for one in (hf_quantised.with_companions(entry, found, paths)
                                     if entry.dtype in hf_quantised.DTYPES else (entry,))]


def _same_bytes(a: TensorEntry, b: TensorEntry, paths: tuple[str, ...]) -> bool:
    """Compare the stored bytes of two tensors of equal size."""
    first, _ = open_regular(paths[a.file])
    try:
        second, _ = open_regular(paths[b.file])
        try:
            chunk = 1 << 22
            return all(read_exactly(first, a.offset + at, min(chunk, a.nbytes - at), path=paths[a.file])
                       == read_exactly(second, b.offset + at, min(chunk, b.nbytes - at), path=paths[b.file])
                       for at in range(0, a.nbytes, chunk))
        finally:
            close(second)
    finally:
        close(first)


def tokenizer_file(folder: Folder, config: Fields) -> str | None:
    """Return the name of a folder's tokenizer file, or None. ``config`` is its ``tokenizer_config.json``."""
    names = (layout.TOKENIZER_NAME, *_legacy_vocabulary(folder, config))
    return next((name for name in names if folder.has(name)), None)


def tokenizer_of(folder: Folder, config: Fields, lower_case: bool, end_ids: tuple[int, ...],
                 append_eos: bool = False) -> TokenizerSource:
    """Find a folder's tokenizer.

    Args:
        folder: the folder.
        config: its ``tokenizer_config.json``.
        lower_case: True if the model requires a tokenizer that converts texts to lower case.
        end_ids: ids of the tokens that end a generation.
        append_eos: True if every text ends with the end-of-text token.

    Raises:
        FormatError: the folder has no tokenizer file.
        Unsupported: ``lower_case`` is True and the tokenizer keeps the case.
    """
    file = tokenizer_file(folder, config)
    if file is None:
        raise layout.missing_tokenizer(folder.path)
    path = folder.path_of(file)
    fd, _ = open_regular(path)
    close(fd)
    settings: dict[str, Any] = {name: value for name, value in config.values.items()
                             if name not in ("chat_template", "added_tokens_decoder")}
    special = folder.fields("special_tokens_map.json", missing_ok=True)
    for name, value in special.values.items():
        settings.setdefault(name, value)
    for name, value in list(settings.items()):
        # An added token is an object with its text under "content".
        if name.endswith("_token") and isinstance(value, dict):
            settings[name] = Fields(value, file=config.file, at=name).str("content")
    if end_ids:
        settings["eos_token_id"] = list(end_ids)
    if append_eos:
        settings["always_add_eos"] = True
    if lower_case and not (_lowercases(folder.fields(file).get("normalizer"), config.values)
                           if file == layout.TOKENIZER_NAME else config.bool("do_lower_case", True)):
        raise Unsupported(f"{path}: the tokenizer keeps the case of texts, but do_lower_case of sentence-transformers "
                          "is true",
                          hint="Add a Lowercase normalizer to tokenizer.json")
    note(path)  # the file is read on first use
    return TokenizerSource(json_path=path, config=settings)


def _legacy_vocabulary(folder: Folder, config: Fields) -> tuple[str, ...]:
    """Return the vocabulary files of the tokenizer class that can replace ``tokenizer.json``."""
    name = config.str("tokenizer_class", "").removesuffix("Fast")
    if name == "CLIPTokenizer" and folder.has("vocab.json"):
        return ("merges.txt",)
    return {"BertTokenizer": ("vocab.txt",), layout.RANKS_CLASS: (layout.RANKS_NAME,)}.get(name, ())


def _lowercases(normalizer: Any, config: Mapping[str, Any]) -> bool:
    """Return True if a normalizer of ``tokenizer.json`` converts texts to lower case. ``config``: content of
    ``tokenizer_config.json``.

    sentence-transformers adds a Lowercase normalizer only to tokenizers without one.
    """
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        parts = normalizer.get("normalizers")
        return isinstance(parts, list) and any(_lowercases(part, {}) for part in parts)
    if normalizer.get("type") == "BertNormalizer":
        return bool(normalizer_settings(config).get("lowercase", normalizer.get("lowercase")))
    return normalizer.get("type") == "Lowercase" or bool(normalizer.get("lowercase"))


def chat_template(folder: Folder, config: Fields) -> str | None:
    """Return a folder's chat template, or None. ``config`` is its ``tokenizer_config.json``."""
    if folder.has("chat_template.jinja"):
        return template(folder.text("chat_template.jinja"), file=os.path.join(folder.path, "chat_template.jinja"),
                        field="template", tool_use=folder.text(TOOL_USE) if folder.has(TOOL_USE) else None)
    value = config.get("chat_template")
    if value is None and folder.has("chat_template.json"):
        value = folder.fields("chat_template.json").get("chat_template")
    return template(value, file=config.file, field="chat_template")


def _harmony_end_ids(tokenizer: Fields, vocabulary: int) -> set[int]:
    """Return the ids of the end tokens of the Harmony format that ``tokenizer_config.json`` lists."""
    found = set()
    added = tokenizer.section("added_tokens_decoder", None)
    for token in added if added is not None else ():
        entry = added.get(token)
        if isinstance(entry, dict) and entry.get("content") in HARMONY_ENDS and token.isdecimal():
            if len(token) <= 10 and int(token) < vocabulary:
                found.add(int(token))
    return found


def generation(folder: Folder, config: Fields, tokenizer: Fields, size: dict[str, int]) -> GenerationSettings:
    """Return the generation settings of a folder's language model.

    Args:
        folder: the folder.
        config: the language model's configuration.
        tokenizer: ``tokenizer_config.json``.
        size: sizes of the network by letter (:mod:`mpool.models.architectures`).
    """
    stored = folder.fields("generation_config.json", missing_ok=True)
    text = config.section("text_config", None) or config  # a vision model, whose language model is used
    end_ids = {*hf_config.special_ids(stored, "eos_token_id", size["V"]),
               *hf_config.special_ids(config, "eos_token_id", size["V"]),
               *hf_config.special_ids(text, "eos_token_id", size["V"])}
    end_ids |= _harmony_end_ids(tokenizer, size["V"])
    start_ids = hf_config.special_ids(stored, "bos_token_id", size["V"]) \
        or hf_config.special_ids(config, "bos_token_id", size["V"])
    if not end_ids:
        log.info("%s defines no end token: generation ends at max_tokens or at a stop string", folder.path)
    defaults: dict[str, Value] = {}
    if stored.bool("do_sample", False):
        for name in _SAMPLING:
            value = stored.int(name, None, low=0) if name == "top_k" else stored.number(name, None)
            if value is not None:
                defaults[name] = value
    return GenerationSettings(context_length=size["P"], eog_token_ids=tuple(sorted(end_ids)),
                              bos_token_id=start_ids[0] if start_ids else None,
                              add_bos=tokenizer.bool("add_bos_token", False), defaults=defaults)
