"""GPT-OSS (arXiv:2508.10925).

Its experts have MXFP4 weights and clamped gates; attention has sinks; all linear layers have biases; every second layer
has a sliding window. Folders interleave the rows of the gate and up projections. They store them either in MXFP4, with
codes and scales in separate tensors (as OpenAI publishes them), or as transposed floats (as transformers saves a
dequantised model).
"""

from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..spec import Value
from .llama import decoder_row, finish, read_common, set_window, window_pattern
from .reading import MAX_WIDTH, require_values, unsupported
from .rows import Architecture, Config, Tensor, layer

_BLOCK = "layers.{}"
_EXPERTS = f"{_BLOCK}.mlp.experts"
#: Number of values in an MXFP4 block, and bytes of their codes.
_ITEMS, _CODES = 32, 16
_ALPHA, _LIMIT = 1.702, 7.0
#: Defaults of transformers for a configuration without RoPE scaling.
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 4096}

_TENSORS = (
    Tensor("embed_tokens.weight", "token_embd.weight", "VD"),
    Tensor("norm.weight", "output_norm.weight", "D"),
    Tensor("lm_head.weight", "output.weight", "VD"),
    *layer(f"{_BLOCK}.input_layernorm", "attn_norm", "D"),
    *layer(f"{_BLOCK}.self_attn.q_proj", "attn_q", "QD", bias="Q"),
    *layer(f"{_BLOCK}.self_attn.k_proj", "attn_k", "KD", bias="K"),
    *layer(f"{_BLOCK}.self_attn.v_proj", "attn_v", "UD", bias="U"),
    *layer(f"{_BLOCK}.self_attn.o_proj", "attn_output", "DO", bias="D"),
    Tensor(f"{_BLOCK}.self_attn.sinks", "blk.{}.attn_sinks.weight", "H"),
    *layer(f"{_BLOCK}.post_attention_layernorm", "ffn_norm", "D", stored="post_attention_norm"),
    *layer(f"{_BLOCK}.mlp.router", "ffn_gate_inp", "XD", bias="X"),
    *(Tensor("", f"blk.{{}}.ffn_{part}_exps.{kind}", shape) for part, kind, shape in (
        ("gate", "weight", "XND"), ("gate", "bias", "XN"), ("up", "weight", "XND"), ("up", "bias", "XN"),
        ("down", "weight", "XDN"), ("down", "bias", "XD"))),
    *(Tensor(f"{_EXPERTS}.{name}", f"blk.{{}}.ffn_{part}_exps.{kind}", shape, when)
      for name, part, kind, shape, when in (
        ("gate_up_proj", "gate_up", "columns", "XDG", "folder if unpacked"),
        ("down_proj", "down", "columns", "XND", "folder if unpacked"),
        ("gate_up_proj_blocks", "gate_up", "codes", "XGBC", "folder if packed"),
        ("gate_up_proj_scales", "gate_up", "scales", "XGB", "folder if packed"),
        ("down_proj_blocks", "down", "codes", "XDbC", "folder if packed"),
        ("down_proj_scales", "down", "scales", "XDb", "folder if packed"),
        ("gate_up_proj_bias", "gate_up", "bias", "XG", "folder if experts"),
        ("down_proj_bias", "down", "bias", "XD", "folder if experts"))),
)


def _read(config: Fields, row: Architecture) -> Config:
    values: dict[str, Any] = {"sliding_window": 128, **config.values}
    if "experts_per_token" in values:
        values.setdefault("num_experts_per_tok", values["experts_per_token"])
    if values.get("rope_parameters") is None and values.get("rope_scaling") is None:
        values["rope_scaling"] = _YARN
    config = Fields(values, file=config.file, at=config.at)
    kv, used = read_common(config, row, theta=150000.0, period=2, acts=("silu",))
    width = config.int("intermediate_size", low=1, high=MAX_WIDTH)
    hidden = config.int("hidden_size", low=1, high=MAX_WIDTH)
    kv["mpool.expert_clamp"] = config.number("swiglu_limit", _LIMIT, above=0.0)
    require_values(config, {"swiglu_alpha": (None, _ALPHA), "attention_bias": (None, True)})
    quantised = config.section("quantization_config", None)
    if quantised is not None:
        if quantised.str("quant_method") != "mxfp4":
            unsupported(quantised, "quant_method", "mxfp4, or weights that are not quantised",
                        "Use the model as OpenAI publishes it, or a quantised .gguf")
        for name, size in (("hidden_size", hidden), ("intermediate_size", width)):
            if size % _ITEMS:
                config.fail(name, size, f"a multiple of {_ITEMS}, the size of an MXFP4 block")
    found = finish(config, row, kv, used | {
        "experts_per_token", "swiglu_limit", "swiglu_alpha", "attention_bias", "quantization_config",
        "initial_context_length"})
    if found.tied:
        unsupported(config, "tie_word_embeddings", "false")
    found.sizes = {"G": 2 * width, "B": hidden // _ITEMS, "b": width // _ITEMS, "C": _CODES, "experts": 1,
                   "packed": int(quantised is not None), "unpacked": int(quantised is None)}
    return found


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    window = table.int(f"{name}.attention.sliding_window", low=1)
    set_window(kv, "gpt_oss", window, window_pattern(table, name, 2))
    kv["mpool.expert_clamp"] = _LIMIT
    kv["mpool.rope_yarn_truncate"] = False


ROWS = (
    decoder_row("gpt_oss", ("GptOssForCausalLM",), _TENSORS, read=_read, complete=_complete,
                model_types=("gpt_oss",), gguf=("gpt-oss",),
                defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "num_experts": 128,
                          "num_experts_per_tok": 4},
                handled=frozenset({"expert_count", "expert_used_count"})),
)
