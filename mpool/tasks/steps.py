"""One generator for every request for vectors, and the sync and async drivers that run it.

A generator yields steps. The sync driver calls ``step.now()`` and blocks; the async driver awaits ``step.later()``,
which keeps the event loop free. The generator cannot tell which driver runs it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import (
    Cancelled,
    FileError,
    IntegrityError,
    MemoryExhausted,
    MpoolError,
    NumericError,
    Overloaded,
    SendError,
    SpawnFailed,
)
from ..host import native_calls
from ..host.resources import aitems_of_caller, items_of_caller
from ..runtime.swapping import begins_again
from . import options as _options
from . import vectors
from .jobs import Job
from .vectors import BULK, DEPTH, INTERACTIVE, Bar, Faults, Kind, VectorPlan

if TYPE_CHECKING:
    from .. import _core
    from ..runtime.history import TrackedRequest
    from .options import Call

#: Result of :class:`Take` after the last slice.
END: Any = object()
#: Inputs of the first slice of an iterator: the first result comes after a small part of the slices in flight.
FIRST_TEXTS = 64
Steps = Generator[Any, Any, Any]


# Steps and requests are not frozen: a frozen dataclass assigns each field through `object.__setattr__`, and a request
# for one text builds four of these objects.

# ---- steps -----------------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Take:
    """Fetch the next slice of inputs, or :data:`END`."""

    source: Iterator[Any] | AsyncIterator[Any]

    def now(self) -> Any:
        return next(self.source, END)  # type: ignore[arg-type]

    async def later(self) -> Any:
        if isinstance(self.source, AsyncIterator):
            return await anext(self.source, END)
        import asyncio

        await asyncio.sleep(0)  # other tasks run between slices
        return next(self.source, END)


@dataclass(slots=True)
class Pack:
    """Tokenize or decode the inputs: the arrays that the core computes on.

    Attributes:
        following: pack of the next slice, which the sync driver starts before it waits for this one: the tokenizer's
            threads then have work while this thread converts results under the GIL. None: the next slice is unknown.
    """

    kind: Kind
    plan: VectorPlan
    inputs: list[Any]
    start: int
    single: bool
    call: Call
    following: Pack | None = None
    pending: native_calls.Pending[Any] | None = None

    def now(self) -> Any:
        if self.following is not None:
            self.begin()
            self.following.begin()
        if self.pending is None:
            return self.kind.pack(self.plan, self.inputs, self.start, self.single, self.call)
        pending, self.pending = self.pending, None
        return pending.result()

    def begin(self) -> None:
        """Start to tokenize the inputs, if that takes long. Not for images: two slices of them need too much memory."""
        if self.pending is None and self.kind.threads is native_calls.TEXTS and self.kind.heavy(self.plan, self.inputs):
            with suppress(Overloaded, SpawnFailed, MemoryExhausted):  # `now` tries again, and raises in its turn
                self.pending = self.kind.threads.begin(self.kind.pack, self.plan, self.inputs, self.start, self.single,
                                                       self.call, deadline=self.call.deadline)

    def leave(self) -> None:
        """Stop waiting for inputs that :meth:`begin` has started to tokenize."""
        if self.pending is not None:
            self.pending.leave()

    async def later(self) -> Any:
        # not `now`: on a thread of the group it would wait for other threads of the group, until all of them wait
        if self.kind.heavy(self.plan, self.inputs):
            return await self.kind.threads.arun(self.kind.pack, self.plan, self.inputs, self.start, self.single,
                                                self.call, deadline=self.call.deadline)
        return self.kind.pack(self.plan, self.inputs, self.start, self.single, self.call)


@dataclass(slots=True)
class Start:
    """Submit a pack. Returns its ticket, or None if no input of the pack is valid."""

    kind: Kind
    plan: VectorPlan
    pack: Any
    call: Call
    service_class: int

    def now(self) -> _core.Ticket | None:
        return vectors.submit(self.kind, self.plan, self.pack, self.call, self.service_class)

    async def later(self) -> _core.Ticket | None:
        from ..runtime.watching import watcher

        wait = not self.call.fail_fast
        return await watcher().enter(
            f"{self.plan.core_key}\n{self.service_class}",
            lambda: vectors.submit(self.kind, self.plan, self.pack, self.call, self.service_class, True, wait), wait,
            self.call.deadline, self.plan.entry.pool.config.request_timeout)


@dataclass(slots=True)
class Land:
    """Wait for the ticket of a pack. Returns one row per input."""

    kind: Kind
    plan: VectorPlan
    pack: Any
    ticket: _core.Ticket | None
    call: Call

    def now(self) -> Any:
        if self.ticket is not None:
            self.ticket.wait()
            vectors.note_wait(self.plan, self.ticket)
        return vectors.rows_of(self.kind, self.plan, self.pack, self.ticket, self.call)

    async def later(self) -> Any:
        if self.ticket is None:
            return vectors.rows_of(self.kind, self.plan, self.pack, None, self.call)
        from ..runtime.watching import watcher

        await watcher().done(self.ticket)
        vectors.note_wait(self.plan, self.ticket)
        if self.plan.null:  # after a numeric error, `rows_of` computes halves of the pack: seconds, off the event loop
            return await native_calls.REQUESTS.arun(vectors.rows_of, self.kind, self.plan, self.pack, self.ticket,
                                                    self.call)
        return vectors.rows_of(self.kind, self.plan, self.pack, self.ticket, self.call)


@dataclass(slots=True)
class Compute:
    """Compute a pack that is the whole request. The sync driver needs a single blocking call into the core."""

    kind: Kind
    plan: VectorPlan
    pack: Any
    call: Call
    service_class: int

    def now(self) -> Any:
        rows = vectors.run(self.kind, self.plan, self.pack, self.call, self.service_class)
        return vectors.finish(self.plan, self.pack, rows)

    async def later(self) -> Any:
        ticket = await Start(self.kind, self.plan, self.pack, self.call, self.service_class).later()
        try:
            return await Land(self.kind, self.plan, self.pack, ticket, self.call).later()
        finally:
            if ticket is not None and not ticket.done():
                ticket.cancel()


@dataclass(slots=True)
class Out:
    """A value that the driver passes on to the caller of an iterator."""

    value: Any


# ---- drivers ---------------------------------------------------------------------------------------------------------

def drive(steps: Steps) -> Any:
    """Run a generator that yields no :class:`Out`. Returns its result."""
    try:
        step = next(steps)
        while True:
            step = steps.send(step.now())
    except StopIteration as end:
        return end.value
    finally:
        steps.close()


def drive_each(request: IterRequest, running: TrackedRequest) -> Iterator[Any]:
    """Run the generator of a request until it ends or the request is closed. Yields the value of each :class:`Out`.

    Records the end of ``running``."""
    steps = request.steps()
    try:
        step = next(steps)
        while not request.closed:
            if type(step) is Out:
                yield step.value
                step = next(steps)
            else:
                step = steps.send(step.now())
        running.cancelled()
    except StopIteration:
        running.completed(request.tokens)
    except BaseException as error:
        running.failed(error)
        raise
    finally:
        steps.close()


async def adrive(steps: Steps) -> Any:
    """Run a generator on an event loop: the async form of :func:`drive`."""
    try:
        step = next(steps)
        while True:
            step = steps.send(await step.later())
    except StopIteration as end:
        return end.value
    finally:
        steps.close()


async def adrive_each(steps: Steps) -> AsyncIterator[Any]:
    """Run a generator on an event loop: the async form of :func:`drive_each`."""
    try:
        step = next(steps)
        while True:
            if type(step) is Out:
                yield step.value
                step = next(steps)
            else:
                step = steps.send(await step.later())
    except StopIteration:
        return
    finally:
        steps.close()


# ---- the generators --------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class VectorRequest:
    """A request for the vectors of a complete list of inputs.

    Attributes:
        slices: function that cuts the inputs into slices: (index of the first input, inputs of the slice).
        single: True if the caller passed one input and not a list.
        finish: function from rows, float32 ``(n, width)``, to the result that the caller gets.
    """

    kind: Kind
    plan: VectorPlan
    inputs: list[Any]
    slices: Callable[[Any], Iterable[tuple[int, list[Any]]]]
    single: bool
    progress: Any
    call: Call
    finish: Callable[[Any], Any]

    def steps(self) -> Steps:
        """Return the generator. Its result is a pair: the caller's result and the number of prompt tokens."""
        return self._one() if self.single else self._many()

    def job(self, capability: str, again: Callable[[], Any], running: TrackedRequest) -> Job:
        """Submit the request and return its handle.

        Args:
            capability: capability of the job.
            again: computes the result anew, with the model that has the name then.
            running: record of the request, for its end.
        """
        if self.kind.alone:
            return SeveralJob(capability, [self], running, lambda parts: self.finish(
                np.concatenate(parts) if parts else vectors.empty(self.plan)))
        return VectorJob(capability, self, again, running)

    def _one(self) -> Steps:
        kind, plan, call = self.kind, self.plan, self.call
        pack = yield Pack(kind, plan, self.inputs, 0, True, call)
        if self.progress is not None and self.progress is not False:
            bar = Bar(self.progress, 1, plan.entry.key, kind.unit)
            try:
                rows = yield Compute(kind, plan, pack, call, INTERACTIVE)
                bar.add(1)
            finally:
                bar.close()
        else:
            rows = yield Compute(kind, plan, pack, call, INTERACTIVE)
        if plan.null:
            vectors.warn_of_faults(kind, plan, pack, rows)
        return self.finish(rows), kind.tokens(pack)

    def _many(self) -> Steps:
        kind, plan, call, total = self.kind, self.plan, self.call, len(self.inputs)
        if plan.precision in ("int8", "uint8") and total == 1:
            vectors.quantize(vectors.empty(plan, 1), plan.precision)  # raises before any input is computed
        parts = list(self.slices(self.inputs))
        faults, bar, tokens = Faults(plan, kind.unit), Bar(self.progress, total, plan.entry.key, kind.unit), 0
        out = vectors.empty(plan, total)
        try:
            if len(parts) == 1:
                pack = yield Pack(kind, plan, parts[0][1], 0, False, call)
                out = yield Compute(kind, plan, pack, call, vectors.service_class_of(total))
                tokens = kind.tokens(pack)
                faults.add(0, pack, out)
                bar.add(total)
            else:
                def took(start: int, pack: Any, rows: Any) -> tuple[()]:
                    nonlocal tokens
                    out[start:start + pack.count] = rows
                    tokens += kind.tokens(pack)
                    faults.add(start, pack, rows)
                    bar.add(pack.count)
                    return ()

                yield from run_slices(kind, plan, iter(parts), call, took, known=True)
        finally:
            bar.close()
        faults.warn(total)
        return self.finish(out), tokens


def run_slices(kind: Kind, plan: Any, source: Iterator[Any] | AsyncIterator[Any], call: Call,
               took: Callable[[int, Any, Any], Iterable[Any]], fetch: Callable[..., Any] = Land,
               known: bool = False) -> Steps:
    """Compute slices in order, at most ``DEPTH`` in flight. ``took`` receives the rows of each and returns outputs.

    ``fetch`` is the step that waits for a ticket and returns what ``took`` receives. ``known``: the source has all
    inputs, so a slice may be packed while the one before it is; the slices of an iterator may come late, one by one.

    With ``fail_fast``, a full queue rejects the first slice only. Later slices wait for a slot, because the pool has
    accepted the request. Closing the generator cancels the slices in flight.
    """
    flying: deque[tuple[int, Any, _core.Ticket | None]] = deque()

    def land() -> Steps:
        start, pack, ticket = flying[0]
        rows = yield fetch(kind, plan, pack, ticket, call)
        for value in took(start, pack, rows):
            yield Out(value)
        flying.popleft()

    def take() -> Steps:
        part = yield Take(source)
        return None if part is END else Pack(kind, plan, part[1], part[0], False, call)

    coming: Pack | None = None
    try:
        coming = yield from take()
        while (step := coming) is not None:
            if known:
                coming = step.following = yield from take()
            pack = yield step
            flying.append((step.start, pack, (yield Start(kind, plan, pack, call, BULK))))
            call = _options.without_fail_fast(call)
            while len(flying) >= DEPTH or (flying and (flying[0][2] is None or flying[0][2].done())):
                yield from land()
            if not known:
                coming = yield from take()
        while flying:
            yield from land()
    finally:
        if coming is not None:
            coming.leave()
        for _, _, ticket in flying:
            if ticket is not None:
                ticket.cancel()


class Cutter:
    """Cuts a sequence of texts into slices of bounded characters and count.

    Args:
        chars: maximum number of characters of a slice of several texts.
        texts: maximum number of texts of a slice.
    """

    def __init__(self, chars: int, texts: int) -> None:
        self.most_chars, self.most_texts, self.texts = chars, texts, texts
        self.start, self.chars, self.held = 0, 0, []  # type: int, int, list[Any]

    def begin_with(self, texts: int) -> None:
        """Limit the first slice to a number of texts, which doubles with each slice."""
        self.texts = min(texts, self.most_texts)

    def add(self, item: Any) -> tuple[int, list[Any]] | None:
        """Append a text. Returns the previous slice if this text does not fit into it."""
        size, full = self.size_of(item), None
        if self.held and (self.chars + size > self.most_chars or len(self.held) >= self.texts):
            full = self.rest()
        self.held.append(item)
        self.chars += size
        return full

    def size_of(self, item: Any) -> int:
        """Return the number of characters of an item."""
        return len(item) if isinstance(item, str) else 0

    def rest(self) -> tuple[int, list[Any]] | None:
        """Return the last, incomplete slice, or None."""
        if not self.held:
            return None
        found, self.texts = (self.start, self.held), min(2 * self.texts, self.most_texts)
        self.start, self.chars, self.held = self.start + len(self.held), 0, []
        return found


class Rebatch:
    """Regroups the results of slices into results of single texts or into batches of a fixed size.

    Attributes:
        size: number of texts of a batch; None: single texts.
        join: function that joins results of slices, in order, which have ``len()`` and can be sliced.
        single: function that yields the results of single texts of a slice, which must not refer to the slice's memory.
    """

    def __init__(self, size: int | None, join: Callable[[list[Any]], Any],
                 single: Callable[[Any], Iterable[Any]]) -> None:
        self.size, self.join, self.single = size, join, single
        self.held: deque[Any] = deque()
        self.rows = 0

    def add(self, rows: Any) -> Iterator[Any]:
        """Append results. Yields each complete batch, or each single result if ``size`` is None."""
        if self.size is None:
            yield from self.single(rows)
            return
        self.held.append(rows)
        self.rows += len(rows)
        while self.rows >= self.size:
            yield self._take(self.size)

    def rest(self) -> Iterator[Any]:
        """Yield the last, shorter batch, if any results remain."""
        if self.rows:
            yield self._take(self.rows)

    def _take(self, count: int) -> Any:
        parts: list[Any] = []
        self.rows -= count
        while count:
            rows = self.held.popleft()
            if len(rows) > count:
                self.held.appendleft(rows[count:])
                rows = rows[:count]
            parts.append(rows)
            count -= len(rows)
        return self.join(parts)


def copied_rows(rows: Any) -> Iterator[Any]:
    """Yield a copy of each row of an array: a view would keep the whole slice in memory."""
    return (row.copy() for row in rows)


@dataclass(slots=True)
class IterRequest:
    """A request for the results of an iterable of texts.

    The first slices are small: slices in flight share the passes of the model, so results of large ones come late.

    Attributes:
        done: number of texts processed so far.
        failed: number of processed texts that have no result.
        tokens: number of tokens of the processed texts.
        closed: True once the iterator was closed; another thread may set it.
    """

    kind: Kind
    plan: Any
    items: Iterable[Any] | AsyncIterable[Any]
    cutter: Cutter
    batch_size: int | None
    bar: Bar
    call: Call
    done: int = 0
    failed: int = 0
    tokens: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        self.cutter.begin_with(FIRST_TEXTS)
        self.kind = self.kind.called(inputs="texts")

    def steps(self) -> Steps:
        """Return the generator. Its outputs are the results of texts or batches."""
        out, faults = self._regrouped(), Faults(self.plan, self.kind.unit)

        def took(start: int, pack: Any, rows: Any) -> Iterable[Any]:
            faults.add(start, pack, rows)
            found = self._finished(rows)
            self.done, self.failed = self.done + len(found), faults.count
            self.tokens += 0 if pack is None else self.kind.tokens(pack)
            self.bar.add(len(found))
            return out.add(found)

        source = self._aslices(self.items) if isinstance(self.items, AsyncIterable) else self._slices(self.items)
        try:
            yield from self._computed(source, took)
            for value in out.rest():
                yield Out(value)
            faults.warn(self.done)
        finally:
            self.bar.close()

    def _regrouped(self) -> Rebatch:
        """Return what regroups the results of slices."""
        return Rebatch(self.batch_size, np.concatenate, copied_rows)

    def _finished(self, rows: Any) -> Any:
        """Return the results of the texts that are complete with this slice."""
        return vectors.quantize(rows, self.plan.precision)

    def _computed(self, source: Iterator[Any] | AsyncIterator[Any], took: Callable[[int, Any, Any], Iterable[Any]]
                  ) -> Steps:
        """Compute the slices. ``took`` is as in :func:`run_slices`."""
        return run_slices(self.kind, self.plan, source, self.call, took)

    def _slices(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items_of_caller(items):
            if self.closed:
                return
            if (full := self.cutter.add(item)) is not None:
                yield full
        if (full := self.cutter.rest()) is not None:
            yield full

    async def _aslices(self, items: AsyncIterable[Any]) -> AsyncIterator[Any]:
        async for item in aitems_of_caller(items):
            if (full := self.cutter.add(item)) is not None:
                yield full
        if (full := self.cutter.rest()) is not None:
            yield full


class VectorJob(Job):
    """A job whose result is vectors or scores."""

    def __init__(self, capability: str, request: VectorRequest, again: Callable[[], Any],
                 running: TrackedRequest) -> None:
        super().__init__(capability, request.plan.entry.key, running)
        self._request, self._again, self._warned = request, again, False
        kind, plan, call = request.kind, request.plan, request.call
        self._pack = kind.pack(plan, request.inputs, 0, request.single, call)
        service_class = vectors.service_class_of(len(request.inputs))
        self._started = vectors.submit(kind, plan, self._pack, call, service_class, True)  # None: no input is valid
        if self._started is not None:
            running.follow(self._started, self)

    def _tokens(self) -> int:
        return self._request.kind.tokens(self._pack)

    @property
    def _ticket(self) -> _core.Ticket | None:
        return self._started

    def _finish_blocks(self) -> bool:
        if self._started is None or not self._request.plan.null:
            return False
        try:
            self._started.check()
        except NumericError:
            return True
        except MpoolError:
            pass
        return False

    def _finish(self) -> Any:
        request = self._request
        try:
            rows = vectors.rows_of(request.kind, request.plan, self._pack, self._started, request.call)
        except (SendError, IntegrityError, FileError) as error:
            # An input gave NaN, so its pack is computed in parts, but the model was replaced; or its files changed
            # before it was loaded. All rows come from the new model.
            if not begins_again(request, error):
                raise
            return self._again()
        if not self._warned:
            self._warned = True
            vectors.warn_of_faults(request.kind, request.plan, self._pack, rows)
        return request.finish(rows)


class SeveralJob(Job):
    """A job of several tickets, because a kind of inputs has one ticket per input, or because several networks compute
    it. A full queue rejects the first input only: later inputs start as earlier ones end, while a thread or task waits
    for the job or asks for its state.

    Args:
        requests: the requests.
        finish: function from the results of all tickets to that of the job.
    """

    def __init__(self, capability: str, requests: list[VectorRequest], running: TrackedRequest,
                 finish: Callable[[list[Any]], Any]) -> None:
        super().__init__(capability, requests[0].plan.entry.key, running)
        self._join = finish
        self._parts = [(one, one.kind.pack(one.plan, inputs, start, one.single, one.call)) for one in requests
                       for start, inputs in (one.slices(one.inputs) if one.kind.alone else [(0, one.inputs)])]
        self._started: list[_core.Ticket | None] = []  # those of the first parts; None: the part has no valid input
        self._first = 0  # tickets before this index are done
        self._lock, self._waiting = threading.Lock(), set[object]()  # _lock: of the starts
        self._stopped, self._error = False, None  # type: bool, MpoolError | None
        self._start_more()

    def _start(self, fail_fast: bool) -> None:
        """Start the next part. Raises Overloaded if the queue is full and ``fail_fast`` is True."""
        one, pack = self._parts[len(self._started)]
        ticket = vectors.submit(one.kind, one.plan, pack, one.call, vectors.service_class_of(len(one.inputs)),
                                fail_fast, any(self._started))
        self._started.append(ticket)
        if ticket is not None:
            self._running.follow(ticket, self)
            if self._stopped:
                ticket.cancel()

    def _start_more(self) -> None:
        """Start parts until the queue is full, unless an earlier part failed or another thread starts them."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self._first < len(self._started):
                ticket = self._started[self._first]
                if ticket is not None and not ticket.done():
                    break
                self._stopped = self._stopped or ticket is not None and self._has_failed(ticket)
                self._first += 1
            while not self._stopped and len(self._started) < len(self._parts):
                try:
                    self._start(True)
                except MpoolError as error:
                    if not any(self._started):
                        raise
                    if not isinstance(error, Overloaded) or error.param:
                        self._stopped, self._error = True, error
                    return
        finally:
            self._lock.release()

    def _has_failed(self, ticket: _core.Ticket) -> bool:
        try:
            ticket.check()
        except NumericError:
            return False  # its row may become NaN
        except MpoolError:
            return True
        return False

    def _tokens(self) -> int:
        return sum(one.kind.tokens(pack) for one, pack in self._parts)

    @property
    def _ticket(self) -> _core.Ticket | None:
        self._start_more()
        for ticket in self._started[self._first:]:
            if ticket is not None and not ticket.done():
                return ticket
        return next((ticket for ticket in reversed(self._started) if ticket is not None), None)

    def done(self) -> bool:
        """See :meth:`Job.done`."""
        self._start_more()
        return (self._stopped or len(self._started) == len(self._parts)) and bool(super().done())

    def cancel(self) -> bool:
        """See :meth:`Job.cancel`."""
        rest, self._stopped = len(self._started) < len(self._parts) and not self._stopped, True
        cancelled = any([ticket.cancel() for ticket in self._started if ticket is not None])
        if cancelled or rest:
            self._running.cancelled()
        return cancelled or rest

    @contextmanager
    def _joined(self) -> Iterator[None]:
        one, gave_up = object(), True
        self._waiting.add(one)
        try:
            yield
            gave_up = False
        except Exception:
            gave_up = False
            raise
        finally:
            self._waiting.discard(one)
            if gave_up and not self._waiting:
                self.cancel()

    def _finish_blocks(self) -> bool:
        return True  # it may compute inputs again, after a numeric error

    def _finish(self) -> Any:
        rows = []
        for at, (one, pack) in enumerate(self._parts):
            with self._lock:
                while not self._stopped and len(self._started) <= at:  # requests of others fill the queue
                    self._start(False)
            if len(self._started) <= at:
                raise self._error or Cancelled("the job was cancelled", key=self.model)
            ticket = self._started[at]
            if ticket is not None:
                ticket.wait()
            rows.append(vectors.rows_of(one.kind, one.plan, pack, ticket, one.call))
        return self._join(rows)
