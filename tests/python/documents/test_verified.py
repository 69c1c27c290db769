"""The table of verified architectures: it is complete, each row names an existing test, and a page shows it."""

import itertools
import subprocess
import sys
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


def stands_for(name: str, test: str) -> bool:
    """Tell whether ``test``, an id of pytest, is one of the tests that ``name`` stands for."""
    function, _, parameter = name.partition("[")
    other, _, parameters = test.partition("[")
    return function == other and (not parameter or parameter[:-1] == parameters[:-1]
                                  or parameter[:-1] in parameters[:-1].split("-"))


def collected(names: set[str], session: pytest.Session) -> set[str]:
    """Return the ids of tests relative to tests/python: those of this session and, if it lacks some of ``names``, those
    that a second pytest collects in their files."""
    found = {str(Path(item.path).relative_to(TESTS)) + "::" + item.nodeid.partition("::")[2] for item in session.items}
    missing = {name for name in names if not any(stands_for(name, test) for test in found)}
    if missing:
        files = sorted({name.partition("::")[0] for name in missing})
        run = subprocess.run([sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files],
                             capture_output=True, text=True, timeout=300, cwd=TESTS)
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
        found |= {line.removeprefix("tests/python/") for line in run.stdout.splitlines() if "::" in line}
    return found


def test_every_claim_has_a_test(request: pytest.FixtureRequest) -> None:
    """Every test that a row names exists, with this parameter. A claim about GGUF files has a test of GGUF files."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    names = {name for row in verified.ROWS for name in row.tests}
    tests = collected(names, request.session)
    for row in verified.ROWS:
        assert row.tests and row.models and (row.folder or row.gguf), row
        for name in row.tests:
            assert any(stands_for(name, test) for test in tests), f"{row.architecture}: no test {name}"
        assert not row.gguf or any("gguf" in name for name in row.tests), row
        assert row.gguf or not any("gguf" in name.lower() for name in row.tests), row
    assert not any(stands_for("parity/test_parity_tiny.py::test_decoder_layers[llama_5]", test) for test in tests)


def page_rows(text: str) -> list[str]:
    """Return the rows below the heading of the table of architectures in the text of a page."""
    lines = text.splitlines()
    start = lines.index("| architecture | capability | known from | folders tested against | GGUF tested against |") + 2
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:]))


def table_rows() -> list[str]:
    """Return the rows that the page must have."""
    return [f"| `{name}` | `{capability}` | {models} | {folder or '-'} | {gguf or '-'} |"
            for name, capability, models, folder, gguf in verified.table()]


def test_the_page_has_the_table() -> None:
    """docs/models/families.md lists every architecture with its references, in the order of the core. After a change of
    the table, copy the expected rows into the page."""
    found, expected = page_rows((ROOT / "docs" / "models" / "families.md").read_text(encoding="utf-8")), table_rows()
    assert found == expected, "docs/models/families.md must have these rows:\n" + "\n".join(expected)
