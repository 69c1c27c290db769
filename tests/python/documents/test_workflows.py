"""The workflows of .github: they parse, and name files, jobs and requirements that exist. GitHub itself does not run
here. The linters of tools/lint_deploy.py check their syntax."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
if not WORKFLOWS:
    pytest.skip("needs the repository", allow_module_level=True)
yaml = pytest.importorskip("yaml")
#: Runners of GitHub, by architecture.
RUNNERS = {"ubuntu-24.04", "ubuntu-24.04-arm"}


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(path: Path) -> dict[str, Any]:
    """Read a workflow. YAML 1.1 reads the key `on` as true."""
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    found["on"] = found.pop(True)
    return found


def runners(job: dict[str, Any]) -> set[str]:
    if job["runs-on"] == "${{ matrix.runner }}":
        return set(job["strategy"]["matrix"]["runner"])
    return {job["runs-on"]}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow(path: Path) -> None:
    """Every job has a time limit, a known runner that the head of the file names, and pinned actions; paths exist."""
    workflow, text = load(path), path.read_text(encoding="utf-8")
    assert workflow["permissions"] == {"contents": "read"} and workflow["on"]
    for job in workflow["jobs"].values():
        assert job.get("needs", next(iter(workflow["jobs"]))) in workflow["jobs"]
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file() and "workflow_call" in load(ROOT / job["uses"])["on"]
            continue
        assert runners(job) <= RUNNERS and job["timeout-minutes"] <= 120
        head = text[:text.index("name:")]
        assert all(re.search(rf"\b{runner}\b(?!-)", head) for runner in runners(job)), "the head names the runners"
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"(actions|pypa)/[\w-]+@(v\d+|release/v1)", step["uses"]), step["uses"]
            else:
                named = re.findall(r"(?<![\w./-])(?:\.ci|tools|tests|deploy)/[\w./-]+", step["run"])
                assert all((ROOT / name).is_file() for name in named), named
    for event in workflow["on"].values():
        assert all((ROOT / name).exists() for name in (event or {}).get("paths", []))


LINT = load_tool("lint_deploy")


@pytest.mark.parametrize("command", LINT.LINTERS, ids=lambda command: command[0])
def test_linter(command: list[str]) -> None:
    if command[0] in LINT.missing():
        pytest.skip(f"{command[0]} is not installed: pip install '.[lint]'")
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env={"PATH": LINT.path()})
    assert done.returncode == 0, done.stdout + done.stderr
