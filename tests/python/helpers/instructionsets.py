"""The section of pytest's summary on instruction sets that this CPU lacks, and how the tests ran their kernels."""

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

CPU_C = Path(__file__).resolve().parents[3] / "csrc" / "base" / "cpu.c"
PROPERTY = "instruction_sets"
"""A test that ran kernels by other means records the property (names, means), such as ``(["amx"], "in qemu")``."""
TITLE = "instruction sets that this CPU lacks"


def known(machine: str | None = None) -> list[str]:
    """Return the instruction sets that the core has kernels for: the levels of base/cpu.c.

    Args:
        machine: architecture, such as "x86_64"; None: all of them.
    """
    found, architecture = [], ""
    for line in CPU_C.read_text(encoding="utf-8").splitlines():
        if guard := re.match(r"#(?:el)?if defined\(__(\w+)__\)", line):
            architecture = guard[1]
        elif (level := re.match(r' {4}\{"(\w+)", ', line)) and level[1] != "ref" and machine in (None, architecture):
            found.append(level[1])
    return found


def of_this_cpu() -> list[str] | None:
    """Return the instruction sets of this CPU, limited by MPOOL_CPU; None if the core cannot be imported."""
    try:
        from mpool import _core
    except Exception:  # the summary must not hide the results of the tests
        return None
    features = list(_core.config()["cpu"]["features"])
    if "avx512" in features and not os.environ.get("MPOOL_CPU") and _accepts("avxvnni"):
        features.insert(features.index("avx512"), "avxvnni")
    return features


@functools.cache
def _accepts(level: str) -> bool:
    """Return True if the core accepts the level as MPOOL_CPU. Levels of AVX-512 do not include avxvnni, so the features
    in use do not tell whether such a CPU has it. The core detects levels when it is loaded: a process of its own asks.
    """
    run = subprocess.run([sys.executable, "-c", "import mpool._core"], env={**os.environ, "MPOOL_CPU": level},
                         capture_output=True)
    return run.returncode == 0


def tested(reports: Iterable[object]) -> dict[str, str]:
    """Return the instruction sets whose kernels ran by other means in tests that passed, and the means.

    Args:
        reports: reports of pytest for tests that passed.
    """
    found = {}
    for report in reports:
        for name, value in getattr(report, "user_properties", []):
            if name == PROPERTY:
                names, means = value
                found.update(dict.fromkeys(names, means))
    return found


def lines(names: list[str], features: list[str] | None, means: dict[str, str]) -> list[str]:
    """Return the lines of the section: the sets that the CPU lacks, by what they were tested by.

    Args:
        names: every set, from :func:`known`.
        features: those of the CPU; None: unknown.
        means: those tested otherwise, from :func:`tested`.
    """
    if features is None:
        return ["unknown: the compiled core cannot be imported"]
    groups: dict[str, list[str]] = {}
    for name in names:
        if name not in features:
            groups.setdefault(means.get(name, ""), []).append(name)
    rows = [f"tested {how}: {', '.join(group)}" for how, group in sorted(groups.items()) if how]
    return rows + ([f"not tested in this run: {', '.join(groups[''])}"] if "" in groups else [])


def write(reports: Iterable[object], section: Callable[[str], None], line: Callable[[str], None]) -> None:
    """Write the section, unless the sources are missing or the CPU has every set.

    Args:
        reports: see :func:`tested`.
        section: writes a title.
        line: writes a line.
    """
    rows = lines(known(), of_this_cpu(), tested(reports)) if CPU_C.exists() else []
    if rows:
        section(TITLE)
    for row in rows:
        line(row)
