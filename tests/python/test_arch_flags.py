"""Flipping any flag of any row of archs.def makes a parity test fail: no flag is without a fixture."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = {"encoder": ["LEARNED_POSITIONS", "TOKEN_TYPES", "POST_NORM", "BIAS"], "decoder": ["QKV_BIAS", "ROPE_NEOX"]}
ROW = re.compile(r"^MP_ARCH\((\w+), *(\w+), *(\w+), *(.*)\)$", re.M)
TABLE = (ROOT / "csrc/models/archs.def").read_text(encoding="utf-8") if (ROOT / "csrc").exists() else ""
CASES = [(name, flag) for name, _, family, _ in ROW.findall(TABLE) for flag in FLAGS[family]]


def _flip(table: str, name: str, flag: str) -> str:
    def row(match: re.Match[str]) -> str:
        if match[1] != name:
            return match[0]
        flags = set(re.findall(r"MP_ARCH_(\w+)", match[4])) ^ {flag}
        return f"MP_ARCH({name}, {match[2]}, {match[3]}, {' | '.join(f'MP_ARCH_{f}' for f in sorted(flags)) or '0'})"

    flipped = ROW.sub(row, table)
    assert flipped != table
    return flipped


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources that may be broken."""
    tree = tmp_path_factory.mktemp("flags") / "tree"
    tree.mkdir()
    for name in ("csrc", "mpool", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "_libs", "fuzz"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def _parity_passes(tree: Path) -> bool:
    build = subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, capture_output=True,
                           text=True)
    assert build.returncode == 0, build.stderr[-2000:]
    tests = ["test_parity_tiny.py", "test_parity_gguf.py::test_divergence_is_no_larger_than_llama_cpps"]
    run = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                          *(str(tree / "tests/python" / test) for test in tests)], cwd=tree, capture_output=True,
                         text=True, env={**os.environ, "PYTHONPATH": str(tree), "MPOOL_SLOW": "1"})
    assert run.returncode in (0, 1), run.stdout[-2000:] + run.stderr[-2000:]
    return run.returncode == 0


@pytest.mark.slow
def test_unflipped_passes(tree: Path) -> None:
    assert _parity_passes(tree)


@pytest.mark.slow
@pytest.mark.parametrize("name, flag", CASES)
def test_flipped_fails(tree: Path, name: str, flag: str) -> None:
    path = tree / "csrc/models/archs.def"
    path.write_text(_flip(TABLE, name, flag), encoding="utf-8")
    try:
        assert not _parity_passes(tree)
    finally:
        path.write_text(TABLE, encoding="utf-8")
