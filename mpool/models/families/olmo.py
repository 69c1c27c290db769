"""OLMo 2 (arXiv:2501.00656): norms of the outputs of attention and feed-forward layer, not of their inputs, and norms
of queries and keys over all heads together."""

from __future__ import annotations

from .llama import ATTENTION_BIAS, decoder, decoder_row
from .rows import layer

_BLOCK = "layers.{}"
_TENSORS = (
    *(tensor for tensor in decoder() if tensor.gguf not in ("blk.{}.attn_norm.weight", "blk.{}.ffn_norm.weight")),
    *layer(f"{_BLOCK}.self_attn.q_norm", "attn_q_norm", "Q"),
    *layer(f"{_BLOCK}.self_attn.k_norm", "attn_k_norm", "K"),
    *layer(f"{_BLOCK}.post_attention_layernorm", "post_attention_norm", "D"),
    *layer(f"{_BLOCK}.post_feedforward_layernorm", "post_ffw_norm", "D"),
)

ROWS = (decoder_row("olmo2", ("Olmo2ForCausalLM",), _TENSORS, biases=ATTENTION_BIAS, defaults={"rms_norm_eps": 1e-5}),)
