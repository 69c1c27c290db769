"""OpenAI's protocol: OpenAI's client and raw requests, compared with the library on the same models."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servers import ask, serving

openai = pytest.importorskip("openai")

TEXTS = ["A cat sat on the mat.", "The dog barked.", "Numbers 1 2 3."]


@pytest.fixture(scope="module")
def server(bert: Path, prompted: Path) -> Iterator[Any]:
    with serving([f"bert={bert}", f"prompted={prompted}"]) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


# ---- models and embeddings -------------------------------------------------------------------------------------------

def test_models_are_listed(client: Any) -> None:
    assert [model.id for model in client.models.list()][:2] == ["bert", "prompted"]


def test_embeddings_agree_with_the_library(server: Any, client: Any) -> None:
    pool = server.state.pool
    wanted = pool.embed(TEXTS, "bert")
    found = client.embeddings.create(model="bert", input=TEXTS)  # the client requests base64
    assert np.array_equal(np.array([row.embedding for row in found.data], dtype=np.float32), wanted)
    assert [row.index for row in found.data] == [0, 1, 2] and found.model == "bert"
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(pool.count_tokens(text, "bert")
                                                                        for text in TEXTS)
    plain = client.embeddings.create(model="bert", input=TEXTS[0], encoding_format="float", dimensions=5)
    assert np.array_equal(np.array(plain.data[0].embedding, dtype=np.float32),
                          pool.embed(TEXTS[0], "bert", dimensions=5))
    status, raw = ask(server, "/v1/embeddings", {"model": "bert", "input": TEXTS[0], "encoding_format": "base64"})
    assert np.array_equal(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4"), wanted[0])


def test_embeddings_of_token_ids(server: Any, client: Any) -> None:
    pool = server.state.pool
    ids = [pool.tokenize(text, "bert") for text in TEXTS]
    wanted = pool.embed(TEXTS, "bert")
    allowed = {"allow_token_ids": True}
    found = client.embeddings.create(model="bert", input=ids, extra_body=allowed)
    assert np.array_equal(np.array([row.embedding for row in found.data], dtype=np.float32), wanted)
    one = client.embeddings.create(model="bert", input=ids[1], extra_body=allowed)
    assert np.array_equal(np.array(one.data[0].embedding, dtype=np.float32), wanted[1])
    assert one.usage.prompt_tokens == len(ids[1])
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="bert", input=[[5] * 100_000], extra_body=allowed)
    assert raised.value.code == "context_length_exceeded"


@pytest.mark.parametrize("ids", [[15339, 1917], [[15339, 1917], [9906]], [5]], ids=str)
def test_token_ids_of_another_vocabulary_are_refused(client: Any, ids: Any) -> None:
    """LangChain's OpenAIEmbeddings sends ids of OpenAI's vocabulary by default; [5] is an id of every vocabulary."""
    with pytest.raises(openai.BadRequestError) as raised:
        client.embeddings.create(model="bert", input=ids)
    assert "check_embedding_ctx_length=False" in raised.value.message and "--allow-token-ids" in raised.value.message


@pytest.mark.parametrize(("ids", "where"), [
    ([5, -1], ""), ([[5], [6, -1]], ""), ([5, 6.5], ""), ([[5, 6.5]], ""), ([[5], [6, 10**12]], ""),
    ([[5], [6, True]], ""), ([5, 1 << 30], "`input[0][1]`"), ([[5], [6, 1 << 30]], "`input[1][1]`"),
    ([[5], 6], ""), ([[5], "text"], "")], ids=str)
def test_invalid_token_ids_are_named(server: Any, ids: Any, where: str) -> None:
    status, found = ask(server, "/v1/embeddings", {"model": "bert", "input": ids, "allow_token_ids": True})
    assert status == 400 and found["error"]["code"] == "invalid_value", found
    assert where in found["error"]["message"] and "input" in found["error"]["message"]


def test_the_server_can_allow_token_ids(bert: Path) -> None:
    with serving([f"bert={bert}"], allow_token_ids=True) as made:
        assert ask(made, "/v1/embeddings", {"model": "bert", "input": [[5, 6]]})[0] == 200
        assert ask(made, "/v1/embeddings", {"model": "bert", "input": [[5, 1 << 30]]})[0] == 400

def test_task_selects_the_prompt(server: Any, client: Any) -> None:
    found = client.embeddings.create(model="prompted", input="cats", extra_body={"task": "query"})
    assert np.array_equal(np.array(found.data[0].embedding, dtype=np.float32),
                          server.state.pool.embed("cats", "prompted", task="query"))


def test_missing_models_of_the_catalogue_are_not_downloaded(bert: Path, monkeypatch: pytest.MonkeyPatch,
                                                            tmp_path: Path) -> None:
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path))
    with serving([f"bert={bert}"], catalogue=True) as made:
        status, found = ask(made, "/v1/embeddings", {"model": "bge-small-en-v1.5", "input": "x"})
        assert status == 404 and found["error"]["code"] == "model_not_found"


# ---- other routes ----------------------------------------------------------------------------------------------------

def test_rerank_agrees_with_the_library(tmp_path: Path, bert: Path) -> None:
    from rerankers import make_reranker

    documents = ["The dog barked.", "A cat sat.", "Numbers 1 2 3.", "Cats sleep."]
    with serving([f"ranker={make_reranker(tmp_path / 'ranker', 'bert')}", f"bert={bert}"]) as made:
        wanted = made.state.pool.rerank("cats", documents, "ranker")
        body: dict[str, Any] = {"model": "ranker", "query": "cats", "documents": documents}
        status, found = ask(made, "/v1/rerank", body)
        assert status == 200
        assert [(row["index"], row["relevance_score"]) for row in found["results"]] == [(row.index, row.score)
                                                                                      for row in wanted]
        assert found["usage"]["total_tokens"] > 4 and "document" not in found["results"][0]
        objects = [{"text": text} for text in documents]
        status, found = ask(made, "/v1/rerank", {**body, "documents": objects, "top_n": 2, "return_documents": True})
        assert [row["document"]["text"] for row in found["results"]] == [row.text for row in wanted.results[:2]]
        assert ask(made, "/v1/rerank", {**body, "model": "bert"})[1]["error"]["code"] == "wrong_capability"
        assert ask(made, "/v1/embeddings", {"model": "ranker", "input": "x"})[1]["error"]["code"] == "wrong_capability"
        for wrong in ({"documents": []}, {"top_n": 0}, {"query": ""}, {"documents": ["x", ""]}, {"documents": [3]}):
            assert ask(made, "/v1/rerank", {**body, **wrong})[0] == 400


@pytest.mark.slow
def test_large_embedding_responses(server: Any, client: Any) -> None:
    """A response of more than 2**15 numbers is encoded on another thread, with the same result."""
    texts = [f"Text number {at}." for at in range(3500)]
    wanted = server.state.pool.embed(texts, "bert")
    for encoding in ("float", "base64"):
        found = client.embeddings.create(model="bert", input=texts, encoding_format=encoding)
        rows = [np.frombuffer(base64.b64decode(row.embedding), "<f4") if encoding == "base64" else row.embedding
                for row in found.data]
        assert np.array_equal(np.array(rows, dtype=np.float32), wanted)
    status, old = ask(server, "/api/embed", {"model": "bert", "input": texts})
    assert status == 200 and np.array_equal(np.array(old["embeddings"], dtype=np.float32), wanted)
