"""`.ci/run` installs the Debian packages that the tests need, and fails if it cannot. All commands are replaced."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / ".ci" / "run").exists() or shutil.which("bash") is None:
    pytest.skip("needs .ci/run and bash", allow_module_level=True)

#: Commands of the system that the scripts use.
SYSTEM = ["bash", "cat", "chmod", "cut", "dirname", "grep", "mktemp", "mkdir", "nice", "rm", "setsid", "tail", "tee",
          "touch"]
#: Debian package -> commands that it installs.
PACKAGES = {"gcc": ["gcc"], "libc6-dev": [], "clang": ["clang"], "libclang-rt-14-dev": [], "gdb": ["gdb"],
            "qemu-user": ["qemu-aarch64"], "gcc-aarch64-linux-gnu": ["aarch64-linux-gnu-gcc"],
            "libc6-dev-arm64-cross": [], "chromium": ["chromium"], "chromium-driver": ["chromedriver"]}

#: Every replaced command. It notes its call; `$0` tells which command it is.
FAKE = r"""#!/usr/bin/env bash
name=${0##*/}
compile() {  # writes files for 5 s
    for ((at = 0; at < 100; at++)); do
        mkdir -p "$MPOOL_TEST_BUILD"
        touch "$MPOOL_TEST_BUILD/$at" "$FAKES/compiling"
        "$FAKE_COMPILER" 0.05
    done
}
case "$name $*" in
"python3 tests/c/build.py "*)
    echo "$*" >"$FAKES/built"
    [ -z "${FAKE_COMPILER:-}" ] || { compile & wait; }
    exit "${FAKE_BUILD:-0}" ;;
esac
echo "$name $*" >>"$FAKES/calls"
case $name in
id) echo "${FAKE_UID:-0}" ;;
clang)
    case "$*" in
    -dumpversion) echo 14.0.6 ;;
    *fuzzer*) [ -e "$FAKES/fuzzer" ] ;;
    esac ;;
apt-get)
    case "$*" in *update*) exit "${FAKE_UPDATE:-0}" ;; esac
    failures=$(cat "$FAKES/failures" 2>/dev/null || echo 0)
    if [ "$failures" -gt 0 ]; then
        echo $((failures - 1)) >"$FAKES/failures"
        echo "E: Failed to fetch"
        exit 100
    fi
    for package in "$@"; do
        case " ${FAKE_REFUSED:-} " in *" $package "*) echo "E: Unable to locate package $package"; exit 100 ;; esac
    done
    for package in "$@"; do
        case $package in libclang-rt-*) touch "$FAKES/fuzzer" ;; esac
        for command in $(cat "$FAKES/packages/$package" 2>/dev/null); do
            cat "$0" >"$FAKES/$command"
            chmod +x "$FAKES/$command"
        done
    done ;;
python3)
    venv=${*: -1}
    mkdir -p "$venv/bin"
    echo "PATH=\"$FAKES/venv:\$PATH\"" >"$venv/bin/activate" ;;
pytest) echo "=== 5 passed in 1.00s ===" ; exit "${FAKE_PYTEST:-0}" ;;
python) exit "${FAKE_NIGHTLY:-0}" ;;
pip)
    while [ -n "${FAKE_COMPILER:-}" ] && [ ! -e "$FAKES/compiling" ]; do "$FAKE_COMPILER" 0.05; done
    exit "${FAKE_PIP:-0}" ;;
esac
"""


class Machine:
    """A machine on which the given commands are installed."""

    def __init__(self, folder: Path, *installed: str) -> None:
        self.folder = folder
        for name in SYSTEM:
            (folder / name).symlink_to(str(shutil.which(name)))
        (folder / "venv").mkdir()
        for name in ("id", "sleep", "python3", "venv/pip", "venv/mpool", "venv/pytest", "venv/python", *installed):
            self.add(name)
        (folder / "packages").mkdir()
        for package, commands in PACKAGES.items():
            (folder / "packages" / package).write_text(" ".join(commands))

    def add(self, name: str) -> None:
        (self.folder / name).write_text(FAKE)
        (self.folder / name).chmod(0o755)

    def run(self, **environment: str) -> tuple[int, str, list[str]]:
        """Run `.ci/run`. Returns its exit code, its output, and the calls of replaced commands."""
        done = subprocess.run([str(self.folder / "bash"), str(ROOT / ".ci" / "run")], capture_output=True, text=True,
                              timeout=120, stdin=subprocess.DEVNULL,
                              env={"PATH": str(self.folder), "FAKES": str(self.folder), "TMPDIR": str(self.folder),
                                   "CI": "true", **environment})
        calls = self.folder / "calls"
        return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines() if calls.exists() else []


def installs(calls: list[str]) -> list[str]:
    return [call.partition(" --no-install-recommends ")[2] for call in calls
            if call.startswith("apt-get ") and " install " in call]


@pytest.fixture
def empty(tmp_path: Path) -> Machine:
    """A new Debian machine: root, apt-get, no compiler."""
    return Machine(tmp_path, "apt-get")


def test_a_new_machine_gets_every_package(empty: Machine) -> None:
    code, said, calls = empty.run()
    assert code == 0 and said.splitlines()[-1] == "ci: === 5 passed in 1.00s ===", said
    assert " ".join(installs(calls)).split() == list(PACKAGES)
    assert sum(call.endswith(" update") for call in calls) == 1
    assert "missing" not in said and not any(call.startswith("python ") for call in calls)
    assert "pip install ." in calls and "mpool demo" in calls and "pip install .[test]" in calls


def test_compilers_of_the_build_end_with_the_script(empty: Machine) -> None:
    """They would write below the work folder while it is removed, and leave a part of it."""
    code, said, _ = empty.run(FAKE_PIP="1", FAKE_COMPILER=str(shutil.which("sleep")))
    assert code == 1 and "failed: pip install . && mpool demo" in said and (empty.folder / "compiling").exists(), said
    (empty.folder / "compiling").unlink()
    time.sleep(0.5)
    assert not (empty.folder / "compiling").exists() and not list(empty.folder.glob("tmp.*"))


def test_installed_packages_are_left_alone(tmp_path: Path) -> None:
    """Without root and without apt-get."""
    machine = Machine(tmp_path, *(command for commands in PACKAGES.values() for command in commands))
    (tmp_path / "fuzzer").touch()
    code, said, _ = machine.run(FAKE_UID="1000")
    assert code == 0 and "missing" not in said, said


@pytest.mark.sample(2)
@pytest.mark.parametrize("failures, passes", [(2, True), (3, False)])
def test_apt_is_tried_three_times(empty: Machine, failures: int, passes: bool) -> None:
    (empty.folder / "failures").write_text(str(failures))
    code, said, calls = empty.run()
    assert (code == 0) == passes, said
    assert [call for call in calls if call.startswith("sleep")] == ["sleep 5", "sleep 10"]
    assert installs(calls)[:4] == ["gcc libc6-dev"] * 3 + (["clang"])
    if not passes:
        assert "E: Failed to fetch" in said and "missing: gcc libc6-dev (for the extension)" in said


def test_an_update_that_fails_is_no_reason_to_stop(empty: Machine) -> None:
    code, said, calls = empty.run(FAKE_UPDATE="100")
    assert code == 0 and "apt-get update failed" in said, said
    assert sum(call.endswith(" update") for call in calls) == 3


@pytest.mark.sample(4)
@pytest.mark.parametrize("refused", ["clang", "libclang-rt-14-dev", "gdb", "qemu-user", "chromium"])
def test_a_package_that_cannot_be_installed(empty: Machine, refused: str) -> None:
    """The script fails, and names the package and the variable that allows it. Nothing is built or tested."""
    code, said, calls = empty.run(FAKE_REFUSED=refused)
    assert code == 1 and not any(call.startswith(("pip", "pytest")) for call in calls), said
    assert f"missing: {refused}" in said and "apt-get failed three times" in said
    last = said.splitlines()[-1]
    assert refused in last and "MPOOL_ALLOW_MISSING=1" in last, said


@pytest.mark.sample(3)
@pytest.mark.parametrize("value, allowed", [("1", True), ("0", False), ("", False)])
def test_the_variable_allows_missing_packages(empty: Machine, value: str, allowed: bool) -> None:
    code, said, calls = empty.run(FAKE_REFUSED="chromium", MPOOL_ALLOW_MISSING=value)
    assert (code == 0) == allowed, said
    assert ("MPOOL_ALLOW_MISSING=1: tests that need chromium chromium-driver are skipped" in said) == allowed
    assert any(call.startswith("pytest") for call in calls) == allowed


def test_all_missing_packages_are_named_at_once(empty: Machine) -> None:
    code, said, _ = empty.run(FAKE_REFUSED="gdb chromium")
    assert code == 1 and "packages: gdb chromium chromium-driver;" in said.splitlines()[-1], said


@pytest.mark.parametrize("root, apt, reason", [(False, True, "only root can install packages"),
                                               (True, False, "there is no apt-get")])
def test_without_root_or_apt(tmp_path: Path, root: bool, apt: bool, reason: str) -> None:
    machine = Machine(tmp_path, "gcc", "gdb", *(["apt-get"] if apt else []))
    code, said, calls = machine.run(FAKE_UID="0" if root else "1000")
    assert code == 1 and reason in said and not installs(calls), said
    assert "install these Debian packages: clang qemu-user" in said.splitlines()[-1]
    code, said, _ = machine.run(FAKE_UID="0" if root else "1000", MPOOL_ALLOW_MISSING="1")
    assert code == 0, said


def test_a_package_without_its_command_is_missing(empty: Machine) -> None:
    (empty.folder / "packages" / "gdb").write_text("")
    code, said, _ = empty.run()
    assert code == 1 and "missing: gdb (for tests of debug information): the package is installed, but has_gdb" in said


@pytest.mark.parametrize("fails", ["0", "1"])
def test_variants_are_compiled_beside_pip(empty: Machine, fails: str) -> None:
    """The tests report a variant that does not build."""
    code, said, _ = empty.run(FAKE_BUILD=fails)
    built = (empty.folder / "built").read_text().split()
    assert code == 0 and built[:3] == ["tests/c/build.py", "asan", "tsan"] and built[-2] == "--out", said


def test_failed_tests_fail_the_run(empty: Machine) -> None:
    assert empty.run(FAKE_PYTEST="1")[0] == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("tests, nightly", [("0", "0"), ("0", "1"), ("1", "0")])
def test_nightly_mode(empty: Machine, tests: str, nightly: str) -> None:
    """The nightly jobs run after pytest, whatever its result, and each of the two fails the run. The job ``clients`` is
    the last one, because it installs other packages."""
    code, said, calls = empty.run(MPOOL_NIGHTLY="1", FAKE_PYTEST=tests, FAKE_NIGHTLY=nightly)
    at = calls.index("python tests/nightly/nightly.py run")
    assert calls[at - 1].startswith("pytest") and calls[-1] == "python tests/nightly/nightly.py run clients"
    assert any(call.startswith("pip install") and "[clients]" in call for call in calls[at + 1:-1]), calls
    assert "python tests/nightly/nightly.py run aider" in calls[at + 1:-1], calls
    assert code == int(tests != "0" or nightly != "0") and "5 passed" in said.splitlines()[-1], said
