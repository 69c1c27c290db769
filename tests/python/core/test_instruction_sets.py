"""pytest's summary names the instruction sets that this CPU lacks, and what their kernels were tested by."""

import os
import subprocess
import sys
from pathlib import Path

import instructionsets
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
