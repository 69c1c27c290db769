"""OpenBLAS computes most products with float32 weights until they are packed, with default options.

A stand-in serves (helpers/blasmodel.py), so that the test also runs where the sums of OpenBLAS are not those of mpool.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import blasmodel
import numpy as np
import pytest
import tinymodels

LAYERS, HIDDEN, INNER, TOKENS = 24, 512, 2048, 128
WEIGHTS = LAYERS * (4 * HIDDEN * HIDDEN + 2 * HIDDEN * INNER)

CHILD = """
import json, sys
import mpool
folder, tokens = sys.argv[1], int(sys.argv[2])
work = lambda: mpool.show_config("dicts")["blas"]["multiply_adds"]
passes = 0
with mpool.Pool() as pool:
    pool.load(folder, compute="float32")
    before = work()
    while passes == 0 or pool.ps()[0].weights == "packing":
        words = ["fox"] * (tokens - 2)
        words[passes] = "lazy"  # vectors of equal texts are kept for a while
        pool.embed(" ".join(words), folder, compute="float32")
        passes += 1
    packed = work()
    pool.embed("fox " * (tokens - 2), folder, compute="float32")
    print(json.dumps({"passes": passes, "work": packed - before, "after": work() - packed,
                      "weights": pool.ps()[0].weights}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 24 layers and 302 MB of float32 matrices: large enough to be packed on use by default."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    folder = tinymodels.bert(tmp_path_factory.mktemp("share") / "bert")
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8, "intermediate_size": INNER,
               "max_position_embeddings": TOKENS}
    (folder / "config.json").write_text(json.dumps(config))
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": TOKENS, "do_lower_case": False}))
    values = np.random.default_rng(3).standard_normal(2 * HIDDEN * INNER, dtype=np.float32) * 0.02
    shapes = {f"embeddings.{name}_embeddings.weight": (rows, HIDDEN)
              for name, rows in (("word", config["vocab_size"]), ("position", TOKENS), ("token_type", 2))}
    shapes |= {f"embeddings.LayerNorm.{name}": (HIDDEN,) for name in ("weight", "bias")}
    for layer in range(LAYERS):
        for part, outputs, inputs in (("attention.self.query", HIDDEN, HIDDEN), ("attention.self.key", HIDDEN, HIDDEN),
                                      ("attention.self.value", HIDDEN, HIDDEN),
                                      ("attention.output.dense", HIDDEN, HIDDEN),
                                      ("intermediate.dense", INNER, HIDDEN), ("output.dense", HIDDEN, INNER)):
            shapes[f"encoder.layer.{layer}.{part}.weight"] = outputs, inputs
            shapes[f"encoder.layer.{layer}.{part}.bias"] = (outputs,)
        for norm in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"encoder.layer.{layer}.{norm}.{name}": (HIDDEN,) for name in ("weight", "bias")}
    tensors = {name: values[at:at + math.prod(shape)].reshape(shape)
               for at, (name, shape) in enumerate(shapes.items())}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_most_products_before_the_weights_are_packed(model: Path, tmp_path: Path) -> None:
    library = blasmodel.build(tmp_path)
    done = subprocess.run([sys.executable, "-c", CHILD, str(model), str(TOKENS)], check=True, capture_output=True,
                          text=True, timeout=300, env={**os.environ, "MPOOL_BLAS": str(library)})
    found = json.loads(done.stdout)
    assert found["weights"] == "packed" and found["after"] == 0
    # attention: HIDDEN multiply-adds for the score of two tokens, and as many for the sum of values
    everything = found["passes"] * TOKENS * (WEIGHTS + LAYERS * 2 * HIDDEN * TOKENS)
    assert 2 * found["work"] >= everything, found
