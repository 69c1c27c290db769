"""``python -m benchmarks images``: image embeddings compared with torch, ONNX Runtime and OpenVINO, with equal weights.

The method is that of ``python -m benchmarks``: every engine in its own process, in rotation, compared within rounds in
which the machine was in one state. Shapes are CLIP ViT-B/32, CLIP ViT-L/14-336 and DINOv2 ViT-S/14 with seeded weights.
transformers makes the weights; ``--maker`` names an interpreter that has it and torch.
"""

import argparse
import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import record as records
from . import report
from .options import found_here, parser_of
from .rotation import Rotation, add_options, finish, rotated, say

#: Options that a record names.
OPTIONS = ("engines", "shapes", "rounds", "quick")


class ShapeBench(Rotation):
    """One run over shapes with seeded weights. Each benchmark of shapes derives a class from this one.

    Attributes:
        topic: the module's name.
        shapes, engines: defaults of the options of these names.
        maker: packages that the interpreter of ``--maker`` needs.
        reference: engine whose vectors those of the others are compared with; "": the tests compare results.
    """

    topic: str
    shapes: tuple[str, ...]
    engines: str
    maker: str
    reference = ""

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options of this benchmark alone."""

    def folder(self, shape: str) -> Path:
        """Return the folder of a shape's weights."""
        return Path(__file__).resolve().parents[1] / "build" / "bench" / self.topic / shape

    def worker(self, python: str, task: dict[str, Any]) -> dict[str, Any]:
        """Run one task in a new process and return its result."""
        return self.run_process(python, task, f"{task['engine']}, {task['shape']}")

    def task(self, what: str, engine: str, shape: str) -> dict[str, Any]:
        """Return the task for a worker."""
        return {"what": what, "engine": engine, "shape": shape, "folder": str(self.folder(shape)), **self.work(shape)}

    def work(self, shape: str) -> dict[str, Any]:
        """Return the further keys of a task: how much a worker computes."""
        return {"repeat": 1 if self.arguments.quick else 3}

    def prepare(self, shape: str) -> list[str]:
        """Let every engine convert the weights; return those that can take part."""
        self.folder(shape).mkdir(parents=True, exist_ok=True)
        self.worker(self.arguments.maker or sys.executable, self.task("prepare", "folder", shape))
        ready = []
        for engine in self.arguments.engines:
            try:
                self.worker(self.python(engine), self.task("prepare", engine, shape))
                ready.append(engine)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                self.failures.append(str(error))
        return ready

    def run(self) -> dict[str, Any]:
        """Run all rounds of all shapes and return the record."""
        self.leave_out_missing()
        engines = {shape: self.prepare(shape) for shape in self.arguments.shapes}
        for number in range(self.arguments.rounds):
            for shape, ready in engines.items():
                for engine in rotated(ready, number):
                    task = self.task("measure", engine, shape)
                    self.measure(shape, engine, number, functools.partial(self.worker, self.python(engine), task))
        return records.build(
            self.topic, self.arguments.threads, {name: getattr(self.arguments, name) for name in OPTIONS}, self.turns,
            weights={}, versions={engine: self.version(engine) for engine in self.arguments.engines},
            agreement=self.agreement(), summary=report.summary(self.turns), failures=self.failures)

    def agreement(self) -> dict[str, Any]:
        """Compare the engines' vectors: the least cosine to those of the reference, in float32."""
        import numpy as np

        found: dict[str, Any] = {}
        for shape in self.arguments.shapes if self.reference else ():
            rows = {turn.engine: np.array(turn.result["vectors"]) for turn in self.turns if turn.topic == shape}
            if self.reference in rows:
                found[f"{shape}: least cosine to {self.reference}"] = {
                    engine: round(float(report.cosine(own, rows[self.reference]).min()), 6)
                    for engine, own in rows.items()}
        return found

    def version(self, engine: str) -> str:
        """Return the version of an engine's distribution."""
        code = f"import {self.modules[engine.partition(':')[0]]} as module; print(module.__version__)"
        done = subprocess.run([self.python(engine), "-c", code], capture_output=True, text=True, cwd=self.file.parent)
        return done.stdout.strip() or "?"


class Bench(ShapeBench):
    """One run over image transformers."""

    topic = "images"
    file = Path(__file__).with_name("image_engines.py")
    shapes = ("clip-b32", "clip-l336", "dinov2-s")
    engines = "mpool,mpool:float32,mpool:int8,torch,torch:bfloat16,onnxruntime,openvino,openvino:bfloat16"
    modules = {"mpool": "mpool", "torch": "torch", "onnxruntime": "onnxruntime", "openvino": "openvino"}
    maker = "transformers and torch"
    reference = "torch"

    def work(self, shape: str) -> dict[str, Any]:
        """Return the numbers of images and repetitions."""
        quick = self.arguments.quick
        # one image of this shape costs as much as forty of the others
        count, repeat = (8, 1) if shape == "clip-l336" else (32, 3)
        return {"images": 4 if quick else count, "repeat": 1 if quick else repeat}


def main(argv: list[str] | None = None, bench: type[ShapeBench] = Bench, about: str | None = __doc__) -> int:
    """Run the benchmark, print the tables, write the record."""
    parser = parser_of(bench.topic, about)
    parser.add_argument("--engines", default=bench.engines, type=lambda text: text.split(","),
                        help="(default: %(default)s)")
    parser.add_argument("--shapes", default=",".join(bench.shapes), type=lambda text: text.split(","),
                        help="(default: %(default)s)")
    add_options(parser)
    bench.add_options(parser)
    parser.add_argument("--maker", type=found_here, metavar="PATH", help=f"interpreter that has {bench.maker}")
    arguments = parser.parse_args(argv)
    wrong = [engine for engine in arguments.engines if engine.partition(":")[0] not in bench.modules]
    wrong += [shape for shape in arguments.shapes if shape not in bench.shapes]
    wrong += [pair for pair in arguments.peer_python if "=" not in pair]
    if wrong:
        parser.error(f"{wrong[0]!r}: engines are {', '.join(bench.modules)}; shapes are {', '.join(bench.shapes)}")
    began = time.monotonic()
    record = bench(arguments).run()
    say(f"{time.monotonic() - began:.0f} s")
    return finish(record, arguments)


if __name__ == "__main__":
    sys.exit(main())
