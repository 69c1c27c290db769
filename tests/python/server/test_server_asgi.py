"""The application under other ASGI servers: httpx's ASGITransport, uvicorn without the protocol class, hypercorn."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("msgspec")
hypercorn = pytest.importorskip("hypercorn.asyncio")

import uvicorn  # noqa: E402
from hypercorn.config import Config as HypercornConfig  # noqa: E402

import mpool  # noqa: E402
from mpool.server import create_app  # noqa: E402
from mpool.server.application import Application, make_app  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402
from mpool.server.state import State  # noqa: E402

from servers import Raw  # noqa: E402
from waiting import busy, idle, until  # noqa: E402

LONG = {"model": "llama", "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture
def app(bert: Path, llama: Path) -> Application:
    return create_app([f"bert={bert}", f"llama={llama}"], catalogue=False)


@asynccontextmanager
async def lifespan(app: Application) -> AsyncIterator[list[str]]:
    """Run the lifespan protocol around a block. Yields the types of the messages that the application sent."""
    incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: list[str] = []
    replied = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message["type"])
        replied.set()

    task = asyncio.create_task(app({"type": "lifespan", "asgi": {"version": "3.0"}}, incoming.get, send))
    for kind in ("startup", "shutdown"):
        replied.clear()
        incoming.put_nowait({"type": f"lifespan.{kind}"})
        await asyncio.wait_for(replied.wait(), 30)
        if kind == "startup":
            yield sent
    await task


def client_of(app: Application, **more: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", **more)


def chunks_of(text: str) -> list[Any]:
    """JSON of the server-sent events; the last one must be ``[DONE]``."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# ---- httpx.ASGITransport ---------------------------------------------------------------------------------------------

def test_asgi_transport(app: Application) -> None:
    async def run() -> None:
        async with lifespan(app) as sent, client_of(app) as client:
            assert sent == ["lifespan.startup.complete"]
            found = await client.post("/v1/embeddings", json={"model": "bert", "input": ["a", "b"]})
            assert found.status_code == 200 and len(found.json()["data"]) == 2

            found = await client.post("/v1/completions", json={**LONG, "max_tokens": 5})
            assert found.headers["content-type"].startswith("text/event-stream")
            assert chunks_of(found.text)[-1]["choices"][0]["finish_reason"] == "length"

            found = await client.post("/v1/completions", json={**LONG, "temperature": -1})
            assert found.status_code == 400
            assert found.json()["error"] | {"message": ""} == {
                "message": "", "type": "invalid_request_error", "param": "temperature", "code": "invalid_value"}
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.get("/health")).status_code == 200
            head = await client.head("/health")
            assert head.status_code == 200 and head.content == b""
        assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        async with client_of(app) as client:
            found = await client.post("/v1/embeddings", json={"model": "bert", "input": "a"})
            assert (found.status_code, found.json()["error"]["code"]) == (503, "shutting_down")

    asyncio.run(run())


def test_create_app_does_not_close_the_callers_pool(bert: Path, pool: mpool.Pool) -> None:
    async def run() -> None:
        app = create_app([f"b={bert}"], pool=pool, catalogue=False)
        async with lifespan(app), client_of(app) as client:
            assert (await client.post("/v1/embeddings", json={"model": "b", "input": "a"})).status_code == 200

    asyncio.run(run())
    assert len(pool.embed("a", bert)) > 0


def test_create_app_closes_the_pool_of_a_config(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[mpool.Pool] = []

    class Recorded(mpool.Pool):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("mpool.server.application.Pool", Recorded)
    config = mpool.PoolConfig(threads=1, offline=True, max_embed_inputs=2)

    async def run() -> None:
        app = create_app([f"b={bert}"], pool=config, catalogue=False)
        async with lifespan(app), client_of(app) as client:
            for inputs, status in ((["a", "b"], 200), (["a", "b", "c"], 413)):
                assert (await client.post("/v1/embeddings", json={"model": "b", "input": inputs})).status_code == status

    asyncio.run(run())
    (pool,) = made
    assert pool.config == config
    with pytest.raises(mpool.ShuttingDown):
        pool.embed("a", bert)


def test_mounted_in_another_application(bert: Path) -> None:
    """It gets no lifespan events there: the outer application closes the pool that both use."""
    from starlette.applications import Starlette
    from starlette.routing import Mount
    from starlette.testclient import TestClient

    pool = mpool.Pool(mpool.PoolConfig(threads=1, offline=True))

    @asynccontextmanager
    async def closing(outer: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(pool.close)

    inner = create_app([f"b={bert}"], pool=pool, catalogue=False)
    with TestClient(Starlette(routes=[Mount("/llm", inner)], lifespan=closing), "http://localhost") as client:
        assert client.post("/llm/v1/embeddings", json={"model": "b", "input": "a"}).status_code == 200
        assert client.get("/llm/v1/nothing").status_code == 404
        assert len(pool.embed("a", bert)) > 0
    with pytest.raises(mpool.ShuttingDown):
        pool.embed("a", bert)


def test_mounted_under_a_prefix(app: Application) -> None:
    async def run() -> None:
        transport = httpx.ASGITransport(app, root_path="/models")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            assert (await client.get("/models/health")).status_code == 200
            assert (await client.get("/health")).status_code == 200

    asyncio.run(run())


def test_a_disconnect_after_the_response_is_none(app: Application, caplog: pytest.LogCaptureFixture) -> None:
    """Some servers report a disconnect as soon as the response is complete: the request was not disconnected."""
    async def run() -> list[str]:
        complete, body = asyncio.Event(), json.dumps({"model": "bert", "input": "x"}).encode()
        messages = [{"type": "http.request", "body": body, "more_body": False}]
        types = list[str]()

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await complete.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            types.append(message["type"])
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                complete.set()
                await asyncio.sleep(0.05)

        headers = {"host": "localhost", "content-type": "application/json", "content-length": str(len(body))}
        async with lifespan(app):
            await app({"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
                       "path": "/v1/embeddings", "raw_path": b"/v1/embeddings", "query_string": b"", "root_path": "",
                       "scheme": "http", "client": ("127.0.0.1", 1), "server": ("localhost", 80),
                       "headers": [(name.encode(), value.encode()) for name, value in headers.items()]},
                      receive, send)
        return types

    with caplog.at_level(logging.INFO, "mpool.server"):
        assert asyncio.run(run()) == ["http.response.start", "http.response.body"]
    line, = [text for text in caplog.messages if "POST /v1/embeddings" in text]
    assert "POST /v1/embeddings 200 in " in line


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A listening socket on a free port of loopback."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


# ---- servers ---------------------------------------------------------------------------------------------------------

@contextmanager
def under_uvicorn(app: Application) -> Iterator[int]:
    """Run uvicorn without mpool's protocol class. Yields the port."""
    with listening() as made:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[made])))
        with stopped(thread, lambda: setattr(server, "should_exit", True)):
            yield made.getsockname()[1]


@contextmanager
def under_hypercorn(app: Application) -> Iterator[int]:
    """Run hypercorn. Yields the port."""
    with listening() as made:
        config = HypercornConfig()
        config.bind, config.graceful_timeout = [f"fd://{os.dup(made.fileno())}"], 2.0
        config.errorlog = None
        loops: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

        async def serve() -> None:
            stop = asyncio.Event()
            loops.append((asyncio.get_running_loop(), stop))
            await hypercorn.serve(app, config, shutdown_trigger=stop.wait)  # type: ignore[arg-type]

        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        with stopped(thread, lambda: loops[0][0].call_soon_threadsafe(loops[0][1].set)):
            yield made.getsockname()[1]


@contextmanager
def stopped(thread: threading.Thread, stop: Callable[[], object]) -> Iterator[None]:
    thread.start()
    try:
        yield
    finally:
        stop()
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop within 30 s"


SERVERS = pytest.mark.parametrize("under", [under_uvicorn, under_hypercorn])


@SERVERS
def test_other_servers(under: Any, app: Application) -> None:
    with under(app) as port, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        found = client.post("/v1/embeddings", json={"model": "bert", "input": ["a", "b"]})
        assert found.status_code == 200 and len(found.json()["data"]) == 2
        found = client.post("/v1/completions", json={**LONG, "max_tokens": 5})
        assert chunks_of(found.text)[-1]["choices"][0]["finish_reason"] == "length"
        found = client.post("/v1/embeddings", json={"model": "none", "input": "a"})
        assert (found.status_code, found.json()["error"]["param"]) == (404, "model")
        assert client.get("/health", headers={"host": "evil.example"}).status_code == 421
        found = client.post("/api/embed", json={"model": "bert", "input": "a"})
        assert len(found.json()["embeddings"]) == 1


@SERVERS
def test_disconnect_cancels_a_stream(under: Any, bert: Path, llama: Path) -> None:
    pool = mpool.Pool(mpool.PoolConfig(offline=True))
    app = create_app([f"llama={llama}"], pool=pool, catalogue=False)
    with pool, under(app) as port:
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=LONG, timeout=60) as found:
            next(found.iter_lines())
        idle(pool, 20)
        assert pool.registry.stats()["cancelled"] == 1


@SERVERS
def test_disconnect_cancels_a_request_without_stream(under: Any, llama: Path) -> None:
    pool = mpool.Pool(mpool.PoolConfig(offline=True))
    app = create_app([f"llama={llama}"], pool=pool, catalogue=False)
    with pool, under(app) as port:
        pool.load(llama)
        with Raw(SimpleNamespace(port=port)) as raw:  # type: ignore[arg-type]
            raw.request("/v1/completions", json.dumps({**LONG, "stream": False, "n": 16}).encode())
            until(lambda: busy(pool))
        idle(pool, 20)
        assert pool.registry.stats()["cancelled"] == 1


def test_environment_variables_configure_the_application(bert: Path, tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """The four variables of docs/server/deployment.md replace the options of ``mpool serve``."""
    token, origin = tmp_path / "token", "https://page.example"
    for name, value in {"MODELS": f"one={bert}, two={bert}", "TOKEN_FILE": str(token),
                        "ALLOW_HOSTS": "models.example, other.example:8000",
                        "ALLOW_ORIGINS": origin}.items():
        monkeypatch.setenv(f"MPOOL_SERVER_{name}", value)
    app = create_app()
    bearer = {"authorization": f"Bearer {token.read_text().strip()}"}

    async def run() -> None:
        async with lifespan(app), httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            for host in ("models.example", "other.example:8000"):
                found = await client.get(f"http://{host}/v1/models", headers={**bearer, "origin": origin})
                assert found.status_code == 200 and {"one", "two"} <= {row["id"] for row in found.json()["data"]}
                assert found.headers["access-control-allow-origin"] == origin
            for host, headers, status in (("models.example", {}, 401), ("models.example:8000", bearer, 421),
                                          ("models.example", {**bearer, "origin": "https://other.example"}, 403)):
                assert (await client.get(f"http://{host}/v1/models", headers=headers)).status_code == status

    asyncio.run(run())


def test_uvicorn_runs_the_factory(bert: Path) -> None:
    environment = {**os.environ, "MPOOL_SERVER_MODELS": f"b={bert}", "MPOOL_SERVER_ALLOW_HOSTS": "models.example",
                   "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen([sys.executable, "-m", "uvicorn", "mpool.server:app", "--factory", "--port", "0"],
                               env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = next(line for line in process.stderr if "running on http://" in line)
        port = int(line.partition("http://127.0.0.1:")[2].split()[0])
        found = httpx.post(f"http://127.0.0.1:{port}/v1/embeddings", json={"model": "b", "input": "a"}, timeout=60,
                           headers={"host": "models.example"})
        assert found.status_code == 200
        process.terminate()
        assert "Application shutdown complete" in process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.communicate()


# ---- a response that cannot be sent ----------------------------------------------------------------------------------

@pytest.mark.parametrize("stream, failing, outcome", [
    (False, "head", "failed"), (False, "end", "failed"), (False, "", "completed"), (True, "head", "failed"),
    (True, "chunk", "internal"), (True, "end", "failed"), (True, "", "completed")])
def test_history_of_a_response_that_was_not_sent(llama: Path, stream: bool, failing: str, outcome: str) -> None:
    """``completed`` says that the whole response was sent. ``failing``: the first part that cannot be sent."""
    body = json.dumps({**LONG, "max_tokens": 3, "stream": stream}).encode()
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
             "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"", "root_path": "",
             "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 5000),
             "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"),
                         (b"content-length", str(len(body)).encode())]}

    async def send(message: Any) -> None:
        part = "head" if message["type"] == "http.response.start" else "chunk" if message.get("more_body") else "end"
        if part == failing:
            raise RuntimeError("the transport is gone")

    async def run(state: State) -> str:
        state.hosts = None  # accept the local address
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        with pytest.raises(RuntimeError, match="the transport is gone") if failing else nullcontext():
            await make_app(state)(scope, incoming.get, send)
        (row,) = state.history
        return row.outcome

    with mpool.Pool() as pool:
        assert asyncio.run(run(State(Settings(), pool, [f"llama={llama}"], catalogue=False))) == outcome
