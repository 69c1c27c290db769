"""Which lines of C the basic blocks of a program belong to, and reading which of its blocks ran (trace.c)."""

from __future__ import annotations

import re
import subprocess
from bisect import bisect_left, bisect_right
from pathlib import Path

import numpy as np

from . import cbuild

BYTES = 1 << 23
"""Size of the file that trace.c maps."""


def new_trace(path: Path) -> None:
    """Create or clear a file for MPOOL_MUTATION_TRACE."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+b" if path.exists() else "wb") as file:
        file.truncate(0)
        file.truncate(BYTES)


def read_trace(path: Path) -> np.ndarray:
    """Return the numbers of the bytes that are set."""
    return np.flatnonzero(np.fromfile(path, np.uint8)).astype(np.int32)


class Lines:
    """The lines of a program's basic blocks."""

    def __init__(self, program: Path, sources: list[cbuild.Source]) -> None:
        """Read the program's line table and code.

        Args:
            program: built with ``-g1`` and trace.c.
            sources: what it was linked from, in this order: the table names the files of a unit by their last part.
        """
        calls, starts = _sites(program)
        begins = [call for call, _ in calls]
        places: dict[tuple[str, int], int] = {}
        row_place, row_site = [], []
        rows = _line_table(program, [source.path for source in sources])
        ends = sorted({*starts, *(address for _, _, address in rows)})
        for file, line, address in rows:
            place = places.setdefault((file, line), len(places))
            function = bisect_right(starts, address)
            first = bisect_right(begins, address) - 1
            if first < 0 or begins[first] < (starts[function - 1] if function else 0):
                first += 1  # before the first call of its function: the function's begin
            # Blocks that begin before the next row belong to the same line.
            after = bisect_right(ends, address)
            following = bisect_left(begins, ends[after]) if after < len(ends) else 0
            for at in range(first, max(first + 1, following)):
                if at < len(calls):
                    row_place.append(place)
                    row_site.append(calls[at][1] // 4)
        self.places = list(places)
        self._row_place, self._row_site = np.array(row_place, np.int64), np.array(row_site, np.int64)

    def ran(self, trace: np.ndarray) -> list[tuple[str, int]]:
        """Return the lines whose blocks ran, as file and number."""
        hit = np.zeros(BYTES, bool)
        hit[trace] = True
        return [self.places[n] for n in np.unique(self._row_place[hit[self._row_site]])]


def _sites(program: Path) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the calls of the trace function, each with the address after it, and the addresses of functions."""
    sites, starts, call = [], [], 0
    with subprocess.Popen(["objdump", "-d", "--no-show-raw-insn", str(program)], stdout=subprocess.PIPE,
                          text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("0"):
                starts.append(int(line.split()[0], 16))
                continue
            if call and ":" in line:
                sites.append((call, int(line.partition(":")[0], 16)))
                call = 0
            if "__sanitizer_cov_trace_pc" in line and "call" in line:
                call = int(line.partition(":")[0], 16)
    return sites, starts


def _line_table(program: Path, sources: list[str]) -> list[tuple[str, int, int]]:
    """Return file, line and address of the rows of csrc."""
    rows = []
    by_name = {source.rpartition("/")[2]: source for source in sources}
    unit, file, at = "", "", -1
    before = ""
    with subprocess.Popen(["objdump", "--dwarf=decodedline", str(program)], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            heading = re.match(r"^(?:CU: )?(\S+):(?:\[\+\+\])?$", line)
            if heading:
                before = file = heading[1]
                if "/" not in file:
                    file = unit
                continue
            if line.startswith("File name"):  # a new unit, named by the line before
                name = before.rpartition("/")[2]
                following = [n for n in range(at + 1, len(sources)) if sources[n].rpartition("/")[2] == name]
                if following:
                    at = following[0]
                    unit = sources[at]
                file = unit
                continue
            words = line.split()
            if words and file == unit and words[0] != unit.rpartition("/")[2]:  # an included file, still without path
                file = by_name.get(words[0], file)
            if len(words) >= 3 and file.startswith("csrc/") and words[1].isdigit() and words[2].startswith("0x"):
                rows.append((file, int(words[1]), int(words[2], 16)))
    return rows
