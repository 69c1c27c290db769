#!/usr/bin/env python3
"""Build the C core and its tests, in several variants, without make.

    python tests/c/build.py asan --run                    # build and run everything under ASan + UBSan
    python tests/c/build.py release --folders base tensor --tests base --run -- --verbose
    python tests/c/build.py tsan --run -- --only base_ --only pool_

A file is recompiled only if it, a header that it includes or the flags changed. Everything goes below ``--out``
(default ``build/c``): ``<out>/<variant>/runner`` and its objects.
"""

import argparse
import concurrent.futures
import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
TESTS = ROOT / "tests" / "c"

# Flags that the extension is built with as well (setup.py); -O and the variant's own flags follow.
BASE_FLAGS = [
    "-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread",
    "-Wall", "-Wextra", "-Werror",
]


@dataclass(frozen=True)
class Variant:
    """A build variant: a compiler and its flags."""

    compiler: str
    flags: list[str]
    link: bool = True
    """False: compile only."""
    library: bool = False
    """Link the core as a library, without tests; with ``binding``, link the extension."""
    binding: bool = False
    """Compile ``csrc/python`` too. A runner is linked without it, because it needs an interpreter."""
    wrapper: list[str] = field(default_factory=list)
    """Command that starts the runner."""
    emulated: bool = False
    """The runner is for another architecture and needs the wrapper."""
    core: list[str] | None = None
    """Compile only files of ``csrc`` with one of these prefixes."""
    tests: list[str] | None = None
    """Compile only ``tests/c/test_<name>*.c``, unless ``--tests`` selects others."""
    link_flags: list[str] = field(default_factory=list)
    test_flags: list[str] = field(default_factory=list)
    """Further flags of files of ``tests/c``, except for those that include a C file of the core."""
    quick_flags: list[str] = field(default_factory=list)
    """Further flags of files of ``tests/c``, except for kernel tests (``BUSY`` without ``BRIEF``) and those that
    include a C file."""
    copied_flags: list[str] = field(default_factory=list)
    """Further flags of files of ``tests/c`` that include a C file of the core."""
    idle_flags: list[str] = field(default_factory=list)
    """Further flags of kernels whose instructions this CPU lacks (``IDLE``)."""
    idle: bool = True
    """False: do not compile those kernels. absent_kernels.c stands in for them."""
    left_out: list[str] = field(default_factory=list)
    """Beginnings of the names of files that are not compiled, unless ``--tests`` selects tests. absent_kernels.c stands
    in for kernels."""
    extension: bool = False
    """Take objects of the core from the build of the extension if they have the flags of this variant
    (``extension_object``)."""
    planted: bool = False
    """Compile copies with the bugs and scheduling points of mutations.py; every atomic of the registry and of
    event counts is a point."""


# Most tests take longer to compile with -O1 than to run without it. The variant release (-O1) has the warnings that
# need optimisation.
QUICK = ["-O0"]
# Beginnings of the names of tests, and of their helpers, that compute for long.
BUSY = ("tests/c/test_kernels", "tests/c/test_dequantize", "tests/c/test_vectors", "tests/c/tile_model", "tests/c/sim")
# Beginnings of the names of kernel tests that are quick nevertheless. Under ASan, gcc takes 46 s of CPU time for them
# with -O1 and 6 s without.
BRIEF = tuple(f"tests/c/test_kernels_{name}" for name in ("attention_kv", "maxima", "unseen"))

# clang's front end without the passes of LLVM: at -O0 they inline the kernels, which takes nine tenths of the time.
NO_PASSES = ["-O0", "-DNDEBUG", "-Xclang", "-disable-llvm-passes"]
# A CPU that has all instruction sets of the kernels.
ALL_SETS = "-march=sapphirerapids" if platform.machine() in ("x86_64", "AMD64") else "-march=armv8.6-a"

# With -O1, gcc ends functions with vzeroupper only if this option is given. Without vzeroupper, code for SSE that runs
# after code for AVX, as in tests and the C library, takes up to 40 times as long on some CPUs.
O1 = ["-O1", "-fexpensive-optimizations"]

VARIANTS: dict[str, Variant] = {
    # idle kernels: -O1 suffices for warnings
    "release": Variant("gcc", ["-O3", "-DNDEBUG", "-falign-functions=64"], binding=True, test_flags=["-O1"],
                       copied_flags=O1, idle_flags=["-O1"], extension=True),
    # Kernels that never run take a fifth of the build even without optimisation: release, zig and clang compile them.
    "debug": Variant("gcc", [*O1, "-g"], idle=False),
    "seam": Variant("gcc", [*O1, "-g1", "-DMP_SEAM"], idle=False, quick_flags=QUICK),
    # -g1, the line numbers in reports: full variable tracking in the kernels takes gcc twice as long as the rest of the
    # build.
    "asan": Variant("gcc", [*O1, "-g1", "-DMP_SEAM", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
                            "-fno-omit-frame-pointer"],
                    # UBSan checks the core. ASan stays on in tests: it sees what the core writes beside their buffers.
                    test_flags=["-fno-sanitize=undefined"], quick_flags=QUICK, idle=False),
    # Address randomisation off: with more than 28 bits of it ThreadSanitizer cannot place its shadow memory.
    # The tests are those of code with threads (test_c_races.py). They compute small models in worker processes, with
    # the kernels of AVX2: the threads are the same with any kernels, and to compile those of the other instruction sets
    # takes more than half of the build's time.
    "tsan": Variant("gcc", [*O1, "-g1", "-fsanitize=thread", "-fno-omit-frame-pointer"], wrapper=["setarch", "-R"],
                    tests=["base", "faults", "isolation_child", "isolation_models", "isolation_process",
                           "models_recent", "pool", "registry"],
                    left_out=["csrc/kernels/x86/avx512", "csrc/kernels/x86/avxvnni", "csrc/kernels/x86/amx"]),
    # The system calls of systems other than Linux (csrc/base/platform.h), run on Linux.
    "portable": Variant("gcc", [*O1, "-g1", "-DMP_SEAM", "-DMP_PORTABLE"],
                        tests=["base", "events", "forks", "isolation_child", "isolation_models", "isolation_process",
                               "pool", "registry_notice",
                               "registry_fake", "registry_forks"], quick_flags=QUICK, idle=False),
    # The extension for Apple silicon. Nothing here can run it. The passes of LLVM are off: at -O0 they inline the
    # kernels, which takes longer than everything else. Inline assembly then stays in functions without its instruction
    # set, so the target CPU must have all sets. UBSan is off, which zig turns on at -O0. The linker
    # leaves missing names to Python.
    "macos": Variant("python-zig cc -target aarch64-macos -mcpu=apple_m2",
                     ["-O0", "-Xclang", "-disable-llvm-passes", "-g0", "-fno-sanitize=undefined", "-DNDEBUG",
                      "-isystem", str(TESTS / "macos")],
                     binding=True, library=True, link_flags=["-dynamiclib", "-Wl,-undefined,dynamic_lookup"]),
    # The registry and the tiers below it, with threads as fibres (tests/c/sim.h).
    "sim": Variant("gcc", ["-O1", "-g", "-DMP_SEAM=1", "-DMP_SIM=1", "-fno-omit-frame-pointer"],
                   core=["base/", "registry/", "models/requests/", "models/capability.c", "models/cache_key.c",
                         *(f"models/generation/{name}.c" for name in ("cache_parts", "kv_arena", "kv_cache",
                                                                      "prefix_cache", "states"))], tests=["sim"],
                   link_flags=["-Wl,--wrap=mp_cpu_memory_bytes"], planted=True),
    # For 64-bit ARM, run by qemu-user. The variable QEMU_CPU chooses the processor: max (all features that qemu
    # supports; the default), cortex-a76 (dotprod), cortex-a53 or cortex-a72 (NEON alone).
    "arm": Variant("aarch64-linux-gnu-gcc", ["-O2", "-g1"], emulated=True,
                   wrapper=["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"]),
    "arm-clang": Variant("clang", ["--target=aarch64-linux-gnu", "-O1", "-DNDEBUG"], link=False),
    # The compiler of the wheels (tools/wheels.py): its results must have the bits of gcc's. The variant clang has its
    # warnings.
    "zig": Variant("python-zig cc -target x86_64-linux-gnu.2.28",
                   ["-O3", "-DNDEBUG", "-falign-functions=64", "-Wno-error"], test_flags=["-O1"]),
    # clang's warnings and its function effect analysis do not depend on optimisation. Without passes, clang still
    # refuses functions that are inlined into others without their instruction set. The variant clang-debug has the
    # tests.
    "clang": Variant("clang", [*NO_PASSES, "-emit-llvm"], link=False, binding=True, tests=[]),
    # clang's assembler, for the inline assembly of kernels. Without passes, it stays in functions without its
    # instruction set, so the target CPU must have all sets.
    "clang-assembly": Variant("clang", [*NO_PASSES, ALL_SETS], link=False, core=["kernels/"], tests=[]),
    # -fsyntax-only: the code that it would generate is that of the variant clang, but for assertions and injected
    # failures.
    "clang-debug": Variant("clang", ["-DMP_SEAM", "-fsyntax-only"], link=False),
}


# Functions that test files replace, by GNU ld's --wrap. The flags are given only if the file takes part.
REPLACED: dict[str, list[str]] = {
    # one thread of each region that is late, and the number of polls (tests/c/late_threads.h)
    "late_threads.c": ["mp_team_barrier", "mp_team_next", "mp_team_rows", "mp_lease_run", "mp_lease_poll"],
    # kernels on models of instruction sets that the machine lacks (tests/c/modelled.h)
    "test_kernels_modelled.c": ["mp_cpu_init", "mp_cpu_features", "mp_amx_dense", "mp_amx_quant",
                                "mp_amx_rows", "mp_amx_attention", "mp_avxvnni_dense", "mp_avxvnni_quant",
                                "mp_avxvnni_rows", "mp_avxvnni_attention"],
}


# Beginnings of the names of kernels, and of tests that compile them, for x86 -> the flag of /proc/cpuinfo without which
# they never run.
IDLE: dict[str, str] = {"csrc/kernels/x86/avx512": "avx512f", "csrc/kernels/x86/avxvnni": "avx_vnni",
                        "csrc/kernels/x86/amx": "amx_tile", "tests/c/test_kernels_amx": "avx512f"}

# Beginning of the names of tests that run kernels on a model of their instructions -> the flag of /proc/cpuinfo with
# which the other tests run the same kernels on the CPU. The models of amx show the loads of tiles to ASan: they
# always run.
NATIVE: dict[str, str] = {"tests/c/test_kernels_avxvnni": "avx_vnni"}

# in a test, compiles a file of the core with replaced instructions
INCLUDES_C = re.compile(r'^#include ".*\.c"$', re.MULTILINE)


class BuildError(Exception):
    """A compiler or the linker failed, or a row of mutations.py does not fit; the message gives the reason."""


def compiler_of(variant: Variant) -> list[str] | None:
    """Return the compiler command, or None if it is not installed. ``CC`` replaces gcc (``ccache gcc``, too)."""
    words = (os.environ.get("CC", "gcc") if variant.compiler == "gcc" else variant.compiler).split()
    path = shutil.which(words[0])
    return [path, *words[1:]] if path else None


def binding_includes() -> list[str] | None:
    """Return the include flags for ``csrc/python``, or None if the headers of Python or numpy are missing."""
    include = sysconfig.get_path("include")
    try:
        import numpy
    except ImportError:
        return None
    if not include or not (Path(include) / "Python.h").exists():
        return None
    return ["-isystem", include, "-isystem", numpy.get_include()]


def sources(folders: list[str] | None, tests: list[str] | None) -> tuple[list[Path], list[Path]]:
    """Return the files of the core (without the binding) and of the tests.

    Args:
        folders: folders and files of ``csrc`` to compile; None: all.
        tests: ``name`` selects ``tests/c/test_name*.c``; None: all. Files not called ``test_*`` are always compiled.
    """
    core = sorted(path for path in CSRC.rglob("*.c")
                  if (place := path.relative_to(CSRC).as_posix().rpartition("/")[0]).split("/")[0] != "python"
                  and (folders is None or any(place == f or place.startswith(f + "/")
                                              or path == CSRC / f for f in folders)))
    chosen = sorted(path for path in TESTS.glob("*.c")
                    if not path.name.startswith("test_")
                    or tests is None or any(path.name.startswith(f"test_{name}") for name in tests))
    return core, chosen


def _cpu_flags(cpuinfo: Path) -> list[str] | None:
    """Return the flags of this CPU; None: unknown."""
    try:
        found = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return None
    return found[1].split() if found else None


def idle_kernels(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the keys of IDLE whose instructions this CPU lacks; none if its flags are unknown."""
    flags = _cpu_flags(cpuinfo)
    return () if flags is None else tuple(name for name, flag in IDLE.items() if flag not in flags)


def needless_models(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the keys of NATIVE whose instructions this CPU has."""
    flags = _cpu_flags(cpuinfo) or []
    return tuple(name for name, flag in NATIVE.items() if flag in flags)


def extension_object(source: Path) -> Path | None:
    """Return the object of a file of the core that the build of the extension (setup.py) has left.

    None if it is missing or not current, if another compiler than gcc or other flags than those of the variant release
    made it, or if warnings were no errors.

    Python's own flags precede those of setup.py, so these objects are what users run.
    """
    folder = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    target = folder / source.relative_to(ROOT).with_suffix(".o")
    try:
        compiler, *flags = shlex.split(target.with_suffix(".flags").read_text().splitlines()[1])
    except (OSError, IndexError, ValueError):
        return None
    wanted = {*BASE_FLAGS, *VARIANTS["release"].flags}
    other = ("-fsanitize", "-DMP_", "-UNDEBUG", "-O")
    if Path(compiler).name.rpartition("-")[2] != "gcc" or not wanted <= {*flags} or any(
            flag.startswith(other) for flag in {*flags} - wanted):
        return None
    return target if is_current(target, target.with_suffix(".d"), source) else None


def replacing(tests: list[Path]) -> list[str]:
    """Return the linker flags for the functions that these test files replace."""
    return [f"-Wl,--wrap={function}" for path in tests for function in REPLACED.get(path.name, [])]


def is_current(target: Path, depfile: Path, source: Path) -> bool:
    """Return True if ``target`` was built from ``source`` and is newer than every file in its dependency file."""
    try:
        made = target.stat().st_mtime_ns
        names = depfile.read_text().partition(":")[2].replace("\\\n", " ").split("\n\n")[0]
        needs = [os.path.join(ROOT, name) for name in shlex.split(names.replace("\n", " "))
                 if not name.endswith(":")]
        return str(source) in needs and all(os.stat(name).st_mtime_ns < made for name in needs)
    except (OSError, ValueError):
        return False


def compile_one(command: list[str], source: Path, target: Path, extension: bool = False) -> str | None:
    """Compile unless the object is current. Return the compiler's message if it failed.

    Args:
        extension: copy the object of the extension, if there is one to use (``extension_object``).
    """
    depfile = target.with_suffix(".d")
    if is_current(target, depfile, source):
        return None
    target.parent.mkdir(parents=True, exist_ok=True)
    if extension and (made := extension_object(source)):
        shutil.copyfile(made.with_suffix(".d"), depfile)
        shutil.copyfile(made, target)
        return None
    run = subprocess.run([*command, "-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(target)],
                         capture_output=True, text=True)
    if run.returncode == 0:
        target.touch()  # with -fsyntax-only, the compiler writes none
        return None
    target.unlink(missing_ok=True)
    return run.stderr + run.stdout


def plant(folder: Path) -> None:
    """Write copies of the sources with plantable bugs, and their table, to ``folder``.

    Raises:
        BuildError: a row of mutations.py does not fit the sources.
    """
    spec = importlib.util.spec_from_file_location("mpool_tests_mutations", TESTS / "mutations.py")
    mutations = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mutations
    spec.loader.exec_module(mutations)
    copies = {"mutations.def": mutations.table()}
    problems = []
    for file, rows in mutations.planted_files().items():
        try:
            planted = mutations.plant(file, (CSRC / file).read_text(), rows)
        except mutations.MutationError as error:
            problems.append(str(error))
            continue
        copies[file] = f'#include "sim_mutation.h"\n#line 1 "{CSRC / file}"\n{planted}'
    if problems:
        raise BuildError("\n".join(problems))
    for old in folder.rglob("*"):
        if old.is_file() and old.relative_to(folder).as_posix() not in copies:
            old.unlink()
    for file, text in copies.items():
        path = folder / file
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def build(name: str, out: Path, *, folders: list[str] | None = None, tests: list[str] | None = None,
          jobs: int | None = None, priority: int = 0) -> Path:
    """Build one variant.

    Args:
        name: a key of VARIANTS.
        out: folder of the outputs; created if missing.
        folders, tests: see :func:`sources`.
        jobs: number of parallel compilers; default: the CPUs this process may use.
        priority: niceness of the compilers, 0 to 19.

    Returns:
        The runner, or the folder of the objects if the variant only compiles.

    Raises:
        BuildError: a compiler failed.
    """
    variant = VARIANTS[name]
    compiler = compiler_of(variant)
    if compiler is None:
        raise BuildError(f"{variant.compiler} is not installed")
    folder = out / name
    first = [f"-I{folder / 'planted'}"] if variant.planted else []
    flags = [*BASE_FLAGS, *first, f"-I{CSRC}", f"-I{TESTS}", *variant.flags]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _build_locked(variant, compiler, flags, folder, folders, tests, jobs, priority)


def _build_locked(variant: Variant, compiler: list[str], flags: list[str], folder: Path, folders: list[str] | None,
                  tests: list[str] | None, jobs: int | None, priority: int) -> Path:
    idle = idle_kernels()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    described = "\0".join([version, *flags, "", *variant.test_flags, "", *variant.quick_flags, "",
                            *variant.copied_flags, "", *variant.idle_flags, "", *idle])
    stamp = hashlib.sha256(described.encode()).hexdigest()
    stamp_file = folder / ".flags"
    if not stamp_file.exists() or stamp_file.read_text() != stamp:
        for old in (*folder.rglob("*.o"), *folder.rglob("*.d")):
            old.unlink()
        stamp_file.write_text(stamp)

    if priority and (nice := shutil.which("nice")):
        compiler = [nice, "-n", str(priority), *compiler]
    core, chosen = sources(folders, tests if tests is not None else variant.tests)
    if variant.library:
        chosen = []
    if variant.core is not None:
        core = [path for path in core if path.relative_to(CSRC).as_posix().startswith(tuple(variant.core))]
    left_out = (*(variant.left_out if tests is None else ()), *(() if variant.idle else idle),
                *(needless_models() if variant.link else ()))
    core, chosen = ([path for path in paths if not path.relative_to(ROOT).as_posix().startswith(left_out)]
                    for paths in (core, chosen))
    work: list[tuple[list[str], Path, Path, bool]] = []
    if variant.planted:
        plant(folder / "planted")
    for source in (*core, *chosen):
        target, own = folder / source.relative_to(ROOT).with_suffix(".o"), []
        if source.relative_to(ROOT).as_posix().startswith(idle):
            own += variant.idle_flags
        elif source.is_relative_to(TESTS) and INCLUDES_C.search(source.read_text()):
            own += variant.copied_flags
        elif source.is_relative_to(TESTS):
            own += variant.test_flags
            name = source.relative_to(ROOT).as_posix()
            if name.startswith(BRIEF) or not name.startswith(BUSY):
                own += variant.quick_flags
        if variant.planted and source.is_relative_to(CSRC):
            if source.is_relative_to(CSRC / "registry") or source == CSRC / "base" / "event_count.c":
                own += ["-include", str(TESTS / "sim_atomic.h")]
            copy = folder / "planted" / source.relative_to(CSRC)
            if copy.exists():
                source = copy
                own += ["-Wno-misleading-indentation", "-Wno-dangling-else"]
        work.append(([*compiler, *flags, *own], source, target, variant.extension and source.is_relative_to(CSRC)))
    linked = [target for _, _, target, _ in work]
    if variant.binding and folders is None:
        includes = binding_includes()
        if includes is not None:
            for source in sorted((CSRC / "python").rglob("*.c")):
                # A table of methods casts between function types, as CPython requires.
                command = [*compiler, *flags, *includes, "-Wno-cast-function-type", "-Wno-missing-field-initializers"]
                target = folder / source.relative_to(ROOT).with_suffix(".o")
                work.append((command, source, target, False))
                if variant.library:
                    linked.append(target)

    jobs = jobs or len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        # the kernels take longest: another file must be last
        ordered = sorted(work, key=lambda item: "kernels" not in item[1].as_posix())
        failures = [message for message in pool.map(lambda item: compile_one(*item), ordered) if message]
    if failures:
        raise BuildError("\n".join(failures))
    if not variant.link:
        return folder

    runner = folder / "runner"
    # the simulator has no teams: late_threads.c is empty there
    link_flags = [*variant.link_flags, *([] if variant.planted else replacing(chosen))]
    listing = "\n".join([*map(str, linked), *link_flags])
    listing_file = folder / ".linked"
    current = (runner.exists() and listing_file.exists() and listing_file.read_text() == listing
               and all(target.stat().st_mtime_ns < runner.stat().st_mtime_ns for target in linked))
    if not current:
        libraries = ["-lm"] if variant.library else ["-lm", "-ldl"]
        command = [*compiler, *flags, *map(str, linked), *link_flags, *libraries, "-o", str(runner)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode != 0:
            runner.unlink(missing_ok=True)
            raise BuildError(run.stderr)
        listing_file.write_text(listing)
    return runner


def command_of(name: str, runner: Path) -> list[str]:
    """Return the command that starts a variant's runner. A sandbox may forbid the wrapper: the runner then starts
    without it.
    """
    wrapper = VARIANTS[name].wrapper
    if VARIANTS[name].emulated:
        return [*wrapper, str(runner)]
    if wrapper and shutil.which(wrapper[0]) and subprocess.run([*wrapper, "true"], capture_output=True).returncode == 0:
        return [*wrapper, str(runner)]
    return [str(runner)]


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", nargs="+", choices=[*VARIANTS, "all"])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "c",
                        help="folder of the outputs (default: %(default)s)")
    parser.add_argument("--folders", nargs="+", help="compile only these folders and files of csrc")
    parser.add_argument("--tests", nargs="+", help="compile only tests/c/test_<name>*.c")
    parser.add_argument("--jobs", type=int, help="number of parallel compilers (default: all CPUs)")
    parser.add_argument("--run", action="store_true", help="run the tests; arguments after -- go to the runner")
    own, rest = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, rest = own[:at], own[at + 1:]
    args = parser.parse_args(own)
    failed = False
    for name in VARIANTS if "all" in args.variant else args.variant:
        try:
            made = build(name, args.out.resolve(), folders=args.folders, tests=args.tests, jobs=args.jobs)
        except BuildError as error:
            print(f"{name}: {error}", file=sys.stderr)
            failed = True
            continue
        print(f"{name}: {made}", flush=True)
        if args.run and VARIANTS[name].link and not VARIANTS[name].library:
            failed |= subprocess.run([*command_of(name, made), *rest]).returncode != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
