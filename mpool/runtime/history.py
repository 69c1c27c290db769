"""The last requests of a pool or of a server, in bounded memory. Neither inputs nor results are kept."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..errors import (
    Cancelled,
    CircuitOpen,
    ContextOverflow,
    InvalidArgument,
    LimitError,
    MpoolError,
    Overloaded,
    ShuttingDown,
    TemplateError,
    UnknownModel,
    Unsupported,
    WrongCapability,
)
from .request_metrics import RequestMetrics

if TYPE_CHECKING:
    from .. import _core

T = TypeVar("T")

#: Number of requests that a history keeps, and maximum length of a model's or tenant's name in it.
KEPT, NAME = 1000, 256
#: Errors of requests that were not computed. After the core has accepted a request, they are failures.
_REFUSALS = (CircuitOpen, ContextOverflow, InvalidArgument, LimitError, Overloaded, ShuttingDown, TemplateError,
             UnknownModel, Unsupported, WrongCapability)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request that ended. See :meth:`mpool.Pool.history`.

    Attributes:
        time: seconds since 1970 at which it ended.
        model: key of the model. Before a model was found: the name that the request gave, None for the default model.
        verb: name of the function, such as ``"embed"`` or ``"chat"``.
        state: ``"completed"``; ``"cancelled"`` (by its caller, or because its stream or job was dropped);
            ``"refused"`` (before it was computed: an invalid argument, an unknown model, a full queue, an open circuit
            breaker, a closed pool); ``"failed"`` (any other error, also a timeout).
        duration: seconds from the call to the end.
        tokens: tokens that it read and generated until it ended; 0 for images that are generated.
        tenant: its ``tenant``, None if it had none.
        error: name of the error as in ``MpoolError.name``, such as ``"TIMEOUT"``, or name of the class of
            another exception. None: it was completed.
    """

    time: float
    model: str | None
    verb: str
    state: str
    duration: float
    tokens: int
    tenant: str | int | None
    error: str | None


#: Fields of a RequestRecord, in its order. A history keeps them as a tuple, which is made faster than a dataclass.
RecordFields = tuple[float, str | None, str, str, float, int, str | int | None, str | None]


class History(Generic[T]):
    """The last :data:`KEPT` records. Thread-safe without a lock: every method is one call of a deque, so a signal
    handler that interrupts a request may add a record, too."""

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: deque[T] = deque(maxlen=KEPT)

    def append(self, record: T) -> None:
        """Add a record. The oldest one makes room for it."""
        self._kept.append(record)

    def __iter__(self) -> Iterator[T]:
        """Iterate over the records, the oldest first."""
        return iter(self._kept.copy())

    def __reversed__(self) -> Iterator[T]:
        """Iterate over the records, the latest first."""
        return reversed(self._kept.copy())


class PoolHistory(History[RecordFields]):
    """The last requests of a pool, and the metrics of all its requests."""

    __slots__ = ("metrics",)

    def __init__(self) -> None:
        super().__init__()
        self.metrics = RequestMetrics()


class TrackedRequest:
    """A request until its end, which the first of the methods below records.

    Attributes:
        model, verb: as in :class:`RequestRecord`.
        core_key: key of the model in the core's registry; "" until the model is found.
    """

    __slots__ = ("_began", "_finalizer", "_open", "_tenant", "_ticket", "core_key", "model", "verb")

    def __init__(self, history: PoolHistory, verb: str, given: Mapping[str, Any]) -> None:
        """Begin the request ``verb`` with these arguments, which may be invalid."""
        self._began = time.monotonic()
        self._open = [history]  # the end takes it out: pop() gives it to one thread only
        self.verb, self._ticket = verb, None  # type: str, _core.Ticket | None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self.model, self.core_key = _name_of(given.get("model")), ""
        tenant = given.get("tenant")
        self._tenant: str | int | None = None
        if tenant is not None:
            if isinstance(tenant, str):
                self._tenant = tenant[:NAME]
            elif isinstance(tenant, int) and 0 < tenant < 2**64:
                self._tenant = tenant

    def follow(self, ticket: _core.Ticket, owner: object) -> None:
        """Let the end be that of a ticket, which the core has accepted. If nothing records the end before ``owner``,
        the stream or job that holds the ticket, is dropped, dropping it does."""
        self._detach()
        self._ticket = ticket
        self._finalizer = weakref.finalize(owner, self._dropped)
        self._finalizer.atexit = False

    def completed(self, tokens: int = 0) -> None:
        """Record that the request was completed."""
        self._end("completed", tokens, None)

    def failed(self, error: BaseException) -> None:
        """Record the error that ended the request. An exception that is no error, such as asyncio.CancelledError or
        KeyboardInterrupt, cancels it."""
        if isinstance(error, Cancelled) or not isinstance(error, Exception):
            self._end("cancelled", 0, Cancelled.name)
            return
        refused = self._ticket is None and isinstance(error, _REFUSALS)
        self._end("refused" if refused else "failed", 0,
                  error.name if isinstance(error, MpoolError) else type(error).__name__, getattr(error, "key", None))

    def cancelled(self) -> None:
        """Record that the caller cancelled the request."""
        self._end("cancelled", 0, Cancelled.name)

    def finished(self, tokens: int = 0) -> None:
        """Record the end of the ticket, which must be done. Does nothing if the end is recorded."""
        ticket = self._ticket
        if ticket is None:
            return
        try:
            ticket.check()
        except Exception as error:
            self.failed(error)
        else:
            self.completed(tokens)

    def _dropped(self) -> None:
        ticket = self._ticket
        if ticket is not None and ticket.done():
            self.finished()
        else:
            self.cancelled()

    def _detach(self) -> None:
        finalizer, self._finalizer = self._finalizer, None
        if finalizer is not None:
            finalizer.detach()

    def _end(self, state: str, tokens: int, error: str | None, key: str | None = None) -> None:
        try:
            history = self._open.pop()
        except IndexError:  # it ended before
            return
        now, ticket = time.monotonic(), self._ticket
        ended = now
        if ticket is not None:
            self._ticket = None
            self._detach()
            if self.verb in _GENERATES:
                tokens = sum(ticket.usage()[:2])
            ended = ticket.times()[2] or now
        seconds = max(0.0, ended - self._began)
        history.append((time.time() - (now - ended), self.model, self.verb, state, seconds, tokens, self._tenant,
                        error))
        if state == "completed":
            if self.core_key:
                history.metrics.completed(self.core_key, seconds, self._began, ticket, self.verb in _GENERATES)
        elif error is not None and state != "cancelled":
            history.metrics.failed(self.core_key, error, key)


#: Verbs whose tickets count tokens.
_GENERATES = frozenset(("generate", "chat", "vision", "describe_image", "describe_url"))


def _name_of(model: Any) -> str | None:
    """Return the key of a model, or the name that stands for it; None if it is neither."""
    if isinstance(model, str):
        return model[:NAME]
    try:
        key = os.fspath(model) if isinstance(model, os.PathLike) else getattr(model, "key", model)
    except Exception:  # the request itself will refuse such an object
        return None
    return key[:NAME] if isinstance(key, str) else None


__all__ = ["History", "KEPT", "NAME", "PoolHistory", "RecordFields", "RequestRecord", "TrackedRequest"]
