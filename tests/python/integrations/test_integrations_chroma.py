"""The embedding function for Chroma, in collections in memory and on disk, compared with mpool's functions."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
import integrationexamples
from clientpackages import package

package("chromadb", "chroma")

import chromadb  # noqa: E402
from chromadb.api.shared_system_client import SharedSystemClient  # noqa: E402
from chromadb.utils.embedding_functions import config_to_embedding_function, known_embedding_functions  # noqa: E402

from mpool.integrations.chroma import MpoolEmbeddingFunction  # noqa: E402

TEXTS = ["A cat sat on the mat.", "Numbers 0 1 2.", "The quick brown fox jumps over the lazy dog.", "one two three"]
QUERY = "Where is the cat?"


def nearest(folder: Path, **options: Any) -> tuple[list[str], list[float]]:
    """Ids of the documents by cosine distance to the query, and the distances."""
    found = 1 - mpool.similarity(mpool.embed([QUERY], str(folder), task="query", **options),
                                 mpool.embed(TEXTS, str(folder), task="document", **options), metric="cosine")[0]
    return [str(at) for at in np.argsort(found)], sorted(found)


def test_vectors_equal_those_of_embed(prompted: Path) -> None:
    same = {"dimensions": 8, "compute": "float32"}
    made = MpoolEmbeddingFunction(prompted, same)
    for call, task in ((made, "document"), (made.embed_query, "query")):
        found = call(TEXTS)  # type: ignore[operator]
        assert all(row.dtype == np.float32 for row in found)
        assert np.array_equal(np.stack(found), mpool.embed(TEXTS, str(prompted), task=task, **same))


def test_a_collection_finds_what_similarity_finds(prompted: Path) -> None:
    """Documents and queries get their own prompts; the space is that of cosine."""
    made = chromadb.EphemeralClient().create_collection("found", embedding_function=MpoolEmbeddingFunction(prompted))
    made.add(ids=[str(at) for at in range(len(TEXTS))], documents=TEXTS)
    found = made.query(query_texts=[QUERY], n_results=len(TEXTS), include=["distances", "documents", "embeddings"])
    ids, distances = nearest(prompted)
    assert found["ids"][0] == ids
    assert np.allclose(found["distances"][0], distances, atol=1e-5)
    assert found["documents"][0] == [TEXTS[int(at)] for at in ids]
    made.update(ids=["0"], documents=["one two three"])
    rows = made.get(ids=["0", "3"], include=["embeddings"])["embeddings"]
    assert np.array_equal(rows[0], rows[1])


def test_a_collection_keeps_its_function(prompted: Path, tmp_path: Path) -> None:
    """A collection on disk names its function: a later client needs neither the model nor the options."""
    made = MpoolEmbeddingFunction(str(prompted), {"dimensions": 8})
    first = chromadb.PersistentClient(str(tmp_path))
    first.create_collection("kept", embedding_function=made).add(ids=["0", "1", "2", "3"], documents=TEXTS)
    SharedSystemClient.clear_system_cache()
    again = chromadb.PersistentClient(str(tmp_path)).get_collection("kept")
    assert again.configuration["embedding_function"].get_config() == made.get_config()
    found = again.query(query_texts=[QUERY], n_results=4)
    ids, distances = nearest(prompted, dimensions=8)
    assert found["ids"][0] == ids and np.allclose(found["distances"][0], distances, atol=1e-5)
    other = MpoolEmbeddingFunction(str(prompted), {"dimensions": 4})
    with pytest.raises(mpool.InvalidArgument, match="options"):
        again.modify(configuration={"embedding_function": other})


def test_configuration(bert: Path) -> None:
    made = MpoolEmbeddingFunction(bert, {"compute": "float32"})
    assert MpoolEmbeddingFunction.name() == "mpool" and known_embedding_functions["mpool"] is MpoolEmbeddingFunction
    config = made.get_config()
    assert config == {"model": str(bert), "options": {"compute": "float32"}}
    again = config_to_embedding_function({"name": "mpool", "config": config})
    assert isinstance(again, MpoolEmbeddingFunction) and again.get_config() == config
    assert MpoolEmbeddingFunction.build_from_config({}).get_config() == {"model": None, "options": {}}
    assert not made.is_legacy() and made.default_space() == "cosine" and "l2" in made.supported_spaces()
    made.validate_config_update(config, dict(config))
    for bad in ({"model": 3}, {"options": []}, {"name": "x"}):
        with pytest.raises(mpool.InvalidArgument, match=next(iter(bad))):
            MpoolEmbeddingFunction.build_from_config(bad)
    with pytest.raises(mpool.InvalidArgument, match="model"):
        made.validate_config_update(config, {**config, "model": "other"})


def test_errors(bert: Path) -> None:
    with mpool.Pool() as pool, pytest.raises(mpool.InvalidArgument, match="mpool.Model held") as caught:
        MpoolEmbeddingFunction(pool.register("held", bert))  # type: ignore[arg-type]
    assert str(bert) in (caught.value.hint or "")
    with pytest.raises(mpool.UnknownModel):
        MpoolEmbeddingFunction("all-MiniLM-L6-v9")(["x"])
    with pytest.raises(mpool.InvalidArgument, match="dimension"):
        MpoolEmbeddingFunction(bert, {"dimension": 3})(["x"])


@pytest.mark.builds
def test_examples(tmp_path: Path) -> None:
    integrationexamples.check("chroma", "chromadb", tmp_path)
