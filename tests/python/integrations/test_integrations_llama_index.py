"""Embeddings and the reranker for LlamaIndex, in its own indexes and query engines, compared with mpool's functions."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
import integrationexamples
from clientpackages import package

package("llama_index.core", "llama-index")

from llama_index.core import Settings, StorageContext, VectorStoreIndex, load_index_from_storage  # noqa: E402
from llama_index.core.base.embeddings.base import BaseEmbedding  # noqa: E402
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler  # noqa: E402
from llama_index.core.ingestion import IngestionPipeline  # noqa: E402
from llama_index.core.llms import MockLLM  # noqa: E402
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode  # noqa: E402
from llama_index.core.storage.kvstore import SimpleKVStore  # noqa: E402

from mpool.integrations.llama_index import MpoolEmbedding, MpoolRerank  # noqa: E402

TEXTS = ["A cat sat on the mat.", "Numbers 0 1 2.", "The quick brown fox jumps over the lazy dog.", "", "one two three"]
QUERY = "Where is the cat?"


FULL = [text for text in TEXTS if text]  # an index skips empty nodes


def nodes(texts: list[str] = TEXTS) -> list[TextNode]:
    return [TextNode(text=text, id_=str(at), metadata={"page": at}, excluded_embed_metadata_keys=["page"])
            for at, text in enumerate(texts)]


def test_vectors_equal_those_of_embed(prompted: Path) -> None:
    """Queries and documents get their own prompts, in all forms of the call."""
    same = {"dimensions": 8, "compute": "float32"}
    made = MpoolEmbedding(model=str(prompted), options=same, embed_batch_size=2)
    documents = mpool.embed(TEXTS, str(prompted), task="document", **same)
    query = mpool.embed(QUERY, str(prompted), task="query", **same)
    assert not np.array_equal(query, mpool.embed(QUERY, str(prompted), task="document", **same))
    assert np.array_equal(np.float32(made.get_text_embedding_batch(TEXTS)), documents)
    assert np.array_equal(np.float32(made.get_text_embedding(TEXTS[0])), documents[0])
    assert np.array_equal(np.float32(made.get_query_embedding(QUERY)), query)
    assert made.get_text_embedding_batch([]) == []

    async def all_of_them() -> list[Any]:
        return [await made.aget_text_embedding_batch(TEXTS), await made.aget_text_embedding(TEXTS[0]),
                await made.aget_query_embedding(QUERY)]

    for found, wanted in zip(asyncio.run(all_of_them()), (documents, documents[0], query)):
        assert np.array_equal(np.float32(found), wanted)


def test_an_index_finds_what_similarity_finds(prompted: Path, tmp_path: Path) -> None:
    """A vector index returns the nearest documents with their cosine, also after it was saved and opened again."""
    made = MpoolEmbedding(model=str(prompted))
    wanted = mpool.similarity(mpool.embed([QUERY], str(prompted), task="query"),
                              mpool.embed(FULL, str(prompted), task="document"), metric="cosine")[0]
    index = VectorStoreIndex(nodes(FULL), embed_model=made)
    index.storage_context.persist(str(tmp_path))
    again = load_index_from_storage(StorageContext.from_defaults(persist_dir=str(tmp_path)), embed_model=made)
    for one in (index, again):
        found = one.as_retriever(similarity_top_k=3).retrieve(QUERY)
        assert [int(node.node.node_id) for node in found] == list(np.argsort(-wanted)[:3])
        assert np.allclose([node.score for node in found], np.sort(wanted)[::-1][:3], atol=1e-5)


def test_a_query_engine_reranks(bert: Path, ranker: Path) -> None:
    """Retrieval and reranking in LlamaIndex's query engine."""
    index = VectorStoreIndex(nodes(FULL), embed_model=MpoolEmbedding(model_name=str(bert)))
    ranking = mpool.rerank(QUERY, FULL, str(ranker))
    engine = index.as_query_engine(llm=MockLLM(), similarity_top_k=len(FULL),
                                   node_postprocessors=[MpoolRerank(model=str(ranker), top_n=3)])
    found = engine.query(QUERY).source_nodes
    assert [(int(one.node.node_id), np.float32(one.score)) for one in found] == [
        (one.index, np.float32(one.score)) for one in ranking.results[:3]]


def test_reranking(ranker: Path) -> None:
    """Order, scores, both forms of the query, the retrieval score, and callbacks."""
    wanted = mpool.rerank(QUERY, TEXTS, str(ranker))
    debug = LlamaDebugHandler(print_trace_on_end=False)
    made = MpoolRerank(model=str(ranker), top_n=10, keep_retrieval_score=True,
                       callback_manager=CallbackManager([debug]))
    given = [NodeWithScore(node=node, score=at / 8) for at, node in enumerate(nodes())]
    for found in (made.postprocess_nodes(given, query_str=QUERY), made.postprocess_nodes(given, QueryBundle(QUERY)),
                  asyncio.run(made.apostprocess_nodes(given, query_str=QUERY))):
        assert [int(one.node.node_id) for one in found] == [one.index for one in wanted]
        assert np.allclose([one.score for one in found], [one.score for one in wanted], atol=1e-6)
        assert [one.node.metadata["retrieval_score"] for one in found] == [one.index / 8 for one in wanted]
    assert [one.score for one in given] == [at / 8 for at in range(len(TEXTS))], "the given nodes keep their scores"
    assert len(debug.get_event_pairs(CBEventType.RERANKING)) == 3
    assert made.postprocess_nodes([], query_str=QUERY) == []
    with pytest.raises(mpool.InvalidArgument, match="query"):
        made.postprocess_nodes(given)


def test_many_nodes_are_reranked_in_several_requests(ranker: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(max_embed_inputs=1000)) as pool:
        model = pool.register("ranker", ranker)
        given = [NodeWithScore(node=TextNode(text=f"text {at % 7}", id_=str(at))) for at in range(1100)]
        found = MpoolRerank(model=model, top_n=1100).postprocess_nodes(given, query_str=QUERY)
        seven = pool.rerank(QUERY, [f"text {at}" for at in range(7)], model).scores
    assert len(found) == 1100
    assert [one.score for one in found] == sorted((one.score for one in found), reverse=True)
    assert all(abs(one.score - seven[int(one.node.node_id) % 7]) <= 1e-6 for one in found)


def test_a_pipeline_with_a_cache(bert: Path) -> None:
    """An ingestion pipeline embeds nodes; a cache of embeddings replaces requests."""
    made = MpoolEmbedding(model=str(bert), embeddings_cache=SimpleKVStore())
    first = IngestionPipeline(transformations=[made], disable_cache=True).run(nodes=nodes())
    wanted = mpool.embed(TEXTS, str(bert))
    assert np.array_equal(np.float32([node.embedding for node in first]), wanted)
    made.model = "no such model"
    assert np.array_equal(np.float32(made.get_text_embedding_batch(TEXTS)), wanted)


def test_saved_components(bert: Path) -> None:
    """LlamaIndex saves a component as a dict; a handle of another pool cannot be saved."""
    made = MpoolEmbedding(model=str(bert), options={"dimensions": 8}, embed_batch_size=7)
    again = MpoolEmbedding.from_dict(made.to_dict())
    assert (again.model, again.model_name, again.options, again.embed_batch_size) == (
        str(bert), str(bert), {"dimensions": 8}, 7)
    assert MpoolRerank.from_dict(MpoolRerank(model="x", top_n=5).to_dict()).top_n == 5
    assert MpoolEmbedding().to_payload()["model_name"] == "unknown" and MpoolEmbedding().model is None
    assert MpoolEmbedding.class_name() == "MpoolEmbedding" and MpoolRerank.class_name() == "MpoolRerank"
    with mpool.Pool() as pool:
        held = MpoolEmbedding(model=pool.register("held", bert))
        assert isinstance(held, BaseEmbedding) and held.model_name == "held"
        assert len(held.get_query_embedding("x")) == pool.get("held").dimensions
        with pytest.raises(Exception, match="mpool.Model held"):
            held.to_dict()
    Settings.embed_model = made
    assert Settings.embed_model is made


@pytest.mark.parametrize("make", [lambda: MpoolEmbedding(dimensions=8), lambda: MpoolRerank(top_k=3),
                                  lambda: MpoolRerank(top_n=0), lambda: MpoolEmbedding(embed_batch_size=0)])
def test_unknown_arguments(make: Any) -> None:
    with pytest.raises(ValueError, match="extra|greater"):
        make()


def test_errors(bert: Path) -> None:
    with pytest.raises(mpool.UnknownModel):
        MpoolEmbedding(model="all-MiniLM-L6-v9").get_query_embedding("x")
    with pytest.raises(mpool.InvalidArgument, match="dimension"):
        MpoolEmbedding(model=str(bert), options={"dimension": 3}).get_query_embedding("x")
    with pytest.raises(mpool.WrongCapability):
        MpoolRerank(model=str(bert)).postprocess_nodes([NodeWithScore(node=nodes()[0])], query_str="x")


@pytest.mark.builds
def test_examples(tmp_path: Path) -> None:
    integrationexamples.check("llama_index", "llama_index", tmp_path)
