"""Requests of aider, Continue, Codex and Claude Code, as their public repositories make them (editor_requests.json),
and what these clients read of the responses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm

from servers import Raw, ask, serving
from tooldata import WORDS, WRITES

pytest.importorskip("llguidance")

REQUESTS = json.loads(Path(__file__).with_name("editor_requests.json").read_text(encoding="utf-8"))["requests"]
FIM = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|file_sep|>"]
MIDDLE = [("<fim_middle>", "m"), ("m", "i"), ("i", "d"), ("d", "<|file_sep|>"), ("<|file_sep|>", "x"), ("x", "x")]


@pytest.fixture(scope="module")
def server(llama: Path, qwen2: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = {"writes": (tm.HERMES, WRITES, WORDS), "coder": ("{{ messages[0].content }}", MIDDLE, FIM)}
    folders = {name: chainmodels.save(tmp_path_factory.mktemp(name), *model) for name, model in models.items()}
    refs = {"llama": llama, "qwen2": qwen2, "bert": bert, **folders}
    with serving([f"{name}={folder}" for name, folder in refs.items()]) as made:
        yield made


def read(kind: str, data: bytes) -> str:
    """Return the text, or the name of the called tool, as the client finds it. Fails on an error in the stream."""
    text = data.decode()
    rows = [json.loads(line.removeprefix("data: ")) for line in text.splitlines()
            if line.startswith("data: {") or kind.startswith("ollama") and line]
    assert rows and not any("error" in row and row["error"] for row in rows), text
    if kind.startswith("openai"):
        choices = [choice for row in rows for choice in row["choices"][:1]]
        assert choices[-1]["finish_reason"] or choices[-2]["finish_reason"]
        if kind == "openai tools":
            return "".join(call["function"].get("name") or "" for choice in choices
                           for call in choice["delta"].get("tool_calls") or ())
        return "".join(choice["text"] if kind == "openai text" else choice["delta"].get("content") or ""
                       for choice in choices)
    if kind.startswith("ollama"):
        assert rows[-1]["done"] is True
        return "".join(row["response"] if kind == "ollama text" else row["message"]["content"] or
                       "".join(call["function"]["name"] for call in row["message"].get("tool_calls", ()))
                       for row in rows)
    if kind == "responses":
        assert rows[-1]["type"] == "response.completed" and rows[-1]["response"]["usage"]["total_tokens"] > 0
        return "".join(row["item"].get("name") or row["item"]["content"][0]["text"] for row in rows
                       if row["type"] == "response.output_item.done")
    assert rows[-1]["type"] == "message_stop"
    return "".join(row["delta"].get("text", "") for row in rows if row["type"] == "content_block_delta")


def expected(server: Any, request: dict[str, Any], model: str) -> str | None:
    """The text of the library for the same conversation; None: the tests of the protocol compare it."""
    body, pool = request["body"], server.state.pool
    if request["reads"] == "openai text":
        return str(pool.generate(body["prompt"], model, temperature=0, max_tokens=12, stop=body["stop"]).text)
    if request["reads"] in ("openai", "anthropic", "ollama") and "tools" not in body and "options" not in body:
        system = [{"role": "system", "content": "".join(part["text"] for part in body["system"])}] \
            if "system" in body else []
        most = {"max_tokens": body["max_tokens"]} if "max_tokens" in body else {}
        return str(pool.chat(system + body["messages"], model, temperature=0, stop=body.get("stop"),
                             **{"max_tokens": server.state.settings.default_max_tokens, **most}).text)
    return {"openai tools": "clock", "ollama text": "mid"}.get(request["reads"])


@pytest.mark.parametrize("request_", REQUESTS, ids=[request["client"] for request in REQUESTS])
def test_requests_are_served(server: Any, request_: dict[str, Any]) -> None:
    model = request_.get("model", "llama")
    body = json.loads(json.dumps(request_["body"]).replace("$MODEL", model))
    lines = [f"{name}: {value}" for name, value in request_["headers"].items()]
    with Raw(server, 60) as raw:
        status, _, data = raw.request(request_["path"], json.dumps(body).encode(), *lines).answer()
    assert status == 200, data
    found, wanted = read(request_["reads"], data), expected(server, request_, model)
    assert found and (wanted is None or found == wanted), (found, wanted)


def test_continue_reads_the_description_of_a_model(server: Any) -> None:
    """Continue splits every line of ``parameters`` into a name and a value, and fills in the middle only if the
    template has ``.Suffix`` (core/llm/llms/Ollama.ts)."""
    shown = {name: ask(server, "/api/show", {"name": name})[1] for name in ("llama", "qwen2", "coder", "writes")}
    for found in shown.values():
        for line in found["parameters"].split("\n") if found["parameters"] else []:
            assert re.match(r'^(\S+)\s+((?:".*")|\S+)$', line), line
    assert any(found["parameters"] for found in shown.values())
    assert {name for name, found in shown.items() if ".Suffix" in found["template"]} == {"coder"}


def test_continue_lists_and_embeds(server: Any) -> None:
    lines = ("Authorization: Bearer undefined", "api-key: ")
    with Raw(server) as raw:
        listed = json.loads(raw.request("/v1/models", None, *lines).answer()[2])
    assert {"llama", "bert"} <= {one["id"] for one in listed["data"]}
    assert {"llama:latest", "bert:latest"} <= {one["name"] for one in ask(server, "/api/tags")[1]["models"]} or \
        {"llama", "bert"} <= {one["name"] for one in ask(server, "/api/tags")[1]["models"]}
    wanted = server.state.pool.embed(["one", "two"], "bert").tolist()
    status, found = ask(server, "/v1/embeddings", {"input": ["one", "two"], "model": "bert"}, *lines)
    assert status == 200 and [one["embedding"] for one in found["data"]] == wanted
    status, found = ask(server, "/api/embed", {"model": "bert", "input": ["one", "two"]})
    assert status == 200 and found["embeddings"] == wanted
