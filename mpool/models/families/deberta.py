"""DeBERTa v2 and v3 (arXiv:2006.03654, arXiv:2111.09543): BERT with disentangled attention.

Attention scores get two further terms, from learned keys and queries of the distance between two tokens. Far distances
share buckets. The embeddings may be narrower than the hidden states; their norm then follows the projection.
"""

from __future__ import annotations

import math

from ..fields import Fields
from .reading import MAX_WIDTH, activation, check_neutral, sizes, unsupported
from .rows import Architecture, Config, Head, HeadLayer, Tensor, layer

#: Largest number of rows for distances in one direction.
_MAX_SPAN = 1 << 16

_BLOCK = "encoder.layer.{}"
_TENSORS = (
    Tensor("embeddings.word_embeddings.weight", "token_embd.weight", "Ve"),
    Tensor("embeddings.position_embeddings.weight", "position_embd.weight", "Pe", "if positions"),
    Tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "Te", "if types"),
    Tensor("embeddings.embed_proj.weight", "token_embd_proj.weight", "De", "if projected"),
    *(Tensor(f"embeddings.LayerNorm.{kind}", f"{name}.{kind}", "D", when) for kind in ("weight", "bias")
      for name, when in (("token_embd_norm", "if plain"), ("token_embd_proj_norm", "if projected"))),
    Tensor("encoder.rel_embeddings.weight", "rel_embd.weight", "rD"),
    Tensor("encoder.LayerNorm.weight", "rel_embd_norm.weight", "D", "if normed"),
    Tensor("encoder.LayerNorm.bias", "rel_embd_norm.bias", "D", "if normed"),
    *layer(f"{_BLOCK}.attention.self.query_proj", "attn_q", "QD", bias="Q"),
    *layer(f"{_BLOCK}.attention.self.key_proj", "attn_k", "KD", bias="K"),
    *layer(f"{_BLOCK}.attention.self.value_proj", "attn_v", "UD", bias="U"),
    *layer(f"{_BLOCK}.attention.self.pos_key_proj", "attn_pos_k", "QD", bias="Q", when="if keys"),
    *layer(f"{_BLOCK}.attention.self.pos_query_proj", "attn_pos_q", "QD", bias="Q", when="if queries"),
    *layer(f"{_BLOCK}.attention.output.dense", "attn_output", "DO", bias="D"),
    *layer(f"{_BLOCK}.attention.output.LayerNorm", "attn_output_norm", "D", bias="D"),
    *layer(f"{_BLOCK}.intermediate.dense", "ffn_up", "FD", bias="F"),
    *layer(f"{_BLOCK}.output.dense", "ffn_down", "DF", bias="D"),
    *layer(f"{_BLOCK}.output.LayerNorm", "layer_output_norm", "D", bias="D"),
)


def _terms(config: Fields) -> tuple[bool, bool]:
    """Return two flags: scores have a term with keys of distances (c2p), and one with queries of distances (p2c)."""
    value = config.get("pos_att_type")
    kinds = [part.strip() for part in config.str("pos_att_type", "", limit=64).lower().split("|")] \
        if isinstance(value, str) else config.list("pos_att_type", [], of=str, limit=4)
    if not kinds or not set(kinds) <= {"c2p", "p2c"}:
        unsupported(config, "pos_att_type", "c2p, p2c or both")
    return "c2p" in kinds, "p2c" in kinds


def _span(config: Fields, found: Config) -> int:
    """Read the buckets of distances. Returns the number of rows for distances in one direction."""
    farthest = config.int("max_relative_positions", -1, low=-1, high=_MAX_SPAN)
    if farthest < 1:
        farthest = config.int("max_position_embeddings", low=1, high=_MAX_SPAN)
    buckets = config.int("position_buckets", -1, low=-1, high=_MAX_SPAN)
    if buckets < 1:
        return farthest
    if not 2 <= buckets < 2 * (farthest - 1):
        config.fail("position_buckets", buckets,
                    f"-1, or 2 to {2 * farthest - 3}, below twice the farthest distance (max_relative_positions)")
    found.kv["mpool.relative_buckets"], found.kv["mpool.relative_farthest"] = buckets, farthest
    return buckets


def read_deberta(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a DeBERTa v2 or v3 encoder."""
    kv, used = sizes(config, row)
    a = row.name
    hidden = config.int("hidden_size", low=1, high=MAX_WIDTH)
    heads = config.int("num_attention_heads", low=1, high=MAX_WIDTH)
    if hidden % heads or config.int("attention_head_size", hidden // heads) != hidden // heads:
        config.fail("num_attention_heads", heads, f"a divisor of the hidden size {hidden}, and of heads that fill it")
    if not config.bool("relative_attention", False):
        unsupported(config, "relative_attention", "true")
    if config.int("conv_kernel_size", 0):
        unsupported(config, "conv_kernel_size", "0, models without a convolution")
    kv[f"{a}.attention.head_count_kv"] = heads
    kv[f"{a}.attention.layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-7, above=0.0)
    kv[f"{a}.attention.causal"] = False
    kv["mpool.activation"] = activation(config, "hidden_act", "gelu")
    keys, queries = _terms(config)
    shared = config.bool("share_att_key", False)
    kv["mpool.attention_scale"] = 1 / math.sqrt(hidden // heads * (1 + keys + queries))
    types, size = config.int("type_vocab_size", 0, low=0, high=1 << 16), config.int("embedding_size", hidden, low=1,
                                                                                    high=MAX_WIDTH)
    found = Config(kv, token_types=types)
    span = _span(config, found)
    norms = [part.strip() for part in config.str("norm_rel_ebd", "none", limit=64).lower().split("|")]
    if not set(norms) <= {"none", "layer_norm"}:
        unsupported(config, "norm_rel_ebd", "none and layer_norm")
    kv |= {"mpool.relative_span": span, "mpool.relative_keys": keys, "mpool.relative_queries": queries,
           "mpool.relative_shared": shared, "mpool.relative_normed": "layer_norm" in norms}
    if size != hidden:
        kv["mpool.embedding_size"] = size
    found.sizes |= {
        "e": size, "r": 2 * span, "projected": int(size != hidden), "plain": int(size == hidden), "types": types,
        "positions": int(config.bool("position_biased_input", True)), "normed": int("layer_norm" in norms),
        "keys": int(keys and not shared), "queries": int(queries and not shared)}
    check_neutral(config, used | {
        "layer_norm_eps", "hidden_act", "type_vocab_size", "tie_word_embeddings", "relative_attention",
        "max_relative_positions", "position_buckets", "pos_att_type", "share_att_key", "norm_rel_ebd",
        "position_biased_input", "embedding_size", "attention_head_size", "conv_kernel_size", "conv_act", "conv_groups",
        "pooler_hidden_size", "pooler_hidden_act", "pooler_dropout", "cls_dropout", "legacy", "padding_idx"})
    return found


def _head(config: Fields) -> Head:
    hidden = config.int("hidden_size", low=1)
    if config.int("pooler_hidden_size", hidden) != hidden:
        unsupported(config, "pooler_hidden_size", f"{hidden}, the hidden size")
    act = activation(config, "pooler_hidden_act", "gelu", ("gelu", "gelu_tanh", "relu", "silu"))
    return Head("cls", (HeadLayer("pooler.dense", act), HeadLayer("classifier", "identity")))


ROWS = (
    Architecture(
        name="deberta_v2", capability="text_embedding", model_types=("deberta-v2",), gguf=(),
        classes=tuple(f"DebertaV2{head}" for head in (
            "Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
            "ForMultipleChoice")),
        prefixes=("", "deberta."), read=read_deberta, tensors=_TENSORS,
        ignored=(r"(deberta\.)?embeddings\.(position_ids|position_embeddings\.weight)", r"pooler\..*",
                 r"classifier\..*", r"cls\..*", r"qa_outputs\..*", r"(lm|mask)_predictions\..*"),
        epsilon="attention.layer_norm_epsilon", rope=False, activation="gelu", head=_head),
)
