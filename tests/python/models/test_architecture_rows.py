"""The table of architectures: names, shapes and conditions of all tensors, and the other fields of each row.

``architecture_rows.json`` has them, one tensor a line. ``python tests/python/models/test_architecture_rows.py`` writes
the file again, after a row changed on purpose.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.models.families.rows import Architecture
from mpool.models.families.table import ROWS

SNAPSHOT = Path(__file__).with_name("architecture_rows.json")


def written(row: Architecture) -> dict[str, Any]:
    """Return the fields of a row: functions by their names, tensors as ``hf ; gguf ; shape ; when ; stored``."""
    fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
    found = {name: sorted(value) if isinstance(value, frozenset) else value.__name__ if callable(value) else value
             for name, value in fields.items() if name != "tensors"}
    return {**found, "tensors": [" ; ".join(dataclasses.astuple(tensor)) for tensor in row.tensors]}


def current() -> dict[str, Any]:
    """Return all rows by their names, those of one name in order."""
    found: dict[str, Any] = {}
    for row in ROWS:
        found.setdefault(row.name, []).append(written(row))
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


#: Text of a failure.
COMMAND = "if a row changed on purpose: python tests/python/models/test_architecture_rows.py"


@pytest.mark.parametrize("name", json.loads(SNAPSHOT.read_text("utf-8")))
def test_rows_are_the_committed_ones(name: str) -> None:
    wanted, found = json.loads(SNAPSHOT.read_text("utf-8"))[name], current()[name]
    assert len(found) == len(wanted), COMMAND
    for one, other in zip(found, wanted):
        for field in {**one, **other}:
            assert one[field] == other[field], f"{field}; {COMMAND}"


def test_all_rows_are_committed() -> None:
    assert list(current()) == list(json.loads(SNAPSHOT.read_text("utf-8"))), COMMAND


def test_the_core_has_all_rows() -> None:
    """archs.def has the name of every row."""
    assert {row.name for row in ROWS} <= {name for name, _ in mpool._core.architectures()}


def test_a_core_without_the_architecture(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says so: the file of the model is not at fault."""
    with mpool.Pool() as pool, monkeypatch.context() as patch:
        patch.setattr(mpool._core, "architectures", lambda: [("bert", "text_embedding")])
        with pytest.raises(mpool.errors.Unsupported, match="does not have the architecture llama") as error:
            pool.generate("x", str(llama), max_tokens=1)
        assert "build it again" in str(error.value.hint) and "archs.def" in str(error.value.hint)
        patch.undo()
        assert pool.generate("x", str(llama), max_tokens=1) is not None


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(current(), indent=1) + "\n", "utf-8")
