"""Replicas of mpool on Ray, without a cluster: their responses, their deaths and silences."""

import asyncio
import json
import selectors
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clientpackages import package

package("ray.serve", "ray")
httpx = pytest.importorskip("httpx")

from ray.exceptions import (  # noqa: E402
    ActorDiedError,
    NodeDiedError,
    ObjectLostError,
    WorkerCrashedError,
)
from ray.serve.exceptions import BackPressureError  # noqa: E402

import mpool  # noqa: E402
from mpool.integrations.ray import _share, routing  # noqa: E402
from mpool.integrations.ray import pools as replicas  # noqa: E402
from mpool.integrations.ray.pools import Pools, operations  # noqa: E402
from mpool.integrations.ray.race import Limits  # noqa: E402
from mpool.server.application import OPERATIONS  # noqa: E402

from outputcalls import OUTPUTS, texts_of  # noqa: E402
from raycalls import (  # noqa: E402
    CHAT, HEAD, Handle, SETTINGS, STREAM_HEAD, ask, contents, dies, forever, part, request,
)


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster, Ray does not report a number of CPUs: use 2."""
    monkeypatch.setattr(_share, "_cpus_here", lambda: 2)


@pytest.fixture
def pools(llama: Path, bert: Path) -> Pools:
    return Pools((f"small={llama}", f"vectors={bert}"), False, "auto", SETTINGS, False, 1, 200, True)


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


@pytest.mark.parametrize("name", [name for name, output in OUTPUTS.items() if output.path])
def test_outputs_of_text_encoders(name: str, request: pytest.FixtureRequest) -> None:
    """A front and a replica respond with the values of the library."""
    output = OUTPUTS[name]
    pools = Pools((f"served={request.getfixturevalue(output.model)}",), False, "auto", SETTINGS, False, 1, 200, True)
    texts = ["w1 The fox jumps.", "w2 w3, over two dogs", "x"]
    response = ask(Handle(pools.respond), output.path, output.payload(texts, "served"))
    assert response.status_code == 200, response.text
    wanted = output.call(pools.pool, texts, "served")
    assert output.of_route(response.json()) == [output.of_text(one) for one in texts_of(wanted)]


def test_operations_of_replicas() -> None:
    """Replicas have every route of the server except those that show a single pool."""
    missing = {operation.path for operation in OPERATIONS} - {operation.path for operation in operations()}
    shown = ("/dashboard/", "/api/mpool/")
    assert missing == {operation.path for operation in OPERATIONS
                       if operation.path in ("/", "/metrics") or operation.path.startswith(shown)}
    assert {"/", "/metrics", "/dashboard/page.js", "/api/mpool/state"} <= missing


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
    """Heartbeats prevent a second attempt. A heartbeat that comes too late ends the second attempt. Time is virtual."""
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
    for listed, attempts, ended in (((busy,), 1, 0), ((late, lambda scope, body: forever([])), 2, 1)):
        handle, selector = Handle(*listed), InstantSelector()
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
