"""Request options, waits and model folders that tests of a pool's state share."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

TEXT: dict[str, Any] = dict(temperature=0, max_tokens=2, ignore_eos=True)
LONG: dict[str, Any] = dict(prompt="a", max_tokens=1900, n=64, ignore_eos=True)


def row_of(pool: mpool.Pool) -> Any:
    """Return the row of the only model of a pool."""
    (row,) = pool.ps()
    return row


@pytest.fixture
def broken(bert: Path, tmp_path: Path) -> tuple[Path, str]:
    """A model, and a text whose embedding is NaN."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "broken"
    shutil.copytree(bert, folder)
    weights = load_file(str(folder / "model.safetensors"))
    name = next(name for name in weights if name.endswith("word_embeddings.weight"))
    weights[name] = weights[name].copy()
    with mpool.Pool() as pool:
        bad = pool.tokenize("z", folder)[1]
    weights[name][bad] = np.nan
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder, "z"
