"""Tables of a GGUF file as the C core reads them: keys, tensors and the paths of its splits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ... import _core
from ..files import note
from ..spec import TensorEntry


class GGUFKeys(Mapping[str, Any]):
    """Keys of a GGUF header that begin with ``prefix``. Values are converted on first access: a vocabulary has hundreds
    of thousands of strings, and most readers need few of them."""

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

    def below(self, prefix: str) -> GGUFKeys:
        """The keys that begin with ``prefix``; values converted already are shared."""
        found = GGUFKeys(self.header, self._prefix + prefix)
        found._values = {name: value for name, value in self._values.items() if name in found._names}
        return found


def read_gguf(path: str) -> tuple[Mapping[str, Any], tuple[TensorEntry, ...], tuple[str, ...]]:
    """Reads the tables of a GGUF file and of its further splits: keys, tensors, absolute paths."""
    note(path)
    table = _core.read_gguf(path)
    for split in table.files:
        note(split)
    tensors = tuple(TensorEntry(name, dtype, tuple(shape), file, offset, nbytes)
                    for name, dtype, shape, file, offset, nbytes in table.tensors)
    return GGUFKeys(table), tensors, tuple(table.files)
