"""BERT."""

from __future__ import annotations

from ..fields import Fields
from .reading import activation, check_neutral, sizes
from .rows import Architecture, Config, Tensor, layer

_BERT = "encoder.layer.{}"
_BERT_TENSORS = (
    Tensor("embeddings.word_embeddings.weight", "token_embd.weight", "VD"),
    Tensor("embeddings.position_embeddings.weight", "position_embd.weight", "PD"),
    Tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "TD", "types"),
    Tensor("embeddings.LayerNorm.weight", "token_embd_norm.weight", "D"),
    Tensor("embeddings.LayerNorm.bias", "token_embd_norm.bias", "D"),
    *layer(f"{_BERT}.attention.self.query", "attn_q", "QD", bias="Q"),
    *layer(f"{_BERT}.attention.self.key", "attn_k", "KD", bias="K"),
    *layer(f"{_BERT}.attention.self.value", "attn_v", "UD", bias="U"),
    *layer(f"{_BERT}.attention.output.dense", "attn_output", "DO", bias="D"),
    *layer(f"{_BERT}.attention.output.LayerNorm", "attn_output_norm", "D", bias="D"),
    *layer(f"{_BERT}.intermediate.dense", "ffn_up", "FD", bias="F"),
    *layer(f"{_BERT}.output.dense", "ffn_down", "DF", bias="D"),
    *layer(f"{_BERT}.output.LayerNorm", "layer_output_norm", "D", bias="D"),
)


def read_bert(config: Fields, row: Architecture) -> Config:
    """Hyper-parameters of a BERT encoder."""
    kv, used = sizes(config, row)
    kv["bert.attention.head_count_kv"] = kv["bert.attention.head_count"]
    kv["bert.attention.layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-12, above=0.0)
    kv["bert.attention.causal"] = False
    kv["mpool.activation"] = activation(config, "hidden_act", "gelu", ("gelu", "gelu_tanh", "relu", "silu"))
    types = config.int("type_vocab_size", 2, low=1, high=1 << 16)
    used |= {"layer_norm_eps", "hidden_act", "type_vocab_size", "tie_word_embeddings"}
    check_neutral(config, used)
    return Config(kv, token_types=types)


ROWS = (
    Architecture(
        name="bert", capability="text_embedding",
        classes=("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForNextSentencePrediction",
                 "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering",
                 "BertForMultipleChoice"),
        prefixes=("", "bert."), read=read_bert, tensors=_BERT_TENSORS,
        harmless=(r"(bert\.)?embeddings\.position_ids", r"(bert\.)?embeddings\.token_type_ids", r"(bert\.)?pooler\..*",
                  r"cls\..*", r"classifier\..*", r"qa_outputs\..*"),
        epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu"),
)
