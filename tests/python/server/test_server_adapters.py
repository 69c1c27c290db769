"""Adapters over HTTP: the model name ``MODEL:ADAPTER`` on every route that generates text, with the clients of OpenAI,
Anthropic and Ollama, compared with ``generate(adapter=...)`` and ``chat(adapter=...)``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapterfiles import matrices, save_peft
from servers import ask, serving

import mpool
from mpool.errors import InvalidArgument
from mpool.server.models import Models

openai = pytest.importorskip("openai")

CHAT: list[Any] = [{"role": "user", "content": "Hello"}]
SYSTEM: list[Any] = [{"role": "system", "content": "You are Mario."}]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
NAMES = {"m": None, "m:one": "one", "m:two": "two"}


@pytest.fixture(scope="module")
def adapters(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_peft(folder / name, matrices(llama, 4, seed, size=0.4), 16.0)
            for seed, name in enumerate(("one", "two", "latest"))}


@pytest.fixture(scope="module")
def server(llama: Path, qwen2: Path, adapters: dict[str, Path]) -> Iterator[Any]:
    config = mpool.PoolConfig(shutdown_grace=1.0, offline=True, threads=2)
    with serving([f"m={llama}", f"q:7b={qwen2}"], config,
                 adapters=[f"m:{name}={adapters[name]}" for name in ("two", "one")]) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def chats(server: Any) -> dict[str, Any]:
    """The completions of the library, which differ."""
    found = {name: server.state.pool.chat(CHAT, "m", adapter=adapter, **OPTIONS) for name, adapter in NAMES.items()}
    assert len({one.text for one in found.values()}) == len(NAMES)
    return found


# ---- OpenAI ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_chat_completions(client: Any, chats: dict[str, Any], name: str) -> None:
    done = client.chat.completions.create(model=name, messages=CHAT, **OPTIONS)
    assert (done.choices[0].message.content, done.model) == (chats[name].text, name)
    with client.chat.completions.create(model=name, messages=CHAT, stream=True, **OPTIONS) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == chats[name].text


@pytest.mark.parametrize("name", NAMES)
def test_responses(client: Any, chats: dict[str, Any], name: str) -> None:
    done = client.responses.create(model=name, input="Hello", temperature=0, max_output_tokens=8)
    assert (done.output_text, done.model) == (chats[name].text, name)
    with client.responses.create(model=name, input="Hello", temperature=0, max_output_tokens=8, stream=True) as stream:
        assert "".join(event.delta for event in stream
                       if event.type == "response.output_text.delta") == chats[name].text


@pytest.mark.parametrize("name", NAMES)
def test_completions(server: Any, client: Any, name: str) -> None:
    prompts = ["Once upon", "The"]
    wanted = [server.state.pool.generate(prompt, "m", adapter=NAMES[name], **OPTIONS).text for prompt in prompts]
    done = client.completions.create(model=name, prompt=prompts, **OPTIONS)
    assert ([choice.text for choice in done.choices], done.model) == (wanted, name)
    found = ["", ""]
    with client.completions.create(model=name, prompt=prompts, stream=True, **OPTIONS) as stream:
        for chunk in stream:
            found[chunk.choices[0].index] += chunk.choices[0].text
    assert found == wanted


def test_models_are_listed_with_their_adapters(client: Any) -> None:
    listed = [(one.id, one.root, one.parent) for one in client.models.list()]
    assert listed == [("m", "m", None), ("m:one", "m", "m"), ("m:two", "m", "m"), ("q:7b", "q:7b", None)]
    for id, root, parent in listed:
        one = client.models.retrieve(id)
        assert (one.id, one.root, one.parent) == (id, root, parent)


# ---- Anthropic and Ollama --------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", NAMES)
def test_messages(server: Any, chats: dict[str, Any], name: str) -> None:
    anthropic, greedy = pytest.importorskip("anthropic"), {"temperature": 0}
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as client:
        done = client.messages.create(model=name, messages=CHAT, max_tokens=8, extra_body=greedy)
        assert (done.content[0].text, done.model) == (chats[name].text, name)
        with client.messages.stream(model=name, messages=CHAT, max_tokens=8, extra_body=greedy) as stream:
            assert "".join(stream.text_stream) == chats[name].text
        assert client.messages.count_tokens(model=name, messages=CHAT).input_tokens == chats[name].usage.prompt_tokens
        assert client.models.retrieve(name).id == name
        assert [one.id for one in client.models.list()] == ["m", "m:one", "m:two", "q:7b"]
        with pytest.raises(anthropic.NotFoundError, match="m:one, m:two"):
            client.messages.create(model="m:three", messages=CHAT, max_tokens=8)


@pytest.mark.parametrize("name", [*NAMES, "m:latest", "m:one:latest"])
def test_ollama(server: Any, chats: dict[str, Any], name: str) -> None:
    ollama = pytest.importorskip("ollama")
    client, wanted = ollama.Client(host=server.url), chats[name.removesuffix(":latest")]
    options = {"temperature": 0, "num_predict": 8}
    done = client.chat(name, CHAT, options=options)
    assert (done.message.content, done.model) == (wanted.text, name)
    parts = client.chat(name, CHAT, stream=True, options=options)
    assert "".join(part.message.content for part in parts) == wanted.text
    assert client.generate(name, "Hello", options=options).response == wanted.text
    raw = client.generate(name, "Once upon", raw=True, options=options)
    adapter = NAMES[name.removesuffix(":latest")]
    assert raw.response == server.state.pool.generate("Once upon", "m", adapter=adapter, **OPTIONS).text


def test_ollama_lists_and_shows_them(server: Any) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    assert [row.model for row in client.list().models] == ["m", "m:one", "m:two", "q:7b"]
    assert client.show("m:one").details.family == "llama"
    with pytest.raises(ollama.ResponseError, match="m:one, m:two") as caught:
        client.chat("m:three", CHAT)
    assert caught.value.status_code == 404
    assert client.generate("q:7b", "x", options={"num_predict": 1}).done  # a tag that names no adapter


# ---- names -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["m:three", "m:", "m:ONE", "m:one:two", "m:one:one", "m::one", ":one", "one",
                                  "m:three:latest", "m" + ":latest" * 30, ":" * 257, "m:" + "x" * 255])
def test_unknown_adapters_are_not_found(client: Any, adapters: dict[str, Path], name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model=name, messages=CHAT, max_tokens=1)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    text = caught.value.message
    assert ("The adapters of m are m:one, m:two." in text) == (name.removesuffix(":latest") in (
        "m:three", "m:", "m:ONE", "m:" + "x" * 255)), text
    assert str(adapters["one"].parent) not in text


def test_an_adapter_may_have_the_name_latest(llama: Path, adapters: dict[str, Path]) -> None:
    with serving([f"m={llama}"], adapters=[f"latest={adapters['latest']}"]) as server:
        pool = server.state.pool
        texts = [ask(server, "/api/generate", {"model": name, "prompt": "Hello", "stream": False, "options": {
            "temperature": 0, "num_predict": 8}})[1]["response"] for name in ("m", "m:latest")]
        assert texts == [pool.chat(CHAT, "m", adapter=name, **OPTIONS).text for name in (None, "latest")]
        assert texts[0] != texts[1]


def test_aliases_of_models_with_adapters(server: Any, client: Any) -> None:
    assert ask(server, "/api/create", {"model": "mario", "from": "m:one", "system": "You are Mario.",
                                       "stream": False})[0] == 200
    wanted = server.state.pool.chat([*SYSTEM, *CHAT], "m", adapter="one", **OPTIONS).text
    assert client.chat.completions.create(model="mario", messages=CHAT, **OPTIONS).choices[0].message.content == wanted
    with pytest.raises(openai.NotFoundError, match="The model mario has no adapters"):
        client.chat.completions.create(model="mario:two", messages=CHAT)
    assert ask(server, "/api/copy", {"source": "m", "destination": "m:two"})[0] == 400
    assert ask(server, "/api/create", {"model": "other", "from": "m", "stream": False})[0] == 200
    other = client.chat.completions.create(model="other:one", messages=CHAT, **OPTIONS).choices[0].message.content
    assert other == server.state.pool.chat(CHAT, "m", adapter="one", **OPTIONS).text
    assert [one.id for one in client.models.list()] == ["m", "m:one", "m:two", "q:7b", "mario", "other"]


def test_a_swap_names_the_model_and_not_an_adapter(server: Any) -> None:
    for body in ({"model": "m:one"}, {"model": "m", "source": "m:one"}):
        status, found = ask(server, "/api/mpool/swap", body)
        assert status == 400 and "adapter" in found["error"], found


def test_adapters_that_the_pool_loads_later_are_served(llama: Path, adapters: dict[str, Path]) -> None:
    with serving([f"m={llama}"]) as server:
        body = {"model": "m:one", "prompt": "x", "max_tokens": 1}
        assert ask(server, "/v1/completions", body)[0] == 404
        server.state.pool.load("m", adapters={"one": adapters["one"]})
        assert ask(server, "/v1/completions", body)[0] == 200
        server.state.pool.load("m", adapters={})
        assert ask(server, "/v1/completions", body)[0] == 404


# ---- options of the server -------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("models", "given", "words"), [
    (1, "one", "NAME=PATH"), (1, "one=", "NAME=PATH"), (1, "=PATH", "NAME=PATH"), (1, "m:=PATH", "NAME=PATH"),
    (2, "one=PATH", "one of the models a, b"), (1, "b:one=PATH", "one of the models a"), (0, "one=PATH", "--model"),
    (1, "!=PATH", "names of 1 to 128")])
def test_invalid_options_are_refused(llama: Path, adapters: dict[str, Path], models: int, given: str,
                                     words: str) -> None:
    with mpool.Pool() as pool, pytest.raises(InvalidArgument, match=words):
        Models(pool, [f"{name}={llama}" for name in "ab"[:models]], False,
               adapters=[given.replace("PATH", str(adapters["one"]))])
