"""Splitting of reasoning and response: both formats, chunks of any size, and models whose output is known by token."""

import random
from pathlib import Path
from typing import Any

import chainmodels
import pytest

import mpool
from mpool.conversation import reasoning
from mpool.conversation.template import ChatTemplate
from mpool.tasks import sampling
from mpool.conversation.reasoning import (
    HarmonyCallSplitter, HarmonySplitter, OpenedThinkSplitter, Splitter, ThinkSplitter)
from reasoningdata import BRACKETS, CHAINS, CONTROL, HARMONY, OPENED, THINK, WORDS

C, M, S, E = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
GRANITE = reasoning.think_splitter(reasoning.THINK_MARKERS[0], False, True)
CASES: list[tuple[type[Splitter], str, str | None, str]] = [
    (ThinkSplitter, "<think>\nWell, 1 < 2.\n\nYes.\n</think>\n\nIt is.\n", "Well, 1 < 2.\n\nYes.", "It is.\n"),
    (ThinkSplitter, "\n<think></think>Ja.", None, "Ja."),
    (ThinkSplitter, "No thoughts, <think>not these</think>.", None, "No thoughts, <think>not these</think>."),
    (ThinkSplitter, "<think>cut off </thin", "cut off </thin", ""),
    (ThinkSplitter, "<thin", None, "<thin"),
    (ThinkSplitter, "<think>a</think>b</think>c", "a", "b</think>c"),
    (ThinkSplitter, "", None, ""),
    (OpenedThinkSplitter, "Hm ä.\n</think>\n\nSo.", "Hm ä.", "So."),
    (OpenedThinkSplitter, "<think>\nagain\n</think>So.", "again", "So."),
    (OpenedThinkSplitter, "never closed\n", "never closed", ""),
    # Granite 3.3 puts its response between tags
    (GRANITE, "<think>Hm</think>\n<response>\nSo <b>.\n\nYes.\n</response>", "Hm", "So <b>.\n\nYes."),
    (GRANITE, "<think>Hm</think><response>cut off\n</respon", "Hm", "cut off\n</respon"),
    (GRANITE, "<think>Hm</think>\n<respect>.", "Hm", "<respect>."),
    (GRANITE, "<think>Hm</think><response></response>\n<|tool_call|>[]", "Hm", "\n<|tool_call|>[]"),
    (GRANITE, "Plain <response>x</response>", None, "Plain <response>x</response>"),
    (HarmonySplitter, f"{C}analysis{M}Let me 漢字 <|see.{E}{S}assistant{C}final{M}It is <b>.",
     "Let me 漢字 <|see.", "It is <b>."),
    (HarmonySplitter, f"{C}final{M}Only this.<|return|>", None, "Only this."),
    (HarmonySplitter, f"{C}analysis{M}a{E}{S}assistant{C}analysis{M}b{E}{S}assistant{C}final{M}c", "a\nb", "c"),
    (HarmonySplitter, f"{C}analysis{M}a{E}{S}assistant{C}commentary to=functions.f <|constrain|>json{M}{{}}<|call|>",
     "a\n{}", ""),
    (HarmonySplitter, f" to=functions.f{C}commentary{M}{{}}", "{}", ""),
    # the last channel of a header counts; messages to the assistant are not to a tool
    *((kind, f"{C}analysis{M}a{E}{S}assistant{C}commentary to=assistant{C}final{M}So.", "a", "So.")
      for kind in (HarmonySplitter, HarmonyCallSplitter)),
    (HarmonySplitter, f"{C}commentary to=functions.f{C}final{M}{{}}", "{}", ""),
    (HarmonySplitter, "A plain answer < 3.", None, "A plain answer < 3."),
    (HarmonySplitter, f"{C}analysis{M}cut off <|chan", "cut off <|chan", ""),
    (HarmonySplitter, f"{C}analysis{M}a{E}{S}assistant{C}fin", "a", ""),
    (HarmonySplitter, f"{M}no channel", None, "no channel"),
    (HarmonySplitter, f"{C}analysis{M}forgot the end{C}final{M}x", "forgot the end", "x"),
    (HarmonySplitter, f"{C}final{M}", None, ""),
    (HarmonySplitter, f"{C}final{M}Hello{E}more text", None, "Hello\nmore text"),
    (HarmonySplitter, "to= be or not to be", None, "to= be or not to be"),
    (HarmonyCallSplitter,
     f"{C}analysis{M}a{E}{S}assistant{C}commentary to=functions.f <|constrain|>json{M}{{}}<|call|>",
     "a", f"{C}commentary to=functions.f{M}{{}}<|call|>"),
    (HarmonyCallSplitter, f" to=functions.f{C}commentary json{M}{{}}", None, f"{C}commentary to=functions.f{M}{{}}"),
    (HarmonyCallSplitter, f"{C}final{M}Hi{E}{S}assistant to=functions.f{C}commentary{M}{{}}{E}{S}assistant{C}final{M}x",
     None, f"Hi\n{C}commentary to=functions.f{M}{{}}<|call|>\nx"),
    (HarmonyCallSplitter, f"{C}commentary to=browser.open{M}{{}}<|call|>", "{}", ""),
    (HarmonyCallSplitter, f"{C}final{M}{C}commentary to=functions.f", None, ""),
    # a message of the channel commentary without a recipient is for the user
    (HarmonyCallSplitter, f"{C}analysis{M}a{E}{S}assistant{C}commentary{M}I look.{E}{S}assistant{C}commentary "
     f"to=functions.f <|constrain|>json{M}{{}}<|call|>", "a", f"I look.\n{C}commentary to=functions.f{M}{{}}<|call|>"),
    (HarmonySplitter, f"{C}commentary{M}I look.{E}{S}assistant{C}final{M}So.", None, "I look.\nSo."),
    # markers in strings of JSON are content; in content that is no JSON they end the message
    (HarmonyCallSplitter, f'{C}commentary to=functions.f{M}{{"a": "{E}<|call|>"}}<|call|>', None,
     f'{C}commentary to=functions.f{M}{{"a": "{E}<|call|>"}}<|call|>'),
    (HarmonyCallSplitter, f'{C}commentary to=functions.f{M}say "{{{E}{S}assistant{C}final{M}x', None,
     f'{C}commentary to=functions.f{M}say "{{<|call|>\nx'),
]


@pytest.mark.parametrize("make, text, thoughts, response", CASES)
def test_splitting(make: type[Splitter], text: str, thoughts: str | None, response: str) -> None:
    """The result is the same for the whole text, single characters and chunks of any size."""
    assert reasoning.split(make, text) == (thoughts, response)
    generator = random.Random(len(text))
    cuts = [list(range(len(text) + 1)), *([0, at, len(text)] for at in range(len(text))),
            *(sorted([0, len(text), *generator.choices(range(len(text) + 1), k=5)]) for _ in range(30))]
    for borders in cuts:
        splitter = make()
        chunks = [splitter.feed(text[a:b]) for a, b in zip(borders, borders[1:])] + [splitter.feed("", True)]
        assert ("".join(chunk[0] for chunk in chunks) or None, "".join(chunk[1] for chunk in chunks)) \
            == (thoughts, response), borders


def test_text_is_emitted_as_early_as_possible() -> None:
    """Only text that may begin a marker is buffered."""
    splitter = HarmonySplitter()
    assert splitter.feed(f"{C}analysis{M}Let me <|") == ("Let me ", "")
    assert splitter.feed("x") == ("<|x", "")
    assert splitter.feed(f"{E}{S}assistant{C}final{M}Yes") == ("", "Yes")
    splitter = ThinkSplitter()
    assert splitter.feed("<think>\nA\n") == ("A", "")
    assert splitter.feed("B") == ("\nB", "")
    assert ThinkSplitter().feed("Plain") == ("", "Plain")


def test_the_format_is_recognised_by_the_template() -> None:
    assert reasoning.of_template(f"...{C}...{M}", "") is HarmonySplitter
    assert reasoning.of_template("{{ '<think>' }}", "user: why?<think>no</think>") is ThinkSplitter
    assert reasoning.of_template("{{ '<think>\n' }}", "assistant\n<think>\n") is OpenedThinkSplitter
    assert reasoning.of_template("{{ messages }}", "<think>") is None
    granite = "Write your thoughts between <think></think> and write your response between <response></response>"
    assert reasoning.of_template(granite, "") is GRANITE


# ---- models ----------------------------------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"temperature": 0, "presence_penalty": 2.0, "max_tokens": 40, "compute": "float32"}


def _model(folder: Path, template: str) -> Path:
    return chainmodels.save(folder, template, CHAINS[template], WORDS, CONTROL.get(template, ()))


@pytest.fixture(scope="module", params=[HARMONY, THINK, OPENED, BRACKETS],
                ids=["harmony", "think", "opened", "brackets"])
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
        # the template gets the reasoning under the key that it reads
        again = ChatTemplate(template).render([*messages, done.message], add_generation_prompt=True)
        assert again.count("ä think") == 1 and again.count("Yes.") == 1
        assert pool.chat([*messages, done.message, *messages], folder, **GREEDY).text == "Yes."
        cut = pool.chat(messages, folder, **{**GREEDY, "max_tokens": {HARMONY: 7, OPENED: 3}.get(template, 4)})
        assert (cut.text, cut.finish_reason) == ("", "length") and "ä think".startswith(str(cut.reasoning))
        assert [choice.reasoning for choice in pool.chat(messages, folder, n=2, **GREEDY).choices] == ["ä think"] * 2


def test_a_chat_that_may_think_has_more_tokens_by_default(model: tuple[Path, str],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasoning alone may take the 512 tokens of other requests."""
    for given, defaults, thinks, most in (({}, {}, False, 512), ({}, {}, True, 4096), ({"max_tokens": 5}, {}, True, 5),
                                          ({}, {"max_tokens": 7}, True, 7), ({"max_tokens": None}, {}, True, None)):
        assert sampling.resolve(given, defaults, 10, thinks).max_tokens == most
    monkeypatch.setattr(sampling, "THINKING_TOKENS", 3)
    options = {name: value for name, value in GREEDY.items() if name != "max_tokens"}
    messages = [{"role": "user", "content": "Is it?"}]
    with mpool.Pool() as pool:
        done = pool.chat(messages, model[0], **options)
        assert (done.usage.completion_tokens, done.finish_reason) == (3, "length")
        schema = {"type": "string", "maxLength": 40}
        assert pool.chat(messages, model[0], response_format=schema, **options).usage.completion_tokens == 3


def test_generate_does_not_split(model: tuple[Path, str]) -> None:
    folder, template = model
    raw = {HARMONY: f"{C}analysis{M}ä think{E}{S}assistant{C}final{M}Yes.", THINK: "<think>ä think</think>Yes.",
           OPENED: "ä think</think>\nYes.", BRACKETS: "[THINK]ä think[/THINK]\nYes."}
    prompt = {HARMONY: f"{S}assistant", OPENED: "[assistant]<think>"}.get(template, "[assistant]")
    with mpool.Pool() as pool:
        done = pool.generate(prompt, folder, parse_special=True, **GREEDY)
        assert (done.text, done.reasoning) == (raw[template], None)
        assert done.message == {"role": "assistant", "content": raw[template]}


def test_reasoning_that_the_prompt_closes(tmp_path: Path) -> None:
    """Like Qwen3 with enable_thinking=False."""
    folder = _model(tmp_path, THINK)
    with mpool.Pool() as pool:
        done = pool.chat([{"role": "user", "content": "Is it?"}], folder, template_options={"closed": True}, **GREEDY)
        assert (done.text, done.reasoning) == ("Yes.", None)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_stop_strings_and_stop_tokens_end_the_response_only(model: tuple[Path, str], isolation: str) -> None:
    folder, _ = model
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Is it?"}]
    with mpool.Pool(mpool.PoolConfig(threads=1, isolation=isolation)) as pool:  # type: ignore[arg-type]
        def reply(**options: Any) -> tuple[str, str | None, str, str | int | None]:
            done = pool.chat(messages, folder, **GREEDY, **options)
            stream = pool.chat(messages, folder, stream=True, **GREEDY, **options)
            chunks = list(stream)
            assert ("".join(chunk.text for chunk in chunks), "".join(chunk.reasoning for chunk in chunks) or None) \
                == (done.text, done.reasoning)
            assert [choice.text for choice in pool.chat(messages, folder, n=2, **GREEDY, **options).choices] == \
                [done.text] * 2
            return done.text, done.reasoning, done.finish_reason, done.stop

        whole = ("Yes.", "ä think", "stop", None)
        assert reply(stop=["think", "ä", "assistant", "analysis", "final", "<", "[", "\n", "</think>"]) == whole
        assert reply(stop=["think", "es"]) == ("Y", "ä think", "stop", "es")
        assert reply(stop="Yes") == ("", "ä think", "stop", "Yes")
        token = pool.tokenize(" think", folder)[-1:]
        assert reply(stop_token_ids=token) == whole
        token = pool.tokenize(".", folder)
        assert reply(stop_token_ids=token) == ("Yes", "ä think", "stop", token[0])


FORMATS: list[tuple[Any, str]] = [
    ({"type": "string", "maxLength": 10}, '"!#$%&\'()*+"'), ({"type": "regex", "regex": r"[A-Z]es\."}, "Yes."),
    ({"type": "grammar", "grammar": 'start: "Yes" | "No"'}, "Yes"),
    ({"type": "grammar", "grammar": 'root ::= "Yes" "!"'}, "Yes!"), ({"type": "text"}, "Yes."),
    ({"type": "regex", "regex": r"\n\nYes"}, "\n\nYes"), ({"type": "grammar", "grammar": 'start: "\\nNo"'}, "\nNo")]


@pytest.mark.parametrize("wanted, text", FORMATS, ids=repr)
def test_a_format_constrains_the_response_only(model: tuple[Path, str], wanted: Any, text: str) -> None:
    """The reasoning is the same as without a format, and a caller that turns it off gets none."""
    pytest.importorskip("llguidance")
    folder, template = model
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Is it?"}]
    with mpool.Pool() as pool:
        done = pool.chat(messages, folder, response_format=wanted, **GREEDY)
        assert (done.text, done.reasoning, done.finish_reason) == (text, "ä think", "stop")
        assert done.parsed == (text[1:-1] if text[0] == '"' else None)
        stream = pool.chat(messages, folder, stream=True, response_format=wanted, **GREEDY)
        assert ["".join(parts) for parts in zip(*((chunk.reasoning, chunk.text) for chunk in stream))] == \
            ["ä think", text]
        cut = pool.chat(messages, folder, response_format=wanted, **{**GREEDY, "max_tokens": 3})
        assert (cut.text, cut.finish_reason, cut.parsed) == ("", "length", None)
        if template in (THINK, BRACKETS) and wanted != {"type": "text"}:
            for options in ({"closed": True}, {"enable_thinking": False}, {"thinking": False}):
                done = pool.chat(messages, folder, response_format=wanted, template_options=options, **GREEDY)
                assert done.reasoning is None and "think" not in done.text and done.finish_reason == "stop"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_stop_string_that_might_begin_the_reasoning(tmp_path: Path, isolation: str) -> None:
    """It is found once a later token shows that the completion has no reasoning."""
    chain = [("]", "<"), ("<", "t"), ("t", "h"), ("h", "x"), ("x", "y"), ("y", "<|return|>")]
    folder = chainmodels.save(tmp_path, THINK, chain, WORDS)
    with mpool.Pool(mpool.PoolConfig(threads=1, isolation=isolation)) as pool:  # type: ignore[arg-type]
        for stop, text in (("<t", ""), ("th", "<"), ("y", "<thx")):
            done = pool.chat([{"role": "user", "content": "Is it?"}], folder, stop=[stop], **GREEDY)
            assert (done.text, done.reasoning, done.stop) == (text, None, stop)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_stop_strings_at_markers(tmp_path: Path, isolation: str) -> None:
    """Granite's tags around the response are not part of it. A text at the end that might have begun a marker is."""
    chain = [("]", "<think>"), ("<think>", "Ġthink"), ("Ġthink", "</think>"), ("</think>", "<response>"),
             ("<response>", "Ċ"), ("Ċ", "Yes"), ("Yes", "<"), ("<", "<|return|>")]
    template = THINK + "{# <response> #}"
    folder = chainmodels.save(tmp_path, template, chain, (*WORDS, "<response>"))
    rows: list[tuple[list[str], int, str, str, str | None]] = [
        (["\n"], 40, "Yes<", "stop", None), (["<"], 40, "Yes", "stop", "<"), (["<", "es"], 40, "Y", "stop", "es"),
        (["<"], 7, "Yes", "stop", "<"), (["<r"], 7, "Yes<", "length", None), (["<r"], 6, "Yes", "length", None)]
    with mpool.Pool(mpool.PoolConfig(threads=1, isolation=isolation)) as pool:  # type: ignore[arg-type]
        for stop, most, text, finish, found in rows:
            done = pool.chat([{"role": "user", "content": "Is it?"}], folder, stop=stop,
                             **{**GREEDY, "max_tokens": most})
            assert (done.text, done.reasoning, done.finish_reason, done.stop) == (text, " think", finish, found), stop


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_stop_strings_between_messages_of_harmony(tmp_path: Path, isolation: str) -> None:
    """A preamble is response; the headers and the reasoning behind it are not."""
    chains = [("assistant", "<|channel|>"), ("<|channel|>", "commentary", "analysis", "final"),
              *((name, "<|message|>") for name in ("commentary", "analysis", "final")),
              ("<|message|>", "Look", "Ġthink", "Yes"), ("Look", "<|end|>"), *CHAINS[HARMONY][7:]]
    chains = [row for at, row in enumerate(chains) if row[0] not in [earlier[0] for earlier in chains[:at]]]
    folder = chainmodels.save(tmp_path, HARMONY, chains, (*WORDS, "commentary", "Look"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Is it?"}]
    rows: list[tuple[list[str], str, str | None, str | None]] = [
        (["assistant", "<", "analysis", "final", " th", "<|message|>"], "Look\nYes.", " think", None),
        (["think", "Yes"], "Look", " think", "Yes"), (["k", "s"], "Loo", None, "k"),
        (["k<", "es"], "Look\nY", " think", "es")]
    with mpool.Pool(mpool.PoolConfig(threads=1, isolation=isolation)) as pool:  # type: ignore[arg-type]
        for stop, text, thoughts, found in rows:
            done = pool.chat(messages, folder, stop=stop, **GREEDY)
            assert (done.text, done.reasoning, done.stop) == (text, thoughts, found)
            chunks = list(pool.chat(messages, folder, stop=stop, stream=True, **GREEDY))
            assert ("".join(chunk.text for chunk in chunks), "".join(chunk.reasoning for chunk in chunks) or None) == \
                (text, thoughts)
