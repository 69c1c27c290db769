"""Reader of InternVL 2.5 to 3.5 as transformers stores them (https://arxiv.org/abs/2504.10479): InternViT with scaled
layers, a projector of squares of patches, and a language model. Images are cut into the tiles of a grid."""

from __future__ import annotations

from typing import Any

from ..families.reading import MAX_WIDTH, activation, check_neutral, unsupported
from ..fields import Fields, describe
from ..files import Folder
from ..spec import ImageSettings, Value, VisionSettings
from . import image_processor
from .image_networks import NetworkSpec, layer_count, read_common
from .vision_model import MAX_TILES, PROJECTOR_ACTS, VisionModel, image_token, text_of, two_layers, used_layers

ARCHITECTURE = "internvl"
#: Defaults of transformers' configuration classes for keys that ``text_config`` leaves out, by ``model_type``.
_TEXT: dict[str, dict[str, Any]] = {
    "qwen2": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768},
    "qwen3": {"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    "llama": {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
              "num_attention_heads": 32, "max_position_embeddings": 2048}}
#: Least and largest number of tiles of an image.
TILES = (1, 12)


def _read_encoder(vision: Fields, layers: Fields) -> NetworkSpec:
    """Read InternViT without pooling. ``layers``: the configuration that states the number of layers to compute."""
    network, known = read_common(vision, ARCHITECTURE, {
        "hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "image_size": 448,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu"})
    for key, usual in (("norm_type", "layer_norm"), ("use_qk_norm", False), ("use_mean_pooling", True),
                       ("use_absolute_position_embeddings", True)):
        if vision.get(key) not in (None, usual):
            unsupported(vision, key, describe(usual))
    for key in ("mpool.pooling", "mpool.normalize", "mpool.dense_count"):
        del network.kv[key]
    d, ffn = network.hidden_size, vision.int("intermediate_size", 4096, low=1, high=MAX_WIDTH)
    bias = vision.bool("attention_bias", False)
    used = used_layers(layers, layer_count(network), -1)
    check_neutral(vision, known | {"norm_type", "use_qk_norm", "use_mean_pooling", "use_absolute_position_embeddings",
                                   "attention_bias", "intermediate_size", "hidden_dropout_prob", "projection_dropout",
                                   "use_mask_token", "layer_scale_init_value"})
    network.kv |= {f"{ARCHITECTURE}.vision.feed_forward_length": ffn, f"{ARCHITECTURE}.vision.block_count": used}
    network.ignored = (r"embeddings\.mask_token", r"encoder\.layer\.\d+\..*")
    rows = 1 + (network.image_size // network.patch_size) ** 2
    network.patches("embeddings.patch_embeddings.projection", bias=True)
    network.reshaped("embeddings.cls_token", "v.class_embd", (1, 1, d), (d,))
    network.reshaped("embeddings.position_embeddings", "v.position_embd.weight", (1, rows, d), (rows, d))
    for i in range(used):
        source, target = f"encoder.layer.{i}", f"v.blk.{i}"
        for name in "qkv":
            network.linear(f"{source}.attention.{name}_proj", f"{target}.attn_{name}", d, d, bias)
        network.linear(f"{source}.attention.projection_layer", f"{target}.attn_out", d, d)
        network.norm(f"{source}.layernorm_before", f"{target}.ln1")
        network.norm(f"{source}.layernorm_after", f"{target}.ln2")
        network.add(f"{source}.lambda_1", f"{target}.ls1.weight", d)
        network.add(f"{source}.lambda_2", f"{target}.ls2.weight", d)
        network.linear(f"{source}.mlp.fc1", f"{target}.ffn_up", ffn, d)
        network.linear(f"{source}.mlp.fc2", f"{target}.ffn_down", d, ffn)
    return network


def read(config: Fields) -> VisionModel:
    """Read a ``config.json`` of InternVL."""
    text, encoder = text_of(config, _TEXT, True), _read_encoder(config.section("vision_config"), config)
    ratio = config.number("downsample_ratio", 0.5, above=0.0, most=1.0)
    merge, grid = round(1 / ratio), encoder.image_size // encoder.patch_size
    if merge > 16 or merge * ratio != 1 or grid % merge:
        config.fail("downsample_ratio", ratio, f"1 divided by a divisor of the {grid} patches per side, at most 16")
    if config.str("vision_feature_select_strategy", "default") != "default":
        unsupported(config, "vision_feature_select_strategy", "default")
    width, token = text.int("hidden_size", low=1, high=MAX_WIDTH), image_token(config, 151667)
    check_neutral(config, {"text_config", "vision_config", "downsample_ratio", "vision_feature_select_strategy",
                           "vision_feature_layer", "image_token_id", "image_token_index", "image_seq_length",
                           "projector_hidden_act", "tie_word_embeddings"})
    projector = two_layers(encoder.hidden_size * merge ** 2, width, width, norm=True)
    return VisionModel(ARCHITECTURE, text, encoder, projector, {
        "mpool.vision.image_token_id": token, "mpool.vision.merge": merge,
        "mpool.vision.activation": activation(config, "projector_hidden_act", "gelu", PROJECTOR_ACTS)},
        lambda folder: _read_settings(folder, encoder, width, merge, token))


def _read_settings(folder: Folder, encoder: NetworkSpec, width: int, merge: int,
                   token: int) -> tuple[VisionSettings, dict[str, Value]]:
    """Read the image processor. As in transformers, the tiles do not depend on ``crop_to_patches``."""
    config = image_processor.config_of(folder, "GotOcr2ImageProcessor")
    image_processor.check_keys(
        config, (image_processor.READ - {"crop_size", "do_center_crop", "do_pad", "image_grid_pinpoints"})
        | {"min_patches", "max_patches"},
        {**image_processor.NEUTRAL, "crop_to_patches": None, "crop_size": (None,), "do_center_crop": (False,),
         "do_pad": (False,)})
    side = encoder.image_size
    size = config.section("size", None) or Fields({"height": 384, "width": 384}, file=config.file, at="size")
    size.only({"height", "width"})
    if (size.int("height", low=1), size.int("width", low=1)) != (side, side):
        config.fail("size", f"{size.get('width')} x {size.get('height')} pixels", f"{side} x {side} pixels")
    config.bool("do_resize", True)
    largest = config.int("max_patches", TILES[1], low=1, high=MAX_TILES)
    image = ImageSettings(hidden_size=encoder.hidden_size, output_size=width, resize=("exact", side, side),
                          resample=config.int("resample", 3, low=0, high=5), crop=None, patch_size=encoder.patch_size,
                          image_size=side, any_size=False)
    return VisionSettings(
        scheme="grid", image=image, image_token_id=token, merge=merge,
        tiles=(config.int("min_patches", TILES[0], low=1, high=largest), largest)), image_processor.read_scaling(
            config, image_processor.CLIP_MEAN, image_processor.CLIP_STD)
