"""LFM2 and LFM2.5 (arXiv:2511.23404), LFM3: gated short convolutions in most layers, attention in the others.

LFM2-MoE has experts in all layers except the first ones. The embedding models of LFM2.5 have attention and
convolutions in both directions; LFM2-ColBERT is a causal decoder. LFM3 has a gate for the output of each head, norms
of the outputs of sublayers, and a sliding window in some layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from ..fields import Fields
from ..spec import Value
from .experts import complete_routing, read_routing
from .llama import attention_tensors, decoder, decoder_row, finish, read_common
from .reading import MAX_LAYERS, MAX_WIDTH, mixed_layers, require_values
from .rows import Architecture, Config, Tensor, layer

_ATTENTION, _CONV = "layers.{}.self_attn", "layers.{}.conv"
_MLP = "layers.{}.feed_forward"
_SHARED = (
    *(tensor for tensor in decoder() if not tensor.gguf.startswith("blk.") and tensor.gguf != "output_norm.weight"),
    Tensor("embedding_norm.weight", "output_norm.weight", "D", stored="token_embd_norm.weight|output_norm.weight"),
    *layer("layers.{}.operator_norm", "attn_norm", "D"),
    *layer("layers.{}.ffn_norm", "ffn_norm", "D"),
    *attention_tensors(_ATTENTION, "in attention", out=f"out_proj|{_ATTENTION}.o_proj"),
    *layer(f"{_ATTENTION}.q_layernorm|{_ATTENTION}.q_norm", "attn_q_norm", "E", when="in attention"),
    *layer(f"{_ATTENTION}.k_layernorm|{_ATTENTION}.k_norm", "attn_k_norm", "E", when="in attention"),
    *layer(f"{_CONV}.in_proj", "shortconv.in_proj", "BD", bias="B", when="in conv", biased="if conv_bias in conv"),
    *layer(f"{_CONV}.out_proj", "shortconv.out_proj", "DD", bias="D", when="in conv", biased="if conv_bias in conv"),
    *layer(f"{_CONV}.conv", "shortconv.conv", "D1L", bias="D", when="folder in conv", biased="if conv_bias in conv"),
    Tensor("", "blk.{}.shortconv.conv.weight", "DL", "in conv"),
)


def _feed_forward(when: str = "") -> tuple[Tensor, ...]:
    """Return the tensors of the feed-forward networks without experts. ``when``: their condition."""
    return (*layer(f"{_MLP}.w1", "ffn_gate", "FD", when=when), *layer(f"{_MLP}.w3", "ffn_up", "FD", when=when),
            *layer(f"{_MLP}.w2", "ffn_down", "DF", when=when))


_ROUTER = (*layer(f"{_MLP}.gate", "ffn_gate_inp", "XD", when="in sparse"),
           Tensor(f"{_MLP}.expert_bias", "blk.{}.exp_probs_b.bias", "X", "if corrected in sparse"))
_EXPERTS = (
    *_ROUTER,
    *(row for name, part, shape in (("w1", "gate", "ND"), ("w3", "up", "ND"), ("w2", "down", "DN"))
      for row in (*layer(f"{_MLP}.experts.{{x}}.{name}", f"ffn_{part}.{{x}}", shape, when="folder in sparse"),
                  Tensor("", f"blk.{{}}.ffn_{part}_exps.weight", f"X{shape}", "in sparse"))),
)
#: Folders that transformers saves with ``save_original_format=False`` have one tensor for all experts of a layer.
_JOINED = (*_ROUTER, Tensor(f"{_MLP}.experts.gate_up_proj", "blk.{}.ffn_gate_up_exps.weight", "XGD", "in sparse"),
           Tensor(f"{_MLP}.experts.down_proj", "blk.{}.ffn_down_exps.weight", "XDN", "in sparse"))
#: Files have ``gate_proj``, which transformers renames to ``g_proj``: adapters have that name.
_LFM3 = (*_SHARED, *_feed_forward(), *layer("layers.{}.post_operator_norm", "post_attention_norm", "D"),
         *layer("layers.{}.post_ffn_norm", "post_ffw_norm", "D"),
         *layer(f"{_ATTENTION}.gate_proj|{_ATTENTION}.g_proj", "attn_head_gate", "HD",
                when="if use_attention_gate in attention"))
#: RoPE of LFM3 by default.
_ROPES = {"full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5},
          "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
#: Number that the network adds to the sum of the chosen experts' scores before it divides by it.
_EPSILON = 1e-6
#: Keys of published files that transformers does not read -> values of its network.
_FIXED: dict[str, tuple[object, ...]] = {"block_use_swiglu": (None, True), "use_pos_enc": (None, True)}
_ADJUSTED = {"block_auto_adjust_ff_dim", "block_multiple_of", "block_ffn_dim_multiplier"}
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
    found = mixed_layers(config, "conv", layers)
    if found is None:
        full = config.list("full_attn_idxs", list(range(layers)), of=int, limit=MAX_LAYERS)
        found = [i in full for i in range(layers)]
    return found


def _compose(kv: dict[str, Value], a: str, attends: list[bool], taps: int) -> None:
    kv["mpool.layer_mixers"] = [int(not attention) for attention in attends]
    kv[f"{a}.shortconv.l_cache"] = taps


def _read(config: Fields, row: Architecture) -> Config:
    return _read_network(config, row, _ADJUSTED, intermediate_size=_width(config))


def _read_lfm3(config: Fields, row: Architecture) -> Config:
    values = {"sliding_window": 256, **config.values}
    epsilon = values.get("rms_norm_eps", values.get("norm_eps"))
    layers = config.int("num_hidden_layers", low=1, high=MAX_LAYERS)
    for key, usual in (("rope_parameters", _ROPES), ("layer_types", [
            "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 < i else "conv"
            for i in range(layers)])):
        values[key] = usual if values.get(key) is None else values[key]
    given = Fields(values, file=config.file, at=config.at)
    attends = mixed_layers(given, "conv", layers, ("full_attention", "sliding_attention"))
    given.section("rope_parameters").section("full_attention")
    require_values(config, {"use_sandwich_norm": (True,)})
    return _read_network(
        config, row, {"auto_map", "use_sandwich_norm", "rms_norm_eps"}, attends, norm_eps=epsilon,
        sliding_window=values["sliding_window"], rope_parameters=values["rope_parameters"],
        layer_types=["full_attention" if kind == "conv" else kind for kind in values["layer_types"]])


def _read_network(config: Fields, row: Architecture, used: set[str], attends: list[bool] | None = None,
                  **own: Any) -> Config:
    """Read what all models have.

    Args:
        config: ``config.json``.
        row: row of the family.
        used: keys that were read.
        attends: for each layer whether it has attention; None: as LFM2 states it.
        **own: values that replace those of the configuration.
    """
    attends = _attends(config) if attends is None else attends
    values = {name: value for name, value in config.values.items() if name not in ("layer_types", "full_attn_idxs")}
    values |= own
    values.setdefault("tie_word_embeddings", config.bool("tie_embedding", True))
    plain = Fields(values, file=config.file, at=config.at)
    kv, known = read_common(plain, row, epsilon="norm_eps", theta=1000000.0, acts=("silu",))
    _compose(kv, row.name, attends, config.int("conv_L_cache", row.defaults.get("conv_L_cache", 3), low=2, high=16))
    require_values(config, _FIXED)
    return finish(plain, row, kv, known | used | _SHAPES | {"conv_L_cache", "tie_embedding", *_FIXED})


def _read_moe(config: Fields, row: Architecture) -> Config:
    found, a = _read_network(config, row, {
        "num_dense_layers", "use_expert_bias", "norm_topk_prob", "routed_scaling_factor"}), row.name
    kv, layers = found.kv, cast(int, found.kv[f"{a}.block_count"])
    config.list("layer_types", of=str)  # has no default in this class
    kv[f"{a}.leading_dense_block_count"] = min(layers, config.int("num_dense_layers", 2, low=0))
    read_routing(config, kv, a)
    kv["mpool.expert_corrected"], kv["mpool.expert_epsilon"] = config.bool("use_expert_bias", True), _EPSILON
    return found


def _read_embedder(config: Fields, row: Architecture) -> Config:
    code = config.section("auto_map", None)
    names = [*config.list("architectures", [], of=str), "" if code is None else code.get("AutoModel", "")]
    both = config.get("model_type") != "lfm2" or any("Lfm2Bidirectional" in str(name) for name in names)
    found = _read_network(config, row, _ADJUSTED | {"auto_map", "conv_zero_padding", "is_causal"},
                          intermediate_size=_width(config))
    found.kv[f"{row.name}.attention.causal"] = not both
    return found


def _complete_embedder(table: Fields, name: str, kv: dict[str, Value]) -> None:
    _complete(table, name, kv, "lfm2_embedding")
    kv["lfm2_embedding.attention.causal"] = table.bool(f"{name}.attention.causal", True)


def _complete(table: Fields, name: str, kv: dict[str, Value], a: str | None = None) -> None:
    layers = cast(int, kv[f"{a or name}.block_count"])
    heads = table.list(f"{name}.attention.head_count_kv", limit=MAX_LAYERS) \
        if isinstance(table.get(f"{name}.attention.head_count_kv"), list) else [1] * layers
    _compose(kv, a or name, [count != 0 for count in heads], table.int(f"{name}.shortconv.l_cache", low=2, high=16))


def _complete_moe(table: Fields, name: str, kv: dict[str, Value]) -> None:
    _complete(table, name, kv)
    require_values(table, {f"{name}.expert_gating_func": (None, 2)})  # sigmoid
    layers = cast(int, kv[f"{name}.block_count"])
    kv[f"{name}.leading_dense_block_count"] = min(layers, table.int(f"{name}.leading_dense_block_count", 0, low=0))
    table.int(f"{name}.expert_feed_forward_length", low=1, high=MAX_WIDTH)
    complete_routing(table, name, kv)
    kv["mpool.expert_epsilon"] = _EPSILON


def _extra_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    """Return the sizes of convolutions, and the layers with convolutions and with attention as bits."""
    conv, every = sum(1 << i for i, mixer in enumerate(kv["mpool.layer_mixers"]) if mixer), (1 << size["layers"]) - 1
    return {"1": 1, "G": 2 * size["N"], "L": kv[f"{a}.shortconv.l_cache"], "B": 3 * size["D"], "conv": conv,
            "attention": ~conv & every,
            "sparse": every & ~((1 << kv.get(f"{a}.leading_dense_block_count", 0)) - 1),
            "corrected": int(kv.get("mpool.expert_corrected", False))}


def _row(name: str, *others: Any, handled: tuple[str, ...] = (), usual: dict[str, int] | None = None,
         **more: Any) -> Architecture:
    common: dict[str, Any] = {
        "extra_sizes": _extra_sizes, "biases": ("conv_bias",),
        "defaults": {"num_key_value_heads": 8, "norm_eps": 1e-5, **(usual or {})},
        "handled": frozenset({"attention.head_count_kv", "shortconv.l_cache", *handled})}
    return replace(decoder_row(name, *others, **common), **more)


ROWS = (
    _row("lfm2", ("Lfm2ForCausalLM",), (*_SHARED, *_feed_forward()), read=_read, complete=_complete),
    *(_row("lfm2moe", ("Lfm2MoeForCausalLM",), (*_SHARED, *_feed_forward("in dense"), *experts), read=_read_moe,
           complete=_complete_moe, model_types=("lfm2_moe",), marker=marker,
           usual={"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 1792},
           handled=("expert_count", "expert_used_count", "expert_gating_func", "expert_weights_scale"))
      for experts, marker in ((_EXPERTS, ("", "")),
                              (_JOINED, ("feed_forward.experts.gate_up_proj", "ffn_gate_up_exps.weight")))),
    _row("lfm3", ("Lfm3ForCausalLM",), _LFM3, read=_read_lfm3, gguf=(), remote=True, window_rope="own",
         biases=("conv_bias", "use_attention_gate"),
         defaults={"num_key_value_heads": 4, "head_dim": 128, "norm_eps": 1e-5, "conv_L_cache": 7,
                   "use_attention_gate": True}),
    _row("lfm2_embedding", ("Lfm2Model", "Lfm2BidirectionalModel", "Lfm2BidirectionalForMaskedLM"),
         (*(tensor for tensor in _SHARED if tensor.when not in ("tied", "gguf")), *_feed_forward(),
          Tensor("", "output.weight", "VD", "gguf")),
         capability="text_embedding", read=_read_embedder, complete=_complete_embedder, remote=True,
         model_types=("lfm2", "lfm2_bidirectional"), gguf=("lfm2",), prefixes=("", "model.", "lfm2."),
         ignored=(r"lm_head\.weight",), handled=("attention.causal",)),
)
