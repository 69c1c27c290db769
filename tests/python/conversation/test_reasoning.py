"""Thoughts and answers: the forms themselves, cut anywhere, and models whose answers are known token by token."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import chainmodels
import pytest

import mpool
from mpool.conversation import reasoning
from mpool.conversation.template import ChatTemplate
from mpool.conversation.reasoning import Harmony, HarmonyCalls, OpenThoughts, Splitter, Thoughts
from reasoningdata import CHAINS, HARMONY, THINK, WORDS

C, M, S, E = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
CASES: list[tuple[type[Splitter], str, str | None, str]] = [
    (Thoughts, "<think>\nWell, 1 < 2.\n\nYes.\n</think>\n\nIt is.\n", "Well, 1 < 2.\n\nYes.", "It is.\n"),
    (Thoughts, "\n<think></think>Ja.", None, "Ja."),
    (Thoughts, "No thoughts, <think>not these</think>.", None, "No thoughts, <think>not these</think>."),
    (Thoughts, "<think>cut off </thin", "cut off </thin", ""),
    (Thoughts, "<thin", None, "<thin"),
    (Thoughts, "<think>a</think>b</think>c", "a", "b</think>c"),
    (Thoughts, "", None, ""),
    (OpenThoughts, "Hm ä.\n</think>\n\nSo.", "Hm ä.", "So."),
    (OpenThoughts, "<think>\nagain\n</think>So.", "again", "So."),
    (OpenThoughts, "never closed\n", "never closed", ""),
    (Harmony, f"{C}analysis{M}Let me 漢字 <|see.{E}{S}assistant{C}final{M}It is <b>.", "Let me 漢字 <|see.", "It is <b>."),
    (Harmony, f"{C}final{M}Only this.<|return|>", None, "Only this."),
    (Harmony, f"{C}analysis{M}a{E}{S}assistant{C}analysis{M}b{E}{S}assistant{C}final{M}c", "a\nb", "c"),
    (Harmony, f"{C}analysis{M}a{E}{S}assistant{C}commentary to=functions.f <|constrain|>json{M}{{}}<|call|>",
     "a\n{}", ""),
    (Harmony, f" to=functions.f{C}commentary{M}{{}}", "{}", ""),
    (Harmony, "A plain answer < 3.", None, "A plain answer < 3."),
    (Harmony, f"{C}analysis{M}cut off <|chan", "cut off <|chan", ""),
    (Harmony, f"{C}analysis{M}a{E}{S}assistant{C}fin", "a", ""),
    (Harmony, f"{M}no channel", None, "no channel"),
    (Harmony, f"{C}analysis{M}forgot the end{C}final{M}x", "forgot the end", "x"),
    (Harmony, f"{C}final{M}", None, ""),
    (Harmony, f"{C}final{M}Hello{E}more text", None, "Hello\nmore text"),
    (Harmony, "to= be or not to be", None, "to= be or not to be"),
    (HarmonyCalls, f"{C}analysis{M}a{E}{S}assistant{C}commentary to=functions.f <|constrain|>json{M}{{}}<|call|>", "a",
     f"{C}commentary to=functions.f{M}{{}}<|call|>"),
    (HarmonyCalls, f" to=functions.f{C}commentary json{M}{{}}", None, f"{C}commentary to=functions.f{M}{{}}"),
    (HarmonyCalls, f"{C}final{M}Hi{E}{S}assistant to=functions.f{C}commentary{M}{{}}{E}{S}assistant{C}final{M}x", None,
     f"Hi\n{C}commentary to=functions.f{M}{{}}<|call|>\nx"),
    (HarmonyCalls, f"{C}commentary to=browser.open{M}{{}}<|call|>", "{}", ""),
    (HarmonyCalls, f"{C}final{M}{C}commentary to=functions.f", None, ""),
]


@pytest.mark.parametrize("make, text, thoughts, answer", CASES)
def test_forms(make: type[Splitter], text: str, thoughts: str | None, answer: str) -> None:
    """Whole, letter by letter, and cut anywhere: the same, and no piece holds a marker."""
    assert reasoning.split(make, text) == (thoughts, answer)
    generator = random.Random(len(text))
    cuts = [list(range(len(text) + 1)), *([0, at, len(text)] for at in range(len(text))),
            *(sorted([0, len(text), *generator.choices(range(len(text) + 1), k=5)]) for _ in range(30))]
    for borders in cuts:
        splitter = make()
        pieces = [splitter.feed(text[a:b]) for a, b in zip(borders, borders[1:])] + [splitter.feed("", True)]
        assert ("".join(piece[0] for piece in pieces) or None, "".join(piece[1] for piece in pieces)) \
            == (thoughts, answer), borders


def test_what_can_be_said_is_said() -> None:
    """Only what may become a marker is kept back."""
    splitter = Harmony()
    assert splitter.feed(f"{C}analysis{M}Let me <|") == ("Let me ", "")
    assert splitter.feed("x") == ("<|x", "")
    assert splitter.feed(f"{E}{S}assistant{C}final{M}Yes") == ("", "Yes")
    splitter = Thoughts()
    assert splitter.feed("<think>\nA\n") == ("A", "")
    assert splitter.feed("B") == ("\nB", "")
    assert Thoughts().feed("Plain") == ("", "Plain")


def test_forms_are_known_by_the_template() -> None:
    assert reasoning.of_template(f"...{C}...{M}", "") is Harmony
    assert reasoning.of_template("{{ '<think>' }}", "user: why?<think>no</think>") is Thoughts
    assert reasoning.of_template("{{ '<think>\n' }}", "assistant\n<think>\n") is OpenThoughts
    assert reasoning.of_template("{{ messages }}", "<think>") is None


# ---- models ----------------------------------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "max_tokens": 40, "compute": "float32"}


def _model(folder: Path, template: str) -> Path:
    return chainmodels.save(folder, template, CHAINS[template], WORDS)


@pytest.fixture(scope="module", params=[HARMONY, THINK], ids=["harmony", "think"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return _model(tmp_path_factory.mktemp("thinks"), request.param), request.param


def test_chat(model: tuple[Path, str]) -> None:
    folder, template = model
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Is it?"}]
    with mpool.Pool() as pool:
        done = pool.chat(messages, folder, **GREEDY)
        assert (done.text, done.reasoning, done.finish_reason) == ("Yes.", "ä think", "stop")
        assert done.message == {"role": "assistant", "content": "Yes.", "reasoning": "ä think"}
        assert done.choices[0].reasoning == "ä think" and len(done.token_ids) == done.usage.completion_tokens
        stream = pool.chat(messages, folder, stream=True, logprobs=True, **GREEDY)
        chunks = list(stream)
        assert "".join(chunk.reasoning for chunk in chunks) == "ä think"
        assert "".join(chunk.text for chunk in chunks) == "Yes." and stream.result().reasoning == "ä think"
        assert not any("<" in chunk.text + chunk.reasoning or "�" in chunk.reasoning for chunk in chunks)
        assert sum(len(chunk.logprobs or ()) for chunk in chunks) == done.usage.completion_tokens
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"]
        # thoughts go back to the template under the name that it reads
        again = ChatTemplate(template).render([*messages, done.message], add_generation_prompt=True)
        assert again.count("ä think") == 1 and again.count("Yes.") == 1
        assert pool.chat([*messages, done.message, *messages], folder, **GREEDY).text == "Yes."
        cut = pool.chat(messages, folder, **{**GREEDY, "max_tokens": 7 if template is HARMONY else 4})
        assert (cut.text, cut.finish_reason) == ("", "length") and "ä think".startswith(str(cut.reasoning))
        assert [choice.reasoning for choice in pool.chat(messages, folder, n=2, **GREEDY).choices] == ["ä think"] * 2


def test_raw_text_is_raw(model: tuple[Path, str]) -> None:
    folder, template = model
    raw = {HARMONY: f"{C}analysis{M}ä think{E}{S}assistant{C}final{M}Yes.", THINK: "<think>ä think</think>Yes."}
    prompt = {HARMONY: f"{S}assistant", THINK: "[assistant]"}[template]
    with mpool.Pool() as pool:
        done = pool.generate(prompt, folder, parse_special=True, **GREEDY)
        assert (done.text, done.reasoning) == (raw[template], None)
        assert done.message == {"role": "assistant", "content": raw[template]}


def test_asyncio(model: tuple[Path, str]) -> None:
    async def read() -> None:
        with mpool.Pool() as pool:
            messages = [{"role": "user", "content": "Is it?"}]
            pieces = [(chunk.reasoning, chunk.text)
                      async for chunk in mpool.aio.chat(messages, model[0], stream=True, pool=pool, **GREEDY)]
            assert ["".join(parts) for parts in zip(*pieces)] == ["ä think", "Yes."]

    asyncio.run(read())


def test_thoughts_that_the_prompt_closes(tmp_path: Path) -> None:
    """Qwen3 with enable_thinking=False."""
    folder = _model(tmp_path, THINK)
    with mpool.Pool() as pool:
        done = pool.chat([{"role": "user", "content": "Is it?"}], folder, template_options={"closed": True}, **GREEDY)
        assert (done.text, done.reasoning) == ("Yes.", None)
