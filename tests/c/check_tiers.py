#!/usr/bin/env python3
"""Check the project rules that a compiler does not: includes between tiers, system calls, sizes, words.

    python tests/c/check_tiers.py                                   # the sources
    python tests/c/check_tiers.py --headers                         # also: every header compiles alone
    python tests/c/check_tiers.py --objects build/c/release         # also: the symbols that objects need
    python tests/c/check_tiers.py --library path/to/_core.so        # also: the symbols of the built extension

Prints one line per violation, ``file:line: problem``, and exits with code 1 if there was any. The refused words come
from ``words.toml``.
"""

import argparse
import ast
import concurrent.futures
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # a dependency of pytest before Python 3.11

ROOT = Path(__file__).resolve().parents[2]

# Folders that a folder may include in addition to itself: only those of lower tiers. The pool is independent of models
# and includes base only.
MAY_INCLUDE: dict[str, set[str]] = {
    "base": set(),
    "tensor": {"base"},
    "kernels": {"base", "tensor"},
    "files": {"base", "tensor", "kernels"},
    "models": {"base", "tensor", "kernels", "files"},
    **{f"models/{name}": {"base", "tensor", "kernels", "files", "models", *(f"models/{other}" for other in others)}
       for name, others in {"requests": (), "nn": (), "generation": ("nn",), "encoder": ("nn",), "image": ("nn",),
                            "decoder": ("nn", "generation"), "vision": ("nn", "generation", "decoder", "image"),
                            "diffusion": ("nn",), "lookup": ("nn",)}.items()},
    "vectors": {"base", "tensor", "kernels"},
    "isolation": {"base", "tensor", "kernels", "files", "models"},
    "registry/pool": {"base"},
    "registry": {"base", "tensor", "kernels", "files", "models", "registry/pool"},
    "python": {"base", "tensor", "kernels", "files", "models", "isolation", "registry", "vectors"},
}
# Folders that may also include the schemas of requests, which are tables of macros without code.
READ_SCHEMAS = ("models", "isolation", "python")
# Files of registry/ from the bottom up: the functions of each call only functions of itself and of files before it. A
# function that is passed as a pointer (the job of a worker's thread, a handler of events) is not called there.
REGISTRY_ORDER = """
    events forecast governor cpu_allocator maintenance services state_machine chaos notifier
    entry worker request faults dispatch ends launch submit caller load improve shortage serve leave evict remove sweep
    describe upkeep audit registry_all registry_fork fork keys registry
""".split()
OPENBLAS_FILE = "kernels/blas.c"
# Keys of tables that requests share: other files of models/ take them from these, so no key lacks the tenant.
KEY_FILES = ("models/cache_key.h", "models/cache_key.c")
MODELS = {name for name in MAY_INCLUDE if name.split("/")[0] == "models"} - {"models/requests"}
MAX_LINES = 1200
MAX_COLUMNS = 120

STDIO_STREAMS = set("""
    printf fprintf vprintf vfprintf dprintf vdprintf __printf_chk __fprintf_chk __vfprintf_chk __vprintf_chk
    __dprintf_chk puts putchar putc fputs fputc putw fopen fopen64 fdopen freopen freopen64 fclose fread fwrite fgets
    fgetc getc getchar gets getline getdelim ungetc scanf fscanf vscanf vfscanf __isoc99_fscanf __isoc99_scanf
    __isoc23_fscanf __isoc23_scanf
    fflush fseek fseeko ftell ftello rewind setvbuf setbuf popen pclose tmpfile open_memstream fmemopen perror psignal
    stdin stdout stderr
""".split())
# System calls that only base/ may make: all other folders use the headers of base/.
SYSTEM_ONLY_BASE = re.compile(
    r"^(malloc|calloc|realloc|reallocarray|free|aligned_alloc|posix_memalign|memalign|strdup|strndup|open|open64|"
    r"openat|fork|pthread_\w+|getenv|secure_getenv|setenv|unsetenv|putenv|clearenv)$")


class Report(list[str]):
    """Violations found so far."""

    def add(self, path: Path, line: int, problem: str) -> None:
        """Record a violation."""
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        self.append(f"{name}:{line}: {problem}")


def folder_of(name: str) -> str:
    """Return the folder of MAY_INCLUDE that contains a path below csrc; "" for a file outside all folders.

    ``registry/pool/queue.c`` -> ``registry/pool``, ``registry/entry.c`` -> ``registry``.
    """
    parts = name.split("/")
    inner = "/".join(parts[:2])
    return inner if inner in MAY_INCLUDE else parts[0] if len(parts) > 1 else ""


def without_comments(text: str) -> str:
    """Return the text with comments replaced by blanks. Lines and strings keep their positions."""
    pattern = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|/\*.*?\*/|//[^\n]*', re.DOTALL)
    return pattern.sub(lambda m: m.group() if m.group()[0] in "\"'" else re.sub(r"[^\n]", " ", m.group()), text)


def model_names(root: Path) -> set[str]:
    """Return names that must not occur in the registry: architectures, families and keys of the catalogue."""
    names: set[str] = set()
    archs = root / "csrc" / "models" / "archs.def"
    if archs.exists():
        for match in re.finditer(r'^\s*MP_\w+\(\s*"?([\w.-]+)"?', without_comments(archs.read_text()), re.MULTILINE):
            names.add(match.group(1).lower())
    for path in (root / "mpool" / "models").glob("catalogue.*"):
        if path.suffix == ".json":
            names |= catalogue_names(json.loads(path.read_text(encoding="utf-8")))
    return {name for name in names if len(name) >= 3}


def catalogue_names(document: object) -> set[str]:
    """Return the model keys of a catalogue: keys of a JSON object, or each ``key``, ``name`` and alias of a list."""
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
    """Check includes, forbidden headers, model names, lines and columns. Returns the number of files read."""
    csrc = root / "csrc"
    forbidden = model_names(root)
    words = re.compile(r"(?<![A-Za-z0-9])(" + "|".join(sorted(map(re.escape, forbidden), key=len, reverse=True))
                       + r")(?![A-Za-z0-9])", re.IGNORECASE) if forbidden else None
    files = sorted(path for path in csrc.rglob("*") if path.suffix in (".c", ".h", ".def"))
    for path in files:
        name = path.relative_to(csrc).as_posix()
        folder = folder_of(name)
        raw = path.read_text(encoding="utf-8")
        code = without_comments(raw)
        if folder not in MAY_INCLUDE:
            report.add(path, 1, f"`{folder or 'csrc'}` is not a folder of the core, allowed: {', '.join(MAY_INCLUDE)}")
            continue
        for number, line in enumerate(code.splitlines(), 1):
            check_include(csrc, path, folder, number, line, report)
            if name != OPENBLAS_FILE and path.suffix != ".def" and re.search(
                    r"\b(scipy_\w+|cblas_\w+|openblas_\w+|dlopen|dlsym)\b|libscipy_openblas|libopenblas", line):
                report.add(path, number, f"only {OPENBLAS_FILE} may use OpenBLAS")
            if folder in MODELS and name not in KEY_FILES and re.search(
                    r"\bmp_siphash\(|\(mp_cache_(scope|key)\)\s*\{|->tenant\b|\.tenant\b", line):
                report.add(path, number, f"only {KEY_FILES[0]} makes keys of cached results, with the tenant")
        if words and folder.startswith("registry"):
            for number, line in enumerate(raw.splitlines(), 1):
                for match in words.finditer(line):
                    report.add(path, number, f"the registry must not name a model, got `{match.group(1)}`")
        check_size(path, raw, report)
    check_order(csrc / "registry", REGISTRY_ORDER, report)
    for path in sorted((*root.glob("tests/**/*.c"), *root.glob("tests/**/*.h"), *root.glob("tests/**/*.py"),
                        *root.glob("mpool/**/*.py"), root / "setup.py")):
        if path.exists():
            check_size(path, path.read_text(encoding="utf-8"), report)
    return len(files)


def check_include(csrc: Path, path: Path, folder: str, number: int, line: str, report: Report) -> None:
    """Check the #include of one line, if it has one."""
    match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
    if not match:
        return
    quoted, target = match.group(1) == '"', match.group(2)
    if not quoted:
        if (target == "Python.h" or target.startswith(("numpy/", "structmember"))) and folder != "python":
            report.add(path, number, f"only csrc/python may include {target}")
        if "cblas" in target:
            report.add(path, number, f"only {OPENBLAS_FILE} may use OpenBLAS")
        if target == "dlfcn.h" and path.relative_to(csrc).as_posix() != OPENBLAS_FILE:
            report.add(path, number, f"only {OPENBLAS_FILE} may load libraries")
        return
    if not (csrc / target).is_file():
        report.add(path, number, f'"{target}" does not exist below csrc')
        return
    other = folder_of(target)
    if folder in READ_SCHEMAS and re.fullmatch(r"models/requests/(.*\.def|schema\.h)", target):
        return
    if other != folder and other not in MAY_INCLUDE[folder]:
        report.add(path, number, f'{folder} may not include {other} ("{target}"): only lower tiers')


def check_order(folder: Path, order: list[str], report: Report) -> None:
    """Check that the functions of each C file of a folder call only those of files that come before it in `order`."""
    code = {path: without_comments(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.c"))}
    defined = {match.group(1): order.index(path.stem) for path, text in code.items() if path.stem in order
               for match in re.finditer(r"^(?!static\b)\w[\w *]*?\b(mp_\w+)\([^;{}]*\)\s*\{", text, re.MULTILINE)}
    for path, text in code.items():
        if path.stem not in order:
            report.add(path, 1, f"the file has no place in the order of {folder.name}/")
            continue
        for number, line in enumerate(text.splitlines(), 1):
            for name in re.findall(r"\b(mp_\w+)\(", line):
                if defined.get(name, 0) > order.index(path.stem):
                    report.add(path, number, f"{path.name} may not call {name}: {order[defined[name]]}.c is above it")


def check_size(path: Path, text: str, report: Report) -> None:
    """Check the lines of a file and the columns of each line. Tables (.def) have no limit of columns."""
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        report.add(path, MAX_LINES + 1, f"{len(lines)} lines, at most {MAX_LINES}: split it")
    if path.suffix == ".def":
        return
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_COLUMNS:
            report.add(path, number, f"{len(line)} columns, at most {MAX_COLUMNS}")
        if "\t" in line and path.suffix != ".py":
            report.add(path, number, "a tab: indentation is four blanks")


# --- words ---


@dataclass(frozen=True)
class Word:
    """One row of words.toml."""

    refused: re.Pattern[str]
    use: str
    elsewhere: tuple[str, ...]
    """Folders and files in which the word has its ordinary meaning."""
    opens: bool = False
    """The pattern is matched only at the start of a comment."""


@dataclass(frozen=True)
class Words:
    """The content of words.toml: the refused words."""

    identifiers: tuple[Word, ...]
    phrases: tuple[Word, ...]


WORDS_FILE = Path(__file__).resolve().parent / "words.toml"


def read_words(path: Path = WORDS_FILE) -> Words:
    """Read words.toml."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))

    def rows(section: str, before: str, after: str) -> tuple[Word, ...]:
        return tuple(Word(re.compile(f"{before}(?:{row['refused']}){after}", re.IGNORECASE), row["use"],
                          tuple(row.get("except", ())), row["refused"].startswith("^"))
                     for row in document[section])

    return Words(rows("identifiers", r"(?:^|_)", r"(?=_|$)"), rows("phrases", "", ""))


@dataclass(frozen=True)
class Text:
    """An identifier, a comment or a message of a file."""

    line: int
    text: str
    kind: str
    """``identifier``, ``comment`` or ``message``."""


def snake(identifier: str) -> str:
    """Write an identifier in snake case: ``ImageStep`` -> ``image_step``; ``MP_LANE_COUNT`` -> ``mp_lane_count``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower()


def comment_text(raw: str) -> str:
    """Return the text of a comment on one line, without comment markers."""
    text = re.sub(r"^[ \t]*(?:/\*+|\*(?![*/])|//+|#+)", " ", raw.replace("*/", " "), flags=re.MULTILINE)
    return re.sub(r"^[-\s]+", "", " ".join(text.split()))


C_TEXT = re.compile(r'(?P<string>"(?:\\.|[^"\\\n])*")|' r"'(?:\\.|[^'\\\n])*'" r"|(?P<block>/\*.*?\*/)"
                    r"|(?P<line>//[^\n]*(?:\n[ \t]*//[^\n]*)*)|(?P<name>[A-Za-z_]\w*)", re.DOTALL)


def c_texts(source: str) -> Iterator[Text]:
    """Yield identifiers, comments and messages of C. ``//`` comments on neighbouring lines are one comment."""
    line, at = 1, 0
    for match in C_TEXT.finditer(source):
        line, at = line + source.count("\n", at, match.start()), match.start()
        if match["name"]:
            yield Text(line, match["name"], "identifier")
        elif match["string"]:
            if " " in match["string"]:
                yield Text(line, match["string"][1:-1], "message")
        elif match["block"] or match["line"]:
            text = comment_text(match.group())
            yield Text(line, re.sub(r"^[\w.]+\.(?:c|h|def): ", "", text), "comment")


def python_texts(source: str) -> Iterator[Text]:
    """Yield identifiers, comments, docstrings and messages of Python. Comments on neighbouring lines are one."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.add(node.value.lineno)
            yield Text(node.value.lineno, " ".join(node.value.value.split()), "comment")
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] == last + 1 and not token.line[:token.start[1]].strip():
                block.append(token.string)
            else:
                if block:
                    yield Text(begin, comment_text("\n".join(block)), "comment")
                block, begin = [token.string], token.start[0]
            last = token.start[0]
        elif token.type == tokenize.NAME:
            yield Text(token.start[0], token.string, "identifier")
        elif (token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE") \
                and " " in token.string and token.start[0] not in docstrings:
            yield Text(token.start[0], " ".join(token.string.strip("rbfRBF\"'").split()), "message")
    if block:
        yield Text(begin, comment_text("\n".join(block)), "comment")


@functools.cache
def any_of(words: tuple[Word, ...]) -> re.Pattern[str]:
    """Return a pattern that is found wherever one of the words is found: most texts need one search."""
    return re.compile("|".join(f"(?:{word.refused.pattern})" for word in words) or "(?!)", re.IGNORECASE)


def refused_words(words: Words, name: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield line and problem of each refused word of one file. ``name`` is its path below the root."""
    def bound(rows: tuple[Word, ...]) -> tuple[Word, ...]:
        return tuple(word for word in rows if not any(name.startswith(place) for place in word.elsewhere))

    identifiers, phrases = bound(words.identifiers), bound(words.phrases)
    any_identifier, any_phrase = any_of(identifiers), any_of(phrases)
    harmless: set[str] = set()  # identifiers, which occur many times in a file
    for text in python_texts(source) if name.endswith(".py") else c_texts(source):
        if text.kind == "identifier":
            if text.text in harmless:
                continue
            plain = snake(text.text)
            if not any_identifier.search(plain):
                harmless.add(text.text)
                continue
            for word in identifiers:
                if word.refused.search(plain):
                    yield text.line, f"`{text.text}`: write {word.use}"
            continue
        if not any_phrase.search(text.text):
            continue
        for word in phrases:
            for match in word.refused.finditer(text.text) if text.kind == "comment" or not word.opens else ():
                yield text.line, f'{text.kind}, "{match.group()}": write {word.use}'


def word_files(root: Path) -> list[Path]:
    """Return all files to which the list of words applies."""
    kinds = {"csrc": (".c", ".h", ".def"), "tests/c": (".c", ".h", ".py"), "tests/fuzz": (".c", ".h", ".py"),
             "tests/python": (".py",), "tests/mutation": (".py", ".c", ".h"), "mpool": (".py",),
             "benchmarks": (".py", ".c", ".h"),
             "examples": (".py",), "training": (".py",), "docs": (".py",)}
    return sorted(path for folder, suffixes in kinds.items() for path in (root / folder).rglob("*")
                  if path.suffix in suffixes)


def check_words(root: Path, report: Report, words: Words | None = None) -> int:
    """Check every file for refused words. Returns the number of files read."""
    words, files = words or read_words(), word_files(root)
    for path in files:
        for line, problem in refused_words(words, path.relative_to(root).as_posix(), path.read_text("utf-8")):
            report.add(path, line, problem)
    return len(files)


# --- headers, objects and the library ---


def check_headers(root: Path, report: Report) -> int:
    """Check that every header compiles alone, with each installed compiler. Returns the number of compilations."""
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
        if folder_of(header.relative_to(csrc).as_posix()) == "python":
            if python_flags is None:
                return None
            flags = [*python_flags, "-Wno-missing-field-initializers"]
        command = [compiler, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function",
                   f"-I{csrc}", *flags, "-fsyntax-only", "-x", "c", "-"]
        text = f'#include "{header.relative_to(csrc).as_posix()}"\nint mp_not_empty;\n'
        run = subprocess.run(command, input=text, capture_output=True, text=True)
        return None if run.returncode == 0 else f"does not compile alone ({compiler}): {run.stderr.strip()}"

    # Kernel bodies that a source includes once per instruction set need its macros: they do not compile alone.
    headers = [path for path in sorted(csrc.rglob("*.h")) if path.parent != csrc / "kernels" / "simd"]
    work = [(compiler, header) for compiler in ("gcc", "clang") if shutil.which(compiler) for header in headers]
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (_, header), problem in zip(work, pool.map(lambda item: compile_alone(*item), work)):
            if problem:
                report.add(header, 1, problem)
    return len(work)


def undefined_symbols(path: Path, *, dynamic: bool = False) -> set[str]:
    """Return the undefined symbols of an object or a library, without versions."""
    run = subprocess.run(["nm", *(["-D"] if dynamic else []), "-u", str(path)], capture_output=True, text=True,
                         check=True)
    return {line.split()[-1].split("@")[0] for line in run.stdout.splitlines() if line.split()}


def check_objects(built: Path, report: Report) -> int:
    """Check that no object uses a stdio stream, and that only base uses the system's memory, threads and files.

    Returns:
        Number of objects read.
    """
    objects = sorted((built / "csrc").rglob("*.o"))
    for path in objects:
        folder = folder_of(path.relative_to(built / "csrc").as_posix())
        symbols = undefined_symbols(path)
        for symbol in sorted(symbols & STDIO_STREAMS):
            report.add(path, 0, f"uses {symbol}: the library must not use stdio streams")
        if folder not in ("base", "python"):
            for symbol in sorted(filter(SYSTEM_ONLY_BASE.match, symbols)):
                report.add(path, 0, f"uses {symbol}: outside base/, use a header of base/ instead")
    return len(objects)


def check_library(path: Path, report: Report) -> None:
    """Check that the built extension uses no stdio stream and exports only its two entry points."""
    for symbol in sorted(undefined_symbols(path, dynamic=True) & STDIO_STREAMS):
        report.add(path, 0, f"uses {symbol}: the library must not use stdio streams")
    run = subprocess.run(["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True)
    exported = {line.split()[-1].split("@")[0] for line in run.stdout.splitlines() if line.split()}
    for symbol in sorted(exported - {"PyInit__core", "mp_isolation_main", "_init", "_fini"}):
        report.add(path, 0, f"exports {symbol}: only PyInit__core and mp_isolation_main may be exported")


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="root of the repository")
    parser.add_argument("--headers", action="store_true", help="compile every header alone")
    parser.add_argument("--objects", type=Path, help="output folder of a variant of build.py")
    parser.add_argument("--library", type=Path, help="path of the built extension")
    args = parser.parse_args()
    root = args.root.resolve()
    report = Report()
    count = check_sources(root, report)
    done = [f"{count} sources", f"the words of {check_words(root, report)} files"]
    if args.headers:
        done.append(f"{check_headers(root, report)} header compilations")
    if args.objects:
        done.append(f"{check_objects(args.objects.resolve(), report)} objects")
    if args.library:
        check_library(args.library.resolve(), report)
        done.append("the extension")
    for line in report:
        print(line)
    print(f"tiers: {', '.join(done)}: {len(report)} violations")
    return 1 if report or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
