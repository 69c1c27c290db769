"""The tables of a GGUF file (keys and tensors), which the C core parses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ... import _core
from ..files import check_read, check_siblings, note
from ..spec import TensorEntry

#: Value of ``general.file_type`` -> name of the recipe, as ``llama_ftype`` of llama.cpp has it. 4 is Ollama's.
FILE_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 4: "MXFP4", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
              11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M",
              18: "Q6_K",
              19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
              26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
              37: "TQ2_0", 38: "MXFP4", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0"}


class GGUFKeys(Mapping[str, Any]):
    """The keys of a GGUF header that begin with ``prefix``, as a mapping.

    Each value is converted to Python on first access: a vocabulary has hundreds of thousands of strings, and most
    readers need few keys.
    """

    def __init__(self, header: _core.GgufFile, prefix: str = "") -> None:
        self.header, self._prefix = header, prefix
        self._names = dict.fromkeys(name for name in header.keys if name.startswith(prefix))
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            if name not in self._names:
                raise KeyError(name)
            self._values[name] = self.header.value(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def with_prefix(self, prefix: str) -> GGUFKeys:
        """Return the keys that begin with ``prefix``. Values that were already converted are shared."""
        found = GGUFKeys(self.header, self._prefix + prefix)
        found._values = {name: value for name, value in self._values.items() if name in found._names}
        return found


def read_gguf(path: str) -> tuple[Mapping[str, Any], tuple[TensorEntry, ...], tuple[str, ...]]:
    """Read the tables of a GGUF file.

    Args:
        path: the file; for a split model, its first part.

    Returns:
        The keys, the tensors of all parts, and the absolute paths of all parts.
    """
    note(path)
    table = _core.read_gguf(path)
    check_siblings(path, table.files)
    for split, read in zip(table.files, table.stamps):
        note(split)
        check_read(split, read)
    tensors = tuple(TensorEntry(name, dtype, tuple(shape), file, offset, nbytes)
                    for name, dtype, shape, file, offset, nbytes in table.tensors)
    return GGUFKeys(table), tensors, tuple(table.files)
