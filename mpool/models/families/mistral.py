"""Mixtral (arXiv:2401.04088) and Ministral 3, which scales queries by their position."""

from __future__ import annotations

import math
from typing import Any

from ..fields import Fields, describe
from ..spec import Value
from .llama import EXPERTS, IGNORED, decoder, decoder_row, expert_tensors, read_decoder, text_config
from .reading import MAX_CONTEXT
from .rows import Architecture, Config, Tensor, layer

_COMMON: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
#: Defaults of transformers' Ministral3Config and MistralConfig, by ``model_type``; the ``text_config`` of a vision
#: model omits such values.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "ministral3": {**_COMMON, "vocab_size": 131072, "num_hidden_layers": 34, "max_position_embeddings": 262144},
    "mistral": {**_COMMON, "vocab_size": 32000, "num_hidden_layers": 32, "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-6}}
#: RoPE of a Ministral3Config that states none.
_ROPE: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}


def _read_ministral(config: Fields, row: Architecture) -> Config:
    if config.get("model_type") == "mistral3":
        kind = config.section("text_config").str("model_type", "ministral3")
        if kind not in TEXT_DEFAULTS:
            config.section("text_config").fail("model_type", describe(kind), " or ".join(TEXT_DEFAULTS))
        config = text_config(config, TEXT_DEFAULTS[kind])
    if config.get("model_type") == "ministral3" and not {"rope_parameters", "rope_scaling"} & set(config):
        config = Fields({**config.values, "rope_parameters": _ROPE}, file=config.file, at=config.at)
    return read_decoder(config, row)


def _complete_ministral(table: Fields, name: str, kv: dict[str, Value]) -> None:
    factor, by = (table.number(f"{name}.rope.scaling.{key}", default, above=-1.0, most=1e6)
                  for key, default in (("factor", 1.0), ("yarn_log_multiplier", 0.0)))
    if by and factor > 1:  # cos and sin are scaled as if by mscale 1 and mscale_all_dim `by` of a config.json
        kv["mpool.rope_attention_factor"] = (0.1 * math.log(factor) + 1) / (0.1 * by * math.log(factor) + 1)
    if table.number(f"{name}.attention.temperature_scale", 0.0):
        kv[f"{name}.attention.temperature_length"] = table.int(f"{name}.rope.scaling.original_context_length", low=1,
                                                               high=MAX_CONTEXT)


_DENSE = decoder(without=("ffn_gate", "ffn_up", "ffn_down"))
ROWS = (
    # GGUF files of before April 2024 have one tensor per expert
    decoder_row("llama", (), (
        *_DENSE, *layer("", "ffn_gate_inp", "XD", when="in sparse"),
        *(Tensor("", f"blk.{{}}.ffn_{part}.{{x}}.weight", shape, "in sparse")
          for part, shape in (("gate", "ND"), ("up", "ND"), ("down", "DN")))),
                model_types=(), gguf=("llama",), marker=("", ".ffn_gate.0.weight"), handled=EXPERTS),
    decoder_row("llama", ("MixtralForCausalLM",), (
        *_DENSE,
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
