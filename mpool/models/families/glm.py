"""GLM-4 of April 2025 and GLM-Z1: norms of the inputs and outputs of both sublayers, RoPE on half of each head."""

from __future__ import annotations

from .llama import ATTENTION_BIAS, decoder, decoder_row
from .rows import layer

_BLOCK = "layers.{}"
_TENSORS = (
    *decoder(biases=("attention_bias", "", ""), without=("ffn_gate", "ffn_up")),
    *layer(f"{_BLOCK}.post_self_attn_layernorm", "post_attention_norm", "D"),
    *layer(f"{_BLOCK}.post_mlp_layernorm", "post_ffw_norm", "D"),
    *layer(f"{_BLOCK}.mlp.gate_up_proj[0]", "ffn_gate", "FD", stored="ffn_gate|ffn_up[0]"),
    *layer(f"{_BLOCK}.mlp.gate_up_proj[1]", "ffn_up", "FD", stored="ffn_up[1]|ffn_up"),
)

ROWS = (
    decoder_row("glm4", ("Glm4ForCausalLM",), _TENSORS, biases=ATTENTION_BIAS, partial_rope=True, rope_neox=False,
                defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7,
                          "partial_rotary_factor": 0.5, "attention_bias": True}),
)
