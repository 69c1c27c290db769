"""Errors that mpool raises.

All of them derive from :class:`MpoolError` and have a ``code`` and a ``name`` (number and name of a row of
``csrc/base/status.def``), a ``hint`` with the suggested next step and, if a model is involved, its ``key``. Each class
also derives from the matching built-in exception (``ValueError``, ``MemoryError``, ``TimeoutError``, ...). The C core
raises the same classes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar


class MpoolError(Exception):
    """Base class of all errors that mpool raises.

    If ``message`` is empty, it is composed from ``param``, ``allowed`` and ``got``: "`top_k` must be 1 or more, got 0".

    Attributes:
        code: number of the error, stable across versions.
        name: name of the error in ``status.def`` (``"FORMAT"``, ``"TIMEOUT"``, ...).
        param: parameter or field with the invalid value, or ``None``. An element of a list has its index:
            ``inputs[3]``.
        got: the invalid value, shortened for display, or ``None``.
        allowed: allowed values, as a phrase that completes "must be ...", or ``None``.
        hint: suggested next step, or ``None``.
        key: key of the model concerned, or ``None``.
        problem: the message without the parameter that it begins with; ``None``: it does not begin with ``param``.
        addition: clause at the end of the message, or ``None``.
    """

    code: ClassVar[int] = 81
    name: ClassVar[str] = "INTERNAL"
    _kept: tuple[str, ...] = ()  # settings that a name kept from its old model, for which the new one is refused
    _of_files: bool = False  # the error came from reading a model's files: its message may contain a path
    #: A model could not be loaded because its paths no longer name the files that were read. No request was begun.
    _outdated: bool = False

    def __init__(self, message: str = "", *, param: str | None = None, got: str | None = None,
                 allowed: str | None = None, hint: str | None = None, key: str | None = None) -> None:
        if not message and param is not None:
            message = f"{_quoted(param)} must be {allowed}, got {got}"
        self.problem: str | None = None
        self.addition: str | None = None
        self.message = message
        self.param, self.got, self.allowed = param, got, allowed
        self.hint = hint
        self.key = key
        if param is not None and message.startswith(_quoted(param)):
            self.problem = message.removeprefix(_quoted(param))
        super().__init__(message)

    @property
    def message(self) -> str:
        """Error text without ``key`` and ``hint``."""
        text = self._message if self.problem is None or self.param is None else _quoted(self.param) + self.problem
        return f"{text}; {self.addition}" if self.addition else text

    @message.setter
    def message(self, text: str) -> None:
        self._message = text
        self.problem = None

    def rename(self, names: Mapping[str, str]) -> None:
        """Give ``param`` the name that the caller has for it: a field of a request, an option of a command.

        Args:
            names: parameter, or parameter with an index or field -> name of the caller. The name of a parameter also
                applies to its elements and fields, that of an element to its fields.
        """
        if self.param is None:
            return
        if self.param in names:
            self.param = names[self.param]
            return
        root, element = re.match(r"\w*", self.param), re.match(r"\w+\[\d+\]", self.param)
        assert root is not None
        if element is not None and element[0] in names:
            root = element
        self.param = names.get(root[0], root[0]) + self.param[root.end():]

    def __str__(self) -> str:
        text = self.message
        if self.key is not None and self.key not in text:
            text = f"{self.key}: {text}"
        return f"{sentence(text)} {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _quoted(name: str) -> str:
    """Return a name as a message has it: words and options of a command stand without backticks."""
    return name if " " in name or name.startswith("-") else f"`{name}`"


def sentence(text: str) -> str:
    """Return a text with a full stop at its end, unless it ends with punctuation of its own ("?", "...")."""
    return text if text.endswith((".", "?", "!")) else text + "."


def _rebuild(cls: type[MpoolError], args: tuple[Any, ...], state: dict[str, Any]) -> MpoolError:
    error = cls()  # cls.__new__(cls) refuses classes that derive from MemoryError
    error.args = args
    error.__dict__.update(state)
    return error


class InvalidArgument(MpoolError, ValueError):
    """An argument has an invalid value; the message states the allowed values."""

    code, name = 10, "INVALID_ARGUMENT"


def _cut(value: Any) -> Any:
    """Return a value of a file, or the start of its text if that is long."""
    text = str(value)
    return value if len(text) <= 1000 else text[:1000] + "..."


class FormatError(MpoolError, ValueError):
    """A model file is malformed.

    Attributes:
        file: path of the file.
        offset: byte offset of the field in the file, or ``None``.
        field: name of the malformed field.
        got: value of the field.
        allowed: allowed values of the field.
    """

    code, name = 11, "FORMAT"

    def __init__(self, message: str = "", *, file: str | None = None, offset: int | None = None,
                 field: str | None = None, got: object = None, allowed: object = None, param: str | None = None,
                 hint: str | None = None, key: str | None = None) -> None:
        if not message:
            field, got = _cut(field), _cut(got)
            where = f"{file}" if offset is None else f"{file} at byte {offset}"
            message = f"{where}: {field} is {got}, allowed: {allowed}"
        super().__init__(message, param=param, hint=hint, key=key)
        self.file, self.offset, self.field = file, offset, field
        self.got, self.allowed = got, allowed  # type: ignore[assignment]


class LimitError(MpoolError, ValueError):
    """A limit was exceeded; the message states the limit, and the setting that raises it if there is one."""

    code, name = 12, "LIMIT"


class ContextOverflow(MpoolError, ValueError):
    """The input is longer than the model's context.

    Attributes:
        tokens: length of the input in tokens.
        limit: longest input that the model accepts, in tokens.
    """

    code, name = 13, "CONTEXT_OVERFLOW"

    def __init__(self, message: str = "", *, tokens: int | None = None, limit: int | None = None,
                 param: str | None = None, hint: str | None = None, key: str | None = None) -> None:
        super().__init__(message or f"the input has {tokens} tokens, the model accepts at most {limit}", param=param,
                         hint=hint, key=key)
        self.tokens, self.limit = tokens, limit


class UnknownModel(MpoolError, LookupError):
    """No model has this key; the message suggests the most similar key."""

    code, name = 14, "UNKNOWN_MODEL"


class WrongCapability(MpoolError, ValueError):
    """The model has another capability than the request needs; the message names both, the hint suggests a model."""

    #: Capability that the request needs. For a text encoder its output, ``"vectors"``, ``"dense"``, ``"sparse"``,
    #: ``"scores"``, ``"labels"`` or ``"spans"``. None if unknown.
    wanted: str | None = None
    code, name = 15, "WRONG_CAPABILITY"


class Unsupported(MpoolError, NotImplementedError):
    """This model or this build does not support the request."""

    code, name = 16, "UNSUPPORTED"


class UnsafeFormat(MpoolError, ValueError):
    """The model needs a file format that can execute code (pickle: .bin, .pt, .ckpt), or remote code.

    The message names a safe alternative.
    """

    code, name = 17, "UNSAFE_FORMAT"


class TemplateError(MpoolError, ValueError):
    """A chat template failed, refused the conversation, or exceeded its limits on time, memory or output size."""

    code, name = 18, "TEMPLATE"


class FileError(MpoolError, OSError):
    """A file could not be read or written, or another call of the operating system failed.

    ``__cause__`` or the message has the reason that the system gave.
    """

    code, name = 30, "IO"


class OfflineError(MpoolError, OSError):
    """The file is not on this machine and downloads are disabled; the hint says how to fetch it.

    Attributes:
        missing: what is not on this machine or is incomplete there: the message without the cause.
        cause: why nothing is downloaded, or ``None``.
    """

    code, name = 31, "OFFLINE"

    def __init__(self, message: str = "", *, missing: str | None = None, cause: str | None = None,
                 param: str | None = None, hint: str | None = None, key: str | None = None) -> None:
        """Compose the message of ``missing`` and ``cause``, if it is empty."""
        super().__init__(message or f"{missing}, and {cause}", param=param, hint=hint, key=key)
        self.missing, self.cause = message if missing is None else missing, cause


class IntegrityError(MpoolError, OSError):
    """A file does not match its recorded size or hash, or a model file was changed while its model was in use."""

    code, name = 32, "INTEGRITY"


class DownloadError(MpoolError, OSError):
    """A download failed."""

    _reason: str | None = None  # the cause without addresses, for clients of the server
    code, name = 33, "DOWNLOAD"


class PoolError(MpoolError):
    """Base class of the errors that a pool raises for a request."""


class NoWorkers(PoolError, RuntimeError):
    """Too many workers of the model failed in a short time; none is started until the model is loaded again."""

    code, name = 50, "NO_WORKERS"


class Timeout(PoolError, TimeoutError):
    """A request, load, unload or swap did not end within its time limit.

    A request is cancelled, or was never queued. A load or unload continues in the background. A swap drops the new
    model, and the name keeps the old one.
    """

    code, name = 51, "TIMEOUT"


class SendError(PoolError, RuntimeError):
    """A request could not be queued, or a swap could not complete, because the model was removed or replaced."""

    code, name = 52, "SEND"


class RecvError(PoolError, RuntimeError):
    """A worker ended, made no progress or sent an invalid message, and so returned no result."""

    code, name = 53, "RECV"


class ModelError(PoolError, RuntimeError):
    """The model failed during computation, or refuses a request that made workers fail repeatedly."""

    code, name = 54, "MODEL"


class ShuttingDown(PoolError, RuntimeError):
    """The pool was closed."""

    code, name = 55, "SHUTTING_DOWN"


class MemoryExhausted(PoolError, MemoryError):
    """There is not enough memory, and waiting would not help; the message states the required bytes and the free bytes
    or the limit."""

    code, name = 56, "MEMORY_EXHAUSTED"


class SpawnFailed(PoolError, RuntimeError):
    """A thread or process could not be started; the message states the cause."""

    code, name = 57, "SPAWN_FAILED"


class SpawnTimeout(PoolError, TimeoutError):
    """A load made no progress or took too long, or a worker process was not ready in time; the message states which."""

    code, name = 58, "SPAWN_TIMEOUT"


class CircuitOpen(PoolError, RuntimeError):
    """The circuit breaker of the model is open after repeated failures; the message states the remaining backoff."""

    code, name = 59, "CIRCUIT_OPEN"


class Overloaded(PoolError, RuntimeError):
    """The queue of the model is full, or running requests, loads or evictions hold the memory that the request needs,
    and the request does not wait (``fail_fast``, or :func:`mpool.submit`); or all threads for a kind of native call are
    stuck."""

    code, name = 60, "OVERLOADED"
    _of_memory: bool = False  # memory was short, not the queue full


class Cancelled(PoolError, RuntimeError):
    """The request was cancelled."""

    code, name = 61, "CANCELLED"


class NumericError(PoolError, ArithmeticError):
    """The model computed NaN or infinity; that output was discarded."""

    code, name = 80, "NUMERIC"

    def __init__(self, message: str = "", *, param: str | None = None, hint: str | None = None,
                 key: str | None = None) -> None:
        super().__init__(message, param=param, key=key, hint=hint or (
            'The same input fails again. Try compute="float32". If that fails too, the weights are damaged or hold '
            "NaN: download the model again, or use another file of it"))


class InternalError(MpoolError, RuntimeError):
    """A bug in mpool; please report it with the message."""

    code, name = 81, "INTERNAL"


__all__ = [name for name, value in list(globals().items())
           if isinstance(value, type) and issubclass(value, MpoolError)]


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
