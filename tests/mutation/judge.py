"""Decides the fate of one mutant: builds it, and runs the tests of its line until one fails."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import cbuild, process, pycover, tree
from .coverage_map import CoverageMap
from .mutant import Mutant

DETECTED = ("killed", "timeout")
COUNTED = (*DETECTED, "survived", "uncovered")
"""Fates that the score counts. Not counted: ``stillborn`` (it does not compile), ``same`` (the compiler makes the same
program of it: equivalent, or not compiled on this machine; or the CPU lacks the kernel's instructions)."""

Unchanged = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes the unchanged program the one that runs, inside a ``with`` block."""

PYTHON_MEMORY = 64 * process.GIB
ASAN_SLOWNESS = 5
"""Cost of a C test under the sanitizers, about, divided by its cost without them."""

SIM_PERCENT = (1, 10)
"""Shares of the simulator's schedules, before the C tests and after them. A schedule takes about a millisecond and ends
at once where a thread would hang, so a hundred of each world are the cheapest judge of the registry."""


@dataclass(frozen=True)
class Program:
    """A runner of C tests, and how the tests' names and costs relate to those of the coverage map."""

    runner: Path
    baseline: Path
    """The runner of the unchanged program."""
    prefix: str
    """The coverage map names the tests with this prefix."""
    shown: str
    """The results name them with this prefix."""
    percent: int = 100
    """Share of the simulator's schedules."""
    slowness: float = 1
    """Cost of a test, divided by that in the map."""
    memory: int = 12 * process.GIB
    """Bytes of address space."""


@dataclass
class Fate:
    """The verdict on a mutant."""

    status: str
    test: str = ""
    """The test that found it."""
    seconds: float = 0.0
    tests: list[str] = field(default_factory=list)
    """For a survivor, the tests that were run."""
    note: str = ""


@dataclass
class Workplace:
    """A copy of the project in which one mutant at a time is built and tested."""

    tree: Path
    scratch: Path
    variants: dict[str, cbuild.Variant]
    coverage: CoverageMap
    passing: dict[str, list[str]]
    """For every file of Python tests, those that pass without a mutant."""
    budget: float
    """Seconds that the tests of one mutant may cost without it, for C tests and for Python tests each."""
    baseline: dict[str, Path]
    """Runners of the unchanged program."""

    def judge(self, mutant: Mutant) -> Fate:
        """Build and test a mutant."""
        begun = time.monotonic()
        path = self.tree / mutant.file
        original = path.read_bytes()
        text = original.decode()
        try:
            path.write_bytes(mutant.apply(text).encode())
            fate = self._judge_python(mutant, text) if mutant.file.endswith(".py") else self._judge_c(mutant, text)
        finally:
            path.write_bytes(original)
            shutil.rmtree(self.scratch, ignore_errors=True)
        fate.seconds = round(time.monotonic() - begun, 2)
        return fate

    # --- Python

    def _judge_python(self, mutant: Mutant, original: str) -> Fate:
        try:
            compile((self.tree / mutant.file).read_text(), mutant.file, "exec")
        except SyntaxError as error:
            return Fate("stillborn", note=str(error))
        tests = self.coverage.covering(mutant.file, mutant.line, bool(mutant.function))
        path = self.tree / mutant.file

        @contextlib.contextmanager
        def unchanged() -> Iterator[None]:
            path.write_text(original)
            try:
                yield
            finally:
                path.write_text(mutant.apply(original))

        return self._python_tests(tests, unchanged) if tests else Fate("uncovered")

    def _python_tests(self, tests: list[str], unchanged: Unchanged) -> Fate:
        """Run the tests within the budget until one fails that passes on the unchanged program right after."""
        chosen: list[str] = []
        spent = 0.0
        for test in tests:
            cost = self.coverage.cost(test)
            if chosen and spent + cost > self.budget:
                break
            chosen.append(test)
            spent += cost
        for batch in self._batches(chosen):
            names = self._names(batch)
            cost = sum(self.coverage.cost(test) for test in batch)
            while names:
                ended, failed = self._pytest(names, cost)
                if ended.code == 0 and not ended.late:
                    break
                again = [failed] if failed else names
                with unchanged():
                    proof, _ = self._pytest(again, cost)
                if proof.code == 0 and not proof.late:
                    if ended.late:
                        return Fate("timeout", batch[0])
                    return Fate("killed", f"py:{failed}" if failed else
                                f"{batch[0]} and others: exit code {ended.code}",
                                note="" if failed else ended.output[-300:])
                names = [name for name in names if name not in again]
        return Fate("survived", tests=chosen, note="" if len(chosen) == len(tests) else
                    f"{len(tests) - len(chosen)} more tests cover the line, beyond the budget")

    def _batches(self, tests: list[str], limit: float = 3.0) -> Iterable[list[str]]:
        """Cheap tests first: a process for the tests of the first seconds, then for more and more."""
        batch, spent = [], 0.0
        for test in tests:
            batch.append(test)
            spent += self.coverage.cost(test)
            if spent > limit:
                yield batch
                batch, spent, limit = [], 0.0, limit * 3
        if batch:
            yield batch

    def _names(self, tests: list[str]) -> list[str]:
        """Return pytest's names of tests; for a file, of those in it that pass without a mutant."""
        names: dict[str, None] = {}
        for test in tests:
            name = test.removeprefix("py:")
            names.update(dict.fromkeys(self.passing.get(name, [name])))
        return list(names)

    def _pytest(self, names: list[str], cost: float) -> tuple[process.Ended, str]:
        """Run tests until one fails, and return its name.

        Args:
            names: as pytest gives them.
            cost: seconds that they take without a mutant.
        """
        self.scratch.mkdir(parents=True, exist_ok=True)
        (self.scratch / "tests").write_text("\n".join(names))
        report = self.scratch / "report.json"
        report.unlink(missing_ok=True)
        env = tree.environment(self.tree, self.scratch / "tmp", MPOOL_MUTATION_REPORT=str(report))
        ended = process.run([sys.executable, *pycover.command(["-x", f"@{self.scratch / 'tests'}"])], self.tree, env,
                            60 + 8 * cost, 60 + 8 * cost, PYTHON_MEMORY)
        failed = ""
        if report.exists():
            outcomes = json.loads(report.read_text())["outcomes"]
            failed = next((test for test, outcome in outcomes.items() if outcome == "failed"), "")
        return ended, failed

    # --- C

    def _judge_c(self, mutant: Mutant, original: str) -> Fate:
        core = self.variants["core"]
        if all(source.path.startswith(cbuild.build.idle_kernels()) for source in cbuild.affected(core, mutant.file)):
            return Fate("same", note="the CPU lacks the instructions of this kernel")
        try:
            changed = self._compile(core, mutant.file)
        except cbuild.CompileError as error:
            return Fate("stillborn", note=str(error)[:300])
        if not changed:
            return Fate("same")
        users = self._users(mutant.file)
        tests = self.coverage.covering(mutant.file, mutant.line, bool(mutant.function), users)
        if not tests:
            return Fate("uncovered")
        ran: list[str] = []
        simulator = self._simulator(mutant, original, tests)
        programs = []
        if simulator is not None:
            programs.append(simulator)
        if any(test.startswith("c:") for test in tests):
            here = {path: made for path, made in changed.items() if not path.startswith("csrc/python/")}
            if here:
                cbuild.link_runner(core, here, self.scratch / "runner-core")
                programs.append(Program(self.scratch / "runner-core", self.baseline["core"], "c:", "c:"))
        if simulator is not None:
            programs.append(replace(simulator, percent=SIM_PERCENT[1], slowness=SIM_PERCENT[1] / SIM_PERCENT[0]))
        for program in programs:
            fate = self._c_tests([test for test in tests if test.startswith(program.prefix)], program, ran)
            if fate is not None:
                return fate
        sanitized = self._sanitized(mutant, tests)
        if sanitized is not None:
            fate = self._c_tests([test for test in tests if test.startswith("c:")], sanitized, ran)
            if fate is not None:
                return fate
        mine = [test for test in tests if test.startswith("py:")]
        if not mine:
            return Fate("survived", tests=ran)
        extension = self.tree / cbuild.extension_name()
        kept, linked = self.scratch / "kept.so", self.scratch / "linked.so"
        shutil.copy2(extension, kept)

        def put(library: Path) -> None:
            shutil.copy2(library, extension.with_suffix(".next"))
            extension.with_suffix(".next").replace(extension)

        @contextlib.contextmanager
        def unchanged() -> Iterator[None]:
            put(kept)
            try:
                yield
            finally:
                put(linked)

        cbuild.link_extension(core, changed, linked)
        try:
            put(linked)
            fate = self._python_tests(mine, unchanged)
        finally:
            put(kept)
        fate.tests = ran + fate.tests
        return fate

    def _simulator(self, mutant: Mutant, original: str, tests: list[str]) -> Program | None:
        """Build the simulator with the mutant; None if it does not run the line."""
        if "sim" not in self.variants or not any(test.startswith("sim:") for test in tests):
            return None
        variant = self.variants["sim"]
        cbuild.plant_simulator(self.tree, mutant.file)  # over the mutant's source
        try:
            changed = self._compile(variant, mutant.file)
        except cbuild.CompileError:
            return None
        finally:
            self._restore_plants(mutant, original)
        if not changed:
            return None
        cbuild.link_runner(variant, changed, self.scratch / "runner-sim")
        return Program(self.scratch / "runner-sim", self.baseline["sim"], "sim:", "sim:", SIM_PERCENT[0])

    def _sanitized(self, mutant: Mutant, tests: list[str]) -> Program | None:
        """Build the runner of the C tests under sanitizers; None if these are not wanted or cannot tell."""
        if "asan" not in self.variants or not any(test.startswith("c:") for test in tests):
            return None
        variant = self.variants["asan"]
        changed = self._compile(variant, mutant.file)
        if not changed:
            return None
        cbuild.link_runner(variant, changed, self.scratch / "runner-asan")
        return Program(self.scratch / "runner-asan", self.baseline["asan"], "c:", "asan:", slowness=ASAN_SLOWNESS,
                       memory=process.UNLIMITED)

    def _users(self, file: str) -> list[str]:
        """Return the files that use what a file defines at file scope: those that include it. A file of tables alone is
        used by those that include its header."""
        core = self.variants["core"]
        header = file.removesuffix(".c") + ".h"
        source = header if file.endswith(".c") and not self.coverage.lines.get(file) else file
        return [user.path for user in cbuild.affected(core, source)]

    def _restore_plants(self, mutant: Mutant, original: str) -> None:
        path = self.tree / mutant.file
        path.write_text(original)
        cbuild.plant_simulator(self.tree, mutant.file)
        path.write_text(mutant.apply(original))

    def _compile(self, variant: cbuild.Variant, file: str) -> dict[str, Path]:
        """Return the objects of a mutant that differ from those of the original."""
        changed = {}
        for source in cbuild.affected(variant, file):
            made = cbuild.compile_one(variant, self.tree, source, self.scratch / variant.name)
            if made.read_bytes() != variant.object_of(source).read_bytes():
                changed[source.path] = made
        return changed

    def _c_tests(self, tests: list[str], program: Program, ran: list[str]) -> Fate | None:
        """Run tests of a runner until one fails; those that pass are added to ``ran``."""
        for batch in self._batches(self._within_budget(tests, program), 0.5):
            rest = list(batch)
            while rest:
                late, test = self._run_c(rest, program, program.runner, self._limit(rest, program))
                if not test:
                    break
                fate = self._confirm(late, test, program)
                if fate is not None:
                    return fate
                rest.remove(test)
            shown = [program.shown + test.removeprefix(program.prefix) for test in batch]
            ran += [test for test in shown if test not in ran]
        return None

    def _cost(self, test: str, program: Program) -> float:
        return self.coverage.cost(test) * program.slowness

    def _within_budget(self, tests: list[str], program: Program) -> list[str]:
        chosen: list[str] = []
        spent = 0.0
        for test in tests:
            spent += self._cost(test, program)
            if chosen and spent > self.budget:
                break
            chosen.append(test)
        return chosen

    def _limit(self, tests: Sequence[str], program: Program) -> float:
        return 2 + 4 * max(self._cost(test, program) for test in tests)

    def _confirm(self, late: bool, test: str, program: Program) -> Fate | None:
        """Return the verdict of a test that failed, or None if the unchanged program fails too.

        A test that was late gets another chance with three times of what the unchanged program takes right now: the
        machine may be busy.
        """
        begun = time.monotonic()
        if self._run_c([test], program, program.baseline, 30 + 10 * self._limit([test], program))[1]:
            return None
        if late:
            limit = max(self._limit([test], program), 3 + 3 * (time.monotonic() - begun))
            late, failed = self._run_c([test], program, program.runner, limit)
            if not failed:
                return None
        return Fate("timeout" if late else "killed", program.shown + test.removeprefix(program.prefix))

    def _run_c(self, tests: Sequence[str], program: Program, runner: Path, limit: float) -> tuple[bool, str]:
        """Run tests, each with a limit of wall time in seconds, until one fails.

        Returns:
            True if it took too long; its name, or "" if all passed.
        """
        env = tree.environment(self.tree, self.scratch / "tmp", MPOOL_SIM_PERCENT=str(program.percent))
        names = [test.removeprefix(program.prefix) for test in tests]
        words = [word for name in names for word in ("--test", name)]
        wall = 30 + limit + 10 * sum(self._cost(test, program) for test in tests)
        ended = process.run([runner, *words, "--first-failure", "--limit", f"{limit:.3f}"], self.tree, env, wall,
                            5 + 2 * limit, program.memory)
        if ended.code == 0 and not ended.late:
            return False, ""
        found = re.search(r"^FAIL (\S+)\n(.*)", ended.output, re.MULTILINE)
        name = found[1] if found and found[1] in names else names[0]
        said = found[2] if found else ""
        return ended.late or "did not end within" in said or "signal 24" in said, program.prefix + name
