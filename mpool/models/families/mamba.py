"""Mamba-2 layers (arXiv:2405.21060), which several families have beside attention.

Letters of shapes: M heads, I components of all heads together, C channels of the convolution, B outputs of the input
projection, L taps of the convolution, g groups, i components of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..fields import Fields, describe
from ..spec import Value
from .reading import MAX_LAYERS, unsupported
from .rows import Tensor, layer

#: Values of ``mpool.layer_mixers``.
ATTENTION, MAMBA = 0, 3
#: Most heads and taps, most components of a head or of its state, and the largest step; the C core has the same limits.
MOST_HEADS, MOST_TAPS, MOST_COMPONENTS, MOST_STEP = 4096, 16, 1024, 1e9
#: Keys that change no computation: the sizes of chunks of other implementations, and the range of initial values.
#: ``time_step_min`` limits the steps of prompts in transformers, but neither those of its generation, nor those of the
#: code that the models were published with.
UNUSED = frozenset({"mamba_chunk_size", "chunk_size", "time_step_min", "time_step_max", "time_step_floor"})


class Names(NamedTuple):
    """Keys of the sizes in config.json."""

    heads: str = "mamba_n_heads"
    head: str = "mamba_d_head"
    state: str = "mamba_d_state"
    groups: str = "mamba_n_groups"
    taps: str = "mamba_d_conv"


NAMES = Names()


def mamba_tensors(block: str, when: str = "", *, norm: str = "") -> tuple[Tensor, ...]:
    """Return the tensors of a Mamba-2 layer.

    Args:
        block: name of the layer in transformers.
        when: condition of its tensors; empty: every layer has them.
        norm: further condition of its norm in folders; GGUF files may then omit it.
    """
    def also(condition: str) -> str:
        return f"{condition} {when}".strip()

    return (
        *layer(f"{block}.in_proj", "ssm_in", "BD", bias="B", when=when, biased=also("if proj_bias")),
        *layer(f"{block}.out_proj", "ssm_out", "DI", bias="D", when=when, biased=also("if out_bias")),
        *layer(f"{block}.conv1d", "ssm_conv1d", "C1L", bias="C", when=also("folder"), biased=also("if conv_bias")),
        Tensor(f"{block}.dt_bias", "blk.{}.ssm_dt.bias", "M", when),
        Tensor(f"{block}.A_log", "blk.{}.ssm_a_log", "M", also("folder")),
        Tensor(f"{block}.D", "blk.{}.ssm_d", "M", also("folder")),
        Tensor("", "blk.{}.ssm_conv1d.weight", "CL", when),
        Tensor("", "blk.{}.ssm_a", "M1", when),
        Tensor("", "blk.{}.ssm_d", "M1", when),
        Tensor("", "blk.{}.ssm_norm.weight", "gi", "gguf" if norm else when),
        *layer(f"{block}.norm", "ssm_norm", "I", when=also(f"folder {norm}".strip())),
    )


def read_mamba(config: Fields, kv: dict[str, Value], a: str, defaults: Mapping[str, int], *, names: Names = NAMES,
               inner: int | None = None) -> set[str]:
    """Read the sizes of Mamba-2 layers, and return the keys that were read.

    Args:
        config: contents of config.json.
        kv: hyper-parameters to add to.
        a: name of the architecture.
        defaults: defaults of the class in transformers, by the fields of :class:`Names`.
        names: keys of the sizes.
        inner: components of all heads together, if the configuration states them; None: they follow from the heads.
    """
    heads = config.int(names.heads, defaults["heads"], low=1, high=MOST_HEADS)
    whole = inner if inner is not None else 0
    if whole % heads:
        config.fail(names.heads, heads, f"a divisor of the {whole} components of all heads")
    head = whole // heads or defaults["head"]
    if config.get(names.head) != "auto":
        head = config.int(names.head, head, low=1, high=MOST_COMPONENTS)
    if whole and head * heads != whole:
        config.fail(names.head, head, f"{whole // heads}: {heads} heads have {whole} components")
    groups = config.int(names.groups, defaults["groups"], low=1, high=MOST_HEADS)
    if heads % groups:
        config.fail(names.groups, groups, f"a divisor of the {heads} heads")
    kv[f"{a}.ssm.conv_kernel"] = config.int(names.taps, 4, low=2, high=MOST_TAPS)
    kv[f"{a}.ssm.state_size"] = config.int(names.state, defaults["state"], low=1, high=MOST_COMPONENTS)
    kv[f"{a}.ssm.group_count"], kv[f"{a}.ssm.time_step_rank"], kv[f"{a}.ssm.inner_size"] = groups, heads, heads * head
    _read_limits(config, kv)
    return {*names, "time_step_limit", *UNUSED}


def _read_limits(config: Fields, kv: dict[str, Value]) -> None:
    """Read the range of steps. transformers writes infinity as ``{"__float__": "Infinity"}``."""
    limits = config.list("time_step_limit", [0.0, math.inf], limit=16)
    limits = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    if len(limits) != 2 or any(type(limit) not in (int, float) for limit in limits) \
            or not 0 <= limits[0] <= limits[1] or limits[0] > MOST_STEP or MOST_STEP < limits[1] < math.inf:
        config.fail("time_step_limit", [describe(limit) for limit in limits],
                    f"two numbers from 0 to {MOST_STEP:g} in ascending order, the second of which may be Infinity")
    low, high = map(float, limits)
    if low > 0:
        kv["mpool.step_low"] = low
    if math.isfinite(high):
        kv["mpool.step_high"] = high


def complete_mamba(table: Fields, name: str) -> None:
    """Check the sizes of Mamba-2 layers in a GGUF file."""
    heads = table.int(f"{name}.ssm.time_step_rank", low=1, high=MOST_HEADS)
    inner = table.int(f"{name}.ssm.inner_size", low=1, high=MOST_HEADS * MOST_COMPONENTS)
    groups = table.int(f"{name}.ssm.group_count", low=1, high=MOST_HEADS)
    table.int(f"{name}.ssm.conv_kernel", low=2, high=MOST_TAPS)
    table.int(f"{name}.ssm.state_size", low=1, high=MOST_COMPONENTS)
    if inner % heads:
        table.fail(f"{name}.ssm.inner_size", inner, f"a multiple of the {heads} heads")
    if heads % groups:
        table.fail(f"{name}.ssm.group_count", groups, f"a divisor of the {heads} heads")


def kv_heads(table: Fields, name: str, kv: dict[str, Value], a: str) -> list[int]:
    """Return the number of KV heads of each layer of a GGUF file: 0 in layers without attention. If the file states one
    number for all layers, return 1 for each."""
    value = table.get(f"{name}.attention.head_count_kv")
    counts = table.list(f"{name}.attention.head_count_kv", of=int, limit=MAX_LAYERS) if isinstance(value, list) else []
    layers: Any = kv[f"{a}.block_count"]
    return counts or [1] * layers


def mix(config: Fields, key: str, kv: dict[str, Value], mixers: list[int], which: list[bool] | None = None) -> None:
    """Set the kinds of the layers' mixers.

    Args:
        config: configuration, or keys of a GGUF file, for errors.
        key: key that states the kinds.
        kv: hyper-parameters to add to.
        mixers: value of ``mpool.layer_mixers`` of each layer.
        which: whether each layer has a mixer; None: all have one.
    """
    if ATTENTION not in [mixer for mixer, has in zip(mixers, which or [True] * len(mixers)) if has]:
        unsupported(config, key, "models in which some layers have attention")
    if MAMBA in mixers:
        kv["mpool.layer_mixers"] = mixers


def mamba_sizes(kv: dict[str, Any], size: dict[str, int], a: str) -> dict[str, int]:
    """Return the sizes of Mamba-2 layers, and the layers with Mamba-2 and with attention as bits."""
    heads, inner = kv.get(f"{a}.ssm.time_step_rank", 0), kv.get(f"{a}.ssm.inner_size", 0)
    groups, taps = kv.get(f"{a}.ssm.group_count", 1), kv.get(f"{a}.ssm.conv_kernel", 0)
    channels = inner + 2 * groups * kv.get(f"{a}.ssm.state_size", 0)
    mamba = sum(1 << i for i, mixer in enumerate(kv.get("mpool.layer_mixers", ())) if mixer == MAMBA)
    return {"1": 1, "M": heads, "I": inner, "C": channels, "B": inner + channels + heads, "L": taps, "g": groups,
            "i": inner // groups, "mamba": mamba, "attention": ~mamba & ((1 << size["layers"]) - 1)}
