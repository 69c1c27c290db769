"""``python -m benchmarks compare``: compare mpool with each installed peer on the same weights, in rotation, as ratios.

Every engine runs in its own process, one at a time, with the same number of threads. In a round every engine has one
turn per topic; the order changes from round to round. A probe of the machine runs before and after every turn. A turn
is disturbed if its two probes saw different machine states, or if other processes used the CPUs meanwhile. A ratio
compares undisturbed turns of one round whose probes saw the same state. An engine without a turn comparable with
mpool's gets more turns (``--again``). A peer is compared with mpool in the same compute type if that takes part
(``--engines mpool:int8,...``), else with mpool's default.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import limits, plot, report
from . import record as records
from .engines import EMBEDDERS, GENERATORS, MODULES, expand, split
from .options import found_here, pair_of, parser_of
from .rotation import Rotation, add_options, finish, rotated, say

#: Folder for the peers' converted weights, one subfolder per hash of the weights.
MADE = Path(__file__).resolve().parents[1] / "build" / "bench" / "peers"
#: The tests' module that joins weights from packages.
JOINED = Path(__file__).resolve().parents[1] / "tests" / "python" / "helpers" / "joined.py"
#: Options that a record names.
OPTIONS = ("engines", "topics", "rounds", "again", "repeat", "prompts", "depths", "quick", "touch", "beside", "weights")
TOPICS = ("import", "cold-embed", "cold-generate", "embed", "generate")
#: Type of quantised weights that peers repack for their fastest kernels. Its files come first in comparisons of text.
FIRST = "q4_k_m"
#: Language models compared by default: keys of the catalogue, the first with weights of type Q4_K_M.
TEXT_MODELS = ("Qwen2.5-Coder-0.5B-Instruct", "SmolLM2-135M-Instruct")
#: Calls behind a 99th percentile.
CALLS = 2000
#: Engine -> distributions that its speed depends on, beside its own.
COMPANIONS = {"sentence-transformers": "torch", "openvino": "nncf"}


class Bench(Rotation):
    """One run: engines, topics, weights, rounds."""

    file = Path(__file__).with_name("worker.py")
    modules = MODULES

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        self.programs = dict(pair.split("=", 1) for pair in arguments.program)
        self.paths: dict[str, str] = {}  # by topic: embed, generate, and generate:FILE for further language models
        if any(kind_of(topic) == "embed" for topic in arguments.topics):
            self.paths["embed"] = weights(arguments.embedding_model, "text_embedding")
        if any(kind_of(topic) == "generate" for topic in arguments.topics):
            given = arguments.text_model or ([None] if arguments.quick else list(TEXT_MODELS))
            self.paths |= text_topics([weights(ref, "text_to_text") for ref in given])
        self.texts, self.calls = (48, 240) if arguments.quick else (384, CALLS)
        self.prompts: list[int]
        self.depths: list[int]
        self.prompts, self.depths = ([16], [8]) if arguments.quick else (arguments.prompts, arguments.depths)
        self.ids: dict[str, list[int]] = {}
        self.failed: set[tuple[str, str]] = set()  # topics and their engines that do not take part any more

    def installed(self, engine: str) -> bool:
        """Return True if the engine's interpreter has its library, or a folder with its programs is given."""
        return super().installed(engine) if MODULES[split(engine)[0]] else engine in self.programs

    def engines(self, topic: str) -> list[str]:
        """Return the engines that take part in a topic."""
        known = {"embed": EMBEDDERS, "generate": GENERATORS}.get(kind_of(topic), MODULES)
        chosen = [engine for engine in self.arguments.engines if split(engine)[0] in known]
        if not topic.startswith("generate"):
            chosen = [engine for engine in chosen if MODULES[split(engine)[0]]]
        if topic == "import":  # the compute type does not change the import time
            chosen = list(dict.fromkeys(split(engine)[0] for engine in chosen))
        return chosen

    def run_worker(self, engine: str, task: dict[str, Any]) -> dict[str, Any]:
        """Run one task in a new process and return its result."""
        return self.run_process(self.python(engine), {**task, "engine": engine}, f"{engine}, {task['topic']}")

    def task(self, topic: str, engine: str) -> dict[str, Any]:
        """Return the task for a worker, as it reads it from standard input."""
        quick = self.arguments.quick
        if topic == "import":
            return {"topic": topic, "module": MODULES[engine]}
        kind, model = kind_of(topic), topic.removeprefix("cold-")
        common = {"topic": "cold" if topic.startswith("cold-") else kind, "kind": kind, "path": self.paths[model],
                  "repeat": 1 if quick else self.arguments.repeat}
        if kind == "embed":
            return {**common, "texts": self.texts, "calls": self.calls,
                    "folder": str(MADE / hashed(self.paths["embed"])[:16])}
        return {**common, "ids": self.ids[model], "write": 16 if quick else 64, "prompts": self.prompts,
                "depths": self.depths, "streams": 8, "folder": self.programs.get(engine, ""),
                "weights": self.arguments.weights}

    def one_turn(self, topic: str, engine: str, number: int) -> bool:
        """Measure one engine on one topic. Returns False if it failed: it does not take part any more."""
        def run() -> dict[str, Any]:
            touch(self.arguments.touch)
            with busy(self.arguments.beside):
                return self.run_worker(engine, self.task(topic, engine))

        done = self.measure(topic, engine, number, run)
        if not done:
            self.failed.add((topic, engine))
        return done

    def one_round(self, topic: str, number: int) -> None:
        """Give every engine one turn. Repeat engines without a comparable turn, and mpool with them, ``--again`` times
        at most.
        """
        engines = [engine for engine in self.engines(topic) if (topic, engine) not in self.failed]
        waiting = rotated(engines, number)
        for _ in range(1 + self.arguments.again):
            for engine in waiting:
                if not self.one_turn(topic, engine, number):
                    engines = [other for other in engines if other != engine]
            mine = [turn for turn in self.turns if (turn.topic, turn.round) == (topic, number)]
            rivals = {engine: rival for engine in engines if (rival := report.against(engine, engines))}
            without = [engine for engine, rival in rivals.items() if not any(
                report.comparable(a, b) for a in mine if a.engine == rival for b in mine if b.engine == engine)]
            waiting = list(dict.fromkeys([*(rivals[engine] for engine in without), *without]))

    def run(self) -> dict[str, Any]:
        """Run all rounds of all topics and return the record."""
        self.leave_out_missing()
        models = [topic for topic in self.paths if kind_of(topic) == "generate"]
        topics = [topic + model.removeprefix("generate") for topic in self.arguments.topics
                  for model in (models if kind_of(topic) == "generate" else [""])]
        for model in models:
            # a word has at least one token
            words = max(1000 if self.arguments.quick else 4000, *self.prompts, *self.depths) + 100
            found = self.run_worker("mpool", {"topic": "ids", "path": self.paths[model], "words": words})
            self.ids[model] = found["ids"]
        if "embed" in self.paths:
            self.prepare()
        for path in self.paths.values():
            warm(path)
        for number in range(self.arguments.rounds):
            for topic in topics:
                self.one_round(topic, number)
        return records.build(
            "compare", self.arguments.threads, {name: getattr(self.arguments, name) for name in OPTIONS}, self.turns,
            weights={kind: {"name": name_of(path), "path": Path(path).name, "sha256": hashed(path)}
                     for kind, path in self.paths.items()},
            versions={engine: self.version(engine) for engine in self.arguments.engines},
            agreement=report.agreement(self.turns),
            summary=report.summary(self.turns, limits.work(self.paths, self.texts, self.prompts, self.depths),
                                   self.arguments.threads),
            failures=self.failures)

    def prepare(self) -> None:
        """Let every engine convert the weights. An engine that fails does not take part."""
        for engine in self.engines("embed"):
            try:
                self.run_worker(engine, {**self.task("embed", engine), "topic": "prepare"})
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                self.failures.append(str(error))
                self.arguments.engines.remove(engine)

    def version(self, engine: str) -> str:
        """Return the version of an engine's distribution with what it depends on, ``"?"`` if it is unknown."""
        name, compute, _ = split(engine)
        if not MODULES[name]:  # a program states its version with its results
            return next((turn.result["version"] for turn in self.turns if turn.engine == engine), "?")
        code = f"import {MODULES[name]} as module; print(module.__version__, end='')"
        if name in COMPANIONS and (name, compute) not in (("openvino", "float32"), ("openvino", "bfloat16")):
            other = COMPANIONS[name]
            code += f"; import importlib.metadata; print(' ({other} ' + importlib.metadata.version({other!r}) + ')')"
        done = subprocess.run([self.python(engine), "-c", code], capture_output=True, text=True, cwd=self.file.parent)
        return done.stdout.strip() or "?"


def weights(given: str | None, capability: str) -> str:
    """Return the path of a model: the given one, or the catalogue's default for a capability (downloaded if missing).

    A file that the tests can join from packages, with the hash that the catalogue states, comes from there if it is on
    this machine already, or if the hub has no answer.
    """
    from mpool.errors import DownloadError, OfflineError
    from mpool.models import load_catalogue, resolve

    key = given or load_catalogue().default(capability).key
    joined = module_at(JOINED)
    if key not in joined.WEIGHTS:
        return resolve(key).path
    try:
        return str(joined.resolve(key, offline=True))
    except OfflineError:
        pass
    try:
        return resolve(key).path
    except DownloadError:
        return str(joined.resolve(key))


def module_at(path: Path) -> Any:
    """Import a module of the repository that no package contains."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kind_of(topic: str) -> str:
    """Return embed, generate or import: what a topic measures, cold or not, with any model."""
    return topic.partition(":")[0].removeprefix("cold-")


def text_topics(paths: list[str]) -> dict[str, str]:
    """Return the topics of language models with their paths: generate and, after the first, generate:FILE.

    Files of type Q4_K_M come first. Without one, a note says what the peers miss.
    """
    ordered = sorted(paths, key=lambda path: FIRST not in Path(path).name.lower())
    if FIRST not in Path(ordered[0]).name.lower():
        say("no file of type Q4_K_M is compared: llama.cpp does not repack every other type for its fastest kernels")
    return {f"generate:{Path(path).name}" if number else "generate": path for number, path in enumerate(ordered)}


def name_of(path: str) -> str:
    """Return the catalogue's name of weights, from their hash, else the name of their file or folder."""
    from mpool.models import load_catalogue

    for key, row in load_catalogue().rows.items():
        if any(fact.sha256 == hashed(path) for fact in (row.files or {}).values()):
            return str(key)
    return Path(path).name


def files_of(path: str) -> list[Path]:
    """Return the weight files of a model."""
    found = Path(path)
    return [found] if found.is_file() else sorted(found.glob("*.safetensors"))


def warm(path: str) -> None:
    """Read the weights once, which puts them into the page cache."""
    for file in files_of(path):
        with open(file, "rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def touch(megabytes: int) -> None:
    """Write to memory and free it. The hosts of some virtual machines take free memory back, and provide it again page
    by page when it is used: in one of them, huge pages took 4 ms per MB. The engine of the next turn finds memory that
    the host has provided.
    """
    if megabytes:
        with mmap.mmap(-1, megabytes << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
            for at in range(0, len(memory), mmap.PAGESIZE):
                memory[at] = 1


@contextlib.contextmanager
def busy(beside: str | None) -> Iterator[None]:
    """Run a loop bound to the last CPU, unless ``beside`` is None. Its CPU time counts as that of the engine, so the
    turn is no disturbed one.
    """
    if not beside:
        yield
        return
    last = max(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{last}}})\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as loop:
        try:
            yield
        finally:
            loop.kill()


@functools.cache
def hashed(path: str) -> str:
    """Return the SHA-256 of the weights."""
    digest = hashlib.sha256()
    for file in files_of(path):
        with open(file, "rb", buffering=0) as stream:
            while part := stream.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()


def _lengths(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected integers >= 1, separated by commas")
    return found


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = parser_of("compare", __doc__)
    parser.add_argument("--engines", default="mpool,mpool:float32,sentence-transformers,llama-cpp",
                        type=lambda text: text.split(","),
                        help="engines, comma-separated, each with an optional variant and setting, as in "
                             "mpool:bfloat16 or openvino:int8:throughput. OpenVINO has the settings latency and "
                             "throughput, CTranslate2 inter1 and inter2; without one, all are measured "
                             "(default: %(default)s)")
    parser.add_argument("--topics", default=",".join(TOPICS), type=lambda text: text.split(","),
                        help="comma-separated (default: all)")
    add_options(parser)
    parser.add_argument("--again", type=int, default=2, metavar="N",
                        help="further turns for an engine without a comparable turn (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, metavar="N",
                        help="repetitions of each measure in a turn, of which the median counts (default: %(default)s)")
    parser.add_argument("--program", type=pair_of, action="append", default=[], metavar="ENGINE=FOLDER",
                        help="folder of the programs of a peer without a Python package: ik")
    parser.add_argument("--embedding-model", type=found_here, metavar="REF", help="a sentence-transformers folder")
    parser.add_argument("--text-model", type=found_here, action="append", default=[], metavar="REF",
                        help="a GGUF file; may be repeated. Files of type Q4_K_M come first "
                             f"(default: {', '.join(TEXT_MODELS)})")
    parser.add_argument("--prompts", default="16,128,512,2048", type=_lengths, metavar="N,...",
                        help="prompt lengths of the prefill measures, in tokens (default: %(default)s)")
    parser.add_argument("--depths", default="8,512,2048", type=_lengths, metavar="N,...",
                        help="prompt lengths of the decode measures, in tokens (default: %(default)s)")
    parser.add_argument("--touch", type=int, default=0, metavar="MB",
                        help="memory to write and free before each turn, for virtual machines whose hosts take free "
                             "memory back (default: %(default)s)")
    parser.add_argument("--beside", choices=["busy"], help="a program to run beside each turn: busy is a loop that is "
                        "bound to the last CPU and takes half of its time from an engine")
    parser.add_argument("--weights", default="auto", choices=["auto", "packed", "mapped"],
                        help="PoolConfig.weights of mpool, for generation (default: %(default)s)")
    parser.add_argument("--plot", metavar="PATH", help="write a plot here, as SVG")
    arguments = parser.parse_args(argv)
    wrong = [engine for engine in arguments.engines if split(engine)[0] not in MODULES]
    wrong += [topic for topic in arguments.topics if topic not in TOPICS]
    wrong += [pair for pair in arguments.peer_python + arguments.program if "=" not in pair]
    arguments.engines = expand(arguments.engines)
    if wrong:
        parser.error(f"{wrong[0]!r}: engines are {', '.join(MODULES)}; topics are {', '.join(TOPICS)}")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Run the comparison, print the tables, write the record."""
    arguments = parse(argv)
    record = Bench(arguments).run()
    if arguments.plot:
        Path(arguments.plot).write_text(plot.svg(record))
    return finish(record, arguments)


if __name__ == "__main__":
    sys.exit(main())
