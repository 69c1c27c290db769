"""How much a model is to think, by OpenAI's protocol and Ollama's, with their own clients."""

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
#: As Qwen3's: without thoughts, the prompt closes them.
SWITCHED = THINK.replace("{% if closed %}", "{% if enable_thinking is defined and not enable_thinking %}")
#: As GPT-OSS's: the degree stands in the prompt, medium if nobody says.
DEGREES = ("{% macro degree() %}{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}"
           "{% endif %}Reasoning: {{ reasoning_effort }}{% endmacro %}{{ degree() }}" + HARMONY)
TEMPLATES = {"switched": SWITCHED, "degrees": DEGREES, "always": THINK}


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folders = {name: chainmodels.save(tmp_path_factory.mktemp(name), template,
                                      CHAINS[HARMONY if name == "degrees" else THINK], WORDS)
               for name, template in TEMPLATES.items()}
    with serving([f"llama={llama}", *(f"{name}={folder}" for name, folder in folders.items())]) as made:
        yield made


@pytest.mark.parametrize("source, wanted", [
    (SWITCHED, (True, ("enable_thinking",), False)), (DEGREES, (True, (), True)), (THINK, (True, (), False)),
    ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ thinking }}",
     (True, ("thinking",), False)),
    ("{% for m in messages %}{% set thinking = m.thinking %}{{ thinking }}{% endfor %}", (False, (), False)),
    (tm.HERMES, (False, (), False)), ("It has enable_thinking in its text.", (False, (), False)),
], ids=["Qwen3", "GPT-OSS", "R1", "DeepSeek", "a variable of its own", "Qwen2.5", "text"])
def test_templates_say_what_they_read(source: str, wanted: tuple[bool, tuple[str, ...], bool]) -> None:
    assert thinking.template_options(source) == wanted


def test_openai(server: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

    def answered(model: str, **more: Any) -> tuple[str, str | None, int]:
        done = client.chat.completions.create(model=model, messages=CHAT, **GREEDY, **more)
        message = done.choices[0].message
        return message.content, getattr(message, "reasoning_content", None), done.usage.prompt_tokens

    for effort in ("minimal", "low", "medium", "high", "xhigh", "max"):
        assert answered("switched", reasoning_effort=effort) == answered("switched")
    text, thoughts, _ = answered("switched")
    assert (text, thoughts) == ("Yes.", "ä think")
    assert answered("switched", reasoning_effort="none")[:2] == ("Yes.", None)
    # by the length of the word in the prompt
    assert answered("degrees", reasoning_effort="medium") == answered("degrees")
    plain = answered("degrees")[2]
    for effort, more in (("low", -3), ("minimal", -3), ("high", -2), ("max", -2)):
        assert answered("degrees", reasoning_effort=effort) == ("Yes.", "ä think", plain + more)
    for model in ("degrees", "always"):
        with pytest.raises(openai.BadRequestError, match="always thinks") as error:
            answered(model, reasoning_effort="none")
        assert error.value.code == "unsupported_parameter" and error.value.param == "reasoning_effort"
    assert answered("always", reasoning_effort="high") == answered("always")
    for effort in ("none", "high"):  # a model that does not think
        assert answered("llama", reasoning_effort=effort, verbosity="high") == answered("llama")
    with pytest.raises(openai.BadRequestError) as error:
        answered("llama", reasoning_effort="much")
    assert error.value.param == "reasoning_effort"


def test_ollama(server: Any) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)

    def answered(model: str, think: Any) -> tuple[str, str | None, int]:
        done = client.chat(model, CHAT, think=think, options=OPTIONS)
        return done.message.content, done.message.thinking, done.prompt_eval_count

    assert answered("switched", None)[:2] == answered("switched", True)[:2] == ("Yes.", "ä think")
    assert answered("switched", False)[:2] == ("Yes.", None)
    done = client.generate("switched", "Is it?", think=False, options=OPTIONS)
    assert (done.response, done.thinking) == ("Yes.", None)
    plain = answered("degrees", None)
    assert answered("degrees", True) == answered("degrees", False) == answered("degrees", "medium") == plain
    assert answered("degrees", "low") == (*plain[:2], plain[2] - 3)
    assert answered("llama", False) == answered("llama", None)
    for model, think, says in (("llama", True, '"llama" does not support thinking'),
                               ("llama", "high", '"llama" does not support thinking'),
                               ("switched", "high", 'think value "high" is not supported for this model'),
                               ("switched", "much", "think")):
        for body in ({"messages": CHAT}, {"prompt": "Is it?"}):
            path = "/api/chat" if "messages" in body else "/api/generate"
            status, found = ask(server, path, {"model": model, "think": think, **body})
            assert status == 400 and says in found["error"]
    assert "thinking" in client.show("always").capabilities and "thinking" not in client.show("llama").capabilities
