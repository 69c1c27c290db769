"""``python -m benchmarks wheel WHEEL``: a built wheel compared with the build in place, which another compiler made.

The wheel is installed into an empty environment of this Python, with the versions of its dependencies that this
environment has. Each build loads the same models in a process of its own. The two processes then do the same works in
turns: a list of texts, single texts, a long and a short prompt, one completion and eight at once. A turn takes about
half a second and is followed by that of the other build, so that both see the same machine, also if other programs use
it. A ratio is the speed of the wheel over that of the build in place in a pair of turns. The target is that the median
ratio of each work is within 3 % of 1. Hashes of results in every compute type
(``tests/python/core/test_recorded_hashes.py``) must be equal.

The build in place is ``mpool/_core.*.so`` of this clone: ``python setup.py build_ext --inplace``.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import report
from .compare import module_at, weights
from .options import add_json, add_threads, found_here, parser_of
from .record import Recorder, Turn
from .rotation import say

ROOT = Path(__file__).resolve().parents[1]
HASHES = ROOT / "tests" / "python" / "core" / "test_recorded_hashes.py"
WORKER = Path(__file__).with_name("wheel_worker.py")
#: Engines of the record: the build in place, and the wheel.
HERE, WHEEL = "mpool", "mpool:wheel"
#: Largest difference of a median ratio from 1.
TARGET = 0.03
#: Seconds that a turn takes at least.
SECONDS = 0.4
#: Measure of all turns: works per second.
RATE = "works/s"
FACTS = """
import json, mpool
from mpool import _core
print(json.dumps([_core.__file__, mpool.__version__, _core.config()["compiler"]]))
"""


class Build:
    """The interpreter and the environment variables of a build."""

    def __init__(self, engine: str, python: str, path: str) -> None:
        """``path``: value of PYTHONPATH."""
        self.engine, self.python = engine, python
        self.env = {**os.environ, "PYTHONPATH": path, "MPOOL_OFFLINE": "1", "MPOOL_SPECULATION": "0"}

    def run(self, *words: str) -> Any:
        """Run a program and return its output, which is JSON."""
        done = subprocess.run([self.python, *words], capture_output=True, text=True, cwd=tempfile.gettempdir(),
                              env=self.env)
        if done.returncode:
            raise RuntimeError(f"{self.engine}: {report.last_line(done.stderr) or done.returncode}")
        return json.loads(done.stdout.strip().splitlines()[-1])


class Worker:
    """A process of a build that has loaded a model."""

    def __init__(self, build: Build, kind: str, path: str, compute: str, threads: int) -> None:
        self.build = build
        self.process = subprocess.Popen([build.python, str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True, cwd=WORKER.parent, env=build.env)
        engine = "mpool" if compute == "auto" else f"mpool:{compute}"
        found = self.ask(kind=kind, path=path, engine=engine, threads=threads)
        self.works: list[str] = found["works"]
        self.memory = 0.0

    def ask(self, **question: Any) -> dict[str, Any]:
        """Send a line and return the answer. Raises RuntimeError if the process has ended."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.build.engine}: the process ended with code {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def seconds(self, work: str, times: int) -> float:
        """Do a work several times, and return the seconds that the process measured."""
        found = self.ask(work=work, times=times)
        self.memory = found["rss MB"]
        return float(found["seconds"])

    def cpu_seconds(self) -> float:
        """Return the CPU time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(recorder: Recorder, workers: Mapping[str, Worker], topic: str, work: str, turns: int) -> None:
    """Do a work in turns on all builds, and add the turns to the record."""
    once = [worker.seconds(work, 1) for worker in workers.values() for _ in range(2)][-1]  # the first ones warm up
    times = max(1, round(SECONDS / max(once, 1e-6)))
    for number in range(turns):
        order = list(workers) if number % 2 == 0 else list(reversed(workers))
        found, frame = recorder.measure(functools.partial(_pair, workers, order, work, times),
                                        lambda: sum(worker.cpu_seconds() for worker in workers.values()))
        for engine, seconds in found.items():
            recorder.add(topic, engine, number, {RATE: times / seconds}, frame, workers[engine].memory)


def _pair(workers: Mapping[str, Worker], order: Sequence[str], work: str, times: int) -> dict[str, float]:
    return {engine: workers[engine].seconds(work, times) for engine in order}


def check_places(facts: Mapping[str, Sequence[str]], python: str) -> None:
    """Refuse to measure another mpool than that of the clone and that of the wheel.

    Args:
        facts: path of the extension first, by engine.
        python: Python of the wheel's environment.
    """
    for engine, folder in ((HERE, ROOT / "mpool"), (WHEEL, Path(python).parents[1])):
        if not Path(facts[engine][0]).is_relative_to(folder):
            sys.exit(f"{engine} would not be measured, but {facts[engine][0]}")


def differing(here: Mapping[str, str], wheel: Mapping[str, str]) -> list[str]:
    """Return a failure for each hash that only one build has, or that differs."""
    return [f"the hash of {name} differs between the builds" for name in sorted({*here, *wheel})
            if here.get(name) != wheel.get(name)]


def ratios(turns: Sequence[Turn]) -> dict[str, tuple[list[float], bool]]:
    """Return topic -> the speeds of the wheel over those of the build in place, by pairs of turns, and True if the
    machine was quiet during these pairs. Without quiet pairs, all pairs count."""
    found: dict[str, tuple[list[float], bool]] = {}
    for topic in dict.fromkeys(turn.topic for turn in turns):
        pairs = [(a, b) for a in turns for b in turns
                 if (a.topic, a.engine) == (topic, WHEEL) and (b.topic, b.engine, b.round) == (topic, HERE, a.round)]
        sound = [pair for pair in pairs if report.comparable(*pair)]
        values = [a.result["measures"][RATE] / b.result["measures"][RATE] for a, b in sound or pairs]
        if values:
            found[topic] = values, bool(sound)
    return found


def table(turns: Sequence[Turn]) -> str:
    """Return the ratios as a table of text, with those that miss the target marked."""
    lines, missed, found = [], 0, ratios(turns)
    for topic, (values, is_sound) in found.items():
        low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        is_missed = abs(median - 1) > TARGET
        missed += is_missed
        lines.append(f"{topic:24} {median:6.3f} ({low:.3f} to {high:.3f}, {len(values)} pairs"
                     f"{'' if is_sound else ', disturbed'}){' *' if is_missed else ''}")
    return "\n".join(["Speed of the wheel over that of the build in place: median (quartiles)", *lines,
                      f"{len(found) - missed} of {len(found)} medians are within {TARGET:.0%} of 1"
                      + ("; * marks the others" if missed else "")])


def constraints(installed: Sequence[tuple[str, str]]) -> str:
    """Return the lines of a constraints file with these distributions, names and versions, without mpool. A version of
    a local build cannot be downloaded, so its package gets no line."""
    return "".join(f"{name}=={version}\n" for name, version in installed if name != "mpool" and "+" not in version)


def install(wheel: Path, folder: str) -> str:
    """Install a wheel, and what its hashes need, into an empty environment. Return its Python."""
    tool = module_at(ROOT / "tools" / "wheels.py")
    alone = tool.empty_environment(sys.executable, folder)
    file = Path(folder, "constraints.txt")
    file.write_text(constraints([(one.metadata["Name"], one.version) for one in importlib.metadata.distributions()]))
    tool.run(f"{folder}/bin/pip", "install", "-q", "--only-binary=:all:", "-c", file, wheel.resolve(),
             *tool.light_requirements(ROOT), env=alone, cwd=folder)
    return f"{folder}/bin/python"


def compare(arguments: argparse.Namespace, python: str) -> Recorder:
    """Compare the builds. Returns the record; its failures name hashes that differ."""
    builds = {HERE: Build(HERE, sys.executable, str(ROOT)), WHEEL: Build(WHEEL, python, "")}
    facts = {engine: build.run("-c", FACTS) for engine, build in builds.items()}
    check_places(facts, python)
    recorder = Recorder("wheel", arguments.threads, turns=arguments.turns, computes=arguments.computes)
    recorder.versions = {engine: f"{version} ({compiler.strip()})" for engine, (_, version, compiler) in facts.items()}
    hashes = {engine: build.run(str(HASHES), "--print") for engine, build in builds.items()}
    recorder.failures += differing(hashes[HERE], hashes[WHEEL])
    equal = f"{len(hashes[HERE]) - len(recorder.failures)} of {len(hashes[HERE])}"
    say(f"{equal} hashes of results are equal")
    recorder.agreement = {"equal hashes of results": {WHEEL: equal}}
    for kind, path in (("embed", weights(arguments.embedding_model, "text_embedding")),
                       ("generate", weights(arguments.text_model, "text_to_text"))):
        recorder.add_weights(kind, path)
        for compute in arguments.computes:
            workers = {engine: Worker(build, kind, path, compute, arguments.threads)
                       for engine, build in builds.items()}
            for work in workers[HERE].works:
                topic = f"{work}, {compute}"
                say(topic)
                measure(recorder, workers, topic, work, arguments.turns)
            for worker in workers.values():
                worker.close()
    digest = hashlib.sha256(arguments.wheel.read_bytes()).hexdigest()
    recorder.weights["wheel"] = {"name": "mpool", "path": arguments.wheel.name, "sha256": digest}
    return recorder


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = parser_of("wheel", __doc__)
    parser.add_argument("wheel", type=Path, help="the wheel, as tools/wheels.py builds it")
    parser.add_argument("--computes", default="auto,float32", type=lambda text: text.split(","), metavar="TYPE,...",
                        help="compute types (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=20, metavar="N",
                        help="turns of each build with each work (default: %(default)s)")
    add_threads(parser)
    parser.add_argument("--embedding-model", type=found_here, metavar="REF", help="a sentence-transformers folder")
    parser.add_argument("--text-model", type=found_here, metavar="REF", help="a GGUF file")
    add_json(parser)
    arguments = parser.parse_args(argv)
    wrong = [one for one in arguments.computes if one not in ("auto", "float32", "bfloat16", "int8")]
    if wrong:
        parser.error(f"--computes must be of auto, float32, bfloat16 and int8, got {wrong[0]!r}")
    if arguments.turns < 1:
        parser.error(f"--turns must be 1 or more, got {arguments.turns}")
    if arguments.wheel.suffix != ".whl" or not arguments.wheel.is_file():
        parser.error(f"{arguments.wheel} is not the file of a wheel; build one with python tools/wheels.py build")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Compare, print the ratios, write the record. Returns 1 if a hash differs."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        say(f"installing {arguments.wheel.name}")
        recorder = compare(arguments, install(arguments.wheel, folder))
    if arguments.json:
        recorder.write(arguments.json, **recorder.agreement)
    print(*(f"{engine} {version}" for engine, version in recorder.versions.items()), sep="\n")
    print(table(recorder.turns))
    for failure in recorder.failures:
        print(f"FAILED: {failure}")
    return 1 if recorder.failures else 0


if __name__ == "__main__":
    sys.exit(main())
