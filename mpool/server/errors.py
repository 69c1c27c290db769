"""Every error that a client can get: one table.

The texts are fixed, so that no path, address or text of a model's file gets out; the log has the details under the
request's id. Only if the request itself is at fault does the response also name the parameter and what is allowed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import NamedTuple

import msgspec

from .. import errors as pool_errors
from ..tasks import sampling

log = logging.getLogger("mpool.server")


class Row(NamedTuple):
    """One error: HTTP status, type as OpenAI's API names it, fixed text, seconds until a retry makes sense."""

    status: int
    kind: str
    text: str
    retry_after: int = 0


_REQUEST, _SERVER = "invalid_request_error", "server_error"

#: Code -> row.
TABLE: dict[str, Row] = {
    "invalid_json": Row(400, _REQUEST, "The body is not strict JSON."),
    "invalid_value": Row(400, _REQUEST, "The request has a value that is not allowed."),
    "unsupported_parameter": Row(400, _REQUEST, "The request has a parameter that is not supported."),
    "context_length_exceeded": Row(400, _REQUEST, "The input is longer than the model's context."),
    "wrong_capability": Row(400, _REQUEST, "The model does not have this capability."),
    "template_refused": Row(400, _REQUEST, "The model's chat template rejects these messages."),
    "bad_request": Row(400, _REQUEST, "The request is not well-formed HTTP."),
    "invalid_api_key": Row(401, "authentication_error", "The token is missing or wrong: Authorization: Bearer TOKEN."),
    "token_required": Row(403, "permission_error", "An address that other machines reach needs a token: set "
                                                   "MPOOL_SERVER_TOKEN_FILE."),
    "forbidden_origin": Row(403, "permission_error", "This origin may not call the server."),
    "model_not_found": Row(404, _REQUEST, "Model not found. GET /v1/models lists the models."),
    "not_found": Row(404, _REQUEST, "Path not found. GET /openapi.json lists the paths."),
    "method_not_allowed": Row(405, _REQUEST, "The path does not allow this method."),
    "busy": Row(409, _REQUEST, "The worker is running a job.", 1),
    "request_timeout": Row(408, _REQUEST, "The request took too long to arrive."),
    "request_too_large": Row(413, _REQUEST, "The body, or a text in it, is longer than allowed."),
    "unsupported_media_type": Row(415, _REQUEST, "The body must be uncompressed JSON with the header "
                                              "Content-Type: application/json."),
    "misdirected": Row(421, _REQUEST, "The Host header does not name this server."),
    "headers_too_large": Row(431, _REQUEST, "The request's headers are larger than allowed."),
    "cancelled": Row(499, _REQUEST, "The request was cancelled."),
    "internal": Row(500, _SERVER, "The server failed. Its log has the details."),
    "model_failed": Row(500, _SERVER, "The model failed while computing. The log has the details."),
    "load_failed": Row(503, _SERVER, "The model could not be loaded. The log has the details.", 10),
    "too_many_streams": Row(503, _SERVER, "The limit of streamed responses is reached.", 1),
    "too_many_connections": Row(503, _SERVER, "The limit of connections is reached.", 1),
    "overloaded": Row(503, _SERVER, "The model's queue is full.", 1),
    "out_of_memory": Row(503, _SERVER, "Not enough memory is free for this request.", 5),
    "worker_lost": Row(503, _SERVER, "The worker ended before it completed the request.", 1),
    "resting": Row(503, _SERVER, "The model is disabled for a while after repeated faults.", 30),
    "shutting_down": Row(503, _SERVER, "The server is shutting down.", 5),
    "timeout": Row(504, _SERVER, "The request did not complete within its time limit.", 1),
}

#: Error class of the library -> code; the first match counts.
_OF_LIBRARY: tuple[tuple[type[BaseException], str], ...] = (
    (pool_errors.ContextOverflow, "context_length_exceeded"), (pool_errors.LimitError, "request_too_large"),
    (pool_errors.InvalidArgument, "invalid_value"), (pool_errors.Unsupported, "unsupported_parameter"),
    (pool_errors.WrongCapability, "wrong_capability"), (pool_errors.TemplateError, "template_refused"),
    (pool_errors.UnknownModel, "model_not_found"), (pool_errors.OfflineError, "model_not_found"),
    (pool_errors.SpawnTimeout, "load_failed"), (pool_errors.SpawnFailed, "load_failed"),
    (pool_errors.DownloadError, "load_failed"), (pool_errors.IntegrityError, "load_failed"),
    (pool_errors.FormatError, "load_failed"), (pool_errors.FileError, "load_failed"),
    (pool_errors.UnsafeFormat, "load_failed"), (pool_errors.Timeout, "timeout"),
    (pool_errors.MemoryExhausted, "out_of_memory"), (pool_errors.Overloaded, "overloaded"),
    (pool_errors.CircuitOpen, "resting"), (pool_errors.ShuttingDown, "shutting_down"),
    (pool_errors.RecvError, "worker_lost"), (pool_errors.SendError, "worker_lost"),
    (pool_errors.NoWorkers, "worker_lost"), (pool_errors.ModelError, "model_failed"),
    (pool_errors.NumericError, "model_failed"), (pool_errors.Cancelled, "cancelled"), (MemoryError, "out_of_memory"),
)
#: Codes of errors in the request: the library's message is about the request alone, so the client may read it.
_SAYS_WHAT = ("invalid_value", "unsupported_parameter", "context_length_exceeded", "request_too_large")
_MAX_DETAIL = 300
#: Parameters of the library that are fields of a request with the same name.
_FORMS = ("response_format", "tools")
_PARAMS = frozenset((*sampling.NAMES, *_FORMS, "tool_choice", "parallel_tool_calls", "messages", "guidance_scale",
                     "num_inference_steps", "negative_prompt"))


class Refusal(Exception):
    """A request that ends in one of the rows of :data:`TABLE`.

    Attributes:
        code: key of the row.
        detail: the parameter at fault and what is allowed, or "".
        param: the parameter at fault, or None.
    """

    def __init__(self, code: str, detail: str = "", param: str | None = None) -> None:
        super().__init__(code)
        self.code, self.detail, self.param = code, detail, param

    @property
    def row(self) -> Row:
        """The row of the table."""
        return TABLE[self.code]

    @property
    def message(self) -> str:
        """The text that the client gets."""
        return f"{self.row.text} {self.detail}" if self.detail else self.row.text


def refusal_of(error: BaseException, request: str) -> Refusal:
    """Turn an error into what a client may know of it. The log gets the rest.

    Args:
        error: any exception.
        request: id of the request, for the log.
    """
    if isinstance(error, Refusal):
        return error
    code = next((code for kind, code in _OF_LIBRARY if isinstance(error, kind)), "internal")
    if isinstance(error, asyncio.CancelledError):
        code = "shutting_down"
    if code == "internal":
        log.error("%s failed", request, exc_info=error)
    else:
        log.info("%s: %s: %s", request, code, error)
    if code not in _SAYS_WHAT or not isinstance(error, pool_errors.MpoolError):
        return Refusal(code)
    name = error.param or error.message.partition(" ")[0].strip("`:")  # the second: errors that carry no `param` yet
    field = name.partition("[")[0].partition(".")[0]
    param = field if field in _PARAMS else None
    if code == "request_too_large" and param in _FORMS:  # the schema's complexity is at fault, not its length
        code = "invalid_value"
    return Refusal(code, error.message[:_MAX_DETAIL] + ".", param)


# ---- shapes --------------------------------------------------------------------------------------------------------

class ErrorBody(msgspec.Struct):
    """The fields of an error in OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    """An error in OpenAI's API."""

    error: ErrorBody


class PlainError(msgspec.Struct):
    """An error in Ollama's API."""

    error: str


_encode = msgspec.json.Encoder().encode


def openai_error(refusal: Refusal) -> bytes:
    """Encode a refusal for OpenAI's API."""
    return _encode(ErrorAnswer(ErrorBody(refusal.message, refusal.row.kind, refusal.param, refusal.code)))


def plain_error(refusal: Refusal) -> bytes:
    """Encode a refusal for Ollama's API."""
    return _encode(PlainError(refusal.message))


class WorkerError(msgspec.Struct):
    """An error in the worker protocol. ``code``: see :func:`worker_code`; ``retriable``: the same request may succeed
    later; ``param``: the parameter at fault, or None."""

    code: str
    message: str
    retriable: bool
    param: str | None = None


#: Codes of the worker protocol that do not follow from the status.
_OF_WORKER = {"load_failed": "MODEL_LOAD_FAILED", "out_of_memory": "OOM", "timeout": "INFERENCE_TIMEOUT",
              "cancelled": "CANCELLED", "shutting_down": "CANCELLED"}
#: Paths of the worker protocol.
_WORKER = ("/execute", "/cancel", "/shutdown")


def worker_code(refusal: Refusal) -> str:
    """The code of a refusal in the worker protocol, one of six."""
    return _OF_WORKER.get(refusal.code) or ("INVALID_REQUEST" if refusal.row.status < 500 else "INTERNAL")


def worker_error(refusal: Refusal) -> bytes:
    """Encode a refusal for the worker protocol."""
    return _encode(WorkerError(worker_code(refusal), refusal.message, refusal.row.retry_after > 0, refusal.param))


def error_body(refusal: Refusal, path: str) -> bytes:
    """Encode a refusal for the protocol of a path."""
    if path in _WORKER:
        return worker_error(refusal)
    return plain_error(refusal) if path.startswith("/api/") else openai_error(refusal)


__all__ = ["TABLE", "ErrorAnswer", "PlainError", "Refusal", "WorkerError", "error_body", "openai_error", "plain_error",
           "refusal_of", "worker_code", "worker_error"]
