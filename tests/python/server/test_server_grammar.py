"""Structured output over HTTP: `response_format` of OpenAI's protocol, `format` of Ollama's protocol, and the fields of
llama.cpp's server and of vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool
from servers import Raw, ask, serving

pytest.importorskip("llguidance")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "собака"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30},
                   "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}},
    "required": ["kind", "age", "tags"], "additionalProperties": False,
}
#: A schema whose automaton has too many states for the limit that tests set.
COMPLEX = {"type": "string", "pattern": "^(.*a.{9})$"}
CHAT = [{"role": "user", "content": "Describe a pet."}]
HOT = {"temperature": 1.5, "seed": 4}


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[Any]:
    with serving([f"llama={llama}"]) as made:
        yield made


def validate(text: str) -> None:
    pytest.importorskip("jsonschema").validate(json.loads(text), SCHEMA)


def test_openai_schema_agrees_with_the_library(server: Any, llama: Path) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
    status, found = ask(server, "/v1/chat/completions", {"model": "llama", "messages": CHAT, "n": 2, "max_tokens": 200,
                                                         "response_format": wanted, **HOT})
    assert status == 200
    for choice in found["choices"]:
        assert choice["finish_reason"] == "stop"
        validate(choice["message"]["content"])
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        done = pool.chat(CHAT, llama, n=2, max_tokens=200, response_format=wanted, **HOT)
    assert [one.text for one in done.choices] == [one["message"]["content"] for one in found["choices"]]


def test_keywords_that_cannot_be_enforced_are_ignored_unless_strict(server: Any) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}
    options = {"model": "llama", "max_tokens": 60, **HOT}

    def chat(**strict: Any) -> tuple[int, Any]:
        return ask(server, "/v1/chat/completions", {**options, "messages": CHAT, "response_format": {
            "type": "json_schema", "json_schema": {"name": "x", "schema": schema, **strict}}})

    for strict in ({}, {"strict": False}, {"strict": None}):
        status, found = chat(**strict)
        assert status == 200 and len(json.loads(found["choices"][0]["message"]["content"])) <= 2
    status, found = chat(strict=True)
    assert status == 400 and "uniqueItems" in found["error"]["message"]
    status, found = ask(server, "/api/chat", {"model": "llama", "messages": CHAT, "format": schema, "stream": False,
                                              "options": {"num_predict": 60, **HOT}})
    assert status == 200 and len(json.loads(found["message"]["content"])) <= 2


def test_openai_client_streams_structured_output(server: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    chunks = client.chat.completions.create(
        model="llama", messages=CHAT, stream=True, max_tokens=200, response_format={
            "type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}, **HOT)
    validate("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))
    found = client.chat.completions.create(model="llama", messages=CHAT, max_tokens=40,
                                           response_format={"type": "json_object"}, **HOT)
    assert (found.choices[0].message.content or "").lstrip().startswith("{")


def test_ollama_format(server: Any) -> None:
    options = {"num_predict": 200, **HOT}
    status, found = ask(server, "/api/chat", {"model": "llama", "messages": CHAT, "format": SCHEMA, "stream": False,
                                              "options": options})
    assert status == 200
    validate(found["message"]["content"])
    status, found = ask(server, "/api/generate", {"model": "llama", "prompt": "A pet:", "raw": True, "format": SCHEMA,
                                                  "stream": False, "options": options})
    assert status == 200
    validate(found["response"])
    status, found = ask(server, "/api/generate", {"model": "llama", "prompt": "A pet:", "format": "json",
                                                  "stream": False, "options": options})
    assert status == 200 and found["response"].lstrip().startswith("{")


DEEP: dict[str, Any] = {"type": "string"}
for _ in range(70):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize("wanted", [
    {"type": "regex", "regex": "(a"}, {"type": "grammar", "grammar": "start: ("}, {"type": "regex"},
    {"type": "object"}, {},
    {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": 3}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "wat"}, "strict": True}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://example.org/x"}, "strict": True}},
    {"type": "json_schema", "json_schema": {"schema": {"enum": ["x" * 70_000]}}},
    {"type": "json_schema", "json_schema": {"schema": DEEP}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(a"}, "strict": True}},
    {"type": "json_object", "schema": 3}, {"type": "json_object", "schema": {"$ref": "#"}},
    {"type": "json_schema", "json_schema": {"schema": False}},
], ids=lambda wanted: str(wanted)[:60])
@pytest.mark.parametrize("stream", [False, True])
def test_invalid_response_formats_are_refused(server: Any, wanted: dict[str, Any], stream: bool) -> None:
    status, found = ask(server, "/v1/chat/completions", {"model": "llama", "messages": CHAT, "stream": stream,
                                                         "response_format": wanted})
    assert status == 400 and found["error"]["code"] in ("unsupported_parameter", "invalid_value")
    assert found["error"]["param"] == "response_format"
    assert ask(server, "/v1/chat/completions", {"model": "llama", "messages": CHAT, "max_tokens": 1})[0] == 200


#: Constraint of a completion in the fields of llama.cpp's server, of vLLM and of mpool, and the completions it allows.
CONSTRAINTS: list[tuple[dict[str, Any], str]] = [
    ({"grammar": 'root ::= "yes" | "no"'}, "yes|no"),
    ({"grammar": 'start: "yes" | "no"'}, "yes|no"),
    ({"json_schema": {"enum": ["a", "b"]}}, '"a"|"b"'),
    ({"guided_json": {"enum": ["a", "b"]}}, '"a"|"b"'),
    ({"guided_json": '{"enum": ["a", "b"]}'}, '"a"|"b"'),
    ({"guided_regex": "[0-9]{3}x"}, "[0-9]{3}x"),
    ({"guided_choice": ["a.b", "c|d", "e f-g"]}, r"a\.b|c\|d|e f-g"),
    ({"guided_grammar": 'root ::= "maybe"'}, "maybe"),
    ({"structured_outputs": {"choice": ["positive", "negative"]}}, "positive|negative"),
    ({"structured_outputs": {"regex": "a{4}", "disable_any_whitespace": True}}, "a{4}"),
    ({"structured_outputs": {"json": {"enum": ["a"]}, "json_object": False}}, '"a"'),
    ({"structured_outputs": {"grammar": 'root ::= "x"'}, "response_format": {"type": "text"}}, "x"),
    ({"response_format": {"type": "regex", "regex": "a{4}"}}, "a{4}"),
    ({"response_format": {"type": "grammar", "grammar": 'root ::= "x"'}}, "x"),
]


@pytest.mark.parametrize(("fields", "allowed"), CONSTRAINTS, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_constraints_of_other_servers(server: Any, path: str, fields: dict[str, Any], allowed: str) -> None:
    given = {"messages": CHAT} if "chat" in path else {"prompt": "A pet:"}
    status, found = ask(server, path, {"model": "llama", "max_tokens": 60, **given, **fields, **HOT})
    choice = found["choices"][0]
    text = choice["message"]["content"] if "chat" in path else choice["text"]
    assert status == 200 and re.fullmatch(allowed, text) and choice["finish_reason"] == "stop"


@pytest.mark.parametrize(("fields", "param"), [
    ({"grammar": "root ::= ("}, "grammar"), ({"grammar": ""}, "grammar"),
    ({"guided_regex": "(a"}, "guided_regex"), ({"guided_json": "[1"}, "guided_json"),
    ({"guided_json": "[]"}, "guided_json"), ({"guided_json": "[" * 5000}, "guided_json"),
    ({"guided_choice": [""]}, "guided_choice[0]"), ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": ["x" * 70_000]}, "guided_choice"), ({"json_schema": {"$ref": "#"}}, "json_schema"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"structured_outputs": {"choice": [3]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex"),
    ({"grammar": 'root ::= "x"', "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "grammar": 'root ::= "x"'}, "grammar"),
    ({"structured_outputs": {"regex": "a", "disable_additional_properties": True}}, "structured_outputs"),
], ids=lambda value: str(value)[:60])
def test_invalid_constraints_are_refused(server: Any, fields: dict[str, Any], param: str) -> None:
    status, found = ask(server, "/v1/completions", {"model": "llama", "prompt": "A pet:", "max_tokens": 4, **fields})
    assert status == 400 and found["error"]["param"] == param
    assert f"`{param}" in found["error"]["message"]


#: Keys that a format of each type does not have.
UNKNOWN_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"type": "text", "schema": {}}, "schema"), ({"type": "json_object", "strict": True}, "strict"),
    ({"type": "json_object", "json_schema": {"schema": {}}}, "json_schema"),
    ({"type": "json_schema", "json_schema": {"schema": {}}, "max_length": 3}, "max_length"),
    ({"type": "json_schema", "json_schema": {"schema": {}, "maxLength": 3}}, "maxLength"),
    ({"type": "regex", "regex": "a", "flags": "i"}, "flags"),
    ({"type": "grammar", "grammar": 'root ::= "x"', "syntax": 1}, "syntax")]


@pytest.mark.parametrize(("wanted", "key"), UNKNOWN_KEYS, ids=lambda value: str(value)[:60])
def test_unknown_keys_of_formats_are_named(server: Any, wanted: dict[str, Any], key: str) -> None:
    for path, given in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": "x"})):
        status, found = ask(server, path, {"model": "llama", "max_tokens": 2, "response_format": wanted, **given})
        assert status == 400 and found["error"]["param"] == "response_format"
        assert found["error"]["message"].count("`") == 2 and f".{key}`" in found["error"]["message"]  # named once
    with pytest.raises(mpool.InvalidArgument) as caught:
        server.state.pool.generate("x", "llama", response_format=wanted)
    assert caught.value.param.startswith("response_format") and caught.value.param.endswith("." + key)


def test_json_object_with_a_schema(server: Any) -> None:
    """As llama.cpp's server and llama-cpp-python read it."""
    wanted = {"type": "json_object", "schema": SCHEMA}
    for path, given in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": "x"})):
        status, found = ask(server, path, {"model": "llama", "max_tokens": 200, "response_format": wanted, **given,
                                           **HOT})
        choice = found["choices"][0]
        assert status == 200 and choice["finish_reason"] == "stop"
        validate(choice["message"]["content"] if "chat" in path else choice["text"])
    validate(server.state.pool.generate("x", "llama", response_format=wanted, max_tokens=200, **HOT).text)
    with pytest.raises(mpool.InvalidArgument, match=r"`response_format.schema` must be a JSON schema, got 3"):
        server.state.pool.generate("x", "llama", response_format={"type": "json_object", "schema": 3})


@pytest.mark.parametrize("schema", [{"enum": ["x" * 70_000]}, {"$ref": "#"}], ids=str)
def test_anthropic_errors_name_the_format(server: Any, schema: Any) -> None:
    status, found = ask(server, "/v1/messages", {
        "model": "llama", "messages": CHAT, "max_tokens": 2,
        "output_config": {"format": {"type": "json_schema", "schema": schema}}})
    assert status == 400 and "`output_config.format`" in found["error"]["message"], found


def test_too_complex_schema(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names `response_format`; it is not the error for a body that is too long."""
    import llguidance

    limits = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **more: limits(**more, max_lexer_states=20))
    wanted = {"type": "json_schema", "json_schema": {"schema": COMPLEX}}
    body = {"model": "llama", "messages": CHAT, "response_format": wanted, "max_tokens": 200, **HOT}
    status, found = ask(server, "/v1/chat/completions", body)
    assert (status, found["error"]["code"], found["error"]["param"]) == (400, "invalid_value", "response_format"), found
    assert "too complex" in found["error"]["message"]


@pytest.mark.parametrize(("path", "field", "body"), [
    ("/v1/chat/completions", "response_format", {
        "messages": CHAT, "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"schema": COMPLEX}}}),
    ("/v1/responses", "text.format", {"input": "x", "max_output_tokens": 200, "text": {
        "format": {"type": "json_schema", "name": "a", "schema": COMPLEX}}}),
    ("/v1/messages", "output_config.format", {"messages": CHAT, "max_tokens": 200, "output_config": {
        "format": {"type": "json_schema", "schema": COMPLEX}}}),
    ("/api/chat", "format", {"messages": CHAT, "format": COMPLEX, "options": {"num_predict": 200, **HOT}}),
    ("/api/generate", "format", {"prompt": "x", "format": COMPLEX, "options": {"num_predict": 200, **HOT}}),
], ids=lambda value: value if isinstance(value, str) else "")
def test_an_error_of_a_stream_names_the_field(server: Any, monkeypatch: pytest.MonkeyPatch, path: str, field: str,
                                              body: dict[str, Any]) -> None:
    """The error is the last event of a response whose status is already sent."""
    import llguidance

    from mpool.server import streaming

    limits = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", lambda **more: limits(**more, max_lexer_states=20))
    monkeypatch.setattr(streaming, "HEAD_TIMEOUT", 0.0)
    more = {} if path.startswith("/api/") else HOT
    with Raw(server, 60) as raw:
        raw.request(path, json.dumps({"model": "llama", "stream": True, **more, **body}).encode())
        status, _, data = raw.answer()
    last = data.decode().strip().split("\n")[-1]
    assert status == 200 and f"`{field}`" in last and "too complex" in last, data[-500:]
    assert field == "response_format" or "response_format" not in last, last
