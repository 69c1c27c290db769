"""The embedding function and the reranker for LanceDB, in tables on disk, compared with mpool's functions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
import integrationexamples
from clientpackages import package

package("lancedb", "lancedb")

import lancedb  # noqa: E402
import pyarrow  # noqa: E402
from lancedb.embeddings import get_registry  # noqa: E402
from lancedb.index import FTS  # noqa: E402
from lancedb.pydantic import LanceModel, Vector  # noqa: E402
from pydantic import ValidationError  # noqa: E402

from mpool.integrations.lancedb import MpoolEmbeddings, MpoolReranker  # noqa: E402

TEXTS = ["A cat sat on the mat.", "Numbers 0 1 2.", "The quick brown fox jumps over the lazy dog.", "one two three cat"]
QUERY = "Where is the cat?"


def table_of(folder: Path, at: Path, **arguments: Any) -> Any:
    """Make a table whose vectors LanceDB computes with the registered function."""
    function = get_registry().get("mpool").create(model=str(folder), **arguments)

    class Row(LanceModel):  # type: ignore[misc]
        number: int
        text: str = function.SourceField()
        vector: Vector(function.ndims()) = function.VectorField()  # type: ignore[valid-type]

    made = lancedb.connect(at).create_table("rows", schema=Row)
    made.add([{"number": number, "text": text} for number, text in enumerate(TEXTS)])
    return made


def test_vectors_equal_those_of_embed(prompted: Path) -> None:
    same = {"dimensions": 8, "compute": "float32"}
    made = MpoolEmbeddings.create(model=str(prompted), options=same)
    documents = mpool.embed(TEXTS, str(prompted), task="document", **same)
    for texts in (TEXTS, pyarrow.array(TEXTS), pyarrow.chunked_array([TEXTS[:1], TEXTS[1:]]), np.array(TEXTS)):
        assert np.array_equal(np.stack(made.compute_source_embeddings(texts)), documents)
    expected = mpool.embed(QUERY, str(prompted), task="query", **same)
    assert np.array_equal(made.compute_query_embeddings(QUERY)[0], expected)
    assert made.ndims() == 8 and MpoolEmbeddings.create(model=str(prompted)).ndims() > 8
    found = made.compute_source_embeddings([None, TEXTS[0], None])
    assert found[0] is None and found[2] is None and np.array_equal(found[1], documents[0])
    assert made.compute_source_embeddings([]) == [] and made.compute_source_embeddings([None]) == [None]


def test_a_table_finds_what_similarity_finds(prompted: Path, tmp_path: Path) -> None:
    """Rows are embedded when added, queries when searched, also in a table that was opened again."""
    table_of(prompted, tmp_path, options={"compute": "float32"})
    again = lancedb.connect(tmp_path).open_table("rows")
    query = mpool.embed([QUERY], str(prompted), task="query", compute="float32")
    documents = mpool.embed(TEXTS, str(prompted), task="document", compute="float32")
    wanted = 1 - mpool.similarity(query, documents, metric="cosine")[0]
    found = again.search(QUERY).distance_type("cosine").limit(4).to_list()
    assert [row["number"] for row in found] == list(np.argsort(wanted))
    assert np.allclose([row["_distance"] for row in found], np.sort(wanted), atol=1e-5)
    stored = json.loads(again.schema.metadata[b"embedding_functions"])
    assert [(one["name"], one["model"]) for one in stored] == [
        ("mpool", {"model": str(prompted), "options": {"compute": "float32"}})]


@pytest.mark.parametrize("return_score", ["relevance", "all"])
@pytest.mark.parametrize("kind", ["vector", "fts", "hybrid"])
def test_reranking(bert: Path, ranker: Path, tmp_path: Path, kind: str, return_score: str) -> None:
    """The order and the scores are those of mpool.rerank for the rows that each kind of search finds."""
    table = table_of(bert, tmp_path)
    if kind != "vector":
        table.create_index("text", config=FTS())
    search = table.search(QUERY, query_type=kind)
    made = MpoolReranker(ranker, return_score=return_score)
    found = (search.rerank(made) if kind != "vector" else search.rerank(made, query_string=QUERY)).limit(4).to_list()
    wanted = mpool.rerank(QUERY, [row["text"] for row in sorted(found, key=lambda row: row["number"])], str(ranker))
    assert len(found) == (2 if kind == "fts" else 4)
    assert [row["text"] for row in found] == [one.text for one in wanted]
    assert np.allclose([row["_relevance_score"] for row in found], [one.score for one in wanted], atol=1e-6)
    scores = {"vector": {"_distance"}, "fts": {"_score"}, "hybrid": {"_distance", "_score"}}[kind]
    expected = scores if return_score == "all" else set()
    assert {name for name in found[0] if name in ("_distance", "_score")} == expected


@pytest.mark.parametrize("return_score", ["relevance", "all"])
def test_reranking_of_nothing_and_of_missing_texts(ranker: Path, return_score: str) -> None:
    made = MpoolReranker(str(ranker), column="words", return_score=return_score)
    schema = pyarrow.schema([("words", pyarrow.string()), ("_distance", pyarrow.float32()),
                             ("_rowid", pyarrow.uint64())])
    none = schema.empty_table()
    for found in (made.rerank_vector(QUERY, none), made.rerank_hybrid(QUERY, none, none.drop_columns(["_distance"]))):
        assert len(found) == 0 and "_relevance_score" in found.column_names
    rows = pyarrow.Table.from_pylist([{"words": None, "_distance": 0.5, "_rowid": 0},
                                      {"words": TEXTS[0], "_distance": 0.25, "_rowid": 1}], schema=schema)
    found = made.rerank_vector(QUERY, rows)
    wanted = mpool.rerank(QUERY, ["", TEXTS[0]], str(ranker))
    assert found["_relevance_score"].to_pylist() == pytest.approx([one.score for one in wanted], abs=1e-6)
    assert found["words"].to_pylist() == [one.text or None for one in wanted]


def test_errors(bert: Path) -> None:
    for bad in ({"model": 3}, {"name": "x"}, {"options": []}):
        with pytest.raises(ValidationError, match=next(iter(bad))):
            MpoolEmbeddings.create(**bad)
    with mpool.Pool() as pool, pytest.raises(ValidationError, match="model"):
        MpoolEmbeddings(model=pool.register("held", bert))  # type: ignore[arg-type]
    with pytest.raises(mpool.UnknownModel):
        MpoolEmbeddings.create(model="all-MiniLM-L6-v9").ndims()
    with pytest.raises(mpool.WrongCapability):
        MpoolReranker(bert).rerank_vector("x", pyarrow.table({"text": ["x"]}))
    with pytest.raises(ValueError, match="relevance"):
        MpoolReranker(return_score="none")
    assert str(MpoolReranker(bert)) == f"MpoolReranker(model={bert})"


@pytest.mark.builds
def test_examples(tmp_path: Path) -> None:
    integrationexamples.check("lancedb", "lancedb", tmp_path)
