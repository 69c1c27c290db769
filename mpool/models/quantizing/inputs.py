"""Keys and tensors of a model, from a GGUF file or a model folder, as they are written to a GGUF file."""

from __future__ import annotations

import functools
import math
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...errors import Unsupported
from ..fields import describe
from ..files import Folder
from ..formats import hf_quantised
from ..formats.gguf_model import describe_gguf
from ..formats.gguf_tables import read_gguf
from ..formats.hf_folder import describe_folder
from ..spec import ModelSpec, TensorEntry, Value
from .exports import CONVERT_ELSEWHERE, EXPORTS, NO_FILE, Change, Changes, Export, Settings
from .gguf_layout import read_values, value
from .recipes import VALUES, Model
from .vocabulary import tokenizer_keys

#: Keys of a file that describe that file only.
_OF_THE_FILE = ("split.", "general.alignment", "general.quantization_version", "general.file_type")

#: Names of the tensors of layers (the text before the kind, the kind, the text after it), and of single experts.
_LAYER = re.compile(r"(blk\.\d+\.)(\w+)(\.(?:weight|bias))")
_NUMBER = re.compile(r"blk\.\d+\.")
_EXPERT = re.compile(r"(blk\.\d+\.\w+)\.\d+\.weight")


@dataclass(frozen=True)
class Tensor:
    """A tensor to write.

    Attributes:
        name: GGUF's name.
        shape: shape, outermost dimension first.
        parts: where its values are: tensors whose rows are written one after the other. Empty: in ``data``.
        heads: heads whose halves are interleaved; 0: rows are copied in their order.
        change: how the values differ from those of the only part that the tensor has; None: they are the same.
        data: values in float32, if they are not in a file.
        folder: True if the tensor is from a folder: small tensors are then written as F32.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[TensorEntry, ...]
    heads: int = 0
    change: Change | None = None
    data: bytes = b""
    folder: bool = False


@dataclass(frozen=True)
class Input:
    """A model to write.

    Attributes:
        keys: keys, as stored with their types, without ``general.file_type``.
        tensors: all tensors.
        paths: files of the tensors.
        model: facts for the recipe.
        scaled: the spec of the model, if the scales of some matrices are separate tensors (AWQ, GPTQ, FP8).
    """

    keys: Mapping[str, bytes]
    tensors: tuple[Tensor, ...]
    paths: tuple[str, ...]
    model: Model
    scaled: ModelSpec | None = None


def read_input(path: str) -> Input:
    """Read a GGUF file or a model folder, without its weights.

    Raises:
        FormatError, UnsafeFormat, LimitError, Unsupported: mpool cannot read or convert the model.
        FileError: a file is missing.
    """
    return _from_folder(path) if os.path.isdir(path) else _from_gguf(path)


def _model(name: str, kv: Mapping[str, Value], names: set[str]) -> Model:
    def number(key: str) -> int:
        found = kv.get(f"{name}.{key}", 0)
        return found if type(found) is int else 0

    def layers(kinds: Iterable[str]) -> list[int]:
        return sorted(int(match[1][4:-1]) for match in found if match[2] in kinds and match[3] == ".weight")

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    found = [match for match in map(_LAYER.fullmatch, names) if match]
    return Model(layers=max((int(match[1][4:-1]) + 1 for match in found), default=0), experts=number("expert_count"),
                 tied="output.weight" not in names,
                 is_70b=number("block_count") == 80 and name in ("llama", "qwen2") and heads != kv_heads,
                 value_layers=layers(VALUES), down_layers=layers(("ffn_down",)))


def _from_gguf(path: str) -> Input:
    described = describe_gguf(path, key=path, ref=path)
    if described.spec.architecture in ("flux", "sd3"):
        raise Unsupported(f"{path}: mpool quantises text models, got {described.spec.architecture}",
                          hint="Use stable-diffusion.cpp for image generation")
    _, tensors, files = read_gguf(path)
    end = min((entry.offset for entry in tensors if entry.file == 0), default=os.path.getsize(path))
    keys = {key: content for key, content in read_values(files[0], end).items() if not key.startswith(_OF_THE_FILE)}
    written = [replace(one, folder=False) for one in _tensors(tensors, Export(), {})]  # joins separate experts
    return Input(keys, tuple(written), files,
                 _model(described.spec.architecture, described.spec.kv, {entry.name for entry in tensors}))


def _from_folder(path: str) -> Input:
    model = describe_folder(path, key=path, ref=path, images=False)
    spec, name = model.spec, model.spec.architecture
    if name not in EXPORTS or model.capability != "text_to_text":
        raise Unsupported(f"{path}: mpool converts folders of the architectures {', '.join(EXPORTS)}, got {name}",
                          hint=NO_FILE.get(name, CONVERT_ELSEWHERE))
    scaled = any(entry.dtype in hf_quantised.DTYPES for entry in spec.tensors)
    written = [entry for entry in spec.tensors if not (scaled and hf_quantised.is_companion(entry.name))]
    names = {entry.name for entry in written}
    export, settings = EXPORTS[name], Settings(path, spec, names)
    heads = {"attn_q": settings.integer("attention.head_count"), "attn_k": settings.integer("attention.head_count_kv")}
    factors, changes = _take_settings(settings, export)
    rows = next(entry.shape[0] for entry in spec.tensors if entry.name == "token_embd.weight")
    keys = {settings.written + key.removeprefix(name): _stored(*spec.origins.get(key, (path, key)), one)
            for key, one in settings.keys.items()}
    keys |= tokenizer_keys(Folder(path), model, rows)
    tensors = [one for tensor in _tensors(written, export, heads) for one in _changed(tensor, changes)]
    tensors += [Tensor(f"{kind}.weight", (len(one),), (), data=struct.pack(f"<{len(one)}f", *one))
                for kind, one in factors.items()]
    general = {"general.architecture": value(settings.written), "general.type": value("model"),
               "general.name": value(os.path.basename(os.path.abspath(path)))}
    return Input(general | keys, tuple(tensors), spec.files,
                 _model(name, spec.kv, {tensor.name for tensor in tensors}), spec if scaled else None)


def _stored(path: str, key: str, content: Any) -> bytes:
    """Return the value of a key as the file stores it."""
    try:
        return value(content)
    except (struct.error, OverflowError):
        raise Unsupported(f"{path}: {key} is {describe(content)}; GGUF files store 32-bit numbers") from None


def _tensors(entries: Sequence[TensorEntry], export: Export, heads: Mapping[str, int]) -> list[Tensor]:
    """Return the tensors of the file, in the order of their first parts in ``entries``.

    Args:
        entries: tensors of the folder.
        export: how the architecture is written.
        heads: kind of tensor -> number of heads whose halves the file interleaves; empty: none.
    """
    whole = {part: kind for kind, parts in export.fused.items() for part in parts}
    groups: dict[str, list[TensorEntry]] = {}
    for entry in entries:
        name = entry.name
        match = _EXPERT.fullmatch(name)
        if match:
            name = f"{match[1]}_exps.weight"
        elif (match := _LAYER.fullmatch(name)) and match[2] in whole:
            name = f"{match[1]}{whole[match[2]]}{match[3]}"
        groups.setdefault(name, []).append(entry)
    tensors = []
    for name, parts in groups.items():
        match, shape = _LAYER.fullmatch(name), parts[0].shape
        kind = match[2] if match else ""
        if name.endswith("_exps.weight") and len(parts[0].shape) == 2:
            parts.sort(key=lambda entry: int(entry.name.split(".")[3]))
            shape = (len(parts), *shape)
        elif kind in export.fused:
            parts.sort(key=lambda entry: export.fused[kind].index(entry.name.split(".")[2]))
            shape = (sum(part.shape[0] for part in parts), *shape[1:])
        offset = export.norm_offset if name.endswith("norm.weight") and kind != "ssm_norm" else 0.0
        tensors.append(Tensor(name, shape, tuple(parts), heads[kind] if kind in export.interleaved else 0, folder=True,
                              change=Change(values=functools.partial(np.add, np.float32(offset))) if offset else None))
    return tensors


def _changed(tensor: Tensor, changes: Changes) -> list[Tensor]:
    """Return the tensors that the file has in place of a tensor of the folder."""
    match = _NUMBER.match(tensor.name)
    layer = match[0] if match else ""
    return [_apply(tensor, change, layer) for change in changes.get(tensor.name[len(layer):], ())] or [tensor]


def _apply(tensor: Tensor, change: Change, layer: str) -> Tensor:
    """Return a tensor of the file. ``layer``: beginning of the names of the layer's tensors."""
    shape = tensor.shape
    if change.ranges:
        shape = (sum(count for _, count in change.ranges), *shape[1:][-1:])
    if change.shape:
        items, known = math.prod(shape), math.prod(size for size in change.shape if size > 0)
        shape = tuple(size if size > 0 else items // known for size in change.shape)
    return replace(tensor, name=layer + change.name if change.name else tensor.name, shape=shape,
                   change=replace(change, values=change.values or (tensor.change.values if tensor.change else None)))


def _take_settings(settings: Settings, export: Export) -> tuple[dict[str, list[float]], Changes]:
    """Take all settings. Return the factors of RoPE, which are tensors, by their names, and the changes of tensors.

    Raises:
        Unsupported: a GGUF file cannot express a setting.
    """
    settings.fixed("rope_neox", export.rope_neox)
    settings.fixed("activation", export.activation)
    settings.take("scale_block", 0)  # the file stores no separate scales
    kind, scaling = settings.scaling("type", "none"), "rope.scaling."
    factor = float(settings.scaling("factor", 1.0))  # type: ignore[arg-type]
    found: dict[str, list[float]] = {}
    if kind == "yarn":
        settings.fixed("rope_yarn_truncate", True)
        for name, usual in (("yarn_beta_fast", 32.0), ("yarn_beta_slow", 1.0)):
            if settings.scaling(name, usual) == usual:
                settings.drop(f"{scaling}{name}")  # readers have the same defaults
        by = 0.1 * math.log(max(factor, 1.0))
        if export.yarn_multiplier and by > 0:
            found_scale = settings.number("rope_attention_factor", by + 1)
            settings.put(f"{scaling}yarn_log_multiplier", ((by + 1) / found_scale - 1) / by)
        settings.fixed("rope_attention_factor", by + 1 if export.yarn_scales_rope else 1.0)
    elif kind == "llama3":
        found["rope_freqs"] = _llama3_factors(settings, factor)
        settings.drop(scaling)
    for name in ("short", "long"):
        if f"rope_{name}_factors" in settings:
            factors = settings.take(f"rope_{name}_factors", [])
            found[f"rope_factors_{name}"] = [float(one) for one in factors]  # type: ignore[union-attr, arg-type]
    if found and not export.rope_factors:
        settings.refuse("rope_type", kind)
    changes = export.complete(settings) or {}
    if not export.windows and f"{settings.architecture}.attention.sliding_window" in settings.keys:
        settings.refuse("sliding_window")
    settings.finish()
    return found, changes


def _llama3_factors(settings: Settings, factor: float) -> list[float]:
    """Return the divisor of the frequency of each rotated pair.

    Short wavelengths are kept, long ones are divided by ``factor``, and the divisor changes gradually between them
    (transformers' ``rope_type`` llama3).
    """
    def number(name: str) -> float:
        found = settings.key(f"rope.{name}")
        assert isinstance(found, (int, float))
        return float(found)

    low, high = number("scaling.low_freq_factor"), number("scaling.high_freq_factor")
    original, base = number("scaling.original_context_length"), number("freq_base")
    size = int(number("dimension_count"))
    factors = []
    for i in range(0, size, 2):
        turns = original / (2 * math.pi * base ** (i / size))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors
