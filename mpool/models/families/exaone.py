"""EXAONE 4.0 (arXiv:2507.11407): norms of queries and keys per head, and of the outputs of both sublayers, not of their
inputs. The larger model has a sliding window with RoPE in three of four layers, and no RoPE in the others."""

from __future__ import annotations

from .llama import decoder, decoder_row
from .rows import layer

_BLOCK = "layers.{}"
_TENSORS = (
    *decoder(head_norms=True, without=("attn_norm", "ffn_norm")),
    *layer(f"{_BLOCK}.post_attention_layernorm", "post_attention_norm", "D"),
    *layer(f"{_BLOCK}.post_feedforward_layernorm", "post_ffw_norm", "D"),
)

ROWS = (
    decoder_row("exaone4", ("Exaone4ForCausalLM",), _TENSORS, period=4, window_rope="only",
                defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5}),
)
