"""Seed-OSS: Llama, with biases of queries, keys and values."""

from __future__ import annotations

from .llama import decoder, decoder_row
from .rows import layer

_TENSORS = (
    *decoder(biases=("attention_bias", "attention_out_bias", "mlp_bias"), without=("ffn_norm",)),
    *layer("layers.{}.post_attention_layernorm", "ffn_norm", "D", stored="post_attention_norm"),
)

ROWS = (
    decoder_row("seed_oss", ("SeedOssForCausalLM",), _TENSORS,
                biases=("attention_bias", "attention_out_bias", "mlp_bias"),
                defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True}),
)
