"""The rules that the C sources follow, and the runner of the C tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TESTS_C = ROOT / "tests" / "c"

if not (ROOT / "csrc").is_dir():
    pytest.skip("the C sources are not available", allow_module_level=True)

import coretests  # noqa: E402

check_tiers = coretests.load("check_tiers")


@pytest.mark.builds
def test_tiers_of_sources() -> None:
    """Includes between tiers, model names in the registry, file sizes, refused words."""
    report = check_tiers.Report()
    assert check_tiers.check_sources(ROOT, report) > 50
    assert check_tiers.check_words(ROOT, report) > 20
    assert not report, "\n".join(report)


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


def test_what_a_variant_leaves_out_others_have() -> None:
    """Idle kernels are compiled by gcc in release, and by clang. Release and seam leave out no tests."""
    build = coretests.build
    assert all(build.VARIANTS[name].idle for name in ("release", "clang", "clang-assembly"))
    files = [path.relative_to(ROOT).as_posix() for path in TESTS_C.glob("*.c")]
    assert all(any(file.startswith(name) for file in files) for name in build.BRIEF)
    for other in ("release", "seam"):
        assert build.VARIANTS[other].tests is None
        assert not any(name.startswith("tests/") for name in build.VARIANTS[other].left_out)
    assert build.VARIANTS["clang"].tests == [] and build.VARIANTS["clang-debug"].tests is None


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
