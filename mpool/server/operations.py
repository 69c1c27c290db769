"""Endpoints: read and parse a request, call its handler, send the response or the error, and log the request.

A protocol is a module with a tuple of :class:`Operation` objects. A handler receives a :class:`Context` and the parsed
body, calls the public functions of the library, and returns a response. :mod:`mpool.server.errors` converts every
exception of a handler into an error response.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from starlette.responses import Response

from .. import records
from ..conversation.messages import NamedImage
from ..errors import InvalidArgument, MpoolError, UnknownModel, WrongCapability
from ..host import native_calls
from ..images import base64_text
from ..images.loading import check_url
from ..model import MissingModel
from ..runtime import tally
from . import bodies, request_log
from .disconnects import DisconnectListener, DisconnectReports
from .errors import Refusal, refusal_of
from .guard import header, may_be_browser, refusal_response
from .models import ServedModel
from .peers import user_of
from .request_history import RunningRequest

if TYPE_CHECKING:
    from ..completions import TokenLogprob, TopLogprob
    from .guard import Scope
    from .state import State

T = TypeVar("T")
log = records.logger("mpool.server")
_encode = msgspec.json.Encoder().encode
#: Maximum length of the URL of an image.
_MAX_URL = 4096
#: Content types of programs that do not set one: none, curl's, and aiohttp's for texts and for bytes.
_DEFAULT_TYPES = (b"", b"application/x-www-form-urlencoded", b"text/plain", b"application/octet-stream")
#: Bodies with at least this many bytes are converted on another thread: that takes 1 ms or more.
LONG = 1 << 14
#: Responses with at least this many numbers are encoded on another thread: encoding them takes milliseconds.
_LARGE = 1 << 15
#: Maximum size of a response, and size of a float32 in it, in bytes of JSON.
MAX_RESPONSE, NUMBER_BYTES = 64 << 20, 22
#: Approximate size of a log probability in bytes of JSON, without the text and the bytes of its token.
_LOGPROB_BYTES = 48
#: Maximum size in bytes of the float32 arrays of a response of numbers.
MAX_NUMBERS = MAX_RESPONSE // NUMBER_BYTES * 4


@dataclass(frozen=True, slots=True)
class Operation:
    """One HTTP method of one path.

    Attributes:
        method: HTTP method.
        path: Path of the URL.
        handler: Coroutine function that receives the context and the parsed body (None without a body).
        body: Struct of the request body; None: the operation has no body.
        response: Struct, or other type, of the JSON response; a tuple: one of these; None: the response is text.
        summary: One line for the OpenAPI document.
        streams: Media type of a streamed response; None: the response is never streamed.
        name: ``operationId`` in the OpenAPI document.
        on_loop: Parse the body on the event loop's thread even if it is long.
        media_type: Media type of a text response.
        owner_only: Without a token, only clients of the server's own user (or of root) may call the operation.
        names: Parameters of the library -> fields of the body, for errors. Sampling options and other parameters that
            have the same name in every protocol need no entry.
    """

    method: str
    path: str
    handler: Callable[[Context, Any], Awaitable[Response]]
    body: type[msgspec.Struct] | None
    response: Any
    summary: str
    streams: str | None = None
    name: str = ""
    on_loop: bool = False
    media_type: str = "text/plain"
    owner_only: bool = False
    names: Mapping[str, str] = field(default_factory=dict)


class Context:
    """The request that a handler serves.

    Attributes:
        operation: The operation that the client called.
        state: Shared state of the server.
        id: Request id.
        scope: Scope of ASGI.
        started: ``time.monotonic()`` when the body was complete.
        images: Names of the fields of the body with an image.
        names: Parameters of the library -> fields of the body, for errors: those of the operation, and those that this
            body chose.
        memory: Memory of the body.
        counts: Number of values of the body, and of the JSON texts in its strings that were parsed.
        long: True if converting the body takes milliseconds: see :meth:`converted`.
        refused: Error that the client received; None: none.
        missing: Error of a model of the request that the server does not serve; None: it serves them all.
        ignored: Names of fields of the body that are ignored because the operation does not have them: the log names
            each once, and the response header ``x-mpool-ignored`` names them all. None: such fields are errors.
    """

    __slots__ = ("operation", "state", "id", "scope", "started", "memory", "counts", "long", "ignored", "images",
                 "missing", "names", "refused")

    def __init__(self, operation: Operation, state: State, scope: Scope) -> None:
        self.operation, self.state, self.scope = operation, state, scope
        self.id, self.started = state.new_id(), time.monotonic()
        self.ignored: list[str] | None = None if state.settings.strict else []
        self.images: set[str] = set()
        self.missing: Refusal | None = None
        self.refused: Refusal | None = None
        self.memory = state.bodies.share()
        self.counts, self.long = bodies.Counts(self.memory), False
        self.names = dict(operation.names)

    def ignore(self, name: str, message: str, param: str, code: str = "unsupported_parameter") -> None:
        """Report that a part of the body has no effect.

        Args:
            name: Name of the part, for the log and the response header.
            message: Error message.
            param: Field of the body, for the error.
            code: Code of the error.

        Raises:
            Refusal: The server is strict.
        """
        if self.ignored is None:
            raise Refusal(code, message, param)
        bodies.add_ignored(self.ignored, name)

    def field_of(self, path: str) -> str:
        """Return the client's name of a part of a parameter of the library."""
        name, _, rest = path.partition(".")
        field = self.names.get(name, name)
        return f"{field}.{rest}" if rest else field

    async def converted(self, function: Callable[[], T]) -> T:
        """Run a conversion of the body, such as that of its messages. If the body is long, another thread runs it, so
        that the event loop keeps serving other requests; at most two threads run such conversions."""
        return await native_calls.BODIES.arun(function) if self.long else function()

    def refusal(self, error: BaseException) -> Refusal:
        """Convert an exception to the error that the client receives, which the record of the request names.

        The error names the field and the model as the client does. The exception loses its traceback: a stream keeps
        its exception, and the frames of the traceback keep the stream and the body until a collection.
        """
        if self.missing is not None and isinstance(error, UnknownModel):
            error = self.missing
        refusal = refusal_of(error, self.id, self.names)
        if isinstance(error, MpoolError) and error.param in self.images:
            refusal.param = error.param
        if isinstance(error, WrongCapability):
            running = self.state.running.get(self.id)
            refusal.detail = _with_name(refusal.detail, error.key, running) + self.state.models.suggest(error.wanted)
        raised: BaseException | None = error
        while raised is not None:
            raised.__traceback__, raised = None, raised.__cause__ or raised.__context__
        self.refused = refusal
        return refusal

    async def model(self, name: str) -> ServedModel:
        """Return the model with the name that the client gave.

        If the server does not serve it, the request still fails for its first invalid value, if it has one: the result
        is then a missing model (:func:`mpool.server.models.is_missing`), and the error of the name is raised where the
        library would look the model up, or where the handler reads its files.
        """
        try:
            return await self.state.models.find(name)
        except Refusal as refusal:
            return self._missing(name, refusal)

    def _missing(self, name: str, refusal: Refusal) -> ServedModel:
        self.missing = refusal
        return ServedModel(name, MissingModel(name, lambda: UnknownModel("not served", key=name)), 0)

    async def model_or_only(self, name: str | None, output: str, noun: str) -> ServedModel:
        """Return the model with the name that the client gave; without a name, the only model with an output, or a
        missing one (see :meth:`model`) if there is not exactly one.

        Args:
            name: Name of the request, or None.
            output: As for :meth:`mpool.server.models.Models.with_output`.
            noun: The kind of model, for the error message.
        """
        if name is not None:
            return await self.model(name)
        return self.only(await native_calls.REQUESTS.arun(self.state.models.with_output, output), noun)

    def only(self, found: list[ServedModel], noun: str) -> ServedModel:
        """Return the model of a request without a name: a missing one (see :meth:`model`) if none fits, or several do.

        Args:
            found: Models that fit.
            noun: The kind of model, for the error message.
        """
        if len(found) != 1:
            several = f"`model` is required: the server has {len(found)} models of this kind ({noun})."
            return self._missing("", Refusal("invalid_value", several if found else f"This server serves no {noun}: "
                                             "start it with one (--model REF).", "model"))
        running = self.state.running.get(self.id)
        if running is not None:
            running.model = found[0].name
        return found[0]

    def check_text(self, text: str, name: str) -> str:
        """Return a text unchanged after checking its length.

        Args:
            text: Text of the request.
            name: Field of the request, for the error message.

        Raises:
            Refusal: The text has more than ``Settings.max_text`` characters.
        """
        most = self.state.settings.max_text
        if len(text) > most:
            raise Refusal("request_too_large", f"`{name}` must have at most {most:,} characters, got {len(text):,}.",
                          name)
        return text

    def check_inputs(self, inputs: Sequence[Any], name: str, most: int) -> None:
        """Check the number of inputs, and the length of those that are texts.

        Args:
            inputs: Texts, or lists of token ids.
            name: Field of the request, for the error message.
            most: Maximum number of inputs.

        Raises:
            Refusal: There are more than ``most`` inputs, or a text has more than ``Settings.max_text`` characters.
        """
        if len(inputs) > most:
            raise Refusal("request_too_large", f"`{name}` must hold at most {most:,} texts, got {len(inputs):,}.", name)
        longest = self.state.settings.max_text
        for at, text in enumerate(inputs):
            if isinstance(text, str) and len(text) > longest:
                self.check_text(text, f"{name}[{at}]")

    def image(self, text: str, name: str) -> NamedImage:
        """Return the image file in a field, or its https URL if the server fetches images: then
        :func:`mpool.server.image_urls.with_images` replaces the URL by the file.

        Args:
            text: Base64, a ``data:`` URL or an https URL.
            name: Field of the request, for error messages.

        Raises:
            Refusal: The text is none of these, or the server fetches no images.
        """
        if self.state.settings.allow_image_urls and text[:8].lower() == "https://" and len(text) <= _MAX_URL:
            try:
                check_url(text, name)
            except InvalidArgument:
                raise Refusal("invalid_value", f"`{name}` must be the https URL of a public server, with a host and "
                                               "without spaces.", name) from None
            self.images.add(name)
            return NamedImage(text, name)
        return self.image_file(text, name)

    def image_file(self, text: str, name: str) -> NamedImage:
        """Return the image file in a field.

        Args:
            text: Base64, or a ``data:`` URL; see :func:`mpool.images.base64_text.decode`.
            name: Field of the request, for error messages.

        Raises:
            Refusal: The text is neither base64 nor such a URL.
        """
        self.images.add(name)
        found = _file_of(text, name)
        self.memory.add(len(found))
        return NamedImage(found, name)


def _file_of(text: str, name: str) -> bytes:
    """Decode an image file from base64 or a ``data:`` URL. The server never opens a path that a client names."""
    try:
        found = base64_text.decode(text)
    except ValueError:
        found = b""
    if not found:
        raise Refusal("invalid_value", f"`{name}` must be base64 of an image, a data: URL, or with the server's option "
                                       "--allow-image-urls an https URL.", name)
    return found


def json_response(value: Any, status: int = 200) -> Response:
    """Encode a struct as a JSON response."""
    return Response(_encode(value), status, media_type="application/json")


def check_response(size: int, field: str) -> None:
    """Refuse a request whose response would be too large, before it is computed.

    Args:
        size: Size of the response in bytes of JSON.
        field: Field of the request with the inputs.

    Raises:
        Refusal: The size exceeds :data:`MAX_RESPONSE`.
    """
    if size > MAX_RESPONSE:
        raise Refusal("request_too_large", f"The response of `{field}` would have about {size:,} bytes; at most "
                                           f"{MAX_RESPONSE:,} are allowed. Send fewer inputs per request.", field)


def encode_checked(value: Any, field: str) -> bytes:
    """Encode a struct as the JSON of a response whose exact size is known only then: a character of a text takes up to
    six bytes.

    Raises:
        Refusal: The size exceeds :data:`MAX_RESPONSE`.
    """
    data = _encode(value)
    check_response(len(data), field)
    return data


def check_logprobs(found: Iterable[tuple[TokenLogprob, ...] | None], bytes_of: Callable[[int], bytes] | None) -> None:
    """Refuse a response whose log probabilities would be too large. Tokens of a model's file have up to 4,096 bytes.

    Args:
        found: Log probabilities of each choice.
        bytes_of: Returns the bytes of a token, which the response lists as numbers; None: it does not list them.

    Raises:
        Refusal: The size exceeds :data:`MAX_RESPONSE`.
    """
    size = 0
    for token in (token for choice in found for token in choice or ()):
        alternatives: tuple[TokenLogprob | TopLogprob, ...] = (token, *token.top)
        for one in alternatives:
            size += _LOGPROB_BYTES + len(one.token) + (0 if bytes_of is None else 4 * len(bytes_of(one.token_id)))
    if size > MAX_RESPONSE:
        raise Refusal("request_too_large", f"The log probabilities of the response would have about {size:,} bytes; at "
                                           f"most {MAX_RESPONSE:,} are allowed. Stream the response, or ask for fewer "
                                           "tokens or alternatives.", "logprobs")


async def large_response(make: Callable[[], Any], numbers: int) -> Response:
    """Encode the struct that ``make`` returns as a JSON response.

    A large response is built and encoded on another thread, so that the event loop keeps serving other requests.

    Args:
        make: Builds the struct.
        numbers: Count of numbers in the response, which decides where it is encoded.
    """
    if numbers < _LARGE:
        return json_response(make())
    data = await native_calls.BODIES.arun(lambda: _encode(make()))
    return Response(data, media_type="application/json")


class Endpoint:
    """The ASGI application of one operation."""

    def __init__(self, operation: Operation, state: State) -> None:
        self.operation, self.state = operation, state

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        context = Context(self.operation, self.state, scope)
        disconnected, sent, status = False, False, 0
        connection: DisconnectReports | None = scope.get("mpool.connection")
        listener = None if connection is not None or self.operation.body is None else DisconnectListener(receive)
        running: RunningRequest | None = None
        used = tally.Tally()
        task = asyncio.current_task()

        def on_disconnect() -> None:  # cancellation stops prompt processing within milliseconds
            nonlocal disconnected
            disconnected = True
            if task is not None:
                task.cancel()

        async def send_with_id(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", context.id.encode())]
                ignored = list(context.ignored or ())
                _log_ignored(context, ignored)
                for path in used.left_out:  # the library has logged them
                    bodies.add_ignored(ignored, context.field_of(path))
                if ignored:
                    message["headers"].append((b"x-mpool-ignored", ", ".join(ignored).encode()))
            elif listener is not None and not message.get("more_body", False):
                listener.stop()  # some servers report a disconnect once the response is complete
            await send(message)

        try:
            try:
                if connection is not None:
                    connection.on_disconnect = on_disconnect
                if self.operation.owner_only and self.state.settings.token is None:
                    _check_owner(scope)
                body = await self._body(context, receive)
                if connection is not None:
                    connection.body_is_read()
                if listener is not None:
                    listener.on_disconnect = on_disconnect
                    listener.start()
                context.started = time.monotonic()
                if hasattr(body, "model"):  # if it is None, the handler chooses the model and sets its name
                    running = RunningRequest(context.id, scope["path"], body.model or "", task)
                    self.state.running[context.id] = running
                    tally.current.set(used)
                response = await self.operation.handler(context, body)
                if running is not None:
                    running.task = None  # only `StreamedResponse` can be cancelled while it is sent, between chunks
                await response(scope, receive, send_with_id)
                sent = True
            except bodies.ClientDisconnected:
                raise
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    if disconnected or status or running is None or not running.cancelled:
                        raise
                    _uncancel(task)
                    error = Refusal("cancelled")
                if status:  # the head is sent: raising closes the connection, so that no client takes it for success
                    raise
                refusal = context.refusal(error)
                if refusal is context.missing:
                    used.capability = None
                if running is not None:
                    running.error = refusal.code
                await refusal_response(refusal, scope)(scope, receive, send_with_id)
        except bodies.ClientDisconnected:
            disconnected = True
        except asyncio.CancelledError:
            if not disconnected:
                raise
            _uncancel(task)
        finally:
            context.memory.close()
            if connection is not None:
                connection.on_disconnect = None
            if listener is not None:
                listener.stop()
            refused = context.refused or scope.get("mpool.refusal")  # that of the connection: the body did not arrive
            outcome = "disconnected" if disconnected else "" if sent or refused is not None else "failed"
            if refused is not None and refused.code not in ("cancelled", "download_failed"):  # a download has its event
                self.state.refused(refused, scope, None if running is None else running.model)
            if running is not None:
                self.state.running.pop(context.id, None)
                client = scope.get("client")
                self.state.history.add(running, used, client[0] if client else None, status,
                                       outcome or running.error or "completed")
            request_log.write(scope, status, id=context.id, refusal=refused, outcome=outcome,
                              model=None if running is None else running.model, used=used, began=context.started)

    async def _body(self, context: Context, receive: Any) -> Any:
        kind, scope = self.operation.body, context.scope
        if kind is None:
            return None
        _check_type(scope)
        data = await bodies.read(receive, bodies.declared_length(scope), self.state.settings.max_body,
                                 context.memory)
        context.long = len(data) >= LONG
        if self.operation.on_loop:
            return bodies.parse_bounded(data, kind, context.ignored, context.counts)
        return await bodies.parse_body(data, kind, context.ignored, context.counts)


def _with_name(detail: str, key: str | None, running: RunningRequest | None) -> str:
    """Return the detail of an error with the client's name of the model in place of the pool's."""
    if running is None or not running.model or not detail.startswith(f"{key}: "):
        return detail
    return running.model + detail[len(str(key)):]


def _log_ignored(context: Context, names: list[str]) -> None:
    path = context.scope["path"]
    for name in names:
        if context.state.is_new(path, name):
            log.info("%s: ignoring the field `%s`, which %s does not have", context.id, name, path)


def _check_owner(scope: Any) -> None:
    """Refuse clients of other users. Loopback is open to every user of the machine."""
    client, server = scope.get("client"), scope.get("server")
    user = user_of(client, server) if client and server else None
    if user is None or user not in (0, os.geteuid()):
        raise Refusal("foreign_user")


def _uncancel(task: asyncio.Task[Any] | None) -> None:
    """Withdraw a cancellation request that was handled: the server's task groups count pending cancellations."""
    if task is not None and hasattr(task, "uncancel"):
        task.uncancel()


def _check_type(scope: Any) -> None:
    """Refuse bodies that are not uncompressed JSON.

    A browser sends JSON's content type to another origin only after a CORS preflight. The check therefore also refuses
    requests from the pages of other sites. A program other than a browser may omit the content type, or send one that
    HTTP libraries send by default.
    """
    coding = header(scope, b"content-encoding")
    if coding is not None and coding.strip().lower() not in (b"identity", b""):
        raise Refusal("unsupported_media_type")
    kind, _, parameters = (header(scope, b"content-type") or b"").partition(b";")
    kind = kind.strip().lower()
    if kind != b"application/json" and (kind not in _DEFAULT_TYPES or may_be_browser(scope)):
        raise Refusal("unsupported_media_type")
    charset = parameters.strip().lower()
    if charset and charset.replace(b'"', b"").replace(b" ", b"") not in (b"charset=utf-8", b"charset=utf8"):
        raise Refusal("unsupported_media_type")


__all__ = ["LONG", "MAX_NUMBERS", "MAX_RESPONSE", "NUMBER_BYTES", "Context", "Endpoint", "Operation", "check_logprobs",
           "check_response", "encode_checked", "json_response", "large_response"]
