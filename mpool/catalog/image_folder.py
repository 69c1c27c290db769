"""A folder of transformers with an image network, and maybe a text network beside it, as a model."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ..errors import FormatError
from . import hf_config, hf_folder, image_processor, image_towers, safetensors_header
from .architectures import check_shape, missing
from .fields import Fields
from .files import Folder, refuse_pickle
from .image_towers import Tower
from .json_strict import shorten
from .spec import EmbeddingSettings, ImageSettings, ModelDescription, ModelSpec, TensorEntry

#: Values of ``model_type`` that this module reads.
MODEL_TYPES = tuple(image_towers.READERS)
#: Image networks that have a text network beside them, in the same space.
WITH_TEXT = ("clip", "siglip")


def describe_images(folder: Folder, config: Fields, *, key: str, ref: str) -> ModelDescription:
    """A model from a folder whose config.json has one of MODEL_TYPES.

    Raises:
        FormatError, UnsafeFormat, Unsupported: as :func:`~mpool.catalog.hf_folder.describe_folder`.
    """
    hf_config.refuse_remote_code(config)
    tower = image_towers.read(config)
    processor = image_processor.read(folder)
    image_towers.check(tower, processor.output(), os.path.join(folder.path, image_processor.NAME))
    found = safetensors_header.read_folder(folder)
    if found is None:
        for name in folder.pickles():
            refuse_pickle(folder.path, name)
        raise FormatError(file=folder.path, field="weights", got="missing",
                          allowed=f"{safetensors_header.SINGLE_NAME} or {safetensors_header.INDEX_NAME}")
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
    config = folder.fields(hf_folder.TOKENIZER_CONFIG_NAME, missing_ok=True, wide_ints=True)
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
        tokenizer=hf_folder.tokenizer_of(folder, config, config.get("tokenizer_class") == "Siglip2Tokenizer", ()),
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
