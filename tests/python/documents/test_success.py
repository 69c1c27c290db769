"""``python -m benchmarks success``: its criteria, its files, and a small run of the whole command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realmodels import real_path

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import options, random_gguf, record as records, success  # noqa: E402
from benchmarks.success import Criterion  # noqa: E402
from waiting import until  # noqa: E402


def test_criteria_pass_and_fail() -> None:
    """A target is an upper bound, or an exact value; without one, a criterion neither passes nor fails."""
    found = [Criterion("a", 0.9, "s", 1.0), Criterion("b", 1.0, "s", 1.0), Criterion("c", 1, "", 1, True),
             Criterion("d", 2, "", 1, True), Criterion("e", 5.0, "x")]
    assert [one.passed for one in found] == [True, False, True, False, None]
    lines = success.table(found).splitlines()
    assert lines[0].split() == ["criterion", "target", "measured", "result"]
    assert [line.split() for line in lines[1:]] == [
        ["a", "<", "1", "s", "0.9", "s", "pass"], ["b", "<", "1", "s", "1", "s", "FAIL"], ["c", "1", "1", "pass"],
        ["d", "1", "2", "FAIL"], ["e", "-", "5", "x"]]


def test_files_are_not_written_without_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             capsys: pytest.CaptureFixture[str]) -> None:
    class Usage:
        free = 21_000_000_000

    monkeypatch.setattr(success.shutil, "disk_usage", lambda folder: Usage)
    assert success.shortage([1.0, 5.0], "/x") is None
    assert "21.0 GB of free space" in (success.shortage([1.0, 20.0], "/x") or "")
    monkeypatch.setattr(sys, "argv", ["success", "--sizes", "1,20", "--folder", str(tmp_path)])
    assert success.main() == 2 and "--sizes" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("sizes", ["", "x", "0", "1,,2", "nan", "1e9", "-1"])
def test_sizes_are_checked(sizes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["success", f"--sizes={sizes}"])
    with pytest.raises(SystemExit):
        success.main()
    assert "GB from 0.01 to 1000" in capsys.readouterr().err


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts run in other working directories. Names of the catalogue and of programs on PATH stay as they are."""
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert options.path_of("later") == str(tmp_path / "later")
    assert [options.found_here(one) for one in ("model.gguf", "python3", "")] == [
        str(tmp_path / "model.gguf"), "python3", ""]
    assert options.pair_of("ik=model.gguf") == f"ik={tmp_path / 'model.gguf'}"
    assert [options.pair_of(one) for one in ("ik", "ik=python3")] == ["ik", "ik=python3"]
    seen: list[str] = []

    def refuse(sizes: list[float], folder: str) -> str:
        seen.append(folder)
        return "no space"

    monkeypatch.setattr(success, "shortage", refuse)
    monkeypatch.setattr(sys, "argv", ["success", "--folder", "files"])
    assert success.main() == 2 and seen == [str(tmp_path / "files")]


@pytest.mark.slow
def test_files_have_their_size_random_bytes_and_no_holes(tmp_path: Path) -> None:
    import mpool

    path, wanted = tmp_path / "random.gguf", 40_000_000
    size = random_gguf.write(str(path), str(real_path("smollm2")), wanted)
    stat = path.stat()
    assert size == stat.st_size and abs(size - wanted) < 2_000_000 and stat.st_blocks * 512 >= size
    data = path.read_bytes()[-20_000_000:]
    assert min(data.count(bytes([value])) for value in range(256)) > len(data) / 256 * 0.9
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        assert pool.generate("Hello", str(path), max_tokens=4, ignore_eos=True).usage.completion_tokens == 4


@pytest.mark.builds
def test_a_terminated_run_removes_its_files(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-m", "benchmarks", "success", "--sizes", "0.03", "--folder", str(tmp_path),
                           "--vocabulary", str(real_path("smollm2"))], cwd=ROOT) as process:
        until(lambda: [*tmp_path.glob("*/*.gguf")] or process.poll() is not None, 120)
        process.terminate()
    assert process.returncode == 143 and not list(tmp_path.iterdir())


@pytest.mark.builds
def test_a_small_run_measures_every_criterion(tmp_path: Path) -> None:
    """Wall times mean nothing here, so only the criteria that do not depend on the load of the machine must pass."""
    record, folder = tmp_path / "record.json", tmp_path / "files"
    folder.mkdir()
    # a relative path: the parts run in other working directories
    relative = os.path.relpath(folder, ROOT)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "success", "--sizes", "0.03", "--tokens", "8", "--words", "4", "--folder",
         relative, "--vocabulary", str(real_path("smollm2")), "--json", str(record)], cwd=ROOT, capture_output=True,
        text=True, timeout=1200)
    assert done.returncode in (0, 1) and not list(folder.iterdir()), done.stderr
    found: dict[str, Any] = json.loads(record.read_text())
    assert found["failures"] == [], done.stderr
    criteria = {one["name"]: one for one in found["criteria"]}
    exact = {name: one["passed"] for name, one in criteria.items() if one["exact"]}
    assert exact == dict.fromkeys([
        "files with a tensor beyond their end that were loaded", "workers of a model that may have two",
        "log records of 20 requests", "log records of a load", "log records of an eviction",
        "log records of a shutdown", "log records of a worker: loading, ready, evicting", "other log records"], True)
    for name in ("0.03 GB, cold cache: worker ready", "0.03 GB, warm cache: first output", "decode",
                 "decode, 8 completions over 1", "memory of the second worker", "worker: first token",
                 "worker: /health during a job, 99th percentile of 2,000 calls", "worker: cancellation, median"):
        assert name in criteria, criteria.keys()
        assert name.startswith("memory") or criteria[name]["measured"] > 0
    assert criteria["memory of the second worker"]["passed"]
    assert all(name in done.stdout for name in criteria) and done.returncode == int(
        any(one["passed"] is False for one in found["criteria"]))
    assert [problem for problem in records.problems({**found, "commit": found["commit"] or "0" * 40})
            if "commit" not in problem] == []
