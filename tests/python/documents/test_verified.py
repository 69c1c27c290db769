"""The table of verified architectures: it is complete, each row names an existing test, and the site shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mpool import _core
from mpool.models import verified

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parents[1]


def test_every_architecture_has_one_row() -> None:
    """Every architecture of the core has one row, and there are no other rows."""
    named = [row.architecture for row in verified.ROWS]
    assert sorted(named) == sorted(name for name, _ in _core.architectures())
    assert [row[0] for row in verified.table()] == [name for name, _ in _core.architectures()]


def test_a_missing_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the architecture and the file to edit."""
    monkeypatch.setattr(verified, "ROWS", verified.ROWS[1:])
    with pytest.raises(KeyError, match="verified.py has no row for bert"):
        verified.table()


def test_every_claim_has_a_test() -> None:
    """The test file of each claim exists and contains the given word."""
    for row in verified.ROWS:
        assert row.tests and row.models and (row.folder or row.gguf), row
        for file, word in row.tests:
            assert word in next(TESTS.rglob(file)).read_text(encoding="utf-8"), f"{row.architecture}: {word} in {file}"
        assert not row.gguf or any(re.search("gguf|sentences|pictures", file) for file, _ in row.tests) or any(
            "gguf" in word for _, word in row.tests), row


def test_the_site_has_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/models/families.md is generated from the rows and lists every architecture with its references."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "_ext"))
    import mpool_reference

    lines = list(mpool_reference.FamiliesTable.lines(None))  # type: ignore[arg-type]
    assert lines[2:] == [f"| `{name}` | `{capability}` | {models} | {folder} | {gguf} |"
                         for name, capability, models, folder, gguf in verified.table()]
    assert "{mpool-families}" in (ROOT / "docs" / "models" / "families.md").read_text(encoding="utf-8")
