"""Qwen3-Next, Qwen3.5, 3.6 and 3.8: gated delta nets in most layers (arXiv:2412.06464), gated attention in the others.

Queries have a gate after each head. Norms multiply by 1 + weight, except those of the delta nets. Some models have
experts with a shared expert in each layer. Folders of vision models that have no image processor, or quantised weights,
load their language model: its positions are those of texts, so the three positions of M-RoPE are equal.
:mod:`mpool.models.formats.vision_folder` reads the others.
"""

from __future__ import annotations

from typing import Any, cast

from ...records import logger
from ..fields import Fields
from ..spec import Value
from .llama import ATTENTION_BIAS, IGNORED, decoder, decoder_row, finish, read_common
from .qwen_moe import read_experts
from .reading import MAX_LAYERS, MAX_WIDTH, mixed_layers, require_values
from .rows import Architecture, Config, Tensor, layer

log = logger("mpool.models")

_DELTA, _MLP = "layers.{}.linear_attn", "layers.{}.mlp"
#: Models whose configuration has the one of their language model in ``text_config``.
_VISION = ("qwen3_5", "qwen3_5_moe")
#: Keys of config.json -> GGUF keys, and their defaults in transformers.
_SIZES = {"linear_conv_kernel_dim": ("ssm.conv_kernel", 4), "linear_key_head_dim": ("ssm.state_size", 128),
          "linear_num_key_heads": ("ssm.group_count", 16), "linear_num_value_heads": ("ssm.time_step_rank", 32)}
#: Keys of published files that transformers does not read -> values of its network.
_FIXED: dict[str, tuple[object, ...]] = {"attn_output_gate": (None, True), "mamba_ssm_dtype": (None, "float32")}


def _tensors(*inputs: Tensor, experts: bool, joined: bool = False) -> tuple[Tensor, ...]:
    """Return the tensors of a model.

    Args:
        *inputs: input projections of the delta nets.
        experts: True if the layers have experts.
        joined: True if the gate and up projections of all experts of a layer are one tensor.
    """
    usual = decoder(experts=experts, shared="shared_expert", head_norms=True, attends="in attention", query="q",
                    without=("ffn_norm",))
    return (
        *(tensor for tensor in usual if not (joined and (".experts." in tensor.hf or "_exps." in tensor.gguf))),
        *layer("layers.{}.post_attention_layernorm", "ffn_norm", "D", stored="post_attention_norm"),
        *inputs,
        *layer(f"{_DELTA}.conv1d", "ssm_conv1d", "C1L", when="folder in delta"),
        Tensor("", "blk.{}.ssm_conv1d.weight", "CL", "in delta"),
        Tensor(f"{_DELTA}.A_log", "blk.{}.ssm_a_log", "h", "folder in delta"),
        Tensor("", "blk.{}.ssm_a", "h", "in delta"),
        Tensor(f"{_DELTA}.dt_bias", "blk.{}.ssm_dt.bias", "h", "in delta"),
        *layer(f"{_DELTA}.norm", "ssm_norm", "v", when="in delta"),
        *layer(f"{_DELTA}.out_proj", "ssm_out", "DW", when="in delta"),
        *(layer(f"{_MLP}.shared_expert_gate", "ffn_gate_inp_shexp", "D", when="if S in sparse") if experts else ()),
        *((Tensor(f"{_MLP}.experts.gate_up_proj", "blk.{}.ffn_gate_up_exps.weight", "XGD"),
           Tensor(f"{_MLP}.experts.down_proj", "blk.{}.ffn_down_exps.weight", "XDN")) if joined else ()),
    )


_SEPARATE = (*layer(f"{_DELTA}.in_proj_qkv", "attn_qkv", "CD", when="in delta"),
             *layer(f"{_DELTA}.in_proj_z", "attn_gate", "WD", when="in delta"),
             *layer(f"{_DELTA}.in_proj_b", "ssm_beta", "hD", when="in delta"),
             *layer(f"{_DELTA}.in_proj_a", "ssm_alpha", "hD", when="in delta"))
#: Qwen3-Next has the rows of a key head's queries, keys, values and gates together. llama.cpp's converter sorts those
#: of the first projection; files of early versions have them as they are in folders.
_GROUPED = (*layer(f"{_DELTA}.in_proj_qkvz", "ssm_in", "ZD", when="if delta in delta"),
            *layer("", "attn_qkv", "CD", when="gguf in delta"), *layer("", "attn_gate", "WD", when="gguf in delta"),
            *layer(f"{_DELTA}.in_proj_ba", "ssm_ba", "BD", when="in delta"))


def _text_config(config: Fields) -> Fields:
    """Return the language model's part of a vision model's configuration."""
    log.info("%s: this is a vision model; mpool uses only its language model", config.file)
    given = dict(config.section("text_config").values)
    if config.get("tie_word_embeddings") is not None:
        given["tie_word_embeddings"] = config.get("tie_word_embeddings")
    return Fields(given, file=config.file, at=config.name("text_config"))


def _plain(config: Fields, row: Architecture) -> Fields:
    """Return the configuration with the defaults of the family, without the keys of M-RoPE, whose sections share one
    position in texts."""
    values = {"partial_rotary_factor": 0.25, **config.values}
    if row.name == "qwen35moe":  # all layers have experts
        values["intermediate_size"] = config.int("moe_intermediate_size", 512, low=1, high=MAX_WIDTH)
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.section(key, None)
        if rope is not None:
            rope.list("mrope_section", [], of=int, limit=4)
            rope.bool("mrope_interleaved", True)
            values[key] = {name: value for name, value in rope.values.items()
                           if name not in ("mrope_section", "mrope_interleaved")}
    return Fields({name: value for name, value in values.items() if name != "layer_types"}, file=config.file,
                  at=config.at)


def _compose(kv: dict[str, Value], a: str, attends: list[bool], fields: Fields, inner: str) -> None:
    """Store the mixers of the layers, and check the heads of the delta nets."""
    kv["mpool.layer_mixers"] = [0 if attention else 2 for attention in attends]
    heads, keys = cast(int, kv[f"{a}.ssm.time_step_rank"]), cast(int, kv[f"{a}.ssm.group_count"])
    if heads % keys:
        fields.fail(inner, heads, f"a multiple of the {keys} key heads")


def _read(config: Fields, row: Architecture) -> Config:
    if config.get("model_type") in _VISION:
        config = _text_config(config)
    a, plain = row.name, _plain(config, row)
    layers = config.int("num_hidden_layers", low=1, high=MAX_LAYERS)
    attends = mixed_layers(config, "linear_attention", layers)
    if attends is None:
        every = config.int("full_attention_interval", 4, low=1)
        attends = [(i + 1) % every == 0 for i in range(layers)]
    kv, used = read_common(plain, row)
    for key, (name, usual) in _SIZES.items():
        kv[f"{a}.{name}"] = config.int(key, usual, low=1, high=MAX_WIDTH)
    heads = cast(int, kv[f"{a}.ssm.time_step_rank"])
    kv[f"{a}.ssm.inner_size"] = heads * config.int("linear_value_head_dim", 128, low=1, high=MAX_WIDTH)
    _compose(kv, a, attends, config, "linear_num_value_heads")
    kv["mpool.norm_offset"] = 1.0
    if a != "qwen35":
        used |= read_experts(config, row, kv, normalise=True)
    require_values(config, _FIXED)
    return finish(plain, row, kv, used | set(_SIZES) | set(_FIXED) | {
        "linear_value_head_dim", "full_attention_interval", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    layers = cast(int, kv[f"{name}.block_count"])
    every = table.int(f"{name}.full_attention_interval", 4, low=1)
    recurrent = table.list(f"{name}.attention.recurrent_layers", None, of=bool, limit=MAX_LAYERS)
    attends = [(i + 1) % every == 0 for i in range(layers)] if recurrent is None else [not on for on in recurrent]
    if len(attends) < layers:
        table.fail(f"{name}.attention.recurrent_layers", f"{len(attends)} values", f"{layers} values, one per layer")
    for key, _ in _SIZES.values():
        kv[f"{name}.{key}"] = table.int(f"{name}.{key}", low=1, high=MAX_WIDTH)
    inner = table.int(f"{name}.ssm.inner_size", low=1, high=MAX_WIDTH)
    if inner % cast(int, kv[f"{name}.ssm.time_step_rank"]):
        table.fail(f"{name}.ssm.inner_size", inner, f"a multiple of {name}.ssm.time_step_rank")
    _compose(kv, name, attends[:layers], table, f"{name}.ssm.time_step_rank")
    kv["mpool.tiled_heads"] = name != "qwen3next"
    if name != "qwen35":
        width = table.int(f"{name}.expert_feed_forward_length", low=1, high=MAX_WIDTH)
        kv.setdefault(f"{name}.expert_shared_feed_forward_length", width)
        kv.setdefault(f"{name}.feed_forward_length", width)
        kv["mpool.expert_normalise"] = table.bool(f"{name}.expert_weights_norm", True)


def _extra_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    """Return the sizes of delta nets and shared experts, and the layers with delta nets and with attention as bits."""
    delta, layers = sum(1 << i for i, mixer in enumerate(kv["mpool.layer_mixers"]) if mixer), (1 << size["layers"]) - 1
    heads, inner = kv[f"{a}.ssm.time_step_rank"], kv[f"{a}.ssm.inner_size"]
    channels = 2 * kv[f"{a}.ssm.group_count"] * kv[f"{a}.ssm.state_size"] + inner
    return {"1": 1, "L": kv[f"{a}.ssm.conv_kernel"], "q": 2 * size["Q"], "C": channels, "W": inner, "h": heads,
            "v": inner // heads, "Z": channels + inner, "B": 2 * heads, "G": 2 * size["N"], "delta": delta,
            "attention": ~delta & layers}


def _row(name: str, classes: tuple[str, ...], tensors: tuple[Tensor, ...], **other: Any) -> Architecture:
    handled = frozenset({"expert_count", "expert_used_count"}) if name != "qwen35" else frozenset[str]()
    return decoder_row(
        name, classes, tensors, read=_read, complete=_complete, extra_sizes=_extra_sizes, partial_rope=True,
        biases=ATTENTION_BIAS, handled=handled, prefixes=("model.language_model.", "model."),
        ignored=(*IGNORED, r"(model\.)?mtp\..*", r"(model\.)?visual\..*"), **other)


_USUAL = {"head_dim": 256, "num_experts_per_tok": 8, "num_experts": 256, "moe_intermediate_size": 512,
          "shared_expert_intermediate_size": 512}
_MOE = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"), ("qwen3_5_moe_text", "qwen3_5_moe")

ROWS = (
    _row("qwen3next", ("Qwen3NextForCausalLM",), _tensors(*_GROUPED, experts=True), model_types=("qwen3_next",),
         defaults=_USUAL | {"num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10}),
    _row("qwen35", ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _tensors(*_SEPARATE, experts=False),
         model_types=("qwen3_5_text", "qwen3_5"), defaults={"head_dim": 256, "num_key_value_heads": 4}),
    _row("qwen35moe", _MOE[0], _tensors(*_SEPARATE, experts=True), model_types=_MOE[1],
         defaults=_USUAL | {"num_key_value_heads": 2}),
    # published folders join the gate and up projections of all experts; transformers saves them one by one
    _row("qwen35moe", _MOE[0], _tensors(*_SEPARATE, experts=True, joined=True), model_types=_MOE[1],
         defaults=_USUAL | {"num_key_value_heads": 2}, marker=("mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight")),
)
