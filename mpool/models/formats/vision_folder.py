"""A folder of transformers whose model reads images beside text: a decoder, an image encoder, and the projector between
them.

The decoder is one of the rows of text models, read from ``text_config``; the image network is one of those of
:mod:`.image_towers`, read from ``vision_config``. In the spec both have the name of the joint model before their keys,
and ``mpool.vision.decoder`` and ``mpool.vision.tower`` name their rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...errors import FormatError, Unsupported
from .. import architectures
from ..families.reading import MAX_WIDTH, activation, check_neutral
from ..fields import Fields, describe
from ..files import Folder
from ..json_strict import shorten
from ..spec import ImageSettings, ModelDescription, ModelSpec, TensorEntry, Value, VisionSettings
from . import hf_config, hf_parts, image_folder, image_processor, image_towers, safetensors_header
from .chat_templates import template
from .image_towers import Tower

#: Defaults of transformers' configuration classes that a ``text_config`` leaves out.
_TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 2048},
    "mistral": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768},
}
#: Limits for one image.
MOST_TILES = 64
#: Limit of the core for an image of any size: larger images are downscaled.
MOST_PATCHES = 16384
_PROJECTOR_ACTS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")
#: Name of a tensor -> (part of the model, name within it), as transformers saved such models at different times.
_NAMES = (
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?(lm_head\..+)"), "text", r"\1"),
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)"), "text", r"model.\1"),
    (re.compile(r"(lm_head\..+)"), "text", r"\1"),
    (re.compile(r"(?:model\.)?text_model\.(.+)"), "text", r"model.\1"),
    (re.compile(r"(?:model\.)?vision_model\.(.+)"), "tower", r"\1"),
    (re.compile(r"(?:model\.)?connector\.(.+)"), "projector", r"\1"),
    (re.compile(r"(?:model\.)?visual\.merger\.(mlp\..+)"), "projector", r"\1"),
    (re.compile(r"(?:model\.)?visual\.(.+)"), "tower", r"\1"),
    (re.compile(r"model\.((?:embed_tokens|layers|norm)\..+)"), "text", r"model.\1"),
    (re.compile(r"(?:model\.)?vision_tower\.(?:vision_model\.)?(.+)"), "tower", r"\1"),
    (re.compile(r"(?:model\.)?multi_modal_projector\.(.+)"), "projector", r"\1"),
    (re.compile(r"(?:model\.)?(image_newline)"), "projector", r"\1"),
)


@dataclass
class Joint:
    """The result of a family's reader.

    Attributes:
        name: row in archs.def.
        text: the decoder's configuration.
        tower: the image network, up to the layer whose states are used.
        projector: as a network of its own, whose pieces are its tensors.
        kv: keys of the joint model.
        make: the settings, from the processor's configuration and the decoder's context.
    """

    name: str
    text: Fields
    tower: Tower
    projector: Tower
    kv: dict[str, Value]
    make: Callable[[Folder], tuple[VisionSettings, dict[str, Value]]]


# ---- LLaVA -----------------------------------------------------------------------------------------------------------

def _text_of(config: Fields, **defaults: Any) -> Fields:
    """The decoder's configuration, completed with the defaults of its class and the joint configuration. ``defaults``:
    of
    the joint model's class."""
    section = config.section("text_config")
    kind = section.str("model_type", "llama")
    if kind not in _TEXT_DEFAULTS:
        section.fail("model_type", describe(kind), ", ".join(sorted(_TEXT_DEFAULTS)))
    values = {**_TEXT_DEFAULTS[kind], **defaults, "model_type": kind, **section.values}
    values.pop("architectures", None)  # may be a class of the authors' own, as SmolVLM's VLlama3ForCausalLM
    values["tie_word_embeddings"] = section.bool("tie_word_embeddings", False) \
        or config.bool("tie_word_embeddings", False)
    for name in ("eos_token_id", "bos_token_id"):
        if values.get(name) is None and config.get(name) is not None:
            values[name] = config.get(name)
    return Fields(values, file=config.file, at=section.at)


def _used_layers(config: Fields, layers: int) -> int:
    """Number of layers of the image encoder to compute for ``vision_feature_layer``, an index into its hidden
    states."""
    value = config.get("vision_feature_layer")
    if isinstance(value, list):
        raise Unsupported(f"{config.file}: vision_feature_layer is {describe(value)}; mpool uses the states of one "
                          "layer")
    index = config.int("vision_feature_layer", -2)
    used = index if index >= 0 else layers + 1 + index
    if not 1 <= used <= layers:
        config.fail("vision_feature_layer", index, f"1 to {layers}, or -{layers} to -1")
    return used


def _image_token(config: Fields, default: int) -> int:
    return config.int("image_token_id" if "image_token_id" in config else "image_token_index", default, low=0)


def read_llava(config: Fields) -> Joint:
    """LLaVA 1.5 (https://arxiv.org/abs/2310.03744), and 1.6, which looks at tiles of an image too
    (https://llava-vl.github.io/blog/2024-01-30-llava-next), as transformers has them."""
    tiled = config.str("model_type") == "llava_next"
    text, vision = _text_of(config), config.section("vision_config")
    kind = vision.str("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        vision.fail("model_type", describe(kind), "clip_vision_model, siglip_vision_model")
    clip = kind == "clip_vision_model"
    layers = vision.int("num_hidden_layers", 24 if clip else 12, low=1, high=1024)
    tower = image_towers.read_part(vision, "clip" if clip else "siglip", _used_layers(config, layers), norm=False)
    select = config.str("vision_feature_select_strategy", "default", choices=("default", "full"))
    if select == "default" and not clip:
        raise Unsupported(f"{config.file}: vision_feature_select_strategy is default, which drops a patch of an image "
                          "network without class token; mpool computes only full with it")
    width = text.int("hidden_size", low=1, high=MAX_WIDTH)
    check_neutral(config, {"text_config", "vision_config", "vision_feature_layer", "vision_feature_select_strategy",
                           "image_token_index", "image_token_id", "projector_hidden_act", "multimodal_projector_bias",
                           "tie_word_embeddings", "image_seq_length", "ignore_index", "vocab_size",
                           "image_grid_pinpoints", "use_image_newline_parameter"})
    projector = Tower("projector", {})
    bias = config.bool("multimodal_projector_bias", True)
    projector.linear("linear_1", "mm.0", width, tower.hidden, bias)
    projector.linear("linear_2", "mm.2", width, width, bias)
    keep = clip and select == "full"
    if tiled:
        if keep:
            raise Unsupported(f"{config.file}: vision_feature_select_strategy is full; mpool puts tiles together "
                              "without their class tokens")
        projector.add("image_newline", "mm.image_newline", width)
    token = _image_token(config, 32000)

    def make(folder: Folder) -> tuple[VisionSettings, dict[str, Value]]:
        processor = image_processor.read(folder)
        image_towers.check(tower, processor.output(), os.path.join(folder.path, image_processor.NAME))
        if tiled:
            _check_grid(config, tower, processor, folder)
        elif processor.grid:
            config.fail("model_type", "llava", "llava_next for a processor of tiles")
        image = ImageSettings(hidden_size=tower.hidden, output_size=width, resize=processor.resize,
                              resample=processor.resample, crop=processor.crop, patch_size=tower.patch,
                              image_size=tower.image, any_size=False, pad_square=processor.pad_square)
        return VisionSettings(scheme="tiles" if tiled else "one", image=image, image_token_id=token, keep_class=keep,
                              grid=processor.grid), processor.kv

    return Joint("llava", text, tower, projector, {
        "mpool.vision.tower": tower.architecture, "mpool.vision.image_token_id": token,
        "mpool.vision.keep_class": keep,
        "mpool.vision.activation": activation(config, "projector_hidden_act", "gelu", _PROJECTOR_ACTS)}, make)


def _check_grid(config: Fields, tower: Tower, processor: image_processor.Processor, folder: Folder) -> None:
    """The processor cuts images where the model puts their tiles together, into whole tiles."""
    default = [list(pair) for pair in processor.grid]
    if not processor.grid or image_processor.pinpoints(config, default) != processor.grid:
        raise FormatError(file=os.path.join(folder.path, image_processor.NAME), field="image_grid_pinpoints",
                          got=describe(default), allowed="those of config.json")
    for pair in processor.grid:
        if any(n % tower.image for n in pair) or pair[0] * pair[1] > MOST_TILES * tower.image ** 2:
            config.fail("image_grid_pinpoints", describe(list(pair)),
                        f"multiples of image_size, {tower.image}, of at most {MOST_TILES} tiles")


# ---- Idefics3 and SmolVLM --------------------------------------------------------------------------------------------

#: Patches a side for which transformers does not take each patch's own position, by rounding (``bucketize`` in float32
#: of its ``...VisionEmbeddings``).
_ROUNDED = frozenset((19, 25, 29, 31, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62, 67, 68, 71, 72, 73, 74, 76,
                      77))


def read_idefics3(config: Fields) -> Joint:
    """Idefics3 (https://arxiv.org/abs/2408.12637) and SmolVLM (https://arxiv.org/abs/2504.05299)."""
    text, vision = _text_of(config, rms_norm_eps=1e-5), config.section("vision_config")
    layers = vision.int("num_hidden_layers", 12, low=1, high=1024)
    tower = image_towers.read_part(vision, "siglip", layers, True, {
        "hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 12, "patch_size": 32, "image_size": 224})
    merge = config.int("scale_factor", 2, low=1, high=16)
    grid = tower.image // tower.patch
    if grid % merge:
        config.fail("scale_factor", merge, f"a divisor of the {grid} patches a side")
    if grid in _ROUNDED or grid >= 80:
        raise Unsupported(f"{config.file}: images have {grid} patches a side, for which positions are rounded in a way "
                          "that mpool does not follow")
    token = _image_token(config, 128257)
    check_neutral(config, {"text_config", "vision_config", "image_token_id", "scale_factor", "tie_word_embeddings",
                           "vocab_size"})
    projector = Tower("projector", {})
    projector.linear("modality_projection.proj", "mm.0", text.int("hidden_size", low=1, high=MAX_WIDTH),
                     tower.hidden * merge * merge, False)

    def make(folder: Folder) -> tuple[VisionSettings, dict[str, Value]]:
        processor = image_processor.read_splitter(folder)
        if processor.side != tower.image:
            config.fail("vision_config.image_size", tower.image,
                        f"max_image_size of {image_processor.NAME}, {processor.side}")
        image = ImageSettings(hidden_size=tower.hidden, output_size=tower.hidden,
                              resize=("exact", tower.image, tower.image), resample=processor.resample, crop=None,
                              patch_size=tower.patch, image_size=tower.image, any_size=False)
        return VisionSettings(scheme="split", image=image, image_token_id=token, merge=merge,
                              longest=processor.longest, split=processor.split), processor.kv

    return Joint("idefics3", text, tower, projector, {
        "mpool.vision.tower": tower.architecture, "mpool.vision.image_token_id": token, "mpool.vision.merge": merge,
        "mpool.vision.norm": True}, make)


# ---- Qwen2.5-VL ------------------------------------------------------------------------------------------------------

#: Keys of a joint configuration, which older files have among those of the decoder.
_QWEN_JOINT = {"vision_config", "text_config", "image_token_id", "video_token_id", "vision_start_token_id",
               "vision_end_token_id", "vision_token_id", "tie_word_embeddings", "model_type", "architectures"}


def _qwen_text(config: Fields) -> tuple[Fields, list[int]]:
    """The decoder's configuration as Qwen2's, and the pairs of a head for each of the three positions."""
    own = config.section("text_config", None)
    values = dict(own.values if own is not None else
                  {name: value for name, value in config.values.items() if name not in _QWEN_JOINT})
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        if isinstance(rope, dict) and "mrope_section" in rope:
            section = Fields.of(rope, file=config.file, at=name)
            found = section.list("mrope_section", of=int, limit=3)
            if len(found) != 3 or min(found) < 1:
                section.fail("mrope_section", describe(found), "three numbers above 0")
            rest = {key: value for key, value in rope.items() if key != "mrope_section"}
            for key in ("type", "rope_type"):
                if rest.get(key) == "mrope":
                    rest[key] = "default"
            values[name] = rest
            break
    else:
        found = [16, 24, 24]
    defaults = {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
                "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768,
                "rms_norm_eps": 1e-5, "rope_theta": 1e6}
    if isinstance(values.get("rope_parameters"), dict):
        values["rope_parameters"] = {"rope_theta": 1e6, **values["rope_parameters"]}
        defaults.pop("rope_theta")
    values = {**defaults, **values, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
              "tie_word_embeddings": config.bool("tie_word_embeddings", False) or bool(
                  values.get("tie_word_embeddings", False))}
    return Fields(values, file=config.file, at=own.at if own is not None else config.at), found


def read_qwen(config: Fields) -> Joint:
    """Qwen2.5-VL (https://arxiv.org/abs/2502.13923)."""
    text, sections = _qwen_text(config)
    vision = config.section("vision_config")
    tower, merge = image_towers.read_qwen(vision)
    width = text.int("hidden_size", low=1, high=MAX_WIDTH)
    if vision.int("out_hidden_size", 3584) != width:
        vision.fail("out_hidden_size", vision.get("out_hidden_size"), f"hidden_size of the decoder, {width}")
    token = _image_token(config, 151655)
    projector = Tower("projector", {})
    inner = tower.hidden * merge * merge
    projector.linear("mlp.0", "mm.0", inner, inner)
    projector.linear("mlp.2", "mm.2", width, inner)

    def make(folder: Folder) -> tuple[VisionSettings, dict[str, Value]]:
        processor = image_processor.read_sizer(folder)
        if (processor.patch, processor.merge) != (tower.patch, merge):
            config.fail("vision_config.patch_size", tower.patch, f"patch_size and merge_size of {image_processor.NAME}")
        image = ImageSettings(hidden_size=tower.hidden, output_size=width, resize=None, resample=processor.resample,
                              crop=None, patch_size=tower.patch, image_size=tower.image, any_size=True)
        most = min(processor.most, MOST_PATCHES * tower.patch ** 2)
        return VisionSettings(scheme="any", image=image, image_token_id=token, merge=merge,
                              pixels=(min(processor.least, most), most) if processor.resize else None), processor.kv

    return Joint("qwen2_5_vl", text, tower, projector, {
        "mpool.vision.image_token_id": token, "mpool.vision.merge": merge, "mpool.vision.norm": True,
        "mpool.rope_sections": sections}, make)


READERS: dict[str, Callable[[Fields], Joint]] = {
    "llava": read_llava, "llava_next": read_llava, "idefics3": read_idefics3, "smolvlm": read_idefics3,
    "qwen2_5_vl": read_qwen}
#: Names in ``architectures`` of config.json.
CLASSES = {"llava": ("LlavaForConditionalGeneration",), "llava_next": ("LlavaNextForConditionalGeneration",),
           "idefics3": ("Idefics3ForConditionalGeneration",),
           "smolvlm": ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
           "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",)}
#: Values of ``model_type`` that this module reads.
MODEL_TYPES = tuple(READERS)


# ---- the folder ------------------------------------------------------------------------------------------------------

def _parts(entries: Mapping[str, TensorEntry], file: str) -> dict[str, dict[str, TensorEntry]]:
    """Tensors by the part of the model that they belong to, under its own names."""
    found: dict[str, dict[str, TensorEntry]] = {"text": {}, "tower": {}, "projector": {}}
    for name, entry in entries.items():
        for pattern, part, plain in _NAMES:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            own = match.expand(plain)
            if own in found[part]:
                raise FormatError(file=file, field="tensors", got=f"{shorten(name)} beside another of its name",
                                  allowed="each tensor once")
            found[part][own] = entry
            break
        else:
            raise FormatError(file=file, field="tensors", got=f"{shorten(name)}, which the model does not have",
                              allowed="the tensors of the architecture")
    return found


def _take(tower: Tower, tensors: Mapping[str, TensorEntry], paths: tuple[str, ...]) -> list[TensorEntry]:
    image_folder.check_surplus([tower], tensors, paths[0])
    return image_folder.take(tower, tensors, paths)


def _chat_template(folder: Folder, config: Fields) -> str | None:
    """The processor's chat template overrides the tokenizer's."""
    if not folder.has("chat_template.jinja"):
        for name in ("chat_template.json", image_processor.JOINT_NAME):
            if folder.has(name):
                value = folder.fields(name).get("chat_template")
                if value is not None:
                    return template(value, file=os.path.join(folder.path, name), field="chat_template")
    return hf_parts.chat_template(folder, config)


def describe_vision(folder: Folder, config: Fields, *, key: str, ref: str) -> ModelDescription:
    """A model from a folder whose config.json has one of MODEL_TYPES.

    Raises:
        FormatError, UnsafeFormat, Unsupported: as :func:`~mpool.models.formats.hf_folder.describe_folder`.
    """
    hf_config.refuse_remote_code(config)
    kind = config.str("model_type")
    for name in config.list("architectures", [], of=str, limit=16):
        if name not in CLASSES[kind]:
            config.fail("architectures", describe(name), ", ".join(CLASSES[kind]))
    joint = READERS[kind](config)
    row, read = hf_config.read_config(joint.text)
    if row.capability != "text_to_text":
        raise Unsupported(f"{config.file}: text_config is of {row.name}, which gives no text")
    size = architectures.sizes(row, read.kv, file=config.file) | read.sizes
    if not 0 <= cast(int, joint.kv["mpool.vision.image_token_id"]) < size["V"]:
        config.fail("image_token_index", joint.kv["mpool.vision.image_token_id"], f"0 to {size['V'] - 1}")
    found = safetensors_header.read_folder(folder)
    if found is None:
        hf_parts.refuse_weights(folder)
    paths, entries = found
    parts = _parts(entries, paths[0])
    _, tensors = hf_parts.weights(folder, row, size, read.tied, paths, parts["text"])
    tensors += _take(joint.tower, parts["tower"], paths) + _take(joint.projector, parts["projector"], paths)
    settings, processor = joint.make(folder)
    tokenizer_config = folder.fields(hf_parts.TOKENIZER_CONFIG_NAME, missing_ok=True, wide_ints=True)
    hf_config.refuse_remote_code(tokenizer_config, row)
    generation = hf_parts.generation(folder, joint.text, tokenizer_config, size)
    kv = {**named(read.kv, row.name, joint.name), **named(joint.tower.kv, joint.tower.architecture, joint.name),
          **joint.kv, **processor, "mpool.vision.decoder": row.name}
    tensors.sort(key=lambda entry: (entry.file, entry.offset))
    return ModelDescription(
        key=key, ref=ref, capability="vision", generation=generation, vision=settings,
        spec=ModelSpec(joint.name, tuple(paths), kv, tuple(tensors)),
        tokenizer=hf_parts.tokenizer_of(folder, tokenizer_config, False, generation.eog_token_ids, read.ended),
        chat_template=_chat_template(folder, tokenizer_config))


def named(kv: Mapping[str, Value], row: str, joint: str) -> dict[str, Value]:
    """Keys of a part under the name of the joint model."""
    return {joint + key[len(row):] if key.startswith(row + ".") else key: value for key, value in kv.items()}

