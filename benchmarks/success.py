"""``python -m benchmarks success``: the success criteria of mpool's first releases, each with target and measurement.

    load        a worker is ready within a second for files of 1, 5 and 20 GB, with a warm and with a cold page cache; a
                file whose last tensor reaches beyond its end is refused
    memory      a second worker costs less than 5 % of the first
    speed       tokens/s as a share of the memory bandwidth; one completion, eight at once, and prompts, with all
                threads and with one
    logs        no record per request at INFO; one per load, eviction and shutdown, and per step of a worker's life
    worker      ``mpool worker``: first token; /health below 10 ms and cancellation below 100 ms while a job runs

A criterion without a target is measured and neither passes nor fails. The files have random weights, no holes, and the
tokenizer of ``--vocabulary``; they are written to ``--folder`` one after the other, after a check of the free disk
space, and removed. A cold cache is one from which the system dropped the file's pages; ``fincore``, if it is installed,
shows whether it did. Exit code 0: all criteria passed. 1: some failed. 2: not enough disk space or memory.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from . import random_gguf, report
from . import record as records
from .options import add_json, add_threads, parser_of, path_of
from .probe import Frame, Probe, Watch
from .record import Turn
from .timed_worker import time_worker

PROGRAM = Path(__file__).with_name("success_worker.py")
#: Disk space in bytes that stays free.
RESERVE = 2_000_000_000


@dataclass
class Criterion:
    """A criterion. ``target``: the measured value must be below it, or equal to it; None: there is no target."""

    name: str
    measured: float
    unit: str
    target: float | None = None
    exact: bool = False

    @property
    def passed(self) -> bool | None:
        """True if the criterion is met; None if it has no target."""
        if self.target is None:
            return None
        return self.measured == self.target if self.exact else self.measured < self.target

    def cells(self) -> tuple[str, str, str, str]:
        """Return the row of the table."""
        target = "-" if self.target is None else f"{'' if self.exact else '< '}{self.target:g} {self.unit}".strip()
        result = {True: "pass", False: "FAIL", None: ""}[self.passed]
        return self.name, target, f"{self.measured:.4g} {self.unit}".strip(), result


class Run:
    """Measures all criteria. ``turns`` has every measurement with its probes, ``criteria`` what follows from them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.threads = arguments.threads or len(os.sched_getaffinity(0))
        self.probe = Probe()
        self.turns: list[Turn] = []
        self.criteria: list[Criterion] = []
        self.failures: list[str] = []
        self.weights: dict[str, Any] = {}

    def part(self, what: str, **task: Any) -> dict[str, Any]:
        """Run a part of :mod:`benchmarks.success_worker` in a process of its own, and return its result."""
        task = {"what": what, "threads": self.threads, "tokens": self.arguments.tokens, **task}
        done = subprocess.run([sys.executable, str(PROGRAM)], input=json.dumps(task), capture_output=True, text=True,
                              timeout=self.arguments.timeout, cwd=PROGRAM.parent)
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            raise RuntimeError(f"{what}: {report.last_line(done.stderr) or done.returncode}")
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def turn(self, topic: str, what: str, **task: Any) -> dict[str, float]:
        """Measure a part between two probes, and return its measures."""
        before = self.probe.run()
        with Watch() as watch:
            result = self.part(what, **task)
        self.turns.append(Turn(topic, "mpool", 0, result, Frame(before, self.probe.run(), watch.others)))
        measures: dict[str, float] = result["measures"]
        return measures

    def add(self, name: str, measured: float, unit: str, target: float | None = None, exact: bool = False) -> None:
        """Add a criterion, and print it."""
        self.criteria.append(Criterion(name, measured, unit, target, exact))
        print(" | ".join(self.criteria[-1].cells()), flush=True)

    def guarded(self, measure: Any, *arguments: Any) -> None:
        """Measure; note a failure, and continue."""
        try:
            measure(*arguments)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            self.failures.append(f"{measure.__name__}: {report.last_line(str(error))}")
            print(self.failures[-1], file=sys.stderr)

    # ---- parts ---------------------------------------------------------------------------------------------------

    def load(self, path: str, size: float) -> None:
        """Load a file with a cold and with a warm cache."""
        for cache in ("cold", "warm"):
            if cache == "cold" and drop(path) > 0.01:
                self.failures.append(f"load {size:g} GB: the system keeps the file in its cache")
                continue
            found = self.turn(f"load {size:g} GB {cache}", "load", path=path, workers=1)
            self.add(f"{size:g} GB, {cache} cache: worker ready", found["ready s"], "s", 1.0)
            self.add(f"{size:g} GB, {cache} cache: first output", found["first output s"], "s")

    def refusal(self, path: str) -> None:
        """Load a file that lacks its last byte."""
        size = os.path.getsize(path)
        os.truncate(path, size - 1)
        try:
            error = self.part("refuse", path=path)["error"]
        finally:
            with open(path, "ab") as file:
                file.write(b"\0")
        self.add("files with a tensor beyond their end that were loaded", 0 if error else 1, "", 0, True)

    def second_worker(self, path: str) -> None:
        """Compare the memory of one worker and of two."""
        one, two = (self.turn(f"{workers} workers", "load", path=path, workers=workers) for workers in (1, 2))
        workers = self.turns[-1].result["counts"]["workers"]
        self.add("workers of a model that may have two", workers, "", 2, True)
        more = 100 * (two["memory MB"] - one["memory MB"]) / one["memory MB"]
        self.add("memory of the second worker", more, "% of the first", 5.0)

    def speed(self, path: str) -> None:
        """Measure tokens/s with all threads and with one."""
        found = {threads: self.turn(f"speed {threads} threads", "decode", path=path, threads=threads,
                                    words=self.arguments.words) for threads in sorted({self.threads, 1})}
        every, frame = found[self.threads], self.turns[-1].frame
        bandwidth = max((probe["read_2" if self.threads > 1 else "read_1"] for probe in (frame.before, frame.after)
                         if probe), default=0.0)
        self.add("decode", every["decode tokens/s"], "tokens/s")
        if bandwidth:
            rate = every["decode tokens/s"] * os.path.getsize(path) / 1e9
            self.add("decode, of the memory bandwidth", 100 * rate / bandwidth, "%")
        self.add("decode, 8 completions over 1", every["decode of 8 tokens/s"] / every["decode tokens/s"], "x")
        if self.threads > 1:
            for name in ("decode tokens/s", "prompt tokens/s"):
                self.add(f"{name.split()[0]}, {self.threads} threads over 1", every[name] / found[1][name], "x")

    def logs(self, path: str) -> None:
        """Count log records."""
        found = self.part("logs", path=path, requests=20)
        self.add("log records of 20 requests", found["requests"], "", 0, True)
        for name in ("load", "eviction", "shutdown"):
            self.add(f"log records of {'an' if name == 'eviction' else 'a'} {name}", found[name], "", 1, True)
        self.add("log records of a worker: loading, ready, evicting", found["worker"], "", 3, True)
        self.add("other log records", found["others"], "", 0, True)

    def worker(self, path: str) -> None:
        """Measure ``mpool worker``."""
        times = time_worker(path, self.threads)
        self.add("worker: first token", times.first * 1e3, "ms")
        self.add(f"worker: /health during a job, 99th percentile of {times.calls:,} calls", times.health * 1e3, "ms",
                 10.0)
        self.add("worker: cancellation, median", times.cancel * 1e3, "ms", 100.0)

    def run(self) -> dict[str, Any]:
        """Measure everything, and return the record."""
        sizes = sorted(self.arguments.sizes)
        with tempfile.TemporaryDirectory(prefix="mpool-success-", dir=self.arguments.folder) as folder:
            for at, size in enumerate(sizes):
                path = os.path.join(folder, f"{size:g}GB.gguf")
                written = random_gguf.write(path, self.arguments.vocabulary, int(size * 1e9))
                self.weights[f"{size:g} GB"] = {"name": "random values, Q8_0", "path": Path(path).name,
                                                "bytes": written}
                self.guarded(self.load, path, size)
                if at == 0:
                    for measure in (self.second_worker, self.speed, self.logs, self.worker, self.refusal):
                        self.guarded(measure, path)
                os.remove(path)
        return records.build("success", self.threads, {"sizes": sizes, "tokens": self.arguments.tokens}, self.turns,
                             weights=self.weights, versions={"mpool": _version()}, agreement={},
                             summary=report.summary(self.turns), failures=self.failures,
                             criteria=[{**asdict(one), "passed": one.passed} for one in self.criteria])


def drop(path: str) -> float:
    """Drop a file from the page cache. Returns the share that is still there, 0 if the system cannot tell."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if shutil.which("fincore") is None:
        return 0.0
    done = subprocess.run(["fincore", "--bytes", "--noheadings", "--output", "RES", path], capture_output=True,
                          text=True)
    return int(done.stdout or 0) / os.path.getsize(path) if done.returncode == 0 else 0.0


def _version() -> str:
    import mpool

    return mpool.__version__


def shortage(sizes: list[float], folder: str) -> str | None:
    """Return why the files cannot be written; None if they can. Files exist one at a time."""
    wanted, free = int(max(sizes) * 1.1e9) + RESERVE, shutil.disk_usage(folder).free
    if free < wanted:
        return (f"{folder} has {free / 1e9:.1f} GB of free space, {max(sizes):g} GB need {wanted / 1e9:.1f} GB: choose "
                "another --folder, or smaller --sizes")
    return None


def table(criteria: list[Criterion]) -> str:
    """Return the criteria as a table."""
    rows = [("criterion", "target", "measured", "result"), *(one.cells() for one in criteria)]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _sizes(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0.01 <= size <= 1000 for size in found):
        raise argparse.ArgumentTypeError(f"must be numbers of GB from 0.01 to 1000 with commas, got {text!r}")
    return found


def main() -> int:
    """Run the command line."""
    parser = parser_of("success", __doc__)
    parser.add_argument("--sizes", type=_sizes, default="1,5,20",
                        help="sizes of the files in GB (default: %(default)s)")
    parser.add_argument("--folder", type=path_of, default=tempfile.gettempdir(),
                        help="folder for the files (default: %(default)s)")
    parser.add_argument("--vocabulary", type=path_of, metavar="FILE",
                        help="a GGUF file with a tokenizer (default: that of SmolLM2-135M-Instruct)")
    add_threads(parser)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--words", type=int, default=20, help="repetitions of a sentence that make a long prompt "
                        "(default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per process (default: %(default)s)")
    add_json(parser)
    arguments = parser.parse_args()
    wrong = shortage(arguments.sizes, arguments.folder)
    if wrong is not None:
        print(wrong, file=sys.stderr)
        return 2
    if arguments.vocabulary is None:
        from mpool.models import resolve

        arguments.vocabulary = str(resolve("SmolLM2-135M-Instruct").path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # leaves no files of gigabytes behind
    run = Run(arguments)
    found = run.run()
    print("\n" + table(run.criteria))
    for turn in run.turns:
        if turn.disturbed:
            print(f"disturbed: {turn.topic}: {turn.disturbed}")
    for failure in run.failures:
        print(f"FAILED: {failure}")
    if arguments.json:
        records.write(found, arguments.json)
    return 1 if run.failures or any(one.passed is False for one in run.criteria) else 0


if __name__ == "__main__":
    sys.exit(main())
