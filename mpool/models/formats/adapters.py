"""Reader of low-rank adapters (LoRA: arXiv:2106.09685): folders of PEFT, and adapters of llama.cpp in GGUF files.

An adapter adds ``scale * B @ (A @ x)`` to the outputs of linear layers. A folder has ``adapter_config.json`` and
``adapter_model.safetensors`` (https://huggingface.co/docs/peft/developer_guides/checkpoint). A GGUF file has the keys
``general.type`` (``adapter``), ``adapter.type`` (``lora``) and ``adapter.lora.alpha``, and two tensors per layer, named
after the layer's weight: ``blk.0.attn_q.weight.lora_a`` (https://github.com/ggml-org/llama.cpp/blob/master/gguf-py).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, NoReturn

from ...errors import FileError, FormatError, LimitError, Unsupported
from ..families import ROWS, Architecture
from ..fields import Fields, describe
from ..files import Folder, collect_stamps, refuse_pickle
from ..json_strict import shorten
from ..spec import Adapter, LowRank, ModelDescription, TensorEntry
from .gguf_tables import read_gguf
from .safetensors_header import WEIGHT_DTYPES, read_header

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
#: Largest rank, and largest absolute value of a scale. The C core has the same limits (csrc/models/nn/adapter.h).
MAX_RANK, MAX_SCALE = 1024, 1e6
#: Maximum number of entries of ``alpha_pattern``: each module of the adapter is compared with each of them.
MAX_PATTERNS = 4096

#: Layers that adapters can update, by the names that the C core uses, without the number of the block.
LAYERS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_LAYER = re.compile(r"blk\.\{\}\.(" + "|".join(LAYERS) + r")\.weight")
_PART = re.compile(r"(.+)\[(\d+)\]")
#: Architectures whose GGUF files interleave the halves of each head in the rows of queries and keys.
_INTERLEAVED = frozenset({"llama", "smollm3", "granite"})
_PEFT_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[A-Za-z0-9_-]+)?\.weight")
_GGUF_NAME = re.compile(r"(?P<module>.+)\.weight\.lora_(?P<side>[ab])")

#: Keys of adapter_config.json that change the computation -> values with which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "use_dora": (False,), "bias": ("none",), "lora_bias": (False,), "modules_to_save": ([],),
    "fan_in_fan_out": (False,), "layer_replication": ([],), "trainable_token_indices": ([], {}),
    "target_parameters": ([],), "alora_invocation_tokens": ([],), "use_qalora": (False,), "use_bdlora": (False,),
    "arrow_config": (), "kappa_tuner_config": (), "lora_ga_config": (), "velora_config": (), "monteclora_config": (),
}
_WHY = {"use_dora": "DoRA normalises the updated weights, which no low-rank update can express",
        "modules_to_save": "modules that were trained as a whole are not low-rank updates",
        "bias": "trained biases are not low-rank updates"}
#: Methods of initialisation after which PEFT subtracts the first values of A and B from the weights of the model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class _Part(NamedTuple):
    """A layer of the model: its name in the core without ``.weight``, its outputs and its inputs."""

    name: str
    rows: int
    width: int


class _Pair(NamedTuple):
    """The matrices of one module of an adapter, as they are in the file."""

    a: TensorEntry
    b: TensorEntry


def read_adapter(path: str | os.PathLike[str], base: ModelDescription) -> Adapter:
    """Read the tables of an adapter, and check that it fits a model. Reads no tensor data.

    Args:
        path: folder of PEFT, or GGUF file.
        base: the model.

    Raises:
        FileError: the path does not exist or cannot be read.
        FormatError: a file is malformed, or a matrix does not fit its layer.
        LimitError: a rank is above ``MAX_RANK``.
        UnsafeFormat: the folder has pickled weights only.
        Unsupported: the adapter is of another kind, or updates a module that adapters of mpool cannot update.
    """
    place = os.path.abspath(os.fspath(path))
    row = next((row for row in ROWS if row.name == base.spec.architecture and row.capability == base.capability), None)
    if row is None:
        raise Unsupported(f"mpool does not support adapters of {base.spec.architecture} models ({base.capability})")
    with collect_stamps() as stamps:
        if os.path.isdir(place):
            found = _read_peft(Folder(place), row, base)
        elif os.path.exists(place):
            found = _read_gguf_adapter(place, row, base)
        else:
            raise FileError(f"{place}: no such file or folder", hint="Pass a folder of PEFT, or a .gguf file")
    return replace(found, stamps=stamps)


# ---- layers of the model -------------------------------------------------------------------------------------------

def _modules(row: Architecture, base: ModelDescription, gguf: bool) -> dict[str, list[tuple[_Part, ...]]]:
    """Return the modules that adapters can update, by their names in transformers (without the prefix of the family) or
    in GGUF files. Each has the layers that its rows belong to; a name may stand for a fused module or a plain one."""
    shapes = {entry.name: entry.shape for entry in base.spec.tensors}
    layers = base.spec.kv.get(f"{row.name}.block_count")
    assert isinstance(layers, int)
    found: dict[str, list[tuple[_Part, ...]]] = {}
    fused: dict[str, dict[int, _Part]] = {}
    for tensor in row.tensors:
        if not _LAYER.fullmatch(tensor.gguf):
            continue
        names = (tensor.stored or tensor.gguf) if gguf else tensor.hf
        for layer in range(layers):
            core = tensor.gguf.replace("{}", str(layer))
            if len(shapes.get(core, ())) != 2:
                continue
            part = _Part(core.removesuffix(".weight"), *shapes[core])
            for name in filter(None, names.split("|")):
                name = name.removeprefix("/").replace("{}", str(layer))
                slice_ = _PART.fullmatch(name)
                if slice_ is None:
                    found.setdefault(name.removesuffix(".weight"), []).append((part,))
                else:
                    fused.setdefault(slice_[1].removesuffix(".weight"), {})[int(slice_[2])] = part
    for name, parts in fused.items():
        found.setdefault(name, []).append(tuple(parts[i] for i in sorted(parts)))
    return found


def _listed(modules: Mapping[str, object]) -> str:
    """Return the last parts of module names, each once."""
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in modules))


def _unknown(path: str, module: str, modules: Mapping[str, object]) -> NoReturn:
    raise Unsupported(f"{path}: the adapter updates {shorten(module)}; in this model, mpool supports adapters of "
                      f"{_listed(modules)}", hint="Train the adapter with these modules as target_modules, or merge it "
                      "into the model with merge_and_unload of PEFT")


# ---- matrices ------------------------------------------------------------------------------------------------------

def _pairs(path: str, entries: Mapping[str, dict[str, TensorEntry]]) -> Iterator[tuple[str, _Pair]]:
    """Yield the matrices of each module, after checking their dtypes, shapes and ranks."""
    if not entries:
        raise FormatError(file=path, field="tensors", got="no matrix of an adapter", allowed="matrices A and B")
    for module, sides in entries.items():
        for side in "ab":
            if side not in sides:
                raise FormatError(file=path, field=shorten(module), got=f"no matrix {side.upper()}",
                                  allowed="two matrices, A and B")
            entry = sides[side]
            if entry.dtype not in WEIGHT_DTYPES:
                raise Unsupported(f"{path}: tensor {shorten(entry.name)} has dtype {entry.dtype}; mpool supports "
                                  f"adapters of {', '.join(sorted(WEIGHT_DTYPES))}")
            if len(entry.shape) != 2 or min(entry.shape) < 1:
                raise FormatError(file=path, offset=entry.offset, field=f"shape of {shorten(entry.name)}",
                                  got=list(entry.shape), allowed="two positive sizes")
        a, b = sides["a"], sides["b"]
        if a.shape[0] > MAX_RANK:
            raise LimitError(f"{path}: {shorten(a.name)} has the rank {a.shape[0]}, mpool supports at most {MAX_RANK}")
        if a.shape[0] != b.shape[1]:
            raise FormatError(file=path, offset=b.offset, field=f"shape of {shorten(b.name)}", got=list(b.shape),
                              allowed=f"[*, {a.shape[0]}], the rank of {shorten(a.name)}")
        yield module, _Pair(a, b)


def _split(path: str, pair: _Pair, choices: list[tuple[_Part, ...]], scale: float, heads: Mapping[str, int]) \
        -> Iterator[LowRank]:
    """Yield the update of each layer that a module consists of.

    Args:
        path: file of the adapter.
        pair: matrices of the module.
        choices: the layers of the module, for each way in which it may be stored.
        scale: factor of the update.
        heads: see :func:`_reordered_heads`.
    """
    parts = next((parts for parts in choices if sum(part.rows for part in parts) == pair.b.shape[0]), choices[0])
    outputs, width = sum(part.rows for part in parts), parts[0].width
    for entry, allowed in ((pair.a, [pair.a.shape[0], width]), (pair.b, [outputs, pair.b.shape[1]])):
        if list(entry.shape) != allowed:
            raise FormatError(file=path, offset=entry.offset, field=f"shape of {shorten(entry.name)}",
                              got=list(entry.shape), allowed=allowed, hint="The adapter is one of another model")
    row_bytes, first = pair.b.nbytes // outputs, 0
    for part in parts:
        b = replace(pair.b, shape=(part.rows, pair.b.shape[1]), offset=pair.b.offset + first * row_bytes,
                    nbytes=part.rows * row_bytes)
        yield LowRank(part.name, pair.a, b, scale, heads.get(part.name.rpartition(".")[2], 0))
        first += part.rows


def _checked_scale(path: str, field: str, alpha: float, scale: float) -> float:
    if not math.isfinite(scale) or scale == 0.0 or abs(scale) > MAX_SCALE:
        raise FormatError(file=path, field=field, got=describe(alpha),
                          allowed=f"a number other than 0 whose quotient by the rank is at most {MAX_SCALE:g}")
    return scale


def _reordered_heads(row: Architecture, base: ModelDescription, gguf: bool) -> dict[str, int]:
    """Return kinds of layers -> heads whose rows the model and the adapter have in different orders.

    The number is positive if the halves of each head stand one after the other in the adapter and are interleaved in
    the model, negative in the opposite case.
    """
    interleaved = not base.spec.files[0].endswith(".safetensors")
    if row.name not in _INTERLEAVED or interleaved == gguf:
        return {}
    kv, sign = base.spec.kv, 1 if interleaved else -1
    heads, kv_heads = kv[f"{row.name}.attention.head_count"], kv[f"{row.name}.attention.head_count_kv"]
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    return {"attn_q": sign * heads, "attn_k": sign * kv_heads}


# ---- PEFT ----------------------------------------------------------------------------------------------------------

def _read_peft(folder: Folder, row: Architecture, base: ModelDescription) -> Adapter:
    if not folder.has(CONFIG_NAME):
        raise FormatError(file=folder.path, field=CONFIG_NAME, got="missing",
                          allowed="a folder of PEFT, which has adapter_config.json and adapter_model.safetensors")
    config = folder.fields(CONFIG_NAME)
    _check_config(config)
    if not folder.has(WEIGHTS_NAME):
        for name in folder.pickles():
            refuse_pickle(folder.path, name)
        raise FormatError(file=folder.path, field=WEIGHTS_NAME, got="missing", allowed="the matrices of the adapter")
    path = folder.path_of(WEIGHTS_NAME)
    modules = _modules(row, base, False)
    entries: dict[str, dict[str, TensorEntry]] = {}
    names: dict[str, str] = {}
    for entry in read_header(path).tensors:
        found = _PEFT_NAME.fullmatch(entry.name)
        if found is None:
            _refuse_peft_tensor(path, entry.name)
        name, side = found["module"].removeprefix("base_model.model."), found["side"].lower()
        module = _without_prefix(name, row, modules)
        if module not in modules:
            _unknown(path, name, modules)
        names[module] = name
        sides = entries.setdefault(module, {})
        if side in sides:
            raise FormatError(file=path, field=shorten(entry.name), got="two matrices of this layer", allowed="one")
        sides[side] = entry
    rank, patterns = config.int("r", low=1, high=1 << 30), config.section("rank_pattern", None)
    stabilised, heads = config.bool("use_rslora", False), _reordered_heads(row, base, False)
    updates: list[LowRank] = []
    for module, pair in _pairs(path, entries):
        actual = pair.a.shape[0]
        if actual != rank and not (patterns is not None and len(patterns.values)):
            raise FormatError(file=path, offset=pair.a.offset, field=f"rank of {shorten(pair.a.name)}", got=actual,
                              allowed=f"{rank}, the value of r in {CONFIG_NAME}")
        field, alpha = _alpha(config, names[module])
        scale = _checked_scale(config.file, field, alpha, alpha / (math.sqrt(actual) if stabilised else actual))
        updates += _split(path, pair, modules[module], scale, heads)
    return Adapter((path,), tuple(updates))


def _check_config(config: Fields) -> None:
    """Raise Unsupported for adapters that are more than low-rank updates."""
    kind = config.str("peft_type")
    if kind != "LORA":
        raise Unsupported(f"{config.file}: peft_type is {shorten(repr(kind))}, mpool supports only LORA")
    for key, neutral in _NEUTRAL.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise Unsupported(f"{config.file}: {key} is {describe(value)}, mpool supports only adapters without it"
                              + (f": {_WHY[key]}" if key in _WHY else ""),
                              hint="Merge the adapter into the model with merge_and_unload of PEFT")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise Unsupported(f"{config.file}: init_lora_weights is {shorten(repr(start))}, which also changes the weights "
                          "of the model", hint="Save the adapter with path_initial_model_for_weight_conversion of PEFT")


def _alpha(config: Fields, module: str) -> tuple[str, float]:
    """Return the name of the key with a module's alpha, and its value."""
    pattern = config.section("alpha_pattern", None)
    if pattern is not None and len(pattern.values) > MAX_PATTERNS:
        raise LimitError(f"{pattern.file}: alpha_pattern has {len(pattern.values):,} entries, mpool supports at most "
                         f"{MAX_PATTERNS:,}")
    for key in pattern if pattern is not None else ():
        if not re.fullmatch(r"[\w.-]+", key):
            raise Unsupported(f"{pattern.file}: alpha_pattern has the regular expression {shorten(repr(key))}, mpool "
                              "supports only names of modules")
        if module == key or module.endswith("." + key):
            return pattern.name(key), pattern.number(key)
    return "lora_alpha", config.number("lora_alpha")


def _without_prefix(module: str, row: Architecture, modules: Mapping[str, object]) -> str:
    """Return the name of a module without the prefix of the family."""
    for prefix in row.prefixes:
        if prefix and module.removeprefix(prefix) in modules:
            return module.removeprefix(prefix)
    return module


def _refuse_peft_tensor(path: str, name: str) -> NoReturn:
    kinds = ((".lora_magnitude_vector", "the magnitudes of DoRA"), (".lora_embedding_", "an update of an embedding"),
             (".modules_to_save", "a module that was trained as a whole"), (".bias", "a trained bias"))
    kind = next((words for part, words in kinds if part in name), "not a matrix of a linear layer")
    raise Unsupported(f"{path}: tensor {shorten(name)} is {kind}; mpool supports only lora_A and lora_B of linear "
                      "layers", hint="Merge the adapter into the model with merge_and_unload of PEFT")


# ---- GGUF ----------------------------------------------------------------------------------------------------------

def _read_gguf_adapter(path: str, row: Architecture, base: ModelDescription) -> Adapter:
    raw, tensors, files = read_gguf(path)
    table = Fields(raw, file=path)
    kind = table.str("general.type", "model")
    if kind != "adapter":
        table.fail("general.type", kind, "adapter", hint="The file is a model or a projector, not an adapter")
    method = table.str("adapter.type")
    if method != "lora":
        raise Unsupported(f"{path}: adapter.type is {shorten(repr(method))}, mpool supports only lora")
    name = table.str("general.architecture")
    if name not in row.in_gguf:
        table.fail("general.architecture", name, f"{' or '.join(row.in_gguf) or 'none'}, the architecture of the model")
    if "adapter.alora.invocation_tokens" in table:
        raise Unsupported(f"{path}: the adapter is an activated LoRA (adapter.alora.invocation_tokens), which mpool "
                          "does not support")
    alpha = table.number("adapter.lora.alpha")
    modules = _modules(row, base, True)
    entries: dict[str, dict[str, TensorEntry]] = {}
    for entry in tensors:
        found = _GGUF_NAME.fullmatch(entry.name)
        if found is None:
            raise Unsupported(f"{path}: tensor {shorten(entry.name)} is not a matrix of a linear layer; mpool supports "
                              "only tensors that end in .weight.lora_a and .weight.lora_b")
        if found["module"] not in modules:
            _unknown(path, found["module"], modules)
        entries.setdefault(found["module"], {})[found["side"]] = entry
    updates: list[LowRank] = []
    heads = _reordered_heads(row, base, True)
    for module, pair in _pairs(path, entries):
        scale = _checked_scale(path, "adapter.lora.alpha", alpha, alpha / pair.a.shape[0])
        updates += _split(path, pair, modules[module], scale, heads)
    return Adapter(tuple(os.path.abspath(file) for file in files), tuple(updates))
