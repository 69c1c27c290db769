"""Files of models that change while the models serve: a loaded model keeps its version, a name that is looked up anew
gets the files of now."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.runtime import entry as entries
from waiting import until
import imagemodels
import paritymodels
import staticmodels
import tinygguf
import tinymodels
import visionmodels

GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
PHOTO = imagemodels.image(5, 60, 90)


def _text(model: Any) -> Any:
    return model.embed("A cat sat.").tobytes()


def _tokens(model: Any) -> Any:
    return model.generate("A cat", **GREEDY).token_ids


def _image(model: Any) -> Any:
    return model.embed_image(PHOTO).tobytes()


def _seen(model: Any) -> Any:
    return model.vision(PHOTO, visionmodels.text(1, 9), **GREEDY).token_ids


def _drawn(model: Any) -> Any:
    return model.generate_image("a cat", width=32, height=32, num_inference_steps=1, seed=1).image.tobytes()


def _write_static(folder: Path) -> Path:
    return staticmodels.write_variant(folder, "plain")


def _write_gguf(folder: Path) -> Path:
    folder.mkdir()
    made = paritymodels.decoder("llama", 2, vocab=157)
    paritymodels.randomise(made, 3)
    return tinygguf.write(folder / "model.gguf", made)


def _write_clip(folder: Path) -> Path:
    folder.mkdir()
    return imagemodels.save(imagemodels.randomised("clip", 2), "clip", folder)


def _write_vision(folder: Path) -> Path:
    folder.mkdir()
    return visionmodels.save(visionmodels.randomised("llava"), "llava", folder)


#: Kind of model -> the function that writes one, and one that computes a result with a handle.
KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Any], Any]]] = {
    "encoder": (tinymodels.bert, _text), "decoder": (tinymodels.llama, _tokens), "gguf": (_write_gguf, _tokens),
    "table": (_write_static, _text), "images": (_write_clip, _image), "texts of images": (_write_clip, _text),
    "vision": (_write_vision, _seen)}


def _weights(place: Path) -> list[Path]:
    return [place] if place.is_file() else sorted(place.rglob("*.safetensors"))


def _flipped(file: Path) -> bytes:
    """Return the content of a file with other weights."""
    data = bytearray(file.read_bytes())
    start = len(data) // 2 & ~7 if data[:4] == b"GGUF" else 8 + int.from_bytes(data[:8], "little")
    for at in range(start, len(data) - 7, 8):
        data[at + 3] ^= 0x80
    return bytes(data)


def _replace(file: Path, data: bytes) -> None:
    """Replace a file the right way: written beside it, then renamed."""
    beside = file.with_name(file.name + ".new")
    beside.write_bytes(data)
    os.replace(beside, file)


def _metadata(file: Path) -> None:
    status = os.stat(file)
    os.chmod(file, status.st_mode)
    os.chown(file, status.st_uid, status.st_gid)
    os.chmod(file, 0o640)
    os.link(file, file.with_name(file.name + ".link"))
    try:
        os.setxattr(file, "user.mpool", b"1")
    except (OSError, AttributeError):  # the file system, or the system, has no such attributes
        pass


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[[Any], Any]]:
    write, use = KINDS[request.param]
    return write(tmp_path_factory.mktemp("kind") / "model"), use


def _copy(place: Path, to: Path) -> Path:
    if place.is_file():
        to.mkdir()
        return Path(shutil.copy(place, to))
    return Path(shutil.copytree(place, to))


# ---- a loaded model keeps its version ----------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["metadata", "renamed", "other", "unlinked"])
def test_a_loaded_model_does_not_depend_on_the_paths_of_its_weights(kind: Any, tmp_path: Path, how: str) -> None:
    place, use = _copy(kind[0], tmp_path / "model"), kind[1]
    with mpool.Pool() as pool:
        model = pool.load(place)
        before = use(model)
        for file in _weights(place):
            if how == "metadata":
                _metadata(file)
            elif how == "unlinked":
                file.unlink()
            else:
                _replace(file, file.read_bytes() if how == "renamed" else _flipped(file))
        loads = pool.registry.stats()["loads"]
        for _ in range(3):
            assert use(model) == before
        if how == "unlinked":  # there is no other version
            assert use(pool.get(place)) == before
        elif how != "other":
            assert use(pool.get(place)) == before
        else:
            with mpool.Pool() as fresh:
                want = use(fresh.get(place))
            assert use(pool.get(place)) == want != before
            assert use(model) == want  # the handle follows its name
        assert how != "metadata" or pool.registry.stats()["loads"] == loads
