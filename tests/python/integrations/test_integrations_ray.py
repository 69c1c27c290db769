"""mpool on Ray, without a cluster: routing, autoscaling, requests whose replica dies, guards, Parquet files.

Tests that need a cluster are in test_ray_cluster.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray.serve")
httpx = pytest.importorskip("httpx")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from ray.exceptions import ActorDiedError  # noqa: E402
from ray.serve.exceptions import BackPressureError  # noqa: E402

import mpool  # noqa: E402
from mpool.cli.parser import make_parser  # noqa: E402
from mpool.integrations.ray import _share, routing  # noqa: E402
from mpool.integrations.ray.front import make_front, model_of  # noqa: E402
from mpool.integrations.ray.parquet import EmbedBatches, Embedded, embed_parquet  # noqa: E402
from mpool.integrations.ray.pools import Pools, operations  # noqa: E402
from mpool.integrations.ray.serving import Plan, application, make  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402

TOKEN = "a token of this test!".replace(" ", "-")
SETTINGS = Settings(port=8000)


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster, Ray does not report a number of CPUs: use 2."""
    monkeypatch.setattr(_share, "_cpus_here", lambda: 2)


# ---- routing and autoscaling ------------------------------------------------------------------------------------

def replica(*models: str, calls: int = 0) -> SimpleNamespace:
    return SimpleNamespace(routing_stats={"models": list(models), "calls": calls})


def test_requests_go_to_replicas_with_their_model() -> None:
    warm, other, busy, new = replica("a"), replica("b"), replica("a", calls=8), SimpleNamespace(routing_stats={})
    for _ in range(20):
        first, rest = routing.ranks([warm, other, busy, new], "a")
        assert first == [warm] and len(rest) == 2
    assert len(routing.ranks([other, busy, new], "a")) == 1  # no replica with the model has capacity: use any replica
    assert len(routing.ranks([warm, other], "")) == 1
    assert routing.ranks([], "a") == []
    assert model_of(b'{"messages": [], "model": "small:latest"}') == "small"
    for body in (b"", b"{", b"[1]", b'{"model": 3}', b'{"x": "model"}', b"[" * 100_000, b"\xff"):
        assert model_of(body) == ""


def test_number_of_replicas_follows_the_requests() -> None:
    policy = routing.CallsPolicy(4)

    def wanted(depths: list[float], current: int = 2, target: int = 2) -> float:
        return policy(SimpleNamespace(aggregated_metrics={routing.DEPTH: dict(enumerate(depths))},
                                      current_num_replicas=current, target_num_replicas=target))[0]

    assert [wanted(depths) for depths in ([0, 0], [4, 0], [4, 1], [8, 9])] == [1, 1, 2, 5]
    assert wanted([9], current=2, target=3) == 3  # one replica has not reported yet
    assert wanted([], current=0, target=1) == 1


def test_pools_share_the_memory() -> None:
    whole = _share._limit()
    assert _share.config(1, 0, None).memory_bytes == whole // 2 and _share.config(2, 0, None).memory_bytes == whole
    config = _share.config(1, 300, True)
    assert (config.memory_bytes, config.threads, config.offline) == (300 << 20, 1, True)


# ---- a replica ------------------------------------------------------------------------------------------------------

class Responses:
    """The response generator that a handle returns for a stream."""

    def __init__(self, batches: AsyncIterator[Any], ended: list[str]) -> None:
        self._batches, self._ended = batches, ended

    def __aiter__(self) -> Responses:
        return self

    async def __anext__(self) -> Any:
        return await self._batches.__anext__()

    def cancel(self) -> None:
        self._ended.append("cancelled")


class Handle:
    """A deployment handle: the first request goes to the first function, the second to the second, and so on."""

    def __init__(self, *replicas: Callable[..., AsyncIterator[Any]]) -> None:
        self.replicas, self.models, self.ended = list(replicas), [], []  # type: ignore[var-annotated]
        self.respond = SimpleNamespace(remote=self._respond)

    def options(self, *, stream: bool, multiplexed_model_id: str) -> Handle:
        assert stream
        self.models.append(multiplexed_model_id)
        return self

    def _respond(self, scope: Any, body: bytes) -> Responses:
        made = self.replicas.pop(0) if len(self.replicas) > 1 else self.replicas[0]
        return Responses(made(scope, body), self.ended)


def dies(after: int, healthy: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """Return a replica that dies after ``after`` batches."""
    async def respond(scope: Any, body: bytes) -> AsyncIterator[Any]:
        count = 0
        async for batch in healthy(scope, body):
            if count == after:
                raise ActorDiedError
            count += 1
            yield batch
    return respond


@pytest.fixture
def pools(llama: Path, bert: Path) -> Pools:
    return Pools((f"small={llama}", f"vectors={bert}"), False, "auto", SETTINGS, False, 1, 200, True)


def ask(handle: Any, path: str, body: Any = None, settings: Settings = SETTINGS, accept_timeout: float = 20.0,
        **headers: str) -> Any:
    """Send a request to a front with this handle and return the response."""
    async def send() -> Any:
        app = make_front(handle, settings, accept_timeout=accept_timeout)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
            return await client.request("GET" if body is None else "POST", path, json=body, headers=headers)
    return asyncio.run(send())


CHAT = {"model": "small", "messages": [{"role": "user", "content": "A cat?"}], "seed": 3, "max_tokens": 12}


def test_responses_equal_those_of_the_library(pools: Pools, llama: Path, bert: Path) -> None:
    handle = Handle(pools.respond)
    expected = mpool.chat(CHAT["messages"], str(llama), seed=3, max_tokens=12)
    assert ask(handle, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"] == expected.text
    response = ask(handle, "/v1/chat/completions", {**CHAT, "stream": True})
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert events[-1] == "[DONE]" and response.headers["content-type"].startswith("text/event-stream")
    assert "".join(json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events[:-1]) \
        == expected.text
    rows = ask(handle, "/v1/embeddings", {"model": "vectors", "input": "A cat."}).json()["data"]
    assert np.allclose(rows[0]["embedding"], mpool.embed("A cat.", str(bert)), atol=1e-6)
    assert ask(handle, "/v1/chat/completions", {**CHAT, "model": "x"}).status_code == 404
    assert ask(handle, "/v1/chat/completions", {**CHAT, "temperature": -1}).status_code == 400
    assert ask(handle, "/v1/nothing").status_code == 404
    assert ask(handle, "/health").json()["status"] == "healthy" and ask(handle, "/metrics").status_code == 404
    assert handle.models[0] == "small" and handle.models[-1] == ""
    assert sorted(asyncio.run(pools.record_routing_stats())["models"]) == ["small", "vectors"]
    pools.pool.unload("small")
    assert pools.resident() == ["vectors"]  # also after the pool was used directly
    assert {operation.path for operation in operations()} >= {"/v1/models", "/api/chat", "/openapi.json"}


def test_autoscaling_counts_the_requests_of_the_pool(pools: Pools) -> None:
    """The autoscaling metric is the number of queued and running requests in the pool."""
    async def depth() -> float:
        return (await pools.record_autoscaling_stats())[routing.DEPTH]

    assert asyncio.run(depth()) == 0.0
    jobs = [pools.pool.submit("text_to_text", prompt="A cat", model="small", max_tokens=4000, ignore_eos=True)
            for _ in range(5)]
    assert asyncio.run(depth()) == 5.0
    for job in jobs:
        job.cancel()


def test_a_disconnect_cancels_the_request(pools: Pools) -> None:
    async def disconnect() -> None:
        body = json.dumps({**CHAT, "max_tokens": 15000, "stream": True, "ignore_eos": True}).encode()
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "query_string": b"",
                 "headers": [(b"content-type", b"application/json")]}
        batches = pools.respond(scope, body)
        while not await batches.__anext__():
            pass
        assert pools.state.streams == 1
        await batches.aclose()
        assert pools.state.streams == 0 and not pools.state.running

    asyncio.run(disconnect())
    pools.pool.generate("A cat", "small", max_tokens=1)
    assert not any(row.running or row.queued for row in pools.pool.ps())


# ---- a replica that dies --------------------------------------------------------------------------------------------

def test_a_death_before_the_response_is_hidden(pools: Pools, llama: Path) -> None:
    """Another replica gets the request, even if the first one had sent a part of an unstreamed response."""
    expected = mpool.chat(CHAT["messages"], str(llama), seed=3, max_tokens=12).text

    async def dies_after_the_header(scope: Any, body: bytes) -> AsyncIterator[Any]:
        yield []
        yield [{"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}]
        raise ActorDiedError

    for first in (dies(0, pools.respond), dies(1, pools.respond), dies_after_the_header):
        handle = Handle(first, pools.respond)
        response = ask(handle, "/v1/chat/completions", CHAT)
        assert response.status_code == 200 and response.json()["choices"][0]["message"]["content"] == expected
        assert len(handle.models) == 2 and len(handle.ended) == 2


def test_a_death_within_a_stream_ends_it_with_one_error(pools: Pools) -> None:
    for path, body, kind in (("/v1/chat/completions", {**CHAT, "stream": True}, "text/event-stream"),
                             ("/api/chat", {"model": "small", "messages": CHAT["messages"]}, "application/x-ndjson")):
        handle = Handle(dies(2, pools.respond))
        response = ask(handle, path, body)
        assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
        assert len(handle.models) == 1
        last = json.loads([line for line in response.text.splitlines() if line][-1].removeprefix("data: "))
        message = last["error"] if kind == "application/x-ndjson" else last["error"]["message"]
        assert message == "The worker ended before it completed the request."
        assert response.text.count("The worker ended") == 1


def test_errors_without_an_available_replica(pools: Pools) -> None:
    async def full(scope: Any, body: bytes) -> AsyncIterator[Any]:
        raise BackPressureError(num_queued_requests=1, max_queued_requests=1)
        yield

    async def silent(scope: Any, body: bytes) -> AsyncIterator[Any]:
        await asyncio.sleep(60)
        yield

    async def broken(scope: Any, body: bytes) -> AsyncIterator[Any]:
        yield []
        raise RuntimeError("a fault of this replica")

    for respond, status, code, attempts in ((dies(0, pools.respond), 503, "worker_lost", 3),
                                            (full, 503, "overloaded", 1), (silent, 503, "overloaded", 1),
                                            (broken, 500, "internal", 1)):
        handle = Handle(respond)
        response = ask(handle, "/v1/chat/completions", CHAT, accept_timeout=0.05)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert len(handle.models) == attempts and ("retry-after" in response.headers) is (status == 503)
        assert "fault of this" not in response.text


# ---- the front ------------------------------------------------------------------------------------------------------

def test_guards_run_before_replicas(pools: Pools) -> None:
    """A request that the server's guards reject does not reach a replica."""
    handle, locked = Handle(pools.respond), Settings(port=8000, token=TOKEN, max_body=2048)
    assert ask(handle, "/v1/models", host="evil.example").status_code == 421
    assert ask(handle, "/v1/models", origin="https://evil.example").status_code == 403
    assert ask(handle, "/v1/models", settings=locked).status_code == 401
    assert ask(handle, "/v1/models", settings=locked, authorization="Bearer " + TOKEN[::-1]).status_code == 401
    big = {**CHAT, "messages": [{"role": "user", "content": "x" * 4096}]}
    assert ask(handle, "/v1/chat/completions", big, settings=locked, authorization=f"Bearer {TOKEN}").status_code == 413
    assert handle.models == []
    assert ask(handle, "/v1/models", settings=locked, authorization=f"Bearer {TOKEN}").status_code == 200
    assert ask(handle, "/health", settings=locked).status_code == 200


def test_lifespan_and_websockets() -> None:
    async def talk(kind: str, *messages: dict[str, Any]) -> list[str]:
        sent: list[str] = []
        waiting = list(messages)

        async def receive() -> dict[str, Any]:
            return waiting.pop(0)

        async def send(message: dict[str, Any]) -> None:
            sent.append(message["type"])

        await make_front(Handle(), SETTINGS)({"type": kind, "path": "/", "headers": []}, receive, send)
        return sent

    assert asyncio.run(talk("lifespan", {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"})) == [
        "lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert asyncio.run(talk("websocket", {"type": "websocket.connect"})) == ["websocket.close"]


def test_plans(tmp_path: Path) -> None:
    """Plans from Python, from ``serve run`` and from the command line."""
    assert make(Plan(replicas=2)) is not None and make(Plan(max_replicas=4, calls=2.0)) is not None
    token = tmp_path / "token"
    assert application({"models": "all-MiniLM-L6-v2,small=./x", "replicas": "2", "only": "true", "max_body": "4096",
                        "token_file": str(token), "host": "0.0.0.0"}) is not None
    assert token.exists()
    for wrong, words in (({"modles": "x"}, "`modles` is not an option of application; did you mean `models`"),
                         ({"replicas": "two"}, "`replicas` must be of type int, got 'two'"),
                         ({"only": "perhaps"}, "`only` must be of type bool, got 'perhaps'"),
                         ({"replicas": "0"}, "`replicas` must be an integer from 1 to .*, got 0"),
                         ({"host": "0.0.0.0"}, "`host` must be a loopback address unless there is a token"),
                         ({"token": "x" * 20}, "`token` is not an option of application")):
        with pytest.raises(mpool.InvalidArgument, match=words):
            application(wrong)
    found = make_parser().parse_args(["ray", "serve", "-m", "small=x", "--replicas", "2", "--cpus", "2"])
    assert (found.model, found.replicas, found.cpus, found.port) == (["small=x"], 2, 2, 11435)


# ---- Parquet --------------------------------------------------------------------------------------------------------

def test_batches(bert: Path) -> None:
    """The vectors are a column of fixed-size lists. Rows, columns and their order are kept."""
    made = EmbedBatches("body", "vector", str(bert), memory_mb=200, compute="float32", on_error="null")
    table = pa.table({"id": [1, 2, 3], "body": ["A cat.", None, "A dog."], "vector": [0, 0, 0]})
    found = made(table)
    assert found.schema.names == ["id", "body", "vector"]
    assert found.schema.field("vector").type == pa.list_(pa.float32(), 32)
    rows = found["vector"].to_pylist()
    expected = mpool.embed(["A cat.", "A dog."], str(bert), compute="float32")
    assert np.array_equal(np.float32([rows[0], rows[2]]), expected)
    assert rows[1] is None and len(made(table.slice(0, 0))) == 0
    with pytest.raises(mpool.InvalidArgument, match="`column` must be one of id, got 'body'") as caught:
        made(table.select(["id"]))
    assert (caught.value.param, caught.value.hint) == ("column", "These are the columns of the batch")


def test_folders_are_checked_first(tmp_path: Path) -> None:
    """Folders and columns are checked before Ray is started."""
    (tmp_path / "in").mkdir()
    with pytest.raises(mpool.FileError, match="in has no .parquet files"):
        embed_parquet(tmp_path / "in", tmp_path / "out")
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "in" / "a.parquet")
    with pytest.raises(mpool.InvalidArgument, match="`column` must be a column of strings, got 'text' of type int64"):
        embed_parquet(tmp_path / "in", tmp_path / "out")
    with pytest.raises(mpool.InvalidArgument, match="`column` must be one of text, got 'body'.*a.parquet") as caught:
        embed_parquet(tmp_path / "in", tmp_path / "out", column="body")
    assert caught.value.param == "column"
    (tmp_path / "in" / "a.parquet").write_bytes(b"PAR1 of no kind")
    with pytest.raises(mpool.FileError, match="a.parquet cannot be read"):
        embed_parquet(tmp_path / "in", tmp_path / "out")
    with pytest.raises(mpool.InvalidArgument, match="`target` must be another folder than `source`, got "):
        embed_parquet(tmp_path / "in", tmp_path / "in" / ".")
    with pytest.raises(mpool.InvalidArgument, match="`actors` must be 1 or more, got 0"):
        embed_parquet(tmp_path / "in", tmp_path / "out", actors=0)


def fake_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace Ray: run the actors of ``embed_parquet`` in this process. Returns the list of the files they write."""
    from mpool.integrations.ray import parquet

    written: list[str] = []

    def run(files: list[dict[str, str]], actors: int, cpus: int, arguments: dict[str, Any]) -> Any:
        actor = parquet._EmbedFiles(**arguments)
        for file in files:
            written.append(file["target"])
            yield actor(file)

    monkeypatch.setattr(parquet, "_run", run)
    monkeypatch.setattr(parquet, "_RayConnection", lambda address: contextlib.nullcontext())
    monkeypatch.setattr(parquet.ray, "cluster_resources", lambda: {"CPU": 1})
    return written


def test_targets_of_another_call_are_refused(bert: Path, prompted: Path, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with vectors of another model, revision, option, column or version is refused before any work, and
    nothing in it changes. The same call continues."""
    written = fake_run(monkeypatch)
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for name in "ab":
        pq.write_table(pa.table({"text": ["A cat.", "A dog."], "title": ["x", "y"]}), source / f"{name}.parquet")
    same: dict[str, Any] = dict(model=str(bert), memory_mb=200, progress=False)
    assert embed_parquet(source, target, **same) == Embedded(2, 4, 0)
    record = json.loads(pq.read_schema(target / "a.parquet").metadata[b"mpool.embedding"])
    assert record["model"] == str(bert) and record["revision"].startswith("sha256:")
    assert record["options"]["precision"] == "float32" and record["mpool"] == mpool.__version__

    os.unlink(target / "b.parquet")
    del written[:]
    assert embed_parquet(source, target, **same) == Embedded(1, 2, 1)  # continues
    assert written == [str(target / "b.parquet")]
    moved = shutil.copytree(bert, tmp_path / "moved")
    assert embed_parquet(source, target, **{**same, "model": str(moved)}) == Embedded(0, 0, 2)

    os.unlink(target / "b.parquet")
    before = (target / "a.parquet").read_bytes()
    config = json.loads((moved / "config.json").read_text())
    (moved / "config.json").write_text(json.dumps({**config, "layer_norm_eps": 1e-5}))
    for change, words in ((dict(model=str(prompted)), "its model is "),
                          (dict(model=str(moved)), "its (model|revision)"),
                          (dict(dimensions=8), "its dimensions is None, not 8"),
                          (dict(precision="int8"), "its precision is 'float32', not 'int8'"),
                          (dict(column="title"), "its column is 'text', not 'title'"),
                          (dict(output="vector"), "no record of the model of its column 'vector'")):
        with pytest.raises(mpool.InvalidArgument, match=words) as caught:
            embed_parquet(source, target, **{**same, **change})
        assert "--overwrite" in str(caught.value) and str(target / "a.parquet") in str(caught.value)
    monkeypatch.setattr("mpool.integrations.ray.provenance.__version__", "0.0.1")
    with pytest.raises(mpool.InvalidArgument, match="its version of mpool is "):
        embed_parquet(source, target, **same)
    monkeypatch.undo()
    fake_run(monkeypatch)
    with pytest.raises(mpool.InvalidArgument, match="`column` must be one of text, title, got 'body'"):
        embed_parquet(source, tmp_path / "new", **same, column="body")
    with pytest.raises(mpool.InvalidArgument, match="`dimension` is not an option"):
        embed_parquet(source, tmp_path / "new", **same, dimension=8)
    assert not (tmp_path / "new").exists()
    assert os.listdir(target) == ["a.parquet"] and (target / "a.parquet").read_bytes() == before
    assert embed_parquet(source, target, **same, dimensions=8, overwrite=True) == Embedded(2, 4, 0)
    assert pq.read_schema(target / "a.parquet").field("embedding").type == pa.list_(pa.float32(), 8)


def test_a_missing_column_is_refused_in_a_finished_target(bert: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Although every file has a copy, a column that does not exist is an error."""
    fake_run(monkeypatch)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["A cat."]}), tmp_path / "in" / "a.parquet")
    embed_parquet(tmp_path / "in", tmp_path / "out", model=str(bert), memory_mb=200, progress=False)
    with pytest.raises(mpool.InvalidArgument, match="`column` must be one of text, got 'body'"):
        embed_parquet(tmp_path / "in", tmp_path / "out", model=str(bert), column="body", progress=False)


def test_columns_of_two_models_keep_their_records(bert: Path, prompted: Path, tmp_path: Path,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    fake_run(monkeypatch)
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"text": ["A cat."]}), tmp_path / "in" / "a.parquet")
    embed_parquet(tmp_path / "in", tmp_path / "one", model=str(bert), memory_mb=200, progress=False)
    embed_parquet(tmp_path / "one", tmp_path / "two", model=str(prompted), output="other", memory_mb=200,
                  progress=False)
    metadata = pq.read_schema(tmp_path / "two" / "a.parquet").metadata
    assert json.loads(metadata[b"mpool.embedding"])["model"] == str(bert)
    assert json.loads(metadata[b"mpool.other"])["model"] == str(prompted)
