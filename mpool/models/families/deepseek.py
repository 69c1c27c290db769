"""DeepSeek-V2, V3 (arXiv:2405.04434, arXiv:2412.19437) and Kimi K2.

They use multi-head latent attention (MLA). The first layers are dense; the others are mixtures of experts (MoE) with
expert groups, shared experts and, in V3, a learned correction bias of the router.
"""

from __future__ import annotations

import math
from typing import Any, cast

from ..fields import Fields
from ..spec import Value
from .experts import complete_routing, read_experts, read_groups, read_routing, set_routing
from .llama import decoder_row, expert_tensors, finish, read_scaling
from .reading import MAX_WIDTH, activation, require_values, sizes, unsupported
from .rows import Architecture, Config, Tensor, layer

_BLOCK = "layers.{}"
_ATTENTION, _MLP = f"{_BLOCK}.self_attn", f"{_BLOCK}.mlp"
#: Epsilon of the norms of the latents; the configuration states only the epsilon of the other norms.
_LATENT_EPSILON = 1e-6

_TENSORS = (
    Tensor("embed_tokens.weight", "token_embd.weight", "VD"),
    Tensor("norm.weight", "output_norm.weight", "D"),
    Tensor("lm_head.weight", "output.weight", "VD", "tied"),
    *layer(f"{_BLOCK}.input_layernorm", "attn_norm", "D"),
    *layer(f"{_BLOCK}.post_attention_layernorm", "ffn_norm", "D"),
    *layer(f"{_ATTENTION}.q_proj", "attn_q", "WD", when="if direct"),
    *layer(f"{_ATTENTION}.q_a_proj", "attn_q_a", "JD", when="if J"),
    *layer(f"{_ATTENTION}.q_a_layernorm", "attn_q_a_norm", "J", when="if J"),
    *layer(f"{_ATTENTION}.q_b_proj", "attn_q_b", "WJ", when="if J"),
    *layer(f"{_ATTENTION}.kv_a_proj_with_mqa", "attn_kv_a_mqa", "AD"),
    *layer(f"{_ATTENTION}.kv_a_layernorm", "attn_kv_a_norm", "L"),
    # a GGUF file contains either kv_b, or its two halves with the key half transposed
    *layer(f"{_ATTENTION}.kv_b_proj", "attn_kv_b", "YL", when="if L"),
    Tensor("", "blk.{}.attn_k_b.weight", "HLn", "gguf"),
    Tensor("", "blk.{}.attn_v_b.weight", "HvL", "gguf"),
    *layer(f"{_ATTENTION}.o_proj", "attn_output", "DZ"),
    *layer(f"{_MLP}.gate_proj", "ffn_gate", "FD", when="in dense"),
    *layer(f"{_MLP}.up_proj", "ffn_up", "FD", when="in dense"),
    *layer(f"{_MLP}.down_proj", "ffn_down", "DF", when="in dense"),
    *expert_tensors(_MLP, shared="shared_experts"),
    Tensor(f"{_MLP}.gate.e_score_correction_bias", "blk.{}.exp_probs_b.bias", "X", "if corrected in sparse"),
)


def _read(config: Fields, row: Architecture) -> Config:
    is_v3 = config.get("model_type") != "deepseek_v2"
    a = row.name
    kv, used = sizes(config, row)
    heads, layers = config.int("num_attention_heads", low=1, high=MAX_WIDTH), config.int("num_hidden_layers", low=1)
    if config.int("num_key_value_heads", heads, low=1) != heads:
        unsupported(config, "num_key_value_heads", f"{heads}, the value of num_attention_heads")
    kv[f"{a}.attention.head_count_kv"] = heads
    kv[f"{a}.attention.layer_norm_rms_epsilon"] = config.number("rms_norm_eps", 1e-6, above=0.0)
    kv["mpool.latent_epsilon"] = _LATENT_EPSILON
    plain = config.int("qk_nope_head_dim", 128, low=1, high=MAX_WIDTH)
    rotated = config.int("qk_rope_head_dim", 64, low=2, high=MAX_WIDTH)
    _heads(kv, a, plain + rotated, config.int("v_head_dim", 128, low=1, high=MAX_WIDTH))
    kv[f"{a}.attention.kv_lora_rank"] = config.int("kv_lora_rank", 512, low=1, high=MAX_WIDTH)
    # null: queries are not compressed; a missing key: 1536, the value of the family's first model
    kv[f"{a}.attention.q_lora_rank"] = config.int("q_lora_rank", 0, low=1, high=MAX_WIDTH) if "q_lora_rank" in config \
        else 1536
    kv[f"{a}.rope.dimension_count"] = rotated
    _rope(config, kv, a, plain + rotated)
    kv["mpool.rope_neox"] = not config.bool("rope_interleave", True) if is_v3 else False
    kv["mpool.activation"] = activation(config, "hidden_act", row.activation)
    used |= read_experts(config, kv, a, {"n_routed_experts": 256 if is_v3 else 64, "num_experts_per_tok": 8,
                                         "moe_intermediate_size": 2048 if is_v3 else 1407})
    width = cast(int, kv[f"{a}.expert_feed_forward_length"])
    kv[f"{a}.expert_shared_feed_forward_length"] = width * config.int("n_shared_experts", 1 if is_v3 else 2, low=0,
                                                                      high=64)
    kv[f"{a}.leading_dense_block_count"] = min(layers, config.int("first_k_dense_replace", 3 if is_v3 else 0, low=0))
    method = config.str("topk_method", "noaux_tc" if is_v3 else "greedy")
    if method not in (("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")):
        unsupported(config, "topk_method", "noaux_tc" if is_v3 else "greedy and group_limited_greedy")
    if is_v3:
        read_routing(config, kv, a, 2.5, (8, 4))
    else:
        set_routing(kv, normalise=False, scale=config.number("routed_scaling_factor", 1.0, above=0.0), sigmoid=False)
        if method != "greedy":
            read_groups(config, kv, a, 1, 1)
    require_values(config, {"moe_layer_freq": (None, 1), "scoring_func": (None, kv["mpool.expert_gate"]),
                            "ep_size": (None, 1)})
    if not is_v3 and config.bool("norm_topk_prob", False):
        unsupported(config, "norm_topk_prob", "false in DeepSeek-V2 models")
    return finish(config, row, kv, used | {
        "num_key_value_heads", "rms_norm_eps", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank",
        "q_lora_rank", "rope_theta", "rope_scaling", "rope_parameters", "rope_interleave", "hidden_act",
        "num_experts", "n_shared_experts", "first_k_dense_replace", "norm_topk_prob", "routed_scaling_factor",
        "topk_method", "n_group", "topk_group", "moe_layer_freq", "scoring_func", "ep_size", "aux_loss_alpha",
        "seq_aux", "head_dim", "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers", "auto_map"})


def _heads(kv: dict[str, Value], a: str, key: int, value: int) -> None:
    """Store the key and value dimensions of a head under both of GGUF's names, with and without ``_mla``.

    They are the dimensions before the key and value up-projections are absorbed.
    """
    kv[f"{a}.attention.key_length"] = kv[f"{a}.attention.key_length_mla"] = key
    kv[f"{a}.attention.value_length"] = kv[f"{a}.attention.value_length_mla"] = value


def _rope(config: Fields, kv: dict[str, Value], a: str, key: int) -> None:
    new, old = config.section("rope_parameters", None), config.section("rope_scaling", None)
    if new is not None and old is not None:
        config.fail("rope_scaling", "present in addition to rope_parameters", "only one of the two keys")
    rope = new or old or Fields({}, file=config.file, at="rope_parameters")
    read_scaling(config, rope, kv, a, 10000.0)
    factor, by = rope.number("factor", 1.0, above=0.0), rope.number("mscale_all_dim", 0.0)
    if (rope.str("rope_type", None) or rope.str("type", "default")) != "default" and by and factor > 1:
        kv["mpool.attention_scale"] = (0.1 * by * math.log(factor) + 1) ** 2 / math.sqrt(key)


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    whole = f"{name}.attention.key_length_mla" in table
    mla = "_mla" if whole else ""
    key = table.int(f"{name}.attention.key_length{mla}", low=2, high=MAX_WIDTH)
    _heads(kv, name, key, table.int(f"{name}.attention.value_length{mla}", low=1, high=MAX_WIDTH))
    table.int(f"{name}.attention.kv_lora_rank", low=1, high=MAX_WIDTH)
    kv[f"{name}.attention.head_count_kv"] = table.int(f"{name}.attention.head_count", low=1, high=MAX_WIDTH)
    kv[f"{name}.attention.q_lora_rank"] = table.int(f"{name}.attention.q_lora_rank", 0, low=0, high=MAX_WIDTH)
    layers = table.int(f"{name}.block_count", low=1)
    kv[f"{name}.leading_dense_block_count"] = min(layers, table.int(f"{name}.leading_dense_block_count", 0, low=0))
    width = table.int(f"{name}.expert_feed_forward_length", low=1, high=MAX_WIDTH)
    shared = table.int(f"{name}.expert_shared_count", 0, low=0, high=64)
    kv[f"{name}.expert_shared_feed_forward_length"] = width * shared
    gate = table.int(f"{name}.expert_gating_func", 1)
    if gate not in (0, 1, 2):
        table.fail(f"{name}.expert_gating_func", gate, "1 (softmax) or 2 (sigmoid)")
    complete_routing(table, name, kv, normalise=False, sigmoid=gate == 2)
    if table.str(f"{name}.rope.scaling.type", "none") == "yarn":
        # the published models scale the attention scores, and do not scale the rotated queries and keys
        factor = table.number(f"{name}.rope.scaling.factor", above=0.0)
        by = table.number(f"{name}.rope.scaling.yarn_log_multiplier", 0.0, above=-1.0, most=1000.0)
        kv["mpool.rope_attention_factor"] = 1.0
        kv["mpool.attention_scale"] = (1 + by * math.log(max(factor, 1.0))) ** 2 / math.sqrt(key)


def _extra_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    """Return the sizes that only this family has."""
    heads, key, value = size["H"], kv[f"{a}.attention.key_length_mla"], kv[f"{a}.attention.value_length_mla"]
    rank, q_rank, rotated = kv[f"{a}.attention.kv_lora_rank"], kv[f"{a}.attention.q_lora_rank"], 2 * size["R"]
    return {"L": rank, "A": rank + rotated, "J": q_rank, "direct": int(not q_rank), "W": heads * key,
            "n": key - rotated, "v": value, "Y": heads * (key - rotated + value), "Z": heads * value,
            "corrected": int(kv["mpool.expert_corrected"])}


ROWS = (
    decoder_row("deepseek2", ("DeepseekV3ForCausalLM", "DeepseekV2ForCausalLM"), _TENSORS, read=_read,
                complete=_complete, model_types=("deepseek_v3", "deepseek_v2", "kimi_k2"), remote=True,
                extra_sizes=_extra_sizes,
                ignored=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq", r"model\.layers\.61\..*"),
                handled=frozenset({"expert_count", "expert_used_count", "expert_shared_count", "expert_weights_scale",
                                   "expert_gating_func", "rope.scaling.yarn_log_multiplier"})),
)
