"""Gemma 2 and 3 (arXiv:2408.00118, arXiv:2503.19786).

Both have norms before and after attention and feed-forward layer, and alternate layers with and without a sliding
window. Gemma 2 soft-caps attention scores and logits; Gemma 3 has head norms, and a second RoPE base for the layers
with a window.
"""

from __future__ import annotations

import math
from typing import Any, cast

from ..fields import Fields
from ..spec import Value
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
from .rows import Architecture, Config, Tensor, layer

#: Period of the layers with full attention: every second layer of Gemma 2, every sixth layer of Gemma 3.
FULL_PERIODS = {"gemma2": 2, "gemma3": 6}
#: Number of layers of the largest model of each version. Its attention scores are scaled by the hidden size divided by
#: the number of heads, not by the head dimension.
LARGEST = {"gemma2": 46, "gemma3": 62}
_ACT = "hidden_activation"
#: Defaults of transformers' Gemma3TextConfig; the ``text_config`` of a Gemma 3 vision model omits such values.
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "sliding_window": 4096}


def _tensors(head_norms: bool) -> tuple[Tensor, ...]:
    block = "layers.{}"
    return (*decoder(head_norms=head_norms, without=("ffn_norm",)),
            *layer(f"{block}.post_attention_layernorm", "post_attention_norm", "D"),
            *layer(f"{block}.pre_feedforward_layernorm", "ffn_norm", "D"),
            *layer(f"{block}.post_feedforward_layernorm", "post_ffw_norm", "D"))


def _common(kv: dict[str, Value], a: str) -> None:
    kv["mpool.embedding_scale"] = math.sqrt(cast(int, kv[f"{a}.embedding_length"]))
    if "mpool.rope_local_base" in kv:
        windowed = cast(list[int], kv.get("mpool.window_layers", [0] * cast(int, kv[f"{a}.block_count"])))
        kv["mpool.rope_layers"] = list(windowed)


def _read(config: Fields, row: Architecture) -> Config:
    is_gemma3 = row.name == "gemma3"
    if config.get("model_type") == "gemma3":
        config = text_config(config, TEXT_DEFAULTS)
    period = config.int("sliding_window_pattern",
                        config.int("_sliding_window_pattern", FULL_PERIODS[row.name], low=1), low=1)
    kv, used = read_common(config, row, act=_ACT, period=period, theta=1e6 if is_gemma3 else 1e4)
    if is_gemma3:
        kv.setdefault("mpool.rope_local_base", 10000.0)
    kv["mpool.attention_scale"] = 1 / math.sqrt(config.number("query_pre_attn_scalar", 256.0, above=0.0))
    for key, ours, default in (("attn_logit_softcapping", "attention_softcap", 50.0),
                               ("final_logit_softcapping", "output_softcap", 30.0)):
        if is_gemma3 and ours == "attention_softcap":
            continue  # transformers' Gemma 3 ignores attn_logit_softcapping
        if config.get(key) is not None or (key not in config and not is_gemma3):
            kv[f"mpool.{ours}"] = config.number(key, default, above=0.0)
    kv["mpool.norm_offset"] = 1.0
    _common(kv, row.name)
    return finish(config, row, kv, used | {
        "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "sliding_window_pattern",
        "_sliding_window_pattern", "rope_local_base_freq", "hidden_act"}, tied=True)


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    is_gemma3, layers = name == "gemma3", table.int(f"{name}.block_count", low=1)
    window = table.int(f"{name}.attention.sliding_window", None if is_gemma3 else 4096, low=0)
    if window:
        set_window(kv, name, window, window_pattern(table, name, FULL_PERIODS[name]))
    if is_gemma3:
        kv["mpool.rope_local_base"] = table.number(f"{name}.rope.freq_base_swa", 10000.0, above=0.0)
    if layers == LARGEST[name]:
        width = table.int(f"{name}.embedding_length", low=1) / table.int(f"{name}.attention.head_count", low=1)
        kv["mpool.attention_scale"] = 1 / math.sqrt(width)
    for key, ours, default in (("attn_logit_softcapping", "attention_softcap", 50.0),
                               ("final_logit_softcapping", "output_softcap", 30.0)):
        cap = table.number(f"{name}.{key}", 0.0 if is_gemma3 else default)
        if cap:
            kv[f"mpool.{ours}"] = cap
    _common(kv, name)


_HANDLED = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
#: Defaults of both versions.
DEFAULTS = {"num_key_value_heads": 4, "head_dim": 256}

ROWS = (
    decoder_row("gemma2", ("Gemma2ForCausalLM",), _tensors(False), read=_read, complete=_complete, handled=_HANDLED,
                activation="gelu_tanh", biases=ATTENTION_BIAS, defaults=DEFAULTS),
    decoder_row("gemma3", ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"), _tensors(True), read=_read,
                complete=_complete, handled=_HANDLED, activation="gelu_tanh", model_types=("gemma3_text", "gemma3"),
                biases=ATTENTION_BIAS, defaults=DEFAULTS,
                prefixes=("language_model.model.", "model.language_model.", "model."),
                ignored=(*IGNORED, r"(model\.)?(vision_tower|multi_modal_projector)\..*")),
)
