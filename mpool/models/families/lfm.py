"""LFM2 and LFM2.5 (arXiv:2511.23404): gated short convolutions in most layers, attention in the others."""

from __future__ import annotations

from typing import Any, cast

from ..fields import Fields
from ..spec import Value
from .llama import decoder, decoder_row, finish, read_common
from .reading import MAX_LAYERS, mixed_layers, require_values
from .rows import Architecture, Config, Tensor, layer

_ATTENTION, _CONV = "layers.{}.self_attn", "layers.{}.conv"
_MLP = "layers.{}.feed_forward"
_TENSORS = (
    *(tensor for tensor in decoder() if not tensor.gguf.startswith("blk.") and tensor.gguf != "output_norm.weight"),
    Tensor("embedding_norm.weight", "output_norm.weight", "D", stored="token_embd_norm.weight|output_norm.weight"),
    *layer("layers.{}.operator_norm", "attn_norm", "D"),
    *layer("layers.{}.ffn_norm", "ffn_norm", "D"),
    *layer(f"{_ATTENTION}.q_proj", "attn_q", "QD", when="in attention"),
    *layer(f"{_ATTENTION}.k_proj", "attn_k", "KD", when="in attention"),
    *layer(f"{_ATTENTION}.v_proj", "attn_v", "UD", when="in attention"),
    *layer(f"{_ATTENTION}.out_proj", "attn_output", "DO", when="in attention"),
    *layer(f"{_ATTENTION}.q_layernorm", "attn_q_norm", "E", when="in attention"),
    *layer(f"{_ATTENTION}.k_layernorm", "attn_k_norm", "E", when="in attention"),
    *layer(f"{_CONV}.in_proj", "shortconv.in_proj", "BD", bias="B", when="in conv", biased="if conv_bias in conv"),
    *layer(f"{_CONV}.out_proj", "shortconv.out_proj", "DD", bias="D", when="in conv", biased="if conv_bias in conv"),
    *layer(f"{_CONV}.conv", "shortconv.conv", "D1L", bias="D", when="folder in conv", biased="if conv_bias in conv"),
    Tensor("", "blk.{}.shortconv.conv.weight", "DL", "in conv"),
    *layer(f"{_MLP}.w1", "ffn_gate", "FD"),
    *layer(f"{_MLP}.w3", "ffn_up", "FD"),
    *layer(f"{_MLP}.w2", "ffn_down", "DF"),
)
#: Keys of published files that transformers does not read -> values of its network.
_FIXED: dict[str, tuple[object, ...]] = {"block_use_swiglu": (None, True), "use_pos_enc": (None, True)}
_SHAPES = {"block_dim", "block_ff_dim", "block_norm_eps", "conv_dim", "conv_dim_out", "num_heads", "theta"}


def _width(config: Fields) -> int:
    """Return the width of the feed-forward networks: the configuration may state that of a network without gates."""
    width = config.int("block_ff_dim", config.int("intermediate_size", 12288, low=1), low=1)
    if not config.bool("block_auto_adjust_ff_dim", True):
        return width
    multiple = config.int("block_multiple_of", 256, low=1)
    width = int(config.number("block_ffn_dim_multiplier", 1.0, above=0.0) * int(2 * width / 3))
    return (width + multiple - 1) // multiple * multiple


def _attends(config: Fields) -> list[bool]:
    """Return for each layer whether it has attention."""
    layers = config.int("num_hidden_layers", low=1, high=MAX_LAYERS)
    full = config.list("full_attn_idxs", list(range(layers)), of=int, limit=MAX_LAYERS)
    return mixed_layers(config, "conv", [i in full for i in range(layers)])


def _compose(kv: dict[str, Value], a: str, attends: list[bool], taps: int) -> None:
    kv["mpool.layer_mixers"] = [int(not attention) for attention in attends]
    kv[f"{a}.shortconv.l_cache"] = taps


def _read(config: Fields, row: Architecture) -> Config:
    attends = _attends(config)
    values = {name: value for name, value in config.values.items() if name not in ("layer_types", "full_attn_idxs")}
    values["intermediate_size"] = _width(config)
    values.setdefault("tie_word_embeddings", config.bool("tie_embedding", True))
    plain = Fields(values, file=config.file, at=config.at)
    kv, used = read_common(plain, row, epsilon="norm_eps", theta=1000000.0)
    _compose(kv, row.name, attends, config.int("conv_L_cache", 3, low=2, high=16))
    require_values(config, _FIXED)
    return finish(plain, row, kv, used | _SHAPES | {
        "block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier", "conv_L_cache", "tie_embedding",
        *_FIXED})


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    layers = cast(int, kv[f"{name}.block_count"])
    heads = table.list(f"{name}.attention.head_count_kv", limit=MAX_LAYERS) \
        if isinstance(table.get(f"{name}.attention.head_count_kv"), list) else [1] * layers
    _compose(kv, name, [count != 0 for count in heads], table.int(f"{name}.shortconv.l_cache", low=2, high=16))


def _extra_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    """Return the sizes of convolutions, and the layers with convolutions and with attention as bits."""
    conv = sum(1 << i for i, mixer in enumerate(kv["mpool.layer_mixers"]) if mixer)
    return {"1": 1, "L": kv[f"{a}.shortconv.l_cache"], "B": 3 * size["D"], "conv": conv,
            "attention": ~conv & ((1 << size["layers"]) - 1)}


ROWS = (
    decoder_row("lfm2", ("Lfm2ForCausalLM",), _TENSORS, read=_read, complete=_complete, extra_sizes=_extra_sizes,
                biases=("conv_bias",), handled=frozenset({"attention.head_count_kv", "shortconv.l_cache"}),
                defaults={"num_key_value_heads": 8, "norm_eps": 1e-5}),
)
