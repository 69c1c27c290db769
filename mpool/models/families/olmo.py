"""OLMo 2 (arXiv:2501.00656) and OLMo 3: norms of the outputs of attention and feed-forward layer, not of their inputs,
and norms of queries and keys over all heads together. OLMo 3 has a sliding window in three of four layers, whose RoPE
is not scaled."""

from __future__ import annotations

from .llama import ATTENTION_BIAS, decoder, decoder_row
from .rows import layer

_BLOCK = "layers.{}"
_TENSORS = (
    *decoder(without=("attn_norm", "ffn_norm")),
    *layer(f"{_BLOCK}.self_attn.q_norm", "attn_q_norm", "Q"),
    *layer(f"{_BLOCK}.self_attn.k_norm", "attn_k_norm", "K"),
    *layer(f"{_BLOCK}.post_attention_layernorm", "post_attention_norm", "D"),
    *layer(f"{_BLOCK}.post_feedforward_layernorm", "post_ffw_norm", "D"),
)

ROWS = (
    decoder_row("olmo2", ("Olmo2ForCausalLM",), _TENSORS, gguf=(), biases=ATTENTION_BIAS,
                defaults={"rms_norm_eps": 1e-5}),
    # GGUF files of OLMo 2 and 3 have the architecture olmo2
    decoder_row("olmo2", ("Olmo3ForCausalLM",), _TENSORS, model_types=("olmo3",), gguf=("olmo2",),
                biases=ATTENTION_BIAS, defaults={"rms_norm_eps": 1e-5, "rope_theta": 500000.0}, period=4,
                window_rope="own"),
)
