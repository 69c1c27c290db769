"""Fields that a route does not have: ignored, named in the log and in a response header, or refused with ``strict``.
Fields that several clients send: ``chat_template_kwargs``, ``num_ctx``, ``num_predict``, the role ``developer``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest

from mpool.conversation.messages import developer_as_system
from mpool.server import bodies
from mpool.server.errors import Refusal
from mpool.server.openai.structs import ChatRequest, EmbeddingsRequest
from reasoningdata import CHAINS, THINK, WORDS
from servers import Raw, ask, serving
from test_server_thinking import SWITCHED

CHAT: list[Any] = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4}
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 4}
#: Route -> a valid body; the names of its models are those of the fixture.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "llama", "messages": CHAT, **GREEDY},
    "/v1/completions": {"model": "llama", "prompt": "x", **GREEDY},
    "/v1/embeddings": {"model": "bert", "input": "x"},
    "/v1/messages": {"model": "llama", "messages": CHAT, **GREEDY},
    "/v1/messages/count_tokens": {"model": "llama", "messages": CHAT},
    "/v1/responses": {"model": "llama", "input": "x", "temperature": 0, "max_output_tokens": 4},
    "/api/chat": {"model": "llama", "messages": CHAT, "stream": False, "options": OPTIONS},
    "/api/generate": {"model": "llama", "prompt": "x", "stream": False, "options": OPTIONS},
    "/api/embed": {"model": "bert", "input": "x"}, "/api/embeddings": {"model": "bert", "prompt": "x"},
    "/api/show": {"model": "bert"}, "/api/pull": {"model": "bert", "stream": False},
    "/embed": {"model": "bert", "inputs": "x"}, "/embed_all": {"model": "bert", "inputs": "x"},
    "/similarity": {"model": "bert", "inputs": {"source_sentence": "x", "sentences": ["y"]}},
    "/pooling": {"model": "bert", "input": "x"},
    "/tokenize": {"model": "llama", "prompt": "x"}, "/detokenize": {"model": "llama", "tokens": [5]},
    "/api/mpool/cancel": {"id": "x"},
}
#: Routes whose models the fixture does not have: the response is an error, and its header names the field too.
BODIES_OF_ERRORS = {"/v1/rerank": {"model": "bert", "query": "x", "documents": ["y"]},
                    "/classify": {"model": "bert", "input": "x"}, "/predict": {"model": "bert", "inputs": "x"},
                    "/embed_sparse": {"model": "bert", "inputs": "x"},
                    "/classify_tokens": {"model": "bert", "inputs": "x"},
                    "/rerank": {"model": "bert", "query": "x", "texts": ["y"]},
                    "/v1/images/generations": {"model": "bert", "prompt": "x"}}
#: Parts of a response that differ between two equal requests.
_CHANGING = ("id", "created", "created_at", "total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def server(llama: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    switched = chainmodels.save(tmp_path_factory.mktemp("switched"), SWITCHED, CHAINS[THINK], WORDS)
    with serving([f"llama={llama}", f"bert={bert}", f"switched={switched}"]) as made:
        yield made


@pytest.fixture(scope="module")
def strict(llama: Path, bert: Path) -> Iterator[Any]:
    with serving([f"llama={llama}", f"bert={bert}"], strict=True) as made:
        yield made


def post(server: Any, path: str, body: dict[str, Any]) -> tuple[int, str | None, Any]:
    """Return the status, the header ``x-mpool-ignored`` and the response without its times and ids."""
    with Raw(server) as raw:
        status, headers, data = raw.request(path, json.dumps(body).encode()).response()
    return status, headers.get("x-mpool-ignored"), _constant(json.loads(data))


def _constant(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _constant(part) for name, part in value.items() if name not in _CHANGING}
    return [_constant(part) for part in value] if isinstance(value, list) else value


def message_of(found: Any) -> str:
    error = found.get("error", found)
    return str(error["message"] if isinstance(error, dict) else error)


@pytest.mark.parametrize("path", [*BODIES, *BODIES_OF_ERRORS])
def test_an_unknown_field_is_ignored_or_refused(server: Any, strict: Any, path: str) -> None:
    body = {**BODIES, **BODIES_OF_ERRORS}[path]
    plain = post(server, path, body)
    assert plain[1] is None and (plain[0] == 200) == (path in BODIES), plain
    assert post(server, path, {**body, "zz": {"deep": [1]}, "null": None}) == (plain[0], "zz", plain[2])
    assert post(strict, path, {**body, "null": None})[:2] == (plain[0], None)
    status, header, found = post(strict, path, {**body, "zz": 1})
    assert status in (400, 422) and header is None and "`zz` is not a parameter of this route." in message_of(found)


@pytest.mark.parametrize(("path", "change", "name"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello", "zz": 1}]}, "messages[].zz"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [
        {"type": "text", "text": "Hello", "zz": 1}]}]}, "messages[].content[].zz"),
    ("/v1/chat/completions", {"stream_options": {"zz": 1}}, "stream_options.zz"),
    ("/v1/responses", {"input": [{"role": "user", "content": "x", "zz": 1}]}, "input[].zz"),
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x", "zz": 1}]}]},
     "input[].content[].zz"),
    ("/v1/responses", {"reasoning": {"zz": 1}}, "reasoning.zz"),
    ("/api/chat", {"options": {**OPTIONS, "zz": 1}}, "options.zz"),
    ("/api/chat", {"messages": [{"role": "user", "content": "Hello", "zz": 1}]}, "messages[].zz"),
    ("/tokenize", {"prompt": None, "messages": [{"role": "user", "content": "Hello", "zz": 1}]}, "messages[].zz")])
def test_unknown_fields_of_parts(server: Any, strict: Any, path: str, change: dict[str, Any], name: str) -> None:
    body = {**BODIES[path], **change}
    status, header, found = post(server, path, body)
    assert (status, header) == (200, name), found
    status, header, found = post(strict, path, body)
    assert status == 400 and header is None and f"`{name.replace('[]', '[0]')}` is not" in message_of(found), found


def test_free_form_values_keep_their_fields(server: Any) -> None:
    body = {**BODIES["/v1/chat/completions"], "metadata": {"a": None, "b": {"c": 1}}, "logit_bias": {"5": 1.0},
            "tools": [{"type": "function", "function": {"name": "f", "x": 1}}], "tool_choice": "none",
            "prediction": {"zz": 1}, "zz": 1}
    assert post(server, "/v1/chat/completions", body)[:2] == (200, "zz")


def test_the_log_names_each_field_once(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The log has a limit of 1,000 names, and no name has other characters."""
    with caplog.at_level(logging.INFO, "mpool.server"):
        for _ in range(3):
            for path in ("/v1/embeddings", "/api/embed"):
                body = {**BODIES[path], "once": 1, "a\r\nb": 1, "x" * 65: 1}
                assert post(server, path, body)[:2] == (200, f"once, ab, {'x' * 65}")
    lines = [record.getMessage() for record in caplog.records if "ignoring the field" in record.getMessage()]
    assert len(lines) == 6 and sum("`once`" in line for line in lines) == 2, lines
    assert sum("`ab`" in line for line in lines) == 2
    state = server.state
    news = [state.is_new("/v1/embeddings", f"field{at}") for at in range(1100)]
    assert news[0] and not news[-1] and sum(news) <= 1000
    state._ignored.clear()


def test_names_of_ignored_fields_are_limited() -> None:
    ignored: list[str] = []
    body = json.dumps({"model": "m", "input": "x", **{f"f{at}": at for at in range(40)}}).encode()
    assert bodies.parse(body, EmbeddingsRequest, ignored).input == "x"
    assert ignored == [f"f{at}" for at in range(16)]
    ignored = []
    messages = [{"role": "user", "content": "x", "again": at} for at in range(50)]
    assert len(bodies.parse(json.dumps({"model": "m", "messages": messages}).encode(), ChatRequest,
                            ignored).messages) == 50
    assert ignored == ["messages[].again"]
    ignored = []
    body = json.dumps({"model": "m", "input": "x", "é": 1, "a, b": 1, "y" * 500: 1, "\r\n": 1}).encode()
    assert bodies.parse(body, EmbeddingsRequest, ignored).input == "x"
    assert ignored == ["ab", "y" * 48 + "..." + "y" * 49]


@pytest.mark.parametrize("value", ["9" * 400, "[" * 200 + "]" * 200, '{"a": 1, "b": 2}'])
def test_values_of_ignored_fields_are_not_read(value: str) -> None:
    """A value that msgspec refuses in a field of the request has no effect in an unknown field."""
    ignored: list[str] = []
    text = '{"zz": ' + value + ', "model": "m", "input": "x"}'
    assert bodies.parse(text.encode(), EmbeddingsRequest, ignored).input == "x" and ignored == ["zz"]


@pytest.mark.parametrize("text", [
    '{"model": "m", "input": "x", "zz": 1', '{"zz": 1, "model": "m", "input": "x"} x', '{"zz": nul, "model": "m"}',
    '{"zz": NaN, "model": "m", "input": "x"}', '{"zz": 1, "zz": 2, "model": "m", "input": "x"}',
    '{"zz": "\\ud800", "model": "m", "input": "x"}', '{"zz": {"a": 1, "a": 2}, "model": "m", "input": "x"}',
    '{"\\ud800": 1, "model": "m", "input": "x"}',
    '{"zz": %s, "model": "m", "input": "x"}' % ("[" * 100_000 + "]" * 100_000)])
def test_bodies_with_unknown_fields_are_strict_json(text: str) -> None:
    with pytest.raises(Refusal) as refused:
        bodies.parse(text.encode(), EmbeddingsRequest, [])
    assert refused.value.code == "invalid_json", refused.value.message


def test_invalid_fields_are_named_beside_unknown_ones() -> None:
    with pytest.raises(Refusal) as refused:
        bodies.parse(b'{"zz": 1, "model": "m", "input": "x", "dimensions": 0}', EmbeddingsRequest, [])
    assert refused.value.code == "invalid_value" and refused.value.param == "dimensions"


def test_samplers_of_ollama_that_the_library_does_not_have(server: Any, strict: Any) -> None:
    body = BODIES["/api/generate"]
    for name, on, off in (("mirostat", 1, 0), ("tfs_z", 0.5, 1), ("typical_p", 0.7, 1)):
        assert post(server, "/api/generate", {**body, "options": {**OPTIONS, name: off}})[:2] == (200, None)
        assert post(server, "/api/generate", {**body, "options": {**OPTIONS, name: on}}) == (
            200, f"options.{name}", post(server, "/api/generate", body)[2])
        status, _, found = post(strict, "/api/generate", {**body, "options": {**OPTIONS, name: on}})
        assert status == 400 and f"`options.{name}` must be {off}" in message_of(found)


# ---- fields of clients ----------------------------------------------------------------------------------------------

def test_chat_template_kwargs(server: Any) -> None:
    """Variables of the template, which take precedence over ``reasoning_effort``."""
    pool, path = server.state.pool, "/v1/chat/completions"
    body = {"model": "switched", "messages": CHAT, "temperature": 0, "max_tokens": 40, "presence_penalty": 2.0}
    texts = {}
    for on in (True, False):
        wanted = pool.chat(CHAT, "switched", temperature=0, max_tokens=40, presence_penalty=2.0, seed=1,
                           template_options={"enable_thinking": on})
        for more in ({}, {"reasoning_effort": "none" if on else "high"}):
            given = {**body, **more, "chat_template_kwargs": {"enable_thinking": on}}
            status, header, found = post(server, path, given)
            assert (status, header) == (200, None), found
            message = found["choices"][0]["message"]
            assert message["content"] == wanted.text and message.get("reasoning_content") == wanted.reasoning
            assert found["usage"]["prompt_tokens"] == wanted.usage.prompt_tokens
        texts[on] = wanted.usage.prompt_tokens
    assert texts[True] != texts[False]
    for name in ("messages", "tools", "add_generation_prompt", "deadline", "chat_template", "_x"):
        status, _, found = post(server, path, {**body, "chat_template_kwargs": {name: 1}})
        assert status == 400 and name in message_of(found), found


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_num_ctx_limits_prompt_and_completion(server: Any, path: str) -> None:
    pool = server.state.pool
    body = {**BODIES[path], "options": {"temperature": 0, "num_predict": 200, "draft_num_predict": 3}}
    whole = post(server, path, body)[2]
    prompt = whole["prompt_eval_count"]
    assert whole["eval_count"] > 3
    status, header, found = post(server, path, {**body, "options": {**body["options"], "num_ctx": prompt + 3}})
    assert (status, header) == (200, None) and found["prompt_eval_count"] == prompt
    assert found["eval_count"] == 3 and found["done_reason"] == "length"
    for most in (prompt, 1, 0, -5):
        status, _, found = post(server, path, {**body, "options": {**body["options"], "num_ctx": most}})
        limit = max(most, 4)
        if prompt >= limit:
            assert status == 400 and f"`num_ctx` allows at most {limit - 1} plus one" in found["error"], found
    more = pool.get("llama").context_length * 10
    assert post(server, path, {**body, "options": {**body["options"], "num_ctx": more}})[2]["eval_count"] == \
        whole["eval_count"]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_errors_have_the_names_of_ollama_s_options(server: Any, path: str) -> None:
    """And keep a value that reads like a parameter of the library."""
    for options, name in (({"repeat_penalty": -1}, "repeat_penalty"), ({"top_k": -3}, "top_k")):
        status, _, found = post(server, path, {**BODIES[path], "options": options})
        assert status == 400 and f" `options.{name}` must be " in found["error"], found
    status, _, found = post(server, path, {**BODIES[path], "format": {"$defs": {"`response_format`": {
        "$ref": "#/$defs/`response_format`"}}, "$ref": "#/$defs/`response_format`"}})
    assert status == 400, found
    assert " `format`: $ref of the JSON schema" in found["error"] and "`response_format`" in found["error"], found


def test_a_conversation_longer_than_num_ctx_loses_its_oldest_turns(server: Any) -> None:
    turns = [{"role": role, "content": f"{at} " + "a b c " * 10} for at in range(6) for role in ("user", "assistant")]
    body = {**BODIES["/api/chat"], "messages": [*turns, *CHAT]}
    whole = post(server, "/api/chat", body)[2]["prompt_eval_count"]
    status, _, found = post(server, "/api/chat", {**body, "options": {**OPTIONS, "num_ctx": whole // 2}})
    assert status == 200 and 0 < found["prompt_eval_count"] < whole // 2
    status, _, found = post(server, "/api/chat", {**body, "truncate": False, "options": {"num_ctx": whole // 2}})
    assert status == 400


@pytest.mark.parametrize("value", [0, -1, -2])
def test_num_predict_without_a_limit(llama: Path, value: int) -> None:
    """0, -1 and -2 select the server's limit instead of its default."""
    with serving([f"llama={llama}"], default_max_tokens=2, max_tokens=9) as made:
        for wanted, most in ((None, 2), (value, 9)):
            options = {"temperature": 0, "num_predict": wanted}
            body = {"model": "llama", "prompt": "x", "stream": False, "options": options}
            found = ask(made, "/api/generate", body)[1]
            assert found["eval_count"] == most or found["done_reason"] == "stop" and most == 9, found


def test_developer_is_system_where_the_template_does_not_know_it(server: Any) -> None:
    pool = server.state.pool
    for path in ("/v1/chat/completions", "/tokenize"):
        counts = {}
        for role in ("system", "developer"):
            body = {"model": "llama", "messages": [{"role": role, "content": "Be brief."}, *CHAT]}
            body |= GREEDY if path != "/tokenize" else {}
            counts[role] = post(server, path, body)[2]
        assert counts["system"] == counts["developer"]
    messages = [{"role": "developer", "content": "A"}, {"role": "user", "content": "B"}]
    assert pool.chat(messages, "llama", **GREEDY).text == pool.chat(
        [{"role": "system", "content": "A"}, messages[1]], "llama", **GREEDY).text


def test_developer_stays_where_the_template_knows_it(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'developer' %}dev{% endif %}{{ m.content }}{% endfor %}"
    with serving([f"knows={chainmodels.save(tmp_path, template, [('a', 'b')], ['a'])}"]) as made:
        counts = [ask(made, "/tokenize", {"messages": [{"role": role, "content": "A"}, *CHAT]})[1]["count"]
                  for role in ("system", "developer")]
    assert counts[1] == counts[0] + 3


def test_developer_messages_join_the_system_message_before_them() -> None:
    parts = [{"type": "text", "text": "C"}]
    found = developer_as_system([{"role": "system", "content": "A"}, {"role": "developer", "content": "B"},
                                 {"role": "developer", "content": parts}, {"role": "user", "content": "D"},
                                 {"role": "developer", "content": "E"}])
    assert [message["role"] for message in found] == ["system", "user", "system"]
    assert "".join(part["text"] for part in found[0]["content"]) == "A\n\nB\n\nC" and found[2]["content"] == "E"


def test_unknown_fields_of_many_objects_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The objects of a list are mended together: msgspec converts the body again for each place, not each object."""
    calls: list[Any] = []
    mend = bodies._mend_object
    monkeypatch.setattr(bodies, "_mend_object", lambda *given: calls.append(given) or mend(*given))
    plain = {"role": "user", "content": "x", "name": "n"}
    for messages, more, most, names in (
            ([plain] * 5000, {"zz": 1}, 2, ["zz"]), ([{**plain, "zz": 1}] * 5000, {}, 5002, ["messages[].zz"]),
            ([{**plain, f"z{at}": 1} for at in range(5000)], {}, 5002, [f"messages[].z{at}" for at in range(16)])):
        ignored: list[str] = []
        calls.clear()
        body = {"model": "m", "messages": messages, "max_tokens": 2.0, **more}
        found = bodies.parse(json.dumps(body).encode(), ChatRequest, ignored)
        assert len(found.messages) == 5000 and found.messages[-1].name == "n" and found.max_tokens == 2
        assert ignored == names and len(calls) <= most
