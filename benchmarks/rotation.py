"""Base of the comparisons of engines: processes, turns between two probes, options, and the written record."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import record as records
from . import report
from .engines import split
from .options import add_json, add_threads, pair_of
from .probe import Probe


class Rotation:
    """One run of engines in processes of their own, one at a time. Each comparison derives a class from this one.

    Attributes:
        file: program of an engine's process. It reads a task from standard input, and its last line is the result.
        modules: engine -> the Python module that it needs.
    """

    file: Path
    modules: Mapping[str, str]

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.probe = arguments, Probe()
        self.pythons = dict(pair.split("=", 1) for pair in arguments.peer_python)
        self.turns: list[records.Turn] = []
        self.failures: list[str] = []

    def python(self, engine: str) -> str:
        """Return the interpreter of an engine."""
        return self.pythons.get(split(engine)[0], sys.executable)

    def installed(self, engine: str) -> bool:
        """Return True if the engine's interpreter has its library."""
        module = self.modules[split(engine)[0]]
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python(engine), "-c", probe], cwd=self.file.parent).returncode == 0

    def leave_out_missing(self) -> None:
        """Remove the engines that are not installed, and name them."""
        for engine in [engine for engine in self.arguments.engines if not self.installed(engine)]:
            say(f"not installed: {engine} ({self.python(engine)})")
            self.arguments.engines.remove(engine)

    def run_process(self, python: str, task: dict[str, Any], label: str) -> dict[str, Any]:
        """Run one task in a new process and return its result.

        Raises:
            RuntimeError: the process failed; the message begins with ``label``.
            subprocess.TimeoutExpired: it took longer than ``--timeout``.
        """
        threads = str(self.arguments.threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads,
               "RAYON_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error",
               "PYTHONDONTWRITEBYTECODE": ""}
        task = {**task, "threads": self.arguments.threads, "started": time.monotonic()}
        done = subprocess.run([python, str(self.file)], input=json.dumps(task), capture_output=True, text=True, env=env,
                              timeout=self.arguments.timeout, cwd=self.file.parent)
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            raise RuntimeError(f"{label}: {report.last_line(done.stderr) or done.returncode}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result

    def measure(self, topic: str, engine: str, number: int, run: Callable[[], dict[str, Any]]) -> bool:
        """Add the turn of one engine on one topic, between two probes. Returns False if the engine failed."""
        try:
            result, frame = self.probe.around(run)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.failures.append(str(error))
            return False
        turn = records.Turn(topic, engine, number, result, frame)
        self.turns.append(turn)
        say(f"round {number + 1}, {topic}, {engine}: {turn.disturbed or 'good'}")
        return True


def rotated(engines: list[str], number: int) -> list[str]:
    """Return the order of the engines in a round: each round begins with the next engine."""
    shift = number % max(1, len(engines))
    return engines[shift:] + engines[:shift]


def say(text: str) -> None:
    """Print progress to standard error: standard output holds the tables."""
    print(text, file=sys.stderr, flush=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all comparisons have."""
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of rounds (default: %(default)s)")
    add_threads(parser, min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS",
                        help="limit for one process (default: %(default)s)")
    parser.add_argument("--peer-python", type=pair_of, action="append", default=[], metavar="ENGINE=PATH",
                        help="interpreter of an engine, as llama-cpp=/path/to/python; may be repeated")
    add_json(parser)
    parser.add_argument("--quick", action="store_true",
                        help="little work: shows that the command runs, measures nothing")


def finish(record: dict[str, Any], arguments: argparse.Namespace) -> int:
    """Write and print a record as the options say. Returns the exit code: 1 if an engine failed."""
    if arguments.json:
        records.write(record, arguments.json)
    print(report.text(record))
    return 1 if record["failures"] else 0
