"""Folders of models with one or two hostile values in their JSON files, vocabularies and headers of weights.

Each folder is loaded and serves a request. Every outcome is a result or one MpoolError, and no library panics.
"""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import imagemodels  # noqa: E402
import pipelinemodels  # noqa: E402
import rerankers  # noqa: E402
import retrievalmodels  # noqa: E402
import staticmodels  # noqa: E402
import tinymodels  # noqa: E402
import visionmodels  # noqa: E402
from jsonplaces import places  # noqa: E402

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


def _vision(family: str) -> Callable[[Path], Any]:
    return _inside(lambda folder: visionmodels.save(visionmodels.randomised(family), family, folder))


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
    "smolvlm": (_vision("smolvlm"), lambda pool, path: pool.vision(IMAGE, "w10", path, **GREEDY)),
    **{name: (_vision(name), lambda pool, path: pool.vision(IMAGE, "w10", path, **GREEDY))
       for name in ("gemma3", "internvl", "lfm2_vl", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")},
    "sd3": (pipelinemodels.sd3, lambda pool, path: pool.generate_image("a cat", path, width=64, height=64,
                                                                       num_inference_steps=1, seed=1)),
}
VALUES: list[Any] = [
    0, 1, -1, 2, 3, 7, 64, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 53, 1 << 63, 1 << 64, 1 << 200, -(1 << 63),
    0.0, -0.0, 0.5, -1.5, 1e-30, 1e30, 1e308, float("inf"), float("nan"), True, False, None, "", "x", "relu", "gelu",
    "mean", "cls", "\0", "a" * 3000, "../x", "/etc/passwd", "\u00e9\ud800", "[PAD]", "w1", "{{ 1/0 }}", [], [0], [1, 2],
    [None], [1 << 64], [[1]], [{}], {}, {"a": {"b": 1}}]


def changed(rng: random.Random, value: Any) -> Any:
    """Return a copy of a JSON value with one place deleted, repeated, scaled or replaced."""
    value = copy.deepcopy(value)
    found = list(places(value, most=60))
    if not found:
        return rng.choice(VALUES)
    *path, last = rng.choice(found)
    parent, choice = value, rng.random()
    for key in path:
        parent = parent[key]
    old = parent[last]
    if choice < 0.15:
        del parent[last]
    elif choice < 0.25 and isinstance(parent, list):
        parent.append(copy.deepcopy(old))
    elif choice < 0.4 and type(old) in (int, float):
        parent[last] = old * rng.choice((2, 3, -1, 1000)) + rng.choice((0, 1, -1))
    else:
        parent[last] = copy.deepcopy(rng.choice(VALUES))
    return value


def change(rng: random.Random, file: Path) -> None:
    """Change a file in one place: a value of JSON, a value of the header of weights, or a few bytes."""
    data = file.read_bytes()
    file.unlink()  # it may be a hard link
    if file.suffix == ".safetensors":
        size = int.from_bytes(data[:8], "little")
        header = json.dumps(changed(rng, json.loads(data[8:8 + size]))).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size:])
    elif file.suffix == ".json":
        file.write_text(json.dumps(changed(rng, json.loads(data))))
    else:
        at, removed = rng.randrange(len(data) + 1), rng.choice((0, 1, 50))
        file.write_bytes(data[:at] + bytes(rng.choices(range(256), k=rng.choice((0, 1, 30)))) + data[at + removed:])


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
                change(rng, rng.choice(tokenizers if tokenizers and rng.random() < 0.4 else files))
            try:
                request(pool, str(folder))
                outcomes.append("served")
            except errors.MpoolError:
                outcomes.append("refused")
            shutil.rmtree(folder)
    assert outcomes.count("served") >= count // 20 and outcomes.count("refused") >= count // 10
    assert "panicked" not in capfd.readouterr().err
