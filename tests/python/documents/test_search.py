"""nDCG@10 of mpool equals that of sentence-transformers, on the topics and the index of pydoc.

The whole measurement is ``python -m benchmarks search``. These tests take the first words of each topic and some of the
queries.
"""

from __future__ import annotations

import pydoc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realmodels import real_path

ROOT = Path(__file__).resolve().parents[3]
if not (ROOT / "benchmarks" / "__main__.py").exists():
    pytest.skip("needs the benchmarks", allow_module_level=True)
sys.path.append(str(ROOT))  # at the end: the sources must not hide the installed package

from benchmarks import search  # noqa: E402


@pytest.fixture(scope="module")
def given() -> search.Collection:
    """Return the collection, with texts of at most 24 words."""
    whole = search.collection()
    return search.Collection(whole.names, [" ".join(text.split()[:24]) for text in whole.texts], whole.queries[::2],
                             whole.grades[::2])


@pytest.mark.slow
def test_dense_vectors_rank_as_those_of_sentence_transformers(given: search.Collection) -> None:
    """On the weights of the default model, with every second query: equal to three digits, and far above chance."""
    pytest.importorskip("sentence_transformers")
    model = str(real_path("minilm"))
    ours, theirs = (search.mean_ndcg(engine.dense(model, given.queries, given.texts), given.grades)
                    for engine in (search.Mpool(2), search.Reference(2)))
    assert abs(ours - theirs) < 5e-4, f"mpool {ours:.5f}, sentence-transformers {theirs:.5f}"
    assert ours > 0.3


@pytest.mark.slow
def test_sparse_vectors_and_rerankers_rank_as_those_of_sentence_transformers(given: search.Collection,
                                                                              tmp_path: Path) -> None:
    """On seeded weights, whose nDCG says nothing about quality: equal to three digits."""
    pytest.importorskip("sentence_transformers")
    sparse, reranker = search.write_seeded(tmp_path, given.texts)
    queries, grades = given.queries[::4], given.grades[::4]
    found = []
    for engine in (search.Mpool(2), search.Reference(2)):
        rows = engine.sparse(sparse, queries, given.texts)
        again = engine.rerank(reranker, queries, given.texts, [row[:search.CANDIDATES] for row in rows])
        assert all(set(row) == set(map(int, old[:search.CANDIDATES])) for row, old in zip(again, rows, strict=True))
        found.append((search.mean_ndcg(rows, grades), search.mean_ndcg(again, grades)))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=5e-4)
    assert found[0][0] != found[0][1]


@pytest.mark.slow
def test_fused_and_reranked_results_are_those_of_sentence_transformers(given: search.Collection,
                                                                       tmp_path: Path) -> None:
    """The search of the guide: dense vectors of the default model and sparse vectors, fused by rank, then reranked.

    The figures are equal to three digits.
    """
    pytest.importorskip("sentence_transformers")
    model, (sparse, reranker) = str(real_path("minilm")), search.write_seeded(tmp_path, given.texts)
    queries, grades, found = given.queries[::4], given.grades[::4], []
    for engine in (search.Mpool(2), search.Reference(2)):
        dense = engine.dense(model, queries, given.texts)
        fused = [search.fuse(len(given.texts), *rows)
                 for rows in zip(dense, engine.sparse(sparse, queries, given.texts), strict=True)]
        again = engine.rerank(reranker, queries, given.texts, [row[:search.CANDIDATES] for row in fused])
        found.append([search.mean_ndcg(rows, grades) for rows in (dense, fused, again)])
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=5e-4)
    assert len({round(figure, 3) for figure in found[0]}) == 3


def test_fusion_is_that_of_the_guide() -> None:
    """The function of the guide gives the same order, also for rankings that miss documents, and for ties."""
    text = (ROOT / "docs" / "guides" / "search.md").read_text("utf-8")
    names: dict[str, Any] = {"np": np, "passages": [""] * 150}
    exec(text[text.index("def fuse("):text.index("def by_meaning")], names)  # noqa: S102
    random = np.random.default_rng(4)
    for _ in range(20):
        rankings = [random.permutation(150)[:100], random.permutation(150)[:random.integers(0, 60)]]
        assert search.fuse(150, *rankings) == names["fuse"](*rankings).tolist()
    assert search.fuse(4, [2, 1], [1, 2]) == [1, 2, 0, 3]


def test_judgements_are_those_of_help() -> None:
    """A query's topic has grade 2. Topics that ``help()`` names as related have grade 1."""
    whole = search.collection()
    assert len(set(whole.texts)) == len(whole.names) > 70 and len(whole.queries) > 150
    labels = {name: at for at, name in enumerate(whole.names)}

    def graded(query: str) -> dict[str, int]:
        judged = whole.grades[whole.queries.index(query)]
        return {name: judged[at] for name, at in labels.items() if at in judged}

    assert graded("for") == {"for": 2, "break": 1, "continue": 1, "while": 1}
    assert graded("PRIVATENAMES") == {"atom-identifiers": 2}
    assert graded("_") == graded("PRIVATENAMES") and graded("@")["function"] == 2 and graded("@")["class"] == 1
    assert "None" not in whole.queries and pydoc.Helper.keywords["None"] == ""


def test_ndcg_is_that_of_scikit_learn() -> None:
    """Also for rankings of fewer documents than ten, and for relevant documents below rank ten."""
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for documents in (7, 40):
        for _ in range(20):
            grades = {int(at): int(random.integers(1, 3)) for at in random.choice(documents, 5, replace=False)}
            ranking = random.permutation(documents)
            scores = np.empty(documents)
            scores[ranking] = -np.arange(documents)
            wanted = metrics.ndcg_score([[grades.get(at, 0) for at in range(documents)]], [scores], k=10)
            assert search.ndcg(ranking, grades) == pytest.approx(wanted)


def test_passages_have_every_word_and_documents_the_rank_of_their_best_passage() -> None:
    """Passages of a long text overlap. A passage that two documents have counts for both, in their order."""
    words = [str(number) for number in range(1000)]
    parts, owners = search.passages([" ".join(words), "one two", "one two"])
    assert {word for part in parts[:-1] for word in part.split()} == set(words)
    assert max(len(part.split()) for part in parts) == search.WORDS and owners[-1] == [1, 2]
    assert parts[0].split()[-search.OVERLAP:] == parts[1].split()[:search.OVERLAP]
    assert search.by_document([[1, 0, 2], [2, 1, 0]], [[5], [4], [3, 5]]) == [[4, 5, 3], [3, 5, 4]]
