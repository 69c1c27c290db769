"""``/v1/responses`` with OpenAI's client and raw requests, compared with the library on the same models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm

from mpool.server.openai import namespaces
from mpool.server.response_memory import ResponseMemory, decoded, encoded
from reasoningdata import CHAINS, HARMONY, THINK
from reasoningdata import WORDS as THOUGHTS
from servers import Raw, ask, server_idle, serving
from test_server_thinking import LEVELS, SWITCHED
from tooldata import BOOK, WORDS, WRITES

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

CHAT: list[Any] = [{"role": "user", "content": "Is it?"}]
CLOCK: dict[str, Any] = {"type": "function", "name": "clock", "description": "The time.", "strict": True,
                         "parameters": {"type": "object", "properties": {}}}
GREEDY: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "seed": 1}
BASE: dict[str, Any] = {"input": "Is it?", "max_output_tokens": 120, "temperature": 0,
                        "extra_body": {"presence_penalty": 2.0, "seed": 1}}


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    models = {"writes": (tm.HERMES, WRITES, WORDS), "always": (THINK, CHAINS[THINK], THOUGHTS),
              "switched": (SWITCHED, CHAINS[THINK], THOUGHTS), "levels": (LEVELS, CHAINS[HARMONY], THOUGHTS)}
    folders = {name: chainmodels.save(tmp_path_factory.mktemp(name), *model) for name, model in models.items()}
    with serving([f"llama={llama}", *(f"{name}={folder}" for name, folder in folders.items())]) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def library(server: Any, model: str, messages: Any = CHAT, **more: Any) -> Any:
    return server.state.pool.chat(messages, model, **{**GREEDY, "max_tokens": 120, **more})


def counts(usage: Any) -> tuple[int, int, int]:
    return usage.input_tokens, usage.output_tokens, usage.total_tokens


def counts_of(done: Any) -> tuple[int, int, int]:
    return done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens


def events_of(server: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the data of all events of a streamed response. Checks their names and numbers."""
    with Raw(server, 60) as raw:
        status, headers, data = raw.request("/v1/responses", json.dumps({**body, "stream": True}).encode()).answer()
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), data
    blocks = [block.split("\n") for block in data.decode().split("\n\n") if block and not block.startswith(":")]
    events = [json.loads(line.removeprefix("data: ")) for _, line in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in events]
    assert [event.pop("sequence_number") for event in events] == list(range(len(events)))
    return events


def test_text_and_reasoning(server: Any, client: Any) -> None:
    done = library(server, "always")
    response = client.responses.create(model="always", **BASE)
    thoughts, message = response.output
    assert (thoughts.type, thoughts.content[0].text, thoughts.status) == ("reasoning", done.reasoning, "completed")
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert response.output_text == done.text == "Yes." and response.status == "completed"
    assert (response.object, response.model, response.error, response.incomplete_details) == \
        ("response", "always", None, None)
    assert (response.temperature, response.max_output_tokens, response.store) == (0, 120, True)
    assert counts(response.usage) == counts_of(done) and 0 < response.usage.output_tokens_details.reasoning_tokens < \
        response.usage.output_tokens
    with client.responses.stream(model="always", **BASE) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "Yes." and [item.type for item in final.output] == ["reasoning", "message"]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_stream_events(server: Any) -> None:
    """All events in order, with all their fields."""
    events = events_of(server, {"model": "always", "input": CHAT, "max_output_tokens": 40, **GREEDY})
    created, progress, *middle, completed = events
    assert (created["type"], progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"] == progress["response"] and created["response"]["status"] == "in_progress"
    assert created["response"]["output"] == [] and created["response"]["usage"] is None
    kinds = [("reasoning", "rs", "reasoning_text", "ä think", {}),
             ("message", "msg", "output_text", "Yes.", {"annotations": [], "logprobs": []})]
    for index, (kind, prefix, part, text, more) in enumerate(kinds):
        own = [event for event in middle if event["output_index"] == index]
        id = own[0]["item"]["id"]
        assert id.startswith(f"{prefix}_")
        place = {"item_id": id, "output_index": index, "content_index": 0}
        deltas = [event for event in own if event["type"] == f"response.{part}.delta"]
        logprobs = {"logprobs": []} if part == "output_text" else {}
        assert "".join(event["delta"] for event in deltas) == text and len(deltas) > 0
        full = {"type": part, "text": text, **more}
        assert own[0]["type"] == "response.output_item.added" and own[0]["item"]["type"] == kind
        assert own[0]["item"]["status"] == "in_progress" and own[0]["item"]["content"] == []
        assert own[1:] == [
            {"type": "response.content_part.added", **place, "part": {**full, "text": ""}},
            *[{"type": f"response.{part}.delta", **place, **logprobs, "delta": event["delta"]} for event in deltas],
            {"type": f"response.{part}.done", **place, **logprobs, "text": text},
            {"type": "response.content_part.done", **place, "part": full},
            {"type": "response.output_item.done", "output_index": index, "item": {
                **own[0]["item"], "status": "completed", "content": [full]}}]
        assert completed["response"]["output"][index] == own[-1]["item"]
    assert completed["type"] == "response.completed" and completed["response"]["status"] == "completed"
    assert completed["response"]["id"] == created["response"]["id"] and completed["response"]["usage"]


def test_a_stream_that_reaches_its_limit_ends_as_incomplete(server: Any, client: Any) -> None:
    """The stream has the status and the reason of the whole response; OpenAI's client reads its last event."""
    given: dict[str, Any] = {**BASE, "model": "always", "max_output_tokens": 2}
    whole = client.responses.create(**given)
    last = events_of(server, {"model": "always", "input": CHAT, "max_output_tokens": 2, **GREEDY})[-1]
    assert last["type"] == "response.incomplete" and last["response"]["status"] == whole.status == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    with client.responses.stream(**given) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def test_tools_and_kept_conversations(server: Any, client: Any) -> None:
    """A function call, its result with the whole conversation and with ``previous_response_id``."""
    base: dict[str, Any] = {**BASE, "model": "writes", "tools": [CLOCK]}
    tool = {"type": "function", "function": {key: value for key, value in CLOCK.items() if key != "type"}}
    done = library(server, "writes", tools=[tool])
    response = client.responses.create(**base)
    message, call = response.output
    assert (message.content[0].text, call.type, call.name, call.arguments) == ("Wait.", "function_call", "clock", "{}")
    assert call.call_id == done.tool_calls[0].id and counts(response.usage) == counts_of(done)
    events = events_of(server, {"model": "writes", "input": "Is it?", "tools": [CLOCK], "max_output_tokens": 120,
                                **GREEDY})
    own = [event for event in events if event.get("output_index") == 1]
    assert [event["type"].removeprefix("response.") for event in own] == [
        "output_item.added", *["function_call_arguments.delta"] * (len(own) - 3), "function_call_arguments.done",
        "output_item.done"]
    assert own[0]["item"]["arguments"] == "" and "".join(event["delta"] for event in own[1:-2]) == "{}"
    assert own[-2]["arguments"] == "{}" == own[-1]["item"]["arguments"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:30"}
    wanted = library(server, "writes", [*CHAT, done.message, {"role": "tool", "content": "12:30",
                                                             "tool_call_id": call.call_id}], tools=[tool])
    whole = client.responses.create(**{**base, "input": [{"role": "user", "content": "Is it?"}, *(
        item.model_dump(exclude_none=True) for item in response.output), result]})
    kept = client.responses.create(**{**base, "input": [result]}, previous_response_id=response.id)
    assert counts(whole.usage) == counts(kept.usage) == counts_of(wanted)
    assert kept.output_text == wanted.text == whole.output_text and kept.previous_response_id == response.id
    again = client.responses.create(**{**base, "input": "And?"}, previous_response_id=kept.id)
    assert again.usage.input_tokens > kept.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as raised:  # its call has a result: a second one is an error
        client.responses.create(**{**base, "input": [result]}, previous_response_id=kept.id)
    assert raised.value.param == "input[0].call_id"
    unkept = client.responses.create(**base, store=False)
    for id in (unkept.id, "resp_none", ""):
        with pytest.raises(openai.BadRequestError) as raised:
            client.responses.create(**base, previous_response_id=id)
        assert raised.value.code == "previous_response_not_found" and raised.value.param == "previous_response_id"
    only = client.responses.create(**base, tool_choice={"type": "function", "name": "clock"})
    assert [item.type for item in only.output] == ["function_call"]
    none = client.responses.create(**base, tool_choice="none")
    assert [item.type for item in none.output] == ["message"]


FILES: dict[str, Any] = {"type": "namespace", "name": "mcp__files", "description": "Files.", "tools": [
    {**CLOCK, "name": "clock"}, {"type": "custom", "name": "patch"}]}


def test_namespaces(server: Any, client: Any) -> None:
    """A model knows the functions of a namespace under joined names. Calls have the names of both, in responses and in
    later inputs."""
    base: dict[str, Any] = {**BASE, "model": "writes", "tools": [{"type": "web_search"}, FILES],
                            "tool_choice": {"type": "function", "name": "clock"}}
    joined = {"type": "function", "function": {**{key: value for key, value in CLOCK.items() if key != "type"},
                                               "name": "mcp__files__clock"}}
    forced = {"type": "function", "function": {"name": "mcp__files__clock"}}
    done = library(server, "writes", tools=[joined], tool_choice=forced)
    response = client.responses.create(**base)
    (call,) = response.output
    assert (call.type, call.namespace, call.name, call.arguments) == ("function_call", "mcp__files", "clock", "{}")
    assert done.tool_calls[0].name == "mcp__files__clock" and call.call_id == done.tool_calls[0].id
    assert counts(response.usage) == counts_of(done)
    assert [tool.to_dict() for tool in response.tools] == [FILES]
    extra = base.pop("extra_body")
    events = events_of(server, {**base, **extra})
    items = [event["item"] for event in events if event["type"].startswith("response.output_item")]
    assert [(item["namespace"], item["name"]) for item in items] == [("mcp__files", "clock")] * 2
    assert [event["name"] for event in events if event["type"].endswith("arguments.done")] == ["clock"]

    result = {"type": "function_call_output", "call_id": call.call_id, "output": "12:30"}
    wanted = library(server, "writes", [*CHAT, done.message, {"role": "tool", "content": "12:30",
                                                             "tool_call_id": call.call_id}], tools=[joined])
    base |= {"tool_choice": "auto", "extra_body": extra}
    whole = client.responses.create(**{**base, "input": [{"role": "user", "content": "Is it?"},
                                                         call.model_dump(exclude_none=True), result]})
    kept = client.responses.create(**{**base, "input": [result]}, previous_response_id=response.id)
    assert counts(whole.usage) == counts(kept.usage) == counts_of(wanted)


def test_names_of_functions_in_namespaces(server: Any, client: Any) -> None:
    """A plain function has no namespace. Functions of two namespaces and a plain one may have the same name."""
    other = {**FILES, "name": "other__"}
    for choice, found in (({"name": "clock"}, None), ({"name": "clock", "namespace": "other__"}, "other__"),
                          ({"name": "clock", "namespace": "mcp__files"}, "mcp__files")):
        response = client.responses.create(**{**BASE, "model": "writes", "tools": [CLOCK, FILES, other],
                                              "tool_choice": {"type": "function", **choice}})
        (call,) = response.output
        assert (call.name, call.namespace) == ("clock", found)
        assert call.to_dict().get("namespace", "none") == (found or "none")  # absent, not null
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    response = client.responses.create(**{**BASE, "model": "writes", "tools": [FILES], "tool_choice": allowed})
    assert response.output[-1].namespace == "mcp__files"
    long = {**FILES, "name": "n" * 127}
    response = client.responses.create(**{**BASE, "model": "writes", "tools": [long], "tool_choice": "required",
                                          "max_output_tokens": 400})
    assert (response.output[-1].namespace, response.output[-1].name) == ("n" * 127, "clock")
    names = [namespaces.joined_name(*pair) for pair in (("a", "b"), ("a__", "b"), ("a" * 128, "b"), ("a" * 128, "c"))]
    assert names[:2] == ["a__b", "a__b"] and len(set(names[2:])) == 2 and {len(name) for name in names[2:]} == {128}
    for tools, param in (([{**FILES, "name": ""}], "tools[0].name"), ([CLOCK, {**FILES, "tools": 5}], "tools[1].tools"),
                         ([{**FILES, "tools": [{"type": "function"}]}], "tools[0].tools"),
                         ([FILES, {**FILES, "name": "mcp__files__"}], "tools"),
                         ([FILES, other], "tool_choice")):
        status, failed = ask(server, "/v1/responses", {"model": "writes", "input": "x", "tools": tools,
                                                       "tool_choice": {"type": "function", "name": "clock"}})
        assert status == 400 and failed["error"]["param"] == param, failed


def test_instructions_and_input_items(server: Any, client: Any) -> None:
    """The input becomes a conversation of the library: same prompt length, same completion. Instructions are not
    kept."""
    options: dict[str, Any] = {"model": "llama", "max_output_tokens": 6, "temperature": 0}
    system = {"role": "system", "content": "Be brief."}
    first = client.responses.create(input="Is it?", instructions="Be brief.", **options)
    done = server.state.pool.chat([system, *CHAT], "llama", temperature=0, max_tokens=6)
    assert (first.output_text, first.usage.input_tokens) == (done.text, done.usage.prompt_tokens)
    assert (first.status, first.incomplete_details and first.incomplete_details.reason) == \
        (("incomplete", "max_output_tokens") if done.finish_reason == "length" else ("completed", None))
    turns = [*CHAT, {"role": "assistant", "content": done.text}, {"role": "user", "content": "Sure?"}]
    wanted = server.state.pool.chat(turns, "llama", temperature=0, max_tokens=6)
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Is "},
                                                            {"type": "input_text", "text": "it?"}]},
             *(item.model_dump() for item in first.output), {"role": "user", "content": "Sure?"}]
    for more in ({"input": items}, {"input": "Sure?", "previous_response_id": first.id}):
        found = client.responses.create(**options, **more)
        assert (found.output_text, found.usage.input_tokens) == (wanted.text, wanted.usage.prompt_tokens)


def test_a_response_repeats_the_fields_of_its_request(client: Any) -> None:
    options: dict[str, Any] = {"model": "llama", "max_output_tokens": 6, "temperature": 0.5, "top_p": 0.75,
                               "instructions": "Be brief.", "metadata": {"user": "7"}, "parallel_tool_calls": False}
    first = client.responses.create(input="Is it?", **options)
    assert {name: getattr(first, name) for name in options} == options and first.previous_response_id is None
    second = client.responses.create(model="llama", input="Sure?", max_output_tokens=6, previous_response_id=first.id)
    assert (second.previous_response_id, second.metadata, second.instructions, second.temperature, second.top_p,
            second.parallel_tool_calls) == (first.id, {}, None, None, None, True)


def test_reasoning_effort_and_structured_output(client: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")

    def reply(model: str, effort: str | None) -> tuple[list[str], int]:
        more = {} if effort is None else {"reasoning": {"effort": effort}}
        found = client.responses.create(model=model, **BASE, **more)
        return [item.type for item in found.output], found.usage.input_tokens

    assert reply("switched", "none")[0] == ["message"] and reply("switched", "high")[0] == ["reasoning", "message"]
    assert reply("levels", "low")[1] == reply("levels", None)[1] - 3
    with pytest.raises(openai.BadRequestError, match=r"`reasoning\.effort`") as raised:
        reply("always", "none")
    assert raised.value.param == "reasoning.effort"
    format = {"type": "json_schema", "name": "book", "schema": BOOK, "strict": True}
    found = client.responses.create(model="writes", input="x", max_output_tokens=300, temperature=1.5,
                                    text={"format": format}, extra_body={"seed": 4})
    jsonschema.validate(json.loads(found.output_text), BOOK)
    assert found.status == "completed" and found.text.format.type == "json_schema"


@pytest.mark.parametrize(("change", "param"), [
    ({"input": []}, "input"), ({"input": 3}, "input"), ({"input": ["x"]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/x.png"}]}]},
     "input[0].content[0].image_url"),
    ({"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}] * 2}, "input[1].call_id"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "", "arguments": "{}"}]}, "input[0].name"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"temperature": "hot"}, "temperature"),
    ({"background": True}, "background"), ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK] * 129}, "tools"), ({"tools": [CLOCK, CLOCK]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [CLOCK], "tool_choice": {"type": "mcp"}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#"}}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#"}}}}, "text.format"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"), ({"reasoning": 3}, "reasoning"),
    ({"previous_response_id": "x" * 257}, "previous_response_id")], ids=lambda value: str(value)[:50])
def test_invalid_fields_are_named(server: Any, change: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        status, found = ask(server, "/v1/responses", {"model": "writes", "input": "x", "max_output_tokens": 2,
                                                      "stream": stream, **change})
        assert status == 400 and found["error"]["param"] == param, found
        assert f"`{param}" in found["error"]["message"], found


@pytest.mark.parametrize("schema, words", [
    ({"$ref": "#"}, "refers to itself"), ({"enum": ["x" * 70_000]}, "limit is 65,536")], ids=["link", "length"])
def test_a_schema_that_cannot_be_used_is_named_as_in_the_request(server: Any, schema: Any, words: str) -> None:
    """Clients of other protocols do not know `response_format`."""
    pytest.importorskip("llguidance")
    plain, chat = {"type": "json_schema", "schema": schema}, {"messages": CHAT}
    format = {**plain, "name": "x"}
    for path, change, field in (("/v1/responses", {"input": "x", "text": {"format": format}}, "text.format"),
                                ("/v1/messages", {**chat, "max_tokens": 1, "output_config": {"format": plain}},
                                 "output_config.format"),
                                ("/api/chat", {**chat, "format": schema}, "format"),
                                ("/api/generate", {"prompt": "x", "format": schema}, "format"),
                                ("/v1/chat/completions", {**chat, "response_format": {
                                    "type": "json_schema", "json_schema": {"schema": schema}}}, "response_format")):
        for stream in (False, True):
            status, found = ask(server, path, {"model": "writes", "stream": stream, **change})
            error = found["error"]
            message = error if isinstance(error, str) else error["message"]
            assert status == 400 and f"`{field}`: " in message and words in message, found
            assert isinstance(error, str) or error.get("param", field) == field, found


def test_failed_stream_ends_with_its_error(server: Any, client: Any) -> None:
    server_idle(server)  # the request of an earlier test may still be listed
    with client.responses.create(model="llama", input="x", max_output_tokens=16_000, stream=True,
                                 extra_body={"ignore_eos": True}) as stream:
        events = iter(stream)
        seen = [next(events) for _ in range(5)]
        assert [event.sequence_number for event in seen] == list(range(5))
        (id,) = server.state.running
        assert ask(server, "/api/mpool/cancel", {"id": id})[1]["cancelled"]
        *rest, error, last = events
    assert (error.type, error.code) == ("error", "cancelled") and error.sequence_number > 4
    assert last.type == "response.failed" and last.sequence_number == error.sequence_number + 1
    assert (last.response.status, last.response.error.code) == ("failed", "server_error")
    assert last.response.error.message == error.message
    text = "".join(event.delta for event in [*seen, *rest] if event.type == "response.output_text.delta")
    (item,) = last.response.output
    assert (item.type, item.status, item.content[0].text) == ("message", "incomplete", text) and text
    assert "response.output_item.done" not in {event.type for event in rest}  # a client runs calls that are done
    server_idle(server)


def test_reasoning_without_a_message(server: Any, client: Any) -> None:
    """The output of an incomplete response may have reasoning only. Sent back, it is what the server would have kept:
    a message of the assistant without text."""
    options: dict[str, Any] = {**BASE, "model": "always", "max_output_tokens": 4}
    first = client.responses.create(**options)
    (thoughts,) = first.output
    assert (thoughts.type, first.status) == ("reasoning", "incomplete")
    question, more = {"role": "user", "content": "Is it?"}, {"role": "user", "content": "Sure?"}
    kept = client.responses.create(**{**options, "input": "Sure?"}, previous_response_id=first.id)
    whole = client.responses.create(**{**options, "input": [question, thoughts.model_dump(), more]})
    assert whole.usage.input_tokens == kept.usage.input_tokens
    last = client.responses.create(**{**options, "input": [question, thoughts.model_dump()]})
    lost = {"role": "assistant", "content": "", "reasoning_content": thoughts.content[0].text}
    assert decoded(server.state.responses.get(whole.id))[:3] == [question, lost, more]
    assert decoded(server.state.responses.get(last.id))[:2] == [question, lost]
    # no two messages of the assistant in a row: templates may refuse them
    said = {"role": "assistant", "content": "Yes."}
    for items, thought in (([said, thoughts.model_dump()], lost["reasoning_content"]),
                           ([thoughts.model_dump(), said, thoughts.model_dump()], 2 * lost["reasoning_content"])):
        joined = client.responses.create(**{**options, "input": [question, *items, more]})
        kept = decoded(server.state.responses.get(joined.id))
        assert kept[:3] == [question, {**said, "reasoning_content": thought}, more]


def test_memory_is_bounded() -> None:
    """The least recently used conversations go first; one that exceeds the limit alone is not kept."""
    memory = ResponseMemory(most=3, most_bytes=10_000)
    for at in range(5):
        memory.put(f"r{at}", encoded([{"role": "user", "content": str(at)}]))
    assert [memory.get(f"r{at}") is None for at in range(5)] == [True, True, False, False, False]
    memory.get("r2")
    memory.put("r5", bytes(8000))
    assert memory.get("r2") and memory.get("r3") is None and memory.get("r5")  # r3 was used least recently
    memory.put("big", bytes(9000))
    assert memory.get("big") and memory.get("r5") is None and memory.bytes == 9500
    memory.put("too big", bytes(9501))
    assert memory.get("too big") is None and memory.get("big")
