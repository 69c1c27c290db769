"""Folders of models with one or two hostile values in their JSON files, vocabularies and headers of weights;
``test_hostile_vision.py`` has vision models.

Each folder is loaded and serves a request. Every outcome is a result or one MpoolError, and no library panics.
"""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import hostilefiles  # noqa: E402
import imagemodels  # noqa: E402
import pipelinemodels  # noqa: E402
import rerankers  # noqa: E402
import retrievalmodels  # noqa: E402
import staticmodels  # noqa: E402
import tinymodels  # noqa: E402

import mpool  # noqa: E402
from mpool import errors  # noqa: E402

IMAGE = np.random.default_rng(0).integers(0, 255, (44, 50, 3), dtype=np.uint8)
TEXTS = ["w1 w2 cat", "the w3"]
GREEDY: dict[str, Any] = {"max_tokens": 3, "temperature": 0}


def _inside(make: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Return a maker that creates the folder first."""
    return lambda folder: (folder.mkdir(), make(folder))


def _image(family: str) -> Callable[[Path], Any]:
    return _inside(lambda folder: imagemodels.save(imagemodels.randomised(family, 2), family, folder))


def _static(folder: Path) -> None:
    staticmodels.write(folder, {"embeddings": staticmodels.table(rows=7), "weights": staticmodels.weights(),
                                "mapping": staticmodels.mapping()}, {"normalize": True})


#: Name -> how to write the folder, and a request to it.
MODELS: dict[str, tuple[Callable[[Path], Any], Callable[[mpool.Pool, str], Any]]] = {
    "bert": (tinymodels.bert, lambda pool, path: pool.embed(TEXTS, path)),
    "static": (_static, lambda pool, path: pool.embed(TEXTS, path)),
    "bge_m3": (_inside(retrievalmodels.write_bge_m3), lambda pool, path: pool.embed_all(TEXTS, path)),
    "jina_colbert": (lambda folder: retrievalmodels.write_jina_colbert(folder, folder.with_name("reference")),
                     lambda pool, path: pool.embed_tokens(TEXTS, path)),
    "reranker": (lambda folder: rerankers.make_reranker(folder, "bert"),
                 lambda pool, path: pool.rerank("a", ["b c", "d"], path)),
    "classifier": (lambda folder: rerankers.make_reranker(folder, "deberta_v3", 3),
                   lambda pool, path: pool.classify(["w1 a"], path)),
    "llama": (tinymodels.llama, lambda pool, path: pool.chat([{"role": "user", "content": "hi"}], path, **GREEDY)),
    "clip": (_image("clip"), lambda pool, path: pool.embed_image([IMAGE], path)),
    "dinov2": (_image("dinov2"), lambda pool, path: pool.embed_image([IMAGE], path)),
    "sd3": (pipelinemodels.sd3, lambda pool, path: pool.generate_image("a cat", path, width=64, height=64,
                                                                       num_inference_steps=1, seed=1)),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MODELS)
def test_hostile_values(tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, count: int) -> None:
    make, request = MODELS[name]
    rng, outcomes = random.Random(f"{name} {count}"), []
    make(tmp_path / "model")
    with mpool.Pool(mpool.PoolConfig(offline=True, request_timeout=60)) as pool:
        request(pool, str(tmp_path / "model"))
        for at in range(count):
            folder = tmp_path / str(at)
            shutil.copytree(tmp_path / "model", folder, copy_function=os.link)
            files = sorted(file for file in folder.rglob("*") if file.is_file())
            tokenizers = [file for file in files if file.name in ("tokenizer.json", "spiece.model", "merges.txt")]
            for _ in range(rng.choice((1, 1, 1, 2))):
                hostilefiles.change(rng, rng.choice(tokenizers if tokenizers and rng.random() < 0.4 else files))
            try:
                request(pool, str(folder))
                outcomes.append("served")
            except errors.MpoolError:
                outcomes.append("refused")
            shutil.rmtree(folder)
    assert outcomes.count("served") >= count // 20 and outcomes.count("refused") >= count // 10
    assert "panicked" not in capfd.readouterr().err
