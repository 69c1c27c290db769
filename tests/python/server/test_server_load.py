"""The server under load, and with requests generated from its OpenAPI document."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.runtime import watching
from servers import Process, Raw, ask, server_idle, serving, streamed
from waiting import until

CHAT = [{"role": "user", "content": "Hello"}]


def check_concurrent_streams(server: Any, count: int, tokens: int) -> None:
    """Run concurrent streams with different prompts and seeds. Each must be complete and, in a sample, equal to the
    result of the same request alone."""
    pool = server.state.pool
    bodies = [{"model": "llama", "messages": [{"role": "user", "content": f"Number {at}"}], "seed": at,
               "temperature": 1.5, "max_tokens": tokens, "ignore_eos": True} for at in range(count)]

    async def work() -> list[tuple[str, str]]:
        return await asyncio.gather(*(streamed(server.port, body) for body in bodies))

    found = asyncio.run(asyncio.wait_for(work(), 300))
    assert [end for _, end in found] == ["done"] * count
    for body, (text, _) in list(zip(bodies, found, strict=True))[::max(1, count // 20)]:
        alone = pool.chat(body["messages"], "llama", seed=body["seed"], temperature=1.5, max_tokens=tokens,
                          ignore_eos=True)
        assert text == alone.text
    assert len({text for text, _ in found}) > count // 2
    server_idle(server)


def test_40_concurrent_streams(llama: Path) -> None:
    with serving([f"llama={llama}"]) as server:
        check_concurrent_streams(server, 40, 30)


MESSAGES = {"model": "llama", "messages": CHAT, "max_tokens": 2000}
#: Requests of each protocol: path, and body. They need more memory than `shortages.full` leaves.
PROTOCOLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", MESSAGES), ("/v1/chat/completions", {**MESSAGES, "stream": True}),
    ("/v1/completions", {"model": "llama", "prompt": "Hello", "max_tokens": 2000}),
    ("/v1/responses", {"model": "llama", "input": "Hello", "max_output_tokens": 2000}),
    ("/v1/messages", MESSAGES), ("/api/chat", {**MESSAGES, "stream": False}),
    ("/api/generate", {"model": "llama", "prompt": "Hello", "options": {"num_predict": 2000}, "stream": True}),
    ("/v1/embeddings", {"model": "bert", "input": ["A cat sat."] * 1000}),
    ("/embed", {"inputs": ["A cat sat."] * 1000}),
    ("/api/embed", {"model": "bert", "input": ["A cat sat."] * 1000}))


def test_requests_of_each_protocol_wait_for_memory(llama: Path, bert: Path) -> None:
    """While running requests hold it; in a pool with `fail_fast` they get 503, and the seconds until a retry."""
    from shortages import full

    models = [f"llama={llama}", f"filler={llama}", f"bert={bert}"]
    config = mpool.PoolConfig(memory_bytes=40 << 20, offline=True, shutdown_grace=1.0, max_workers_per_model=1,
                              request_timeout=200)
    def pinned(server: Any) -> mpool.Pool:  # with other models loaded: their requests are checked when they arrive
        pool: mpool.Pool = server.state.pool
        for name in ("llama", "bert"):
            pool.load(name, pin=True)
        return pool

    with serving(models, config) as server:
        with full(pinned(server), "filler"):
            waiting = [Raw(server, 120).request(path, json.dumps(body).encode()) for path, body in PROTOCOLS]
            until(lambda: sum(line.length for watcher in list(watching._watchers.values())
                              for line in list(watcher._lines.values())) == len(waiting), 30)
        statuses = []
        for raw in waiting:
            with raw:
                statuses.append(raw.response()[0])
        assert statuses == [200] * len(waiting)
    with serving(models, dataclasses.replace(config, fail_fast=True)) as server, full(pinned(server), "filler"):
        for path, body in PROTOCOLS:
            with Raw(server) as raw:
                status, headers, _ = raw.request(path, json.dumps(body).encode()).response()
            wanted = {"/v1/messages": 529, "/embed": 429}.get(path, 503)
            assert (path, status, headers.get("retry-after")) == (path, wanted, "1")


@pytest.mark.slow
def test_200_concurrent_streams(llama: Path) -> None:
    with serving([f"llama={llama}"]) as server:
        check_concurrent_streams(server, 200, 100)


@pytest.mark.slow
def test_idle_and_incomplete_requests_do_not_disturb_others(llama: Path) -> None:
    with serving([f"llama={llama}"], header_timeout=10.0) as server:
        silent, half = [], []
        for _ in range(1000):
            raw = Raw(server)
            assert raw.request("/health").answer()[0] == 200
            silent.append(raw)
        for _ in range(100):
            half.append(Raw(server).send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: "))
        check_concurrent_streams(server, 50, 50)
        assert all(raw.answer()[0] == 408 for raw in half)
        assert all(raw.request("/health").answer()[0] == 200 for raw in silent[::50])
        for raw in (*silent, *half):
            raw.socket.close()


@pytest.mark.slow
def test_memory_is_constant_over_100_000_requests(bert: Path, llama: Path) -> None:
    def resident() -> int:
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with serving([f"bert={bert}", f"llama={llama}"]) as server:
        embed = json.dumps({"model": "bert", "input": "A sentence."}).encode()
        chat = json.dumps({"model": "llama", "messages": CHAT, "max_tokens": 3, "stream": True}).encode()

        def send(count: int) -> None:
            with Raw(server) as raw:
                for at in range(count):
                    path, body = ("/v1/chat/completions", chat) if at % 5 == 0 else ("/v1/embeddings", embed)
                    assert raw.request(path, body).answer()[0] == 200
                    if at % 500 == 0:  # also use new connections and refused requests
                        assert ask(server, "/v1/embeddings", {"model": "nothing", "input": "x"})[0] == 404

        send(3000)
        before = resident()
        send(100_000)
        assert resident() - before < 4 << 20


# ---- the OpenAPI document --------------------------------------------------------------------------------------------

def test_openapi_document_is_consistent(bert: Path) -> None:
    """All references resolve, names are unique, and every operation is described."""
    with serving([f"bert={bert}"]) as server:
        _, document = ask(server, "/openapi.json")
    text = json.dumps(document)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in document["components"]["schemas"], name
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names) >= 18 and all(names)
    assert "additionalProperties" not in document["components"]["schemas"]["EmbeddingsRequest"]
    with serving([f"bert={bert}"], strict=True) as server:
        _, document = ask(server, "/openapi.json")
    assert document["components"]["schemas"]["EmbeddingsRequest"]["additionalProperties"] is False


# ---- the command -----------------------------------------------------------------------------------------------------

def test_serve_with_a_token(bert: Path, tmp_path: Path) -> None:
    with Process("serve", "--offline", "-m", str(bert), "--token-file", str(tmp_path / "token")) as server:
        token = (tmp_path / "token").read_text().strip()
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        for given, code in ((token, 200), ("x" * 43, 401)):
            done = subprocess.run(["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H",
                                   f"Authorization: Bearer {given}", f"http://127.0.0.1:{server.port}/v1/models"],
                                  capture_output=True, text=True, timeout=30)
            assert done.stdout == str(code)
        server.process.terminate()
        code, stderr = server.end()
        assert code == 0 and "token" in stderr and token not in stderr


def test_errors_of_serve(bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mpool.cli import main

    with serving([f"bert={bert}"]) as server:
        assert main(["serve", "--port", str(server.port), "-m", f"bert={bert}"]) == 1
        assert "cannot listen on" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "-m", str(tmp_path / "nothing")]) == 1
    assert main(["serve", "--port", "0", "-m", f"a={bert}", "-m", f"a={bert}"]) == 1
    assert "taken" in capsys.readouterr().err
    assert main(["serve", "--port", "0", "--max-streams", "0"]) == 1
    assert "--max-streams must be an integer from 1 to 100000, got 0" in capsys.readouterr().err


def test_serve_without_optional_packages_names_the_extra(bert: Path) -> None:
    code = ("import sys; sys.modules['uvicorn'] = None\nfrom mpool.cli import main\n"
            "sys.exit(main(['serve', '--port', '0']))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and re.search(r"""pip install .*(the extra server of mpool|"\.\[server\]")""",
                                                done.stderr)
