#!/usr/bin/env python3
"""Mutation testing: change the sources in one place, and see whether a test fails.

    python tests/mutate.py --sample 100 --only kernels     # 100 mutants of csrc/kernels
    python tests/mutate.py --sample 400                    # 400 of every folder of csrc and mpool: a night
    python tests/mutate.py --only mpool/server --sample 50 --seed 7 --jobs 4
    python tests/mutate.py --survivors build/mutation/results.jsonl --only files   # after new tests
    python tests/mutate.py --list --only csrc/files/cursor.c --sample 20           # show, do not run

Mutants are planted in copies below ``--out``; the worktree is not changed. The first run builds the core and maps which
test runs which line; maps, builds and results are kept there, and an interrupted run goes on where it stopped. The
table goes to standard output, progress to standard error. docs/mutation-testing.md explains the results.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from mutation import process, report, session, tree  # noqa: E402
from mutation.mutant import folder_of, sample  # noqa: E402


def arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="FOLDER",
                        help="a folder or file of csrc or mpool (may be repeated); default: all")
    parser.add_argument("--sample", type=int, metavar="N", help="mutants of each folder; default: all of them")
    parser.add_argument("--seed", type=int, default=0, help="of the choice (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=tree.ROOT / "build" / "mutation",
                        help="folder of copies, builds and results (default: %(default)s)")
    parser.add_argument("--tests", nargs="+", choices=["c", "sim", "asan", "python"],
                        default=["c", "sim", "asan", "python"], help="kinds of tests that judge (default: all; asan: "
                        "the C tests under sanitizers; Python code is judged by Python tests only)")
    parser.add_argument("--c-tests", nargs="+", default=[], metavar="PART",
                        help="of the C tests, only files whose name contains a PART: fewer to map")
    parser.add_argument("--python-tests", nargs="+", default=[], metavar="PART",
                        help="of the Python tests, only files whose path contains a PART")
    parser.add_argument("--budget", type=float, default=120, metavar="SECONDS",
                        help="of tests for one mutant, cheapest first (default: %(default)s)")
    parser.add_argument("--survivors", type=Path, metavar="RESULTS", help="judge the survivors of these results again")
    parser.add_argument("--list", action="store_true", help="print the chosen mutants and stop")
    return parser.parse_args()


def main() -> int:
    """Run the command line; the exit code is 0 unless the run could not be done."""
    args = arguments()
    begun = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - begun:6.0f} s] {line}", file=sys.stderr, flush=True)

    def stop(*_: object) -> None:
        process.end_all()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        run = session.Session(args.out.resolve(), args.jobs, args.tests, args.python_tests, args.budget, say,
                              args.c_tests)
        files = session.files_of(run.files, args.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.list:
        folders: dict[str, list[session.Mutant]] = {}
        for file in files:
            folders.setdefault(folder_of(file), []).extend(session.mutants_of(file, say))
        for mutants in folders.values():
            for mutant in sample(mutants, args.sample, args.seed):
                print(f"{mutant.id} {mutant.file}:{mutant.line} {mutant.operator}\n    - {mutant.source}\n"
                      f"    + {mutant.mutated}")
        return 0
    again = None
    if args.survivors:
        lines = map(json.loads, args.survivors.read_text().splitlines())
        last = {row["id"]: row["status"] for row in lines}
        again = {name for name, status in last.items() if status in ("survived", "uncovered")}
    try:
        rows = run.run(files, args.sample, args.seed, again)
    except KeyboardInterrupt:
        say(f"interrupted; the same command goes on with the results of {run.results}")
        return 130
    print(report.survivors(rows), end="\n\n")
    print(report.table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
