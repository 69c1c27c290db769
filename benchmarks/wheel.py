"""``python -m benchmarks wheel WHEEL``: a built wheel compared with the build in place, which another compiler made.

The wheel is installed into an empty environment of this Python, with the versions of its dependencies that this
environment has. Both builds compute the same tasks in processes of their own, in turns between two probes of the
machine: lists of texts, single texts, prompts and decoding. A ratio is the speed of the wheel over that of the build in
place, of turns of one round whose probes saw the same state; the target is that medians are within 3 % of 1. Hashes of
results in every compute type (``tests/python/core/test_recorded_hashes.py``) must be equal.

The build in place is ``mpool/_core.*.so`` of this clone: ``python setup.py build_ext --inplace``.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import record as records
from . import report
from .compare import hashed as hash_of_weights
from .compare import module_at, name_of, weights
from .options import add_json, add_threads, parser_of
from .rotation import Rotation, rotated, say

ROOT = Path(__file__).resolve().parents[1]
HASHES = ROOT / "tests" / "python" / "core" / "test_recorded_hashes.py"
#: Engines of the record: the build in place, and the wheel.
HERE, WHEEL = "mpool", "mpool:wheel"
#: Largest difference of a median ratio from 1.
TARGET = 0.03
#: Topics of a compute type: embed, generate, and after a space the type if it is not auto.
KINDS = ("embed", "generate")
FACTS = """
import json, mpool
from mpool import _core
print(json.dumps([_core.__file__, mpool.__version__, _core.config()["compiler"]]))
"""


class Wheels(Rotation):
    """One run: two builds, topics, rounds."""

    file = Path(__file__).with_name("worker.py")
    modules = {"mpool": "mpool"}

    def __init__(self, arguments: argparse.Namespace, python: str) -> None:
        super().__init__(arguments)
        self.builds = {HERE: (sys.executable, {"PYTHONPATH": str(ROOT)}), WHEEL: (python, {"PYTHONPATH": ""})}
        self.paths = {"embed": weights(arguments.embedding_model, "text_embedding"),
                      "generate": weights(arguments.text_model, "text_to_text")}
        self.ids: list[int] = []

    def run_program(self, engine: str, *words: str) -> Any:
        """Run a program in the Python of a build. Returns its output, which is JSON."""
        python, variables = self.builds[engine]
        done = subprocess.run([python, *words], capture_output=True, text=True, cwd=tempfile.gettempdir(),
                              env={**os.environ, **variables})
        if done.returncode:
            raise RuntimeError(f"{engine}: {report.last_line(done.stderr) or done.returncode}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def run_worker(self, engine: str, task: dict[str, Any]) -> dict[str, Any]:
        """Run one task in a process of a build."""
        python, variables = self.builds[engine]
        return self.run_process(python, task, f"{engine}, {task['topic']}", **variables)

    def task(self, topic: str) -> dict[str, Any]:
        """Return the task of a topic, the same for both builds."""
        kind, _, compute = topic.partition(" ")
        quick = self.arguments.quick
        common = {"topic": kind, "path": self.paths[kind], "repeat": 1 if quick else 3,
                  "engine": f"mpool:{compute}" if compute else "mpool"}
        if kind == "embed":
            return {**common, "texts": 24 if quick else 192, "calls": 40 if quick else 400}
        return {**common, "ids": self.ids, "write": 8 if quick else 64, "prompts": [16] if quick else [16, 512],
                "depths": [8] if quick else [8, 512], "streams": 0 if quick else 8}

    def run(self) -> dict[str, Any]:
        """Run all rounds and return the record."""
        facts = {engine: self.run_program(engine, "-c", FACTS) for engine in self.builds}
        check_places(facts, self.builds[WHEEL][0])
        hashes = {engine: self.run_program(engine, str(HASHES), "--print") for engine in self.builds}
        said = differing(hashes[HERE], hashes[WHEEL])
        self.failures += said
        self.ids = self.run_worker(HERE, {"topic": "ids", "path": self.paths["generate"], "words": 2000})["ids"]
        topics = topics_of(self.arguments.computes)
        for number in range(self.arguments.rounds):
            for topic in topics:
                for engine in rotated([HERE, WHEEL], number):
                    self.measure(topic, engine, number, lambda: self.run_worker(engine, self.task(topic)))
        wheel = self.arguments.wheel
        return records.build(
            "wheel", self.arguments.threads, {"rounds": self.arguments.rounds, "computes": self.arguments.computes,
                                              "quick": self.arguments.quick}, self.turns,
            weights={**{kind: {"name": name_of(path), "path": Path(path).name, "sha256": hash_of_weights(path)}
                        for kind, path in self.paths.items()},
                     "wheel": {"name": "mpool", "path": wheel.name,
                               "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest()}},
            versions={engine: f"{version} ({compiler})" for engine, (_, version, compiler) in facts.items()},
            agreement={"equal hashes of results": {WHEEL: f"{len(hashes[HERE]) - len(said)} of {len(hashes[HERE])}"}},
            summary=report.summary(self.turns), failures=self.failures)


def topics_of(computes: Sequence[str]) -> list[str]:
    """Return the topics of compute types."""
    return [kind if compute == "auto" else f"{kind} {compute}" for compute in computes for kind in KINDS]


def check_places(facts: dict[str, Sequence[str]], python: str) -> None:
    """Refuse to measure another mpool than that of the clone and that of the wheel.

    Args:
        facts: path of the extension first, by engine.
        python: Python of the wheel's environment.
    """
    for engine, folder in ((HERE, ROOT / "mpool"), (WHEEL, Path(python).parents[1])):
        if not Path(facts[engine][0]).is_relative_to(folder):
            sys.exit(f"{engine} would not be measured, but {facts[engine][0]}")


def differing(here: dict[str, str], wheel: dict[str, str]) -> list[str]:
    """Return a failure for each hash that only one build has, or that differs."""
    return [f"the hash of {name} differs between the builds" for name in sorted({*here, *wheel})
            if here.get(name) != wheel.get(name)]


def ratios(turns: Sequence[records.Turn]) -> dict[str, dict[str, tuple[list[float], bool]]]:
    """Return topic -> measure -> the speeds of the wheel over those of the build in place, by pairs of turns of one
    round, and True if the pairs are comparable. Without comparable pairs, all pairs count."""
    found: dict[str, dict[str, tuple[list[float], bool]]] = {}
    for topic in dict.fromkeys(turn.topic for turn in turns):
        pairs = [(a, b) for a in turns for b in turns
                 if (a.topic, a.engine) == (topic, WHEEL) and (b.topic, b.engine, b.round) == (topic, HERE, a.round)]
        sound = [pair for pair in pairs if report.comparable(*pair)]
        for a, b in sound or pairs:
            for name, value in report.measures(a).items():
                other = report.measures(b)[name]
                ratio = other / value if name.endswith(report.LESS) else value / other
                found.setdefault(topic, {}).setdefault(name, ([], bool(sound)))[0].append(ratio)
    return found


def table(turns: Sequence[records.Turn]) -> str:
    """Return the ratios as a table of text, with those that miss the target marked."""
    lines, missed, count = [], 0, 0
    for topic, rows in ratios(turns).items():
        for name, (values, is_sound) in rows.items():
            median = statistics.median(values)
            is_missed = abs(median - 1) > TARGET
            missed, count = missed + is_missed, count + 1
            lines.append(f"{topic:18} {name:24} {median:6.3f} ({min(values):.3f} to {max(values):.3f}, "
                         f"{len(values)} pairs{'' if is_sound else ', disturbed'}){' *' if is_missed else ''}")
    return "\n".join(["Speed of the wheel over that of the build in place: median (minimum to maximum)", *lines,
                      f"{count - missed} of {count} medians are within {TARGET:.0%} of 1; * marks the others"])


def constraints(names: Sequence[tuple[str, str]]) -> str:
    """Return the lines of a constraints file with these distributions, names and versions, without mpool. A version
    of a local build cannot be downloaded, so its package gets no line."""
    return "".join(f"{name}=={version}\n" for name, version in names if name != "mpool" and "+" not in version)


def install(wheel: Path, folder: str) -> str:
    """Install a wheel, and what its hashes need, into an empty environment. Return its Python."""
    tool = module_at(ROOT / "tools" / "wheels.py")
    alone = tool.empty_environment(sys.executable, folder)
    file = Path(folder, "constraints.txt")
    file.write_text(constraints([(one.metadata["Name"], one.version) for one in importlib.metadata.distributions()]))
    tool.run(f"{folder}/bin/pip", "install", "-q", "--only-binary=:all:", "-c", file, wheel.resolve(),
             *tool.light_requirements(ROOT), env=alone, cwd=folder)
    return f"{folder}/bin/python"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = parser_of("wheel", __doc__)
    parser.add_argument("wheel", type=Path, help="the wheel, as tools/wheels.py builds it")
    parser.add_argument("--computes", default="auto,float32", type=lambda text: text.split(","), metavar="TYPE,...",
                        help="compute types (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="number of rounds (default: %(default)s)")
    add_threads(parser)
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS",
                        help="limit for one process (default: %(default)s)")
    parser.add_argument("--embedding-model", metavar="REF", help="a sentence-transformers folder")
    parser.add_argument("--text-model", metavar="REF", help="a GGUF file")
    add_json(parser)
    parser.add_argument("--quick", action="store_true",
                        help="little work: shows that the command runs, measures nothing")
    arguments = parser.parse_args(argv)
    wrong = [one for one in arguments.computes if one not in ("auto", "float32", "bfloat16", "int8")]
    if wrong:
        parser.error(f"--computes must be of auto, float32, bfloat16 and int8, got {wrong[0]!r}")
    if arguments.wheel.suffix != ".whl" or not arguments.wheel.is_file():
        parser.error(f"{arguments.wheel} is not the file of a wheel; build one with python tools/wheels.py build")
    arguments.peer_python = []
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Compare, print the ratios, write the record. Returns 1 if a hash differs or a process failed."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        say(f"installing {arguments.wheel.name}")
        found = Wheels(arguments, install(arguments.wheel, folder))
        record = found.run()
    if arguments.json:
        records.write(record, arguments.json)
    print("\n".join(f"{engine} {version}" for engine, version in record["versions"].items()))
    print("equal hashes of results:", record["agreement"]["equal hashes of results"][WHEEL])
    print(table(found.turns))
    print(*(f"FAILED: {failure}" for failure in record["failures"]), sep="\n", end="")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
