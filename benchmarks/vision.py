"""``python -m benchmarks vision --vocabulary FILE``: encoding of images and questions about them, compared with
llama.cpp's mtmd, with equal weights.

The method is that of ``python -m benchmarks images``. Shapes are pairs of GGUF files with random values, the image
encoder in bfloat16, the decoder as in Q4_K_M. Images have 1,024 x 1,024 pixels. Needs the ``gguf`` package.
"""

import argparse
from pathlib import Path
from typing import Any

from . import images
from .synthetic_vision import PAIRS


class Bench(images.ShapeBench):
    """One run."""

    topic = "vision"
    file = Path(__file__).with_name("vision_engines.py")
    shapes = tuple(PAIRS)
    engines = "mpool,llama-cpp"
    modules = {"mpool": "mpool", "llama-cpp": "llama_cpp"}
    maker = "gguf"

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """See ShapeBench."""
        parser.add_argument("--vocabulary", required=True, metavar="FILE", help="a GGUF file with a tokenizer")

    def prepare(self, shape: str) -> list[str]:
        """Write the pair of files."""
        folder = self.folder(shape)
        if not (folder / "ready").exists():
            folder.mkdir(parents=True, exist_ok=True)
            PAIRS[shape].write(folder, self.arguments.vocabulary)
            (folder / "ready").touch()
        return list(self.arguments.engines)

    def work(self, shape: str) -> dict[str, Any]:
        """Return the number of repetitions, the operations of an image's encoding and its option."""
        return {**super().work(shape), "operations": PAIRS[shape].operations, "tokens": PAIRS[shape].tokens}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, print the tables, write the record."""
    return images.main(argv, Bench, __doc__)
