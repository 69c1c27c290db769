"""The nightly run: its jobs exist, its summary says what ran, and a warning appears when it is out of date."""

from __future__ import annotations

import importlib.util
import platform
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


def test_outdated_jobs() -> None:
    everything = {name: row(days=30) for name in nightly.JOBS}
    assert nightly.outdated(everything, NOW, lambda at: at == "a" * 40) == []
    everything["soak"], everything["flags"] = row(days=31), row(commit="b" * 40 + "+")
    del everything["fuzz"]
    assert nightly.outdated(everything, NOW, lambda at: at == "a" * 40) == [
        "fuzz never ran", "soak ran 31 days ago",
        "flags ran at bbbbbbbbbb, which is no ancestor of the checked-out commit"]


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
