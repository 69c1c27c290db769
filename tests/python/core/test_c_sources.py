"""Check the rules that the C sources follow, the tool that checks them, and the runner of the C tests."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS_C = ROOT / "tests" / "c"

if not (ROOT / "csrc").is_dir():
    pytest.skip("the C sources are not available", allow_module_level=True)

import coretests  # noqa: E402

check_tiers = coretests.load("check_tiers")


def test_planted_bugs_fit_the_sources() -> None:
    """Every mutation fits the sources and keeps line numbers; a mutation that does not fit is an error."""
    mutations = coretests.load("mutations")
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


@pytest.mark.builds
def test_tiers_of_sources() -> None:
    """Includes between tiers, model names in the registry, file sizes, refused words."""
    report = check_tiers.Report()
    assert check_tiers.check_sources(ROOT, report) > 50
    assert check_tiers.check_words(ROOT, report) > 20
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


@pytest.mark.parametrize("flags, idle", [
    ("fpu avx2 fma f16c", {"avx512", "avxvnni", "amx", "test_kernels_amx", "test_kernels_prefetch_quant512"}),
    ("avx2 avx_vnni", {"avx512", "amx", "test_kernels_amx", "test_kernels_prefetch_quant512"}),
    ("avx2 avx512f avx512_vnni", {"avxvnni", "amx"}),
    ("avx2 avx512f avx_vnni amx_tile", set()),
    (None, set())])
def test_kernels_that_this_cpu_cannot_run_are_idle(tmp_path: Path, flags: str | None, idle: set[str]) -> None:
    """No kernel is idle if the CPU is unknown."""
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: avx512f\nflags\t\t: {flags}\nbugs\t\t: amx\n")
    build = coretests.build
    assert {Path(name).name for name in build.idle_kernels(tmp_path / "cpuinfo")} == idle
    files = [path.relative_to(ROOT).as_posix() for path in (*(ROOT / "csrc").rglob("*.c"), *TESTS_C.glob("*.c"))]
    assert all(any(file.startswith(name) for file in files) for name in build.IDLE)
    assert not any(file.startswith(tuple(build.IDLE)) for file in files if "avx2" in file or "avxvnni.c" in file)


def test_models_of_instructions_that_this_cpu_has_are_left_out(tmp_path: Path) -> None:
    """The other tests run these kernels on the CPU. They run on models if the CPU lacks the instructions."""
    build = coretests.build
    for flags, needless in (("avx2 avx_vnni", {"test_kernels_avxvnni"}), ("avx2 avx512f amx_tile", set())):
        (tmp_path / "cpuinfo").write_text(f"flags\t\t: {flags}\n")
        assert {Path(name).name for name in build.needless_models(tmp_path / "cpuinfo")} == needless
    assert build.needless_models(tmp_path / "missing") == ()
    for variant in build.VARIANTS.values():  # absent_kernels.c has no other functions
        assert all(name.startswith(tuple(build.IDLE)) for name in variant.left_out if name.startswith("csrc/"))


def test_what_a_variant_leaves_out_others_have() -> None:
    """Idle kernels are compiled by gcc in release, and by clang. Tests that asan leaves out run in release and seam."""
    build = coretests.build
    assert all(build.VARIANTS[name].idle for name in ("release", "clang", "clang-assembly"))
    left_out = [name for name in build.VARIANTS["asan"].left_out if name.startswith("tests/")]
    files = [path.relative_to(ROOT).as_posix() for path in TESTS_C.glob("*.c")]
    assert all(any(file.startswith(name) for file in files) for name in (*left_out, *build.BRIEF))
    for other in ("release", "seam"):
        assert build.VARIANTS[other].tests is None
        assert not any(name.startswith("tests/") for name in build.VARIANTS[other].left_out)
    assert build.VARIANTS["clang"].tests == [] and build.VARIANTS["clang-debug"].tests is None


def _flags_of_the_extension(**variables: str) -> list[str]:
    """Return the flags of setup.py."""
    script = ("import runpy, setuptools\n"
              "setuptools.setup = lambda **given: print(*given['ext_modules'][0].extra_compile_args)\n"
              "runpy.run_path('setup.py')\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MPOOL_")} | variables
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True,
                         check=True)
    return run.stdout.split()


@pytest.mark.builds
@pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="setup.py is not available")
def test_objects_of_the_extension_are_used_if_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant release takes an object that setup.py has left if it is newer than its sources, and compiled by gcc
    with the flags of the variant and with -Werror."""
    build = coretests.build
    monkeypatch.setattr(build, "ROOT", tmp_path)
    source, header = tmp_path / "csrc/base/a.c", tmp_path / "csrc/base/a.h"
    folder = tmp_path / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    made = folder / "csrc/base/a.o"
    for path in (source, made):
        path.parent.mkdir(parents=True)
    for path, age in ((source, 20), (header, 20), (made, 10)):
        path.write_text("")
        os.utime(path, (1e9 - age, 1e9 - age))
    made.with_suffix(".d").write_text("build/csrc/base/a.o: csrc/base/a.c \\\n csrc/base/a.h\n")
    fitting = _flags_of_the_extension(MPOOL_WERROR="1")

    def found(flags: list[str], compiler: str = "x86_64-linux-gnu-gcc") -> Path | None:
        made.with_suffix(".flags").write_text(f"0123\n{shlex.join([compiler, *flags])}\n")
        return build.extension_object(source)

    assert found(fitting) == made and found(fitting, "/usr/bin/gcc") == made
    assert found(fitting, "clang") is None
    for variables in ({}, {"MPOOL_SEAM": "1"}, {"MPOOL_DEBUG": "1"}, {"MPOOL_SANITIZE": "address"}):
        flags = _flags_of_the_extension(**variables)
        assert found([*flags, *(["-Werror"] if variables else [])]) is None, variables
    made.with_suffix(".flags").write_text("0123")  # earlier versions wrote one line
    assert build.extension_object(source) is None
    assert found(fitting) == made
    assert build.compile_one(["false"], source, tmp_path / "out/a.o", True) is None
    assert (tmp_path / "out/a.o").exists() and build.is_current(tmp_path / "out/a.o", tmp_path / "out/a.d", source)
    assert build.compile_one(["false"], source, tmp_path / "out/b.o") is not None
    os.utime(header, (1e9, 1e9))
    assert found(fitting) is None
    made.unlink()
    assert found(fitting) is None


@pytest.mark.builds
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
