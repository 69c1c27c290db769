"""Tools in chats: input validation, calls that are valid by construction, completions and conversations with calls.

Small checkpoints with random weights write noise: their calls match the schemas only because the masks allow nothing
else. Other models have output that is known by token; their completions are compared exactly."""

import asyncio
import json
import pickle
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import chainmodels
import pytest
import toolmodels as tm

import mpool
from mpool.conversation import grammar, tool_calls, tool_formats, tool_grammar
from mpool.conversation.messages import check_messages
from mpool.conversation.tools import _call_id, complete_results
from tooldata import BOOK, NAMED, SCHEMAS, TOOLS, WORDS, WRITES

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
HOT: dict[str, Any] = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "max_tokens": 700}


def named(pool: mpool.Pool, folder: Path, template: str, key: str) -> str:
    """Registers the model under ``key`` with another template."""
    try:
        pool.get(key)
    except mpool.UnknownModel:
        pool.register(key, str(folder), chat_template=template)
    return key


def check_stream(stream: Any, done: mpool.Completion) -> None:
    """Checks that the chunks of a stream add up to the completion."""
    texts, calls = [""] * len(done.choices), [[] for _ in done.choices]  # type: list[str], list[list[list[str]]]
    for chunk in stream:
        texts[chunk.index] += chunk.text
        for delta in chunk.tool_calls:
            if delta.id is not None:
                assert delta.index == len(calls[chunk.index])
                calls[chunk.index].append([delta.id, str(delta.name), ""])
            calls[chunk.index][delta.index][2] += delta.arguments
    assert texts == [choice.text for choice in done.choices]
    assert calls == [[[call.id, call.name, call.raw] for call in choice.tool_calls] for choice in done.choices]


def check_calls(choice: Any) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    assert choice.finish_reason == "tool_calls" and choice.tool_calls and choice.stop is None
    for call in choice.tool_calls:
        assert json.loads(call.raw) == call.arguments and len(call.id) == 9 or call.id.startswith("functions.")
        jsonschema.validate(call.arguments, SCHEMAS[call.name])


# ---- valid by construction -------------------------------------------------------------------------------------------

@pytest.mark.sample(4)
@pytest.mark.parametrize("name", tm.TEMPLATES)
def test_required_calls_are_valid(pool: mpool.Pool, llama: Path, name: str) -> None:
    """With random weights and a high temperature, every completion is a valid call, streamed or not, in every format.
    """
    pytest.importorskip("llguidance")
    model = named(pool, llama, tm.TEMPLATES[name], f"tools-{name}")
    for choice in ("required", NAMED):
        options = {**HOT, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": 5, "n": 6}
        done = pool.chat(CHAT, model, **options)
        for one in done.choices:
            check_calls(one)
            assert one.text == "" and len(one.tool_calls) == 1
            assert choice == "required" or one.tool_calls[0].name == "get_weather"
        stream = pool.chat(CHAT, model, stream=True, logprobs=True, **options)
        check_stream(stream, done)
        again = stream.result()
        assert [one.tool_calls for one in again.choices] == [one.tool_calls for one in done.choices]
        assert len({call.id for one in done.choices for call in one.tool_calls}) == 6 or name == "kimi_k2"


def test_several_calls(pool: mpool.Pool, llama: Path) -> None:
    pytest.importorskip("llguidance")
    model = named(pool, llama, tm.KIMI_K2, "tools-kimi_k2")
    done = pool.chat(CHAT, model, tools=TOOLS, tool_choice="required", n=12, seed=1, **{**HOT, "max_tokens": 3000})
    assert max(len(one.tool_calls) for one in done.choices) > 1
    for one in done.choices:
        check_calls(one)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", tm.TEMPLATES)
def test_a_tool_needs_only_a_name(pool: mpool.Pool, llama: Path, name: str) -> None:
    """It may have 128 characters. DeepSeek V3.1 gets tools in a text of mpool's, the others in their template."""
    pytest.importorskip("llguidance")
    model, tool = named(pool, llama, tm.TEMPLATES[name], f"tools-{name}"), "f" * 128
    options: dict[str, Any] = {**HOT, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 1000}
    done = pool.chat(CHAT, model, tools=[{"type": "function", "function": {"name": tool}}], **options)
    assert [call.name for call in done.tool_calls] == [tool]


def test_calls_per_completion_are_limited(pool: mpool.Pool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar allows no call beyond the maximum, so that the completion ends."""
    pytest.importorskip("llguidance")
    model = named(pool, llama, tm.KIMI_K2, "tools-kimi_k2")
    options: dict[str, Any] = {**HOT, "tools": TOOLS, "tool_choice": "required", "n": 8, "seed": 2, "max_tokens": 3000}
    assert max(len(one.tool_calls) for one in pool.chat(CHAT, model, **options).choices) > 2
    for module in (tool_grammar, tool_calls):
        monkeypatch.setattr(module, "MAX_CALLS", 2)
    done = pool.chat(CHAT, model, **options)
    assert max(len(one.tool_calls) for one in done.choices) == 2
    assert {one.finish_reason for one in done.choices} == {"tool_calls"}
    assert {one.stop for one in done.choices if len(one.tool_calls) == 2} == {"max_tool_calls"}


F1, F2, G = ("f", '{"x": 1}'), ("f", '{"x": 2}'), ("g", "{}")
#: Calls that a model writes, the number that are kept, the limit.
LIMITS: list[tuple[list[tuple[str, str]], int, str | None]] = [
    ([F1, F1, G], 3, None), ([F1, G, F1, F2, F1, G, G], 7, None), ([F1] * 7 + [F2] * 7 + [F1] * 7, 21, None),
    ([F1] * 7 + [G] + [F1] * 7, 15, None), ([F1] * 9, 8, "repeated_tool_calls"), ([F1] * 8, 8, "repeated_tool_calls"),
    ([F2] + [F1, ("f", '{"x":1}')] * 9, 9, "repeated_tool_calls"),
    ([("f", '{"x": 1, "y": 2}'), ("f", '{"y": 2, "x": 1}')] * 6, 8, "repeated_tool_calls"),
    ([("f", '{"x": 1}'), ("f", '{"x": true}'), ("f", '{"x": 1.5}')] * 4, 12, None),
    ([("f", f'{{"x": {at}}}') for at in range(40)], 32, "max_tool_calls"),
    ([("f", f'{{"x": {at}}}') for at in range(24)] + [F1] * 9, 32, "repeated_tool_calls"),
    ([("f", f'{{"x": {at}}}') for at in range(31)] + [F1], 32, "max_tool_calls")]


@pytest.mark.parametrize("constrained", [True, False])
@pytest.mark.parametrize("calls, kept, limit", LIMITS)
def test_limits_of_calls_however_the_text_is_split(calls: list[tuple[str, str]], kept: int, limit: str | None,
                                                   constrained: bool) -> None:
    """Calls are kept up to the limit; text after it is dropped."""
    format = tool_formats.of_template(tm.HERMES)
    assert format is not None
    text = "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
                     for name, arguments in calls) + "\nand more text"
    for size in (1, 3, 7, 50, len(text)):
        parser = tool_calls.ToolCallParser(format, {"f": {}, "g": {}}, constrained, str)
        deltas: list[tool_calls.CallDelta] = []
        said = ""
        for at in range(0, len(text), size):
            more, new = parser.feed(text[at:at + size], at + size >= len(text))
            said, deltas = said + more, deltas + new
        assert (parser.limit, said) == (limit, "and more text" if limit is None else "")
        found = [(one.name, json.loads(one.raw)) for one in parser.calls]
        assert json.dumps(found) == json.dumps([(name, json.loads(raw)) for name, raw in calls[:kept]])
        assert ["".join(one.arguments for one in deltas if one.number == number) for number in range(kept)] \
            == [one.raw for one in parser.calls] and max(one.number for one in deltas) == kept - 1


def test_truncated_arguments(pool: mpool.Pool, llama: Path) -> None:
    pytest.importorskip("llguidance")
    model = named(pool, llama, tm.HERMES, "tools-hermes")
    options = {**HOT, "tools": [tm.WEATHER], "tool_choice": "required", "seed": 3}
    whole = pool.chat(CHAT, model, **options)
    seen = set()
    for tokens in range(1, len(whole.token_ids), 2):
        done = pool.chat(CHAT, model, **{**options, "max_tokens": tokens})
        assert done.finish_reason == "length" and "{" not in done.text and "</tool_call>" not in done.text
        assert whole.tool_calls[0].raw.startswith("".join(call.raw for call in done.tool_calls).rstrip("\ufffd"))
        for call in done.tool_calls:
            seen.add(call.arguments is None)
            assert call.arguments in (None, whole.tool_calls[0].arguments)
            assert ("tool_calls" in done.message) == (call.arguments is not None)
    assert True in seen


def test_strict_tools_and_schemas_that_cannot_be_used(pool: mpool.Pool, llama: Path) -> None:
    pytest.importorskip("llguidance")
    model = named(pool, llama, tm.HERMES, "tools-hermes")
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}}
    assert pool.chat(CHAT, model, tools=[odd], max_tokens=2).finish_reason
    with pytest.raises(mpool.InvalidArgument, match="the schema of odd cannot be used: .*format: .*odd") as no:
        pool.chat(CHAT, model, tools=[tm.CLOCK, {**odd, "strict": True}], max_tokens=2)
    assert "llguidance" not in no.value.message
    broken = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}}
    with pytest.raises(mpool.InvalidArgument, match="`tools`: the schema of odd cannot be used"):
        pool.chat(CHAT, model, tools=[{**broken, "strict": True}], max_tokens=2)
    for name, value in (("ignore_eos", True), ("min_tokens", 3)):
        with pytest.raises(mpool.InvalidArgument, match=f"`{name}` cannot be set together with tools"):
            pool.chat(CHAT, model, tools=TOOLS, **{name: value})


# ---- together with a response_format ---------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", tm.TEMPLATES)
def test_calls_or_json(pool: mpool.Pool, llama: Path, name: str) -> None:
    """With random weights and a high temperature, every completion is valid calls, or JSON that matches the schema."""
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema")
    model = named(pool, llama, tm.TEMPLATES[name], f"tools-{name}")
    tools = [tm.WEATHER, tm.CLOCK]
    kinds: set[bool] = set()
    for seed in range(8):
        chat = [{"role": "user", "content": f"{seed} or {seed * seed}?"}]
        options = {**HOT, "tools": tools, "response_format": BOOK, "parallel_tool_calls": False, "seed": seed, "n": 4}
        done = pool.chat(chat, model, **options)
        for one in done.choices:
            kinds.add(bool(one.tool_calls))
            if one.tool_calls:
                check_calls(one)
                assert one.text == "" and one.parsed is None
            else:
                assert one.finish_reason == "stop" and one.parsed == json.loads(one.text)
                jsonschema.validate(one.parsed, BOOK)
        check_stream(pool.chat(chat, model, stream=True, **options), done)
    assert kinds == {True, False}, kinds
    forced = pool.chat(CHAT, model, tool_choice="required", **options)
    assert all(one.tool_calls for one in forced.choices)


@pytest.mark.parametrize("name", tm.TEMPLATES)
def test_calls_or_a_regex(pool: mpool.Pool, llama: Path, name: str) -> None:
    pytest.importorskip("llguidance")
    model = named(pool, llama, tm.TEMPLATES[name], f"tools-{name}")
    options = {**HOT, "tools": [tm.CLOCK], "response_format": {"type": "regex", "regex": "[a-z/<]{1,9}"}, "n": 8}
    if name == "llama3":
        with pytest.raises(mpool.InvalidArgument, match="begins with {\"name\""):
            pool.chat(CHAT, model, **options)
        return
    done = pool.chat(CHAT, model, seed=1, **options)
    for one in done.choices:
        assert one.tool_calls or re.fullmatch("[a-z/<]{1,9}", one.text), one
    assert not all(one.tool_calls for one in done.choices)


@pytest.mark.parametrize("schema, may", [
    ({"type": "object"}, True), ({"type": "array"}, False), ({"type": "string"}, False), (True, True), ({}, True),
    ({"type": "object", "properties": {"name": {}}, "required": ["name"]}, True),
    ({"type": "object", "properties": {"a": {}, "name": {}}, "required": ["name"]}, True),
    ({"type": "object", "properties": {"a": {}, "name": {}}, "required": ["a"]}, False),
    ({"anyOf": [{"type": "array"}, {"type": "object"}]}, True),
    ({"oneOf": [{"type": "null"}, {"type": "array"}]}, False),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "array"}}}, False),
    ({"anyOf": [{"$ref": "#"}, {"type": "object"}]}, True),
    ({"type": "object", "properties": {"a": {}}, "required": ["a"], "allOf": [{"properties": {"b": {}}}]}, True),
    ({"properties": {"name": {}}, "required": ["name"], "anyOf": [
        {"type": "object", "properties": {"a": {}}, "required": ["a"]}]}, True),
    ({"type": "string", "anyOf": [{"maxLength": 3}], "properties": {"name": {}}}, False),
    ({"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"name": {}}, "type": "object"}}}, True)], ids=str)
def test_json_that_looks_like_a_call_without_marker(pool: mpool.Pool, llama: Path, schema: Any, may: bool) -> None:
    pytest.importorskip("llguidance")
    model = named(pool, llama, tm.TEMPLATES["llama3"], "tools-llama3")
    options: dict[str, Any] = {"tools": [tm.CLOCK], "max_tokens": 1, "response_format": {
        "type": "json_schema", "json_schema": {"schema": schema}}}
    if may:
        with pytest.raises(mpool.InvalidArgument, match="begins with {\"name\"") as caught:
            pool.chat(CHAT, model, **options)
        assert caught.value.key == model
    else:
        assert pool.chat(CHAT, model, **options).finish_reason == "length"
    assert pool.chat(CHAT, named(pool, llama, tm.HERMES, "tools-hermes"), **options).finish_reason == "length"


def test_alternatives_with_many_references_are_read_once() -> None:
    """Each of four definitions refers to the next one 400 times: 400 ** 4 ways to the last one."""
    definitions: dict[str, Any] = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 400} for i in range(4)}
    for last in ("array", "object"):
        schema = {"$ref": "#/$defs/d0", "$defs": {**definitions, "d4": {"type": last}}}
        began = time.process_time()
        assert tool_grammar._may_start_with_name(json.loads(json.dumps(schema))) == (last == "object")
        assert time.process_time() - began < 5
    assert tool_grammar._may_start_with_name({"$ref": "#x", "$defs": {"x": {"$anchor": "x", "type": "array"}}})


def test_unsupported_keywords_in_a_format_without_markers(pool: mpool.Pool, llama: Path) -> None:
    """As in other formats, a response_format and a strict tool refuse unsupported schema keywords."""
    pytest.importorskip("llguidance")
    model = named(pool, llama, tm.TEMPLATES["llama3"], "tools-llama3")
    odd = {"name": "odd", "parameters": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}}
    few: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
    options: dict[str, Any] = {"max_tokens": 1, "tools": [odd]}
    assert pool.chat(CHAT, model, response_format=few, **options).finish_reason == "length"
    with pytest.raises(mpool.InvalidArgument, match="`response_format`: .* cannot be used: uniqueItems"):
        pool.chat(CHAT, model, response_format={**few, "uniqueItems": True}, **options)
    with pytest.raises(mpool.InvalidArgument, match="the schema of odd cannot be used: .*uniqueItems"):
        pool.chat(CHAT, model, response_format=few, **{**options, "tools": [tm.CLOCK, {**odd, "strict": True}]})


def test_constants_that_look_like_references(pool: mpool.Pool, llama: Path) -> None:
    pytest.importorskip("llguidance")
    model = named(pool, llama, tm.TEMPLATES["llama3"], "tools-llama3")
    value = [{"$ref": "#/a"}, 3]
    schema = {"type": "array", "minItems": 3, "maxItems": 3, "items": False, "prefixItems": [
        {"const": value[0]}, {"enum": [value[0]]}, {"$ref": "#/$defs/const"}],
        "$defs": {"const": {"$ref": "#/$defs/enum"}, "enum": {"type": "object", "properties": {
            "default": {"$ref": "#/$defs/examples"}}, "required": ["default"], "additionalProperties": False},
            "examples": {"const": 3}}}
    answers = [one for seed in range(8) for one in pool.chat(
        [{"role": "user", "content": f"{seed} or {seed * seed}?"}], model, tools=[tm.CLOCK], response_format=schema,
        n=4, seed=seed, **HOT).choices if one.finish_reason == "stop"]
    assert answers and all(one.parsed == [value[0], value[0], {"default": 3}] for one in answers)


# ---- models whose output is known ------------------------------------------------------------------------------------

THINKS = [("Ċ", "<think>"), ("<think>", "Hm"), ("Hm", "</think>"), ("</think>", "<tool_call>"), *WRITES[3:]]
SAYS = [("assistant", "<|channel|>"), ("<|channel|>", "analysis", "commentary"), ("analysis", "<|message|>"),
        ("<|message|>", "Hm", "{}"), ("Hm", "<|end|>"), ("<|end|>", "<|start|>"), ("<|start|>", "assistant"),
        ("commentary", " to=functions."), (" to=functions.", "clock"), ("clock", "<|message|>"), ("{}", "<|call|>")]
GREEDY: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "max_tokens": 120, "compute": "float32",
                          "seed": 1}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            template, chains = {"writes": (tm.HERMES, WRITES), "thinks": (tm.THINKING, THINKS),
                                "repeats": (tm.HERMES, [*WRITES[:-1], ("</tool_call>", "<tool_call>")]),
                                "unclosed": (tm.THINKING, [*THINKS[:2], ("Hm", "<tool_call>"), *THINKS[4:]]),
                                "harmony": (tm.HARMONY, SAYS)}[name]
            made[name] = chainmodels.save(tmp_path_factory.mktemp(name), template, chains, WORDS)
        return made[name]

    return get


def prepared(pool: mpool.Pool, monkeypatch: pytest.MonkeyPatch, how: str) -> mpool.Pool:
    if how == "parsed":
        monkeypatch.setattr(grammar, "installed", lambda: False)
    elif how == "masked":
        pytest.importorskip("llguidance")
    return pool


@pytest.mark.parametrize("how", ["masked", "parsed"])
def test_a_call_after_text(pool: mpool.Pool, chain: Any, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The result is the same with masks and without llguidance."""
    pool = prepared(pool, monkeypatch, how)
    done = pool.chat(CHAT, chain("writes"), tools=[tm.CLOCK], **GREEDY)
    (call,) = done.tool_calls
    assert (done.text, done.finish_reason, call.name, call.arguments) == ("Wait.", "tool_calls", "clock", {})
    assert done.message == {"role": "assistant", "content": "Wait.", "tool_calls": [
        {"id": call.id, "type": "function", "function": {"name": "clock", "arguments": "{}"}}]}
    assert pickle.loads(pickle.dumps(done)) == done
    stream = pool.chat(CHAT, chain("writes"), tools=[tm.CLOCK], stream=True, logprobs=True, **GREEDY)
    chunks = list(stream)
    check_stream(chunks, done)
    assert not any("<" in chunk.text for chunk in chunks) and chunks[-1].finish_reason == "tool_calls"
    assert sum(len(chunk.logprobs or ()) for chunk in chunks) == done.usage.completion_tokens
    # in the next turn, the prompt contains the call and its result, and the next call has another id
    messages = [*CHAT, done.message, {"role": "tool", "tool_call_id": call.id, "content": "12:30"}]
    again = pool.chat(messages, chain("writes"), tools=[tm.CLOCK], **GREEDY)
    assert again.tool_calls[0].id != call.id and again.usage.prompt_tokens > done.usage.prompt_tokens
    assert pool.chat(messages, chain("writes"), tools=[tm.CLOCK], **GREEDY).tool_calls == again.tool_calls
    # a stop string ends the completion; nothing is called without tools or with tool_choice="none"
    cut = pool.chat(CHAT, chain("writes"), tools=[tm.CLOCK], stop="</tool_call>", **GREEDY)
    assert cut.finish_reason == "stop" and cut.stop == "</tool_call>"
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        plain = pool.chat(CHAT, chain("writes"), **options, **GREEDY)
        assert not plain.tool_calls and "<tool_call>" in plain.text and plain.finish_reason == "stop"


@pytest.mark.parametrize("how", ["masked", "parsed"])
def test_a_model_that_repeats_a_call_without_end(pool: mpool.Pool, chain: Any, monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture, how: str) -> None:
    """The completion ends after the eighth call, far from ``max_tokens``. One line of the log says so per choice, for a
    stream and its result together."""
    pool, model = prepared(pool, monkeypatch, how), chain("repeats")
    options: dict[str, Any] = {"tools": [tm.CLOCK], "n": 2, **GREEDY, "presence_penalty": 0.0, "max_tokens": 3000}
    done = pool.chat(CHAT, model, **options)
    for one in done.choices:
        assert (one.finish_reason, one.stop, len(one.tool_calls)) == ("tool_calls", "repeated_tool_calls", 8)
        assert len(one.token_ids) < 60 and one.text == "Wait."
    caplog.clear()
    stream = pool.chat(CHAT, model, stream=True, **options)
    chunks = list(stream)
    check_stream(chunks, done)
    ends = [(chunk.finish_reason, chunk.stop) for chunk in chunks if chunk.finish_reason]
    assert ends == [("tool_calls", "repeated_tool_calls")] * 2 and stream.result().choices == done.choices
    said = [record.getMessage() for record in caplog.records if record.name == "mpool"]
    assert len(said) == 2 and all("repeated_tool_calls" in line and "clock" in line for line in said)

    async def read() -> mpool.Completion:
        return await mpool.aio.chat(CHAT, model, pool=pool, **options)

    assert asyncio.run(read()).choices == done.choices


@pytest.mark.parametrize("how", ["masked", "parsed"])
@pytest.mark.parametrize("name", ["thinks", "unclosed", "harmony"])
def test_reasoning_before_calls(pool: mpool.Pool, chain: Any, monkeypatch: pytest.MonkeyPatch, name: str,
                                how: str) -> None:
    pool = prepared(pool, monkeypatch, how)
    done = pool.chat(CHAT, chain(name), tools=[tm.CLOCK], **GREEDY)
    assert (done.text, done.reasoning, done.finish_reason) == ("", "Hm", "tool_calls"), done
    assert [(call.name, call.arguments) for call in done.tool_calls] == [("clock", {})]
    check_stream(pool.chat(CHAT, chain(name), tools=[tm.CLOCK], stream=True, **GREEDY), done)
    if how == "masked":
        forced = pool.chat(CHAT, chain(name), tools=[tm.CLOCK], tool_choice="required", **GREEDY)
        assert [forced.reasoning, *(call.name for call in forced.tool_calls)] == ["Hm", "clock"], forced


@pytest.mark.parametrize("how", ["masked", "parsed"])
@pytest.mark.parametrize("name", ["writes", "thinks", "unclosed", "harmony"])
def test_stop_strings_end_no_call(pool: mpool.Pool, chain: Any, monkeypatch: pytest.MonkeyPatch, name: str,
                                  how: str) -> None:
    """Neither its markers nor its arguments; the text before it ends as ever."""
    pool = prepared(pool, monkeypatch, how)
    options: dict[str, Any] = {"tools": [tm.CLOCK], **GREEDY}
    whole = pool.chat(CHAT, chain(name), **options)
    kept = pool.chat(CHAT, chain(name), stop=["\n", "{", "clock", "<", "functions", '"'], **options)
    assert kept.choices == whole.choices and len(kept.tool_calls) == 1
    check_stream(pool.chat(CHAT, chain(name), stream=True, stop=["\n", "{", "clock", "<"], **options), kept)
    token = pool.tokenize("clock", chain(name))[-1:]
    assert pool.chat(CHAT, chain(name), stop_token_ids=token, **options).choices == whole.choices
    if name == "writes":
        cut = pool.chat(CHAT, chain(name), stop=["t.", "clock"], **options)
        assert (cut.text, cut.stop, cut.finish_reason, cut.tool_calls) == ("Wai", "t.", "stop", ())


def test_reasoning_between_control_tokens(pool: mpool.Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markers of reasoning are control tokens in Magistral and Ministral. A call ends the reasoning there, too."""
    monkeypatch.setattr(chainmodels, "SPECIAL", [*chainmodels.SPECIAL, "[THINK]", "[/THINK]"])
    begin, template = [("Ċ", "[THINK]"), ("[THINK]", "Hm")], tm.HERMES + "{# [THINK] #}"
    chains = {"closed": [*begin, ("Hm", "[/THINK]"), ("[/THINK]", "Wait."), ("Wait.", "<|return|>")],
              "unclosed": [*begin, ("Hm", "<tool_call>"), *WRITES[3:]]}
    models = {name: chainmodels.save(tmp_path / name, template, chain, WORDS) for name, chain in chains.items()}
    done = pool.chat(CHAT, models["closed"], **GREEDY)
    assert (done.reasoning, done.text) == ("Hm", "Wait.")
    called = pool.chat(CHAT, models["unclosed"], tools=[tm.CLOCK], **GREEDY)
    assert (called.reasoning, called.text, [one.name for one in called.tool_calls]) == ("Hm", "", ["clock"])


@pytest.mark.sample(4)
@pytest.mark.parametrize("words", ["<|end|>", "<|call|>", "<|channel|>final<|message|>", " to=functions.clock",
                                   "<|start|>assistant", "<think>", "</think>", "<tool_call>"])
@pytest.mark.parametrize("name", ["thinks", "harmony"])
def test_markers_in_a_formatted_response_are_text(pool: mpool.Pool, tmp_path: Path, name: str, words: str) -> None:
    """Inside the JSON of a response, also markers that end a message or begin another one are text."""
    pytest.importorskip("llguidance")
    value = {"a": f"x{words} {words}y", "b": None}
    template, chains = {
        "thinks": (tm.THINKING, [*THINKS[:2], ("Hm", "</think>"), ("</think>", "{")]),
        "harmony": (tm.HARMONY,
                    [("assistant", "<|channel|>"), ("<|channel|>", "final"), ("final", "<|message|>")])}[name]
    model = chainmodels.save(tmp_path, template, chains, (*WORDS, "final"))
    options = {"tools": [tm.CLOCK], "response_format": {"const": value}, **GREEDY, "max_tokens": 300}
    done = pool.chat(CHAT, model, **options)
    assert (json.loads(done.text), done.parsed, done.finish_reason) == (value, value, "stop"), done
    assert done.reasoning == ("Hm" if name == "thinks" else None) and not done.tool_calls
    check_stream(pool.chat(CHAT, model, stream=True, **options), done)


@pytest.mark.slow
def test_a_real_model_calls_the_right_functions() -> None:
    """Qwen2.5-Coder omits the markers of its format. It calls the functions that a question needs, and no others."""
    from realmodels import real_path

    def get_weather(city: str, days: int = 1) -> str:
        """The weather of a city.

        Args:
            city: its name.
            days: how many days.
        """
        return f"{city}: rain for {days} days"

    def add(a: float, b: float) -> float:
        """Adds two numbers."""
        return a + b

    with mpool.Pool() as pool:
        found = []
        asked = ("What is the weather in Paris for the next 3 days?", "What is 12.5 plus 30?", "Hello, who are you?")
        for text in asked:
            done = pool.chat([{"role": "user", "content": text}], real_path("qwen05"), tools=[get_weather, add],
                             temperature=0, max_tokens=120)
            found.append([(call.name, call.arguments) for call in done.tool_calls])
            assert bool(done.text) != bool(done.tool_calls)
    assert found == [[("get_weather", {"city": "Paris", "days": 3})], [("add", {"a": 12.5, "b": 30})], []]


def test_without_llguidance(pool: mpool.Pool, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = named(pool, llama, tm.HERMES, "tools-hermes")
    monkeypatch.setattr(grammar, "installed", lambda: False)
    assert pool.chat(CHAT, model, tools=TOOLS, max_tokens=2).usage.completion_tokens <= 2
    with pytest.raises(mpool.Unsupported, match="`tool_choice` requires a call, which needs the package") as caught:
        pool.chat(CHAT, model, tools=TOOLS, tool_choice="required")
    assert re.search(r"pip install .*(llguidance.*extra grammar of mpool|\.\[grammar\])", str(caught.value))
    assert caught.value.key == model
    with pytest.raises(mpool.Unsupported, match="`tools`: the tool f is strict, which needs"):
        pool.chat(CHAT, model, tools=[{"name": "f", "strict": True}])


def test_worker_processes_give_the_same_results(chain: Any) -> None:
    with mpool.Pool(mpool.PoolConfig(isolation="process")) as pool:
        done = pool.chat(CHAT, chain("writes"), tools=[tm.CLOCK], **GREEDY)
        assert (done.text, done.tool_calls[0].name) == ("Wait.", "clock")
        done = pool.chat(CHAT, chain("writes"), tools=[tm.CLOCK], tool_choice="required", **GREEDY)
        assert (done.text, done.tool_calls[0].name) == ("", "clock")


def test_call_ids() -> None:
    """Ids have nine letters and digits; they are equal for the same call and differ for others."""
    made = {_call_id(b"prompt", number) for number in range(1000)}
    assert len(made) == 1000 and all(len(one) == 9 and one.isalnum() for one in made)
    assert _call_id(b"prompt", 1) == _call_id(b"prompt", 1) != _call_id(b"another", 1)


# ---- input validation ------------------------------------------------------------------------------------------------

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize("options, message", [
    ({"tools": "f"}, "`tools` must be a list of tools, got 'f'"), ({"tools": {"name": "f"}},
     "`tools` must be .*, got dict"),
    ({"tools": [3]}, r"`tools\[0\]` must be a dict .*, got 3"), ({"tools": [None]},
     r"`tools\[0\]` must be .*, got None"),
    ({"tools": [{}]}, r"`tools\[0\]` must be .*, got no function"), ({"tools": [{"type": "retrieval"}]},
     "must be .*, got 'retrieval'"),
    ({"tools": [{"name": ""}]}, "name` must be 1 to 128 .*, got ''"), ({"tools": [{"name": "a b"}]},
     "name` must be .*, got 'a b'"),
    ({"tools": [{"name": "x" * 129}]}, "must be 1 to 128"), ({"tools": [{"name": '"}<|im_end|>'}]}, "must be 1 to 128"),
    ({"tools": [FUNCTION, FUNCTION]}, r"tools\[1\].function.name` must be unique among the tools, got 'f'"),
    ({"tools": [{"name": "f", "description": 3}]}, "description` must be a string, got 3"),
    ({"tools": [{"name": "f", "strict": "yes"}]}, "strict` must be True or False, got 'yes'"),
    ({"tools": [{"name": "f", "parameters": []}]}, "parameters` must be the JSON schema of an object.*, got list"),
    ({"tools": [{"name": "f", "parameters": {"type": "string"}}]}, "must be the JSON schema of an object"),
    ({"tools": [{"name": "f", "parameters": {"properties": []}}]}, "properties` must be .*, got list"),
    ({"tools": [{"name": "f", "parameters": {"required": "a"}}]}, "required` must be a list, got 'a'"),
    ({"tools": [{"name": "f", "parameters": {"x": {1, 2}}}]}, "must be plain JSON, got"),
    ({"tools": [{"name": "f", "parameters": {"x": float("nan")}}]}, "must be plain JSON, got"),
    ({"tools": [{"name": "f", "description": "\ud800"}]}, "must be plain JSON, got"),
    ({"tools": [lambda city: city]}, "Pass a function without a name as a dict"),
    ({"tools": [dict]}, "got the class dict"),
    ({"tools": TOOLS, "tool_choice": "maybe"}, "`tool_choice` must be \"auto\".*, got 'maybe'"),
    ({"tools": TOOLS, "tool_choice": {"type": "x"}}, "`tool_choice` must be .*, got dict"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "`tool_choice` must be the name of a tool: .*, got 'g'"),
    ({"tool_choice": "required"}, "without tools"), ({"tool_choice": NAMED}, "without tools"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "`parallel_tool_calls` must be True or False, got 1"),
    ({"tools": TOOLS, "response_format": {"type": "grammar", "grammar": "start: /a/"}},
     "`response_format` must be JSON or a regex when tools are given, got a grammar"),
    ({"tools": TOOLS, "response_format": {"type": "nothing"}}, "`response_format.type` must be .*, got 'nothing'"),
    ({"tools": TOOLS, "response_format": {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}},
     "`response_format`: .* cannot be used: properties.a.\\$ref"),
    ({"tools": TOOLS, "response_format": {"type": "regex", "regex": "(a"}}, "`response_format` cannot be used"),
])
def test_invalid_tools(pool: mpool.Pool, llama: Path, options: dict[str, Any], message: str) -> None:
    model = named(pool, llama, tm.HERMES, "tools-hermes")
    with pytest.raises(mpool.InvalidArgument, match=message) as caught:
        pool.chat(CHAT, model, **options)
    assert caught.value.key == model


def test_too_many_or_too_large_tools(pool: mpool.Pool, llama: Path) -> None:
    model = named(pool, llama, tm.HERMES, "tools-hermes")
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(70):
        deep = {"items": deep}
    many = [{"name": f"f{at}"} for at in range(129)]
    wide = {"enum": [0] * 70_000}
    for tools, message in ((many, "`tools` must be at most 128 tools, got 129 tools"),
                           ([{"name": "f", "description": "x" * 300_000}], "characters as JSON"),
                           ([{"name": "f", "parameters": {"type": "object", "x": wide}}],
                            r"tools-hermes: tools\[0\] has more than 65,536 values"),
                           ([{"name": "f", "parameters": {"type": "object", "x": deep}}],
                            r"tools-hermes: tools\[0\] is nested more than")):
        with pytest.raises(mpool.LimitError, match=message) as caught:
            pool.chat(CHAT, model, tools=tools)
        assert caught.value.param == "tools"
    assert pool.chat(CHAT, model, tools=[{"name": f"f{at}"} for at in range(128)], max_tokens=1).finish_reason


def test_raw_prompts_and_models_without_tools(pool: mpool.Pool, llama: Path) -> None:
    for name, value in (("tools", TOOLS), ("tool_choice", "auto"), ("parallel_tool_calls", True)):
        with pytest.raises(mpool.InvalidArgument, match=f"`{name}` applies only to `chat`") as refused:
            pool.generate("x", llama, **{name: value})
        assert refused.value.param == name
    with pytest.raises(mpool.Unsupported, match="does not support tools") as caught:
        pool.chat(CHAT, named(pool, llama, tm.PLAIN, "tools-plain"), tools=TOOLS)
    assert caught.value.key == "tools-plain"
    strange = "{% if tools %}{{ tools | tojson }}{% endif %}" + tm.PLAIN
    with pytest.raises(mpool.Unsupported, match="the tool-call format of this model is not supported"):
        pool.chat(CHAT, named(pool, llama, strange, "tools-strange"), tools=TOOLS)


@pytest.mark.parametrize("calls, message", [
    ("x", "tool_calls` must be a list of calls, got 'x'"),
    ([3], r"tool_calls\[0\]` must be .*, got 3"),
    ([{}], r"tool_calls\[0\]` must be .*, got dict"),
    ([{"function": {"name": 3}}], "must be .*, got dict"),
    ([{"function": {"name": "f", "arguments": "{"}}], "arguments` must be .*, got '{'"),
    ([{"function": {"name": "f", "arguments": "[1]"}}],
     r"arguments` must be a dict, or the JSON text of one, got '\[1\]'"),
    ([{"function": {"name": "f", "arguments": 3}}], "arguments` must be .*, got 3"),
    ([{"id": 3, "function": {"name": "f"}}], r"tool_calls\[0\].id` must be a string, got 3"),
])
def test_invalid_calls_in_messages(pool: mpool.Pool, llama: Path, calls: Any, message: str) -> None:
    model = named(pool, llama, tm.HERMES, "tools-hermes")
    with pytest.raises(mpool.InvalidArgument, match=r"messages\[1\].*" + message):
        pool.chat([*CHAT, {"role": "assistant", "content": None, "tool_calls": calls}], model)
    with pytest.raises(mpool.InvalidArgument, match=r"`messages\[0\].role` must be 'assistant' when .*, got 'user'"):
        pool.chat([{**CHAT[0], "tool_calls": [{"function": {"name": "f"}}]}], model)


@pytest.mark.parametrize("name", ["tool_call_id", "name", "tool_name"])
def test_invalid_results_in_messages(pool: mpool.Pool, llama: Path, name: str) -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(mpool.InvalidArgument, match=rf"`messages\[2\].{name}` must be a string, got list"):
        pool.chat([*CHAT, calls, {"role": "tool", "content": "1", name: ["f"]}],
                  named(pool, llama, tm.HERMES, "tools-hermes"))


def test_formats_of_earlier_calls(pool: mpool.Pool, llama: Path) -> None:
    """Calls in the formats of OpenAI, Ollama and mpool yield the same prompt."""
    model = named(pool, llama, tm.HERMES, "tools-hermes")
    own = mpool.results.ToolCall("abcdefghi", "clock", {"a": 1}, '{"a": 1}')
    prompts = set()
    for call in ({"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}},
                 {"function": {"name": "clock", "arguments": {"a": 1}}}, {"name": "clock", "arguments": {"a": 1}}, own):
        for said in ({"tool_call_id": "abcdefghi"}, {"name": "clock"}, {"tool_name": "clock"}, {}):
            done = pool.chat([*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]},
                              {"role": "tool", "content": "12:30", **said}], model, max_tokens=1)
            prompts.add(done.usage.prompt_tokens)
    assert len(prompts) == 1


def test_ids_and_names_of_earlier_calls_and_results() -> None:
    """Templates read the id, the name, or both. Given ones are kept, and a result gets what it lacks from its call."""
    calls = [{"id": "abcdefghi", "name": "clock"}, {"name": "weather"}, {"name": "weather"}]
    results = [{"tool_name": "weather"}, {"tool_call_id": "abcdefghi"}, {}, {"tool_call_id": "other"}]
    found = check_messages([*CHAT, {"role": "assistant", "content": "", "tool_calls": calls},
                            *({"role": "tool", "content": "1", **one} for one in results)])
    complete_results(found)
    ids = [call["id"] for call in found[1]["tool_calls"]]
    assert ids == ["abcdefghi", _call_id(b"1", 0), _call_id(b"2", 0)] and ids[1] != ids[2]
    assert [(one["tool_call_id"], one.get("name")) for one in found[2:]] == [
        (ids[1], "weather"), (ids[0], "clock"), (ids[2], "weather"), ("other", None)]


def test_calling_a_function(pool: mpool.Pool, llama: Path) -> None:
    """The example of the README: call a function with the arguments of the model's call."""
    pytest.importorskip("llguidance")

    def get_time(city: Literal["Rome", "Oslo"], hours: Sequence[int]) -> str:
        """The time."""
        return f"{city} {len(hours)}"

    model = named(pool, llama, tm.HERMES, "tools-hermes")
    done = pool.chat(CHAT, model, tools=[get_time], tool_choice="required", parallel_tool_calls=False, seed=2, **HOT)
    arguments = done.tool_calls[0].arguments
    assert done.finish_reason == "tool_calls" and arguments is not None
    assert get_time(**arguments).startswith(("Rome", "Oslo"))


@pytest.mark.parametrize("reference, fit", [
    ({"$ref": "#/$defs/wide", "description": "Again."}, [{}, {"n149": 1}]),
    ({"allOf": [{"$ref": "#/$defs/wide"}]}, [{}, {"n149": 1}]),
    ({"$ref": "#/$defs/wide", "type": "object"},  # too many to enforce
     [{}, {"n149": 1}, {"n149": "a"}, {"next": {"next": {}}}]),
    ({"$ref": "#/$defs/deep"}, [{}, {"next": {"next": {}}}])], ids=str)
def test_size_of_gemma4_grammars(reference: dict[str, Any], fit: list[Any]) -> None:
    """Many references to a schema with many properties do not multiply, and schemas are not followed without end.
    ``fit``: values of the last reference that the grammar accepts."""
    llguidance = pytest.importorskip("llguidance")
    wide = {"type": "object", "properties": {**{f"n{i}": True for i in range(149)}, "n149": {"type": "integer"}}}
    deep = {"type": "object", "allOf": [{"properties": {"next": {"$ref": "#/$defs/deep"}}},
                                        {"properties": {"next": {"description": "The next one."}}}]}
    whole = {"type": "object", "properties": {f"p{i}": dict(reference) for i in range(180)},
             "$defs": {"wide": wide, "deep": deep}}
    functions = [tool_formats.Function("f", whole), tool_formats.Function("g", whole)]
    made = tool_grammar.build_grammar(tool_formats.GEMMA4, functions, forced=True, single=True, splitter=None)
    assert made.lark.count("\n") < 11_000
    start = llguidance.LLMatcher(llguidance.LLTokenizer("byte"),
                                 llguidance.LLMatcher.grammar_from_lark(made.lark), log_level=0)
    assert not start.is_error(), start.get_error()
    for value in [{}, {"n149": 1}, {"n149": "a"}, {"next": {"next": {}}}]:  # type: dict[str, Any]
        completion = tool_formats.GEMMA4.render([("f", {"p179": value})])
        matcher = start.deep_copy()
        accepted = all(matcher.try_consume_tokens([byte]) for byte in completion.encode())
        assert accepted == (value in fit), value


@pytest.mark.parametrize("format", [tool_formats.GEMMA4, tool_formats.QWEN3_CODER], ids=lambda format: format.name)
def test_size_of_grammars_of_texts(format: tool_formats.ToolFormat) -> None:
    """Schemas of texts that refer to each other several times do not multiply."""
    defs: dict[str, Any] = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"} for _ in range(14)]} for i in range(4)}
    whole = {"type": "object", "properties": {"p": {"$ref": "#/$defs/a0"}},
             "$defs": {**defs, "a4": {"type": "string", "maxLength": 5}}}
    made = tool_grammar.build_grammar(format, [tool_formats.Function("f", whole)], forced=True, single=True,
                                      splitter=None)
    assert len(made.lark) < 400_000


@pytest.mark.parametrize("end, copies", [("b", 0), ("a~0b", 1)])
def test_arguments_have_the_definitions_that_they_need(end: str, copies: int) -> None:
    """An argument that needs no definition has none. One with an escaped reference has all."""
    llguidance = pytest.importorskip("llguidance")
    defs: dict[str, Any] = {"a": {"type": "array", "items": {"$ref": f"#/$defs/{end}"}}, end.replace("~0", "~"): {
        "type": "integer"}, "wide": {"type": "object", "properties": {f"wide{i}": True for i in range(200)}}}
    whole: dict[str, Any] = {"type": "object", "properties": {
        "p0": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "integer"}]}, "p1": {"type": "number"}}, "$defs": defs}
    made = tool_grammar.build_grammar(tool_formats.QWEN3_CODER, [tool_formats.Function("f", whole)], forced=True,
                                      single=True, splitter=None)
    assert made.lark.count("wide199") == copies
    tokenizer = llguidance.LLTokenizer("byte")
    start = llguidance.LLMatcher(tokenizer, made.lark)
    for value, allowed in (("[1, 2]", True), ("[true]", False)):
        matcher = start.deep_copy()
        call = f"<tool_call>\n<function=f>\n<parameter=p0>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert all(matcher.try_consume_tokens([byte]) for byte in call.encode()) == allowed
