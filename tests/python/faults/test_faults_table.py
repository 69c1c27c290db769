"""tests/FAULTS.md names the tests of each fault. Every row names a test, and every named test exists."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
TABLE = TESTS / "FAULTS.md"


def rows() -> dict[int, list[str]]:
    """Return the test names in the third column of each row, by the number of the fault."""
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and cells[0].isdigit():
            assert int(cells[0]) not in found, line
            found[int(cells[0])] = re.findall(r"`(\w+)`", cells[2])
    return found


def known() -> set[str]:
    """Return the names of all C and Python tests."""
    names: set[str] = set()
    for path in (TESTS / "c").glob("test_*.c"):
        names |= set(re.findall(r"^MP_TEST(?:_SECONDS)?\((\w+)", path.read_text(encoding="utf-8"), re.MULTILINE))
    for path in (TESTS / "python").rglob("test_*.py"):
        names |= set(re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    return names


def test_every_row_has_its_number() -> None:
    assert sorted(rows()) == list(range(1, 54))


@pytest.mark.parametrize("number", sorted(rows()))
def test_named_tests_exist(number: int) -> None:
    names = rows()[number]
    assert names and set(names) <= known(), sorted(set(names) - known())


def test_tests_named_below_the_table_exist() -> None:
    after = TABLE.read_text(encoding="utf-8").rpartition("|")[2]
    assert set(re.findall(r"`(test_\w+)`", after)) <= known()
