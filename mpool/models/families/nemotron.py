"""NVIDIA's Nemotron-H (arXiv:2504.03624), Nemotron Nano 2 and Nemotron 3.

Each layer has one block: Mamba-2, attention without positions, a network with squared ReLU and no gates, or experts of
that kind beside a shared expert. The experts of Nemotron 3 Super see projections of the rows to fewer components.
"""

from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..spec import Value
from .experts import complete_routing, read_experts, read_routing
from .llama import attention_tensors, decoder_row, finish, read_common
from .mamba import ATTENTION, MAMBA, Names, complete_mamba, kv_heads, mamba_sizes, mamba_tensors, mix, read_mamba
from .reading import MAX_LAYERS, MAX_WIDTH, require_values
from .rows import Architecture, Config, Tensor, layer

_MIXER = "layers.{}.mixer"
_TENSORS = (
    Tensor("embeddings.weight", "token_embd.weight", "VD"),
    Tensor("norm_f.weight", "output_norm.weight", "D"),
    Tensor("lm_head.weight", "output.weight", "VD", "tied"),
    *layer("layers.{}.norm", "attn_norm", "D"),
    *attention_tensors(_MIXER, "in attention"),
    *mamba_tensors(_MIXER, "in mamba"),
    *(tensor for name, shape in (("up", "FD"), ("down", "DF"))
      for tensor in layer(f"{_MIXER}.{name}_proj", f"ffn_{name}", shape, bias=shape[0], when="in mlp",
                          biased="if mlp_bias in mlp")),
    *(tensor for name, shape in (("up", "SD"), ("down", "DS"))
      for tensor in layer(f"{_MIXER}.shared_experts.{name}_proj", f"ffn_{name}_shexp", shape, bias=shape[0],
                          when="in sparse", biased="if mlp_bias in sparse")),
    *layer(f"{_MIXER}.fc1_latent_proj", "ffn_latent_down", "ZD", bias="Z", when="if latent in sparse",
           biased="if latent_bias in sparse"),
    *layer(f"{_MIXER}.fc2_latent_proj", "ffn_latent_up", "DZ", bias="D", when="if latent in sparse",
           biased="if latent_bias in sparse"),
    *layer(f"{_MIXER}.gate", "ffn_gate_inp", "XD", when="in sparse"),
    Tensor(f"{_MIXER}.gate.e_score_correction_bias", "blk.{}.exp_probs_b.bias", "X", "in sparse"),
    *layer(f"{_MIXER}.experts.{{x}}.up_proj", "ffn_up.{x}", "NZ", when="folder in sparse"),
    *layer(f"{_MIXER}.experts.{{x}}.down_proj", "ffn_down.{x}", "ZN", when="folder in sparse"),
    Tensor("", "blk.{}.ffn_up_exps.weight", "XNZ", "in sparse"),
    Tensor("", "blk.{}.ffn_down_exps.weight", "XZN", "in sparse"),
)
#: Kinds of layers: in ``hybrid_override_pattern``, in ``layers_block_type``, and there in older files.
_KINDS = {"M": ("linear_attention", "mamba"), "*": ("full_attention", "attention"), "-": ("mlp",), "E": ("moe",)}
#: Values of ``mpool.layer_blocks``.
_MIXES, _FEEDS = 1, 2
_FIXED: dict[str, tuple[object, ...]] = {
    "mamba_hidden_act": (None, "silu"), "mamba_proj_bias": (None, False), "mlp_hidden_act": (None, "relu2")}
_OF_EXPERTS = {"n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group",
               "moe_shared_expert_intermediate_size", "moe_latent_size", "norm_topk_prob", "routed_scaling_factor",
               "topk_group"}
#: Keys that change no computation, or not one of its results beyond rounding.
_UNUSED = {"num_logits_to_keep", "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
           "residual_in_fp32", "rescale_prenorm_residual", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
           "num_nextn_predict_layers", "output_router_logits", "expand", "auto_map", "n_shared_experts"}


def _kinds(config: Fields) -> tuple[str, str]:
    """Return the kind of each layer as a letter, and the key that states them."""
    pattern, types = config.str("hybrid_override_pattern", None), config.list("layers_block_type", None, of=str,
                                                                              limit=MAX_LAYERS)
    if types is None:
        key, found = "hybrid_override_pattern", list(pattern if pattern is not None else "ME*-")
    else:
        key = "layers_block_type"
        found = [next((letter for letter, names in _KINDS.items() if kind in names), kind) for kind in types]
    for kind in found:
        if kind not in _KINDS:
            config.fail(key, kind, ", ".join(_KINDS if types is None else [names[0] for names in _KINDS.values()]))
    if not 0 < len(found) <= MAX_LAYERS:
        config.fail(key, f"{len(found)} layers", f"1 to {MAX_LAYERS} layers")
    return "".join(found), key


def _compose(table: Fields, key: str, kv: dict[str, Value], kinds: str) -> None:
    mixes = [kind in "M*" for kind in kinds]
    mix(table, key, kv, [MAMBA if kind == "M" else ATTENTION for kind in kinds], mixes)
    kv["mpool.layer_blocks"] = [_MIXES if mixer else _FEEDS for mixer in mixes]
    kv["mpool.dense_layers"] = [int(kind != "E") for kind in kinds]
    kv["mpool.gated_ffn"] = False
    kv["mpool.rope_layers"] = [-1] * len(kinds)


def _read(config: Fields, row: Architecture) -> Config:
    kinds, key = _kinds(config)
    values = {**config.values, "num_hidden_layers": len(kinds)}
    values.setdefault("intermediate_size", 21504)
    plain = Fields(values, file=config.file, at=config.at)
    kv, used = read_common(plain, row, act="mlp_hidden_act", epsilon="layer_norm_epsilon", acts=("relu2",))
    _compose(config, key, kv, kinds)
    if "M" in kinds:
        names = Names("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
        used |= read_mamba(config, kv, row.name, {"heads": 128, "head": 64, "groups": 8, "state": 128}, names=names)
    if "E" in kinds:
        _read_experts(config, kv, row.name)
    require_values(config, _FIXED)
    found = finish(plain, row, kv, used | _UNUSED | {
        *_FIXED, *_OF_EXPERTS, "hybrid_override_pattern", "layers_block_type", "use_bias", "use_conv_bias",
        "rms_norm_eps"})
    proj, latent = int(config.bool("use_bias", False)), kv.get(f"{row.name}.moe_latent_size", 0) != 0
    found.sizes |= {"proj_bias": proj, "out_bias": proj, "conv_bias": int(config.bool("use_conv_bias", True)),
                    "latent_bias": int(latent) & found.sizes["mlp_bias"]}
    return found


def _read_experts(config: Fields, kv: dict[str, Value], a: str) -> None:
    read_experts(config, kv, a, {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688})
    kv[f"{a}.expert_shared_feed_forward_length"] = config.int("moe_shared_expert_intermediate_size", 7688, low=1,
                                                              high=MAX_WIDTH)
    latent = config.int("moe_latent_size", None, low=1, high=MAX_WIDTH)
    if latent is not None:
        kv[f"{a}.moe_latent_size"] = latent
    read_routing(config, kv, a, groups=(1, 1))


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    a, key = "nemotron_h", f"{name}.feed_forward_length"
    if f"{name}.attention.layer_norm_rms_epsilon" not in table:  # llama.cpp's converter may write the other key alone
        kv[f"{a}.attention.layer_norm_rms_epsilon"] = table.number(f"{name}.attention.layer_norm_epsilon", above=0.0)
    heads = kv_heads(table, name, kv, a)
    widths = table.list(key, of=int, limit=MAX_LAYERS) if isinstance(table.get(key), list) else [0] * len(heads)
    experts = table.int(f"{name}.expert_count", 0, low=0, high=4096)
    feeds = "E" if experts else "-"
    layers: Any = kv[f"{a}.block_count"]
    kinds = "".join("*" if head else feeds if width else "M" for head, width in list(zip(heads, widths))[:layers])
    _compose(table, f"{name}.attention.head_count_kv", kv, kinds)
    if "M" in kinds:
        complete_mamba(table, name)
    if not experts:
        kv.pop(f"{a}.expert_used_count", None)
        return
    table.int(f"{name}.moe_latent_size", 0, low=0, high=MAX_WIDTH)
    complete_routing(table, name, kv)


def _extra_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    found = mamba_sizes(kv, size, a)
    feeds = sum(1 << i for i, blocks in enumerate(kv["mpool.layer_blocks"]) if blocks == _FEEDS)
    latent = kv.get(f"{a}.moe_latent_size", 0)
    return {**found, "attention": found["attention"] & ~feeds, "mlp": feeds & ~size["sparse"], "latent": latent,
            "Z": latent or size["D"]}


ROWS = (
    decoder_row("nemotron_h", ("NemotronHForCausalLM",), _TENSORS, read=_read, complete=_complete, activation="relu2",
                gguf=("nemotron_h", "nemotron_h_moe"), prefixes=("backbone.", "model."), ignored=(r"mtp\..*",),
                biases=("mlp_bias",), remote=True, extra_sizes=_extra_sizes,
                defaults={"num_key_value_heads": 8, "head_dim": 128, "layer_norm_epsilon": 1e-5},
                handled=frozenset({"expert_count", "expert_used_count", "expert_shared_count", "expert_weights_scale",
                                   "attention.head_count_kv", "feed_forward_length", "moe_latent_size"})),
)
