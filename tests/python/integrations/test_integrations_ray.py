"""mpool on Ray, without a cluster: routing, autoscaling, requests whose replica dies, guards, Parquet files.

Tests that need a cluster are in test_ray_cluster.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import selectors
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray.serve")
httpx = pytest.importorskip("httpx")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import (  # noqa: E402
    ActorDiedError,
    NodeDiedError,
    ObjectLostError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError  # noqa: E402

import mpool  # noqa: E402
from mpool.cli.parser import make_parser  # noqa: E402
from mpool.integrations.ray import _share, proxy, routing, serving  # noqa: E402
from mpool.integrations.ray import pools as replicas  # noqa: E402
from mpool.integrations.ray.front import make_front, model_of  # noqa: E402
from mpool.integrations.ray.parquet import EmbedBatches, Embedded, embed_parquet  # noqa: E402
from mpool.integrations.ray.pools import Pools, operations  # noqa: E402
from mpool.integrations.ray.race import Limits
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
    return SimpleNamespace(replica_id=object(), routing_stats={"models": list(models), "calls": calls})


def test_requests_go_to_replicas_with_their_model() -> None:
    warm, other, busy, new = replica("a"), replica("b"), replica("a", calls=8), replica()
    for _ in range(20):
        first, rest = routing.ranks([warm, other, busy, new], "a")
        assert first == [warm] and len(rest) == 2
    assert len(routing.ranks([other, busy, new], "a")) == 1  # no replica with the model has capacity: use any replica
    assert len(routing.ranks([warm, other], "")) == 1
    assert routing.ranks([], "a") == []
    assert model_of(b'{"messages": [], "model": "small:latest"}') == "small"
    for body in (b"", b"{", b"[1]", b'{"model": 3}', b'{"x": "model"}', b"[" * 100_000, b"\xff"):
        assert model_of(body) == ""


def test_suspects_are_avoided() -> None:
    """A replica is a suspect from its first failure until it accepts a request or ``SUSPICION`` seconds are over."""
    now = 100.0
    answers = routing.Answers(lambda: now)
    answers.sent("1", "a")
    answers.sent("2", "b")
    answers.accepted("2", "b", "second")
    assert answers.suspects() == set() and answers.loads() == {"b": 1}
    now += routing.PATIENCE + 0.01
    assert answers.suspects() == {"a"}
    answers.accepted("1", "a", "first")
    assert answers.suspects() == set() and answers.loads() == {"a": 1, "b": 1}
    answers.silent(["first", "unknown"])
    assert answers.suspects() == {"a"}
    now += routing.SUSPICION + 0.01
    assert answers.suspects() == set()
    answers.failed("b")
    assert answers.suspects() == {"b"}
    answers.sent("3", "b")
    answers.accepted("3", "b", "third")
    assert answers.suspects() == set()
    for request in ("1", "2", "3"):
        answers.completed(request)
    answers.sent("4", "a")
    answers.completed("4")  # Ray may report the end first
    answers.accepted("4", "a", "fourth")
    assert answers.loads() == {}
    answers.sent("5", "a")
    now += routing.SUSPICION + 0.01
    assert answers.suspects() == set()  # the request was given up long ago: try the replica again


def test_the_router_skips_a_replica_at_its_first_failure() -> None:
    now = 0.0
    router = routing.WarmRouter.__new__(routing.WarmRouter)
    router.initialize_state(4.0)
    router.answers = routing.Answers(lambda: now)
    one, two = replica("a"), replica("a")

    def choose(request: str, silent: tuple[str, ...] = ()) -> list[Any]:
        found = asyncio.run(router.choose_replicas([one, two], pending_request(request, silent)))
        assert all(len(group) == 1 for group in found)
        return [group[0] for group in found]

    def pending_request(request: str, silent: tuple[str, ...] = ()) -> Any:
        return SimpleNamespace(metadata=SimpleNamespace(internal_request_id=request, multiplexed_model_id="a"),
                               args=[{routing.ATTEMPT: f"attempt {request}", routing.SILENT: silent}, b""])

    first, other = choose("1")
    router.on_request_routed(pending_request("1"), first.replica_id, None)
    assert [choose(f"2{number}")[0] for number in range(20)] == [other] * 20  # it has fewer requests
    router.on_request_routed(pending_request("219"), other.replica_id, None)
    for number in range(20):
        router.on_request_completed(other.replica_id, f"2{number}")
    assert choose("3", ("attempt 1",)) == [other]
    router.on_request_completed(first.replica_id, "1")
    assert [choose(f"4{number}") for number in range(20)] == [[other]] * 20
    router.answers.failed(other.replica_id)
    assert len(choose("suspects only")) == 2
    now += routing.SUSPICION + 1.0
    assert {choose(f"5{number}")[0].replica_id for number in range(50)} == {one.replica_id, two.replica_id}


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
        self.scopes: list[dict[str, Any]] = []
        self.respond = SimpleNamespace(remote=self._respond)

    def options(self, *, stream: bool, multiplexed_model_id: str) -> Handle:
        assert stream
        self.models.append(multiplexed_model_id)
        return self

    def _respond(self, scope: Any, body: bytes) -> Responses:
        self.scopes.append(scope)
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


def ask(handle: Any, path: str, body: Any = None, settings: Settings = SETTINGS, limits: Limits = Limits(),
        **headers: str) -> Any:
    """Send a request to a front with this handle and return the response."""
    return asyncio.run(request(handle, path, body, settings, limits, **headers))


async def request(handle: Any, path: str, body: Any, settings: Settings, limits: Limits, **headers: str) -> Any:
    app = make_front(handle, settings, limits)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
        return await client.request("GET" if body is None else "POST", path, json=body, headers=headers)


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
        assert len(handle.scopes) == 2 and len(handle.ended) == 2


def test_a_death_within_a_stream_ends_it_with_one_error(pools: Pools) -> None:
    for path, body, kind in (("/v1/chat/completions", {**CHAT, "stream": True}, "text/event-stream"),
                             ("/api/chat", {"model": "small", "messages": CHAT["messages"]}, "application/x-ndjson")):
        async def dies_after_the_first_token(scope: Any, body: bytes) -> AsyncIterator[Any]:
            async for batch in pools.respond(scope, body):
                for message in batch:
                    yield [message]
                    if message.get("body"):
                        raise ActorDiedError

        handle = Handle(dies_after_the_first_token, pools.respond)
        response = ask(handle, path, body)
        assert response.status_code == 200 and response.headers["content-type"].startswith(kind)
        assert len(handle.scopes) == 1
        last = json.loads([line for line in response.text.splitlines() if line][-1].removeprefix("data: "))
        message = last["error"] if kind == "application/x-ndjson" else last["error"]["message"]
        assert message == "The worker ended before it completed the request."
        assert response.text.count("The worker ended") == 1


STREAM_HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


def part(text: str, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def forever(*batches: Any) -> AsyncIterator[Any]:
    """A replica whose machine loses power after these batches."""
    for batch in batches:
        yield batch
    await asyncio.Event().wait()


def contents(stream: str) -> str:
    """Return the text of a streamed chat, whatever its division into chunks."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def test_a_stream_without_its_first_token_has_not_begun(pools: Pools) -> None:
    """Another replica gives the stream if the first one dies or falls silent between the head and the first token."""
    expected = ask(Handle(pools.respond), "/v1/chat/completions", {**CHAT, "stream": True}).text

    async def dies_after_the_head(scope: Any, body: bytes) -> AsyncIterator[Any]:
        yield []
        yield [STREAM_HEAD]
        raise ActorDiedError

    for first in (dies_after_the_head, lambda scope, body: forever([], [STREAM_HEAD])):
        handle = Handle(first, pools.respond)
        response = ask(handle, "/v1/chat/completions", {**CHAT, "stream": True}, limits=Limits(2, patience=0.1))
        assert contents(response.text) == contents(expected) and response.text.endswith("data: [DONE]\n\n")
        assert "error" not in response.text and len(handle.scopes) == 2


def test_errors_of_a_lost_node_are_those_of_a_dead_replica(pools: Pools) -> None:
    """If a node is lost, its replica's messages are lost too, and Ray raises other errors than for a process."""
    for error in (ObjectLostError("00", None, ""), NodeDiedError("the node died"), WorkerCrashedError()):
        async def lost(scope: Any, body: bytes, error: Exception = error) -> AsyncIterator[Any]:
            yield []
            raise error

        handle = Handle(lost, pools.respond)
        assert ask(handle, "/v1/chat/completions", CHAT).status_code == 200 and len(handle.scopes) == 2


def test_a_silent_replica_loses_its_request(pools: Pools) -> None:
    """A replica whose machine lost power raises no error. Another one gets the request after ``patience``, and the
    router is told which attempt is silent."""
    for batches in ((), ([],), ([], [], [])):
        handle = Handle(lambda scope, body, batches=batches: forever(*batches), pools.respond)
        assert ask(handle, "/v1/chat/completions", CHAT, limits=Limits(2, patience=0.1)).status_code == 200
        first, second = handle.scopes
        assert first[routing.SILENT] == [] and second[routing.SILENT] == [first[routing.ATTEMPT]]
        assert len(handle.ended) == 2 and first[routing.ATTEMPT] != second[routing.ATTEMPT]


class InstantSelector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]
    """A selector that adds the time to wait to ``now`` instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


def test_a_slow_replica_keeps_its_request() -> None:
    """Heartbeats prevent a second attempt. One that comes too late ends the second attempt. In virtual time."""
    answer = [HEAD, part("{}", more=False)]

    async def busy(scope: Any, body: bytes) -> AsyncIterator[Any]:
        for _ in range(10):
            yield []
            await asyncio.sleep(0.5)
        yield answer

    async def late(scope: Any, body: bytes) -> AsyncIterator[Any]:
        yield []
        await asyncio.sleep(1.5)
        yield []
        await asyncio.sleep(0.5)
        ended_before_the_response.extend(handle.ended)
        yield answer

    ended_before_the_response = list[str]()
    for replicas, attempts, ended in (((busy,), 1, 0), ((late, lambda scope, body: forever([])), 2, 1)):
        handle, selector = Handle(*replicas), InstantSelector()
        loop = asyncio.SelectorEventLoop(selector)
        loop.time = lambda selector=selector: selector.now  # type: ignore[method-assign]
        try:
            response = loop.run_until_complete(request(handle, "/v1/chat/completions", CHAT, SETTINGS, Limits()))
        finally:
            loop.close()
        assert response.text == "{}" and len(handle.scopes) == attempts == len(handle.ended)
        assert len(ended_before_the_response) == ended


def test_a_stream_that_falls_silent_ends_with_an_error() -> None:
    handle = Handle(lambda scope, body: forever([], [STREAM_HEAD, part("data: {}\n\n")]))
    response = ask(handle, "/v1/chat/completions", {**CHAT, "stream": True}, limits=Limits(lost_after=0.1))
    begun, last = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert begun == "{}" and json.loads(last)["error"]["code"] == "worker_lost"
    assert len(handle.scopes) == 1 == len(handle.ended)


def test_replicas_send_heartbeats(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica sends an empty batch when it accepts a request, and then regularly until the response is complete."""
    monkeypatch.setattr(replicas, "HEARTBEAT", 0.02)
    release = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await release.wait()
        await send({**STREAM_HEAD, "status": 204})
        await send(part("", more=False))

    async def batches() -> list[list[Any]]:
        found = []
        async for batch in pools.respond({}, b""):
            found.append(batch)
            if len(found) == 5:
                release.set()
        return found

    monkeypatch.setattr(pools, "_app", slow)
    found = asyncio.run(batches())
    assert found[:5] == [[]] * 5
    messages = [message["type"] for batch in found[5:] for message in batch]
    assert messages == ["http.response.start", "http.response.body"]


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

    quick = Limits(patience=0.05, accept_timeout=0.05)
    for respond, status, code, attempts in ((dies(0, pools.respond), 503, "worker_lost", 3),
                                            (full, 503, "overloaded", 1), (silent, 503, "overloaded", 3),
                                            (broken, 500, "internal", 1)):
        handle = Handle(respond)
        response = ask(handle, "/v1/chat/completions", CHAT, limits=quick if respond is silent else Limits())
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert len(handle.scopes) == attempts and ("retry-after" in response.headers) is (status == 503)
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


class Fronts:
    """The application of Ray's proxy: each request goes to the next front. A front that dies ends it early."""

    def __init__(self, *fronts: list[dict[str, Any]]) -> None:
        self.fronts, self.bodies = list(fronts), []  # type: ignore[var-annotated]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        parts = [await receive()]
        while parts[-1].get("more_body"):
            parts.append(await receive())
        self.bodies.append(b"".join(part.get("body", b"") for part in parts))
        for message in self.fronts.pop(0):
            await send(message)


def through_proxy(fronts: Fronts, *parts: bytes, max_body: int = 1000) -> list[dict[str, Any]]:
    """Send a request in parts, and return the messages of the response."""
    sent: list[dict[str, Any]] = []
    received = [{"type": "http.request", "body": body, "more_body": True} for body in parts]
    received[-1]["more_body"] = False

    async def receive() -> dict[str, Any]:
        return received.pop(0) if received else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/v1/chat/completions", "headers": []}
    asyncio.run(proxy.Repeat(fronts, max_body=max_body)(scope, receive, send))
    return sent


HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}


def test_the_proxy_repeats_a_request_whose_front_died() -> None:
    whole = [HEAD, part("{}", more=False)]
    for dead in ([], [HEAD], [STREAM_HEAD]):
        fronts = Fronts(dead, whole)
        assert through_proxy(fronts, b"one ", b"two") == whole
        assert fronts.bodies == [b"one two"] * 2
    fronts = Fronts([], [], [])
    assert through_proxy(fronts, b"{}")[0]["status"] == 503 and len(fronts.bodies) == 3
    fronts = Fronts([], whole)
    assert through_proxy(fronts, b"x" * 600, b"y" * 600)[0]["status"] == 503  # too large to be kept
    assert len(fronts.bodies) == 1


def test_the_proxy_ends_a_stream_whose_front_died() -> None:
    """A stream that has begun ends with an error event. Another response stays incomplete, as its length is known."""
    begun = [STREAM_HEAD, part("data: {}\n\n")]
    sent = through_proxy(Fronts(begun), b"{}")
    assert sent[:2] == begun and json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]["code"] == "worker_lost"
    assert not sent[2]["more_body"] and len(sent) == 3
    assert through_proxy(Fronts([HEAD, part("{")]), b"{}") == [HEAD, part("{")]


def test_the_proxy_does_not_repeat_a_request_after_a_disconnect() -> None:
    """If the client has disconnected, a response without an end is no failure."""
    class Gone(Fronts):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await super().__call__(scope, receive, send)
            assert (await receive())["type"] == "http.disconnect"

    fronts = Gone([], [])
    assert through_proxy(fronts, b"{}") == [] and len(fronts.bodies) == 1
    (middleware,) = proxy.middlewares()
    assert middleware.cls is proxy.Repeat and not middleware.args and not middleware.kwargs


def test_a_request_whose_proxy_died_is_no_error() -> None:
    """The front reads the body from the proxy. If that died, the client is gone, too."""
    async def receive() -> dict[str, Any]:
        raise ActorDiedError

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError(message)

    handle = Handle()
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions",
             "headers": [(b"host", b"127.0.0.1:8000")]}
    asyncio.run(make_front(handle, SETTINGS)(scope, receive, send))
    assert handle.scopes == []


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


class Deployments:
    """Stands in for ``serve.deployment``, and records the options and arguments of each deployment."""

    def __init__(self) -> None:
        self.options: dict[str, dict[str, Any]] = {}
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self.targets: dict[str, Any] = {}

    def deployment(self, target: Any) -> Any:
        def options(name: str, **given: Any) -> Any:
            self.options[name], self.targets[name] = given, target

            def bind(*arguments: Any) -> str:
                self.arguments[name] = arguments
                return name

            return SimpleNamespace(bind=bind)

        return SimpleNamespace(options=options)


def deployed(plan: Plan, nodes: int, monkeypatch: pytest.MonkeyPatch) -> Deployments:
    """Return what the application of a plan consists of. Ray must accept the same plan."""
    assert isinstance(make(plan, nodes), serve.Application)
    found = Deployments()
    with monkeypatch.context() as patched:
        patched.setattr(serving.serve, "deployment", found.deployment)
        assert make(plan, nodes) == "Front"  # the deployment that gets the requests
    return found


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number of processes, their resources and limits."""
    settings = Settings(port=8000, token=TOKEN, host="0.0.0.0", max_connections=99, grace=7.0, max_tokens=5)
    found = deployed(Plan(("small=x", "y"), True, True, "int8", True, 3, calls=2.0, cpus=2, memory_mb=300,
                          settings=settings), 1, monkeypatch)
    pools, front = found.options["Pools"], found.options["Front"]
    assert found.targets["Pools"] is Pools
    assert (pools["num_replicas"], pools["ray_actor_options"]) == (3, {"num_cpus": 2})
    assert pools["max_ongoing_requests"] == 99
    assert (pools["graceful_shutdown_timeout_s"], pools["health_check_period_s"]) == (12.0, 5.0)
    assert pools["max_constructor_retry_count"] == 3 and "autoscaling_config" not in pools
    router = pools["request_router_config"]
    assert router.get_request_router_class().__name__ == "WarmRouter"
    assert (router.request_router_kwargs, router.request_routing_stats_period_s) == ({"calls": 2.0}, 1.0)
    replica_settings = replace(settings, token=None, host="127.0.0.1")  # the front has checked the token
    assert found.arguments["Pools"] == (("small=x", "y"), False, "int8", replica_settings, True, 2, 300, True)
    assert found.arguments["Front"] == ("Pools", settings)
    assert front == {"num_replicas": 2, "max_replicas_per_node": 2, "ray_actor_options": {"num_cpus": 0},
                     "max_ongoing_requests": 99, "graceful_shutdown_timeout_s": 12.0, "health_check_period_s": 5.0}
    for nodes, fronts, expected in ((1, 0, (2, 2)), (2, 0, (2, 1)), (5, 0, (5, 1)), (2, 3, (3, 2)), (4, 1, (1, 1))):
        front = deployed(Plan(fronts=fronts), nodes, monkeypatch).options["Front"]
        assert (front["num_replicas"], front["max_replicas_per_node"]) == expected


def test_plans_that_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = deployed(Plan(replicas=2, max_replicas=4, calls=3.0), 1, monkeypatch).options["Pools"]
    scaling = pools["autoscaling_config"]
    assert "num_replicas" not in pools
    assert (scaling.min_replicas, scaling.max_replicas, scaling.initial_replicas) == (2, 4, None)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s, scaling.look_back_period_s) == (10.0, 300.0, 15.0)
    assert scaling.policy.policy_kwargs == {"calls": 3.0}
    assert scaling.policy.policy_function.endswith("CallsPolicy")
    for fixed in (Plan(replicas=3), Plan(replicas=3, max_replicas=3), Plan(replicas=3, max_replicas=2)):
        pools = deployed(fixed, 1, monkeypatch).options["Pools"]
        assert pools["num_replicas"] == 3 and "autoscaling_config" not in pools


def test_plans_from_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``serve run`` and the command line give the plan that they describe."""
    token, made = tmp_path / "token", list[tuple[Plan, int]]()
    monkeypatch.setattr(serving, "make", lambda plan, nodes: made.append((plan, nodes)))
    application({"models": "all-MiniLM-L6-v2,small=./x", "replicas": "2", "max_replicas": "3", "only": "true",
                 "calls": "2.5", "cpus": "2", "fronts": "4", "load": "0", "max_body": "4096", "grace": "7.5",
                 "token_file": str(token), "host": "0.0.0.0"})
    application({})
    assert made == [(Plan(("all-MiniLM-L6-v2", "small=./x"), True, replicas=2, max_replicas=3, calls=2.5, cpus=2,
                          fronts=4, settings=Settings("0.0.0.0", 8000, token.read_text().strip(), max_body=4096,
                                                      grace=7.5)), 1), (Plan(settings=SETTINGS), 1)]
    for wrong, words in (({"modles": "x"}, "`modles` is not an option of application; did you mean `models`"),
                         ({"replicas": "two"}, "`replicas` must be of type int, got 'two'"),
                         ({"only": "perhaps"}, "`only` must be of type bool, got 'perhaps'"),
                         ({"replicas": "0"}, "`replicas` must be an integer from 1 to .*, got 0"),
                         ({"fronts": "-1"}, "`fronts` must be an integer from 0 to .*, got -1"),
                         ({"host": "0.0.0.0"}, "`host` must be a loopback address unless there is a token"),
                         ({"token": "x" * 20}, "`token` is not an option of application")):
        with pytest.raises(mpool.InvalidArgument, match=words):
            application(wrong)
    ran = list[tuple[Any, ...]]()
    monkeypatch.setattr(serving, "run", lambda *given: ran.append(given[:2]))
    found = make_parser().parse_args(["ray", "serve", "-m", "small=x", "--replicas", "2", "--max-replicas", "5",
                                      "--cpus", "3", "--calls", "4", "--fronts", "6", "--memory-mb", "7", "--only",
                                      "--load", "--offline", "--max-body", "4096", "--address", "auto"])
    assert found.run(found) == 0
    assert ran == [(Plan(("small=x",), True, True, "auto", True, 2, 5, 4.0, 3, 7, 6,
                         Settings(port=11435, max_body=4096)), "auto")]


@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_proxies_are_on_every_node(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run`` starts proxies on all nodes with the plan's address, and one front per live node."""
    events = list[Any]()
    for name in proxy.ENVIRONMENT:
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(serving, "connect", lambda given: events.append(("connect", given, dict(os.environ))))
    monkeypatch.setattr(serving, "make", lambda plan, nodes: ("application", nodes))
    monkeypatch.setattr(serving, "ray", SimpleNamespace(
        cluster_resources=lambda: {"CPU": 2.0}, is_initialized=lambda: True, shutdown=lambda: events.append("ended"),
        nodes=lambda: [{"Alive": True}, {"Alive": False}, {"Alive": True}]))
    for called in ("start", "run", "shutdown", "delete"):
        monkeypatch.setattr(serving.serve, called, partial(lambda called, *given, **options: events.append(
            (called, given, options)), called))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        serving.run(Plan(only=True, replicas=2, settings=Settings(host="::1", port=8123)), address,
                    lambda url: (events.append(url), signal.raise_signal(signal.SIGTERM)))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    connected, *rest = events
    assert connected[:2] == ("connect", address)
    # the variables are those of Ray's processes: on a cluster, they belong to `ray start`
    given = {name: connected[2].get(name) for name in proxy.ENVIRONMENT}
    assert given == (proxy.ENVIRONMENT if address is None else dict.fromkeys(proxy.ENVIRONMENT))
    assert rest == [
        ("start", (), {"proxy_location": "EveryNode", "http_options": {"host": "::1", "port": 8123}}),
        ("run", (("application", 2),), {"name": "mpool", "route_prefix": "/"}), "http://[::1]:8123",
        ("shutdown", (), {}) if address is None else ("delete", ("mpool",), {}), "ended"]


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
