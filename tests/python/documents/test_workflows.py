"""The linters of tools/lint_deploy.py accept the workflows, the container file and the Kubernetes manifest."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / ".github" / "workflows").is_dir():
    pytest.skip("needs the repository", allow_module_level=True)


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINT = load_tool("lint_deploy")


@pytest.mark.parametrize("command", LINT.LINTERS, ids=lambda command: command[0])
def test_linter(command: list[str]) -> None:
    if command[0] in LINT.missing():
        pytest.skip(f"{command[0]} is not installed: pip install '.[lint]'")
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, env={"PATH": LINT.path()})
    assert done.returncode == 0, done.stdout + done.stderr
