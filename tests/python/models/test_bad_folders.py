"""Bad values in every JSON file of model folders, and tensors that do not fit, with the whole text of each error.

``bad_folders.json`` has the outcomes. This writes them again, after a reader or a text changed on purpose:

    PYTHONPATH=tests/python/helpers python tests/python/models/test_bad_folders.py
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import badvalues
from mpool.models.formats.hf_folder import describe_folder
from test_hf_embedding import KINDS

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "corpus"))
import make_safetensors as make  # noqa: E402

SNAPSHOT = Path(__file__).with_name("bad_folders.json")


def _files(kind: str) -> dict[str, Any]:
    """Return the files of a folder, with tensors as ``{"tensors": {name: (type, shape)}}``."""
    found = make.base() if kind == "dense" else KINDS[kind]()
    return json.loads(json.dumps({
        name: {"tensors": {tensor: ("F32", shape) for tensor, shape in value.items()}}
        if name.endswith(".safetensors") and "tensors" not in value else value for name, value in found.items()}))


class Folder:
    """A folder of which one file at a time is changed."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.files = path / "m", _files(kind)
        make.write_folder(str(self.path), self.files)

    def reader(self, name: str) -> Callable[[Any], Any]:
        """Return a function that describes the folder with another value in a file."""
        def read(value: Any) -> Any:
            try:
                make.write_folder(str(self.path), {name: value})
                return describe_folder(str(self.path), key="k", ref="r")
            finally:
                make.write_folder(str(self.path), {name: self.files[name]})
        return read

    def tables(self) -> Iterator[tuple[str, dict[str, dict[str, str]]]]:
        hidden = {f"{self.path}/": "", str(self.path): "folder"}
        for name, base in self.files.items():
            if name in ("config.json", "document/config.json", "tokenizer.json", "document/tokenizer.json"):
                continue  # other tests: test_bad_values.py, and those of tokenizers
            if name.endswith(".safetensors"):
                yield name, dict(_tensors(self.reader(name), base, hidden))
            else:
                yield name, badvalues.table(self.reader(name), base, name=name, hidden=hidden)


def _tensors(read: Callable[[Any], Any], base: Any, hidden: dict[str, str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the outcomes of a tensor that is missing, has another shape or type, or is not part of the model."""
    names = [name for name in base["tensors"] if "encoder.layer" not in name or "0.attention.self.query" in name]
    for name in [*names, "other.weight"]:
        dtype, shape = base["tensors"].get(name, ("F32", [2, 3]))
        changes: dict[str, Any] = {"longer": (dtype, [shape[0] + 1, *shape[1:]]), "deeper": (dtype, [*shape, 1]),
                                   "empty": (dtype, [0, *shape[1:]]), "I64": ("I64", shape), "F64": ("F64", shape)}
        row: dict[str, str] = {}
        for change, value in {"missing": None, **changes}.items():
            tensors = {**base["tensors"], name: value}
            if value is None:
                del tensors[name]
                if name == "other.weight":
                    continue
            row[change] = badvalues.outcome(read, {"tensors": tensors}, hidden)[0] or "accepted"
        yield name, row


def found(kind: str, path: Path) -> dict[str, Any]:
    return {f"{name}: {place}": row for name, rows in Folder(path, kind).tables() for place, row in rows.items()}


@pytest.mark.parametrize("kind", ["dense", *KINDS])
def test_outcomes_are_the_committed_ones(kind: str, tmp_path: Path) -> None:
    badvalues.compare(json.loads(SNAPSHOT.read_text("utf-8"))[kind], found(kind, tmp_path))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        SNAPSHOT.write_text(badvalues.written({kind: found(kind, Path(folder) / kind) for kind in ("dense", *KINDS)}),
                            "utf-8")
