"""Replicas of mpool on Ray without a cluster, and requests to them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx
from ray.exceptions import ActorDiedError

from mpool.integrations.ray.front import make_front
from mpool.integrations.ray.race import Limits
from mpool.server.settings import Settings

TOKEN = "a token of this test!".replace(" ", "-")
SETTINGS = Settings(port=8000)
LIMITS = Limits()


class Responses:
    """The response generator that a handle returns for a stream."""

    def __init__(self, batches: AsyncIterator[Any], ended: list[str]) -> None:
        self._batches, self._ended = batches, ended

    def __aiter__(self) -> "Responses":
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

    def options(self, *, stream: bool, multiplexed_model_id: str) -> "Handle":
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


def ask(handle: Any, path: str, body: Any = None, settings: Settings = SETTINGS, limits: Limits = LIMITS,
        **headers: str) -> Any:
    """Send a request to a front with this handle and return the response."""
    return asyncio.run(request(handle, path, body, settings, limits, **headers))


async def request(handle: Any, path: str, body: Any, settings: Settings, limits: Limits, **headers: str) -> Any:
    app = make_front(handle, settings, limits)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
        return await client.request("GET" if body is None else "POST", path, json=body, headers=headers)


CHAT = {"model": "small", "messages": [{"role": "user", "content": "A cat?"}], "seed": 3, "max_tokens": 12}


HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
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
