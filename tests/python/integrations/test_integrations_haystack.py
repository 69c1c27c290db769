"""Embedders and the ranker for Haystack, in its pipelines, compared with mpool's functions."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
import integrationexamples
from clientpackages import package

package("haystack", "haystack")

from haystack import Document, Pipeline  # noqa: E402
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever  # noqa: E402
from haystack.components.writers import DocumentWriter  # noqa: E402
from haystack.document_stores.in_memory import InMemoryDocumentStore  # noqa: E402

from mpool.integrations.haystack import MpoolDocumentEmbedder, MpoolRanker, MpoolTextEmbedder  # noqa: E402

TEXTS = ["A cat sat on the mat.", "Numbers 0 1 2.", "The quick brown fox jumps over the lazy dog.", "", "one two three"]
QUERY = "Where is the cat?"


def documents() -> list[Document]:
    return [Document(id=str(at), content=text, meta={"title": f"number {at}"}) for at, text in enumerate(TEXTS)]


def rows(found: Any) -> np.ndarray:
    return np.float32([one.embedding for one in found["documents"]])


def test_vectors_equal_those_of_embed(prompted: Path) -> None:
    """Queries and documents get their own prompts; the given documents stay as they are."""
    same = {"dimensions": 8, "compute": "float32"}
    given, wanted = documents(), mpool.embed(TEXTS, str(prompted), task="document", **same)
    embedder, texts = MpoolDocumentEmbedder(str(prompted), same), MpoolTextEmbedder(str(prompted), same)
    query = mpool.embed(QUERY, str(prompted), task="query", **same)
    for found in (embedder.run(documents=given), asyncio.run(embedder.run_async(documents=given))):
        assert np.array_equal(rows(found), wanted) and found["meta"] == {"model": str(prompted)}
        assert [one.id for one in found["documents"]] == [one.id for one in given]
    for found in (texts.run(text=QUERY), asyncio.run(texts.run_async(text=QUERY))):
        assert np.array_equal(np.float32(found["embedding"]), query) and found["meta"] == {"model": str(prompted)}
    assert all(one.embedding is None for one in given)
    assert embedder.run(documents=[]) == {"documents": [], "meta": {"model": str(prompted)}}
    missing = embedder.run(documents=[Document(content=None, meta={"a": 1})])
    assert np.array_equal(rows(missing), mpool.embed([""], str(prompted), task="document", **same))


def test_metadata_is_put_before_the_content(bert: Path) -> None:
    made = MpoolDocumentEmbedder(str(bert), meta_fields_to_embed=["title", "none"], embedding_separator=" | ")
    wanted = mpool.embed([f"number {at} | {text}" for at, text in enumerate(TEXTS)], str(bert))
    assert np.array_equal(rows(made.run(documents=documents())), wanted)


def pipelines(prompted: Path, ranker: Path) -> tuple[Any, Any]:
    """A pipeline that writes documents to a store, and one that searches and ranks them."""
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    index, search = Pipeline(), Pipeline()
    index.add_component("embed", MpoolDocumentEmbedder(str(prompted)))
    index.add_component("write", DocumentWriter(store))
    index.connect("embed.documents", "write.documents")
    search.add_component("embed", MpoolTextEmbedder(str(prompted)))
    search.add_component("retrieve", InMemoryEmbeddingRetriever(store, top_k=4))
    search.add_component("rank", MpoolRanker(str(ranker), top_k=2))
    search.connect("embed.embedding", "retrieve.query_embedding")
    search.connect("retrieve.documents", "rank.documents")
    return index, search


@pytest.mark.parametrize("asynchronous", [False, True])
def test_pipelines_find_and_rank(prompted: Path, ranker: Path, asynchronous: bool) -> None:
    index, search = pipelines(prompted, ranker)
    index.run({"embed": {"documents": documents()}})
    given = {"embed": {"text": QUERY}, "rank": {"query": QUERY}}
    found = asyncio.run(search.run_async(given, include_outputs_from={"retrieve"})) if asynchronous else search.run(
        given, include_outputs_from={"retrieve"})
    nearest = mpool.similarity(mpool.embed([QUERY], str(prompted), task="query"),
                               mpool.embed(TEXTS, str(prompted), task="document"), metric="cosine")[0]
    retrieved = found["retrieve"]["documents"]
    assert [int(one.id) for one in retrieved] == list(np.argsort(-nearest)[:4])
    ranking = mpool.rerank(QUERY, [one.content for one in retrieved], str(ranker), top_k=2)
    assert [one.content for one in found["rank"]["documents"]] == [one.text for one in ranking]
    assert np.allclose([one.score for one in found["rank"]["documents"]], [one.score for one in ranking], atol=1e-6)


def test_ranking(ranker: Path) -> None:
    wanted = mpool.rerank(QUERY, TEXTS, str(ranker))
    made = MpoolRanker(str(ranker), top_k=None)
    given = documents()
    for found in (made.run(query=QUERY, documents=given), asyncio.run(made.run_async(query=QUERY, documents=given))):
        assert [int(one.id) for one in found["documents"]] == [one.index for one in wanted]
        assert np.allclose([one.score for one in found["documents"]], [one.score for one in wanted], atol=1e-6)
    assert all(one.score is None for one in given)
    least = wanted[2].score - 1e-6
    assert len(made.run(query=QUERY, documents=given, score_threshold=least)["documents"]) == 3
    assert len(MpoolRanker(str(ranker), score_threshold=least).run(query=QUERY, documents=given)["documents"]) == 3
    assert len(made.run(query=QUERY, documents=given, top_k=1, score_threshold=least)["documents"]) == 1
    assert made.run(query=QUERY, documents=[]) == {"documents": []}
    titled = MpoolRanker(str(ranker), meta_fields_to_embed=["title"], embedding_separator=" ")
    ranking = mpool.rerank(QUERY, [f"number {at} {text}" for at, text in enumerate(TEXTS)], str(ranker))
    found = titled.run(query=QUERY, documents=given)["documents"]
    assert [int(one.id) for one in found] == [one.index for one in ranking]


def test_saved_pipelines(prompted: Path, ranker: Path) -> None:
    """A pipeline that was saved as YAML and read again does the same."""
    made = Pipeline()
    made.add_component("embed", MpoolDocumentEmbedder(Path(prompted), {"dimensions": 8}, ["title"], " "))
    made.add_component("text", MpoolTextEmbedder(None, {"dimensions": 8}))
    made.add_component("rank", MpoolRanker(str(ranker), 3, 0.25, {"compute": "float32"}, ["title"]))
    again = Pipeline.loads(made.dumps(), allowed_modules=["mpool.integrations.haystack"])
    assert again.to_dict() == made.to_dict()
    assert np.array_equal(*(rows(one.get_component("embed").run(documents=documents())) for one in (made, again)))
    ranked = again.get_component("rank")
    assert (ranked.model, ranked.top_k, ranked.score_threshold, ranked.options, ranked.meta_fields_to_embed) == (
        str(ranker), 3, 0.25, {"compute": "float32"}, ["title"])
    with mpool.Pool() as pool:
        held = MpoolTextEmbedder(pool.register("held", prompted))
        assert held.run(text="x")["meta"] == {"model": "held"}
        with pytest.raises(mpool.InvalidArgument, match="mpool.Model held"):
            held.to_dict()


def test_errors(bert: Path) -> None:
    with pytest.raises(mpool.InvalidArgument, match="text.*must be a str"):
        MpoolTextEmbedder(str(bert)).run(text=["x"])  # type: ignore[arg-type]
    for bad in ("x", ["x"], [Document(content="x"), 3]):
        with pytest.raises(mpool.InvalidArgument, match="documents"):
            MpoolDocumentEmbedder(str(bert)).run(documents=bad)  # type: ignore[arg-type]
    for top_k in (0, -1, 1.5, True):
        with pytest.raises(mpool.InvalidArgument, match="top_k"):
            MpoolRanker(top_k=top_k)  # type: ignore[arg-type]
    with pytest.raises(mpool.UnknownModel):
        MpoolTextEmbedder("all-MiniLM-L6-v9").run(text="x")
    with pytest.raises(mpool.WrongCapability):
        MpoolRanker(str(bert)).run(query="x", documents=documents())


@pytest.mark.builds
def test_examples(tmp_path: Path) -> None:
    integrationexamples.check("haystack", "haystack", tmp_path)
