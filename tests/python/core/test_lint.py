"""ruff and mypy accept the sources, with the settings of pyproject.toml."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

if not (ROOT / "pyproject.toml").exists():
    pytest.skip("needs the sources of the project", allow_module_level=True)


def check(*command: str) -> None:
    if importlib.util.find_spec(command[0]) is None:
        pytest.skip(f"needs {command[0]}: pip install '.[test]'")
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    """No unused or undefined name, no syntax of a later Python, no line of more than 120 columns, in any folder."""
    check("ruff", "check", "--no-cache", ".")


@pytest.mark.builds
def test_mypy(tmp_path: Path) -> None:
    check("mypy", "--cache-dir", str(tmp_path))
