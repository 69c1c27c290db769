"""Reader of Pixtral 12B (https://arxiv.org/abs/2410.07073), Mistral Small 3.1 and 3.2, and Ministral 3: an image
encoder with rotary positions by line and column, for images of any size. Mistral 3 merges squares of patches."""

from __future__ import annotations

from math import isqrt

from ...errors import Unsupported
from ..families.mistral import TEXT_DEFAULTS
from ..families.reading import MAX_LAYERS, MAX_WIDTH, activation, check_neutral, unsupported
from ..fields import Fields, describe
from ..files import Folder
from ..spec import ImageSettings, Value, VisionSettings
from . import image_processor
from .image_networks import ACTIVATIONS, NetworkSpec, square_side
from .vision_model import MAX_PATCHES, PROJECTOR_ACTS, VisionModel, image_token, text_of, two_layers, used_layers

ARCHITECTURE = "pixtral"
#: Epsilon of all norms of the image encoder; no file states it.
_EPSILON = 1e-5


def _rope_base(vision: Fields) -> float:
    rope = vision.section("rope_parameters", None)
    if rope is None:
        return vision.number("rope_theta", 10000.0, above=0.0)
    rope.only({"rope_theta", "rope_type"})
    rope.str("rope_type", "axial", choices=("axial", "default"))
    return rope.number("rope_theta", 10000.0, above=0.0)


def _read_encoder(vision: Fields, layers: Fields, default: int, merge: int) -> NetworkSpec:
    """Read the image encoder.

    Args:
        vision: section ``vision_config`` of ``config.json``.
        layers: the configuration that states the number of layers to compute.
        default: default of ``vision_feature_layer``.
        merge: side of the squares of patches that are merged, in patches.
    """
    vision.str("model_type", "pixtral", choices=("pixtral",))
    d, heads = (vision.int(key, usual, low=1, high=MAX_WIDTH)
                for key, usual in (("hidden_size", 1024), ("num_attention_heads", 16)))
    if d % heads or d // heads % 4:
        vision.fail("num_attention_heads", heads, f"a divisor of hidden_size, {d}, such that the size of a head is "
                                                  "divisible by 4")
    if vision.int("head_dim", d // heads) != d // heads:
        unsupported(vision, "head_dim", d // heads)
    if vision.int("num_channels", 3) != 3:
        unsupported(vision, "num_channels", 3)
    ffn = vision.int("intermediate_size", 4096, low=1, high=MAX_WIDTH)
    patch, image = square_side(vision, "patch_size", 16), square_side(vision, "image_size", 1024)
    if not patch <= image <= 256 * patch:
        vision.fail("image_size", image, f"{patch} to {256 * patch}: 1 to 256 patches per side")
    used = used_layers(layers, vision.int("num_hidden_layers", 24, low=1, high=MAX_LAYERS), default)
    check_neutral(vision, {"hidden_size", "num_attention_heads", "head_dim", "num_channels", "intermediate_size",
                           "patch_size", "image_size", "num_hidden_layers", "hidden_act", "rope_parameters",
                           "rope_theta", "vocab_size"})
    network = NetworkSpec(ARCHITECTURE, {
        f"{ARCHITECTURE}.vision.block_count": used, f"{ARCHITECTURE}.vision.embedding_length": d,
        f"{ARCHITECTURE}.vision.attention.head_count": heads, f"{ARCHITECTURE}.vision.feed_forward_length": ffn,
        f"{ARCHITECTURE}.vision.attention.layer_norm_epsilon": _EPSILON, f"{ARCHITECTURE}.vision.patch_size": patch,
        f"{ARCHITECTURE}.vision.image_size": image, "mpool.image.gated": True, "mpool.image.frames": 1,
        "mpool.image.rope_base": _rope_base(vision), "mpool.vision.merge": merge,
        "mpool.image.activation": activation(vision, "hidden_act", "gelu", ACTIVATIONS)},
        hidden_size=d, output_size=d, patch_size=patch, image_size=image, any_size=True,
        ignored=(r"transformer\.layers\.\d+\..*",))
    network.patches("patch_conv", bias=False)
    network.norm("ln_pre", "v.pre_ln", bias=False)
    for i in range(used):
        source, target = f"transformer.layers.{i}", f"v.blk.{i}"
        for name in "qkv":
            network.linear(f"{source}.attention.{name}_proj", f"{target}.attn_{name}", d, d, bias=False)
        network.linear(f"{source}.attention.o_proj", f"{target}.attn_out", d, d, bias=False)
        network.norm(f"{source}.attention_norm", f"{target}.ln1", bias=False)
        network.norm(f"{source}.ffn_norm", f"{target}.ln2", bias=False)
        for name in ("gate", "up"):
            network.linear(f"{source}.feed_forward.{name}_proj", f"{target}.ffn_{name}", ffn, d, bias=False)
        network.linear(f"{source}.feed_forward.down_proj", f"{target}.ffn_down", d, ffn, bias=False)
    return network


def read(config: Fields) -> VisionModel:
    """Read a ``config.json`` of Mistral 3, or of LLaVA's class with Pixtral's image encoder, as Pixtral 12B has it."""
    merges = config.str("model_type") == "mistral3"
    text = text_of(config, TEXT_DEFAULTS, True) if merges else text_of(config)
    if merges and text.number("rms_norm_eps", _EPSILON) != _EPSILON:
        unsupported(text, "rms_norm_eps", f"{_EPSILON:g}, which the norm of the projector shares")
    merge = config.int("spatial_merge_size", 2, low=1, high=16) if merges else 1
    encoder = _read_encoder(config.section("vision_config"), config, -1 if merges else -2, merge)
    if not merges and config.str("vision_feature_select_strategy", "default") != "full":
        raise Unsupported(f"{config.file}: vision_feature_select_strategy is default, which would drop an image patch "
                          "because the encoder has no class token; mpool supports only full for this encoder")
    width, token = text.int("hidden_size", low=1, high=MAX_WIDTH), image_token(config, 10 if merges else 32000)
    check_neutral(config, {"text_config", "vision_config", "vision_feature_layer", "image_token_index",
                           "image_token_id", "projector_hidden_act", "multimodal_projector_bias", "tie_word_embeddings",
                           *(("spatial_merge_size",) if merges else (
                               "vision_feature_select_strategy", "image_seq_length", "ignore_index", "vocab_size"))})
    d = encoder.hidden_size
    projector = two_layers(d, width, width, bias=config.bool("multimodal_projector_bias", not merges))
    if merges:
        projector.add("norm.weight", "v.post_ln.weight", d)
        projector.linear("patch_merger.merging_layer", "mm.patch_merger", d, d * merge ** 2, bias=False)
    return VisionModel(ARCHITECTURE, text, encoder, projector, {
        "mpool.vision.image_token_id": token, "mpool.vision.norm": merges,
        "mpool.vision.activation": activation(config, "projector_hidden_act", "gelu", PROJECTOR_ACTS)},
        lambda folder: _read_settings(folder, encoder, width, merge, token))


def longest_side(side: int, patch: int) -> int:
    """Return the largest side of an image: that of the processor, unless a square image had too many patches."""
    return min(side, isqrt(MAX_PATCHES) * patch)


def most_patches(longest: int, patch: int, merge: int) -> int:
    """Return the largest number of patches of an image, for the estimate of memory."""
    return min((-(-longest // (patch * merge)) * merge) ** 2, MAX_PATCHES)


def _read_settings(folder: Folder, encoder: NetworkSpec, width: int, merge: int,
                   token: int) -> tuple[VisionSettings, dict[str, Value]]:
    """Read the image processor. As in transformers, the sides are multiples of the model's merged patches, whatever
    the processor's ``patch_size`` is."""
    config = image_processor.config_of(folder, "PixtralImageProcessor")
    image_processor.check_keys(
        config, (image_processor.READ - {"crop_size", "do_center_crop", "image_grid_pinpoints"}) | {"patch_size"},
        {**image_processor.NEUTRAL, "crop_size": (None,), "do_center_crop": (False,)})
    patch, longest = encoder.patch_size, 1024
    if isinstance(config.get("patch_size"), dict):
        sides = config.section("patch_size")
        sides.only({"height", "width"})
        found = {sides.int("height", low=1), sides.int("width", low=1)}
    else:
        found = {config.int("patch_size", patch, low=1)}
    if not found <= {patch, patch * merge} or len(found) > 1:
        config.fail("patch_size", describe(config.get("patch_size")), f"{patch}, as in config.json")
    size = config.section("size", None)
    if size is not None:
        size.only({"longest_edge"})
        longest = size.int("longest_edge", longest, low=1, high=image_processor.MAX_SIDE)
    if not config.bool("do_resize", True):
        unsupported(config, "do_resize", "true")
    image = ImageSettings(hidden_size=encoder.hidden_size, output_size=width, resize=None,
                          resample=config.int("resample", 3, low=0, high=5), crop=None, patch_size=patch,
                          image_size=encoder.image_size, any_size=True)
    return VisionSettings(scheme="lines", image=image, image_token_id=token, merge=merge,
                          longest=longest_side(longest, patch)), {
        **image_processor.read_scaling(config, image_processor.CLIP_MEAN, image_processor.CLIP_STD),
        "mpool.vision.patches": most_patches(longest_side(longest, patch), patch, merge)}
