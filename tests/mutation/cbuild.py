"""Builds of the C core for mutants: one build of everything, then the files that a mutant changes, then a link.

The flags are those of the variant ``seam`` of tests/c/build.py (failure injection, assertions) and -fPIC, so that the
same objects make the runner of the C tests and the extension. Compilers run in the root of a copy of the project and
see relative paths: an object does not depend on the place of the copy. A mutant whose objects are equal to those of the
original is the same program.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from .tree import ROOT


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"mpool_mutation_{name}", ROOT / "tests" / "c" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = _load("build")
planted = _load("mutations")

# The compiler refuses swapped arguments of different types, as every other build does: such a mutant is stillborn.
_STRICT = ["-Werror=incompatible-pointer-types", "-Werror=int-conversion", "-Werror=implicit-function-declaration"]


_TRACE = "tests/mutation/trace.c"


class CompileError(Exception):
    """The compiler refused a file."""


@dataclass(frozen=True)
class Source:
    """A file to compile."""

    path: str
    """Below the copy; for planted files of the simulator, that of the original."""
    flags: tuple[str, ...] = ()


@dataclass
class Variant:
    """A way to build: flags, sources, and the folder of the objects of the unchanged program."""

    name: str
    flags: list[str]
    objects: Path
    sources: list[Source] = field(default_factory=list)
    binding: list[Source] = field(default_factory=list)
    is_simulator: bool = False
    link_flags: list[str] = field(default_factory=list)
    runner_flags: list[str] = field(default_factory=list)
    """For the linker, of the runner alone."""
    needs: dict[str, set[str]] = field(default_factory=dict)
    """For every source, the files that it was made from."""

    def object_of(self, source: Source, folder: Path | None = None) -> Path:
        """Return the object's path."""
        return (folder or self.objects) / Path(source.path).with_suffix(".o")


def variants(out: Path, tree: Path, coverage: bool = False) -> dict[str, Variant]:
    """Return the variants ``core`` (runner and extension), ``sim`` (the simulator) and ``asan`` (runner under ASan and
    UBSan).

    Args:
        out: folder below which objects are kept.
        tree: a copy of the project.
        coverage: count how often lines run.
    """
    more = ["-g1", "-fsanitize-coverage=trace-pc"] if coverage else []
    trace = [Source(_TRACE, ("-fno-sanitize-coverage=trace-pc",))] if coverage else []
    off = ("-fno-sanitize-coverage=trace-pc",) if coverage else ()

    def test(path: str) -> Source:
        return Source(path, () if includes_core(tree / path) else off)

    tail = "-cov" if coverage else ""
    base = [flag for flag in build.BASE_FLAGS if flag not in ("-Wall", "-Wextra", "-Werror")]
    includes = ["-Icsrc", "-Itests/c", *_STRICT]
    core = [path.relative_to(tree).as_posix() for path in sorted((tree / "csrc").rglob("*.c"))]
    tests = [path.relative_to(tree).as_posix() for path in sorted((tree / "tests/c").glob("*.c"))]
    own = [Source(path) for path in core if not path.startswith("csrc/python/")]
    binding = [Source(path, tuple(build.binding_includes() or ())) for path in core if path.startswith("csrc/python/")]
    seam, asan = ([flag for flag in build.VARIANTS[name].flags if not flag.startswith("-g")]
                  for name in ("seam", "asan"))
    replaced = build.replacing([Path(path) for path in tests])
    sim_variant = build.VARIANTS["sim"]
    sim_flags = [flag for flag in sim_variant.flags if not flag.startswith("-g")]
    sim = [Source(path, ("-include", "tests/c/sim_atomic.h") if path.startswith("csrc/registry/")
                  or path == "csrc/base/event_count.c" else ())
           for path in core if path[5:].startswith(tuple(sim_variant.core))]
    sim_tests = [path for path in tests if not Path(path).name.startswith("test_")
                 or any(Path(path).name.startswith(f"test_{name}") for name in sim_variant.tests)]
    return {
        "core": Variant("core", [*base, *includes, *seam, "-fPIC", *more], out / f"core{tail}",
                        own + [test(path) for path in tests] + trace, binding,
                        runner_flags=replaced),
        "sim": Variant("sim", [*base, "-I.planted", *includes, *sim_flags, *more], out / f"sim{tail}",
                       sim + [test(path) for path in sim_tests] + trace, is_simulator=True,
                       link_flags=list(sim_variant.link_flags)),
        "asan": Variant("asan", [*base, *includes, *asan], out / "asan", own + [test(path) for path in tests],
                        link_flags=[flag for flag in asan if flag.startswith("-fsanitize")], runner_flags=replaced),
    }


def includes_core(path: Path) -> bool:
    """Return True for a file of the C tests that compiles a file of csrc, such as kernels on a model (modelled.h)."""
    return path.name.endswith(".c") and re.search(r'^#include "\w+/.*\.c"', path.read_text(), re.MULTILINE) is not None


def plant_simulator(tree: Path, only: str | None = None) -> None:
    """Write the simulator's copies of the sources, whose planted bugs stay switched off, below ``tree/.planted``.

    A row of mutations.py that does not fit a mutant is left out.

    Args:
        tree: a copy of the project.
        only: the one file to write, below the copy; None: all.
    """
    folder = tree / ".planted"
    for file, rows in planted.planted_files().items():
        if only is not None and only != f"csrc/{file}":
            continue
        text = (tree / "csrc" / file).read_text()
        try:
            text = planted.plant(file, text, rows)
        except planted.MutationError:
            for row in rows:
                try:
                    text = planted.plant(file, text, [row])
                except planted.MutationError:
                    continue
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(f'#include "base/sys.h"\n#line 1 "csrc/{file}"\n{text}')
    if only is None:
        (folder / "mutations.def").write_text(planted.table())


def compile_one(variant: Variant, tree: Path, source: Source, folder: Path | None = None) -> Path:
    """Compile one file and return its object.

    Raises:
        CompileError: with the compiler's message.
    """
    target = variant.object_of(source, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    path = source.path
    if variant.is_simulator and (tree / ".planted" / path.removeprefix("csrc/")).exists() and path.startswith("csrc/"):
        path = f".planted/{path.removeprefix('csrc/')}"
    compiler = build.compiler_of(build.VARIANTS["seam"])
    command = [*compiler, *variant.flags, *source.flags, "-MMD", "-MF", str(target.with_suffix(".d")), "-c", path, "-o",
               str(target)]
    # A mutant is compiled once: ccache would only hash and store it.
    env = {**os.environ, **({"CCACHE_DISABLE": "1"} if folder is not None else {})}
    run = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)
    if run.returncode != 0:
        target.unlink(missing_ok=True)
        raise CompileError(run.stderr or run.stdout)
    return target


def compile_all(variant: Variant, tree: Path, jobs: int) -> None:
    """Compile every file whose object is not current.

    Raises:
        CompileError: a file of the unchanged project does not compile.
    """
    if variant.is_simulator:
        plant_simulator(tree)
    hashes: dict[str, str] = {}

    def key(source: Source) -> str:
        parts = [*variant.flags, *source.flags]
        for name in _made_from(variant, source):
            path = tree / name
            if name not in hashes:
                hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
            parts.append(hashes[name])
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def one(source: Source) -> None:
        target = variant.object_of(source)
        stamp = target.with_suffix(".key")
        if not target.exists() or not stamp.exists() or stamp.read_text() != key(source):
            stamp.unlink(missing_ok=True)
            compile_one(variant, tree, source)
            stamp.write_text(key(source))

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, [*variant.sources, *variant.binding]))
    for source in (*variant.sources, *variant.binding):
        variant.needs[source.path] = {source.path, *(name.replace(".planted/", "csrc/", 1)
                                                     for name in _made_from(variant, source))}


def _made_from(variant: Variant, source: Source) -> list[str]:
    """Return the files that an object was made from, below the copy; none if it was never made."""
    path = variant.object_of(source).with_suffix(".d")
    if not path.exists():
        return []
    names = shlex.split(path.read_text().partition(":")[2].replace("\\\n", " "))
    return [name for name in names if not name.startswith("/")]


def affected(variant: Variant, file: str, binding: bool = True) -> list[Source]:
    """Return the sources that include a file."""
    chosen = [*variant.sources, *(variant.binding if binding else [])]
    return [source for source in chosen if file in variant.needs[source.path]]


def link_runner(variant: Variant, changed: dict[str, Path], target: Path) -> None:
    """Link the runner of the C tests.

    Args:
        variant: a built variant.
        changed: for sources of a mutant, their objects.
        target: the runner.

    Raises:
        CompileError: the linker failed.
    """
    objects = [changed.get(source.path, variant.object_of(source)) for source in variant.sources]
    _link([*map(str, objects), *variant.link_flags, *variant.runner_flags, "-pthread", "-lm", "-ldl"], target)


def link_extension(variant: Variant, changed: dict[str, Path], target: Path) -> None:
    """Link ``mpool._core`` from the same objects."""
    objects = [changed.get(source.path, variant.object_of(source)) for source in extension_sources(variant)]
    _link(["-shared", *map(str, objects), *variant.link_flags, "-pthread", "-lm", "-ldl"], target)


def extension_sources(variant: Variant) -> list[Source]:
    """Return what the extension is linked from."""
    core = [source for source in variant.sources if source.path.startswith("csrc/") or source.path == _TRACE]
    return [*core, *variant.binding]


def extension_name() -> str:
    """Return the path of the extension below a copy."""
    return f"mpool/_core{sysconfig.get_config_var('EXT_SUFFIX')}"


def _link(words: Iterable[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".new")
    compiler = build.compiler_of(build.VARIANTS["seam"])
    run = subprocess.run([*compiler, *words, "-o", str(temporary)], capture_output=True, text=True)
    if run.returncode != 0:
        raise CompileError(run.stderr)
    temporary.replace(target)
