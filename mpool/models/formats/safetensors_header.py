"""Reader of the headers of safetensors files. It checks every bound and reads no tensor data.

A file has 8 bytes with the header length ``n`` (little-endian), ``n`` bytes of JSON padded with spaces, and the tensor
data, which must cover the rest of the file without gaps (https://github.com/huggingface/safetensors#format). A sharded
model also has ``model.safetensors.index.json``, which maps each tensor name to a file in the same folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn

from ...errors import FormatError, LimitError, Unsupported
from .. import json_strict
from ..fields import describe
from ..files import Folder, close, open_regular, read_exactly
from ..json_strict import shorten
from ..layout import INDEX_NAME, shard_names
from ..spec import TensorEntry

#: Maximum header length, in bytes.
MAX_HEADER = 100_000_000
#: Maximum number of dimensions of a tensor.
MAX_RANK = 8
#: Maximum length of a tensor name, in characters.
MAX_NAME = 512
#: Maximum number of tensors of a file, as of a GGUF file, and of values of a header.
MAX_TENSORS = 65536
_MAX_VALUES = MAX_TENSORS * (7 + MAX_RANK)
_MAX_SPAN = (1 << 63) - 1
#: JSON nesting of a header: the object, a tensor, its two lists.
_HEADER_DEPTH = 3

#: Bits per element of every dtype of the format.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}
#: Dtypes that ``csrc/tensor/dtype.def`` has under the same name.
STORED_DTYPES = frozenset({"F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64"})
#: Dtypes that mpool supports for weights.
WEIGHT_DTYPES = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True)
class Header:
    """A parsed header.

    Attributes:
        tensors: the tensors in the order of their data.
        metadata: the file's ``__metadata__``.
    """

    tensors: tuple[TensorEntry, ...]
    metadata: dict[str, str]


class _Reader:
    """Parser of one file's header."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.raw = b""

    def fail(self, field: str, got: object, allowed: object, *, offset: int | None = None,
             name: str | None = None) -> NoReturn:
        """Raise FormatError; with ``name``, at the offset of that key in the header."""
        if name is not None:
            found = self.raw.find(b'"' + name.encode("utf-8") + b'"')
            offset = 8 + max(found, 0)
        raise FormatError(file=self.path, offset=offset, field=field, got=got, allowed=allowed)

    def load(self, file_index: int) -> Header:
        """Parse and check the header."""
        fd, size = open_regular(self.path)
        try:
            if size < 8:
                self.fail("file size", f"{size} bytes", "at least 8", offset=0)
            start = read_exactly(fd, 0, min(size, 9), path=self.path)
            length = int.from_bytes(start[:8], "little")
            if length > MAX_HEADER:
                self.fail("header length", length, f"at most {MAX_HEADER}", offset=0)
            if length > size - 8:
                self.fail("header length", length, f"at most {size - 8}, the number of bytes after it", offset=0)
            if not length or start[8:] != b"{":
                self.fail("header", describe(start[8:].decode("latin-1")) if length else "empty", "'{' first", offset=8)
            self.raw = read_exactly(fd, 8, length, path=self.path)
        finally:
            close(fd)
        text = self.raw.rstrip(b" ")
        if text[-1:] != b"}":
            self.fail("header padding", describe(text[-1:].decode("latin-1")), "spaces after the closing '}'",
                      offset=8 + len(text) - 1)
        table = json_strict.loads(text, file=self.path, offset=8, max_bytes=MAX_HEADER, max_depth=_HEADER_DEPTH,
                                  max_values=_MAX_VALUES)
        assert isinstance(table, dict)
        metadata = self.metadata(table.pop("__metadata__", {}))
        if len(table) > MAX_TENSORS:
            raise LimitError(f"{self.path}: {len(table):,} tensors, the limit is {MAX_TENSORS:,}",
                             hint="Split the file into shards")
        data = 8 + length
        entries = [self.entry(name, value, file_index, data) for name, value in table.items()]
        return Header(self.tiled(entries, data, size), metadata)

    def metadata(self, value: Any) -> dict[str, str]:
        """Check that ``__metadata__`` maps texts to texts, and return it."""
        if not isinstance(value, dict):
            self.fail("__metadata__", describe(value), "an object whose values are texts", name="__metadata__")
        for key, text in value.items():
            if not isinstance(text, str):
                self.fail(f"__metadata__.{shorten(key)}", describe(text), "text", name=key)
        return value

    def entry(self, name: str, value: Any, file_index: int, start: int) -> TensorEntry:
        """Check one tensor of the header. ``start`` is the offset of the tensor data in the file, in bytes."""
        label = shorten(name)
        if not name or len(name) > MAX_NAME or not name.isprintable():
            self.fail("tensor name", label or "empty", f"1 to {MAX_NAME} printable characters", name=name)
        if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
            got = "the keys " + ", ".join(map(shorten, value)) if isinstance(value, dict) else describe(value)
            self.fail(label, got, "an object with the keys dtype, shape and data_offsets", name=name)
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
            self.fail(f"{label}.dtype", describe(dtype), "one of " + ", ".join(DTYPE_BITS), name=name)
        if not isinstance(shape, list) or len(shape) > MAX_RANK:
            self.fail(f"{label}.shape", f"{len(shape)} dimensions" if isinstance(shape, list) else describe(shape),
                      f"a list of at most {MAX_RANK} sizes", name=name)
        if not isinstance(offsets, list) or len(offsets) != 2:
            self.fail(f"{label}.data_offsets", describe(offsets), "a list of two byte offsets", name=name)
        for field, numbers in (("shape", shape), ("data_offsets", offsets)):
            for i, number in enumerate(numbers):
                if type(number) is not int or not 0 <= number <= _MAX_SPAN:
                    self.fail(f"{label}.{field}[{i}]", describe(number), f"an integer from 0 to {_MAX_SPAN}",
                              name=name)
        begin, end = offsets
        if begin > end:
            self.fail(f"{label}.data_offsets", f"[{begin}, {end}]", "begin <= end", name=name)
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
            if bits > _MAX_SPAN * 8:
                self.fail(f"{label}.shape", shape, f"a shape of at most {_MAX_SPAN} bytes", name=name)
        if bits % 8:
            self.fail(f"{label}.shape", f"{shape} of {dtype}, {bits} bits", "a whole number of bytes", name=name)
        if bits // 8 != end - begin:
            self.fail(f"{label}.data_offsets", f"{end - begin} bytes", f"{bits // 8} bytes for {shape} of {dtype}",
                      name=name)
        return TensorEntry(name, dtype, tuple(shape), file_index, start + begin, end - begin)

    def tiled(self, entries: list[TensorEntry], start: int, size: int) -> tuple[TensorEntry, ...]:
        """Return the entries by offset, after checking that they cover the file's data without gap or overlap."""
        entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
        at, before = start, "the header"
        for entry in entries:
            if entry.offset != at:
                self.fail(f"{shorten(entry.name)}.data_offsets",
                          f"begin {entry.offset - start}, {'a gap' if entry.offset > at else 'an overlap'} after "
                          f"{before}", f"begin {at - start}", name=entry.name)
            at, before = at + entry.nbytes, shorten(entry.name)
        if at != size:
            self.fail("data_offsets", f"{at}, the end of the last tensor", f"{size}, the end of the file",
                      offset=min(at, size))
        return tuple(entries)


def read_header(path: str, file_index: int = 0) -> Header:
    """Read the header of one safetensors file.

    Args:
        path: the file; must be a regular file.
        file_index: value of :attr:`TensorEntry.file <mpool.models.spec.TensorEntry>` in the entries.

    Returns:
        The tensors in the order of their data. Offsets are in bytes from the start of the file. Dtypes have the
        format's own names, which are mpool's names too for ``STORED_DTYPES``.

    Raises:
        FormatError: the file is malformed. All checks precede any allocation that depends on the file's size.
        LimitError: the file has more than :data:`MAX_TENSORS` tensors.
    """
    return _Reader(path).load(file_index)


def read_folder(folder: Folder, stem: str = "model") -> tuple[tuple[str, ...], dict[str, TensorEntry]] | None:
    """Read the tensors of a folder's ``model.safetensors``, or of the shards listed in its index.

    Args:
        folder: the folder.
        stem: name of the file without ``.safetensors`` or ``.safetensors.index.json``.

    Returns:
        The absolute paths of the files and the tensors by name; None if the folder has neither file.

    Raises:
        FormatError: a file is malformed; the index lists a file outside the folder or a tensor that its shard does not
            have, or omits a tensor of a shard; or two shards have the same tensor.
    """
    if folder.has(f"{stem}.safetensors"):
        path = folder.path_of(f"{stem}.safetensors")
        return (path,), {entry.name: entry for entry in read_header(path).tensors}
    if folder.has(f"{stem}.safetensors.index.json"):
        return _read_shards(folder, f"{stem}.safetensors.index.json")
    return None


def _read_shards(folder: Folder, name: str = INDEX_NAME) -> tuple[tuple[str, ...], dict[str, TensorEntry]]:
    """Read the tensors of the shards listed in the index ``name``."""
    index = folder.fields(name)
    shard_of = shard_names(index)
    shards = sorted(set(shard_of.values()))
    paths: list[str] = []
    tensors: dict[str, TensorEntry] = {}
    for number, shard in enumerate(shards):
        path = folder.path_of(shard, declared_in=index.file, field="weight_map")
        if not os.path.lexists(path):
            index.fail("weight_map", f"{shorten(shard)}, which is missing", "a file in the same folder")
        paths.append(path)
        for entry in read_header(path, number).tensors:
            if entry.name in tensors:
                index.fail(f"weight_map.{shorten(entry.name)}",
                           f"in both {shards[tensors[entry.name].file]} and {shard}", "each tensor in one file")
            if shard_of.get(entry.name) != shard:
                index.fail(f"weight_map.{shorten(entry.name)}", shard_of.get(entry.name, "missing"),
                           f"{shard}, the file with the tensor")
            tensors[entry.name] = entry
    for name, shard in shard_of.items():
        if name not in tensors:
            index.fail(f"weight_map.{shorten(name)}", f"{shard}, which does not have it",
                       "the file with the tensor")
    return tuple(paths), tensors


def require_weight_dtype(entry: TensorEntry, path: str) -> None:
    """Raise Unsupported unless mpool supports the tensor's dtype for weights."""
    if entry.dtype not in WEIGHT_DTYPES:
        raise Unsupported(f"{path}: tensor {entry.name} has dtype {entry.dtype}; in safetensors files, mpool supports "
                          f"weights of {', '.join(sorted(WEIGHT_DTYPES))}",
                          hint="Save the model with one of these dtypes, or use a quantised .gguf file")
