"""Mixtral (arXiv:2401.04088) and Ministral 3, which scales queries by their position."""

from __future__ import annotations

import math
from typing import Any

from ..fields import Fields
from ..spec import Value
from .llama import EXPERTS, IGNORED, decoder, decoder_row, expert_tensors, read_decoder, text_config
from .reading import MAX_CONTEXT
from .rows import Architecture, Config, Tensor

#: Defaults of transformers' Ministral3Config; the ``text_config`` of a vision model omits such values.
_TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
    "num_attention_heads": 32, "max_position_embeddings": 262144}


def _read_ministral(config: Fields, row: Architecture) -> Config:
    if config.get("model_type") == "mistral3":
        config = text_config(config, _TEXT_DEFAULTS)
    return read_decoder(config, row)


def _complete_ministral(table: Fields, name: str, kv: dict[str, Value]) -> None:
    factor, by = (table.number(f"{name}.rope.scaling.{key}", default, above=-1.0, most=1e6)
                  for key, default in (("factor", 1.0), ("yarn_log_multiplier", 0.0)))
    if by and factor > 1:  # cos and sin are scaled as if by mscale 1 and mscale_all_dim `by` of a config.json
        kv["mpool.rope_attention_factor"] = (0.1 * math.log(factor) + 1) / (0.1 * by * math.log(factor) + 1)
    if table.number(f"{name}.attention.temperature_scale", 0.0):
        kv[f"{name}.attention.temperature_length"] = table.int(f"{name}.rope.scaling.original_context_length", low=1,
                                                               high=MAX_CONTEXT)


ROWS = (
    decoder_row("llama", ("MixtralForCausalLM",), (
        *decoder(without=("ffn_gate", "ffn_up", "ffn_down")),
        *expert_tensors("layers.{}.block_sparse_moe", parts=("w1", "w3", "w2"))),
                model_types=("mixtral",), gguf=("llama",), marker=("", ".ffn_gate_inp.weight"), handled=EXPERTS,
                defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_experts": 8,
                          "num_experts_per_tok": 2}),
    # files of the vision models name the output layer after their language model
    decoder_row("mistral3", ("Ministral3ForCausalLM", "Mistral3ForConditionalGeneration"), (
        *decoder(without=("output",)),
        Tensor("lm_head.weight|/language_model.lm_head.weight", "output.weight", "VD", "tied")),
                model_types=("ministral3", "mistral3"), read=_read_ministral, complete=_complete_ministral,
                handled=frozenset({"rope.scaling.yarn_log_multiplier"}),
                defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5},
                prefixes=("language_model.model.", "model.language_model.", "model."),
                ignored=(*IGNORED, r"(model\.)?(vision_tower|multi_modal_projector)\..*")),
)
