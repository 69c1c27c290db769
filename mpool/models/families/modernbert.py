"""ModernBERT (arXiv:2412.13663): pre-norm layers, a gated MLP, RoPE, and a sliding window in two of three layers."""

from __future__ import annotations

from typing import Any

from ..fields import Fields
from ..spec import Value
from .reading import MAX_LAYERS, activation, check_neutral, sizes, unsupported
from .rows import Architecture, Config, Head, HeadLayer, Tensor, layer

_BLOCK = "layers.{}"


def _norm(hf: str, gguf: str, when: str = "") -> tuple[Tensor, ...]:
    return layer(f"{_BLOCK}.{hf}", gguf, "D", bias="D", when=when, biased="if norm_bias")


def _linear(hf: str, gguf: str, shape: str, part: str, stored: str = "") -> tuple[Tensor, ...]:
    return layer(f"{_BLOCK}.{hf}", gguf, shape, bias=shape[0], biased=f"if {part}_bias", stored=stored)


_TENSORS = (
    Tensor("embeddings.tok_embeddings.weight", "token_embd.weight", "VD"),
    Tensor("embeddings.norm.weight", "token_embd_norm.weight", "D"),
    Tensor("embeddings.norm.bias", "token_embd_norm.bias", "D", "if norm_bias"),
    *layer(f"{_BLOCK}.attn_norm", "attn_norm", "D", when="above 0"),
    Tensor(f"{_BLOCK}.attn_norm.bias", "blk.{}.attn_norm.bias", "D", "if norm_bias above 0"),
    *_linear("attn.Wqkv[0]", "attn_q", "QD", "attention", "attn_qkv[0]"),
    *_linear("attn.Wqkv[1]", "attn_k", "KD", "attention", "attn_qkv[1]"),
    *_linear("attn.Wqkv[2]", "attn_v", "UD", "attention", "attn_qkv[2]"),
    *_linear("attn.Wo", "attn_output", "DO", "attention"),
    *_norm("mlp_norm", "ffn_norm"),
    *_linear("mlp.Wi[0]", "ffn_gate", "FD", "mlp", "ffn_up[0]"),
    *_linear("mlp.Wi[1]", "ffn_up", "FD", "mlp", "ffn_up[1]"),
    *_linear("mlp.Wo", "ffn_down", "DF", "mlp"),
    Tensor("final_norm.weight", "output_norm.weight", "D"),
    Tensor("final_norm.bias", "output_norm.bias", "D", "if norm_bias"),
)


def _layer_types(config: Fields, layers: int) -> list[str]:
    every = config.int("global_attn_every_n_layers", 3, low=1)
    types = config.list("layer_types", None, of=str, limit=MAX_LAYERS)
    if types is None:
        return ["sliding_attention" if i % every else "full_attention" for i in range(layers)]
    if len(types) != layers:
        config.fail("layer_types", f"{len(types)} values", f"{layers} values, one per layer")
    for kind in sorted(set(types)):
        if kind not in ("full_attention", "sliding_attention"):
            config.fail("layer_types", kind, "full_attention or sliding_attention")
    return list(types)


def _rope_base(config: Fields, kind: str, old: str, default: float) -> float:
    """Return the RoPE base of a layer type, from ``rope_parameters`` or from the key ``old`` of older files."""
    by_kind = config.section("rope_parameters", None)
    rope = by_kind.section(kind, None) if by_kind is not None else None
    if config.get("rope_scaling") is not None:
        unsupported(config, "rope_scaling", "models without it")
    if rope is None:
        return float(config.number(old, default, above=0.0))
    if rope.str("rope_type", "default") != "default":
        unsupported(rope, "rope_type", "default")
    rope.only({"rope_type", "rope_theta"})
    return float(rope.number("rope_theta", config.number(old, default, above=0.0), above=0.0))


def windows(types: list[str], window: int) -> list[int]:
    """Return the sliding window of each layer; 0 for full attention."""
    return [window if kind == "sliding_attention" else 0 for kind in types]


def read_modernbert(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a ModernBERT encoder."""
    kv, used = sizes(config, row)
    a = row.name
    kv[f"{a}.attention.head_count_kv"] = kv[f"{a}.attention.head_count"]
    kv[f"{a}.attention.layer_norm_epsilon"] = config.number(
        "norm_eps" if "norm_eps" in config else "layer_norm_eps", 1e-5, above=0.0)
    kv[f"{a}.attention.causal"] = False
    kv[f"{a}.rope.freq_base"] = _rope_base(config, "full_attention", "global_rope_theta", 160000.0)
    kv["mpool.rope_local_base"] = _rope_base(config, "sliding_attention", "local_rope_theta", 10000.0)
    window = config.int("local_attention", 128, low=2)
    layers: Any = kv[f"{a}.block_count"]
    kv["mpool.layer_windows"] = list(windows(_layer_types(config, layers), window // 2 * 2))
    kv["mpool.activation"] = activation(config, "hidden_activation", "gelu")
    biases = {key: int(config.bool(key, False)) for key in ("norm_bias", "attention_bias", "mlp_bias")}
    check_neutral(config, used | {
        "norm_eps", "layer_norm_eps", "global_rope_theta", "local_rope_theta", "rope_parameters", "rope_scaling",
        "rope_theta", "local_attention", "sliding_window", "layer_types", "global_attn_every_n_layers",
        "hidden_activation", "tie_word_embeddings", "position_embedding_type", *biases, "classifier_bias",
        "classifier_pooling", "classifier_activation", "classifier_dropout", "decoder_bias",
        "deterministic_flash_attn", "embedding_dropout", "mlp_dropout", "reference_compile", "repad_logits_with_grad",
        "sparse_pred_ignore_index", "sparse_prediction", "initializer_cutoff_factor"})
    return Config(kv, sizes=biases)


def complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    """Add the defaults that GGUF files omit: every third layer has full attention, and layers with a sliding window
    have a RoPE base of their own."""
    layers = table.int(f"{name}.block_count", low=1)
    key = f"{name}.attention.sliding_window_pattern"
    window = table.int(f"{name}.attention.sliding_window", low=2) // 2 * 2
    if isinstance(table.get(key), (int, type(None))):
        every = table.int(key, 3, low=1)
        windowed = [bool(i % every) for i in range(min(layers, MAX_LAYERS))]
    else:  # one value per layer
        windowed = table.list(key, of=bool, limit=MAX_LAYERS)
        if len(windowed) != layers:
            table.fail(key, f"{len(windowed)} values", f"{layers} values, one per layer")
    kv["mpool.layer_windows"] = [window if layer else 0 for layer in windowed]
    kv["modern_bert.rope.freq_base"] = table.number(f"{name}.rope.freq_base", 160000.0, above=0.0)
    kv["mpool.rope_local_base"] = table.number(f"{name}.rope.freq_base_swa", 10000.0, above=0.0)
    if table.str(f"{name}.rope.scaling.type", "none") != "none":
        unsupported(table, f"{name}.rope.scaling.type", "'none'")


def _head(config: Fields) -> Head:
    return Head(config.str("classifier_pooling", "cls", choices=("cls", "mean")), _token_head(config).layers)


def _token_head(config: Fields) -> Head:
    act = activation(config, "classifier_activation", "gelu", ("gelu", "gelu_tanh", "relu", "silu"))
    epsilon = config.number("norm_eps" if "norm_eps" in config else "layer_norm_eps", 1e-5, above=0.0)
    return Head("", (HeadLayer("head.dense", act, "head.norm", epsilon), HeadLayer("classifier", "identity")))


ROWS = (
    Architecture(
        name="modern_bert", capability="text_embedding", model_types=("modernbert",), gguf=("modern-bert",),
        classes=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification",
                 "ModernBertForTokenClassification", "ModernBertForQuestionAnswering",
                 "ModernBertForMultipleChoice"),
        prefixes=("", "model."), read=read_modernbert, tensors=_TENSORS,
        ignored=(r"head\..*", r"decoder\..*", r"classifier\..*"),
        epsilon="attention.layer_norm_epsilon", rope=True, activation="gelu", complete=complete, head=_head,
        token_head=_token_head, gguf_head="gelu"),
)
