"""Values that clients send although the protocols do not have them, or that this server can serve in part only."""

from __future__ import annotations

import base64
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm
from PIL import Image

from servers import Raw, ask, serving
from test_server_editors import FIM, MIDDLE
from tooldata import WORDS, WRITES

pytest.importorskip("llguidance")

CHAT: list[Any] = [{"role": "user", "content": "Is it?"}]
CHATS, TEXTS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COUNT, OLLAMA, GENERATE, FILL_IN = "/v1/messages/count_tokens", "/api/chat", "/api/generate", "/v1/fim/completions"
with io.BytesIO() as _file:
    Image.new("RGB", (8, 8), "red").save(_file, "PNG")
    IMAGE = "data:image/png;base64," + base64.b64encode(_file.getvalue()).decode()


@pytest.fixture(scope="module")
def folders(llama: Path, llava: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    models = {"writes": (tm.HERMES, WRITES, WORDS), "coder": ("{{ messages[0].content }}", MIDDLE, FIM)}
    made = {name: chainmodels.save(tmp_path_factory.mktemp(name), *model) for name, model in models.items()}
    return [f"{name}={folder}" for name, folder in {"llama": llama, "llava": llava, "bert": bert, **made}.items()]


@pytest.fixture(scope="module")
def server(folders: list[str]) -> Iterator[Any]:
    with serving(folders) as made:
        yield made


@pytest.fixture(scope="module")
def strict(folders: list[str]) -> Iterator[Any]:
    with serving(folders, strict=True) as made:
        yield made


def post(server: Any, path: str, body: dict[str, Any]) -> tuple[int, str | None, Any]:
    """Return the status, the header ``x-mpool-ignored`` and the response."""
    with Raw(server, 60) as raw:
        status, headers, data = raw.request(path, json.dumps(body).encode()).response()
    return status, headers.get("x-mpool-ignored"), json.loads(data)


def text_of(found: Any) -> str:
    """Return the text of a response of any protocol."""
    if "choices" in found:
        choice = found["choices"][0]
        return choice["text"] if "text" in choice else choice["message"]["content"]
    if "output" in found:
        return found["output"][0]["content"][0]["text"]
    return found["content"][0]["text"] if "content" in found else found.get("response") or found["message"]["content"]


BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"model": "llama", "messages": CHAT, "max_tokens": 12},
    TEXTS: {"model": "llama", "prompt": "The cat", "max_tokens": 12},
    RESPONSES: {"model": "llama", "input": "Is it?", "max_output_tokens": 12},
    MESSAGES: {"model": "llama", "messages": CHAT, "max_tokens": 12},
    OLLAMA: {"model": "llama", "messages": CHAT, "stream": False, "options": {"num_predict": 12}},
    GENERATE: {"model": "llama", "prompt": "The cat", "stream": False, "options": {"num_predict": 12}},
}


def with_options(path: str, **options: Any) -> dict[str, Any]:
    body = BODIES[path]
    return {**body, "options": {**body["options"], **options}} if "options" in body else {**body, **options}


@pytest.mark.parametrize("path", BODIES)
def test_top_p_of_0_is_the_most_likely_token(server: Any, path: str) -> None:
    """Clients have a slider from 0 to 1. The temperature would otherwise change the text."""
    greedy = text_of(post(server, path, with_options(path, temperature=0))[2])
    texts = set()
    for seed in (1, 2, 3):
        extra = {"seed": seed}
        status, ignored, found = post(server, path, with_options(path, temperature=2, top_p=0, **extra))
        assert (status, ignored) == (200, None), found
        texts.add(text_of(found))
    assert texts == {greedy}
    assert len({text_of(post(server, path, with_options(path, temperature=2, seed=seed))[2]) for seed in (1, 2, 3)}) > 1


def test_whole_numbers_with_a_decimal_point(server: Any, strict: Any) -> None:
    for made in (server, strict):
        status, ignored, found = post(made, OLLAMA, with_options(OLLAMA, num_predict=3.0, top_k=1.0, num_ctx=512.00))
        assert (status, ignored, found["eval_count"]) == (200, None, 3), found
        status, _, found = post(made, CHATS, with_options(CHATS, max_tokens=2.0, temperature=0))
        assert status == 200 and found["usage"]["completion_tokens"] == 2
    for value in (2.5, "2.0", -2.0):
        status, _, found = post(server, CHATS, with_options(CHATS, max_tokens=value))
        assert status == 400 and "`max_tokens` must be an integer" in found["error"]["message"], found


@pytest.mark.parametrize("path, field", [("/api/embed", "input"), ("/api/embeddings", "prompt")])
def test_options_of_embeddings(server: Any, strict: Any, path: str, field: str) -> None:
    """Ollama's clients send ``num_ctx`` with embeddings."""
    plain = post(server, path, {"model": "bert", field: "A cat."})
    body = {"model": "bert", field: "A cat.", "options": {"num_ctx": 4, "temperature": 0.5}}
    status, ignored, found = post(server, path, body)
    assert (status, ignored) == (200, "options.num_ctx"), found
    assert found.get("embeddings") == plain[2].get("embeddings") and found.get("embedding") == plain[2].get("embedding")
    status, _, found = post(strict, path, body)
    assert status == 400 and "`options.num_ctx` limits completions only" in found["error"], found


def test_control_tokens_of_raw_prompts(server: Any) -> None:
    """A client that sends ``raw`` writes the chat template itself. In other prompts the name of a token is text."""
    name = chainmodels.SPECIAL[0]
    counts = [post(server, GENERATE, {"model": "coder", "prompt": name + "a", "raw": raw, "stream": False, "options": {
        "num_predict": 1}})[2]["prompt_eval_count"] for raw in (True, False)]
    assert counts[1] - counts[0] == len(name) - 1


# ---- tools -----------------------------------------------------------------------------------------------------------

#: What Zod 4 writes for an e-mail address: look-ahead, which the grammar's regular expressions do not have.
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"


def clock(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"to": {"type": "string", "pattern": EMAIL, "maxLength": 3}}, **more}


def function(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "clock", "parameters": schema, **more}}


@pytest.mark.parametrize(("path", "change"), [
    (CHATS, {"tools": [function(clock())]}), (OLLAMA, {"tools": [function(clock())]}),
    (CHATS, {"tools": [function(clock(patternProperties={"^(?=x)": {"type": "string"}}))]}),
    (RESPONSES, {"tools": [{"type": "function", "name": "clock", "parameters": clock()}]}),
    (MESSAGES, {"tools": [{"name": "clock", "input_schema": clock()}]})])
def test_patterns_that_cannot_be_enforced(server: Any, path: str, change: dict[str, Any]) -> None:
    """One tool of an MCP server with such a pattern must not make all requests fail."""
    status, ignored, found = post(server, path, {**BODIES[path], "model": "writes", **change})
    assert status == 200 and "tools.clock.properties.to.pattern" in str(ignored).split(", "), found


def test_patterns_of_strict_tools_are_refused(server: Any) -> None:
    body = {**BODIES[CHATS], "model": "writes", "tools": [function(clock(), strict=True)]}
    status, _, found = post(server, CHATS, body)
    assert status == 400 and "the schema of clock cannot be used" in found["error"]["message"], found


#: Paths -> fields that constrain the text, and the prefix of their names in the header.
FORMATS = [
    (CHATS, lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
     "response_format"),
    (CHATS, lambda schema: {"response_format": {"type": "json_object", "schema": schema}}, "response_format"),
    (TEXTS, lambda schema: {"guided_json": schema}, "guided_json"),
    (TEXTS, lambda schema: {"structured_outputs": {"json": schema}}, "structured_outputs"),
    (RESPONSES, lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
     "text.format"),
    (MESSAGES, lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
     "output_config.format"),
    (OLLAMA, lambda schema: {"format": schema}, "format"), (GENERATE, lambda schema: {"format": schema}, "format"),
]


@pytest.mark.parametrize(("path", "fields", "prefix"), FORMATS)
@pytest.mark.parametrize("stream", [False, True])
def test_keywords_that_cannot_be_enforced_are_named(server: Any, path: str, fields: Any, prefix: str, stream: bool,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    """In the header of the response, streamed or not, and in the log."""
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": -2**63}, "f": {"type": "float"},
                                               "e": {"enum": None}, "b": {"type": "boolean"}}}
    body = {**BODIES[path], **fields(schema), "stream": stream}
    with caplog.at_level(logging.WARNING, "mpool"), Raw(server, 60) as raw:
        status, headers, data = raw.request(path, json.dumps(body).encode()).response()
    assert status == 200, data
    wanted = [f"{prefix}.properties.{name}" for name in ("n.minimum", "f.type", "e.enum")]
    assert sorted(headers["x-mpool-ignored"].split(", ")) == sorted(wanted)
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("properties.n.minimum" in text for text in texts), texts


@pytest.mark.parametrize("schema", [True, {}])
def test_a_schema_that_allows_everything(server: Any, schema: Any) -> None:
    for path, fields, prefix in FORMATS[:6]:
        if schema is True and prefix == "guided_json":  # a string or an object
            continue
        status, ignored, found = post(server, path, {**BODIES[path], **fields(schema)})
        assert (status, ignored) == (200, None), found
    for tool in (function(schema), function({"type": "object", "properties": {"x": schema}})):
        status, ignored, found = post(server, CHATS, {**BODIES[CHATS], "model": "writes", "tools": [tool]})
        assert (status, ignored) == (200, None), found


CLOCK_TOOL = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}
FLAT: dict[str, Any] = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(("path", "kept", "other"), [
    (CHATS, tm.CLOCK, {"type": "custom", "custom": {"name": "x"}}), (RESPONSES, FLAT, {"type": "web_search"}),
    (RESPONSES, FLAT, {"type": "mcp", "server_label": "x"}),
    (MESSAGES, CLOCK_TOOL, {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}),
    (COUNT, CLOCK_TOOL, {"type": "bash_20250124", "name": "bash"})], ids=str)
def test_tools_of_other_types_are_left_out(server: Any, strict: Any, path: str, kept: Any, other: Any) -> None:
    body: dict[str, Any] = {**BODIES.get(path, {"messages": CHAT}), "model": "writes"}

    def count(found: Any) -> int:
        usage = found.get("usage", found)
        return int(usage.get("prompt_tokens", usage.get("input_tokens", 0)) + usage.get("cache_read_input_tokens", 0))

    plain = post(server, path, {**body, "tools": [kept]})
    status, ignored, found = post(server, path, {**body, "tools": [other, kept, other]})
    assert (status, count(found)) == (200, count(plain[2])), found
    assert ignored is not None and f"tools[].{other['type']}" in ignored.split(", ")
    status, ignored, found = post(server, path, {**body, "tools": [other]})
    assert status == 200 and 0 < count(found) < count(plain[2])
    if path == RESPONSES:
        assert found["tools"] == []
    status, ignored, found = post(strict, path, {**body, "tools": [kept, other]})
    assert status == 400 and ignored is None and "tools[1]" in found["error"]["message"]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools(server: Any, mode: str) -> None:
    """Only the allowed tools are in the prompt, and with ``required`` the model calls one of them."""
    named = {"type": "function", "function": {"name": "clock"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
    body = {**BODIES[CHATS], "model": "writes", "max_tokens": 60, "temperature": 0}
    wanted = post(server, CHATS, {**body, "tools": [tm.CLOCK], "tool_choice": mode})[2]
    status, ignored, found = post(server, CHATS, {**body, "tools": [tm.WEATHER, tm.CLOCK], "tool_choice": choice})
    assert (status, ignored) == (200, None), found
    assert found["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    assert [call["function"]["name"] for call in found["choices"][0]["message"]["tool_calls"]] == ["clock"]
    flat = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "clock"}]}
    other = {**FLAT, "name": "other"}
    status, _, found = post(server, RESPONSES, {**BODIES[RESPONSES], "model": "writes", "max_output_tokens": 60,
                                                "temperature": 0, "tools": [other, FLAT], "tool_choice": flat})
    assert status == 200 and [item["name"] for item in found["output"] if item["type"] == "function_call"] == ["clock"]


@pytest.mark.parametrize("inner", [{"mode": "auto"}, {"mode": "x", "tools": [{"function": {"name": "clock"}}]}, 5,
                                   {"mode": "auto", "tools": []}, {"mode": "auto", "tools": [{"name": "none"}]},
                                   {"mode": "auto", "tools": [5]}, {"mode": "auto", "tools": 5}], ids=str)
def test_invalid_allowed_tools(server: Any, inner: Any) -> None:
    body = {**BODIES[CHATS], "model": "writes", "tools": [tm.CLOCK],
            "tool_choice": {"type": "allowed_tools", "allowed_tools": inner}}
    status, _, found = post(server, CHATS, body)
    assert status == 400 and found["error"]["param"] == "tool_choice", found


# ---- earlier calls ---------------------------------------------------------------------------------------------------

def _calls(path: str, arguments: Any) -> dict[str, Any]:
    """Return a conversation with a call, and with a result that says that its arguments were not valid."""
    result = {"role": "tool", "tool_call_id": "abcdefghi", "content": "Invalid JSON."}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "clock", "arguments": arguments}}
    if path == RESPONSES:
        return {"input": [*CHAT, {"type": "function_call", "call_id": "a", "name": "clock", "arguments": arguments},
                          {"type": "function_call_output", "call_id": "a", "output": "Invalid JSON."}]}
    if path == MESSAGES:
        return {"messages": [*CHAT, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "clock", "input": arguments}]}, {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": "Invalid JSON."}]}]}
    return {"messages": [*CHAT, {"role": "assistant", "content": "", "tool_calls": [call]}, result]}


def _prompt_tokens(found: Any) -> int:
    usage = found.get("usage", found)
    return int(next(usage[name] for name in ("prompt_tokens", "input_tokens", "prompt_eval_count") if name in usage))


@pytest.mark.parametrize("text", ['{"zone": "Par', '{"zone": 1}}', "[1]", "5", '"x"', "not JSON", "[" * 1200],
                         ids=lambda text: text[:12])
@pytest.mark.parametrize(("path", "field"), [
    (CHATS, "messages[1].tool_calls[0].function.arguments"), (RESPONSES, "input[1].arguments"),
    (OLLAMA, "messages[1].tool_calls[0].function.arguments")])
def test_invalid_arguments_of_earlier_calls(server: Any, strict: Any, path: str, field: str, text: str) -> None:
    """A client sends back what a model wrote, and the model sees it as the only argument."""
    def body(arguments: Any) -> dict[str, Any]:
        return {**BODIES[path], "model": "writes", **_calls(path, arguments)}

    status, ignored, found = post(server, path, body(text))
    assert status == 200 and ignored == field.replace("[0]", "[]").replace("[1]", "[]"), found
    wanted = json.dumps({"invalid_json": text})
    status, ignored, same = post(server, path, body(json.loads(wanted) if path == OLLAMA else wanted))
    assert (status, ignored, _prompt_tokens(same)) == (200, None, _prompt_tokens(found))
    status, ignored, found = post(strict, path, body(text))
    message = found["error"] if path == OLLAMA else found["error"]["message"]
    assert (status, ignored) == (400, None) and f"`{field}` must be the JSON text of an object, got " in message
    assert path == OLLAMA or (found["error"]["code"], found["error"]["param"]) == ("invalid_value", field)


@pytest.mark.parametrize("path", [CHATS, RESPONSES, OLLAMA])
def test_arguments_without_text_are_empty(server: Any, strict: Any, path: str) -> None:
    for made in (server, strict):
        counts = {_prompt_tokens(post(made, path, {**BODIES[path], "model": "writes", **_calls(path, text)})[2])
                  for text in ("", " ", "{}")}
        assert len(counts) == 1


def test_inputs_of_earlier_tool_uses_are_objects(server: Any) -> None:
    """Anthropic's protocol has no JSON text in which a call could be invalid."""
    for given, status in (({}, 200), ('{"zone', 400)):
        found = post(server, MESSAGES, {**BODIES[MESSAGES], "model": "writes", **_calls(MESSAGES, given)})
        assert found[0] == status, found


# ---- parts of messages -----------------------------------------------------------------------------------------------

def test_documents_and_search_results_are_text(server: Any) -> None:
    """The prompt has the tokens of the same lines as text, in a message and in the result of a tool."""
    document = {"type": "document", "title": "A title", "context": "notes.txt", "citations": {"enabled": True},
                "source": {"type": "text", "media_type": "text/plain", "data": "Some text."}}
    blocks = {**document, "source": {"type": "content", "content": [{"type": "text", "text": "Some text."}]}}
    result = {"type": "search_result", "title": "A title", "source": "notes.txt",
              "content": [{"type": "text", "text": "Some text."}]}
    text = {"type": "text", "text": "A title\nnotes.txt\nSome text."}
    bare = {"type": "document", "source": {"type": "content", "content": "Some text."}}

    def count(block: Any, inside: bool) -> int:
        call = {"type": "tool_use", "id": "a", "name": "clock", "input": {}}
        content = [{"type": "tool_result", "tool_use_id": "a", "content": [block]}] if inside else [block]
        status, ignored, found = post(server, COUNT, {"model": "writes", "messages": [
            *CHAT, {"role": "assistant", "content": [call]}, {"role": "user", "content": content}]})
        assert (status, ignored) == (200, None), found
        return int(found["input_tokens"])

    for inside in (False, True):
        assert {count(block, inside) for block in (document, blocks, result)} == {count(text, inside)}
        assert count(bare, inside) == count({"type": "text", "text": "Some text."}, inside)


def test_images_of_function_results(server: Any) -> None:
    """The images follow all results in one message of the user, before the next message."""
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    image = {"type": "input_image", "image_url": IMAGE}
    output = [{"type": "input_text", "text": "Here."}, image]
    result = {"type": "function_call_output", "call_id": "a"}
    counts = []
    for items in ([{**result, "output": output}], [{**result, "output": "Here."}, {"role": "user", "content": [image]}],
                  [{**result, "output": "Here."}]):
        status, ignored, found = post(server, RESPONSES, {"model": "llava", "max_output_tokens": 1, "input": [
            *CHAT, call, *items]})
        assert (status, ignored) == (200, None), found
        counts.append(found["usage"]["input_tokens"])
    assert counts[0] == counts[1] > counts[2]


def test_refusals_are_text(server: Any) -> None:
    """A conversation may have refusals of another model."""
    for path, field, part, plain in (
            (CHATS, "messages", {"type": "refusal", "refusal": "No."}, {"type": "text", "text": "No."}),
            (RESPONSES, "input", {"type": "refusal", "refusal": "No."}, {"type": "output_text", "text": "No."})):
        counts = []
        for given in (part, plain):
            turn = {"role": "assistant", "content": [given], **({"type": "message"} if field == "input" else {})}
            status, _, found = post(server, path, {**BODIES[path], field: [*CHAT, turn, *CHAT]})
            assert status == 200, found
            counts.append(found["usage"].get("prompt_tokens", found["usage"].get("input_tokens")))
        assert counts[0] == counts[1]
    bodies = [{**BODIES[CHATS], "messages": [*CHAT, {"role": "assistant", **turn}, *CHAT]}
              for turn in ({"content": None, "refusal": "No."}, {"content": "No."})]
    assert len({post(server, CHATS, body)[2]["usage"]["prompt_tokens"] for body in bodies}) == 1


@pytest.mark.parametrize("model", ["llama", "llava"])
def test_a_turn_of_the_assistant_without_text(server: Any, model: str) -> None:
    """``content`` null is an empty text, in both protocols that have it and in the library, for every model."""
    counts = set()
    for turn in ({"content": None}, {"content": ""}, {}, {"content": None, "tool_calls": []}):
        messages = [*CHAT, {"role": "assistant", **turn}, *CHAT]
        counts.add(post(server, CHATS, {"model": model, "messages": messages, "max_tokens": 1})[2]
                   ["usage"]["prompt_tokens"])
        counts.add(post(server, OLLAMA, {"model": model, "messages": messages, "stream": False,
                                         "options": {"num_predict": 1}})[2]["prompt_eval_count"])
        counts.add(server.state.pool.chat(messages, model, max_tokens=1).usage.prompt_tokens)
    assert len(counts) == 1


# ---- /v1/fim/completions ---------------------------------------------------------------------------------------------

def test_fill_in_the_middle_as_in_mistrals_api(server: Any) -> None:
    body = {"model": "coder", "prompt": "ab", "suffix": "cde", "max_tokens": 20, "temperature": 0}
    wanted = post(server, TEXTS, body)[2]
    status, ignored, found = post(server, FILL_IN, {**body, "metadata": {"a": 1}, "random_seed": 5})
    assert (status, ignored, found["object"]) == (200, None, "chat.completion"), found
    choice = found["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (wanted["choices"][0]["text"], "stop") == (
        "mid", "stop")
    assert found["usage"] == wanted["usage"]
    plain = {"model": "llama", "prompt": "The cat", "max_tokens": 12, "stop": ["zz"]}
    for seed in (3, -4):
        assert text_of(post(server, FILL_IN, {**plain, "random_seed": seed, "temperature": 1.5})[2]) == text_of(
            post(server, TEXTS, {**plain, "seed": seed, "temperature": 1.5})[2])
    assert ask(server, FILL_IN, {**plain, "model": "nothing"})[0] == 404
    status, _, found = post(server, FILL_IN, {**plain, "suffix": "x"})
    assert status == 400 and "`suffix` requires a model" in found["error"]["message"]
    found = post(server, FILL_IN, {**plain, "max_completion_tokens": 2, "temperature": 0})[2]
    assert found["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path, body, field", [
    (CHATS, {"messages": CHAT, "stop": ["a", "e", "o"]}, "max_tokens"),
    (TEXTS, {"prompt": "x", "stop": ["a", "e", "o"]}, "max_tokens"),
    (MESSAGES, {"messages": CHAT, "stop_sequences": ["a", "e", "o"]}, "max_tokens"),
    (RESPONSES, {"input": "x"}, "max_output_tokens"),
    (GENERATE, {"prompt": "x", "stream": False, "options": {"stop": ["a", "e", "o"]}}, "num_predict")])
def test_no_limit_of_tokens(server: Any, path: str, body: dict[str, Any], field: str) -> None:
    """-1 is the server's own limit. Ollama's clients also send 0 and -2."""
    for most in (-1, 0, -2):
        given = {**body, "options": {**body["options"], field: most}} if path == GENERATE else {**body, field: most}
        status, found = ask(server, path, {"model": "llama", **given})
        assert status == (200 if most == -1 or path == GENERATE else 400), found


@pytest.mark.parametrize("path, more", [
    (CHATS, {"max_tokens": 3}), (MESSAGES, {"max_tokens": 3}), (COUNT, {}),
    (OLLAMA, {"stream": False, "options": {"num_predict": 3, "temperature": 0}}), ("/tokenize", {})])
def test_a_text_as_messages(server: Any, path: str, more: dict[str, Any]) -> None:
    """As one message of the user."""
    def result(messages: Any) -> Any:
        given = {"model": "llama", "messages": messages, "temperature": 0, **more}
        if path in (OLLAMA, "/tokenize"):
            del given["temperature"]
        status, found = ask(server, path, given)
        assert status == 200, found
        return next(found[name] for name in ("choices", "content", "message", "tokens", "input_tokens")
                    if name in found)

    assert result("Hello") == result([{"role": "user", "content": "Hello"}])


def test_forms_of_images(server: Any) -> None:
    """In every protocol with images, base64 is read as the library reads it."""
    text = "DATA:;BASE64," + IMAGE.partition(",")[2].rstrip("=").replace("+", "-").replace("/", "_")
    openai = [{"type": "image_url", "image_url": {"url": text}}, {"type": "text", "text": "?"}]
    anthropic = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}]
    for path, body in ((CHATS, {"messages": [{"role": "user", "content": openai}], "max_tokens": 1}),
                       (RESPONSES, {"input": [{"role": "user", "content": [
                           {"type": "input_image", "image_url": text}]}], "max_output_tokens": 1}),
                       (MESSAGES, {"messages": [{"role": "user", "content": anthropic}], "max_tokens": 1}),
                       (OLLAMA, {"messages": [{"role": "user", "content": "?", "images": [text]}],
                                      "stream": False, "options": {"num_predict": 1}})):
        status, found = ask(server, path, {"model": "llava", **body})
        assert status == 200, found
