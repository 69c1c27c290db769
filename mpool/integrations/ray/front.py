"""The front: it checks requests with the server's guards and forwards each to a replica.

A replica can die at any time. If no part of the response was sent yet, the front forwards the request to another
replica; otherwise the stream ends with the error ``worker_lost``. Every request thus gets one response or one error,
and a client can retry after ``worker_lost``, ``overloaded`` or the status 503.
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

#: Maximum number of replicas that a request is forwarded to, one after the other.
MAX_ATTEMPTS = 3
#: Seconds that a replica has to accept a request.
ACCEPT_TIMEOUT = 60.0
_LOST = (RayActorError, ActorUnavailableError, ReplicaUnavailableError, DeploymentUnavailableError)
_PLAIN = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


class _ModelField(msgspec.Struct):
    """The only field of a body that the front reads. The replica validates the whole body."""

    model: str = ""


_decode_model = msgspec.json.Decoder(_ModelField).decode


def model_of(body: bytes) -> str:
    """Return the field ``model`` of a body; "" if it is missing or the body is invalid."""
    try:
        return _decode_model(body).model.removesuffix(":latest") if body else ""
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
        max_attempts: maximum number of replicas that a request is forwarded to, one after the other.
        accept_timeout: seconds that a replica has to accept the request.
    """

    def __init__(self, handle: Any, settings: Settings, max_attempts: int = MAX_ATTEMPTS,
                 accept_timeout: float = ACCEPT_TIMEOUT) -> None:
        self.handle, self.settings = handle, settings
        self.max_attempts, self.accept_timeout = max_attempts, accept_timeout

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        try:
            body = await bodies.read(receive, bodies.declared_length(scope), self.settings.max_body)
        except bodies.ClientDisconnected:
            return
        except Refusal as refusal:
            await refusal_response(refusal, scope["path"])(scope, receive, send)
            return
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        forwarding = asyncio.ensure_future(self._forward(scope, body, _Response(scope, receive, send)))
        try:
            await asyncio.wait({disconnect, forwarding}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                forwarding.result()
        finally:
            for task in (disconnect, forwarding):
                task.cancel()
            await asyncio.gather(disconnect, forwarding, return_exceptions=True)

    async def _forward(self, scope: Scope, body: bytes, response: _Response) -> None:
        plain = {name: scope[name] for name in _PLAIN if name in scope}
        plain["headers"] = [(bytes(name), bytes(value)) for name, value in plain["headers"]]
        refusal = Refusal("worker_lost")
        for _ in range(self.max_attempts):
            try:
                async with aclosing(self._messages(plain, body)) as messages:
                    async for message in messages:
                        await response.handle_message(message)
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
            if response.started:
                break
            response.discard()
        await response.fail(refusal)

    async def _messages(self, plain: dict[str, Any], body: bytes) -> AsyncGenerator[dict[str, Any], None]:
        handle = self.handle.options(stream=True, multiplexed_model_id=model_of(body))
        batches = handle.respond.remote(plain, body)
        try:
            await asyncio.wait_for(anext(batches), self.accept_timeout)
            async for batch in batches:
                for message in batch:
                    yield message
        finally:
            batches.cancel()


class _Response:
    """Passes the messages of a response on to the client. A response that is not streamed is held back until it is
    complete."""

    def __init__(self, scope: Scope, receive: Any, send: Any) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._held: list[dict[str, Any]] = []
        self._media_type = ""
        self.started = False

    async def handle_message(self, message: dict[str, Any]) -> None:
        """Hold a message back, or send it and all messages held back before."""
        if message["type"] == "http.response.start":
            content_type = header(message, b"content-type") or b""
            self._media_type = content_type.decode("latin-1").partition(";")[0]
        self._held.append(message)
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if last or self._media_type in (EVENTS, LINES):
            self.started = True
            held, self._held = self._held, []
            for held_message in held:
                await self._send(held_message)

    def discard(self) -> None:
        """Discard the messages of a replica that died."""
        self._held.clear()
        self._media_type = ""

    async def fail(self, refusal: Refusal) -> None:
        """Send an error: as the whole response, or as the last message of a stream."""
        if not self.started:
            await refusal_response(refusal, self._scope["path"])(self._scope, self._receive, self._send)
            return
        last = event(openai_error(refusal)) if self._media_type == EVENTS else line(plain_error(refusal))
        await self._send({"type": "http.response.body", "body": last, "more_body": False})


async def _wait_for_disconnect(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Front:
    """The deployment that receives the requests. Ray Serve constructs it in a process of its own.

    Args:
        pools: handle of the replicas' deployment.
        settings: address, clients and limits.
    """

    def __init__(self, pools: Any, settings: Settings) -> None:
        self._pools, self._settings = pools, settings

    def __serve_build_asgi_app__(self) -> App:
        return make_front(self._pools, self._settings)


def make_front(handle: Any, settings: Settings, max_attempts: int = MAX_ATTEMPTS,
               accept_timeout: float = ACCEPT_TIMEOUT) -> App:
    """Return the ASGI application of a front. For the arguments see :class:`Relay`."""
    return Application(guarded(Relay(handle, settings, max_attempts, accept_timeout), FrontGate(settings)))


__all__ = ["Front", "FrontGate", "Relay", "make_front", "model_of"]
