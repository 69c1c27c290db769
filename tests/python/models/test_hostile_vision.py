"""Vision models with a hostile value in a configuration, a template, a tokenizer or a description of weights, or with a
part of another model, as folders, as embedding models and as pairs of GGUF files.

Each model is loaded and serves a request with an odd image. Every outcome is a result or one MpoolError that names what
was changed, in bounded time and memory.
"""

import functools
import json
import os
import random
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import hostilefiles  # noqa: E402
import visiongguf  # noqa: E402
import visionmodels  # noqa: E402
from jsonplaces import places  # noqa: E402

import mpool  # noqa: E402
from mpool import errors  # noqa: E402

#: One case takes less CPU time, in seconds, and less memory, in bytes. Valid models take 1 % of it.
MOST_SECONDS, MOST_BYTES = 20, 1 << 30
GREEDY: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
PIXELS = np.random.default_rng(0).integers(0, 255, (60, 600, 3), dtype=np.uint8)
IMAGES = [PIXELS[:44, :50], PIXELS[:5], PIXELS[:1, :1], PIXELS[:44, :3]]
FOLDERS = [name for name in visionmodels.FAMILIES if name not in ("llava_uneven", "llava_full", "llava_siglip")]
PAIRS = [name for name in FOLDERS if name not in ("llava", "llava_next", "idefics3")]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
#: Texts that a template has in place of the token of an image.
MARKS = ["", "w20", "<image> <image>", "<image><image>", "</s>", "{{ 1 / 0 }}"]


def _pair(folder: Path, name: str, parts: tuple[str, ...] = ("text", "mmproj")) -> None:
    model = visionmodels.randomised(name)
    if name == "pixtral":
        model.config.text_config.sliding_window = None  # GGUF files of Mistral have no window
    for part in parts:
        write = visiongguf.decoder if part == "text" else visiongguf.projector
        write(model, folder / f"{part}.gguf")


@functools.cache
def _other_projector(folder: Path, name: str) -> bytes:
    _pair(folder, name, ("mmproj",))
    return (folder / "mmproj.gguf").read_bytes()


def _ask(pool: mpool.Pool, folder: Path, image: np.ndarray) -> None:
    pool.vision(image, "w10", folder, **GREEDY)


def _ask_pair(pool: mpool.Pool, folder: Path, image: np.ndarray) -> None:
    pool.vision(image, "w10", pool.register(folder.name, str(folder), chat_template=TEMPLATE), **GREEDY)


def _embed(pool: mpool.Pool, folder: Path, image: np.ndarray) -> None:
    assert np.isfinite(pool.embed([{"image": image, "text": "w10"}, "w11"], folder)).all()


def _rank(pool: mpool.Pool, folder: Path, image: np.ndarray) -> None:
    pool.rerank("w10", [{"image": image}, "w11"], folder)


def _made(folder: Path, kind: str, name: str) -> Callable[[mpool.Pool, Path, np.ndarray], None]:
    """Write a model and return the function that asks it."""
    folder.mkdir()
    if kind == "pair":
        _pair(folder, name)
        return _ask_pair
    if name == "embedding_gemma2":
        visionmodels.embedding_gemma2(folder)
        return _embed
    visionmodels.save(visionmodels.randomised(name), name, folder)
    if kind in ("embedder", "reranker"):
        visionmodels.make_embedder(folder, kind == "reranker")
    return {"folder": _ask, "embedder": _embed, "reranker": _rank}[kind]


def _change(rng: random.Random, folder: Path, kind: str, others: Path) -> str:
    """Change a model in one place. Returns the key or the tensor of the place, or nothing."""
    choice, other = rng.random(), rng.choice(("gemma3", "lfm2_vl", "pixtral", "internvl", "qwen2_5_vl", "qwen3_vl"))
    if kind == "pair":
        projector = folder / "mmproj.gguf"
        if choice < 0.9:
            return hostilefiles.change_gguf(rng, projector, "clip.")
        projector.unlink()  # it may be a hard link
        projector.write_bytes(_other_projector(others, other))
        return ""
    files = {name: folder / name for name in os.listdir(folder) if (folder / name).is_file()}
    if choice < 0.1:
        files["preprocessor_config.json"].unlink()
        files["preprocessor_config.json"].write_text(json.dumps(visionmodels.PROCESSORS[other]))
        return ""
    if choice < 0.2:
        template = files["chat_template.json"]
        text = template.read_text().replace("<start_of_image>" if "<start_of" in template.read_text() else "<image>",
                                            rng.choice(MARKS))
        template.unlink()
        template.write_text(text)
        return ""
    for most, name in ((0.3, "tokenizer.json"), (0.35, "model.safetensors")):
        if choice < most:
            hostilefiles.change(rng, files[name])
            return ""
    names = [name for name in files if "config" in name and not name.startswith("tokenizer")]
    return hostilefiles.change(rng, files[rng.choice([*names, "config.json", "preprocessor_config.json"])])


def _paths(folder: Path) -> Iterator[str]:
    """Yield the keys of the JSON files, with their sections."""
    for file in folder.rglob("*.json"):
        for path in places(json.loads(file.read_text("utf-8", "surrogatepass")), most=60):
            yield re.sub(r"\.\d+\b", "", ".".join(map(str, path)))


def _names_the_place(error: errors.MpoolError, key: str, folder: Path) -> bool:
    """Return True if an error of the files names the key that was changed, a key of the files that contradicts it, or a
    tensor of another size."""
    text = str(error)
    if key in text or any(name in text for name in (".safetensors", "tokenizer.json")):
        return True
    if (missing := re.search(r"([\w.]+)`? is missing", text)) is not None:
        return missing[1].rpartition(".")[2] in key or key.rpartition(".")[0] in missing[1] or missing[1] in key
    if "mmproj.gguf" in text:
        return re.search(r"\b(a|clip|mm|v)\.\w", text) is not None
    return bool(set(re.findall(r"[\w.]+\w", re.sub(r"\.\d+\b", "", text))) & set(_paths(folder)))


@pytest.mark.sample(6)
@pytest.mark.parametrize("count", [20, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind, name", [*(("folder", name) for name in FOLDERS), *(("pair", name) for name in PAIRS),
                                        ("embedder", "qwen3_vl"), ("embedder", "qwen3_5"), ("reranker", "qwen3_vl"),
                                        ("embedder", "embedding_gemma2")])
def test_hostile_values(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str, name: str, count: int) -> None:
    rng, outcomes = random.Random(f"{kind} {name} {count}"), []
    ask = _made(tmp_path / "model", kind, name)
    (tmp_path / "other").mkdir()
    with mpool.Pool(mpool.PoolConfig(offline=True, request_timeout=60)) as pool:
        ask(pool, tmp_path / "model", IMAGES[0])
        for at in range(count):
            folder = tmp_path / str(at)
            shutil.copytree(tmp_path / "model", folder, copy_function=os.link)
            key = _change(rng, folder, kind, tmp_path / "other")
            seconds, most = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            try:
                ask(pool, folder, rng.choice(IMAGES))
                outcomes.append("served")
            except errors.MpoolError as error:
                outcomes.append("refused")
                if key and isinstance(error, (errors.FormatError, errors.Unsupported)):
                    assert _names_the_place(error, key, folder), f"{at}: {key} is not in: {error}"
            assert time.process_time() - seconds < MOST_SECONDS, f"{at}: {key}"
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < MOST_BYTES >> 10, f"{at}: {key}"
            shutil.rmtree(folder)
    assert outcomes.count("served") >= count // 20 and outcomes.count("refused") >= count // 10
    assert "panicked" not in capfd.readouterr().err
