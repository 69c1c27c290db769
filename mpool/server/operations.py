"""Endpoints: from a request to its handler and back, with body, disconnects, errors and the log.

A protocol is a module with a tuple of :class:`Operation` rows. A handler takes a :class:`Context` and the parsed body,
calls the library as any other caller would, and returns a response. :mod:`mpool.server.errors` turns every exception
of a handler into an error response.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from ..runtime import threads as _threads
from . import bodies
from .disconnects import Disconnects
from .errors import Refusal, refusal_of
from .guard import answer, header
from .state import Running

if TYPE_CHECKING:
    from .models import Served
    from .state import State

log = logging.getLogger("mpool.server")
_encode = msgspec.json.Encoder().encode
#: Responses with at least this many numbers are encoded on a thread: encoding them takes milliseconds.
_MANY = 1 << 15


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path.

    Attributes:
        handler: called with the context and the parsed body (None without a body).
        body: struct of the request body; None: the operation takes no body.
        answer: struct, or other type, of the JSON response; None: the response is text.
        summary: one line, for the OpenAPI document.
        streams: media type of the response with ``stream``; None: the response is never streamed.
        name: ``operationId`` of the OpenAPI document.
        alone: parse the body on the loop's thread, however long it is: no other thread may get work.
        kind: media type of a text response.
    """

    method: str
    path: str
    handler: Callable[[Context, Any], Awaitable[Response]]
    body: type[msgspec.Struct] | None
    answer: Any
    summary: str
    streams: str | None = None
    name: str = ""
    alone: bool = False
    kind: str = "text/plain"


class Context:
    """A request, as handlers see it.

    Attributes:
        state: the server's shared state.
        id: the request's id.
        begun: ``time.monotonic()`` when the body was complete.
    """

    __slots__ = ("state", "id", "begun")

    def __init__(self, state: State) -> None:
        self.state, self.id, self.begun = state, state.new_id(), time.monotonic()

    async def model(self, name: str) -> Served:
        """Find the model that a client names.

        Raises:
            Refusal: clients may use no such name.
        """
        return await self.state.models.find(name)

    def check_text(self, text: str, name: str) -> str:
        """Return the text, at most ``max_text`` characters long.

        Raises:
            Refusal: the text is longer.
        """
        most = self.state.settings.max_text
        if len(text) > most:
            raise Refusal("request_too_large", f"`{name}` must have at most {most:,} characters, got {len(text):,}.",
                          name)
        return text


def image_of(text: str, name: str) -> bytes:
    """Decode an image file from base64 or a ``data:`` URL. The server opens no path and fetches no URL for a client.

    Raises:
        Refusal: the text is neither.
    """
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise Refusal("invalid_value", f"`{name}` must be data:image/...;base64,... or base64.", name)
    try:
        found = base64.b64decode(text, validate=True)
    except ValueError:
        found = b""
    if not found:
        raise Refusal("invalid_value", f"`{name}` must be base64; the server fetches no URL.", name)
    return found


def json_answer(value: Any, status: int = 200) -> Response:
    """Encode a struct as a JSON response."""
    return Response(_encode(value), status, media_type="application/json")


async def large_answer(make: Callable[[], Any], numbers: int) -> Response:
    """Encode the struct that ``make`` returns as a JSON response.

    A struct of many numbers is made and encoded on a tokenizer thread, so that the loop keeps serving other requests.
    """
    if numbers < _MANY:
        return json_answer(make())
    data = await asyncio.get_running_loop().run_in_executor(_threads.executor(), lambda: _encode(make()))
    return Response(data, media_type="application/json")


class Endpoint:
    """The ASGI application of one operation."""

    def __init__(self, operation: Operation, state: State) -> None:
        self.operation, self.state = operation, state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        context = Context(self.state)
        gone, status = False, 0
        connection = scope.get("mpool.connection")
        watch = None if connection is not None or self.operation.body is None else Disconnects(receive)
        running: Running | None = None
        task = asyncio.current_task()

        def left() -> None:  # the cancellation ends prompt processing within milliseconds
            nonlocal gone
            gone = True
            if task is not None:
                task.cancel()

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", context.id.encode())]
            elif watch is not None and not message.get("more_body", False):
                watch.stop()  # some servers report a disconnect once the response is complete
            await send(message)

        try:
            try:
                if connection is not None:
                    connection.on_disconnect = left
                body = await self._body(scope, receive)
                if watch is not None:
                    watch.left = left
                    watch.start()
                context.begun = time.monotonic()
                model = getattr(body, "model", None)
                if model is not None:
                    running = Running(context.id, scope["path"], model, task)
                    self.state.running[context.id] = running
                response = await self.operation.handler(context, body)
                if running is not None:
                    running.task = None  # a response is sent whole; `Streamed` allows cancellation between chunks
                await response(scope, receive, noted)
            except bodies.Gone:
                raise
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    if gone or status or running is None or not running.cancelled:
                        raise
                    _uncancel(task)
                    error = Refusal("cancelled")
                if status:  # the head is sent: raising makes the server cut the connection, so no client sees success
                    raise
                refusal = refusal_of(error, context.id)
                await answer(refusal, scope["path"])(scope, receive, noted)
        except bodies.Gone:
            gone = True
        except asyncio.CancelledError:
            if not gone:
                raise
            _uncancel(task)
        finally:
            if connection is not None:
                connection.on_disconnect = None
            if watch is not None:
                watch.stop()
            if running is not None:
                self.state.running.pop(context.id, None)
            if log.isEnabledFor(logging.INFO):
                log.info("%s %s %s %s in %.1f ms", context.id, scope["method"], scope["path"],
                         "left by its client" if gone else status, (time.monotonic() - context.begun) * 1e3)

    async def _body(self, scope: Any, receive: Any) -> Any:
        kind = self.operation.body
        if kind is None:
            return None
        _check_type(scope)
        data = await bodies.read(receive, bodies.declared_length(scope), self.state.settings.max_body)
        return bodies.parse(data, kind) if self.operation.alone else await bodies.parse_body(data, kind)


def _uncancel(task: asyncio.Task[Any] | None) -> None:
    """Forget a cancellation that was handled here: the server's task groups count those that are pending."""
    if task is not None and hasattr(task, "uncancel"):
        task.uncancel()


def _check_type(scope: Any) -> None:
    """Accept only uncompressed JSON. A browser sends this type across origins only after a CORS preflight, so the
    check also keeps other sites' pages out."""
    coding = header(scope, b"content-encoding")
    if coding is not None and coding.strip().lower() not in (b"identity", b""):
        raise Refusal("unsupported_media_type")
    kind, _, parameters = (header(scope, b"content-type") or b"").partition(b";")
    if kind.strip().lower() != b"application/json":
        raise Refusal("unsupported_media_type")
    charset = parameters.strip().lower()
    if charset and charset.replace(b'"', b"").replace(b" ", b"") not in (b"charset=utf-8", b"charset=utf8"):
        raise Refusal("unsupported_media_type")


__all__ = ["Context", "Endpoint", "Operation", "image_of", "json_answer", "large_answer"]
