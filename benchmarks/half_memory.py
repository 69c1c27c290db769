"""``python -m benchmarks half-memory FILE``: a model of experts in a part of the memory that its file needs.

A process of its own holds so much memory of the machine that about ``--share`` of the size of the file is left for the
engine and the page cache, so that experts are read from the disk as they are chosen. The file leaves the page cache
before each turn. If an engine needs more than that, the system kills it. ``--faked`` sets only the memory limit of
mpool, and no engine reads from the disk: such a run shows that mpool serves the file within its budget, and compares
nothing. Files are those of :mod:`benchmarks.synthetic`, with ``--routing`` of each kind.

Prints the rates of a prompt and of decoding after it, and the pages that had to be read from the disk.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import report
from .low_bits import IDS, WORKER
from .options import add_json, add_threads, found_here, parser_of, path_of
from .record import Recorder, Turn
from .success import drop

#: The default engines are the first two: with half of the memory, the system kills a process that copies the weights.
ENGINES = ("mpool", "llama-cpp:mapped", "llama-cpp")


#: A process that holds the memory of its first argument, in bytes, until its standard input ends.
HOLD = """
import mmap, sys
held = mmap.mmap(-1, int(sys.argv[1]), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
print("held", flush=True)
sys.stdin.read()
"""


def available() -> int:
    """Return the bytes that processes and the page cache can still have (``MemAvailable``)."""
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


def sacrifice() -> None:
    """Make the system kill this process, rather than another one, if memory runs out."""
    Path("/proc/self/oom_score_adj").write_text("1000")


@contextlib.contextmanager
def ballast(limit: int) -> Iterator[Callable[[], None]]:
    """Hold memory so that about ``limit`` bytes are left. Yields what a process of an engine calls first.

    Raises:
        RuntimeError: the memory cannot be held.
    """
    size = available() - limit
    if size <= 0:
        raise RuntimeError(f"{limit >> 20} MiB are not available, so that no limit is needed")
    with subprocess.Popen([sys.executable, "-c", HOLD, str(size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as holder:
        assert holder.stdin and holder.stdout
        if holder.stdout.readline() != "held\n":
            raise RuntimeError(f"{size >> 20} MiB could not be held")
        try:
            yield sacrifice
        finally:
            holder.stdin.close()


def one_turn(python: str, task: dict[str, Any], enter: Callable[[], None] | None,
             environment: dict[str, str]) -> dict[str, Any]:
    """Measure an engine in a process of its own, which calls ``enter`` first.

    Raises:
        RuntimeError: the process failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_majflt
    done = subprocess.run([python, str(WORKER)], input=json.dumps(task), capture_output=True, text=True,
                          cwd=WORKER.parent, preexec_fn=enter, env={**os.environ, **environment})
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        raise RuntimeError(report.last_line(done.stderr) or f"exit code {done.returncode}")
    found: dict[str, Any] = json.loads(lines[-1])
    found["counts"] = {"major faults": resource.getrusage(resource.RUSAGE_CHILDREN).ru_majflt - before}
    return found


def version(python: str, module: str) -> str:
    """Return the version of a library in an interpreter; ``"?"``: unknown."""
    code = f"import {module}; print({module}.__version__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.stdout.strip() or "?"


def run_turns(args: argparse.Namespace, task: dict[str, Any], topic: str, recorder: Recorder,
              enter: Callable[[], None] | None, environment: dict[str, str]) -> None:
    """Measure all engines in turns. ``enter``: what their processes call first."""
    for number in range(args.rounds):
        for engine in args.engines[number % len(args.engines):] + args.engines[:number % len(args.engines)]:
            python = args.peer_python if engine.startswith("llama-cpp") else sys.executable
            if drop(args.model) > 0.01:
                recorder.failures.append("the system keeps the file in its cache")
            try:
                found, frame = recorder.measure(functools.partial(
                    one_turn, python, {**task, "engine": engine}, enter, environment))
            except RuntimeError as error:
                recorder.failures.append(f"{engine}: {error}")
                print(json.dumps({"engine": engine, "failed": str(error)}), flush=True)
                continue
            recorder.turns.append(Turn(topic, engine, number, found, frame))
            print(json.dumps({"engine": engine, "round": number, **found["measures"], **found["counts"]}), flush=True)


def main() -> int:
    """Run the command line."""
    parser = parser_of("half-memory", __doc__)
    parser.add_argument("model", type=path_of, help="GGUF file of a model of experts")
    parser.add_argument("--faked", action="store_true", help="limit mpool's budget only; compares nothing")
    parser.add_argument("--share", type=float, default=0.5, help="limit / size of the file (default: %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES[:2]))
    parser.add_argument("--peer-python", type=found_here, metavar="PATH", default=sys.executable,
                        help="interpreter that has llama-cpp-python (default: this one)")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="measurements of a rate in a turn (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: %(default)s)")
    add_threads(parser)
    add_json(parser)
    args = parser.parse_args()
    if args.faked:
        args.engines = ["mpool"]
    limit = int(args.share * os.path.getsize(args.model))
    chance = random.Random(1)
    task = {"topic": "generate", "path": args.model, "prompts": [args.prompt], "depths": [8],
            "write": args.tokens, "streams": 0, "threads": args.threads, "repeat": args.repeat, "folder": None,
            "ids": [chance.randrange(*IDS) for _ in range(args.prompt + 2000)]}
    recorder = Recorder("half-memory", args.threads, share=args.share, prompt=args.prompt, tokens=args.tokens,
                        repeat=args.repeat, rounds=args.rounds, faked=args.faked, ballast=not args.faked)
    environment = {"MPOOL_MEMORY_MB": str(limit >> 20)}
    topic = f"{args.share:g} of the file" + (", faked" if args.faked else ", ballast")
    peers = [engine for engine in args.engines if engine != "mpool"]
    for peer in peers:
        recorder.versions[peer] = version(args.peer_python, "llama_cpp")
    with contextlib.nullcontext() if args.faked else ballast(limit) as enter:
        run_turns(args, task, topic, recorder, enter, environment)
    for name, row in report.summary(recorder.turns).get(topic, {}).items():
        for peer in peers:
            if "ratio" in row.get(peer, {}):
                print(f"{name}: mpool over {peer} {row[peer]['ratio']:.2f}")
    recorder.write(args.json, model=args.model)
    return int(bool(recorder.failures))


if __name__ == "__main__":
    raise SystemExit(main())
