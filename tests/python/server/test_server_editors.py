"""Requests of aider, Continue, Cline, Zed, LiteLLM, Open WebUI, llm, Codex and Claude Code, as their repositories make
them (editor_requests.json), and what these clients read of the responses.

The text, the calls and the number of prompt tokens are those of the library for the same conversation.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm
from PIL import Image

from reasoningdata import CHAINS, THINK
from reasoningdata import WORDS as THOUGHTS
from servers import Raw, ask, serving
from tooldata import WORDS, WRITES

pytest.importorskip("llguidance")

REQUESTS = json.loads(Path(__file__).with_name("editor_requests.json").read_text(encoding="utf-8"))["requests"]
with io.BytesIO() as _file:
    Image.new("RGB", (8, 8), "red").save(_file, "PNG")
    IMAGE = "data:image/png;base64," + base64.b64encode(_file.getvalue()).decode()
FIM = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|file_sep|>"]
MIDDLE = [("<fim_middle>", "m"), ("m", "i"), ("i", "d"), ("d", "<|file_sep|>"), ("<|file_sep|>", "x"), ("x", "x")]


@pytest.fixture(scope="module")
def server(llama: Path, qwen2: Path, bert: Path, llava: Path, ranker: Path,
           tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = {"writes": (tm.HERMES, WRITES, WORDS), "coder": ("{{ messages[0].content }}", MIDDLE, FIM),
              "always": (THINK, CHAINS[THINK], THOUGHTS)}
    folders = {name: chainmodels.save(tmp_path_factory.mktemp(name), *model) for name, model in models.items()}
    refs = {"llama": llama, "qwen2": qwen2, "bert": bert, "llava": llava, "ranker": ranker, **folders}
    with serving([f"{name}={folder}" for name, folder in refs.items()]) as made:
        yield made


def rows_of(kind: str, data: bytes) -> list[dict[str, Any]]:
    """Return the events or lines of a stream, or the whole response. Fails on an error in the stream."""
    text = data.decode()
    rows = [json.loads(line.removeprefix("data: ")) for line in text.splitlines()
            if line.startswith(("data: {", "{")) or kind.startswith("ollama") and line]
    assert rows and not any("error" in row and row["error"] for row in rows), text
    return rows


def read(kind: str, rows: list[dict[str, Any]]) -> str:
    """Return the text, or the name of the called tool, as the client finds it."""
    if kind.startswith("openai"):
        choices = [choice for row in rows for choice in row["choices"][:1]]
        assert any(choice["finish_reason"] for choice in choices[-2:])
        parts = [choice.get("delta") or choice.get("message") or {} for choice in choices]
        if kind == "openai tools":
            return "".join(call["function"].get("name") or "" for part in parts
                           for call in part.get("tool_calls") or ())
        return "".join(choice["text"] if kind == "openai text" else part.get("content") or ""
                       for choice, part in zip(choices, parts, strict=True))
    if kind.startswith("ollama"):
        assert rows[-1]["done"] is True
        return "".join(row["response"] if kind == "ollama text" else row["message"]["content"] or
                       "".join(call["function"]["name"] for call in row["message"].get("tool_calls", ()))
                       for row in rows)
    if kind == "responses":
        assert rows[-1]["type"] in ("response.completed", "response.incomplete")
        assert rows[-1]["response"]["usage"]["total_tokens"] > 0
        return "".join(row["item"].get("name") or row["item"]["content"][0]["text"] for row in rows
                       if row["type"] == "response.output_item.done")
    assert rows[-1]["type"] == "message_stop"
    return "".join(row["delta"].get("text", "") for row in rows if row["type"] == "content_block_delta")


def prompt_tokens(row: dict[str, Any]) -> int | None:
    """Return the number of prompt tokens in a row; None: it has none."""
    inner = [part for name in ("response", "message") if isinstance(part := row.get(name), dict)]
    usage = next((part["usage"] for part in [*inner, row] if part.get("usage")), row)
    found = [usage[name] for name in ("prompt_tokens", "prompt_eval_count", "input_tokens") if name in usage]
    return found[0] + usage.get("cache_read_input_tokens", 0) if found else None


def meant(server: Any, request: dict[str, Any], model: str) -> Any:
    """Return the completion of the library for the messages that the request means."""
    body = request["body"]
    options, most = body.get("options", body), ("max_tokens", "max_completion_tokens", "max_output_tokens",
                                                "num_predict")
    stop = options.get("stop") or body.get("stop_sequences")
    return server.state.pool.chat(
        request["means"], model, temperature=0, max_tokens=next(int(options[name]) for name in most if name in options),
        **({"presence_penalty": 2.0} if "presence_penalty" in options else {}), **({"stop": stop} if stop else {}))


def has(row: Any, path: list[str]) -> bool:
    """Return True if a row has a field; numbers in the path are positions in lists."""
    if not path:
        return row is not None
    key: Any = int(path[0]) if path[0].isdigit() else path[0]
    inside = key < len(row) if isinstance(row, list) and isinstance(key, int) else isinstance(row, dict) and key in row
    return inside and has(row[key], path[1:])


def expected(server: Any, request: dict[str, Any], model: str) -> str | None:
    """The text of the library for the same conversation; None: the tests of the protocol compare it."""
    body, pool = request["body"], server.state.pool
    if request["reads"] == "openai text":
        return str(pool.generate(body["prompt"], model, temperature=0, max_tokens=12, stop=body["stop"]).text)
    if body.get("raw"):
        options = body["options"]
        return str(pool.generate(body["prompt"], model, temperature=0, max_tokens=options["num_predict"],
                                 stop=options["stop"], parse_special=True).text)
    if "text" in request or model == "llava":
        return request.get("text")
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
    body = json.loads(json.dumps(request_["body"]).replace("$MODEL", model).replace("$IMAGE", IMAGE))
    lines = [f"{name}: {value}" for name, value in request_["headers"].items()]
    with Raw(server, 60) as raw:
        status, headers, data = raw.request(request_["path"], json.dumps(body).encode(), *lines).response()
    assert status == 200, data
    assert headers.get("x-mpool-ignored") == request_.get("reported")
    rows = rows_of(request_["reads"], data)
    found, tokens = read(request_["reads"], rows), [one for row in rows if (one := prompt_tokens(row))]
    if "means" in request_:
        done = meant(server, request_, model)
        assert found == done.text and (not tokens or tokens[-1] == done.usage.prompt_tokens), (found, done)
        assert tokens or request_["reads"] == "openai"
    else:
        wanted = expected(server, request_, model)
        assert found and (wanted is None or found == wanted), (found, wanted)
    for field in request_.get("fields", ()):
        assert any(has(row, field.split(".")) for row in rows), field


def test_an_image_of_a_plain_url_is_seen(server: Any) -> None:
    """The number of prompt tokens is that of the same message with the URL in an object, and more than without it."""
    counts = []
    for part in ([{"type": "image_url", "image_url": IMAGE}], [{"type": "image_url", "image_url": {"url": IMAGE}}], []):
        body = {"model": "llava", "max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, *part]}]}
        counts.append(ask(server, "/v1/chat/completions", body)[1]["usage"]["prompt_tokens"])
    assert counts[0] == counts[1] > counts[2]


def test_continue_reads_the_context_length_and_ranks(server: Any) -> None:
    """Continue's provider for vLLM (core/llm/llms/Vllm.ts) reads ``max_model_len`` of the models, and sorts
    ``results`` by ``index``."""
    listed = {one["id"]: one for one in ask(server, "/v1/models")[1]["data"]}
    assert listed["llama"]["max_model_len"] == server.state.pool.get("llama").context_length
    assert listed["bert"]["max_model_len"] is None
    status, found = ask(server, "/v1/rerank", {"model": "ranker", "query": "a cat", "documents": ["a dog", "a cat"]})
    wanted = {one.index: one.score for one in server.state.pool.rerank("a cat", ["a dog", "a cat"], "ranker")}
    assert status == 200 and found["usage"]["total_tokens"] > 0
    assert {one["index"]: one["relevance_score"] for one in found["results"]} == wanted


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
