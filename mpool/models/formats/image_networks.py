"""Readers of the image encoders of transformers, and of the text encoders that share their embedding space.

Each family has one reader. It translates the encoder's section of ``config.json`` into the hyper-parameters of the
family's row in ``csrc/models/archs.def`` and lists the tensors under GGUF's names for image encoders. Each tensor has
two shapes: the one stored in the file and the one that the C core reads. The core reads a convolution over patches as a
matrix, and stacked projections as several tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import isqrt, prod
from typing import Any, cast

from ...errors import FormatError
from ..families.reading import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, activation, check_neutral, unsupported
from ..fields import Fields, describe
from ..spec import Value

ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")


@dataclass(frozen=True)
class TensorSource:
    """A tensor of the C core and the stored tensor that holds it.

    Attributes:
        source: name of the stored tensor, without prefix.
        name: name of the tensor in the core.
        stored_shape: shape of the stored tensor.
        shape: shape of the tensor in the core.
        part, parts: position of the tensor in the stored one: part number ``part`` (from 0) of ``parts`` equal parts
            along the first axis.
    """

    source: str
    name: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        assert prod(self.stored_shape) == prod(self.shape) * self.parts


@dataclass
class NetworkSpec:
    """A network (image encoder, text encoder or projector) as the C core loads it.

    Attributes:
        architecture: name of the network's row in ``csrc/models/archs.def``.
        kv: hyper-parameters under the core's keys.
        prefixes: prefixes that the tensor names may have in the file.
        ignored: regular expressions for the names of stored tensors that the computation does not use.
        tensors: the tensors, with their sources.
        hidden_size: width of the layers.
        output_size: size of the output vectors.
        patch_size: side of a patch, in pixels; 0 for a network without image input.
        image_size: side of the images that the network was trained on, in pixels; 0 without image input.
        any_size: True if the network accepts images of other sizes, for which it interpolates its position embeddings.
    """

    architecture: str
    kv: dict[str, Value]
    prefixes: tuple[str, ...] = ("",)
    ignored: tuple[str, ...] = ()
    tensors: list[TensorSource] = field(default_factory=list)
    hidden_size: int = 0
    output_size: int = 0
    patch_size: int = 0
    image_size: int = 0
    any_size: bool = False

    def add(self, source: str, name: str, *shape: int) -> None:
        """Add a tensor that has the same shape in the file and in the core."""
        self.reshaped(source, name, shape, shape)

    def reshaped(self, source: str, name: str, stored_shape: tuple[int, ...], shape: tuple[int, ...], part: int = 0,
                 parts: int = 1) -> None:
        """Add a tensor whose shape in the core differs from the stored one; arguments as for :class:`TensorSource`."""
        self.tensors.append(TensorSource(source, name, stored_shape, shape, part, parts))

    def linear(self, source: str, name: str, outputs: int, inputs: int, bias: bool = True) -> None:
        """Add the weight matrix and the bias of a linear layer."""
        self.add(f"{source}.weight", f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{source}.bias", f"{name}.bias", outputs)

    def norm(self, source: str, name: str, bias: bool = True) -> None:
        """Add the weight and the bias of a layer norm, or the weight of an RMS norm."""
        self.add(f"{source}.weight", f"{name}.weight", self.hidden_size)
        if bias:
            self.add(f"{source}.bias", f"{name}.bias", self.hidden_size)

    def stacked(self, source: str, names: tuple[str, ...], outputs: int, inputs: int | None) -> None:
        """Add matrices stored as one tensor, stacked along the first axis; biases if ``inputs`` is None."""
        tail = () if inputs is None else (inputs,)
        for part, name in enumerate(names):
            self.reshaped(source, name, (len(names) * outputs, *tail), (outputs, *tail), part, len(names))

    def patches(self, source: str, bias: bool) -> None:
        """Add the convolution over patches."""
        stored = (self.hidden_size, 3, self.patch_size, self.patch_size)
        self.reshaped(f"{source}.weight", "v.patch_embd.weight", stored, (self.hidden_size, prod(stored[1:])))
        if bias:
            self.add(f"{source}.bias", "v.patch_embd.bias", self.hidden_size)


def square_side(config: Fields, key: str, default: int) -> int:
    """Return the side of a square, in pixels: one number, or a list of two equal numbers."""
    value = config.get(key)
    if type(value) is list:
        if len(value) != 2 or value[0] != value[1]:
            unsupported(config, key, "squares")
        return Fields({key: value[0]}, file=config.file, at=config.at).int(key, low=1, high=1 << 14)
    return config.int(key, default, low=1, high=1 << 14)


def read_common(config: Fields, arch: str, defaults: dict[str, int | float | str]) -> tuple[NetworkSpec, set[str]]:
    """Read the hyper-parameters that CLIP, SigLIP and DINOv2 share; return the network and the keys read."""
    hidden = config.int("hidden_size", defaults["hidden_size"], low=1, high=MAX_WIDTH)
    heads = config.int("num_attention_heads", defaults["num_attention_heads"], low=1, high=MAX_WIDTH)
    patch = square_side(config, "patch_size", int(defaults["patch_size"]))
    image = square_side(config, "image_size", int(defaults["image_size"]))
    if hidden % heads:
        config.fail("num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")
    if image < patch:
        config.fail("image_size", image, f"at least patch_size, {patch}")
    if config.int("num_channels", 3) != 3:
        unsupported(config, "num_channels", 3)
    kv: dict[str, Value] = {
        f"{arch}.vision.block_count": config.int("num_hidden_layers", defaults["num_hidden_layers"], low=1,
                                                 high=MAX_LAYERS),
        f"{arch}.vision.embedding_length": hidden,
        f"{arch}.vision.attention.head_count": heads,
        f"{arch}.vision.attention.layer_norm_epsilon": config.number("layer_norm_eps", defaults["layer_norm_eps"],
                                                                     above=0.0),
        f"{arch}.vision.patch_size": patch,
        f"{arch}.vision.image_size": image,
        "mpool.image.activation": activation(config, "hidden_act", str(defaults["hidden_act"]), ACTIVATIONS),
        "mpool.pooling": ["cls"], "mpool.normalize": False, "mpool.dense_count": 0,
    }
    network = NetworkSpec(arch, kv, hidden_size=hidden, output_size=hidden, patch_size=patch, image_size=image)
    return network, {"hidden_size", "num_attention_heads", "patch_size", "image_size", "num_channels",
                     "num_hidden_layers", "layer_norm_eps", "hidden_act"}


def _patch_count(network: NetworkSpec) -> int:
    """Return the number of patches of an image of the trained size."""
    return (network.image_size // network.patch_size) ** 2


def layer_count(network: NetworkSpec) -> int:
    """Return the number of layers of an image encoder."""
    count = network.kv[f"{network.architecture}.vision.block_count"]
    assert isinstance(count, int)
    return count


# ---- DINOv2 ----------------------------------------------------------------------------------------------------------

def read_dinov2(config: Fields) -> NetworkSpec:
    """Read DINOv2 (https://arxiv.org/abs/2304.07193), without or with registers (https://arxiv.org/abs/2309.16588)."""
    registers = config.get("model_type") == "dinov2_with_registers"
    arch = "dinov2_with_registers" if registers else "dinov2"
    network, known = read_common(config, arch, {
        "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 16 if registers else 14,
        "image_size": 224, "layer_norm_eps": 1e-6, "hidden_act": "gelu"})
    d, gated, bias = network.hidden_size, config.bool("use_swiglu_ffn", False), config.bool("qkv_bias", True)
    ffn = int(d * config.number("mlp_ratio", 4, above=0.0, most=1024.0))
    if gated:
        ffn = (int(ffn * 2 / 3) + 7) // 8 * 8
        network.kv["mpool.image.activation"] = "silu"
    network.kv |= {f"{arch}.vision.feed_forward_length": ffn, "mpool.image.gated": gated}
    check_neutral(config, known | {"mlp_ratio", "use_swiglu_ffn", "qkv_bias", "num_register_tokens", "layerscale_value",
                                   "drop_path_rate", "use_mask_token", "out_features", "out_indices", "stage_names",
                                   "apply_layernorm", "reshape_hidden_states"})
    network.any_size = True
    network.prefixes = ("", f"{arch}.")
    network.ignored = (r"(dinov2\w*\.)?embeddings\.mask_token", r"classifier\..*")
    network.patches("embeddings.patch_embeddings.projection", bias=True)
    network.reshaped("embeddings.cls_token", "v.class_embd", (1, 1, d), (d,))
    rows = 1 + _patch_count(network)
    network.reshaped("embeddings.position_embeddings", "v.position_embd.weight", (1, rows, d), (rows, d))
    if registers:
        count = config.int("num_register_tokens", 4, low=0, high=64)
        network.kv["mpool.image.registers"] = count
        if count:
            network.reshaped("embeddings.register_tokens", "v.register_embd", (1, count, d), (count, d))
    network.norm("layernorm", "v.post_ln")
    for i in range(layer_count(network)):
        source, target = f"encoder.layer.{i}", f"v.blk.{i}"
        for name, short in (("query", "q"), ("key", "k"), ("value", "v")):
            network.linear(f"{source}.attention.attention.{name}", f"{target}.attn_{short}", d, d, bias)
        network.linear(f"{source}.attention.output.dense", f"{target}.attn_out", d, d)
        network.norm(f"{source}.norm1", f"{target}.ln1")
        network.norm(f"{source}.norm2", f"{target}.ln2")
        network.add(f"{source}.layer_scale1.lambda1", f"{target}.ls1.weight", d)
        network.add(f"{source}.layer_scale2.lambda1", f"{target}.ls2.weight", d)
        if gated:
            gate, up = f"{target}.ffn_gate", f"{target}.ffn_up"
            network.stacked(f"{source}.mlp.weights_in.weight", (f"{gate}.weight", f"{up}.weight"), ffn, d)
            network.stacked(f"{source}.mlp.weights_in.bias", (f"{gate}.bias", f"{up}.bias"), ffn, None)
            network.linear(f"{source}.mlp.weights_out", f"{target}.ffn_down", d, ffn)
        else:
            network.linear(f"{source}.mlp.fc1", f"{target}.ffn_up", ffn, d)
            network.linear(f"{source}.mlp.fc2", f"{target}.ffn_down", d, ffn)
    return network


# ---- CLIP and SigLIP -------------------------------------------------------------------------------------------------

#: Values of ``model_type`` of models with an image and a text encoder, whose vectors share a space.
WITH_TEXT = ("clip", "siglip")
#: Top-level keys of ``config.json`` of CLIP and SigLIP, next to the sections of the two encoders.
_JOINT_KEYS = {"text_config", "vision_config", "text_config_dict", "vision_config_dict", "projection_dim",
               "logit_scale_init_value", "initializer_factor", "model_type"}


def section_of(config: Fields, name: str) -> Fields:
    """Return the section ``name`` of a joint configuration. Values of ``{name}_dict``, which older files also have,
    take precedence."""
    section = config.section(name, None) or Fields({}, file=config.file, at=config.name(name))
    older = config.section(f"{name}_dict", None)
    return section if older is None else Fields({**section.values, **older.values}, file=config.file, at=section.at)


def _vision_section(config: Fields) -> Fields:
    """Return the settings of the image encoder: a section of a joint configuration, or all of a configuration of the
    image encoder alone."""
    if config.get("model_type") not in WITH_TEXT:
        return config
    check_neutral(config, _JOINT_KEYS)
    return section_of(config, "vision_config")


def _without_prefix(network: NetworkSpec) -> NetworkSpec:
    """Return an image encoder that is stored alone. Folders of older versions of transformers have the prefix
    ``vision_model.``, those of newer versions have none."""
    network.tensors = [replace(tensor, source=tensor.source.removeprefix("vision_model."))
                       for tensor in network.tensors]
    network.prefixes = ("", "vision_model.")
    return network


def _add_layers(network: NetworkSpec, config: Fields, known: set[str], ffn: int) -> None:
    """Add the layers and the tensors that CLIP's and SigLIP's image encoders have in common.

    Args:
        network: the network, with its sizes set.
        config: the encoder's section of ``config.json``.
        known: keys that were already read.
        ffn: width of the feed-forward layers.
    """
    arch, d = network.architecture, network.hidden_size
    network.kv[f"{arch}.vision.feed_forward_length"] = ffn
    check_neutral(config, known | {"intermediate_size", "projection_dim", "initializer_factor", "dropout",
                                   "vision_use_head"})
    rows = _patch_count(network) + (arch == "clip")
    network.add("vision_model.embeddings.position_embedding.weight", "v.position_embd.weight", rows, d)
    network.norm("vision_model.post_layernorm", "v.post_ln")
    for i in range(layer_count(network)):
        add_layer(network, f"vision_model.encoder.layers.{i}", f"v.blk.{i}", ffn, ("attn_out", "ln1", "ln2"))


def add_layer(network: NetworkSpec, source: str, target: str, ffn: int, names: tuple[str, str, str]) -> None:
    """Add a layer of CLIP or SigLIP, whose image and text encoders store the same tensors.

    Args:
        network: the network, with its sizes set.
        source: prefix of the layer's tensors in the file.
        target: prefix of the layer's tensors in the core.
        ffn: width of the feed-forward layer.
        names: names in the core of the attention's output layer and of the two norms.
    """
    d, (output, norm1, norm2) = network.hidden_size, names
    for name in ("q", "k", "v"):
        network.linear(f"{source}.self_attn.{name}_proj", f"{target}.attn_{name}", d, d)
    network.linear(f"{source}.self_attn.out_proj", f"{target}.{output}", d, d)
    network.norm(f"{source}.layer_norm1", f"{target}.{norm1}")
    network.norm(f"{source}.layer_norm2", f"{target}.{norm2}")
    network.linear(f"{source}.mlp.fc1", f"{target}.ffn_up", ffn, d)
    network.linear(f"{source}.mlp.fc2", f"{target}.ffn_down", d, ffn)


def read_clip(config: Fields) -> NetworkSpec:
    """Read the image encoder of CLIP (https://arxiv.org/abs/2103.00020), with its projection."""
    vision = _vision_section(config)
    network, known = read_common(vision, "clip", {
        "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 32, "image_size": 224,
        "layer_norm_eps": 1e-5, "hidden_act": "quick_gelu"})
    network.patches("vision_model.embeddings.patch_embedding", bias=False)
    network.add("vision_model.embeddings.class_embedding", "v.class_embd", network.hidden_size)
    network.norm("vision_model.pre_layrnorm", "v.pre_ln")
    _add_layers(network, vision, known, vision.int("intermediate_size", 3072, low=1, high=MAX_WIDTH))
    network.ignored = (r"logit_scale", r"((text|vision)_model\.)?embeddings\.position_ids")
    if "CLIPVisionModel" in config.list("architectures", [], of=str, limit=16):
        return _without_prefix(network)
    network.output_size = config.int("projection_dim", 512, low=1, high=MAX_WIDTH)
    network.kv |= {"mpool.dense_count": 1, "mpool.dense.0.activation": "identity"}
    network.add("visual_projection.weight", "dense.0.weight", network.output_size, network.hidden_size)
    return network


def read_siglip(config: Fields) -> NetworkSpec:
    """Read the image encoder of SigLIP (https://arxiv.org/abs/2303.15343) or of a SigLIP 2 with a fixed image size
    (https://arxiv.org/abs/2502.14786), with its attention pooling."""
    vision = _vision_section(config)
    network, known = read_common(vision, "siglip", {
        "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 16, "image_size": 224,
        "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh"})
    if not vision.bool("vision_use_head", True):
        unsupported(vision, "vision_use_head", "true")
    d, ffn = network.hidden_size, vision.int("intermediate_size", 3072, low=1, high=MAX_WIDTH)
    network.patches("vision_model.embeddings.patch_embedding", bias=True)
    _add_layers(network, vision, known, ffn)
    head = "vision_model.head"
    network.reshaped(f"{head}.probe", "v.head.probe", (1, 1, d), (d,))
    names = ("v.head.attn_q", "v.head.attn_k", "v.head.attn_v")
    network.stacked(f"{head}.attention.in_proj_weight", tuple(f"{name}.weight" for name in names), d, d)
    network.stacked(f"{head}.attention.in_proj_bias", tuple(f"{name}.bias" for name in names), d, None)
    network.linear(f"{head}.attention.out_proj", "v.head.attn_out", d, d)
    network.norm(f"{head}.layernorm", "v.head.ln")
    network.linear(f"{head}.mlp.fc1", "v.head.ffn_up", ffn, d)
    network.linear(f"{head}.mlp.fc2", "v.head.ffn_down", d, ffn)
    network.ignored = (r"logit_scale", r"logit_bias", r"((text|vision)_model\.)?embeddings\.position_ids")
    return network if vision is not config else _without_prefix(network)


def read_vision_encoder(vision: Fields, arch: str, layers: int, norm: bool,
                        defaults: dict[str, int | float | str] | None = None) -> NetworkSpec:
    """Read the image encoder of a vision model, which is CLIP's or SigLIP's without pooling and projection.

    The tensor names in the result lack the prefix ``vision_model.``.

    Args:
        vision: section ``vision_config`` of ``config.json``.
        arch: ``"clip"`` or ``"siglip"``.
        layers: number of layers to compute, from the first.
        norm: True if the norm after the last layer is applied.
        defaults: defaults of the vision model's configuration class that differ from the encoder's.
    """
    clip = arch == "clip"
    network, known = read_common(vision, arch, {
        "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "patch_size": 32 if clip else 16,
        "image_size": 224, "layer_norm_eps": 1e-5 if clip else 1e-6,
        "hidden_act": "quick_gelu" if clip else "gelu_pytorch_tanh", **(defaults or {})})
    network.kv[f"{arch}.vision.block_count"] = layers
    network.patches("vision_model.embeddings.patch_embedding", bias=not clip)
    if clip:
        network.add("vision_model.embeddings.class_embedding", "v.class_embd", network.hidden_size)
        network.norm("vision_model.pre_layrnorm", "v.pre_ln")
    _add_layers(network, vision, known, vision.int("intermediate_size", 3072, low=1, high=MAX_WIDTH))
    for key in ("mpool.pooling", "mpool.normalize", "mpool.dense_count"):
        del network.kv[key]
    network.tensors = [replace(tensor, source=tensor.source.removeprefix("vision_model.")) for tensor in network.tensors
                       if norm or not tensor.name.startswith("v.post_ln")]
    network.ignored = (r"encoder\.layers\.\d+\..*", r"post_layernorm\..*", r"head\..*", r"embeddings\.position_ids")
    return network


#: Image encoders of Qwen's vision models -> their keys in ``config.json`` that have other names in others, and the
#: defaults of transformers.
_QWEN: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"width": ("embed_dim", 1280), "output": ("hidden_size", 3584), "depth": 32, "patch_size": 14,
                 "hidden_act": "quick_gelu"},
    "qwen2_5_vl": {"width": ("hidden_size", 3584), "output": ("out_hidden_size", 3584), "depth": 32, "patch_size": 14,
                   "hidden_act": "silu", "intermediate_size": 3420},
    "qwen3_vl": {"width": ("hidden_size", 1152), "output": ("out_hidden_size", 3584), "depth": 27, "patch_size": 16,
                 "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304},
}
#: Names of a layer's tensors in the folder -> in the core, after the queries, keys and values.
_QWEN_LAYERS = {
    "qwen2_vl": {"mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"},
    "qwen2_5_vl": {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"},
    "qwen3_vl": {"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"},
}


@dataclass(frozen=True)
class QwenEncoder:
    """The image encoder of one of Qwen's vision models.

    Attributes:
        network: the network.
        merge: side of the squares of patches that are merged into one row, in patches.
        output: width of the rows of the projector, which must be the decoder's.
        output_key: key of this width.
        taps: layers whose outputs further projectors read (DeepStack), in ascending order.
    """

    network: NetworkSpec
    merge: int
    output: int
    output_key: str
    taps: tuple[int, ...] = ()


def _qwen_sizes(vision: Fields, arch: str) -> tuple[dict[str, Value], set[str]]:
    """Read the keys that all image encoders of Qwen have; return the hyper-parameters and the keys read."""
    usual = _QWEN[arch]
    width, default = usual["width"]
    hidden = vision.int(width, default, low=1, high=MAX_WIDTH)
    heads = vision.int("num_heads", 16, low=1, high=MAX_WIDTH)
    patch, merge = square_side(vision, "patch_size", usual["patch_size"]), vision.int("spatial_merge_size", 2, low=1,
                                                                                       high=16)
    if hidden % heads:
        vision.fail("num_heads", heads, f"a divisor of {width}, {hidden}")
    if vision.int("in_channels", vision.int("in_chans", 3)) != 3:
        unsupported(vision, "in_channels", 3)
    rope = vision.section("rope_parameters", None)
    base = 10000.0
    if rope is not None:
        rope.only({"rope_theta", "rope_type"})
        rope.str("rope_type", "axial", choices=("axial",))
        base = rope.number("rope_theta", base, above=0.0)
    ffn = int(hidden * vision.number("mlp_ratio", 4, above=0.0, most=1024.0)) if arch == "qwen2_vl" else \
        vision.int("intermediate_size", usual["intermediate_size"], low=1, high=MAX_WIDTH)
    return {
        f"{arch}.vision.block_count": vision.int("depth", usual["depth"], low=1, high=MAX_LAYERS),
        f"{arch}.vision.embedding_length": hidden, f"{arch}.vision.attention.head_count": heads,
        f"{arch}.vision.feed_forward_length": ffn, f"{arch}.vision.attention.layer_norm_epsilon": 1e-6,
        f"{arch}.vision.patch_size": patch, f"{arch}.vision.image_size": 16 * merge * patch,
        "mpool.image.activation": activation(vision, "hidden_act", usual["hidden_act"], ACTIVATIONS),
        "mpool.image.frames": vision.int("temporal_patch_size", 2, low=1, high=16), "mpool.image.rope_base": base,
        "mpool.vision.merge": merge,
    }, {width, usual["output"][0], "num_heads", "patch_size", "spatial_merge_size", "in_channels", "in_chans",
        "rope_parameters", "depth", "hidden_act", "temporal_patch_size", "spatial_patch_size",
        "mlp_ratio" if arch == "qwen2_vl" else "intermediate_size"}


def _qwen_windows(vision: Fields, kv: dict[str, Value], patch: int, merge: int, layers: int) -> set[str]:
    """Read the windows of Qwen2.5-VL, which most layers have; return the keys read."""
    window = vision.int("window_size", 112, low=1, high=1 << 14) // merge // patch
    if window < 1:
        vision.fail("window_size", vision.get("window_size"), f"at least {merge * patch}, the side of a merged patch")
    full = set(vision.list("fullatt_block_indexes", [7, 15, 23, 31], of=int, limit=MAX_LAYERS))
    kv |= {"mpool.image.gated": True, "mpool.image.window": window,
           "mpool.image.window_layers": [int(i not in full) for i in range(layers)]}
    return {"window_size", "fullatt_block_indexes", "tokens_per_second"}


def _qwen_positions(vision: Fields, kv: dict[str, Value], patch: int, layers: int,
                    usual: tuple[int, ...] | None) -> tuple[tuple[int, ...], set[str]]:
    """Read the table of positions and the taps of Qwen3-VL; return the layers of the taps and the keys read."""
    count = vision.int("num_position_embeddings", 2304, low=1, high=1 << 16)
    side = isqrt(count)
    if side * side != count:
        vision.fail("num_position_embeddings", count, "a square number")
    kv["qwen3_vl.vision.image_size"] = side * patch
    taps = vision.list("deepstack_visual_indexes", list(usual or ()), of=int, limit=8)
    if sorted(set(taps)) != taps or (taps and not 0 <= taps[0] <= taps[-1] < layers):
        vision.fail("deepstack_visual_indexes", describe(taps), f"ascending numbers of layers from 0 to {layers - 1}")
    if taps and usual is None:
        unsupported(vision, "deepstack_visual_indexes", "an empty list for this model")
    kv["mpool.vision.tap_layers"] = [int(i in taps) for i in range(layers)]
    return tuple(taps), {"num_position_embeddings", "deepstack_visual_indexes"}


def read_qwen(vision: Fields, arch: str, deep: tuple[int, ...] | None = None) -> QwenEncoder:
    """Read the image encoder of Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5: rotary embeddings over row and column,
    images of any size. Most layers of Qwen2.5-VL have windows; Qwen3-VL also has a table of positions, and taps.

    Args:
        vision: section ``vision_config`` of ``config.json``.
        arch: ``"qwen2_vl"``, ``"qwen2_5_vl"`` or ``"qwen3_vl"``.
        deep: for Qwen3-VL: layers with taps if the configuration does not list them; None: the model has none.
    """
    kv, known = _qwen_sizes(vision, arch)
    hidden, ffn, layers, patch, frames, merge = (cast(int, kv[key]) for key in (
        f"{arch}.vision.embedding_length", f"{arch}.vision.feed_forward_length", f"{arch}.vision.block_count",
        f"{arch}.vision.patch_size", "mpool.image.frames", "mpool.vision.merge"))
    taps: tuple[int, ...] = ()
    if arch == "qwen2_5_vl":
        known |= _qwen_windows(vision, kv, patch, merge, layers)
    if arch == "qwen3_vl":
        taps, more = _qwen_positions(vision, kv, patch, layers, deep)
        known |= more
    check_neutral(vision, known)
    image = cast(int, kv[f"{arch}.vision.image_size"])
    network = NetworkSpec(arch, kv, hidden_size=hidden, output_size=hidden, patch_size=patch, image_size=image,
                          any_size=True)
    stored = (hidden, 3, frames, patch, patch)
    network.reshaped("patch_embed.proj.weight", "v.patch_embd.weight", stored, (hidden, prod(stored[1:])))
    if arch == "qwen3_vl":
        network.add("patch_embed.proj.bias", "v.patch_embd.bias", hidden)
        network.add("pos_embed.weight", "v.position_embd.weight", (image // patch) ** 2, hidden)
    bias = arch != "qwen2_5_vl"
    network.norm("merger.norm" if arch == "qwen3_vl" else "merger.ln_q", "v.post_ln", bias)
    for i in range(layers):
        source, target = f"blocks.{i}", f"v.blk.{i}"
        names = tuple(f"{target}.attn_{name}" for name in "qkv")
        network.stacked(f"{source}.attn.qkv.weight", tuple(f"{name}.weight" for name in names), hidden, hidden)
        network.stacked(f"{source}.attn.qkv.bias", tuple(f"{name}.bias" for name in names), hidden, None)
        network.linear(f"{source}.attn.proj", f"{target}.attn_out", hidden, hidden)
        network.norm(f"{source}.norm1", f"{target}.ln1", bias)
        network.norm(f"{source}.norm2", f"{target}.ln2", bias)
        for name, short in _QWEN_LAYERS[arch].items():
            outputs, inputs = (hidden, ffn) if short == "ffn_down" else (ffn, hidden)
            network.linear(f"{source}.{name}", f"{target}.{short}", outputs, inputs)
    key, default = _QWEN[arch]["output"]
    return QwenEncoder(network, merge, vision.int(key, default, low=1, high=MAX_WIDTH), key, taps)


# ---- Gemma 4 ---------------------------------------------------------------------------------------------------------

#: Names of a layer's parts in the folder -> in the core.
_GEMMA4_PARTS = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
                 "self_attn.o_proj": "attn_out", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
                 "mlp.down_proj": "ffn_down"}
_GEMMA4_NORMS = {"input_layernorm": "ln1", "post_attention_layernorm": "attn_post_norm",
                 "pre_feedforward_layernorm": "ln2", "post_feedforward_layernorm": "ffn_post_norm"}


def read_gemma4(vision: Fields, unified: bool) -> tuple[NetworkSpec, int]:
    """Read the image encoder of Gemma 4; return the network, and the side of the squares of patches that are averaged.

    Args:
        vision: section ``vision_config`` of ``config.json``.
        unified: True for Gemma 4 12B, whose encoder has no layers, and patches as large as those squares.
    """
    arch = "gemma4_unified_vision" if unified else "gemma4_vision"
    patch, merge = vision.int("patch_size", 16, low=1, high=256), vision.int("pooling_kernel_size", 3, low=1, high=16)
    side = patch * merge if unified else patch
    if side > 256:
        vision.fail("patch_size", patch, f"at most {256 // merge} with pooling_kernel_size {merge}")
    hidden = vision.int("mm_embed_dim", 3840, low=1, high=MAX_WIDTH) if unified else \
        vision.int("hidden_size", 768, low=1, high=MAX_WIDTH)
    network = NetworkSpec(arch, {
        f"{arch}.vision.embedding_length": hidden, f"{arch}.vision.patch_size": side,
        f"{arch}.vision.image_size": 16 * (1 if unified else merge) * side, "mpool.image.channels_last": True,
    }, hidden_size=hidden, output_size=hidden, patch_size=side, image_size=16 * side, any_size=True,
        ignored=(r"(audio_tower|embed_audio)\..*",))
    inputs = 3 * side ** 2
    if unified:
        _read_unified(network, vision, hidden, inputs)
        return network, merge
    layers, ffn = (vision.int(key, default, low=1, high=high) for key, default, high in (
        ("num_hidden_layers", 16, MAX_LAYERS), ("intermediate_size", 3072, MAX_WIDTH)))
    heads = vision.int("num_attention_heads", 12, low=1, high=MAX_WIDTH)
    if hidden % heads:
        vision.fail("num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")
    for key, default, wanted in (("num_key_value_heads", 12, heads), ("head_dim", 64, hidden // heads)):
        if vision.int(key, default, low=1, high=MAX_WIDTH) != wanted:
            unsupported(vision, key, f"{wanted}, for {heads} heads of together hidden_size, {hidden}")
    if vision.bool("attention_bias", False):
        unsupported(vision, "attention_bias", "false")
    rope, base = vision.section("rope_parameters", None), 100.0
    if rope is not None:
        rope.only({"rope_theta", "rope_type"})
        rope.str("rope_type", "axial", choices=("axial", "default"))
        base = rope.number("rope_theta", base, above=0.0)
    places = vision.int("position_embedding_size", 10240, low=1, high=1 << 16)
    network.kv |= {
        f"{arch}.vision.block_count": layers, f"{arch}.vision.feed_forward_length": ffn,
        f"{arch}.vision.attention.head_count": heads,
        f"{arch}.vision.attention.layer_norm_epsilon": vision.number("rms_norm_eps", 1e-6, above=0.0),
        "mpool.image.activation": activation(vision, "hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
        "mpool.image.gated": True, "mpool.image.frames": 1, "mpool.image.rope_base": base,
        "mpool.image.places": places}
    network.add("patch_embedder.input_proj.weight", "v.patch_embd.weight", hidden, inputs)
    network.reshaped("patch_embedder.position_embedding_table", "v.position_embd.weight", (2, places, hidden),
                     (2 * places, hidden))
    if vision.bool("standardize", False):
        network.add("std_bias", "v.std_bias", hidden)
        network.add("std_scale", "v.std_scale", hidden)
    clipped = vision.bool("use_clipped_linears", False)
    for i in range(layers):
        source, target = f"encoder.layers.{i}", f"v.blk.{i}"
        for name, short in _GEMMA4_NORMS.items():
            network.norm(f"{source}.{name}", f"{target}.{short}", False)
        for short in "qk":
            network.add(f"{source}.self_attn.{short}_norm.weight", f"{target}.attn_{short}_norm.weight",
                        hidden // heads)
        for name, short in _GEMMA4_PARTS.items():
            outputs, width = (hidden, ffn) if short == "ffn_down" else \
                (ffn if short.startswith("ffn") else hidden, hidden)
            network.add(f"{source}.{name}.linear.weight", f"{target}.{short}.weight", outputs, width)
            for end in ("input_min", "input_max", "output_min", "output_max") if clipped else ():
                network.reshaped(f"{source}.{name}.{end}", f"{target}.{short}.{end}", (), (1,))
    return network, merge


def _read_unified(network: NetworkSpec, vision: Fields, hidden: int, inputs: int) -> None:
    """Add the tensors of an encoder without layers: norms around the matrix of the patches, and positions."""
    arch, places = network.architecture, vision.int("mm_posemb_size", 1120, low=1, high=1 << 16)
    if vision.int("output_proj_dims", 3840, low=1, high=MAX_WIDTH) != hidden:
        unsupported(vision, "output_proj_dims", f"mm_embed_dim, {hidden}")
    network.kv |= {f"{arch}.vision.block_count": 0, f"{arch}.vision.feed_forward_length": 1,
                   f"{arch}.vision.attention.head_count": hidden,
                   f"{arch}.vision.attention.layer_norm_epsilon": 1e-5,
                   "mpool.image.places": places, "mpool.image.places_in_turn": True}
    network.linear("patch_dense", "v.patch_embd", hidden, inputs)
    network.reshaped("pos_embedding", "v.position_embd.weight", (places, 2, hidden), (2 * places, hidden))
    network.norm("patch_ln2", "v.patch_norm.2")
    network.norm("pos_norm", "v.pre_ln")
    for end in ("weight", "bias"):
        network.add(f"patch_ln1.{end}", f"v.patch_norm.1.{end}", inputs)


# ---- text encoders of CLIP and SigLIP --------------------------------------------------------------------------------

def read_text(config: Fields, kind: str) -> NetworkSpec:
    """Read the text encoder of CLIP or SigLIP: the core's encoder with pre-norm layers.

    CLIP uses causal attention and pools the last token. SigLIP pads every text to all positions, attends to all of them
    and pools the last position.

    Args:
        config: the model's ``config.json``.
        kind: ``"clip"`` or ``"siglip"``.
    """
    clip, text = kind == "clip", section_of(config, "text_config")
    arch = f"{kind}_text"
    d = text.int("hidden_size", 512 if clip else 768, low=1, high=MAX_WIDTH)
    ffn = text.int("intermediate_size", 2048 if clip else 3072, low=1, high=MAX_WIDTH)
    heads = text.int("num_attention_heads", 8 if clip else 12, low=1, high=MAX_WIDTH)
    if d % heads:
        text.fail("num_attention_heads", heads, f"a divisor of hidden_size, {d}")
    layers = text.int("num_hidden_layers", 12, low=1, high=MAX_LAYERS)
    positions = text.int("max_position_embeddings", 77 if clip else 64, low=2, high=1 << 16)
    vocabulary = text.int("vocab_size", 49408 if clip else 32000, low=1, high=MAX_VOCABULARY)
    output = config.int("projection_dim", 512, low=1, high=MAX_WIDTH) if clip else \
        text.int("projection_size", d, low=1, high=MAX_WIDTH)
    network = NetworkSpec(arch, {
        f"{arch}.block_count": layers, f"{arch}.context_length": positions, f"{arch}.embedding_length": d,
        f"{arch}.feed_forward_length": ffn, f"{arch}.attention.head_count": heads, f"{arch}.vocab_size": vocabulary,
        f"{arch}.attention.causal": clip,
        f"{arch}.attention.layer_norm_epsilon": text.number("layer_norm_eps", 1e-5 if clip else 1e-6, above=0.0),
        "mpool.activation": activation(text, "hidden_act", "quick_gelu" if clip else "gelu_pytorch_tanh", ACTIVATIONS),
        "mpool.pooling": ["lasttoken"], "mpool.normalize": False, "mpool.dense_count": 1,
        "mpool.dense.0.activation": "identity",
    }, hidden_size=d, output_size=output)
    check_neutral(text, {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
                         "max_position_embeddings", "vocab_size", "projection_dim", "projection_size", "layer_norm_eps",
                         "hidden_act", "initializer_factor", "dropout"})
    network.add("text_model.embeddings.token_embedding.weight", "token_embd.weight", vocabulary, d)
    network.add("text_model.embeddings.position_embedding.weight", "position_embd.weight", positions, d)
    network.norm("text_model.final_layer_norm", "output_norm")
    for i in range(layers):
        add_layer(network, f"text_model.encoder.layers.{i}", f"blk.{i}", ffn,
                   ("attn_output", "attn_norm", "ffn_norm"))
    if clip:
        network.add("text_projection.weight", "dense.0.weight", output, d)
    else:
        network.linear("text_model.head", "dense.0", output, d)
    return network


READERS = {"clip": read_clip, "clip_vision_model": read_clip, "siglip": read_siglip, "siglip_vision_model": read_siglip,
           "dinov2": read_dinov2, "dinov2_with_registers": read_dinov2}
#: Accepted values of ``architectures`` in config.json, by ``model_type``: classes whose weights hold the image encoder.
CLASSES = {
    "clip": ("CLIPModel",), "clip_vision_model": ("CLIPVisionModelWithProjection", "CLIPVisionModel"),
    "siglip": ("SiglipModel",), "siglip_vision_model": ("SiglipVisionModel",),
    "dinov2": ("Dinov2Model", "Dinov2Backbone", "Dinov2ForImageClassification"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone",
                              "Dinov2WithRegistersForImageClassification"),
}


def read(config: Fields) -> NetworkSpec:
    """Read the image encoder that a config.json describes.

    Raises:
        FormatError: a value is malformed.
        Unsupported: a value selects a computation that mpool does not implement.
    """
    kind = config.str("model_type")
    for name in config.list("architectures", [], of=str, limit=16):
        if name not in CLASSES[kind]:
            config.fail("architectures", describe(name), ", ".join(CLASSES[kind]))
    return READERS[kind](config)


def check_processor(network: NetworkSpec, output: tuple[int, int] | None, file: str) -> None:
    """Raise FormatError unless the network accepts the size of the images that the image processor produces.

    Args:
        network: the image encoder.
        output: (height, width) of every processed image, in pixels; None if it depends on the image.
        file: path of the processor's configuration, for the message.
    """
    if output is None and network.any_size:
        return
    side = network.image_size
    fits = output is not None and (min(output) >= network.patch_size if network.any_size else output == (side, side))
    if not fits:
        raise FormatError(file=file, field="size", got="sizes that depend on the image" if output is None
                          else f"{output[1]} x {output[0]} pixels",
                          allowed=f"sides of at least {network.patch_size} pixels" if network.any_size
                          else f"{side} x {side} pixels")
