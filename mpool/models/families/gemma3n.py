"""The text side of Gemma 3n: several residual sums per row (AltUp), low-rank layers beside attention (LAuReL), sparse
gates in the first layers, and, as in Gemma 4, inputs per layer and keys that the last layers share."""

from __future__ import annotations

import math
from typing import Any, cast

from ..fields import Fields
from ..spec import Value
from .gemma4 import INPUTS, attention, bits, share
from .llama import (
    ATTENTION_BIAS,
    IGNORED,
    decoder,
    decoder_row,
    finish,
    read_common,
    set_window,
    text_config,
    window_pattern,
)
from .reading import MAX_LAYERS, MAX_WIDTH, require_values
from .rows import Architecture, Config, Tensor, layer

_BLOCK, _ALTUP = "layers.{}", "layers.{}.altup"
_PERIOD = 5
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "max_position_embeddings": 32768,
    "sliding_window": 512, "final_logit_softcapping": 30.0, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 15, "laurel_rank": 64, "altup_num_inputs": 4}
_RANK = 64
#: Layers with sparse gates if the configuration names none, and their sparsity.
_SPARSE, _SPARSITY = 10, 0.95
#: Keys with one supported value, besides those that only training reads.
_FIXED: dict[str, tuple[object, ...]] = {"altup_active_idx": (None, 0), "altup_correct_scale": (None, True)}

_TENSORS = (
    *decoder(without=("ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output")),
    *layer(f"{_BLOCK}.post_attention_layernorm", "post_attention_norm", "D"),
    *layer(f"{_BLOCK}.pre_feedforward_layernorm", "ffn_norm", "D"),
    *layer(f"{_BLOCK}.post_feedforward_layernorm", "post_ffw_norm", "D"),
    *attention("every", "Q", "K", "E"), *INPUTS,
    Tensor("altup_projections.{x}.weight", "altup_proj.{x}.weight", "DD", "folder"),
    Tensor("altup_unembed_projections.{x}.weight", "altup_unembd_proj.{x}.weight", "DD", "folder"),
    Tensor("", "altup_proj.weight", "XDD", "in first"), Tensor("", "altup_unembd_proj.weight", "XDD", "in first"),
    *layer(f"{_ALTUP}.modality_router", "altup_router", "AD"),
    *layer(f"{_ALTUP}.router_norm", "altup_router_norm", "D"),
    *layer(f"{_ALTUP}.prediction_coefs", "altup_predict_coef", "aA"),
    *layer(f"{_ALTUP}.correction_coefs", "altup_correct_coef", "AA"),
    Tensor(f"{_ALTUP}.correct_output_scale", "blk.{}.altup_correct_scale.weight", "D"),
    *layer(f"{_BLOCK}.laurel.linear_left", "laurel_l", "lD"), *layer(f"{_BLOCK}.laurel.linear_right", "laurel_r", "Dl"),
    *layer(f"{_BLOCK}.laurel.post_laurel_norm", "laurel_post_norm", "D"),
)


def _deviations(share_of_zeros: float) -> float:
    """Return the number of standard deviations above the mean below which a gate is 0; 0: all gates stay."""
    from statistics import NormalDist

    return NormalDist().inv_cdf(share_of_zeros) or 1e-12 if share_of_zeros > 0.0 else 0.0


def _read(config: Fields, row: Architecture) -> Config:
    if config.get("model_type") == "gemma3n":
        config = text_config(config, _DEFAULTS)
    else:
        config = Fields({**_DEFAULTS, **{key: value for key, value in config.values.items() if value is not None}},
                        file=config.file, at=config.at)
    a, layers = row.name, config.int("num_hidden_layers", low=1, high=MAX_LAYERS)
    widths = config.list("intermediate_size", of=int, limit=MAX_LAYERS) \
        if isinstance(config.get("intermediate_size"), list) else \
        [config.int("intermediate_size", low=1, high=MAX_WIDTH)] * layers
    if len(widths) != layers or not 0 < widths[0] <= MAX_WIDTH or len(set(widths)) > 1:
        config.fail("intermediate_size", f"{len(widths)} values", f"one value, or {layers} equal ones")
    hidden, heads = config.int("hidden_size", low=1), config.int("num_attention_heads", low=1)
    if hidden % heads:  # as in transformers
        config.fail("num_attention_heads", heads, f"a divisor of hidden_size, {hidden}")
    plain = Fields({**config.values, "intermediate_size": widths[0]}, file=config.file, at=config.at)
    kv, used = read_common(plain, row, act="hidden_activation", period=_PERIOD, theta=1e6)
    kv.setdefault("mpool.rope_local_base", 10000.0)
    windowed = [bool(one) for one in cast(list[int], kv.setdefault("mpool.window_layers", [0] * layers))]
    share(config, "num_kv_shared_layers", kv, a, config.int("num_kv_shared_layers", low=0, high=layers - 1), windowed)
    kv[f"{a}.embedding_length_per_layer_input"] = config.int("hidden_size_per_layer_input", low=1, high=MAX_WIDTH)
    kv[f"{a}.altup.num_inputs"] = config.int("altup_num_inputs", low=2, high=4)
    _compose(kv, a, config.number("final_logit_softcapping", 0.0),
             [_deviations(one) for one in _sparsity(config, layers)])
    require_values(config, _FIXED)
    found = finish(plain, row, kv, used | {
        "final_logit_softcapping", "hidden_size_per_layer_input", "vocab_size_per_layer_input", "num_kv_shared_layers",
        "laurel_rank", "altup_num_inputs", "altup_coef_clip", "activation_sparsity_pattern", *_FIXED,
        "rope_local_base_freq"}, tied=True)
    found.sizes |= {"Y": config.int("vocab_size_per_layer_input", low=1), "every_values": 1,
                    "l": config.int("laurel_rank", low=1, high=MAX_WIDTH),
                    "every_biases": found.sizes["attention_bias"]}
    return found


def _sparsity(config: Fields, layers: int) -> list[float]:
    """Return for each layer the share of gates that become 0."""
    if config.get("activation_sparsity_pattern") is None:
        return [_SPARSITY if i < _SPARSE < layers else 0.0 for i in range(layers)]
    found = config.list("activation_sparsity_pattern", limit=MAX_LAYERS)
    if len(found) != layers or not all(type(one) in (int, float) and 0.0 <= one < 1.0 for one in found):
        config.fail("activation_sparsity_pattern", f"{len(found)} values", f"{layers} numbers from 0 to below 1")
    return found


def _compose(kv: dict[str, Value], a: str, cap: float, sparse: list[float]) -> None:
    kv["mpool.embedding_scale"] = math.sqrt(cast(int, kv[f"{a}.embedding_length"]))
    kv["mpool.attention_scale"], kv["mpool.value_norms"] = 1.0, True
    kv["mpool.sparse_gates"] = sparse
    kv["mpool.rope_layers"] = list(cast(list[int], kv["mpool.window_layers"]))
    if cap:
        kv["mpool.output_softcap"] = cap


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    layers = table.int(f"{name}.block_count", low=1, high=MAX_LAYERS)
    windowed = window_pattern(table, name, _PERIOD)
    set_window(kv, name, table.int(f"{name}.attention.sliding_window", low=1), windowed)
    kv["mpool.rope_local_base"] = table.number(f"{name}.rope.freq_base_swa", 10000.0, above=0.0)
    shared = table.int(f"{name}.attention.shared_kv_layers", 0, low=0, high=layers - 1)
    share(table, f"{name}.attention.shared_kv_layers", kv, name, shared, windowed)
    require_values(table, {f"{name}.altup.active_idx": (None, 0)})
    table.int(f"{name}.altup.num_inputs", low=2, high=4)
    table.int(f"{name}.embedding_length_per_layer_input", low=1, high=MAX_WIDTH)
    found = table.list(f"{name}.activation_sparsity_scale", [], limit=MAX_LAYERS)
    if found and (len(found) != layers or not all(isinstance(one, float) and one < 100 for one in found)):
        table.fail(f"{name}.activation_sparsity_scale", f"{len(found)} values", f"{layers} numbers, one per layer")
    # minus infinity: no gate becomes 0
    sparse = [0.0 if one < -100 else one or 1e-12 for one in found] or [0.0] * layers
    _compose(kv, name, table.number(f"{name}.final_logit_softcapping", 0.0), sparse)


def _extra_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    layers, sums = size["layers"], kv[f"{a}.altup.num_inputs"]
    own = [i < layers - kv[f"{a}.attention.shared_kv_layers"] for i in range(layers)]
    width = kv[f"{a}.embedding_length_per_layer_input"]
    return {"X": sums - 1, "A": sums, "a": sums * sums, "l": _RANK, "W": width, "w": width * layers, "Y": size["V"],
            "first": 1, "every": bits([True] * layers), "own_every": bits(own),
            "read_every": bits([not one for one in own]), "every_values": 1}


ROWS = (
    decoder_row("gemma3n", ("Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"), _TENSORS, read=_read,
                complete=_complete, activation="gelu_tanh", biases=ATTENTION_BIAS, extra_sizes=_extra_sizes,
                model_types=("gemma3n_text", "gemma3n"), handled=frozenset({"final_logit_softcapping"}),
                prefixes=("model.language_model.", "language_model.model.", "model."),
                ignored=(*IGNORED, r"(model\.)?((vision|audio)_tower|embed_(vision|audio))\..*")),
)
