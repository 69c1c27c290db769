"""Decides the fate of one mutant: builds it, and runs the tests of its line until one fails."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from . import cbuild, process, pycover, tree
from .coverage_map import CoverageMap
from .mutant import Mutant

DETECTED = ("killed", "timeout")
COUNTED = (*DETECTED, "survived", "uncovered")
"""Fates that the score counts. Not counted: ``stillborn`` (it does not compile), ``same`` (the compiler makes the same
program of it: equivalent, or not compiled on this machine), ``equivalent`` (listed in equivalent.toml)."""

PYTHON_MEMORY = 64 * process.GIB


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
            fate = self._judge_python(mutant) if mutant.file.endswith(".py") else self._judge_c(mutant, text)
        finally:
            path.write_bytes(original)
            shutil.rmtree(self.scratch, ignore_errors=True)
        fate.seconds = round(time.monotonic() - begun, 2)
        return fate

    # --- Python

    def _judge_python(self, mutant: Mutant) -> Fate:
        try:
            compile((self.tree / mutant.file).read_text(), mutant.file, "exec")
        except SyntaxError as error:
            return Fate("stillborn", note=str(error))
        tests = self.coverage.covering(mutant.file, mutant.line, bool(mutant.function))
        return self._python_tests(tests) if tests else Fate("uncovered")

    def _python_tests(self, tests: list[str]) -> Fate:
        chosen, spent = [], 0.0
        for test in tests:
            cost = self.coverage.cost(test)
            if chosen and spent + cost > self.budget:
                break
            chosen.append(test)
            spent += cost
        for batch in self._batches(chosen):
            ended, failed = self._pytest(batch)
            if ended.late:
                return Fate("timeout", batch[0])
            if failed or ended.code != 0:
                return Fate("killed", failed or f"{batch[0]} and others: exit code {ended.code}",
                            note="" if failed else ended.output[-300:])
        return Fate("survived", tests=chosen, note="" if len(chosen) == len(tests) else
                    f"{len(tests) - len(chosen)} more tests cover the line, beyond the budget")

    def _batches(self, tests: list[str]) -> Iterable[list[str]]:
        """Cheap tests first: a process for the tests of the first seconds, then for more and more."""
        batch, spent, limit = [], 0.0, 3.0
        for test in tests:
            batch.append(test)
            spent += self.coverage.cost(test)
            if spent > limit:
                yield batch
                batch, spent, limit = [], 0.0, limit * 3
        if batch:
            yield batch

    def _pytest(self, tests: list[str]) -> tuple[process.Ended, str]:
        names: dict[str, None] = {}
        for test in tests:
            name = test.removeprefix("py:")
            names.update(dict.fromkeys(self.passing.get(name, [name])))
        self.scratch.mkdir(parents=True, exist_ok=True)
        (self.scratch / "tests").write_text("\n".join(names))
        report = self.scratch / "report.json"
        report.unlink(missing_ok=True)
        env = tree.environment(self.tree, self.scratch / "tmp", MPOOL_MUTATION_REPORT=str(report))
        cost = sum(self.coverage.cost(test) for test in tests)
        ended = process.run([sys.executable, *pycover.command(["-x", f"@{self.scratch / 'tests'}"])], self.tree, env,
                            60 + 8 * cost, 60 + 8 * cost, PYTHON_MEMORY)
        failed = ""
        if report.exists():
            outcomes = json.loads(report.read_text())["outcomes"]
            failed = next((f"py:{test}" for test, outcome in outcomes.items() if outcome == "failed"), "")
        return ended, failed

    # --- C

    def _judge_c(self, mutant: Mutant, original: str) -> Fate:
        core = self.variants["core"]
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
        for kind, variant in self.variants.items():
            prefix = "sim:" if variant.is_simulator else "c:"
            mine = [test for test in tests if test.startswith(prefix)]
            if not mine:
                continue
            if variant.is_simulator:
                cbuild.plant_simulator(self.tree, mutant.file)  # over the mutant's source
                try:
                    changed_here = self._compile(variant, mutant.file)
                except cbuild.CompileError as error:
                    return Fate("stillborn", note=str(error)[:300])
                finally:
                    self._restore_plants(mutant, original)
            else:
                changed_here = {path: made for path, made in changed.items() if not path.startswith("csrc/python/")}
            if not changed_here:
                continue
            runner = self.scratch / f"runner-{kind}"
            cbuild.link_runner(variant, changed_here, runner)
            fate = self._c_tests(mine, prefix, runner, self.baseline[kind], ran)
            if fate is not None:
                return fate
        mine = [test for test in tests if test.startswith("py:")]
        if not mine:
            return Fate("survived", tests=ran)
        extension = self.tree / cbuild.extension_name()
        kept = self.scratch / "kept.so"
        shutil.copy2(extension, kept)
        try:
            cbuild.link_extension(core, changed, extension)
            fate = self._python_tests(mine)
        finally:
            shutil.copy2(kept, extension.with_suffix(".old"))
            extension.with_suffix(".old").replace(extension)
        fate.tests = ran + fate.tests
        return fate

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

    def _c_tests(self, tests: list[str], prefix: str, runner: Path, baseline: Path, ran: list[str]) -> Fate | None:
        spent = 0.0
        for test in tests:
            cost = self.coverage.cost(test)
            if ran and spent + cost > self.budget:
                break
            spent += cost
            name = test.removeprefix(prefix)
            late, failed = self._c_test(name, runner, cost, 1)
            if late:  # a busy machine, or a hang: only a hang takes three times as long
                late, failed = self._c_test(name, runner, cost, 3)
            if (late or failed) and not any(self._c_test(name, baseline, cost, 4)):
                return Fate("timeout" if late else "killed", test)
            ran.append(test)
        return None

    def _c_test(self, name: str, runner: Path, cost: float, patience: float) -> tuple[bool, bool]:
        """Run one test; return whether it took too long, and whether it failed."""
        seconds = patience * (3 + 8 * cost)
        env = tree.environment(self.tree, self.scratch / "tmp")
        ended = process.run([runner, "--only", name, "--slow", f"{seconds / 20:.3f}"], self.tree, env,
                            30 + 10 * seconds, 5 + 2 * seconds)
        late = ended.late or "did not end within" in ended.output or "signal 24" in ended.output
        return late, not late and ended.code != 0
