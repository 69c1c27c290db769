"""The nightly run: its jobs exist, its summary says what ran, and a warning appears when it is out of date."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
import warnings
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import instructionsets
import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "nightly" / "nightly.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mpool_nightly", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


nightly = load()
NOW = datetime(2026, 3, 31, tzinfo=timezone.utc)

TESTS = """
import pytest
def test_good(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_bad(n): assert n == 1, "two\\nlines"
@pytest.fixture
def broken():
    import pathlib
    raise OSError(f"no disk at {pathlib.Path.home()}/x")
def test_error(broken): pass
def test_skipped(): pytest.skip("no weights")
@pytest.mark.xfail
def test_xfail(): assert False
"""


def row(days: int = 0, commit: str = "a" * 40, **more: Any) -> dict[str, Any]:
    """Return the record of a job that ran `days` days ago."""
    return {"date": (NOW - timedelta(days=days)).isoformat(), "commit": commit, "part": "", "seconds": 60,
            "environment": {}, "machine": {"cpu": "a CPU", "cores": 2, "has": ["avx2"], "lacks": [], "python": "3.11"},
            "counts": {"passed": 3}, "failures": [], "skipped": {}, "slowest": [], **more}


def test_paths_of_the_jobs_exist() -> None:
    """No path is in two jobs. The job `others` runs every slow test that is in none."""
    paths = [path for job in nightly.JOBS.values() for path in job.paths]
    assert len(paths) == len(set(paths)) and all((ROOT / path).exists() for path in paths), paths
    others = nightly.command(nightly.JOBS["others"], "", Path("out"))
    everything = "tests/python"
    assert everything in others and {f"--ignore={path}" for path in paths} - set(others) == {f"--ignore={everything}"}


def test_a_relative_path_can_be_ignored() -> None:
    """The job `others` runs the tests that no other job has: it ignores their files."""
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-n0", "--collect-only", "tests/python/schedules",
                          "--ignore=tests/python/schedules/test_injected_failures.py"], cwd=ROOT, capture_output=True,
                         text=True, timeout=300)
    assert "test_schedules.py" in run.stdout and "test_injected_failures.py" not in run.stdout, run.stdout + run.stderr


def test_junit_results_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(TESTS)
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=junit.xml", "-c",
                    "/dev/null", "--rootdir=.", "test_some.py"], cwd=tmp_path, capture_output=True, timeout=120,
                   env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    found = nightly.junit(tmp_path / "junit.xml")
    assert found["counts"] == {"passed": 2, "failed": 1, "error": 1, "skipped": 1, "xfailed": 1}
    messages = {failure["test"]: failure["message"] for failure in found["failures"]}
    assert set(messages) == {"test_some::test_bad[2]", "test_some::test_error"}
    assert "two" in messages["test_some::test_bad[2]"] and "no disk at ~/x" in messages["test_some::test_error"]
    assert found["skipped"] == {"no weights": 1} and len(found["slowest"]) == 5


def test_an_interrupted_test_is_not_counted(tmp_path: Path) -> None:
    """pytest writes it as a case without a name and without a failure."""
    (tmp_path / "junit.xml").write_text('<testsuites><testsuite><testcase classname="x" name="test_a" time="1"/>'
                                        '<testcase time="0.001"/></testsuite></testsuites>')
    found = nightly.junit(tmp_path / "junit.xml")
    assert found["counts"] == {"passed": 1} and len(found["slowest"]) == 1


def test_results_of_several_runs_make_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "a.xml", tmp_path / "b.xml"]
    for number, path in enumerate(paths, 1):
        path.write_text(f'<testsuites><testsuite time="{number}.5" timestamp="2026-03-0{number}T10:00:00+00:00">'
                        f'<testcase classname="x" name="test_{number}" time="1"/></testsuite></testsuites>')
    monkeypatch.setattr(nightly, "SUMMARY", tmp_path / "summary.json")
    monkeypatch.setattr(nightly.load, "__defaults__", (nightly.SUMMARY,))
    monkeypatch.setattr(nightly.save, "__defaults__", (nightly.SUMMARY,))
    monkeypatch.setattr(sys, "argv", ["nightly.py", "record", "flags", *map(str, paths), "--commit", "abc"])
    assert nightly.main() == 0
    found = nightly.load()["flags"]
    assert found["counts"] == {"passed": 2} and found["date"] == "2026-03-01T10:00:00+00:00"
    assert found["seconds"] == 4 and found["commit"] == "abc"


def test_results_of_the_mutation_tool_make_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.jsonl"
    results.write_text("".join(json.dumps({"status": status, "file": "csrc/a.c", "line": 3, "operator": "delete",
                                           "seconds": 1.5}) + "\n" for status in ("killed", "uncovered")))
    os.utime(results, (1003.0, 1003.0))
    monkeypatch.setattr(nightly.load, "__defaults__", (tmp_path / "summary.json",))
    monkeypatch.setattr(nightly.save, "__defaults__", (tmp_path / "summary.json",))
    monkeypatch.setattr(sys, "argv", ["nightly.py", "record", "mutation", str(results), "--commit", "abc", "--part",
                                      "--only csrc/a.c"])
    assert nightly.main() == 0
    found = nightly.load()["mutation"]
    assert found["counts"] == {"killed": 1, "uncovered": 1} and found["survivors"] == ["csrc/a.c:3 delete"]
    assert found["seconds"] == 3 and found["date"] == "1970-01-01T00:16:40+00:00"
    assert found["part"] == "--only csrc/a.c" and found["commit"] == "abc"


def test_ids_of_tests() -> None:
    assert nightly._test_id("tests.python.core.test_nightly", "test_x[a.b]") == \
        "tests/python/core/test_nightly.py::test_x[a.b]"
    assert nightly._test_id("tests.python.core.test_nightly.TestSome", "test_x") == \
        "tests/python/core/test_nightly.py::TestSome::test_x"


def test_mutants_are_counted(tmp_path: Path) -> None:
    rows = [{"status": status, "file": "csrc/a.c", "line": 3, "operator": "delete"}
            for status in ("killed", "killed", "survived")]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    found = nightly.mutants(tmp_path / "results.jsonl")
    assert found["counts"] == {"killed": 2, "survived": 1} and found["survivors"] == ["csrc/a.c:3 delete"]


@pytest.mark.parametrize("program, hours, failure", [
    ("pass", 1, "no test ran"), ("raise SystemExit(3)", 1, "exit code 3"),
    ("import time; time.sleep(60)", 0.0001, "did not end within 0.0001 hours")])
def test_a_job_without_results_is_no_success(monkeypatch: pytest.MonkeyPatch, program: str, hours: float,
                                               failure: str) -> None:
    monkeypatch.setattr(nightly, "command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setitem(nightly.JOBS, "soak", nightly.Job("some tests", ("tests/python",), hours=hours))
    found = nightly.run("soak", "")
    assert [failure["message"] for failure in found["failures"]] == [failure]
    assert found["commit"] == nightly.commit() and found["machine"]["cores"] >= 1
    assert found["machine"]["has"] == instructionsets.of_this_cpu()
    assert sorted(found["machine"]["has"] + found["machine"]["lacks"]) == sorted(
        instructionsets.known(platform.machine()))


def test_variables_of_a_job_reach_no_other_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPOOL_SOAK", raising=False)
    monkeypatch.setattr(nightly, "command", lambda *_: [
        sys.executable, "-c", "import os; raise SystemExit(os.environ.get('MPOOL_SOAK') != '900')"])
    monkeypatch.setitem(nightly.JOBS, "soak", nightly.Job("some tests", ("tests/python",), {"MPOOL_SOAK": "900"}))
    found = nightly.run("soak", "")
    assert [failure["message"] for failure in found["failures"]] == ["no test ran"]  # and no exit code
    assert found["environment"] == {"MPOOL_SOAK": "900"} and "MPOOL_SOAK" not in os.environ


def test_the_summary_keeps_jobs_that_did_not_run(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    nightly.save({"flags": row(), "soak": row(days=3)}, path)
    nightly.save({**nightly.load(path), "flags": row(days=1)}, path)
    assert list(nightly.load(path)) == ["soak", "flags"]
    assert nightly.load(path)["soak"] == row(days=3) and nightly.load(path)["flags"] == row(days=1)
    assert nightly.page(nightly.load(path)) == (tmp_path / "README.md").read_text()


def test_the_page_says_what_ran_and_what_did_not() -> None:
    shown = nightly.page({"soak": row(part="-k calm", failures=[{"test": "tests/x.py::test_y", "message": "too bad"}],
                                      skipped={"no weights": 4}, environment={"MPOOL_SOAK": "900"})})
    assert "(only `-k calm`) | 2026-03-31 | `aaaaaaaaaa` | 3 passed | 1 |" in shown
    assert "- soak: `tests/x.py::test_y`: too bad" in shown and "- soak: 4 tests: no weights" in shown
    assert "- soak: a CPU, 2 cores, Python 3.11; has avx2; lacks none; MPOOL_SOAK=900" in shown
    assert shown.count("**not run**") == len(nightly.JOBS) - 1


def test_outdated_jobs() -> None:
    everything = {name: row(days=30) for name in nightly.JOBS}
    assert nightly.outdated(everything, NOW, lambda at: at == "a" * 40) == []
    everything["soak"], everything["flags"] = row(days=31), row(commit="b" * 40 + "+")
    del everything["fuzz"]
    assert nightly.outdated(everything, NOW, lambda at: at == "a" * 40) == [
        "fuzz never ran", "soak ran 31 days ago",
        "flags ran at bbbbbbbbbb, which is no ancestor of the checked-out commit"]


@pytest.mark.parametrize("shallow, code, expected", [((0, "false"), 0, True), ((0, "false"), 1, False),
                                                     ((0, "false"), 128, False), ((0, "true"), 128, True),
                                                     ((128, ""), 128, True), ((127, ""), 127, True)])
def test_ancestors(monkeypatch: pytest.MonkeyPatch, shallow: tuple[int, str], code: int, expected: bool) -> None:
    """Without git, outside a clone, and in a clone without history, every commit passes."""
    monkeypatch.setattr(nightly, "git", lambda *arguments: shallow if "rev-parse" in arguments else (code, ""))
    assert nightly.is_ancestor("a" * 40) is expected


def test_the_committed_summary() -> None:
    """The committed page shows the summary, and every record is complete. Warns if the summary is out of date."""
    summary = nightly.load()
    assert nightly.PAGE.read_text(encoding="utf-8") == nightly.page(summary)
    assert set(summary) <= set(nightly.JOBS)
    for name, found in summary.items():
        assert set(row()) <= set(found) and found["machine"]["cpu"], name
    problems = nightly.outdated(summary, datetime.now(timezone.utc), nightly.is_ancestor)
    if problems:
        warnings.warn(pytest.PytestWarning(f"nightly run (MPOOL_NIGHTLY=1 .ci/run): {'; '.join(problems)}"),
                      stacklevel=1)
