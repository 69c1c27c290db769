"""Llama and similar decoders: Mistral, Qwen2 and Qwen3. Other families use the helpers of this module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from ...records import logger
from ..fields import REQUIRED, Fields
from ..spec import Value
from .experts import read_experts
from .reading import ALL_ACTIVATIONS, MAX_LAYERS, MAX_WIDTH, activation, check_neutral, sizes, unsupported
from .rows import Architecture, Config, Tensor, layer

log = logger("mpool.models")


def decoder(*, qkv_bias: bool = False, head_norms: bool = False, experts: bool = False, shared: str = "",
            biases: tuple[str, str, str] = ("attention_bias", "attention_bias", "mlp_bias"), attends: str = "",
            query: str = "Q", without: tuple[str, ...] = ()) -> tuple[Tensor, ...]:
    """Return the tensors of a decoder like Llama.

    Args:
        qkv_bias: True if the query, key and value projections have biases in every model, and no other layer has them.
            Otherwise ``biases`` selects them (:func:`finish`).
        head_norms: True if the queries and keys of each head are normalised.
        experts: True if layers have experts in place of a dense MLP, except those of ``mpool.dense_layers``.
        shared: name of the shared expert in the MLP of layers with experts; empty: there is none.
        biases: keys of config.json that select the biases of the query, key and value projections, of the output
            projection, and of the MLP; empty: there are none.
        attends: condition of the layers with attention; empty: all layers have it.
        query: letter of the outputs of the query projection.
        without: GGUF names of tensors to leave out, without the number of the layer and ``.weight`` or ``.bias``.
    """
    block = "layers.{}"
    qkv, other, mlp = (f"if {key}" if key else None for key in biases)
    qkv = "" if qkv_bias else qkv
    norms = (*layer(f"{block}.self_attn.q_norm", "attn_q_norm", "E", when=attends),
             *layer(f"{block}.self_attn.k_norm", "attn_k_norm", "E", when=attends))
    where = "in dense" if experts else ""
    dense = tuple(row for name, gguf, shape in (("gate", "ffn_gate", "FD"), ("up", "ffn_up", "FD"),
                                                ("down", "ffn_down", "DF"))
                  for row in layer(f"{block}.mlp.{name}_proj", gguf, shape, bias=None if mlp is None else shape[0],
                                   when=where, biased=f"{mlp} {where}".strip()))
    all_rows = (
        Tensor("embed_tokens.weight", "token_embd.weight", "VD"),
        Tensor("norm.weight", "output_norm.weight", "D"),
        Tensor("lm_head.weight", "output.weight", "VD", "tied"),
        Tensor("", "rope_freqs.weight", "R", "gguf"),
        *layer(f"{block}.input_layernorm", "attn_norm", "D"),
        *attention_tensors(f"{block}.self_attn", attends, query=query, qkv=qkv, other=None if qkv_bias else other),
        *layer(f"{block}.post_attention_layernorm", "ffn_norm", "D"),
        *dense,
        *(expert_tensors(f"{block}.mlp", shared=shared) if experts else ()),
        *(norms if head_norms else ()),
    )
    return tuple(row for row in all_rows if row.gguf.removeprefix("blk.{}.").rpartition(".")[0] not in without)


def attention_tensors(block: str, when: str = "", *, query: str = "Q", out: str = "o_proj", qkv: str | None = None,
                      other: str | None = None) -> tuple[Tensor, ...]:
    """Return the tensors of the projections of attention.

    Args:
        block: name of the attention in transformers.
        when: condition of the layers with attention; empty: all layers have it.
        query: letter of the outputs of the query projection.
        out: name of the output projection in that attention.
        qkv: condition of the biases of queries, keys and values; None: there are none.
        other: likewise of the output projection.
    """
    return tuple(row for name, gguf, rows, columns, bias in (
        ("q_proj", "attn_q", query, "D", qkv), ("k_proj", "attn_k", "K", "D", qkv), ("v_proj", "attn_v", "U", "D", qkv),
        (out, "attn_output", "D", "O", other))
        for row in layer(f"{block}.{name}", gguf, rows + columns, bias=None if bias is None else rows, when=when,
                         biased=f"{bias or ''} {when}".strip()))


def expert_tensors(block: str, router: str = "gate", shared: str = "",
                   parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> tuple[Tensor, ...]:
    """Return the tensors of the router and the experts. Folders have one tensor per expert, GGUF files one per layer.

    Args:
        block: name of the MLP in transformers.
        router: name of the router in that MLP.
        shared: name of the shared expert in that MLP; empty: there is none.
        parts: names of the matrices of an expert.
    """
    gate, up, down = parts
    return (
        *(row for name, shape in (("gate", "SD"), ("up", "SD"), ("down", "DS")) if shared
          for row in layer(f"{block}.{shared}.{name}_proj", f"ffn_{name}_shexp", shape, when="if S in sparse")),
        *layer(f"{block}.{router}", "ffn_gate_inp", "XD", when="in sparse"),
        *layer(f"{block}.experts.{{x}}.{gate}", "ffn_gate.{x}", "ND", when="folder in sparse"),
        *layer(f"{block}.experts.{{x}}.{up}", "ffn_up.{x}", "ND", when="folder in sparse"),
        *layer(f"{block}.experts.{{x}}.{down}", "ffn_down.{x}", "DN", when="folder in sparse"),
        Tensor("", "blk.{}.ffn_gate_exps.weight", "XND", "in sparse"),
        Tensor("", "blk.{}.ffn_up_exps.weight", "XND", "in sparse"),
        Tensor("", "blk.{}.ffn_down_exps.weight", "XDN", "in sparse"),
    )


#: Values of ``biases``: keys of config.json that select the biases of linear layers.
ATTENTION_BIAS, BIASES = ("attention_bias",), ("attention_bias", "mlp_bias")

#: ``handled`` of rows with experts.
EXPERTS = frozenset({"expert_count", "expert_used_count"})

IGNORED = (r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


def decoder_row(name: str, classes: tuple[str, ...], tensors: tuple[Tensor, ...], **other: Any) -> Architecture:
    """Return a row with the defaults of most decoders.

    Args:
        name: name of the architecture.
        classes: names in ``architectures`` of config.json.
        tensors: all tensors of the network.
        **other: further attributes of :class:`Architecture`.
    """
    common: dict[str, Any] = {"read": read_decoder, "prefixes": ("model.",), "ignored": IGNORED,
                              "epsilon": "attention.layer_norm_rms_epsilon", "rope": True, "activation": "silu"}
    return Architecture(name=name, capability="text_to_text", classes=classes, tensors=tensors, **{**common, **other})


def read_decoder(config: Fields, row: Architecture) -> Config:
    """Read the hyper-parameters of a decoder."""
    kv, used = read_common(config, row)
    return finish(config, row, kv, used)


def read_common(config: Fields, row: Architecture, *, act: str = "hidden_act", theta: float = 10000.0,
                period: int = 0, epsilon: str = "rms_norm_eps",
                acts: tuple[str, ...] = ALL_ACTIVATIONS) -> tuple[dict[str, Value], set[str]]:
    """Read the keys of config.json that decoders share.

    Args:
        config: contents of config.json.
        row: architecture of the model.
        act: key of the activation.
        theta: RoPE base if the configuration states none.
        period: period of the layers with full attention, if it differs from the row's: see :func:`read_window`.
        epsilon: key of the epsilon of the norms.
        acts: supported activations, under their names in mpool.

    Returns:
        hyper-parameters under GGUF's names, and the keys that were read.
    """
    a = row.name
    kv, used = sizes(config, row)
    heads, hidden = kv[f"{a}.attention.head_count"], kv[f"{a}.embedding_length"]
    assert isinstance(heads, int) and isinstance(hidden, int)
    usual = row.defaults
    groups = heads if "num_key_value_heads" in config else usual.get("num_key_value_heads", heads)  # null: heads
    kv[f"{a}.attention.head_count_kv"] = config.int("num_key_value_heads", groups, low=1)
    kv[f"{a}.{row.epsilon}"] = config.number(epsilon, usual.get(epsilon, 1e-6), above=0.0)
    head_dim = config.int("head_dim", usual.get("head_dim"), low=1, high=MAX_WIDTH)
    if head_dim is not None:
        kv[f"{a}.attention.key_length"] = kv[f"{a}.attention.value_length"] = head_dim
    part = config.number("partial_rotary_factor", usual.get("partial_rotary_factor", 1.0), above=0.0)
    rope = config.section("rope_parameters", None) or config.section("rope_scaling", None) or config
    part = rope.number("partial_rotary_factor", part, above=0.0)
    if part > 1.0:
        config.fail("partial_rotary_factor", part, "a number above 0, at most 1")
    rotated = head_dim or hidden // heads
    if "proportional" in (rope.get("rope_type"), rope.get("type")):  # all dimensions are rotated, some by 0
        kv["mpool.rope_pairs"], part = int(part * rotated // 2), 1.0
    if part != 1.0 and not row.partial_rope:
        unsupported(config, "partial_rotary_factor" if "partial_rotary_factor" in config else "rope_parameters",
                    "a partial_rotary_factor of 1")
    kv[f"{a}.rope.dimension_count"] = int(rotated * part)
    read_rope(config, kv, a, usual.get("rope_theta", theta))
    compose_rope(kv, row, read_window(config, kv, row, period))
    kv["mpool.rope_neox"] = row.rope_neox
    kv["mpool.activation"] = activation(config, act, row.activation, acts)
    experts = read_experts(config, kv, a, usual) if "num_experts" in usual else set()
    return kv, used | experts | {
                       "num_key_value_heads", epsilon, "head_dim", "rope_theta", "rope_scaling",
                       "rope_parameters", "original_max_position_embeddings", "sliding_window", "use_sliding_window",
                       "max_window_layers", "layer_types", "partial_rotary_factor", act,
                       *({"sliding_window_pattern"} if row.period else ())}


def text_config(config: Fields, defaults: Mapping[str, Any]) -> Fields:
    """Return the decoder's part of a vision model's configuration, with the defaults of its class. Whether the output
    layer shares the weights of the token embedding is a key of the whole model, which is True by default."""
    log.info("%s: this is a vision model; mpool uses only its language model", config.file)
    given = {name: value for name, value in config.section("text_config").values.items() if value is not None}
    tied = config.bool("tie_word_embeddings", True)
    return Fields({**defaults, **given, "tie_word_embeddings": tied}, file=config.file, at=config.name("text_config"))


def finish(config: Fields, row: Architecture, kv: dict[str, Value], used: set[str], *, tied: bool = False) -> Config:
    """Check the keys that were not read, and return the result of reading a config.json.

    Args:
        config: contents of config.json.
        row: architecture of the model.
        kv: hyper-parameters under GGUF's names.
        used: keys that were read.
        tied: default of ``tie_word_embeddings``, unless the row has one.
    """
    found = Config(kv, tied=config.bool("tie_word_embeddings", row.defaults.get("tie_word_embeddings", tied)),
                   sizes={key: int(config.bool(key, row.defaults.get(key, False))) for key in row.biases})
    check_neutral(config, used | {"tie_word_embeddings", *row.biases})
    return found


def read_rope(config: Fields, kv: dict[str, Value], a: str, theta: float = 10000.0) -> None:
    """Read the RoPE parameters.

    Current files have ``rope_parameters``, with one set per layer type if these differ. Older files have
    ``rope_theta``, ``rope_local_base_freq`` and ``rope_scaling``.

    Args:
        config: contents of config.json.
        kv: hyper-parameters to add to.
        a: name of the architecture.
        theta: RoPE base if the configuration states none.
    """
    new, old = config.section("rope_parameters", None), config.section("rope_scaling", None)
    if new is not None and old is not None:
        config.fail("rope_scaling", "present in addition to rope_parameters", "only one of the two keys")
    rope = new or old or Fields({}, file=config.file, at="rope_parameters")
    local = config.number("rope_local_base_freq", None, above=0.0)
    if isinstance(rope.get("full_attention"), dict):
        rope.only({"full_attention", "sliding_attention"})
        narrow = rope.section("sliding_attention")
        if narrow.str("rope_type", "default") != "default":
            unsupported(narrow, "rope_type", "default for layers with a sliding window")
        local = narrow.number("rope_theta", above=0.0)
        rope = rope.section("full_attention")
        if rope.str("rope_type", "default") not in ("default", "proportional") and \
                rope.number("partial_rotary_factor", 1.0) != 1.0:
            unsupported(rope, "partial_rotary_factor", "1 for this rope_type")
    if local is not None:
        kv["mpool.rope_local_base"] = local
    read_scaling(config, rope, kv, a, theta)


def read_scaling(config: Fields, rope: Fields, kv: dict[str, Value], a: str, default: float) -> None:
    """Read one set of RoPE parameters.

    Args:
        config: contents of config.json.
        rope: set of parameters.
        kv: hyper-parameters to add to.
        a: name of the architecture.
        default: RoPE base if the configuration states none.
    """
    theta = rope.number("rope_theta", None, above=0.0)
    kv[f"{a}.rope.freq_base"] = theta or config.number("rope_theta", default, above=0.0)
    kind = rope.str("rope_type", None) or rope.str("type", "default")
    if kind in ("su", "longrope"):
        _long_rope(config, rope, kv, a)
        return
    if kind not in ("default", "linear", "proportional", "dynamic", "llama3", "yarn"):
        unsupported(rope, "rope_type" if "rope_type" in rope else "type",
                    "default, linear, proportional, dynamic, llama3, longrope and yarn")
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    if kind == "default":
        kv_factor = rope.number("factor", 1.0, above=0.0)
        if kv_factor != 1.0:
            unsupported(rope, "factor", "1 if rope_type is default")
        rope.only(known | {"factor", "original_max_position_embeddings"})
        return
    if kind == "dynamic":  # changes only sequences longer than max_position_embeddings, where the context ends
        rope.number("factor", above=0.0)
        rope.only(known | {"factor", "original_max_position_embeddings"})
        return
    kv[f"{a}.rope.scaling.type"] = kind
    kv[f"{a}.rope.scaling.factor"] = rope.number("factor", 1.0 if kind == "proportional" else REQUIRED, above=0.0)
    if kind in ("linear", "proportional"):
        rope.only(known | {"factor"})
        if kind == "proportional":  # the first part of the rotary pairs turns
            part = rope.number("partial_rotary_factor", 1.0, above=0.0, most=1.0)
            kv.setdefault("mpool.rope_pairs", int(part * cast(int, kv[f"{a}.rope.dimension_count"]) // 2))
        return
    original = config.int("original_max_position_embeddings", None, low=1) or rope.int(
        "original_max_position_embeddings", config.int("max_position_embeddings", low=1), low=1)
    kv[f"{a}.rope.scaling.original_context_length"] = original
    if kind == "yarn":
        _yarn(rope, kv, a, known)
        return
    rope.only(known | {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
    low, high = rope.number("low_freq_factor", above=0.0), rope.number("high_freq_factor", above=0.0)
    if high <= low:
        rope.fail("high_freq_factor", high, f"a number above low_freq_factor, {low}")
    kv[f"{a}.rope.scaling.low_freq_factor"], kv[f"{a}.rope.scaling.high_freq_factor"] = low, high


def _long_rope(config: Fields, rope: Fields, kv: dict[str, Value], a: str) -> None:
    rope.only({"rope_theta", "rope_type", "type", "partial_rotary_factor", "short_factor", "long_factor", "factor",
               "attention_factor", "original_max_position_embeddings"})
    context = config.int("max_position_embeddings", low=1)
    original = rope.int("original_max_position_embeddings",
                        config.int("original_max_position_embeddings", context, low=1), low=1)
    pairs = cast(int, kv[f"{a}.rope.dimension_count"]) // 2
    for name in ("short", "long"):
        factors = rope.list(f"{name}_factor", limit=MAX_WIDTH)
        if len(factors) != pairs or any(type(f) not in (int, float) or not 0 < f < 1e9 for f in factors):
            rope.fail(f"{name}_factor", f"{len(factors)} values",
                      f"{pairs} numbers above 0, one for each rotated pair of dimensions")
        kv[f"mpool.rope_{name}_factors"] = [float(f) for f in factors]
    stretch = rope.number("factor", context / original, above=0.0)
    if original < 2 and stretch > 1:  # the attention factor is divided by its logarithm
        config.fail("original_max_position_embeddings", original, "an integer of at least 2")
    inferred = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    kv["mpool.rope_attention_factor"] = rope.number("attention_factor", inferred, above=0.0)
    kv["mpool.rope_long_from"] = original


def _yarn(rope: Fields, kv: dict[str, Value], a: str, known: set[str]) -> None:
    rope.only(known | {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor",
                       "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta", "max_position_embeddings"})
    temperature = rope.number("llama_4_scaling_beta", 0.0, above=-1e-9, most=1000.0)
    if temperature:
        kv[f"{a}.attention.temperature_scale"] = temperature
        kv[f"{a}.attention.temperature_length"] = kv[f"{a}.rope.scaling.original_context_length"]
    kv[f"{a}.rope.scaling.yarn_beta_fast"] = rope.number("beta_fast", 32.0, above=0.0) or 32.0
    kv[f"{a}.rope.scaling.yarn_beta_slow"] = rope.number("beta_slow", 1.0, above=0.0) or 1.0
    factor = rope.number("factor", above=0.0)

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    by, all_by = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    for name, value in (("mscale", by), ("mscale_all_dim", all_by)):
        if not 0 <= value <= 1000:
            rope.fail(name, value, "a number from 0 to 1000")
    inferred = scale(by) / scale(all_by) if by and all_by else scale(1.0)
    kv["mpool.rope_attention_factor"] = rope.number("attention_factor", inferred, above=0.0)
    kv["mpool.rope_yarn_truncate"] = rope.bool("truncate", True)


def read_window(config: Fields, kv: dict[str, Value], row: Architecture, period: int = 0) -> bool:
    """Read the sliding window and the layers that use it. A window that is switched off is not stored.

    Args:
        config: contents of config.json.
        kv: hyper-parameters to add to.
        row: architecture of the model.
        period: if the configuration has no ``layer_types``, every ``period``-th layer has full attention and the others
            use the window; 0: the period of the row. If that is 0, too, the layers from ``max_window_layers`` on use
            the window.

    Returns:
        True if the model has a window.
    """
    layers: Any = kv[f"{row.name}.block_count"]
    types = config.list("layer_types", None, of=str, limit=MAX_LAYERS)
    if row.period and types is None:
        period = config.int("sliding_window_pattern", row.period, low=1)
    period = period or row.period
    by_default = period or config.get("model_type") == "mistral"
    default = 4096 if by_default and "sliding_window" not in config else None
    is_off = config.get("use_sliding_window") is False  # transformers then writes a window of 0 for some families
    window = config.int("sliding_window", default, low=0 if is_off else 1)
    if types is not None:
        if len(types) != layers:
            config.fail("layer_types", f"{len(types)} values", f"{layers} values, one per layer")
        for kind in sorted(set(types)):
            if kind not in ("full_attention", "sliding_attention"):
                config.fail("layer_types", kind, "full_attention or sliding_attention")
    if not config.bool("use_sliding_window", window is not None and row.full_layers is None) or window is None:
        if types is not None and "sliding_attention" in types:
            unsupported(config, "layer_types",
                        "full_attention if sliding_window is null or use_sliding_window is false")
        return False
    first = config.int("max_window_layers", row.full_layers or 0)
    windowed = [kind == "sliding_attention" for kind in types] if types is not None else \
        windowed_layers(layers, period) if period else [i >= first for i in range(layers)]
    if config.get("model_type") == "llama" and window < cast(int, kv[f"{row.name}.context_length"]):
        unsupported(config, "sliding_window", "models without a sliding window if model_type is llama (Mistral models "
                    "with a window have model_type mistral)")
    if any(windowed):
        set_window(kv, row.name, window, windowed)
    return True


def compose_rope(kv: dict[str, Value], row: Architecture, has_window: bool) -> None:
    """Set for each layer which RoPE it has, as ``window_rope`` of the row states.

    Args:
        kv: hyper-parameters, which include the layers with the window.
        row: architecture of the model.
        has_window: True if the model has a sliding window.
    """
    layers = cast(int, kv[f"{row.name}.block_count"])
    windowed = cast(list[int], kv.get("mpool.window_layers", [0] * layers))
    if row.window_rope == "only" and has_window:
        kv["mpool.rope_layers"] = [one - 1 for one in windowed]
    elif row.window_rope == "own" and any(windowed):
        kv.setdefault("mpool.rope_local_base", kv[f"{row.name}.rope.freq_base"])
        kv["mpool.rope_layers"] = list(windowed)


def windowed_layers(layers: int, period: int) -> list[bool]:
    """Return for each layer whether it uses the sliding window. Every ``period``-th layer has full attention."""
    return [(i + 1) % period != 0 for i in range(min(layers, MAX_LAYERS))]


def window_pattern(table: Fields, name: str, period: int) -> list[bool]:
    """Return for each layer of a GGUF file whether it uses the sliding window.

    Args:
        table: keys of the file, which state the period of the layers with full attention, or one flag per layer.
        name: name of the architecture in the file.
        period: period if the file states neither.
    """
    layers, key = table.int(f"{name}.block_count", low=1, high=MAX_LAYERS), f"{name}.attention.sliding_window_pattern"
    if isinstance(table.get(key), (int, type(None))):
        return windowed_layers(layers, table.int(key, period, low=1))
    windowed = [bool(layer) for layer in table.list(key, limit=MAX_LAYERS)]
    if len(windowed) != layers:
        table.fail(key, f"{len(windowed)} values", f"{layers} values, one per layer")
    return windowed


def complete_windows(table: Fields, name: str, row: Architecture, kv: dict[str, Value]) -> None:
    """Set the windows of the layers of a GGUF file, and their RoPE, if the row of the architecture has a period."""
    window = table.int(f"{name}.attention.sliding_window", 0, low=0) if row.period else 0
    if window:
        set_window(kv, row.name, window, window_pattern(table, name, row.period))
    compose_rope(kv, row, window > 0)


def set_window(kv: dict[str, Value], a: str, window: int, windowed: list[bool]) -> None:
    """Store the sliding window, and for each layer whether it uses the window, under the keys that the C core reads."""
    kv[f"{a}.attention.sliding_window"] = window
    kv["mpool.window_layers"] = [int(layer) for layer in windowed]


_CLASSES = ("LlamaForCausalLM", "MistralForCausalLM")
ROWS = (
    decoder_row("llama", _CLASSES, decoder(), model_types=("llama",), biases=BIASES),
    # GGUF files of Mistral have the architecture llama
    decoder_row("llama", _CLASSES, decoder(), model_types=("mistral",), gguf=(), defaults={"num_key_value_heads": 8}),
    # the decoders of Qwen2-VL and Qwen2.5-VL are Qwen2's, that of Qwen3-VL is Qwen3's, with three positions per token
    # of an image
    decoder_row("qwen2", ("Qwen2ForCausalLM",), decoder(qkv_bias=True), full_layers=28, gguf=("qwen2", "qwen2vl"),
                defaults={"num_key_value_heads": 32}),
    decoder_row("qwen3", ("Qwen3ForCausalLM",), decoder(head_norms=True), full_layers=28, biases=ATTENTION_BIAS,
                gguf=("qwen3", "qwen3vl"), defaults={"num_key_value_heads": 32, "head_dim": 128}),
)
