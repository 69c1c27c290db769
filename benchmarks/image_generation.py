"""``python -m benchmarks image-generation``: denoising steps and image decoders compared with diffusers.

The method is that of ``python -m benchmarks``: every engine in its own process, in rotation, compared within rounds in
which the machine was in one state. A shape is a few blocks of a published transformer at 512 x 512 pixels with 256 T5
tokens, or the published decoder. diffusers makes the seeded weights; ``--maker`` names an interpreter that has it.
"""

import sys
from pathlib import Path

from . import images


class Bench(images.ShapeBench):
    """One run."""

    topic = "image-generation"
    file = Path(__file__).with_name("image_generation_engines.py")
    shapes = ("flux-512", "sd35m-512", "vae-512")
    engines = "mpool,mpool:float32,torch,torch:bfloat16"
    modules = {"mpool": "mpool", "torch": "torch"}
    maker = "diffusers and torch"

    def prepare(self, shape: str) -> list[str]:
        """Write the model folder of a shape. Returns the names of the engines: all of them can read it."""
        self.folder(shape).mkdir(parents=True, exist_ok=True)
        self.worker(self.arguments.maker or sys.executable, self.task("prepare", "folder", shape))
        return list(self.arguments.engines)


def main() -> int:
    """Run with the options of ``sys.argv``."""
    return images.main(bench=Bench, about=__doc__)


if __name__ == "__main__":
    sys.exit(main())
