"""Adapters against recorded results of PEFT: largest difference 1e-4 of the largest value.
``tests/parity/libraries/make_library_goldens.py`` recorded them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import librarycases as cases

GOLDENS = Path(__file__).resolve().parents[2] / "parity" / "libraries"


def recorded() -> dict[str, Any]:
    with np.load(GOLDENS / "peft.npz") as found:
        return dict(found)


def close(found: Any, wanted: Any) -> bool:
    """Return True if the shapes are equal, and no difference is above 1e-4 of the largest value."""
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max())


@pytest.mark.parametrize("name", cases.ADAPTERS)
def test_adapters_match_peft(tmp_path: Path, name: str) -> None:
    golden = recorded()
    folder, adapter = cases.write_adapted(tmp_path, name)
    assert cases.digest_of(folder, adapter) == str(golden[f"{name}.sha256"]), "these are not the recorded weights"
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.load(folder, adapters={"it": adapter}, compute="float32")
        options: dict[str, Any] = {"function_to_apply": "none", "compute": "float32"}
        assert close(pool.classify(cases.TEXTS, folder, adapter="it", **options).scores, golden[name])
        assert not close(pool.classify(cases.TEXTS, folder, **options).scores, golden[name])


def test_versions_are_recorded() -> None:
    versions = json.loads(str(recorded()["versions"]))
    assert set(versions) == {"peft", "torch", "transformers", "tokenizers"} and all(versions.values())
