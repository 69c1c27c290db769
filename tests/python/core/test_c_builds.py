"""Build the C core in several variants, and run its C tests.

By default: the variant with failure injection, and a tenth of the simulator's schedules. ``--builds`` (always in CI):
all schedules, sanitizers (with failure injection), the kernels of the extension, clang and the build for macOS.
``--slow``: all tests with the objects of the extension, and those that run for ARM in an emulator.
"""

import importlib.util
import shutil
import struct
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import blasmodel
import instructionsets
import pytest

ROOT = Path(__file__).resolve().parents[3]

if not (ROOT / "csrc").is_dir():
    pytest.skip("the C sources are not available", allow_module_level=True)

import coretests  # noqa: E402

check_tiers = coretests.load("check_tiers")


def _record_models(runner: Path, record_property: Callable[[str, object], None]) -> None:
    """Tell the summary which kernels ran on models of their instructions."""
    for name in ("avxvnni", "amx"):
        ran = subprocess.run([str(runner), "--only", f"kernels_modelled_{name}_slots"], capture_output=True, text=True)
        if ran.stdout.startswith("c tests: 1 passed"):  # skipped if the CPU lacks what the model needs
            record_property(instructionsets.PROPERTY, ([name], "on a model of the instructions"))


def test_gcc_seam(builds_wanted: bool, out: Path, record_property: Callable[[str, object], None]) -> None:
    """All tests, with injected system failures."""
    if builds_wanted:
        pytest.skip("the variant asan runs these tests")
    runner = coretests.make("seam", out)
    coretests.run("seam", runner, "--slow", "5")
    _record_models(runner, record_property)


@pytest.mark.slow
def test_gcc_release(out: Path) -> None:
    """All tests, in the variant of the extension, with -Wall -Wextra -Werror and with the binding."""
    coretests.run("release", coretests.make("release", out), "--slow", "5")


@pytest.mark.builds
def test_kernels_of_the_extension(out: Path, record_property: Callable[[str, object], None]) -> None:
    """The kernels as they are optimised in the extension: asan and seam compile them with -O1."""
    runner = coretests.make("release", out, tests=["dequantize", "kernels", "vectors"])
    coretests.run("release", runner, "--slow", "5")
    _record_models(runner, record_property)


def test_products_by_a_model_of_openblas(builds_wanted: bool, out: Path, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of OpenBLAS, also on machines where its sums differ from mpool's and it is not used."""
    name, tests = ("release", ["kernels", "models_mapped"]) if builds_wanted else ("seam", None)
    runner = coretests.make(name, out, tests=tests)
    monkeypatch.setenv("MPOOL_BLAS", str(blasmodel.build(tmp_path)))
    coretests.run(name, runner, *_only(["kernels_blas_gives", "models_mapped_products_by_blas"]))


@pytest.mark.builds
def test_gcc_address_and_undefined_sanitizers(out: Path) -> None:
    """All tests under ASan, LSan and UBSan, with injected system failures."""
    runner = coretests.make("asan", out)
    coretests.run("asan", runner, "--slow", "10")


# base/, and the code that depends most on its system calls: folders, tests.
PORTABLE = (["base", "registry", "models/requests", "models/capability.c"],
            ["base", "events", "pool", "registry_fake", "registry_forks", "registry_notice"])


@pytest.mark.builds
def test_portable_system_calls(out: Path) -> None:
    """The tests of base/ and of the registry with the system calls of other systems."""
    coretests.run("portable", coretests.make("portable", out, *PORTABLE), "--slow", "10")


@pytest.mark.slow
def test_portable_core(out: Path) -> None:
    """All tests, also those with worker processes, with the system calls of other systems."""
    coretests.run("portable", coretests.make("portable", out), "--slow", "10")


def _macos_symbols(library: bytes) -> tuple[set[str], set[str]]:
    """Return the symbols that a Mach-O file defines, and those that no library it names has."""
    assert library[:8] == b"\xcf\xfa\xed\xfe\x0c\0\0\x01", "a 64-bit Mach-O file for ARM"
    (commands,), at = struct.unpack_from("<I", library, 16), 32
    defined, missing = set(), set()
    for _ in range(commands):
        command, size, symbols, count, strings = struct.unpack_from("<5I", library, at)
        at += size
        if command != 2:  # LC_SYMTAB
            continue
        for name, kind, _, description, _ in struct.iter_unpack("<IBBHQ", library[symbols:symbols + 16 * count]):
            start = strings + name
            text = library[start:library.index(0, start)].decode()
            if kind & 0x0E:  # N_TYPE: not undefined
                defined.add(text)
            elif description >> 8 in (0, 0xFE):  # the number of a library; zig's linker writes 0 for none
                missing.add(text)
    return defined, missing


@pytest.mark.builds
def test_macos_links(out: Path) -> None:
    """The extension, compiled and linked for Apple silicon. Nothing here can run it."""
    if shutil.which("python-zig") is None:
        pytest.skip("ziglang is not installed (pip install 'ziglang>=0.15')")
    if "unknown multiarch" in Path(sysconfig.get_config_h_filename()).read_text():
        pytest.skip("the headers of Debian's Python are for Linux only: use another Python")
    defined, missing = _macos_symbols(coretests.make("macos", out).read_bytes())
    assert "_PyInit__core" in defined
    assert len(missing) > 50
    # __sigbits: a function of signal.h that the compiler inlines when it optimises
    assert {name for name in missing if not name.startswith(("_Py", "__Py"))} - {"___sigbits"} == set()


# C tests to run under emulation: those of the kernels, without the ones that use only the reference variant.
ARM_KERNELS = ["base_cpu_", "kernels_half_", "kernels_acts_", "kernels_dense_", "kernels_plain_", "kernels_quant_",
               "kernels_rows_match_ref", "kernels_attention_zero_sign", "kernels_attention_full_nan",
               "kernels_attention_full_any_split", "kernels_attention_kv_"]


def _only(prefixes: list[str]) -> list[str]:
    return [word for prefix in prefixes for word in ("--only", prefix)]


@pytest.mark.slow
def test_arm_kernels_under_emulation(out: Path, record_property: Callable[[str, object], None]) -> None:
    """64-bit ARM, cross-compiled, in qemu: every kernel of every instruction set agrees with the reference."""
    runner = coretests.make("arm", out, ["base", "tensor", "kernels"], ["base_cpu", "dequantize", "kernels"])
    coretests.run("arm", runner, "--slow", "10", *_only(ARM_KERNELS))
    for processor in ("cortex-a53", "cortex-a76"):  # NEON alone; dotprod
        coretests.run("arm", runner, "--slow", "10", "--only", "base_cpu_", "--only", "kernels_dense_dispatch",
             processor=processor)
    record_property(instructionsets.PROPERTY, (["neon", "dotprod", "i8mm", "bf16"], "in qemu"))


@pytest.mark.slow
@pytest.mark.parametrize(("processor", "folders"), [
    ("max", ["base_", "tensor_", "kernels_", "files_", "models_"]),
    ("cortex-a72", ["base_", "tensor_", "kernels_", "files_"]),
    ("cortex-a53", ["kernels_"]),
    ("neoverse-n1", ["kernels_", "models_contract_masks"]),
])
def test_arm_core_under_emulation(processor: str, folders: list[str], out: Path) -> None:
    """64-bit ARM: the tests of the tiers below the registry."""
    coretests.run("arm", coretests.make("arm", out), "--slow", "20", *_only(folders), processor=processor)


@pytest.mark.slow
def test_arm_clang_compiles_without_a_warning(out: Path) -> None:
    """clang for 64-bit ARM, with the C library of the cross compiler."""
    if shutil.which("aarch64-linux-gnu-gcc") is None:
        pytest.skip("aarch64-linux-gnu-gcc and its C library are not installed")
    coretests.make("arm-clang", out)


@pytest.mark.builds
def test_every_header_compiles_alone() -> None:
    """With each installed compiler."""
    report = check_tiers.Report()
    if shutil.which("gcc") or shutil.which("clang"):
        assert check_tiers.check_headers(ROOT, report) > 0
    assert not report, "\n".join(report)


@pytest.mark.builds
def test_tiers_symbols(out: Path) -> None:
    """Only base uses system memory, threads and files; no object uses stdio; the library exports one symbol."""
    coretests.make("release", out, tests=["kernels"])
    report = check_tiers.Report()
    assert check_tiers.check_objects(out / "release", report) > 20
    spec = importlib.util.find_spec("mpool._core")
    if spec is not None and spec.origin and spec.origin.endswith(".so"):
        check_tiers.check_library(Path(spec.origin), report)
    assert not report, "\n".join(report)
