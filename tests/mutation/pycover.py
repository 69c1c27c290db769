"""Runs the Python tests under coverage.py, with an extension that traces its blocks, and notes the lines of each."""

from __future__ import annotations

import ast
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import blocks, cbuild, coverage_map, process, tree

LEFT_OUT = {
    "tests/python/core/test_c_builds.py": "builds and runs the C tests",
    "tests/python/core/test_c_races.py": "builds and runs the C tests",
    "tests/python/core/test_c_sources.py": "reads and compiles the sources",
    "tests/python/core/test_fuzz.py": "compiles with clang",
    "tests/python/documents/test_dependencies.py": "creates environments",
    "tests/python/documents/test_docs.py": "builds the documentation",
    "tests/python/documents/test_notebook.py": "starts a notebook",
    "tests/python/integrations/test_ray_cluster.py": "starts Ray clusters",
    "tests/python/integrations/test_ray_fronts.py": "starts Ray",
    "tests/python/integrations/test_ray_parquet.py": "starts Ray",
    "tests/python/integrations/test_ray_plans.py": "starts Ray",
    "tests/python/integrations/test_ray_replicas.py": "starts Ray",
    "tests/python/server/test_dashboard_browser.py": "starts a browser",
    "tests/python/server/test_dashboard_playground.py": "starts a browser",
}
"""Test files that take no part, and why."""

SECONDS, WALL = 900, 3600
"""Limits for one file of tests while lines are recorded: CPU time of each process, and wall time, which a busy machine
multiplies."""

_CONFIG = """[run]
source = {tree}/mpool
data_file = {out}/data
parallel = True
sigterm = True
patch = subprocess, _exit
context = ${{MPOOL_MUTATION_TEST-}}
disable_warnings = no-data-collected,module-not-imported,already-imported,couldnt-parse
"""


def test_files(files: list[str]) -> list[str]:
    """Return the files of Python tests that take part."""
    return [name for name in files if name.startswith("tests/python/") and Path(name).name.startswith("test_")
            and name.endswith(".py") and name not in LEFT_OUT]


def command(arguments: list[str]) -> list[str]:
    """Return the words of a pytest run. The project's ``addopts`` need plugins that do not load here."""
    return ["-m", "pytest", "-q", "-o", "addopts=--strict-markers", "-p", "no:cacheprovider", "-p", "mutation.plugin",
            "--tb=line", "--no-header", *arguments]


def map_file(name: str, place: Path, out: Path, say: Callable[[str], None],
             lines: blocks.Lines | None = None) -> coverage_map.CoverageMap | None:
    """Run one file of tests and return what it covers; None if pytest did not run all of them.

    Args:
        name: the file, below the project.
        place: a copy of the project.
        out: scratch folder.
        say: takes lines of progress.
        lines: those of the copy's extension, from :func:`prepare`; None: only Python is mapped.
    """
    import coverage

    data = out / "python" / Path(name).stem
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir(parents=True)
    (data / "rc").write_text(_CONFIG.format(tree=place, out=data))
    report, trace = data / "report.json", data / "trace"
    env = tree.environment(place, out / "tmp", MPOOL_MUTATION_REPORT=str(report))
    if lines is not None:
        blocks.new_trace(trace)
        env["MPOOL_MUTATION_TRACE"] = str(trace)
    begun = time.monotonic()
    ended = process.run([sys.executable, "-m", "coverage", "run", f"--rcfile={data / 'rc'}", *command([name])], place,
                        env, WALL, SECONDS, 64 * process.GIB)
    seconds = time.monotonic() - begun
    if not report.exists() or ended.code not in (0, 1):  # 1: tests failed; others: pytest did not run every test
        say(f"{name}: no whole report after {seconds:.0f} s, not used: {ended.output.strip()[-500:]}")
        return None
    result = coverage_map.CoverageMap()
    said = json.loads(report.read_text())
    failed = [test for test, outcome in said["outcomes"].items() if outcome == "failed"]
    passed = {test for test, outcome in said["outcomes"].items() if outcome == "passed"}
    if failed:
        say(f"{name}: {len(failed)} tests fail without a mutant, not used: {', '.join(failed)[:300]}")
    if not passed:
        return result
    whole = result.test(f"py:{name}", sum(said["seconds"].values()))
    for test in sorted(passed):
        result.test(f"py:{test}", said["seconds"][test])
    prefix = f"{place}{os.sep}"
    parsed: set[str] = set()
    for written in sorted(data.glob("data.*")):
        found = coverage.CoverageData(basename=str(written))
        found.read()
        outlives = any(f".pid{pid}." in written.name for pid in said["outliving"])
        for path in found.measured_files():
            if not path.startswith(prefix):
                continue
            file = path.removeprefix(prefix)
            if path not in parsed:
                parsed.add(path)
                for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
                    if isinstance(node, ast.stmt):
                        result.add(whole, file, node.lineno, False)
            for line, contexts in found.contexts_by_lineno(path).items():
                for context in contexts:
                    test = context.rpartition("|")[2]
                    if test in passed:
                        result.add(result.known[f"py:{test}"], file, line, True)
                    if not test or outlives:
                        result.add(whole, file, line, True)
    if lines is not None:
        for file, line in lines.places:
            result.add(whole, file, line, False)
        with np.load(f"{report}.npz") as traces:
            for n, test in enumerate(said["seconds"]):
                if test in passed:
                    for file, line in lines.ran(traces[str(n)]):
                        result.add(result.known[f"py:{test}"], file, line, True)
    shutil.rmtree(data, ignore_errors=True)
    say(f"coverage: {name}, {len(passed)} tests in {seconds:.0f} s")
    return result


def prepare(variant: cbuild.Variant, place: Path) -> blocks.Lines:
    """Link the tracing extension into a copy of the project, and return its lines."""
    extension = place / cbuild.extension_name()
    cbuild.link_extension(variant, {}, extension)
    return blocks.Lines(extension, cbuild.extension_sources(variant))
