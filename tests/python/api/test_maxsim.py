"""mpool.maxsim, quantize_tokens and pool_tokens against plain formulas in float64, and scipy's clustering."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.api import functions
from mpool.search import late_interaction, token_pooling
from waiting import together, until

RNG = np.random.default_rng(19)
DIM = 40


def texts(count: int, least: int = 0, most: int = 60) -> list[np.ndarray]:
    """Normalised token vectors of texts of random lengths."""
    lengths = RNG.integers(least, most, count)
    vectors = [RNG.standard_normal((n, DIM)).astype(np.float32) for n in lengths]
    return [v / np.linalg.norm(v, axis=1, keepdims=True) for v in vectors]


DOCUMENTS = [*texts(120), np.empty((0, DIM), np.float32), *texts(30, 100, 300)]
QUERIES = [*texts(4, 1), *texts(1, 33, 34)]


def plain(queries: list[np.ndarray], documents: list[np.ndarray]) -> np.ndarray:
    return np.array([[(q.astype(float) @ d.astype(float).T).max(axis=1).sum() if len(d) else -np.inf
                      for d in documents] for q in queries])


EXACT = plain(QUERIES, DOCUMENTS)


def packed(parts: list[np.ndarray], dtype: Any = np.float32) -> mpool.search.PackedTokens:
    return mpool.search.PackedTokens(np.concatenate(parts).astype(dtype), np.cumsum([0, *map(len, parts)]))


def test_scores_are_exact() -> None:
    scores = mpool.maxsim(QUERIES, DOCUMENTS)
    assert isinstance(scores, np.ndarray) and scores.dtype == np.float32 and scores.shape == EXACT.shape
    np.testing.assert_allclose(scores, EXACT, rtol=1e-5, atol=1e-5)
    assert (scores[:, 120] == -np.inf).all()


@pytest.mark.parametrize("top_k", [1, 7, 1000])
def test_best_documents(top_k: int) -> None:
    scores = mpool.maxsim(QUERIES, DOCUMENTS)
    found = mpool.maxsim(QUERIES, DOCUMENTS, top_k=top_k)
    assert isinstance(found, mpool.search.Neighbours)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
    assert (found.indices == order).all() and found.indices.dtype == np.int64
    assert (found.scores == np.take_along_axis(scores, order, 1)).all()


def test_equal_scores_come_by_index() -> None:
    found = mpool.maxsim(QUERIES[0], [DOCUMENTS[3], *DOCUMENTS[:9], DOCUMENTS[3]], top_k=11)
    assert isinstance(found, mpool.search.Neighbours)
    places = found.indices.tolist()
    assert places.index(0) + 1 == places.index(4) and places.index(4) + 1 == places.index(10)


def test_scores_do_not_depend_on_other_queries_or_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    together = mpool.maxsim(QUERIES, DOCUMENTS)
    best = mpool.maxsim(QUERIES, DOCUMENTS, top_k=5)
    for number, query in enumerate(QUERIES):
        assert (mpool.maxsim(query, DOCUMENTS) == together[number]).all()
    assert (mpool.maxsim(QUERIES, DOCUMENTS[7:9]) == together[:, 7:9]).all()
    monkeypatch.setattr(late_interaction, "_TOKENS", 40)
    monkeypatch.setattr(late_interaction, "_BLOCK", DIM * 70)
    assert (mpool.maxsim(QUERIES, packed(DOCUMENTS, np.float64)) == together).all()
    apart = mpool.maxsim(QUERIES, packed(DOCUMENTS, np.float64), top_k=5)
    assert (apart[0] == best[0]).all() and (apart[1] == best[1]).all()


def test_forms_of_arguments() -> None:
    scores = mpool.maxsim(QUERIES, DOCUMENTS)
    store = packed(DOCUMENTS)
    for form in (store, SimpleNamespace(values=store.values, offsets=store.offsets.tolist()),
                 [document.tolist() for document in DOCUMENTS[:120]]):
        count = len(form) if isinstance(form, list) else len(DOCUMENTS)
        assert (mpool.maxsim(packed(QUERIES), form) == scores[:, :count]).all()
    cube = RNG.standard_normal((6, 9, DIM)).astype(np.float32)
    assert (mpool.maxsim(QUERIES, cube) == mpool.maxsim(QUERIES, list(cube))).all()
    assert mpool.maxsim(QUERIES[0], cube[0]).shape == (1,)
    assert mpool.maxsim(QUERIES[:1], cube).shape == (1, 6)
    for rows in (list(cube[0]), cube[0].tolist()):  # one vector a token: one text
        found = mpool.maxsim(rows, cube)
        assert isinstance(found, np.ndarray) and found.shape == (6,)
        np.testing.assert_allclose(found, mpool.maxsim(cube[0], cube), rtol=1e-6)
    strided = np.repeat(store.values, 2, axis=1)[:, ::2]
    assert (mpool.maxsim(QUERIES, store._replace(values=strided)) == scores).all()
    none = mpool.search.PackedTokens(np.empty((0, DIM), np.float32), np.zeros(1, np.int64))
    assert mpool.maxsim(QUERIES, none).shape == (5, 0)
    assert mpool.maxsim(QUERIES, none, top_k=3).indices.shape == (5, 0)  # type: ignore[union-attr]


def test_int8_is_exact_for_its_vectors() -> None:
    store = mpool.search.quantize_tokens(DOCUMENTS)
    assert store.values.dtype == np.int8 and store.scales is not None and store.scales.dtype == np.float32
    dense = np.concatenate(DOCUMENTS)
    rounded = store.values * store.scales[:, None].astype(float)
    assert (np.abs(rounded - dense) <= 0.5001 * store.scales[:, None]).all()
    expected = plain(QUERIES, np.split(rounded, store.offsets[1:-1]))
    np.testing.assert_allclose(mpool.maxsim(QUERIES, store), expected, rtol=1e-5, atol=1e-5)
    scaled = store._replace(values=store.values.astype(np.float32))
    np.testing.assert_allclose(mpool.maxsim(QUERIES, scaled), mpool.maxsim(QUERIES, store), rtol=1e-6, atol=1e-6)
    again = mpool.search.quantize_tokens(store)
    assert (again.values == store.values).all()
    zero = mpool.search.quantize_tokens(np.zeros((1, 2, 3)))
    assert not zero.values.any() and mpool.maxsim(np.ones((1, 3)), zero).tolist() == [0.0]


def exact(queries: np.ndarray, stored: mpool.search.PackedTokens) -> np.ndarray:
    """Scores in float64 of queries of one token."""
    rows = stored.values.astype(float) * (1 if stored.scales is None else stored.scales[:, None].astype(float))
    products = queries.astype(float) @ rows.T
    return np.array([products[:, a:b].max(axis=1) for a, b in zip(stored.offsets, stored.offsets[1:])]).T


@pytest.mark.parametrize("dim", [1, 2, 40, 63, 64, 65, 128, 385, 1100])
def test_int8_is_nearer_to_float64_than_float32(dim: int) -> None:
    random = np.random.default_rng(dim)
    queries = random.standard_normal((60, 1, dim), np.float32)
    lengths = [1, 2, 7, 16, 17, 33, 64, 130] * 5
    store = mpool.search.quantize_tokens([random.standard_normal((tokens, dim)) for tokens in lengths])
    expected = exact(queries[:, 0], store)
    scores, floats = mpool.maxsim(queries, store), mpool.maxsim(queries, store._replace(
        values=store.values.astype(np.float32)))
    assert isinstance(scores, np.ndarray) and isinstance(floats, np.ndarray)
    error, other = np.abs(scores - expected).mean(), np.abs(floats - expected).mean()
    assert dim < 64 or error < 0.9 * other
    assert (np.abs(scores - expected) <= 2e-7 * np.abs(queries).max(axis=2) * np.abs(store.scales).max() * 127 * dim
            ).all()


@pytest.mark.parametrize("scale", [None, 0.37])
def test_int8_with_extreme_numbers(scale: float | None) -> None:
    """Integers of up to 23 bits, at any exponent, and the least int8 give exact scores."""
    random = np.random.default_rng(3)
    for dim in (1, 5, 64, 400):
        values = random.choice(np.array([-128, -127, 0, 127], np.int8), (90, dim))
        stored = mpool.search.PackedTokens(values, np.array([0, 1, 30, 90]), None if scale is None else np.full(
            90, scale, np.float32))
        numbers = random.choice([-4194304.0, 4194303.0, 1.0, 0.0, -77777.0], (9, 1, dim))
        for exponent in (-104, -20, 0, 80 if dim < 64 else 70):
            queries = np.ldexp(numbers, exponent).astype(np.float32)
            np.testing.assert_allclose(mpool.maxsim(queries, stored), exact(queries[:, 0], stored), rtol=3e-7)
    tiny = np.float32([[[1e-38, -1e-40]], [[0.0, -0.0]]])
    pair = mpool.search.PackedTokens(np.int8([[100, -128]]), np.array([0, 1]), None)
    scores = mpool.maxsim(tiny, pair)
    assert isinstance(scores, np.ndarray)
    assert abs(scores[0, 0] - 1e-36) < 128 * 2.0**-126 and scores[1, 0] == 0
    with pytest.raises(mpool.InvalidArgument, match="exceeds float32"):
        mpool.maxsim(np.full((1, 2), 3e38, np.float32),
                     mpool.search.PackedTokens(np.int8([[100, 100]]), np.array([0, 1])))


def with_number(number: float, document: int = 123) -> list[np.ndarray]:
    changed = [part.copy() for part in DOCUMENTS]
    with np.errstate(over="ignore"):
        changed[document][-1, 7] = number
    return changed


def store(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"values": np.ones((4, DIM), np.float32), "offsets": [0, 2, 4], "scales": None, **fields})


@pytest.mark.parametrize(("call", "name", "part"), [
    (lambda: mpool.maxsim(QUERIES, with_number(np.nan)), "documents",
     f"`documents` must have finite components, got NaN in document 123 (token {len(DOCUMENTS[123]) - 1})"),
    (lambda: mpool.maxsim(QUERIES, with_number(np.inf), top_k=3), "documents", "got infinity in document 123 "),
    (lambda: mpool.maxsim(QUERIES, packed(with_number(-1e300), np.float64)), "documents",
     "got -infinity in document 123 "),
    (lambda: mpool.maxsim(np.full((2, DIM), 1e30), with_number(3e38)), "documents",
     "`documents` must have finite products with the queries, got one that exceeds float32 in document 123"),
    (lambda: mpool.maxsim(np.ones((1 << 19, 8), np.float32), [np.ones((2, 8)), np.ones((9000, 8))]), "documents",
     "`documents` must have at most 8192 tokens in a document for queries of 524288 tokens and 8 components, got 9000 "
     "in document 1"),
    (lambda: mpool.maxsim([np.ones((2, 1), np.float32), np.ones(((1 << 20) + 1, 1), np.float32)], [[[1.0]]]), "query",
     "`query` must be texts of at most 1,048,576 tokens, got a text of 1,048,577 tokens"),
    (lambda: mpool.maxsim(np.ones((1, (1 << 20) + 1)), np.ones((1, (1 << 20) + 1))), "query",
     "`query` must be vectors of at most 1,048,576 components, got vectors of 1,048,577 components"),
    (lambda: mpool.maxsim([[1.0]], np.ones((1, (1 << 20) + 1))), "documents",
     "`documents` must be vectors of at most 1,048,576 components"),
    (lambda: mpool.maxsim(with_number(np.nan)[121:], DOCUMENTS), "query", "text 2"),
    (lambda: mpool.maxsim(DOCUMENTS, DOCUMENTS), "query", "without tokens"),
    (lambda: mpool.maxsim(QUERIES, store(scales=[1, 1, np.inf, 1])), "documents",
     "`documents` must have finite scales, got infinity in document 1 (token 0)"),
    (lambda: mpool.maxsim(QUERIES, store(scales=[1, 1, 1, np.nan], values=np.ones((4, DIM), np.int8))), "documents",
     "`documents` must have finite scales, got NaN in document 1 (token 1)"),
    (lambda: mpool.maxsim(with_number(-np.inf)[121:], mpool.search.quantize_tokens(DOCUMENTS)), "query", "text 2"),
    (lambda: mpool.maxsim(QUERIES, store(scales=[1, 1])), "documents", "scales of shape (2,)"),
    (lambda: mpool.maxsim(QUERIES, store(offsets=[0, 3, 2, 4])), "documents", "offsets that descend from 3 to 2"),
    (lambda: mpool.maxsim(QUERIES, store(offsets=[1, 4])), "documents", "offsets that go from 1 to 4"),
    (lambda: mpool.maxsim(QUERIES, store(offsets=[0, 5])), "documents", "offsets that go from 0 to 5"),
    (lambda: mpool.maxsim(QUERIES, store(offsets=[])), "documents", "offsets"),
    (lambda: mpool.maxsim(QUERIES, store(offsets=[0.0, 4.0])), "documents", "float64"),
    (lambda: mpool.maxsim(QUERIES, store(values=np.ones(4))), "documents", "shape (4,)"),
    (lambda: mpool.maxsim(QUERIES, [np.ones((2, DIM)), np.ones((2, 3))]), "documents", "(2, 3)"),
    (lambda: mpool.maxsim(QUERIES, np.ones((2, 3))), "documents", "3 components"),
    (lambda: mpool.maxsim(QUERIES, []), "documents", "got an empty list"),
    (lambda: mpool.search.quantize_tokens([]), "documents", "got an empty list"),
    (lambda: mpool.maxsim(5, DOCUMENTS), "query", "5"),  # type: ignore[arg-type]
    (lambda: mpool.maxsim(np.array(1.0), DOCUMENTS), "query", "shape ()"),
    (lambda: mpool.maxsim(QUERIES, store(offsets=[[0], [1, 4]])), "documents", "different lengths"),
    (lambda: mpool.maxsim(["text"], DOCUMENTS), "query", "dtype"),
    (lambda: mpool.maxsim(QUERIES, DOCUMENTS, top_k=0), "top_k", "0"),
    (lambda: mpool.maxsim(QUERIES, DOCUMENTS, top_k=True), "top_k", "True"),
    (lambda: mpool.search.quantize_tokens(with_number(np.nan)), "documents", "text 123"),
    (lambda: mpool.search.pool_tokens(with_number(np.nan), factor=2), "documents", "text 123"),
    (lambda: mpool.search.pool_tokens(DOCUMENTS), "factor", "factor=None"),
    (lambda: mpool.search.pool_tokens(DOCUMENTS, factor=2, budget=3), "factor", "budget=3"),
    (lambda: mpool.search.pool_tokens(DOCUMENTS, factor=0), "factor", "0"),
    (lambda: mpool.search.pool_tokens(DOCUMENTS, budget=1), "budget", "1"),
    (lambda: mpool.search.pool_tokens(DOCUMENTS, factor=2, protected=-1), "protected", "-1"),
    (lambda: mpool.search.pool_tokens(np.ones((1, 5000, 2)), budget=3), "budget", "document 0 with 5,000 tokens"),
    (lambda: mpool.search.pool_tokens(np.ones((1, 2049, 1)), budget=1, protected=0), "budget",
     "document 0 with 2,049 tokens"),
])
def test_refused(call: Callable[[], Any], name: str, part: str) -> None:
    with pytest.raises(mpool.InvalidArgument) as caught:
        call()
    assert caught.value.param == name and part in str(caught.value), str(caught.value)


# ---- threads and closed pools ----

def test_a_pool_is_closed_during_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that the pool refuses raises ShuttingDown; every other one has all scores."""
    expected = mpool.maxsim(DOCUMENTS[-20:], DOCUMENTS)
    monkeypatch.setattr(functions, "_default", mpool.Pool())
    monkeypatch.setattr(functions, "_ending", True)
    ready, closed = threading.Barrier(9), threading.Event()
    complete: list[int] = []

    def caller() -> None:
        assert np.array_equal(mpool.maxsim(DOCUMENTS[-20:], DOCUMENTS), expected)
        ready.wait(60)
        with pytest.raises(mpool.ShuttingDown):
            while not closed.is_set():
                assert np.array_equal(mpool.maxsim(DOCUMENTS[-20:], DOCUMENTS), expected)
                complete.append(1)
            mpool.maxsim(QUERIES, DOCUMENTS)

    def closer() -> None:
        ready.wait(60)
        try:
            until(lambda: len(complete) > 8, 60)
        finally:
            functions.default_pool().close()
            closed.set()

    together([*[caller] * 8, closer])


def test_interrupts_stop_it() -> None:
    """The search computes for seconds; the interrupt ends it at once."""
    query, documents = RNG.standard_normal((512, 256)), np.ones((400, 4000, 256), np.int8)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        mpool.maxsim(query, documents)
    timer.join()
    assert mpool.maxsim(query, documents[:1, :3]).shape == (1,)


# ---- pooling ----

def groups(labels: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(np.flatnonzero(labels == label).tolist()) for label in set(labels.tolist())}


@pytest.mark.parametrize("factor", [2, 3, 5])
def test_clusters_are_those_of_scipy(factor: int) -> None:
    hierarchy = pytest.importorskip("scipy.cluster.hierarchy")
    for tokens in [*texts(12, 8), *texts(2, 200, 300)]:
        most = max(1, len(tokens) // factor)
        distances = 1 - tokens.astype(float) @ tokens.astype(float).T
        tree = hierarchy.linkage(distances[np.triu_indices(len(tokens), 1)], method="ward")
        expected = hierarchy.fcluster(tree, t=most, criterion="maxclust")
        found = token_pooling.clusters(tokens, most)
        assert groups(found) == groups(expected)
        assert [found.tolist().index(label) for label in range(most)] == sorted(
            found.tolist().index(label) for label in range(most)), "clusters come in the order of their first tokens"


def test_pooled_tokens_are_means_of_clusters() -> None:
    pooled = mpool.search.pool_tokens(DOCUMENTS, factor=3)
    for number, tokens in enumerate(DOCUMENTS):
        part = pooled.values[pooled.offsets[number]:pooled.offsets[number + 1]]
        rest = len(tokens) - 1
        assert len(part) == (min(len(tokens), 1 + max(1, rest // 3)) if rest > 0 else len(tokens))
        if rest < 4:
            continue
        assert (part[0] == tokens[0]).all()
        labels = token_pooling.clusters(tokens[1:], rest // 3)
        for label in set(labels.tolist()):
            np.testing.assert_allclose(part[1 + label], tokens[1:][labels == label].mean(axis=0), atol=1e-6)


def test_a_budget_limits_every_document(monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (2048, 50):
        monkeypatch.setattr(token_pooling, "_BLOCK", block)
        pooled = mpool.search.pool_tokens(DOCUMENTS, budget=16, protected=2)
        lengths = np.diff(pooled.offsets)
        assert lengths.tolist() == [min(16, len(tokens)) for tokens in DOCUMENTS]
        assert (pooled.values[pooled.offsets[-2]:][:2] == DOCUMENTS[-1][:2]).all()
        same = mpool.search.pool_tokens(DOCUMENTS, factor=1)
        np.testing.assert_allclose(mpool.maxsim(QUERIES, same), EXACT, atol=1e-5)


def test_as_many_tokens_as_a_block_has_become_one() -> None:
    tokens = np.random.default_rng(3).standard_normal((2048, 2))
    pooled = mpool.search.pool_tokens([tokens], budget=1, protected=0)
    assert pooled.offsets.tolist() == [0, 1]
    np.testing.assert_allclose(pooled.values[0], tokens.mean(axis=0), atol=1e-6)


def test_equal_tokens_become_one() -> None:
    tokens = np.repeat(np.eye(4, dtype=np.float32), 6, axis=0)
    pooled = mpool.search.pool_tokens([tokens], factor=2, protected=0)
    assert (pooled.values == np.eye(4)).all()


@pytest.mark.parametrize("scales, rows", [(None, [[2, -4], [6, 8]]), ([0.5, 2.0], [[1, -2], [12, 16]])])
def test_vectors_with_scales(scales: list[float] | None, rows: list[list[float]]) -> None:
    """Each vector is multiplied by its scale."""
    stored = late_interaction.PackedTokens(np.int8([[2, -4], [6, 8]]), np.array([0, 1, 2]),
                                           None if scales is None else np.float32(scales))
    found = late_interaction.dense(stored)
    assert found.dtype == np.float32 and found.tolist() == rows
