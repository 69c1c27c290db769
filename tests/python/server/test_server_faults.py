"""Faults under load: signals, a full disk, killed worker processes, and no free file descriptors."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpool
from servers import Process, Raw, ask, server_idle, serving, streamed
from waiting import until

CHAT: dict[str, Any] = {"model": "llama", "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}


# ---- signals ---------------------------------------------------------------------------------------------------------

@pytest.mark.sample(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_shuts_down_under_load(bert: Path, llama: Path, number: signal.Signals) -> None:
    """The signal arrives while streams are in flight that exceed the grace period, and new requests keep arriving. Each
    accepted stream receives exactly one final event, later requests are refused, and the exit code is 0."""
    ends: list[str] = []
    long: set[int] = set()  # clients whose long stream has begun

    async def client(port: int, at: int) -> None:
        while True:
            tokens, begun = (16_000, lambda: long.add(at)) if at % 2 else (5, lambda: None)
            try:
                _, end = await streamed(port, {**CHAT, "seed": at, "n": 4, "max_tokens": tokens}, begun)
            except ConnectionError:
                return  # the socket is closed, or the connection was closed before the request was read
            if not end:
                return  # refused with an HTTP status
            ends.append(end)

    async def load(server: Process) -> None:
        clients = [asyncio.ensure_future(client(server.port, at)) for at in range(24)]
        await asyncio.sleep(1.5)
        for _ in range(300):
            if len(long) == 12:
                break
            await asyncio.sleep(0.1)
        assert len(long) == 12 and not any(task.done() for task in clients)
        server.process.send_signal(number)
        await asyncio.wait_for(asyncio.gather(*clients), 60)

    with Process("serve", "--offline", "-m", f"bert={bert}", "-m", f"llama={llama}", "--grace", "0.5", "--load",
                 "--only") as server:
        asyncio.run(load(server))
        code, stderr = server.end()
        assert code == 0, stderr
    assert set(ends) <= {"done", "shutting_down"} and ends.count("shutting_down") >= 12, ends


# ---- full disk, no file descriptors ----------------------------------------------------------------------------------

def test_full_disk_of_the_log(bert: Path, llama: Path) -> None:
    """Every request is logged, but no line can be written: all requests succeed nevertheless."""
    with open("/dev/full", "w") as full, \
            Process("serve", "-v", "--offline", "-m", f"bert={bert}", "-m", f"llama={llama}", "--only",
                    stderr=full) as server:
        async def load() -> list[tuple[str, str]]:
            return await asyncio.gather(*(streamed(server.port, {**CHAT, "seed": at, "max_tokens": 40})
                                          for at in range(20)))

        for _ in range(2):
            assert [end for _, end in asyncio.run(load())] == ["done"] * 20
        assert ask(server, "/v1/embeddings", {"model": "bert", "input": "x"})[0] == 200
        assert ask(server, "/v1/embeddings", {"model": "nobody", "input": "x"})[0] == 404
        server.process.terminate()
        assert server.end()[0] == 0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_no_file_descriptors_for_further_connections(bert: Path) -> None:
    """Further connections wait without a busy loop in the server. Open connections are served meanwhile, and the others
    after some have closed."""
    most = 96
    with Process("serve", "--offline", "-m", f"bert={bert}", "--load", "--only", "--max-connections", "512",
                 preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))) as server:
        early = Raw(server)
        assert early.request("/health").answer()[0] == 200
        used = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2 * most)]
        assert used < most - 1
        until(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) >= most - 1)
        before = _cpu_seconds(server.process.pid)
        time.sleep(1.5)
        assert _cpu_seconds(server.process.pid) - before < 0.5  # a busy loop would take 1.5 s
        assert early.request("/health").answer()[0] == 200
        for one in held:
            one.close()
        assert ask(server, "/v1/embeddings", {"model": "bert", "input": "x"})[0] == 200
        early.socket.close()
        server.process.terminate()
        assert server.end()[0] == 0


# ---- killed worker processes -----------------------------------------------------------------------------------------

async def _run_and_kill_worker(pool: mpool.Pool, warm: Callable[[], Any], requests: list[Any]) -> list[Any]:
    """Return the results of requests during which their only worker process is killed.

    The worker is stopped (SIGSTOP) until requests are running: on a fast machine they might complete before the kill.
    """
    await asyncio.to_thread(warm)
    worker, = [pid for row in pool.ps() for pid in row.processes]
    os.kill(worker, signal.SIGSTOP)
    running = asyncio.gather(*requests)
    while not any(row.running for row in pool.ps()):
        assert not running.done()
        await asyncio.sleep(0.002)
    os.kill(worker, signal.SIGKILL)
    found = list(await asyncio.wait_for(running, 120))
    assert pool.metrics()["retries"] > 0
    return found


def test_killed_worker_does_not_break_streams(llama: Path) -> None:
    """Every stream continues and has exactly one final event, and the next request is served."""
    config = mpool.PoolConfig(isolation="process", max_workers_per_model=1, shutdown_grace=1.0)
    with serving([f"llama={llama}"], config) as server:
        pool = server.state.pool

        async def work() -> list[tuple[str, str]]:
            # prompts must differ: the pool refuses a request whose content has killed a worker twice
            return await _run_and_kill_worker(
                pool, lambda: ask(server, "/v1/chat/completions", {**CHAT, "max_tokens": 1}), [
                    streamed(server.port, {
                        **CHAT, "messages": [{"role": "user", "content": f"Number {at}"}], "max_tokens": 3000})
                    for at in range(6)])

        found = asyncio.run(work())
        assert {end for _, end in found} == {"done"}
        assert asyncio.run(streamed(server.port, {**CHAT, "max_tokens": 5}))[1] == "done"
        server_idle(server)


def test_embeddings_of_a_killed_worker_are_computed_again(bert: Path) -> None:
    """The retry is invisible to the client: it receives the same embeddings as without the kill."""
    config = mpool.PoolConfig(isolation="process", max_workers_per_model=1, shutdown_grace=1.0)
    with serving([f"bert={bert}"], config) as server:
        pool = server.state.pool
        bodies = [{"model": "bert", "input": [f"Sentence number {at} of list {number}, which takes a while."
                                              for at in range(600)]} for number in range(4)]  # different, as above

        async def work() -> list[tuple[int, Any]]:
            return await _run_and_kill_worker(
                pool, lambda: ask(server, "/v1/embeddings", {"model": "bert", "input": "the first"}),
                [asyncio.to_thread(ask, server, "/v1/embeddings", body) for body in bodies])

        found = asyncio.run(work())
        assert {status for status, _ in found} == {200}
        time.sleep(0.15)  # wait until the cache of recent results (100 ms) has expired
        assert found == [ask(server, "/v1/embeddings", body) for body in bodies]
        server_idle(server)
