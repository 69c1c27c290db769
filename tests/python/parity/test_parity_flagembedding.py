"""BGE-M3 against recorded results of FlagEmbedding: dense, sparse and token vectors, and their scores. Largest
difference 1e-4 of the largest value. ``tests/parity/libraries/make_library_goldens.py`` recorded them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

pytest.importorskip("safetensors")

import recordedm3 as cases
from adapterfiles import digest_of

GOLDENS = Path(__file__).resolve().parents[2] / "parity" / "libraries" / "flagembedding.npz"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDENS) as found:
        return dict(found)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, golden: dict[str, Any]) -> mpool.TextEmbeddings:
    folder = cases.write(tmp_path_factory.mktemp("m3") / "model")
    assert digest_of(folder) == str(golden["sha256"]), "these are not the recorded weights"
    assert cases.inputs() == str(golden["inputs"]), "these are not the recorded tokenizer and texts"
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        return pool.embed_all(cases.TEXTS, folder, compute="float32", parse_special=True)


def close(found: Any, wanted: Any) -> bool:
    """Return True if the shapes are equal, and no difference is above 1e-4 of the largest value."""
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max())


def test_dense_vectors(found: mpool.TextEmbeddings, golden: dict[str, Any]) -> None:
    assert close(found.dense, golden["dense"])


def test_lexical_weights(found: mpool.TextEmbeddings, golden: dict[str, Any]) -> None:
    """The same tokens have a weight, among them the mask token; no other special token has one."""
    weights, wanted = np.zeros(found.sparse.shape, np.float32), golden["sparse"]
    for row, (ids, values) in zip(weights, found.sparse):
        row[ids] = values
    assert close(weights, wanted)
    assert np.array_equal(weights > 1e-5, wanted > 1e-5)
    *special, mask = cases.SPECIAL
    assert wanted[:, mask].any() and not wanted[:, special].any() and 0 < (wanted > 0).mean() < 0.5


@pytest.mark.parametrize("named", [True, False])
def test_files_that_name_special_tokens(tmp_path: Path, golden: dict[str, Any], named: bool) -> None:
    """special_tokens_map.json names those without a weight as well; without any name, no special token has one."""
    folder = cases.write(tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    names = {key: config.pop(key) for key in list(config) if key.endswith("_token")}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if named:
        (folder / "special_tokens_map.json").write_text(json.dumps(
            {key: {"content": text, "lstrip": False} for key, text in names.items()}))
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        found = pool.embed_sparse(cases.TEXTS, folder, compute="float32", parse_special=True)
    wanted = golden["sparse"].copy()
    wanted[:, cases.SPECIAL[-1]] *= named
    assert [ids.tolist() for ids, _ in found] == [np.flatnonzero(row > 1e-5).tolist() for row in wanted]


def test_token_vectors(found: mpool.TextEmbeddings, golden: dict[str, Any]) -> None:
    """Every token has one except the first."""
    assert [len(text) for text in found.tokens] == golden["counts"].tolist()
    assert max(golden["counts"]) == cases.LENGTH - 1  # a text was truncated
    assert close(found.tokens.values, golden["tokens"])


def test_scores(found: mpool.TextEmbeddings, golden: dict[str, Any]) -> None:
    """FlagEmbedding divides the score of token vectors by the number of tokens of the query."""
    dense, sparse = found.dense @ found.dense.T, found.sparse.dot(found.sparse)
    colbert = mpool.maxsim(found.tokens, found.tokens) / golden["counts"][:, None]
    assert close(sparse, golden["lexical"]) and close(colbert, golden["colbert"])
    weights = np.array(cases.MODES)
    for name, wanted in (("dense", dense), ("sparse", sparse), ("colbert", colbert),
                         ("sparse+dense", (weights[0] * dense + weights[1] * sparse) / weights[:2].sum()),
                         ("colbert+sparse+dense",
                          (weights[0] * dense + weights[1] * sparse + weights[2] * colbert) / weights.sum())):
        assert close(wanted, golden[f"pair.{name}"]), name
