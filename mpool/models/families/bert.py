"""BERT, RoBERTa and XLM-RoBERTa. RoBERTa's positions start at the id of the padding token plus 1."""

from __future__ import annotations

from collections.abc import Collection

from ..fields import Fields
from .reading import activation, check_neutral, sizes
from .rows import Architecture, Config, Head, HeadLayer, Tensor, layer

_BERT = "encoder.layer.{}"
#: Tensors of BERT, which several families extend.
BERT_TENSORS = (
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


def read_bert(config: Fields, row: Architecture, act: str = "gelu", used: Collection[str] = ()) -> Config:
    """Read the hyper-parameters of a BERT encoder.

    Args:
        config: ``config.json``.
        row: row of the family.
        act: the family's default activation.
        used: further keys that the family reads.
    """
    kv, known = sizes(config, row)
    kv["bert.attention.head_count_kv"] = kv["bert.attention.head_count"]
    kv["bert.attention.layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-12, above=0.0)
    kv["bert.attention.causal"] = False
    kv["mpool.activation"] = activation(config, "hidden_act", act)
    types = config.int("type_vocab_size", 2, low=1, high=1 << 16)
    check_neutral(config, known | {"layer_norm_eps", "hidden_act", "type_vocab_size", "tie_word_embeddings", *used})
    return Config(kv, token_types=types)


#: Position table whose first rows are unused: they precede position 0 of a text.
POSITIONS = (Tensor("embeddings.position_embeddings.weight[0]", "", "oD"),
             Tensor("embeddings.position_embeddings.weight[1]", "position_embd.weight", "PD"))
_ROBERTA_TENSORS = (*POSITIONS, *(tensor for tensor in BERT_TENSORS if tensor.gguf != "position_embd.weight"))


def read_roberta(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a RoBERTa encoder.

    GGUF files of RoBERTa have the architecture BERT: the converter removes the unused rows of the position table.
    """
    found = read_bert(config, row)
    rows, offset = config.int("max_position_embeddings"), config.int("pad_token_id", 1, low=0) + 1
    if offset >= rows:
        config.fail("max_position_embeddings", rows,
                    f"more than {offset}, the number of unused rows up to the padding token (pad_token_id + 1)")
    found.kv["bert.context_length"] = rows - offset
    found.sizes["o"] = offset
    return found


def roberta_head(config: Fields) -> Head:
    """Return RoBERTa's classification head: two linear layers on the hidden state of the first token."""
    return Head("cls", (HeadLayer("classifier.dense", "tanh"), HeadLayer("classifier.out_proj", "identity")))


_ROBERTA = ("Model", "ForMaskedLM", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification",
            "ForMultipleChoice", "ForQuestionAnswering")


ROWS = (
    Architecture(
        name="bert", capability="text_embedding",
        classes=("BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForNextSentencePrediction",
                 "BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering",
                 "BertForMultipleChoice", "HF_ColBERT"),
        prefixes=("", "bert."), read=read_bert, tensors=BERT_TENSORS,
        ignored=(r"(bert\.)?embeddings\.position_ids", r"(bert\.)?embeddings\.token_type_ids", r"(bert\.)?pooler\..*",
                  r"cls\..*", r"classifier\..*", r"qa_outputs\..*", r"linear\.weight"),
        epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu", gguf_head="tanh",
        head=lambda config: Head("cls", (HeadLayer("bert.pooler.dense", "tanh"), HeadLayer("classifier", "identity")))),
    Architecture(
        name="bert", capability="text_embedding", model_types=("roberta", "xlm-roberta", "camembert"), gguf=(),
        classes=tuple(f"{name}{head}" for name in ("Roberta", "XLMRoberta", "Camembert") for head in _ROBERTA),
        prefixes=("", "roberta."), read=read_roberta, tensors=_ROBERTA_TENSORS,
        ignored=(r"(roberta\.)?embeddings\.position_ids", r"(roberta\.)?embeddings\.token_type_ids",
                  r"(roberta\.)?pooler\..*", r"lm_head\..*", r"classifier\..*", r"qa_outputs\..*"),
        epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu", head=roberta_head),
)
