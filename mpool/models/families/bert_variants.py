"""DistilBERT (arXiv:1910.01108), ELECTRA (arXiv:2003.10555) and ALBERT (arXiv:1909.11942): encoders with BERT's layers.

DistilBERT has no token types. The embeddings of ELECTRA and ALBERT may be narrower than the hidden states; a linear
layer maps them. ALBERT's layers share weights: the core loads each group of weights once and is told their order
(``mpool.layer_order``). The core computes all three as ``bert``.
"""

from __future__ import annotations

from ...errors import LimitError
from ..fields import Fields
from .bert import BERT_TENSORS, read_bert
from .reading import MAX_LAYERS, MAX_WIDTH, activation, check_neutral, sizes
from .rows import Architecture, Config, Head, HeadLayer, Tensor, layer

_EMBEDDINGS = ("token_embd.weight", "position_embd.weight", "token_types.weight", "token_embd_norm.weight",
               "token_embd_norm.bias")


def _projected(name: str, tensors: tuple[Tensor, ...], when: str = "") -> tuple[Tensor, ...]:
    """Return tensors whose embeddings have a size of their own, ``e``, followed by a projection called ``name``."""
    narrow = (Tensor(tensor.hf, tensor.gguf, tensor.shape.replace("D", "e"), tensor.when)
              if tensor.gguf in _EMBEDDINGS else tensor for tensor in tensors)
    return (*narrow, Tensor(f"{name}.weight", "token_embd_proj.weight", "De", when),
            Tensor(f"{name}.bias", "token_embd_proj.bias", "D", when))


# ---- DistilBERT ----------------------------------------------------------------------------------------------------

_DISTIL = "transformer.layer.{}"
_DISTIL_TENSORS = (
    *(tensor for tensor in BERT_TENSORS if tensor.gguf in _EMBEDDINGS and tensor.gguf != "token_types.weight"),
    *layer(f"{_DISTIL}.attention.q_lin", "attn_q", "QD", bias="Q"),
    *layer(f"{_DISTIL}.attention.k_lin", "attn_k", "KD", bias="K"),
    *layer(f"{_DISTIL}.attention.v_lin", "attn_v", "UD", bias="U"),
    *layer(f"{_DISTIL}.attention.out_lin", "attn_output", "DO", bias="D"),
    *layer(f"{_DISTIL}.sa_layer_norm", "attn_output_norm", "D", bias="D"),
    *layer(f"{_DISTIL}.ffn.lin1", "ffn_up", "FD", bias="F"),
    *layer(f"{_DISTIL}.ffn.lin2", "ffn_down", "DF", bias="D"),
    *layer(f"{_DISTIL}.output_layer_norm", "layer_output_norm", "D", bias="D"),
)
#: Keys of the sizes in DistilBERT's configuration.
_DISTIL_SIZES = {"num_hidden_layers": "n_layers", "hidden_size": "dim", "intermediate_size": "hidden_dim",
                 "num_attention_heads": "n_heads"}


def read_distilbert(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a DistilBERT encoder. Its table of positions is stored, also if it was initialised
    with sines."""
    kv, used = sizes(config, row, _DISTIL_SIZES)
    kv["bert.attention.head_count_kv"] = kv["bert.attention.head_count"]
    kv["bert.attention.layer_norm_epsilon"] = 1e-12
    kv["bert.attention.causal"] = False
    kv["mpool.activation"] = activation(config, "activation", "gelu")
    check_neutral(config, used | {"activation", "sinusoidal_pos_embds", "dropout", "qa_dropout", "seq_classif_dropout",
                                  "tie_word_embeddings", "tie_weights_", "output_past"})
    return Config(kv)


# ---- ELECTRA -------------------------------------------------------------------------------------------------------

def _embedding_size(config: Fields, found: Config, default: int) -> int:
    """Add the size of the embeddings to the sizes of a model, and return it."""
    size = config.int("embedding_size", default, low=1, high=MAX_WIDTH)
    found.sizes["e"] = size
    return size


def read_electra(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of an ELECTRA encoder. If its embeddings are as wide as the hidden states, it has no
    projection."""
    found = read_bert(config, row, used={"embedding_size", "summary_last_dropout"})
    size, hidden = _embedding_size(config, found, 128), config.int("hidden_size", low=1)
    found.sizes["projected"] = int(size != hidden)
    if size != hidden:
        found.kv["mpool.embedding_size"] = size
    return found


# ---- ALBERT --------------------------------------------------------------------------------------------------------

_ALBERT = "encoder.albert_layer_groups.{g}.albert_layers.{i}"
_ALBERT_TENSORS = _projected("encoder.embedding_hidden_mapping_in", (
    *(tensor for tensor in BERT_TENSORS if tensor.gguf in _EMBEDDINGS),
    *layer(f"{_ALBERT}.attention.query", "attn_q", "QD", bias="Q"),
    *layer(f"{_ALBERT}.attention.key", "attn_k", "KD", bias="K"),
    *layer(f"{_ALBERT}.attention.value", "attn_v", "UD", bias="U"),
    *layer(f"{_ALBERT}.attention.dense", "attn_output", "DO", bias="D"),
    *layer(f"{_ALBERT}.attention.LayerNorm", "attn_output_norm", "D", bias="D"),
    *layer(f"{_ALBERT}.ffn", "ffn_up", "FD", bias="F"),
    *layer(f"{_ALBERT}.ffn_output", "ffn_down", "DF", bias="D"),
    *layer(f"{_ALBERT}.full_layer_layer_norm", "layer_output_norm", "D", bias="D"),
))


def read_albert(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of an ALBERT encoder.

    ``num_hidden_groups`` groups divide the ``num_hidden_layers`` layers. A layer of the configuration runs all
    ``inner_group_num`` layers of its group.
    """
    found = read_bert(config, row, act="gelu_new", used={
        "embedding_size", "num_hidden_groups", "inner_group_num", "classifier_dropout_prob", "down_scale_factor",
        "gap_size", "layers_to_keep", "net_structure_type", "num_memory_blocks"})
    found.kv["mpool.embedding_size"] = _embedding_size(config, found, 128)
    layers = config.int("num_hidden_layers", low=1)
    groups = config.int("num_hidden_groups", 1, low=1, high=layers)
    inner = config.int("inner_group_num", 1, low=1)
    if layers * inner > MAX_LAYERS:
        raise LimitError(f"{config.file}: {config.name('num_hidden_layers')} times inner_group_num is "
                         f"{layers * inner}, mpool supports at most {MAX_LAYERS} layers")
    each = layers / groups  # transformers divides in floating point too, so the rounding agrees
    group = [int(number / each) for number in range(layers)]
    found.kv["bert.block_count"] = groups * inner
    found.kv["mpool.layer_order"] = [at * inner + part for at in group for part in range(inner)]
    found.sizes["inner"] = inner
    return found


def _classes(name: str, *more: str) -> tuple[str, ...]:
    return tuple(f"{name}{head}" for head in (
        "Model", "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification",
        "ForQuestionAnswering", "ForMultipleChoice", *more))


ROWS = (
    Architecture(
        name="bert", capability="text_embedding", model_types=("distilbert",), gguf=(), classes=_classes("DistilBert"),
        prefixes=("", "distilbert."), read=read_distilbert, tensors=_DISTIL_TENSORS,
        ignored=(r"(distilbert\.)?embeddings\.position_ids", r"vocab_(transform|layer_norm|projector)\..*",
                 r"pre_classifier\..*", r"classifier\..*", r"qa_outputs\..*"),
        epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu",
        head=lambda config: Head("cls", (HeadLayer("pre_classifier", "relu"), HeadLayer("classifier", "identity")))),
    Architecture(
        name="bert", capability="text_embedding", model_types=("electra",), gguf=(),
        classes=_classes("Electra", "ForCausalLM"), prefixes=("", "electra."), read=read_electra,
        tensors=_projected("embeddings_project", BERT_TENSORS, "if projected"),
        ignored=(r"(electra\.)?embeddings\.(position_ids|token_type_ids)",
                 r"(discriminator|generator)_predictions\..*", r"generator_lm_head\..*", r"classifier\..*",
                 r"qa_outputs\..*", r"sequence_summary\..*"),
        epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu",
        head=lambda config: Head("cls", (HeadLayer("classifier.dense", "gelu"),
                                         HeadLayer("classifier.out_proj", "identity")))),
    Architecture(
        name="bert", capability="text_embedding", model_types=("albert",), gguf=(), classes=_classes("Albert"),
        prefixes=("", "albert."), read=read_albert, tensors=_ALBERT_TENSORS,
        ignored=(r"(albert\.)?embeddings\.(position_ids|token_type_ids)", r"(albert\.)?pooler\..*",
                 r"predictions\..*", r"sop_classifier\..*", r"classifier\..*", r"qa_outputs\..*"),
        epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu_tanh",
        head=lambda config: Head("cls", (HeadLayer("albert.pooler", "tanh"), HeadLayer("classifier", "identity")))),
)
