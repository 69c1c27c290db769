"""Responses and events validate against the types of OpenAI's, Anthropic's and Ollama's clients.

The clients build their objects without validation, so a missing field or an unknown value of an enumeration would pass
their own calls. Here pydantic validates the raw JSON of requests to small models: required fields, types, literals.
"""

from __future__ import annotations

import json
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import toolmodels as tm

from servers import Raw, ask, server_idle, serving
from tooldata import BOOK

pydantic = pytest.importorskip("pydantic")
openai, anthropic, ollama = (pytest.importorskip(name) for name in ("openai", "anthropic", "ollama"))
pytest.importorskip("llguidance")

CHAT: list[Any] = [{"role": "user", "content": "Is it?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "seed": 1}
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "description": "The time.", "strict": True,
                         "parameters": {"type": "object", "properties": {}}}


def raw(server: Any, path: str, body: dict[str, Any] | None = None) -> tuple[int, bytes]:
    with Raw(server, 60) as found:
        status, _, data = found.request(path, None if body is None else json.dumps(body).encode()).answer()
    return status, data


def check(kind: Any, data: bytes | dict[str, Any]) -> Any:
    """Validate JSON against a type of a client, without conversions between types."""
    text = data if isinstance(data, bytes) else json.dumps(data).encode()
    return pydantic.TypeAdapter(kind).validate_json(text, strict=True)


def events(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream, without the end mark and comments."""
    status, data = raw(server, path, {**body, "stream": True})
    assert status == 200, data
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def by_type(union: Any) -> dict[str, Any]:
    """Members of a union of events by the value of their ``type``."""
    members = typing.get_args(typing.get_args(union)[0] if typing.get_origin(union) is typing.Annotated else union)
    found = {}
    for member in members:
        for name in typing.get_args(member.model_fields["type"].annotation):
            found[name] = member
    return found


# ---- OpenAI ----------------------------------------------------------------------------------------------------------

CHATS: dict[str, dict[str, Any]] = {
    "text": {"model": "llama", "max_tokens": 8},
    "several": {"model": "llama", "max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 2},
    "stop": {"model": "llama", "max_tokens": 30, "stop": ["e", "a"]},
    "reasoning": {"model": "always", "max_tokens": 120},
    "tools": {"model": "writes", "max_tokens": 60, "tools": [tm.CLOCK]},
    "forced": {"model": "writes", "max_tokens": 60, "tools": [tm.CLOCK, tm.WEATHER], "tool_choice": "required"},
    "schema": {"model": "llama", "max_tokens": 200, "response_format": {
        "type": "json_schema", "json_schema": {"name": "book", "schema": BOOK}}},
}


@pytest.mark.parametrize("name", CHATS)
def test_openai_chat(server: Any, name: str) -> None:
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    body = {"messages": CHAT, **GREEDY, **CHATS[name]}
    status, data = raw(server, "/v1/chat/completions", body)
    assert status == 200, data
    check(ChatCompletion, data)
    chunks = [check(ChatCompletionChunk, one) for one in events(server, "/v1/chat/completions", {
        **body, "stream_options": {"include_usage": True}})]
    assert chunks[-1].usage is not None and chunks[-1].choices == [] and len({one.id for one in chunks}) == 1
    ended = [choice.finish_reason for one in chunks for choice in one.choices if choice.finish_reason]
    assert len(ended) == CHATS[name].get("n", 1)


@pytest.mark.parametrize("more", [{}, {"n": 2, "logprobs": 2}, {"echo": True}, {"prompt": ["a", "b"]}], ids=str)
def test_openai_completions(server: Any, more: dict[str, Any]) -> None:
    from openai.types import Completion

    body = {"model": "llama", "prompt": "The cat", "max_tokens": 6, **GREEDY, **more}
    status, data = raw(server, "/v1/completions", body)
    assert status == 200, data
    assert all(one.finish_reason is not None for one in check(Completion, data).choices)
    # The type of a whole completion serves for chunks, too; there the last chunk of a choice has the finish reason.
    found = [choice["finish_reason"] for one in events(server, "/v1/completions", body)
             for choice in pydantic.TypeAdapter(Completion).validate_json(json.dumps({**one, "choices": [
                 {**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in one["choices"]]}),
                 strict=True) and one["choices"]]
    assert sum(reason is not None for reason in found) == len(json.loads(data)["choices"])


def test_openai_embeddings_and_models(server: Any) -> None:
    from openai.types import CreateEmbeddingResponse, Model

    for more in ({}, {"encoding_format": "float"}, {"dimensions": 4}):
        status, data = raw(server, "/v1/embeddings", {"model": "bert", "input": ["one", "two"], **more})
        assert status == 200, data
        check(CreateEmbeddingResponse, data)
    status, found = ask(server, "/v1/models")
    assert status == 200 and found["object"] == "list" and len(found["data"]) >= 4
    for one in found["data"]:
        check(Model, one)
        check(Model, raw(server, "/v1/models/" + one["id"])[1])


@pytest.fixture(scope="module")
def painter(flux: Path) -> Iterator[Any]:
    with serving([f"flux={flux}"]) as made:
        yield made


@pytest.mark.parametrize("more", [{}, {"n": 2, "output_format": "webp"}], ids=str)
def test_openai_images(painter: Any, more: dict[str, Any]) -> None:
    from openai.types import ImageGenStreamEvent, ImagesResponse

    body = {"model": "flux", "prompt": "a cat", "size": "32x32", "num_inference_steps": 2, **more}
    status, data = raw(painter, "/v1/images/generations", body)
    assert status == 200, data
    found = check(ImagesResponse, data)
    assert len(found.data) == more.get("n", 1)
    kinds = by_type(ImageGenStreamEvent)
    if "n" not in more:
        seen = [check(kinds[one["type"]], one) for one in events(painter, "/v1/images/generations",
                                                                 {**body, "partial_images": 1})]
        assert [one.type for one in seen] == ["image_generation.partial_image", "image_generation.completed"]


def test_fill_in_the_middle(server: Any) -> None:
    """Mistral's format of ``/v1/fim/completions`` is that of chat completions; the last chunk has the usage."""
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    body = {"model": "llama", "prompt": "The cat", "max_tokens": 6, **GREEDY}
    status, data = raw(server, "/v1/fim/completions", body)
    assert status == 200, data
    whole = check(ChatCompletion, data)
    chunks = [check(ChatCompletionChunk, one) for one in events(server, "/v1/fim/completions", body)]
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    assert "".join(choice.delta.content for one in chunks for choice in one.choices) == whole.choices[0].message.content


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_errors_in_the_middle_of_a_stream(server: Any, path: str) -> None:
    """The events of a cancelled stream, as OpenAI's and Anthropic's clients look for them."""
    from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent
    from openai.types.shared import ErrorObject

    most = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": "llama", most: 16_000, "ignore_eos": True, "stream": True,
            **({"input": "x"} if path == "/v1/responses" else {"messages": CHAT})}
    server_idle(server)  # the request of an earlier test may still be listed
    with Raw(server, 60) as stream:
        stream.request(path, json.dumps(body).encode())
        while not server.state.running or not next(iter(server.state.running.values())).chunks:
            time.sleep(0.005)
        (id,) = server.state.running
        assert ask(server, "/api/mpool/cancel", {"id": id})[1]["cancelled"]
        status, _, data = stream.response()
    lines = data.decode().splitlines()
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert status == 200 and "data: [DONE]" not in lines
    if path == "/v1/chat/completions":
        assert check(ErrorObject, found[-1]["error"]).code == "cancelled"
    elif path == "/v1/responses":
        assert check(ResponseErrorEvent, found[-2]).code == "cancelled"
        failed = check(ResponseFailedEvent, found[-1]).response
        assert failed.status == "failed" and failed.error.message == found[-2]["message"]
        assert "event: response.failed" in lines
    else:
        assert check(anthropic.types.ErrorResponse, {**found[-1], "request_id": None}).error.message
        assert "event: error" in lines


RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"model": "llama", "max_output_tokens": 16},
    "instructions": {"model": "llama", "max_output_tokens": 16, "instructions": "Be brief.", "metadata": {"a": "b"},
                     "user": "me", "truncation": "auto", "store": False, "top_logprobs": 2,
                     "include": ["message.output_text.logprobs"]},
    "reasoning": {"model": "always", "max_output_tokens": 120},
    "tools": {"model": "writes", "max_output_tokens": 60, "tools": [CLOCK]},
    "forced": {"model": "writes", "max_output_tokens": 60, "tools": [CLOCK],
               "tool_choice": {"type": "function", "name": "clock"}},
    "schema": {"model": "llama", "max_output_tokens": 200,
               "text": {"format": {"type": "json_schema", "name": "book", "schema": BOOK, "strict": True}}},
}


@pytest.mark.parametrize("name", RESPONSES)
def test_openai_responses(server: Any, name: str) -> None:
    from openai.types.responses import Response, ResponseStreamEvent

    body = {"input": "Is it?", **GREEDY, **RESPONSES[name]}
    status, data = raw(server, "/v1/responses", body)
    assert status == 200, data
    check(Response, data)
    kinds = by_type(ResponseStreamEvent)
    found = [check(kinds[one["type"]], one) for one in events(server, "/v1/responses", body)]
    assert found[0].type == "response.created" and found[-1].type in ("response.completed", "response.incomplete")


@pytest.mark.parametrize(("path", "body", "status"), [
    ("/v1/chat/completions", {"model": "nothing", "messages": CHAT}, 404),
    ("/v1/chat/completions", {"model": "llama", "messages": CHAT, "temperature": "hot"}, 400),
    ("/v1/chat/completions", {"model": "llama"}, 400), ("/v1/embeddings", {"model": "llama", "input": "x"}, 400),
    ("/v1/responses", {"model": "llama", "input": 3}, 400), ("/v1/models/nothing", None, 404)], ids=str)
def test_openai_errors(server: Any, path: str, body: Any, status: int) -> None:
    from openai.types.shared import ErrorObject

    code, data = raw(server, path, body)
    assert code == status
    error = json.loads(data)["error"]
    # The client's type gives the server's code as a string or null, and requires all four fields.
    assert check(ErrorObject, error).message


# ---- Anthropic -------------------------------------------------------------------------------------------------------

MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"model": "llama", "max_tokens": 8}, "stop": {"model": "llama", "max_tokens": 30, "stop_sequences": ["e"]},
    "system": {"model": "llama", "max_tokens": 8, "system": [{"type": "text", "text": "Be brief."}]},
    "thinking": {"model": "always", "max_tokens": 2000, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    "tools": {"model": "writes", "max_tokens": 60, "tools": [
        {"name": "clock", "description": "The time.", "input_schema": {"type": "object", "properties": {}}}]},
    "forced": {"model": "writes", "max_tokens": 60, "tool_choice": {"type": "any"}, "tools": [
        {"name": "clock", "input_schema": {"type": "object", "properties": {}}}]},
}


@pytest.mark.parametrize("name", MESSAGES)
def test_anthropic_messages(server: Any, name: str) -> None:
    from anthropic.types import Message, RawMessageStreamEvent

    body = {"messages": CHAT, **MESSAGES[name]}
    body |= {} if name == "thinking" else {"temperature": 0}
    status, data = raw(server, "/v1/messages", body)
    assert status == 200, data
    whole = check(Message, data)
    kinds = by_type(RawMessageStreamEvent)
    found = [check(kinds[one["type"]], one) for one in events(server, "/v1/messages", body) if one["type"] != "ping"]
    assert found[0].type == "message_start" and found[-1].type == "message_stop"
    if name != "thinking":  # sampled without a seed
        assert found[-2].delta.stop_reason == whole.stop_reason
    check(anthropic.types.MessageTokensCount, raw(server, "/v1/messages/count_tokens", {
        name: value for name, value in body.items() if name in ("model", "messages", "system", "tools")})[1])


@pytest.mark.parametrize(("body", "status"), [
    ({"model": "nothing", "max_tokens": 3, "messages": CHAT}, 404), ({"model": "llama", "messages": CHAT}, 400),
    ({"model": "llama", "max_tokens": 0, "messages": CHAT}, 400)], ids=str)
def test_anthropic_errors(server: Any, body: Any, status: int) -> None:
    code, data = raw(server, "/v1/messages", body)
    assert code == status
    check(anthropic.types.ErrorResponse, data)


def test_anthropic_models(server: Any) -> None:
    with Raw(server) as found:
        status, _, data = found.request("/v1/models", None, "anthropic-version: 2023-06-01", "x-api-key: none").answer()
    assert status == 200
    for one in json.loads(data)["data"]:
        check(anthropic.types.ModelInfo, one)


# ---- Ollama ----------------------------------------------------------------------------------------------------------

#: Fields that Ollama's documentation says every response has; the client's types make all of them optional.
LAST = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration",
        "done_reason")


@pytest.mark.parametrize(("path", "body"), [
    ("/api/chat", {"model": "llama", "messages": CHAT}),
    ("/api/chat", {"model": "always", "messages": CHAT, "think": True}),
    ("/api/chat", {"model": "writes", "messages": CHAT, "tools": [tm.CLOCK]}),
    ("/api/chat", {"model": "llama", "messages": CHAT, "format": BOOK}),
    ("/api/generate", {"model": "llama", "prompt": "The cat"}),
    ("/api/generate", {"model": "llama", "prompt": "The cat", "raw": True, "logprobs": True, "top_logprobs": 2}),
    ("/api/generate", {"model": "llama"})], ids=str)
def test_ollama_completions(server: Any, path: str, body: dict[str, Any]) -> None:
    from ollama import ChatResponse, GenerateResponse

    kind = ChatResponse if path == "/api/chat" else GenerateResponse
    options = {"options": {"temperature": 0, "num_predict": 60, "presence_penalty": 2.0}}
    status, data = raw(server, path, {**body, **options, "stream": False})
    assert status == 200, data
    whole = check(kind, data)
    assert whole.done and whole.model == body["model"] and whole.created_at
    missing = [name for name in LAST if getattr(whole, name) is None]
    assert not missing or "prompt" not in body and "messages" not in body, missing
    status, data = raw(server, path, {**body, **options})
    chunks = [check(kind, line) for line in data.splitlines()]
    assert status == 200 and chunks[-1].done and all(chunk.created_at and chunk.done is not None for chunk in chunks)


def test_ollama_models_and_embeddings(server: Any) -> None:
    from ollama import EmbeddingsResponse, EmbedResponse, ListResponse, ProcessResponse, ShowResponse

    status, data = raw(server, "/api/embed", {"model": "bert", "input": ["one", "two"]})
    found = check(EmbedResponse, data)
    assert len(found.embeddings) == 2 and None not in (found.model, found.total_duration, found.load_duration,
                                                       found.prompt_eval_count)
    check(EmbeddingsResponse, raw(server, "/api/embeddings", {"model": "bert", "prompt": "one"})[1])
    # /api/ps lists loaded models: a second one
    raw(server, "/api/generate", {"model": "llama", "prompt": "a", "stream": False, "options": {"num_predict": 1}})
    # Ollama's client turns times and sizes into objects: strict validation would refuse their JSON form.
    for path, kind in (("/api/tags", ListResponse), ("/api/ps", ProcessResponse)):
        listed = kind.model_validate_json(raw(server, path)[1])
        assert len(listed.models) >= 2
        for one in listed.models:
            assert None not in (one.model, one.digest, one.size, one.details, getattr(one, "modified_at", 0),
                                getattr(one, "expires_at", 0), getattr(one, "size_vram", 0)), one
    for path, body in (("/api/pull", {"model": "llama"}), ("/api/copy", {"source": "llama", "destination": "again"}),
                       ("/api/create", {"model": "other", "from": "llama"})):
        status, data = raw(server, path, body)
        assert status == 200, data
        assert all(check(ollama.ProgressResponse, one).status for one in data.splitlines())
    for name in ("llama", "bert", "writes"):
        shown = ShowResponse.model_validate_json(raw(server, "/api/show", {"model": name})[1])
        assert None not in (shown.modified_at, shown.template, shown.modelinfo, shown.details, shown.capabilities)
