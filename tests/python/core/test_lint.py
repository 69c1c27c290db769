"""ruff and mypy accept the sources, with the settings of pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def check(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff() -> None:
    """No unused or undefined name, no syntax of a later Python, no line of more than 120 columns, in any folder."""
    check("ruff", "check", "--no-cache", ".")


@pytest.mark.builds
def test_mypy(tmp_path: Path) -> None:
    check("mypy", "--cache-dir", str(tmp_path))
