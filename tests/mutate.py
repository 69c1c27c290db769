#!/usr/bin/env python3
"""Mutation testing: change the sources in one place, and see whether a test fails.

    python tests/mutate.py csrc/files --sample 50                     # 50 mutants of a folder
    python tests/mutate.py mpool/server/errors.py --sample 20 --seed 7 --python tests/python/server/test_server_http.py
    python tests/mutate.py csrc/files/cursor.c --sample 20 --list     # show, do not run
    python tests/mutate.py csrc/files --survivors results.jsonl       # after new tests

Mutants are planted in a copy of the project below ``--out``; the worktree is not changed. The C tests whose names begin
with a prefix, and files of Python tests, judge them: by default those that belong to the folder. They must pass without
a mutant. The table goes to standard output, progress to standard error. docs/mutation-testing.md explains the results.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutation.operators import of_c, of_python  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
#: Folder of csrc -> prefixes of the names of the C tests that judge it.
C_TESTS = {"base": ("base", "pool", "registry"), "files": ("files",), "isolation": ("isolation",),
           "kernels": ("kernels", "dequantize"), "models": ("models",), "registry": ("registry",),
           "tensor": ("tensor", "files"), "vectors": ("vectors",)}
#: Other architectures; the generator of stubs, whose output a test compares; data.
NOT_MUTATED = ("csrc/kernels/arm/", "csrc/python/", "mpool/api/stubs.py", "mpool/demo_models/")


def mutants_of(file: str) -> list[dict[str, Any]]:
    """Return the mutants of a file, in a random order in which each line has its first mutant before a second one."""
    text = (ROOT / file).read_text("utf-8")
    by_line: dict[int, list[dict[str, Any]]] = {}
    for change in sorted(set((of_python if file.endswith(".py") else of_c)(text))):
        first = text.rfind("\n", 0, change.start) + 1
        changed = text[:change.start] + change.new + text[change.end:]
        row = {"file": file, "line": text.count("\n", 0, first) + 1, **change._asdict(),
               "source": text[first:].partition("\n")[0].strip(), "mutated": changed[first:].partition("\n")[0].strip()}
        row["id"] = hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:12]
        by_line.setdefault(row["line"], []).append(row)
    return [row for rows in by_line.values() for row in rows]


def chosen(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the mutants of the command line: lines first, each with the same chance, then one mutant of the line."""
    place = (ROOT / args.place).relative_to(ROOT).as_posix()
    found = [ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*"))
    names = [path.relative_to(ROOT).as_posix() for path in found if path.suffix in (".c", ".h", ".py")]
    rows = [row for name in names if not name.startswith(NOT_MUTATED) for row in mutants_of(name)]
    if not rows:
        raise SystemExit(f"PLACE must be a folder or file of csrc or mpool with code, got {args.place!r}")
    if args.survivors:
        last = {row["id"]: row["status"] for row in map(json.loads, args.survivors.read_text().splitlines())}
        return [row for row in rows if last.get(row["id"]) == "survived"]
    choice, turns = random.Random(args.seed), collections.Counter[tuple[str, int]]()
    choice.shuffle(rows)
    order = []
    for row in rows:
        turns[row["file"], row["line"]] += 1
        order.append(turns[row["file"], row["line"]])
    return [row for _, row in sorted(zip(order, rows), key=lambda pair: pair[0])][:args.sample]


class Copy:
    """A copy of the project in which one mutant at a time is built and tested."""

    def __init__(self, out: Path, c_tests: list[str], python_tests: list[str], is_c: bool) -> None:
        self.tree, self.c_tests, self.python_tests, self.is_c = out / "tree", c_tests, python_tests, is_c
        listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True,
                                check=True).stdout.decode().split("\0")
        for name in filter(None, listed):
            source, target = ROOT / name, self.tree / name
            if source.is_file() and not (target.exists() and target.read_bytes() == source.read_bytes()):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        self.runner, self.limit = out / "c/seam/runner", 3600.0
        self.env = {**os.environ, "PYTHONPATH": str(self.tree), "MPOOL_TEST_ROOT": str(self.tree / "tests"),
                    "MPOOL_TEST_PROCESSES": "0", "MPOOL_TEST_BUILD": str(out / "c"), "PYTHONDONTWRITEBYTECODE": "1"}
        if not self.build(extension=bool(python_tests)):
            raise SystemExit("the project does not build without a mutant")
        began = time.monotonic()
        if (failed := self.failing()):
            raise SystemExit(f"the tests must pass without a mutant, but {failed} fails")
        self.limit = 60 + 5 * (time.monotonic() - began)
        self.unchanged = self.runner.read_bytes() if c_tests else b""

    def run(self, *command: str | Path) -> tuple[int | None, str]:
        """Run a command in the copy; return its exit code (None: it took too long) and its output."""
        with tempfile.TemporaryFile("w+", errors="replace") as output, subprocess.Popen(
                [str(word) for word in command], cwd=self.tree, env=self.env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True) as child:
            try:
                code = child.wait(self.limit)
            except subprocess.TimeoutExpired:
                code = None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            output.seek(0)
            return code, output.read()

    def build(self, extension: bool) -> bool:
        """Build what the tests need; return False if a compiler refused the sources."""
        commands: list[list[str | Path]] = []
        if self.c_tests:
            commands.append(["tests/c/build.py", "seam", "--out", self.runner.parents[1]])
        if extension:
            commands.append(["setup.py", "-q", "build_ext", "--inplace"])
        return all(self.run(sys.executable, *command)[0] == 0 for command in commands)

    def failing(self) -> str:
        """Run the tests; return the name of the first that failed, or an empty text."""
        if self.c_tests:
            names = [word for prefix in self.c_tests for word in ("--only", f"{prefix}_")]
            code, said = self.run(self.runner, *names, "--first-failure")
            if code != 0:
                found = re.search(r"^FAIL (\S+)", said, re.MULTILINE)
                return found[1] if found else f"{self.c_tests[0]} (exit code {code})"
        if self.python_tests:
            code, said = self.run(sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider",
                                  *self.python_tests)
            if code != 0:
                found = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
                return found[1] if found else f"{self.python_tests[0]} (exit code {code})"
        return ""

    def judge(self, row: dict[str, Any]) -> tuple[str, str]:
        """Plant a mutant, build and test it; return its status and the test that found it."""
        path = self.tree / row["file"]
        text = path.read_text("utf-8")
        changed = text[:row["start"]] + row["new"] + text[row["end"]:]
        try:
            path.write_text(changed, "utf-8")
            if self.is_c and not self.build(extension=bool(self.python_tests)):
                return "stillborn", ""
            if self.is_c and not self.python_tests and self.runner.read_bytes() == self.unchanged:
                return "same", ""
            failed = self.failing()
            return ("killed" if failed else "survived"), failed
        finally:
            path.write_text(text, "utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the score as Markdown, with the Wilson interval at 95 %, and before it the survivors."""
    counts = collections.Counter(row["status"] for row in rows)
    hits, total, z = counts["killed"], counts["killed"] + counts["survived"], 1.959964
    share, scale = (hits / total, 1 + z * z / total) if total else (0.0, 1.0)
    spread = z * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total)) if total else 0.5
    low, high = ((share + z * z / (2 * max(total, 1)) + sign * spread) / scale for sign in (-1, 1))
    survivors = [f"{row['id']} {row['file']}:{row['line']}: {row['operator']}\n    - {row['source']}\n    + "
                 f"{row['mutated']}" for row in rows if row["status"] == "survived"]
    return "\n".join([*survivors, "| mutants | killed | survived | same | stillborn | score | 95 % interval |",
                      "|---" * 7 + "|", f"| {total} | {hits} | {counts['survived']} | {counts['same']} | "
                      f"{counts['stillborn']} | {100 * share:.1f} % | {100 * low:.1f} to {100 * high:.1f} % |"])


def main() -> int:
    """Run the command line; the exit code is 0 unless the run could not be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", metavar="PLACE", help="a folder or file of csrc or mpool")
    parser.add_argument("--sample", type=int, metavar="N", help="number of mutants; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutation",
                        help="folder of the copy, its builds and results.jsonl (default: %(default)s)")
    parser.add_argument("--c", nargs="+", metavar="PREFIX", help="C tests that judge, for a place in csrc")
    parser.add_argument("--python", nargs="+", metavar="PATH", help="Python tests that judge")
    parser.add_argument("--survivors", type=Path, metavar="RESULTS", help="judge the survivors of these results again")
    parser.add_argument("--list", action="store_true", help="print the chosen mutants and stop")
    args = parser.parse_args()
    rows = chosen(args)
    if args.list:
        for row in rows:
            print(f"{row['id']} {row['file']}:{row['line']} {row['operator']}\n    - {row['source']}\n"
                  f"    + {row['mutated']}")
        return 0
    folder, is_c = rows[0]["file"].split("/")[1], rows[0]["file"].startswith("csrc/")
    own = ROOT / "tests" / "python" / folder
    python = args.python or ([] if is_c else [str(own if own.is_dir() else ROOT / "tests/python/api")])
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    copy = Copy(out, (args.c or list(C_TESTS[folder])) if is_c else [],
                [str(out / "tree" / Path(path).resolve().relative_to(ROOT)) for path in python], is_c)
    for row in rows:
        began = time.monotonic()
        row["status"], row["test"] = copy.judge(row)
        row["seconds"] = round(time.monotonic() - began, 1)
        with open(out / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['status']:9} {row['seconds']:6.1f} s  {row['file']}:{row['line']} {row['operator']} {row['test']}",
              file=sys.stderr, flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
