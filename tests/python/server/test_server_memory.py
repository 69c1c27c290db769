"""Memory that clients can fill: bodies and what is parsed out of them, and the stores of the server."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.conversation import enforced_schemas
from mpool.debug.show import limit_of
from mpool.runtime import history
from mpool.server import bodies, models
from mpool.server.body_memory import SMALL, BodyMemory
from mpool.server.errors import Refusal
from mpool.server.settings import Settings
from servers import Process, Raw, ask, limits, serving
from mpool.stores import STORES
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
    schema = f'{{"anyOf": [{",".join(texts)}]}}'
    return {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"json": schema}}


@pytest.mark.parametrize("path, make", [
    ("/v1/chat/completions", chat), ("/tokenize", chat), ("/v1/responses", items), ("/v1/chat/completions", guided),
    ("/api/chat", lambda *texts: {"messages": [{"role": "assistant", "content": "", "tool_calls": list(
        map(call, texts))}]})], ids=["chat", "tokenize", "responses", "guided", "ollama"])
def test_values_of_json_texts_count_as_those_of_the_body(server: Any, monkeypatch: pytest.MonkeyPatch, path: str,
                                                         make: Any) -> None:
    """The limits hold for the JSON texts of a body together; each of them alone is allowed."""
    monkeypatch.setattr(bodies, "_MAX_CONTAINERS", 1000)
    text = json.dumps({"a": [{}] * 600})
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
    assert memory.most == 4 * MIB
    until(lambda: memory.bytes == 0)
    held = [Raw(server).request("/v1/embeddings", part, length=MIB) for _ in range(3)]
    until(lambda: memory.bytes == 3 * len(part))
    with Raw(server) as raw:
        status, headers, body = raw.request("/v1/embeddings", part, length=MIB).response()
        assert (status, headers["retry-after"], json.loads(body)["error"]["code"]) == (503, "1", "too_many_bodies")
    until(lambda: memory.bytes == 3 * len(part))  # a share ends a moment after its response
    assert ask(server, "/health")[0] == 200
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


# ---- models ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("path, body", [("/v1/embeddings", {"input": "a"}), ("/api/embed", {"input": "a"}),
                                        ("/embed", {"inputs": "a"})])
def test_a_lack_of_memory_is_in_the_answer_and_in_the_log(bert: Path, path: str, body: Any) -> None:
    """The log is standard error. It has warnings also without ``--verbose``, and nothing else. A client that asks for
    too much does not make the server unhealthy, and the event of the load has the reason."""
    with Process("serve", "--model", f"one={bert}", "--only", env={**os.environ, "MPOOL_MEMORY_MB": "1"}) as made:
        status, found = ask(made, path, {"model": "one", **body})
        health, state = ask(made, "/health")
        event = until(lambda: [one for one in ask(made, "/api/mpool/events")[1]["events"]
                               if one["kind"] == "load_failed"])[0]
        made.process.send_signal(signal.SIGTERM)
        _, log = made.end()
    assert status in (503, 429)
    told = json.dumps(found).partition("one needs ")[2].partition(";")[0]
    assert told.endswith("MB, but the memory limit is 1.0 MB")
    assert "--memory" in json.dumps(found) and "MPOOL_MEMORY_MB" not in json.dumps([found, event])
    assert (health, state["status"], event["code"]) == (200, "degraded", "out_of_memory") and told in event["reason"]
    assert [line for line in log.splitlines() if " WARNING mpool.pool: " in line and f"one needs {told}" in line], log


# ---- stores ----------------------------------------------------------------------------------------------------------

def test_every_store_has_its_limit() -> None:
    """The table has the limits that are in use, and docs/settings.md has the table."""
    settings, rows = Settings(), {name: row[1:3] for name, row in STORES.items()}
    assert {name: rows[name] for name in ("connections", "bodies", "streams", "history")} == {
        "connections": (settings.max_connections, None), "bodies": (None, settings.body_memory),
        "streams": (settings.max_streams, None), "history": (history.KEPT, 2 * MIB)}
    assert all(row.entries or row.bytes or row.setting for row in STORES.values())
    shown = "\n".join(f"| {name} | {row.what} | {limit_of(row._replace(setting=row.setting and f'`{row.setting}`'))} | "
                      f"{row.full} |" for name, row in STORES.items())
    assert shown in (Path(__file__).parents[3] / "docs" / "settings.md").read_text(encoding="utf-8")
    assert mpool.show_config("dicts")["stores"]["aliases"]["bytes"] == 64 * MIB


def test_aliases_have_a_limit_of_bytes(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """System messages and options of all aliases count, in memory: one wide character widens all of a text."""
    monkeypatch.setattr(models, "_MAX_ALIAS_BYTES", 1_000_000)
    with serving([f"bert={bert}"]) as made:
        def create(name: str, system: str, **options: Any) -> int:
            return ask(made, "/api/create", {"model": name, "from": "bert", "system": system, "stream": False,
                                             "parameters": options})[0]

        statuses = [create(f"a{at}", "x" * 400_000) for at in range(3)]
        statuses += [create("wide", "x" * 50_000 + "\U0001f600"), create("stops", "x", stop=["y" * 200_000] * 2)]
        assert statuses == [200, 200, 400, 400, 400]
        assert create("a1", "x" * 10) == 200 and create("a2", "x" * 400_000) == 200  # one that is replaced counts once
        assert ask(made, "/api/create", {"model": "a3", "from": "a2", "stream": False})[0] == 400
        with Raw(made) as raw:
            assert raw.request("/api/delete", b'{"model": "a2"}', method="DELETE").response()[0] == 200
        assert create("wide", "x" * 50_000 + "\U0001f600") == 200
        assert [row["name"] for row in ask(made, "/api/tags")[1]["models"]] == ["bert", "a0", "a1", "wide"]


def test_the_memory_of_schemas_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client chooses the schemas of its tools: 256 of 64 KiB would stay in memory."""
    pytest.importorskip("llguidance")
    monkeypatch.setattr(enforced_schemas, "CACHED_BYTES", 100_000)
    monkeypatch.setattr(enforced_schemas, "_cache", type(enforced_schemas._cache)())
    for at in range(5):
        enforced_schemas.enforce(json.dumps({"const": "x" * 20_000 + str(at)}), False)
    kept = [source[-3:] for _, (source, _) in enforced_schemas._cache._entries]
    assert kept == ['3"}', '4"}'], kept
