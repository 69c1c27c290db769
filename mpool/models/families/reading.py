"""Helpers that all families use to read config.json.

A key that can change the computation is either read by the family or must have a neutral value, under which it changes
nothing; any other value is an error that names the key. Keys that only matter for training, generation or book-keeping
are listed and skipped. Defaults are those of the configuration classes of transformers
(https://github.com/huggingface/transformers/tree/main/src/transformers/models).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from ...errors import LimitError, Unsupported
from ...records import logger
from ..fields import Fields, describe
from ..json_strict import shorten
from ..spec import Value
from .rows import Architecture

log = logger("mpool.models")

MAX_LAYERS = 512
MAX_CONTEXT = 1 << 24
MAX_VOCABULARY = 1 << 20
MAX_WIDTH = 1 << 20

#: Name of an activation function in transformers -> name in mpool.
ACTIVATIONS: dict[str, str] = {
    "gelu": "gelu", "gelu_python": "gelu",
    "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu", "relu": "relu", "relu2": "relu2", "silu": "silu", "swish": "silu",
}
#: Every activation of mpool, once.
ALL_ACTIVATIONS = tuple(dict.fromkeys(ACTIVATIONS.values()))

#: Keys that never change a forward pass.
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

#: Keys of other architectures -> neutral values, under which they change nothing; None: every value is neutral.
_NEUTRAL: dict[str, tuple[Any, ...] | None] = {
    "is_decoder": (False,), "is_encoder_decoder": (False,), "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,), "tie_encoder_decoder": (False,), "pruned_heads": ({},), "adapters": ({},),
    "position_embedding_type": ("absolute",), "relative_attention": (False,), "embedding_size": (),
    "attention_bias": (False,), "mlp_bias": (False,), "qkv_bias": (False,), "lm_head_bias": (False,),
    "rope_interleaved": (False,), "partial_rotary_factor": (1,), "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "clip_qkv": (None,), "use_qk_norm": (False,), "qk_layernorm": (False,), "attention_multiplier": (),
    "embedding_multiplier": (1,), "residual_multiplier": (1,), "logits_scaling": (1,), "logit_scale": (1,),
    "num_experts": (0, 1), "num_local_experts": (0, 1), "n_routed_experts": (0,), "moe_latent_size": (),
    "no_rope_layers": ([],), "attn_layer_indices": (),
    "is_causal": (True,), "use_bidirectional_attention": (False,), "scale_embeddings": (False,),
    "parallel_attention": (False,), "layer_norm_type": (), "norm_type": (), "alibi": (False,), "use_alibi": (False,),
    "attention_window": (None,), "sliding_window": (None,), "use_sliding_window": (False,),
    "quantization_config": (None,), "compression_config": (None,), "quantization": (None,),
    "matryoshka_dimensions": None, "compression_ratio": (1,),
}


def unsupported(config: Fields, key: str, allowed: object, hint: str | None = None) -> NoReturn:
    """Raise Unsupported for the value of a key.

    Args:
        config: fields that contain the key.
        key: key with the unsupported value.
        allowed: supported values, as words that follow "mpool supports only".
        hint: next step for the user.
    """
    got = describe(config.get(key)) if key in config else "missing"
    raise Unsupported(f"{config.file}: {config.name(key)} is {got}, mpool supports only {allowed}", hint=hint)


def check_neutral(config: Fields, used: set[str]) -> None:
    """Raise Unsupported if a key that is not in ``used`` has a value that would change the computation."""
    for key in config:
        if key in used or key in _SKIPPED:
            continue
        value = config.get(key)
        neutral = _NEUTRAL.get(key, ())
        if key not in _NEUTRAL:
            log.info("%s: ignoring the unknown key %s", config.file, key)
        elif neutral is not None and value is not None and value not in neutral:
            if key in ("quantization_config", "quantization"):
                _refuse_quantised(config, key)
            unsupported(config, key, " or ".join(describe(v) if not isinstance(v, dict) else "none" for v in neutral)
                         or "models without it")


def _refuse_quantised(config: Fields, key: str) -> NoReturn:
    """Refuse quantised checkpoints (AWQ, GPTQ, bitsandbytes, FP8 and others): each method packs weights in a layout of
    its own."""
    method = Fields.of(config.get(key), file=config.file, at=config.name(key)).get("quant_method")
    raise Unsupported(f"{config.file}: {config.name(key)} states that the weights are quantised"
                      f"{f' by {shorten(method)}' if isinstance(method, str) else ''}, which mpool does not support in "
                      "safetensors files", hint="Use the unquantised safetensors model, or a quantised .gguf of it")


def activation(config: Fields, key: str, default: str, allowed: tuple[str, ...] = ALL_ACTIVATIONS) -> str:
    """Read the activation function of a model.

    Args:
        config: fields that contain the key.
        key: key of the activation.
        default: activation if the key is absent, under its name in transformers or in mpool.
        allowed: supported activations, under their names in mpool.

    Returns:
        name of the activation in mpool.

    Raises:
        FormatError: the activation is not supported.
    """
    name = config.str(key, None)
    found = ACTIVATIONS.get(default, default) if name is None else ACTIVATIONS.get(name)
    if found is None or found not in allowed:
        config.fail(key, describe(name), ", ".join(hf for hf, own in ACTIVATIONS.items() if own in allowed))
    return found


#: Key of a size in config.json -> GGUF key, without the name of the architecture.
_SIZES = {"num_hidden_layers": "block_count", "max_position_embeddings": "context_length",
          "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
          "num_attention_heads": "attention.head_count", "vocab_size": "vocab_size"}


def sizes(config: Fields, row: Architecture,
          names: Mapping[str, str] | None = None) -> tuple[dict[str, Value], set[str]]:
    """Return the hyper-parameters that every architecture has, and the keys that were read for them.

    Args:
        config: ``config.json``.
        row: row of the family.
        names: usual key -> the family's key, of those that differ.
    """
    a, keys = row.name, {key: (names or {}).get(key, key) for key in _SIZES}
    layers = config.int(keys["num_hidden_layers"], low=1)
    if layers > MAX_LAYERS:  # checked before any list with one value per layer is built
        raise LimitError(f"{config.file}: {config.name(keys['num_hidden_layers'])} is {layers}, mpool supports at most "
                         f"{MAX_LAYERS} layers")
    kv: dict[str, Value] = {f"{a}.{gguf}": config.int(keys[key], low=1) for key, gguf in _SIZES.items()}
    return kv, {*keys.values(), "model_type", "architectures"}


def require_values(config: Fields, allowed: Mapping[str, tuple[object, ...]]) -> None:
    """Raise Unsupported if a key is present with a value that is not among its supported values in ``allowed``."""
    for key, values in allowed.items():
        if key in config and config.get(key) not in values:
            unsupported(config, key, " or ".join(describe(value) for value in values))


def mixed_layers(config: Fields, other: str, layers: int,
                 attention: tuple[str, ...] = ("full_attention",)) -> list[bool] | None:
    """Return for each layer whether it has attention, from ``layer_types``; None if the key is missing.

    Args:
        config: ``config.json``.
        other: type of the layers without attention.
        layers: number of layers.
        attention: types of the layers with attention.
    """
    types = config.list("layer_types", None, of=str, limit=MAX_LAYERS)
    if types is None:
        return None
    if len(types) != layers:
        config.fail("layer_types", f"{len(types)} values", f"{layers} values, one per layer")
    for kind in types:
        if kind not in (*attention, other):
            config.fail("layer_types", kind, f"{', '.join(attention)} or {other}")
    return [kind != other for kind in types]


def plain_rope(config: Fields, default: float) -> float:
    """Return the base of RoPE, from ``rope_parameters`` or, in older files, from ``rope_theta``.

    Raises:
        Unsupported: RoPE is scaled, or rotates only a part of the dimensions.
    """
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.section(key, None)
        if rope is None:
            continue
        kind = rope.str("rope_type", None) or rope.str("type", "default")
        if kind != "default":
            unsupported(rope, "rope_type" if "rope_type" in rope else "type", "default")
        if rope.number("partial_rotary_factor", 1.0) != 1.0:
            unsupported(rope, "partial_rotary_factor", "1")
        rope.only({"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"})
        theta = rope.number("rope_theta", None, above=0.0)
        if theta is not None:
            return float(theta)
    return float(config.number("rope_theta", default, above=0.0))
