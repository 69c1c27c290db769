"""tools/trim_openblas.py removes what mpool cannot reach, and nothing else: in small libraries, and in OpenBLAS."""

from __future__ import annotations

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

#: Functions are reached by a call, by a table of pointers, by an address, and before or after all others. Functions
#: called `removed_*` are not reached; one of them needs another library.
LIBRARY = r"""
#define APART __attribute__((noinline, noclone))
int from_beside(int x);
APART int scipy_removed_first(int x) { return from_beside(x) + 1; }
APART int reached_by_call(int x) { return x * 3; }
static APART int reached_locally(int x) { return x ^ 5; }
static APART int reached_by_pointer(int x) { return x + 40; }
static APART int reached_by_address(int x) { return x - 7; }
static APART int reached_after_start(int x) { return x + 1000; }
static APART int removed_locally(int x) { return scipy_removed_first(x) * 5; }
APART int scipy_removed_last(int x) { return removed_locally(x) + 2; }
static int (*const g_table[])(int) = {reached_by_pointer, reached_locally};
static int (*volatile g_later)(int);
static int g_start;
__attribute__((constructor)) static void start(void) { g_start = reached_after_start(1); }
int scipy_cblas_sgemm(int x) {
    g_later = reached_by_address;
    return reached_by_call(x) + reached_locally(x) + g_table[x & 1](x) + g_later(x) + g_start;
}
int scipy_openblas_get_corename(void) { return 2; }
int scipy_openblas_set_num_threads(void) { return 3; }
"""
CALLER = r"""
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
    void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return puts(dlerror()), 1;
    int (*function)(int) = (int (*)(int))dlsym(library, "scipy_cblas_sgemm");
    printf("%d %d %d %d\n", function(6), function(7), count, dlsym(library, "scipy_removed_last") != 0);
    return 0;
}
"""
EXPECTED = [sum((x * 3, x ^ 5, x ^ 5 if x & 1 else x + 40, x - 7, 1001)) for x in (6, 7)]

COMPILERS = [("gcc", []), ("aarch64-linux-gnu-gcc", ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"])]


def compile_library(compiler: str, folder: Path) -> Path:
    """Compile LIBRARY and the library beside it, as the wheel's are compiled. Return the path of the former."""
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    (folder / "beside.c").write_text("int from_beside(int x) { return x; }\n")
    (folder / "versions").write_text("BESIDE_1 { global: from_beside; local: *; };\n")
    (folder / "library.c").write_text(LIBRARY)
    base = [compiler, "-O1", "-fPIC", "-shared", "-Wl,-z,lazy"]
    if compiler == "gcc" and os.uname().machine == "x86_64":
        base.append("-fcf-protection=none")  # one table of linkage, as in the wheel
    else:
        base.append("-falign-functions=4096")  # all functions in a page to which code refers are kept
    beside, made = folder / "libbeside.so", folder / tool.SONAME
    script = f"-Wl,--version-script={folder / 'versions'}"
    subprocess.run([*base, folder / "beside.c", "-o", beside, script], check=True)
    subprocess.run([*base, folder / "library.c", "-o", made, f"-Wl,-soname,{tool.SONAME}", "-L", folder,
                    "-lbeside", "-Wl,-rpath,$ORIGIN", "-Wl,--no-as-needed", "-lm", "-lc"], check=True)
    return made


@pytest.mark.parametrize("compiler, wrapper", COMPILERS)
def test_a_small_library(tmp_path: Path, compiler: str, wrapper: list[str]) -> None:
    made = compile_library(compiler, tmp_path)
    if wrapper and shutil.which(wrapper[0]) is None:
        pytest.skip(f"{wrapper[0]} is not installed")
    (tmp_path / "caller.c").write_text(CALLER)
    caller = tmp_path / "caller"
    subprocess.run([compiler, "-O1", tmp_path / "caller.c", "-o", caller, "-ldl"], check=True)

    def call(path: Path) -> list[str]:
        ran = subprocess.run([*wrapper, caller, path], capture_output=True, text=True)
        return ran.stdout.split() or [str(ran.returncode), ran.stderr]

    whole = made.read_bytes()
    before = tool.Library(whole)
    assert tool.requirements(before) >= {"libbeside.so", "libc.so.6"}
    assert call(made) == [*map(str, EXPECTED), "2", "1"]
    trimmed = tool.trim(whole, {"libbeside.so", "libabsent.so"})
    other = tmp_path / "elsewhere" / "trimmed.so"
    other.parent.mkdir()
    other.write_bytes(trimmed)
    (tmp_path / "libbeside.so").unlink()
    assert call(other) == [*map(str, EXPECTED), "2", "0"], "the same results, without the other library"
    after = tool.Library(trimmed)
    assert tool.requirements(after) == tool.requirements(before) - {"libbeside.so"}
    assert len(trimmed) == len(whole)
    exported = {symbol.name for symbol in after.symbols(".dynsym", ".dynstr") if symbol.defined}
    assert {tool.PREFIX + name for name in tool.KEPT} <= exported
    assert not [name for name in exported if "removed" in name]
    assert b"libmpool_openblas.so" in trimmed and b"libscipy_openblas.so" not in trimmed

    # function by function: a reached one has all its bytes, another one has only traps
    trap = tool.TRAP[after.machine]
    states = {}
    for symbol in before.symbols(".symtab", ".strtab"):
        if symbol.type == tool.STT_FUNC and symbol.defined and re.search("reached|removed|scipy", symbol.name):
            code = slice(symbol.value, symbol.value + symbol.size)  # offsets and addresses of .text are equal
            states[symbol.name] = ("kept" if trimmed[code] == whole[code]
                                   else "removed" if trimmed[code] == trap * (symbol.size // len(trap)) else "damaged")
    assert before.section(".text").address == before.section(".text").offset
    assert len(states) >= 10
    assert {name: state for name, state in states.items()
            if state != ("removed" if "removed" in name else "kept")} == {}


def test_kept_functions_are_those_of_the_core() -> None:
    text = (ROOT / "csrc/kernels/blas.c").read_text()
    assert set(re.findall(r'\bfind\(library, "(\w+)"\)', text)) == set(tool.KEPT)


def test_the_checked_version_is_the_one_of_the_build() -> None:
    assert f'"scipy-openblas32=={tool.CHECKED}' in (ROOT / "pyproject.toml").read_text()


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
