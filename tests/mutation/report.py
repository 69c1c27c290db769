"""The table of results, with the 95 % confidence interval of each score, and the list of survivors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from .judge import COUNTED, DETECTED
from .mutant import TARGETS, folder_of, group_of

_COLUMNS = ("mutants", "killed", "timeout", "survived", "uncovered", "same", "stillborn")


def wilson(hits: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Return the Wilson score interval of a share, by default at 95 %."""
    if total == 0:
        return 0.0, 1.0
    share = hits / total
    centre = share + z * z / (2 * total)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    scale = 1 + z * z / total
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return the table as Markdown: a row for each folder, then for each group with its target.

    A score is the share of detected mutants (killed or timed out) among the counted ones; a mutant that no test runs
    counts as survived.
    """
    folders: dict[str, Counter[str]] = {}
    groups: dict[str, Counter[str]] = {}
    for row in rows:
        folders.setdefault(folder_of(row["file"]), Counter())[row["status"]] += 1
        groups.setdefault(group_of(row["file"]), Counter())[row["status"]] += 1
    lines = [f"| folder | {' | '.join(_COLUMNS)} | score | 95 % interval | target |",
             "|---" * (len(_COLUMNS) + 4) + "|"]
    for name, counts in [*sorted(folders.items()), *sorted(groups.items())]:
        total = sum(counts[status] for status in COUNTED)
        hits = sum(counts[status] for status in DETECTED)
        low, high = wilson(hits, total)
        cells = [str(total), *(str(counts[column]) for column in _COLUMNS[1:])]
        target = f"{TARGETS[name]} %" if name in TARGETS else ""
        score = f"{100 * hits / total:.1f} %" if total else "-"
        shown = f"**{name}**" if name in groups else f"`{name}`"
        lines.append(f"| {shown} | {' | '.join(cells)} | {score} | {100 * low:.1f} to {100 * high:.1f} % | {target} |")
    return "\n".join(lines)


def survivors(rows: Iterable[dict[str, Any]]) -> str:
    """Return the survivors with place, change and tests; those that no test runs come last, as one list."""
    parts: list[str] = []
    chosen = [row for row in rows if row["status"] in ("survived", "uncovered")]
    for row in sorted(chosen, key=lambda row: (row["status"] == "uncovered", row["file"], row["line"])):
        where = f"{row['file']}:{row['line']}" + (f" {row['function']}()" if row["function"] else "")
        parts.append(f"{row['id']} {where}: {row['operator']}\n    - {row['source']}\n    + {row['mutated']}\n    "
                     + (_tests(row) if row["status"] == "survived" else "no test runs this line"))
    return "\n".join(parts)


def _tests(row: dict[str, Any]) -> str:
    tests = row.get("tests", [])
    shown = ", ".join(tests[:4]) + (f" and {len(tests) - 4} more" if len(tests) > 4 else "")
    return f"survived {shown}" + (f" ({row['note']})" if row.get("note") else "")
