"""``/api/create``, ``/api/copy`` and ``/api/delete`` with Ollama's client; the names in all protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool.server.models
from servers import Raw, ask, serving

ollama = pytest.importorskip("ollama")

CHAT: list[Any] = [{"role": "user", "content": "Hello"}]
SYSTEM: list[Any] = [{"role": "system", "content": "You are Mario."}]
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 5, "repeat_penalty": 1.5}
LIBRARY: dict[str, Any] = {"temperature": 0, "max_tokens": 5, "repetition_penalty": 1.5}


@pytest.fixture
def server(llama: Path) -> Iterator[Any]:
    with serving([f"llama={llama}"]) as made:
        yield made


@pytest.fixture
def client(server: Any) -> Any:
    return ollama.Client(host=server.url)


def test_an_alias_has_a_system_message_and_options_in_every_protocol(server: Any, client: Any) -> None:
    pool = server.state.pool
    made = client.create(model="mario", from_="llama", system="You are Mario.", parameters=OPTIONS, stream=False)
    assert made.status == "success"
    wanted = pool.chat([*SYSTEM, *CHAT], "llama", **LIBRARY)
    for name in ("mario", "mario:latest"):
        found = client.chat(name, CHAT)
        assert (found.message.content, found.prompt_eval_count, found.eval_count) == (
            wanted.text, wanted.usage.prompt_tokens, wanted.usage.completion_tokens)
        assert client.generate(name, "Hello").response == wanted.text
    status, found = ask(server, "/v1/chat/completions", {"model": "mario", "messages": CHAT})
    assert found["choices"][0]["message"]["content"] == wanted.text
    assert found["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens
    status, found = ask(server, "/v1/responses", {"model": "mario", "input": "Hello"})
    assert found["output"][0]["content"][0]["text"] == wanted.text
    status, found = ask(server, "/v1/messages", {"model": "mario", "messages": CHAT, "max_tokens": 5})
    assert found["content"][0]["text"] == wanted.text
    status, found = ask(server, "/tokenize", {"model": "mario", "messages": CHAT})
    assert found["count"] == wanted.usage.prompt_tokens
    status, found = ask(server, "/v1/completions", {"model": "mario", "prompt": "The"})
    assert found["choices"][0]["text"] == pool.generate("The", "llama", **LIBRARY).text


def test_a_request_overrides_the_alias(server: Any, client: Any) -> None:
    pool = server.state.pool
    client.create(model="mario", from_="llama", system="You are Mario.", parameters=OPTIONS)
    other = [{"role": "system", "content": "You are Luigi."}, *CHAT]
    wanted = pool.chat(other, "llama", **{**LIBRARY, "max_tokens": 3})
    found = client.chat("mario", other, options={"num_predict": 3})
    assert (found.message.content, found.eval_count) == (wanted.text, 3)
    less = client.generate("mario", "Hello", system="You are Luigi.", options={"num_predict": 3})
    assert less.response == wanted.text
    status, body = ask(server, "/v1/chat/completions", {"model": "mario", "messages": other, "max_tokens": 3})
    assert body["choices"][0]["message"]["content"] == wanted.text
    client.create(model="child", from_="mario", parameters={"num_predict": 12})
    wanted = pool.chat([*SYSTEM, *CHAT], "llama", **{**LIBRARY, "max_tokens": 12})
    assert client.chat("child", CHAT).message.content == wanted.text


def test_the_parameters_of_an_alias_have_the_names_that_create_takes(server: Any, client: Any) -> None:
    given: dict[str, Any] = {"temperature": 0.5, "num_predict": 5, "num_ctx": 64, "repeat_penalty": 1.5, "seed": 7,
                             "stop": ["a \"b\"", "\n"]}
    client.create(model="mario", from_="llama", parameters=given)
    text = client.show("mario").parameters
    found: dict[str, Any] = {}
    for line in text.splitlines():
        name, value = line.split(None, 1)
        if name == "stop":
            found.setdefault(name, []).append(json.loads(value))
        else:
            found[name] = json.loads(value)
    assert found == given
    client.create(model="luigi", from_="llama", parameters=found)
    assert client.show("luigi").parameters == text


def test_names_of_aliases(server: Any, client: Any) -> None:
    statuses = [part.status for part in client.create(model="mario:8b", from_="llama", system="x", stream=True)]
    assert statuses == ["success"]
    client.copy("mario:8b", "other")
    assert {row.model for row in client.list().models} == {"llama", "mario:8b", "other"}
    shown = client.show("other")
    assert shown.details.family == client.show("llama").details.family
    assert ask(server, "/api/show", {"model": "other"})[1]["system"] == "x"
    assert {row["id"] for row in ask(server, "/v1/models")[1]["data"]} == {"llama", "mario:8b", "other"}
    client.delete("mario:8b")
    client.delete("other:latest")
    with pytest.raises(ollama.ResponseError) as gone:
        client.delete("other")
    assert gone.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as kept:
        client.delete("llama")
    assert kept.value.status_code == 400 and "can be deleted" in kept.value.error
    assert {row.model for row in client.list().models} == {"llama"}


@pytest.mark.sample(4)
@pytest.mark.parametrize("change", [
    {"from": "nothing"}, {"from": "../llama"}, {"from": None}, {"model": "llama"}, {"model": "a//b"}, {"model": ""},
    {"parameters": {"temperature": -1}}, {"template": "x"}, {"files": {"a": "b"}},
    {"adapters": {"a": "b"}}, {"quantize": "q4_K_M"}, {"messages": CHAT}, {"system": "x" * 1_000_001}], ids=str)
def test_refused_aliases(server: Any, change: dict[str, Any]) -> None:
    status, found = ask(server, "/api/create", {"model": "new", "from": "llama", **change})
    assert status in (400, 404, 413) and found["error"], found
    assert [row["name"] for row in ask(server, "/api/tags")[1]["models"]] == ["llama"]


def test_the_number_of_aliases_is_limited(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpool.server.models, "_MAX_ALIASES", 3)
    for at in range(5):
        status, body = 0, {}
        with Raw(server) as raw:
            data = json.dumps({"source": "llama", "destination": f"name{at}"}).encode()
            status = raw.request("/api/copy", data).response()[0]
        assert status == (200 if at < 3 else 400), body
    assert len(ask(server, "/api/tags")[1]["models"]) == 4
