"""Embedding models that are decoders without the output layer: Qwen2, Llama, Mistral, Qwen3, Gemma 3 and EuroBERT.

Attention is causal or bidirectional. Examples are Qwen3-Embedding (arXiv:2506.05176), gte-Qwen2, Stella 1.5B
(arXiv:2412.19048), EmbeddingGemma (arXiv:2509.20354) and NV-Embed (arXiv:2405.17428). A folder is read as an embedding
model if it has modules of sentence-transformers, a GGUF file if it states a pooling type.
"""

from __future__ import annotations

import math
from typing import Any, cast

from ..fields import Fields
from ..spec import Value
from .gemma import DEFAULTS
from .llama import decoder, finish, read_common, read_rope, read_window, windowed_layers
from .reading import MAX_WIDTH, activation, check_neutral, plain_rope, sizes, unsupported
from .rows import Architecture, Config, Head, HeadLayer, Tensor, layer


def _tensors(*, qkv_bias: bool = False, head_norms: bool = False) -> tuple[Tensor, ...]:
    """Return the tensors of a decoder. The output layer may be present in GGUF files and is not used."""
    ours = decoder(qkv_bias=qkv_bias, head_norms=head_norms)
    return (*(tensor for tensor in ours if tensor.gguf not in ("output.weight", "rope_freqs.weight")),
            Tensor("", "output.weight", "VD", "gguf"))


def read_embedder(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a decoder that is used as an embedding model."""
    a = row.name
    kv, used = sizes(config, row)
    heads, hidden = config.int("num_attention_heads", low=1), config.int("hidden_size", low=1)
    kv[f"{a}.attention.head_count_kv"] = config.int("num_key_value_heads", heads, low=1)
    kv[f"{a}.attention.layer_norm_rms_epsilon"] = config.number("rms_norm_eps", 1e-6, above=0.0)
    head_dim = config.int("head_dim", None, low=1, high=MAX_WIDTH)
    if head_dim is not None:
        kv[f"{a}.attention.key_length"] = kv[f"{a}.attention.value_length"] = head_dim
    kv[f"{a}.rope.dimension_count"] = head_dim or hidden // heads
    read_rope(config, kv, a)
    # the Python code that gte-Qwen2 and Stella are published with (auto_map) uses bidirectional attention by default
    kv[f"{a}.attention.causal"] = config.bool("is_causal", "auto_map" not in config)
    read_window(config, kv, row)
    _windows(config, kv, a)
    kv["mpool.activation"] = activation(config, "hidden_act", "silu")
    check_neutral(config, used | {
        "num_key_value_heads", "rms_norm_eps", "head_dim", "rope_theta", "rope_scaling", "rope_parameters",
        "original_max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
        "hidden_act", "tie_word_embeddings", "is_causal", "auto_map"})
    return Config(kv)


def _windows(config: Fields, kv: dict[str, Value], a: str) -> None:
    layers: Any = kv.pop("mpool.window_layers", [])
    window: Any = kv.pop(f"{a}.attention.sliding_window", 0)
    if any(layers) and window < config.int("max_position_embeddings", low=1):
        if not kv[f"{a}.attention.causal"]:
            unsupported(config, "sliding_window", "sliding windows in models with causal attention")
        kv["mpool.layer_windows"] = [window if windowed else 0 for windowed in layers]


def complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    """Add the defaults that GGUF files omit."""
    a = "qwen3_embedding" if name == "qwen3" else "llama_embedding"
    kv[f"{a}.attention.causal"] = table.bool(f"{name}.attention.causal", True)
    kv.setdefault(f"{a}.rope.freq_base", 10000.0)
    if table.str(f"{name}.rope.scaling.type", "none") not in ("none", "linear", "yarn"):
        unsupported(table, f"{name}.rope.scaling.type", "none, linear and yarn")
    window = table.int(f"{name}.attention.sliding_window", 0, low=0)
    if 0 < window < table.int(f"{name}.context_length", low=1):
        unsupported(table, f"{name}.attention.sliding_window", "models without a window")


# ---- EuroBERT ------------------------------------------------------------------------------------------------------

def read_eurobert(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of EuroBERT (arXiv:2503.05500), a Llama with attention in both directions."""
    a = row.name
    kv, used = sizes(config, row)
    heads, hidden = config.int("num_attention_heads", low=1), config.int("hidden_size", low=1)
    kv[f"{a}.attention.head_count_kv"] = config.int("num_key_value_heads", heads, low=1)
    kv[f"{a}.attention.layer_norm_rms_epsilon"] = config.number("rms_norm_eps", 1e-5, above=0.0)
    head_dim = config.int("head_dim", max(1, hidden // heads), low=1, high=MAX_WIDTH)
    kv[f"{a}.attention.key_length"] = kv[f"{a}.attention.value_length"] = head_dim
    kv[f"{a}.rope.dimension_count"] = head_dim
    kv[f"{a}.rope.freq_base"] = plain_rope(config, 10000.0)
    kv[f"{a}.attention.causal"] = False
    kv["mpool.activation"] = activation(config, "hidden_act", "silu")
    check_neutral(config, used | {
        "num_key_value_heads", "rms_norm_eps", "head_dim", "rope_theta", "rope_scaling", "rope_parameters",
        "hidden_act", "tie_word_embeddings", "auto_map", "mask_token_id", "mask_token", "bos_token", "eos_token",
        "pad_token", "classifier_pooling", "clf_pooling", "is_causal"})
    return Config(kv)


def complete_eurobert(table: Fields, name: str, kv: dict[str, Value]) -> None:
    """Add the defaults that GGUF files omit."""
    kv["llama_embedding.attention.causal"] = table.bool(f"{name}.attention.causal", False)
    kv.setdefault("llama_embedding.rope.freq_base", 10000.0)
    if table.str(f"{name}.rope.scaling.type", "none") != "none":
        unsupported(table, f"{name}.rope.scaling.type", "'none'")


def _eurobert_head(config: Fields) -> Head:
    """Read the head of a classifier. Its default pools the logits of all tokens instead of their hidden states."""
    key = "clf_pooling" if "clf_pooling" in config else "classifier_pooling"
    pooling = config.str(key, "late", choices=("bos", "mean", "late"))
    if pooling == "late":
        unsupported(config, key, "'bos' and 'mean'")
    return Head("cls" if pooling == "bos" else pooling,
                (HeadLayer("dense", "gelu"), HeadLayer("classifier", "identity")))


# ---- EmbeddingGemma ------------------------------------------------------------------------------------------------

_FULL_PERIOD = 6  # every sixth layer has full attention, the others have a sliding window
_BLOCK = "layers.{}"
_GEMMA = (*(tensor for tensor in _tensors(head_norms=True) if tensor.gguf != "blk.{}.ffn_norm.weight"),
          *layer(f"{_BLOCK}.post_attention_layernorm", "post_attention_norm", "D"),
          *layer(f"{_BLOCK}.pre_feedforward_layernorm", "ffn_norm", "D"),
          *layer(f"{_BLOCK}.post_feedforward_layernorm", "post_ffw_norm", "D"))


def read_gemma(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a Gemma 3 embedding model.

    With bidirectional attention, the sliding window is the number of tokens on both sides together.
    """
    a, bidirectional = row.name, config.bool("use_bidirectional_attention", False)
    period = config.int("sliding_window_pattern", config.int("_sliding_window_pattern", _FULL_PERIOD, low=1), low=1)
    kv, used = read_common(config, row, act="hidden_activation", period=period, theta=1e6)
    kv[f"{a}.attention.causal"] = not bidirectional
    layers: Any = kv.pop("mpool.window_layers", [])
    window: Any = kv.pop(f"{a}.attention.sliding_window", 0)
    if any(layers):
        kv["mpool.layer_windows"] = [window if windowed else 0 for windowed in layers]
    kv.setdefault("mpool.rope_local_base", 10000.0)
    kv["mpool.attention_scale"] = 1 / math.sqrt(config.number("query_pre_attn_scalar", 256.0, above=0.0))
    kv["mpool.embedding_scale"] = math.sqrt(cast(int, kv[f"{a}.embedding_length"]))
    kv["mpool.norm_offset"] = 1.0
    return finish(config, row, kv, used | {
        "query_pre_attn_scalar", "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq",
        "hidden_act", "use_bidirectional_attention"}, tied=True)


def complete_gemma(table: Fields, name: str, kv: dict[str, Value]) -> None:
    """Add the defaults that GGUF files omit. Norm weights in GGUF files already include the added 1."""
    layers = table.int(f"{name}.block_count", low=1)
    window = table.int(f"{name}.attention.sliding_window", 0, low=0)
    if window:
        kv["mpool.layer_windows"] = [window if windowed else 0 for windowed in windowed_layers(layers, _FULL_PERIOD)]
    kv.setdefault("gemma_embedding.rope.freq_base", 1e6)
    kv["mpool.rope_local_base"] = table.number(f"{name}.rope.freq_base_swa", 10000.0, above=0.0)
    kv["mpool.embedding_scale"] = math.sqrt(table.int(f"{name}.embedding_length", low=1))


# ---- NV-Embed ------------------------------------------------------------------------------------------------------

_LATENT = "/latent_attention_model.cross_attend_blocks"
_NV_EMBED = (
    *_tensors(),
    Tensor("/latent_attention_model.latents", "latent.latents", "lD"),
    *(Tensor(f"{_LATENT}.{hf}.{kind}", f"latent.{name}.{kind}", "D") for kind in ("weight", "bias") for hf, name in (
        ("0.norm", "norm"), ("0.norm_context", "norm_context"), ("1.norm", "ffn_norm"))),
    Tensor(f"{_LATENT}.0.fn.to_q.weight", "latent.to_q.weight", "iD"),
    Tensor(f"{_LATENT}.0.fn.to_kv.weight", "latent.to_kv.weight", "jD"),
    Tensor(f"{_LATENT}.0.fn.to_out.weight", "latent.to_out.weight", "Di"),
    *(Tensor(f"{_LATENT}.1.fn.net.0.{kind}[{part}]", f"latent.ffn_{name}.{kind}", shape)
      for part, name in enumerate(("up", "gate")) for kind, shape in (("weight", "fD"), ("bias", "f"))),
    Tensor(f"{_LATENT}.1.fn.net.2.weight", "latent.ffn_down.weight", "Df"),
    Tensor(f"{_LATENT}.1.fn.net.2.bias", "latent.ffn_down.bias", "D"),
)


def read_nv_embed(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of NV-Embed (arXiv:2405.17428).

    It is Mistral with bidirectional attention, followed by cross-attention to a learned array of latents and mean
    pooling. The feed-forward layer after the cross-attention is four times as wide as the hidden states.
    """
    found = read_embedder(config.section("text_config"), row)
    latent = config.section("latent_attention_config")
    hidden: Any = found.kv[f"{row.name}.embedding_length"]
    for key in ("hidden_dim", "latent_dim"):
        if latent.int(key, hidden) != hidden:
            latent.fail(key, latent.get(key), f"{hidden}, the hidden size")
    heads, head = latent.int("num_cross_heads", 8, low=1), latent.int("cross_dim_head", 4096, low=1)
    count, wide = latent.int("num_latents_value", 512, low=1), 4 * hidden
    found.kv |= {f"{row.name}.attention.causal": False, "mpool.latent_heads": heads, "mpool.latent_head_size": head,
                 "mpool.latent_count": count, "mpool.latent_feed_forward": wide, "mpool.latent_epsilon": 1e-5}
    found.sizes |= {"l": count, "i": heads * head, "j": 2 * heads * head, "f": wide}
    found.kv.pop("mpool.layer_windows", None)  # the Python code of NV-Embed ignores the sliding window
    found.exclude_prompt, found.append_eos = config.bool("is_mask_instruction", True), config.bool("add_eos", True)
    return found


_COMMON: dict[str, Any] = {
    "capability": "text_embedding", "prefixes": ("", "model."), "read": read_embedder,
    "ignored": (r"lm_head\.weight", r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    "epsilon": "attention.layer_norm_rms_epsilon", "rope": True, "activation": "silu", "complete": complete,
    "handled": frozenset({"attention.causal"}), "remote": True}

ROWS = (
    Architecture(name="llama_embedding", model_types=("qwen2",), gguf=("qwen2",), full_layers=28,
                 classes=("Qwen2Model", "Qwen2ForCausalLM"), tensors=_tensors(qkv_bias=True), **_COMMON),
    Architecture(name="llama_embedding", model_types=("llama", "mistral"), gguf=(),
                 classes=("LlamaModel", "LlamaForCausalLM", "MistralModel", "MistralForCausalLM"), tensors=_tensors(),
                 **_COMMON),
    Architecture(name="qwen3_embedding", model_types=("qwen3",), gguf=("qwen3",), full_layers=28,
                 classes=("Qwen3Model", "Qwen3ForCausalLM"), tensors=_tensors(head_norms=True), **_COMMON),
    Architecture(**{**_COMMON, "name": "llama_embedding", "model_types": ("eurobert",), "gguf": ("eurobert",),
                    "classes": tuple(f"EuroBert{head}" for head in (
                        "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")),
                    "tensors": _tensors(), "read": read_eurobert, "complete": complete_eurobert,
                    "head": _eurobert_head, "ignored": (r"lm_head\..*", r"dense\..*", r"classifier\..*",
                                                        r"(model\.)?rotary_emb\.inv_freq")}),
    Architecture(**{**_COMMON, "name": "gemma_embedding", "model_types": ("gemma3_text",), "gguf": ("gemma-embedding",),
                    "classes": ("Gemma3TextModel", "Gemma3ForCausalLM"), "tensors": _GEMMA, "read": read_gemma,
                    "activation": "gelu_tanh", "complete": complete_gemma, "remote": False,
                    "handled": frozenset(), "defaults": DEFAULTS}),
    Architecture(**{**_COMMON, "name": "nv_embed", "model_types": ("nvembed",), "gguf": (), "tensors": _NV_EMBED,
                    "classes": ("NVEmbedModel",), "prefixes": ("embedding_model.",), "read": read_nv_embed}),
)
