"""``python -m benchmarks images``: image embeddings compared with torch, ONNX Runtime and OpenVINO, with equal weights.

The method is that of ``python -m benchmarks``: every engine in its own process, in rotation, compared within rounds in
which the machine was in one state. Shapes are CLIP ViT-B/32, CLIP ViT-L/14-336 and DINOv2 ViT-S/14 with seeded weights.
transformers makes the weights; ``--maker`` names an interpreter that has it and torch.
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

from . import record as records
from . import report
from .compare import say
from .probe import Frame, Probe, Watch

#: Options that a record names.
OPTIONS = ("engines", "shapes", "rounds", "quick")


class Bench:
    """One run. The benchmarks of vision and image generation derive from this class.

    Attributes:
        topic: the module's name.
        file: program of an engine's process.
        shapes, engines: defaults of the options of these names.
        modules: engine -> the Python module that it needs.
        maker: packages that the interpreter of ``--maker`` needs.
    """

    topic = "images"
    file = Path(__file__).with_name("image_engines.py")
    shapes: tuple[str, ...] = ("clip-b32", "clip-l336", "dinov2-s")
    engines = "mpool,mpool:float32,mpool:int8,torch,torch:bfloat16,onnxruntime,openvino,openvino:bfloat16"
    modules = {"mpool": "mpool", "torch": "torch", "onnxruntime": "onnxruntime", "openvino": "openvino"}
    maker = "transformers and torch"

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.probe = arguments, Probe()
        self.pythons = dict(pair.split("=", 1) for pair in arguments.peer_python)
        self.turns: list[records.Turn] = []
        self.failures: list[str] = []

    def python(self, engine: str) -> str:
        """Return the interpreter of an engine."""
        return self.pythons.get(engine.partition(":")[0], sys.executable)

    def installed(self, engine: str) -> bool:
        """Return True if the engine's interpreter has its library."""
        module = self.modules[engine.partition(":")[0]]
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python(engine), "-c", probe], cwd=self.file.parent).returncode == 0

    def folder(self, shape: str) -> Path:
        """Return the folder of a shape's weights."""
        return Path(__file__).resolve().parents[1] / "build" / "bench" / self.topic / shape

    def worker(self, python: str, task: dict[str, Any]) -> dict[str, Any]:
        """Run one task in a new process and return its result."""
        threads = str(self.arguments.threads)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads,
               "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run([python, str(self.file)], input=json.dumps(task), capture_output=True, text=True, env=env,
                              timeout=self.arguments.timeout, cwd=self.file.parent)
        lines = done.stdout.strip().splitlines()
        if done.returncode != 0 or not lines:
            raise RuntimeError(f"{task['engine']}, {task['shape']}: {report.last_line(done.stderr) or done.returncode}")
        result: dict[str, Any] = json.loads(lines[-1])
        return result

    def task(self, what: str, engine: str, shape: str) -> dict[str, Any]:
        """Return the task for a worker."""
        quick = self.arguments.quick
        # one image of this shape costs as much as forty of the others
        count, repeat = (8, 1) if shape == "clip-l336" else (32, 3)
        return {"what": what, "engine": engine, "shape": shape, "folder": str(self.folder(shape)),
                "threads": self.arguments.threads, "images": 4 if quick else count, "repeat": 1 if quick else repeat}

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

    def turn(self, shape: str, engine: str, number: int) -> None:
        """Measure one engine on one shape, between two probes."""
        before, watch = self.probe.run(), Watch()
        try:
            with watch:
                result = self.worker(self.python(engine), self.task("measure", engine, shape))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.failures.append(str(error))
            return
        self.turns.append(records.Turn(shape, engine, number, result, Frame(before, self.probe.run(), watch.others)))
        say(f"round {number + 1}, {shape}, {engine}: {self.turns[-1].disturbed or 'good'}")

    def run(self) -> dict[str, Any]:
        """Run all rounds of all shapes and return the record."""
        missing = [engine for engine in self.arguments.engines if not self.installed(engine)]
        for engine in missing:
            say(f"not installed: {engine} ({self.python(engine)})")
        self.arguments.engines = [engine for engine in self.arguments.engines if engine not in missing]
        engines = {shape: self.prepare(shape) for shape in self.arguments.shapes}
        for number in range(self.arguments.rounds):
            for shape, ready in engines.items():
                shift = number % max(1, len(ready))
                for engine in ready[shift:] + ready[:shift]:
                    self.turn(shape, engine, number)
        return records.build(
            self.topic, self.arguments.threads, {name: getattr(self.arguments, name) for name in OPTIONS}, self.turns,
            weights={}, versions={engine: self.version(engine) for engine in self.arguments.engines},
            agreement=self.agreement(), summary=report.summary(self.turns), failures=self.failures)

    def agreement(self) -> dict[str, Any]:
        """Compare the engines' vectors: the least cosine to torch's float32."""
        import numpy as np

        found: dict[str, Any] = {}
        for shape in self.arguments.shapes:
            vectors = {turn.engine: np.array(turn.result["vectors"]) for turn in self.turns if turn.topic == shape}
            if "torch" in vectors:
                found[f"{shape}: least cosine to torch"] = {
                    engine: round(float(report.cosine(rows, vectors["torch"]).min()), 6)
                    for engine, rows in vectors.items()}
        return found

    def version(self, engine: str) -> str:
        """Return the version of an engine's distribution."""
        code = f"import {self.modules[engine.partition(':')[0]]} as module; print(module.__version__)"
        done = subprocess.run([self.python(engine), "-c", code], capture_output=True, text=True, cwd=self.file.parent)
        return done.stdout.strip() or "?"


def main(argv: list[str] | None = None, bench: type[Bench] = Bench, about: str | None = __doc__) -> int:
    """Run the benchmark, print the tables, write the record."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks {bench.topic}", description=about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default=bench.engines, type=lambda text: text.split(","),
                        help="(default: %(default)s)")
    parser.add_argument("--shapes", default=",".join(bench.shapes), type=lambda text: text.split(","),
                        help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="number of rounds (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))), metavar="N",
                        help="compute threads (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=900, metavar="SECONDS",
                        help="limit for one process (default: %(default)s)")
    parser.add_argument("--peer-python", action="append", default=[], metavar="ENGINE=PATH",
                        help="interpreter of an engine; may be repeated")
    parser.add_argument("--maker", metavar="PATH", help=f"interpreter that has {bench.maker}")
    parser.add_argument("--json", metavar="PATH", help="write the whole record here")
    parser.add_argument("--markdown", metavar="PATH", help="write Markdown tables of mpool and its best rivals here")
    parser.add_argument("--quick", action="store_true",
                        help="little work: shows that the command runs, measures nothing")
    arguments = parser.parse_args(argv)
    wrong = [engine for engine in arguments.engines if engine.partition(":")[0] not in bench.modules]
    wrong += [shape for shape in arguments.shapes if shape not in bench.shapes]
    wrong += [pair for pair in arguments.peer_python if "=" not in pair]
    if wrong:
        parser.error(f"{wrong[0]!r}: engines are {', '.join(bench.modules)}; shapes are {', '.join(bench.shapes)}")
    began = time.monotonic()
    record = bench(arguments).run()
    if arguments.json:
        records.write(record, arguments.json)
    if arguments.markdown:
        Path(arguments.markdown).write_text(report.markdown(record) + "\n")
    print(report.text(record))
    say(f"{time.monotonic() - began:.0f} s")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
