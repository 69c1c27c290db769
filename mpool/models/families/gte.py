"""GTE (gte-base-en-v1.5, gte-multilingual, Stella 400M): BERT with RoPE and a gated MLP (arXiv:2407.19669).

The models were published with their own Python code and model type ``new``; snowflake-arctic-embed-m-v2.0 is published
with the same code and model type ``gte``. transformers later added the architecture as model type ``gte``, with other
tensor names (https://github.com/huggingface/transformers/blob/main/src/transformers/models/gte).
"""

from __future__ import annotations

from typing import Any

from ..fields import Fields
from .reading import activation, check_neutral, plain_rope, require_values, sizes, unsupported
from .rows import Architecture, Config, Head, HeadLayer, Tensor, layer

_OLD, _NEW = "encoder.layer.{}", "layers.{}"


def _qkv(part: int, name: str, shape: str) -> tuple[Tensor, ...]:
    return layer(f"{_OLD}.attention.qkv_proj[{part}]|{_NEW}.self_attn.{name}_proj", f"attn_{name}", shape,
                 bias=shape[0])


_TENSORS = (
    Tensor("embeddings.word_embeddings.weight", "token_embd.weight", "VD"),
    Tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "TD", "if types"),
    Tensor("embeddings.LayerNorm.weight", "token_embd_norm.weight", "D"),
    Tensor("embeddings.LayerNorm.bias", "token_embd_norm.bias", "D"),
    *_qkv(0, "q", "QD"), *_qkv(1, "k", "KD"), *_qkv(2, "v", "UD"),
    *layer(f"{_OLD}.attention.o_proj|{_NEW}.self_attn.o_proj", "attn_output", "DO", bias="D"),
    *layer(f"{_OLD}.attn_ln|{_NEW}.post_attention_layernorm", "attn_output_norm", "D", bias="D"),
    *layer(f"{_OLD}.mlp.up_gate_proj[0]|{_NEW}.mlp.up_proj", "ffn_up", "FD"),
    *layer(f"{_OLD}.mlp.up_gate_proj[1]|{_NEW}.mlp.gate_proj", "ffn_gate", "FD"),
    *layer(f"{_OLD}.mlp.down_proj|{_NEW}.mlp.down_proj", "ffn_down", "DF", bias="D"),
    *layer(f"{_OLD}.mlp_ln|{_NEW}.post_mlp_layernorm", "layer_output_norm", "D", bias="D"),
)

#: Options of the published code -> values that mpool supports. No published model uses other values.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "position_embedding_type": ("rope",), "layer_norm_type": ("layer_norm",), "pack_qkv": (True,),
    "logn_attention_scale": (False,), "logn_attention_clip1": (False,),
}


def _old_rope(config: Fields, kv: dict[str, Any], a: str) -> None:
    """Read the RoPE parameters of the published code.

    Its NTK scaling multiplies the base by the factor, and divides every angle by ``factor ** (2 / head_dim)``, for
    texts of any length.
    """
    kv[f"{a}.rope.freq_base"] = config.number("rope_theta", 10000.0, above=0.0)
    scaling = config.section("rope_scaling", None)
    if scaling is None:
        return
    scaling.only({"type", "factor", "mixed_b"})
    if scaling.str("type") != "ntk" or scaling.get("mixed_b") is not None:
        if scaling.get("mixed_b") is None:
            unsupported(scaling, "type", "'ntk'")
        unsupported(scaling, "mixed_b", "null")
    factor = scaling.number("factor", above=0.0, most=1e6)
    heads: int = kv[f"{a}.attention.head_count"]
    if heads > kv[f"{a}.embedding_length"]:
        config.fail("num_attention_heads", heads, f"at most {kv[f'{a}.embedding_length']}, the hidden size")
    kv[f"{a}.rope.freq_base"] *= factor
    kv[f"{a}.rope.scaling.type"] = "linear"
    kv[f"{a}.rope.scaling.factor"] = factor ** (2 / (kv[f"{a}.embedding_length"] // heads))


def read_gte(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a GTE encoder, under the names of the published code or of transformers."""
    kv, used = sizes(config, row)
    a = row.name
    kv[f"{a}.attention.head_count_kv"] = kv[f"{a}.attention.head_count"]
    kv[f"{a}.attention.layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-12, above=0.0)
    kv[f"{a}.attention.causal"] = False
    kv["mpool.activation"] = activation(config, "hidden_act", "gelu")
    require_values(config, _SUPPORTED)
    published = config.str("model_type", "new") == "new"
    if published or "rope_parameters" not in config and "auto_map" in config:
        _old_rope(config, kv, a)
    else:
        kv[f"{a}.rope.freq_base"] = plain_rope(config, 160000.0)
    types = config.int("type_vocab_size", 0 if published else 1, low=0, high=1 << 16)
    check_neutral(config, used | {
        "layer_norm_eps", "hidden_act", "type_vocab_size", "tie_word_embeddings", "rope_theta", "rope_scaling",
        "rope_parameters", "auto_map", "unpad_inputs", "use_memory_efficient_attention", *_SUPPORTED})
    return Config(kv, token_types=types, sizes={"types": types})


def _head(config: Fields) -> Head:
    prefix = config.str("model_type", "new")
    return Head("cls", (HeadLayer(f"{prefix}.pooler.dense", "tanh"), HeadLayer("classifier", "identity")))


ROWS = (
    Architecture(
        name="gte", capability="text_embedding", model_types=("new", "gte"), gguf=(),
        classes=tuple(f"{name}{head}" for name in ("New", "Gte")
                      for head in ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")),
        prefixes=("", "new.", "gte."), read=read_gte, tensors=_TENSORS,
        ignored=(r"((new|gte)\.)?embeddings\.(position_ids|token_type_ids|rotary_emb\..*)",
                  r"((new|gte)\.)?pooler\..*", r"lm_head\..*", r"classifier\..*", r".*rotary_emb\..*inv_freq"),
        epsilon="attention.layer_norm_epsilon", rope=True, activation="gelu", head=_head, remote=True),
)
