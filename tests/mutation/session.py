"""A run of the tool: copies, builds, coverage maps, the choice of mutants, and the file of results."""

from __future__ import annotations

import concurrent.futures
import fcntl
import json
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import cbuild, coperators, coverage_map, ctokens, pycover, pyoperators, tree
from .coverage_map import CoverageMap
from .judge import COUNTED, Workplace
from .mutant import Mutant, folder_of, sample

NOT_MUTATED = ("csrc/kernels/arm/", "mpool/api/stubs.py", "mpool/demo_models/")
"""Other architectures' kernels; the generator of stubs, whose output a test compares; data."""
NOT_RUN = ("sim_mutations_are_found", "sim_long", "sim_replay")
"""Tests of the simulator that check planted bugs, or that run on request."""


def files_of(files: list[str], only: list[str]) -> list[str]:
    """Return the sources to mutate.

    Args:
        files: of the project.
        only: folders or files: ``csrc/kernels``, ``kernels``, ``mpool/server``, ``mpool``. A name alone means a folder
            of csrc, or else of mpool. Empty: all.

    Raises:
        ValueError: an entry of ``only`` names nothing that can be mutated.
    """
    able = [name for name in files if (name.startswith("csrc/") and name.endswith((".c", ".h")))
            or (name.startswith("mpool/") and name.endswith(".py"))]
    able = [name for name in able if not name.startswith(NOT_MUTATED)]
    chosen: set[str] = set()
    for entry in only:
        entry = entry.strip("/")
        for place in (entry, f"csrc/{entry}", f"mpool/{entry}"):
            found = {name for name in able if name == place or name.startswith(place + "/")}
            if found:
                break
        if not found:
            raise ValueError(f"`--only` must name a folder or file of csrc or mpool, got {entry!r}")
        chosen |= found
    return sorted(chosen) if only else able


def mutants_of(file: str, say: Callable[[str], None]) -> list[Mutant]:
    """Return the mutants of a file."""
    text = (tree.ROOT / file).read_text()
    if file.endswith(".py"):
        return pyoperators.mutants(file, text)
    try:
        return coperators.mutants(file, text)
    except ctokens.Unbalanced as error:
        say(f"{file}: not mutated, {error}")
        return []


class Session:
    """One tree of sources and tests, and everything built for it below ``out``."""

    def __init__(self, out: Path, jobs: int, kinds: list[str], python_tests: list[str], budget: float,
                 say: Callable[[str], None], c_tests: Sequence[str] = ()) -> None:
        self.out, self.jobs, self.kinds, self.budget, self.say = out, jobs, kinds, budget, say
        out.mkdir(parents=True, exist_ok=True)
        self._lock = open(out / ".lock", "w")  # held until the process ends
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"`--out` must not be in use: another run works in {out}") from None
        self.files = tree.project_files()
        self.stamp = tree.tree_hash(self.files)
        self.python_files = [name for name in pycover.test_files(self.files)
                             if not python_tests or any(part in name for part in python_tests)]
        self.c_tests = c_tests
        self.results = out / "results.jsonl"
        self.key = " ".join([self.stamp, *sorted(kinds), *sorted(c_tests), *sorted(python_tests)])
        self.places = [out / "trees" / str(n) for n in range(jobs)]
        self.variants: dict[str, cbuild.Variant] = {}
        self.coverage = CoverageMap()

    # --- preparation

    def prepare(self, files: list[str]) -> list[Workplace]:
        """Copy, build and map what the mutants of these files need."""
        for place in self.places:
            tree.copy_to(place, self.files)
        has_c = any(not name.endswith(".py") for name in files)
        if has_c:
            built = cbuild.variants(self.out, self.places[0])
            for name in ["core", *(kind for kind in ("sim", "asan") if kind in self.kinds)]:
                self.say(f"building {name}")
                cbuild.compile_all(built[name], self.places[0], self.jobs)
                cbuild.link_runner(built[name], {}, self.out / f"runner-{name}")
                self.variants[name] = built[name]
            for place in self.places:
                cbuild.plant_simulator(place)
        self._map(has_c)
        if "python" in self.kinds:
            self._extensions()
        passing: dict[str, list[str]] = {}
        for test in self.coverage.tests:
            file, found, _ = test.removeprefix("py:").partition("::")
            if found and test.startswith("py:"):
                passing.setdefault(file, []).append(test.removeprefix("py:"))
        baseline = {name: self.out / f"runner-{name}" for name in self.variants}
        return [Workplace(place, self.out / "scratch" / place.name, self.variants, self.coverage, passing, self.budget,
                          baseline) for place in self.places]

    def _extensions(self) -> None:
        tree.build_extension(self.places[0])
        for place in self.places[1:]:
            shutil.copytree(self.places[0] / "mpool", place / "mpool", dirs_exist_ok=True)

    def _tracing(self, name: str) -> cbuild.Variant:
        """Build a variant that traces its blocks."""
        variant = cbuild.variants(self.out, self.places[0], coverage=True)[name]
        self.say(f"building {name} for coverage")
        cbuild.compile_all(variant, self.places[0], self.jobs)
        return variant

    def _map(self, has_c: bool) -> None:
        """Read the coverage maps, and make those that are missing."""
        maps, scratch = self.out / "maps", self.out / "coverage"
        maps.mkdir(exist_ok=True)
        for kind, name in (("c", "core"), ("sim", "sim")):
            if kind in self.kinds and has_c:
                self._map_c(maps, scratch, kind, name)
        if "python" in self.kinds:
            self._map_python(maps, scratch, has_c)

    def _map_c(self, maps: Path, scratch: Path, kind: str, name: str) -> None:
        """Map the C tests. The map of a file of tests is kept while it, its helpers and the core are as they were."""
        shared = [file for file in self.files if file.startswith("tests/corpus/") or (
            file.startswith(("csrc/", "tests/c/")) and file.endswith((".c", ".h", ".def", "mutations.py"))
            and not (Path(file).name.startswith("test_") and file.endswith(".c"))
            ) or Path(file).name in cbuild.build.REPLACED or (
                file.startswith("tests/c/") and cbuild.includes_core(self.places[0] / file))]
        groups = coverage_map.tests_by_file(self.places[0], self.out / f"runner-{name}")
        paths, missing = [], {}
        for file, names in groups.items():
            if kind == "c" and self.c_tests and not any(part in Path(file).name for part in self.c_tests):
                continue
            own = [test for test in self.files if test.startswith(file)]
            stamp = tree.tree_hash(sorted({*shared, *own}), ("csrc/", "tests/"))
            paths.append(maps / f"{kind}-{Path(file).stem}-{stamp}.json")
            if not paths[-1].exists():
                missing[file] = (names, paths[-1])
        if missing:
            tests = coverage_map.CTests(self._tracing(name), kind, self.places[0], scratch, self.say)

            def one(file: str) -> None:
                names, path = missing[file]
                tests.map([test for test in names if test not in NOT_RUN]).save(path)
                self.say(f"coverage: {file}")

            with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
                list(pool.map(one, missing))
        for path in paths:
            self.coverage.merge(CoverageMap.load(path))

    def _map_python(self, maps: Path, scratch: Path, has_c: bool) -> None:
        """Map files of Python tests: lines of Python, and of C if C is mutated."""
        paths = {}
        for name in self.python_files:
            stamp = f"{Path(name).stem}-{self._python_stamp(name)}"
            both = maps / f"{stamp}-c.json"
            paths[name] = both if has_c or both.exists() else maps / f"{stamp}.json"
        missing = [name for name, path in paths.items() if not path.exists()]
        if missing:
            place = self.out / "trees" / "coverage"
            tree.copy_to(place, self.files)
            tree.build_extension(place)
            lines = pycover.prepare(self._tracing("core"), place) if has_c else None
            self.say(f"coverage: {len(missing)} files of Python tests")

            def one(name: str) -> None:
                made = pycover.map_file(name, place, scratch, self.say, lines)
                if made is not None:  # else the next run tries again
                    made.save(paths[name])

            with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
                list(pool.map(one, missing))
        for path in paths.values():
            if path.exists():
                self.coverage.merge(CoverageMap.load(path))

    def _python_stamp(self, name: str) -> str:
        return tree.tree_hash(self.files, ("csrc/", "mpool/", "tests/python/helpers/", "tests/python/conftest.py",
                                           name))

    # --- mutants

    def known(self) -> dict[str, dict[str, Any]]:
        """Return the results that an earlier run wrote for the same sources, tests and options, by mutant."""
        if not self.results.exists():
            return {}
        rows = (json.loads(line) for line in self.results.read_text().splitlines() if line.endswith("}"))
        return {row["id"]: row for row in rows if row["tree"] == self.key}

    def run(self, files: list[str], count: int | None, seed: int,
            again: set[str] | None = None) -> list[dict[str, Any]]:
        """Judge mutants, and return a row for each.

        Args:
            files: the sources to mutate.
            count: mutants for each folder that count for the score; None: all there are.
            seed: of the choice.
            again: judge exactly these, by id.
        """
        folders: dict[str, list[Mutant]] = {}
        for file in files:
            folders.setdefault(folder_of(file), []).extend(mutants_of(file, self.say))
        workplaces: queue.SimpleQueue[Workplace] = queue.SimpleQueue()
        for workplace in self.prepare(files):
            workplaces.put(workplace)
        done, rows = self.known(), []

        def judge(mutant: Mutant) -> dict[str, Any]:
            if mutant.id in done:
                return done[mutant.id]
            workplace = workplaces.get()
            try:
                fate = workplace.judge(mutant)
            finally:
                workplaces.put(workplace)
            row = {"tree": self.key, "seed": seed, **mutant.to_dict(), "status": fate.status, "test": fate.test,
                   "seconds": fate.seconds, "tests": fate.tests, "note": fate.note}
            with open(self.results, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self.say(f"{fate.status:10} {fate.seconds:6.1f} s  {mutant.file}:{mutant.line} {mutant.operator} "
                     f"{fate.test}")
            return row

        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            for folder in sorted(folders):
                chosen = sample(folders[folder], None, seed)
                if again is not None:
                    chosen = [mutant for mutant in chosen if mutant.id in again]
                self.say(f"{folder}: {len(chosen)} mutants")
                rows += self._until(pool, judge, iter(chosen), count if again is None else None)
        return rows

    def _until(self, pool: concurrent.futures.Executor, judge: Callable[[Mutant], dict[str, Any]],
               chosen: Iterator[Mutant], count: int | None) -> list[dict[str, Any]]:
        """Judge in order until ``count`` count for the score. The result does not depend on the number of jobs. Mutants
        wait ahead of their turn, so that one that takes minutes does not leave the other jobs without work."""
        rows: list[dict[str, Any]] = []
        pending: list[concurrent.futures.Future[dict[str, Any]]] = []
        counted = 0
        try:
            while count is None or counted < count:
                left = 4 * self.jobs if count is None else count - counted
                while len(pending) < max(self.jobs, min(4 * self.jobs, left)) and (
                        mutant := next(chosen, None)) is not None:
                    pending.append(pool.submit(judge, mutant))
                if not pending:
                    break
                row = pending.pop(0).result()
                counted += row["status"] in COUNTED
                rows.append(row)
        finally:
            for future in pending:
                future.cancel()
        return rows
