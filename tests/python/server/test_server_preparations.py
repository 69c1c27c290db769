"""Preparations of long requests: few at once, and none for a prompt that cannot fit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpool.host import native_calls
from mpool.conversation import template
from mpool.tasks import chat_prompt, text_embedding, text_to_text
from mpool.tokenizers import Tokenizer
from servers import ask, serving


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[Any]:
    with serving([f"llama={llama}"]) as made:
        yield made


class Watched:
    """Wraps a function: counts the calls, those that run at the same time, and their threads."""

    def __init__(self, function: Any) -> None:
        self._function, self._lock = function, threading.Lock()
        self.calls = self.running = self.most = 0
        self.threads: set[str] = set()

    def __call__(self, *args: Any, **more: Any) -> Any:
        with self._lock:
            self.calls, self.running = self.calls + 1, self.running + 1
            self.most = max(self.most, self.running)
            self.threads.add(threading.current_thread().name.rpartition("-")[0])
        time.sleep(0.02)
        try:
            return self._function(*args, **more)
        finally:
            with self._lock:
                self.running -= 1


def chat(count: int, **more: Any) -> dict[str, Any]:
    return {"model": "llama", "messages": [{"role": ("user", "assistant")[at % 2], "content": "a"}
                                           for at in range(count)], **more}


def items(count: int) -> dict[str, Any]:
    found = chat(count)
    return {"model": "llama", "input": found["messages"]}


ROUTES = [("/v1/chat/completions", chat), ("/v1/responses", items), ("/tokenize", chat),
          ("/api/chat", lambda count: chat(count, stream=False)),
          ("/v1/messages", lambda count: chat(count, max_tokens=1)),
          ("/v1/messages/count_tokens", lambda count: chat(count))]


@pytest.mark.parametrize("path, make", ROUTES, ids=[path for path, _ in ROUTES])
def test_two_long_conversations_are_converted_at_once(server: Any, monkeypatch: pytest.MonkeyPatch, path: str,
                                                      make: Any) -> None:
    """A thread that runs Python code delays the event loop by 5 ms each time: 24 of them by 4 s."""
    checked, copied = Watched(chat_prompt.check_messages), Watched(template._plain_data)
    monkeypatch.setattr(chat_prompt, "check_messages", checked)
    monkeypatch.setattr(template, "_plain_data", copied)
    threads = [threading.Thread(target=ask, args=(server, path, make(2001))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for watched in (checked, copied):
        assert watched.calls >= 8 and watched.most <= 2 and watched.threads == {"mpool-bodies"}


@pytest.mark.parametrize("path, body", [
    ("/v1/chat/completions", chat(9999)), ("/v1/responses", items(9999)), ("/v1/messages", chat(9999, max_tokens=1)),
    ("/api/chat", chat(9999, truncate=False)), ("/v1/completions", {"model": "llama", "prompt": "a" * 900_000}),
    ("/v1/completions", {"model": "llama", "prompt": [1] * 900_000}),
    ("/api/generate", {"model": "llama", "prompt": "a" * 900_000, "raw": True})],
    ids=["chat", "responses", "messages", "ollama", "text", "ids", "raw"])
def test_a_prompt_that_cannot_fit_is_not_tokenized(server: Any, monkeypatch: pytest.MonkeyPatch, path: str,
                                                   body: dict[str, Any]) -> None:
    """Control tokens and characters are counted first: encoding 1,000,000 characters takes a second and 350 MB."""
    def encode(*args: Any) -> Any:
        pytest.fail("the prompt was tokenized")

    monkeypatch.setattr(Tokenizer, "_encode_marked", encode)
    monkeypatch.setattr(text_to_text, "_encode", encode)
    monkeypatch.setattr(text_to_text.sampling, "check_id", encode)
    status, found = ask(server, path, body)
    assert status == 400 and "at least" in str(found), found


@pytest.mark.parametrize("path, field, inputs", [
    ("/v1/embeddings", "input", ["a"] * 2048), ("/api/embed", "input", ["a"] * 2048),
    ("/embed", "inputs", ["a"] * 2048), ("/v1/embeddings", "input", ["a" * 20] * 2048),
    ("/v1/embeddings", "input", [[5]] * 2048),
    ("/v1/embeddings", "input", [[5] * 60] * 100)], ids=["openai", "ollama", "tei", "longer", "ids", "few rows of ids"])
def test_many_tiny_inputs_are_prepared_on_threads(bert: Path, monkeypatch: pytest.MonkeyPatch, path: str, field: str,
                                                  inputs: list[Any]) -> None:
    """Neither many texts of one character nor many token ids are converted on the event loop. Four requests at once:
    a thread that waits for others of its group would stop all of them."""
    texts, ids = Watched(text_embedding._encoded), Watched(text_embedding._pack_ids)
    monkeypatch.setattr(text_embedding, "_encoded", lambda *args: texts(*args))
    monkeypatch.setattr(text_embedding, "_pack_ids", lambda *args: ids(*args))
    with serving([f"bert={bert}"], allow_token_ids=True) as server:
        body, found = {"model": "bert", field: inputs}, []
        threads = [threading.Thread(target=lambda: found.append(ask(server, path, body))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [status for status, _ in found] == [200] * 4, [str(one)[:300] for one in found]
    if isinstance(inputs[0], list):
        assert ids.calls >= 4 and ids.most <= 2 and ids.threads == {"mpool-bodies"}
    else:
        assert texts.calls >= 4 and texts.threads == {"mpool-texts"}


def test_what_counts_as_many() -> None:
    """Characters of strings and keys, and 16 for each value."""
    most = native_calls.LONG_ON_LOOP
    for few, many in (("x" * (most - 1), "x" * most), ([0] * 1000, [0] * 1024),
                      ({"k" * (most - 100): 1}, {"k" * most: 1}),
                      ([["x" * 99] * 9] * 9, [["x" * 99] * 30] * 9),
                      ({"a": [{}] * 900}, {"a": [{}] * 1100})):
        assert not native_calls.are_many(few) and native_calls.are_many(many)
    deep: Any = 0
    for _ in range(100_000):
        deep = [deep]
    assert native_calls.are_many(deep)
    while isinstance(deep, list):
        deep = deep[0]
