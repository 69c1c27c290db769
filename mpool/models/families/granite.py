"""IBM's Granite 3 (arXiv:2407.13739), and the models of Granite 4 without Mamba layers and without experts.

The network is Llama's, with scale factors for embeddings, residuals, attention scores and logits.
"""

from __future__ import annotations

from ..fields import Fields
from ..spec import Value
from .llama import ATTENTION_BIAS, BIASES, EXPERTS, decoder, decoder_row, finish, read_common
from .reading import MAX_WIDTH, unsupported
from .rows import Architecture, Config, Tensor, layer

_MLP = "layers.{}.shared_mlp"
#: Tensors of models that store the gate and up projections as one tensor.
_FUSED = (*(tensor for tensor in decoder() if ".ffn_" not in tensor.gguf or "ffn_norm" in tensor.gguf),
          *layer(f"{_MLP}.input_linear[0]", "ffn_gate", "FD"), *layer(f"{_MLP}.input_linear[1]", "ffn_up", "FD"),
          *layer(f"{_MLP}.output_linear", "ffn_down", "DF"))
_EXPERTS = "layers.{}.block_sparse_moe"
#: Tensors of models whose layers have experts, and in some of them a shared expert.
_WITH_EXPERTS = (
    *decoder(without=("ffn_gate", "ffn_up", "ffn_down")),
    *layer(f"{_EXPERTS}.router.layer", "ffn_gate_inp", "XD"),
    *layer(f"{_EXPERTS}.input_linear[{{2x}}]", "ffn_gate.{x}", "ND", when="folder"),
    *layer(f"{_EXPERTS}.input_linear[{{2x+1}}]", "ffn_up.{x}", "ND", when="folder"),
    *layer(f"{_EXPERTS}.output_linear", "ffn_down_exps", "XDN"),
    Tensor("", "blk.{}.ffn_gate_exps.weight", "XND"),
    Tensor("", "blk.{}.ffn_up_exps.weight", "XND"),
    *layer(f"{_MLP}.input_linear[0]", "ffn_gate_shexp", "SD", when="if S"),
    *layer(f"{_MLP}.input_linear[1]", "ffn_up_shexp", "SD", when="if S"),
    *layer(f"{_MLP}.output_linear", "ffn_down_shexp", "DS", when="if S"),
)
#: Values that the configuration of a model without Mamba layers and experts must state.
_DENSE = {"num_local_experts": 0, "position_embedding_type": "rope"}


def _read(config: Fields, row: Architecture) -> Config:
    kv, used = read_common(config, row)
    kv["mpool.embedding_scale"] = config.number("embedding_multiplier", 1.0, above=0.0)
    kv["mpool.residual_scale"] = config.number("residual_multiplier", 1.0, above=0.0)
    kv["mpool.attention_scale"] = config.number("attention_multiplier", 1.0, above=0.0)
    kv["mpool.output_scale"] = 1.0 / config.number("logits_scaling", 1.0, above=0.0)
    return finish(config, row, kv, used | {"embedding_multiplier", "residual_multiplier", "attention_multiplier",
                                           "logits_scaling"})


def _read_hybrid(config: Fields, row: Architecture) -> Config:
    """Read a configuration of the class GraniteMoeHybrid. Models with Mamba layers or experts are refused."""
    if not set(config.list("layer_types", ["mamba"], of=str)) <= {"attention", "full_attention"}:
        unsupported(config, "layer_types", "models in which every layer is an attention layer")
    for key, value in _DENSE.items():
        if config.get(key) != value:  # absent keys are refused, too: their defaults differ from these values
            unsupported(config, key, value)
    values = {name: value for name, value in config.values.items() if name not in ("layer_types", *_DENSE)}
    values["intermediate_size"] = config.int("shared_intermediate_size", 1024, low=1)
    return _read(Fields(values, file=config.file, at=config.at), row)


def _read_experts(config: Fields, row: Architecture) -> Config:
    found = _read(config, row)
    if config.get("model_type") == "granitemoeshared":
        width = config.int("shared_intermediate_size", 1024, low=0, high=MAX_WIDTH)
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
        unsupported(table, f"{name}.rope.scaling.finetuned", "models with RoPE")


_SCALES = frozenset({"embedding_scale", "residual_scale", "attention.scale", "logit_scale"})
ROWS = (
    # GGUF files of Granite 4 state 0 KV heads for Mamba layers
    decoder_row("granite", ("GraniteForCausalLM",), decoder(), read=_read, complete=_complete,
                gguf=("granite", "granitehybrid"), biases=BIASES,
                handled=_SCALES),
    decoder_row("granitemoe", ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"), _WITH_EXPERTS,
                read=_read_experts, complete=_complete, model_types=("granitemoe", "granitemoeshared"),
                biases=ATTENTION_BIAS, handled=EXPERTS | _SCALES,
                defaults={"num_experts": 8, "num_experts_per_tok": 2}),
    decoder_row("granite", ("GraniteMoeHybridForCausalLM",), _FUSED, read=_read_hybrid, gguf=(),
                model_types=("granitemoehybrid",), biases=ATTENTION_BIAS),
)
