"""``python -m benchmarks vision``: time to the first token of a prompt with an image, compared with transformers on
torch.

The method is that of ``python -m benchmarks``: every engine in its own process, in rotation, compared within rounds in
which the machine was in one state. The shape is LLaVA 1.5 7B with four decoder layers and seeded weights. transformers
makes the weights; ``--maker`` names an interpreter that has it and torch.
"""

import sys
from pathlib import Path

from . import images


class Bench(images.ShapeBench):
    """One run."""

    topic = "vision"
    file = Path(__file__).with_name("vision_engines.py")
    shapes = ("llava-7b-4",)
    engines = "mpool,mpool:float32,torch,torch:bfloat16"
    modules = {"mpool": "mpool", "torch": "transformers"}
    maker = "transformers and torch"


def main() -> int:
    """Run with the options of ``sys.argv``."""
    return images.main(bench=Bench, about=__doc__)


if __name__ == "__main__":
    sys.exit(main())
