"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side in each layer, and factors on many of its parts.

GGUF files hold the weights multiplied by the factors.
"""

from __future__ import annotations

import math
from typing import cast

from ..fields import Fields
from ..spec import Value
from .llama import decoder, decoder_row, finish, read_common
from .mamba import MAMBA, complete_mamba, mamba_sizes, mamba_tensors, read_mamba
from .reading import require_values
from .rows import Architecture, Config, Tensor, layer

_BLOCK = "layers.{}"
_TENSORS = (
    *(tensor for tensor in decoder() if ".ffn_" not in tensor.gguf and tensor.gguf != "output_norm.weight"),
    Tensor("final_layernorm.weight", "output_norm.weight", "D"),
    Tensor(f"{_BLOCK}.pre_ff_layernorm.weight", "blk.{}.ffn_norm.weight", "D",
           stored="blk.{}.ffn_norm|blk.{}.ffn_norm.weight"),
    *(tensor for name, shape in (("gate", "FD"), ("up", "FD"), ("down", "DF"))
      for tensor in layer(f"{_BLOCK}.feed_forward.{name}_proj", f"ffn_{name}", shape)),
    *mamba_tensors(f"{_BLOCK}.mamba", norm="if gated_norm"),
)
_FIXED: dict[str, tuple[object, ...]] = {key: (None, False) for key in ("attention_bias", "mlp_bias", "projectors_bias",
                                                                        "mamba_proj_bias")}


def _factors(config: Fields, key: str, count: int) -> list[float]:
    found = config.list(key, [1.0] * count, limit=64)
    if len(found) != count or any(type(one) not in (int, float) or not 0 < one <= 1e6 for one in found):
        config.fail(key, f"{len(found)} values", f"{count} numbers above 0, at most 1e6")
    return [float(one) for one in found]


def _read(config: Fields, row: Architecture) -> Config:
    kv, used = read_common(config, row, acts=("silu",))
    a = row.name
    scale = {key: config.number(f"{key}_multiplier", 1.0, above=0.0, most=1e6) for key in (
        "embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")}
    hidden, head = cast(int, kv[f"{a}.embedding_length"]), cast(int, kv[f"{a}.rope.dimension_count"])
    gate, down = _factors(config, "mlp_multipliers", 2)
    kv["mpool.embedding_scale"], kv["mpool.output_scale"] = scale["embedding"], scale["lm_head"]
    kv["mpool.attention_scale"] = scale["attention_in"] ** 2 * scale["key"] / math.sqrt(max(1, head))
    kv["mpool.mixed_scale"] = scale["attention_in"] * scale["attention_out"]
    kv["mpool.recurrent_scale"], kv["mpool.gate_scale"], kv["mpool.ffn_scale"] = scale["ssm_out"], gate, down
    kv["mpool.ssm_scales"] = [scale["ssm_in"] * one for one in _factors(config, "ssm_multipliers", 5)]
    inner = config.int("mamba_d_ssm", None, low=1, high=1 << 20) if "mamba_d_ssm" in config else 1024
    if inner is None:
        inner = config.int("mamba_expand", 2, low=1, high=64) * hidden
    used |= read_mamba(config, kv, a, {"heads": 128, "head": 1, "groups": 1, "state": 256}, inner=inner)
    _compose(kv, a)
    normed = config.bool("mamba_rms_norm", False)
    kv["mpool.norm_then_gate"] = config.bool("mamba_norm_before_gate", True)
    require_values(config, _FIXED)
    found = finish(config, row, kv, used | {f"{key}_multiplier" for key in scale} | {
        "mlp_multipliers", "ssm_multipliers", "mamba_d_ssm", "mamba_expand", "mamba_rms_norm", "mamba_conv_bias",
        "mamba_norm_before_gate", "num_logits_to_keep", "mamba_use_mlp", "mlp_expansion_factor", *_FIXED})
    found.sizes |= {"gated_norm": int(normed), "conv_bias": int(config.bool("mamba_conv_bias", True))}
    return found


def _compose(kv: dict[str, Value], a: str) -> None:
    kv["mpool.layer_mixers"] = [MAMBA] * cast(int, kv[f"{a}.block_count"])
    kv["mpool.attention_beside"] = True


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    _compose(kv, "falcon_h1")
    complete_mamba(table, name)


ROWS = (
    decoder_row("falcon_h1", ("FalconH1ForCausalLM",), _TENSORS, read=_read, complete=_complete,
                gguf=("falcon-h1",), extra_sizes=mamba_sizes,
                defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
)
