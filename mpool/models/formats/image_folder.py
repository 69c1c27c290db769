"""Readers of transformers and sentence-transformers folders with an image encoder: CLIP, SigLIP and DINOv2.

CLIP and SigLIP also have a text encoder, which becomes a second network of the model description.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from ...errors import FormatError, Unsupported
from .. import layout, origins
from ..architectures import check_shape, missing
from ..fields import Fields
from ..files import Folder
from ..json_strict import shorten
from ..spec import EmbeddingSettings, ImageSettings, ModelDescription, ModelSpec, TensorEntry
from . import hf_config, hf_parts, image_networks, image_processor, safetensors_header, sentence_folder
from .image_networks import NetworkSpec

#: Values of ``model_type`` that this module reads.
MODEL_TYPES = tuple(image_networks.READERS)

#: Modality -> (method of the transformers class, name of its output) that sentence-transformers uses for embeddings.
_METHODS = {"text": ("get_text_features", "pooler_output"), "image": ("get_image_features", "pooler_output")}


def describe_modules(folder: Folder, *, key: str, ref: str) -> ModelDescription | None:
    """Describe a sentence-transformers folder whose first module is an image encoder.

    The supported module chains are the image encoder alone, and the image encoder followed by Normalize.

    Args:
        folder: the model folder.
        key, ref: key and reference of the model, stored in the result.

    Returns:
        The description, or None if the folder has no ``modules.json`` or its first module is not an image encoder.

    Raises:
        FormatError, UnsafeFormat, Unsupported: on the conditions of
            :func:`~mpool.models.formats.hf_folder.describe_folder`.
    """
    if not folder.has(layout.MODULES_NAME):
        return None
    path = folder.shown(layout.MODULES_NAME)
    rows = folder.json(layout.MODULES_NAME)
    if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
        return None
    first = Fields.of(rows[0], file=path, at="[0]")
    if sentence_folder.CLASSES.get(str(first.get("type"))) not in ("CLIPModel", "Transformer"):
        return None
    network = folder.sub(first.str("path", ""), declared_in=path, field="[0].path")
    if not network.has(hf_parts.CONFIG_NAME):
        return None
    config = network.fields(hf_parts.CONFIG_NAME)
    if config.get("model_type") not in MODEL_TYPES:
        return None
    kinds = [sentence_folder.CLASSES.get(Fields.of(row, file=path, at=f"[{i}]").str("type"))
             for i, row in enumerate(rows)]
    if kinds[1:] not in ([], ["Normalize"]):
        raise Unsupported(f"{path}: the image encoder is followed by {', '.join(map(str, kinds[1:]))}; mpool supports "
                          "an image encoder alone or followed by Normalize")
    _check_module(network)
    settings = sentence_folder.ModuleSettings(transformer=network)
    sentence_folder.read_model_config(folder, settings)
    model = describe_images(network, config, key=key, ref=ref)
    others = tuple(_with_prompts(other, settings) for other in model.networks)
    if kinds[1:] and model.image is not None:
        others = tuple(replace(other, embedding=replace(other.embedding, normalize=True), spec=_normalized(other.spec))
                       if other.embedding is not None else other for other in others)
        model = replace(model, image=replace(model.image, normalize=True), spec=_normalized(model.spec))
    return replace(model, networks=others)


def _check_module(folder: Folder) -> None:
    """Raise Unsupported for settings of ``sentence_bert_config.json`` that select anything but plain embeddings."""
    config = folder.fields("sentence_bert_config.json", missing_ok=True)
    config.only({"transformer_task", "modality_config", "module_output_name", "max_seq_length", "do_lower_case"})
    for key, plain in (("transformer_task", "feature-extraction"), ("module_output_name", "sentence_embedding")):
        if config.str(key, plain) != plain:
            raise Unsupported(f"{config.file}: {key} is {shorten(config.get(key))}; mpool supports {plain}")
    if config.get("max_seq_length") is not None or config.bool("do_lower_case", False):
        raise Unsupported(f"{config.file}: max_seq_length or do_lower_case is set; mpool supports neither for a model "
                          "with an image encoder")
    modality = config.section("modality_config", None)
    for name in modality or ():
        part = modality.section(name)
        wanted = _METHODS.get(name)
        if wanted != (part.str("method"), part.str("method_output_name")):
            raise Unsupported(f"{config.file}: modality {shorten(name)} is not supported; mpool supports text and image"
                              if wanted is None else f"{config.file}: {shorten(part.at)} must select the method "
                              f"{wanted[0]} and its output {wanted[1]}")


def _with_prompts(model: ModelDescription, settings: sentence_folder.ModuleSettings) -> ModelDescription:
    """Return the description with the prompts and the similarity function of ``settings``."""
    if model.embedding is None:
        return model
    return replace(model, embedding=replace(model.embedding, prompts=settings.prompts, similarity=settings.similarity,
                                            default_prompt_name=settings.default_prompt_name))


def _normalized(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the same network with its output vectors normalised to length 1."""
    return replace(spec, kv={**spec.kv, "mpool.normalize": True})


def describe_images(folder: Folder, config: Fields, *, key: str, ref: str) -> ModelDescription:
    """Describe a transformers folder whose ``model_type`` is one of MODEL_TYPES.

    Args:
        folder: the model folder.
        config: its ``config.json``.
        key, ref: key and reference of the model, stored in the result.

    Returns:
        A description with the capability ``image_embedding``; the text encoder, if any, is in ``networks``.

    Raises:
        FormatError, UnsafeFormat, Unsupported: on the conditions of
            :func:`~mpool.models.formats.hf_folder.describe_folder`.
    """
    hf_config.refuse_remote_code(config)
    encoder = image_networks.read(config)
    processor = image_processor.read(folder)
    image_networks.check_processor(encoder, processor.output(), os.path.join(folder.path, image_processor.NAME))
    found = safetensors_header.read_folder(folder)
    if found is None:
        hf_parts.refuse_weights(folder)
    paths, entries = found
    text = image_networks.read_text(config, encoder.architecture) \
        if config.get("model_type") in image_networks.WITH_TEXT else None
    check_surplus([encoder] if text is None else [encoder, text], entries, paths[0])
    others = () if text is None else (_describe_text(folder, text, config, entries, paths, key=key, ref=ref),)
    settings = ImageSettings(hidden_size=encoder.hidden_size, output_size=encoder.output_size, resize=processor.resize,
                             resample=processor.resample, crop=processor.crop, patch_size=encoder.patch_size,
                             image_size=encoder.image_size, any_size=encoder.any_size)
    return ModelDescription(
        key=key, ref=ref, capability="image_embedding", image=settings,
        spec=ModelSpec(encoder.architecture, tuple(paths), encoder.kv | processor.kv,
                       tuple(select_tensors(encoder, entries, paths)),
                       origins=origins.in_config(config, encoder.kv, encoder.architecture,
                                                 image_processor.configuration(folder))),
        networks=others)


def _describe_text(folder: Folder, network: NetworkSpec, model: Fields, entries: Mapping[str, TensorEntry],
                   paths: tuple[str, ...], *, key: str, ref: str) -> ModelDescription:
    """Describe the text encoder of a CLIP or SigLIP folder, whose config.json is ``model``, as a text-embedding model.
    """
    config = folder.fields(hf_parts.TOKENIZER_CONFIG_NAME, missing_ok=True, wide_ints=True)
    hf_config.refuse_remote_code(config)
    positions = network.kv[f"{network.architecture}.context_length"]
    assert isinstance(positions, int)
    padding = ""
    if network.architecture == "siglip_text":
        side = config.str("padding_side", None, choices=("left", "right"))
        left = config.get("tokenizer_class") in ("GemmaTokenizer", "GemmaTokenizerFast", "Siglip2Tokenizer")
        padding = side or ("left" if left else "right")
    settings = EmbeddingSettings(max_tokens=positions, hidden_size=network.hidden_size, output_size=network.output_size,
                                 pooling=("lasttoken",), normalize=False, padding=padding)
    # a folder without a tokenizer still embeds images; a text raises the error of the missing file
    tokenizer = hf_parts.tokenizer_of(folder, config, config.get("tokenizer_class") == "Siglip2Tokenizer", ()) \
        if hf_parts.tokenizer_file(folder, config) else None
    return ModelDescription(
        key=key, ref=ref, capability="text_embedding", embedding=settings, tokenizer=tokenizer,
        spec=ModelSpec(network.architecture, tuple(paths), network.kv, tuple(select_tensors(network, entries, paths)),
                       origins=origins.in_config(model, network.kv, network.architecture)))


def check_surplus(networks: list[NetworkSpec], tensors: Mapping[str, TensorEntry], file: str) -> None:
    """Raise FormatError if the files have a tensor that none of the networks uses or ignores."""
    used = {prefix + tensor.source for network in networks for prefix in network.prefixes for tensor in network.tensors}
    ignored = re.compile("|".join(pattern for network in networks for pattern in network.ignored) or r"(?!)")
    extra = [name for name in tensors if name not in used and not ignored.fullmatch(name)]
    if extra:
        shown = ", ".join(shorten(name) for name in extra[:4])
        raise FormatError(file=file, field="tensors", got=f"{shown}, which {networks[0].architecture} does not have",
                          allowed="the tensors of the architecture",
                          hint="The model is a variant of the architecture that this version of mpool does not support")


def select_tensors(network: NetworkSpec, tensors: Mapping[str, TensorEntry],
                   paths: tuple[str, ...]) -> list[TensorEntry]:
    """Select a network's tensors from the stored ones and check their shapes and dtypes.

    Args:
        network: the network.
        tensors: the stored tensors by name.
        paths: paths of the files.

    Returns:
        Entries under the core's names, in the order of files and offsets.

    Raises:
        FormatError: a tensor is missing or has a wrong shape.
        Unsupported: a tensor has a dtype that mpool does not support for weights.
    """
    first = network.tensors[0].source
    prefix = next((prefix for prefix in network.prefixes if prefix + first in tensors), network.prefixes[0])
    absent = [prefix + tensor.source for tensor in network.tensors if prefix + tensor.source not in tensors]
    if absent:
        raise missing(list(dict.fromkeys(absent)), file=paths[0])
    selected = []
    for tensor in network.tensors:
        entry = tensors[prefix + tensor.source]
        check_shape(entry, tensor.stored_shape, paths[entry.file])
        safetensors_header.require_weight_dtype(entry, paths[entry.file])
        size = entry.nbytes // tensor.parts
        selected.append(TensorEntry(tensor.name, entry.dtype, tensor.shape, entry.file,
                                    entry.offset + tensor.part * size, size))
    return sorted(selected, key=lambda entry: (entry.file, entry.offset))
