"""Gemma 4: the text side of all its models.

Layers with full attention have heads of another size and number than layers with a sliding window, and in the larger
models no projection of values: their values are their keys. The last layers of the small models have no keys and
values of their own (they read those of earlier layers), and wider networks. Values have a norm without weights. The
small models add to each layer inputs of its own from a second table of tokens. The model with experts has them beside
the dense network.
"""

from __future__ import annotations

import math
from typing import Any, cast

from ..fields import Fields
from ..spec import Value
from .llama import (
    ATTENTION_BIAS,
    EXPERTS,
    IGNORED,
    decoder,
    decoder_row,
    finish,
    read_common,
    set_window,
    text_config,
    window_pattern,
    windowed_layers,
)
from .reading import MAX_LAYERS, MAX_WIDTH, require_values, unsupported
from .rows import Architecture, Config, Tensor, layer

_BLOCK, _ATTENTION = "layers.{}", "layers.{}.self_attn"
_PERIOD = 6
#: Defaults of the classes of transformers: those of both, and the other ones of Gemma4TextConfig and
#: Gemma4UnifiedTextConfig.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
_FIRST: dict[str, Any] = {"max_position_embeddings": 131072, "sliding_window": 512, "hidden_size_per_layer_input": 256}
_UNIFIED: dict[str, Any] = {"max_position_embeddings": 262144, "sliding_window": 1024}
_ROPE: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}


def attention(kind: str, q: str, k: str, e: str) -> tuple[Tensor, ...]:
    """Return the tensors of the attention of one kind of layers.

    Args:
        kind: name of the size with these layers; those that have their own keys are in the size ``own_`` + ``kind``.
        q: letter of the queries of all heads.
        k: letter of the keys.
        e: letter of a head.
    """
    own, biased = f"own_{kind}", "if attention_bias in "
    unused = {"when": f"gguf in read_{kind}"}  # keys and values that files may have, but no network reads
    return (
        *layer(f"{_ATTENTION}.q_proj", "attn_q", f"{q}D", bias=q, when=f"in {kind}", biased=biased + kind),
        *layer(f"{_ATTENTION}.o_proj", "attn_output", f"D{q}", bias="D", when=f"in {kind}", biased=biased + kind),
        *layer(f"{_ATTENTION}.q_norm", "attn_q_norm", e, when=f"in {kind}"),
        *layer(f"{_ATTENTION}.k_proj", "attn_k", f"{k}D", bias=k, when=f"in {own}", biased=biased + own),
        *layer(f"{_ATTENTION}.v_proj", "attn_v", f"{k}D", bias=k, when=f"if {kind}_values in {own}",
               biased=f"if {kind}_biases in {own}"),
        *layer(f"{_ATTENTION}.k_norm", "attn_k_norm", e, when=f"in {own}"),
        *(Tensor(f"{_ATTENTION}.{hf}.weight", f"#blk.{{}}.{name}.weight", shape, stored=f"blk.{{}}.{name}.weight",
                 **unused)
          for hf, name, shape in (("k_proj", "attn_k", f"{k}D"), ("v_proj", "attn_v", f"{k}D"),
                                  ("k_norm", "attn_k_norm", e))),
    )


def _network(kind: str, width: str) -> tuple[Tensor, ...]:
    return tuple(row for name, shape in (("gate", f"{width}D"), ("up", f"{width}D"), ("down", f"D{width}"))
                 for row in layer(f"{_BLOCK}.mlp.{name}_proj", f"ffn_{name}", shape, when=f"in {kind}"))


#: Tensors of the layers' inputs.
INPUTS = (
    Tensor("embed_tokens_per_layer.weight", "per_layer_token_embd.weight", "Yw", "if W"),
    Tensor("per_layer_model_projection.weight", "per_layer_model_proj.weight", "wD", "if W"),
    Tensor("per_layer_projection_norm.weight", "per_layer_proj_norm.weight", "W", "if W"),
    *layer(f"{_BLOCK}.per_layer_input_gate", "inp_gate", "WD", when="if W"),
    *layer(f"{_BLOCK}.per_layer_projection", "proj", "DW", when="if W"),
    *layer(f"{_BLOCK}.post_per_layer_input_norm", "post_norm", "D", when="if W"),
)
_TENSORS = (
    *decoder(without=("ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")),
    *layer(f"{_BLOCK}.post_attention_layernorm", "post_attention_norm", "D"),
    *layer(f"{_BLOCK}.pre_feedforward_layernorm", "ffn_norm", "D"),
    *layer(f"{_BLOCK}.post_feedforward_layernorm", "post_ffw_norm", "D"),
    Tensor(f"{_BLOCK}.layer_scalar", "blk.{}.layer_output_scale.weight", "1"),
    *attention("wide", "Q", "K", "E"), *attention("narrow", "q", "k", "e"),
    *_network("single", "F"), *_network("double", "f"),
    *INPUTS,
    *layer(f"{_BLOCK}.router.proj", "ffn_gate_inp", "XD", when="in sparse"),
    Tensor(f"{_BLOCK}.router.scale", "blk.{}.ffn_gate_inp.scale", "D", "in sparse"),
    Tensor(f"{_BLOCK}.router.per_expert_scale", "blk.{}.ffn_down_exps.scale", "X", "in sparse"),
    Tensor(f"{_BLOCK}.experts.gate_up_proj", "blk.{}.ffn_gate_up_exps.weight", "XGD", "if X in sparse"),
    Tensor("", "blk.{}.ffn_gate_exps.weight", "XND", "gguf in sparse"),
    Tensor("", "blk.{}.ffn_up_exps.weight", "XND", "gguf in sparse"),
    Tensor(f"{_BLOCK}.experts.down_proj", "blk.{}.ffn_down_exps.weight", "XDN", "in sparse"),
    *(row for hf, gguf in (("post_feedforward_layernorm_1", "post_ffw_norm_1"),
                           ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
                           ("post_feedforward_layernorm_2", "post_ffw_norm_2"))
      for row in layer(f"{_BLOCK}.{hf}", gguf, "D", when="in sparse")),
)


def kinds(config: Fields, layers: int) -> list[str]:
    """Return the types of the layers. The last one has full attention, whatever the file says."""
    types = config.list("layer_types", None, of=str, limit=MAX_LAYERS)
    if types is None:
        types = ["sliding_attention" if windowed else "full_attention" for windowed in windowed_layers(layers, _PERIOD)]
    return [*types[:-1], "full_attention"]


def _wide_heads(config: Fields, types: list[str], heads: int) -> tuple[int, int]:
    """Return the size and the number of KV heads of layers with full attention.

    Files have ``per_layer_config``, or the keys that it replaces.
    """
    size, count = config.int("head_dim", low=1, high=MAX_WIDTH), config.int("num_key_value_heads", low=1)
    if "per_layer_config" not in config:
        size = config.int("global_head_dim", 512, low=1, high=MAX_WIDTH)
        given = config.int("num_global_key_value_heads", None, low=1, high=heads)
        return size, given if given is not None and config.bool("attention_k_eq_v", False) else count
    table = config.section("per_layer_config")
    full = [i for i, kind in enumerate(types) if kind == "full_attention"]
    found: set[tuple[int, int]] = {(size, count)} if len(table.values) != len(full) else set()
    for number in table:
        own = table.section(number)
        own.only({"head_dim", "num_key_value_heads"})
        if not number.isdecimal() or len(number) > 6 or int(number) not in full:
            table.fail(number, "present", "numbers of layers with full_attention only")
        found.add((own.int("head_dim", size, low=1, high=MAX_WIDTH), own.int("num_key_value_heads", count, low=1)))
    if len(found) > 1:
        unsupported(config, "per_layer_config", "equal values for all layers with full_attention")
    return found.pop() if found else (size, count)


def _read(config: Fields, row: Architecture) -> Config:
    name = str(config.get("model_type"))
    defaults = {**_DEFAULTS, **(_UNIFIED if name.startswith("gemma4_unified") else _FIRST)}
    if name in ("gemma4", "gemma4_unified"):
        config = text_config(config, defaults)
    else:
        config = Fields({**defaults, **{key: value for key, value in config.values.items() if value is not None}},
                        file=config.file, at=config.at)
    return read_layers(config, row, kinds(config, config.int("num_hidden_layers", low=1, high=MAX_LAYERS)))


def read_layers(config: Fields, row: Architecture, types: list[str], more: frozenset[str] | set[str] = frozenset(),
                ) -> Config:
    """Read a configuration with the defaults of its class. ``types``: types of the layers; ``more``: further keys that
    the caller reads."""
    a, layers = row.name, len(types)
    size, count = _wide_heads(config, types, config.int("num_attention_heads", low=1))
    values = {**config.values, "layer_types": types, "head_dim": size, "num_key_value_heads": count}
    values.setdefault("rope_parameters", _ROPE)
    plain = Fields(values, file=config.file, at=config.at)
    kv, used = read_common(plain, row, act="hidden_activation")
    narrow, windowed = config.int("head_dim", low=1, high=MAX_WIDTH), [kind != "full_attention" for kind in types]
    kv[f"{a}.attention.key_length_swa"] = kv[f"{a}.rope.dimension_count_swa"] = narrow
    kv["mpool.window_layers"] = [int(window) for window in windowed]
    shared = config.int("num_kv_shared_layers", 0, low=0, high=layers - 1)
    share(config, "num_kv_shared_layers", kv, a, shared, windowed)
    widths = [config.int("intermediate_size", low=1, high=MAX_WIDTH)] * layers
    if config.bool("use_double_wide_mlp", False):
        widths[layers - shared:] = [2 * width for width in widths[layers - shared:]]
    kv[f"{a}.feed_forward_length"] = cast(Value, widths)
    local = config.int("num_key_value_heads", low=1)
    kv[f"{a}.attention.head_count_kv"] = cast(Value, [local if window else count for window in windowed])
    kv[f"{a}.embedding_length_per_layer_input"] = config.int("hidden_size_per_layer_input", 0, low=0, high=MAX_WIDTH)
    cap = config.number("final_logit_softcapping", 0.0)
    _compose(kv, a, cap, values_are_keys=config.bool("attention_k_eq_v", False))
    if config.bool("enable_moe_block", False):
        experts = config.int("num_experts", low=1, high=4096)
        kv[f"{a}.expert_count"] = experts
        kv[f"{a}.expert_used_count"] = config.int("top_k_experts", low=1, high=experts)
        kv[f"{a}.expert_feed_forward_length"] = config.int("moe_intermediate_size", low=1, high=MAX_WIDTH)
    require_values(config, {"use_bidirectional_attention": (None, False, "vision")})
    found = finish(plain, row, kv, used | {
        "use_bidirectional_attention", "global_head_dim", "num_global_key_value_heads", "per_layer_config",
        "attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input",
        "vocab_size_per_layer_input", "final_logit_softcapping", "enable_moe_block", "num_experts", "top_k_experts",
        "moe_intermediate_size", *more}, tied=True)
    biased, projected = found.sizes["attention_bias"], int(not kv["mpool.key_values"])
    found.sizes |= {"Y": config.int("vocab_size_per_layer_input", 262144, low=1), "wide_values": projected,
                    "wide_biases": biased & projected, "narrow_biases": biased}
    return found


def share(table: Fields, key: str, kv: dict[str, Value], a: str, shared: int, windowed: list[bool]) -> None:
    """Store the number of last layers that read keys and values of earlier layers. These must be of both kinds if the
    last ones are."""
    if set(windowed) != set(windowed[:len(windowed) - shared]):
        table.fail(key, shared, "so few layers that layers of both kinds are before them")
    kv[f"{a}.attention.shared_kv_layers"] = shared


def _compose(kv: dict[str, Value], a: str, cap: float, values_are_keys: bool) -> None:
    kv["mpool.embedding_scale"] = math.sqrt(cast(int, kv[f"{a}.embedding_length"]))
    kv["mpool.attention_scale"] = 1.0
    kv["mpool.value_norms"], kv["mpool.key_values"] = True, values_are_keys
    kv["mpool.experts_beside"], kv["mpool.expert_normalise"] = True, True
    if cap:
        kv["mpool.output_softcap"] = cap
    kv["mpool.rope_layers"] = list(cast(list[int], kv["mpool.window_layers"]))


def by_layer(table: Fields, key: str, layers: int) -> list[int]:
    """Return the values of a key of a GGUF file that has one value, or one per layer."""
    if not isinstance(table.get(key), list):
        return [table.int(key, low=1, high=MAX_WIDTH)] * layers
    found: list[int] = table.list(key, of=int, limit=MAX_LAYERS)
    if len(found) != layers or not all(0 < one <= MAX_WIDTH for one in found):
        table.fail(key, f"{len(found)} values", f"{layers} values of at least 1, one per layer")
    return found


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    layers = table.int(f"{name}.block_count", low=1, high=MAX_LAYERS)
    windowed = window_pattern(table, name, _PERIOD)
    set_window(kv, name, table.int(f"{name}.attention.sliding_window", low=1), windowed)
    kv["mpool.rope_local_base"] = table.number(f"{name}.rope.freq_base_swa",
                                               cast(float, kv[f"{name}.rope.freq_base"]), above=0.0)
    wide = table.int(f"{name}.attention.key_length", low=1, high=MAX_WIDTH)
    narrow = table.int(f"{name}.attention.key_length_swa", wide, low=1, high=MAX_WIDTH)
    for kind, length in (("", wide), ("_swa", narrow)):
        require_values(table, {f"{name}.attention.value_length{kind}": (None, length)})
    kv[f"{name}.attention.key_length_swa"] = narrow
    shared = table.int(f"{name}.attention.shared_kv_layers", 0, low=0, high=layers - 1)
    share(table, f"{name}.attention.shared_kv_layers", kv, name, shared, windowed)
    heads = by_layer(table, f"{name}.attention.head_count_kv", layers)
    widths = by_layer(table, f"{name}.feed_forward_length", layers)
    for key, values, kinds in (("attention.head_count_kv", heads, windowed),
                               ("feed_forward_length", widths, [i >= layers - shared for i in range(layers)])):
        if len(set(zip(values, kinds))) > len(set(kinds)):
            unsupported(table, f"{name}.{key}", "layers of a kind that are equal")
        kv[f"{name}.{key}"] = cast(Value, values)
    _compose(kv, name, table.number(f"{name}.final_logit_softcapping", 0.0), values_are_keys=True)


def bits(layers: list[bool]) -> int:
    return sum(1 << i for i, one in enumerate(layers) if one)


def extra_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    """Return the sizes of the tensors, and the layers that have them as bits."""
    layers, heads = size["layers"], size["H"]
    windowed = [bool(one) for one in kv["mpool.window_layers"]]
    own = [i < layers - kv[f"{a}.attention.shared_kv_layers"] for i in range(layers)]
    narrow, counts, widths = (kv[f"{a}.{key}"] for key in (
        "attention.key_length_swa", "attention.head_count_kv", "feed_forward_length"))
    wide_count = next((count for count, window in zip(counts, windowed) if not window), counts[0])
    count = next((count for count, window in zip(counts, windowed) if window), counts[0])
    found = {"1": 1, "G": 2 * size["N"], "K": wide_count * size["E"], "q": heads * narrow, "k": count * narrow,
             "e": narrow, "F": widths[0], "f": widths[-1], "Y": size["V"],
             "W": kv.get(f"{a}.embedding_length_per_layer_input", 0), "single": bits(own),
             "double": bits([not one for one in own]), "narrow_values": 1}
    for kind, layers_of in (("wide", [not window for window in windowed]), ("narrow", windowed)):
        found |= {kind: bits(layers_of), f"own_{kind}": bits([a and b for a, b in zip(layers_of, own)]),
                  f"read_{kind}": bits([a and not b for a, b in zip(layers_of, own)])}
    return found | {"w": found["W"] * layers}


ROWS = (
    decoder_row("gemma4", ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedForCausalLM",
                           "Gemma4UnifiedForConditionalGeneration"), _TENSORS, read=_read, complete=_complete,
                activation="gelu_tanh", biases=ATTENTION_BIAS, extra_sizes=extra_sizes,
                model_types=("gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"),
                handled=EXPERTS | {"final_logit_softcapping"},
                by_layer=frozenset({"attention.head_count_kv", "feed_forward_length"}),
                prefixes=("model.language_model.", "language_model.model.", "model."),
                ignored=(*IGNORED, r"(model\.)?((vision|audio)_tower|embed_(vision|audio)|vision_embedder)\..*")),
)
