"""JinaBERT v2 (arXiv:2310.19923): BERT with a gated MLP, and symmetric ALiBi in place of position embeddings.

The variant jina-embeddings-v2-base-code also normalises queries and keys, and has one more norm per layer
(https://github.com/huggingface/text-embeddings-inference/blob/main/backends/candle/src/models/jina_code.rs). Both are
published with their own Python code and model type ``bert``. ``position_embedding_type: alibi`` distinguishes them from
BERT, and their tensors distinguish them from each other.
"""

from __future__ import annotations

from dataclasses import replace

from ..fields import Fields
from ..spec import Value
from .reading import check_neutral, require_values, sizes, unsupported
from .rows import Architecture, Config, Head, HeadLayer, Tensor, layer

_BLOCK = "encoder.layer.{}"
_COMMON = (
    Tensor("embeddings.word_embeddings.weight", "token_embd.weight", "VD"),
    Tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "TD", "types"),
    Tensor("embeddings.LayerNorm.weight", "token_embd_norm.weight", "D"),
    Tensor("embeddings.LayerNorm.bias", "token_embd_norm.bias", "D"),
    *layer(f"{_BLOCK}.attention.self.query", "attn_q", "QD", bias="Q"),
    *layer(f"{_BLOCK}.attention.self.key", "attn_k", "KD", bias="K"),
    *layer(f"{_BLOCK}.attention.self.value", "attn_v", "UD", bias="U"),
    *layer(f"{_BLOCK}.attention.output.dense", "attn_output", "DO", bias="D"),
    *layer(f"{_BLOCK}.attention.output.LayerNorm", "attn_output_norm", "D", bias="D"),
)
_TENSORS = (
    *_COMMON,
    *layer(f"{_BLOCK}.mlp.gated_layers[0]", "ffn_gate", "FD", stored="ffn_gate|ffn_up[0]"),
    *layer(f"{_BLOCK}.mlp.gated_layers[1]", "ffn_up", "FD", stored="ffn_up[1]|ffn_up"),
    *layer(f"{_BLOCK}.mlp.wo", "ffn_down", "DF", bias="D"),
    *layer(f"{_BLOCK}.mlp.layernorm", "layer_output_norm", "D", bias="D"),
)
_CODE = (
    *_COMMON,
    *layer(f"{_BLOCK}.attention.self.layer_norm_q", "attn_q_norm", "Q", bias="Q"),
    *layer(f"{_BLOCK}.attention.self.layer_norm_k", "attn_k_norm", "K", bias="K"),
    *layer(f"{_BLOCK}.layer_norm_1", "attn_norm_2", "D", bias="D"),
    *layer(f"{_BLOCK}.mlp.up_gated_layer[0]", "ffn_up", "FD", stored="ffn_up[0]|ffn_up"),
    *layer(f"{_BLOCK}.mlp.up_gated_layer[1]", "ffn_gate", "FD", stored="ffn_gate|ffn_up[1]"),
    *layer(f"{_BLOCK}.mlp.down_layer", "ffn_down", "DF", bias="D"),
    *layer(f"{_BLOCK}.layer_norm_2", "layer_output_norm", "D", bias="D"),
)

_SUPPORTED: dict[str, tuple[object, ...]] = {"attn_implementation": (None, "torch"), "emb_pooler": (None, "mean")}


def read_jina(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a JinaBERT v2 encoder. Its ALiBi table ends at ``max_position_embeddings``."""
    kv, used = sizes(config, row)
    a = row.name
    require_values(config, _SUPPORTED)
    kinds = {"geglu": "gelu", "reglu": "relu"}
    kind = config.str("feed_forward_type", "original", choices=None)
    if kind not in kinds:
        unsupported(config, "feed_forward_type", " and ".join(kinds))
    kv[f"{a}.attention.head_count_kv"] = kv[f"{a}.attention.head_count"]
    kv[f"{a}.attention.layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-12, above=0.0)
    kv[f"{a}.attention.causal"] = False
    kv["mpool.activation"] = kinds[kind]
    types = config.int("type_vocab_size", 2, low=1, high=1 << 16)
    check_neutral(config, used | {"layer_norm_eps", "type_vocab_size", "tie_word_embeddings", "auto_map", "hidden_act",
                                  "feed_forward_type", "position_embedding_type", "emb_pooler", "model_max_length"})
    return Config(kv, token_types=types)


def complete(table: Fields, name: str, kv: dict[str, Value]) -> None:
    """Check the ALiBi bias of a GGUF file, which must be 8. All GGUF files are of models with GeGLU."""
    if table.number(f"{name}.attention.max_alibi_bias", 8.0) != 8.0:
        unsupported(table, f"{name}.attention.max_alibi_bias", "8")


_ROW = Architecture(
    name="jina_bert_v2", capability="text_embedding", model_types=("bert",), gguf=("jina-bert-v2",),
    classes=("JinaBertModel", "JinaBertForMaskedLM", "JinaBertForSequenceClassification"),
    prefixes=("", "bert."), read=read_jina, tensors=_TENSORS,
    ignored=(r"(bert\.)?embeddings\.position_ids", r"(bert\.)?pooler\..*", r"cls\..*", r"classifier\..*"),
    epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu", complete=complete,
    handled=frozenset({"attention.max_alibi_bias"}), remote=True,
    head=lambda config: Head("cls", (HeadLayer("bert.pooler.dense", "tanh"), HeadLayer("classifier", "identity"))))

ROWS = (
    _ROW,
    replace(_ROW, name="jina_bert_v2_code", tensors=_CODE,
            marker=("encoder.layer.0.attention.self.layer_norm_q.weight", "blk.0.attn_q_norm.weight")),
)
