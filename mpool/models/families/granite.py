"""IBM's Granite 3 (arXiv:2407.13739): Llama with factors on embeddings, residuals, scores and logits; and those of
Granite 4 that are the same network, without Mamba's layers and without experts."""

from __future__ import annotations

from ..fields import Fields
from ..spec import Value
from .llama import decoder, finish, read_common, text_row
from .reading import unsupported
from .rows import Architecture, Config, layer

_MLP = "layers.{}.shared_mlp"
#: Gate and up are one tensor.
_FUSED = (*(tensor for tensor in decoder() if ".ffn_" not in tensor.gguf or "ffn_norm" in tensor.gguf),
          *layer(f"{_MLP}.input_linear[0]", "ffn_gate", "FD"), *layer(f"{_MLP}.input_linear[1]", "ffn_up", "FD"),
          *layer(f"{_MLP}.output_linear", "ffn_down", "DF"))
#: Keys of the configuration that describe this network.
_DENSE = {"num_local_experts": 0, "position_embedding_type": "rope"}


def _read(config: Fields, row: Architecture) -> Config:
    kv, used = read_common(config, row)
    kv["mpool.embedding_scale"] = config.number("embedding_multiplier", 1.0, above=0.0)
    kv["mpool.residual_scale"] = config.number("residual_multiplier", 1.0, above=0.0)
    kv["mpool.attention_scale"] = config.number("attention_multiplier", 1.0, above=0.0)
    kv["mpool.output_scale"] = 1.0 / config.number("logits_scaling", 1.0, above=0.0)
    return finish(config, kv, used | {"embedding_multiplier", "residual_multiplier", "attention_multiplier",
                                      "logits_scaling"})


def _read_hybrid(config: Fields, row: Architecture) -> Config:
    """The words of models that may have Mamba's layers and experts, of one that has none."""
    if not set(config.list("layer_types", ["mamba"], of=str)) <= {"attention", "full_attention"}:
        unsupported(config, "layer_types", "models whose layers are all of attention")
    for key, value in _DENSE.items():
        if config.get(key) != value:  # which is not the default
            unsupported(config, key, value)
    values = {name: value for name, value in config.values.items() if name not in ("layer_types", *_DENSE)}
    values["intermediate_size"] = config.int("shared_intermediate_size", 1024, low=1)
    return _read(Fields(values, file=config.file, at=config.at), row)


def _complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    for key, ours in (("embedding_scale", "embedding_scale"), ("residual_scale", "residual_scale"),
                      ("attention.scale", "attention_scale")):
        value = table.number(f"{name}.{key}", 0.0)
        if value:  # 0 says nothing, as in llama.cpp
            kv[f"mpool.{ours}"] = value
    kv["mpool.output_scale"] = 1.0 / (table.number(f"{name}.logit_scale", 1.0) or 1.0)
    if not table.bool(f"{name}.rope.scaling.finetuned", True):  # this key selects RoPE in these models
        unsupported(table, f"{name}.rope.scaling.finetuned", "models with RoPE")


ROWS = (
    # files of Granite 4 say which layers have attention by their KV heads, none for Mamba's
    text_row("granite", ("GraniteForCausalLM",), decoder(), read=_read, complete=_complete,
             gguf=("granite", "granitehybrid"),
             handled=frozenset({"embedding_scale", "residual_scale", "attention.scale", "logit_scale"})),
    text_row("granite", ("GraniteMoeHybridForCausalLM",), _FUSED, read=_read_hybrid, gguf=(),
             model_types=("granitemoehybrid",)),
)
