"""Errors that mpool raises.

All derive from :class:`MpoolError`, carry a ``code`` (the number and name of a row of ``csrc/base/status.def``), a
``hint`` that states the next step and, where a model is involved, its ``key``; each is also the built-in class that a
caller would catch (``ValueError``, ``MemoryError``, ``TimeoutError``, ...). The C core raises these same classes.
"""

from __future__ import annotations

from typing import Any, ClassVar


class MpoolError(Exception):
    """Base of everything that mpool raises.

    Without a message, ``param``, ``got`` and ``allowed`` make one: "`top_k` must be 1 or more, got 0".

    Attributes:
        code: public number of the error, stable across versions.
        name: its name in ``status.def`` (``"FORMAT"``, ``"TIMEOUT"``, ...).
        message: the text without ``key`` and ``hint``.
        param: the parameter or field at fault, or ``None``.
        got: the value found, shortened for display (:func:`mpool.checks.shown`), or ``None``.
        allowed: the allowed values, as words that follow "must be", or ``None``.
        hint: the next step, or ``None``.
        key: the model concerned, or ``None``.
    """

    code: ClassVar[int] = 81
    name: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str = "", *, param: str | None = None, got: str | None = None,
                 allowed: str | None = None, hint: str | None = None, key: str | None = None) -> None:
        if not message and param is not None:
            subject = param if " " in param else f"`{param}`"
            message = f"{subject} must be {allowed}, got {got}"
        self.message = message
        self.param, self.got, self.allowed = param, got, allowed
        self.hint = hint
        self.key = key
        super().__init__(message)

    def __str__(self) -> str:
        text = self.message
        if self.key is not None and self.key not in text:
            text = f"{self.key}: {text}"
        return f"{text}. {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(cls: type[MpoolError], args: tuple[Any, ...], state: dict[str, Any]) -> MpoolError:
    error = cls.__new__(cls)
    Exception.__init__(error, *args)
    error.__dict__.update(state)
    return error


class InvalidArgument(MpoolError, ValueError):
    """An argument has a value that is not allowed; the message states the allowed values."""

    code, name = 10, "INVALID_ARGUMENT"


class FormatError(MpoolError, ValueError):
    """A model file is not well formed.

    Attributes:
        file: path of the file.
        offset: byte offset of the field, or ``None``.
        field: the field concerned.
        got: the value found.
        allowed: the allowed values.
    """

    code, name = 11, "FORMAT"

    def __init__(self, message: str = "", *, file: str | None = None, offset: int | None = None,
                 field: str | None = None, got: object = None, allowed: object = None, param: str | None = None,
                 hint: str | None = None, key: str | None = None) -> None:
        if not message:
            where = f"{file}" if offset is None else f"{file} at byte {offset}"
            message = f"{where}: {field} is {got}, allowed: {allowed}"
        super().__init__(message, param=param, hint=hint, key=key)
        self.file, self.offset, self.field = file, offset, field
        self.got, self.allowed = got, allowed  # type: ignore[assignment]


class LimitError(MpoolError, ValueError):
    """A limit was exceeded; the message names the limit and the setting that raises it."""

    code, name = 12, "LIMIT"


class ContextOverflow(MpoolError, ValueError):
    """The input is longer than the model's context.

    Attributes:
        tokens: length of the input.
        limit: length that the model takes.
    """

    code, name = 13, "CONTEXT_OVERFLOW"

    def __init__(self, message: str = "", *, tokens: int | None = None, limit: int | None = None,
                 param: str | None = None, hint: str | None = None, key: str | None = None) -> None:
        super().__init__(message or f"the input has {tokens} tokens, the model takes {limit}", param=param, hint=hint,
                         key=key)
        self.tokens, self.limit = tokens, limit


class UnknownModel(MpoolError, LookupError):
    """No model has this key; the message names the nearest that exists."""

    code, name = 14, "UNKNOWN_MODEL"


class WrongCapability(MpoolError, ValueError):
    """The model exists but has another capability; the message names it, and the nearest model that fits."""

    code, name = 15, "WRONG_CAPABILITY"


class Unsupported(MpoolError, NotImplementedError):
    """This model or this build does not support the request."""

    code, name = 16, "UNSUPPORTED"


class UnsafeFormat(MpoolError, ValueError):
    """A format that can execute code (pickle: .bin, .pt, .ckpt) or remote code; the message says which file is safe."""

    code, name = 17, "UNSAFE_FORMAT"


class TemplateError(MpoolError, ValueError):
    """A chat template failed, or went over its limits of time or output."""

    code, name = 18, "TEMPLATE"


class FileError(MpoolError, OSError):
    """A file could not be read; ``__cause__`` or the message carries the system's reason."""

    code, name = 30, "IO"


class OfflineError(MpoolError, OSError):
    """The file is not on this machine and downloading is not allowed; the hint says how to fetch it."""

    code, name = 31, "OFFLINE"


class IntegrityError(MpoolError, OSError):
    """Bytes do not match the recorded size or hash."""

    code, name = 32, "INTEGRITY"


class DownloadError(MpoolError, OSError):
    """A download failed."""

    code, name = 33, "DOWNLOAD"


class PoolError(MpoolError):
    """Base of the errors that the pool raises."""


class NoWorkers(PoolError, RuntimeError):
    """No worker serves this model, and none will be started."""

    code, name = 50, "NO_WORKERS"


class Timeout(PoolError, TimeoutError):
    """No response within the timeout. The request is cancelled."""

    code, name = 51, "TIMEOUT"


class SendError(PoolError, RuntimeError):
    """The request could not be queued because the queue is closed."""

    code, name = 52, "SEND"


class RecvError(PoolError, RuntimeError):
    """A worker ended without a response."""

    code, name = 53, "RECV"


class ModelError(PoolError, RuntimeError):
    """The model failed while computing."""

    code, name = 54, "MODEL"


class ShuttingDown(PoolError, RuntimeError):
    """The pool was closed."""

    code, name = 55, "SHUTTING_DOWN"


class MemoryExhausted(PoolError, MemoryError):
    """Not enough memory; the message states the needed and the free bytes."""

    code, name = 56, "MEMORY_EXHAUSTED"


class SpawnFailed(PoolError, RuntimeError):
    """A worker could not be started; the message names the stage and the cause."""

    code, name = 57, "SPAWN_FAILED"


class SpawnTimeout(PoolError, TimeoutError):
    """A worker made no progress while loading; the message names the stage."""

    code, name = 58, "SPAWN_TIMEOUT"


class CircuitOpen(PoolError, RuntimeError):
    """The model's circuit breaker is open after repeated faults; the message states the remaining backoff."""

    code, name = 59, "CIRCUIT_OPEN"


class Overloaded(PoolError, RuntimeError):
    """The queue is full and the request has ``fail_fast``."""

    code, name = 60, "OVERLOADED"


class Cancelled(PoolError, RuntimeError):
    """The request was cancelled."""

    code, name = 61, "CANCELLED"


class NumericError(PoolError, ArithmeticError):
    """The model produced NaN or infinity; no output was taken from it."""

    code, name = 80, "NUMERIC"


class InternalError(MpoolError, RuntimeError):
    """A fault in mpool itself; please report it with the message."""

    code, name = 81, "INTERNAL"


__all__ = [name for name, value in list(globals().items())
           if isinstance(value, type) and issubclass(value, MpoolError)]
