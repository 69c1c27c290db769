"""Ollama's protocol: Ollama's client and raw requests, compared with the library on the same models."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from servers import Raw, ask, server_idle, serving

ollama = pytest.importorskip("ollama")

CHAT: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, wörld! 😀"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 24, "num_ctx": 4096, "num_thread": 2, "mirostat": 0}
TEXTS = ["A cat sat on the mat.", "The dog barked."]


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path) -> Iterator[Any]:
    with serving([f"llama={llama}", f"bert={bert}"]) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    return ollama.Client(host=server.url)


def lines(server: Any, path: str, body: dict[str, Any]) -> tuple[int, list[Any]]:
    with Raw(server, 60) as raw:
        status, headers, data = raw.request(path, json.dumps(body).encode()).answer()
    if status == 200:
        assert headers["content-type"].startswith("application/x-ndjson") and data.endswith(b"\n")
    return status, [json.loads(line) for line in data.splitlines()]


def test_chat_agrees_with_the_library(server: Any, client: Any) -> None:
    wanted = server.state.pool.chat(CHAT, "llama", **GREEDY)
    for name in ("llama", "llama:latest"):
        done = client.chat(model=name, messages=CHAT, options=OPTIONS)
        assert done.message.content == wanted.text and done.message.role == "assistant" and done.done
        assert done.done_reason == ("length" if wanted.finish_reason == "length" else "stop") and done.model == name
        assert (done.prompt_eval_count, done.eval_count) == (wanted.usage.prompt_tokens, wanted.usage.completion_tokens)
        assert done.total_duration >= done.eval_duration >= 0 and done.total_duration > 1000
    chunks = list(client.chat(model="llama", messages=CHAT, options=OPTIONS, stream=True))
    assert "".join(chunk.message.content for chunk in chunks) == wanted.text
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].eval_count == wanted.usage.completion_tokens and chunks[0].eval_count is None


def test_generate_with_and_without_chat_template(server: Any, client: Any) -> None:
    pool = server.state.pool
    chat = pool.chat([{"role": "system", "content": "S"}, {"role": "user", "content": "The cat"}], "llama", **GREEDY)
    assert client.generate("llama", "The cat", system="S", options=OPTIONS).response == chat.text
    raw = pool.generate("The cat", "llama", **GREEDY)
    assert client.generate("llama", "The cat", raw=True, options=OPTIONS).response == raw.text
    chunks = list(client.generate("llama", "The cat", raw=True, stream=True, options=OPTIONS))
    assert "".join(chunk.response for chunk in chunks) == raw.text and chunks[-1].done
    seeded = client.generate("llama", "The cat", raw=True, options={"seed": -1, "num_predict": 10, "stop": ["zzz"]})
    assert seeded.response == pool.generate("The cat", "llama", seed=2**64 - 1, max_tokens=10, stop=["zzz"]).text


def test_logprobs(server: Any) -> None:
    """Every token has its own values, streamed or not, and a chunk has those of the tokens that end in its text."""
    pool = server.state.pool
    hot: dict[str, Any] = {"temperature": 1.4, "top_k": 100, "seed": 5}
    wanted = pool.chat(CHAT, "llama", logprobs=True, top_logprobs=2, max_tokens=24, **hot)
    assert len({token.logprob for token in wanted.logprobs}) > 15
    bytes_of = pool.get("llama").tokenizer.token_bytes
    tokens = [{"token": token.token, "logprob": token.logprob, "bytes": list(bytes_of(token.token_id)),
               "top_logprobs": [{"token": top.token, "logprob": top.logprob, "bytes": list(bytes_of(top.token_id))}
                                for top in token.top]} for token in wanted.logprobs]
    body = {"model": "llama", "messages": CHAT, "options": {**hot, "num_predict": 24}, "logprobs": True,
            "top_logprobs": 2}
    assert ask(server, "/api/chat", {**body, "stream": False})[1]["logprobs"] == tokens
    found, text = [], ""
    for part in lines(server, "/api/chat", body)[1]:
        found += part.get("logprobs") or []
        text += part["message"]["content"]
        whole = b"".join(bytes(token["bytes"]) for token in found)
        assert codecs.getincrementaldecoder("utf-8")("replace").decode(whole, part["done"]) == text
    assert found == tokens


def test_embeddings(server: Any, client: Any) -> None:
    pool = server.state.pool
    found = client.embed(model="bert", input=TEXTS)
    assert np.array_equal(np.array(found.embeddings, dtype=np.float32), pool.embed(TEXTS, "bert"))
    assert found.prompt_eval_count == sum(pool.count_tokens(text, "bert") for text in TEXTS)
    one = client.embed(model="bert", input=TEXTS[0], dimensions=4, keep_alive="10m")
    assert np.array_equal(np.array(one.embeddings, dtype=np.float32), pool.embed(TEXTS[:1], "bert", dimensions=4))
    old = client.embeddings(model="bert", prompt=TEXTS[1])
    assert np.array_equal(np.array(old.embedding, dtype=np.float32), pool.embed(TEXTS[1], "bert"))
    assert client.embed(model="bert", input=[]).embeddings == []
    assert client.embed(model="bert", input="").embeddings == []  # as Ollama responds: "" only loads the model
    found = client.embed(model="bert", input=["", TEXTS[0]])  # in a list, it is a text
    assert np.array_equal(np.array(found.embeddings, dtype=np.float32), pool.embed(["", TEXTS[0]], "bert"))
    with pytest.raises(ollama.ResponseError) as raised:
        client.embed(model="bert", input="word " * 5000, truncate=False)
    assert raised.value.status_code == 400 and "tokens" in raised.value.error


def test_models_are_described(server: Any, client: Any, llama: Path) -> None:
    assert [model.model for model in client.list().models] == ["llama", "bert"]
    assert all(model.size > 1000 and len(model.digest) == 64 for model in client.list().models)
    shown = client.show("llama")
    assert shown.capabilities == ["completion"] and shown.details.family == "llama" and shown.modified_at
    assert shown.modelinfo["llama.context_length"] == server.state.pool.get("llama").context_length
    assert client.show("bert").capabilities == ["embedding"]
    assert ask(server, "/api/version") == (200, {"version": mpool.__version__})
    assert str(llama) not in json.dumps([ask(server, "/api/tags"), ask(server, "/api/show", {"name": "llama"})])


def test_ps_reports_memory_and_the_time_left(server: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is that of weights and caches. A model that has been idle for 3,000 of 7,200 s has 4,200 s left."""
    client.embeddings("bert", "x", keep_alive=7200)
    found = {row.model: row for row in server.state.pool.ps()}
    key = str(server.state.models.all()[1].model.key)
    assert found[key].capability == "text_embedding" and found[key].keep_alive == 7200 and found[key].engine_bytes > 0
    idle_row = replace(found[key], idle_seconds=3000.0)
    monkeypatch.setattr(type(server.state.pool), "ps", lambda _: [idle_row])
    row, = client.ps().models
    assert row.size == idle_row.model_bytes + idle_row.engine_bytes
    assert row.expires_at.timestamp() - time.time() == pytest.approx(4200, abs=60)
    idle_row = replace(idle_row, keep_alive=float("inf"))  # a date of the protocol cannot be "never": 100 years
    row, = client.ps().models
    assert row.expires_at.timestamp() - time.time() == pytest.approx(100 * 365 * 86400, abs=86400)


def test_loading_unloading_and_keep_alive(server: Any, client: Any) -> None:
    assert client.generate("llama", keep_alive="2h").done_reason == "load"
    row = next(model for model in client.ps().models if model.model == "llama")
    assert row.size > 1000 and row.context_length and 7000 < row.expires_at.timestamp() - time.time() < 7300
    assert client.generate("llama", "x", keep_alive=-1, options=OPTIONS).done
    row = next(model for model in client.ps().models if model.model == "llama")
    assert row.expires_at.timestamp() - time.time() > 86400 * 365
    assert client.chat("llama", [], keep_alive=0).done_reason == "unload"
    assert not any(model.model == "llama" for model in client.ps().models)
    for wrong in ("soon", "5 minutes", "", True, "1d", "1h" * 33, "1h" * 1_000_000):
        status, found = ask(server, "/api/generate", {"model": "llama", "prompt": "x", "keep_alive": wrong})
        assert status == 400 and "keep_alive" in found["error"]


def test_load_duration(server: Any, client: Any) -> None:
    """Only the request that has to load the model reports a load duration."""
    requests: list[Any] = [
        lambda: client.chat("llama", CHAT, options=OPTIONS), lambda: client.generate("llama", "x", options=OPTIONS),
        lambda: list(client.chat("llama", CHAT, options=OPTIONS, stream=True))[-1],
        lambda: client.embed("bert", TEXTS)]
    for request in requests:
        for name in ("llama", "bert"):
            server.state.pool.unload(name)
        cold, warm = request(), request()
        assert 0 < cold.load_duration <= cold.total_duration and warm.load_duration == 0
    server.state.pool.unload("bert")
    assert ask(server, "/api/embed", {"model": "llama", "input": "x"})[0] == 400


def test_pull(server: Any, client: Any) -> None:
    for status in (client.pull("llama"), *client.pull("llama", stream=True)):
        assert status.status in ("success", "pulling manifest")
    for name in ("no-such-model", "../llama", "hf.co/org/name", "https://evil.example/m", "registry/x:7b",
                 "all-MiniLM-L6-v2"):  # the last one is in the catalogue, which this server does not serve
        with pytest.raises(ollama.ResponseError) as raised:
            client.pull(name)
        assert raised.value.status_code == 404


def test_failed_pull_ends_its_stream_with_an_error(bert: Path, tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPOOL_CACHE", str(tmp_path))
    with serving([f"bert={bert}"], catalogue=True) as made:  # offline
        status, found = lines(made, "/api/pull", {"model": "Qwen2.5-Coder-0.5B-Instruct"})
        assert status == 200 and found[0] == {"status": "pulling manifest"} and "error" in found[-1] and len(found) == 2
        assert ask(made, "/api/pull", {"model": "Qwen2.5-Coder-0.5B-Instruct", "stream": False})[0] == 503
        assert made.state.streams == 0


@pytest.mark.parametrize("field", [
    {"format": "xml"},
    {"format": {"$ref": "#"}}, {"tools": [{"type": "function"}]},
    {"messages": [{"role": "user", "content": "x", "images": ["aGVsbG8="]}]},
], ids=str)
def test_unsupported_options_are_refused(server: Any, field: dict[str, Any]) -> None:
    status, found = ask(server, "/api/chat", {"model": "llama", "messages": CHAT, **field})
    assert status == 400 and isinstance(found["error"], str)
    for more in ({"context": [1, 2]}, {"suffix": "x"}, {"suffix": "x", "system": "y"}, {"template": "x"},
                 {"images": ["aGVsbG8="]}):
        assert ask(server, "/api/generate", {"model": "llama", "prompt": "x", **more})[0] == 400


def test_model_names_are_never_paths(server: Any) -> None:
    for path in ("chat", "generate", "embed", "embeddings", "show", "pull"):
        body: dict[str, Any] = {"model": "../llama"}
        body |= {"chat": {"messages": CHAT}, "generate": {"prompt": "x"}, "embed": {"input": "x"},
                 "embeddings": {"prompt": "x"}}.get(path, {})
        status, found = ask(server, f"/api/{path}", body)
        assert status == 404 and "Model not found" in found["error"]
    for path in ("/api/push", "/api/blobs/sha256:abc"):
        assert ask(server, path, {"model": "llama", "path": "/etc/passwd"})[0] == 404
    for name in ("../llama", "/etc/passwd", "a/../b", "a//b", "", "x" * 129, "llama"):
        assert ask(server, "/api/create", {"model": name, "from": "llama"})[0] == 400
        assert ask(server, "/api/copy", {"source": "llama", "destination": name})[0] == 400
    assert ask(server, "/api/create", {"model": "x", "from": "/etc/passwd"})[0] == 404
    assert ask(server, "/api/copy", {"source": "../llama", "destination": "x"})[0] == 404


@pytest.mark.parametrize("chaos", ["seed=3,fail=0.02", "seed=1,fail=1.0"])
def test_streams_have_one_final_line_despite_faults(llama: Path, chaos: str) -> None:
    config = mpool.PoolConfig(chaos=chaos, shutdown_grace=1.0, breaker_threshold=0)
    with serving([f"llama={llama}"], config) as made:
        for seed in range(12):
            status, found = lines(made, "/api/chat", {"model": "llama", "messages": CHAT, "options": {
                "seed": seed, "num_predict": 200}})
            ends = [at for at, one in enumerate(found) if one.get("done") or "error" in one]
            assert ends == [len(found) - 1] and (status == 200 or "error" in found[0])
        server_idle(made)


@pytest.mark.sample(2)
@pytest.mark.parametrize("stream", [False, True])
def test_too_long_conversation_loses_its_oldest_turns(server: Any, stream: bool) -> None:
    """The server drops complete turns, as Ollama does, and keeps system messages. With ``truncate`` false, the request
    is refused."""
    pool = server.state.pool
    limit = pool.get("llama").context_length
    system, turns = {"role": "system", "content": "Be brief."}, []
    for at in range(8):
        turns += [{"role": "user", "content": f"{at} " + "a b c " * (limit // 24)},
                  {"role": "assistant", "content": f"Answer {at}."}]
    last = {"role": "user", "content": "And then?"}
    body = {"model": "llama", "messages": [system, *turns, last], "options": {"temperature": 0, "num_predict": 4},
            "stream": stream}
    if stream:
        status, found = lines(server, "/api/chat", body)
    else:
        status, whole = ask(server, "/api/chat", body)
        found = [whole]
    assert status == 200 and found[-1]["done"]
    kept = next(at for at in range(8) if pool.get("llama").count_tokens(
        "".join(turn["content"] for turn in turns[2 * at:])) < limit - 100)
    assert 0 < kept < 7
    wanted = [pool.chat([system, *turns[2 * at:], last], "llama", temperature=0, max_tokens=4)
              for at in (kept, kept + 1)]
    assert ("".join(chunk["message"]["content"] for chunk in found), found[-1]["prompt_eval_count"]) in [
        (done.text, done.usage.prompt_tokens) for done in wanted]
    for more in ({"truncate": False}, {"messages": [system, {"role": "user", "content": "a b " * limit}]}):
        status, refused = ask(server, "/api/chat", {**body, **more})
        assert status == 400 and "longer than the model's context" in refused["error"], refused
    server_idle(server)
