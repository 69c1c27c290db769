"""Build the C core in several variants, run its C tests, and check the project rules.

By default: the variant with failure injection, and a tenth of the simulator's schedules. ``--builds`` (always in CI):
all schedules, the variant of the extension, sanitizers (with failure injection), clang and ARM.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import instructionsets
import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS_C = ROOT / "tests" / "c"

if not (ROOT / "csrc").is_dir():
    pytest.skip("the C sources are not available", allow_module_level=True)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mpool_tests_{name}", TESTS_C / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = _load("build")
check_tiers = _load("check_tiers")


@pytest.fixture(scope="session")
def out() -> Path:
    """Build folder of the variants: ``MPOOL_TEST_BUILD``, by default build/c."""
    return Path(os.environ.get("MPOOL_TEST_BUILD") or ROOT / "build" / "c")


def _build(name: str, out: Path, folders: list[str] | None = None, tests: list[str] | None = None) -> Path:
    variant = build.VARIANTS[name]
    needed = [variant.compiler, *variant.wrapper[:1]] if variant.emulated else [variant.compiler]
    for tool in needed:
        if build.compiler_of(variant) is None if tool == variant.compiler else shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    try:
        return build.build(name, out, folders=folders, tests=tests)
    except build.BuildError as error:
        pytest.fail(f"{name} does not build:\n{error}", pytrace=False)


def _run(name: str, runner: Path, *arguments: str, processor: str | None = None) -> None:
    jobs = str(len(os.sched_getaffinity(0)))
    run = subprocess.run([*build.command_of(name, runner), "--jobs", jobs, *arguments], capture_output=True, text=True,
                         env={**os.environ, "MPOOL_TEST_ROOT": str(ROOT / "tests"),
                              **({"QEMU_CPU": processor} if processor else {})})
    print(run.stdout, run.stderr, sep="\n")
    closing = run.stdout.strip().splitlines()[-1:] or ["nothing was printed"]
    assert run.returncode == 0, f"{name}: {closing[0]}\n{run.stderr}"
    assert not closing[0].startswith("c tests: 0 passed"), closing[0]


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
    runner = _build("seam", out)
    _run("seam", runner, "--slow", "5")
    _record_models(runner, record_property)


def test_gcc_simulator_in_short(builds_wanted: bool, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry in the simulator: a tenth of the schedules, without the planted bugs."""
    if builds_wanted:
        pytest.skip("all schedules run")
    monkeypatch.setenv("MPOOL_SIM_PERCENT", "10")
    _run("sim", _build("sim", out), "--slow", "5")


@pytest.mark.builds
def test_gcc_release(out: Path, record_property: Callable[[str, object], None]) -> None:
    """All tests, in the variant of the extension, with -Wall -Wextra -Werror and with the binding."""
    runner = _build("release", out)
    _run("release", runner, "--slow", "5")
    _record_models(runner, record_property)


@pytest.mark.builds
def test_gcc_address_and_undefined_sanitizers(out: Path) -> None:
    """All tests under ASan, LSan and UBSan, with injected system failures."""
    runner = _build("asan", out)
    _run("asan", runner, "--slow", "10")


@pytest.mark.builds
def test_gcc_thread_sanitizer(out: Path) -> None:
    """Code with threads: base, the pool, and worker processes."""
    runner = _build("tsan", out)
    listed = subprocess.run([str(runner), "--list"], capture_output=True, text=True, check=True).stdout
    assert "base_team_barrier_2_threads" in listed
    _run("tsan", runner, "--slow", "20", "--only", "base_", "--only", "pool_", "--only", "registry_", "--only",
         "isolation_a_registry", "--only", "isolation_processes")


@pytest.mark.builds
def test_gcc_simulator(out: Path) -> None:
    """The registry in the simulator: tens of thousands of schedules, all schedules of tiny cases, and planted bugs."""
    runner = _build("sim", out)
    listed = subprocess.run([str(runner), "--list"], capture_output=True, text=True, check=True).stdout
    assert {"sim_world_shutdown", "sim_world_reclaim", "sim_mutations_are_found"} <= set(listed.split())
    _run("sim", runner, "--slow", "10")


def test_planted_bugs_fit_the_sources() -> None:
    """Every mutation fits the sources and keeps line numbers; a mutation that does not fit is an error."""
    mutations = _load("mutations")
    for file, rows in mutations.planted_files().items():
        text = (ROOT / "csrc" / file).read_text()
        planted = mutations.plant(file, text, rows)
        assert planted.count("\n") == text.count("\n")
        for row in rows:
            assert (f"mp_seam_mutation({row.number})" if row.number else "mp_seam_point()") in planted
    source = "static int twice(int a) {\n    return a +\n           a;\n}\n"
    row = mutations.Mutation(7, "x.c", "twice", "once", "return a + a;", "return BUG ? a : a + a;")
    assert mutations.plant("x.c", source, [row]) == (
        "static int twice(int a) {\n    return mp_seam_mutation(7) ? a : a + a;\n\n}\n")
    with pytest.raises(mutations.MutationError, match="row 7 .* occurs 0 times"):
        mutations.plant("x.c", source.replace("a +", "2 *"), [row])
    with pytest.raises(mutations.MutationError, match="defined 0 times"):
        mutations.plant("x.c", source.replace("twice", "thrice"), [row])


# C tests to run under emulation: those of the kernels, without the ones that use only the reference variant.
ARM_KERNELS = ["base_cpu_", "kernels_half_", "kernels_acts_", "kernels_dense_", "kernels_plain_", "kernels_quant_",
               "kernels_rows_match_ref", "kernels_attention_zero_sign", "kernels_attention_full_nan",
               "kernels_attention_full_any_split", "kernels_attention_kv_"]


def _only(prefixes: list[str]) -> list[str]:
    return [word for prefix in prefixes for word in ("--only", prefix)]


@pytest.mark.builds
def test_arm_kernels_under_emulation(out: Path, record_property: Callable[[str, object], None]) -> None:
    """64-bit ARM, cross-compiled, in qemu: every kernel of every instruction set agrees with the reference."""
    runner = _build("arm", out, ["base", "tensor", "kernels"], ["base_cpu", "dequantize", "kernels"])
    _run("arm", runner, "--slow", "10", *_only(ARM_KERNELS))
    for processor in ("cortex-a53", "cortex-a76"):  # NEON alone; dotprod
        _run("arm", runner, "--slow", "10", "--only", "base_cpu_", "--only", "kernels_dense_dispatch",
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
    _run("arm", _build("arm", out), "--slow", "20", *_only(folders), processor=processor)


@pytest.mark.slow
def test_arm_clang_compiles_without_a_warning(out: Path) -> None:
    """clang for 64-bit ARM, with the C library of the cross compiler."""
    if shutil.which("aarch64-linux-gnu-gcc") is None:
        pytest.skip("aarch64-linux-gnu-gcc and its C library are not installed")
    _build("arm-clang", out)


@pytest.mark.builds
@pytest.mark.parametrize("name", ["clang", "clang-debug"])
def test_clang_compiles_without_a_warning(name: str, out: Path) -> None:
    """clang with -Wall -Wextra -Werror, including the binding and the seam build."""
    _build(name, out)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["seam", "debug"])
def test_gcc_other_builds(name: str, out: Path) -> None:
    """Failure injection and assertions, without sanitizers."""
    _run(name, _build(name, out))


def test_tiers_of_sources() -> None:
    """Includes between tiers, model names in the registry, file sizes, refused words."""
    report = check_tiers.Report()
    assert check_tiers.check_sources(ROOT, report) > 50
    assert check_tiers.check_words(ROOT, report) > 20
    assert not report, "\n".join(report)


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
    _build("release", out)
    report = check_tiers.Report()
    assert check_tiers.check_objects(out / "release", report) > 20
    spec = importlib.util.find_spec("mpool._core")
    if spec is not None and spec.origin and spec.origin.endswith(".so"):
        check_tiers.check_library(Path(spec.origin), report)
    assert not report, "\n".join(report)


def test_tiers_check_reports_every_violation(tmp_path: Path) -> None:
    """Each violation in an artificial source tree is reported."""
    files = {
        "csrc/base/up.h": '#include "tensor/tensor.h"\n',
        "csrc/tensor/tensor.h": '#include "kernels/k.h"\n#include <Python.h>\n',
        "csrc/kernels/k.h": 'void *p = 0; int cblas_sgemm;\n#include <numpy/ndarrayobject.h>\n',
        "csrc/kernels/blas.c": '#include <dlfcn.h>\nint scipy_cblas_sgemm; /* allowed here */\n',
        "csrc/models/archs.def": "/* MP_ARCH(hidden, X, y, 0) */\nMP_ARCH(shiny, TEXT_TO_TEXT, decoder, 0)\n",
        "csrc/registry/entry.c": '/* for Shiny-1B */\n#include "nowhere.h"\nint by_catalogue_name; // the-key\n',
        "csrc/registry/pool/queue.c": '#include "registry/registry.h"\n#include "base/up.h"\n',
        "csrc/registry/registry.h": "",
        "csrc/registry/long.c": "int x;\n" * 1201 + "/* " + "w" * 130 + " */\n",
        "csrc/elsewhere/file.c": "",
        "mpool/models/catalogue.json": '{"models": [{"key": "the-key"}]}',
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    report = check_tiers.Report()
    check_tiers.check_sources(tmp_path, report)
    said = "\n".join(report)
    for part in ("up.h:1: base may not include tensor", "tensor.h:1: tensor may not include kernels",
                 "tensor.h:2: only csrc/python may include Python.h", "k.h:1: only kernels/blas.c may use OpenBLAS",
                 "k.h:2: only csrc/python may include numpy/",
                 "entry.c:1: the registry must not name a model, got `Shiny`",
                 'entry.c:2: "nowhere.h" does not exist below csrc',
                 "entry.c:3: the registry must not name a model, got `the-key`",
                 "queue.c:1: registry/pool may not include registry", "long.c:1201: 1202 lines",
                 "long.c:1202: 136 columns", "file.c:1: `elsewhere` is not a folder of the core"):
        assert part in said, f"missing: {part}\n{said}"
    assert "queue.c:2" not in said and "blas.c" not in said.replace("kernels/blas.c may", "")
    assert "hidden" not in said


def _planted(text: str, kind: str) -> dict[str, str]:
    """Return a C file and a Python file with this identifier, comment or message."""
    if kind == "identifier":
        return {"csrc/models/planted.c": f"int a;\nint {text};\n", "mpool/planted.py": f"a = 1\n{text} = 2\n"}
    if kind == "message":
        return {"csrc/models/planted.c": f'int a;\nconst char *b = "{text}";\n',
                "mpool/planted.py": f'a = 1\nb = "{text}"\n'}
    wrapped = text.replace(" ", "\n * ", 1)
    return {"csrc/models/planted.c": f"int a;\n/* {wrapped} */\n", "mpool/planted.py": f"a = 1\n# {text}\n"}


def _refused(root: Path, files: dict[str, str], words: object) -> list[str]:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    report = check_tiers.Report()
    assert check_tiers.check_words(root, report, words) == len(files)
    return list(report)


def test_words_are_refused(tmp_path: Path) -> None:
    """Each row of words.toml refuses its example in C and in Python, and names the word to use."""
    words = check_tiers.read_words()
    for section in ("identifiers", "phrases"):
        for word in getattr(words, section):
            row = check_tiers.Words(**{"identifiers": (), "phrases": (), section: (word,)})
            kinds = ("identifier",) if section == "identifiers" else ("comment",) if word.opens else ("comment",
                                                                                                     "message")
            for kind in kinds:
                found = _refused(tmp_path, _planted(word.example, kind), row)
                assert len(found) >= 2 and all(":2: " in line and word.use in line for line in found), (word, found)


def test_words_have_no_false_alarms(tmp_path: Path) -> None:
    """The check accepts ordinary words, words of other sections, and folders that are exempt."""
    words = check_tiers.read_words()
    ordinary = {"csrc/models/planted.c": "/* The thread offers what it holds; it may start with one of: a, b. */\n"
                                         "int plane, drawer, ringing, pieced;\n",
                "csrc/kernels/planted.c": "/* Sum each lane. */\nint lane;\n",
                "mpool/planted.py": '"""Offer a caller the plane."""\nchoices = "Whether"\n'}
    assert _refused(tmp_path, ordinary, words) == []
    planted = _planted("mp_lane_sync", "identifier")
    (tmp_path / "csrc/kernels/planted.c").unlink()
    assert len(_refused(tmp_path, planted, words)) == 2
    assert _refused(tmp_path, planted, check_tiers.Words((), words.phrases)) == []


def test_runner_reports_failures(tmp_path: Path) -> None:
    """Failed checks, crashes and timeouts count as failures."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("gcc is not installed")
    source = tmp_path / "test_bad.c"
    source.write_text('#include <stdlib.h>\n#include "mp_test.h"\n'
                      "MP_TEST(bad_check) { MP_CHECK_INT(1 + 1, 3); }\n"
                      "MP_TEST(bad_crash) { abort(); }\n"
                      "MP_TEST_SECONDS(bad_time, 0.2) { for (volatile int i = 1; i;) { } }\n"
                      'MP_TEST(good_skip) { MP_SKIP("no reason"); }\n'
                      "MP_TEST(good_pass) { MP_CHECK(1); }\n")
    runner = tmp_path / "runner"
    subprocess.run([compiler, "-std=c11", "-D_GNU_SOURCE", f"-I{ROOT / 'csrc'}", f"-I{TESTS_C}", str(source),
                    str(TESTS_C / "runner.c"), str(ROOT / "csrc/base/error.c"), "-lm", "-o", str(runner)], check=True)
    run = subprocess.run([str(runner)], capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stdout.startswith("c tests: 1 passed, 3 failed, 1 skipped")
    assert "test_bad.c:3: 1 + 1 is 2, expected 3 = 3" in run.stderr
    assert "bad_crash" in run.stderr and "signal 6" in run.stderr
    assert "bad_time" in run.stderr and "did not end within" in run.stderr
    assert subprocess.run([str(runner), "--only", "good_"], capture_output=True).returncode == 0
    assert subprocess.run([str(runner), "--only", "nothing"], capture_output=True).returncode == 1


def test_a_new_capability_needs_one_row(tmp_path: Path) -> None:
    """With a row in capabilities.def, a capability has its own pool: queue, policy, workers, breaker, governor."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    shutil.copytree(TESTS_C, tmp_path / "tests" / "c")
    with open(tmp_path / "csrc/models/capabilities.def", "a", encoding="utf-8") as rows:
        rows.write('MP_CAPABILITY(SPEECH_TO_TEXT, "speech_to_text", 7, 9, "sequential")\n')
    run = subprocess.run(
        [sys.executable, str(tmp_path / "tests/c/build.py"), "debug", "--out", str(tmp_path / "out"), "--folders",
         "base", "registry", "models/requests", "models/capability.c", "--tests", "registry_fake", "registry_workers",
         "--run", "--", "--only", "workers_serve_every_capability"], capture_output=True, text=True)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout + run.stderr
