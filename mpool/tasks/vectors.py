"""Shared part of text and image embedding: option checks, submission, failed inputs, quantisation, progress.

text_embedding.py and image_embedding.py contain the parts that differ, steps.py the generators that run a request.

A small request is submitted to the pool as one item. A larger one is cut into slices, and each slice is one item. DEPTH
slices are in flight at a time: the next slice is packed while earlier ones are computed, memory use is bounded, and
Ctrl-C waits for at most one slice. Slicing does not change the result, because a vector does not depend on the other
inputs of its batch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .. import tenants
from ..checks import integer, is_same, refuse, shown, surrogate_of
from ..errors import InvalidArgument, MemoryExhausted, MpoolError, NumericError
from ..host.resources import of_caller
from ..runtime.logs import log
from ..tokenizers.limits import MAX_CHARS as MAX_CHARS
from . import options as _options

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..host.native_calls import ThreadGroup
    from ..runtime.entry import Entry
    from .options import Call

#: Maximum number of slices in flight while the next one is packed.
DEPTH = 3
#: Requests with more inputs than this show a progress bar if the logger is at INFO.
MANY = 1024
#: Service classes of the core: interactive requests (one input), and bulk work.
INTERACTIVE, BULK = 0, 1


# ---- options -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class VectorPlan:
    """Settings derived from the options and the model. Cached per model for each combination of options.

    Attributes:
        entry: pool entry of the model.
        registry: registry of the core that runs the model.
        core_key: key of the model in the registry, which includes the compute type.
        dimensions: number of components that the core returns; 0: all.
        width: number of components of a result row, before quantisation.
        normalize: 1: normalise; 0: do not; -1: follow the model's files.
        null: True if an input that cannot be embedded gives a row of NaN instead of an error.
        precision: option ``precision``.
    """

    entry: Entry
    registry: _core.Registry
    core_key: str
    dimensions: int
    width: int
    normalize: int
    null: bool
    precision: str


P = TypeVar("P", bound=VectorPlan)


def plan_of(entry: Entry, options: Any, strict: tuple[Any, ...], make: Callable[[Entry, Any], P]) -> P:
    """Return the cached plan for ``options``, or build it.

    Args:
        entry: pool entry of the model.
        options: options dataclass.
        strict: values of the options that are numbers or bools; their types are part of the cache key.
        make: function that validates the options and builds the plan.
    """
    # 1 == True == 1.0, and their hashes are equal: without the types, an invalid value would find a cached plan.
    key = tenant_of(options), options, *map(type, strict)
    try:
        found = entry.plans.get(key)
    except TypeError:
        found = None  # a value is unhashable, hence invalid: make() raises the error that names it
    if found is None:
        found = make(entry, options)
        entry.keep_plan(key, found)
    return found


def tenant_of(options: Any) -> int | None:
    """Return the tenant that may use the plan of these options. None: any, because they have no text of the caller."""
    return None if getattr(options, "prompt", None) is None else tenants.current()


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Check that a value is one of the allowed strings or singletons (None, True, False).

    Raises:
        InvalidArgument: it is not; the error lists the allowed values.
    """
    if not any(is_same(value, item) for item in allowed):
        refuse(name, value, "one of " + ", ".join(map(str, allowed)))


def check_options(options: Any) -> None:
    """Check the options of a request for vectors, scores or labels before its model is known.

    Raises:
        InvalidArgument: an option has a value that no model allows.
    """
    for one in fields(options):
        value, choices = getattr(options, one.name), one.metadata.get("choices")
        if choices is not None:
            check_choice(one.name, value, choices)
        elif one.name in ("dimensions", "max_active") and value is not None:
            number = integer(value)
            if number is None or number < 1:
                refuse(one.name, value, "an integer of 1 or more, or None")
        elif one.name == "prompt_name" and not isinstance(value, str | None) or \
                one.name == "adapter" and value is not None and (not isinstance(value, str) or not value):
            refuse(one.name, value, "a name, or None")
        elif one.name == "prompt" and value is not None:
            check_prompt(value, options.prompt_name)
    if options.on_error == "null" and options.precision != "float32":
        refuse("on_error", options.on_error, f"'raise' with precision {options.precision!r}",
               hint="Only float32 can represent NaN: embed as float32, remove the NaN rows, then quantise")


def check_prompt(prompt: Any, name: Any) -> None:
    """Check the option ``prompt``, and that ``prompt_name`` is None beside it.

    Raises:
        InvalidArgument: the prompt is not a text, is too long, or is not valid Unicode.
    """
    if name is not None:
        refuse("prompt_name", name, "None if prompt is given")
    if not isinstance(prompt, str) or len(prompt) > MAX_CHARS:
        got = f"{len(prompt):,} characters" if isinstance(prompt, str) else shown(prompt)
        raise InvalidArgument(param="prompt", got=got, allowed=f"text of at most {MAX_CHARS:,} characters")
    fault = surrogate_of(prompt, "prompt")
    if fault is not None:
        raise fault


def check_progress(progress: Any) -> Any:
    """Return the option ``progress`` if it is valid.

    Raises:
        InvalidArgument: it is not True, False, None or callable.
    """
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        refuse("progress", progress, "True, False, None or a function of (done, total)")
    return progress


# ---- one item of the pool --------------------------------------------------------------------------------------------

def _vectors_of(plan: VectorPlan, ticket: _core.Ticket) -> NDArray[np.float32]:
    return ticket.vectors()


@dataclass(frozen=True, slots=True)
class Kind:
    """Functions that embed one kind of input, texts or images.

    A pack holds inputs in the form that the core accepts, and the errors of invalid inputs. An input without an error
    is valid.

    Attributes:
        unit: noun for one input, for messages.
        pack: packs inputs; arguments are the plan, the inputs, the index of the first input in the request, True if
            the input is the whole request and not in a list, and the :class:`Call`. Long work runs on another thread
            so that the main thread can handle Ctrl-C.
        valid: returns the number of valid inputs of a pack.
        embed: computes the vectors of the valid inputs, with arguments plan, pack and keywords of the core. Blocks,
            and releases the GIL once.
        start: same as ``embed``, but returns the ticket of the submitted item without waiting.
        halves: splits the valid inputs of a pack into two packs; empty if there is only one input.
        heavy: True if packing these inputs for a plan would block an event loop for too long.
        tokens: returns the number of tokens of a pack.
        threads: threads that pack heavy inputs for an event loop.
        result: returns the vectors of the finished ticket of a plan.
        alone: True if a pack has one input, so that a job needs several tickets.
    """

    unit: str
    pack: Callable[[Any, list[Any], int, bool, Call], Any]
    valid: Callable[[Any], int]
    embed: Callable[..., NDArray[np.float32]]
    start: Callable[..., _core.Ticket]
    halves: Callable[[Any], tuple[Any, ...]]
    heavy: Callable[[Any, list[Any]], bool]
    tokens: Callable[[Any], int]
    threads: ThreadGroup
    result: Callable[[Any, _core.Ticket], NDArray[np.float32]] = _vectors_of
    alone: bool = False

    def called(self, **names: str) -> Kind:
        """Return this kind for a function whose parameters have other names, so that errors have the names of that
        function."""
        return replace(self, pack=partial(_pack_under, names, self.pack))


def _pack_under(names: Mapping[str, str], pack: Callable[..., Any], *given: Any) -> Any:
    """Pack inputs; errors have the names of parameters that ``names`` states."""
    try:
        found = pack(*given)
    except MpoolError as error:
        error.rename(names)
        raise
    for _, fault in getattr(found, "faults", ()):
        fault.rename(names)
    return found


def empty(plan: VectorPlan, count: int = 0) -> NDArray[np.float32]:
    """Return an uninitialised array of ``count`` result rows."""
    return np.empty((count, plan.width), dtype=np.float32)


def service_class_of(inputs: int) -> int:
    """Return the service class of a request with this number of inputs."""
    return INTERACTIVE if inputs == 1 else BULK


def _keywords(plan: VectorPlan, service_class: int) -> dict[str, Any]:
    return {"dimensions": plan.dimensions, "normalize": plan.normalize, "tolerant": plan.null,
            "service_class": service_class}


def run(kind: Kind, plan: VectorPlan, pack: Any, call: Call, service_class: int) -> NDArray[np.float32]:
    """Compute the vectors of the valid inputs of a pack; blocks until they are computed."""
    if not kind.valid(pack):
        return empty(plan)
    try:
        return kind.embed(plan, pack, **_keywords(plan, service_class), **call.keywords(plan.entry))
    except NumericError:
        if not plan.null:
            raise
        return recover(kind, plan, pack, call)
    except MemoryExhausted as error:
        plan.entry.pool._name_idle(error, plan.core_key)
        raise


def submit(kind: Kind, plan: VectorPlan, pack: Any, call: Call, service_class: int, fail_fast: bool | None = None,
           uncounted: bool = False) -> _core.Ticket | None:
    """Submit the valid inputs of a pack and return the ticket; None if no input is valid.

    ``fail_fast`` and ``uncounted`` are those of :meth:`Call.keywords`.
    """
    if not kind.valid(pack):
        return None
    try:
        return kind.start(plan, pack, **_keywords(plan, service_class),
                          **call.keywords(plan.entry, fail_fast, uncounted))
    except MemoryExhausted as error:
        plan.entry.pool._name_idle(error, plan.core_key)
        raise


def note_wait(plan: VectorPlan, ticket: _core.Ticket) -> None:
    """Add the time that a finished ticket waited in the queue of its model to the metrics."""
    submitted, started, _ = ticket.times()
    if started:
        plan.entry.pool._history.metrics.waited(plan.core_key, max(0.0, started - submitted))


@contextlib.contextmanager
def naming_idle(plan: VectorPlan) -> Iterator[None]:
    """Add to the hint of a MemoryExhausted which models could be unloaded."""
    try:
        yield
    except MemoryExhausted as error:
        plan.entry.pool._name_idle(error, plan.core_key)
        raise


def recover(kind: Kind, plan: VectorPlan, pack: Any, call: Call) -> NDArray[np.float32]:
    """Compute the vectors of a pack in which at least one input gives NaN or infinity.

    The pack is halved recursively until each such input is alone; its row is NaN.
    """
    parts = kind.halves(pack)
    if not parts:
        return np.full((1, plan.width), np.nan, dtype=np.float32)
    call = _options.without_fail_fast(call)
    return np.concatenate([run(kind, plan, half, call, BULK)[:, :plan.width] for half in parts])


def finish(plan: VectorPlan, pack: Any, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return one row per input of a pack, float32 ``(count, width)``, with NaN for inputs without a vector.

    Args:
        plan: plan of the request.
        pack: the inputs.
        vectors: vectors of the valid inputs; additional components are truncated.
    """
    if vectors.shape[1] > plan.width:
        vectors = np.ascontiguousarray(vectors[:, :plan.width])
    if not pack.faults:
        return vectors
    rows = np.full((pack.count, plan.width), np.nan, dtype=np.float32)
    good = np.ones(pack.count, dtype=bool)
    good[[at for at, _ in pack.faults]] = False
    rows[good] = vectors
    return rows


def rows_of(kind: Kind, plan: VectorPlan, pack: Any, ticket: _core.Ticket | None, call: Call) -> NDArray[np.float32]:
    """Return one row per input of a pack whose ticket is done, with NaN for inputs without a vector.

    ``ticket`` is None if no input of the pack is valid.
    """
    if ticket is None:
        return finish(plan, pack, empty(plan))
    try:
        with naming_idle(plan):
            vectors = kind.result(plan, ticket)
    except NumericError:
        if not plan.null:
            raise
        vectors = recover(kind, plan, pack, call)
    return finish(plan, pack, vectors)


def check_precision(precision: str, count: int) -> None:
    """Raise InvalidArgument for int8 or uint8 if a request has one input, whose vector does not define a range."""
    if precision in ("int8", "uint8") and count == 1:
        refuse("precision", precision, "float32, binary or ubinary for a single input",
               hint="The range of each component is computed over all vectors of a request: pass many inputs to one "
                    "call")


def quantize(vectors: NDArray[np.float32], precision: str) -> NDArray[Any]:
    """Quantise vectors as ``quantize_embeddings`` of sentence-transformers does.

    int8 and uint8 map the range of each component over all vectors to 256 levels. binary and ubinary keep only the sign
    bits, eight per byte (``binary`` is ``ubinary`` minus 128).

    Args:
        vectors: float32 ``(n, d)`` or ``(d,)``.
        precision: option ``precision``.

    Raises:
        InvalidArgument: int8 or uint8 for a single vector, which does not define a range.
    """
    if precision == "float32":
        return vectors
    if precision in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    dtype = np.int8 if precision == "int8" else np.uint8
    if vectors.ndim == 2 and len(vectors) == 0:
        return np.zeros(vectors.shape, dtype=dtype)
    check_precision(precision, 1 if vectors.ndim == 1 else len(vectors))
    if len(vectors) < 100:
        log.warning("the %s ranges are computed from only %d vectors; at least 100 give more stable ranges", precision,
                    len(vectors))
    low, high = vectors.min(axis=0), vectors.max(axis=0)
    step = (high - low) / 255
    step = np.where(step == 0, 1, step)
    levels = np.clip(np.floor((vectors - low) / step), 0, 255)
    return (levels - 128).astype(np.int8) if precision == "int8" else levels.astype(np.uint8)


def activate(logits: NDArray[np.float32], function: str) -> NDArray[np.float32]:
    """Make scores of logits.

    Computes in float64 and rounds once, so that a row's scores depend neither on other rows nor on the number of rows.

    Args:
        logits: float32 ``(n, labels)``.
        function: ``"softmax"`` over each row, ``"sigmoid"`` of each number, or ``"none"``.
    """
    if function == "none":
        return logits
    x = logits.astype(np.float64)
    if function == "softmax":
        x = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))
        # a sum over columns adds in one order for any number of rows, unlike one over contiguous rows
        total = np.add.accumulate(x, axis=1)[:, -1:]
        return (x / total).astype(np.float32)
    small = np.exp(-np.abs(x))  # never overflows
    return (np.where(x >= 0, 1.0, small) / (1.0 + small)).astype(np.float32)


# ---- many inputs ---------------------------------------------------------------------------------------------------

class Faults:
    """Counter of the inputs without a vector, which logs a warning about them at the end.

    Attributes:
        count: number of inputs without a vector so far.
        first: description of the first one.
    """

    def __init__(self, plan: VectorPlan, unit: str = "text") -> None:
        self.plan, self.unit, self.count, self.first = plan, unit, 0, ""

    def add(self, start: int, pack: Any, rows: NDArray[np.float32]) -> None:
        """Count the inputs without a vector in a slice.

        Args:
            start: index of the first input of the slice in the request.
            pack: packed inputs of the slice.
            rows: rows of the slice, NaN for inputs without a vector.
        """
        if not self.plan.null:
            return
        lost = int(np.isnan(rows[:, 0]).sum()) if rows.size else 0
        if lost and not self.count:
            self.first = str(pack.faults[0][1]) if pack.faults else \
                f"the model computed NaN or infinity for {self.unit} {start} or a later one"
        self.count += lost

    def warn(self, total: int) -> None:
        """Log a warning if any of the ``total`` inputs has no vector."""
        if self.count:
            log.warning("%s: %d of %d %ss have no vector (rows of NaN); the first: %s", self.plan.entry.key,
                        self.count, total, self.unit, self.first)


class Bar:
    """Progress of a request: calls the caller's function, updates a tqdm progress bar, or does nothing."""

    def __init__(self, progress: Any, total: int | None, key: str, unit: str = "text") -> None:
        self.total, self.done = total, 0
        self.call: Callable[[int, int | None], object] | None = progress if callable(progress) else None
        self.bar: Any = None
        check_progress(progress)
        # As in sentence-transformers, the default is to show a bar only if the logger is at INFO.
        if progress is True or (progress is None and log.isEnabledFor(logging.INFO) and (total or 0) > MANY):
            from tqdm.auto import tqdm

            self.bar = tqdm(desc=key, total=total, unit=unit)

    def add(self, count: int) -> None:
        """Advance by ``count`` inputs."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        if self.call is not None:
            with of_caller():
                self.call(self.done, self.total)

    def close(self) -> None:
        """Close the progress bar."""
        if self.bar is not None:
            self.bar.close()


def warn_of_faults(kind: Kind, plan: VectorPlan, pack: Any, rows: NDArray[Any]) -> None:
    """Log a warning if inputs of a request that consists of one pack have no vector."""
    faults = Faults(plan, kind.unit)
    faults.add(0, pack, rows)
    faults.warn(pack.count)
