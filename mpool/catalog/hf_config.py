"""``config.json`` of transformers, translated into GGUF's hyper-parameters.

Every key that could change what a model computes is read, or must have the one value that changes nothing; an error
names it otherwise. Keys that only matter for training, generation or book-keeping are listed and skipped. Defaults
are those of transformers' own configuration classes
(https://github.com/huggingface/transformers/tree/main/src/transformers/models).
"""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from ..errors import FormatError, UnsafeFormat, Unsupported
from . import architectures
from .architectures import Architecture
from .fields import Fields, describe
from .spec import Value

log = logging.getLogger("mpool.catalog")

#: Names of one activation function in transformers -> its name here.
ACTIVATIONS: dict[str, str] = {
    "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "relu": "relu", "silu": "silu", "swish": "silu",
}

#: Keys that change nothing in a forward pass.
_SKIPPED = frozenset("""
    _name_or_path _commit_hash _attn_implementation attn_implementation name_or_path transformers_version torch_dtype
    dtype model_type architectures initializer_range use_cache attention_dropout attention_probs_dropout_prob
    hidden_dropout_prob hidden_dropout classifier_dropout gradient_checkpointing pad_token_id bos_token_id eos_token_id
    sep_token_id cls_token_id decoder_start_token_id tokenizer_class torchscript output_attentions
    output_hidden_states return_dict use_return_dict chunk_size_feed_forward id2label label2id num_labels problem_type
    finetuning_task task_specific_params prefix pretraining_tp keys_to_ignore_at_inference is_llama_config
    transformers.js_config max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type summary_type summary_use_proj summary_activation summary_first_dropout
    unsloth_version unsloth_fixed sentence_transformers tf_legacy_loss use_bfloat16 output_past neuron
    generation_config
""".split())

#: Keys that other networks have, with the values under which they change nothing here; None: any value does.
_NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "is_decoder": (False,), "is_encoder_decoder": (False,), "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,), "tie_encoder_decoder": (False,), "pruned_heads": ({},), "adapters": ({},),
    "position_embedding_type": ("absolute",), "relative_attention": (False,), "embedding_size": (),
    "attention_bias": (False,), "mlp_bias": (False,), "qkv_bias": (), "rope_interleaved": (False,),
    "partial_rotary_factor": (1,), "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,),
    "clip_qkv": (None,), "use_qk_norm": (False,), "qk_layernorm": (False,), "attention_multiplier": (),
    "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,), "logit_scale": (1,),
    "num_experts": (0, 1), "num_local_experts": (0, 1), "n_routed_experts": (0,), "no_rope_layers": ([],),
    "is_causal": (True,), "use_bidirectional_attention": (False,), "scale_embeddings": (False,),
    "parallel_attention": (False,), "layer_norm_type": (), "norm_type": (), "alibi": (False,), "use_alibi": (False,),
    "attention_window": (None,), "sliding_window": (None,), "use_sliding_window": (False,),
    "quantization_config": (None,), "compression_config": (None,),
    "matryoshka_dimensions": None,
}


def _unsupported(config: Fields, key: str, allowed: object, hint: str | None = None) -> NoReturn:
    raise Unsupported(f"{config.file}: {config.name(key)} is {describe(config.get(key))}, mpool computes only "
                      f"{allowed}", hint=hint)


def refuse_remote_code(config: Fields) -> None:
    """Raises UnsafeFormat if a configuration asks for the repository's own Python code to be run."""
    for key in ("auto_map", "trust_remote_code", "custom_pipelines"):
        if config.get(key):
            raise UnsafeFormat(f"{config.file}: {key} asks to run code from the model's repository, which mpool "
                               "never does", hint="Use a .gguf file of the model, or one that transformers loads "
                                                  "without trust_remote_code, in safetensors")


def find_architecture(config: Fields) -> Architecture:
    """The row for a config.json, from its ``model_type``, or its ``architectures`` if that is missing.

    Raises:
        UnsafeFormat: the configuration asks for remote code.
        FormatError: an architecture, or a head, that mpool does not know.
    """
    refuse_remote_code(config)
    classes = config.list("architectures", [], of=str, limit=16)
    name = config.str("model_type", None)
    if name is None:
        known = [row.name for row in architectures.ARCHITECTURES.values() if set(row.classes) & set(classes)]
        if not known:
            config.fail("model_type", "missing", ", ".join(sorted(architectures.ARCHITECTURES)))
        name = known[0]
    row = architectures.find(name, file=config.file, field="model_type")
    unknown = [cls for cls in classes if cls not in row.classes]
    if unknown:
        config.fail("architectures", unknown[0], ", ".join(row.classes))
    return row


def _check_neutral(config: Fields, used: set[str]) -> None:
    for key in config:
        if key in used or key in _SKIPPED:
            continue
        value = config.get(key)
        neutral = _NEUTRAL.get(key, ())
        if key not in _NEUTRAL:
            log.info("%s: key %s is not known and changes nothing", config.file, key)
        elif neutral is not None and value is not None and value not in neutral:
            _unsupported(config, key, " or ".join(describe(v) if not isinstance(v, dict) else "none" for v in neutral)
                         or "models without it", "Use an unquantised model in safetensors, or a quantised .gguf"
                         if key == "quantization_config" else None)


def _activation(config: Fields, key: str, default: str, allowed: tuple[str, ...]) -> str:
    name = config.str(key, default)
    found = ACTIVATIONS.get(name)
    if found is None or found not in allowed:
        config.fail(key, describe(name), ", ".join(n for n, here in ACTIVATIONS.items() if here in allowed))
    return found


def _sizes(config: Fields, row: Architecture) -> tuple[dict[str, Value], set[str]]:
    """Hyper-parameters that every architecture has, and the keys that were read for them."""
    a = row.name
    kv: dict[str, Value] = {
        f"{a}.block_count": config.int("num_hidden_layers", low=1),
        f"{a}.context_length": config.int("max_position_embeddings", low=1),
        f"{a}.embedding_length": config.int("hidden_size", low=1),
        f"{a}.feed_forward_length": config.int("intermediate_size", low=1),
        f"{a}.attention.head_count": config.int("num_attention_heads", low=1),
        f"{a}.vocab_size": config.int("vocab_size", low=1),
    }
    return kv, {"num_hidden_layers", "max_position_embeddings", "hidden_size", "intermediate_size",
                "num_attention_heads", "vocab_size", "model_type", "architectures"}


def read_bert(config: Fields) -> tuple[dict[str, Value], int]:
    """Hyper-parameters of a BERT encoder and its count of token types."""
    row = architectures.ARCHITECTURES["bert"]
    kv, used = _sizes(config, row)
    kv["bert.attention.head_count_kv"] = kv["bert.attention.head_count"]
    kv["bert.attention.layer_norm_epsilon"] = config.number("layer_norm_eps", 1e-12, above=0.0)
    kv["bert.attention.causal"] = False
    kv["mpool.activation"] = _activation(config, "hidden_act", "gelu", ("gelu", "gelu_tanh", "relu", "silu"))
    types = config.int("type_vocab_size", 2, low=1, high=1 << 16)
    used |= {"layer_norm_eps", "hidden_act", "type_vocab_size", "tie_word_embeddings"}
    _check_neutral(config, used)
    return kv, types


def read_decoder(config: Fields, row: Architecture) -> tuple[dict[str, Value], bool]:
    """Hyper-parameters of a decoder, and whether its output layer is its embedding."""
    a = row.name
    kv, used = _sizes(config, row)
    heads, hidden = kv[f"{a}.attention.head_count"], kv[f"{a}.embedding_length"]
    assert isinstance(heads, int) and isinstance(hidden, int)
    kv[f"{a}.attention.head_count_kv"] = config.int("num_key_value_heads", heads, low=1)
    kv[f"{a}.attention.layer_norm_rms_epsilon"] = config.number("rms_norm_eps", 1e-6, above=0.0)
    head_dim = config.int("head_dim", None, low=1, high=architectures.MAX_WIDTH)
    if head_dim is not None:
        kv[f"{a}.attention.key_length"] = kv[f"{a}.attention.value_length"] = head_dim
    kv[f"{a}.rope.dimension_count"] = head_dim or hidden // heads
    _rope(config, kv, a)
    _sliding_window(config, kv, row)
    kv["mpool.rope_neox"] = True
    kv["mpool.activation"] = _activation(config, "hidden_act", "silu", ("silu",))
    tied = config.bool("tie_word_embeddings", False)
    used |= {"num_key_value_heads", "rms_norm_eps", "head_dim", "rope_theta", "rope_scaling", "rope_parameters",
             "original_max_position_embeddings", "sliding_window", "use_sliding_window", "max_window_layers",
             "layer_types", "hidden_act", "tie_word_embeddings"}
    _check_neutral(config, used)
    return kv, tied


def _rope(config: Fields, kv: dict[str, Value], a: str) -> None:
    """Rotary parameters: ``rope_parameters`` today, ``rope_theta`` and ``rope_scaling`` in older files."""
    new, old = config.section("rope_parameters", None), config.section("rope_scaling", None)
    if new is not None and old is not None:
        config.fail("rope_scaling", "given beside rope_parameters", "one of the two")
    rope = new or old or Fields({}, file=config.file, at="rope_parameters")
    theta = rope.number("rope_theta", None, above=0.0)
    kv[f"{a}.rope.freq_base"] = theta or config.number("rope_theta", 10000.0, above=0.0)
    kind = rope.str("rope_type", None) or rope.str("type", "default")
    if kind not in ("default", "linear", "llama3"):
        _unsupported(rope, "rope_type" if "rope_type" in rope else "type", "default, linear and llama3")
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        _unsupported(rope, "partial_rotary_factor", "1")
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind == "default":
        kv_factor = rope.number("factor", 1.0, above=0.0)
        if kv_factor != 1.0:
            _unsupported(rope, "factor", "1 with the default rope_type")
        rope.only(known | {"factor", "original_max_position_embeddings"})
        return
    kv[f"{a}.rope.scaling.type"] = kind
    kv[f"{a}.rope.scaling.factor"] = rope.number("factor", above=0.0)
    if kind == "linear":
        rope.only(known | {"factor"})
        return
    rope.only(known | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
    low, high = rope.number("low_freq_factor", above=0.0), rope.number("high_freq_factor", above=0.0)
    if high <= low:
        rope.fail("high_freq_factor", high, f"a number above low_freq_factor, {low}")
    original = config.int("original_max_position_embeddings", None, low=1) or rope.int(
        "original_max_position_embeddings", config.int("max_position_embeddings", low=1), low=1)
    kv[f"{a}.rope.scaling.low_freq_factor"], kv[f"{a}.rope.scaling.high_freq_factor"] = low, high
    kv[f"{a}.rope.scaling.original_context_length"] = original


def _sliding_window(config: Fields, kv: dict[str, Value], row: Architecture) -> None:
    """Refuses a window that would narrow attention; one that is switched off or as wide as the context is none."""
    layers: Any = kv[f"{row.name}.block_count"]
    types = config.list("layer_types", None, of=str, limit=architectures.MAX_LAYERS)
    window = config.int("sliding_window", None, low=1)
    if types is not None:
        if len(types) != layers:
            config.fail("layer_types", f"{len(types)} values", f"{layers}, one a layer")
        for kind in sorted(set(types)):
            if kind not in ("full_attention", "sliding_attention"):
                config.fail("layer_types", kind, "full_attention or sliding_attention")
    if not config.bool("use_sliding_window", window is not None and row.full_layers is None) or window is None:
        if types is not None and "sliding_attention" in types:
            _unsupported(config, "layer_types", "full_attention when no sliding window is in use")
        return
    windowed = "sliding_attention" in types if types is not None else \
        config.int("max_window_layers", row.full_layers or 0) < layers
    context: Any = kv[f"{row.name}.context_length"]
    if windowed and window < context:
        _unsupported(config, "sliding_window", f"windows at least as long as the context, {context}")


def read_config(config: Fields) -> tuple[Architecture, dict[str, Value], bool, int]:
    """A config.json as hyper-parameters.

    Returns:
        (architecture, hyper-parameters under GGUF's names, whether the output layer is the embedding, token types).

    Raises:
        FormatError: a key is missing, of the wrong type, or has a value that mpool does not know.
        Unsupported: a key asks for a computation that mpool does not have; the message names it.
        UnsafeFormat: the configuration asks for code of its own to be run.
    """
    row = find_architecture(config)
    if row.name == "bert":
        kv, types = read_bert(config)
        return row, kv, False, types
    kv, tied = read_decoder(config, row)
    return row, kv, tied, 0


def special_ids(config: Fields, key: str, vocabulary: int) -> list[int]:
    """Token ids under ``key`` (one or a list), each checked against the vocabulary."""
    value = config.get(key)
    if value is None:
        return []
    ids = config.list(key, of=int, limit=64) if isinstance(value, list) else [config.int(key)]
    for i in ids:
        if not 0 <= i < vocabulary:
            raise FormatError(file=config.file, field=config.name(key), got=i, allowed=f"0 to {vocabulary - 1}")
    return ids
