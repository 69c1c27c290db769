"""The tables of measured rates in README.md and docs/ come from committed records, and the records are complete."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import tables  # noqa: E402


def test_documents_agree_with_their_records(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m benchmarks tables --check` finds nothing."""
    assert tables.main(["--check"]) == 0, capsys.readouterr().err
