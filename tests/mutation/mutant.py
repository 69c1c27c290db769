"""Mutants, the groups that they are counted in, and the seeded choice among them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """One change of one place of one file."""

    file: str
    """Path below the repository."""
    start: int
    """Offset of the replaced text, in characters."""
    end: int
    new: str
    operator: str
    line: int
    function: str
    """Enclosing function; empty at file scope."""
    source: str
    """The line as it is, without indentation."""
    mutated: str
    """The line as the mutant has it."""

    @property
    def id(self) -> str:
        """A name that does not depend on other lines of the file: results of an unchanged function keep it."""
        text = "\0".join((self.file, self.function, self.operator, self.source, self.mutated, str(self.line)))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def apply(self, text: str) -> str:
        """Return the file's text with the mutant in it."""
        return text[:self.start] + self.new + text[self.end:]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {"id": self.id, **asdict(self)}


def make(file: str, text: str, start: int, end: int, new: str, operator: str, function: str) -> Mutant:
    """Return the mutant that replaces ``text[start:end]``."""
    first = text.rfind("\n", 0, start) + 1
    changed = text[first:start] + new + text[end:].partition("\n")[0]
    return Mutant(file, start, end, new, operator, text.count("\n", 0, start) + 1, function,
                  text[first:].partition("\n")[0].strip(), changed.partition("\n")[0].strip())


GROUPS = {"csrc/kernels": "kernels and models", "csrc/models": "kernels and models",
          "csrc/vectors": "kernels and models", "csrc/tensor": "files", "csrc/files": "files",
          "csrc/registry": "registry and pool", "csrc/isolation": "registry and pool",
          "csrc/base": "registry and pool", "csrc/python": "Python", "mpool": "Python"}
"""Folders and the groups for which the project has a target."""
TARGETS = {"kernels and models": 93, "files": 93, "registry and pool": 88, "Python": 83}
"""Lower bounds of the 95 % confidence interval that the project aims at, in per cent."""


def folder_of(file: str) -> str:
    """Return the top folder that a file is counted in: ``csrc/kernels``, ``mpool/server``; ``mpool`` for the rest."""
    parts = file.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def group_of(file: str) -> str:
    """Return the group of a file."""
    return next(group for folder, group in GROUPS.items() if file.startswith(folder + "/"))


def sample(mutants: Iterable[Mutant], count: int | None, seed: int) -> list[Mutant]:
    """Choose mutants: lines first, each with the same chance, then one mutant of the line.

    A line of a table with twenty constants has the chance of a line with one comparison. Only when every line has had
    its mutant does a line give a second one. The result depends on the seed and the set of mutants alone; a smaller
    ``count`` gives the beginning of a larger one.

    Args:
        mutants: all candidates.
        count: how many; None: all.
        seed: of the choice.
    """
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for mutant in sorted(mutants, key=lambda m: (m.file, m.start, m.end, m.operator, m.new)):
        by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    choice = random.Random(seed)
    lines = list(by_line.values())
    choice.shuffle(lines)
    for line in lines:
        choice.shuffle(line)
    chosen: list[Mutant] = []
    for turn in range(max(map(len, lines), default=0)):
        chosen += [line[turn] for line in lines if turn < len(line)]
        if count is not None and len(chosen) >= count:
            return chosen[:count]
    return chosen
