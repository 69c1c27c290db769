"""Copies of the project in which mutants are planted. The worktree itself is never changed."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_HASHED = ("csrc/", "mpool/", "tests/c/", "tests/python/")


def project_files() -> list[str]:
    """Return the project's files: those that git knows, and new ones that it does not ignore."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True,
                            check=True).stdout.decode()
    return sorted(name for name in set(listed.split("\0")) if name and (ROOT / name).is_file())


def tree_hash(files: list[str], parts: tuple[str, ...] = _HASHED) -> str:
    """Return a hash of the files whose paths begin with one of ``parts``; by default, of sources and tests."""
    digest = hashlib.sha256()
    for name in files:
        if name.startswith(parts):
            digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def copy_to(folder: Path, files: list[str]) -> None:
    """Make ``folder`` hold exactly these files, beside what builds put there."""
    known = folder / ".files"
    before = set(known.read_text().split("\n")) if known.exists() else set()
    for name in before - set(files):
        (folder / name).unlink(missing_ok=True)
    for name in files:
        source, target = ROOT / name, folder / name
        if not target.exists() or target.read_bytes() != source.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(source.stat().st_mode)
    known.write_text("\n".join(files))


def environment(tree: Path, scratch: Path, **more: str) -> dict[str, str]:
    """Return the environment of tests that run in a copy."""
    scratch.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *_paths()]), "TMPDIR": str(scratch),
           "MPOOL_TEST_ROOT": str(tree / "tests"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0",
           "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **more}
    for name in ("MPOOL_SLOW", "MPOOL_BUILDS", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST"):
        env.pop(name, None)
    return env


def _paths() -> list[str]:
    """Return the caller's PYTHONPATH without the worktree, whose package the copy replaces, and with the plugin."""
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
             if path and Path(path).resolve() != ROOT]
    return [str(ROOT / "tests"), *given]


def build_extension(tree: Path) -> None:
    """Build the release extension in the copy, and byte code that is checked by hash, not by date.

    Raises:
        subprocess.CalledProcessError: the build failed.
    """
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True,
                   stdout=subprocess.DEVNULL)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "mpool"],
                   cwd=tree, check=True)
