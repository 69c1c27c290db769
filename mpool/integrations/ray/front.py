"""The front: the server's guards; it forwards each request to a replica.

A replica may die at any time. Before any part of the response is sent, the front forwards the request to another
replica; after that, the stream ends with the error ``worker_lost``. Every request thus gets one response or one error,
and a client may retry after ``worker_lost``, ``overloaded`` or the status 503.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, ReplicaUnavailableError

from ...server import bodies
from ...server.application import Application, guarded
from ...server.errors import Refusal, openai_error, plain_error
from ...server.guard import App, Scope, header, refusal_response
from ...server.settings import Settings
from ...server.streaming import EVENTS, LINES, event, line

log = logging.getLogger("mpool.server")

#: Replicas that are tried for a request; seconds until one of them must have accepted it.
TRIES, PATIENCE = 3, 60.0
_LOST = (RayActorError, ActorUnavailableError, ReplicaUnavailableError, DeploymentUnavailableError)
_PLAIN = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


class _Named(msgspec.Struct):
    """The field of a body that the front reads. The replica checks the whole body."""

    model: str = ""


_named = msgspec.json.Decoder(_Named).decode


def model_of(body: bytes) -> str:
    """The model that a request names; "": none, or the body is not valid."""
    try:
        return _named(body).model.removesuffix(":latest") if body else ""
    except (msgspec.MsgspecError, RecursionError):
        return ""


@dataclass
class FrontGate:
    """The state that the guards need (:class:`mpool.server.guard.GuardState`)."""

    settings: Settings
    stopping: bool = False
    hosts: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.hosts = self.settings.hosts(self.settings.port)


class Relay:
    """An ASGI application that forwards requests to replicas.

    Args:
        handle: handle of the replicas' deployment.
        settings: limits of requests.
        tries, patience: see :data:`TRIES`.
    """

    def __init__(self, handle: Any, settings: Settings, tries: int = TRIES, patience: float = PATIENCE) -> None:
        self.handle, self.settings, self.tries, self.patience = handle, settings, tries, patience

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        try:
            body = await bodies.read(receive, bodies.declared_length(scope), self.settings.max_body)
        except bodies.ClientDisconnected:
            return
        except Refusal as refusal:
            await refusal_response(refusal, scope["path"])(scope, receive, send)
            return
        left = asyncio.ensure_future(_left(receive))
        passing = asyncio.ensure_future(self._pass(scope, body, _Answer(scope, receive, send)))
        try:
            await asyncio.wait({left, passing}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            for task in (left, passing):
                task.cancel()
            await asyncio.gather(left, passing, return_exceptions=True)

    async def _pass(self, scope: Scope, body: bytes, out: _Answer) -> None:
        plain = {name: scope[name] for name in _PLAIN if name in scope}
        plain["headers"] = [(bytes(name), bytes(value)) for name, value in plain["headers"]]
        refusal = Refusal("worker_lost")
        for _ in range(self.tries):
            try:
                async with aclosing(self._messages(plain, body)) as messages:
                    async for message in messages:
                        await out.take(message)
                return
            except _LOST as error:
                log.warning("A replica was lost: %s", type(error).__name__)
            except (BackPressureError, TimeoutError):
                refusal = Refusal("overloaded")
                break
            except Exception:
                log.exception("A replica failed")
                refusal = Refusal("internal")
                break
            if out.begun:
                break
            out.forget()
        await out.fail(refusal)

    async def _messages(self, plain: dict[str, Any], body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        handle = self.handle.options(stream=True, multiplexed_model_id=model_of(body))
        batches = handle.respond.remote(plain, body)
        try:
            await asyncio.wait_for(anext(batches), self.patience)
            async for batch in batches:
                for message in batch:
                    yield message
        finally:
            batches.cancel()


class _Answer:
    """A response on its way to the client. A response that is not streamed is sent whole or not at all."""

    def __init__(self, scope: Scope, receive: Any, send: Any) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._held: list[dict[str, Any]] = []
        self._kind = ""
        self.begun = False

    async def take(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            kind = header(message, b"content-type") or b""
            self._kind = kind.decode("latin-1").partition(";")[0]
        self._held.append(message)
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last or self._kind in (EVENTS, LINES):
            self.begun = True
            held, self._held = self._held, []
            for part in held:
                await self._send(part)

    def forget(self) -> None:
        """Drop the messages of a replica that was lost."""
        self._held.clear()
        self._kind = ""

    async def fail(self, refusal: Refusal) -> None:
        if not self.begun:
            await refusal_response(refusal, self._scope["path"])(self._scope, self._receive, self._send)
            return
        last = event(openai_error(refusal)) if self._kind == EVENTS else line(plain_error(refusal))
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


async def _left(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Front:
    """The deployment that gets the requests. Ray Serve makes it, in a process of its own.

    Args:
        pools: handle of the replicas' deployment.
        settings: address, clients and limits.
    """

    def __init__(self, pools: Any, settings: Settings) -> None:
        self._pools, self._settings = pools, settings

    def __serve_build_asgi_app__(self) -> App:
        return make_front(self._pools, self._settings)


def make_front(handle: Any, settings: Settings, tries: int = TRIES, patience: float = PATIENCE) -> App:
    """Make the application of a front; see :class:`Relay`."""
    return Application(guarded(Relay(handle, settings, tries, patience), FrontGate(settings)))


__all__ = ["Front", "FrontGate", "Relay", "make_front", "model_of"]
