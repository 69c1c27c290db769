"""``python -m benchmarks.pictures``: steps of FLUX.1 and Stable Diffusion 3.5 and their decoder, beside diffusers.

Turns, probes and ratios are those of ``python -m benchmarks``: every engine in a process of its own, in rotation,
compared within rounds in which the machine was in one state. Shapes are some blocks of the published transformers at
512 x 512 pixels with 256 tokens of T5, and the published decoder, with seeded weights made by diffusers (``--maker``
names an interpreter that has it).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import images, report
from .__main__ import say

WORKER = Path(__file__).with_name("picture_engines.py")
MADE = Path(__file__).resolve().parents[1] / "build" / "bench" / "pictures"
SHAPES = ("flux-512", "sd35m-512", "vae-512")
ENGINES = "mpool,mpool:float32,torch,torch:bfloat16"
MODULES = {"mpool": "mpool", "torch": "torch"}


class Bench(images.Bench):
    """A run."""

    def worker(self, python: str, task: dict[str, Any]) -> dict[str, Any]:
        """One process."""
        threads = str(self.arguments.threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads,
               "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run([python, str(WORKER)], input=json.dumps(task), capture_output=True, text=True, env=env,
                              timeout=self.arguments.timeout, cwd=WORKER.parent)
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            raise RuntimeError(f"{task['engine']}, {task['shape']}: {done.stderr.strip()[-600:] or done.returncode}")
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer

    def task(self, what: str, engine: str, shape: str) -> dict[str, Any]:
        """What a worker is asked."""
        return {"what": what, "engine": engine, "shape": shape, "folder": str(MADE / shape),
                "threads": self.arguments.threads, "repeat": 1 if self.arguments.quick else 3}

    def prepare(self, shape: str) -> list[str]:
        """Makes the folder; all engines can take part."""
        (MADE / shape).mkdir(parents=True, exist_ok=True)
        self.worker(self.arguments.maker or sys.executable, self.task("prepare", "folder", shape))
        return list(self.arguments.engines)

    def agreement(self) -> dict[str, Any]:
        """That all compute the same is for the tests: against diffusers, step by step."""
        return {}


def main(argv: list[str] | None = None) -> int:
    """Runs, prints tables, writes the record."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=ENGINES, type=lambda text: text.split(","), help="(default: %(default)s)")
    parser.add_argument("--shapes", default=",".join(SHAPES), type=lambda text: text.split(","),
                        help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), metavar="N")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS", help="for one process")
    parser.add_argument("--peer-python", action="append", default=[], metavar="ENGINE=PATH",
                        help="an interpreter of an engine's own; may be repeated")
    parser.add_argument("--maker", metavar="PATH", help="an interpreter with diffusers and torch")
    parser.add_argument("--json", metavar="PATH", help="write the whole record here")
    parser.add_argument("--markdown", metavar="PATH", help="write tables of mpool against its best rivals here")
    parser.add_argument("--quick", action="store_true", help="little work: shows that it runs, measures nothing")
    arguments = parser.parse_args(argv)
    wrong = [engine for engine in arguments.engines if engine.partition(":")[0] not in MODULES]
    wrong += [shape for shape in arguments.shapes if shape not in SHAPES]
    wrong += [pair for pair in arguments.peer_python if "=" not in pair]
    if wrong:
        parser.error(f"{wrong[0]!r}: engines are {', '.join(MODULES)}; shapes are {', '.join(SHAPES)}")
    began = time.monotonic()
    record = Bench(arguments).run()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n")
    if arguments.markdown:
        Path(arguments.markdown).write_text(report.markdown(record) + "\n")
    print(report.text(record))
    say(f"{time.monotonic() - began:.0f} s")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
