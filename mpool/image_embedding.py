"""Image embedding calls, up to the core and back: options, reading and preparing images, slices, faults.

As for texts, a call with few images is one item of the pool, and one with many is cut into slices, of which a few are
in flight: the next images are decoded while the last are computed. A vector does not depend on its batch mates.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _threads
from ._options import ImageEmbedding as Options
from .embedding import PRECISIONS, Kind, _choice, empty, recover
from .errors import InvalidArgument, MemoryExhausted, MpoolError, NumericError
from .images import prepare, read_image
from .sampling import _short, integer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from . import _core
    from ._entry import Entry
    from ._options import Call
    from .catalog import ImageSettings

#: Images in a slice: some 100 ms of decoding photographs.
SLICE = 16
_MAX_PLANS = 64
#: What is prepared in a millisecond or two.
_LITTLE = 1 << 20


@dataclass(frozen=True, slots=True)
class ImagePlan:
    """What follows from options and model. The attributes of :class:`mpool.embedding.Plan` that both have are the
    same."""

    entry: Entry
    registry: _core.Registry
    core_key: str
    settings: ImageSettings
    dimensions: int
    width: int
    normalize: int
    null: bool
    precision: str
    allow_urls: bool


def plan(entry: Entry, options: Options) -> ImagePlan:
    """Checks options against the model; reads its files, and has the core load it, on first use."""
    key = options, type(options.dimensions), type(options.normalize), type(options.allow_urls)
    try:
        found = entry.plans.get(key)
    except TypeError:
        found = None  # an unhashable value, which the checks below name
    if found is None:
        found = _make_plan(entry, options)
        if len(entry.plans) >= _MAX_PLANS:
            entry.plans.clear()
        entry.plans[key] = found
    return found


def _make_plan(entry: Entry, options: Options) -> ImagePlan:
    try:
        _choice("precision", options.precision, PRECISIONS)
        _choice("on_error", options.on_error, ("raise", "null"))
        _choice("normalize", options.normalize, (None, True, False))
        _choice("allow_urls", options.allow_urls, (True, False))
        if options.on_error == "null" and options.precision != "float32":
            raise InvalidArgument(f"on_error is 'null' with precision {options.precision!r}, allowed: 'raise'",
                                  hint="Only float32 can hold NaN: quantise afterwards, without the NaN rows")
    except InvalidArgument as error:
        error.key = error.key or entry.key
        raise
    settings = entry.describe().image
    assert settings is not None, "entries of another capability are refused before"
    width = settings.output_size
    dimensions = integer(width if options.dimensions is None else options.dimensions)
    if dimensions is None or not 1 <= dimensions <= width:
        raise InvalidArgument(f"dimensions is {_short(options.dimensions)}, allowed: 1 to {width}", key=entry.key)
    return ImagePlan(entry=entry, registry=entry.pool.registry, core_key=entry.core_key(options.compute),
                     settings=settings, dimensions=0 if dimensions == width else dimensions, width=dimensions,
                     normalize=-1 if options.normalize is None else int(options.normalize),
                     null=options.on_error == "null", precision=options.precision, allow_urls=options.allow_urls)


@dataclass(frozen=True, slots=True)
class ImagePack:
    """Images as the core takes them.

    Attributes:
        pixels: uint8, the good images behind each other.
        sizes: int32 ``[2 * good images]``, heights and widths in turn.
        count: images, those with a fault included.
        faults: (place in the slice, error) of images without a vector.
    """

    pixels: NDArray[np.uint8]
    sizes: NDArray[np.int32]
    count: int
    faults: tuple[tuple[int, MpoolError], ...] = ()


def pack(plan: ImagePlan, images: list[Any], start: int = 0, single: bool = False,
         call: Call | None = None) -> ImagePack:
    """Reads and prepares images, the first of which is number ``start`` of its call.

    Raises:
        MpoolError: of the first image that cannot be read, unless the plan says null.
    """
    parts: list[NDArray[np.uint8]] = []
    sizes: list[int] = []
    faults: list[tuple[int, MpoolError]] = []
    for at, image in enumerate(images):
        name = "the image" if single else f"image {start + at}"
        try:
            limit = None if call is None else _threads.remaining(call.deadline, plan.entry.key)
            read = read_image(image, name, allow_urls=plan.allow_urls, timeout=limit)
            pixels = prepare(read, plan.settings, name)
        except MpoolError as error:
            error.key = error.key or plan.entry.key
            if not plan.null:
                raise
            faults.append((at, error))
            continue
        parts.append(pixels.reshape(-1))
        sizes += pixels.shape[:2]
    flat = np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.empty(0, dtype=np.uint8)
    return ImagePack(np.ascontiguousarray(flat), np.array(sizes, dtype=np.int32), len(images), tuple(faults))


def _work(image: Any) -> int:
    """Numbers that are looked at to prepare an image, about."""
    return int(image.size) if isinstance(image, np.ndarray) else 8 * len(image) if isinstance(image, bytes) else _LITTLE


def packed(plan: ImagePlan, images: list[Any], start: int, single: bool, call: Call) -> ImagePack:
    """As :func:`pack`; off the main thread, so that Ctrl-C is seen while images are decoded, unless that is quick."""
    if threading.current_thread() is not threading.main_thread() or sum(map(_work, images)) < _LITTLE:
        return pack(plan, images, start, single, call)
    return _threads.interruptible(pack, plan, images, start, single, call, chars=_threads.LONG)


def _keywords(plan: ImagePlan) -> dict[str, Any]:
    return {"dimensions": plan.dimensions, "normalize": plan.normalize, "tolerant": plan.null}


def run(plan: ImagePlan, pack: ImagePack, call: Call, lane: int) -> NDArray[np.float32]:
    """Vectors of the good images, in one call that lets go of the GIL once."""
    if not len(pack.sizes):
        return empty(plan)
    try:
        return plan.registry.embed_images(plan.core_key, pack.pixels, pack.sizes, lane=lane, **_keywords(plan),
                                          **call.keywords(plan.entry.key))
    except NumericError:
        if not plan.null:
            raise
        return recover(IMAGES, plan, pack, call)
    except MemoryExhausted as error:
        plan.entry.pool._name_idle(error, plan.core_key)
        raise


def submit(plan: ImagePlan, pack: ImagePack, call: Call, lane: int, fail_fast: bool | None = None,
           again: bool = False) -> _core.Ticket | None:
    """Starts a call for the good images; None if there are none. ``fail_fast``, ``again``: as of Call.keywords."""
    if not len(pack.sizes):
        return None
    try:
        return plan.registry.submit_images(plan.core_key, pack.pixels, pack.sizes, lane=lane, **_keywords(plan),
                                           **call.keywords(plan.entry.key, fail_fast, again))
    except MemoryExhausted as error:
        plan.entry.pool._name_idle(error, plan.core_key)
        raise


def halves(pack: ImagePack) -> tuple[ImagePack, ...]:
    """The good images of a pack as two packs; none if there is one."""
    images = len(pack.sizes) // 2
    middle = images // 2
    if not middle:
        return ()
    sizes = pack.sizes.reshape(-1, 2).astype(np.int64)
    edge = int(sizes[:middle].prod(axis=1).sum()) * 3
    return (ImagePack(pack.pixels[:edge], pack.sizes[:2 * middle], middle),
            ImagePack(pack.pixels[edge:], pack.sizes[2 * middle:], images - middle))


IMAGES = Kind("image", packed, run, submit, halves)


def slices(images: list[Any]) -> list[tuple[int, list[Any]]]:
    """(Number of the first image, images)."""
    return [(start, images[start:start + SLICE]) for start in range(0, len(images), SLICE)]
