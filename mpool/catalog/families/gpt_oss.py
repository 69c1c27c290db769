"""GPT-OSS (arXiv:2508.10925), from GGUF files: experts in MXFP4 with clamped gates, attention sinks, biases everywhere,
every other layer with a window. Folders hold the experts in an order of their own and are not read."""

from __future__ import annotations

from ..fields import Fields
from ..spec import Value
from .llama import has_window, set_window, text_row
from .rows import Tensor, layer

_TENSORS = (
    Tensor("", "token_embd.weight", "VD"),
    Tensor("", "output_norm.weight", "D"),
    Tensor("", "output.weight", "VD"),
    *layer("", "attn_norm", "D"),
    *layer("", "attn_q", "QD", bias="Q"),
    *layer("", "attn_k", "KD", bias="K"),
    *layer("", "attn_v", "UD", bias="U"),
    *layer("", "attn_output", "DO", bias="D"),
    *layer("", "attn_sinks", "H"),
    *layer("", "ffn_norm", "D", stored="post_attention_norm"),
    *layer("", "ffn_gate_inp", "XD", bias="X"),
    *(Tensor("", f"blk.{{}}.ffn_{part}_exps.{kind}", shape) for part, kind, shape in (
        ("gate", "weight", "XND"), ("gate", "bias", "XN"), ("up", "weight", "XND"), ("up", "bias", "XN"),
        ("down", "weight", "XDN"), ("down", "bias", "XD"))),
)


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    layers = table.int(f"{name}.block_count", low=1)
    set_window(kv, "gpt_oss", table.int(f"{name}.attention.sliding_window", low=1), has_window(layers, 2))
    kv["mpool.expert_clamp"] = 7.0
    kv["mpool.rope_yarn_truncate"] = False
    if "gpt_oss.expert_feed_forward_length" not in kv:
        kv["gpt_oss.expert_feed_forward_length"] = table.int(f"{name}.feed_forward_length", low=1)


ROWS = (
    text_row("gpt_oss", ("GptOssForCausalLM",), _TENSORS, complete=_complete, model_types=(), gguf=("gpt-oss",),
             handled=frozenset({"expert_count", "expert_used_count"})),
)
