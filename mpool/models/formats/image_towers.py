"""Image networks of transformers: their configuration and their tensors, in the names of GGUF's image encoders.

A family is one reader; it gives what the core needs under the names of its row in ``csrc/models/archs.def``. Tensors
are stated with the shape in which files have them and the one that the core reads: a convolution over patches is a
matrix there, and stacked projections are several tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod

from ...errors import FormatError
from ..families.reading import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, activation, check_neutral, unsupported
from ..fields import Fields, describe
from ..spec import Value

_ACTIVATIONS = ("gelu", "gelu_tanh", "quick_gelu", "relu", "silu")


@dataclass(frozen=True)
class Piece:
    """A tensor of the core, and its place in a tensor of the files.

    Attributes:
        hf: the file's tensor, without prefix.
        name: here.
        stored: its shape in the file.
        shape: its shape here.
        part, parts: the tensor is number ``part`` of ``parts`` equal parts along the first axis.
    """

    hf: str
    name: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        assert prod(self.stored) == prod(self.shape) * self.parts


@dataclass
class Tower:
    """A network as the core loads it.

    Attributes:
        architecture: the row in archs.def.
        kv: hyper-parameters.
        pieces: its tensors.
        prefixes: what may stand before their names.
        harmless: patterns of tensors beside them that take no part.
        hidden, output, patch, image: sizes.
        any_size: whether positions are interpolated for images of other sizes.
    """

    architecture: str
    kv: dict[str, Value]
    prefixes: tuple[str, ...] = ("",)
    harmless: tuple[str, ...] = ()
    pieces: list[Piece] = field(default_factory=list)
    hidden: int = 0
    output: int = 0
    patch: int = 0
    image: int = 0
    any_size: bool = False

    def add(self, hf: str, name: str, *shape: int) -> None:
        """A tensor with the same shape in both."""
        self.pieces.append(Piece(hf, name, shape, shape))

    def linear(self, hf: str, name: str, out: int, into: int, bias: bool = True) -> None:
        """A matrix, and its bias."""
        self.add(f"{hf}.weight", f"{name}.weight", out, into)
        if bias:
            self.add(f"{hf}.bias", f"{name}.bias", out)

    def norm(self, hf: str, name: str) -> None:
        """Weight and bias of a layer norm."""
        self.add(f"{hf}.weight", f"{name}.weight", self.hidden)
        self.add(f"{hf}.bias", f"{name}.bias", self.hidden)

    def stacked(self, hf: str, names: tuple[str, ...], out: int, into: int | None) -> None:
        """Matrices (biases: ``into`` is None) that stand on top of each other in one tensor."""
        tail = () if into is None else (into,)
        for part, name in enumerate(names):
            self.pieces.append(Piece(hf, name, (len(names) * out, *tail), (out, *tail), part, len(names)))

    def patches(self, hf: str, bias: bool) -> None:
        """The convolution over patches."""
        stored = (self.hidden, 3, self.patch, self.patch)
        self.pieces.append(Piece(f"{hf}.weight", "v.patch_embd.weight", stored, (self.hidden, prod(stored[1:]))))
        if bias:
            self.add(f"{hf}.bias", "v.patch_embd.bias", self.hidden)


def _side(config: Fields, key: str, default: int) -> int:
    """A length, or a pair of equal ones."""
    value = config.get(key)
    if type(value) is list:
        if len(value) != 2 or value[0] != value[1]:
            unsupported(config, key, "squares")
        return Fields({key: value[0]}, file=config.file, at=config.at).int(key, low=1, high=1 << 14)
    return config.int(key, default, low=1, high=1 << 14)


def _common(config: Fields, arch: str, defaults: dict[str, int | float | str]) -> tuple[Tower, set[str]]:
    """Sizes that all of them have, and the keys that were read."""
    hidden = config.int("hidden_size", defaults["hidden_size"], low=1, high=MAX_WIDTH)
    heads = config.int("num_attention_heads", defaults["num_attention_heads"], low=1, high=MAX_WIDTH)
    patch = _side(config, "patch_size", int(defaults["patch_size"]))
    image = _side(config, "image_size", int(defaults["image_size"]))
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
        "mpool.image.activation": activation(config, "hidden_act", str(defaults["hidden_act"]), _ACTIVATIONS),
        "mpool.pooling": ["cls"], "mpool.normalize": False, "mpool.dense_count": 0,
    }
    tower = Tower(arch, kv, hidden=hidden, output=hidden, patch=patch, image=image)
    return tower, {"hidden_size", "num_attention_heads", "patch_size", "image_size", "num_channels",
                   "num_hidden_layers", "layer_norm_eps", "hidden_act"}


def _positions(tower: Tower) -> int:
    return (tower.image // tower.patch) ** 2


def _layers(tower: Tower) -> int:
    count = tower.kv[f"{tower.architecture}.vision.block_count"]
    assert isinstance(count, int)
    return count


# ---- DINOv2 ----------------------------------------------------------------------------------------------------------

def read_dinov2(config: Fields) -> Tower:
    """DINOv2 (https://arxiv.org/abs/2304.07193), and with registers (https://arxiv.org/abs/2309.16588)."""
    registers = config.get("model_type") == "dinov2_with_registers"
    arch = "dinov2_with_registers" if registers else "dinov2"
    tower, used = _common(config, arch, {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
                                         "patch_size": 16 if registers else 14, "image_size": 224,
                                         "layer_norm_eps": 1e-6, "hidden_act": "gelu"})
    d, gated, bias = tower.hidden, config.bool("use_swiglu_ffn", False), config.bool("qkv_bias", True)
    ffn = int(d * config.number("mlp_ratio", 4, above=0.0))
    if gated:
        ffn = (int(ffn * 2 / 3) + 7) // 8 * 8
        tower.kv["mpool.image.activation"] = "silu"
    tower.kv |= {f"{arch}.vision.feed_forward_length": ffn, "mpool.image.gated": gated}
    check_neutral(config, used | {"mlp_ratio", "use_swiglu_ffn", "qkv_bias", "num_register_tokens", "layerscale_value",
                                  "drop_path_rate", "use_mask_token", "out_features", "out_indices", "stage_names",
                                  "apply_layernorm", "reshape_hidden_states"})
    tower.any_size = True
    tower.prefixes = ("", f"{arch}.")
    tower.harmless = (r"(dinov2\w*\.)?embeddings\.mask_token", r"classifier\..*")
    tower.patches("embeddings.patch_embeddings.projection", bias=True)
    tower.pieces.append(Piece("embeddings.cls_token", "v.class_embd", (1, 1, d), (d,)))
    rows = 1 + _positions(tower)
    tower.pieces.append(Piece("embeddings.position_embeddings", "v.position_embd.weight", (1, rows, d), (rows, d)))
    if registers:
        count = config.int("num_register_tokens", 4, low=0, high=64)
        tower.kv["mpool.image.registers"] = count
        if count:
            tower.pieces.append(Piece("embeddings.register_tokens", "v.register_embd", (1, count, d), (count, d)))
    tower.norm("layernorm", "v.post_ln")
    for i in range(_layers(tower)):
        hf, here = f"encoder.layer.{i}", f"v.blk.{i}"
        for name, short in (("query", "q"), ("key", "k"), ("value", "v")):
            tower.linear(f"{hf}.attention.attention.{name}", f"{here}.attn_{short}", d, d, bias)
        tower.linear(f"{hf}.attention.output.dense", f"{here}.attn_out", d, d)
        tower.norm(f"{hf}.norm1", f"{here}.ln1")
        tower.norm(f"{hf}.norm2", f"{here}.ln2")
        tower.add(f"{hf}.layer_scale1.lambda1", f"{here}.ls1.weight", d)
        tower.add(f"{hf}.layer_scale2.lambda1", f"{here}.ls2.weight", d)
        if gated:
            tower.stacked(f"{hf}.mlp.weights_in.weight", (f"{here}.ffn_gate.weight", f"{here}.ffn_up.weight"), ffn, d)
            tower.stacked(f"{hf}.mlp.weights_in.bias", (f"{here}.ffn_gate.bias", f"{here}.ffn_up.bias"), ffn, None)
            tower.linear(f"{hf}.mlp.weights_out", f"{here}.ffn_down", d, ffn)
        else:
            tower.linear(f"{hf}.mlp.fc1", f"{here}.ffn_up", ffn, d)
            tower.linear(f"{hf}.mlp.fc2", f"{here}.ffn_down", d, ffn)
    return tower


# ---- CLIP and SigLIP -------------------------------------------------------------------------------------------------

_PAIR_KEYS = {"text_config", "vision_config", "text_config_dict", "vision_config_dict", "projection_dim",
              "logit_scale_init_value", "initializer_factor", "model_type"}


def part_of(config: Fields, name: str) -> Fields:
    """The section of one of two networks; what older files have under ``..._dict`` beside it goes before."""
    section = config.section(name, None) or Fields({}, file=config.file, at=config.name(name))
    older = config.section(f"{name}_dict", None)
    return section if older is None else Fields({**section.values, **older.values}, file=config.file, at=section.at)


def _pair(tower: Tower, config: Fields, used: set[str], ffn: int) -> None:
    """Tensors that the layers of both encoders have."""
    arch, d = tower.architecture, tower.hidden
    tower.kv[f"{arch}.vision.feed_forward_length"] = ffn
    check_neutral(config, used | {"intermediate_size", "projection_dim", "initializer_factor", "dropout",
                                  "vision_use_head"})
    rows = _positions(tower) + (arch == "clip")
    tower.add("vision_model.embeddings.position_embedding.weight", "v.position_embd.weight", rows, d)
    tower.norm("vision_model.post_layernorm", "v.post_ln")
    for i in range(_layers(tower)):
        hf, here = f"vision_model.encoder.layers.{i}", f"v.blk.{i}"
        for name in ("q", "k", "v"):
            tower.linear(f"{hf}.self_attn.{name}_proj", f"{here}.attn_{name}", d, d)
        tower.linear(f"{hf}.self_attn.out_proj", f"{here}.attn_out", d, d)
        tower.norm(f"{hf}.layer_norm1", f"{here}.ln1")
        tower.norm(f"{hf}.layer_norm2", f"{here}.ln2")
        tower.linear(f"{hf}.mlp.fc1", f"{here}.ffn_up", ffn, d)
        tower.linear(f"{hf}.mlp.fc2", f"{here}.ffn_down", d, ffn)


def read_clip(config: Fields) -> Tower:
    """The image network of CLIP (https://arxiv.org/abs/2103.00020), with its projection."""
    vision = part_of(config, "vision_config")
    check_neutral(config, _PAIR_KEYS)
    tower, used = _common(vision, "clip", {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
                                           "patch_size": 32, "image_size": 224, "layer_norm_eps": 1e-5,
                                           "hidden_act": "quick_gelu"})
    tower.patches("vision_model.embeddings.patch_embedding", bias=False)
    tower.add("vision_model.embeddings.class_embedding", "v.class_embd", tower.hidden)
    tower.norm("vision_model.pre_layrnorm", "v.pre_ln")
    _pair(tower, vision, used, vision.int("intermediate_size", 3072, low=1, high=MAX_WIDTH))
    tower.output = config.int("projection_dim", 512, low=1, high=MAX_WIDTH)
    tower.kv |= {"mpool.dense_count": 1, "mpool.dense.0.activation": "identity"}
    tower.add("visual_projection.weight", "dense.0.weight", tower.output, tower.hidden)
    tower.harmless = (r"logit_scale", r"(text|vision)_model\.embeddings\.position_ids")
    return tower


def read_siglip(config: Fields) -> Tower:
    """The image network of SigLIP (https://arxiv.org/abs/2303.15343) and SigLIP 2 of fixed sizes
    (https://arxiv.org/abs/2502.14786), with its attention pooling."""
    vision = part_of(config, "vision_config")
    check_neutral(config, _PAIR_KEYS)
    tower, used = _common(vision, "siglip", {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
                                             "patch_size": 16, "image_size": 224, "layer_norm_eps": 1e-6,
                                             "hidden_act": "gelu_pytorch_tanh"})
    if not vision.bool("vision_use_head", True):
        unsupported(vision, "vision_use_head", "true")
    d, ffn = tower.hidden, vision.int("intermediate_size", 3072, low=1, high=MAX_WIDTH)
    tower.patches("vision_model.embeddings.patch_embedding", bias=True)
    _pair(tower, vision, used, ffn)
    head = "vision_model.head"
    tower.pieces.append(Piece(f"{head}.probe", "v.head.probe", (1, 1, d), (d,)))
    names = ("v.head.attn_q", "v.head.attn_k", "v.head.attn_v")
    tower.stacked(f"{head}.attention.in_proj_weight", tuple(f"{name}.weight" for name in names), d, d)
    tower.stacked(f"{head}.attention.in_proj_bias", tuple(f"{name}.bias" for name in names), d, None)
    tower.linear(f"{head}.attention.out_proj", "v.head.attn_out", d, d)
    tower.norm(f"{head}.layernorm", "v.head.ln")
    tower.linear(f"{head}.mlp.fc1", "v.head.ffn_up", ffn, d)
    tower.linear(f"{head}.mlp.fc2", "v.head.ffn_down", d, ffn)
    tower.harmless = (r"logit_scale", r"logit_bias", r"(text|vision)_model\.embeddings\.position_ids")
    return tower


def read_part(vision: Fields, arch: str, layers: int, norm: bool,
              defaults: dict[str, int | float | str] | None = None) -> Tower:
    """The image network of CLIP or SigLIP as a part of a model that reads images: the first ``layers`` layers, and the
    norm behind the last if it is used. Names are without ``vision_model``; ``defaults`` are those of the joint model's
    class, where they differ."""
    clip = arch == "clip"
    tower, used = _common(vision, arch, {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12,
                                         "patch_size": 32 if clip else 16, "image_size": 224,
                                         "layer_norm_eps": 1e-5 if clip else 1e-6,
                                         "hidden_act": "quick_gelu" if clip else "gelu_pytorch_tanh",
                                         **(defaults or {})})
    tower.kv[f"{arch}.vision.block_count"] = layers
    tower.patches("vision_model.embeddings.patch_embedding", bias=not clip)
    if clip:
        tower.add("vision_model.embeddings.class_embedding", "v.class_embd", tower.hidden)
        tower.norm("vision_model.pre_layrnorm", "v.pre_ln")
    _pair(tower, vision, used, vision.int("intermediate_size", 3072, low=1, high=MAX_WIDTH))
    for key in ("mpool.pooling", "mpool.normalize", "mpool.dense_count"):
        del tower.kv[key]
    tower.pieces = [replace(piece, hf=piece.hf.removeprefix("vision_model.")) for piece in tower.pieces
                    if norm or not piece.name.startswith("v.post_ln")]
    tower.harmless = (r"encoder\.layers\.\d+\..*", r"post_layernorm\..*", r"head\..*", r"embeddings\.position_ids")
    return tower


def read_qwen(vision: Fields) -> tuple[Tower, int]:
    """The image network of Qwen2.5-VL, and how many patches a side are merged: rotated by line and column, windows in
    most layers, images of any size."""
    arch = "qwen2_5_vl"
    hidden = vision.int("hidden_size", 3584, low=1, high=MAX_WIDTH)
    heads = vision.int("num_heads", 16, low=1, high=MAX_WIDTH)
    layers = vision.int("depth", 32, low=1, high=MAX_LAYERS)
    ffn = vision.int("intermediate_size", 3420, low=1, high=MAX_WIDTH)
    patch, merge = _side(vision, "patch_size", 14), vision.int("spatial_merge_size", 2, low=1, high=16)
    frames = vision.int("temporal_patch_size", 2, low=1, high=16)
    window = vision.int("window_size", 112, low=1, high=1 << 14) // merge // patch
    if hidden % heads:
        vision.fail("num_heads", heads, f"a divisor of hidden_size, {hidden}")
    if window < 1:
        vision.fail("window_size", vision.get("window_size"), f"at least {merge * patch}, merged patches")
    if vision.int("in_channels", vision.int("in_chans", 3)) != 3:
        unsupported(vision, "in_channels", 3)
    full = set(vision.list("fullatt_block_indexes", [7, 15, 23, 31], of=int, limit=MAX_LAYERS))
    rope = vision.section("rope_parameters", None)
    base = 10000.0
    if rope is not None:
        rope.only({"rope_theta", "rope_type"})
        rope.str("rope_type", "axial", choices=("axial",))
        base = rope.number("rope_theta", base, above=0.0)
    check_neutral(vision, {"hidden_size", "num_heads", "depth", "intermediate_size", "patch_size", "spatial_merge_size",
                           "temporal_patch_size", "window_size", "in_channels", "in_chans", "fullatt_block_indexes",
                           "rope_parameters", "out_hidden_size", "hidden_act", "tokens_per_second",
                           "spatial_patch_size"})
    tower = Tower(arch, {
        f"{arch}.vision.block_count": layers, f"{arch}.vision.embedding_length": hidden,
        f"{arch}.vision.attention.head_count": heads, f"{arch}.vision.feed_forward_length": ffn,
        f"{arch}.vision.attention.layer_norm_epsilon": 1e-6, f"{arch}.vision.patch_size": patch,
        f"{arch}.vision.image_size": 16 * merge * patch, "mpool.image.gated": True,
        "mpool.image.activation": activation(vision, "hidden_act", "silu", _ACTIVATIONS),
        "mpool.image.frames": frames, "mpool.image.window": window, "mpool.image.rope_base": base,
        "mpool.image.window_layers": [int(i not in full) for i in range(layers)],
    }, hidden=hidden, output=hidden, patch=patch, image=16 * merge * patch, any_size=True)
    stored = (hidden, 3, frames, patch, patch)
    tower.pieces.append(Piece("patch_embed.proj.weight", "v.patch_embd.weight", stored, (hidden, prod(stored[1:]))))
    tower.add("merger.ln_q.weight", "v.post_ln.weight", hidden)
    for i in range(layers):
        hf, here = f"blocks.{i}", f"v.blk.{i}"
        names = tuple(f"{here}.attn_{name}" for name in "qkv")
        tower.stacked(f"{hf}.attn.qkv.weight", tuple(f"{name}.weight" for name in names), hidden, hidden)
        tower.stacked(f"{hf}.attn.qkv.bias", tuple(f"{name}.bias" for name in names), hidden, None)
        tower.linear(f"{hf}.attn.proj", f"{here}.attn_out", hidden, hidden)
        tower.add(f"{hf}.norm1.weight", f"{here}.ln1.weight", hidden)
        tower.add(f"{hf}.norm2.weight", f"{here}.ln2.weight", hidden)
        tower.linear(f"{hf}.mlp.gate_proj", f"{here}.ffn_gate", ffn, hidden)
        tower.linear(f"{hf}.mlp.up_proj", f"{here}.ffn_up", ffn, hidden)
        tower.linear(f"{hf}.mlp.down_proj", f"{here}.ffn_down", hidden, ffn)
    return tower, merge


# ---- their text networks ---------------------------------------------------------------------------------------------

def read_text(config: Fields, kind: str) -> Tower:
    """The text network beside an image network of CLIP or SigLIP: the core's encoder, with norms before its layers.

    CLIP attends to what stands before, and takes the last token; SigLIP pads every text to all positions, attends to
    all of them, and takes the last position.
    """
    clip, text = kind == "clip", part_of(config, "text_config")
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
    tower = Tower(arch, {
        f"{arch}.block_count": layers, f"{arch}.context_length": positions, f"{arch}.embedding_length": d,
        f"{arch}.feed_forward_length": ffn, f"{arch}.attention.head_count": heads, f"{arch}.vocab_size": vocabulary,
        f"{arch}.attention.causal": clip,
        f"{arch}.attention.layer_norm_epsilon": text.number("layer_norm_eps", 1e-5 if clip else 1e-6, above=0.0),
        "mpool.activation": activation(text, "hidden_act", "quick_gelu" if clip else "gelu_pytorch_tanh", _ACTIVATIONS),
        "mpool.pooling": ["lasttoken"], "mpool.normalize": False, "mpool.dense_count": 1,
        "mpool.dense.0.activation": "identity",
    }, hidden=d, output=output)
    check_neutral(text, {"hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
                         "max_position_embeddings", "vocab_size", "projection_dim", "projection_size", "layer_norm_eps",
                         "hidden_act", "initializer_factor", "dropout"})
    tower.add("text_model.embeddings.token_embedding.weight", "token_embd.weight", vocabulary, d)
    tower.add("text_model.embeddings.position_embedding.weight", "position_embd.weight", positions, d)
    tower.norm("text_model.final_layer_norm", "output_norm")
    for i in range(layers):
        hf, here = f"text_model.encoder.layers.{i}", f"blk.{i}"
        for name in ("q", "k", "v"):
            tower.linear(f"{hf}.self_attn.{name}_proj", f"{here}.attn_{name}", d, d)
        tower.linear(f"{hf}.self_attn.out_proj", f"{here}.attn_output", d, d)
        tower.norm(f"{hf}.layer_norm1", f"{here}.attn_norm")
        tower.norm(f"{hf}.layer_norm2", f"{here}.ffn_norm")
        tower.linear(f"{hf}.mlp.fc1", f"{here}.ffn_up", ffn, d)
        tower.linear(f"{hf}.mlp.fc2", f"{here}.ffn_down", d, ffn)
    if clip:
        tower.add("text_projection.weight", "dense.0.weight", output, d)
    else:
        tower.linear("text_model.head", "dense.0", output, d)
    return tower


READERS = {"clip": read_clip, "siglip": read_siglip, "dinov2": read_dinov2, "dinov2_with_registers": read_dinov2}
#: Names in ``architectures`` of config.json whose weights hold these networks.
CLASSES = {
    "clip": ("CLIPModel",), "siglip": ("SiglipModel",),
    "dinov2": ("Dinov2Model", "Dinov2Backbone", "Dinov2ForImageClassification"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersBackbone",
                              "Dinov2WithRegistersForImageClassification"),
}


def read(config: Fields) -> Tower:
    """The image network of a config.json.

    Raises:
        FormatError, Unsupported: a key is malformed, or asks for something that mpool does not compute.
    """
    kind = config.str("model_type")
    for name in config.list("architectures", [], of=str, limit=16):
        if name not in CLASSES[kind]:
            config.fail("architectures", describe(name), ", ".join(CLASSES[kind]))
    return READERS[kind](config)


def check(tower: Tower, output: tuple[int, int] | None, file: str) -> None:
    """Raises FormatError unless what the processor makes is what the network takes."""
    if output is None and tower.any_size:
        return
    fits = output is not None and (min(output) >= tower.patch if tower.any_size else output == (tower.image, ) * 2)
    if not fits:
        raise FormatError(file=file, field="size", got="sizes that depend on the image" if output is None
                          else f"{output[1]} x {output[0]} pixels", allowed=f"{tower.image} x {tower.image} pixels"
                          if not tower.any_size else f"{tower.patch} pixels and more a side")
