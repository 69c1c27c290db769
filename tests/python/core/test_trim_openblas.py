"""tools/trim_openblas.py removes from OpenBLAS what mpool cannot reach, and nothing else."""

import ctypes
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mpool

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "tools").is_dir():
    pytest.skip("needs the repository", allow_module_level=True)

SPEC = importlib.util.spec_from_file_location("tools_trim_openblas", ROOT / "tools" / "trim_openblas.py")
tool = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = tool
SPEC.loader.exec_module(tool)

def installed_library() -> Path:
    """Return OpenBLAS in the installed package."""
    path = Path(mpool.__file__).parent / "_libs" / tool.SONAME
    if not path.exists():
        pytest.skip("the package has no OpenBLAS for Linux")
    if (path.parent / "openblas.txt").read_text().endswith("whole\n"):
        pytest.skip("the package was built with MPOOL_OPENBLAS=whole")
    return path


def test_the_package_has_openblas_alone() -> None:
    """Without libgfortran and libquadmath, and without functions that nothing calls."""
    path = installed_library()
    assert [found.name for found in path.parent.glob("*.so*")] == [path.name]
    library = tool.Library(path.read_bytes())
    system = re.compile(r"(lib(c|m|pthread|dl)|ld-linux-[\w-]+)\.so\.\d")
    assert [name for name in tool.requirements(library) if not system.fullmatch(name)] == []
    opened = ctypes.CDLL(str(path))
    assert all(hasattr(opened, tool.PREFIX + name) for name in tool.KEPT)
    assert not hasattr(opened, "scipy_dgesv_") and not hasattr(opened, "scipy_LAPACKE_dgesv")


PRODUCTS = r"""
import ctypes, sys
import numpy as np
library = ctypes.CDLL(sys.argv[1])
library.scipy_openblas_get_corename.restype = ctypes.c_char_p
pointer = lambda array: array.ctypes.data_as(ctypes.c_void_p)
random, one = np.random.default_rng(7), ctypes.c_float(1)
for threads in (1, 2):
    library.scipy_openblas_set_num_threads(threads)
    for m, n, k in [(1, 1, 1), (1, 300, 200), (300, 1, 200), (5, 6, 7), (64, 64, 64), (100, 129, 83), (700, 300, 500)]:
        for left, right in [(a, b) for a in (111, 112) for b in (111, 112)]:
            a = random.standard_normal((m, k) if left == 111 else (k, m)).astype(np.float32)
            b = random.standard_normal((k, n) if right == 111 else (n, k)).astype(np.float32)
            c = np.ones((m, n), np.float32)
            wanted = (a if left == 111 else a.T).astype(np.float64) @ (b if right == 111 else b.T) + c
            library.scipy_cblas_sgemm(101, left, right, m, n, k, one, pointer(a), a.shape[1], pointer(b), b.shape[1],
                                      one, pointer(c), n)
            assert np.abs(c - wanted).max() < 1e-3, (threads, m, n, k, left, right)
print(library.scipy_openblas_get_corename().decode())
"""


@pytest.mark.builds
@pytest.mark.parametrize("core", ["", "Prescott", "Nehalem", "Sandybridge", "Haswell", "SkylakeX"])
def test_every_path_of_the_product(core: str) -> None:
    """Small and large products, vectors, transposed factors, threads: no removed function is called."""
    path = installed_library()
    flags = Path("/proc/cpuinfo").read_text().split()
    if core and os.uname().machine != "x86_64":
        pytest.skip("a processor of x86-64")
    if {"Sandybridge": "avx", "Haswell": "avx2", "SkylakeX": "avx512vl"}.get(core, "fpu" if core else "") not in [
            *flags, ""]:
        pytest.skip(f"this CPU lacks the instructions of {core}")
    environment = {**os.environ, **({"OPENBLAS_CORETYPE": core} if core else {})}
    ran = subprocess.run([sys.executable, "-c", PRODUCTS, str(path)], env=environment, capture_output=True, text=True)
    if core == "Prescott" and ran.returncode == -signal.SIGSEGV:
        # Version 0.3.33 as published crashes as Prescott on a Zen 4: its kernel overwrites the stack. Removed code is
        # replaced by traps, whose signal is another one.
        pytest.skip("OpenBLAS as published crashes as Prescott on some CPUs")
    assert ran.returncode == 0, (ran.returncode, ran.stderr)
    assert ran.stdout.strip() == {"Prescott": "Katmai"}.get(core, core) or not core


@pytest.mark.slow
def test_a_disassembler_finds_no_call_of_removed_code() -> None:
    """Each direct reference in each function that was kept."""
    path = installed_library()
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    library = tool.Library(path.read_bytes())
    text = library.section(".text")
    code = bytes(library.bytes[text.offset:text.offset + text.size])
    trap = tool.TRAP[library.machine] * 8
    listing = subprocess.Popen(["objdump", "-d", "-j", ".text", "--no-show-raw-insn", str(path)],
                               stdout=subprocess.PIPE, text=True)
    referring = re.compile(r"\s+[0-9a-f]+:\s+(?:bnd |notrack )?(call|j\w+|lea|b|bl|b\.\w+|cbn?z|tbn?z|adr)\b"
                           r".*?(?:# |\s|,)(?:0x)?([0-9a-f]{5,})(?: <|$)")
    seen, bad = 0, []
    for line in listing.stdout:
        if found := referring.match(line):
            at = int(found[2], 16) - text.address
            if 0 <= at < text.size:
                seen += 1
                if code[at:at + 8] == trap[:8]:
                    bad.append(line)
    assert listing.wait() == 0
    assert seen > 10_000 and bad == []
