"""Files that change under a model: never an answer from one file read by the description of another."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

import mpool
import tinymodels


def _shift_tensors(file: Path) -> None:
    """The same tensors at other offsets: metadata in front of them grows, as saving again may do."""
    data = file.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    header["__metadata__"] = {"note": "x" * 5000}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    fresh = file.with_suffix(".new")
    fresh.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length:])
    os.replace(fresh, file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tinymodels.bert(tmp_path / "bert")


def test_a_replaced_file_is_read_anew_after_unload(folder: Path) -> None:
    with mpool.Pool() as pool:
        before = pool.embed("A text.", str(folder))
        _shift_tensors(folder / "model.safetensors")
        pool.unload(str(folder))
        assert np.array_equal(pool.embed("A text.", str(folder)), before)


def test_a_replaced_file_is_refused_without_unload(folder: Path) -> None:
    with mpool.Pool() as pool:
        before = pool.embed("A text.", str(folder))
        key = pool.get(str(folder))._entry.core_keys()[0]
        pool.registry.evict(key)
        _shift_tensors(folder / "model.safetensors")
        with pytest.raises(mpool.IntegrityError, match="unload"):
            pool.embed("A text.", str(folder))
        pool.unload(str(folder))
        assert np.array_equal(pool.embed("A text.", str(folder)), before)


def test_an_unchanged_file_keeps_its_description(folder: Path) -> None:
    with mpool.Pool() as pool:
        pool.embed("A text.", str(folder))
        description = pool.get(str(folder)).description
        pool.unload(str(folder))
        pool.embed("A text.", str(folder))
        assert pool.get(str(folder)).description is description
