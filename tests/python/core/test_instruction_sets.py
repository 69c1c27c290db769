"""pytest's summary names the instruction sets that this CPU lacks, and what their kernels were tested by."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import instructionsets
import ownpytest
import pytest

ROOT = Path(__file__).resolve().parents[3]

if not instructionsets.CPU_C.exists():
    pytest.skip("the C sources are not available", allow_module_level=True)


def test_every_level_is_known() -> None:
    """The levels of both architectures are read from the source, and the core knows the same names."""
    assert instructionsets.known() == ["avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx", "neon",
                                       "dotprod", "i8mm", "bf16"]
    assert instructionsets.known("x86_64") == ["avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx"]
    assert instructionsets.known("aarch64") == ["neon", "dotprod", "i8mm", "bf16"]
    assert instructionsets.known("riscv64") == []
    assert set(instructionsets.of_this_cpu() or ()) <= set(instructionsets.known())


def test_this_cpu_has_every_level_that_the_core_accepts() -> None:
    """Also avxvnni on a CPU with AVX-512, whose own levels leave it out."""
    script = "import os, mpool; assert mpool.show_config('dicts')['cpu']['level'] == os.environ['MPOOL_CPU']"
    accepted = [name for name in instructionsets.known()
                if subprocess.run([sys.executable, "-c", script], env={**os.environ, "MPOOL_CPU": name},
                                  capture_output=True).returncode == 0]
    assert instructionsets.of_this_cpu() == accepted


def test_sections_name_what_was_tested() -> None:
    """Each set that a planted CPU lacks is in one line: the means that a passed test recorded, or "not tested"."""
    passed = [SimpleNamespace(user_properties=[("other", 1), (instructionsets.PROPERTY, (["amx"], "on a model"))]),
              SimpleNamespace(user_properties=[(instructionsets.PROPERTY, (["neon", "i8mm"], "in qemu"))]),
              SimpleNamespace()]
    means = instructionsets.tested(passed)
    names = ["avx2", "avxvnni", "amx", "neon", "i8mm"]
    assert instructionsets.lines(names, ["avx2"], means) == [
        "tested in qemu: neon, i8mm", "tested on a model: amx", "not tested in this run: avxvnni"]
    assert instructionsets.lines(names, ["avx2", "avxvnni", "amx"], means) == ["tested in qemu: neon, i8mm"]
    assert instructionsets.lines(names, names, means) == []
    assert instructionsets.lines(names, ["avx2"], {}) == ["not tested in this run: avxvnni, amx, neon, i8mm"]
    assert "unknown" in instructionsets.lines(names, None, {})[0]


def test_the_summary_of_a_cpu_that_lacks_sets(tmp_path: Path) -> None:
    """A run of pytest on a CPU with no instruction set but the reference lists all of them; a test that fails records
    nothing."""
    names = instructionsets.known()
    (tmp_path / "test_planted.py").write_text(f"""
def test_passes(record_property):
    record_property({instructionsets.PROPERTY!r}, (["amx"], "on a model"))

def test_fails(record_property):
    record_property({instructionsets.PROPERTY!r}, (["avx2"], "on a model"))
    assert False
""")
    run = ownpytest.run(tmp_path, MPOOL_CPU="ref")
    rows = run.stdout.splitlines()
    at = next((n for n, row in enumerate(rows) if instructionsets.TITLE in row), None)
    assert at is not None, run.stdout + run.stderr
    assert rows[at + 1] == "tested on a model: amx"
    assert rows[at + 2] == f"not tested in this run: {', '.join(name for name in names if name != 'amx')}"
