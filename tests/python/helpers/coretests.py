"""Builds of the C core and its tests: tests/c/build.py and its neighbours as modules, and how tests use them."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS_C = ROOT / "tests" / "c"


def load(name: str) -> ModuleType:
    """Import a program of tests/c."""
    spec = importlib.util.spec_from_file_location(f"mpool_tests_{name}", TESTS_C / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load("build")


def _jobs() -> int:
    """Return how many C tests run at once: the cores that other test processes leave."""
    cores = len(os.sched_getaffinity(0))
    return max(1, cores // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def make(name: str, out: Path, folders: list[str] | None = None, tests: list[str] | None = None) -> Path:
    """Build a variant, or skip the test if its compiler is not installed.

    Beside other test processes, compilers have a low priority: they use the CPU time that those leave.
    """
    variant = build.VARIANTS[name]
    needed = [variant.compiler, *variant.wrapper[:1]] if variant.emulated else [variant.compiler]
    for tool in needed:
        if build.compiler_of(variant) is None if tool == variant.compiler else shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    priority = 10 if "PYTEST_XDIST_WORKER" in os.environ else 0
    try:
        return build.build(name, out, folders=folders, tests=tests, priority=priority)
    except build.BuildError as error:
        pytest.fail(f"{name} does not build:\n{error}", pytrace=False)


def run(name: str, runner: Path, *arguments: str, processor: str | None = None) -> None:
    """Run the C tests of a variant; at least one must pass and none may fail."""
    # the core sets variables of OpenBLAS while it opens the library, and tests check that it removes them again
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environment |= {"MPOOL_TEST_ROOT": str(ROOT / "tests"), **({"QEMU_CPU": processor} if processor else {}),
                    **({"MPOOL_TEST_EMULATED": "1"} if build.VARIANTS[name].emulated else {})}
    ran = subprocess.run([*build.command_of(name, runner), "--jobs", str(_jobs()), *arguments], capture_output=True,
                         text=True, env=environment)
    print(ran.stdout, ran.stderr, sep="\n")
    closing = ran.stdout.strip().splitlines()[-1:] or ["nothing was printed"]
    assert ran.returncode == 0, f"{name}: {closing[0]}\n{ran.stderr}"
    assert not closing[0].startswith("c tests: 0 passed"), closing[0]
