"""Memory that clients can fill: bodies and what is parsed out of them, and the stores of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpool.server import bodies
from mpool.server.body_memory import SMALL, BodyMemory
from mpool.server.errors import Refusal
from servers import Process, Raw, ask, limits, serving
from waiting import until

MIB = 2**20


@pytest.fixture(scope="module")
def server(bert: Path) -> Iterator[Any]:
    with serving([f"bert={bert}"], max_body=MIB, max_bodies=4 * MIB) as made:
        yield made


# ---- JSON texts in bodies --------------------------------------------------------------------------------------------

def call(arguments: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}}


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": [
        {"id": f"c{at}", "type": "function", **call(text)} for at, text in enumerate(texts)]}]}


def items(*texts: str) -> dict[str, Any]:
    return {"input": [{"type": "function_call", "call_id": f"c{at}", "name": "f", "arguments": text}
                      for at, text in enumerate(texts)]}


def guided(*texts: str) -> dict[str, Any]:
    schema = '{"anyOf": [%s]}' % ",".join(texts)
    return {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": schema}}


@pytest.mark.parametrize("path, make", [
    ("/v1/chat/completions", chat), ("/tokenize", chat), ("/v1/responses", items), ("/v1/chat/completions", guided),
    ("/api/chat", lambda *texts: {"messages": [{"role": "assistant", "content": "", "tool_calls": list(
        map(call, texts))}]})], ids=["chat", "tokenize", "responses", "guided", "ollama"])
def test_values_of_json_texts_count_as_those_of_the_body(server: Any, monkeypatch: pytest.MonkeyPatch, path: str,
                                                         make: Any) -> None:
    """The limits hold for the JSON texts of a body together; each of them alone is allowed."""
    monkeypatch.setattr(bodies, "_MAX_CONTAINERS", 1000)
    text = '{"a": [%s]}' % ",".join(["{}"] * 600)
    statuses = []
    for texts in ([text], [text] * 2):
        status, found = ask(server, path, {"model": "bert", **make(*texts)})
        statuses.append(status)
    assert statuses == [400, 413], found  # 400: the model does not generate text
    assert "1,000 lists and objects" in json.dumps(found)


# ---- all bodies together ---------------------------------------------------------------------------------------------

def test_unfinished_bodies_have_a_limit_together(server: Any) -> None:
    """Large bodies fill three quarters of the limit. Further ones get 503; small ones are still served."""
    part = b'{"model": "bert", "input": "' + b"x" * (900 << 10)
    memory = server.state.bodies
    assert (memory.most, memory.bytes) == (4 * MIB, 0)
    held = [Raw(server).request("/v1/embeddings", part, length=MIB) for _ in range(3)]
    until(lambda: memory.bytes == 3 * len(part))
    with Raw(server) as raw:
        status, headers, body = raw.request("/v1/embeddings", part, length=MIB).response()
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "too_many_bodies")
    assert memory.bytes == 3 * len(part) and ask(server, "/health")[0] == 200
    small = {"model": "bert", "input": "x" * 1000}
    assert ask(server, "/v1/embeddings", small)[0] == 200
    with limits(server, body_timeout=0.2), Raw(server) as raw:  # a sender that does not go on gives its share back
        raw.request("/v1/embeddings", part[:200 << 10], length=MIB)
        until(lambda: memory.bytes > 3 * len(part))
        assert raw.response()[0] == 408
    until(lambda: memory.bytes == 3 * len(part))
    for raw in held:
        raw.socket.close()
    until(lambda: memory.bytes == 0)
    assert ask(server, "/v1/embeddings", part + b"\"}")[0] == 200


def test_shares() -> None:
    """A share that can never fit is refused with 413, one that does not fit now with 503."""
    memory = BodyMemory(8 * SMALL)
    large, small = memory.share(), memory.share()
    large.add(6 * SMALL)
    for share, size, code in ((large, 1, "request_too_large"), (memory.share(), SMALL + 1, "too_many_bodies"),
                              (memory.share(), 6 * SMALL + 1, "request_too_large")):
        with pytest.raises(Refusal) as caught:
            share.add(size)
        assert caught.value.code == code
    small.add(SMALL)
    assert memory.bytes == 7 * SMALL
    small.close()
    small.close()
    assert memory.bytes == 6 * SMALL


def test_values_count_as_memory() -> None:
    """The memory of a body is at most twice that of its bytes and its values."""
    share = BodyMemory(1 << 30).share()
    bodies.Counts(share).add(b'{"a":[' + b",".join([b'"ab"'] * 100_000) + b"]}")
    assert 100_000 * (5 + 64) <= share.bytes <= 100_000 * (5 + 64) + 1000


def test_memory_of_large_bodies_is_returned(bert: Path) -> None:
    """A request whose values took 150 MB leaves nothing behind, without a collection."""
    body = b'{"model":"bert","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":[%s]}}' % b",".join(
        [b'"ab"'] * 1_500_000)
    with Process("serve", "--model", f"bert={bert}", "--only") as made:
        def resident(name: str) -> int:
            with open(f"/proc/{made.process.pid}/status", encoding="ascii") as file:
                return next(int(line.split()[1]) >> 10 for line in file if line.startswith(name))

        assert ask(made, "/v1/chat/completions", body[:100] + b'"x"]}}')[0] == 400
        before = resident("VmRSS:")
        for _ in range(2):
            assert ask(made, "/v1/chat/completions", body)[0] == 400
        assert resident("VmHWM:") > before + 60
        until(lambda: resident("VmRSS:") < before + 30)
