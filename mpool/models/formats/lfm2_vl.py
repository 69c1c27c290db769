"""Reader of LFM2-VL (https://arxiv.org/abs/2511.23404): SigLIP 2 with images of any size, a projector of squares of
patches, and LFM2 as decoder. Large images are cut into tiles."""

from __future__ import annotations

from math import isqrt
from typing import Any

from ..families.reading import MAX_WIDTH, activation, check_neutral, unsupported
from ..fields import Fields
from ..files import Folder
from ..spec import ImageSettings, Value, VisionSettings
from . import image_processor
from .image_networks import NetworkSpec, add_layer, layer_count, read_common
from .vision_model import MAX_PATCHES, MAX_TILES, PROJECTOR_ACTS, VisionModel, image_token, text_of, two_layers

ARCHITECTURE = "lfm2_vl"
#: Defaults of transformers' configuration class for keys that ``text_config`` leaves out.
_TEXT: dict[str, dict[str, Any]] = {
    "lfm2": {"vocab_size": 65536, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 32,
             "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 128000}}
#: Least and largest number of tiles; least and largest number of embeddings of an image; how many times the largest
#: number an image must exceed to be cut into tiles; side of a tile in pixels.
TILES, TOKENS, EXCESS, SIDE = (2, 10), (64, 256), 2.0, 512


def _read_encoder(vision: Fields) -> NetworkSpec:
    """Read SigLIP 2 with images of any size (https://arxiv.org/abs/2502.14786). A line of the first matrix has the
    channels of a pixel side by side."""
    kind = vision.str("model_type", "siglip2_vision_model", choices=("siglip2_vision_model",))
    count = vision.int("num_patches", 256, low=1, high=1 << 16)
    side = isqrt(count)
    if side * side != count:
        vision.fail("num_patches", count, "a square number")
    patch = vision.int("patch_size", 16, low=1, high=256)
    given = Fields({**vision.values, "image_size": side * patch, "model_type": kind}, file=vision.file, at=vision.at)
    network, known = read_common(given, ARCHITECTURE, {
        "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 16, "image_size": 256,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"})
    for key in ("mpool.pooling", "mpool.normalize", "mpool.dense_count"):
        del network.kv[key]
    d, ffn = network.hidden_size, vision.int("intermediate_size", 3072, low=1, high=MAX_WIDTH)
    check_neutral(vision, known | {"num_patches", "intermediate_size", "vision_use_head", "dropout"})
    network.kv |= {f"{ARCHITECTURE}.vision.feed_forward_length": ffn, "mpool.image.channels_last": True}
    network.any_size = True
    network.ignored = (r"head\..*",)
    network.linear("embeddings.patch_embedding", "v.patch_embd", d, 3 * patch * patch)
    network.add("embeddings.position_embedding.weight", "v.position_embd.weight", count, d)
    network.norm("post_layernorm", "v.post_ln")
    for i in range(layer_count(network)):
        add_layer(network, f"encoder.layers.{i}", f"v.blk.{i}", ffn, ("attn_out", "ln1", "ln2"))
    return network


def read(config: Fields) -> VisionModel:
    """Read a ``config.json`` of LFM2-VL."""
    text = text_of(config, _TEXT, config.bool("tie_embedding", True))
    encoder = _read_encoder(config.section("vision_config"))
    if config.get("vision_feature_layer") not in (None, -1):
        unsupported(config, "vision_feature_layer", -1)
    merge = config.int("downsample_factor", 2, low=1, high=16)
    width = text.int("hidden_size", low=1, high=MAX_WIDTH)
    inner = config.int("projector_hidden_size", 2560, low=1, high=MAX_WIDTH)
    token = image_token(config, 396)
    check_neutral(config, {"text_config", "vision_config", "vision_feature_layer", "downsample_factor",
                           "image_token_id", "image_token_index", "projector_hidden_act", "projector_hidden_size",
                           "projector_bias", "projector_use_layernorm", "tie_word_embeddings", "tie_embedding",
                           "eos_token_id", "bos_token_id"})
    projector = two_layers(encoder.hidden_size * merge ** 2, inner, width, bias=config.bool("projector_bias", True),
                           norm=config.bool("projector_use_layernorm", True))
    return VisionModel(ARCHITECTURE, text, encoder, projector, {
        "mpool.vision.image_token_id": token, "mpool.vision.merge": merge, "mpool.vision.norm": True,
        "mpool.vision.activation": activation(config, "projector_hidden_act", "gelu", PROJECTOR_ACTS)},
        lambda folder: _read_settings(folder, encoder, width, merge, token))


def _read_settings(folder: Folder, encoder: NetworkSpec, width: int, merge: int,
                   token: int) -> tuple[VisionSettings, dict[str, Value]]:
    """Read the image processor. As in transformers, ``size`` and ``do_resize`` have no effect."""
    config = image_processor.config_of(folder, "Lfm2VlImageProcessor")
    image_processor.check_keys(
        config, (image_processor.READ - {"crop_size", "do_center_crop", "image_grid_pinpoints"})
        | {"downsample_factor", "do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens",
           "max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance"},
        {**image_processor.NEUTRAL, "crop_size": (None,), "do_center_crop": (False,), "return_row_col_info": None,
         "max_num_patches": None})
    for key, default, wanted in (("downsample_factor", 2, merge), ("encoder_patch_size", 16, encoder.patch_size)):
        if config.int(key, default) != wanted:
            config.fail(key, config.get(key, default), f"{wanted}, as in config.json")
    unit = encoder.patch_size * merge
    side = config.int("tile_size", SIDE, low=1, high=image_processor.MAX_SIDE)
    if side % unit or (side // encoder.patch_size) ** 2 > MAX_PATCHES:
        config.fail("tile_size", side, f"a multiple of {unit}, the side of {merge} x {merge} patches, of at most "
                                       f"{MAX_PATCHES:,} patches")
    most = config.int("max_image_tokens", TOKENS[1], low=1, high=MAX_PATCHES // merge ** 2)
    least = config.int("min_image_tokens", TOKENS[0], low=1, high=most)
    largest = config.int("max_tiles", TILES[1], low=1, high=MAX_TILES)
    tiles = (config.int("min_tiles", TILES[0], low=1, high=largest), largest) \
        if config.bool("do_image_splitting", True) else None
    resample = config.int("resample", 2, low=0, high=5)
    image = ImageSettings(hidden_size=encoder.hidden_size, output_size=width, resize=("exact", side, side),
                          resample=resample, crop=None, patch_size=encoder.patch_size, image_size=encoder.image_size,
                          any_size=True)
    return VisionSettings(
        scheme="marked", image=image, image_token_id=token, merge=merge, pixels=(least * unit ** 2, most * unit ** 2),
        tiles=tiles, excess=config.number("max_pixels_tolerance", EXCESS, above=0.0),
        thumbnail=config.bool("use_thumbnail", True)), {
            **image_processor.read_scaling(config, image_processor.HALVES, image_processor.HALVES),
            "mpool.vision.patches": most_patches(encoder.patch_size, merge, side if tiles else 0, most)}


def most_patches(patch: int, merge: int, side: int, most: int) -> int:
    """Return the largest number of patches of a tile, for the estimate of memory. Narrow images may have more.

    Args:
        patch: side of a patch in pixels.
        merge: side of the squares of patches that are merged, in patches.
        side: side of a tile in pixels; 0: images have no tiles.
        most: largest number of embeddings of an image.
    """
    return min(max((side // patch) ** 2, most * merge ** 2), MAX_PATCHES)
