#!/usr/bin/env python3
"""Builds and runs the fuzz targets (libFuzzer, with AddressSanitizer and UndefinedBehaviorSanitizer).

    python tests/fuzz/fuzz.py [gguf] [spec] [isolation] [model] --seconds 20 [--out build/fuzz]
    python tests/fuzz/fuzz.py --merge           # add the inputs of a long run to tests/fuzz/corpus/<target>

Runs one process per target, in sequence. Exits with 1 if a target failed; the failing inputs are in <out>/artifacts.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
HERE = Path(__file__).resolve().parent
GGUF = ROOT / "tests" / "corpus" / "gguf"

FOLDERS = ["base", "tensor", "files"]
FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fno-omit-frame-pointer", "-pthread", "-Wall", "-Wextra", "-Werror",
         f"-I{CSRC}", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
#: Target -> folders of seeds in addition to tests/fuzz/corpus/<target>, and libFuzzer options.
TARGETS: dict[str, tuple[list[Path], list[str]]] = {
    "gguf": ([GGUF / "valid", GGUF / "reject", GGUF / "regress"],
             ["-max_len=8192", f"-dict={HERE / 'gguf.dict'}"]),
    "spec": ([], ["-max_len=1024"]),
    "isolation": ([], ["-max_len=1024"]),
    "model": ([], ["-max_len=33"]),
}
#: Files of kernels/ that FOLDERS call for questions about types. The kernels that these files also call are missing in
#: all targets but "model": a call of one is a crash.
TYPES = ["kernels/dequantize.c", "kernels/iq_grids.c", "kernels/scaled.c", "kernels/wmat.c"]
#: Target -> files of the core in addition to FOLDERS.
SOURCES: dict[str, list[str]] = {
    "isolation": ["isolation/capability_wire.c", "isolation/channel.c", "isolation/proxy.c", "isolation/spec_codec.c",
                  "isolation/wire.c", "models/capability.c",
                  *sorted(path.relative_to(CSRC).as_posix() for pattern in ("isolation/wire_*.c", "models/requests/*.c")
                          for path in CSRC.glob(pattern))],
    "model": sorted(path.relative_to(CSRC).as_posix() for folder in ("kernels", "models")
                    for path in (CSRC / folder).rglob("*.c")),
}


class FuzzError(Exception):
    """The build or a target failed. The message is the end of its output."""


def find_clang() -> str | None:
    """Return a clang with libFuzzer, or None."""
    clang = shutil.which(os.environ.get("FUZZ_CC", "clang"))
    if clang is None:
        return None
    program = b"int LLVMFuzzerTestOneInput(const char *data, unsigned long size) { (void)data; return size > 9; }"
    probe = subprocess.run([clang, "-x", "c", "-fsanitize=fuzzer,address", "-", "-o", os.devnull], input=program,
                           capture_output=True)
    return clang if probe.returncode == 0 else None


def build(clang: str, out: Path, targets: list[str]) -> dict[str, Path]:
    """Compile the core and link each target; return target -> program."""
    objects = out / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    newest_header = max(path.stat().st_mtime for folder in (CSRC, HERE) for path in folder.rglob("*")
                        if path.suffix in (".h", ".def"))

    def compile_one(source: Path, *flags: str) -> Path:
        made = objects / (source.relative_to(ROOT).as_posix().replace("/", "_") + ".o")
        if made.exists() and made.stat().st_mtime > max(source.stat().st_mtime, newest_header):
            return made
        command = [clang, *FLAGS, *flags, "-c", str(source), "-o", str(made)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            made.unlink(missing_ok=True)
            raise FuzzError(run.stderr)
        return made

    core = [compile_one(source, "-fsanitize=fuzzer-no-link")
            for folder in FOLDERS for source in sorted((CSRC / folder).glob("*.c"))]
    programs = {}
    for target in targets:
        main = compile_one(HERE / f"fuzz_{target}.c", "-fsanitize=fuzzer-no-link")
        named = SOURCES.get(target, [])
        more = [compile_one(CSRC / source, "-fsanitize=fuzzer-no-link")
                for source in [*named, *(one for one in TYPES if one not in named)]]
        partial = [] if target == "model" else ["-no-pie", "-Wl,--unresolved-symbols=ignore-in-object-files"]
        program = out / f"fuzz_{target}"
        run = subprocess.run([clang, *FLAGS, "-fsanitize=fuzzer", *partial, str(main), *map(str, [*more, *core]), "-lm",
                              "-ldl", "-o", str(program)], capture_output=True, text=True)
        if run.returncode:
            raise FuzzError(run.stderr)
        programs[target] = program
    return programs


def run(target: str, program: Path, out: Path, seconds: int, seed: int) -> str:
    """Run one target for `seconds`; return the last lines of its output. Raises FuzzError if it fails."""
    folders, options = TARGETS[target]
    found, artifacts = out / "found" / target, out / "artifacts"
    found.mkdir(parents=True, exist_ok=True)
    artifacts.mkdir(parents=True, exist_ok=True)
    seeds = [folder for folder in (HERE / "corpus" / target, *folders) if folder.is_dir()]
    # Start through a shell: Linux passes the parent's peak memory on to the child, where it would count towards the
    # limit.
    done = subprocess.run(
        ["sh", "-c", '"$@"; exit $?', "sh", str(program), *options, f"-max_total_time={seconds}", "-timeout=10",
         "-rss_limit_mb=1500", f"-seed={seed}", "-print_final_stats=1", f"-artifact_prefix={artifacts}/{target}-",
         str(found), *map(str, seeds)],
        capture_output=True, text=True, errors="replace", timeout=seconds + 300)
    if done.returncode:
        raise FuzzError(f"fuzz_{target} failed:\n" + done.stderr[-6000:])
    return "\n".join(done.stderr.splitlines()[-9:])


def merge(target: str, program: Path, out: Path) -> int:
    """Put the smallest set of inputs with the same coverage into the corpus; return its size."""
    keep = HERE / "corpus" / target
    folders, options = TARGETS[target]
    fresh = out / "merged" / target
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    sources = [path for path in (keep, out / "found" / target) if path.is_dir()]
    # The merge keeps the first input of each coverage. The other corpora come first, so that it drops inputs that cover
    # nothing new; the copies of those corpora's own inputs are skipped below.
    others = [folder for folder in folders if folder.is_dir()]
    done = subprocess.run([str(program), *options, "-set_cover_merge=1", str(fresh), *map(str, others + sources)],
                          capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise FuzzError(done.stderr[-4000:])
    known = {path.read_bytes() for folder in others for path in folder.rglob("*") if path.is_file()}
    shutil.rmtree(keep, ignore_errors=True)
    keep.mkdir(parents=True)
    count = 0
    for path in sorted(fresh.iterdir()):
        if path.read_bytes() not in known and path.stat().st_size <= 2048:
            shutil.copy(path, keep / path.name[:16])
            count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="default: all")
    parser.add_argument("--seconds", type=int, default=20, help="per target")
    parser.add_argument("--seed", type=int, default=0, help="0: a random seed")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--merge", action="store_true", help="do not run; merge inputs of earlier runs in --out")
    args = parser.parse_args()
    clang = find_clang()
    if clang is None:
        print("no clang with libFuzzer found; install clang or set FUZZ_CC", file=sys.stderr)
        return 2
    targets = args.targets or list(TARGETS)
    out = args.out.resolve()
    try:
        programs = build(clang, out, targets)
        for target in targets:
            if args.merge:
                print(f"{target}: {merge(target, programs[target], out)} inputs kept")
            else:
                print(f"fuzz_{target}:\n{run(target, programs[target], out, args.seconds, args.seed)}", flush=True)
    except FuzzError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
