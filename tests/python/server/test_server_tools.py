"""Tools in OpenAI's and Ollama's protocols, with their clients, and invalid tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm

import mpool
from mpool.results import ToolCallDelta
from servers import Raw, ask, serving
from tooldata import BOOK, NAMED, SCHEMAS, TOOLS, WORDS, WRITES

pytest.importorskip("llguidance")
msgspec = pytest.importorskip("msgspec")

from mpool.server.openai.chat import _deltas  # noqa: E402

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
WARM = {"temperature": 1.5, "seed": 4, "max_tokens": 700}
GREEDY: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "max_tokens": 120, "seed": 1}


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chainmodels.save(tmp_path_factory.mktemp("writes"), tm.HERMES, WRITES, WORDS)


@pytest.fixture(scope="module")
def server(llama: Path, writes: Path) -> Iterator[Any]:
    with serving([f"llama={llama}", f"writes={writes}"]) as made:
        yield made


@pytest.fixture(scope="module")
def openai(server: Any) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def test_openai_client(openai: Any) -> None:
    """A tool call, with and without streaming, the result of the tool, and the next completion."""
    options: dict[str, Any] = {"model": "writes", "tools": [tm.CLOCK], **GREEDY}
    done = openai.chat.completions.create(messages=CHAT, **options)
    message = done.choices[0].message
    (call,) = message.tool_calls
    assert done.choices[0].finish_reason == "tool_calls" and message.content == "Wait."
    assert (call.type, call.function.name, call.function.arguments) == ("function", "clock", "{}")
    found: dict[int, list[str]] = {}
    text, reasons = "", []
    for chunk in openai.chat.completions.create(messages=CHAT, stream=True, **options):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        reasons += [choice.finish_reason] if choice.finish_reason else []
        indices = [delta.index for delta in choice.delta.tool_calls or ()]
        assert len(set(indices)) == len(indices)  # instructor reads only the first delta of a chunk
        for delta in choice.delta.tool_calls or ():
            one = found.setdefault(delta.index, [delta.id, delta.type, delta.function.name, ""])
            one[3] += delta.function.arguments or ""
    assert (text, reasons, found) == ("Wait.", ["tool_calls"], {0: [call.id, "function", "clock", "{}"]})
    messages = [*CHAT, message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id,
                                                               "content": "12:30"}]
    again = openai.chat.completions.create(messages=messages, **options)
    assert again.usage.prompt_tokens > done.usage.prompt_tokens
    none = openai.chat.completions.create(messages=messages, tool_choice="none", **options)
    assert not none.choices[0].message.tool_calls and none.choices[0].finish_reason == "stop"
    only = openai.chat.completions.create(messages=CHAT, tool_choice="required", **options)
    assert only.choices[0].message.content is None and only.choices[0].message.tool_calls


def test_a_stream_chunk_has_one_delta_per_tool_call() -> None:
    """A chunk of the library may have several parts of a call: OpenAI's protocol joins them."""
    parts = [ToolCallDelta(0, "a", "f", ""), ToolCallDelta(0, None, None, '{"x"'), ToolCallDelta(1, "b", "g", "{"),
             ToolCallDelta(0, None, None, ": 1}"), ToolCallDelta(2, None, None, "}")]
    assert msgspec.to_builtins(_deltas(parts)) == [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": "{"}},
        {"index": 2, "function": {"arguments": "}"}}]
    assert _deltas(()) == []


def test_openai_tool_calls_match_the_schemas_and_the_library(server: Any, writes: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    body = {"model": "writes", "messages": CHAT, "tools": TOOLS, "tool_choice": NAMED, "n": 2, **WARM}
    status, found = ask(server, "/v1/chat/completions", body)
    assert status == 200
    for choice in found["choices"]:
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        done = pool.chat(CHAT, writes, tools=TOOLS, tool_choice=NAMED, n=2, **WARM)
    assert [[call.id, call.raw] for one in done.choices for call in one.tool_calls] == \
        [[call["id"], call["function"]["arguments"]] for one in found["choices"]
         for call in one["message"]["tool_calls"]]


def test_ollama_client(server: Any) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=f"http://127.0.0.1:{server.port}")

    def clock() -> str:
        """The time."""
        return "12:30"

    options = {"temperature": 0, "presence_penalty": 2.0, "num_predict": 120, "seed": 1}
    done = client.chat("writes", CHAT, tools=[clock], options=options)
    (call,) = done.message.tool_calls
    assert (done.message.content, call.function.name, call.function.arguments) == ("Wait.", "clock", {})
    assert done.done and done.done_reason == "stop"
    chunks = list(client.chat("writes", CHAT, tools=[clock], options=options, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == "Wait." and chunks[-1].done
    (streamed,) = [call for chunk in chunks for call in chunk.message.tool_calls or ()]
    assert (streamed.function.name, streamed.function.arguments) == ("clock", {})
    messages = [*CHAT, done.message, {"role": "tool", "content": clock(), "tool_name": "clock"}]
    again = client.chat("writes", messages, tools=[clock], options=options)
    assert again.prompt_eval_count > done.prompt_eval_count
    assert client.show("writes").capabilities == ["completion", "tools"]
    assert client.show("llama").capabilities == ["completion"]


def test_ollama_streams_send_every_complete_tool_call(tmp_path: Path) -> None:
    ollama = pytest.importorskip("ollama")
    # greedy decoding repeats the first tool call up to the limit
    chains = [*WRITES[:-1], ("</tool_call>", "<tool_call>")]
    with serving([f"again={chainmodels.save(tmp_path, tm.HERMES, chains, WORDS)}"]) as made:
        client = ollama.Client(host=made.url)
        options = {"temperature": 0}
        whole = client.chat("again", CHAT, tools=[tm.CLOCK], options=options)
        chunks = list(client.chat("again", CHAT, tools=[tm.CLOCK], options=options, stream=True))
    sent = [[call.function.model_dump() for call in chunk.message.tool_calls] for chunk in chunks
            if chunk.message.tool_calls]
    assert [call for calls in sent for call in calls] == [call.function.model_dump()
                                                          for call in whole.message.tool_calls]
    assert len(whole.message.tool_calls or ()) == 8 and whole.done_reason == chunks[-1].done_reason == "length"
    assert whole.eval_count < 60  # without a limit of tokens in the request


def test_openai_requests_without_a_limit_end_after_eight_equal_calls(tmp_path: Path) -> None:
    openai = pytest.importorskip("openai")
    chains = [*WRITES[:-1], ("</tool_call>", "<tool_call>")]
    with serving([f"again={chainmodels.save(tmp_path, tm.HERMES, chains, WORDS)}"]) as made:
        client = openai.OpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0)
        for choice in ("auto", "required"):
            options: dict[str, Any] = {"model": "again", "messages": CHAT, "tools": [tm.CLOCK], "tool_choice": choice,
                                       "temperature": 0}
            done = client.chat.completions.create(**options)
            assert done.choices[0].finish_reason == "tool_calls" and done.usage.completion_tokens < 60
            assert len(done.choices[0].message.tool_calls) == 8
            assert done.choices[0].stop_reason == "repeated_tool_calls"
            chunks = list(client.chat.completions.create(stream=True, **options))
            begun = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or () if delta.id]
            assert len(begun) == 8 and chunks[-1].choices[0].finish_reason == "tool_calls"
            assert chunks[-1].choices[0].stop_reason == "repeated_tool_calls"
            assert "stop_reason" not in chunks[0].choices[0].model_dump()


def test_other_protocols_name_the_limit_of_tool_calls(tmp_path: Path) -> None:
    """The words that make clients run the calls stay; a field beside them has the limit, in streams too."""
    chains = [*WRITES[:-1], ("</tool_call>", "<tool_call>")]
    tool, limit = tm.CLOCK["function"], "repeated_tool_calls"
    schema = {"type": "object", "properties": {}}
    with serving([f"again={chainmodels.save(tmp_path, tm.HERMES, chains, WORDS)}"]) as made:
        for path, body, kind, right in (
                ("/v1/responses", {"input": "Weather?", "tools": [{"type": "function", **tool}]}, "function_call",
                 {"status": "completed", "incomplete_details": {"reason": limit}}),
                ("/v1/messages", {"messages": CHAT, "max_tokens": 900, "tools": [{
                    "name": "clock", "input_schema": schema}]}, "tool_use",
                 {"stop_reason": "tool_use", "stop_sequence": limit})):
            body = {"model": "again", "temperature": 0, **body}
            status, done = ask(made, path, body)[:2]
            items = done.get("output") or done["content"]
            assert status == 200 and {name: done[name] for name in right} == right
            assert sum(item["type"] == kind for item in items) == 8
            with Raw(made) as raw:
                text = raw.request(path, json.dumps({**body, "stream": True}).encode()).response()[2].decode()
            assert limit in text and ("response.completed" in text or "tool_use" in text)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": 5}]}, "`tools[0]` must be a dict"), ({"tools": [{}]}, "got no function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
     "`tools[0].function.name` must be 1 to 128 letters, digits, _, - and ., got 'a b'"),
    ({"tools": [tm.CLOCK, tm.CLOCK]}, "`tools[1].function.name` must be unique among the tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{at}"}} for at in range(129)]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 300_000}}]}, "characters as JSON"),
    ({"tools": "f"}, "tools"), ({"tools": [tm.CLOCK], "tool_choice": "maybe"}, "got 'maybe'"),
    ({"tools": [tm.CLOCK], "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "`tool_choice` must be the name of a tool: clock, got 'g'"),
    ({"tools": [tm.CLOCK], "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "$ref": "#/nowhere"}, "strict": True}}}, "`response_format`: the JSON schema cannot be used: $ref"),
    ({"messages": [*CHAT, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "tool_calls"),
]


@pytest.mark.parametrize("field, message", BAD, ids=lambda value: str(value)[:40])
def test_invalid_tools_are_refused(server: Any, field: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        body = {"model": "writes", "messages": CHAT, "max_tokens": 2, "stream": stream, **field}
        status, found = ask(server, "/v1/chat/completions", body)
        assert status == 400 and found["error"]["code"] == "invalid_value", found
        assert message in found["error"]["message"], found
        param = next((name for name in ("tool_choice", "response_format") if name in field), next(iter(field)))
        assert found["error"]["param"].partition("[")[0] == param
    if "tool_choice" not in field and "response_format" not in field and "messages" not in field:
        status, found = ask(server, "/api/chat", {"model": "writes", "messages": CHAT, **field})
        assert status == 400 and message in found["error"]


def test_models_without_tool_support(server: Any) -> None:
    for path in ("/v1/chat/completions", "/api/chat"):
        status, found = ask(server, path, {"model": "llama", "messages": CHAT, "tools": [tm.CLOCK]})
        assert status == 400 and "does not support tools" in str(found["error"])
        assert path.startswith("/api") or found["error"]["param"] == "tools"
    broken = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}
    status, found = ask(server, "/v1/chat/completions", {"model": "writes", "messages": CHAT, "tools": [
        {"type": "function", "function": {**broken, "strict": True}}]})
    assert status == 400 and found["error"]["param"] == "tools" and "of odd cannot be used" in found["error"]["message"]


def test_tools_with_a_response_format(openai: Any) -> None:
    """Each completion is either a tool call or text in the response format."""
    jsonschema = pytest.importorskip("jsonschema")
    format = {"type": "json_schema", "json_schema": {"name": "book", "strict": True, "schema": BOOK}}
    options: dict[str, Any] = {"model": "writes", "tools": [tm.CLOCK], "response_format": format, "n": 3, **WARM}
    kinds = set()
    for at in range(12):
        messages = [{"role": "user", "content": f"Number {at * at}"}]
        for choice in openai.chat.completions.create(messages=messages, **options).choices:
            kinds.add(choice.finish_reason)
            if choice.finish_reason == "tool_calls":
                assert not choice.message.content and choice.message.tool_calls[0].function.name == "clock"
            else:
                assert choice.finish_reason == "stop" and not choice.message.tool_calls
                jsonschema.validate(json.loads(choice.message.content), BOOK)
    assert kinds == {"tool_calls", "stop"}


def test_requests_without_a_limit_of_tokens_get_the_servers(llama: Path) -> None:
    """``Settings.default_max_tokens`` applies in both protocols, streamed or not, and a request may set more."""
    endless = {"ignore_eos": True}
    with serving([f"llama={llama}"], default_max_tokens=7, max_tokens=12) as made:
        base = {"model": "llama", "temperature": 0}
        for path, prompt, default in (("/v1/chat/completions", {"messages": CHAT}, 7),
                                      ("/v1/completions", {"prompt": "The"}, 12)):  # OpenAI's default there is 16
            for wanted, expected in ((None, default), (9, 9), (50, 12)):
                limit = {} if wanted is None else {"max_tokens": wanted}
                status, done = ask(made, path, {**base, **prompt, **endless, **limit})
                assert status == 200 and done["usage"]["completion_tokens"] == expected
                assert done["choices"][0]["finish_reason"] == "length"
        for path, prompt in (("/api/chat", {"messages": CHAT}), ("/api/generate", {"prompt": "The"})):
            for wanted, expected in ((None, 7), (-1, 12), (9, 9), (50, 12)):
                options = {"temperature": 0, **({} if wanted is None else {"num_predict": wanted})}
                status, done = ask(made, path, {"model": "llama", **prompt, "stream": False, "options": options})
                assert status == 200 and done["eval_count"] <= expected
                assert done["done_reason"] == "length" or done["eval_count"] < expected
