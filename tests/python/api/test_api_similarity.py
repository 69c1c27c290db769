"""mpool.similarity against plain formulas and sentence-transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpool

RNG = np.random.default_rng(5)
A, B = RNG.standard_normal((5, 7)).astype(np.float32), RNG.standard_normal((4, 7)).astype(np.float32)


def plain(x: np.ndarray, y: np.ndarray, metric: str) -> float:
    x, y = x.astype(np.float64), y.astype(np.float64)
    return {"cosine": lambda: x @ y / np.sqrt((x @ x) * (y @ y)), "dot": lambda: x @ y,
            "euclidean": lambda: -np.sqrt(((x - y) ** 2).sum()), "manhattan": lambda: -np.abs(x - y).sum()}[metric]()


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean", "manhattan"])
def test_against_the_formula(metric: str) -> None:
    found = mpool.similarity(A, B, metric=metric)
    assert found.shape == (5, 4) and found.dtype == np.float32
    np.testing.assert_allclose(found, [[plain(x, y, metric) for y in B] for x in A], rtol=1e-5, atol=1e-5)
    pairs = mpool.similarity(A[:4], B, metric=metric, pairwise=True)
    np.testing.assert_allclose(pairs, [plain(x, y, metric) for x, y in zip(A, B)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("metric", ["cosine", "dot", "euclidean", "manhattan"])
def test_against_sentence_transformers(metric: str) -> None:
    util = pytest.importorskip("sentence_transformers.util")
    name = {"cosine": "cos_sim", "dot": "dot_score", "euclidean": "euclidean_sim", "manhattan": "manhattan_sim"}[metric]
    np.testing.assert_allclose(mpool.similarity(A, B, metric=metric), getattr(util, name)(A, B).numpy(), rtol=1e-4,
                               atol=1e-5)


def test_shapes() -> None:
    assert mpool.similarity(A, B[0]).shape == (5,)
    assert mpool.similarity(A[0], B).shape == (4,)
    single = mpool.similarity(A[0], B[0])
    assert single.shape == () and float(single) == pytest.approx(plain(A[0], B[0], "cosine"), rel=1e-5)
    assert mpool.similarity(A[:0], B).shape == (0, 4)
    assert mpool.similarity(A[0], B[0], pairwise=True).shape == ()


def test_types() -> None:
    assert mpool.similarity(A.astype(np.float64), B).dtype == np.float64
    assert mpool.similarity([[1, 2], [3, 4]], [[1, 0]], metric="dot").tolist() == [[1.0], [3.0]]
    assert mpool.similarity(np.int8([[100, 100]]), np.int8([[100, 100]]), metric="dot").item() == 20000.0


BITS = np.packbits(np.concatenate([A, A, A], axis=1) > 0, axis=-1)


@pytest.mark.parametrize(("a", "b", "name", "got"), [
    (BITS, BITS, "a", "shape (5, 3) and dtype uint8"), (A[:, :3], BITS, "b", "shape (5, 3) and dtype uint8"),
    (np.int8(100 * A), B, "a", "int8 vectors, while `b` has floats"),
    (A.astype(np.float64), np.int8(100 * B), "b", "int8 vectors, while `a` has floats")])
def test_quantised_vectors_without_a_common_scale(a: np.ndarray, b: np.ndarray, name: str, got: str) -> None:
    """Bytes of packed bits are no numbers, and embed gives int8 the ranges of one request."""
    for metric in ("cosine", "dot", "euclidean", "manhattan"):
        with pytest.raises(mpool.InvalidArgument) as caught:
            mpool.similarity(a, b, metric=metric)  # type: ignore[arg-type]
        assert caught.value.param == name and caught.value.got == got and "astype(np.float32)" in str(caught.value)


def test_the_hamming_distance_of_the_hint() -> None:
    with pytest.raises(mpool.InvalidArgument, match=re.escape("np.unpackbits(query ^ corpus, axis=-1).sum(axis=-1)")):
        mpool.similarity(BITS[0], BITS)
    found = np.unpackbits(BITS[0] ^ BITS, axis=-1).sum(axis=-1)
    assert found.tolist() == [3 * int(((A[0] > 0) != (row > 0)).sum()) for row in A]


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e300, 1e-300, 1e-40])
def test_cosine_similarity_ignores_the_norm(scale: float) -> None:
    dtype = np.float32 if 1e-38 < scale < 1e38 else np.float64
    a, b = A.astype(dtype), B.astype(dtype)
    want = mpool.similarity(A, B)
    for x, y in ((a * dtype(scale), b), (a, b * dtype(scale)), (a * dtype(scale), b * dtype(scale))):
        np.testing.assert_allclose(mpool.similarity(x, y), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mpool.similarity(x[:4], y, pairwise=True), np.diag(want), rtol=1e-5, atol=1e-6)


def test_zero_vectors_have_similarity_zero() -> None:
    assert mpool.similarity(np.zeros(3), np.ones(3)).item() == 0.0


@pytest.mark.parametrize(("a", "b", "options"), [
    (A, B[:, :3], {}), (A, "text", {}), (A[None], B, {}), ([[1, 2], [3]], B, {}), (A, B, {"metric": "l2"}),
    (A, B, {"pairwise": True}), (np.array(3.0), B, {}), (A > 0, B, {})])
def test_what_does_not_fit(a: object, b: object, options: dict[str, object]) -> None:
    with pytest.raises(mpool.InvalidArgument, match="must be") as caught:
        mpool.similarity(a, b, **options)
    assert caught.value.param in ("a", "b", "metric")


SPARSE = mpool.SparseVectors(np.array([0, 2, 4]), np.array([1, 4, 0, 2], np.int32), np.ones(4, np.float32), (2, 5), str)
TOKENS = mpool.TokenVectors(np.ones((4, 3), np.float32), np.array([0, 2, 4]))


@pytest.mark.parametrize("function", [
    lambda given: mpool.similarity(A, given), lambda given: mpool.semantic_search(given, A),
    mpool.search.paraphrase_mining, mpool.search.community_detection])
@pytest.mark.parametrize("given, hint", [
    (SPARSE, r"got SparseVectors. a.dot\(b\) compares"), (TOKENS, "got TokenVectors. mpool.maxsim"),
    (mpool.TextEmbeddings(A, SPARSE, TOKENS), "got TextEmbeddings. .*attribute dense")])
def test_other_results_are_refused(function: Callable[[Any], object], given: object, hint: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=hint):
        function(given)


@pytest.mark.parametrize("function", [lambda given: mpool.maxsim(given, given), mpool.search.quantize_tokens,
                                      lambda given: mpool.search.pool_tokens(given, factor=2)])
def test_sparse_vectors_of_equal_size_are_no_vectors_of_tokens(function: Callable[[Any], object]) -> None:
    with pytest.raises(mpool.InvalidArgument, match=r"got SparseVectors. a.dot\(b\) compares sparse vectors"):
        function(SPARSE)
