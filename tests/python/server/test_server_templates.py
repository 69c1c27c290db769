"""A model whose chat template never ends: its requests fail, the others are served, the server ends in time."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import chainmodels
import pytest

from reasoningdata import CHAINS, THINK, WORDS
from servers import Process, ask

CHAT: list[Any] = [{"role": "user", "content": "Is it?"}]
#: The string search of the fourth template is one call of C code, during which no other thread of its process runs.
HOSTILE = ["{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
           "{% set ns = namespace(v=(1,)) %}{% for i in range(40) %}{% set ns.v = (ns.v, ns.v) %}{% endfor %}"
           "{{ dict([(ns.v, 1)]) }}",
           "{{ raise_exception([1] * 10 ** 9) }}", "{{ ('a' * 2000000).rfind('ab' ~ 'a' * 1000000) }}"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    made = [f"good={chainmodels.save(tmp_path_factory.mktemp('good'), THINK, CHAINS[THINK], WORDS)}"]
    for at, source in enumerate(HOSTILE):
        folder = chainmodels.save(tmp_path_factory.mktemp("hostile"), source + THINK, CHAINS[THINK], WORDS)
        made.append(f"hostile{at}={folder}")
    yield made


def chat(server: Process, model: str) -> tuple[int, Any]:
    return ask(server, "/v1/chat/completions", {"model": model, "messages": CHAT, "max_tokens": 4, "temperature": 0})


def test_endless_templates_of_a_server(models: list[str]) -> None:
    with Process("serve", *(part for model in models for part in ("--model", model)), "--grace", "2") as server:
        assert chat(server, "good")[0] == 200
        answers: list[tuple[int, Any]] = []
        names = [f"hostile{at}" for at in range(len(HOSTILE))] * 2
        threads = [threading.Thread(target=lambda name=name: answers.append(chat(server, name))) for name in names]
        for thread in threads:
            thread.start()
        quiet = 0  # responses during which no hostile request ended
        while any(thread.is_alive() for thread in threads):
            before = len(answers)
            assert ask(server, "/health")[0] == 200
            quiet += len(answers) == before
            time.sleep(0.01)
        assert quiet > 3 * len(threads), f"{quiet} responses of an event loop that renders no template"
        assert len(answers) == len(threads)
        assert {(status, body["error"]["code"]) for status, body in answers} == {(400, "template_refused")}, answers
        assert chat(server, "good")[0] == 200
        thread = threading.Thread(target=lambda: ask_once(server), daemon=True)
        thread.start()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) in (0, -signal.SIGTERM, 143)


def ask_once(server: Process) -> None:
    """Send a request that the end of the server may cut off."""
    try:
        chat(server, "hostile0")
    except OSError:
        pass
