"""The tool for mutation testing (tests/mutate.py): its operators, on tiny programs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "tests" / "mutate.py").exists():
    pytest.skip("needs the tests' tools", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tests"))

from mutation import coperators, pyoperators  # noqa: E402
from mutation.mutant import Mutant  # noqa: E402

C_SOURCE = '''#include "tiny.h" /* a + b */
static const int table[3] = {1, 2};
struct pair {
    int both[2];
};
int twice_below(int a, int limit) {
    assert(a + 1 > 0);
    mp_log(MP_LOG_INFO, "a + %d", a + 1);
    int sizes[16], *p = sizes;
    if (a < limit)
        a = add(a, limit) + 7;
    for (int i = 0; i < 4; i++)
        p[i] = -a;
    a = a < limit ? a : limit;
    return (int)sizeof(sizes[1 + 1]) == a;
}
'''

C_MUTANTS = {
    ("constant", "static const int table[3] = {2, 2};"), ("constant", "static const int table[3] = {0, 2};"),
    ("constant", "static const int table[3] = {1, 3};"), ("constant", "static const int table[3] = {1, 1};"),
    ("condition", "if (0 && (a < limit))"), ("condition", "if (1 || (a < limit))"), ("comparison", "if (a <= limit)"),
    ("swap", "a = add(limit, a) + 7;"), ("arithmetic", "a = add(a, limit) - 7;"), ("delete", ";"),
    ("constant", "a = add(a, limit) + 8;"), ("constant", "a = add(a, limit) + 6;"),
    ("constant", "for (int i = 1; i < 4; i++)"), ("comparison", "for (int i = 0; i <= 4; i++)"),
    ("constant", "for (int i = 0; i < 5; i++)"), ("constant", "for (int i = 0; i < 3; i++)"),
    ("bound", "for (int i = 0; i < (4) - 1; i++)"), ("arithmetic", "for (int i = 0; i < 4; i--)"),
    ("index", "p[(i) + 1] = -a;"), ("arithmetic", "p[i] = a;"),
    ("comparison", "return (int)sizeof(sizes[1 + 1]) != a;"),
}

PY_SOURCE = '''"""Text with 1 + 1."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import a
LIMIT = 3
def clip(x: int, low: int = 1) -> int:
    """Return 2."""
    assert x + 1
    log.debug("x", x + 1)
    if x < low and not done:
        raise ValueError(f"{x + 1}", 4)
    notify(x, low)
    for i in range(x):
        x += y[:low]
    return x if x is None else x % 2
'''

PY_MUTANTS = {
    ("constant", "LIMIT = 4"), ("constant", "LIMIT = 2"),
    ("constant", "def clip(x: int, low: int = 2) -> int:"), ("constant", "def clip(x: int, low: int = 0) -> int:"),
    ("condition", "if False and (x < low and not done):"), ("condition", "if True or (x < low and not done):"),
    ("comparison", "if x <= low and not done:"), ("logic", "if x < low or not done:"),
    ("logic", "if x < low and done:"), ("delete", "pass"), ("swap", "notify(low, x)"),
    ("bound", "for i in range((x) - 1):"), ("arithmetic", "x -= y[:low]"), ("bound", "x += y[:(low) + 1]"),
    ("return", "return None"), ("condition", "return x if not (x is None) else x % 2"),
    ("comparison", "return x if x is not None else x % 2"), ("arithmetic", "return x if x is None else x + 2"),
    ("constant", "return x if x is None else x % 3"), ("constant", "return x if x is None else x % 1"),
}


def _shown(mutants: list[Mutant]) -> set[tuple[str, str]]:
    return {(mutant.operator, mutant.mutated) for mutant in mutants}


def test_c_operators() -> None:
    """The tool makes exactly these mutants: none of an assertion, log record, comment, string, type or declaration."""
    mutants = coperators.mutants("csrc/tiny.c", C_SOURCE)
    assert _shown(mutants) == C_MUTANTS
    assert {mutant.line for mutant in mutants if mutant.operator == "delete"} == {11, 13, 14}
    assert {mutant.function for mutant in mutants if mutant.line > 5} == {"twice_below"}
    for mutant in mutants:
        assert mutant.apply(C_SOURCE).count("\n") == C_SOURCE.count("\n")


def test_python_operators() -> None:
    """The tool makes exactly these mutants: none of an annotation, docstring, assertion, log record or error."""
    mutants = pyoperators.mutants("mpool/tiny.py", PY_SOURCE)
    assert _shown(mutants) == PY_MUTANTS
    assert {mutant.line for mutant in mutants if mutant.operator == "delete"} == {12, 14}
