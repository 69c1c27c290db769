"""Records of benchmarks: what a JSON file in ``benchmarks/results`` holds, how it is written, and how it is checked.

A record has every turn with the probes around it. Its summary follows from the turns (``report.summary``), and
``problems`` checks that it does.
"""

import json
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from . import report
from .engines import split
from .own_process import rss
from .probe import Frame, Probe, disturbance

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
#: Version of the layout of a record.
SCHEMA = 2
#: CPU flags in /proc/cpuinfo that matter here: vector and matrix instructions.
FLAGS = re.compile(r"avx|amx|fma|f16c|sse4_2|asimd|sve|i8mm|bf16|neon")


@dataclass
class Turn:
    """Measures of one engine on one topic in one round."""

    topic: str
    engine: str
    round: int
    result: dict[str, Any]
    frame: Frame
    disturbed: str | None = field(init=False)

    def __post_init__(self) -> None:
        self.disturbed = disturbance([self.frame])

    def as_json(self) -> dict[str, Any]:
        """Return the turn as the record holds it."""
        found = {"topic": self.topic, "engine": self.engine, "round": self.round, "disturbed": self.disturbed,
                 "compute": self.result.get("compute"), "counts": self.result.get("counts", {}),
                 "measures": self.result["measures"], "rss MB": self.result["rss MB"], "frame": self.frame.as_json()}
        samples = self.result.get("samples")  # measure -> the rate of each repetition
        return {**found, "samples": samples} if samples else found


def turns(record: dict[str, Any]) -> list[Turn]:
    """Return the turns of a record."""
    return [Turn(found["topic"], found["engine"], found["round"], found, Frame(**found["frame"]))
            for found in record["turns"]]


def build(benchmark: str, threads: int, options: dict[str, Any], measured: list[Turn], **parts: Any) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        benchmark: the command that ran, such as "compare".
        threads: compute threads of every engine.
        options: what was run: rounds, topics, lengths. No paths of the machine.
        measured: all turns.
        parts: weights, versions, agreement, summary, failures.
    """
    return {"schema": SCHEMA, "benchmark": benchmark, "machine": machine(threads), "commit": commit(),
            "options": options, **parts, "turns": [turn.as_json() for turn in measured]}


class Recorder:
    """Measures between probes, and writes the record of a benchmark that compares variants of mpool or few engines.

    Args:
        benchmark: the command that runs.
        threads: compute threads.
        options: what is run, as for :func:`build`.
    """

    def __init__(self, benchmark: str, threads: int, **options: Any) -> None:
        import mpool

        self.benchmark, self.threads, self.options = benchmark, threads, options
        self.probe = Probe()
        self.turns: list[Turn] = []
        self.weights: dict[str, dict[str, Any]] = {}
        self.versions, self.failures = {"mpool": mpool.__version__}, list[str]()

    def measure(self, run: Callable[[], T]) -> tuple[T, Frame]:
        """Return the result of ``run``, and the probes around it; arguments as for :meth:`Probe.around`."""
        return self.probe.around(run)

    def add(self, topic: str, engine: str, number: int, measures: dict[str, float], frame: Frame,
            memory: float | None = None) -> None:
        """Add the turn of an engine in round ``number``. ``memory``: peak MB of its process; None: of this process."""
        found = {"measures": measures, "rss MB": rss() if memory is None else memory}
        self.turns.append(Turn(topic, engine, number, found, frame))
        self.versions.setdefault(engine, self.versions.get(split(engine)[0], "?"))

    def add_weights(self, kind: str, path: str | os.PathLike[str]) -> None:
        """Note the name and the hash of a file or folder of weights. The record has no folder of the machine."""
        from .compare import hashed, name_of

        self.weights[kind] = {"name": name_of(str(path)), "path": Path(path).name, "sha256": hashed(str(path))}

    def write(self, path: str | None, **weights: str) -> dict[str, Any]:
        """Write the record to a file, with these kinds and paths of weights, and return it. ``path`` None: no file is
        wanted."""
        for kind, file in weights.items() if path else ():
            self.add_weights(kind, file)
        found = build(self.benchmark, self.threads, self.options, self.turns, weights=self.weights,
                      versions=self.versions, agreement={}, summary=report.summary(self.turns), failures=self.failures)
        if path:
            write(found, path)
        return found


def write(record: dict[str, Any], path: str) -> None:
    """Write a record to a file."""
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a record.

    Raises:
        ValueError: the file is missing, or it is no record as ``problems`` wants it.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: {error}") from error
    wrong = problems(found)
    if wrong:
        raise ValueError(f"{path.name}: " + "; ".join(wrong))
    return found


def machine(threads: int) -> dict[str, Any]:
    """Describe the machine."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return {"cpu": facts.get("model name") or platform.processor() or platform.machine(),
            "family": _integer(facts.get("cpu family") or facts.get("CPU architecture")),
            "model": _integer(facts.get("model") or facts.get("CPU part")),
            "instruction_sets": sorted(flag for flag in flags if FLAGS.search(flag)),
            "cpus": len(os.sched_getaffinity(0)), "threads": threads,
            "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            "kernel": platform.release(), "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}


def _integer(text: str | None) -> int | None:
    return int(text, 0) if text else None


def commit() -> str:
    """Return the commit of the clone, with "+changes" if files of mpool differ from it; "" outside a clone."""
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        found = git("rev-parse", "HEAD")
        return found + ("+changes" if found and git("status", "--porcelain", "--", "csrc", "mpool", "setup.py") else "")
    except OSError:  # git is not installed
        return ""


NUMBER = (int, float)
#: Field -> its type. A dict describes a nested object, a list of one item the items of a list, a str is a pattern.
FIELDS: dict[str, Any] = {
    "schema": int, "benchmark": str, "commit": r"[0-9a-f]{40}(\+changes)?", "options": dict,
    "machine": {"cpu": r".+", "family": int, "model": int, "instruction_sets": [str], "cpus": int, "threads": int,
                "memory_gb": NUMBER, "kernel": str, "python": str, "date": r"\d{4}-\d\d-\d\d"},
    "weights": dict, "versions": dict, "agreement": dict, "summary": dict, "failures": [str],
    "turns": [{"topic": str, "engine": str, "round": int, "compute": (str, type(None)), "counts": dict,
               "disturbed": (str, type(None)), "measures": dict, "rss MB": NUMBER,
               "frame": {"before": dict, "after": dict, "others": NUMBER}}],
}
#: Figures of every probe.
PROBES = ("round_trip_ns", "read_1", "read_2", "fp32", "bf16", "int8")


def problems(record: Any) -> list[str]:
    """Return what a record lacks, or what contradicts its turns; an empty list for a good record."""
    if not isinstance(record, dict):
        return ["a record must be an object"]
    return [f"{path} {text}" for path, text in _mistyped(record, FIELDS, "")] or _contradictions(record)


def _mistyped(value: Any, wanted: Any, path: str) -> list[tuple[str, str]]:
    """Return the path of every field that is missing or has another type, and what is wrong with it."""
    if isinstance(wanted, dict) and isinstance(value, dict):
        inner = ((f"{path}.{key}".strip("."), key, kind) for key, kind in wanted.items())
        return [fault for name, key, kind in inner
                for fault in (_mistyped(value[key], kind, name) if key in value else [(name, "is missing")])]
    if isinstance(wanted, list) and isinstance(value, list):
        return list(dict.fromkeys(fault for item in value for fault in _mistyped(item, wanted[0], f"{path}[]")))
    if isinstance(wanted, (dict, list)):
        return [(path, f"must be {'an object' if isinstance(wanted, dict) else 'a list'}")]
    if isinstance(wanted, str):
        good = isinstance(value, str) and re.fullmatch(wanted, value) is not None
    else:
        good = isinstance(value, wanted) and not isinstance(value, bool)
    return [] if good else [(path, f"is {value!r}")]


def _contradictions(record: dict[str, Any]) -> list[str]:
    found = []
    if record["schema"] != SCHEMA:
        found.append(f"schema is {record['schema']}, not {SCHEMA}")
    if record["options"].get("quick"):
        found.append("--quick measures nothing")
    if not record["turns"]:
        found.append("the record has no turns")
    if not record["machine"]["instruction_sets"]:
        found.append("the machine has no instruction sets")
    for number, turn in enumerate(record["turns"]):
        wrong = [name for name, value in turn["measures"].items() if not isinstance(value, NUMBER) or not value > 0]
        wrong += [f"{side}.{name}" for side in ("before", "after") for name in PROBES
                  if name not in turn["frame"][side]]
        wrong += [f"samples of {name}" for name, rates in turn.get("samples", {}).items()
                  if statistics.median(rates) != turn["measures"].get(name)]
        if wrong or not turn["measures"]:
            found.append(f"turns[{number}]: {', '.join(wrong) or 'no measures'}")
    if found:
        return found
    measured = turns(record)
    for number, (turn, given) in enumerate(zip(measured, record["turns"])):
        if turn.disturbed != given["disturbed"]:
            found.append(f"turns[{number}].disturbed is {given['disturbed']!r}, its probes give {turn.disturbed!r}")
    known = {*record["versions"], *(split(engine)[0] for engine in record["versions"])}
    found += [f"versions lacks {engine}" for engine in dict.fromkeys(turn.engine for turn in measured)
              if engine not in known]
    computed = report.summary(measured)
    for topic, measure, engine in ((topic, measure, engine) for topic, rows in computed.items()
                                   for measure, row in rows.items() for engine in row):
        given = record["summary"].get(topic, {}).get(measure, {}).get(engine, {})
        if {key: value for key, value in given.items() if key != "limit"} != computed[topic][measure][engine]:
            found.append(f"summary: {topic}, {measure}, {engine} does not follow from the turns")
    return found
