"""How each architecture is written to a GGUF file: what llama.cpp's files store differently than model folders.

The names of keys and tensors are those of llama.cpp's converter (``convert_hf_to_gguf.py``). A setting that its files
cannot express is refused, because the file would compute something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from ...errors import Unsupported
from ...records import logger
from ..families.gemma import FULL_PERIODS, LARGEST
from ..families.llama import windowed_layers
from ..families.smollm import INTERVAL, rope_layers
from ..fields import describe
from ..files import Folder
from ..spec import ModelSpec, Value

log = logger("mpool.models")

#: Hint of the error for a folder that mpool does not convert.
CONVERT_ELSEWHERE = "Convert the folder with llama.cpp's convert_hf_to_gguf.py; mpool quantises the .gguf"
#: Architecture without a right GGUF file -> hint of its error.
NO_FILE = {"bamba": "Run the folder itself: llama.cpp's convert_hf_to_gguf.py sorts the rotary pairs of Bamba wrongly",
           "lfm3": "Run the folder itself: llama.cpp has no LFM3"}
#: Values of ``expert_gating_func``.
_SOFTMAX, _SIGMOID = 1, 2


class Settings:
    """Hyper-parameters of a folder. Each reader takes one. A GGUF file cannot express those that are left.

    Attributes:
        architecture: name of the architecture.
        written: name of the architecture in the file.
        names: names of the folder's tensors.
        keys: hyper-parameters under GGUF's names, which are written as they are.
    """

    def __init__(self, path: str, spec: ModelSpec, names: Container[str]) -> None:
        """Read the hyper-parameters of a model.

        Args:
            path: folder named in errors.
            spec: the model's spec.
            names: names of the folder's tensors.
        """
        kv, self._origins = spec.kv, spec.origins
        self.path, self.architecture, self.written, self.names = path, spec.architecture, spec.architecture, names
        self.keys = {key: one for key, one in kv.items() if not key.startswith("mpool.")}
        self._own = {key.removeprefix("mpool."): one for key, one in kv.items() if key.startswith("mpool.")}

    def __contains__(self, name: str) -> bool:
        """Return True if a setting of mpool is left."""
        return name in self._own

    def take(self, name: str, default: Value) -> Value:
        """Return a setting of mpool, without ``mpool.``, and mark it as expressed."""
        return self._own.pop(name, default)

    def number(self, name: str, default: float) -> float:
        """Take a setting that is a number."""
        found = self.take(name, default)
        assert isinstance(found, (int, float))
        return float(found)

    def key(self, name: str) -> Value:
        """Return a hyper-parameter. ``name`` lacks the prefix of the architecture."""
        return self.keys[f"{self.architecture}.{name}"]

    def integer(self, name: str) -> int:
        """Return a hyper-parameter that is an integer."""
        found = self.key(name)
        assert isinstance(found, int)
        return found

    def scaling(self, name: str, default: Value) -> Value:
        """Return a parameter of RoPE's scaling, or ``default``."""
        return self.keys.get(f"{self.architecture}.rope.scaling.{name}", default)

    def drop(self, prefix: str) -> None:
        """Remove the hyper-parameters whose names begin with ``prefix``; it lacks the prefix of the architecture."""
        start = f"{self.architecture}.{prefix}"
        self.keys = {key: one for key, one in self.keys.items() if not key.startswith(start)}

    def put(self, name: str, value: Value) -> None:
        """Add a hyper-parameter. ``name`` lacks the prefix of the architecture."""
        self.keys[f"{self.architecture}.{name}"] = value

    def fixed(self, name: str, value: Value) -> None:
        """Take a setting that the file does not state, because readers assume ``value``; refuse any other value."""
        found = self.take(name, value)
        same = math.isclose(found, value, rel_tol=1e-6) if isinstance(found, float) and isinstance(value, float) \
            else found == value
        if not same:
            self.refuse(name, found)

    def refuse(self, name: str, got: Value = "") -> None:
        """Raise Unsupported for a setting of mpool, or a key of config.json, and its value."""
        file, key = self._origins.get(f"mpool.{name}", (self.path, name))
        computed = key.endswith(",") and isinstance(got, bool)
        stated = key.rstrip(",") if got == "" or isinstance(got, list) or computed else f"{key} {describe(got)}"
        raise Unsupported(f"{file}: a .gguf file of {self.architecture} cannot state {stated}",
                          hint="Run the folder itself: the model in a .gguf would compute something else")

    def finish(self) -> None:
        """Refuse the folder if a setting was not taken."""
        for name in self._own:
            self.refuse(name)


@dataclass(frozen=True)
class Change:
    """How the file stores a tensor of the folder.

    Attributes:
        name: name of the tensor, without the layer's number; empty: the folder's.
        shape: shape, outermost dimension first; -1 stands for the size that follows from the others. Empty: the
            folder's, with the rows of ``ranges``.
        ranges: first row and number of rows of each part of the tensor, in order; empty: all rows. Matrices of a
            tensor with three dimensions follow each other.
        factors: number that multiplies the values: one for each range, or one for all; empty: 1.
        transposed: True if the rows of each range become columns.
        tiled: groups and members of a group, if the columns are members of groups and the file stores the first members
            of all groups, then the second ones.
        values: function of the values in float32.
    """

    name: str = ""
    shape: tuple[int, ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()
    factors: tuple[float, ...] = ()
    transposed: bool = False
    tiled: tuple[int, int] | None = None
    values: Callable[[Any], Any] | None = None


#: Name of a tensor of the folder, without the layer's number -> tensors of the file that store its values.
Changes = Mapping[str, Sequence[Change]]


@dataclass(frozen=True)
class Export:
    """How an architecture is written.

    Attributes:
        complete: function that takes the settings which only this architecture has, and adds the keys of the file. It
            returns the tensors that the file stores in another way than the folder, or None.
        interleaved: kinds of tensors whose rows llama.cpp orders differently: the halves of each head interleaved.
        fused: kind of tensor in the file -> kinds whose rows it concatenates.
        activation: activation that the architecture's files imply.
        windows: True if the file states the sliding window.
        norm_offset: number that the folder's network adds to the weights of norms, except those of recurrent layers;
            the file stores the sums.
        rope_neox: True if folders store the first halves of all rotary pairs of a head before the second halves.
        rope_factors: True if the file may have tensors with divisors of RoPE's frequencies.
        yarn_scales_rope: True if YaRN also scales rotated queries and keys, by a factor that readers compute; False if
            the architecture's readers scale only the attention scores.
        yarn_multiplier: True if the file states the factor by which YaRN scales rotated queries and keys.
    """

    complete: Callable[[Settings], Changes | None] = lambda settings: None
    interleaved: tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    activation: str = "silu"
    windows: bool = False
    norm_offset: float = 0.0
    rope_neox: bool = True
    rope_factors: bool = True
    yarn_scales_rope: bool = True
    yarn_multiplier: bool = False


def _qwen3moe(settings: Settings) -> None:
    settings.fixed("expert_normalise", True)
    settings.fixed("dense_layers", [0] * settings.integer("block_count"))


def _smollm3(settings: Settings) -> None:
    settings.fixed("rope_layers", rope_layers(settings.integer("block_count"), INTERVAL))


def _granite(settings: Settings) -> None:
    for ours, key in (("embedding_scale", "embedding_scale"), ("residual_scale", "residual_scale"),
                      ("attention_scale", "attention.scale")):
        settings.put(key, settings.number(ours, 1.0))
    settings.put("logit_scale", 1.0 / settings.number("output_scale", 1.0))


def _stop_attention(settings: Settings, attends: Sequence[bool]) -> None:
    """Write 0 KV heads for the layers without attention."""
    heads = settings.integer("attention.head_count_kv")
    settings.put("attention.head_count_kv", [heads if attention else 0 for attention in attends])


def _mixers(settings: Settings) -> list[int]:
    """Take the kinds of the layers' mixers; 0 is attention."""
    return cast(list[int], settings.take("layer_mixers", [0] * settings.integer("block_count")))


def _mamba(settings: Settings) -> dict[str, tuple[Change, ...]]:
    """Return the tensors of Mamba-2 layers."""
    return {"ssm_conv1d.weight": (Change(shape=(-1, settings.integer("ssm.conv_kernel"))),),
            "ssm_a_log": (Change("ssm_a", shape=(-1, 1), values=_negative_exponential),),
            "ssm_d": (Change(shape=(-1, 1)),),
            "ssm_norm.weight": (Change(shape=(settings.integer("ssm.group_count"), -1)),)}


def _negative_exponential(values: Any) -> Any:
    return -np.exp(values)


def _granitehybrid(settings: Settings) -> Changes | None:
    _granite(settings)
    mixers = _mixers(settings)
    rotated = settings.take("rope_layers", [0] * len(mixers))
    settings.put("rope.scaling.finetuned", rotated == [0] * len(mixers))
    if f"{settings.architecture}.expert_count" in settings.keys:
        settings.put("feed_forward_length", settings.key("expert_feed_forward_length"))
    if not any(mixers):
        return None
    _stop_attention(settings, [mixer == 0 for mixer in mixers])
    return _mamba(settings)


def _nemotron(settings: Settings) -> Changes:
    layers = settings.integer("block_count")
    blocks, mixers = cast(list[int], settings.take("layer_blocks", [1] * layers)), _mixers(settings)
    dense = cast(list[int], settings.take("dense_layers", [1] * layers))
    settings.fixed("gated_ffn", False)
    settings.fixed("rope_layers", [-1] * layers)
    has_experts = f"{settings.architecture}.expert_count" in settings.keys
    if not settings.keys.get(f"{settings.architecture}.moe_latent_size"):
        settings.drop("moe_latent_size")
    if has_experts and any(block == 2 and one for block, one in zip(blocks, dense)):
        settings.refuse("layers_block_type, which has mlp and moe")
    _stop_attention(settings, [block == 1 and mixer == 0 for block, mixer in zip(blocks, mixers)])
    width = settings.integer("expert_feed_forward_length" if has_experts else "feed_forward_length")
    settings.put("feed_forward_length", [width if block == 2 else 0 for block in blocks])
    settings.put("attention.layer_norm_epsilon", settings.key("attention.layer_norm_rms_epsilon"))
    if has_experts:
        settings.written = "nemotron_h_moe"
        settings.fixed("expert_gate", "sigmoid")
        settings.fixed("expert_corrected", True)
        _expert_weights(settings)
    return _mamba(settings) if any(mixers) else {}


def _expert_weights(settings: Settings) -> None:
    """Write the keys of the weights and groups of experts."""
    settings.put("expert_weights_norm", bool(settings.take("expert_normalise", False)))
    settings.put("expert_weights_scale", settings.number("expert_scale", 1.0))
    groups, used = settings.take("expert_groups", 1), settings.take("expert_groups_used", 1)
    if groups != 1:
        settings.put("expert_group_count", groups)
        settings.put("expert_group_used_count", used)


def _falcon(settings: Settings) -> Changes:
    """Multiply the weights by the factors of the network."""
    settings.written = "falcon-h1"
    _mixers(settings)
    settings.fixed("attention_beside", True)
    if settings.take("norm_then_gate", False) and "blk.0.ssm_norm.weight" in settings.names:
        settings.refuse("mamba_norm_before_gate")
    into = Folder(settings.path).fields("config.json").number("attention_in_multiplier", 1.0)
    scale = {name: settings.number(f"{name}_scale", 1.0) for name in (
        "embedding", "output", "attention", "mixed", "recurrent", "gate", "ffn")}
    found: dict[str, tuple[Change, ...]] = {name: (Change(factors=(factor,)),) for name, factor in (
        ("attn_q.weight", into), ("attn_v.weight", into), ("attn_output.weight", scale["mixed"] / into),
        ("attn_k.weight", scale["attention"] * math.sqrt(settings.integer("rope.dimension_count")) / into),
        ("ssm_out.weight", scale["recurrent"]), ("ffn_gate.weight", scale["gate"]), ("ffn_down.weight", scale["ffn"]),
        ("token_embd.weight", scale["embedding"]), ("output.weight", scale["output"]))}
    if "output.weight" not in settings.names:  # the factors of embeddings and logits differ
        found["token_embd.weight"] += (Change("output.weight", factors=(scale["output"],)),)
    inner, heads = settings.integer("ssm.inner_size"), settings.integer("ssm.time_step_rank")
    counts = [inner, inner, *[settings.integer("ssm.group_count") * settings.integer("ssm.state_size")] * 2, heads]
    factors = cast(list[float], settings.take("ssm_scales", [1.0] * len(counts)))
    found["ssm_in.weight"] = (Change(ranges=tuple((sum(counts[:i]), count) for i, count in enumerate(counts)),
                                     factors=tuple(factors)),)
    return {**found, **_mamba(settings), "ffn_norm.weight": (Change("ffn_norm"),)}


def _lfm(settings: Settings) -> Changes:
    _stop_attention(settings, [mixer == 0 for mixer in _mixers(settings)])
    changes = {"shortconv.conv.weight": (Change(shape=(-1, settings.integer("shortconv.l_cache"))),),
               "output_norm.weight": (Change("token_embd_norm.weight"),)}
    if settings.architecture != "lfm2moe":
        return changes
    settings.fixed("expert_gate", "sigmoid")
    settings.fixed("expert_epsilon", 1e-6)
    settings.fixed("expert_corrected", True)
    settings.put("expert_gating_func", _SIGMOID)
    _expert_weights(settings)
    return {**changes, **_gate_and_up(settings)}


def _gate_and_up(settings: Settings) -> dict[str, tuple[Change, ...]]:
    """Return the gate and up projections of all experts of a layer, which folders may have in one tensor."""
    experts, width = settings.integer("expert_count"), settings.integer("expert_feed_forward_length")
    return {"ffn_gate_up_exps.weight": tuple(
        Change(f"ffn_{part}_exps.weight", (experts, width, -1),
               tuple((2 * width * expert + first, width) for expert in range(experts)))
        for part, first in (("gate", 0), ("up", width)))}


def _qwen_next(settings: Settings) -> Changes:
    """Sort the heads of delta nets: value head h of the file belongs to key head h mod the number of key heads.

    Files of Qwen3-Next keep the value heads of a key head together. Its folders have all rows of a key head together.
    """
    settings.fixed("norm_offset", 1.0)
    delta = [mixer != 0 for mixer in _mixers(settings)]
    every = 1 + delta.index(False) if False in delta else 1
    if every > 1 and delta == [(i + 1) % every != 0 for i in range(len(delta))]:
        settings.put("full_attention_interval", every)
    else:
        settings.put("attention.recurrent_layers", delta)
    keys, heads = settings.integer("ssm.group_count"), settings.integer("ssm.time_step_rank")
    state, width, group = settings.integer("ssm.state_size"), settings.integer("ssm.inner_size") // heads, heads // keys
    grouped = settings.architecture == "qwen3next"

    def sort(size: int, first: int = 0) -> tuple[tuple[int, int], ...]:
        if grouped or group == 1:
            return ()
        return (*(((0, first),) if first else ()), *((first + (key * group + member) * size, size)
                                                     for member in range(group) for key in range(keys)))

    channels = Change(ranges=sort(width, 2 * keys * state))
    found: dict[str, tuple[Change, ...]] = {
        "ssm_conv1d.weight": (Change(shape=(-1, settings.integer("ssm.conv_kernel")), ranges=channels.ranges),),
        "ssm_a_log": (Change("ssm_a", ranges=sort(1), values=_negative_exponential),),
        "ssm_dt.bias": (Change(ranges=sort(1)),), "ffn_norm.weight": (Change("post_attention_norm.weight"),)}
    if settings.architecture != "qwen35":
        settings.fixed("expert_normalise", True)
        settings.fixed("dense_layers", [0] * len(delta))
        found |= _gate_and_up(settings)
    if not grouped:
        settings.put("rope.dimension_sections", [11, 11, 10, 0])  # texts have the same position in all sections
        return {**found, "attn_qkv.weight": (channels,), "attn_gate.weight": (Change(ranges=sort(width)),),
                "ssm_beta.weight": (Change(ranges=sort(1)),), "ssm_alpha.weight": (Change(ranges=sort(1)),),
                "ssm_out.weight": (Change(tiled=(keys, group)),)}
    parts = (state, state, group * width, group * width)
    query, key, value, gate = ([(head * sum(parts) + sum(parts[:i]), parts[i]) for head in range(keys)]
                               for i in range(len(parts)))
    return {**found, "ssm_in.weight": (Change("attn_qkv.weight", ranges=(*query, *key, *value)),
                                       Change("attn_gate.weight", ranges=tuple(gate)))}


def _qwen2moe(settings: Settings) -> None:
    settings.fixed("expert_normalise", False)
    settings.fixed("dense_layers", [0] * settings.integer("block_count"))


def _windowed(settings: Settings) -> None:
    """Write the layers with a sliding window. Those of OLMo 3 have an unscaled RoPE of the same base; EXAONE 4 has RoPE
    only in these layers."""
    if f"{settings.architecture}.attention.sliding_window" not in settings.keys:
        return
    windowed = cast(list[int], settings.take("window_layers", []))
    settings.put("attention.sliding_window_pattern", [bool(one) for one in windowed])
    if settings.architecture == "exaone4":
        settings.fixed("rope_layers", [one - 1 for one in windowed])
    else:
        settings.fixed("rope_layers", windowed)
        settings.fixed("rope_local_base", settings.key("rope.freq_base"))


def _cohere2(settings: Settings) -> None:
    windowed = [int(one) for one in windowed_layers(settings.integer("block_count"), 4)]
    for name, fixed in (("root_norms", False), ("one_norm", True), ("window_layers", windowed),
                        ("rope_layers", [one - 1 for one in windowed])):
        settings.fixed(name, cast(Value, fixed))
    settings.put("logit_scale", settings.number("output_scale", 1.0))


def _seed_oss(settings: Settings) -> Changes:
    return {"ffn_norm.weight": (Change("post_attention_norm.weight"),)}


def _gemma(settings: Settings) -> None:
    name, layers = settings.architecture, settings.integer("block_count")
    is_gemma3, width = name == "gemma3", settings.integer("embedding_length")
    settings.fixed("norm_offset", 1.0)
    settings.fixed("embedding_scale", math.sqrt(width))
    scaled_by = width / settings.integer("attention.head_count") if layers == LARGEST[name] \
        else settings.integer("attention.key_length")
    settings.fixed("attention_scale", 1 / math.sqrt(scaled_by))
    windowed = [int(one) for one in windowed_layers(layers, FULL_PERIODS[name])]
    settings.fixed("window_layers", windowed)
    if f"{name}.attention.sliding_window" not in settings.keys:
        settings.refuse("sliding_window")
    for ours, key in (("attention_softcap", "attn_logit_softcapping"), ("output_softcap", "final_logit_softcapping")):
        cap = settings.number(ours, 0.0)
        if cap:
            settings.put(key, cap)
        elif not is_gemma3:  # readers of Gemma 2 files without the key assume a cap
            settings.refuse(key)
    if is_gemma3:
        settings.fixed("rope_layers", windowed)
        settings.put("rope.freq_base_swa", settings.number("rope_local_base", 10000.0))


def _phi3(settings: Settings) -> None:
    settings.fixed("window_layers", [1] * settings.integer("block_count"))
    if "rope_long_from" in settings:
        settings.put("rope.scaling.original_context_length", settings.take("rope_long_from", 0))
        settings.put("rope.scaling.attn_factor", settings.number("rope_attention_factor", 1.0))


def _deepseek2(settings: Settings) -> Changes:
    """Write the latent KV head as the only one, as llama.cpp does since kv_b is split in two tensors; the ``_mla`` keys
    have the sizes of the model's heads."""
    rank, rotated = settings.integer("attention.kv_lora_rank"), settings.integer("rope.dimension_count")
    epsilon, key = settings.key("attention.layer_norm_rms_epsilon"), settings.integer("attention.key_length_mla")
    if settings.number("latent_epsilon", 0.0) != epsilon:
        log.warning("%s: readers of GGUF files use rms_norm_eps, %s, also in the norms of the latents, where the model "
                    "uses 1e-06: the results differ slightly", settings.path, epsilon)
    settings.put("attention.head_count_kv", 1)
    settings.put("attention.key_length", rank + rotated)
    settings.put("attention.value_length", rank)
    if not settings.key("attention.q_lora_rank"):
        settings.drop("attention.q_lora_rank")
    shared = settings.integer("expert_shared_feed_forward_length")
    settings.drop("expert_shared_feed_forward_length")
    settings.put("expert_shared_count", shared // settings.integer("expert_feed_forward_length"))
    is_sigmoid = settings.take("expert_gate", "softmax") == "sigmoid"
    settings.fixed("expert_corrected", is_sigmoid)
    settings.put("expert_gating_func", _SIGMOID if is_sigmoid else _SOFTMAX)
    _expert_weights(settings)
    factor = settings.scaling("factor", 1.0)
    assert isinstance(factor, (int, float))
    if settings.scaling("type", "none") == "yarn" and factor > 1:
        if "attention_scale" not in settings:  # llama.cpp would scale the rotated queries and keys
            settings.refuse("rope_type yarn without mscale_all_dim")
        scale = math.sqrt(settings.number("attention_scale", 1.0) * math.sqrt(key))
        settings.put("rope.scaling.yarn_log_multiplier", (scale - 1) / math.log(factor))
    heads, value = settings.integer("attention.head_count"), settings.integer("attention.value_length_mla")
    plain = key - rotated
    first = [head * (plain + value) for head in range(heads)]
    return {"attn_kv_b.weight": (
        Change("attn_k_b.weight", (heads, rank, plain), tuple((row, plain) for row in first), transposed=True),
        Change("attn_v_b.weight", (heads, value, rank), tuple((row + plain, value) for row in first)))}


_PAIRS = ("attn_q", "attn_k")
EXPORTS = {
    "llama": Export(interleaved=_PAIRS),
    "qwen2": Export(),
    "qwen3": Export(),
    "qwen3moe": Export(_qwen3moe),
    "qwen2moe": Export(_qwen2moe),
    "qwen3next": Export(_qwen_next, norm_offset=1.0),
    "qwen35": Export(_qwen_next, norm_offset=1.0),
    "qwen35moe": Export(_qwen_next, norm_offset=1.0),
    "smollm3": Export(_smollm3, interleaved=_PAIRS),
    "granite": Export(_granite, interleaved=_PAIRS),
    "granitemoe": Export(_granite, interleaved=_PAIRS),
    "granitehybrid": Export(_granitehybrid, interleaved=_PAIRS),
    "phi3": Export(_phi3, fused={"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")},
                   windows=True),
    "deepseek2": Export(_deepseek2, rope_neox=False, rope_factors=False, yarn_scales_rope=False),
    "gemma2": Export(_gemma, activation="gelu_tanh", windows=True, norm_offset=1.0),
    "gemma3": Export(_gemma, activation="gelu_tanh", windows=True, norm_offset=1.0),
    "olmo2": Export(_windowed, windows=True),
    "exaone4": Export(_windowed, windows=True),
    "cohere2": Export(_cohere2, windows=True, rope_neox=False),
    "lfm2": Export(_lfm),
    "lfm2moe": Export(_lfm),
    "nemotron_h": Export(_nemotron, activation="relu2", interleaved=_PAIRS),
    "falcon_h1": Export(_falcon),
    "mistral3": Export(interleaved=_PAIRS, yarn_multiplier=True),
    "glm4": Export(fused={"ffn_up": ("ffn_gate", "ffn_up")}, rope_neox=False),
    "ernie4_5": Export(rope_neox=False),
    "seed_oss": Export(_seed_oss),
}
