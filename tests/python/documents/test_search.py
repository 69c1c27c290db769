"""nDCG@10 of mpool equals that of sentence-transformers, on the topics and the index of pydoc.

The whole measurement is ``python -m benchmarks search``. These tests take the first words of each topic and some of the
queries.
"""

import sys
from pathlib import Path

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
