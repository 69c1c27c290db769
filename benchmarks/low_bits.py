"""``python -m benchmarks low-bits``: language models whose linear matrices have two or three bits a weight.

For each type it writes a file with the shapes of Qwen3-1.7B, all linear matrices of the layers in this type and the
token embeddings in Q6_K (random values; see :mod:`benchmarks.synthetic`), measures it in a process of its own, and
removes it. Q4_K is the reference. Each row has the bytes that a token reads, as the file stores them and as mpool packs
them, and the rates of prompts and of decoding in tokens per second. ``share of``: the decoding rate times these bytes,
divided by the rate at which two threads read memory in the probe of the same turn. ``beyond the file MB`` is the
highest resident memory of the process minus the size of the file and, for mpool, minus ``caches MB``: its keys and
values, which it keeps for later prompts. ``--ik FOLDER`` adds ik_llama.cpp through its programs
(:mod:`benchmarks.ik`), for the types that it reads. In the record of ``--json``, a type is a topic of one round.
"""

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import report, synthetic
from .options import add_json, add_threads, parser_of, path_of
from .probe import Frame, Probe, disturbance
from .record import Recorder

WORKER = Path(__file__).with_name("worker.py")
#: Range of the token ids of prompts, which are random.
IDS = (300, 1900)
#: Sizes of the model for ``--quick``.
SMALL = {"layers": 1, "heads": 2, "kv_heads": 1, "feed": 512, "width": 256, "words": 50_000}


def measure(engine: str, task: dict[str, Any], probe: Probe, again: int) -> tuple[dict[str, Any], Frame]:
    """Measure an engine in a process of its own, between two probes. Repeat a disturbed turn, at most ``again`` times.

    Raises:
        RuntimeError: the process failed.
    """
    for left in range(again, -1, -1):
        done, frame = probe.around(functools.partial(
            subprocess.run, [sys.executable, str(WORKER)], input=json.dumps({**task, "engine": engine}),
            capture_output=True, text=True, cwd=WORKER.parent))
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            raise RuntimeError(report.last_line(done.stderr) or f"exit code {done.returncode}")
        if left == 0 or disturbance([frame]) is None:
            break
    return json.loads(lines[-1]), frame


def row_of(found: dict[str, Any], frame: Frame, task: dict[str, Any], read: float) -> dict[str, Any]:
    """Return the figures of a turn. ``read``: bytes of the file that a token reads."""
    rates, memory = found["measures"], found.get("memory") or {}
    file = os.path.getsize(task["path"]) / 1e6
    speed = max((probe["read_2"] for probe in (frame.before, frame.after) if probe), default=0.0)
    row: dict[str, Any] = {f"prefill {length}": round(rates[f"pp{length} tokens/s"], 1) for length in task["prompts"]}
    row |= {f"decode after {depth}": round(rates[f"tg@{depth} tokens/s"], 1) for depth in task["depths"]}
    sizes = {"file": read / 1e6, **({"memory": memory["weights MB"]} if memory else {})}
    row |= {f"{name} MB": round(size, 1) for name, size in sizes.items()}
    if speed:
        rate = rates[f"tg@{task['depths'][0]} tokens/s"]
        row |= {f"share of {name}": round(rate * size / 1e3 / speed, 2) for name, size in sizes.items()}
    caches = memory.get("caches MB", 0.0)
    row |= {"beyond the file MB": round(found["rss MB"] - file - caches, 1), "caches MB": round(caches, 1)}
    return row | {"read_2": speed, "disturbed": disturbance([frame])}


def main() -> int:
    """Run the command line."""
    parser = parser_of("low-bits", __doc__)
    parser.add_argument("--types", nargs="+", choices=synthetic.LINEAR, default=list(synthetic.LINEAR),
                        help="types of the linear matrices (default: all)")
    parser.add_argument("--vocabulary", type=path_of, metavar="FILE",
                        help="a GGUF file with a tokenizer (default: that of SmolLM2-135M-Instruct)")
    parser.add_argument("--folder", type=path_of, default=tempfile.gettempdir(),
                        help="folder for the file, at most 1.2 GB (default: %(default)s)")
    parser.add_argument("--ik", type=path_of, metavar="FOLDER", help="folder with the programs of ik_llama.cpp")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each rate, of which the median counts "
                        "(default: %(default)s)")
    parser.add_argument("--again", type=int, default=0, help="further turns for an engine whose turn was disturbed "
                        "(default: %(default)s)")
    add_threads(parser)
    add_json(parser)
    parser.add_argument("--quick", action="store_true", help="only check that the command works, with a small model")
    args = parser.parse_args()
    if args.vocabulary is None:
        from mpool.models import resolve

        args.vocabulary = str(resolve("SmolLM2-135M-Instruct").path)
    chance, failed = random.Random(synthetic.SEED), False
    recorder = Recorder("low-bits", args.threads, types=args.types, repeat=args.repeat, again=args.again,
                        quick=args.quick)
    shape = {"topic": "generate", "prompts": [16] if args.quick else [128, 512], "streams": 0, "folder": args.ik,
             "depths": [8] if args.quick else [8, 512], "write": 8 if args.quick else 32, "threads": args.threads,
             "repeat": 1 if args.quick else args.repeat, "ids": [chance.randrange(*IDS) for _ in range(2000)]}
    with tempfile.TemporaryDirectory(prefix="mpool-low-bits-", dir=args.folder) as folder:
        for kind in args.types:
            path = os.path.join(folder, f"{kind}.gguf")
            write = synthetic.SHAPES["qwen3-1.7b"]
            read = write(path, args.vocabulary, linear=kind, **(SMALL if args.quick else {}))
            for engine in ("mpool", *(["ik"] if args.ik else [])):
                task = {**shape, "path": path}
                try:
                    found, frame = measure(engine, task, recorder.probe, args.again)
                except RuntimeError as error:
                    failed = failed or engine == "mpool"  # a peer need not read every type
                    recorder.failures.append(f"{kind}, {engine}: {error}")
                    print(json.dumps({"type": kind, "engine": engine, "failed": str(error)}), flush=True)
                else:
                    print(json.dumps({"type": kind, "engine": engine, **row_of(found, frame, task, read)}), flush=True)
                    recorder.versions.setdefault(engine, found.get("version", "?"))
                    recorder.add(kind, engine, 0, found["measures"], frame, found["rss MB"])
            if args.json:
                recorder.add_weights(kind, path)
            os.remove(path)
    recorder.write(args.json)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
