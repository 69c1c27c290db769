"""``python -m benchmarks outputs``: sparse vectors, token vectors and labels of texts compared with
sentence-transformers, ONNX Runtime, OpenVINO and fastembed, with equal weights.

The method is that of ``python -m benchmarks images``. Shapes are a SPLADE model of BERT's size, a ColBERT model of 12
layers of 384 and a classifier of DistilBERT's size, with seeded weights and the tokenizer of all-MiniLM-L6-v2.
sentence-transformers makes the folders; ``--maker`` names an interpreter that has it.
"""

import argparse
from pathlib import Path
from typing import Any

from . import images
from .compare import weights
from .engines import expand


class Bench(images.ShapeBench):
    """One run."""

    topic = "outputs"
    file = Path(__file__).with_name("output_engines.py")
    shapes = ("splade", "colbert", "classifier")
    engines = ("mpool,mpool:float32,mpool:bfloat16,mpool:int8,sentence-transformers,sentence-transformers:bfloat16,"
               "onnxruntime,onnxruntime:int8,openvino,openvino:bfloat16,fastembed")
    modules = {"mpool": "mpool", "sentence-transformers": "sentence_transformers", "onnxruntime": "onnxruntime",
               "openvino": "openvino", "fastembed": "fastembed"}
    maker = reference = "sentence-transformers"

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        arguments.engines = expand(arguments.engines)
        self.tokenizer = weights(None, "text_embedding")

    def work(self, shape: str) -> dict[str, Any]:
        """Return the tokenizer, and the numbers of texts and repetitions."""
        quick = self.arguments.quick
        count = 64 if shape == "splade" else 192  # one text of this shape costs as much as five of the others
        return {"tokenizer": self.tokenizer, "texts": 24 if quick else count, "repeat": 1 if quick else 3}


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark, print the tables, write the record."""
    return images.main(argv, Bench, __doc__)
