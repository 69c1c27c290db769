"""The markers of conftest.py: what runs by default, with --builds and with --slow."""

from __future__ import annotations

from pathlib import Path

import ownpytest
import pytest

TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.builds
def test_build(): pass

@pytest.mark.slow
def test_long(): pass

@pytest.mark.sample(4)
@pytest.mark.parametrize("right", range(5))
@pytest.mark.parametrize("left", "abcd")
def test_many(left, right): pass

@pytest.mark.sample(4)
def test_one(): pass

@pytest.mark.sample(3)
class TestMethods:
    @pytest.mark.parametrize("n", range(6))
    def test_method(self, n): pass
    def test_single(self): pass
"""


def _passed(tmp_path: Path, *arguments: str, **variables: str) -> list[str]:
    """Return the names of the planted tests that passed."""
    run = ownpytest.run(tmp_path, "-rp", *arguments, **variables)
    return [row.rpartition("::")[2] for row in run.stdout.splitlines() if row.startswith("PASSED")]


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with tests that have the markers."""
    (tmp_path / "test_planted.py").write_text(TESTS)
    return tmp_path


def _counts(names: list[str]) -> dict[str, int]:
    """Return the number of cases by test."""
    functions = [name.partition("[")[0] for name in names]
    return {name: functions.count(name) for name in functions}


@pytest.mark.parametrize("arguments, variables, also", [
    ([], {}, {}), (["--builds"], {}, {"test_build": 1}),
    ([], {"MPOOL_SLOW": "1"}, {"test_build": 1, "test_long": 1, "test_many": 20, "test_method": 6}),
    (["--slow", "-m", "slow or sample"], {}, {"test_build": 0, "test_plain": 0, "test_long": 1, "test_many": 20,
                                              "test_method": 6})], ids=str)
def test_options(planted: Path, arguments: list[str], variables: dict[str, str], also: dict[str, int]) -> None:
    expected = {"test_plain": 1, "test_many": 5, "test_one": 1, "test_method": 2, "test_single": 1} | also
    assert _counts(_passed(planted, *arguments, **variables)) == {name: n for name, n in expected.items() if n}


@pytest.mark.parametrize("arguments, expected", [
    (["-k", "b-3 or b-4"], {"test_many": 2}),
    (["-k", "not test_plain"], {"test_many": 5, "test_one": 1, "test_method": 2, "test_single": 1}),
    (["-k", "test_many", "--sample"], {"test_many": 5})], ids=str)
def test_all_cases_that_k_selects_run(planted: Path, arguments: list[str], expected: dict[str, int]) -> None:
    assert _counts(_passed(planted, *arguments)) == expected
