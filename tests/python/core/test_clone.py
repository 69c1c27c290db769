"""In a clone without the compiled core, ``pytest`` and ``python -m pytest`` test the installed package, in one process
and in several."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mpool

TESTS = Path(__file__).resolve().parents[1]
PROBE = """
import mpool
import poolstates
def test_the_installed_package_is_used():
    assert mpool._core.__file__ == {core!r} and poolstates.LONG
"""


WITHOUT_CWD = ["-c", "import sys, pytest; sys.path.remove(''); sys.exit(pytest.main(sys.argv[1:]))"]


@pytest.mark.builds
@pytest.mark.parametrize("command", [["-m", "pytest", "-n", "0"], [*WITHOUT_CWD, "-n", "0"],
                                     ["-m", "pytest", "-n", "2", "tests/python/api"]])
def test_a_clone_without_the_core(tmp_path: Path, command: list[str]) -> None:
    package, clone = Path(mpool.__file__).parent, tmp_path / "clone"
    shutil.copytree(package, clone / "mpool", ignore=shutil.ignore_patterns("_core.*.so", "lib*", "demo_models"))
    for name in ("conftest.py", "helpers"):
        copy = shutil.copytree if (TESTS / name).is_dir() else shutil.copy
        (clone / "tests/python").mkdir(parents=True, exist_ok=True)
        copy(TESTS / name, clone / "tests/python" / name)
    shutil.copy(TESTS.parents[1] / "pyproject.toml", clone)
    probe = clone / "tests/python/api/test_probe.py"
    probe.parent.mkdir()
    probe.write_text(PROBE.format(core=mpool._core.__file__))
    done = subprocess.run([sys.executable, *command, "-q", "-p", "no:cacheprovider"], cwd=clone, text=True,
                          capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": str(package.parent)})
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
