"""Conversations that clients continue: those of other services, several messages of a role in a row, and a last message
of the assistant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm

import mpool
from servers import Raw, ask, serving
from tooldata import WORDS, WRITES

pytest.importorskip("llguidance")

#: Refuses two messages of a role in a row, as the templates of Gemma, Llama 2 and Mistral do.
ALTERNATING = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception("
               "'roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
               "{% if add_generation_prompt %}[assistant]{% endif %}")
CHATS, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
ROW: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in (
    ("user", "Wait."), ("user", "Hm"), ("assistant", "clock"), ("assistant", "json"), ("user", "a"), ("user", "b"))]
JOINED: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in (
    ("user", "Wait.\n\nHm"), ("assistant", "clock\n\njson"), ("user", "a\n\nb"))]


@pytest.fixture(scope="module")
def folders(llama: Path, llava: Path, lfm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    models = {"alternating": ALTERNATING, "writes": tm.HERMES}
    made = {name: chainmodels.save(tmp_path_factory.mktemp(name), source, WRITES, WORDS)
            for name, source in models.items()}
    return [f"{name}={folder}" for name, folder in {"llama": llama, "llava": llava, "lfm2": lfm2, **made}.items()]


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


def body(path: str, model: str, messages: Any, **more: Any) -> dict[str, Any]:
    options = {RESPONSES: {"input": messages, "max_output_tokens": 16, "temperature": 0},
               OLLAMA: {"messages": messages, "stream": False, "options": {"num_predict": 4, "temperature": 0}}}
    return {"model": model, **options.get(path, {"messages": messages, "max_tokens": 4, "temperature": 0}), **more}


def prompt_tokens(path: str, found: Any) -> int:
    usage = found.get("usage", found)
    count: int = usage.get("prompt_tokens") or usage.get("input_tokens") or usage.get("prompt_eval_count")
    return count


# ---- the next turn ---------------------------------------------------------------------------------------------------

CACHED: dict[str, Any] = {CHATS: lambda found: found["usage"]["prompt_tokens_details"]["cached_tokens"],
                          RESPONSES: lambda found: found["usage"]["input_tokens_details"]["cached_tokens"],
                          MESSAGES: lambda found: found["usage"]["cache_read_input_tokens"]}


@pytest.mark.parametrize("path", [CHATS, RESPONSES, MESSAGES, OLLAMA])
def test_tokens_of_a_snapshot_are_counted(server: Any, path: str) -> None:
    """The second turn reuses the first prompt up to its last block border, where the snapshot of the state is."""
    chat: list[dict[str, Any]] = [{"role": "user", "content": f"This chat is that of {path}. " * 20}]
    first = post(server, path, body(path, "lfm2", chat))[2]
    chat += [{"role": "assistant", "content": "a b"}, {"role": "user", "content": "And that?"}]
    second = post(server, path, body(path, "lfm2", chat))[2]
    whole = server.state.pool.chat(chat, "lfm2", max_tokens=1).usage
    if path == MESSAGES:
        assert second["usage"]["input_tokens"] == whole.prompt_tokens - CACHED[path](second)
    else:
        assert prompt_tokens(path, second) == whole.prompt_tokens
    if path in CACHED:
        assert CACHED[path](first) == 0 and CACHED[path](second) == (prompt_tokens(path, first) - 1) // 64 * 64 > 0


# ---- messages of one role in a row -----------------------------------------------------------------------------------

@pytest.mark.parametrize("path", [CHATS, RESPONSES, MESSAGES, OLLAMA])
def test_messages_of_a_role_are_joined_where_the_template_refuses_them(server: Any, path: str) -> None:
    """The prompt is that of the joined messages. A template that accepts them gets them as they are."""
    counts = {}
    for model in ("alternating", "llama"):
        for name, messages in (("row", ROW), ("joined", JOINED)):
            status, _, found = post(server, path, body(path, model, messages))
            assert status == 200, found
            counts[model, name] = prompt_tokens(path, found)
    assert counts["alternating", "row"] == counts["alternating", "joined"]
    if path != MESSAGES:  # in Anthropic's protocol, messages of a role in a row are one turn
        assert counts["llama", "row"] != counts["llama", "joined"]


def test_joined_messages_in_the_library_and_in_counts(server: Any) -> None:
    pool = server.state.pool
    wanted = pool.chat(JOINED, "alternating", temperature=0, max_tokens=4)
    done = pool.chat(ROW, "alternating", temperature=0, max_tokens=4)
    assert (done.token_ids, done.usage.prompt_tokens) == (wanted.token_ids, wanted.usage.prompt_tokens)
    for path, more in (("/tokenize", {}), ("/v1/messages/count_tokens", {})):
        counted = [ask(server, path, {"model": "alternating", "messages": messages, **more})[1]
                   for messages in (ROW, JOINED)]
        assert counted[0] == counted[1] and "error" not in counted[0]
    with pytest.raises(mpool.errors.TemplateError, match="roles must alternate"):
        pool.chat([{"role": "assistant", "content": "x"}, *ROW], "alternating")


def test_joined_messages_keep_reasoning_calls_and_images() -> None:
    from mpool.conversation.turns import merged

    text = {"type": "text", "text": "x"}
    call = {"id": "a", "function": {"name": "f", "arguments": {}}}
    assert merged([{"role": "user", "content": [{"type": "image"}]}, {"role": "user", "content": "x"}]) == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "\n\n"}, text]}]
    assert merged([{"role": "assistant", "content": "x", "reasoning_content": "r"},
                   {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "s"},
                   {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]) == [
        {"role": "assistant", "content": "x", "reasoning_content": "r\n\ns", "tool_calls": [call]},
        {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]


# ---- a last message of the assistant ---------------------------------------------------------------------------------

TURNS: list[dict[str, Any]] = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "The quick"}]


@pytest.mark.parametrize(("path", "more"), [
    (OLLAMA, {}), (CHATS, {"continue_final_message": True, "add_generation_prompt": False}),
    (CHATS, {"continue_final_message": True})])
@pytest.mark.parametrize("model", ["llama", "llava"])
def test_a_last_message_of_the_assistant_is_continued(server: Any, path: str, more: dict[str, Any], model: str) -> None:
    done = server.state.pool.chat(TURNS, model, temperature=0, max_tokens=4,
                                  template_options={"continue_final_message": True})
    again = server.state.pool.chat(TURNS, model, temperature=0, max_tokens=4)
    assert done.usage.prompt_tokens < again.usage.prompt_tokens
    status, ignored, found = post(server, path, body(path, model, TURNS, **more))
    assert (status, ignored, prompt_tokens(path, found)) == (200, None, done.usage.prompt_tokens), found
    text = found["message"]["content"] if path == OLLAMA else found["choices"][0]["message"]["content"]
    assert text == done.text


def test_messages_that_are_not_continued(server: Any) -> None:
    """In chat completions, only the option continues a message; calls and empty messages have no text to continue."""
    whole = server.state.pool.chat(TURNS, "llama", temperature=0, max_tokens=4).usage.prompt_tokens
    assert prompt_tokens(CHATS, post(server, CHATS, body(CHATS, "llama", TURNS))[2]) == whole
    closed = server.state.pool.chat(TURNS, "llama", max_tokens=4, template_options={"add_generation_prompt": False})
    found = post(server, CHATS, body(CHATS, "llama", TURNS, add_generation_prompt=False))[2]
    assert prompt_tokens(CHATS, found) == closed.usage.prompt_tokens < whole
    call = {"function": {"name": "clock", "arguments": {}}}
    for last in ({"role": "assistant", "content": ""}, {"role": "assistant", "content": "x", "tool_calls": [call]}):
        assert post(server, OLLAMA, body(OLLAMA, "writes", [TURNS[0], last]))[0] == 200
    status, _, found = post(server, CHATS, body(CHATS, "llama", TURNS, continue_final_message=True,
                                                add_generation_prompt=True))
    assert status == 400 and found["error"]["param"] == "continue_final_message"


# ---- items of other services -----------------------------------------------------------------------------------------

#: Items of sessions with tools and stores that OpenAI's servers and Codex have.
ITEMS: list[dict[str, Any]] = [
    {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin", "status": "completed"},
    {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    {"type": "compaction", "encrypted_content": "gAAAA"}, {"type": "item_reference", "id": "msg_1"}, {"id": "msg_2"},
    {"type": None, "id": "msg_3"}, {"type": "local_shell_call", "call_id": "l1", "action": {"command": ["ls"]}},
    {"type": "mcp_list_tools", "server_label": "x", "tools": [{"name": "a"}]}, {"type": "image_generation_call"}]


def test_items_of_other_services_are_read_over(server: Any, strict: Any) -> None:
    """The prompt is that of the session without them; the header names them; a strict server refuses them."""
    said = [{"role": "user", "content": "Is it?"}, {"type": "function_call", "call_id": "f1", "name": "clock",
                                                    "arguments": "{}"},
            {"type": "function_call_output", "call_id": "f1", "output": "noon"}, {"role": "user", "content": "Hm"}]
    session = [said[0], *ITEMS[:4], *said[1:3], *ITEMS[4:], said[3]]
    plain = post(server, RESPONSES, body(RESPONSES, "writes", said))
    status, ignored, found = post(server, RESPONSES, body(RESPONSES, "writes", session))
    assert status == 200 and plain[1] is None, found
    assert found["usage"]["input_tokens"] == plain[2]["usage"]["input_tokens"]
    assert set(str(ignored).split(", ")) == {f"input[].{item.get('type') or 'item_reference'}" for item in ITEMS}
    status, _, found = post(strict, RESPONSES, body(RESPONSES, "writes", session))
    assert (status, found["error"]["param"]) == (400, "input[1].type"), found
    for wrong in ([{"type": "mesage", "role": "user", "content": "x"}], ITEMS[:2]):
        status, _, found = post(server, RESPONSES, body(RESPONSES, "writes", wrong))
        assert status == 400 and found["error"]["param"].startswith("input"), found


def test_blocks_of_anthropics_own_tools_are_read_over(server: Any, strict: Any) -> None:
    blocks = [{"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
              {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "web_search_result"}]},
              {"type": "mcp_tool_use", "id": "m1", "name": "a", "server_name": "b", "input": {}}]
    turns = [TURNS[0], {"role": "assistant", "content": [*blocks, {"type": "text", "text": "No"}]}, TURNS[0]]
    plain = [TURNS[0], {"role": "assistant", "content": [{"type": "text", "text": "No"}]}, TURNS[0]]
    wanted = post(server, MESSAGES, body(MESSAGES, "llama", plain))
    status, ignored, found = post(server, MESSAGES, body(MESSAGES, "llama", turns))
    assert status == 200 and (found["usage"], found["content"]) == (wanted[2]["usage"], wanted[2]["content"]), found
    assert set(str(ignored).split(", ")) == {f"messages[].content[].{block['type']}" for block in blocks}
    assert post(strict, MESSAGES, body(MESSAGES, "llama", turns))[0] == 400
    assert post(server, MESSAGES, body(MESSAGES, "llama", [{"role": "user", "content": [{"type": "video"}]}]))[0] == 400


# ---- names of tools --------------------------------------------------------------------------------------------------

def test_names_of_128_characters(server: Any) -> None:
    """Servers of the Model Context Protocol name tools ``mcp__server__tool``."""
    name = "mcp__" + "a" * 123
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    for path, tool, choice in (
            (CHATS, {"type": "function", "function": {"name": name, "parameters": schema}}, "required"),
            (RESPONSES, {"type": "function", "name": name, "parameters": schema}, "required"),
            (MESSAGES, {"name": name, "input_schema": schema}, {"type": "any"})):
        more = {"tools": [tool], "tool_choice": choice}
        more |= {"max_output_tokens": 300} if path == RESPONSES else {"max_tokens": 300}
        status, _, found = post(server, path, body(path, "writes", TURNS[:1], **more))
        assert status == 200 and f'"name":"{name}"' in json.dumps(found, separators=(",", ":")), found
        inner = tool.get("function", tool)
        longer = {**tool, **({"function": {**inner, "name": name + "a"}} if "function" in tool else
                             {"name": name + "a"})}
        assert post(server, path, body(path, "writes", TURNS[:1], tools=[longer]))[0] == 400
