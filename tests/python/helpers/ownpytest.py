"""A run of pytest by a test: with conftest.py of these tests, without plugins, in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of a folder."""
    paths = [str(ROOT / "tests" / "python"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {name: value for name, value in os.environ.items() if name not in ("MPOOL_SLOW", "MPOOL_BUILDS")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", "-o", "addopts=", "-c",
         str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *arguments, str(folder)],
        capture_output=True, text=True, timeout=120,
        env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(paths), **variables})
