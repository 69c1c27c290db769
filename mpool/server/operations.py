"""From a route to its handler and back: body, disconnects, errors, the log. One table row an operation.

A protocol is a module with a tuple of :class:`Operation` s. Its handlers take a :class:`Context` and the parsed body,
use the library as any other caller would, and give a response; whatever they raise becomes an error of the catalogue.
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
from .errors import Refusal, refusal_of
from .guard import answer, header
from .state import Running

if TYPE_CHECKING:
    from .models import Served
    from .state import State

log = logging.getLogger("mpool.server")
_encode = msgspec.json.Encoder().encode
#: Numbers of an answer that are some milliseconds of writing.
_MANY = 1 << 15


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a path.

    Attributes:
        handler: called with the context and the parsed body (None if there is none).
        body: struct that the body is; None: it takes none.
        answer: struct, or other type, of the answer as JSON; None: it is text.
        summary: one line, for the OpenAPI document.
        streams: media type of the answer with ``stream``; None: it is never streamed.
        name: ``operationId`` of the document.
        alone: bodies are parsed on the loop's thread, however long: no other thread is to have work.
        kind: media type of an answer that is text.
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
        state: of the server.
        id: of the request.
        begun: ``time.monotonic()`` at which its body was here.
    """

    __slots__ = ("state", "id", "begun")

    def __init__(self, state: State) -> None:
        self.state, self.id, self.begun = state, state.new_id(), time.monotonic()

    async def model(self, name: str) -> Served:
        """The model of a name.

        Raises:
            Refusal: there is none that clients may name.
        """
        return await self.state.models.find(name)

    def check_text(self, text: str, name: str) -> str:
        """The text, unless it is longer than allowed.

        Raises:
            Refusal: it is.
        """
        most = self.state.settings.max_text
        if len(text) > most:
            raise Refusal("request_too_large", f"{name} has {len(text):,} characters, allowed: {most:,}.", name)
        return text


def image_of(text: str, name: str) -> bytes:
    """A file of an image, from base64 or a ``data:`` URL: what else a text could name, clients may not.

    Raises:
        Refusal: it is neither.
    """
    if text.startswith("data:"):
        head, _, text = text.partition(",")
        if not head.endswith(";base64"):
            raise Refusal("invalid_value", f"{name}: allowed is data:image/...;base64,...", name)
    try:
        found = base64.b64decode(text, validate=True)
    except ValueError:
        found = b""
    if not found:
        raise Refusal("invalid_value", f"{name}: it is not base64, and the server fetches nothing.", name)
    return found


def json_answer(value: Any, status: int = 200) -> Response:
    """A struct as a response."""
    return Response(_encode(value), status, media_type="application/json")


async def large_answer(make: Callable[[], Any], numbers: int) -> Response:
    """The struct that a function makes, as a response; one of many numbers is made and written on a thread that
    tokenises, since the loop has others to serve."""
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
        connection, gone, status = scope["mpool.connection"], False, 0
        running: Running | None = None
        task = asyncio.current_task()

        def left() -> None:  # reading a prompt ends within milliseconds then
            nonlocal gone
            gone = True
            if task is not None:
                task.cancel()

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", context.id.encode())]
            await send(message)

        try:
            try:
                connection.left = left
                body = await self._body(scope, receive)
                context.begun = time.monotonic()
                model = getattr(body, "model", None)
                if model is not None:
                    running = Running(context.id, scope["path"], model, task)
                    self.state.running[context.id] = running
                response = await self.operation.handler(context, body)
                if running is not None:
                    running.task = None  # an answer is sent whole; one that is streamed says when it can be cut
                await response(scope, receive, noted)
            except bodies.Gone:
                raise
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    if gone or status or running is None or not running.cancelled:
                        raise
                    error = Refusal("cancelled")
                if status:  # the head of an answer is out: nothing can be put right, and nothing ends as if it were
                    raise
                refusal = refusal_of(error, context.id)
                await answer(refusal, scope["path"])(scope, receive, noted)
        except bodies.Gone:
            gone = True
        except asyncio.CancelledError:
            if not gone:
                raise
        finally:
            connection.left = None
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
        length = header(scope, b"content-length")
        data = await bodies.read(receive, int(length) if length is not None else None, self.state.settings.max_body)
        return bodies.parse(data, kind) if self.operation.alone else await bodies.parse_body(data, kind)


def _check_type(scope: Any) -> None:
    """Only JSON as it is. It is also what keeps pages of others out: they cannot send this type unasked."""
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
