"""Vectors of texts and images: checks of options, submitting packs, rows of failed inputs, quantised output, progress.

text_embedding.py and image_embedding.py have the part that differs; steps.py cuts requests into slices.

A request with few inputs is one item of the pool. A larger one is cut into slices, each an item, of which DEPTH are in
flight: the next slice is packed while the last one is computed, memory stays bounded, and Ctrl-C waits for one slice at
most. The cut does not change the result: a vector does not depend on its batch mates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..checks import shown
from ..errors import InvalidArgument, MemoryExhausted, NumericError
from ..runtime.logs import log
from . import options as _options
from .options import ON_ERROR, PRECISIONS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..runtime.entry import Entry
    from .options import Call

#: Slices in flight while the next is prepared.
DEPTH = 3
#: A request of more inputs shows a bar if the logger is at INFO.
MANY = 1024
#: Service classes: requests that a caller waits for, and bulk work.
INTERACTIVE, BULK = 0, 1

#: Allowed values of the options that texts and images share.
CHOICES: dict[str, tuple[Any, ...]] = {"precision": PRECISIONS, "on_error": ON_ERROR,
                                       "normalize": (None, True, False)}
_MAX_PLANS = 64


# ---- options -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class VectorPlan:
    """Settings that follow from the options and the model, for all inputs. Made once for each combination in use.

    Attributes:
        dimensions: asked of the core, 0 for all.
        width: components of a vector, before the precision is applied.
        normalize: -1 as the model says, 0, 1.
        null: an input that cannot be embedded gives NaN instead of an error.
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
    """The plan for options, by ``make`` on first use. ``strict``: the values of those that are numbers or bools."""
    # 1 == True == 1.0: only the type tells them apart
    key = options, *map(type, strict)
    try:
        found = entry.plans.get(key)
    except TypeError:
        found = None  # an unhashable value, which the checks below name
    if found is None:
        found = make(entry, options)
        if len(entry.plans) >= _MAX_PLANS:
            entry.plans.clear()
        entry.plans[key] = found
    return found


def choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Refuses a value that is none of those allowed.

    Raises:
        InvalidArgument: it names them.
    """
    if not any(value is item or (isinstance(item, str) and isinstance(value, str) and value == item)
               for item in allowed):
        raise InvalidArgument(f"{name} is {shown(value)}, allowed: " + ", ".join(map(str, allowed)))


def check(entry: Entry, options: Any, choices: Mapping[str, tuple[Any, ...]]) -> None:
    """Checks options before the model is read.

    Raises:
        InvalidArgument: one is none of its ``choices``, or two do not go together.
    """
    try:
        for name, allowed in choices.items():
            choice(name, getattr(options, name), allowed)
        if options.on_error == "null" and options.precision != "float32":
            raise InvalidArgument(f"on_error is 'null' with precision {options.precision!r}, allowed: 'raise'",
                                  hint="Only float32 can hold NaN: quantise afterwards, without the NaN rows")
    except InvalidArgument as error:
        error.key = error.key or entry.key
        raise


def check_progress(progress: Any) -> Any:
    """The option, checked.

    Raises:
        InvalidArgument: neither True, False, None nor a function.
    """
    if progress is not None and not isinstance(progress, bool) and not callable(progress):
        raise InvalidArgument(f"progress is {shown(progress)}, allowed: True, False, None or a function (done, total)")
    return progress


# ---- one call ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Kind:
    """How inputs of one kind, texts or images, become vectors.

    Attributes:
        unit: noun for one input.
        pack: (plan, inputs, number of the first, whether it stands alone, call) -> what the core takes; off the main
            thread if it takes long, so that Ctrl-C is seen.
        good: how many inputs of a pack have no fault.
        embed: (plan, pack, keywords) -> vectors of those, in one call that lets go of the GIL once.
        start: (plan, pack, keywords) -> the ticket of such a call.
        halves: the good inputs of a pack as two packs; none if there is one.
        heavy: inputs whose packing would hold up an event loop.
        tokens: tokens of a pack.
    """

    unit: str
    pack: Callable[[Any, list[Any], int, bool, Call], Any]
    good: Callable[[Any], int]
    embed: Callable[..., NDArray[np.float32]]
    start: Callable[..., _core.Ticket]
    halves: Callable[[Any], tuple[Any, ...]]
    heavy: Callable[[list[Any]], bool]
    tokens: Callable[[Any], int]


def empty(plan: VectorPlan, count: int = 0) -> NDArray[np.float32]:
    """A matrix of ``count`` rows, not filled."""
    return np.empty((count, plan.width), dtype=np.float32)


def lane_of(inputs: int) -> int:
    """Service class of a request with this count of inputs."""
    return INTERACTIVE if inputs == 1 else BULK


def _keywords(plan: VectorPlan, lane: int) -> dict[str, Any]:
    return {"dimensions": plan.dimensions, "normalize": plan.normalize, "tolerant": plan.null, "service_class": lane}


def run(kind: Kind, plan: VectorPlan, pack: Any, call: Call, lane: int) -> NDArray[np.float32]:
    """Vectors of the good inputs, in one call."""
    if not kind.good(pack):
        return empty(plan)
    try:
        return kind.embed(plan, pack, **_keywords(plan, lane), **call.keywords(plan.entry.key))
    except NumericError:
        if not plan.null:
            raise
        return recover(kind, plan, pack, call)
    except MemoryExhausted as error:
        plan.entry.pool._name_idle(error, plan.core_key)
        raise


def submit(kind: Kind, plan: VectorPlan, pack: Any, call: Call, lane: int, fail_fast: bool | None = None,
           again: bool = False) -> _core.Ticket | None:
    """Starts a call for the good inputs; None if there are none. ``fail_fast``, ``again``: as of Call.keywords."""
    if not kind.good(pack):
        return None
    try:
        return kind.start(plan, pack, **_keywords(plan, lane), **call.keywords(plan.entry.key, fail_fast, again))
    except MemoryExhausted as error:
        plan.entry.pool._name_idle(error, plan.core_key)
        raise


def vectors_of(plan: VectorPlan, ticket: _core.Ticket) -> NDArray[np.float32]:
    """Vectors of a call that is done."""
    try:
        return ticket.vectors()
    except MemoryExhausted as error:
        plan.entry.pool._name_idle(error, plan.core_key)
        raise


def recover(kind: Kind, plan: VectorPlan, pack: Any, call: Call) -> NDArray[np.float32]:
    """Vectors of a pack in which an input gives NaN or infinity: halved until it stands alone."""
    parts = kind.halves(pack)
    if not parts:
        return np.full((1, plan.width), np.nan, dtype=np.float32)
    return np.concatenate([run(kind, plan, half, _options.patient(call), BULK)[:, :plan.width] for half in parts])


def finish(plan: VectorPlan, pack: Any, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """One row an input, float32 ``(count, width)``: cut to the model's size, NaN where there is no vector."""
    if vectors.shape[1] > plan.width:
        vectors = np.ascontiguousarray(vectors[:, :plan.width])
    if not pack.faults:
        return vectors
    rows = np.full((pack.count, plan.width), np.nan, dtype=np.float32)
    good = np.ones(pack.count, dtype=bool)
    good[[at for at, _ in pack.faults]] = False
    rows[good] = vectors
    return rows


def landed(kind: Kind, plan: VectorPlan, pack: Any, ticket: _core.Ticket | None, call: Call) -> NDArray[np.float32]:
    """Rows of a pack, NaN where there is no vector, once its ticket is done; None: all of it is faults."""
    if ticket is None:
        return finish(plan, pack, empty(plan))
    try:
        vectors = vectors_of(plan, ticket)
    except NumericError:
        if not plan.null:
            raise
        vectors = recover(kind, plan, pack, call)
    return finish(plan, pack, vectors)


def quantize(vectors: NDArray[np.float32], precision: str) -> NDArray[Any]:
    """Vectors in a smaller type, as ``quantize_embeddings`` of sentence-transformers defines it.

    int8 and uint8 spread every component over its range among these vectors; binary and ubinary keep the signs, eight
    to a byte (``binary`` is ``ubinary`` less 128).

    Raises:
        InvalidArgument: int8 or uint8 of a single vector, whose components have no range.
    """
    if precision == "float32":
        return vectors
    if precision in ("binary", "ubinary"):
        bits = np.packbits(vectors > 0, axis=-1)
        return bits if precision == "ubinary" else (bits.astype(np.int16) - 128).astype(np.int8)
    dtype = np.int8 if precision == "int8" else np.uint8
    if vectors.ndim == 2 and len(vectors) == 0:
        return np.zeros(vectors.shape, dtype=dtype)
    if vectors.ndim == 1 or len(vectors) == 1:
        raise InvalidArgument(f"precision is {precision!r} for a single text, allowed: float32, binary, ubinary",
                              hint="The range of each component comes from the vectors of the call: embed many texts "
                                   "at once")
    if len(vectors) < 100:
        log.warning("%s ranges come from only %d vectors; they are steadier from more", precision, len(vectors))
    low, high = vectors.min(axis=0), vectors.max(axis=0)
    step = (high - low) / 255
    step = np.where(step == 0, 1, step)
    levels = np.clip(np.floor((vectors - low) / step), 0, 255)
    return (levels - 128).astype(np.int8) if precision == "int8" else levels.astype(np.uint8)


# ---- many inputs ---------------------------------------------------------------------------------------------------

class Faults:
    """Texts (or what ``unit`` says) without a vector: counts them, remembers the first, says so in the log at the
    end."""

    def __init__(self, plan: VectorPlan, unit: str = "text") -> None:
        self.plan, self.unit, self.count, self.first = plan, unit, 0, ""

    def add(self, start: int, pack: Any, rows: NDArray[np.float32]) -> None:
        """Takes those of a slice."""
        if not self.plan.null:
            return
        lost = int(np.isnan(rows[:, 0]).sum()) if rows.size else 0
        if lost and not self.count:
            self.first = str(pack.faults[0][1]) if pack.faults else \
                f"a{'n' * (self.unit == 'image')} {self.unit} after number {start} gave NaN"
        self.count += lost

    def tell(self, total: int) -> None:
        """Logs a warning if there are any."""
        if self.count:
            log.warning("%s: %d of %d %ss have no vector (rows of NaN); the first: %s", self.plan.entry.key,
                        self.count, total, self.unit, self.first)


class Bar:
    """Progress of a call: a callable, a bar of tqdm, or nothing."""

    def __init__(self, progress: Any, total: int | None, key: str, unit: str = "text") -> None:
        self.total, self.done = total, 0
        self.call: Callable[[int, int | None], object] | None = progress if callable(progress) else None
        self.bar: Any = None
        check_progress(progress)
        # as in sentence-transformers: without an explicit option, only if the logger is at INFO
        if progress is True or (progress is None and log.isEnabledFor(logging.INFO) and (total or 0) > MANY):
            from tqdm.auto import tqdm

            self.bar = tqdm(desc=key, total=total, unit=unit)

    def add(self, count: int) -> None:
        """Moves on."""
        self.done += count
        if self.bar is not None:
            self.bar.update(count)
        if self.call is not None:
            self.call(self.done, self.total)

    def close(self) -> None:
        """Ends it."""
        if self.bar is not None:
            self.bar.close()


def tell(kind: Kind, plan: VectorPlan, pack: Any, rows: NDArray[Any]) -> None:
    """Logs a warning if inputs of a call that is one pack have no vector."""
    faults = Faults(plan, kind.unit)
    faults.add(0, pack, rows)
    faults.tell(pack.count)
