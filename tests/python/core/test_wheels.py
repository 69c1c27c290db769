"""The sdist has every file that a build needs. The nightly job ``wheels`` builds wheels with tools/wheels.py, installs
them without a compiler, runs the demo and the light tests there, and runs the C tests, compiled by the same compiler.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import coretests
import pytest

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "setup.py").exists():
    pytest.skip("needs the repository", allow_module_level=True)
#: Folders whose files the sdist has.
PACKED = {"benchmarks", "csrc", "deploy", "docs", "examples", "mpool", "tests", "tools", "training"}
#: Folders and files that only a clone has.
LEFT_OUT = {".ci", ".dockerignore", ".github", ".gitignore"}
#: Folders and files of the sdist that setuptools writes.
MADE = {"PKG-INFO", "mpool.egg-info", "setup.cfg"}
#: Bytes of a file in the sdist. The largest are the weights of the demo models.
LARGEST = 3_000_000


@pytest.mark.builds
def test_the_sdist_has_every_file(tmp_path: Path) -> None:
    if importlib.util.find_spec("build") is None or shutil.which("git") is None:
        pytest.skip("needs git and the package build")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a clone")
    tracked = [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    # in a copy: setuptools packs every file that an old mpool.egg-info lists
    for name in tracked:
        (tmp_path / "clone" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tmp_path / "clone" / name)
    done = subprocess.run([sys.executable, "-m", "build", "--sdist", "--outdir", tmp_path, tmp_path / "clone"],
                          cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"})
    assert done.returncode == 0, done.stdout[-4000:]
    (path,) = tmp_path.glob("mpool-*.tar.gz")
    with tarfile.open(path) as archive:
        sizes = {member.name.partition("/")[2]: member.size for member in archive if member.isfile()}
    packed = set(sizes)
    tops = {name.partition("/")[0] for name in tracked if "/" in name}
    assert tops == PACKED | (LEFT_OUT & tops)
    wanted = {name for name in tracked if name.partition("/")[0] not in LEFT_OUT}
    assert wanted - packed == set()
    assert {name for name in packed - wanted if name.partition("/")[0] not in MADE} == set()
    assert not [name for name in packed if name.endswith((".so", ".o", ".pyc")) or name.startswith("mpool/_libs")]
    assert {name: size for name, size in sizes.items() if size > LARGEST} == {}


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tools_wheels", ROOT / "tools" / "wheels.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_light_tests_exist() -> None:
    names = (ROOT / "tests" / "python" / "light.txt").read_text("utf-8").split()
    assert [name for name in names if not (ROOT / "tests" / "python" / name).is_file()] == []
    assert {"pytest", "hypothesis"} <= {text.partition(">")[0] for text in load_tool().light_requirements(ROOT)}


def needs_tools() -> None:
    needed = ("build", "ziglang", "auditwheel", "abi3audit")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install '.[wheels]'")


@pytest.mark.slow
def test_wheels_install_without_a_compiler(tmp_path: Path) -> None:
    """Both architectures are built. This machine's wheel runs on this Python, and on others that are installed."""
    needs_tools()
    if sys.version_info < (3, 11):
        pytest.skip("3.10 builds no abi3 wheel")
    tool = [sys.executable, str(ROOT / "tools" / "wheels.py")]
    subprocess.run([*tool, "build", "--out", tmp_path], check=True, cwd=tmp_path)
    names = sorted(path.name for path in tmp_path.glob("*.whl"))
    assert all("-cp311-abi3-manylinux_" in name for name in names)
    assert [name.removesuffix(".whl").endswith(arch) for name, arch in zip(names, ("aarch64", "x86_64"))] == [True] * 2
    others = [found for minor in range(11, 16) if (found := shutil.which(f"python3.{minor}"))]
    working = [found for found in others
               if subprocess.run([found, "-c", "import venv, sys; sys.exit(sys.flags.optimize)"]).returncode == 0]
    subprocess.run([*tool, "check", "--out", tmp_path, sys.executable, *working], check=True, cwd=tmp_path)


@pytest.mark.slow
def test_the_contract_by_the_compiler_of_the_wheels(out: Path) -> None:
    """All C tests: the hashes of the contract, every kernel against the reference, the registry."""
    if platform.machine() != "x86_64":
        pytest.skip("the variant zig is for x86-64")
    coretests.run("zig", coretests.make("zig", out))
