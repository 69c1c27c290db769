"""Builds of the C core that find races and other compilers' warnings: the simulator, ThreadSanitizer, clang.

They are a file of their own because a file runs in one process, and all builds together take longest of all tests.
"""

import subprocess
from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[3] / "csrc").is_dir():
    pytest.skip("the C sources are not available", allow_module_level=True)

import coretests


def test_gcc_simulator_in_short(builds_wanted: bool, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry in the simulator: a tenth of the schedules, without the planted bugs."""
    if builds_wanted:
        pytest.skip("all schedules run")
    monkeypatch.setenv("MPOOL_SIM_PERCENT", "10")
    coretests.run("sim", coretests.make("sim", out), "--slow", "5")


@pytest.mark.builds
def test_gcc_thread_sanitizer(out: Path) -> None:
    """Code with threads: base, the pool, and worker processes."""
    runner = coretests.make("tsan", out)
    listed = subprocess.run([str(runner), "--list"], capture_output=True, text=True, check=True).stdout
    assert "base_team_barrier_2_threads" in listed
    coretests.run("tsan", runner, "--slow", "20", "--only", "base_", "--only", "pool_", "--only", "registry_", "--only",
         "isolation_a_registry", "--only", "isolation_processes", "--only", "models_recent")


@pytest.mark.builds
def test_gcc_simulator(out: Path) -> None:
    """The registry in the simulator: tens of thousands of schedules, all schedules of tiny cases, and planted bugs."""
    runner = coretests.make("sim", out)
    listed = subprocess.run([str(runner), "--list"], capture_output=True, text=True, check=True).stdout
    assert {"sim_world_shutdown", "sim_world_reclaim", "sim_mutations_are_found"} <= set(listed.split())
    coretests.run("sim", runner, "--slow", "10")


@pytest.mark.builds
@pytest.mark.parametrize("name", ["clang", *(pytest.param(name, marks=pytest.mark.slow)
                                             for name in ("clang-assembly", "clang-debug"))])
def test_clang_compiles_without_a_warning(name: str, out: Path) -> None:
    """clang with -Wall -Wextra -Werror, including the binding and the seam build."""
    coretests.make(name, out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seam", "debug"])
def test_gcc_other_builds(name: str, out: Path) -> None:
    """Failure injection and assertions, without sanitizers."""
    coretests.run(name, coretests.make(name, out))
