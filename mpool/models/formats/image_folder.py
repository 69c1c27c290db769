"""A folder of transformers with an image network, and maybe a text network beside it, as a model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from ...errors import FormatError, Unsupported
from .. import layout
from ..architectures import check_shape, missing
from ..fields import Fields
from ..files import Folder
from ..json_strict import shorten
from ..spec import EmbeddingSettings, ImageSettings, ModelDescription, ModelSpec, TensorEntry
from . import hf_config, hf_parts, image_processor, image_towers, safetensors_header, sentence_folder
from .image_towers import Tower

#: Values of ``model_type`` that this module reads.
MODEL_TYPES = tuple(image_towers.READERS)
#: Image networks that have a text network beside them, in the same space.
WITH_TEXT = ("clip", "siglip")


#: Modality -> (method, output) that sentence-transformers uses for embeddings with a network of MODEL_TYPES.
_METHODS = {"text": ("get_text_features", "pooler_output"), "image": ("get_image_features", "pooler_output")}


def describe_modules(folder: Folder, *, key: str, ref: str) -> ModelDescription | None:
    """A model from a folder of sentence-transformers whose first module is an image network; None: it is not.

    The chain is that module alone, or Normalize behind it.

    Raises:
        FormatError, UnsafeFormat, Unsupported: as :func:`~mpool.models.formats.hf_folder.describe_folder`.
    """
    if not folder.has(layout.MODULES_NAME):
        return None
    path = os.path.join(folder.path, layout.MODULES_NAME)
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
        raise Unsupported(f"{path}: {', '.join(map(str, kinds[1:]))} behind an image network; mpool computes Normalize "
                          "or nothing")
    _check_module(network)
    found = sentence_folder.Sentence(transformer=network)
    sentence_folder.read_model_config(folder, found)
    made = describe_images(network, config, key=key, ref=ref)
    towers = tuple(_with_prompts(tower, found) for tower in made.towers)
    if kinds[1:] and made.image is not None:
        towers = tuple(replace(tower, embedding=replace(tower.embedding, normalize=True), spec=_normal(tower.spec))
                       if tower.embedding is not None else tower for tower in towers)
        made = replace(made, image=replace(made.image, normalize=True), spec=_normal(made.spec))
    return replace(made, towers=towers)


def _check_module(folder: Folder) -> None:
    """Refuses settings of ``sentence_bert_config.json`` beyond embeddings."""
    config = folder.fields("sentence_bert_config.json", missing_ok=True)
    config.only({"transformer_task", "modality_config", "module_output_name", "max_seq_length", "do_lower_case"})
    for key, plain in (("transformer_task", "feature-extraction"), ("module_output_name", "sentence_embedding")):
        if config.str(key, plain) != plain:
            raise Unsupported(f"{config.file}: {key} is {shorten(config.get(key))}; mpool computes {plain}")
    if config.get("max_seq_length") is not None or config.bool("do_lower_case", False):
        raise Unsupported(f"{config.file}: max_seq_length or do_lower_case is set; mpool reads image networks without")
    modality = config.section("modality_config", None)
    for name in modality or ():
        part = modality.section(name)
        wanted = _METHODS.get(name)
        if wanted != (part.str("method"), part.str("method_output_name")):
            raise Unsupported(f"{config.file}: {shorten(part.at)} is not {' and '.join(wanted or ('there',))}")


def _with_prompts(tower: ModelDescription, found: sentence_folder.Sentence) -> ModelDescription:
    if tower.embedding is None:
        return tower
    return replace(tower, embedding=replace(tower.embedding, prompts=found.prompts, similarity=found.similarity,
                                            default_prompt_name=found.default_prompt_name))


def _normal(spec: ModelSpec) -> ModelSpec:
    return replace(spec, kv={**spec.kv, "mpool.normalize": True})


def describe_images(folder: Folder, config: Fields, *, key: str, ref: str) -> ModelDescription:
    """A model from a folder whose config.json has one of MODEL_TYPES.

    Raises:
        FormatError, UnsafeFormat, Unsupported: as :func:`~mpool.models.formats.hf_folder.describe_folder`.
    """
    hf_config.refuse_remote_code(config)
    tower = image_towers.read(config)
    processor = image_processor.read(folder)
    image_towers.check(tower, processor.output(), os.path.join(folder.path, image_processor.NAME))
    found = safetensors_header.read_folder(folder)
    if found is None:
        hf_parts.refuse_weights(folder)
    paths, entries = found
    text = image_towers.read_text(config, tower.architecture) if tower.architecture in WITH_TEXT else None
    check_surplus([tower] if text is None else [tower, text], entries, paths[0])
    towers = () if text is None else (_describe_text(folder, text, entries, paths, key=key, ref=ref),)
    settings = ImageSettings(hidden_size=tower.hidden, output_size=tower.output, resize=processor.resize,
                             resample=processor.resample, crop=processor.crop, patch_size=tower.patch,
                             image_size=tower.image, any_size=tower.any_size)
    return ModelDescription(
        key=key, ref=ref, capability="image_embedding", image=settings,
        spec=ModelSpec(tower.architecture, tuple(paths), tower.kv | processor.kv, tuple(take(tower, entries, paths))),
        towers=towers)


def _describe_text(folder: Folder, tower: Tower, entries: Mapping[str, TensorEntry], paths: tuple[str, ...], *,
                   key: str, ref: str) -> ModelDescription:
    """The text network beside the image network."""
    config = folder.fields(hf_parts.TOKENIZER_CONFIG_NAME, missing_ok=True, wide_ints=True)
    hf_config.refuse_remote_code(config)
    positions = tower.kv[f"{tower.architecture}.context_length"]
    assert isinstance(positions, int)
    padding = ""
    if tower.architecture == "siglip_text":
        side = config.str("padding_side", None, choices=("left", "right"))
        left = config.get("tokenizer_class") in ("GemmaTokenizer", "GemmaTokenizerFast", "Siglip2Tokenizer")
        padding = side or ("left" if left else "right")
    settings = EmbeddingSettings(max_tokens=positions, hidden_size=tower.hidden, output_size=tower.output,
                                 pooling=("lasttoken",), normalize=False, padding=padding)
    return ModelDescription(
        key=key, ref=ref, capability="text_embedding", embedding=settings,
        tokenizer=hf_parts.tokenizer_of(folder, config, config.get("tokenizer_class") == "Siglip2Tokenizer", ()),
        spec=ModelSpec(tower.architecture, tuple(paths), tower.kv, tuple(take(tower, entries, paths))))


def check_surplus(towers: list[Tower], tensors: Mapping[str, TensorEntry], file: str) -> None:
    """Raises FormatError if the files have tensors for which none of the networks has a place."""
    used = {prefix + piece.hf for tower in towers for prefix in tower.prefixes for piece in tower.pieces}
    harmless = re.compile("|".join(pattern for tower in towers for pattern in tower.harmless) or r"(?!)")
    extra = [name for name in tensors if name not in used and not harmless.fullmatch(name)]
    if extra:
        shown = ", ".join(shorten(name) for name in extra[:4])
        raise FormatError(file=file, field="tensors", got=f"{shown}, which {towers[0].architecture} does not have",
                          allowed="the tensors of the architecture",
                          hint="The model is a variant that this version of mpool would compute wrongly")


def take(tower: Tower, tensors: Mapping[str, TensorEntry], paths: tuple[str, ...]) -> list[TensorEntry]:
    """The tensors of a network out of those of the files, every shape and type checked.

    Raises:
        FormatError: tensors missing, or of another shape.
        Unsupported: a type that weights do not have.
    """
    first = tower.pieces[0].hf
    prefix = next((prefix for prefix in tower.prefixes if prefix + first in tensors), tower.prefixes[0])
    absent = [prefix + piece.hf for piece in tower.pieces if prefix + piece.hf not in tensors]
    if absent:
        raise missing(list(dict.fromkeys(absent)), file=paths[0])
    made = []
    for piece in tower.pieces:
        entry = tensors[prefix + piece.hf]
        check_shape(entry, piece.stored, paths[entry.file])
        safetensors_header.require_weight_dtype(entry, paths[entry.file])
        size = entry.nbytes // piece.parts
        made.append(TensorEntry(piece.name, entry.dtype, piece.shape, entry.file, entry.offset + piece.part * size,
                                size))
    return sorted(made, key=lambda entry: (entry.file, entry.offset))
