"""``suffix`` in OpenAI's and Ollama's completions: the tokens of the prompt, and what ends the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chainmodels
import pytest

from servers import Raw, ask, serving

FIM = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|file_sep|>"]
#: The middle is "mid"; its last letter is followed by a token that begins another file.
CHAINS = [("<fim_middle>", "m"), ("m", "i"), ("i", "d"), ("d", "<|file_sep|>"), ("<|file_sep|>", "x"), ("x", "x")]
TEMPLATE = "{{ messages[0].content }}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Iterator[Any]:
    with serving([f"coder={chainmodels.save(tmp_path_factory.mktemp('coder'), TEMPLATE, CHAINS, FIM)}",
                  f"llama={llama}"]) as made:
        yield made


BASE: dict[str, Any] = {"model": "coder", "prompt": "ab", "suffix": "cde"}
#: Three tokens of the model's vocabulary for the parts, and one per letter.
PROMPT_TOKENS = 3 + 2 + 3


def test_openai_completions_fill_in_the_middle(server: Any) -> None:
    body = {**BASE, "max_tokens": 20, "temperature": 0}
    status, found = ask(server, "/v1/completions", body)
    assert status == 200 and found["choices"][0]["text"] == "mid" and found["choices"][0]["finish_reason"] == "stop"
    assert found["usage"]["prompt_tokens"] == PROMPT_TOKENS
    status, found = ask(server, "/v1/completions", {**body, "prompt": ["ab", "xyz"], "echo": True})
    assert [choice["text"] for choice in found["choices"]] == ["abmid", "xyzmid"]
    with Raw(server) as raw:
        status, _, data = raw.request("/v1/completions", json.dumps({**body, "stream": True}).encode()).answer()
    parts = [json.loads(block[6:]) for block in data.decode().split("\n\n") if block.startswith("data: {")]
    assert "".join(choice["text"] for part in parts for choice in part["choices"]) == "mid"
    assert parts[-1]["choices"][0]["finish_reason"] == "stop"


def test_ollama_generate_fills_in_the_middle(server: Any) -> None:
    body = {**BASE, "stream": False, "options": {"temperature": 0, "num_predict": 20}}
    status, found = ask(server, "/api/generate", body)
    assert status == 200 and found["response"] == "mid" and found["done_reason"] == "stop"
    assert found["prompt_eval_count"] == PROMPT_TOKENS
    assert "insert" in ask(server, "/api/show", {"model": "coder"})[1]["capabilities"]
    assert "insert" not in ask(server, "/api/show", {"model": "llama"})[1]["capabilities"]


def test_names_of_tokens_in_the_texts_are_plain_text(server: Any) -> None:
    """The added tokens of this vocabulary are no control tokens; control tokens of the model are."""
    text = "<|start|>"
    found = ask(server, "/v1/completions", {**BASE, "suffix": text, "max_tokens": 1})[1]
    assert found["usage"]["prompt_tokens"] == 3 + 2 + len(text)


@pytest.mark.parametrize(("change", "status", "word"), [
    ({"model": "llama"}, 400, "`suffix` requires a model"), ({"prompt": [5]}, 400, "`suffix` requires text prompts"),
    ({"suffix": "x" * 1_000_001}, 413, "`suffix` must have at most")], ids=str)
def test_refused_suffixes(server: Any, change: dict[str, Any], status: int, word: str) -> None:
    found = ask(server, "/v1/completions", {**BASE, **change})
    assert found[0] == status and word in found[1]["error"]["message"], found
    if "prompt" not in change:
        found = ask(server, "/api/generate", {**BASE, **change})
        assert found[0] == status and word in found[1]["error"], found
