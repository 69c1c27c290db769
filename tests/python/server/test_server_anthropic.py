"""Anthropic's protocol: Anthropic's client and raw requests, compared with the library on the same models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm

from reasoningdata import CHAINS, HARMONY, THINK
from reasoningdata import WORDS as THOUGHTS
from servers import Raw, ask, server_idle, serving
from test_server_thinking import LEVELS, SWITCHED
from tooldata import BOOK, WORDS, WRITES

anthropic = pytest.importorskip("anthropic")
pytest.importorskip("llguidance")

CHAT: list[Any] = [{"role": "user", "content": "Is it?"}]
CLOCK: dict[str, Any] = {"name": "clock", "description": "The time.", "input_schema": {
    "$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {}}}
#: Extensions of Anthropic's API, and options that its client takes only in the body.
GREEDY: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "seed": 1}
BASE: dict[str, Any] = {"max_tokens": 40, "messages": CHAT, "extra_body": GREEDY}


@pytest.fixture(scope="module")
def server(llama: Path, qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = {"writes": (tm.HERMES, WRITES, WORDS), "switched": (SWITCHED, CHAINS[THINK], THOUGHTS),
              "levels": (LEVELS, CHAINS[HARMONY], THOUGHTS), "always": (THINK, CHAINS[THINK], THOUGHTS)}
    folders = {name: chainmodels.save(tmp_path_factory.mktemp(name), *model) for name, model in models.items()}
    refs = [f"{name}={folder}" for name, folder in {"llama": llama, "qwen2": qwen2, **folders}.items()]
    with serving(refs) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as made:
        yield made


def kinds(message: Any) -> list[tuple[str, Any]]:
    """Return the content of a message: types and values of its blocks."""
    return [(block.type, {"text": lambda b: b.text, "thinking": lambda b: b.thinking,
                          "tool_use": lambda b: (b.name, b.input)}[block.type](block)) for block in message.content]


def counts(usage: Any) -> tuple[int, int]:
    """Return the numbers of prompt tokens and of generated tokens."""
    return usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens, usage.output_tokens


def library(server: Any, model: str, messages: Any = CHAT, **more: Any) -> Any:
    return server.state.pool.chat(messages, model, **{**GREEDY, "max_tokens": 40, **more})


def events_of(server: Any, body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and data of all events of a streamed response."""
    with Raw(server, 60) as raw:
        status, headers, data = raw.request("/v1/messages", json.dumps({**body, "stream": True}).encode()).answer()
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), data
    found = []
    for block in data.decode().split("\n\n"):
        if block and not block.startswith(":"):
            name, line = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(line.removeprefix("data: "))))
    assert all(event["type"] == name for name, event in found)
    return found


# ---- content, events and usage ---------------------------------------------------------------------------------------

def test_text_and_thinking(server: Any, client: Any) -> None:
    done = library(server, "always")
    message = client.messages.create(model="always", **BASE)
    assert kinds(message) == [("thinking", "ä think"), ("text", "Yes.")] == [("thinking", done.reasoning),
                                                                            ("text", done.text)]
    assert (message.role, message.type, message.model) == ("assistant", "message", "always")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None) and message.id.startswith("msg_")
    assert counts(message.usage) == (done.usage.prompt_tokens, done.usage.completion_tokens)
    with client.messages.stream(model="always", **BASE) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds(final) == kinds(message) and final.stop_reason == "end_turn"
    assert final.content[0].signature == message.content[0].signature != ""
    assert counts(final.usage) == counts(message.usage)
    assert [kind for kind in seen if "_" in kind and kind != "content_block_delta"] == [
        "message_start", *["content_block_start", "content_block_stop"] * 2, "message_delta", "message_stop"]
    again = client.messages.create(model="always", **{**BASE, "messages": [
        *CHAT, {"role": "assistant", "content": message.content}, {"role": "user", "content": "Sure?"}]})
    assert counts(again.usage)[0] == library(server, "always", [
        *CHAT, {"role": "assistant", "content": done.text, "reasoning_content": done.reasoning},
        {"role": "user", "content": "Sure?"}]).usage.prompt_tokens


def test_stream_events(server: Any) -> None:
    """All events in order, with all their fields."""
    body = {"model": "always", "max_tokens": 40, "messages": CHAT, **GREEDY}
    used = library(server, "always").usage
    events = events_of(server, body)
    start = events[0][1]["message"]
    assert events[0][0] == "message_start" and start.pop("id").startswith("msg_")
    assert start == {"type": "message", "role": "assistant", "model": "always", "content": [], "stop_reason": None,
                     "stop_sequence": None, "usage": {"input_tokens": used.prompt_tokens, "output_tokens": 0,
                                                      "cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}}
    blocks = [event for name, event in events if name.startswith("content_block")]
    assert events == [events[0], *((event["type"], event) for event in blocks), *events[-2:]]
    thoughts = [event["delta"].pop("thinking") for event in blocks if event.get("delta", {}).get("thinking")]
    texts = [event["delta"].pop("text") for event in blocks if event.get("delta", {}).get("text")]
    assert ("".join(thoughts), "".join(texts)) == ("ä think", "Yes.")
    assert blocks == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "",
                                                                      "signature": ""}},
        *[{"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta"}}] * len(thoughts),
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "unsigned"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        *[{"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta"}}] * len(texts),
        {"type": "content_block_stop", "index": 1}]
    usage = events[-2][1].pop("usage")
    assert events[-2][1] == {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}}
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == used.prompt_tokens
    assert usage["output_tokens"] == used.completion_tokens
    assert events[-1][1] == {"type": "message_stop"}


def test_tools(server: Any, client: Any) -> None:
    """A tool call, with and without streaming, its result, and the next completion."""
    base: dict[str, Any] = {**BASE, "model": "writes", "max_tokens": 120, "tools": [CLOCK]}
    openai_tool = {"type": "function", "function": {"name": "clock", "description": "The time.",
                                                    "parameters": CLOCK["input_schema"]}}
    done = library(server, "writes", tools=[openai_tool], max_tokens=120)
    message = client.messages.create(**base)
    assert kinds(message) == [("text", "Wait."), ("tool_use", ("clock", {}))] and message.stop_reason == "tool_use"
    assert message.content[1].id == done.tool_calls[0].id
    assert counts(message.usage) == (done.usage.prompt_tokens, done.usage.completion_tokens)
    with client.messages.stream(**base) as stream:
        final = stream.get_final_message()
    assert kinds(final) == kinds(message) and final.content[1].id == message.content[1].id
    assert final.stop_reason == "tool_use"
    events = [event for _, event in events_of(server, {**{k: v for k, v in base.items() if k != "extra_body"},
                                                       **GREEDY})]
    assert [event["content_block"] for event in events if event["type"] == "content_block_start"] == [
        {"type": "text", "text": ""}, {"type": "tool_use", "id": message.content[1].id, "name": "clock", "input": {}}]
    parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"
             and event["delta"]["type"] == "input_json_delta"]
    assert "".join(parts) == "{}" and all(parts)
    result = {"type": "tool_result", "tool_use_id": message.content[1].id, "content": [
        {"type": "text", "text": "12:"}, {"type": "text", "text": "30"}]}
    turns = [*CHAT, {"role": "assistant", "content": message.content},
             {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
    again = client.messages.create(**{**base, "messages": turns})
    wanted = library(server, "writes", [*CHAT, done.message, {"role": "tool", "content": "12:30",
                                                             "tool_call_id": message.content[1].id},
                                        {"role": "user", "content": "And?"}], tools=[openai_tool], max_tokens=120)
    assert counts(again.usage)[0] == wanted.usage.prompt_tokens
    counted = client.messages.count_tokens(model="writes", messages=turns, tools=[CLOCK])
    assert counted.input_tokens == wanted.usage.prompt_tokens
    none = client.messages.create(**{**base, "tool_choice": {"type": "none"}})
    assert none.stop_reason != "tool_use" and {block.type for block in none.content} == {"text"}
    for choice in ({"type": "any"}, {"type": "tool", "name": "clock"}):
        only = client.messages.create(**{**base, "tool_choice": choice})
        assert kinds(only) == [("tool_use", ("clock", {}))] and only.stop_reason == "tool_use"
    auto = client.messages.create(**{**base, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
    assert kinds(auto) == kinds(message)


@pytest.mark.parametrize(("sent", "wanted"), [
    ({"system": "Be brief.", "messages": CHAT}, [{"role": "system", "content": "Be brief."}, *CHAT]),
    ({"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                 {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                 {"type": "text", "text": "brief."}], "messages": CHAT},
     [{"role": "system", "content": "Be brief."}, *CHAT]),
    ({"system": "x-anthropic-billing-header: cch=2;\nBe brief.", "messages": CHAT},
     [{"role": "system", "content": "Be brief."}, *CHAT]),
    ({"system": [], "messages": CHAT}, CHAT),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Is "}, {"type": "text", "text": "it?"}]}]},
     CHAT),
    ({"messages": [*CHAT, {"role": "user", "content": "Yes?"}]}, [{"role": "user", "content": "Is it?\n\nYes?"}]),
    ({"messages": [*CHAT, {"role": "system", "content": "Now."}, {"role": "user", "content": "Go"}]},
     [*CHAT, {"role": "system", "content": "Now."}, {"role": "user", "content": "Go"}]),
    ({"messages": [*CHAT, {"role": "assistant", "content": "No"}, {"role": "assistant", "content": [
        {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Yes"}]}, *CHAT]},
     [*CHAT, {"role": "assistant", "content": "No\n\nYes"}, *CHAT])], ids=range(8))
def test_conversations(server: Any, client: Any, sent: dict[str, Any], wanted: Any) -> None:
    """A conversation becomes that of the library: same prompt length, same completion."""
    options = {"temperature": 0, "max_tokens": 6}
    done = server.state.pool.chat(wanted, "llama", **options)
    message = client.messages.create(model="llama", max_tokens=6, extra_body={"temperature": 0}, **sent)
    assert (message.content[0].text, counts(message.usage)[0]) == (done.text, done.usage.prompt_tokens)
    assert client.messages.count_tokens(model="llama", **sent).input_tokens == done.usage.prompt_tokens


def test_a_message_of_the_assistant_is_continued(server: Any, client: Any) -> None:
    turns = [*CHAT, {"role": "assistant", "content": "The quick"}]
    done = server.state.pool.chat(turns, "llama", temperature=0, max_tokens=6,
                                  template_options={"continue_final_message": True})
    message = client.messages.create(model="llama", max_tokens=6, messages=turns, extra_body={"temperature": 0})
    assert (message.content[0].text, counts(message.usage)[0]) == (done.text, done.usage.prompt_tokens)
    assert client.messages.count_tokens(model="llama", messages=turns).input_tokens == done.usage.prompt_tokens


def test_thinking_options(client: Any) -> None:
    def reply(model: str, **more: Any) -> tuple[list[str], str, int]:
        message = client.messages.create(model=model, **{**BASE, **more})
        return [kind for kind, _ in kinds(message)], kinds(message)[-1][1], counts(message.usage)[0]

    enabled = {"type": "enabled", "budget_tokens": 8000}
    assert reply("switched", thinking=enabled) == reply("switched") and reply("switched")[0] == ["thinking", "text"]
    assert reply("switched", thinking={"type": "disabled"})[:2] == (["text"], "Yes.")
    assert reply("always", thinking={"type": "disabled"}) == reply("always", thinking={"type": "adaptive"})
    plain = reply("levels")
    for budget, more in ((1024, -3), (8000, 0), (31_999, -2)):  # the prompt contains the level: low, medium or high
        found = reply("levels", thinking={**enabled, "budget_tokens": budget})
        assert found == (*plain[:2], plain[2] + more)
        counted = client.messages.count_tokens(model="levels", messages=CHAT, thinking={**enabled,
                                                                                        "budget_tokens": budget})
        assert counted.input_tokens == found[2]
    assert reply("levels", output_config={"effort": "max"})[2] == plain[2] - 2
    assert reply("levels", thinking=enabled, output_config={"effort": "low"})[2] == plain[2] - 3
    assert reply("llama", thinking=enabled)[2] == reply("llama")[2]
    hidden = client.messages.create(model="always", **BASE, thinking={**enabled, "display": "omitted"})
    with client.messages.stream(model="always", **BASE, thinking={"type": "adaptive", "display": "omitted"}) as stream:
        final = stream.get_final_message()
    assert kinds(hidden) == kinds(final) == [("thinking", ""), ("text", "Yes.")]


def test_stop_reasons(server: Any, client: Any) -> None:
    pool = server.state.pool
    text = pool.chat(CHAT, "llama", temperature=0, max_tokens=12, ignore_eos=True).text
    stop = text[3:5]
    done = pool.chat(CHAT, "llama", temperature=0, max_tokens=12, stop=stop)
    base: dict[str, Any] = {"model": "llama", "max_tokens": 12, "messages": CHAT, "stop_sequences": ["\0", stop],
                            "extra_body": {"temperature": 0}}
    with client.messages.stream(**base) as stream:
        final = stream.get_final_message()
    for message in (client.messages.create(**base), final):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert message.content[0].text == done.text and counts(message.usage)[1] == done.usage.completion_tokens
    endless = {"temperature": 0, "ignore_eos": True}
    message = client.messages.create(model="llama", max_tokens=5, messages=CHAT, extra_body=endless)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 5)
    message = client.messages.create(model="qwen2", max_tokens=512, messages=CHAT, extra_body=endless)
    assert message.stop_reason == "model_context_window_exceeded" and sum(counts(message.usage)) == 512


def test_output_format(server: Any, client: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    config = {"format": {"type": "json_schema", "schema": BOOK}}
    message = client.messages.create(model="writes", max_tokens=300, messages=CHAT, output_config=config,
                                     extra_body={"seed": 4, "temperature": 1.5})
    jsonschema.validate(json.loads(message.content[0].text), BOOK)
    assert message.stop_reason == "end_turn"
    broken = {"format": {"type": "json_schema", "schema": {"$ref": "#"}}}
    status, found = ask(server, "/v1/messages", {"model": "writes", "max_tokens": 3, "messages": CHAT,
                                                 "output_config": broken})
    assert status == 400 and found["error"]["type"] == "invalid_request_error", found


# ---- errors ----------------------------------------------------------------------------------------------------------

def test_errors_map_to_the_clients_exceptions(server: Any, client: Any) -> None:
    for wrong, kind, name, text in (
            ({"model": "nothing"}, anthropic.NotFoundError, "not_found_error", "Model not found"),
            ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error", "`max_tokens`"),
            ({"model": "qwen2", "messages": [{"role": "user", "content": "word " * 600}]}, anthropic.BadRequestError,
             "invalid_request_error", "prompt is too long")):
        for stream in (False, True):
            with pytest.raises(kind, match=text) as raised:
                client.messages.create(**{"model": "llama", "stream": stream, **BASE, **wrong})
            assert raised.value.type == name and raised.value.body["type"] == "error"
            assert set(raised.value.body) == {"type", "error"} and set(raised.value.body["error"]) == {"type",
                                                                                                      "message"}
    status, found = ask(server, "/v1/messages", b"{")
    assert status == 400 and found["error"]["type"] == "invalid_request_error"
    status, found = ask(server, "/v1/messages")
    assert status == 405 and found["type"] == "error"
    assert ask(server, "/v1/messages/batches", {})[1]["error"]["type"] == "not_found_error"


def test_keys_and_limits(llama: Path) -> None:
    token = "a-token-of-22-characters"
    with serving([f"llama={llama}"], token=token, max_streams=1) as made:
        def client(**more: Any) -> Any:
            return anthropic.Anthropic(base_url=made.url, max_retries=0, **more)

        for given in ({"api_key": token}, {"auth_token": token}):
            assert client(**given).messages.count_tokens(model="llama", messages=CHAT).input_tokens > 0
        body = {"model": "llama", "messages": CHAT}
        for lines, status in (((f"X-Api-Key: {token}", "Authorization: Bearer of-another-server"), 200),
                              (("X-Api-Key: of-another-server", f"Authorization: Bearer {token}"), 200),
                              (("X-Api-Key:",), 401), ((f"X-Api-Key: Bearer {token}",), 401)):
            assert ask(made, "/v1/messages/count_tokens", body, *lines)[0] == status
        for given in ({"api_key": "wrong"}, {"auth_token": "wrong"}, {"api_key": token + "x"}):
            with pytest.raises(anthropic.AuthenticationError) as raised:
                client(**given).messages.create(model="llama", max_tokens=1, messages=CHAT)
            assert raised.value.type == "authentication_error"
        used = client(api_key=token)
        long = {"model": "llama", "max_tokens": 16_000, "messages": CHAT, "stream": True,
                "extra_body": {"ignore_eos": True}}
        with used.messages.create(**long) as first:
            next(iter(first))
            with pytest.raises(anthropic.APIStatusError) as raised:
                used.messages.create(**long)
            assert (raised.value.status_code, raised.value.type) == (529, "overloaded_error")
        server_idle(made)  # the client closed the first stream: its request was cancelled


def test_failed_stream_ends_with_an_error_event(server: Any, client: Any) -> None:
    server_idle(server)  # the request of an earlier test may still be listed
    with client.messages.create(model="llama", max_tokens=16_000, messages=CHAT, stream=True,
                                extra_body={"ignore_eos": True}) as stream:
        events = iter(stream)
        assert [next(events).type for _ in range(3)] == ["message_start", "content_block_start", "content_block_delta"]
        (id,) = server.state.running
        assert ask(server, "/api/mpool/cancel", {"id": id})[1]["cancelled"]
        with pytest.raises(anthropic.APIStatusError, match="cancelled") as raised:
            list(events)
    assert raised.value.body["type"] == "error" and raised.value.type == "invalid_request_error"
    server_idle(server)


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"), ({"messages": 5}, "messages"), ({"messages": CHAT * 10_001}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "container_upload"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64", "data": "x"}}]}]},
     "messages[0].content[0].source.type"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 10_001}]}, "messages[0].content"),
    ({"messages": [*CHAT, {"role": "assistant", "content": ""}]}, "messages[1].content"),
    ({"messages": [*CHAT, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
                   ]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]},
     "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
     "messages[0].content[0].tool_use_id"),
    ({"messages": [*CHAT, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]
                                                           * 2}, *CHAT]}, "messages[1].content[1].id"),
    ({"messages": [*CHAT, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f",
                                                            "input": {}}]},
                   {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "1"}] * 2}]},
     "messages[2].content[1].tool_use_id"),
    ({"messages": [*CHAT, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f",
                                                            "input": "{}"}]}]}, "messages[1].content[0].input"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "x"}}]}]},
     "messages[0].content[0].source.type"),
    ({"system": 3}, "system"), ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": "9"}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_k": 1.5}, "top_k"), ({"top_p": 7}, "top_p"), ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"), ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x", "ä" * 600]}, "stop_sequences[1]"), ({"stream": "yes"}, "stream"),
    ({"thinking": True}, "thinking"), ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"), ({"tools": [CLOCK], "tool_choice": {"type": "tool"}},
                                                        "tool_choice.name"),
    ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tools": [CLOCK, CLOCK]}, "tools[1].name"), ({"tools": [CLOCK] * 129}, "tools"),
    ({"tools": [{**CLOCK, "name": "a b"}]}, "tools[0].name"), ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**CLOCK, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "custom", "name": "clock"}]}, "tools[0].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}}, "tool_choice"),
]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("change", "name"), HOSTILE, ids=lambda value: str(value)[:50])
def test_invalid_fields_are_named(server: Any, change: dict[str, Any], name: str) -> None:
    body = {"model": "writes", "max_tokens": 2, "messages": CHAT, **change}
    for stream in (False, True):
        status, found = ask(server, "/v1/messages", {"stream": stream, **body})
        assert status == 400 and found["error"]["type"] == "invalid_request_error", found
        assert f"`{name}`" in found["error"]["message"], found
