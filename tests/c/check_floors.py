#!/usr/bin/env python3
"""Checks the rules of the house that a compiler does not: who may include whom, who may call what, and sizes.

    python tests/c/check_floors.py                                   # the sources
    python tests/c/check_floors.py --headers                         # and: every header compiles alone
    python tests/c/check_floors.py --objects build/c/release         # and: the symbols that objects ask for
    python tests/c/check_floors.py --library path/to/_core.so        # and: the symbols of the built extension

Prints one line a violation, ``file:line: what``, and ends with code 1 when there was any.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Which rooms a room may include besides itself: only rooms below it. The pool knows no model: base alone.
MAY_INCLUDE: dict[str, set[str]] = {
    "base": set(),
    "tensor": {"base"},
    "kernels": {"base", "tensor"},
    "files": {"base", "tensor", "kernels"},
    "models": {"base", "tensor", "kernels", "files"},
    **{f"models/{name}": {"base", "tensor", "kernels", "files", "models", *(f"models/{other}" for other in others)}
       for name, others in {"requests": (), "nn": (), "generation": ("nn",), "encoder": ("nn",), "image": ("nn",),
                            "decoder": ("nn", "generation"), "vision": ("nn", "generation", "decoder", "image"),
                            "diffusion": ("nn",)}.items()},
    "isolation": {"base", "tensor", "kernels", "files", "models"},
    "registry/pool": {"base"},
    "registry": {"base", "tensor", "kernels", "files", "models", "registry/pool"},
    "python": {"base", "tensor", "kernels", "files", "models", "isolation", "registry"},
}
OPENBLAS_FILE = "kernels/blas.c"
MOST_LINES = 1200
MOST_COLUMNS = 120

STDIO_STREAMS = set("""
    printf fprintf vprintf vfprintf dprintf vdprintf __printf_chk __fprintf_chk __vfprintf_chk __vprintf_chk
    __dprintf_chk puts putchar putc fputs fputc putw fopen fopen64 fdopen freopen freopen64 fclose fread fwrite fgets
    fgetc getc getchar gets getline getdelim ungetc scanf fscanf vscanf vfscanf __isoc99_fscanf __isoc99_scanf
    __isoc23_fscanf __isoc23_scanf
    fflush fseek fseeko ftell ftello rewind setvbuf setbuf popen pclose tmpfile open_memstream fmemopen perror psignal
    stdin stdout stderr
""".split())
# What only base/ may ask of the system: everything else goes through base/sys.h and base/alloc.h.
SYSTEM_ONLY_BASE = re.compile(
    r"^(malloc|calloc|realloc|reallocarray|free|aligned_alloc|posix_memalign|memalign|strdup|strndup|open|open64|"
    r"openat|fork|pthread_\w+)$")


class Report(list[str]):
    """Violations found so far."""

    def add(self, path: Path, line: int, what: str) -> None:
        """Record one."""
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        self.append(f"{name}:{line}: {what}")


def room_of(name: str) -> str:
    """The folder of MAY_INCLUDE that a path below csrc is in; "" for a file beside the folders.

    ``registry/pool/queue.c`` -> ``registry/pool``, ``registry/entry.c`` -> ``registry``.
    """
    parts = name.split("/")
    inner = "/".join(parts[:2])
    return inner if inner in MAY_INCLUDE else parts[0] if len(parts) > 1 else ""


def without_comments(text: str) -> str:
    """The text with comments blanked; lines and strings stay where they are."""
    pattern = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*', re.DOTALL)
    return pattern.sub(lambda m: m.group() if m.group()[0] in "\"'" else re.sub(r"[^\n]", " ", m.group()), text)


def model_names(root: Path) -> set[str]:
    """Names that the registry must not know: architectures, families and keys of the catalogue."""
    names: set[str] = set()
    archs = root / "csrc" / "models" / "archs.def"
    if archs.exists():
        for match in re.finditer(r'^\s*MP_\w+\(\s*"?([\w.-]+)"?', without_comments(archs.read_text()), re.MULTILINE):
            names.add(match.group(1).lower())
    for path in (root / "mpool" / "catalog").glob("catalogue.*"):
        if path.suffix == ".json":
            names |= catalogue_names(json.loads(path.read_text(encoding="utf-8")))
    return {name for name in names if len(name) >= 3}


def catalogue_names(document: object) -> set[str]:
    """Keys of the models of a catalogue: of an object of models, or the ``key`` and ``aliases`` of a list of them."""
    names: set[str] = set()
    models = document.get("models", document) if isinstance(document, dict) else document
    if isinstance(models, dict):
        names |= {str(key).lower() for key, row in models.items() if isinstance(row, dict)}
        models = list(models.values())
    if isinstance(models, list):
        for row in models:
            if isinstance(row, dict):
                names |= {str(row[field]).lower() for field in ("key", "name") if isinstance(row.get(field), str)}
                names |= {str(alias).lower() for alias in row.get("aliases", []) if isinstance(alias, str)}
    return names


def check_sources(root: Path, report: Report) -> int:
    """Includes, forbidden headers and words, lines and columns. Returns how many files were read."""
    csrc = root / "csrc"
    forbidden = model_names(root)
    words = re.compile(r"(?<![A-Za-z0-9])(" + "|".join(sorted(map(re.escape, forbidden), key=len, reverse=True))
                       + r")(?![A-Za-z0-9])", re.IGNORECASE) if forbidden else None
    files = sorted(path for path in csrc.rglob("*") if path.suffix in (".c", ".h", ".def"))
    for path in files:
        name = path.relative_to(csrc).as_posix()
        room = room_of(name)
        raw = path.read_text(encoding="utf-8")
        code = without_comments(raw)
        if room not in MAY_INCLUDE:
            report.add(path, 1, f"`{room or 'csrc'}` is no room: known are {', '.join(MAY_INCLUDE)}")
            continue
        for number, line in enumerate(code.splitlines(), 1):
            check_include(csrc, path, room, number, line, report)
            if name != OPENBLAS_FILE and path.suffix != ".def" and re.search(
                    r"\b(scipy_\w+|cblas_\w+|openblas_\w+|dlopen|dlsym)\b|libscipy_openblas|libopenblas", line):
                report.add(path, number, f"only {OPENBLAS_FILE} knows OpenBLAS")
        if words and room.startswith("registry"):
            for number, line in enumerate(raw.splitlines(), 1):
                for match in words.finditer(line):
                    report.add(path, number, f"the registry knows no model, but names `{match.group(1)}`")
        check_size(path, raw, report)
    for path in sorted((*root.glob("tests/**/*.c"), *root.glob("tests/**/*.h"), *root.glob("tests/**/*.py"),
                        *root.glob("mpool/**/*.py"), root / "setup.py")):
        if path.exists():
            check_size(path, path.read_text(encoding="utf-8"), report)
    return len(files)


def check_include(csrc: Path, path: Path, room: str, number: int, line: str, report: Report) -> None:
    """One line's #include, if it has one."""
    match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
    if not match:
        return
    quoted, target = match.group(1) == '"', match.group(2)
    if not quoted:
        if (target == "Python.h" or target.startswith(("numpy/", "structmember"))) and room != "python":
            report.add(path, number, f"{target} belongs to csrc/python alone")
        if "cblas" in target:
            report.add(path, number, f"only {OPENBLAS_FILE} knows OpenBLAS")
        if target == "dlfcn.h" and path.relative_to(csrc).as_posix() != OPENBLAS_FILE:
            report.add(path, number, f"only {OPENBLAS_FILE} loads libraries")
        return
    if not (csrc / target).is_file():
        report.add(path, number, f'"{target}" is no path below csrc')
        return
    other = room_of(target)
    if other != room and other not in MAY_INCLUDE[room]:
        report.add(path, number, f'{room} may not include {other} ("{target}"): only what lies below it')


def check_size(path: Path, text: str, report: Report) -> None:
    """Lines of a file and columns of a line. Tables (.def) may be as wide as a row is."""
    lines = text.splitlines()
    if len(lines) > MOST_LINES:
        report.add(path, MOST_LINES + 1, f"{len(lines)} lines, at most {MOST_LINES}: split it")
    if path.suffix == ".def":
        return
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_COLUMNS:
            report.add(path, number, f"{len(line)} columns, at most {MOST_COLUMNS}")
        if "\t" in line and path.suffix != ".py":
            report.add(path, number, "a tab: indentation is four blanks")


def check_headers(root: Path, report: Report) -> int:
    """Every header compiles alone, with each compiler that is installed. Returns how many compilations ran."""
    csrc = root / "csrc"
    python_flags: list[str] | None = None
    try:
        import numpy

        include = sysconfig.get_path("include")
        if (Path(include) / "Python.h").exists():
            python_flags = ["-isystem", include, "-isystem", numpy.get_include()]
    except ImportError:
        pass

    def compile_alone(compiler: str, header: Path) -> str | None:
        flags: list[str] = []
        if room_of(header.relative_to(csrc).as_posix()) == "python":
            if python_flags is None:
                return None
            flags = [*python_flags, "-Wno-missing-field-initializers"]
        command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
                   f"-I{csrc}", *flags, "-fsyntax-only", "-x", "c", "-"]
        text = f'#include "{header.relative_to(csrc).as_posix()}"\nint mp_not_empty;\n'
        run = subprocess.run(command, input=text, capture_output=True, text=True)
        return None if run.returncode == 0 else f"does not compile alone ({compiler}): {run.stderr.strip()}"

    # Bodies that a source includes once for each instruction set are no headers: they need its macros.
    headers = [path for path in sorted(csrc.rglob("*.h")) if path.parent != csrc / "kernels" / "simd"]
    work = [(compiler, header) for compiler in ("gcc", "clang") if shutil.which(compiler) for header in headers]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (_, header), said in zip(work, pool.map(lambda item: compile_alone(*item), work)):
            if said:
                report.add(header, 1, said)
    return len(work)


def undefined_symbols(path: Path, *, dynamic: bool = False) -> set[str]:
    """Names that an object or a library asks of others, without versions."""
    run = subprocess.run(["nm", *(["-D"] if dynamic else []), "-u", str(path)], capture_output=True, text=True,
                         check=True)
    return {line.split()[-1].split("@")[0] for line in run.stdout.splitlines() if line.split()}


def check_objects(folder: Path, report: Report) -> int:
    """No stream of stdio anywhere; the system's memory, threads and files only in base. Returns objects read."""
    objects = sorted((folder / "csrc").rglob("*.o"))
    for path in objects:
        room = room_of(path.relative_to(folder / "csrc").as_posix())
        symbols = undefined_symbols(path)
        for symbol in sorted(symbols & STDIO_STREAMS):
            report.add(path, 0, f"uses {symbol}: the library uses no stdio stream")
        if room not in ("base", "python"):
            for symbol in sorted(filter(SYSTEM_ONLY_BASE.match, symbols)):
                report.add(path, 0, f"uses {symbol}: outside base/ this goes through base/sys.h or base/alloc.h")
    return len(objects)


def check_library(path: Path, report: Report) -> None:
    """The built extension: no stream of stdio, and nothing exported but its init function."""
    for symbol in sorted(undefined_symbols(path, dynamic=True) & STDIO_STREAMS):
        report.add(path, 0, f"uses {symbol}: the library uses no stdio stream")
    run = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    exported = {line.split()[-1].split("@")[0] for line in run.stdout.splitlines() if line.split()}
    for symbol in sorted(exported - {"PyInit__core", "mp_isolation_main", "_init", "_fini"}):
        report.add(path, 0, f"exports {symbol}: only PyInit__core and mp_isolation_main are public")


def main() -> int:
    """Command line: see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    parser.add_argument("--headers", action="store_true", help="compile every header alone")
    parser.add_argument("--objects", type=Path, help="folder of a variant that build.py made")
    parser.add_argument("--library", type=Path, help="the built extension")
    args = parser.parse_args()
    report = Report()
    count = check_sources(args.root.resolve(), report)
    said = [f"{count} sources"]
    if args.headers:
        said.append(f"{check_headers(args.root.resolve(), report)} header compilations")
    if args.objects:
        said.append(f"{check_objects(args.objects.resolve(), report)} objects")
    if args.library:
        check_library(args.library.resolve(), report)
        said.append("the extension")
    for line in report:
        print(line)
    print(f"floors: {', '.join(said)}: {len(report)} violations")
    return 1 if report or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
