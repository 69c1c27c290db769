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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from ...errors import FileError, FormatError, LimitError, Unsupported
from ..families.rows import Architecture, TaskAdapters
from ..families.table import ROWS
from ..fields import Fields, describe
from ..files import Folder, check_links, check_stamps, collect_stamps, model_folders, refuse_missing_weights
from ..json_strict import shorten
from ..layout import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ..spec import Adapter, LowRank, ModelDescription, TensorEntry
from .gguf_tables import read_gguf
from .safetensors_header import WEIGHT_DTYPES, read_header

#: Largest rank, and largest absolute value of a scale. The C core has the same limits (csrc/models/nn/adapter.h).
MAX_RANK, MAX_SCALE = 1024, 1e6
#: Maximum number of entries of ``alpha_pattern`` and of ``rank_pattern``: each module of the adapter is compared with
#: each of them.
MAX_PATTERNS = 4096

#: Layers that adapters can update, by the names that the C core uses, without the number of the block.
LAYERS = ("shortconv.in_proj", "shortconv.out_proj", "inp_gate", "proj",
          "attn_q", "attn_k", "attn_v", "attn_output", "attn_head_gate", "ffn_gate", "ffn_up", "ffn_down",
          "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_latent_down", "ffn_latent_up",
          "attn_qkv", "attn_gate", "ssm_in", "ssm_beta", "ssm_alpha", "ssm_ba", "ssm_out")
_LAYER = re.compile(r"(?:blk\.\{\}\.)?(per_layer_model_proj|" + "|".join(map(re.escape, LAYERS)) + r")\.weight")
_PART = re.compile(r"(.+)\[(\d+)\]")
#: Architectures whose GGUF files interleave the halves of each head in the rows of queries and keys. Those of
#: nemotron_h do so although it has no RoPE: llama.cpp's converter treats its attention as Granite's.
_INTERLEAVED = frozenset({"llama", "smollm3", "granite", "granitemoe", "granitehybrid", "mistral3", "nemotron_h"})
#: Architectures whose GGUF files have other orders of value heads than folders.
_TILED = frozenset({"qwen35", "qwen35moe"})
#: Layers of Falcon-H1 whose weights GGUF files hold times factors, which they do not state.
_MULTIPLIED = ("attn_q", "attn_k", "attn_v", "attn_output", "ssm_in", "ssm_out", "ffn_gate", "ffn_down")
#: Keys of patterns without operators: see :class:`_Pattern`.
_PLAIN_KEY = re.compile(r"\^?(?:[\w.-]|\\\.)+")
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
    """The matrices of one module of an adapter, as stored in the file."""

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
    base = base.language_model
    rows = _rows_of(base)
    if not rows:
        raise Unsupported(f"mpool does not support adapters of {base.spec.architecture} models ({base.capability})")
    with check_links(), collect_stamps() as stamps:
        if os.path.isdir(place):
            found = _read_peft(Folder(place), rows, base)
        else:
            found = _read_gguf_adapter(place, rows, base)
        check_stamps(stamps)
    return replace(found, stamps=stamps)


def check_places(adapters: Iterable[tuple[str, str]], folders: Iterable[str | os.PathLike[str]]) -> None:
    """Check the files of adapters on this machine as far as it goes without the model.

    Args:
        adapters: pairs of a name and a place.
        folders: value of ``PoolConfig.model_folders``.

    Raises:
        MpoolError: as for :func:`read_adapter`.
    """
    with model_folders(folders):
        for _, place in adapters:
            if os.path.isabs(place):
                _check_place(place)


def _check_place(place: str) -> None:
    with check_links():
        if os.path.isdir(place):
            _opened_peft(Folder(place))
        else:
            _opened_gguf(place)


def read_folder(folder: Folder, base: ModelDescription) -> Adapter:
    """Read an adapter in a folder of PEFT that belongs to the model's files. Raises the errors of :func:`read_adapter`.
    """
    return _read_peft(folder, _rows_of(base), base)


def updates_of(paths: Sequence[str], found: Mapping[str, dict[str, TensorEntry]], base: ModelDescription,
               tasks: TaskAdapters) -> tuple[LowRank, ...]:
    """Return the updates of an adapter whose matrices are in the model's files.

    Args:
        paths: paths of these files.
        found: matrices ``a`` and ``b`` by the name of the module in transformers.
        base: the model.
        tasks: rank and factor of the adapter.

    Raises:
        FormatError, LimitError, Unsupported: as for :func:`read_adapter`.
    """
    rows = _rows_of(base)
    modules = _modules(rows, base, False)
    entries: dict[str, dict[str, TensorEntry]] = {}
    for name, sides in found.items():
        module = _without_prefix(name, rows, modules)
        if module not in modules:
            _unknown(paths[0], name, modules, base, False)
        entries[module] = sides
    _checked_scale(paths[0], "lora_alpha", tasks.scale * tasks.rank, tasks.scale)
    updates: list[LowRank] = []
    taken: dict[str, str] = {}
    for module, pair in pairs_of(paths, entries):
        if pair.a.shape[0] != tasks.rank:
            raise FormatError(file=paths[pair.a.file], offset=pair.a.offset, field=f"rank of {shorten(pair.a.name)}",
                              got=pair.a.shape[0], allowed=f"{tasks.rank}, the lora_rank of config.json")
        updates += _once(paths[0], taken, module,
                         _split(paths, pair, modules[module], tasks.scale, {}))
    return tuple(updates)


def supported_modules(base: ModelDescription) -> tuple[str, ...]:
    """Return the last parts of the names of the modules that adapters of PEFT can update; empty: the model cannot have
    adapters."""
    base = base.language_model
    rows = _rows_of(base)
    return tuple(_last_parts(_modules(rows, base, False))) if rows else ()


def _rows_of(base: ModelDescription) -> list[Architecture]:
    """Return the rows of the architecture table that a model may have; several if it is a GGUF file."""
    return [row for row in ROWS if row.name == base.spec.architecture and row.capability == base.capability
            and base.spec.variant in ("", next(iter(row.in_config), ""))]


# ---- layers of the model -------------------------------------------------------------------------------------------

def _modules(rows: Sequence[Architecture], base: ModelDescription, gguf: bool) -> dict[str, list[tuple[_Part, ...]]]:
    """Return the modules that adapters can update, by their names in transformers (without the prefix of the family) or
    in GGUF files. Each module has a list of choices: the layers of the core that its rows belong to. A name has several
    choices if it may stand for a fused module or for a plain one.

    Args:
        rows: rows of the architecture table that the model may have; several if it is a GGUF file.
        base: the model.
        gguf: True for the names in GGUF files.
    """
    shapes = {entry.name: entry.shape for entry in base.spec.tensors}
    layers, inner = base.spec.kv.get(f"{base.spec.architecture}.block_count"), base.spec.inner
    assert isinstance(layers, int)
    # DeBERTa: loading multiplies attn_q and attn_k into the learned queries and keys of distances, so they are fixed
    fixed: tuple[str, ...] = ("attn_q", "attn_k") if "rel_embd.weight" in shapes else ()
    if base.spec.architecture == "falcon_h1" and gguf != _is_gguf(base):
        fixed = _MULTIPLIED
    found: dict[str, list[tuple[_Part, ...]]] = {}
    fused: dict[str, dict[int, _Part]] = {}
    for tensor in dict.fromkeys(tensor for row in rows for tensor in row.tensors):
        kind = _LAYER.fullmatch(tensor.gguf)
        if kind is None or kind[1] in fixed:
            continue
        names = (tensor.stored or tensor.gguf) if gguf else tensor.hf
        for layer in range(layers if "{}" in tensor.gguf else 1):
            core = tensor.gguf.replace("{}", str(layer))
            if len(shapes.get(core, ())) != 2:
                continue
            part = _Part(core.removesuffix(".weight"), *shapes[core])
            for name in filter(None, names.split("|")):
                name = (name.removeprefix("/").replace("{}", str(layer)).replace("{g}", str(layer // inner))
                        .replace("{i}", str(layer % inner)))
                slice_ = _PART.fullmatch(name)
                if slice_ is None:
                    choices = found.setdefault(name.removesuffix(".weight"), [])
                    choices += [] if (part,) in choices else [(part,)]
                else:
                    fused.setdefault(slice_[1].removesuffix(".weight"), {})[int(slice_[2])] = part
    for name, parts in fused.items():
        found.setdefault(name, []).append(tuple(parts[i] for i in sorted(parts)))
    return found


def _is_gguf(base: ModelDescription) -> bool:
    return not base.spec.files[0].endswith(".safetensors")


def _last_parts(modules: Iterable[str]) -> dict[str, None]:
    """Return the last parts of module names, each once."""
    return dict.fromkeys(name.rpartition(".")[2] for name in modules)


def _unknown(path: str, module: str, modules: Mapping[str, object], base: ModelDescription, gguf: bool) -> NoReturn:
    supported = ", ".join(_last_parts(modules))
    hint = "Train the adapter with these modules as target_modules, or merge it into the model with merge_and_unload " \
        "of PEFT"
    if base.spec.architecture == "falcon_h1" and gguf != _is_gguf(base):
        hint = "GGUF files of Falcon-H1 hold weights times factors, which folders state separately: use a model and " \
            "an adapter of the same format"
    raise Unsupported(f"{path}: the adapter updates {shorten(module)}; in this model, mpool supports adapters of "
                      f"{supported}", hint=hint)


# ---- matrices ------------------------------------------------------------------------------------------------------

def pairs_of(paths: Sequence[str], entries: Mapping[str, dict[str, TensorEntry]],
             across: bool = False) -> Iterator[tuple[str, _Pair]]:
    """Yield the matrices of each module, after checking their dtypes, shapes and ranks.

    Args:
        paths: paths of the files.
        entries: matrices ``a`` and ``b`` by module.
        across: True for embeddings: the rank is the second dimension of ``a`` and the first one of ``b``.
    """
    if not entries:
        raise FormatError(file=paths[0], field="tensors", got="no matrix of an adapter", allowed="matrices A and B")
    for module, sides in entries.items():
        for side in "ab":
            if side not in sides:
                raise FormatError(file=paths[0], field=shorten(module), got=f"no matrix {side.upper()}",
                                  allowed="two matrices, A and B")
            entry = sides[side]
            path = paths[entry.file]
            if entry.dtype not in WEIGHT_DTYPES:
                raise Unsupported(f"{path}: tensor {shorten(entry.name)} has dtype {entry.dtype}; mpool supports "
                                  f"adapters of {', '.join(sorted(WEIGHT_DTYPES))}")
            if len(entry.shape) != 2 or min(entry.shape) < 1:
                raise FormatError(file=path, offset=entry.offset, field=f"shape of {shorten(entry.name)}",
                                  got=list(entry.shape), allowed="two positive sizes")
        a, b = sides["a"], sides["b"]
        rank, other = a.shape[across], b.shape[not across]
        if rank > MAX_RANK:
            raise LimitError(f"{paths[a.file]}: {shorten(a.name)} has the rank {rank}, mpool supports at most "
                             f"{MAX_RANK}")
        if rank != other:
            raise FormatError(file=paths[b.file], offset=b.offset, field=f"shape of {shorten(b.name)}",
                              got=list(b.shape), allowed=f"[{rank}, *]" if across else
                              f"[*, {rank}], the rank of {shorten(a.name)}")
        yield module, _Pair(a, b)


def _split(paths: Sequence[str], pair: _Pair, choices: list[tuple[_Part, ...]], scale: float,
           orders: Mapping[str, tuple[int, ...]]) -> Iterator[LowRank]:
    """Yield the update of each layer that a module consists of.

    Args:
        paths: files of the adapter.
        pair: matrices of the module.
        choices: the layers of the module, for each way in which it may be stored.
        scale: factor of the update.
        orders: see :func:`_orders`.
    """
    parts = next((parts for parts in choices if sum(part.rows for part in parts) == pair.b.shape[0]), choices[0])
    outputs, width = sum(part.rows for part in parts), parts[0].width
    for entry, allowed in ((pair.a, [pair.a.shape[0], width]), (pair.b, [outputs, pair.b.shape[1]])):
        if list(entry.shape) != allowed:
            raise FormatError(file=paths[entry.file], offset=entry.offset, field=f"shape of {shorten(entry.name)}",
                              got=list(entry.shape), allowed=allowed, hint="The adapter is one of another model")
    row_bytes, first = pair.b.nbytes // outputs, 0
    for part in parts:
        b = replace(pair.b, shape=(part.rows, pair.b.shape[1]), offset=pair.b.offset + first * row_bytes,
                    nbytes=part.rows * row_bytes)
        order = orders.get(part.name.partition(".")[2].partition(".")[2], ())
        yield LowRank(part.name, pair.a, b, scale, *(((), order) if part.name.endswith("ssm_out") else (order,)))
        first += part.rows


def _once(path: str, taken: dict[str, str], module: str, updates: Iterable[LowRank]) -> Iterator[LowRank]:
    """Yield the updates of a module. Raise FormatError if another module has updated one of the layers.

    Args:
        path: file of the adapter.
        taken: layers that modules have updated so far -> name of the module.
        module: name of the module.
        updates: updates of its layers.
    """
    for update in updates:
        other = taken.setdefault(update.layer, module)
        if other != module:
            raise FormatError(file=path, field=shorten(module), got=f"an update of a part of {shorten(other)}, which "
                              "the adapter updates as well", allowed="one update for each layer",
                              hint="Merge the adapter into the model with merge_and_unload of PEFT")
        yield update


def _checked_scale(path: str, field: str, alpha: float, scale: float) -> float:
    if not math.isfinite(scale) or scale == 0.0 or abs(scale) > MAX_SCALE:
        raise FormatError(file=path, field=field, got=describe(alpha),
                          allowed=f"a number other than 0 whose quotient by the rank is at most {MAX_SCALE:g}")
    return scale


def _orders(base: ModelDescription, gguf: bool) -> dict[str, tuple[int, ...]]:
    """Return kinds of layers -> order of an adapter's rows, or of its columns for ``ssm_out``, if the model has them in
    another order: see ``LowRank``. ``gguf``: the adapter is one of llama.cpp, not of PEFT."""
    kv, name, to_gguf = base.spec.kv, base.spec.architecture, _is_gguf(base)
    if to_gguf == gguf:
        return {}

    def size(key: str) -> int:
        found = kv[f"{name}.{key}"]
        assert isinstance(found, int)
        return found

    def order(first: int, outer: int, a: int, b: int, width: int) -> tuple[int, ...]:
        """``a`` and ``b``: numbers of blocks within each other in folders; GGUF files have them the other way round."""
        return (first, outer, a, b, width) if to_gguf else (first, outer, b, a, width)

    if name in _TILED:
        keys, heads = size("ssm.group_count"), size("ssm.time_step_rank")
        channels, width = 2 * keys * size("ssm.state_size"), size("ssm.inner_size") // heads
        values, each = (order(0, 1, keys, heads // keys, n) for n in (width, 1))
        return {"attn_qkv": (channels, *values[1:]), "attn_gate": values, "ssm_out": values, "ssm_beta": each,
                "ssm_alpha": each}
    if name not in _INTERLEAVED:
        return {}
    heads = size("attention.head_count")
    half = (size("attention.key_length") if f"{name}.attention.key_length" in kv
            else size("embedding_length") // heads) // 2
    return {"attn_q": order(0, heads, 2, half, 1), "attn_k": order(0, size("attention.head_count_kv"), 2, half, 1)}


# ---- PEFT ----------------------------------------------------------------------------------------------------------

def _opened_peft(folder: Folder) -> tuple[Fields, str]:
    """Return the configuration of an adapter, and the path of its matrices."""
    if not folder.has(ADAPTER_CONFIG):
        raise FormatError(file=folder.path, field=ADAPTER_CONFIG, got="missing",
                          allowed="a folder of PEFT, which has adapter_config.json and adapter_model.safetensors")
    config = folder.fields(ADAPTER_CONFIG)
    _check_config(config)
    if not folder.has(ADAPTER_WEIGHTS):
        refuse_missing_weights(folder, "the matrices of the adapter", field=ADAPTER_WEIGHTS)
    return config, folder.path_of(ADAPTER_WEIGHTS)


def _read_peft(folder: Folder, rows: Sequence[Architecture], base: ModelDescription) -> Adapter:
    config, path = _opened_peft(folder)
    modules = _modules(rows, base, False)
    entries: dict[str, dict[str, TensorEntry]] = {}
    names: dict[str, str] = {}
    for entry in read_header(path).tensors:
        found = _PEFT_NAME.fullmatch(entry.name)
        if found is None:
            _refuse_peft_tensor(path, entry.name)
        name, side = found["module"].removeprefix("base_model.model."), found["side"].lower()
        module = _without_prefix(name, rows, modules)
        if module not in modules:
            _unknown(path, name, modules, base, False)
        names[module] = name
        sides = entries.setdefault(module, {})
        if side in sides:
            raise FormatError(file=path, field=shorten(entry.name), got="two matrices of this layer", allowed="one")
        sides[side] = entry
    ranks, alphas = _Pattern.of(config, "rank_pattern"), _Pattern.of(config, "alpha_pattern")
    config.int("r", low=1, high=1 << 30)
    stabilised, orders = config.bool("use_rslora", False), _orders(base, False)
    updates: list[LowRank] = []
    taken: dict[str, str] = {}
    for module, pair in pairs_of((path,), entries):
        actual = pair.a.shape[0]
        table, key = ranks.find(names[module]) or (config, "r")
        rank = table.int(key, low=1, high=1 << 30)
        if actual != rank:
            raise FormatError(file=path, offset=pair.a.offset, field=f"rank of {shorten(pair.a.name)}", got=actual,
                              allowed=f"{rank}, the value of {shorten(table.name(key))} in {ADAPTER_CONFIG}")
        table, key = alphas.find(names[module]) or (config, "lora_alpha")
        alpha = table.number(key)
        scale = _checked_scale(config.file, table.name(key), alpha,
                               alpha / (math.sqrt(actual) if stabilised else actual))
        updates += _once(path, taken, names[module], _split((path,), pair, modules[module], scale, orders))
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


class _Pattern:
    """The entries of ``alpha_pattern`` or ``rank_pattern``: keys of modules -> values.

    PEFT reads a key as a regular expression for the end of a module's name, after a ``.`` or from its start, and takes
    the first key that matches (``get_pattern_key`` in peft/utils). Expressions can take exponential time, so keys have
    only characters of names here: ``.`` stands for any character, ``\\.`` for a dot, and a leading ``^`` for the start
    of the name. All matches of such a key have the same length, so each name is compared at one position.
    """

    def __init__(self, table: Fields | None) -> None:
        self.table = table
        #: Key, its length in a name, True if it stands for a whole name, and the expression without ``^``.
        self.keys: list[tuple[str, int, bool, str]] = []
        self._compiled: dict[str, re.Pattern[str]] = {}

    @classmethod
    def of(cls, config: Fields, name: str) -> _Pattern:
        """Read the section ``name`` of the configuration, which may be missing."""
        found = cls(config.section(name, None))
        if found.table is None:
            return found
        if len(found.table.values) > MAX_PATTERNS:
            raise LimitError(f"{config.file}: {name} has {len(found.table.values):,} entries, mpool supports at most "
                             f"{MAX_PATTERNS:,}")
        for key in found.table:
            if not _PLAIN_KEY.fullmatch(key):
                raise Unsupported(f"{config.file}: {name} has the regular expression {shorten(repr(key))}, mpool "
                                  "supports only names of modules, with . for any character",
                                  hint="Write one entry for each module")
            plain = key.removeprefix("^")
            found.keys.append((key, len(plain.replace("\\.", ".")), plain != key, plain))
        return found

    def find(self, module: str) -> tuple[Fields, str] | None:
        """Return the section and the first key that matches the name of a module; None: no key matches."""
        for key, length, whole, plain in self.keys:
            at = len(module) - length
            if at != 0 and (at < 0 or whole or module[at - 1] != "."):
                continue
            pattern = self._compiled.get(plain)
            if pattern is None:  # a long key takes milliseconds, and one that is longer than all names never matches
                pattern = self._compiled[plain] = re.compile(plain)
            if pattern.fullmatch(module, at):
                assert self.table is not None
                return self.table, key
        return None


#: Prefixes of the names of a decoder's modules in vision models.
_IN_VISION_MODELS = ("model.language_model.", "language_model.model.", "model.text_model.")


def _without_prefix(module: str, rows: Sequence[Architecture], modules: Mapping[str, object]) -> str:
    """Return the name of a module without the prefix of the family."""
    for prefix in (*(prefix for row in rows for prefix in row.prefixes), *_IN_VISION_MODELS):
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

def _opened_gguf(path: str) -> tuple[Fields, Any, Any]:
    """Return the metadata of an adapter, its tensors, and the paths of its files."""
    if not os.path.exists(path):
        raise FileError(f"{path}: no such file or folder", hint="Pass a folder of PEFT, or a .gguf file")
    raw, tensors, files = read_gguf(path)
    table = Fields(raw, file=path)
    kind = table.str("general.type", "model")
    if kind != "adapter":
        table.fail("general.type", kind, "adapter", hint="The file is a model or a projector, not an adapter")
    method = table.str("adapter.type")
    if method != "lora":
        raise Unsupported(f"{path}: adapter.type is {shorten(repr(method))}, mpool supports only lora")
    return table, tensors, files


def _read_gguf_adapter(path: str, rows: Sequence[Architecture], base: ModelDescription) -> Adapter:
    table, tensors, files = _opened_gguf(path)
    name = table.str("general.architecture")
    allowed = list(dict.fromkeys(one for row in rows for one in row.in_gguf))
    if name not in allowed:
        table.fail("general.architecture", name, f"{' or '.join(allowed) or 'none'}, the architecture of the model")
    if "adapter.alora.invocation_tokens" in table:
        raise Unsupported(f"{path}: the adapter is an activated LoRA (adapter.alora.invocation_tokens), which mpool "
                          "does not support")
    alpha = table.number("adapter.lora.alpha")
    modules = _modules(rows, base, True)
    entries: dict[str, dict[str, TensorEntry]] = {}
    for entry in tensors:
        found = _GGUF_NAME.fullmatch(entry.name)
        if found is None:
            raise Unsupported(f"{files[entry.file]}: tensor {shorten(entry.name)} is not a matrix of a linear layer; "
                              "mpool supports only tensors that end in .weight.lora_a and .weight.lora_b")
        if found["module"] not in modules:
            _unknown(files[entry.file], found["module"], modules, base, True)
        entries.setdefault(found["module"], {})[found["side"]] = entry
    updates: list[LowRank] = []
    taken: dict[str, str] = {}
    orders = _orders(base, True)
    for module, pair in pairs_of(files, entries):
        scale = _checked_scale(path, "adapter.lora.alpha", alpha, alpha / pair.a.shape[0])
        updates += _once(path, taken, module, _split(files, pair, modules[module], scale, orders))
    return Adapter(tuple(os.path.abspath(file) for file in files), tuple(updates))
