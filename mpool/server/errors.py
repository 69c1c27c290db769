"""Everything that a client can be told has gone wrong: one table.

The texts are fixed, so that no path, address or word of a model's file gets out; what exactly happened is in the log,
under the request's id. Only where the request itself is at fault does the answer also say what of it, and what was
allowed.
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import NamedTuple

import msgspec

from .. import errors as pool_errors
from ..tasks import sampling

log = logging.getLogger("mpool.server")


class Row(NamedTuple):
    """One way to fail: HTTP status, kind as OpenAI's API names it, fixed text, seconds until a retry makes sense."""

    status: int
    kind: str
    text: str
    retry_after: int = 0


_REQUEST, _SERVER = "invalid_request_error", "server_error"

#: Code -> row.
TABLE: dict[str, Row] = {
    "invalid_json": Row(400, _REQUEST, "The body is not strict JSON."),
    "invalid_value": Row(400, _REQUEST, "The request has a value that is not allowed."),
    "unsupported_parameter": Row(400, _REQUEST, "The request asks for something that is not supported."),
    "context_length_exceeded": Row(400, _REQUEST, "The input is longer than the model takes."),
    "wrong_capability": Row(400, _REQUEST, "The model is not for this."),
    "template_refused": Row(400, _REQUEST, "The model's chat template refuses these messages."),
    "bad_request": Row(400, _REQUEST, "The request is not well-formed HTTP."),
    "invalid_api_key": Row(401, "authentication_error", "The token is missing or wrong: Authorization: Bearer TOKEN."),
    "token_required": Row(403, "permission_error", "Other machines can reach this address, and the server has no token. "
                                                   "Set MPOOL_SERVER_TOKEN_FILE."),
    "forbidden_origin": Row(403, "permission_error", "Pages of this origin may not call the server."),
    "model_not_found": Row(404, _REQUEST, "There is no such model here; GET /v1/models lists them."),
    "not_found": Row(404, _REQUEST, "There is nothing at this path; GET /openapi.json lists what there is."),
    "method_not_allowed": Row(405, _REQUEST, "The path does not take this method."),
    "busy": Row(409, _REQUEST, "The worker has a job.", 1),
    "request_timeout": Row(408, _REQUEST, "The request took too long to arrive."),
    "request_too_large": Row(413, _REQUEST, "The body, or a text in it, is larger than allowed."),
    "unsupported_media_type": Row(415, _REQUEST, "The body has to be JSON, uncompressed, and to say so: "
                                              "Content-Type: application/json."),
    "misdirected": Row(421, _REQUEST, "The Host header names another server."),
    "headers_too_large": Row(431, _REQUEST, "The request's head is larger than allowed."),
    "cancelled": Row(499, _REQUEST, "The request was cancelled."),
    "internal": Row(500, _SERVER, "The server failed. Its log says more."),
    "model_failed": Row(500, _SERVER, "The model failed while computing. The log says more."),
    "load_failed": Row(503, _SERVER, "The model could not be loaded. The log says more.", 10),
    "too_many_streams": Row(503, _SERVER, "As many answers as may are being streamed.", 1),
    "too_many_connections": Row(503, _SERVER, "As many connections as may are open.", 1),
    "overloaded": Row(503, _SERVER, "As many requests as may are waiting for the model.", 1),
    "out_of_memory": Row(503, _SERVER, "There is not enough memory for this now.", 5),
    "worker_lost": Row(503, _SERVER, "The worker that had the request went away.", 1),
    "resting": Row(503, _SERVER, "The model rests after repeated faults.", 30),
    "shutting_down": Row(503, _SERVER, "The server is being stopped.", 5),
    "timeout": Row(504, _SERVER, "There was no answer within the time allowed.", 1),
}

#: Error of the library -> code here; the first that fits counts.
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
#: Codes that are the request's own fault: what the library says of it is about the request alone.
_SAYS_WHAT = ("invalid_value", "unsupported_parameter", "context_length_exceeded", "request_too_large")
_MAX_DETAIL = 300
#: What the library says of a parameter begins with its name; these have the same one in a request.
_FORMS = ("response_format", "tools")
_PARAMS = frozenset((*sampling.NAMES, *_FORMS, "tool_choice", "parallel_tool_calls", "messages", "guidance_scale",
                     "num_inference_steps", "negative_prompt"))
_NAME = re.compile(r"[a-z_]+")


class Refusal(Exception):
    """A request that ends in one of the rows of :data:`TABLE`.

    Attributes:
        code: of the row.
        detail: what of the request is at fault, and what was allowed; "": nothing that a client may know.
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
        """What the client is told."""
        return f"{self.row.text} {self.detail}" if self.detail else self.row.text


def refusal_of(error: BaseException, request: str) -> Refusal:
    """What a client is told about an error; what it is not told goes to the log.

    Args:
        error: anything that was raised.
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
    name = _NAME.match(error.message)
    param = name[0] if name is not None and name[0] in _PARAMS else None
    if code == "request_too_large" and param in _FORMS:  # it is not its length that is too much
        code = "invalid_value"
    return Refusal(code, error.message[:_MAX_DETAIL] + ".", param)


# ---- shapes --------------------------------------------------------------------------------------------------------

class ErrorBody(msgspec.Struct):
    """What OpenAI's API says about an error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct):
    """An error, as OpenAI's API has it."""

    error: ErrorBody


class PlainError(msgspec.Struct):
    """An error, as Ollama has it."""

    error: str


_encode = msgspec.json.Encoder().encode


def openai_error(refusal: Refusal) -> bytes:
    """JSON in the shape of OpenAI's API."""
    return _encode(ErrorAnswer(ErrorBody(refusal.message, refusal.row.kind, refusal.param, refusal.code)))


def plain_error(refusal: Refusal) -> bytes:
    """JSON in the shape of Ollama."""
    return _encode(PlainError(refusal.message))


class WorkerError(msgspec.Struct):
    """An error, as the worker protocol has it. ``code``: see :func:`worker_code`; ``retriable``: the same request may
    succeed later; ``param``: the parameter at fault, or None."""

    code: str
    message: str
    retriable: bool
    param: str | None = None


#: Codes of the worker protocol, where the status does not say enough.
_OF_WORKER = {"load_failed": "MODEL_LOAD_FAILED", "out_of_memory": "OOM", "timeout": "INFERENCE_TIMEOUT",
              "cancelled": "CANCELLED", "shutting_down": "CANCELLED"}
#: Paths of the worker protocol.
_WORKER = ("/execute", "/cancel", "/shutdown")


def worker_code(refusal: Refusal) -> str:
    """One of the six codes that the worker protocol has."""
    return _OF_WORKER.get(refusal.code) or ("INVALID_REQUEST" if refusal.row.status < 500 else "INTERNAL")


def worker_error(refusal: Refusal) -> bytes:
    """JSON in the shape of the worker protocol."""
    return _encode(WorkerError(worker_code(refusal), refusal.message, refusal.row.retry_after > 0, refusal.param))


def error_body(refusal: Refusal, path: str) -> bytes:
    """JSON in the shape that clients of a path expect."""
    if path in _WORKER:
        return worker_error(refusal)
    return plain_error(refusal) if path.startswith("/api/") else openai_error(refusal)


__all__ = ["TABLE", "ErrorAnswer", "PlainError", "Refusal", "WorkerError", "error_body", "openai_error", "plain_error",
           "refusal_of", "worker_code", "worker_error"]
