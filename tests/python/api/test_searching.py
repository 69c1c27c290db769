"""mpool.semantic_search, paraphrase_mining and community_detection against sentence-transformers and plain formulas."""

from __future__ import annotations

import signal
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.search import nearest

RNG = np.random.default_rng(11)


def clustered(count: int = 600, dim: int = 48) -> np.ndarray:
    """Vectors around 20 centres, with exact duplicates."""
    centres = RNG.standard_normal((20, dim))
    rows = centres[RNG.integers(0, 20, count) ** 2 // 20] + 0.45 * RNG.standard_normal((count, dim))
    rows[5], rows[count - 1] = rows[3], rows[3]
    return rows.astype(np.float32)


ROWS = clustered()
LONG = np.ones((2, (1 << 20) + 1), np.float32)


def plain(queries: np.ndarray, corpus: np.ndarray, metric: str) -> np.ndarray:
    q, c = queries.astype(np.float64), corpus.astype(np.float64)
    if metric == "cosine":
        q, c = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, c))
    return q @ c.T


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("count", [1, 3, 70, 1100])
def test_search_is_exact(metric: str, count: int) -> None:
    queries = RNG.standard_normal((count, 48)).astype(np.float32)
    found = mpool.semantic_search(queries, ROWS, top_k=9, metric=metric)  # type: ignore[arg-type]
    scores = plain(queries, ROWS, metric)
    assert found.indices.shape == found.scores.shape == (count, 9)
    assert found.indices.dtype == np.int64 and found.scores.dtype == np.float32
    scale = np.abs(scores).max()
    np.testing.assert_allclose(found.scores, np.take_along_axis(scores, found.indices, 1), atol=2e-6 * scale)
    np.testing.assert_allclose(found.scores, -np.sort(-scores, axis=1)[:, :9], atol=2e-6 * scale)


def test_equal_scores_come_by_index() -> None:
    found = mpool.semantic_search(ROWS[3], ROWS, top_k=3)
    assert found.indices.tolist() == [3, 5, 599] and len(set(found.scores.tolist())) == 1


def test_scores_do_not_depend_on_the_other_queries() -> None:
    """Kernels and blocks differ for one query, three and a thousand; arrays are split at other places."""
    together = mpool.semantic_search(np.tile(ROWS[:100], (11, 1)), ROWS, top_k=600)
    for count in (1, 2, 7):
        apart = mpool.semantic_search(ROWS[:count], ROWS, top_k=600)
        assert (apart.indices == together.indices[:count]).all() and (apart.scores == together.scores[:count]).all()
    matrix = np.empty((600, 600), np.float32)
    np.put_along_axis(matrix, (found := mpool.semantic_search(ROWS, ROWS, top_k=600)).indices, found.scores, 1)
    assert (matrix == matrix.T).all(), "the score of a and b is the score of b and a"


def test_against_sentence_transformers() -> None:
    util = pytest.importorskip("sentence_transformers.util")
    import torch

    tensor = torch.from_numpy(ROWS)
    expected = util.semantic_search(tensor[:9], tensor, top_k=13)
    found = mpool.semantic_search(ROWS[:9], ROWS, top_k=13)
    np.testing.assert_allclose(found.scores, [[hit["score"] for hit in row] for row in expected], atol=1e-6)
    for indices, row in zip(found.indices.tolist(), expected):
        assert sorted(indices) == sorted(hit["corpus_id"] for hit in row)
    for size, threshold in ((2, 0.7), (10, 0.75), (1, 0.9)):
        communities = mpool.search.community_detection(ROWS, threshold=threshold, min_community_size=size)
        reference = util.community_detection(tensor, threshold=threshold, min_community_size=size)
        assert [(one[0], sorted(one)) for one in communities] == [(one[0], sorted(one)) for one in reference]
    for most, room in ((1, 1000), (7, 300), (100, 500_000)):
        pairs = mpool.search.paraphrase_mining(ROWS, top_k=most, max_pairs=room)
        mined = util.paraphrase_mining_embeddings(tensor, top_k=most, max_pairs=room)
        np.testing.assert_allclose([pair[0] for pair in pairs], [pair[0] for pair in mined], atol=1e-6)
        differing = {pair[1:] for pair in pairs} ^ {tuple(pair[1:]) for pair in mined}
        scores = plain(ROWS, ROWS, "cosine")
        worst = pairs[-1][0]
        assert all(abs(scores[i, j] - worst) < 1e-6 or _ties(scores, i, j, most) for i, j in differing), differing


def _ties(scores: np.ndarray, i: int, j: int, most: int) -> bool:
    """True if the pair's score equals the last one among the nearest of one of them."""
    return any(abs(np.sort(np.delete(scores[a], a))[-most] - scores[i, j]) < 1e-6 for a in (i, j))


def test_groups_of_queries_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (mpool.semantic_search(ROWS, ROWS, top_k=5), mpool.search.paraphrase_mining(ROWS, top_k=5, max_pairs=200),
             mpool.search.community_detection(ROWS, min_community_size=3))
    monkeypatch.setattr(nearest, "_QUERIES", 37)
    monkeypatch.setattr(nearest, "_KEPT", 1)
    monkeypatch.setattr(nearest, "_BLOCK", 48 * 101)
    apart = (mpool.semantic_search(ROWS, ROWS, top_k=5), mpool.search.paraphrase_mining(ROWS, top_k=5, max_pairs=200),
             mpool.search.community_detection(ROWS, min_community_size=3))
    assert (whole[0].indices == apart[0].indices).all() and (whole[0].scores == apart[0].scores).all()
    assert whole[1:] == apart[1:]


def test_memory_of_paraphrase_mining_does_not_grow_with_the_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and candidates of each search, and the bytes that NumPy allocates, are bounded by `top_k`, `max_pairs`
    and the number of queries at once, not by the number of vectors."""
    top_k, room, at_once = 20, 500, 64
    monkeypatch.setattr(nearest, "_QUERIES", at_once)
    queries, lists, peaks = [], [], []
    search, best_pairs = nearest._search, nearest._best_pairs

    def searched(name: str, rows: Any, *arguments: Any) -> Any:
        queries.append(len(rows))
        return search(name, rows, *arguments)

    def merged(kept: list[Any], more: list[Any], most: int) -> list[Any]:
        lists.append((len(kept[0]), len(more[0])))
        return best_pairs(kept, more, most)

    monkeypatch.setattr(nearest, "_search", searched)
    monkeypatch.setattr(nearest, "_best_pairs", merged)
    random = np.random.default_rng(8)
    for count in (1000, 8000):
        vectors = random.standard_normal((count, 8), dtype=np.float32)
        tracemalloc.start()
        assert len(mpool.search.paraphrase_mining(vectors, top_k=top_k, max_pairs=room)) == room
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(queries) == count and max(queries) == at_once
        assert max(kept for kept, _ in lists) <= room and max(more for _, more in lists) <= top_k * at_once
        queries.clear()
        lists.clear()
    assert peaks[1] <= 1.5 * peaks[0] < 4 * 1000 * 1000  # the matrix of all scores has count * count * 4 bytes


def test_arrays_of_other_types(tmp_path: Path) -> None:
    expected = mpool.semantic_search(ROWS[:4], ROWS)
    mapped = np.memmap(tmp_path / "rows", np.float32, "w+", shape=ROWS.shape)
    mapped[:] = ROWS
    strided = np.repeat(ROWS, 2, axis=1)[:, ::2]
    for corpus in (mapped, ROWS.astype(np.float64), strided, np.asfortranarray(ROWS), ROWS.tolist()):
        assert (mpool.semantic_search(ROWS[:4], corpus).scores == expected.scores).all()
    small = np.int8([[3, 4], [-3, 4], [100, 100]])
    assert mpool.semantic_search(small[0], small, metric="dot").scores.tolist() == [700.0, 25.0, 7.0]


def test_edges() -> None:
    assert mpool.semantic_search(ROWS[:3], ROWS[:0]).indices.shape == (3, 0)
    assert mpool.semantic_search(ROWS[:0], ROWS).indices.shape == (0, 10)
    assert mpool.semantic_search(ROWS[0], ROWS[:2], top_k=50).indices.shape == (2,)
    assert mpool.semantic_search(np.zeros(48), ROWS, top_k=2).scores.tolist() == [0.0, 0.0]
    assert mpool.search.paraphrase_mining(ROWS[:1]) == [] == mpool.search.paraphrase_mining(ROWS[:0])
    assert mpool.search.community_detection(ROWS[:0]) == [] == mpool.search.community_detection(ROWS[:5])
    same = np.ones((50, 3))
    assert mpool.search.community_detection(same) == [list(range(50))]
    assert mpool.search.paraphrase_mining(same, top_k=1, max_pairs=3) == [(pytest.approx(1.0), 0, j) for j in (1, 2, 3)]


def with_nan(row: int) -> np.ndarray:
    rows = ROWS.copy()
    rows[row, 7] = np.nan
    return rows


@pytest.mark.parametrize(("call", "name", "part"), [
    (lambda: mpool.semantic_search(ROWS[:2], with_nan(123)), "corpus", "vector 123"),
    (lambda: mpool.semantic_search(with_nan(123), ROWS), "queries", "vector 123"),
    (lambda: mpool.search.paraphrase_mining(with_nan(599)), "vectors", "vector 599"),
    (lambda: mpool.search.community_detection(with_nan(0)), "vectors", "vector 0"),
    (lambda: mpool.semantic_search(np.full((1, 48), 1e300), ROWS), "queries", "beyond float32"),
    (lambda: mpool.semantic_search(ROWS[:2, :7], ROWS), "corpus", "48 components"),
    (lambda: mpool.semantic_search(ROWS, ROWS[0]), "corpus", "shape (48,)"),
    (lambda: mpool.semantic_search([["a"]], ROWS), "queries", "got texts"),
    (lambda: mpool.semantic_search(3.0, np.ones((2, 1))), "queries", "shape ()"),
    (lambda: mpool.similarity([["a"]], ROWS), "a", "got texts"),
    (lambda: mpool.similarity([[1.0], [1.0, 2.0]], ROWS), "a", "different lengths"),
    (lambda: mpool.semantic_search([[1.0], [1.0, 2.0]], ROWS), "queries", "different lengths"),
    (lambda: mpool.semantic_search(ROWS, np.zeros((3, 0))), "corpus", "shape (3, 0)"),
    (lambda: mpool.semantic_search(np.uint8([1, 2]), np.uint8([[1, 2]])), "queries", "Hamming distance"),
    (lambda: mpool.semantic_search(ROWS[0], np.uint8(ROWS)), "corpus", "dtype uint8"),
    (lambda: mpool.semantic_search(ROWS, np.int8(ROWS)), "corpus", "int8 vectors, while `queries` has floats"),
    (lambda: mpool.semantic_search(np.int8(ROWS), ROWS), "queries", "int8 vectors, while `corpus` has floats"),
    (lambda: mpool.search.paraphrase_mining(np.uint8(ROWS)), "vectors", "dtype uint8"),
    (lambda: mpool.search.community_detection(np.uint8(ROWS)), "vectors", "dtype uint8"),
    (lambda: mpool.semantic_search(ROWS, ROWS, top_k=0), "top_k", "0"),
    (lambda: mpool.semantic_search(ROWS, ROWS, top_k=True), "top_k", "True"),
    (lambda: mpool.semantic_search(ROWS, ROWS, metric="l2"), "metric", "l2"),  # type: ignore[arg-type]
    (lambda: mpool.search.paraphrase_mining(ROWS, max_pairs=0), "max_pairs", "0"),
    (lambda: mpool.search.community_detection(ROWS, threshold=float("nan")), "threshold", "NaN"),
    (lambda: mpool.search.community_detection(ROWS, min_community_size=1.5), "min_community_size",
     "1.5"),  # type: ignore[arg-type]
    (lambda: mpool.semantic_search(LONG[0], LONG), "corpus", "1,048,577 components"),
    (lambda: mpool.search.paraphrase_mining(LONG), "vectors", "at most 1,048,576 components"),
    (lambda: mpool.search.community_detection(LONG), "vectors", "at most 1,048,576 components"),
])
def test_what_is_wrong_is_named(call: Callable[[], Any], name: str, part: str) -> None:
    with pytest.raises(mpool.InvalidArgument) as caught:
        call()
    assert caught.value.param == name and part in str(caught.value)


def test_ctrl_c_ends_a_long_search() -> None:
    """The search would take minutes."""
    rows = np.ones((400_000, 64), np.float32)
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        mpool.search.paraphrase_mining(rows)
    timer.join()
    assert mpool.semantic_search(ROWS[0], ROWS, top_k=1).indices.tolist() == [0]


def test_a_closed_pool_refuses_a_search() -> None:
    from mpool import _core

    pool = mpool.Pool()
    search = _core.Search(pool.registry, ROWS[:2], 3, True)
    pool.close()
    with pytest.raises(mpool.ShuttingDown):
        search.add(ROWS)
