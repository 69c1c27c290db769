"""IBM's Granite 3 (arXiv:2407.13739) and 4.

The network is Llama's, with scale factors for embeddings, residuals, attention scores and logits. Most layers of
Granite 4 H have Mamba-2 in place of attention; its larger models have experts beside a shared MLP.
"""

from __future__ import annotations

from typing import cast

from ..fields import Fields
from ..spec import Value
from .experts import read_experts
from .llama import ATTENTION_BIAS, BIASES, EXPERTS, decoder, decoder_row, finish, read_common
from .mamba import ATTENTION, MAMBA, complete_mamba, kv_heads, mamba_sizes, mamba_tensors, mix, read_mamba
from .reading import MAX_LAYERS, MAX_WIDTH, unsupported
from .rows import Architecture, Config, Tensor, layer

_BLOCK = "layers.{}"
_MLP, _EXPERTS = f"{_BLOCK}.shared_mlp", f"{_BLOCK}.block_sparse_moe"
#: Tensors of layers with experts, and in some models a shared expert.
_WITH_EXPERTS = (
    *(tensor for name, gguf, shape in (("input_linear[0]", "ffn_gate", "SD"), ("input_linear[1]", "ffn_up", "SD"),
                                       ("output_linear", "ffn_down", "DS"))
      for tensor in layer(f"{_MLP}.{name}", f"{gguf}_shexp", shape, when="if S in sparse")),
    *layer(f"{_EXPERTS}.router.layer", "ffn_gate_inp", "XD", when="in sparse"),
    *layer(f"{_EXPERTS}.input_linear[{{2x}}]", "ffn_gate.{x}", "ND", when="folder in sparse"),
    *layer(f"{_EXPERTS}.input_linear[{{2x+1}}]", "ffn_up.{x}", "ND", when="folder in sparse"),
    *layer(f"{_EXPERTS}.output_linear", "ffn_down_exps", "XDN", when="in sparse"),
    Tensor("", "blk.{}.ffn_gate_exps.weight", "XND", "in sparse"),
    Tensor("", "blk.{}.ffn_up_exps.weight", "XND", "in sparse"),
)
_NETWORK = ("ffn_gate", "ffn_up", "ffn_down")
_MOE = (*decoder(without=_NETWORK), *_WITH_EXPERTS)
_HYBRID = (
    *decoder(attends="in attention", without=_NETWORK),
    *mamba_tensors(f"{_BLOCK}.mamba", "in mamba"),
    *(tensor for name, gguf, shape in (("input_linear[0]", "ffn_gate", "FD"), ("input_linear[1]", "ffn_up", "FD"),
                                       ("output_linear", "ffn_down", "DF"))
      for tensor in layer(f"{_MLP}.{name}", gguf, shape, when="in dense")),
    *_WITH_EXPERTS,
)
#: Kinds of layers in config.json, in older and newer files -> kind of the mixer.
_KINDS = {"attention": ATTENTION, "full_attention": ATTENTION, "mamba": MAMBA, "linear_attention": MAMBA}


def _read_scales(config: Fields, kv: dict[str, Value]) -> set[str]:
    """Read the scale factors, and return their keys."""
    kv["mpool.embedding_scale"] = config.number("embedding_multiplier", 1.0, above=0.0)
    kv["mpool.residual_scale"] = config.number("residual_multiplier", 1.0, above=0.0)
    kv["mpool.attention_scale"] = config.number("attention_multiplier", 1.0, above=0.0)
    kv["mpool.output_scale"] = 1.0 / config.number("logits_scaling", 1.0, above=0.0)
    return {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}


def _read(config: Fields, row: Architecture) -> Config:
    kv, used = read_common(config, row)
    return finish(config, row, kv, used | _read_scales(config, kv))


def _mixers(config: Fields, key: str) -> list[int]:
    layers = config.int("num_hidden_layers", low=1, high=MAX_LAYERS)
    types = config.list(key, ["mamba"] * layers, of=str, limit=MAX_LAYERS)
    if len(types) != layers:
        config.fail(key, f"{len(types)} values", f"{layers} values, one per layer")
    for kind in types:
        if kind not in _KINDS:
            config.fail(key, kind, " or ".join(_KINDS))
    return [_KINDS[kind] for kind in types]


def _read_hybrid(config: Fields, row: Architecture) -> Config:
    """Read a configuration of the class GraniteMoeHybrid."""
    a, key = row.name, "layers_block_type" if "layers_block_type" in config else "layer_types"
    mixers = _mixers(config, key)
    experts = config.int("num_local_experts", 8, low=0, high=4096)
    width = config.int("shared_intermediate_size", 1024, low=1, high=MAX_WIDTH)
    values = {name: value for name, value in config.values.items() if name not in ("layer_types", "layers_block_type")}
    plain = Fields({**values, "intermediate_size": width}, file=config.file, at=config.at)
    kv, used = read_common(plain, row, acts=("silu",))
    mix(config, key, kv, mixers)
    if MAMBA in mixers:
        inner = config.int("mamba_expand", 2, low=1, high=64) * cast(int, kv[f"{a}.embedding_length"])
        used |= read_mamba(config, kv, a, {"heads": 128, "head": 1, "groups": 1, "state": 256}, inner=inner)
    if experts:
        read_experts(config, kv, a, {"num_local_experts": experts, "num_experts_per_tok": 2,
                                      "intermediate_size": 11008}, "intermediate_size")
        kv[f"{a}.expert_shared_feed_forward_length"] = width
    if config.str("position_embedding_type", None, limit=64) != "rope":
        kv["mpool.rope_layers"] = [-1] * len(mixers)
    found = finish(plain, row, kv, used | _read_scales(config, kv) | {
        "shared_intermediate_size", "num_local_experts", "num_experts_per_tok", "position_embedding_type",
        "output_router_logits", "router_aux_loss_coef", "mamba_expand", "mamba_conv_bias", "mamba_proj_bias",
        "normalization_function", "init_method"})
    proj = int(config.bool("mamba_proj_bias", False))
    found.sizes |= {"proj_bias": proj, "out_bias": proj, "conv_bias": int(config.bool("mamba_conv_bias", True))}
    return found


def _read_shared(config: Fields, row: Architecture) -> Config:
    found = _read(config, row)
    if config.get("model_type") == "granitemoeshared":
        width = config.int("shared_intermediate_size", 0, low=0, high=MAX_WIDTH)
        found.kv[f"{row.name}.expert_shared_feed_forward_length"] = width
    return found


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    for key, ours in (("embedding_scale", "embedding_scale"), ("residual_scale", "residual_scale"),
                      ("attention.scale", "attention_scale")):
        value = table.number(f"{name}.{key}", 0.0)
        if value:  # 0 means that the factor is not set, as in llama.cpp
            kv[f"mpool.{ours}"] = value
    kv["mpool.output_scale"] = 1.0 / (table.number(f"{name}.logit_scale", 1.0) or 1.0)
    if not table.bool(f"{name}.rope.scaling.finetuned", True):  # False means no RoPE in Granite's files
        layers = table.int(f"{name}.block_count", low=1, high=MAX_LAYERS)
        kv["mpool.rope_layers"] = [-1] * layers


def _complete_hybrid(table: Fields, name: str, kv: dict[str, Value]) -> None:
    _complete(table, name, kv)
    mixers = [ATTENTION if heads else MAMBA for heads in kv_heads(table, name, kv, name)]
    mix(table, f"{name}.attention.head_count_kv", kv, mixers)
    if MAMBA in mixers:
        complete_mamba(table, name)
        heads = table.int(f"{name}.attention.head_count", low=1, high=MAX_WIDTH)
        head = table.int(f"{name}.attention.key_length", cast(int, kv[f"{name}.embedding_length"]) // heads, low=1)
        if table.int(f"{name}.rope.dimension_count", head, low=1) != head:
            # llama.cpp's converter sorts the pairs of whole heads in Bamba, which rotates a part of them
            unsupported(table, f"{name}.rope.dimension_count", f"{head}, all components of a head, beside Mamba layers",
                        "Use the transformers folder of Bamba models")
    if table.int(f"{name}.expert_count", 0, low=0, high=4096):
        kv[f"{name}.expert_feed_forward_length"] = kv[f"{name}.feed_forward_length"]
    else:
        kv.pop(f"{name}.expert_used_count", None)


_SCALES = frozenset({"embedding_scale", "residual_scale", "attention.scale", "logit_scale"})
ROWS = (
    decoder_row("granite", ("GraniteForCausalLM",), decoder(), read=_read, complete=_complete, biases=BIASES,
                handled=_SCALES),
    decoder_row("granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _MOE,
                read=_read_shared, complete=_complete, model_types=("granitemoe", "granitemoeshared"),
                biases=ATTENTION_BIAS, handled=EXPERTS | _SCALES,
                defaults={"num_experts": 8, "num_experts_per_tok": 2}),
    decoder_row("granitehybrid", ("GraniteMoeHybridForCausalLM",), _HYBRID, read=_read_hybrid,
                complete=_complete_hybrid, extra_sizes=mamba_sizes, model_types=("granitemoehybrid",),
                biases=ATTENTION_BIAS, handled=EXPERTS | _SCALES | {"attention.head_count_kv"}),
)
