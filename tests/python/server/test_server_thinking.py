"""Reasoning effort in OpenAI's and Ollama's protocols, with their clients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest
import toolmodels as tm

from mpool.server import thinking
from servers import ask, serving
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
    (tm.HERMES, (False, (), False)), ("It has enable_thinking in its text.", (False, (), False)),
], ids=["Qwen3", "GPT-OSS", "R1", "DeepSeek", "a variable of its own", "Qwen2.5", "text"])
def test_options_of_templates(source: str, wanted: tuple[bool, tuple[str, ...], bool]) -> None:
    assert thinking.template_options(source) == wanted


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
