"""Reasoning effort in OpenAI's and Ollama's protocols, with their clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm

from mpool.conversation.template import ChatTemplate
from mpool.server import thinking
from servers import Raw, ask, serving
from reasoningdata import CHAINS, HARMONY, THINK, WORDS

CHAT: list[Any] = [{"role": "user", "content": "Is it?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "max_tokens": 40}
OPTIONS: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "num_predict": 40}
#: Like Qwen3's template: with thinking off, the prompt contains an empty reasoning block.
SWITCHED = THINK.replace("{% if closed %}", "{% if enable_thinking is defined and not enable_thinking %}")
#: Like GPT-OSS's template: the prompt contains the reasoning level, medium by default.
LEVELS = ("{% macro level() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}"
           "{% endif %}Reasoning: {{ reasoning_effort }}{% endmacro %}{{ level() }}" + HARMONY)
TEMPLATES = {"switched": SWITCHED, "levels": LEVELS, "always": THINK}


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folders = {name: chainmodels.save(tmp_path_factory.mktemp(name), template,
                                      CHAINS[HARMONY if name == "levels" else THINK], WORDS)
               for name, template in TEMPLATES.items()}
    with serving([f"llama={llama}", *(f"{name}={folder}" for name, folder in folders.items())]) as made:
        yield made


@pytest.mark.parametrize("source, wanted", [
    (SWITCHED, (True, ("enable_thinking",), False)), (LEVELS, (True, (), True)), (THINK, (True, (), False)),
    ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}",
     (True, ("thinking",), False)),
    ("{% for m in messages %}{% set thinking = m.thinking %}{{ thinking }}{% endfor %}", (False, (), False)),
    ("{% if thinking_budget is defined and thinking_budget == 0 %}<seed:think></seed:think>{% endif %}",
     (True, ("thinking_budget",), False)),
    ("{{ '<|START_THINKING|>' if reasoning is undefined or reasoning }}", (True, ("reasoning",), False)),
    (tm.NEMOTRON2_THINKING, (True, ("enable_thinking",), False)), (tm.QWEN3_5, (True, ("enable_thinking",), False)),
    (tm.HERMES, (False, (), False)), ("It has enable_thinking in its text.", (False, (), False)),
], ids=["Qwen3", "GPT-OSS", "R1", "DeepSeek", "a variable of its own", "Seed-OSS", "Command A",
         "Nemotron Nano 2", "Qwen3.5", "Qwen2.5", "text"])
def test_options_of_templates(source: str, wanted: tuple[bool, tuple[str, ...], bool]) -> None:
    found = thinking.template_options(source)
    assert found == wanted
    if found.switches == ("thinking_budget",):
        assert (found.switched(False), found.switched(True)) == ({"thinking_budget": 0}, {"thinking_budget": -1})


def test_openai(server: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

    def reply(model: str, **more: Any) -> tuple[str, str | None, int]:
        done = client.chat.completions.create(model=model, messages=CHAT, **GREEDY, **more)
        message = done.choices[0].message
        return message.content, getattr(message, "reasoning_content", None), done.usage.prompt_tokens

    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        assert reply("switched", reasoning_effort=effort) == reply("switched")
    text, thoughts, _ = reply("switched")
    assert (text, thoughts) == ("Yes.", "ä think")
    assert reply("switched", reasoning_effort="none")[:2] == ("Yes.", None)
    # the prompt length shows the level: it contains the word
    assert reply("levels", reasoning_effort="medium") == reply("levels")
    plain = reply("levels")[2]
    for effort, more in (("low", -3), ("minimal", -3), ("high", -2), ("max", -2)):
        assert reply("levels", reasoning_effort=effort) == ("Yes.", "ä think", plain + more)
    for model in ("levels", "always"):
        with pytest.raises(openai.BadRequestError, match="always thinks") as error:
            reply(model, reasoning_effort="none")
        assert error.value.code == "unsupported_parameter" and error.value.param == "reasoning_effort"
    assert reply("always", reasoning_effort="high") == reply("always")
    for effort in ("none", "high"):  # a model that does not think
        assert reply("llama", reasoning_effort=effort, verbosity="high") == reply("llama")
    with pytest.raises(openai.BadRequestError) as error:
        reply("llama", reasoning_effort="much")
    assert error.value.param == "reasoning_effort"


def test_ollama(server: Any) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)

    def reply(model: str, think: Any) -> tuple[str, str | None, int]:
        done = client.chat(model, CHAT, think=think, options=OPTIONS)
        return done.message.content, done.message.thinking, done.prompt_eval_count

    assert reply("switched", None)[:2] == reply("switched", True)[:2] == ("Yes.", "ä think")
    assert reply("switched", False)[:2] == ("Yes.", None)
    done = client.generate("switched", "Is it?", think=False, options=OPTIONS)
    assert (done.response, done.thinking) == ("Yes.", None)
    plain = reply("levels", None)
    assert reply("levels", True) == reply("levels", False) == reply("levels", "medium") == plain
    assert reply("levels", "low") == (*plain[:2], plain[2] - 3)
    assert reply("llama", False) == reply("llama", None)
    for model, think, text_of_error in (("llama", True, '"llama" does not support thinking'),
                               ("llama", "high", '"llama" does not support thinking'),
                               ("switched", "high", 'think value "high" is not supported for this model'),
                               ("switched", "much", "think")):
        for body in ({"messages": CHAT}, {"prompt": "Is it?"}):
            path = "/api/chat" if "messages" in body else "/api/generate"
            status, found = ask(server, path, {"model": model, "think": think, **body})
            assert status == 400 and text_of_error in found["error"]
    assert "thinking" in client.show("always").capabilities and "thinking" not in client.show("llama").capabilities


@pytest.mark.parametrize("model", list(TEMPLATES))
def test_formats_and_stop_strings_leave_the_reasoning_alone(server: Any, model: str) -> None:
    """In every protocol that has both: reasoning, then a response of the format or up to the stop string."""
    pytest.importorskip("llguidance")
    schema = {"type": "string", "maxLength": 10}

    def chat(**body: Any) -> tuple[str, str]:
        message = ask(server, "/v1/chat/completions", {"model": model, "messages": CHAT, **GREEDY, **body})[1][
            "choices"][0]["message"]
        return message.get("reasoning_content"), message["content"]

    def responses(**body: Any) -> tuple[str, str]:
        items = ask(server, "/v1/responses", {"model": model, "input": "Is it?", "temperature": 0,
                                              "presence_penalty": 2.0, "max_output_tokens": 40, **body})[1]["output"]
        return next(part["text"] for part in items[0]["content"]), items[-1]["content"][0]["text"]

    def messages(**body: Any) -> tuple[str, str]:
        blocks = ask(server, "/v1/messages", {"model": model, "messages": CHAT, **GREEDY, **body})[1]["content"]
        return blocks[0]["thinking"], blocks[-1]["text"]

    def ollama(path: str, **body: Any) -> tuple[str, str]:
        found = ask(server, path, {"model": model, "stream": False, "messages": CHAT, "prompt": "Is it?", **body})[1]
        found = found.get("message", found)
        return found["thinking"], found.get("content", found.get("response"))

    wanted = "ä think", '"!#$%&\'()*+"'
    assert chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}) == wanted
    assert chat(response_format={"type": "json_object", "schema": schema}) == wanted
    assert chat(grammar='root ::= "Yes!"') == ("ä think", "Yes!")
    assert responses(text={"format": {"type": "json_schema", "name": "a", "schema": schema}}) == wanted
    assert messages(output_config={"format": {"type": "json_schema", "schema": schema}}) == wanted
    assert messages(output_format={"type": "json_schema", "schema": schema}) == wanted
    for path in ("/api/chat", "/api/generate"):
        assert ollama(path, format=schema, options=OPTIONS) == wanted
        assert ollama(path, options={**OPTIONS, "stop": ["think", "."]}) == ("ä think", "Yes")
    assert chat(stop=["think", "."]) == messages(stop_sequences=["think", "."]) == ("ä think", "Yes")
    if model == "switched":
        off = chat(response_format={"type": "json_object", "schema": schema}, reasoning_effort="none")
        assert off == (None, wanted[1])
        found = ask(server, "/api/chat", {"model": model, "stream": False, "messages": CHAT, "format": schema,
                                          "think": False, "options": OPTIONS})[1]["message"]
        assert found["content"] == wanted[1] and not found.get("thinking")


#: Arguments that the model below writes: nested, and with the tag that ends a value.
WHERE = {"a": ["</parameter>", {"b": None}]}
#: Tokens of the call: the text that a grammar forces, and the rest.
CALLED = ("\n<function=find>\n<parameter=where>\n{", f"{json.dumps(WHERE)[1:]}\n</parameter>\n</function>\n")
FIND = {"name": "find", "description": "Find a place.", "parameters": {
    "type": "object", "properties": {"where": {"type": "object"}}, "required": ["where"]}}
ASKED: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
LATER: list[Any] = [{"role": "assistant", "content": "In Bonn."}, {"role": "user", "content": "And now?"}]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Models with the templates of Qwen3.5 and Nemotron Nano 2 that think, then call a function."""
    words = ("Hm", "</think>", "<tool_call>", *CALLED, "</tool_call>")
    chain = [("Ċ", "Hm"), *zip(words, words[1:]), ("</tool_call>", "<|return|>")]
    folders = {name: chainmodels.save(tmp_path_factory.mktemp(name), template, chain, words)
               for name, template in (("qwen", tm.QWEN3_5), ("nemotron", tm.NEMOTRON2_THINKING),
                                      ("mixtral", ALTERNATING))}
    with serving([f"{name}={folder}" for name, folder in folders.items()]) as made:
        yield made


#: Like that of Mixtral 8x7B.
ALTERNATING = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles "
               "must alternate') }}{% endif %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content "
               "}}{% endfor %}")


def openai_turn(send: Any, turns: list[Any]) -> tuple[Any, int, list[Any]]:
    found, parts = send("/v1/chat/completions", messages=turns, tools=[{"type": "function", "function": FIND}])
    message = found["choices"][0]["message"]
    call, deltas = message["tool_calls"][0], [part["choices"][0]["delta"] for part in parts if part.get("choices")]
    streamed = ["".join(delta.get("reasoning_content") or "" for delta in deltas), json.loads("".join(
        one["function"].get("arguments", "") for delta in deltas for one in delta.get("tool_calls") or ()))]
    assert [message["reasoning_content"], json.loads(call["function"]["arguments"])] == streamed
    return streamed, found["usage"]["prompt_tokens"], [message, {
        "role": "tool", "tool_call_id": call["id"], "content": "Bonn"}]


def ollama_turn(send: Any, turns: list[Any]) -> tuple[Any, int, list[Any]]:
    found, parts = send("/api/chat", messages=turns, tools=[{"type": "function", "function": FIND}])
    message = found["message"]
    streamed = ["".join(part["message"].get("thinking", "") for part in parts), *(
        call["function"]["arguments"] for part in parts for call in part["message"].get("tool_calls", ()))]
    assert [message["thinking"], message["tool_calls"][0]["function"]["arguments"]] == streamed
    return streamed, found["prompt_eval_count"], [message, {"role": "tool", "tool_name": "find", "content": "Bonn"}]


def anthropic_turn(send: Any, turns: list[Any]) -> tuple[Any, int, list[Any]]:
    system = [turn["content"] for turn in turns if turn["role"] == "system"]
    tool = {"name": "find", "description": FIND["description"], "input_schema": FIND["parameters"]}
    found, parts = send("/v1/messages", system=system[0], tools=[tool],
                        messages=[turn for turn in turns if turn["role"] != "system"])
    thinks, calls = found["content"]
    deltas = [part["delta"] for part in parts if part["type"] == "content_block_delta"]
    streamed = ["".join(delta.get("thinking", "") for delta in deltas),
                json.loads("".join(delta.get("partial_json", "") for delta in deltas))]
    assert [thinks["thinking"], calls["input"]] == streamed
    usage = found["usage"]
    tokens = sum(usage[name] for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))
    return streamed, tokens, [{"role": "assistant", "content": found["content"]}, {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": calls["id"], "content": "Bonn"}]}]


def responses_turn(send: Any, turns: list[Any]) -> tuple[Any, int, list[Any]]:
    found, parts = send("/v1/responses", input=turns, tools=[{"type": "function", **FIND}])
    thinks, call = found["output"]
    streamed = ["".join(part["delta"] for part in parts if part["type"] == f"response.{name}.delta")
                for name in ("reasoning_text", "function_call_arguments")]
    assert [thinks["content"][0]["text"], call["arguments"]] == streamed
    return [streamed[0], json.loads(streamed[1])], found["usage"]["input_tokens"], [*found["output"], {
        "type": "function_call_output", "call_id": call["call_id"], "output": "Bonn"}]


@pytest.mark.parametrize("turn", [openai_turn, ollama_turn, anthropic_turn, responses_turn])
def test_tools_and_reasoning_in_turns_of_qwen3_5(qwen: Any, turn: Any) -> None:
    """Reasoning and a call, whole and streamed. Their next turn has the prompt that the template makes of them: with
    the reasoning up to the next question, then without it."""
    template = ChatTemplate(tm.QWEN3_5)

    def send(path: str, **body: Any) -> tuple[Any, list[Any]]:
        greedy = {"options": {"temperature": 0}} if path == "/api/chat" else {"temperature": 0}
        body = {"model": "qwen", **greedy, **body, **({"max_tokens": 40} if path == "/v1/messages" else {})}
        status, whole = ask(qwen, path, {**body, "stream": False})
        assert status == 200, whole
        with Raw(qwen, 60) as raw:
            lines = raw.request(path, json.dumps({**body, "stream": True}).encode()).response()[2].decode().splitlines()
        texts = [line.removeprefix("data: ") for line in lines]
        return whole, [json.loads(text) for text in texts if text.startswith("{")]

    def tokens(turns: list[Any]) -> int:
        text = template.render(turns, tools=[{"type": "function", "function": FIND}], add_generation_prompt=True)
        return len(qwen.state.pool.tokenize(text, "qwen"))

    found, count, added = turn(send, ASKED)
    assert (found, count) == (["Hm", {"where": WHERE}], tokens(ASKED))
    history = [*ASKED, {"role": "assistant", "content": "", "reasoning_content": "Hm", "tool_calls": [
        {"type": "function", "function": {"name": "find", "arguments": {"where": WHERE}}}]},
        {"role": "tool", "content": "Bonn"}]
    assert turn(send, [*ASKED, *added])[:2] == (found, tokens(history))
    assert turn(send, [*ASKED, *added, *LATER])[:2] == (found, tokens([*history, *LATER]))


@pytest.mark.parametrize("model, turns, joined", [
    ("qwen", [*ASKED, *LATER[:1], {"role": "system", "content": "Now."}, *LATER[1:]],
     [*ASKED, *LATER[:1], {"role": "user", "content": "Now.\n\nAnd now?"}]),
    ("mixtral", [*ASKED, *LATER], [{"role": "user", "content": "Be brief.\n\nWhere?"}, *LATER])])
def test_system_messages_that_a_template_refuses(qwen: Any, model: str, turns: list[Any], joined: list[Any]) -> None:
    """They become part of the question: that of Qwen3.5 in the middle, and that of Mixtral 8x7B anywhere."""
    first, second = (qwen.state.pool.chat(one, model, temperature=0, max_tokens=1) for one in (turns, joined))
    assert first.usage.prompt_tokens == second.usage.prompt_tokens


@pytest.mark.parametrize("turns", [ASKED, ASKED[1:]], ids=["system", "none"])
def test_words_of_the_system_message_turn_thinking_off(qwen: Any, turns: list[Any]) -> None:
    """Nemotron Nano 2 has no variable for it."""
    def tokens(content: str) -> int:
        text = ChatTemplate(tm.NEMOTRON2_THINKING).render([{"role": "system", "content": content}, turns[-1]],
                                                 add_generation_prompt=True)
        assert text.endswith("<think></think>")
        return len(qwen.state.pool.tokenize(text, "nemotron"))

    wanted = tokens("Be brief.\n\n/no_think" if turns is ASKED else "/no_think")
    off = ask(qwen, "/v1/chat/completions", {"model": "nemotron", "messages": turns, "reasoning_effort": "none",
                                             "max_tokens": 1})[1]["usage"]["prompt_tokens"]
    ollama = ask(qwen, "/api/chat", {"model": "nemotron", "messages": turns, "think": False, "stream": False,
                                     "options": {"num_predict": 1}})[1]["prompt_eval_count"]
    assert (off, ollama) == (wanted, wanted)
