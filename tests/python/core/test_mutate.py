"""The tool for mutation testing (tests/mutate.py): its operators, choice, verdicts and intervals, on tiny programs."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "tests" / "mutate.py").exists() or not (ROOT / ".git").exists():
    pytest.skip("needs a git checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tests"))

from mutation import (  # noqa: E402
    blocks,
    cbuild,
    coperators,
    coverage_map,
    judge,
    process,
    pycover,
    pyoperators,
    report,
    session,
    tree,
)
from mutation.mutant import Mutant, sample  # noqa: E402

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


def test_the_pragma_of_a_loop_is_no_statement() -> None:
    """The tool changes statements of such a loop one by one, and no size of an array."""
    source = ("void copy(int n, int *to) {\n    VEC_UNROLL\n    for (int i = 0; i < n; i++) {\n"
              "        int low[4], high[4];\n        low[i] = high[i];\n        to[i] = low[i];\n    }\n}\n")
    mutants = coperators.mutants("csrc/tiny.c", source)
    assert [mutant.line for mutant in mutants if mutant.operator == "delete"] == [5, 6]
    assert not [mutant for mutant in mutants if mutant.line == 4]


def test_python_operators() -> None:
    """The tool makes exactly these mutants: none of an annotation, docstring, assertion, log record or error."""
    mutants = pyoperators.mutants("mpool/tiny.py", PY_SOURCE)
    assert _shown(mutants) == PY_MUTANTS
    assert {mutant.line for mutant in mutants if mutant.operator == "delete"} == {12, 14}


def test_mutants_of_python_are_programs() -> None:
    """At most 1 % of 200 mutants of the package do not compile."""
    files = [path for path in sorted((ROOT / "mpool").rglob("*.py")) if path.stat().st_size < 30000][::4]
    mutants = [mutant for path in files
               for mutant in pyoperators.mutants(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))]
    chosen = sample(mutants, 200, 3)
    wrong = []
    for mutant in chosen:
        try:
            ast.parse(mutant.apply((ROOT / mutant.file).read_text(encoding="utf-8")))
        except SyntaxError:
            wrong.append(mutant)
    assert len(wrong) <= 2, wrong


def test_every_c_file_is_mutated() -> None:
    """Brackets of every source match; tables do not outweigh code."""
    said: list[str] = []
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "csrc/files").rglob("*.c"))]
    counts = {file: len(session.mutants_of(file, said.append)) for file in [*files, "csrc/kernels/iq_grids.c"]}
    assert not said
    assert min(counts.values()) > 5
    lines = {mutant.line for mutant in session.mutants_of("csrc/kernels/iq_grids.c", said.append)}
    assert len(lines) < 150, "a table of constants has more mutants than a file of code"


def test_sample_is_seeded_and_spread() -> None:
    """A smaller sample begins a larger one; no line gives a second mutant before every line has given one."""
    mutants = coperators.mutants("csrc/tiny.c", C_SOURCE)
    lines = {mutant.line for mutant in mutants}
    chosen = sample(mutants, len(lines), 5)
    assert {mutant.line for mutant in chosen} == lines
    assert chosen == sample(reversed(mutants), None, 5)[:len(lines)]
    assert chosen != sample(mutants, len(lines), 6)
    assert sorted(sample(mutants, None, 5), key=repr) == sorted(mutants, key=repr)


@pytest.mark.parametrize(("hits", "total", "low", "high"), [
    (0, 0, 0.0, 1.0), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (9, 10, 0.5958, 0.9821), (372, 400, 0.9007, 0.9511),
])
def test_wilson(hits: int, total: int, low: float, high: float) -> None:
    """Values of the Wilson score interval."""
    assert report.wilson(hits, total) == pytest.approx((low, high), abs=2e-4)


def test_table_counts() -> None:
    """Timeouts are detected, uncovered mutants survive, and the others do not count."""
    statuses = [*["killed"] * 5, *["timeout"] * 2, "survived", "uncovered", "uncovered", "same", "stillborn",
                "equivalent"]
    rows = [{"file": "csrc/files/a.c", "status": status} for status in statuses]
    line = next(line for line in report.table(rows).splitlines() if "`csrc/files`" in line)
    assert [cell.strip() for cell in line.split("|")[2:10]] == ["10", "5", "2", "1", "2", "1", "1", "1"]
    assert "| 70.0 % | 39.7 to 89.2 % |" in line


def test_table_has_every_folder_of_the_core() -> None:
    """A folder without a group would end a run without its table."""
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "csrc").rglob("*.c"))]
    found = report.table({"file": file, "status": "killed"} for file in files)
    assert all(f"`{folder}`" in found for folder in {"/".join(file.split("/")[:2]) for file in files})


def test_coverage_map(tmp_path: Path) -> None:
    """Cheap tests come first, a continued line has the tests of its first line, and a saved map is read back."""
    made = coverage_map.CoverageMap()
    slow, quick = made.test("c:slow", 2.0), made.test("c:quick", 0.1)
    for test, line, ran in ((slow, 10, True), (quick, 10, True), (slow, 14, True), (slow, 20, False)):
        made.add(test, "csrc/a.c", line, ran)
    made.save(tmp_path / "map.json")
    merged = coverage_map.CoverageMap()
    merged.test("c:other", 1.0)
    merged.merge(coverage_map.CoverageMap.load(tmp_path / "map.json"))
    for one in (made, merged):
        assert one.covering("csrc/a.c", 10, True) == ["c:quick", "c:slow"]
        assert one.covering("csrc/a.c", 16, True) == ["c:slow"]
        assert one.covering("csrc/a.c", 20, True) == []
        assert one.covering("csrc/a.c", 3, False) == ["c:quick", "c:slow"]
        assert one.covering("csrc/a.h", 3, False, ["csrc/a.c"]) == ["c:quick", "c:slow"]


def test_coverage_of_builds_that_differ() -> None:
    """A line without code in one build takes this build's tests from the line before it."""
    merged = coverage_map.CoverageMap()
    for name, lines in (("c:one", (10, 12)), ("sim:one", (10,))):
        made = coverage_map.CoverageMap()
        for line in lines:
            made.add(made.test(name, 1.0), "csrc/a.c", line, True)
        merged.merge(made)
    assert merged.covering("csrc/a.c", 12, True) == ["c:one", "sim:one"]


def test_blocks_belong_to_the_lines_that_they_begin_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block begins with the call of the trace function, and a line may have several blocks."""
    rows = [("csrc/a.c", line, address) for line, address in ((1, 100), (2, 120), (3, 128), (4, 160), (9, 204))]
    monkeypatch.setattr(blocks, "_sites", lambda _: ([(100, 105), (120, 125), (140, 145), (208, 213)], [100, 200]))
    monkeypatch.setattr(blocks, "_line_table", lambda *_: rows)
    lines = blocks.Lines(Path(), [])
    ran = {site: [line for _, line in lines.ran(np.array([site // 4]))] for site in (105, 125, 145, 213)}
    assert ran == {105: [1], 125: [2, 3], 145: [3, 4], 213: [9]}


def test_listed_equivalents_exist() -> None:
    """Every row of equivalent.toml names a mutant that the tool makes today, and gives a reason."""
    said: list[str] = []
    rows = session.read_equivalent()
    files = {key[0] for key in rows}
    made = {session.key_of(mutant) for file in files for mutant in session.mutants_of(file, said.append)}
    assert not set(rows) - made
    assert all(len(reason) > 20 for reason in rows.values())


TINY_C = '''#include "tiny.h"
int clamp(int x) {
    if (x > 9)
        x = 9;
    return x;
}
int skip(int x) {
    while (x < 10)
        x += 1;
    return x;
}
int shift(int x) { return x + 3; }
int unused(int x) { return x + 1; }
int never(int x) {
#if 0
    x = x + 1;
#endif
    return x;
}
int freed(int x) {
    char *bytes = calloc((size_t)x, 1);
    x += bytes[x - 1];
    free(bytes);
    return x;
}
'''
TINY_TEST = '''#include "mp_test.h"
#include "tiny.h"
MP_TEST(tiny_clamp) { MP_CHECK_INT(clamp(20), 9); }
MP_TEST(tiny_shift) { MP_CHECK(shift(2) > 2); }
MP_TEST(tiny_never) { MP_CHECK_INT(never(3), 3); }
MP_TEST(tiny_freed) { MP_CHECK_INT(freed(3), 3); }
MP_TEST_SECONDS(tiny_skip, 1) { MP_CHECK_INT(skip(3), 10); }
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> judge.Workplace:
    """A C program of a few functions with its tests, built, also under ASan, and mapped."""
    if cbuild.build.compiler_of(cbuild.build.VARIANTS["seam"]) is None or shutil.which("objdump") is None:
        pytest.skip("gcc or objdump is not installed")
    place = tmp_path_factory.mktemp("tiny")
    header = "#include <stdlib.h>\nint clamp(int), skip(int), shift(int), unused(int), never(int), freed(int);\n"
    for name, text in {"csrc/tiny.c": TINY_C, "csrc/tiny.h": header, "tests/c/test_tiny.c": TINY_TEST}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for path in ("csrc/base/error.c", "csrc/base/error.h", "csrc/base/status.def", "csrc/base/alloc.h",
                 "tests/c/runner.c", "tests/c/mp_test.h", "tests/mutation/trace.c"):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, place / path)
    built = {}
    asan = ["-fsanitize=address"]
    for tail, more in (("", []), ("-cov", ["-g1", "-fsanitize-coverage=trace-pc"]), ("-asan", asan)):
        sources = [cbuild.Source(path) for path in ("csrc/tiny.c", "csrc/base/error.c", "tests/c/runner.c",
                                                    "tests/c/test_tiny.c")]
        if tail == "-cov":
            sources.append(cbuild.Source("tests/mutation/trace.c", ("-fno-sanitize-coverage=trace-pc",)))
        built[tail] = cbuild.Variant("core", ["-std=c11", "-D_GNU_SOURCE", "-O1", "-Icsrc", "-Itests/c", "-w", *more],
                                     place / f"objects{tail}", sources,
                                     link_flags=asan if tail == "-asan" else [])
        cbuild.compile_all(built[tail], place, 2)
    cbuild.link_runner(built[""], {}, place / "runner")
    cbuild.link_runner(built["-asan"], {}, place / "runner-asan")
    groups = coverage_map.tests_by_file(place, place / "runner")
    assert groups == {"tests/c/test_tiny.c": ["tiny_clamp", "tiny_freed", "tiny_never", "tiny_shift", "tiny_skip"]}
    (place / "cov").mkdir()
    covered = coverage_map.CTests(built["-cov"], "c", place, place / "cov", print).map(groups["tests/c/test_tiny.c"])
    return judge.Workplace(place, place / "scratch", {"core": built[""], "asan": built["-asan"]}, covered, {}, 60,
                           {"core": place / "runner", "asan": place / "runner-asan"})


@pytest.mark.builds
@pytest.mark.parametrize(("operator", "mutated", "status", "test"), [
    ("condition", "if (0 && (x > 9))", "killed", "c:tiny_clamp"),
    ("comparison", "if (x >= 9)", "same", ""),
    ("arithmetic", "int shift(int x) { return x - 3; }", "killed", "c:tiny_shift"),
    ("constant", "int shift(int x) { return x + 4; }", "survived", ""),
    ("arithmetic", "x -= 1;", "timeout", "c:tiny_skip"),
    ("arithmetic", "int unused(int x) { return x - 1; }", "uncovered", ""),
    ("arithmetic", "x = x - 1;", "same", ""),
    ("index", "x += bytes[(x - 1) + 1];", "killed", "asan:tiny_freed"),
    ("delete", ";", "killed", "asan:tiny_freed"),
])
def test_verdicts_for_c(operator: str, mutated: str, status: str, test: str, tiny: judge.Workplace) -> None:
    """Each fate, by the test that covers the line; the source is as before afterwards."""
    mutant = next(one for one in coperators.mutants("csrc/tiny.c", TINY_C)
                  if (one.operator, one.mutated) == (operator, mutated) and (mutated != ";" or "free" in one.source))
    fate = tiny.judge(mutant)
    assert (fate.status, fate.test) == (status, test)
    assert (tiny.tree / "csrc/tiny.c").read_text() == TINY_C
    if status == "survived":
        assert fate.tests == ["c:tiny_shift", "asan:tiny_shift"]


@pytest.mark.builds
def test_kernels_that_never_run_are_not_judged(tiny: judge.Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose instructions the CPU lacks is like code of another machine."""
    mutant = next(one for one in coperators.mutants("csrc/tiny.c", TINY_C) if one.mutated.startswith("if (0 &&"))
    assert tiny.judge(mutant).status == "killed"
    monkeypatch.setattr(cbuild.build, "idle_kernels", lambda: ("csrc/tiny",))
    fate = tiny.judge(mutant)
    assert fate.status == "same" and "lacks the instructions" in fate.note


@pytest.mark.builds
def test_mutants_that_do_not_compile_are_stillborn(tiny: judge.Workplace) -> None:
    """The compiler's refusal is not a test's."""
    at = TINY_C.index("x > 9")
    fate = tiny.judge(Mutant("csrc/tiny.c", at, at + 1, "y", "constant", 3, "clamp", "if (x > 9)", "if (y > 9)"))
    assert fate.status == "stillborn" and "y" in fate.note


TINY_PY = '''LIMIT = 9


def clamp(x):
    if x > LIMIT:
        x = LIMIT
    return x


def unused(x):
    return x + 1


def served(x):
    return x + 2
'''
TINY_PY_TEST = '''import subprocess
import sys
from pathlib import Path

import mpool.tiny
import pytest

SERVER = "import sys, mpool.tiny\\nfor line in sys.stdin: print(mpool.tiny.served(int(line)), flush=True)"


def test_clamp():
    assert mpool.tiny.clamp(20) == 9


def test_low():
    assert mpool.tiny.clamp(2) == 2


def test_wrong():
    assert mpool.tiny.clamp(2) == 3


def test_only_the_first_run_passes():
    assert mpool.tiny.clamp(3) == 3
    ran = Path(mpool.tiny.__file__).with_suffix(".ran")
    assert not ran.exists()
    ran.touch()


@pytest.fixture(scope="module")
def server():
    child = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield child
    child.communicate()


def test_the_server_begins(server):
    assert server.poll() is None


def test_the_server_answers(server):
    server.stdin.write("1\\n")
    server.stdin.flush()
    assert server.stdout.readline() == "3\\n"
'''


@pytest.mark.builds
def test_verdicts_for_python(tmp_path: Path) -> None:
    """Lines are mapped to tests, a test that fails anyway judges nothing, and each mutant gets its fate.

    A process that outlives the test that started it runs lines for the other tests of the file, too.
    """
    pytest.importorskip("coverage")
    place = tmp_path / "place"
    for name, text in {"mpool/__init__.py": "", "mpool/tiny.py": TINY_PY,
                       "tests/python/test_tiny.py": TINY_PY_TEST}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    shutil.copy(ROOT / "pyproject.toml", place)
    covered = pycover.map_file("tests/python/test_tiny.py", place, tmp_path / "out", print)
    one, both, once, *servers = (f"py:tests/python/test_tiny.py::test_{name}" for name in (
        "clamp", "low", "only_the_first_run_passes", "the_server_begins", "the_server_answers"))
    assert covered.covering("mpool/tiny.py", 6, True) == [one]
    assert set(covered.covering("mpool/tiny.py", 5, True)) == {one, both, once}
    assert covered.covering("mpool/tiny.py", 11, True) == []
    assert "py:tests/python/test_tiny.py" in covered.covering("mpool/tiny.py", 1, False)
    assert "py:tests/python/test_tiny.py" in covered.covering("mpool/tiny.py", 15, True)
    passing = {"tests/python/test_tiny.py": [name.removeprefix("py:") for name in (one, both, once, *servers)]}
    workplace = judge.Workplace(place, tmp_path / "scratch", {}, covered, passing, 60, {})
    made = {mutant.mutated: mutant for mutant in pyoperators.mutants("mpool/tiny.py", TINY_PY)}
    fates = {text: workplace.judge(made[text]) for text in ("if False and (x > LIMIT):", "if x >= LIMIT:", "LIMIT = 10",
                                                            "return x - 1", "return x - 2")}
    assert [fate.status for fate in fates.values()] == ["killed", "survived", "killed", "uncovered", "killed"]
    assert fates["if False and (x > LIMIT):"].test == one
    assert fates["return x - 2"].test == servers[1]
    assert (place / "mpool/tiny.py").read_text() == TINY_PY


TOGGLES = '''import mmap, sys
with open(sys.argv[1], "r+b") as file:
    trace = mmap.mmap(file.fileno(), 0)
half = len(trace) // 2
print("begun", flush=True)
while True:
    trace[half:] = bytes(half)
    trace[half:] = b"\\1" * half
'''


@pytest.mark.slow
def test_blocks_are_noted_while_others_run(tmp_path: Path) -> None:
    """A process that runs blocks meanwhile, such as a server of a fixture, does not end the session of tests."""
    (tmp_path / "test_tiny.py").write_text("import pytest\n\n\n@pytest.mark.parametrize('n', range(20))\n"
                                           "def test_nothing(n):\n    pass\n")
    trace, told = tmp_path / "trace", tmp_path / "report.json"
    blocks.new_trace(trace)
    env = tree.environment(tmp_path, tmp_path / "tmp", MPOOL_MUTATION_REPORT=str(told), MPOOL_MUTATION_TRACE=str(trace))
    with subprocess.Popen([sys.executable, "-c", TOGGLES, str(trace)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == b"begun\n"
            ended = process.run([sys.executable, *pycover.command(["test_tiny.py"])], tmp_path, env, 60, 60)
        finally:
            other.kill()
    assert ended.code == 0, ended.output
    outcomes = json.loads(told.read_text())["outcomes"]
    with np.load(f"{told}.npz") as traces:
        assert len(outcomes) == len(traces.files) == 20
        assert any(len(traces[name]) > 0 for name in traces.files)


def test_a_map_of_half_a_file_is_not_used(tmp_path: Path) -> None:
    """A file whose tests end the session has no map: the later tests would seem to cover nothing."""
    pytest.importorskip("coverage")
    name, place, said = "tests/python/test_tiny.py", tmp_path / "place", list[str]()
    (place / name).parent.mkdir(parents=True)
    (place / name).write_text("import pytest\n\n\ndef test_first():\n    pass\n\n\ndef test_second():\n"
                              "    pytest.exit('no more')\n\n\ndef test_third():\n    pass\n")
    assert pycover.map_file(name, place, tmp_path / "out", said.append) is None
    assert len(said) == 1 and "no whole report" in said[0]


@pytest.mark.slow
def test_processes_end_at_their_limits(tmp_path: Path) -> None:
    """A process that waits, and its child in a group of its own, end; one that computes ends by its CPU time."""
    script = ("import os, subprocess, sys, time; child = subprocess.Popen(['sleep', '300'], process_group=0);"
              "open('pid', 'w').write(str(child.pid)); time.sleep(300)")
    ended = process.run([sys.executable, "-c", script], tmp_path, {}, 1.0, 60)
    assert ended.late
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}/cmdline").exists() or \
        b"sleep" not in Path(f"/proc/{(tmp_path / 'pid').read_text()}/cmdline").read_bytes()
    ended = process.run([sys.executable, "-c", "while True: pass"], tmp_path, {}, 60, 0.4)
    assert not ended.late and ended.code < 0
    # The limit holds a moment after the start.
    endless = "import mmap\nwhile True: mmap.mmap(-1, 1 << 32)"
    ended = process.run([sys.executable, "-c", endless], tmp_path, {}, 60, 60, 2 * process.GIB)
    assert ended.code == 1 and "Cannot allocate memory" in ended.output


def test_results_are_kept_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted run continues: judged mutants are not judged again, and the sample is the same."""
    judged: list[str] = []

    class Fake:
        def judge(self, mutant: Mutant) -> judge.Fate:
            judged.append(mutant.id)
            if len(judged) == 4:
                raise KeyboardInterrupt
            return judge.Fate("stillborn" if mutant.operator == "swap" else "killed", "c:test")

    monkeypatch.setattr(session.Session, "prepare", lambda self, files: [Fake()])

    def run() -> list[dict[str, object]]:
        made = session.Session(tmp_path, 1, ["c"], [], 60, lambda line: None)
        return made.run(["csrc/files/bpe.c"], 8, 11)

    with pytest.raises(KeyboardInterrupt):
        run()
    rows = run()
    running = session.Session(tmp_path, 1, ["c"], [], 60, print)
    with pytest.raises(ValueError, match="must not be in use"):
        session.Session(tmp_path, 1, ["c"], [], 60, print)
    del running
    assert sum(row["status"] in judge.COUNTED for row in rows) == 8
    assert len(judged) == len(rows) + 1 and len(set(judged)) == len(rows)
    assert rows == run() and len(judged) == len(rows) + 1
    kept = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(kept) == len(rows)


def test_a_slow_mutant_delays_only_its_own_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first mutant ends after three others, which the second job judges meanwhile."""
    judged: list[str] = []
    three, lock = threading.Event(), threading.Lock()

    class Fake:
        def judge(self, mutant: Mutant) -> judge.Fate:
            with lock:
                judged.append(mutant.id)
                if len(judged) == 4:
                    three.set()
                first = len(judged) == 1
            assert not first or three.wait(30)
            return judge.Fate("killed", "c:test")

    monkeypatch.setattr(session.Session, "prepare", lambda self, files: [Fake(), Fake()])
    rows = session.Session(tmp_path, 2, ["c"], [], 60, lambda line: None).run(["csrc/files/bpe.c"], 6, 11)
    assert len(rows) == 6
    assert {row["id"] for row in rows} <= set(judged)  # a job without work may judge a seventh, which is not counted


def test_only_names_folders_and_files() -> None:
    """`--only` takes a folder of csrc or mpool by name, a path, or a file; anything else is refused."""
    files = tree.project_files()
    assert session.files_of(files, ["files"]) == session.files_of(files, ["csrc/files/"])
    assert all(name.startswith("mpool/server/") for name in session.files_of(files, ["server"]))
    assert session.files_of(files, ["csrc/files/cursor.c"]) == ["csrc/files/cursor.c"]
    assert not any("/arm/" in name for name in session.files_of(files, []))
    with pytest.raises(ValueError, match="got 'nowhere'"):
        session.files_of(files, ["nowhere"])
