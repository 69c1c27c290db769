"""MPNet (arXiv:2004.09297): BERT with relative position biases of the attention scores."""

from __future__ import annotations

from ..fields import Fields
from .bert import POSITIONS, roberta_head
from .reading import activation, check_neutral, sizes
from .rows import Architecture, Config, Tensor, layer

_BLOCK = "encoder.layer.{}"
_TENSORS = (
    Tensor("embeddings.word_embeddings.weight", "token_embd.weight", "VD"),
    *POSITIONS,
    Tensor("embeddings.LayerNorm.weight", "token_embd_norm.weight", "D"),
    Tensor("embeddings.LayerNorm.bias", "token_embd_norm.bias", "D"),
    Tensor("encoder.relative_attention_bias.weight", "attn_rel_b.weight", "BH"),
    *layer(f"{_BLOCK}.attention.attn.q", "attn_q", "QD", bias="Q"),
    *layer(f"{_BLOCK}.attention.attn.k", "attn_k", "KD", bias="K"),
    *layer(f"{_BLOCK}.attention.attn.v", "attn_v", "UD", bias="U"),
    *layer(f"{_BLOCK}.attention.attn.o", "attn_output", "DO", bias="D"),
    *layer(f"{_BLOCK}.attention.LayerNorm", "attn_output_norm", "D", bias="D"),
    *layer(f"{_BLOCK}.intermediate.dense", "ffn_up", "FD", bias="F"),
    *layer(f"{_BLOCK}.output.dense", "ffn_down", "DF", bias="D"),
    *layer(f"{_BLOCK}.output.LayerNorm", "layer_output_norm", "D", bias="D"),
)


def read_mpnet(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of an MPNet encoder.

    Positions start at 2, the id of the padding token plus 1, as in RoBERTa. The padding id is 1 even if the
    configuration states another value.
    """
    kv, used = sizes(config, row)
    a, offset = row.name, 2
    positions = config.int("max_position_embeddings", low=offset + 1)
    kv[f"{a}.context_length"] = positions - offset
    kv[f"{a}.attention.head_count_kv"] = heads = config.int("num_attention_heads", low=1)
    kv[f"{a}.attention.layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-12, above=0.0)
    kv[f"{a}.attention.causal"] = False
    kv["mpool.activation"] = activation(config, "hidden_act", "gelu")
    buckets = config.int("relative_attention_num_buckets", 32, low=32, high=32)
    check_neutral(config, used | {"layer_norm_eps", "hidden_act", "relative_attention_num_buckets",
                                  "tie_word_embeddings"})
    return Config(kv, sizes={"o": offset, "B": buckets, "H": heads})


ROWS = (
    Architecture(
        name="mpnet", capability="text_embedding", gguf=(),
        classes=("MPNetModel", "MPNetForMaskedLM", "MPNetForSequenceClassification", "MPNetForTokenClassification",
                 "MPNetForMultipleChoice", "MPNetForQuestionAnswering"),
        prefixes=("", "mpnet."), read=read_mpnet, tensors=_TENSORS,
        ignored=(r"(mpnet\.)?embeddings\.position_ids", r"(mpnet\.)?pooler\..*", r"lm_head\..*", r"classifier\..*",
                  r"qa_outputs\..*"),
        epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu", head=roberta_head),
)
