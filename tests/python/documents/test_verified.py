"""The table of architectures: complete, each claim with a test that stands where the row says, and the README's."""

from __future__ import annotations

import re
from pathlib import Path

from mpool import _core
from mpool.models import verified

TESTS = Path(__file__).resolve().parent.parent
README = (TESTS.parents[1] / "README.md").read_text(encoding="utf-8")


def test_every_architecture_has_one_row() -> None:
    """And no row is of an architecture that the core does not have."""
    named = [row.architecture for row in verified.ROWS]
    assert sorted(named) == sorted(name for name, _ in _core.architectures())
    assert [row[0] for row in verified.table()] == [name for name, _ in _core.architectures()]


def test_every_claim_has_a_test() -> None:
    """The file is there and has the word."""
    for row in verified.ROWS:
        assert row.tests and row.models and (row.folder or row.gguf), row
        for file, word in row.tests:
            assert word in next(TESTS.rglob(file)).read_text(encoding="utf-8"), f"{row.architecture}: {word} in {file}"
        assert not row.gguf or any(re.search("gguf|sentences|pictures", file) for file, _ in row.tests) or any(
            "gguf" in word for _, word in row.tests), row


def test_the_readme_has_the_table() -> None:
    """Row by row; a failure prints the table as it must be."""
    head = ["| architecture | for | known from | folders against | GGUF against |", "|---|---|---|---|---|"]
    expected = "\n".join(head + [
        f"| `{name}` | `{capability}` | {models} | {folder or '-'} | {gguf or '-'} |"
        for name, capability, models, folder, gguf in verified.table()])
    found = re.search(r"^<!-- made from mpool/models/verified.py.*?-->\n(.*?)\n<!-- end -->$", README,
                      re.MULTILINE | re.DOTALL)
    assert found is not None and found[1] == expected, "\n" + expected
