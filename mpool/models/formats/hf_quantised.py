"""Reader of quantised weights in Hugging Face folders: AWQ, GPTQ and FP8.

Such a folder stores the weight of a linear layer as several tensors. This module checks their names, types and shapes,
and replaces them by one entry for the codes, whose dtype names the layout (``csrc/kernels/scaled.h`` describes each),
and *companions*: the scales, the zeros and the order of the groups. The core combines them when it packs the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NoReturn

import numpy as np

from ...errors import FormatError, Unsupported
from ..fields import Fields, describe
from ..files import close, open_regular, read_exactly
from ..json_strict import shorten
from ..spec import TensorEntry, Value
from .safetensors_header import WEIGHT_DTYPES

#: Dtypes of the core for the codes of a quantised weight.
DTYPES = frozenset({"AWQ4", "GPTQ4", "GPTQ4_ORDERED", "F8_E4M3"})
#: Inputs of a block of the core. All layouts require a multiple of it.
_BLOCK = 32
#: Codes in an int32.
_PACKED = 8
_MAX_GROUP = 1 << 20
_SUPPORTED = ("awq (4 bits, version gemm), gptq (4 bits), fp8 (e4m3), and compressed-tensors with FP8 weights "
              "(float-quantized)")
_HINT = "Use the unquantised safetensors model, or a quantised .gguf of it"


@dataclass(frozen=True)
class Scheme:
    """The method by which a folder's weights are quantised.

    Attributes:
        method: ``"awq"``, ``"gptq"`` or ``"fp8"``.
        file: path of the configuration, for errors.
        block: outputs and inputs that share a scale; 0: all of them.
        less_one: for GPTQ: True if each stored zero is one less than the actual zero.
        ordered: for GPTQ: True if every weight must have ``g_idx``.
    """

    method: str
    file: str
    block: tuple[int, int]
    less_one: bool = False
    ordered: bool = False

    @property
    def kv(self) -> dict[str, Value]:
        """Keys for the core."""
        return {"mpool.scale_block": list(self.block)}


@dataclass(frozen=True)
class Quantised:
    """Tensors of a quantised folder.

    Attributes:
        entries: all tensors by name; quantised weights have one entry, named ``<layer>.weight``, with a dtype of
            :data:`DTYPES`.
        companions: size in bytes and further tensors of each quantised weight, by file and offset of its codes. The
            names of the tensors are suffixes that replace ``.weight``.
    """

    entries: dict[str, TensorEntry]
    companions: dict[tuple[int, int], tuple[int, tuple[TensorEntry, ...]]] = field(default_factory=dict)


def read_scheme(config: Fields) -> Scheme | None:
    """Read ``quantization_config`` of a config.json.

    Returns:
        the scheme; None if the weights are not quantised, and for GPT-OSS, whose family reads the key itself.

    Raises:
        Unsupported: the method, or an option of it, is not supported.
        FormatError: an option has a wrong type or value.
    """
    table = config.section("quantization_config", None)
    method = None if table is None else table.str("quant_method", None)
    if table is None or method == "mxfp4" or config.get("model_type") == "gpt_oss":
        return None
    if method == "awq":
        _require(table, "bits" if "bits" in table else "w_bit", (4,), 4)
        _require(table, "version", ("gemm", "GEMM"), "gemm")
        _require(table, "zero_point", (True,), True)
        return Scheme("awq", config.file, (1, _group(table, "group_size" if "group_size" in table else "q_group_size")))
    if method == "gptq":
        _require(table, "bits", (4,), 4)
        _require(table, "pack_dtype", ("int32",), "int32")
        _require(table, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        return Scheme("gptq", config.file, (1, _group(table, "group_size")),
                      less_one=table.get("checkpoint_format") != "gptq_v2", ordered=table.bool("desc_act", False))
    if method == "fp8":
        _require(table, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        return Scheme("fp8", config.file, _block(table, "weight_block_size"))
    if method == "compressed-tensors":
        return Scheme("fp8", config.file, _compressed(table))
    raise Unsupported(f"{config.file}: {config.name('quantization_config')} states that the weights are quantised"
                      f"{f' by {shorten(method)}' if method else ''}; in safetensors files, mpool supports only "
                      f"{_SUPPORTED}", hint=_HINT)


def _require(table: Fields, key: str, allowed: tuple[object, ...], default: object) -> None:
    value = table.get(key)
    value = default if value is None else value
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise Unsupported(f"{table.file}: {table.name(key)} is {describe(value)}, mpool supports only "
                          + " or ".join(describe(one) for one in allowed), hint=_HINT)


def _group(table: Fields, key: str) -> int:
    """Return the inputs per group; 0: all inputs are one group, which the files state as -1."""
    value = int(table.int(key, 128, low=-1, high=_MAX_GROUP))
    if value == -1:
        return 0
    if value == 0 or value % _BLOCK:
        table.fail(key, value, f"-1 (one group), or a multiple of {_BLOCK}")
    return value


def _block(table: Fields, key: str) -> tuple[int, int]:
    sizes = table.list(key, None, of=int, limit=2)
    if sizes is None:
        return 0, 0
    if len(sizes) != 2 or min(sizes) < 1 or max(sizes) > _MAX_GROUP:
        table.fail(key, str(sizes), f"two sizes from 1 to {_MAX_GROUP}")
    return sizes[0], sizes[1]


def _compressed(table: Fields) -> tuple[int, int]:
    """Check a configuration of compressed-tensors, and return its block size."""
    _require(table, "format", ("float-quantized",), "float-quantized")
    groups = table.section("config_groups")
    blocks: set[tuple[int, int]] = set()
    for name in groups:
        weights = groups.section(name).section("weights")
        _require(weights, "num_bits", (8,), 8)
        _require(weights, "type", ("float",), "float")
        _require(weights, "strategy", ("tensor", "channel", "block"), "tensor")
        if weights.get("strategy") == "block":
            blocks.add(_block(weights, "block_structure"))
    if len(blocks) > 1:
        table.fail("config_groups", "different block structures", "one block structure")
    return blocks.pop() if blocks else (0, 0)


class _Reader:
    """Combines the tensors of the weights of one folder."""

    def __init__(self, scheme: Scheme, entries: Mapping[str, TensorEntry], paths: tuple[str, ...]) -> None:
        self.scheme, self.paths = scheme, paths
        self.left = dict(entries)
        self.found = Quantised({})

    def fail(self, entry: TensorEntry, part: str, got: object, allowed: object) -> NoReturn:
        """Raise the error about a property of a tensor."""
        raise FormatError(file=self.paths[entry.file], offset=entry.offset, field=f"{part} of {shorten(entry.name)}",
                          got=got, allowed=allowed)

    def take(self, name: str, by: TensorEntry) -> TensorEntry:
        """Remove a tensor that belongs to the codes ``by``, and return it."""
        if name not in self.left:
            raise FormatError(f"{self.paths[by.file]}: {shorten(name)} missing; {self.scheme.method} requires it "
                              f"beside {shorten(by.name)}", file=self.paths[by.file], field="tensors",
                              got=f"{shorten(name)} missing", allowed=f"{shorten(name)} beside {shorten(by.name)}")
        return self.left.pop(name)

    def check(self, entry: TensorEntry, dtypes: frozenset[str], shape: tuple[int, ...]) -> TensorEntry:
        """Check the dtype and the shape of a tensor, and return it."""
        if entry.dtype not in dtypes:
            self.fail(entry, "type", entry.dtype, ", ".join(sorted(dtypes)))
        if entry.shape != shape:
            self.fail(entry, "shape", list(entry.shape), list(shape))
        return entry

    def add(self, stem: str, codes: TensorEntry, dtype: str, shape: tuple[int, int],
            companions: dict[str, TensorEntry]) -> None:
        """Add a combined weight."""
        name = f"{stem}.weight"
        if name in self.left and dtype != "F8_E4M3":
            self.fail(codes, "tensors", f"both {shorten(name)} and {shorten(codes.name)}", "one of them")
        self.left[name] = replace(codes, name=name, dtype=dtype, shape=shape)
        self.found.companions[codes.file, codes.offset] = codes.nbytes, tuple(
            replace(entry, name=suffix) for suffix, entry in companions.items())

    def read(self) -> Quantised:
        """Combine all weights."""
        integers = self.scheme.method != "fp8"
        for name, entry in list(self.left.items()):
            if integers and name.endswith(".qweight"):
                self.integers(name.removesuffix(".qweight"), self.left.pop(name))
            elif not integers and name.endswith(".weight") and entry.dtype == "F8_E4M3":
                self.fp8(name.removesuffix(".weight"), entry)
        if not self.found.companions:
            raise FormatError(file=self.scheme.file, field="quantization_config.quant_method", got=self.scheme.method,
                              allowed="null, because no weight of the folder is quantised by it")
        self.found.entries.update(self.left)
        return self.found

    def integers(self, stem: str, codes: TensorEntry) -> None:
        """Combine a weight of AWQ or GPTQ."""
        awq = self.scheme.method == "awq"
        if codes.dtype != "I32" or len(codes.shape) != 2 or min(codes.shape) < 1:
            self.fail(codes, "type and shape", f"{codes.dtype} {list(codes.shape)}", "an I32 matrix")
        inputs, outputs = codes.shape
        if awq:
            outputs *= _PACKED
        else:
            inputs *= _PACKED
        if inputs % _BLOCK or outputs % _PACKED:
            self.fail(codes, "shape", f"{outputs} outputs, {inputs} inputs",
                      f"multiples of {_PACKED} outputs and of {_BLOCK} inputs")
        group = self.scheme.block[1] or inputs
        groups = -(-inputs // group)
        zeros = self.check(self.take(f"{stem}.qzeros", codes), frozenset({"I32"}), (groups, outputs // _PACKED))
        scales = self.check(self.take(f"{stem}.scales", codes), WEIGHT_DTYPES, (groups, outputs))
        companions = {".scales": scales, ".zeros_less_one" if self.scheme.less_one else ".zeros": zeros}
        dtype = "AWQ4" if awq else "GPTQ4"
        if not awq and (self.scheme.ordered or f"{stem}.g_idx" in self.left):
            order = self.check(self.take(f"{stem}.g_idx", codes), frozenset({"I32"}), (inputs,))
            if self.is_ordered(order, group, groups):
                dtype, companions[".order"] = "GPTQ4_ORDERED", order
        self.add(stem, codes, dtype, (outputs, inputs), companions)

    def is_ordered(self, order: TensorEntry, group: int, groups: int) -> bool:
        """Check the group of every input. Return False if the groups are consecutive ranges of inputs."""
        values = np.frombuffer(self.bytes_of(order), "<i4")
        wrong = np.flatnonzero((values < 0) | (values >= groups))
        if wrong.size:
            self.fail(order, "values", f"{values[wrong[0]]} at index {wrong[0]}", f"groups 0 to {groups - 1}")
        return bool((values != np.arange(len(values)) // group).any())

    def bytes_of(self, entry: TensorEntry) -> bytes:
        """Read a tensor."""
        fd, _ = open_regular(self.paths[entry.file])
        try:
            return read_exactly(fd, entry.offset, entry.nbytes, path=self.paths[entry.file])
        finally:
            close(fd)

    def fp8(self, stem: str, codes: TensorEntry) -> None:
        """Combine a weight of FP8. The scales have the shape [], [1], [outputs], [outputs, 1] or one per block."""
        if len(codes.shape) != 2 or min(codes.shape) < 1 or codes.shape[1] % _BLOCK:
            self.fail(codes, "shape", list(codes.shape), f"a matrix whose inputs are a multiple of {_BLOCK}")
        name = next((f"{stem}.{one}" for one in ("weight_scale_inv", "weight_scale") if f"{stem}.{one}" in self.left),
                    f"{stem}.weight_scale_inv")
        scales = self.take(name, codes)
        outputs, inputs = codes.shape
        shape = scales.shape if len(scales.shape) == 2 else (scales.shape or (1,)) + (1,)
        rows, columns = self.scheme.block
        allowed = [(1, 1), (outputs, 1)]
        if rows:
            allowed.append((-(-outputs // rows), -(-inputs // columns)))
        if scales.dtype not in WEIGHT_DTYPES:
            self.fail(scales, "type", scales.dtype, ", ".join(sorted(WEIGHT_DTYPES)))
        if shape not in allowed:
            self.fail(scales, "shape", list(scales.shape), " or ".join(str(list(one)) for one in allowed))
        for other in ("input_scale", "input_scale_inv", "activation_scale"):
            self.left.pop(f"{stem}.{other}", None)  # mpool chooses the scales of activations itself
        self.add(stem, codes, "F8_E4M3", (outputs, inputs), {".scales": replace(scales, shape=shape)})

    def drop_zero_bias(self, name: str) -> None:
        """Remove a bias if it is zero. Converters to GPTQ add zero biases to layers without one."""
        entry = self.left[name]
        width = {"F32": 4, "F16": 2, "BF16": 2}.get(entry.dtype)
        if width and len(entry.shape) == 1 and not np.frombuffer(self.bytes_of(entry), f"<u{width}").any():
            del self.left[name]


def combine(scheme: Scheme | None, entries: Mapping[str, TensorEntry], paths: tuple[str, ...],
            biases: frozenset[str] = frozenset()) -> Quantised:
    """Combine the tensors of each quantised weight of a folder.

    Args:
        scheme: the method; None: no weight is quantised.
        entries: the stored tensors by name.
        paths: paths of the weight files.
        biases: suffixes of the names of the biases that the architecture has. Other biases of quantised layers are
            dropped if they are zero.

    Raises:
        FormatError: a tensor is missing, or has a wrong dtype, shape or value; the message names it.
    """
    if scheme is None:
        return Quantised(dict(entries))
    reader = _Reader(scheme, entries, paths)
    if scheme.method == "gptq":
        for name in [name for name in entries if name.endswith(".qweight")]:
            bias = name.removesuffix("qweight") + "bias"
            if bias in entries and not bias.endswith(tuple(biases)):
                reader.drop_zero_bias(bias)
    return reader.read()


def is_companion(name: str) -> bool:
    """Return True for the core's name of a tensor that belongs to a quantised weight, such as its scales."""
    return name.endswith((".scales", ".zeros", ".zeros_less_one", ".order"))


def with_companions(entry: TensorEntry, found: Quantised, paths: tuple[str, ...]) -> list[TensorEntry]:
    """Return a tensor of the core and its companions, under the core's names.

    Raises:
        Unsupported: the tensor is a slice of a quantised weight, or not a weight of a linear layer.
    """
    nbytes, companions = found.companions.get((entry.file, entry.offset), (0, ()))
    if nbytes != entry.nbytes or not entry.name.endswith(".weight") or entry.name.startswith("token_embd."):
        raise Unsupported(f"{paths[entry.file]}: {shorten(entry.name)} is quantised ({entry.dtype}), which mpool does "
                          "not support for fused layers and token embeddings", hint=_HINT)
    stem = entry.name.removesuffix(".weight")
    return [entry, *(replace(one, name=stem + one.name) for one in companions)]
