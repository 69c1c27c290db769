"""The table of all errors that a client can receive, and their encodings.

The texts are constants, so that no response contains a path, an address or text from a model file. A detail may follow:
the invalid parameter with its allowed values, or the names of models that clients can use. The log has all details
under the request id.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import msgspec

from .. import errors as pool_errors
from ..host.resources import error_of
from ..records import logger
from ..tasks import sampling
from .option_table import with_options

log = logger("mpool.server")


class Row(NamedTuple):
    """One error.

    Attributes:
        status: HTTP status.
        kind: ``type`` of the error in OpenAI's API.
        text: Constant text of the message.
        retry_after: Seconds until a retry may succeed; 0: no retry is suggested.
    """

    status: int
    kind: str
    text: str
    retry_after: int = 0


_REQUEST, _SERVER = "invalid_request_error", "server_error"

#: Error code -> status, type and text of the response.
TABLE: dict[str, Row] = {
    "invalid_json": Row(400, _REQUEST, "The body is not strict JSON."),
    "invalid_value": Row(400, _REQUEST, "The request has a value that is not allowed."),
    "unsupported_parameter": Row(400, _REQUEST, "The request has an unsupported parameter."),
    "context_length_exceeded": Row(400, _REQUEST, "The input is longer than the model's context."),
    "previous_response_not_found": Row(400, _REQUEST, "The server no longer has the previous response. Send "
                                                      "the whole conversation."),
    "wrong_capability": Row(400, _REQUEST, "The model does not have this capability."),
    "template_refused": Row(400, _REQUEST, "The model's chat template rejects these messages."),
    "empty_input": Row(400, _REQUEST, "The request has no input."),
    "bad_request": Row(400, _REQUEST, "The request is not well-formed HTTP."),
    "invalid_api_key": Row(401, "authentication_error", "The token is missing or wrong: Authorization: Bearer TOKEN, "
                                                        "or x-api-key: TOKEN."),
    "token_required": Row(403, "permission_error", "An address that other machines can reach requires a token: set "
                                                   "MPOOL_SERVER_TOKEN_FILE."),
    "foreign_user": Row(403, "permission_error", "Only the user who runs the server may do this, or a client with the "
                                                 "token (--token-file)."),
    "forbidden_origin": Row(403, "permission_error", "This origin may not call the server. Start mpool serve "
                                                     "with --allow-origin ORIGIN to allow it."),
    "model_not_found": Row(404, _REQUEST, "Model not found. GET /v1/models lists the models."),
    "not_found": Row(404, _REQUEST, "Path not found."),
    "method_not_allowed": Row(405, _REQUEST, "The path does not allow this method."),
    "busy": Row(409, _REQUEST, "The worker is running a job.", 1),
    "request_timeout": Row(408, _REQUEST, "The request took too long to arrive."),
    "request_too_large": Row(413, _REQUEST, "The body, or a text in it, is longer than allowed."),
    "unsupported_media_type": Row(415, _REQUEST, "The body must be uncompressed JSON with the header "
                                              "Content-Type: application/json."),
    "misdirected": Row(421, _REQUEST, "The Host header does not name this server. Use its address, or start mpool "
                                      "serve with --allow-host NAME:PORT to accept another name."),
    "headers_too_large": Row(431, _REQUEST, "The request's headers are larger than allowed."),
    "cancelled": Row(499, _REQUEST, "The request was cancelled."),
    "internal": Row(500, _SERVER, "Internal error. The server's log has the details."),
    "download_failed": Row(503, _SERVER, "The model could not be downloaded.", 10),
    "model_failed": Row(500, _SERVER, "The model failed while computing. The server's log has the details."),
    "load_failed": Row(503, _SERVER, "The model could not be loaded. The server's log has the details.", 10),
    "too_many_streams": Row(503, _SERVER, "The limit of streamed responses is reached (--max-streams).", 1),
    "too_many_connections": Row(503, _SERVER, "The limit of connections is reached (--max-connections).", 1),
    "too_many_bodies": Row(503, _SERVER, "The memory for request bodies is full (--max-bodies).", 1),
    "overloaded": Row(503, _SERVER, "The model's queue or the memory is full for now, or the threads that prepare "
                                      "requests are stuck.", 1),
    "out_of_memory": Row(503, _SERVER, "Not enough free memory for this request.", 5),
    "worker_lost": Row(503, _SERVER, "The worker ended before it completed the request.", 1),
    "circuit_open": Row(503, _SERVER, "The model is temporarily disabled after repeated faults.", 30),
    "shutting_down": Row(503, _SERVER, "The server is shutting down.", 5),
    "timeout": Row(504, _SERVER, "The request did not complete within its time limit.", 1),
}

#: Error class of the library -> code; the first matching class decides.
_CODES: tuple[tuple[type[BaseException], str], ...] = (
    (pool_errors.ContextOverflow, "context_length_exceeded"), (pool_errors.LimitError, "request_too_large"),
    (pool_errors.InvalidArgument, "invalid_value"), (pool_errors.Unsupported, "unsupported_parameter"),
    (pool_errors.WrongCapability, "wrong_capability"), (pool_errors.TemplateError, "template_refused"),
    (pool_errors.UnknownModel, "model_not_found"), (pool_errors.OfflineError, "model_not_found"),
    (pool_errors.SpawnTimeout, "load_failed"), (pool_errors.SpawnFailed, "load_failed"),
    (pool_errors.DownloadError, "download_failed"), (pool_errors.IntegrityError, "load_failed"),
    (pool_errors.FormatError, "load_failed"), (pool_errors.FileError, "load_failed"),
    (pool_errors.UnsafeFormat, "load_failed"), (pool_errors.Timeout, "timeout"),
    (pool_errors.MemoryExhausted, "out_of_memory"), (pool_errors.Overloaded, "overloaded"),
    (pool_errors.CircuitOpen, "circuit_open"), (pool_errors.ShuttingDown, "shutting_down"),
    (pool_errors.RecvError, "worker_lost"), (pool_errors.SendError, "worker_lost"),
    (pool_errors.NoWorkers, "worker_lost"), (pool_errors.ModelError, "model_failed"),
    (pool_errors.NumericError, "model_failed"), (pool_errors.Cancelled, "cancelled"), (MemoryError, "out_of_memory"),
)
#: Name of a library error, as the pool's events have it -> code.
CODE_OF_NAME = {kind.name: next((code for other, code in _CODES if issubclass(kind, other)), "internal")
                for kind in vars(pool_errors).values()
                if isinstance(kind, type) and issubclass(kind, pool_errors.MpoolError)}
#: Codes of invalid requests. Their library messages describe only the request, so they are included in the response.
_DETAILED = ("invalid_value", "unsupported_parameter", "context_length_exceeded", "request_too_large")
_MAX_DETAIL = 300
#: A lack of memory names what is needed and free, and the models that hold memory, which ``/v1/models`` lists as well.
_MAX_MEMORY_DETAIL = 600
#: The list of models at the end of a lack of memory, as csrc/registry/describe.c writes it, and one model of it.
_HOLDERS, _HOLDER = ". In memory: ", re.compile(r"(.+?)( [0-9.]+ M?B \([a-z, ]+\)(?:, |$))", re.DOTALL)
#: Request fields that contain a JSON schema. Request fields whose name is also that of the library's parameter: only
#: these become the `param` of a library error.
_SCHEMA_PARAMS = ("response_format", "tools")
_PARAMS = frozenset((*sampling.NAMES, *_SCHEMA_PARAMS, "tool_choice", "parallel_tool_calls", "messages",
                     "guidance_scale", "num_inference_steps", "negative_prompt"))


class Refusal(Exception):
    """A refused or failed request, with an error of :data:`TABLE`.

    Attributes:
        code: Key of :data:`TABLE`.
        detail: Invalid parameter and its allowed values; "": no detail.
        param: Name of the invalid parameter, or None.
        cause: What the log says in place of the message, which has no details of the server's own failures; "": the
            message says it all.
    """

    def __init__(self, code: str, detail: str = "", param: str | None = None, cause: str = "") -> None:
        super().__init__(code)
        self.code, self.detail, self.param, self.cause = code, detail, param, cause

    @property
    def row(self) -> Row:
        """The entry of :data:`TABLE`."""
        return TABLE[self.code]

    @property
    def message(self) -> str:
        """The message for the client."""
        # Messages of the core begin in lower case, because the key of the model stands before them.
        detail = re.sub(r"^(the|this|a|no) ", lambda word: word[0].capitalize(), self.detail)
        return f"{self.row.text} {detail}" if detail else self.row.text


def refusal_of(error: BaseException, request: str, names: Mapping[str, str] = {}) -> Refusal:
    """Convert an exception to the error that the client receives. Logs the traceback of an internal error; the record
    of the request has the reason of every other one.

    Args:
        error: Any exception.
        request: Id of the request, for the log.
        names: Parameter of the library -> the client's field, if they differ or the parameter is not in ``_PARAMS``.
            The error gets this name.
    """
    if isinstance(error, Refusal):
        return error
    raised, error = error, error_of(error) or error
    library = param_of(error)
    detail = renamed(error, names) if isinstance(error, pool_errors.MpoolError) else ""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "internal")
    if code in _DETAILED and getattr(error, "_of_files", False):
        code = "load_failed"  # the message names a file of this machine
    if isinstance(error, asyncio.CancelledError):
        code = "shutting_down"
    cause = "" if code in _DETAILED else str(error)  # clients do not see the details of the server's own failures
    if code == "internal":
        cause = f"{type(error).__name__}; the record of this id has the traceback"
        log.error("%s failed", request, exc_info=error)
    found = _refusal(code, error, raised, detail, library, names)
    if not (found.detail and isinstance(error, (pool_errors.WrongCapability, pool_errors.MemoryExhausted))):
        found.cause = cause  # else the message says it all
    return found


def _refusal(code: str, error: BaseException, raised: BaseException, detail: str, library: str,
             names: Mapping[str, str]) -> Refusal:
    """Return the refusal with a code, with what the client may know of the error. ``raised``: the exception before it
    became ``error``."""
    if isinstance(error, pool_errors.DownloadError) and error._reason:
        return Refusal(code, pool_errors.sentence(error._reason))
    if isinstance(error, pool_errors.WrongCapability):  # the message names capabilities; the hint is for Python
        return Refusal(code, pool_errors.sentence(f"{error.key}: {error.message}"), "model")
    if isinstance(error, pool_errors.MemoryExhausted) and isinstance(raised, pool_errors.MpoolError):
        return Refusal(code, pool_errors.sentence(memory_text(error.message)[:_MAX_MEMORY_DETAIL]))
    if code not in _DETAILED or not isinstance(error, pool_errors.MpoolError):
        return Refusal(code)
    param = names.get(library) or (library if library in _PARAMS else None)
    if code == "request_too_large" and library in _SCHEMA_PARAMS:  # the schema is too complex, not too long
        code = "invalid_value"
    return Refusal(code, pool_errors.sentence(detail), param)


def memory_text(message: str) -> str:
    """Return the message of a lack of memory with the last parts of models' paths in place of the paths, and with the
    options of ``mpool serve`` in place of the names in Python.

    A folder may have any character in its name. The message begins with the model that lacks memory, and no text after
    it has a slash; each model in memory ends with its size and the reason why it stays.
    """
    head, intro, held = message.partition(_HOLDERS)
    shown = "".join(found[1].rpartition("/")[2] + found[2] for found in _HOLDER.finditer(held))
    return with_options(head.rpartition("/")[2]) + (intro + shown if shown else "")


def param_of(error: BaseException) -> str:
    """Return the parameter of an error, without index and field; "": it has none."""
    return str(getattr(error, "param", None) or "").partition("[")[0].partition(".")[0]


def renamed(error: pool_errors.MpoolError, names: Mapping[str, str]) -> str:
    """Give the parameter of an error the client's name, and return the message, which begins with this name.

    Args:
        error: An error of the library.
        names: Parameter of the library -> the client's field.
    """
    name = names.get(param_of(error))
    error.rename(names)
    detail = error.message[:_MAX_DETAIL]
    return detail if name is None or error.problem is not None else f"`{name}`: {detail}"


# ---- error formats -------------------------------------------------------------------------------------------------

class ErrorBody(msgspec.Struct):
    """The fields of an error in OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(msgspec.Struct):
    """An error in OpenAI's API."""

    error: ErrorBody


class PlainError(msgspec.Struct):
    """An error in Ollama's API."""

    error: str


_encode = msgspec.json.Encoder().encode


def openai_error(refusal: Refusal) -> bytes:
    """Encode an error for OpenAI's API."""
    return _encode(ErrorResponse(ErrorBody(refusal.message, refusal.row.kind, refusal.param, refusal.code)))


def plain_error(refusal: Refusal) -> bytes:
    """Encode an error for Ollama's API."""
    return _encode(PlainError(refusal.message))


class AnthropicErrorBody(msgspec.Struct):
    """The fields of an error in Anthropic's API."""

    type: str
    message: str


class AnthropicError(msgspec.Struct):
    """An error in Anthropic's API."""

    error: AnthropicErrorBody
    type: str = "error"


#: Codes of errors that Anthropic's API reports as ``overloaded_error``, with status 529.
_OVERLOADED = ("overloaded", "out_of_memory", "too_many_streams", "too_many_connections", "too_many_bodies")
#: HTTP status -> type of an error in Anthropic's API; other statuses are ``api_error`` from 500 on, else
#: ``invalid_request_error``.
_ANTHROPIC_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error",
                    409: "conflict_error", 413: "request_too_large", 504: "timeout_error"}


def anthropic_error(refusal: Refusal) -> bytes:
    """Encode an error for Anthropic's API."""
    status, message = refusal.row.status, refusal.message
    kind = "overloaded_error" if refusal.code in _OVERLOADED else \
        _ANTHROPIC_TYPES.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    if refusal.code == "context_length_exceeded":  # clients such as Claude Code search for these words
        message = f"prompt is too long: {refusal.detail or message}"
    return _encode(AnthropicError(AnthropicErrorBody(kind, message)))


class InferenceError(msgspec.Struct):
    """An error in the API of text-embeddings-inference."""

    error: str
    error_type: Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]


#: Code -> HTTP status and type of an error in the API of text-embeddings-inference. Other errors keep their status;
#: their type is ``Unhealthy`` for 503, else ``Backend`` from 500 on, else ``Validation``.
_INFERENCE: dict[str, tuple[int, str]] = {
    "empty_input": (400, "Empty"), "wrong_capability": (424, "Backend"), "model_failed": (424, "Backend"),
    **dict.fromkeys(("invalid_value", "unsupported_parameter", "context_length_exceeded"), (422, "Validation")),
    **dict.fromkeys(_OVERLOADED, (429, "Overloaded"))}
#: Paths of text-embeddings-inference.
_INFERENCE_PATHS = ("/embed", "/embed_sparse", "/embed_all", "/rerank", "/similarity", "/predict")


def inference_error(refusal: Refusal) -> bytes:
    """Encode an error for the API of text-embeddings-inference."""
    status = refusal.row.status
    other = "Unhealthy" if status == 503 else "Backend" if status >= 500 else "Validation"
    return _encode({"error": refusal.message, "error_type": _INFERENCE.get(refusal.code, (status, other))[1]})


class WorkerError(msgspec.Struct):
    """An error in the worker protocol. ``retriable``: the same request may succeed later. ``param``: the invalid
    parameter, or null."""

    code: str
    message: str
    retriable: bool
    param: str | None = None


#: Code -> code of the worker protocol, where the HTTP status does not determine it.
_WORKER_CODES = {"load_failed": "MODEL_LOAD_FAILED", "download_failed": "MODEL_LOAD_FAILED", "out_of_memory": "OOM",
                 "timeout": "INFERENCE_TIMEOUT", "cancelled": "CANCELLED", "shutting_down": "CANCELLED"}
#: Paths of the worker protocol.
_WORKER_PATHS = ("/execute", "/cancel", "/shutdown")


def worker_code(refusal: Refusal) -> str:
    """Return one of the six codes of the worker protocol for an error."""
    return _WORKER_CODES.get(refusal.code) or ("INVALID_REQUEST" if refusal.row.status < 500 else "INTERNAL")


def worker_error(refusal: Refusal) -> bytes:
    """Encode an error for the worker protocol."""
    return _encode(WorkerError(worker_code(refusal), refusal.message, refusal.row.retry_after > 0, refusal.param))


# ---- choice of the format ------------------------------------------------------------------------------------------

class ErrorFormat(NamedTuple):
    """Errors of one protocol.

    Attributes:
        encode: Function that encodes an error as JSON.
        body: Struct of the JSON.
        event: Name of a server-sent event with an error; None: the event has no name.
        statuses: Code -> HTTP status, where it differs from that of :data:`TABLE`.
    """

    encode: Callable[[Refusal], bytes]
    body: type[msgspec.Struct]
    event: str | None = None
    statuses: Mapping[str, int] = {}

    def status(self, code: str) -> int:
        """Return the HTTP status of an error."""
        return self.statuses.get(code, TABLE[code].status)


OPENAI = ErrorFormat(openai_error, ErrorResponse)
OLLAMA = ErrorFormat(plain_error, PlainError)
ANTHROPIC = ErrorFormat(anthropic_error, AnthropicError, "error", dict.fromkeys(_OVERLOADED, 529))
INFERENCE = ErrorFormat(inference_error, InferenceError, None,
                        {code: status for code, (status, _) in _INFERENCE.items()})
_WORKER = ErrorFormat(worker_error, WorkerError)


def error_format(path: str, anthropic: bool = False) -> ErrorFormat:
    """Return the format of the errors of a path.

    Args:
        path: Path of the request.
        anthropic: The request has the header ``anthropic-version``, which decides on the routes that OpenAI and
            Anthropic share.
    """
    if path in _WORKER_PATHS:
        return _WORKER
    if path in _INFERENCE_PATHS:
        return INFERENCE
    if path.startswith("/api/"):
        return OLLAMA
    if path.startswith("/v1/messages") or anthropic and path.startswith("/v1/models"):
        return ANTHROPIC
    return OPENAI


__all__ = ["ANTHROPIC", "INFERENCE", "OLLAMA", "OPENAI", "TABLE", "AnthropicError", "ErrorFormat", "ErrorResponse",
           "PlainError", "Refusal", "WorkerError", "error_format", "openai_error", "param_of", "plain_error",
           "refusal_of", "renamed", "worker_code", "worker_error"]
