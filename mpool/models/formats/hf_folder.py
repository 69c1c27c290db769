"""A folder of transformers or sentence-transformers as a model."""

from __future__ import annotations

import logging

from ...errors import FormatError, Unsupported
from .. import architectures, layout
from ..files import Folder
from ..spec import (
    EmbeddingSettings,
    ModelDescription,
    ModelSpec,
    TensorEntry,
)
from . import hf_config, image_folder, safetensors_header, scoring, sentence_folder, vision_folder
from .hf_parts import (
    CONFIG_NAME,
    PIPELINE_NAME,
    TOKENIZER_CONFIG_NAME,
    chat_template,
    generation,
    refuse_weights,
    tokenizer_of,
    weights,
)
from .pipelines import describe_pipeline

log = logging.getLogger("mpool.models")

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
    folder = Folder(path)
    if folder.has(PIPELINE_NAME):
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
    row, read = hf_config.read_config(config, folder.has(layout.MODULES_NAME), lambda: _entries(encoder)[1])
    kv = read.kv
    if row.capability != "text_embedding" and folder.has(layout.MODULES_NAME):
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
            crossed or not folder.has(layout.MODULES_NAME)):
        head = scoring.head_of(row, config, entries, bool(crossed))
    if len(crossed) == 2:
        rows, answering = scoring.read_logits(folder, crossed, config, tensors, entries, kv)
        tensors += rows
        prompts, default = scoring.prompts_of(folder)
        told = encoder.fields(layout.TRANSFORMER_CONFIGS[0], missing_ok=True)
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
