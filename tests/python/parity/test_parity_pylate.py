"""Token vectors, pooled documents and scores against recorded results of PyLate: largest difference 1e-4 of the largest
value. ``tests/parity/libraries/make_library_goldens.py`` recorded them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import recordedpylate as cases
from adapterfiles import digest_of

GOLDENS = Path(__file__).resolve().parents[2] / "parity" / "libraries" / "pylate.npz"
POOLED = [(name, factor, protected) for name, case in cases.CASES.items() for factor, protected in case.pooled]


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDENS) as found:
        return dict(found)


@pytest.fixture(scope="module", params=cases.CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, golden: dict[str, Any],
          name: str) -> Iterator[dict[str, mpool.TokenVectors]]:
    """The token vectors of the queries and of the documents."""
    folder = cases.write(tmp_path_factory.mktemp(name) / "model", name)
    assert digest_of(folder) == str(golden[f"{name}.sha256"]), "these are not the recorded weights"
    assert cases.inputs(folder) == str(golden[f"{name}.inputs"]), "these are not the recorded tokenizer and texts"
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        yield {part: pool.embed_tokens(texts, folder, task=task, compute="float32") for part, task, texts in (
            ("queries", "query", cases.QUERIES), ("documents", "document", cases.DOCUMENTS))}


def close(found: Any, wanted: Any) -> bool:
    """Return True if the shapes are equal, and no difference is above 1e-4 of the largest value."""
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max())


def split(golden: dict[str, Any], key: str) -> list[np.ndarray]:
    """Return the recorded vectors of each text."""
    return np.split(golden[key], np.cumsum(golden[f"{key}.counts"])[:-1])


@pytest.mark.parametrize("part", ["queries", "documents"])
def test_token_vectors(found: dict[str, mpool.TokenVectors], golden: dict[str, Any], name: str, part: str) -> None:
    assert [len(text) for text in found[part]] == golden[f"{name}.{part}.counts"].tolist()
    assert close(found[part].values, golden[f"{name}.{part}"])


def test_scores(found: dict[str, mpool.TokenVectors], golden: dict[str, Any], name: str) -> None:
    assert close(mpool.maxsim(found["queries"], found["documents"]), golden[f"{name}.scores"])
    best = mpool.maxsim(found["queries"], found["documents"], top_k=len(cases.DOCUMENTS))
    assert np.array_equal(best.indices, golden[f"{name}.ranks"])
    assert close(best.scores, golden[f"{name}.ranked"])


def same_means(pooled: mpool.search.PackedTokens, wanted: list[np.ndarray], protected: int) -> None:
    """Compare pooled documents. The reference returns the means in an order of its own: each has one equal mean."""
    assert np.diff(pooled.offsets).tolist() == [len(text) for text in wanted]
    for mine, other in zip(np.split(pooled.values, pooled.offsets[1:-1]), wanted, strict=True):
        assert np.array_equal(mine[:protected], other[:protected])
        apart = np.abs(mine[protected:, None] - other[None, protected:]).max(axis=2)
        assert sorted(apart.argmin(axis=1)) == list(range(len(apart)))
        assert (apart.min(axis=1) <= 1e-4 * np.abs(other).max()).all()


@pytest.mark.parametrize("name, factor, protected", POOLED)
def test_pooled_documents(golden: dict[str, Any], name: str, factor: int, protected: int) -> None:
    """The vectors that are pooled are PyLate's, so that clusters do not depend on the rounding of the model's kernels.
    """
    documents = split(golden, f"{name}.documents")
    pooled = mpool.search.pool_tokens(documents, factor=factor, protected=protected)
    same_means(pooled, split(golden, f"{name}.pool.{factor}.{protected}"), protected)


@pytest.mark.parametrize("name, factor, protected", POOLED)
def test_pooling_of_sentence_transformers(golden: dict[str, Any], name: str, factor: int, protected: int) -> None:
    modules = pytest.importorskip("sentence_transformers.multi_vector_encoder.modules")
    torch, documents = pytest.importorskip("torch"), split(golden, f"{name}.documents")
    reference = modules.HierarchicalTokenPooling(factor, num_protected_tokens=protected, normalize_embeddings=False)
    wanted = reference.pool([torch.from_numpy(text) for text in documents])
    same_means(mpool.search.pool_tokens(documents, factor=factor, protected=protected), [one.numpy() for one in wanted],
               protected)


def test_the_cases_reach_what_they_record(golden: dict[str, Any]) -> None:
    """Expanded queries have one length; punctuation, truncation and pooling leave fewer vectors."""
    assert set(golden["bert.queries.counts"]) == {12} and set(golden["modernbert.queries.counts"]) == {19}
    assert len(set(golden["unexpanded.queries.counts"])) > 1
    assert golden["bert.documents.counts"].max() < 40 and golden["modernbert.documents.counts"].max() == 31
    for name, factor, protected in POOLED:
        counts = golden[f"{name}.documents.counts"]
        assert golden[f"{name}.pool.{factor}.{protected}.counts"].sum() < 0.7 * counts.sum()


def test_versions_are_recorded(golden: dict[str, Any]) -> None:
    versions = json.loads(str(golden["versions"]))
    assert set(versions) == {"pylate", "sentence-transformers", "scipy", "torch", "transformers", "tokenizers"}
    assert all(versions.values())
