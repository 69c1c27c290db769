"""Which tests run which lines: the map, and how C tests fill it."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from . import blocks, cbuild, process, tree


@dataclass
class CoverageMap:
    """For every line that has code, the tests that ran it."""

    tests: list[str] = field(default_factory=list)
    """``c:name``, ``sim:name``, ``py:file::name``, or ``py:file`` for everything in a file."""
    costs: list[float] = field(default_factory=list)
    """Seconds of each test."""
    lines: dict[str, dict[int, set[int]]] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)
    tables: dict[str, dict[str, set[int]]] = field(default_factory=dict)
    """For every kind of tests that was merged, the lines that have code in its build: compilers optimise builds
    differently."""

    def test(self, name: str, cost: float) -> int:
        """Return the number of a test, which is added if it is new."""
        if name not in self.known:
            self.known[name] = len(self.tests)
            self.tests.append(name)
            self.costs.append(cost)
        self.costs[self.known[name]] = max(cost, 0.001)
        return self.known[name]

    def add(self, test: int, file: str, line: int, ran: bool) -> None:
        """Note that a line has code, and that a test ran it."""
        tests = self.lines.setdefault(file, {}).setdefault(line, set())
        if ran:
            tests.add(test)

    def covering(self, file: str, line: int, in_function: bool, users: Iterable[str] = ()) -> list[str]:
        """Return the tests of a line, cheapest first.

        Args:
            file: below the project.
            line: counted from 1.
            in_function: the line belongs to a function. If it has no code of its own, it continues the nearest line
                before it that has.
            users: for a line at file scope, the files that include it. Its tests are all of the file and of these.
        """
        lines = self.lines.get(file, {})
        if in_function and lines:
            chosen = set()
            for kind, own in (self.tables or {"": {file: set(lines)}}).items():
                known = own.get(file)
                if known:
                    nearest = line if line in known else max((n for n in known if n < line), default=min(known))
                    chosen |= {n for n in lines[nearest] if self.tests[n].startswith(kind)}
        else:
            every = [lines, *(self.lines.get(user, {}) for user in users)]
            chosen = set().union(*(tests for one in every for tests in one.values()))
        return [self.tests[n] for n in sorted(chosen, key=lambda n: (self.costs[n], n))]

    def cost(self, test: str) -> float:
        """Return the seconds of a test."""
        return self.costs[self.known[test]]

    def save(self, path: Path) -> None:
        """Write the map. Lines with the same tests share one list."""
        sets: dict[tuple[int, ...], int] = {}
        lines = {file: {str(line): sets.setdefault(tuple(sorted(tests)), len(sets)) for line, tests in rows.items()}
                 for file, rows in self.lines.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps({"tests": self.tests, "costs": [round(cost, 4) for cost in self.costs],
                                         "sets": list(sets), "lines": lines}))
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> CoverageMap:
        """Read a map."""
        data = json.loads(path.read_text())
        sets = [set(one) for one in data["sets"]]
        lines = {file: {int(line): sets[n] for line, n in rows.items()} for file, rows in data["lines"].items()}
        return cls(data["tests"], data["costs"], lines, {name: n for n, name in enumerate(data["tests"])})

    def merge(self, other: CoverageMap) -> None:
        """Add everything that another map knows."""
        numbers = [self.test(name, cost) for name, cost in zip(other.tests, other.costs)]
        table = self.tables.setdefault(other.tests[0].partition(":")[0] + ":", {}) if other.tests else {}
        for file, rows in other.lines.items():
            mine = self.lines.setdefault(file, {})
            table.setdefault(file, set()).update(rows)
            for line, tests in rows.items():
                mine[line] = mine.get(line, set()) | {numbers[n] for n in tests}


class CTests:
    """The runner of a variant that traces its blocks."""

    def __init__(self, variant: cbuild.Variant, kind: str, place: Path, out: Path, say: Callable[[str], None]) -> None:
        """Link the runner.

        Args:
            variant: built with coverage.
            kind: prefix of the tests' names: ``c`` or ``sim``.
            place: a copy of the project.
            out: folder for the runner and its trace.
            say: takes lines of progress.
        """
        self.kind, self.place, self.out, self.say = kind, place, out, say
        self.runner = out / f"{kind}-runner"
        cbuild.link_runner(variant, {}, self.runner)
        self.lines = blocks.Lines(self.runner, variant.sources)

    def map(self, names: list[str]) -> CoverageMap:
        """Run tests, each alone, and note the lines that they run. Threads may call this at the same time."""
        trace = self.out / f"{self.kind}-trace-{threading.get_ident()}"
        env = tree.environment(self.place, self.out / "tmp", MPOOL_MUTATION_TRACE=str(trace), MPOOL_SIM_PERCENT="1")
        result = CoverageMap()
        for file, line in self.lines.places:
            result.add(0, file, line, False)
        for name in names:
            blocks.new_trace(trace)
            ended = process.run([self.runner, "--test", name, "--slow", "10", "--verbose"], self.place, env, 600, 600)
            took = re.search(rf"^ok   {name} \(([\d.]+) s, cpu ([\d.]+) s\)", ended.output, re.MULTILINE)
            if ended.code != 0 or took is None:
                self.say(f"{self.kind}:{name}: {'skipped' if ended.code == 0 else 'fails without a mutant'}, not used")
                continue
            test = result.test(f"{self.kind}:{name}", float(took[1]))
            for file, line in self.lines.ran(blocks.read_trace(trace)):
                result.add(test, file, line, True)
        trace.unlink(missing_ok=True)
        return result


def tests_by_file(place: Path, runner: Path) -> dict[str, list[str]]:
    """Return the runner's tests by their file below the copy; those that a macro names are under ``tests/c/``."""
    listed = subprocess.run([runner, "--list"], capture_output=True, text=True, check=True).stdout.split()
    files = {name: path.relative_to(place).as_posix() for path in sorted((place / "tests/c").glob("*.c"))
             for name in re.findall(r"^MP_TEST(?:_SECONDS)?\((\w+)", path.read_text(), re.MULTILINE)}
    groups: dict[str, list[str]] = {}
    for name in listed:
        groups.setdefault(files.get(name, "tests/c/"), []).append(name)
    return groups
