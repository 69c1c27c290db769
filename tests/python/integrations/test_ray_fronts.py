"""Fronts and proxies of mpool on Ray, without a cluster: guards, deaths, disconnects."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from clientpackages import package

package("ray.serve", "ray")
httpx = pytest.importorskip("httpx")

from ray.exceptions import (  # noqa: E402
    ActorDiedError,
)

from mpool.integrations.ray import _share, proxy  # noqa: E402
from mpool.integrations.ray.front import make_front  # noqa: E402
from mpool.integrations.ray.pools import Pools  # noqa: E402
from mpool.server.settings import Settings  # noqa: E402

from raycalls import CHAT, HEAD, Handle, SETTINGS, STREAM_HEAD, TOKEN, ask, part  # noqa: E402


@pytest.fixture(autouse=True)
def two_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cluster, Ray does not report a number of CPUs: use 2."""
    monkeypatch.setattr(_share, "_cpus_here", lambda: 2)


@pytest.fixture
def pools(llama: Path, bert: Path) -> Pools:
    return Pools((f"small={llama}", f"vectors={bert}"), False, "auto", SETTINGS, False, 1, 200, True)


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
