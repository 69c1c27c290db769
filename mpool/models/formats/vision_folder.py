"""Readers of transformers folders of vision models: an image encoder, a projector and a language model (the decoder).

The decoder's architecture is a row of :mod:`mpool.models.families`, read from ``text_config``. The image encoder is one
of :mod:`.image_networks`, read from ``vision_config``. In the spec, the hyper-parameters of both have the name of the
vision model as their prefix; ``mpool.vision.decoder`` and ``mpool.vision.image_encoder`` name the rows of the two
networks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isqrt, sqrt
from typing import Any, cast

from ...errors import FormatError, Unsupported
from .. import architectures, origins
from ..families import embedding_gemma2, gemma4
from ..families.gemma import TEXT_DEFAULTS as GEMMA_TEXT
from ..families.reading import MAX_LAYERS, MAX_WIDTH, activation, check_neutral, unsupported
from ..fields import Fields, describe
from ..files import Folder
from ..json_strict import shorten
from ..spec import ImageSettings, ModelDescription, ModelSpec, TensorEntry, Value, VideoSettings, VisionSettings
from . import (
    hf_config,
    hf_parts,
    hf_quantised,
    image_folder,
    image_networks,
    image_processor,
    internvl,
    lfm2_vl,
    pixtral,
    safetensors_header,
)
from .chat_templates import template
from .image_networks import NetworkSpec
from .vision_model import (
    MAX_PATCHES,
    MAX_TILES,
    PROJECTOR_ACTS,
    VisionModel,
    add_ends,
    image_token,
    image_token_key,
    text_of,
    two_layers,
    used_layers,
)

#: Patterns of tensor names -> (part of the model, name within the part). Versions of transformers differ in the names.
_NAMES = (
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?(lm_head\..+)"), "text", r"\1"),
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)"), "text", r"model.\1"),
    (re.compile(r"(lm_head\..+)"), "text", r"\1"),
    (re.compile(r"(?:model\.)?text_model\.(.+)"), "text", r"model.\1"),
    (re.compile(r"(?:model\.)?vision_model\.(.+)"), "encoder", r"\1"),
    (re.compile(r"(?:model\.)?connector\.(.+)"), "projector", r"\1"),
    (re.compile(r"(?:model\.)?visual\.merger\.(mlp\..+)"), "projector", r"\1"),
    (re.compile(r"(?:model\.)?visual\.(merger\.linear_fc.+|deepstack_merger_list\..+)"), "projector", r"\1"),
    (re.compile(r"(?:model\.)?visual\.(.+)"), "encoder", r"\1"),
    (re.compile(r"model\.((?:embed_tokens|layers|norm)\..+)"), "text", r"model.\1"),
    (re.compile(r"(mtp\..+)"), "text", r"\1"),
    # the keys of Gemma 4 12B, whose image encoder has no layers
    (re.compile(r"(?:model\.)?(?:embed_vision|vision_embedder)\.((?:patch_|pos_).+)"), "encoder", r"\1"),
    (re.compile(r"(?:model\.)?embed_vision\.(?:multimodal_embedder\.)?(.+)"), "projector", r"\1"),
    (re.compile(r"(?:model\.)?((?:audio_tower|embed_audio)\..+)"), "encoder", r"\1"),
    (re.compile(r"(?:model\.)?vision_tower\.(?:vision_model\.)?(.+)"), "encoder", r"\1"),
    (re.compile(r"(?:model\.)?multi_modal_projector\.(.+)"), "projector", r"\1"),
    (re.compile(r"(?:model\.)?(image_newline)"), "projector", r"\1"),
)


# ---- LLaVA -----------------------------------------------------------------------------------------------------------

def read_llava(config: Fields) -> VisionModel:
    """Read LLaVA 1.5 (https://arxiv.org/abs/2310.03744) or LLaVA 1.6, which also encodes tiles of an image
    (https://llava-vl.github.io/blog/2024-01-30-llava-next)."""
    tiled = config.str("model_type") == "llava_next"
    if not tiled and config.section("vision_config").get("model_type") == "pixtral":
        return pixtral.read(config)
    text, vision = text_of(config), config.section("vision_config")
    kind = vision.str("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        vision.fail("model_type", describe(kind), "clip_vision_model, siglip_vision_model"
                    + ("" if tiled else ", pixtral"))
    clip = kind == "clip_vision_model"
    layers = vision.int("num_hidden_layers", 12, low=1, high=1024)
    encoder = image_networks.read_vision_encoder(vision, "clip" if clip else "siglip", used_layers(config, layers),
                                                 norm=False)
    select = config.str("vision_feature_select_strategy", "default", choices=("default", "full"))
    if select == "default" and not clip:
        raise Unsupported(f"{config.file}: vision_feature_select_strategy is default, which would drop an image patch "
                          "because the encoder has no class token; mpool supports only full for this encoder")
    width = text.int("hidden_size", low=1, high=MAX_WIDTH)
    check_neutral(config, {"text_config", "vision_config", "vision_feature_layer", "vision_feature_select_strategy",
                           "image_token_index", "image_token_id", "projector_hidden_act", "multimodal_projector_bias",
                           "tie_word_embeddings", "image_seq_length", "ignore_index", "vocab_size",
                           "image_grid_pinpoints", "use_image_newline_parameter"})
    projector = two_layers(encoder.hidden_size, width, width, bias=config.bool("multimodal_projector_bias", True))
    keep = clip and select == "full"
    if tiled:
        if keep:
            raise Unsupported(f"{config.file}: vision_feature_select_strategy is full; for models with tiles, mpool "
                              "supports only default, which drops the class tokens")
        projector.add("image_newline", "mm.image_newline", width)
    token = image_token(config, 32000)

    def read_settings(folder: Folder) -> tuple[VisionSettings, dict[str, Value]]:
        processor = image_processor.read(folder)
        image_networks.check_processor(encoder, processor.output(), os.path.join(folder.path, image_processor.NAME))
        if tiled:
            _check_grid(config, encoder, processor, folder)
        elif processor.grid:
            config.fail("model_type", "llava", "llava_next, because the image processor cuts images into tiles")
        image = ImageSettings(hidden_size=encoder.hidden_size, output_size=width, resize=processor.resize,
                              resample=processor.resample, crop=processor.crop, patch_size=encoder.patch_size,
                              image_size=encoder.image_size, any_size=False, pad_square=processor.pad_square)
        return VisionSettings(scheme="tiles" if tiled else "one", image=image, image_token_id=token, keep_class=keep,
                              grid=processor.grid), processor.kv

    return VisionModel("llava", text, encoder, projector, {
        "mpool.vision.image_encoder": encoder.architecture, "mpool.vision.image_token_id": token,
        "mpool.vision.keep_class": keep,
        "mpool.vision.activation": activation(config, "projector_hidden_act", "gelu", PROJECTOR_ACTS)}, read_settings)


def _check_grid(config: Fields, encoder: NetworkSpec, processor: image_processor.Processor, folder: Folder) -> None:
    """Raise FormatError unless the image processor and ``config.json`` list the same image sizes for tiling, each a
    whole number of tiles."""
    default = [list(pair) for pair in processor.grid]
    if not processor.grid or image_processor.pinpoints(config, default) != processor.grid:
        raise FormatError(file=os.path.join(folder.path, image_processor.NAME), field="image_grid_pinpoints",
                          got=describe(default), allowed="the same list as in config.json")
    for pair in processor.grid:
        if any(n % encoder.image_size for n in pair) or pair[0] * pair[1] > MAX_TILES * encoder.image_size ** 2:
            config.fail("image_grid_pinpoints", describe(list(pair)),
                        f"multiples of image_size, {encoder.image_size}, of at most {MAX_TILES} tiles")


# ---- Idefics3 and SmolVLM --------------------------------------------------------------------------------------------

#: Numbers of patches per side with which transformers gives a patch the position of another one, because ``bucketize``
#: in its ``...VisionEmbeddings`` rounds to float32.
_ROUNDED = frozenset((19, 25, 29, 31, 38, 40, 41, 43, 47, 49, 50, 54, 55, 58, 59, 61, 62, 67, 68, 71, 72, 73, 74, 76,
                      77))


def read_idefics3(config: Fields) -> VisionModel:
    """Read Idefics3 (https://arxiv.org/abs/2408.12637) or SmolVLM (https://arxiv.org/abs/2504.05299)."""
    text, vision = text_of(config), config.section("vision_config")
    layers = vision.int("num_hidden_layers", 12, low=1, high=1024)
    encoder = image_networks.read_vision_encoder(vision, "siglip", layers, True, {
        "hidden_size": 1152, "num_attention_heads": 16, "num_hidden_layers": 12, "patch_size": 32, "image_size": 224})
    merge = config.int("scale_factor", 2, low=1, high=16)
    grid = encoder.image_size // encoder.patch_size
    if grid % merge:
        config.fail("scale_factor", merge, f"a divisor of the {grid} patches per side")
    if grid in _ROUNDED or grid >= 80:
        raise Unsupported(f"{config.file}: images have {grid} patches per side, for which transformers rounds "
                          "positions in a way that mpool does not reproduce")
    token = image_token(config, 128257)
    check_neutral(config, {"text_config", "vision_config", "image_token_id", "scale_factor", "tie_word_embeddings",
                           "vocab_size"})
    projector = NetworkSpec("projector", {})
    projector.linear("modality_projection.proj", "mm.0", text.int("hidden_size", low=1, high=MAX_WIDTH),
                     encoder.hidden_size * merge * merge, False)

    def read_settings(folder: Folder) -> tuple[VisionSettings, dict[str, Value]]:
        processor = image_processor.read_tiling(folder)
        if processor.side != encoder.image_size:
            config.fail("vision_config.image_size", encoder.image_size,
                        f"max_image_size of {image_processor.NAME}, {processor.side}")
        image = ImageSettings(hidden_size=encoder.hidden_size, output_size=encoder.hidden_size,
                              resize=("exact", encoder.image_size, encoder.image_size), resample=processor.resample,
                              crop=None, patch_size=encoder.patch_size, image_size=encoder.image_size, any_size=False)
        frames = image_processor.read_frames(folder, processor) if config.str("model_type") == "smolvlm" else None
        video = VideoSettings(None, None, 1, None, None, frames[0], longest=frames[1]) \
            if isinstance(frames, tuple) else None
        return VisionSettings(scheme="split", image=image, image_token_id=token, merge=merge,
                              longest=processor.longest, split=processor.split, video=video,
                              no_video=frames if isinstance(frames, str) else None), processor.kv

    return VisionModel("idefics3", text, encoder, projector, {
        "mpool.vision.image_encoder": encoder.architecture, "mpool.vision.image_token_id": token,
        "mpool.vision.merge": merge,
        "mpool.vision.norm": True}, read_settings)


# ---- Qwen2-VL, Qwen2.5-VL, Qwen3-VL, Qwen3.5 ------------------------------------------------------------------------

#: Keys of the whole model's configuration. Older files without ``text_config`` mix them with the decoder's keys.
_QWEN_JOINT = {"vision_config", "text_config", "image_token_id", "video_token_id", "vision_start_token_id",
               "vision_end_token_id", "vision_token_id", "tie_word_embeddings", "model_type", "architectures"}
_QWEN2_TEXT = {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
               "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768,
               "rms_norm_eps": 1e-5}
_QWEN3_TEXT = {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
               "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128000}

_MOE_TEXT = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
             "num_attention_heads": 16, "max_position_embeddings": 128000}

_QWEN35_TEXT = {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
                "num_attention_heads": 16, "max_position_embeddings": 32768}
_QWEN35_MOE_TEXT = {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
                    "max_position_embeddings": 32768}


@dataclass(frozen=True)
class _QwenText:
    """The decoder of one of Qwen's vision models.

    Attributes:
        kind: ``model_type`` of a decoder with the same layers.
        name: class of that decoder.
        sections: default of ``mrope_section``.
        theta: default of the RoPE base.
        defaults: further defaults of transformers.
        interleaved: True if the sections of M-RoPE are interleaved.
        token: default of ``image_token_id``.
        video: defaults of ``video_token_id``, ``vision_start_token_id`` and ``vision_end_token_id``.
        taps: default layers of the image encoder with taps; None: the model has none.
    """

    kind: str
    name: str
    sections: tuple[int, int, int]
    theta: float
    defaults: dict[str, Any]
    interleaved: bool = True
    token: int = 151655
    video: tuple[int, int, int] = (151656, 151652, 151653)
    taps: tuple[int, ...] | None = (8, 16, 24)


_QWEN_TEXT = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QwenText("qwen2", "Qwen2ForCausalLM", (16, 24, 24), 1e6, _QWEN2_TEXT,
                                                         False)),
    "qwen3_vl": _QwenText("qwen3", "Qwen3ForCausalLM", (24, 20, 20), 5e5, _QWEN3_TEXT),
    "qwen3_vl_moe": _QwenText("qwen3_vl_moe_text", "Qwen3VLMoeForConditionalGeneration", (24, 20, 20), 5e5, _MOE_TEXT),
    "qwen3_5": _QwenText("qwen3_5_text", "Qwen3_5ForCausalLM", (11, 11, 10), 1e4, _QWEN35_TEXT, token=248056,
                         video=(248057, 248053, 248054), taps=None),
    "qwen3_5_moe": _QwenText("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", (11, 11, 10), 1e4, _QWEN35_MOE_TEXT,
                             token=248056, video=(248057, 248053, 248054), taps=None),
}


def _qwen_text(config: Fields, usual: _QwenText) -> tuple[Fields, list[int]]:
    """Return the decoder's configuration as that of a language model, and its ``mrope_section``: the number of
    component pairs of a head that each of the three positions (time, row, column) rotates."""
    own = config.section("text_config", None)
    values = dict(own.values if own is not None else
                  {name: value for name, value in config.values.items() if name not in _QWEN_JOINT})
    found, defaults = list(usual.sections), {**usual.defaults, "rope_theta": usual.theta}
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        if isinstance(rope, dict) and "mrope_section" in rope:
            section = Fields.of(rope, file=config.file, at=name)
            found = section.list("mrope_section", of=int, limit=3)
            if len(found) != 3 or min(found) < 1:
                section.fail("mrope_section", describe(found), "three numbers above 0")
            known = {"mrope_section"}
            if usual.interleaved:
                known.add("mrope_interleaved")
                if not section.bool("mrope_interleaved", True):
                    unsupported(section, "mrope_interleaved", "true")
            rest = {key: value for key, value in rope.items() if key not in known}
            for key in ("type", "rope_type"):
                if rest.get(key) == "mrope":
                    rest[key] = "default"
            values[name] = rest
            break
    if isinstance(values.get("rope_parameters"), dict):
        values["rope_parameters"] = {"rope_theta": usual.theta, **values["rope_parameters"]}
        defaults.pop("rope_theta")
    values = {**defaults, **values, "model_type": usual.kind, "architectures": [usual.name],
              "tie_word_embeddings": config.bool("tie_word_embeddings", False) or not usual.interleaved and bool(
                  values.get("tie_word_embeddings", False))}
    return Fields(values, file=config.file, at=own.at if own is not None else config.at), found


def _qwen_projector(encoder: image_networks.QwenEncoder, width: int) -> NetworkSpec:
    """Return the projector, and those of the taps."""
    projector = NetworkSpec("projector", {})
    inner = encoder.network.hidden_size * encoder.merge ** 2
    first, second = ("merger.linear_fc1", "merger.linear_fc2") if encoder.network.architecture == "qwen3_vl" else \
        ("mlp.0", "mlp.2")
    projector.linear(first, "mm.0", inner, inner)
    projector.linear(second, "mm.2", width, inner)
    for number, layer in enumerate(encoder.taps):
        source, target = f"deepstack_merger_list.{number}", f"v.deepstack.{layer}"
        for end in ("weight", "bias"):
            projector.add(f"{source}.norm.{end}", f"{target}.norm.{end}", inner)
        projector.linear(f"{source}.linear_fc1", f"{target}.fc1", inner, inner)
        projector.linear(f"{source}.linear_fc2", f"{target}.fc2", width, inner)
    return projector


def read_qwen(config: Fields) -> VisionModel:
    """Read Qwen2-VL (https://arxiv.org/abs/2409.12191), Qwen2.5-VL (https://arxiv.org/abs/2502.13923), Qwen3-VL
    (https://arxiv.org/abs/2511.21631), or Qwen3.5 to 3.8, whose image encoder is Qwen3-VL's without taps."""
    name = config.str("model_type")
    usual = _QWEN_TEXT[name]
    text, sections = _qwen_text(config, usual)
    vision = config.section("vision_config")
    found = image_networks.read_qwen(vision, "qwen3_vl" if usual.interleaved else name, usual.taps)
    encoder, merge = found.network, found.merge
    width = text.int("hidden_size", low=1, high=MAX_WIDTH)
    if found.output != width:
        vision.fail(found.output_key, vision.get(found.output_key), f"{width}, the decoder's hidden_size")
    token = image_token(config, usual.token)
    per_second = vision.number("tokens_per_second", 4, above=0.0, most=1000.0) if name == "qwen2_5_vl" else None

    def read_settings(folder: Folder) -> tuple[VisionSettings, dict[str, Value]]:
        processor = image_processor.read_dynamic_size(folder)
        if (processor.patch, processor.merge) != (encoder.patch_size, merge):
            config.fail("vision_config.patch_size", f"{encoder.patch_size} with spatial_merge_size {merge}",
                        f"patch_size and merge_size of {image_processor.NAME}, {processor.patch} and {processor.merge}")
        image = ImageSettings(hidden_size=encoder.hidden_size, output_size=width, resize=None,
                              resample=processor.resample, crop=None, patch_size=encoder.patch_size,
                              image_size=encoder.image_size, any_size=True)
        max_pixels = min(processor.max_pixels, MAX_PATCHES * encoder.patch_size ** 2)
        frames = cast(int, encoder.kv["mpool.image.frames"])
        video = image_processor.read_video(folder, processor, frames, not usual.interleaved)
        marks = [config.int(name, default, low=0) for name, default in zip(
            ("video_token_id", "vision_start_token_id", "vision_end_token_id"), usual.video)]
        return VisionSettings(scheme="any", image=image, image_token_id=token, merge=merge,
                              pixels=(min(processor.min_pixels, max_pixels), max_pixels)
                              if processor.resize else None,
                              video=None if isinstance(video, str) else VideoSettings(
                                  marks[0], (marks[1], marks[2]) if usual.interleaved else None, frames, *video,
                                  per_second),
                              no_video=video if isinstance(video, str) else None), processor.kv

    return VisionModel(encoder.architecture, text, encoder, _qwen_projector(found, width), {
        "mpool.vision.image_token_id": token, "mpool.vision.merge": merge, "mpool.vision.norm": True,
        "mpool.rope_sections": sections, "mpool.rope_interleaved": usual.interleaved}, read_settings)


# ---- Gemma 3 ---------------------------------------------------------------------------------------------------------

def read_gemma(config: Fields) -> VisionModel:
    """Read Gemma 3 (https://arxiv.org/abs/2503.19786): SigLIP, whose patches are averaged in squares. The rows of an
    image attend to each other in both directions."""
    vision = config.section("vision_config")
    layers = vision.int("num_hidden_layers", 12, low=1, high=1024)
    encoder = image_networks.read_vision_encoder(vision, "siglip", layers, True)
    own = config.section("text_config")
    values = {**GEMMA_TEXT, **{name: value for name, value in own.values.items() if value is not None},
              "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"],
              "tie_word_embeddings": config.bool("tie_word_embeddings", True)}
    add_ends(values, config)
    text = Fields(values, file=config.file, at=own.at)
    width = text.int("hidden_size", low=1, high=MAX_WIDTH)
    check_neutral(config, {"text_config", "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index",
                           "boi_token_id", "eoi_token_id", "image_token_index", "image_token_id",
                           "tie_word_embeddings", "eos_token_id", "bos_token_id"})
    grid, rows = encoder.image_size // encoder.patch_size, config.int("mm_tokens_per_image", 256, low=1)
    merge = grid // isqrt(rows) if isqrt(rows) ** 2 == rows and isqrt(rows) <= grid else 0
    if merge == 0 or grid % merge or grid // merge != isqrt(rows) or merge > 16:
        config.fail("mm_tokens_per_image", rows, f"the number of squares of equal size that {grid} x {grid} patches "
                    "have, of at most 16 x 16 patches each")
    token = image_token(config, 262144)
    mark = config.int("boi_token_id" if "boi_token_id" in config else "boi_token_index", 255999, low=0)
    projector = NetworkSpec("projector", {})
    projector.add("mm_soft_emb_norm.weight", "mm.soft_emb_norm.weight", encoder.hidden_size)
    projector.add("mm_input_projection_weight", "mm.input_projection.weight", encoder.hidden_size, width)

    def read_settings(folder: Folder) -> tuple[VisionSettings, dict[str, Value]]:
        processor, crops = image_processor.read_pan(folder)
        image_networks.check_processor(encoder, processor.output(), os.path.join(folder.path, image_processor.NAME))
        image = ImageSettings(hidden_size=encoder.hidden_size, output_size=width, resize=processor.resize,
                              resample=processor.resample, crop=None, patch_size=encoder.patch_size,
                              image_size=encoder.image_size, any_size=False)
        return VisionSettings(scheme="pan", image=image, image_token_id=token, mark_token_id=mark, merge=merge,
                              crops=crops), processor.kv

    return VisionModel("gemma3_vision", text, encoder, projector, {
        "mpool.vision.image_encoder": encoder.architecture, "mpool.vision.image_token_id": token,
        "mpool.vision.merge": merge, "mpool.vision.norm": True, "mpool.vision.averaged": True,
        "mpool.vision.norm_offset": 1.0, "mpool.image_spans": 1}, read_settings)


# ---- Gemma 4 and EmbeddingGemma 2 ------------------------------------------------------------------------------------

#: Class of the language model, by ``model_type`` of the whole model.
_GEMMA4_TEXT = {**dict.fromkeys(("gemma4", "gemma4_unified"), ("Gemma4ForCausalLM",)),
                "embedding_gemma2": ("EmbeddingGemma2TextModel",)}


def read_gemma4(config: Fields) -> VisionModel:
    """Read Gemma 4 or EmbeddingGemma 2: images of any size, whose patches are averaged in squares.

    The image encoder of Gemma 4 12B ("unified") has no layers. In the larger models, the rows of an image attend to
    each other in both directions, in layers with a sliding window.
    """
    kind = config.str("model_type")
    if kind == "embedding_gemma2" and config.get("vision_config") is None:
        unsupported(config, "vision_config", "EmbeddingGemma 2 with its image encoder")
    vision, own = config.section("vision_config"), config.section("text_config")
    unified = kind == "gemma4_unified"
    encoder, merge = image_networks.read_gemma4(vision, unified)
    values = {**own.values, "model_type": f"{kind}_text", "architectures": list(_GEMMA4_TEXT[kind]),
              "tie_word_embeddings": config.bool("tie_word_embeddings", True)}
    add_ends(values, config)
    text = Fields(values, file=config.file, at=own.at)
    usual = embedding_gemma2.DEFAULTS if kind == "embedding_gemma2" else {"hidden_size": 2304, "num_hidden_layers": 30}
    width = text.int("hidden_size", usual["hidden_size"], low=1, high=MAX_WIDTH)
    check_neutral(config, {"text_config", "vision_config", "audio_config", "tie_word_embeddings", "eos_token_id",
                           "bos_token_id", *(f"{name}_token_id" for name in (
                               "boi", "eoi", "image", "video", "boa", "eoa", "audio")), "eoa_token_index"})
    token = config.int("image_token_id", 258880, low=0)
    both = text.get("use_bidirectional_attention") if "use_bidirectional_attention" in text else unified and "vision"
    types = gemma4.kinds(text, text.int("num_hidden_layers", usual["num_hidden_layers"], low=1, high=MAX_LAYERS))
    projector = NetworkSpec("projector", {})
    projector.linear("embedding_projection", "mm.0", width, encoder.hidden_size, False)
    pooled = 1 if unified else merge

    def read_settings(folder: Folder) -> tuple[VisionSettings, dict[str, Value]]:
        processor = image_processor.read_fitting(folder, pixels_from_0=unified)
        if (processor.patch * (merge if unified else 1), processor.merge) != (encoder.patch_size, merge):
            config.fail("vision_config.patch_size", f"{vision.int('patch_size', 16)} with pooling_kernel_size {merge}",
                        f"patch_size and pooling_kernel_size of {image_processor.NAME}, {processor.patch} and "
                        f"{processor.merge}")
        image = ImageSettings(hidden_size=encoder.hidden_size, output_size=width, resize=None,
                              resample=processor.resample, crop=None, patch_size=encoder.patch_size,
                              image_size=encoder.image_size, any_size=True)
        return VisionSettings(scheme="fit", image=image, image_token_id=token, merge=pooled, rows=processor.rows,
                              rows_allowed=image_processor.GEMMA4_ROWS), {
            **processor.kv, "mpool.vision.patches": min(processor.rows * pooled ** 2, MAX_PATCHES)}

    return VisionModel(encoder.architecture, text, encoder, projector, {
        "mpool.vision.image_token_id": token, "mpool.vision.merge": pooled,
        "mpool.vision.averaged": not unified, "mpool.vision.mean_scale": 1.0 if unified else sqrt(encoder.hidden_size),
        "mpool.vision.norm_epsilon": vision.number("rms_norm_eps", 1e-6, above=0.0),
        "mpool.image_spans": [int(both == "vision" and one != "full_attention") for one in types]}, read_settings)


READERS: dict[str, Callable[[Fields], VisionModel]] = {
    "llava": read_llava, "llava_next": read_llava, "idefics3": read_idefics3, "smolvlm": read_idefics3,
    **dict.fromkeys(_QWEN_TEXT, read_qwen), "gemma3": read_gemma, "gemma4": read_gemma4, "gemma4_unified": read_gemma4,
    "embedding_gemma2": read_gemma4, "lfm2_vl": lfm2_vl.read, "mistral3": pixtral.read, "internvl": internvl.read}
#: Accepted values of ``architectures`` in config.json, by ``model_type``.
CLASSES = {"llava": ("LlavaForConditionalGeneration",), "llava_next": ("LlavaNextForConditionalGeneration",),
           "idefics3": ("Idefics3ForConditionalGeneration",),
           "smolvlm": ("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
           "gemma3": ("Gemma3ForConditionalGeneration",), "gemma4": ("Gemma4ForConditionalGeneration",),
           "gemma4_unified": ("Gemma4UnifiedForConditionalGeneration",),
           "embedding_gemma2": ("EmbeddingGemma2Model",),
           "lfm2_vl": ("Lfm2VlForConditionalGeneration",), "mistral3": ("Mistral3ForConditionalGeneration",),
           "internvl": ("InternVLForConditionalGeneration",),
           "qwen2_vl": ("Qwen2VLForConditionalGeneration",), "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration",),
           "qwen3_vl": ("Qwen3VLForConditionalGeneration",),
           "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
           "qwen3_5": ("Qwen3_5ForConditionalGeneration",), "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration",)}
#: Values of ``model_type`` whose folders are read as language models if they have no image processor, if
#: ``vision_config`` is null, or if their weights are quantised.
_OPTIONAL = ("gemma3", "gemma4", "gemma4_unified", "mistral3", "qwen3_5", "qwen3_5_moe")


def sees(folder: Folder, config: Fields, images: bool = True) -> bool:
    """Return True if the folder is a vision model that :func:`describe_vision` reads. ``images``: False if only its
    language model is of use."""
    kind = config.get("model_type")
    processor = any(folder.has(name) for name in (image_processor.NAME, image_processor.JOINT_NAME))
    return isinstance(kind, str) and kind in READERS and (
        kind not in _OPTIONAL or images and processor and config.get("quantization_config") is None
        and config.get("vision_config") is not None)


# ---- the folder ------------------------------------------------------------------------------------------------------

def _parts(entries: Mapping[str, TensorEntry], file: str) -> dict[str, dict[str, TensorEntry]]:
    """Group the stored tensors by part of the model (text, encoder, projector), by their names within the part."""
    found: dict[str, dict[str, TensorEntry]] = {"text": {}, "encoder": {}, "projector": {}}
    for name, entry in entries.items():
        for pattern, part, plain in _NAMES:
            match = pattern.fullmatch(name)
            if match is None:
                continue
            own = match.expand(plain)
            if own in found[part]:
                raise FormatError(file=file, field="tensors", allowed="each tensor once",
                                  got=f"{shorten(name)} and the same tensor under another name")
            found[part][own] = entry
            break
        else:
            raise FormatError(file=file, field="tensors", got=f"{shorten(name)}, which the model does not have",
                              allowed="the tensors of the architecture")
    return found


def _expert_layout(tensors: Mapping[str, TensorEntry], size: Mapping[str, int]) -> dict[str, int]:
    """Return whether tensors of all experts have the rows of their matrices or, transposed, the columns. As in
    transformers, square matrices are not transposed."""
    joined = next((entry.shape for name, entry in tensors.items() if name.endswith(".experts.gate_up_proj")), ())
    rows = joined[1:] == (size.get("G"), size["D"])
    return {"rows": int(rows), "columns": int(not rows)}


def _select(encoder: NetworkSpec, tensors: Mapping[str, TensorEntry], paths: tuple[str, ...]) -> list[TensorEntry]:
    """Select the tensors of one part of the model; raise FormatError if a tensor is missing or unknown."""
    image_folder.check_surplus([encoder], tensors, paths[0])
    return image_folder.select_tensors(encoder, tensors, paths)


def _chat_template(folder: Folder, config: Fields) -> str | None:
    """Return the folder's chat template; the processor's template takes precedence over the tokenizer's."""
    if not folder.has("chat_template.jinja"):
        for name in ("chat_template.json", image_processor.JOINT_NAME):
            if folder.has(name):
                value = folder.fields(name).get("chat_template")
                if value is not None:
                    return template(value, file=os.path.join(folder.path, name), field="chat_template")
    return hf_parts.chat_template(folder, config)


def describe_vision(folder: Folder, config: Fields, *, key: str, ref: str, embeds: bool = False) -> ModelDescription:
    """Describe a transformers folder of a vision model (:func:`sees`).

    Args:
        folder: the model folder.
        config: its ``config.json``.
        key, ref: key and reference of the model, stored in the result.
        embeds: True if the model is used without its output layer, which the files may then leave out.

    Returns:
        A description with the capability ``vision``.

    Raises:
        FormatError, UnsafeFormat, Unsupported: on the conditions of
            :func:`~mpool.models.formats.hf_folder.describe_folder`.
    """
    hf_config.refuse_remote_code(config)
    kind = config.str("model_type")
    for name in config.list("architectures", [], of=str, limit=16):
        if name not in CLASSES[kind]:
            config.fail("architectures", describe(name), ", ".join(CLASSES[kind]))
    model = READERS[kind](config)
    found = safetensors_header.read_folder(folder)
    if found is None:
        hf_parts.refuse_weights(folder)
    paths, entries = found
    parts = _parts(entries, paths[0])
    row, read = hf_config.read_config(model.text, names=lambda: parts["text"])
    if row.capability != "text_to_text":
        raise Unsupported(f"{config.file}: text_config describes {row.name}, which does not generate text; the "
                          "decoder of a vision model must be a language model")
    size = architectures.sizes(row, read.kv, file=config.file,
                               own=lambda key: origins.key_in_config(config, key, row.name)) | read.sizes
    size |= _expert_layout(parts["text"], size)
    token = cast(int, model.kv["mpool.vision.image_token_id"])
    if not 0 <= token < size["V"]:
        config.fail(image_token_key(config), token, f"0 to {size['V'] - 1}")
    tied = read.tied or embeds and not any(name.startswith("lm_head.") for name in parts["text"])
    _, tensors = hf_parts.weights(folder, row, size, tied, paths, hf_quantised.Quantised(parts["text"]))
    tensors += _select(model.encoder, parts["encoder"], paths) + _select(model.projector, parts["projector"], paths)
    settings, processor = model.read_settings(folder)
    tokenizer_config = folder.fields(hf_parts.TOKENIZER_CONFIG_NAME, missing_ok=True, wide_ints=True)
    hf_config.refuse_remote_code(tokenizer_config, row)
    generation = hf_parts.generation(folder, model.text, tokenizer_config, size)
    kv = {**with_prefix(read.kv, row.name, model.name),
          **with_prefix(model.encoder.kv, model.encoder.architecture, model.name),
          **model.kv, **processor, "mpool.vision.decoder": row.name}
    tensors.sort(key=lambda entry: (entry.file, entry.offset))
    return ModelDescription(
        key=key, ref=ref, capability="vision", generation=generation, vision=settings,
        spec=ModelSpec(model.name, tuple(paths), kv, tuple(tensors),
                       origins=origins.in_config(config, kv, model.name, image_processor.configuration(folder))),
        tokenizer=hf_parts.tokenizer_of(folder, tokenizer_config, False, generation.eog_token_ids, read.append_eos),
        chat_template=_chat_template(folder, tokenizer_config))


def with_prefix(kv: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return the hyper-parameters with the prefix ``old.`` of their keys replaced by ``new.``."""
    return {new + key[len(old):] if key.startswith(old + ".") else key: value for key, value in kv.items()}
