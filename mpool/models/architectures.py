"""Supported architectures: lookup by name, checks of hyper-parameters, and mapping of tensor names and shapes.

The package ``families`` holds one row per architecture; this module applies a row to a model's files. Hyper-parameters
use GGUF's names for every file format
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#standardized-key-value-pairs); ``hf_config`` translates a
``config.json`` into these names. Letters in tensor shapes stand for sizes:

    V vocabulary   T token types   P positions   D hidden size   F feed-forward size   R rotated dimensions / 2
    Q heads x key length   K KV heads x key length   U KV heads x value length   O heads x value length
    E key length   H heads   X experts   N feed-forward size of an expert   S that of the shared experts together
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from ..errors import FormatError, LimitError, Unsupported
from .families.reading import MAX_CONTEXT, MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH
from .families.rows import Architecture
from .families.table import ROWS
from .fields import Fields
from .json_strict import shorten
from .spec import TensorEntry, Value

#: Rows by ``model_type`` of config.json, and by ``general.architecture`` of a GGUF file.
#: Several rows may share a ``model_type``; the model class or the surrounding sentence-transformers modules decide.
IN_CONFIG: dict[str, list[Architecture]] = {}
IN_GGUF: dict[str, list[Architecture]] = {}
for _row in ROWS:
    for _name in _row.in_config:
        IN_CONFIG.setdefault(_name, []).append(_row)
    for _name in _row.in_gguf:
        IN_GGUF.setdefault(_name, []).append(_row)

Row = TypeVar("Row")
_PART = re.compile(r"(.+)\[(\d+)\]")
#: Condition of a tensor that some layers have: the condition before it, and the size with the layers.
_LAYERS = re.compile(r"(.*?) ?\bin (\w+)")
#: Name of a weight with a parametrisation (torch.nn.utils.parametrize), after the name of its module.
_PARAMETRIZED = ".parametrizations.weight.original"


def find(table: Mapping[str, Row], name: str, *, file: str, field: str) -> Row:
    """Return the table's rows for an architecture. Raises FormatError if there are none."""
    row = table.get(name)
    if row is None:
        raise FormatError(file=file, field=field, got=shorten(repr(name)), allowed=", ".join(sorted(table)),
                          hint="This version of mpool does not support the architecture")
    return row


def filter_by_capability(rows: list[Architecture], embeds: bool) -> list[Architecture]:
    """Keep the embedding rows if ``embeds``, else the other rows; keep all rows if none would be left."""
    return [row for row in rows if (row.capability == "text_embedding") == embeds] or rows


def filter_by_marker(rows: list[Architecture], names: Callable[[], Iterable[str]], *, gguf: bool) -> list[Architecture]:
    """Keep the rows whose marker tensor the model has; if there is no such row, keep the rows without a marker."""
    if not any(row.marker[gguf] for row in rows):
        return rows
    tensor_names = list(names())
    found = [row for row in rows
             if row.marker[gguf] and any(name.endswith(row.marker[gguf]) for name in tensor_names)]
    return found or [row for row in rows if not row.marker[gguf]] or rows


#: Largest number of experts of a model, counted over all layers.
MAX_EXPERTS = 1 << 16


def _limited(kv: Fields, key: str, limit: int, unit: str, default: int | None = None) -> int:
    value = kv.int(key, low=1) if default is None else kv.int(key, default, low=1)
    if value > limit:
        raise LimitError(f"{kv.file}: {kv.name(key)} is {value}, mpool supports at most {limit} {unit}")
    return value


def _by_layer(table: Fields, row: Architecture, suffix: str, default: int | None = None) -> Sequence[int]:
    """Return the values of a size that may differ between the layers of a row; otherwise its one value."""
    key = f"{row.name}.{suffix}"
    found = table.get(key)
    if suffix in row.by_layer and isinstance(found, list):  # checked by the row
        return found
    return [table.int(key, low=1, high=MAX_WIDTH) if default is None else
            table.int(key, default, low=1, high=MAX_WIDTH)]


def check_layers(table: Fields, name: str) -> None:
    """Check the number of layers of a GGUF file. Call this before building any list with one value per layer.

    Raises:
        FormatError: ``block_count`` is missing or not a positive integer.
        LimitError: ``block_count`` is above ``MAX_LAYERS``.
    """
    _limited(table, f"{name}.block_count", MAX_LAYERS, "layers")


def sizes(row: Architecture, kv: Mapping[str, Value], *, file: str, token_types: int | None = None,
          own: Callable[[str], str] | None = None) -> dict[str, int]:
    """Check that the hyper-parameters of a model are consistent, and return its sizes by their letters.

    Args:
        row: architecture of the model.
        kv: hyper-parameters under GGUF's names.
        file: path named in errors.
        token_types: rows of the token type table, if the architecture has one.
        own: function that returns the file's key of a hyper-parameter, for errors; None: it is the hyper-parameter.

    Raises:
        FormatError: a key is missing, of the wrong type, out of range or inconsistent with another.
        LimitError: the model has more layers, positions, tokens or experts than mpool supports.
    """
    a = row.name
    table = Fields(kv, file=file, own=own)
    layers = _limited(table, f"{a}.block_count", MAX_LAYERS, "layers")
    context = _limited(table, f"{a}.context_length", MAX_CONTEXT, "positions")
    vocabulary = _limited(table, f"{a}.vocab_size", MAX_VOCABULARY, "tokens")
    hidden = table.int(f"{a}.embedding_length", low=1, high=MAX_WIDTH)
    widths = _by_layer(table, row, "feed_forward_length")
    heads = table.int(f"{a}.attention.head_count", low=1, high=MAX_WIDTH)
    counts = _by_layer(table, row, "attention.head_count_kv", heads)
    for kv_heads in counts:
        if heads % kv_heads:
            table.fail(f"{a}.attention.head_count_kv", kv_heads, f"a divisor of the {heads} heads")
    feed_forward, kv_heads = widths[0], counts[0]
    if f"{a}.attention.key_length" not in kv and hidden % heads:
        table.fail(f"{a}.attention.head_count", heads, f"a divisor of the embedding length {hidden}")
    key_length = table.int(f"{a}.attention.key_length", hidden // heads, low=1, high=MAX_WIDTH)
    value_length = table.int(f"{a}.attention.value_length", key_length, low=1, high=MAX_WIDTH)
    epsilon = table.number(f"{a}.{row.epsilon}", above=0.0)
    if epsilon >= 1.0:
        table.fail(f"{a}.{row.epsilon}", epsilon, "a number below 1")
    rotated = 0
    if row.rope:
        rotated = table.int(f"{a}.rope.dimension_count", key_length, low=2, high=MAX_WIDTH)
        if rotated % 2 or rotated > key_length:
            table.fail(f"{a}.rope.dimension_count", rotated,
                       f"an even number, at most {key_length} (the head dimension)")
        table.number(f"{a}.rope.freq_base", above=0.0)
    experts = table.int(f"{a}.expert_count", 0, low=0, high=4096)
    if experts * layers > MAX_EXPERTS:
        raise LimitError(f"{file}: {layers} layers of {experts} experts are {layers * experts} experts, mpool supports "
                         f"at most {MAX_EXPERTS}")
    inner = table.int(f"{a}.expert_feed_forward_length", 0, low=0, high=MAX_WIDTH)
    shared = sparse = 0
    if experts:
        table.int(f"{a}.expert_used_count", low=1, high=experts)
        shared = table.int(f"{a}.expert_shared_feed_forward_length", 0, low=0, high=MAX_WIDTH)
        first = table.int(f"{a}.leading_dense_block_count", 0, low=0, high=layers)
        dense = table.list("mpool.dense_layers", [0] * layers, of=int, limit=MAX_LAYERS)
        sparse = sum(1 << i for i in range(first, layers) if not dense[i])
    size = {"V": vocabulary, "D": hidden, "F": feed_forward, "P": context, "T": token_types or 0, "R": rotated // 2,
            "X": experts, "N": inner, "H": heads, "Q": heads * key_length, "K": kv_heads * key_length,
            "U": kv_heads * value_length,
            "O": heads * value_length, "E": key_length, "layers": layers, "S": shared, "sparse": sparse}
    return size if row.extra_sizes is None else size | row.extra_sizes(dict(kv), size, a)


class Expected(NamedTuple):
    """A tensor that a model may have.

    Attributes:
        hf: possible names in a transformers folder.
        stored: possible names in GGUF files.
        shape: expected shape, outermost dimension first.
        needed: True if the files must contain the tensor.
        when: condition from the row (:class:`~mpool.models.families.Tensor`).
    """

    hf: tuple[str, ...]
    stored: tuple[str, ...]
    shape: tuple[int, ...]
    needed: bool
    when: str


def expected(row: Architecture, size: Mapping[str, int], *, gguf: bool = False) -> dict[str, Expected]:
    """Return every tensor that a model may have, by the name that the C core uses.

    Slices of fused tensors that mpool does not load are included under names that begin with ``#``.

    Args:
        row: architecture of the model.
        size: sizes by letter, from :func:`sizes`.
        gguf: True for a GGUF file, False for a transformers folder.
    """
    table: dict[str, Expected] = {}
    for number, tensor in enumerate(row.tensors):
        when, kind = tensor.when, ""
        if layered := _LAYERS.fullmatch(when):
            when, kind = layered[1], layered[2]
        which = ~size["sparse"] if kind == "dense" else size[kind] if kind else -1  # bit i: layer i
        condition = when.partition("if ")[2].removesuffix(" above 0")
        above = when.endswith("above 0")
        if condition and not gguf and not size.get(condition, 0):
            continue
        if (gguf and (not tensor.gguf or when.startswith("folder"))) or not (gguf or tensor.hf or when):
            continue
        shape = tuple(size[letter] for letter in tensor.shape)
        names = (tensor.gguf or f"#{number}", tensor.hf, tensor.stored or tensor.gguf)
        layers = range(size["layers"]) if "{}" in tensor.gguf or "{}" in tensor.hf else range(1)
        experts = range(size.get("X", 0)) if "{x}" in tensor.hf or "{x}" in tensor.gguf else range(1)
        inner = size.get("inner", 1)
        for layer, expert in itertools.product(layers, experts):
            if (above and layer == 0) or not which >> layer & 1:
                continue
            name, hf, stored = (name.replace("{}", str(layer)).replace("{x}", str(expert))
                                .replace("{2x}", str(2 * expert)).replace("{2x+1}", str(2 * expert + 1))
                                .replace("{g}", str(layer // inner)).replace("{i}", str(layer % inner))
                                for name in names)
            needed = not when or when == "above 0" or (not gguf and when not in ("gguf", "tied"))
            table[name] = Expected(tuple(filter(None, hf.split("|"))), tuple(stored.split("|")), shape, needed, when)
    return table


def _match_tensors(left: dict[str, TensorEntry], table: Mapping[str, Expected],
                   names: Callable[[Expected], Iterable[str]], paths: Sequence[str]) -> dict[str, TensorEntry]:
    """Match the tensors of the files with the expected tensors, and check their shapes.

    A fused tensor (such as a joint QKV matrix) is split into one entry for each of its parts.

    Args:
        left: tensors by their names in the files; matched tensors are removed.
        table: expected tensors by the names that the C core uses.
        names: function that returns the possible names of an expected tensor in the files.
        paths: paths of the files, for errors.

    Returns:
        matched tensors by the names that the C core uses.
    """
    found: dict[str, TensorEntry] = {}
    parts: dict[str, dict[int, str]] = {}
    for gguf, tensor in table.items():
        for part in filter(None, map(_PART.fullmatch, names(tensor))):
            parts.setdefault(part[1], {})[int(part[2])] = gguf
    for gguf, tensor in table.items():
        for name in names(tensor):
            if name in left and (name not in parts or left[name].shape == tensor.shape):
                if gguf in found:
                    path, one, other = paths[left[name].file], shorten(found[gguf].name), shorten(name)
                    raise FormatError(f"{path}: {one} and {other} are two names of the same tensor", file=path,
                                      field="tensors", got=f"both {one} and {other}", allowed="each tensor once")
                entry = left.pop(name)
                if _without_ones(entry.shape) == _without_ones(tensor.shape):  # vectors may be matrices of one row
                    entry = replace(entry, shape=tensor.shape)
                check_shape(entry, tensor.shape, paths[entry.file])
                found[gguf] = entry
    for name, by_number in parts.items():
        if name not in left or any(gguf in found for gguf in by_number.values()):
            continue
        whole = left.pop(name)
        first = table[by_number[0]].shape
        rows = [table[by_number[i]].shape[0] for i in range(len(by_number))]
        outer = whole.shape[:-len(first)]  # the experts, each with all parts
        if len(outer) != 1 or outer[0] < 1 or sum(rows) % outer[0]:
            outer = ()
        check_shape(whole, (*outer, sum(rows) // (outer or (1,))[0], *first[1:]), paths[whole.file])
        row_bytes, offset = whole.nbytes // sum(rows), whole.offset
        for i, count in enumerate(rows):
            found[by_number[i]] = TensorEntry(f"{name}[{i}]", whole.dtype, (count, *first[1:]), whole.file, offset,
                                              count * row_bytes)
            offset += count * row_bytes
    return found


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape without dimensions of size 1. The last one stays, because types with blocks divide it."""
    return (*(size for size in shape[:-1] if size != 1), shape[-1]) if shape else shape


def check_shape(entry: TensorEntry, shape: tuple[int, ...], file: str) -> None:
    """Raise FormatError unless a tensor has the given shape."""
    if entry.shape != shape:
        raise FormatError(file=file, offset=entry.offset, field=f"shape of {shorten(entry.name)}",
                          got=list(entry.shape), allowed=list(shape),
                          hint="The tensor does not match the sizes in the model's configuration")


def _listed(names: list[str]) -> str:
    shown = ", ".join(shorten(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"


def missing(names: list[str], *, file: str, others: list[str] | None = None) -> FormatError:
    """Return the error for missing tensors.

    Args:
        names: missing tensors.
        file: path named in the error.
        others: tensors of the files that the architecture does not have; they are named in the hint.
    """
    return FormatError(f"{file}: {_listed(names)} missing; the architecture requires all its tensors",
                       file=file, field="tensors", got=f"{_listed(names)} missing",
                       allowed="every tensor of the architecture",
                       hint=f"The files hold a variant of the architecture that this version of mpool does not "
                            f"support: they also contain {_listed(others)}" if others else None)


def surplus(row: Architecture, names: list[str], *, file: str) -> FormatError:
    """Return the error for tensors that the architecture does not have."""
    return FormatError(f"{file}: unexpected tensors: {_listed(names)}, which {row.name} does not have",
                       file=file, field="tensors", got=f"{_listed(names)}, which {row.name} does not have",
                       allowed="the tensors of the architecture",
                       hint="The model is a variant of the architecture that this version of mpool does not support")


def map_folder(row: Architecture, size: Mapping[str, int], tensors: Mapping[str, TensorEntry], paths: tuple[str, ...],
               *, file: str, tied: bool, same: Callable[[TensorEntry, TensorEntry], bool]) -> list[TensorEntry]:
    """Return the tensors of a transformers folder under their GGUF names, after checking every shape.

    Args:
        row: architecture of the model.
        size: sizes by letter, from :func:`sizes`.
        tensors: tensors by their names in the files.
        paths: paths of the files.
        file: path named in errors about missing or surplus tensors.
        tied: True if the output layer shares the weights of the token embedding. If the files contain both tensors,
            they are compared, as transformers does: equal tensors are loaded once, different tensors are both loaded.
        same: function that compares two tensors byte by byte.

    Raises:
        FormatError: tensors are missing, unknown, stored under two names, or have the wrong shape.
    """
    table = expected(row, size)
    left = {_current_name(name): entry for name, entry in tensors.items()}
    if len(left) != len(tensors):
        raise FormatError(f"{file}: a tensor is stored under two names: a LayerNorm under its old names (gamma, beta) "
                          "and its new names (weight, bias), or a weight with and without .parametrizations", file=file,
                          field="tensors", got="a tensor under two names", allowed="each tensor once")
    first = next(name.partition("[")[0] for tensor in table.values() for name in tensor.hf)
    prefixes = [p for p in row.prefixes if p + first in left] or [row.prefixes[-1]]
    if len(prefixes) > 1:
        raise FormatError(f"{file}: {first} is stored under several prefixes: "
                          + ", ".join(repr(prefix) for prefix in prefixes), file=file, field="tensors",
                          got=f"{first} under several prefixes", allowed="each tensor once")

    def named(tensor: Expected) -> list[str]:
        return [name[1:] if name[0] == "/" else name if name == "lm_head.weight" else prefixes[0] + name
                for name in tensor.hf]

    head = left.get("lm_head.weight") if tied else None
    found = _match_tensors(left, table, named, paths)
    if head is not None and "output.weight" in found:
        if "token_embd.weight" not in found:
            found["token_embd.weight"] = found.pop("output.weight")
        elif same(found["output.weight"], found["token_embd.weight"]):
            del found["output.weight"]
    absent = [named(tensor)[0].partition("[")[0] for gguf, tensor in table.items()
              if gguf not in found and (tensor.needed or tensor.when == "tied" and not tied)]
    ignored = re.compile("|".join(row.ignored))
    extra = [name for name in left if not ignored.fullmatch(name)]
    if absent:
        raise missing(list(dict.fromkeys(absent)), file=file, others=extra)
    if extra:
        raise surplus(row, extra, file=file)
    return [replace(entry, name=gguf)
            for gguf, entry in sorted(found.items(), key=lambda item: (item[1].file, item[1].offset))
            if not gguf.startswith("#")]


def _current_name(name: str) -> str:
    """Return the usual name of a tensor.

    Early BERT checkpoints call the weight and bias of a norm gamma and beta. torch stores a parametrised weight as
    ``parametrizations.weight.original``.
    """
    if name.endswith(_PARAMETRIZED):
        return name[:-len(_PARAMETRIZED)] + ".weight"
    if name.endswith("LayerNorm.gamma"):
        return name[:-len("gamma")] + "weight"
    return name[:-len("beta")] + "bias" if name.endswith("LayerNorm.beta") else name


def map_gguf(row: Architecture, size: Mapping[str, int], tensors: Sequence[TensorEntry],
             paths: Sequence[str]) -> tuple[TensorEntry, ...]:
    """Return the tensors of a GGUF file under the names that the C core uses, in the order of the file.

    Args:
        row: architecture of the model.
        size: sizes by letter, from :func:`sizes`.
        tensors: tensors of the file.
        paths: paths of the files (several for a split model).

    Raises:
        FormatError: a tensor is missing, unknown or has the wrong shape.
        Unsupported: the file has MoE tensors, which mpool does not support for this architecture.
    """
    table = expected(row, size, gguf=True)
    experts = [entry.name for entry in tensors if entry.name not in table
               and re.search(r"_exps\.|\.ffn_gate_inp\.|\.\d+\.weight$", entry.name)]
    if experts:
        raise Unsupported(f"{paths[0]}: {sorted(experts)[0]} is a tensor of a mixture of experts (MoE); mpool supports "
                          f"{row.name} only without experts")
    left = {entry.name: entry for entry in tensors}
    position = {entry.name: at for at, entry in enumerate(tensors)}
    found = _match_tensors(left, table, lambda tensor: tensor.stored, paths)
    absent = [tensor.stored[0].partition("[")[0] for name, tensor in table.items()
              if name not in found and tensor.needed]
    if absent:
        raise missing(list(dict.fromkeys(absent)), file=paths[0])
    heads = ("cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias") if row.name == "bert" else ()
    extra = [name for name in left if name not in heads]
    if extra:
        raise surplus(row, sorted(extra), file=paths[0])
    order = sorted((name for name in found if not name.startswith("#")),
                   key=lambda name: (position[found[name].name.partition("[")[0]], found[name].offset))
    return tuple(replace(found[name], name=name) for name in order)
