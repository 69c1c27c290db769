"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905).

Query, key and value projections are one fused tensor; gate and up projections are another. Some models rotate only a
part of the dimensions of each head; some use LongRoPE (arXiv:2402.13753).
"""

from __future__ import annotations

from ..fields import Fields
from ..spec import Value
from .llama import decoder_row
from .rows import Tensor, layer

_BLOCK = "layers.{}"
_TENSORS = (
    Tensor("embed_tokens.weight", "token_embd.weight", "VD"),
    Tensor("norm.weight", "output_norm.weight", "D"),
    Tensor("lm_head.weight", "output.weight", "VD", "tied"),
    Tensor("", "rope_factors_long.weight", "R", "gguf"),
    Tensor("", "rope_factors_short.weight", "R", "gguf"),
    *layer(f"{_BLOCK}.input_layernorm", "attn_norm", "D"),
    *layer(f"{_BLOCK}.self_attn.qkv_proj[0]", "attn_q", "QD", stored="attn_qkv[0]|attn_q"),
    *layer(f"{_BLOCK}.self_attn.qkv_proj[1]", "attn_k", "KD", stored="attn_qkv[1]|attn_k"),
    *layer(f"{_BLOCK}.self_attn.qkv_proj[2]", "attn_v", "UD", stored="attn_qkv[2]|attn_v"),
    *layer(f"{_BLOCK}.self_attn.o_proj", "attn_output", "DO"),
    *layer(f"{_BLOCK}.post_attention_layernorm", "ffn_norm", "D"),
    *layer(f"{_BLOCK}.mlp.gate_up_proj[0]", "ffn_gate", "FD", stored="ffn_gate|ffn_up[0]"),
    *layer(f"{_BLOCK}.mlp.gate_up_proj[1]", "ffn_up", "FD", stored="ffn_up[1]|ffn_up"),
    *layer(f"{_BLOCK}.mlp.down_proj", "ffn_down", "DF"),
)


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    original = table.int(f"{name}.rope.scaling.original_context_length", None, low=1)
    if original is not None:  # the core uses it only for models with LongRoPE factors
        kv["mpool.rope_long_from"] = original
    kv["mpool.rope_attention_factor"] = table.number(f"{name}.rope.scaling.attn_factor", 1.0, above=0.0)


ROWS = (
    decoder_row("phi3", ("Phi3ForCausalLM",), _TENSORS, complete=_complete, partial_rope=True, remote=True,
                defaults={"rms_norm_eps": 1e-5},
                handled=frozenset({"rope.scaling.attn_factor"})),
)
