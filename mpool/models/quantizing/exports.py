"""How each architecture is written to a GGUF file: what llama.cpp's files store differently than model folders.

The names of keys and tensors are those of llama.cpp's converter (``convert_hf_to_gguf.py``). A setting that its files
cannot express is refused, because the file would compute something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...errors import Unsupported
from ...records import logger
from ..families.gemma import FULL_PERIODS, LARGEST
from ..families.llama import windowed_layers
from ..families.smollm import INTERVAL, rope_layers
from ..spec import Value

log = logger("mpool.models")

#: Hint of the error for a folder that mpool does not convert.
CONVERT_ELSEWHERE = "Convert the folder with llama.cpp's convert_hf_to_gguf.py; mpool quantises the .gguf"
#: Values of ``expert_gating_func``.
_SOFTMAX, _SIGMOID = 1, 2


class Settings:
    """Hyper-parameters of a folder. Each reader takes one. A GGUF file cannot express those that are left.

    Attributes:
        architecture: name of the architecture.
        keys: hyper-parameters under GGUF's names, which are written as they are.
    """

    def __init__(self, path: str, architecture: str, kv: Mapping[str, Value]) -> None:
        """Read the hyper-parameters of a model's spec.

        Args:
            path: folder named in errors.
            architecture: name of the architecture.
            kv: hyper-parameters.
        """
        self.path, self.architecture = path, architecture
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
            self.refuse(name)

    def refuse(self, name: str) -> None:
        """Raise Unsupported for a setting."""
        raise Unsupported(f"{self.path}: mpool does not convert {self.architecture} with the setting {name}",
                          hint=CONVERT_ELSEWHERE)

    def finish(self) -> None:
        """Refuse the folder if a setting was not taken."""
        for name in self._own:
            self.refuse(name)


@dataclass(frozen=True)
class HeadRows:
    """Rows of each head of a matrix ``[heads * stride, columns]``, which are a tensor of their own in the file.

    Attributes:
        kind: kind of the tensor in the file.
        heads: number of heads.
        stride: rows of a head.
        first, count: first row that the tensor takes of each head, and number of rows.
        transposed: True if the file stores ``[heads, columns, count]`` instead of ``[heads, count, columns]``.
    """

    kind: str
    heads: int
    stride: int
    first: int
    count: int
    transposed: bool = False

    def shape(self, columns: int) -> tuple[int, int, int]:
        """Return the shape of the tensor, outermost dimension first."""
        return (self.heads, columns, self.count) if self.transposed else (self.heads, self.count, columns)


@dataclass(frozen=True)
class Export:
    """How an architecture is written.

    Attributes:
        complete: function that takes the settings which only this architecture has, and adds the keys of the file.
        interleaved: kinds of tensors whose rows llama.cpp orders differently: the halves of each head interleaved.
        fused: kind of tensor in the file -> kinds whose rows it concatenates.
        split: function of the settings that returns, by kind of tensor in the folder, the tensors that the file has
            in its place.
        activation: activation that the architecture's files imply.
        windows: True if the file states the sliding window.
        norm_offset: number that the folder's network adds to the weights of norms; the file stores the sums.
        rope_neox: True if folders store the first halves of all rotary pairs of a head before the second halves.
        rope_factors: True if the file may have tensors with divisors of RoPE's frequencies.
        yarn_scales_rope: True if YaRN also scales rotated queries and keys, by a factor that readers compute; False if
            the architecture's readers scale only the attention scores.
    """

    complete: Callable[[Settings], None] = lambda settings: None
    interleaved: tuple[str, ...] = ()
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    split: Callable[[Settings], Mapping[str, Sequence[HeadRows]]] = lambda settings: {}
    activation: str = "silu"
    windows: bool = False
    norm_offset: float = 0.0
    rope_neox: bool = True
    rope_factors: bool = True
    yarn_scales_rope: bool = True


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


def _granitehybrid(settings: Settings) -> None:
    """Write a model without Mamba layers and experts. The others keep their settings, which are refused."""
    _granite(settings)
    if f"{settings.architecture}.expert_count" in settings.keys:
        settings.refuse("expert_count")
    layers = settings.integer("block_count")
    rotated = settings.take("rope_layers", [0] * layers)
    settings.put("rope.scaling.finetuned", rotated == [0] * layers)


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


def _deepseek2(settings: Settings) -> None:
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
    settings.put("expert_weights_norm", bool(settings.take("expert_normalise", False)))
    settings.put("expert_weights_scale", settings.number("expert_scale", 1.0))
    groups, used = settings.take("expert_groups", 1), settings.take("expert_groups_used", 1)
    if groups != 1:
        settings.put("expert_group_count", groups)
        settings.put("expert_group_used_count", used)
    factor = settings.scaling("factor", 1.0)
    assert isinstance(factor, (int, float))
    if settings.scaling("type", "none") == "yarn" and factor > 1:
        if "attention_scale" not in settings:  # llama.cpp would scale the rotated queries and keys
            settings.refuse("rope.scaling.type yarn without mscale_all_dim")
        scale = math.sqrt(settings.number("attention_scale", 1.0) * math.sqrt(key))
        settings.put("rope.scaling.yarn_log_multiplier", (scale - 1) / math.log(factor))


def _latent_halves(settings: Settings) -> dict[str, tuple[HeadRows, HeadRows]]:
    """Return the key half and the value half of each head of kv_b."""
    heads, value = settings.integer("attention.head_count"), settings.integer("attention.value_length_mla")
    plain = settings.integer("attention.key_length_mla") - settings.integer("rope.dimension_count")
    return {"attn_kv_b": (HeadRows("attn_k_b", heads, plain + value, 0, plain, transposed=True),
                          HeadRows("attn_v_b", heads, plain + value, plain, value))}


EXPORTS = {
    "llama": Export(interleaved=("attn_q", "attn_k")),
    "qwen2": Export(),
    "qwen3": Export(),
    "qwen3moe": Export(_qwen3moe),
    "smollm3": Export(_smollm3, interleaved=("attn_q", "attn_k")),
    "granite": Export(_granite, interleaved=("attn_q", "attn_k")),
    "granitehybrid": Export(_granitehybrid, interleaved=("attn_q", "attn_k")),
    "phi3": Export(_phi3, fused={"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_gate", "ffn_up")},
                   windows=True),
    "deepseek2": Export(_deepseek2, split=_latent_halves, rope_neox=False, rope_factors=False, yarn_scales_rope=False),
    "gemma2": Export(_gemma, activation="gelu_tanh", windows=True, norm_offset=1.0),
    "gemma3": Export(_gemma, activation="gelu_tanh", windows=True, norm_offset=1.0),
    "olmo2": Export(),
}
