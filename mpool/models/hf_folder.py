"""A folder of transformers or sentence-transformers as a model."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any, NoReturn

from ..errors import FormatError, Unsupported
from . import architectures, hf_config, safetensors_header, scoring, sentence_folder
from .families import Architecture
from .fields import Fields
from .files import Folder, note, open_regular, refuse_pickle
from .gguf_model import HARMONY_ENDS, template
from .spec import (
    EmbeddingSettings,
    GenerationSettings,
    ModelDescription,
    ModelSpec,
    TensorEntry,
    TokenizerSource,
    Value,
)

log = logging.getLogger("mpool.models")

CONFIG_NAME = "config.json"
#: Of a folder of diffusers.
PIPELINE_NAME = "model_index.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
#: Sampling settings of generation_config.json that are passed on as the model's defaults.
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def describe_folder(path: str, *, key: str, ref: str) -> ModelDescription:
    """A model from a folder with ``config.json``, safetensors weights and ``tokenizer.json``.

    Args:
        path: the folder; with ``modules.json`` it is one of sentence-transformers.
        key, ref: stored in the result.

    Raises:
        FormatError: a file is missing or malformed, names something outside the folder, or does not fit the others.
        UnsafeFormat: only pickled weights, or a configuration that asks for code of its own to be run.
        Unsupported: the model computes something that mpool does not.
    """
    from . import image_folder, vision_folder

    folder = Folder(path)
    if folder.has(PIPELINE_NAME):
        from .pipelines import describe_pipeline

        return describe_pipeline(folder, key=key, ref=ref)
    images = image_folder.describe_modules(folder, key=key, ref=ref)
    if images is not None:
        return images
    crossed = scoring.encoder_folders(folder)
    encoder = crossed[0] if crossed else sentence_folder.encoder_folder(folder)
    if not encoder.has(CONFIG_NAME):
        raise FormatError(file=encoder.path, field=CONFIG_NAME, got="missing",
                          allowed="a folder of transformers or sentence-transformers, or a .gguf file")
    config = encoder.fields(CONFIG_NAME)
    if config.get("model_type") in image_folder.MODEL_TYPES:
        return image_folder.describe_images(folder, config, key=key, ref=ref)
    if config.get("model_type") in vision_folder.MODEL_TYPES:
        return vision_folder.describe_vision(folder, config, key=key, ref=ref)
    row, read = hf_config.read_config(config, folder.has(sentence_folder.MODULES_NAME), lambda: _entries(encoder)[1])
    kv = read.kv
    if row.capability != "text_embedding" and folder.has(sentence_folder.MODULES_NAME):
        raise Unsupported(f"{folder.path}: an embedding model on {row.name}; mpool computes {row.name} as a text "
                          "generator")
    size = architectures.sizes(row, kv, file=config.file, token_types=read.token_types) | read.sizes
    found_in, entries = _entries(encoder)
    paths, tensors = weights(encoder, row, size, read.tied, found_in, entries)
    tokenizer_config = encoder.fields(TOKENIZER_CONFIG_NAME, missing_ok=True, wide_ints=True)
    hf_config.refuse_remote_code(tokenizer_config, row)
    embedding = made = None
    lower_case = False
    ends: tuple[int, ...] = ()
    head = None
    if row.capability == "text_embedding" and len(crossed) < 2 and (
            crossed or not folder.has(sentence_folder.MODULES_NAME)):
        head = scoring.head_of(row, config, entries, bool(crossed))
    if len(crossed) == 2:
        rows, answering = scoring.read_logits(folder, crossed, config, tensors, entries, kv)
        tensors += rows
        prompts, default = scoring.prompts_of(folder)
        told = encoder.fields(sentence_folder.TRANSFORMER_CONFIGS[0], missing_ok=True)
        embedding = EmbeddingSettings(
            max_tokens=sentence_folder.max_tokens(
                sentence_folder.Sentence(encoder, max_seq_length=told.int("max_seq_length", None, low=1)),
                tokenizer_config.values, size["P"]),
            hidden_size=size["D"], output_size=1, pooling=("lasttoken",), normalize=False, scores=True,
            prompts=prompts, default_prompt_name=default, answering=answering)
    elif head is not None:
        tensors += scoring.read_head(folder, config, head, entries, found_in, size["D"], kv)
        embedding = EmbeddingSettings(
            max_tokens=sentence_folder.max_tokens(sentence_folder.Sentence(encoder), tokenizer_config.values,
                                                  size["P"]),
            hidden_size=size["D"], output_size=1, pooling=(head.pooling,), normalize=False, scores=True)
    elif row.capability == "text_embedding":
        found = sentence_folder.read_modules(folder, size["D"])
        kv |= found.kv
        lower_case = found.do_lower_case
        for entry, file in found.dense:
            if file not in paths:
                paths.append(file)
            tensors.append(TensorEntry(entry.name, entry.dtype, entry.shape, paths.index(file), entry.offset,
                                       entry.nbytes))
        embedding = EmbeddingSettings(
            max_tokens=sentence_folder.max_tokens(found, tokenizer_config.values, size["P"]), hidden_size=size["D"],
            output_size=found.output_size, pooling=found.pooling, normalize=found.normalize,
            include_prompt=found.include_prompt and not read.masked, prompts=found.prompts,
            default_prompt_name=found.default_prompt_name, similarity=found.similarity,
            dimensions=tuple(sorted(set(config.list("matryoshka_dimensions", [], of=int, limit=64)))),
            truncate_dim=found.truncate_dim, sizes=found.sizes)
    else:
        made = generation(encoder, config, tokenizer_config, size)
        ends = made.eog_token_ids
    return ModelDescription(
        key=key, ref=ref, capability=row.capability, spec=ModelSpec(row.name, tuple(paths), kv, tuple(tensors)),
        tokenizer=tokenizer_of(encoder, tokenizer_config, lower_case, ends, read.ended),
        chat_template=chat_template(encoder, tokenizer_config), embedding=embedding, generation=made)


def _entries(folder: Folder) -> tuple[tuple[str, ...], dict[str, TensorEntry]]:
    found = safetensors_header.read_folder(folder)
    if found is None:
        refuse_weights(folder)
    return found[0], dict(found[1])


def refuse_weights(folder: Folder) -> NoReturn:
    """Raises what a folder without weights in safetensors deserves."""
    for name in folder.pickles():
        refuse_pickle(folder.path, name)
    raise FormatError(file=folder.path, field="weights", got="missing",
                      allowed=f"{safetensors_header.SINGLE_NAME} or {safetensors_header.INDEX_NAME}")


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
    """Where a folder's tokenizer is. lower_case: it must be one that lowers case; ends: ids that end a generation;
    ended: every text ends with the end of text."""
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
    """The file that stands for a tokenizer of a class that has older files."""
    name = config.str("tokenizer_class", "").removesuffix("Fast")
    if name == "CLIPTokenizer" and folder.has("vocab.json"):
        return ("merges.txt",)
    return ("vocab.txt",) if name == "BertTokenizer" else ()


def _lowers(normalizer: Any) -> bool:
    """Whether a normalizer of tokenizer.json lowers case; sentence-transformers adds one that does only if not."""
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
    """Tokens that end an answer of several messages, where tokenizer_config.json names them."""
    found = set()
    added = tokenizer.section("added_tokens_decoder", None)
    for token in added if added is not None else ():
        entry = added.get(token)
        if isinstance(entry, dict) and entry.get("content") in HARMONY_ENDS and token.isdecimal():
            if int(token[:10]) < vocabulary:
                found.add(int(token[:10]))
    return found


def generation(folder: Folder, config: Fields, tokenizer: Fields, size: dict[str, int]) -> GenerationSettings:
    """How a folder's text model wants to be used."""
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
