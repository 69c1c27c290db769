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


def test_one_case_in_n_of_a_sample(planted: Path) -> None:
    """The sample has more than one value of each parameter."""
    names = _passed(planted)
    assert _counts(names) == {"test_plain": 1, "test_many": 5, "test_one": 1, "test_method": 2, "test_single": 1}
    many = [name.partition("[")[2].rstrip("]").split("-") for name in names if name.startswith("test_many")]
    assert all(len({case[side] for case in many}) > 1 for side in (0, 1)), many


def test_a_new_case_changes_little_of_a_sample(planted: Path) -> None:
    before = set(_passed(planted))
    (planted / "test_planted.py").write_text(TESTS.replace("range(5)", "range(6)"))
    assert len(before - set(_passed(planted))) <= 2


@pytest.mark.parametrize("arguments, variables, also", [
    (["--builds"], {}, {"test_build": 1}), ([], {"MPOOL_BUILDS": "1"}, {"test_build": 1}),
    (["--slow"], {}, {"test_build": 1, "test_long": 1, "test_many": 20, "test_method": 6}),
    ([], {"MPOOL_SLOW": "1"}, {"test_build": 1, "test_long": 1, "test_many": 20, "test_method": 6}),
    (["--slow", "-m", "slow or sample"], {}, {"test_build": 0, "test_plain": 0, "test_long": 1, "test_many": 20,
                                              "test_method": 6})], ids=str)
def test_options(planted: Path, arguments: list[str], variables: dict[str, str], also: dict[str, int]) -> None:
    expected = {"test_plain": 1, "test_many": 5, "test_one": 1, "test_method": 2, "test_single": 1} | also
    assert _counts(_passed(planted, *arguments, **variables)) == {name: n for name, n in expected.items() if n}


def test_a_case_that_is_named_runs(planted: Path) -> None:
    cases = ("a-0", "b-3", "d-4")
    names = [f"test_many[{case}]" for case in cases]
    assert [_passed(planted / f"test_planted.py::{name}") for name in names] == [[name] for name in names]


@pytest.mark.parametrize("arguments, expected", [
    (["-k", "test_many"], {"test_many": 20}), (["-k", "b-3 or b-4"], {"test_many": 2}),
    (["-k", "test_method and not test_many"], {"test_method": 6}),
    (["-k", "not test_plain"], {"test_many": 5, "test_one": 1, "test_method": 2, "test_single": 1}),
    (["-k", "test_many", "--sample"], {"test_many": 5})], ids=str)
def test_all_cases_that_k_selects_run(planted: Path, arguments: list[str], expected: dict[str, int]) -> None:
    assert _counts(_passed(planted, *arguments)) == expected


def test_all_cases_that_are_named_run(planted: Path) -> None:
    """Several cases of one test, or all of them."""
    file = planted / "test_planted.py"
    names = [f"test_many[{case}]" for case in ("a-0", "b-3", "d-4")]
    assert _passed(file.with_name(f"{file.name}::{names[2]}"), *(f"{file}::{name}" for name in names[:2])) == names
    assert len(_passed(planted / "test_planted.py::test_many")) == 20
