"""Nomic's BERT.

nomic-embed-text v1 and v1.5 have RoPE, a gated MLP, and biases in the norms only. v2 MoE (arXiv:2502.07972) has biases,
no gate, and experts in every second layer. The models were published with their own Python code and a configuration
with the key names of GPT-2. transformers later added the architecture with its own names
(https://github.com/huggingface/transformers/blob/main/src/transformers/models/nomic_bert).
"""

from __future__ import annotations

from dataclasses import replace

from ..fields import Fields
from ..spec import Value
from .reading import activation, check_neutral, plain_rope, require_values, sizes
from .rows import Architecture, Config, Tensor, layer

_OLD, _NEW = "encoder.layers.{}", "layers.{}"


def _qkv(part: int, name: str, shape: str, biased: bool) -> tuple[Tensor, ...]:
    return layer(f"{_OLD}.attn.Wqkv[{part}]|{_NEW}.self_attn.{name}_proj", f"attn_{name}", shape,
                 bias=shape[0] if biased else None, stored=f"attn_qkv[{part}]")


def _common(biased: bool) -> tuple[Tensor, ...]:
    """Return all tensors except those of the feed-forward layers."""
    return (
        Tensor("embeddings.word_embeddings.weight", "token_embd.weight", "VD"),
        Tensor("embeddings.token_type_embeddings.weight", "token_types.weight", "TD", "types"),
        Tensor("emb_ln.weight|embeddings.LayerNorm.weight", "token_embd_norm.weight", "D"),
        Tensor("emb_ln.bias|embeddings.LayerNorm.bias", "token_embd_norm.bias", "D"),
        *_qkv(0, "q", "QD", biased), *_qkv(1, "k", "KD", biased), *_qkv(2, "v", "UD", biased),
        *layer(f"{_OLD}.attn.out_proj|{_NEW}.self_attn.o_proj", "attn_output", "DO", bias="D" if biased else None),
        *layer(f"{_OLD}.norm1|{_NEW}.post_attention_layernorm", "attn_output_norm", "D", bias="D"),
        *layer(f"{_OLD}.norm2|{_NEW}.post_mlp_layernorm", "layer_output_norm", "D", bias="D"),
    )


_TENSORS = (
    *_common(biased=False),
    *layer(f"{_OLD}.mlp.fc11|{_NEW}.mlp.up_proj", "ffn_up", "FD"),
    *layer(f"{_OLD}.mlp.fc12|{_NEW}.mlp.gate_proj", "ffn_gate", "FD"),
    *layer(f"{_OLD}.mlp.fc2|{_NEW}.mlp.down_proj", "ffn_down", "DF"),
)
_EXPERTS = f"{_OLD}.mlp.experts"
_MOE_TENSORS = (
    *_common(biased=True),
    *layer(f"{_OLD}.mlp.fc1", "ffn_up", "FD", bias="F", when="in dense"),
    *layer(f"{_OLD}.mlp.fc2", "ffn_down", "DF", bias="D", when="in dense"),
    *layer(f"{_OLD}.mlp.router.layer", "ffn_gate_inp", "XD", when="in sparse"),
    # folders concatenate the experts along the first dimension, and store the down projections transposed
    Tensor(f"{_EXPERTS}.mlp.w1[{{x}}]", "blk.{}.ffn_up.{x}.weight", "FD", "folder in sparse"),
    Tensor(f"{_EXPERTS}.mlp.w2[{{x}}]", "blk.{}.ffn_down.{x}.columns", "FD", "folder in sparse"),
    Tensor("", "blk.{}.ffn_up_exps.weight", "XFD", "in sparse"),
    Tensor("", "blk.{}.ffn_down_exps.weight", "XDF", "in sparse"),
    Tensor(f"{_EXPERTS}.bias", "blk.{}.ffn_exps.bias", "D", "folder in sparse"),  # GGUF files lack it
)

#: Options of the published code -> values that mpool supports.
_SUPPORTED: dict[str, tuple[object, ...]] = {
    "moe_every_n_layers": (0, None), "activation_function": ("swiglu",), "prenorm": (False,), "causal": (False,),
    "qkv_proj_bias": (False,), "mlp_fc1_bias": (False,), "mlp_fc2_bias": (False,), "parallel_block": (False,),
    "rotary_emb_fraction": (1, 1.0), "rotary_emb_interleaved": (False,), "rotary_emb_scale_base": (None,),
    "use_rms_norm": (False, None), "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,),
    "layer_norm_type": (None,), "shared_expert": (None,),
}
#: Keys that only concern training or the choice of kernels, or that are checked elsewhere.
_IGNORED = {"attn_pdrop", "embd_pdrop", "resid_pdrop", "dense_seq_output", "fused_bias_fc", "fused_dropout_add_ln",
            "last_layer_subset", "mlp_checkpoint_lvl", "pad_vocab_size_multiple", "parallel_block_tied_norm",
            "reorder_and_upcast_attn", "use_flash_attn", "use_xentropy", "max_trained_positions", "auto_map", "n_inner",
            "summary_proj_to_labels", "expert_choice_router", "ffn_div", "moe_impl", "moe_normalize_expert_weights",
            "moe_resid_pdrop", "moe_top_k", "num_experts", "num_shared_experts", "router_aux_loss_coef"}


#: Options of the published code of v2 MoE -> values that mpool supports.
_MOE_SUPPORTED: dict[str, tuple[object, ...]] = {
    **{key: values for key, values in _SUPPORTED.items() if key != "moe_every_n_layers"},
    "activation_function": ("gelu",), "qkv_proj_bias": (True,), "mlp_fc1_bias": (True,), "mlp_fc2_bias": (True,),
    "moe_normalize_expert_weights": (False, None), "expert_choice_router": (False, None),
    "num_shared_experts": (0, None), "ffn_div": (1, None),
}


def _read_old(config: Fields, row: Architecture) -> tuple[dict[str, Value], set[str]]:
    """Read a configuration with the key names of GPT-2, and return the hyper-parameters and the keys that were read.

    The published code scales RoPE by the length of texts longer than ``max_trained_positions``. mpool does not support
    this, so the context length is cut to ``max_trained_positions`` if the configuration enables the scaling.
    """
    a = row.name
    require_values(config, _MOE_SUPPORTED if row.marker[0] else _SUPPORTED)
    positions = config.int("n_positions", low=1)
    trained = config.int("max_trained_positions", 2048, low=1)
    factor = config.number("rotary_scaling_factor", None)
    if factor is not None and factor != 1:
        positions = min(positions, trained)
    hidden = config.int("n_embd", low=1)
    kv: dict[str, Value] = {
        f"{a}.block_count": config.int("n_layer", low=1), f"{a}.context_length": positions,
        f"{a}.embedding_length": hidden, f"{a}.feed_forward_length": config.int("n_inner", 4 * hidden, low=1),
        f"{a}.attention.head_count": config.int("n_head", low=1), f"{a}.vocab_size": config.int("vocab_size", low=1),
        f"{a}.attention.layer_norm_epsilon": config.number("layer_norm_epsilon", 1e-12, above=0.0),
        f"{a}.rope.freq_base": config.number("rotary_emb_base", 10000.0, above=0.0), "mpool.activation": row.activation}
    return kv, {"n_positions", "n_embd", "n_layer", "n_head", "vocab_size", "layer_norm_epsilon", "rotary_emb_base",
                "rotary_scaling_factor", *_SUPPORTED, *_IGNORED}


def read_nomic(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a Nomic BERT encoder."""
    a = row.name
    if "n_embd" in config:
        kv, used = _read_old(config, row)
    else:
        kv, used = sizes(config, row)
        kv[f"{a}.attention.layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-12, above=0.0)
        kv[f"{a}.rope.freq_base"] = plain_rope(config, 1000.0)
        kv["mpool.activation"] = activation(config, "hidden_act", "silu")
        head_dim = config.int("head_dim", None, low=1)
        if head_dim is not None:
            kv[f"{a}.attention.key_length"] = kv[f"{a}.attention.value_length"] = head_dim
        used |= {"layer_norm_eps", "hidden_act", "head_dim", "rope_parameters", "rope_theta", "rope_scaling"}
    heads = kv[f"{a}.attention.head_count"]
    kv[f"{a}.attention.head_count_kv"] = heads
    kv[f"{a}.attention.causal"] = False
    types = config.int("type_vocab_size", 2, low=1, high=1 << 16)
    check_neutral(config, used | {"type_vocab_size", "tie_word_embeddings"})
    return Config(kv, token_types=types)


def read_moe(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a Nomic BERT encoder with experts."""
    if "n_embd" not in config:
        config.fail("n_embd", "missing", "the hidden size, as in the config.json of nomic-embed-text-v2-moe")
    found, a = read_nomic(config, row), row.name
    found.kv[f"{a}.expert_count"] = config.int("num_experts", low=1, high=1024)
    found.kv[f"{a}.expert_used_count"] = config.int("moe_top_k", low=1)
    found.kv[f"{a}.moe_every_n_layers"] = config.int("moe_every_n_layers", low=2)
    found.kv["mpool.expert_normalise"] = False
    return found


def complete_moe(table: Fields, name: str, kv: dict[str, Value]) -> None:
    """Add the defaults that GGUF files omit."""
    table.int(f"{name}.expert_count", low=1, high=1024)
    table.int(f"{name}.moe_every_n_layers", low=2)
    kv.setdefault("nomic_bert_moe.rope.freq_base", 10000.0)
    kv["mpool.expert_normalise"] = False


_ROW = Architecture(
    name="nomic_bert", capability="text_embedding", gguf=("nomic-bert",),
    classes=("NomicBertModel", "NomicBertForMaskedLM", "NomicBertForPreTraining",
             "NomicBertForSequenceClassification", "NomicBertForTokenClassification"),
    prefixes=("", "bert.", "nomic_bert."), read=read_nomic, tensors=_TENSORS,
    ignored=(r"((nomic_)?bert\.)?pooler\..*", r"cls\..*", r"classifier\..*", r".*rotary_emb\.(original_)?inv_freq"),
    epsilon="attention.layer_norm_epsilon", rope=True, activation="silu", remote=True)

ROWS = (
    _ROW,
    replace(_ROW, name="nomic_bert_moe", model_types=("nomic_bert",), gguf=("nomic-bert-moe",), read=read_moe,
            tensors=_MOE_TENSORS, activation="gelu", complete=complete_moe,
            handled=frozenset({"expert_count", "expert_used_count"}),
            extra_sizes=lambda kv, size, a: {"sparse": sum(1 << i for i in range(size["layers"])
                                                           if i % kv[f"{a}.moe_every_n_layers"] == 1)},
            marker=("encoder.layers.0.mlp.fc1.bias", "")),
)
