"""The front: it checks requests with the server's guards and forwards each to a replica.

A replica can die or fall silent at any time. If no part of the response was sent yet, the front forwards the request
to another replica (:mod:`mpool.integrations.ray.race`); otherwise the stream ends with the error ``worker_lost``. Every
request thus gets one response or one error, and a client can retry after ``worker_lost``, ``overloaded`` or the status
503.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
from ray.exceptions import RayActorError

from ...records import to_standard_error
from ...server import bodies
from ...server.application import Application, guarded
from ...server.body_memory import BodyMemory, Share
from ...server.errors import Refusal
from ...server.guard import App, Scope, refusal_response
from ...server.request_log import log_refused
from ...server.settings import Settings
from .race import Limits, Race
from .responses import HeldResponse
from .routing import ATTEMPT, SILENT

_PLAIN = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


#: Maximum length of a model's name (:data:`mpool.server.fields.Name`).
_MAX_NAME = 257


class _ModelField(msgspec.Struct):
    """The only field of a body that the front reads. The replica validates the whole body."""

    model: str = ""


_decode_model = msgspec.json.Decoder(_ModelField).decode


def model_of(body: bytes) -> str:
    """Return the field ``model`` of a body; "" if it is missing, longer than any name, or the body is invalid."""
    try:
        found = _decode_model(body).model.removesuffix(":latest") if body else ""
        return found if len(found) <= _MAX_NAME else ""  # Ray keeps the names that it has seen
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

    def refused(self, refusal: Refusal, scope: Scope) -> None:
        """Do nothing: the front has no list of events."""


class Relay:
    """An ASGI application that forwards requests to replicas.

    Args:
        handle: handle of the replicas' deployment.
        settings: limits of requests.
        limits: limits of the attempts of a request.
    """

    def __init__(self, handle: Any, settings: Settings, limits: Limits) -> None:
        self.handle, self.settings, self.limits = handle, settings, limits
        self.bodies = BodyMemory(settings.body_memory)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        share = self.bodies.share()
        try:
            await self._relay(scope, receive, send, share)
        finally:
            share.close()

    async def _relay(self, scope: Scope, receive: Any, send: Any, share: Share) -> None:
        try:
            body = await bodies.read(receive, bodies.declared_length(scope), self.settings.max_body, share)
        except (bodies.ClientDisconnected, RayActorError):  # RayActorError: the proxy with the connection died
            return
        except Refusal as refusal:
            response = refusal_response(refusal, scope)
            log_refused(scope, refusal, response.status_code)
            await response(scope, receive, send)
            return
        disconnect = asyncio.ensure_future(_wait_for_disconnect(receive))
        forwarding = asyncio.ensure_future(self._forward(scope, body, receive, send))
        try:
            await asyncio.wait({disconnect, forwarding}, return_when=asyncio.FIRST_COMPLETED)
            if forwarding.done():
                forwarding.result()
        finally:
            for task in (disconnect, forwarding):
                task.cancel()
            await asyncio.gather(disconnect, forwarding, return_exceptions=True)

    async def _forward(self, scope: Scope, body: bytes, receive: Any, send: Any) -> None:
        plain = {name: scope[name] for name in _PLAIN if name in scope}
        plain["headers"] = [(bytes(name), bytes(value)) for name, value in plain["headers"]]
        handle = self.handle.options(stream=True, multiplexed_model_id=model_of(body))

        def ask(attempt: str, silent: list[str]) -> Any:
            return handle.respond.remote({**plain, ATTEMPT: attempt, SILENT: silent}, body)

        await Race(ask, lambda: HeldResponse(scope, receive, send, whole=True), self.limits).run()


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
        to_standard_error()

    def __serve_build_asgi_app__(self) -> App:
        return make_front(self._pools, self._settings)


def make_front(handle: Any, settings: Settings, limits: Limits = Limits()) -> App:  # noqa: B008 - immutable
    """Return the ASGI application of a front. For the arguments see :class:`Relay`."""
    return Application(guarded(Relay(handle, settings, limits), FrontGate(settings)))


__all__ = ["Front", "FrontGate", "Relay", "make_front", "model_of"]
