"""Errors about models name the model, those it may mean, and the capability that it has, in every protocol."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Raw, ask, serving
from waiting import until

import mpool
from mpool.server.ollama_models import fetch

CHAT = [{"role": "user", "content": "Hello"}]
#: Path -> body without the model, for a route of each protocol.
GENERATION: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": CHAT}, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": CHAT, "max_tokens": 4}, "/v1/messages/count_tokens": {"messages": CHAT},
    "/api/generate": {"prompt": "x", "stream": False}, "/api/chat": {"messages": CHAT, "stream": False}}
EMBEDDING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "x"}, "/api/embed": {"input": "x"}, "/api/embeddings": {"prompt": "x"},
    "/embed": {"inputs": "x"}, "/embed_all": {"inputs": "x"}, "/pooling": {"input": "x"},
    "/similarity": {"inputs": {"source_sentence": "x", "sentences": ["y"]}}}
OTHERS: dict[str, dict[str, Any]] = {
    "/rerank": {"query": "x", "texts": ["y"]}, "/v1/rerank": {"query": "x", "documents": ["y"]},
    "/v1/score": {"text_1": "x", "text_2": "y"}, "/predict": {"inputs": "x"}, "/classify": {"input": "x"},
    "/classify_tokens": {"inputs": "x"}, "/embed_sparse": {"inputs": "x"}}


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path) -> Iterator[Any]:
    with serving([f"bert={bert}", f"llama={llama}"]) as made:
        yield made


def message(found: Any) -> str:
    error = found["error"]
    return error if isinstance(error, str) else error["message"]


@pytest.mark.parametrize("path", [*GENERATION, *EMBEDDING, *OTHERS])
def test_an_unknown_name_and_the_nearest_one(server: Any, path: str) -> None:
    body = {**GENERATION, **EMBEDDING, **OTHERS}[path]
    status, found = ask(server, path, {**body, "model": "lama"})
    assert status == 404 and "'lama' is unknown; did you mean llama?" in message(found)
    status, found = ask(server, path, {**body, "model": "z" * 100})
    assert status == 404 and "zzz..." in message(found) and "did you mean" not in message(found)


def test_other_models_of_the_family_are_named() -> None:
    """With the catalogue, a server names models of the same family, and none of another."""
    from mpool.server.models import Models

    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        models = Models(pool, [])
        assert models._unknown("qwen3:14b").endswith(
            "is unknown; known models of its family: Qwen3-8B, Qwen3-32B, Qwen3-4B.")
        assert models._unknown("zephyr") == "'zephyr' is unknown."
        assert "did you mean SmolLM2-135M-Instruct?" in models._unknown("SmolLM2-135M-Instrukt")


@pytest.mark.parametrize("path", GENERATION)
def test_an_embedding_model_generates_nothing(server: Any, path: str) -> None:
    status, found = ask(server, path, {**GENERATION[path], "model": "bert"})
    if path == "/v1/messages/count_tokens" and status == 200:
        return
    text = message(found)
    assert status == 400 and "bert: the model's capability is text_embedding, not text_to_text." in text, text
    assert "Models that fit: llama." in text


@pytest.mark.parametrize("path", [*EMBEDDING, *OTHERS])
def test_a_language_model_embeds_nothing(server: Any, path: str) -> None:
    status, found = ask(server, path, {**EMBEDDING, **OTHERS}[path] | {"model": "llama"})
    text = message(found)
    assert status in (400, 424) and "llama: the model's capability is text_to_text, not text_embedding." in text, text
    assert "Models that fit: bert." in text


@pytest.mark.parametrize("path, words", [
    ("/rerank", "bert: is an embedding model, not a reranker."),
    ("/predict", "bert: is an embedding model, not a classifier"), ("/classify", "not a classifier"),
    ("/classify_tokens", "bert: is an embedding model, not a token classifier."),
    ("/embed_sparse", "bert: has no sparse vectors; it has: dense")])
def test_an_embedding_model_says_what_it_is(server: Any, path: str, words: str) -> None:
    status, found = ask(server, path, {**OTHERS[path], "model": "bert"})
    assert status in (400, 424) and words in message(found), found
    assert "mpool." not in message(found)  # hints for Python


def test_the_model_has_the_name_of_the_client(bert: Path) -> None:
    with serving([f"my:bert={bert}"]) as made:
        for name in ("my:bert", "my:bert:latest"):
            _, found = ask(made, "/api/chat", {"model": name, "messages": CHAT})
            assert f"{name}: the model's capability is text_embedding" in found["error"]


def test_no_error_has_a_path(server: Any, bert: Path) -> None:
    """A model that a program loaded from a path into the pool of the server is not suggested."""
    server.state.pool.embed("x", bert)
    for body in (GENERATION["/v1/completions"], {"prompt": "y"}):
        _, found = ask(server, "/v1/completions", {**body, "model": "bert"})
        assert "/" not in message(found)


def test_suggestions_read_no_files(bert: Path, llama: Path, tmp_path: Path) -> None:
    """The files of a model that could be suggested may be broken by now: the error is about another model."""
    for name in ("other", "talker"):
        shutil.copytree(bert if name == "other" else llama, tmp_path / name)
    refs = [f"bert={bert}", f"llama={llama}", *(f"{name}={tmp_path / name}" for name in ("other", "talker"))]
    with serving(refs) as made:
        for name in ("other", "talker"):
            made.state.pool.unload(name)
            (tmp_path / name / "config.json").write_text('{"model_type": "be')
        for name, path in (("other", "/v1/completions"), ("talker", "/v1/embeddings"), ("other", "/v1/embeddings")):
            status, found = ask(made, path, {**(EMBEDDING | GENERATION)[path], "model": name})
            assert (status, "json" in str(found)) in ((400, False), (503, False)), found
        for path, body in (EMBEDDING | GENERATION | OTHERS).items():
            name = "bert" if path in GENERATION or path in OTHERS else "llama"
            status, found = ask(made, path, {**body, "model": name})
            assert status in (200, 400, 424), found
            assert status == 200 or f"{name}: " in message(found) and "Models that fit: other" not in message(found)


def test_a_tokenizer_that_is_refused_shows_no_path(bert: Path, tmp_path: Path) -> None:
    shutil.copytree(bert, tmp_path / "model")
    tokenizer = json.loads((tmp_path / "model/tokenizer.json").read_text())
    tokenizer["model"]["max_input_chars_per_word"] = 1 << 30
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(tokenizer))
    with serving([f"m={tmp_path / 'model'}"]) as made:
        for path, body in EMBEDDING.items():
            status, found = ask(made, path, {**body, "model": "m"})
            assert status == 503 and str(tmp_path) not in json.dumps(found), found
        with pytest.raises(mpool.LimitError, match=str(tmp_path)):
            made.state.pool.embed("x", "m")


def test_a_model_that_the_core_refuses_shows_no_path(llama: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = Path(shutil.copytree(llama, tmp_path / "model"))
    vocab = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = transformers.LlamaConfig(vocab_size=vocab, hidden_size=256, num_hidden_layers=1, num_attention_heads=128,
                                      num_key_value_heads=1, intermediate_size=64, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    with serving([f"m={folder}"]) as made:
        status, found = ask(made, "/v1/completions", {"prompt": "x", "model": "m"})
        assert status == 503 and str(tmp_path) not in message(found), found
        with pytest.raises(mpool.LimitError, match=f"{tmp_path}.*at most 64 heads"):
            made.state.pool.generate("x", "m")


# ---- downloads -------------------------------------------------------------------------------------------------------

def test_a_failed_pull_says_that_nothing_was_downloaded_and_why(bert: Path, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPOOL_OFFLINE", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MPOOL_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    body = {"model": "bge-small-en-v1.5"}
    with serving([f"bert={bert}"], catalogue=True) as made:
        status, found = ask(made, "/api/pull", {**body, "stream": False})
        assert (status, found["error"]) == \
            (503, "The model could not be downloaded. Downloads are disabled (offline).")
        with Raw(made, 60) as raw:
            _, _, data = raw.request("/api/pull", json.dumps(body).encode()).answer()
        assert json.loads(data.splitlines()[-1]) == found
        status, found = ask(made, "/api/pull", {"model": "bge-smal", "stream": False})
        assert status == 404 and "'bge-smal' is not in the catalogue" in found["error"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://secret.internal")
    monkeypatch.setattr("mpool.models.sources.probe.unreachable", lambda endpoint: "no route to 10.0.0.1")
    with serving([f"bert={bert}"], mpool.PoolConfig(shutdown_grace=1.0, offline=False), catalogue=True) as made:
        status, found = ask(made, "/api/pull", {**body, "stream": False})
        assert (status, found["error"]) == \
            (503, "The model could not be downloaded. The hub cannot be reached.")


def test_requests_for_one_model_share_a_download(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of requests starts one thread, also in other spellings and after a client has disconnected."""
    begun: list[str] = []
    gate = threading.Event()

    def resolve(name: str, offline: bool | None = None, progress: bool | None = None) -> None:
        if offline:
            raise mpool.errors.OfflineError("not here")
        begun.append(name)
        gate.wait(60)
        raise mpool.errors.DownloadError("planted")

    async def fetched(name: str, *arguments: Any) -> None:
        waiting.append(name)
        await fetch(name, *arguments)

    waiting: list[str] = []  # names of requests that wait for a download, or have waited
    monkeypatch.setattr("mpool.server.ollama_models.resolve", resolve)
    monkeypatch.setattr("mpool.server.ollama_models.fetch", fetched)
    with serving([f"bert={bert}"], mpool.PoolConfig(shutdown_grace=1.0, offline=False), catalogue=True) as made:
        statuses: list[int] = []

        def pull(name: str) -> None:
            statuses.append(ask(made, "/api/pull", {"model": name, "stream": False})[0])

        with Raw(made) as raw:
            raw.request("/api/pull", json.dumps({"model": "bge-small-en-v1.5", "stream": False}).encode())
            until(lambda: begun)
        until(lambda: not made.state.running)
        threads = [threading.Thread(target=pull, args=(name,)) for name in
                   ("bge-small-en-v1.5", "BGE-small-en-v1.5", "bge-small-en-v1.5:latest")]
        for thread in threads:
            thread.start()
        until(lambda: len(waiting) == 4)
        assert list(made.state.models.downloads) == begun == ["bge-small-en-v1.5"]
        gate.set()
        for thread in threads:
            thread.join()
        assert statuses == [503] * 3 and not made.state.models.downloads
        pull("bge-small-en-v1.5")
        assert len(begun) == 2 and statuses[3] == 503  # a later request tries again
