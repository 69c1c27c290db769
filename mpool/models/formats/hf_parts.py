"""Parts of a Hugging Face folder that every reader of folders shares: weights, tokenizer, chat template, generation."""


from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any, NoReturn

from ...errors import FormatError, Unsupported
from .. import architectures, layout
from ..families import Architecture
from ..fields import Fields
from ..files import Folder, note, open_regular, refuse_pickle
from ..spec import (
    GenerationSettings,
    TensorEntry,
    TokenizerSource,
    Value,
)
from . import hf_config, safetensors_header
from .chat_templates import HARMONY_ENDS, template

log = logging.getLogger("mpool.models")

CONFIG_NAME = "config.json"
#: Index of a diffusers folder.
PIPELINE_NAME = "model_index.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
#: Sampling settings of generation_config.json that are passed on as the model's defaults.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def refuse_weights(folder: Folder) -> NoReturn:
    """Raises UnsafeFormat for pickled weights, else FormatError for missing weights."""
    for name in folder.pickles():
        refuse_pickle(folder.path, name)
    raise FormatError(file=folder.path, field="weights", got="missing",
                      allowed=f"{layout.SINGLE_NAME} or {layout.INDEX_NAME}")


def weights(folder: Folder, row: Architecture, size: dict[str, int], tied: bool, paths: tuple[str, ...],
            entries: dict[str, TensorEntry]) -> tuple[list[str], list[TensorEntry]]:
    """The files, and the tensors of a row's network in them."""
    def same(a: TensorEntry, b: TensorEntry) -> bool:
        equal = a.dtype == b.dtype and a.shape == b.shape and _same_bytes(a, b, paths)
        if not equal:
            log.warning("%s: config.json ties the output layer to the embedding, but both are stored and differ; both "
                        "are used", folder.path)
        return equal

    tensors = architectures.map_folder(row, size, entries, paths, file=paths[0], tied=tied, same=same)
    packed = [entry.name.endswith((".codes", ".scales")) for entry in tensors]
    for entry, is_packed in zip(tensors, packed):
        if not is_packed:
            safetensors_header.require_weight_dtype(entry, paths[entry.file])
        elif entry.dtype != "U8":
            raise FormatError(file=paths[entry.file], offset=entry.offset, field=f"type of {entry.name}",
                              got=entry.dtype, allowed="U8")
    # the core takes codes as bytes, and has one name for those
    return list(paths), [replace(entry, dtype="I8") if is_packed else entry
                         for entry, is_packed in zip(tensors, packed)]


def _same_bytes(a: TensorEntry, b: TensorEntry, paths: tuple[str, ...]) -> bool:
    first, _ = open_regular(paths[a.file])
    try:
        second, _ = open_regular(paths[b.file])
        try:
            chunk = 1 << 22
            return all(os.pread(first, min(chunk, a.nbytes - at), a.offset + at)
                       == os.pread(second, min(chunk, b.nbytes - at), b.offset + at)
                       for at in range(0, a.nbytes, chunk))
        finally:
            os.close(second)
    finally:
        os.close(first)


def tokenizer_of(folder: Folder, config: Fields, lower_case: bool, ends: tuple[int, ...],
                 ended: bool = False) -> TokenizerSource:
    """Finds a folder's tokenizer. lower_case: require one that lowers case; ends: ids that end a generation; ended:
    append the end-of-text token to every text."""
    file = next((name for name in (TOKENIZER_NAME, *_older(folder, config)) if folder.has(name)), None)
    if file is None:
        raise FormatError(file=folder.path, field=TOKENIZER_NAME, got="missing", allowed="the tokenizer in one file",
                          hint="AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it")
    path = folder.path_of(file)
    fd, _ = open_regular(path)
    os.close(fd)
    facts: dict[str, Any] = {name: value for name, value in config.values.items()
                             if name not in ("chat_template", "added_tokens_decoder")}
    special = folder.fields("special_tokens_map.json", missing_ok=True)
    for name, value in special.values.items():
        facts.setdefault(name, value)
    for name, value in list(facts.items()):
        # an added token, with its text under "content"
        if name.endswith("_token") and isinstance(value, dict):
            facts[name] = Fields(value, file=config.file, at=name).str("content")
    if ends:
        facts["eos_token_id"] = list(ends)
    if ended:
        facts["always_add_eos"] = True
    if lower_case and not (_lowers(folder.fields(file).get("normalizer")) if file == TOKENIZER_NAME
                           else config.bool("do_lower_case", True)):
        raise Unsupported(f"{path}: keeps case, and do_lower_case of sentence-transformers asks to lower it first",
                          hint="Add a Lowercase normalizer to tokenizer.json")
    note(path)  # read when it is needed
    return TokenizerSource(json_path=path, config=facts)


def _older(folder: Folder, config: Fields) -> tuple[str, ...]:
    """The older vocabulary file of a tokenizer class that has one."""
    name = config.str("tokenizer_class", "").removesuffix("Fast")
    if name == "CLIPTokenizer" and folder.has("vocab.json"):
        return ("merges.txt",)
    return ("vocab.txt",) if name == "BertTokenizer" else ()


def _lowers(normalizer: Any) -> bool:
    """A normalizer of tokenizer.json lowers case; sentence-transformers adds such a one only if it does not."""
    if not isinstance(normalizer, dict):
        return False
    if normalizer.get("type") == "Sequence":
        return any(_lowers(part) for part in normalizer.get("normalizers") or ())
    return normalizer.get("type") == "Lowercase" or bool(normalizer.get("lowercase"))


def chat_template(folder: Folder, config: Fields) -> str | None:
    """A folder's chat template, if it has one."""
    if folder.has("chat_template.jinja"):
        return template(folder.text("chat_template.jinja"), file=os.path.join(folder.path, "chat_template.jinja"),
                        field="template")
    value = config.get("chat_template")
    if value is None and folder.has("chat_template.json"):
        value = folder.fields("chat_template.json").get("chat_template")
    return template(value, file=config.file, field="chat_template")


def _ends_of_harmony(tokenizer: Fields, vocabulary: int) -> set[int]:
    """Ids of the tokens that end a Harmony completion, if tokenizer_config.json names them."""
    found = set()
    added = tokenizer.section("added_tokens_decoder", None)
    for token in added if added is not None else ():
        entry = added.get(token)
        if isinstance(entry, dict) and entry.get("content") in HARMONY_ENDS and token.isdecimal():
            if int(token[:10]) < vocabulary:
                found.add(int(token[:10]))
    return found


def generation(folder: Folder, config: Fields, tokenizer: Fields, size: dict[str, int]) -> GenerationSettings:
    """Generation settings of a folder's language model."""
    own = folder.fields("generation_config.json", missing_ok=True)
    ends = {*hf_config.special_ids(own, "eos_token_id", size["V"]),
            *hf_config.special_ids(config, "eos_token_id", size["V"])}
    ends |= _ends_of_harmony(tokenizer, size["V"])
    starts = hf_config.special_ids(own, "bos_token_id", size["V"]) \
        or hf_config.special_ids(config, "bos_token_id", size["V"])
    if not ends:
        log.info("%s names no token that ends a generation", folder.path)
    defaults: dict[str, Value] = {}
    if own.bool("do_sample", False):
        for name in _SAMPLING:
            value = own.int(name, None, low=0) if name == "top_k" else own.number(name, None)
            if value is not None:
                defaults[name] = value
    return GenerationSettings(context_length=size["P"], eog_token_ids=tuple(sorted(ends)),
                              bos_token_id=starts[0] if starts else None,
                              add_bos=tokenizer.bool("add_bos_token", False), defaults=defaults)
