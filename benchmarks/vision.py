"""``python -m benchmarks vision``: the first token of an answer about an image, beside transformers on torch.

Turns, probes and ratios are those of ``python -m benchmarks``: every engine in a process of its own, in rotation,
compared within rounds in which the machine was in one state. The shape is LLaVA 1.5 7B with four of its decoder's
layers and seeded weights, made by transformers (``--maker`` names an interpreter that has it and torch).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from . import images


class Bench(images.Bench):
    """A run."""

    topic = "vision"
    file = Path(__file__).with_name("vision_engines.py")
    shapes = ("llava-7b-4",)
    engines = "mpool,mpool:float32,torch,torch:bfloat16"
    modules = {"mpool": "mpool", "torch": "transformers"}
    maker = "transformers and torch"

    def task(self, what: str, engine: str, shape: str) -> dict[str, Any]:
        """What a worker is asked."""
        return {"what": what, "engine": engine, "shape": shape, "folder": str(self.folder(shape)),
                "threads": self.arguments.threads, "repeat": 1 if self.arguments.quick else 3}

    def agreement(self) -> dict[str, Any]:
        """That all compute the same is for the tests: against transformers, layer by layer."""
        return {}


def main() -> int:
    """Run with the options of ``sys.argv``."""
    return images.main(bench=Bench, about=__doc__)


if __name__ == "__main__":
    sys.exit(main())
