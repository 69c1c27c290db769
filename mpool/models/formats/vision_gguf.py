"""Reader of vision models stored as a pair of GGUF files: a language model and a projector file.

llama.cpp calls the projector file mmproj. It is in the same folder, has the ``general.architecture`` clip, and contains
the image encoder and the projector.

The projector type identifies the family: ``mlp`` is LLaVA (LLaVA 1.6 if the file has sizes for tiling), ``idefics3`` is
Idefics3 or SmolVLM, ``gemma3`` is Gemma 3, ``gemma4v`` and ``gemma4uv`` are Gemma 4, ``lfm2`` is LFM2-VL, ``pixtral``
is Pixtral or Mistral 3, ``internvl`` is InternVL, ``qwen2vl_merger``, ``qwen2.5vl_merger`` and ``qwen3vl_merger`` are
Qwen's. Projector files do not describe the image preprocessing, so this module uses that of the family.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from ...errors import FormatError, Unsupported
from .. import origins
from ..architectures import missing
from ..families.reading import MAX_LAYERS, MAX_WIDTH
from ..fields import Fields, describe
from ..json_strict import shorten
from ..spec import ImageSettings, ModelDescription, ModelSpec, TensorEntry, Value, VideoSettings, VisionSettings
from . import gguf_tables, internvl, lfm2_vl, ollama_gguf, pixtral
from .image_processor import GEMMA4_ROWS, centred, padding_color
from .vision_folder import with_prefix
from .vision_model import MAX_PATCHES, MAX_TILES

_BICUBIC, _BILINEAR, _LANCZOS = 3, 2, 1
_FAMILIES = {"mlp": "llava", "idefics3": "idefics3", "qwen2vl_merger": "qwen2_vl", "qwen2.5vl_merger": "qwen2_5_vl",
             "qwen3vl_merger": "qwen3_vl", "gemma3": "gemma3_vision", "gemma4v": "gemma4_vision",
             "gemma4uv": "gemma4_unified_vision", "lfm2": "lfm2_vl", "pixtral": "pixtral", "internvl": "internvl"}
_BLOCK = re.compile(r"v\.blk\.(\d+)\.((?:attn_(?:q|k|v|qkv|out)|ffn_(?:up|down)|ln[12])\.(?:weight|bias)"
                    r"|ls[12]\.weight)")
_QWEN_BLOCK = re.compile(r"v\.blk\.(\d+)\.((?:attn_(?:q|k|v|out)|ffn_(?:gate|up|down))\.(?:weight|bias)"
                         r"|ln[12]\.weight)")
_GEMMA4_BLOCK = re.compile(r"v\.blk\.(\d+)\.((?:attn_(?:q|k|v|out)|ffn_(?:gate|up|down))"
                           r"\.(?:weight|(?:input|output)_(?:min|max))"
                           r"|(?:ln[12]|attn_[qk]_norm|(?:attn|ffn)_post_norm)\.weight)")
#: Gemma 4: tensor name in the file -> in the core.
_GEMMA4_TENSORS = {
    "gemma4_vision": {name: name for name in ("v.patch_embd.weight", "v.position_embd.weight", "v.std_bias",
                                              "v.std_scale")} | {"mm.input_projection.weight": "mm.0.weight"},
    "gemma4_unified_vision": {name: name for name in (
        "v.patch_embd.weight", "v.patch_embd.bias", "v.position_embd.weight",
        *(f"v.patch_norm.{i}.{end}" for i in (1, 2) for end in ("weight", "bias")))} | {
            "mm.input_projection.weight": "mm.0.weight", "v.patch_norm.3.weight": "v.pre_ln.weight",
            "v.patch_norm.3.bias": "v.pre_ln.bias"}}
#: Tensor name in the file -> in the core.
_ALIASES = {"mm.model.fc.weight": "mm.0.weight", "mm.0.weight": "mm.0.weight", "mm.0.bias": "mm.0.bias",
            "mm.2.weight": "mm.2.weight", "mm.2.bias": "mm.2.bias", "model.image_newline": "mm.image_newline"}
_ENDS = ("weight", "bias")
_LAYERS = {f"mm.{old}.{end}": f"mm.{new}.{end}" for old, new in ((1, 0), (2, 2)) for end in _ENDS}
#: Tensor name in the file -> in the core, for families whose projector has other names. Empty: the core does not read
#: the tensor; the row of Pixtral's token between lines is also in the language model.
_PROJECTORS = {
    "lfm2_vl": {**_LAYERS, **{f"mm.input_norm.{end}": f"mm.input_norm.{end}" for end in _ENDS}},
    "pixtral": {**_LAYERS, "mm.input_norm.weight": "v.post_ln.weight", "v.token_embd.img_break": "",
                "mm.patch_merger.weight": "mm.patch_merger.weight"},
    "internvl": {f"mm.model.mlp.{old}.{end}": f"mm.{new}.{end}" for old, new in ((0, "input_norm"), (1, 0), (3, 2))
                 for end in _ENDS},
}
#: Tensors of the projector of Gemma 3.
_GEMMA_PROJECTOR = ("mm.input_projection.weight", "mm.soft_emb_norm.weight")
#: Texts of image tokens other than ``<image>``.
_IMAGE_TOKENS = {**dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|image_pad|>"),
                 "gemma3_vision": "<image_soft_token>", "pixtral": "[IMG]", "internvl": "<IMG_CONTEXT>",
                 **dict.fromkeys(_GEMMA4_TENSORS, "<|image|>")}
#: Further tensors that a file must have; other families: the norm after the last layer.
_REQUIRED = {"llava": ("v.class_embd", "mm.2.weight"), "lfm2_vl": ("v.post_ln.weight", "mm.2.weight"),
             "pixtral": ("v.pre_ln.weight", "mm.2.weight"), "internvl": ("v.class_embd", "mm.2.weight",
                                                                          "mm.input_norm.weight"),
             **dict.fromkeys(_GEMMA4_TENSORS, ())}
_TILED = ("llava", "idefics3", "gemma3_vision")
_TENSORS = ("v.class_embd", "v.patch_embd.weight", "v.patch_embd.bias", "v.position_embd.weight", "v.pre_ln.weight",
            "v.pre_ln.bias", "v.post_ln.weight", "v.post_ln.bias")
#: Qwen's encoders accept videos: they have two patch matrices, for two consecutive frames. An image counts as both.
_QWEN_TENSORS = {
    "qwen2_vl": ("v.patch_embd.weight", "v.patch_embd.weight.1", "v.post_ln.weight", "v.post_ln.bias"),
    "qwen2_5_vl": ("v.patch_embd.weight", "v.patch_embd.weight.1", "v.post_ln.weight"),
    "qwen3_vl": ("v.patch_embd.weight", "v.patch_embd.weight.1", "v.patch_embd.bias", "v.position_embd.weight",
                 "v.post_ln.weight", "v.post_ln.bias"),
}
#: Architectures of mpool's decoders -> names of those of Qwen's vision models in GGUF files.
_QWEN_DECODERS = {"qwen2": "qwen2vl", "qwen3": "qwen3vl", "qwen3moe": "qwen3vlmoe"}
#: Default limits of the number of pixels of an image.
_QWEN_PIXELS = {"qwen2_vl": (3136, 12845056), "qwen2_5_vl": (3136, 12845056), "qwen3_vl": (65536, 16777216)}

#: Chat template for LLaVA 1.5 files without one: the format of its training, Vicuna's without the system message.
LLAVA_TEMPLATE = ("{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + ' ' }}"
                  "{% elif message['role'] == 'assistant' %}{{ 'ASSISTANT: ' + message['content'] + eos_token }}"
                  "{% else %}{{ 'USER: ' + message['content'] + ' ' }}{% endif %}{% endfor %}"
                  "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}")


def describe_pair(text: ModelDescription, projector: str) -> ModelDescription:
    """Describe a vision model stored as a pair of GGUF files.

    Args:
        text: the language model.
        projector: file of the image encoder and the projector.

    Raises:
        FormatError: a file is malformed, or the files are of different models.
        Unsupported: ``text`` is not a language model, or mpool does not support the projector's type.
    """
    if text.capability != "text_to_text" or text.generation is None or text.tokenizer is None:
        raise Unsupported(f"{text.spec.files[0]} has the capability {text.capability}, but the projector file in its "
                          "folder needs a language model", hint="Pass the path of the file instead of the folder")
    raw, tensors, files = gguf_tables.read_gguf(projector)
    return _joined(text, raw, tensors, files, projector)


def with_images(text: ModelDescription, path: str) -> ModelDescription:
    """Return the vision model in a file of Ollama's converter that also contains an image encoder, or ``text`` if mpool
    does not read that encoder.

    Args:
        text: the language model of the file.
        path: the file.

    Raises:
        FormatError, Unsupported: the image encoder is malformed, or does not fit the language model.
    """
    raw, tensors, _ = gguf_tables.read_gguf(path)
    images = ollama_gguf.image_tables(raw, tensors)
    return text if images is None else _joined(text, *images, (), path, ollama_gguf.own_keys(raw))


def _joined(text: ModelDescription, raw: Mapping[str, Any], tensors: tuple[TensorEntry, ...], files: tuple[str, ...],
            projector: str, own: Callable[[str], str] | None = None) -> ModelDescription:
    """Return the vision model of a language model and the tables of a projector file.

    Args:
        text: the language model.
        raw, tensors: keys and tensors of the projector file.
        files: paths of its parts; empty: the tensors are in the files of the language model.
        projector: path of the file, for errors.
        own: function that returns the file's name of a key, for errors; None: the file has llama.cpp's names.
    """
    table = Fields(raw, file=projector, own=own)
    if table.str("general.architecture") != "clip":
        table.fail("general.architecture", table.get("general.architecture"),
                   "clip, the architecture of projector files")
    stated = next((key for key in ("clip.projector_type", "clip.vision.projector_type") if key in table),
                  "clip.projector_type")
    kind = table.str(stated, "mlp")
    name = _FAMILIES.get(kind)
    if name is None:
        raise Unsupported(f"{projector}: {stated} is {describe(kind)}; mpool supports "
                          + ", ".join(sorted(_FAMILIES)),
                          hint="Use the model's transformers folder; for text only, pass the path "
                               + text.spec.files[0])
    qwen = name in _QWEN_TENSORS
    if name in _GEMMA4_TENSORS:
        kv, settings = _gemma4_settings(table, name, tensors, text)
    else:
        kv, settings = (_qwen_settings if qwen else _vit_settings if name in _TILED else _more_settings)(table, name)
    if name == "qwen2_vl":  # llama.cpp's converter stores another number under this key
        kv[f"{name}.vision.feed_forward_length"] = _feed_forward(tensors, kv[f"{name}.vision.embedding_length"])
    projector_tensors = _tensors(tensors, kv, name, projector)
    _check_width(projector_tensors, text, projector)
    if bool(settings.grid) != any(entry.name == "mm.image_newline" for entry in projector_tensors):
        table.fail("clip.vision.image_grid_pinpoints", describe(table.get("clip.vision.image_grid_pinpoints")),
                   "sizes if the file has the tensor model.image_newline, else none")
    token = _image_token(text, _IMAGE_TOKENS.get(name, "<image>"))
    mark = _image_token(text, "<start_of_image>") if name == "gemma3_vision" else None
    if kind == "mlp" and not settings.grid and text.chat_template is None:
        text = replace(text, chat_template=LLAVA_TEMPLATE)
    kv |= {"mpool.vision.decoder": text.spec.architecture, "mpool.vision.image_token_id": token}
    if qwen:
        kv |= {"mpool.rope_sections": _rope_sections(text), "mpool.rope_interleaved": name == "qwen3_vl"}
    first = len(text.spec.files) if files else 0
    spec = ModelSpec(name, (*text.spec.files, *map(os.path.abspath, files)),
                     {**with_prefix(text.spec.kv, text.spec.architecture, name), **kv},
                     (*text.spec.tensors, *(replace(entry, file=first + entry.file) for entry in projector_tensors)),
                     origins={**with_prefix(text.spec.origins, text.spec.architecture, name),
                              **origins.in_projector(projector, kv, name, table.name)})
    settings = replace(settings, image_token_id=token, mark_token_id=None if mark == -1 else mark)
    marks = [_image_token(text, f"<|{part}|>") for part in ("video_pad", "vision_start", "vision_end")]
    if name == "qwen3_vl" and min(marks) >= 0:  # the files have no settings for videos; transformers' defaults
        settings = replace(settings, video=VideoSettings(marks[0], (marks[1], marks[2]), 2, (1 << 17, 768 << 10), None,
                                                         3))
    elif name in ("qwen2_vl", "qwen2_5_vl") and marks[0] >= 0:  # and two positions per second, as in published models
        settings = replace(settings, video=VideoSettings(marks[0], None, 2, (128 * 28 ** 2, 768 * 28 ** 2), None, 3,
                                                         2.0 if name == "qwen2_5_vl" else None))
    return replace(text, capability="vision", spec=spec, vision=settings)


def _rope_sections(text: ModelDescription) -> list[int]:
    """Return the number of component pairs of a head that each of the three positions (time, row, column) rotates."""
    arch = text.spec.architecture
    key = f"{arch}.rope.dimension_sections"
    value = text.spec.kv.get(key)
    found = [number for number in value if type(number) is int] if isinstance(value, list) else []
    if found != value or len(found) not in (3, 4) or not 1 <= min(found[:3]) <= max(found) < 1 << 31 or any(found[3:]):
        own = text.spec.origins.get(key, ("", key.replace(arch, _QWEN_DECODERS.get(arch, arch))))[1]
        raise FormatError(file=text.spec.files[0], field=own,
                          got=describe(value), allowed="three positive numbers, optionally followed by 0",
                          hint="The language model is not one of Qwen's vision models, but the projector file is")
    return found[:3]


def _read_three(table: Fields, key: str) -> list[float]:
    """Return a value for each of the colours red, green and blue."""
    value = table.list(key, limit=3)
    if len(value) != 3 or not all(type(number) in (int, float) and math.isfinite(number) for number in value):
        table.fail(key, describe(value), "three finite numbers")
    return [float(number) for number in value]


def _common_kv(table: Fields, name: str, side: int, merge: int) -> tuple[dict[str, Value], int]:
    """Return the hyper-parameters that all families share, and the hidden size of the image encoder.

    Args:
        table: keys of the projector file.
        name: the family, a row of ``csrc/models/archs.def``.
        side: side of the images that the encoder was trained on, in pixels.
        merge: side of the square of patches that the projector merges, in patches.
    """

    def size(key: str, high: int = MAX_WIDTH) -> int:
        return table.int(f"clip.vision.{key}", low=1, high=high)

    hidden = size("embedding_length")
    return {
        f"{name}.vision.block_count": size("block_count", MAX_LAYERS), f"{name}.vision.embedding_length": hidden,
        f"{name}.vision.feed_forward_length": size("feed_forward_length"),
        f"{name}.vision.attention.head_count": size("attention.head_count"),
        f"{name}.vision.attention.layer_norm_epsilon": table.number("clip.vision.attention.layer_norm_epsilon",
                                                                    above=0.0),
        f"{name}.vision.patch_size": size("patch_size", 256), f"{name}.vision.image_size": side,
        "mpool.vision.merge": merge, "mpool.vision.norm": name not in ("llava", "internvl"),
        "mpool.vision.activation": "gelu",
        "mpool.image.mean": _read_three(table, "clip.vision.image_mean"),
        "mpool.image.std": _read_three(table, "clip.vision.image_std"),
    }, hidden


def _vit_settings(table: Fields, name: str) -> tuple[dict[str, Value], VisionSettings]:
    """Return the hyper-parameters of the image encoder of LLaVA, Idefics3 or Gemma 3, and the settings of image
    preprocessing."""
    llava, gemma = name == "llava", name == "gemma3_vision"
    side = table.int("clip.vision.image_size", low=1, high=4096)
    patch = table.int("clip.vision.patch_size", low=1, high=256)
    scale = "clip.vision.projector.scale_factor"
    merge = 1 if llava else table.int(scale, 4, low=1, high=16) if gemma else table.int(scale, low=1, high=16)
    if side < patch or side // patch % merge:
        table.fail("clip.vision.image_size", side, f"at least {patch}, with a whole number of patches of {patch} "
                   f"pixels that is a multiple of {merge}")
    kv, hidden = _common_kv(table, name, side, merge)
    # For SigLIP encoders (Idefics3, Gemma 3), use_gelu means GELU's tanh approximation.
    kv["mpool.image.activation"] = "silu" if table.bool("clip.use_silu", False) else "quick_gelu" \
        if not table.bool("clip.use_gelu", False) else "gelu" if llava else "gelu_tanh"
    kv["mpool.vision.image_encoder"] = "clip" if llava else "siglip"
    grid = _tile_grid(table, side) if llava else ()
    # LLaVA 1.5 was trained on images padded to squares with the mean colour.
    square = padding_color(_read_three(table, "clip.vision.image_mean"))
    image = ImageSettings(hidden_size=hidden, output_size=hidden, resize=("exact", side, side), crop=None,
                          resample=_BICUBIC if llava else _BILINEAR if gemma else _LANCZOS, patch_size=patch,
                          image_size=side, any_size=False, pad_square=square if llava and not grid else None)
    if gemma:
        kv |= {"mpool.vision.averaged": True, "mpool.image_spans": 1}
        return kv, VisionSettings(scheme="pan", image=image, image_token_id=-1, merge=merge)
    return kv, VisionSettings(scheme="tiles" if grid else "one" if llava else "split", image=image, image_token_id=-1,
                              merge=merge, grid=grid, split=not llava,
                              longest=table.int("clip.vision.preproc_image_size", 4 * side, low=1, high=4096))


def _tile_grid(table: Fields, side: int) -> tuple[tuple[int, int], ...]:
    """Return the (height, width) pairs, in pixels, at which LLaVA 1.6 cuts an image into tiles; LLaVA 1.5 has none.

    Files store them as one list of alternating widths and heights.
    """
    merged = table.str("clip.vision.mm_patch_merge_type", "flat", choices=("flat", "spatial_unpad"))
    found = table.list("clip.vision.image_grid_pinpoints", [], of=int, limit=128)
    if merged == "flat" and not found:
        return ()
    pairs = tuple(zip(found[1::2], found[::2]))
    if merged == "flat" or not pairs or len(found) % 2 or any(
            n < 1 or n % side for n in found) or any(h * w > MAX_TILES * side ** 2 for h, w in pairs):
        table.fail("clip.vision.image_grid_pinpoints", describe(found),
                   f"alternating widths and heights, multiples of {side}, at most {MAX_TILES} tiles, together with "
                   "clip.vision.mm_patch_merge_type spatial_unpad")
    return pairs


def _feed_forward(tensors: tuple[TensorEntry, ...], hidden: Value) -> int:
    """Return the width of the feed-forward layers, which is one side of their matrices. Files differ in the order of
    both names."""
    shape = next((entry.shape for entry in tensors if entry.name == "v.blk.0.ffn_up.weight"), (0, 0))
    return shape[0] if len(shape) == 2 and shape[1] == hidden else max(shape[-1], 1)


def _qwen_settings(table: Fields, name: str) -> tuple[dict[str, Value], VisionSettings]:
    """Return the hyper-parameters of an image encoder of Qwen, and the settings of image preprocessing.

    The encoder has rotary embeddings over row and column, and images of any size. Qwen2.5-VL has window attention in
    most layers; Qwen3-VL has a table of positions, and taps.
    """
    patch = table.int("clip.vision.patch_size", low=1, high=256)
    merge = table.int("clip.vision.spatial_merge_size", 2, low=1, high=16)
    side = table.int("clip.vision.image_size", low=patch, high=256 * patch) // patch * patch if name == "qwen3_vl" \
        else 16 * merge * patch
    kv, hidden = _common_kv(table, name, side, merge)
    silu, gelu = table.bool("clip.use_silu", False), table.bool("clip.use_gelu", False)
    if silu != (name == "qwen2_5_vl"):
        table.fail("clip.use_silu", str(silu).lower(), str(not silu).lower())
    layers = kv[f"{name}.vision.block_count"]
    assert isinstance(layers, int)
    kv |= {"mpool.image.activation": "silu" if silu else "gelu_tanh" if gelu else "quick_gelu",
           "mpool.image.frames": 2, "mpool.image.rope_base": 10000.0}
    if name == "qwen2_5_vl":
        pattern = table.int("clip.vision.n_wa_pattern", low=1, high=MAX_LAYERS)
        window = table.int("clip.vision.window_size", 112, low=merge * patch, high=1 << 14) // merge // patch
        kv |= {"mpool.image.gated": True, "mpool.image.window": window,
               "mpool.image.window_layers": [int((i + 1) % pattern != 0) for i in range(layers)]}
    if name == "qwen3_vl":
        taps = table.list("clip.vision.is_deepstack_layers", [False] * layers, of=bool, limit=MAX_LAYERS)
        if len(taps) != layers:
            table.fail("clip.vision.is_deepstack_layers", f"{len(taps)} values", f"{layers} values, one per layer")
        kv["mpool.vision.tap_layers"] = [int(tap) for tap in taps]
    least, most = _QWEN_PIXELS[name]
    max_pixels = min(table.int("clip.vision.image_max_pixels", most, low=1), MAX_PATCHES * patch ** 2)
    min_pixels = min(table.int("clip.vision.image_min_pixels", least, low=1), max_pixels)
    image = ImageSettings(hidden_size=hidden, output_size=hidden, resize=None, crop=None, resample=_BICUBIC,
                          patch_size=patch, image_size=side, any_size=True)
    return kv, VisionSettings(scheme="any", image=image, image_token_id=-1, merge=merge,
                              pixels=(min_pixels, max_pixels))


def _more_settings(table: Fields, name: str) -> tuple[dict[str, Value], VisionSettings]:
    """Return the hyper-parameters of the image encoder of LFM2-VL, Pixtral or InternVL, and the settings of image
    preprocessing. Files without the key of the merge have one row for each patch."""
    patch = table.int("clip.vision.patch_size", low=1, high=256)
    side = table.int("clip.vision.image_size", low=patch, high=min(256 * patch, 4096))
    lines, grid = name == "pixtral", name == "internvl"
    merge = table.int("clip.vision.spatial_merge_size" if lines else "clip.vision.projector.scale_factor",
                      1 if lines else 2, low=1, high=16)
    if grid and side // patch % merge:
        table.fail("clip.vision.projector.scale_factor", merge, f"a divisor of the {side // patch} patches per side")
    kv, hidden = _common_kv(table, name, side // patch * patch, merge)
    silu, gelu = table.bool("clip.use_silu", False), table.bool("clip.use_gelu", False)
    kv["mpool.image.activation"] = "silu" if silu else "quick_gelu" if not gelu else "gelu_tanh" if name == "lfm2_vl" \
        else "gelu"
    image = ImageSettings(hidden_size=hidden, output_size=hidden, resize=("exact", side, side), crop=None,
                          resample=_BICUBIC, patch_size=patch, image_size=side, any_size=not grid)
    if lines:  # files have the rotary pairs of llama.cpp, which stand side by side, except for Ollama's own
        kv |= {"mpool.image.gated": True, "mpool.image.frames": 1,
               "mpool.image.rope_neox": table.bool(ollama_gguf.ROPE_HALVES, False),
               "mpool.image.rope_base": table.number("clip.rope.freq_base", 10000.0, above=0.0)}
        longest = pixtral.longest_side(side, patch)
        kv["mpool.vision.patches"] = pixtral.most_patches(longest, patch, merge)
        return kv, VisionSettings(scheme="lines", image=replace(image, resize=None), image_token_id=-1, merge=merge,
                                  longest=longest)
    if grid:
        most = table.int("clip.vision.preproc_max_tiles", internvl.TILES[1], low=1, high=MAX_TILES)
        least = table.int("clip.vision.preproc_min_tiles", internvl.TILES[0], low=1, high=most)
        return kv, VisionSettings(scheme="grid", image=image, image_token_id=-1, merge=merge, tiles=(least, most))
    unit = patch * merge
    tile = max(lfm2_vl.SIDE // unit, 1) * unit
    kv["mpool.vision.patches"] = lfm2_vl.most_patches(patch, merge, tile, lfm2_vl.TOKENS[1])
    return kv, VisionSettings(
        scheme="marked", image=replace(image, resize=("exact", tile, tile), resample=_BILINEAR), image_token_id=-1,
        merge=merge, pixels=(lfm2_vl.TOKENS[0] * unit ** 2, lfm2_vl.TOKENS[1] * unit ** 2), tiles=lfm2_vl.TILES,
        excess=lfm2_vl.EXCESS)


def _gemma4_settings(table: Fields, name: str, tensors: tuple[TensorEntry, ...],
                     text: ModelDescription) -> tuple[dict[str, Value], VisionSettings]:
    """Return the hyper-parameters of an image encoder of Gemma 4, and the settings of image preprocessing.

    Files do not say that GELU is the tanh approximation. The rows of an image see each other except in the small
    models, which are those with inputs per layer.
    """
    unified = name == "gemma4_unified_vision"
    patch, merge = table.int("clip.vision.patch_size", low=1, high=256), table.int(
        "clip.vision.projector.scale_factor", 3, low=1, high=16)
    if unified:
        if patch * merge > 256:
            table.fail("clip.vision.patch_size", patch, f"at most {256 // merge}")
        patch, merge = patch * merge, 1
        hidden = table.int("clip.vision.embedding_length", low=1, high=MAX_WIDTH)
        kv: dict[str, Value] = {
            f"{name}.vision.block_count": 0, f"{name}.vision.embedding_length": hidden,
            f"{name}.vision.feed_forward_length": 1, f"{name}.vision.attention.head_count": hidden,
            f"{name}.vision.attention.layer_norm_epsilon": 1e-5, f"{name}.vision.patch_size": patch,
            f"{name}.vision.image_size": 16 * patch, "mpool.vision.merge": 1,
            "mpool.image.mean": _read_three(table, "clip.vision.image_mean"),
            "mpool.image.std": _read_three(table, "clip.vision.image_std")}
    else:
        kv, hidden = _common_kv(table, name, 16 * merge * patch, merge)
        kv = centred(kv) | {"mpool.image.gated": True, "mpool.image.frames": 1, "mpool.image.rope_base": 100.0,
                            "mpool.image.activation": "silu" if table.bool("clip.use_silu", False) else "gelu_tanh",
                            "mpool.vision.averaged": True, "mpool.vision.mean_scale": math.sqrt(hidden)}
    shape = next((entry.shape for entry in tensors if entry.name == "v.position_embd.weight"), ())
    rows, windowed = 280, text.spec.kv.get("mpool.window_layers")
    small = bool(text.spec.kv.get(f"{text.spec.architecture}.embedding_length_per_layer_input"))
    kv |= {"mpool.image.places": shape[1] if len(shape) == 3 else 1, "mpool.vision.norm": False,
           "mpool.vision.norm_epsilon": table.number("clip.vision.attention.layer_norm_epsilon", above=0.0),
           "mpool.vision.patches": min(rows * merge ** 2, MAX_PATCHES),
           "mpool.image_spans": windowed if isinstance(windowed, list) and not small else 0}
    image = ImageSettings(hidden_size=hidden, output_size=hidden, resize=None, crop=None, resample=_BICUBIC,
                          patch_size=patch, image_size=16 * patch, any_size=True)
    return kv, VisionSettings(scheme="fit", image=image, image_token_id=-1, merge=merge, rows=rows,
                              rows_allowed=GEMMA4_ROWS)


def _split(entry: TensorEntry, block: str, end: str) -> list[TensorEntry]:
    """Return the queries, keys and values of a joint tensor of a layer."""
    size, rows = entry.nbytes // 3, entry.shape[0] // 3
    return [replace(entry, name=f"{block}.attn_{name}.{end}", shape=(rows, *entry.shape[1:]),
                    offset=entry.offset + i * size, nbytes=size) for i, name in enumerate("qkv")]


def _tensors(tensors: tuple[TensorEntry, ...], kv: dict[str, Value], name: str, file: str) -> list[TensorEntry]:
    """Return the tensors of the image encoder and the projector under the core's names.

    In old files, the names of the two matrices of the feed-forward layer are swapped.

    Raises:
        FormatError: a tensor is missing or unknown.
    """
    hidden, ffn = kv[f"{name}.vision.embedding_length"], kv[f"{name}.vision.feed_forward_length"]
    layers = kv[f"{name}.vision.block_count"]
    assert isinstance(layers, int)
    own, gemma4 = _QWEN_TENSORS.get(name), _GEMMA4_TENSORS.get(name, {})
    pattern, other_names = _GEMMA4_BLOCK if gemma4 else _QWEN_BLOCK if name in ("qwen2_5_vl", "pixtral") else _BLOCK, \
        () if gemma4 else own or _TENSORS
    taps = kv.get("mpool.vision.tap_layers")
    deep = [f"v.deepstack.{i}.{part}.{end}" for i, tap in enumerate(taps if isinstance(taps, list) else ()) if tap
            for part in ("norm", "fc1", "fc2") for end in ("weight", "bias")]
    by_name = {entry.name: entry for entry in tensors}
    up = by_name.get("v.blk.0.ffn_up.weight")
    swapped = up is not None and up.shape == (hidden, ffn) and hidden != ffn
    swap = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"} if swapped else {}
    found: dict[str, TensorEntry] = {}
    for entry in tensors:
        block = pattern.fullmatch(entry.name)
        if block is not None and int(block[1]) < layers:
            part, _, end = block[2].partition(".")
            if part == "attn_qkv" and entry.shape[0] % 3 == 0:
                found |= {each.name: each for each in _split(entry, f"v.blk.{block[1]}", end)}
                continue
            target = f"v.blk.{block[1]}.{swap.get(part, part)}.{end}"
        elif block is not None or entry.name in other_names or entry.name in deep:
            target = "" if block is not None else entry.name
        elif name in _PROJECTORS and entry.name in _PROJECTORS[name]:
            target = _PROJECTORS[name][entry.name]
        elif gemma4 and (entry.name in gemma4 or entry.name.startswith(("a.", "mm.a."))):
            target = gemma4.get(entry.name, "")  # the other ones belong to the audio encoder
            if target == "v.position_embd.weight" and len(entry.shape) == 3:
                entry = replace(entry, shape=(entry.shape[0] * entry.shape[1], entry.shape[2]))
        elif not gemma4 and name != "gemma3_vision" and name not in _PROJECTORS and entry.name in _ALIASES:
            target = _ALIASES[entry.name]
        elif name == "gemma3_vision" and entry.name in _GEMMA_PROJECTOR:
            target = entry.name
        else:
            raise FormatError(file=file, field="tensors", got=f"{shorten(entry.name)}, which the model does not have",
                              allowed="the tensors of the architecture")
        if target.startswith("v.patch_embd.weight") and len(entry.shape) == 4:
            entry = replace(entry, shape=(entry.shape[0], entry.shape[1] * entry.shape[2] * entry.shape[3]))
        # LLaVA does not use the last layer, nor the norm after it.
        if target and not (name == "llava" and target.startswith("v.post_ln")):
            found[target] = replace(entry, name=target)
    required = ["v.patch_embd.weight", *(_GEMMA_PROJECTOR if name == "gemma3_vision" else ("mm.0.weight",)), *deep]
    required += ("mm.2.weight", *own) if own else () if name == "pixtral" else ("v.position_embd.weight",)
    required += _REQUIRED.get(name, ("v.post_ln.weight",))
    if name == "pixtral":
        merges = "mm.patch_merger.weight" in found
        kv["mpool.vision.norm"] = merges
        required += ("v.post_ln.weight",) if merges else ()
    patches = found.get("v.patch_embd.weight")
    if own and patches is not None and patches.shape[1:] == (6 * cast(int, kv[f"{name}.vision.patch_size"]) ** 2,):
        required.remove("v.patch_embd.weight.1")  # both matrices are one
    absent = [name for name in required if name not in found]
    if absent:
        raise missing(list(dict.fromkeys(absent)), file=file)
    return list(found.values())


def _check_width(tensors: list[TensorEntry], text: ModelDescription, file: str) -> None:
    """Raise FormatError unless the projector's output has the hidden size of the language model."""
    by_name = {entry.name: entry for entry in tensors}
    last = next(by_name[name] for name in ("mm.2.weight", "mm.0.weight", "mm.input_projection.weight")
                if name in by_name)
    width = text.spec.kv[f"{text.spec.architecture}.embedding_length"]
    if last.shape[-1 if last.name == "mm.input_projection.weight" else 0] != width:
        raise FormatError(file=file, offset=last.offset, field=f"shape of {last.name}", got=list(last.shape),
                          allowed=f"{width} outputs, the hidden size of {text.spec.files[0]}",
                          hint="The two files are of different models")


def _image_token(text: ModelDescription, name: str) -> int:
    """Return the id of the image placeholder token, or -1 if the vocabulary has none.

    For -1, the positions of images in the prompt are tracked without a token.
    """
    assert text.tokenizer is not None and text.tokenizer.gguf is not None
    keys: Mapping[str, Any] = text.tokenizer.gguf
    tokens = keys["tokenizer.ggml.tokens"]
    return int(tokens.index(name)) if name in tokens else -1
