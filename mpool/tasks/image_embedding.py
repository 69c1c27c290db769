"""Image embedding up to the core: the plan, reading and preparing images, slices. vectors.py has the part that texts
share."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import integer, shown
from ..errors import InvalidArgument, MpoolError
from ..images import prepare, read_image
from ..runtime import threads as _threads
from .options import ImageOptions as Options
from .vectors import CHOICES, Kind, VectorPlan, check, plan_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..models import ImageSettings
    from ..runtime.entry import Entry
    from .options import Call

#: Images in a slice: some 100 ms of decoding photographs.
SLICE = 16
#: Bytes that are prepared in 1 to 2 ms.
_LITTLE = 1 << 20
_CHOICES = {**CHOICES, "allow_urls": (True, False)}


@dataclass(frozen=True, slots=True)
class ImagePlan(VectorPlan):
    """Settings that follow from the options and the model."""

    settings: ImageSettings
    allow_urls: bool


def plan(entry: Entry, options: Options) -> ImagePlan:
    """Checks options against the model; reads its files, and has the core load it, on first use."""
    return plan_of(entry, options, (options.dimensions, options.normalize, options.allow_urls), _make_plan)


def _make_plan(entry: Entry, options: Options) -> ImagePlan:
    check(entry, options, _CHOICES)
    settings = entry.describe().image
    assert settings is not None, "entries of another capability are refused before"
    width = settings.output_size
    dimensions = integer(width if options.dimensions is None else options.dimensions)
    if dimensions is None or not 1 <= dimensions <= width:
        raise InvalidArgument(f"dimensions is {shown(options.dimensions)}, allowed: 1 to {width}", key=entry.key)
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
        MpoolError: the first image that cannot be read, unless ``plan.null``.
    """
    parts: list[NDArray[np.uint8]] = []
    sizes: list[int] = []
    faults: list[tuple[int, MpoolError]] = []
    for at, image in enumerate(images):
        name = "image" if single else f"images[{start + at}]"
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
    """Estimated count of numbers that preparing an image reads."""
    return int(image.size) if isinstance(image, np.ndarray) else 8 * len(image) if isinstance(image, bytes) else _LITTLE


def packed(plan: ImagePlan, images: list[Any], start: int, single: bool, call: Call) -> ImagePack:
    """As :func:`pack`; off the main thread, so that Ctrl-C is seen while images are decoded, unless that is quick."""
    if threading.current_thread() is not threading.main_thread() or sum(map(_work, images)) < _LITTLE:
        return pack(plan, images, start, single, call)
    return _threads.interruptible(pack, plan, images, start, single, call, chars=_threads.LONG)


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


def _good(pack: ImagePack) -> int:
    return len(pack.sizes) // 2


def _embed(plan: ImagePlan, pack: ImagePack, **keywords: Any) -> NDArray[np.float32]:
    return plan.registry.embed_images(plan.core_key, pack.pixels, pack.sizes, **keywords)


def _start(plan: ImagePlan, pack: ImagePack, **keywords: Any) -> _core.Ticket:
    return plan.registry.submit_images(plan.core_key, pack.pixels, pack.sizes, **keywords)


def _heavy(images: list[Any]) -> bool:
    return True  # they are read and decoded


def _tokens(pack: ImagePack) -> int:
    return 0


IMAGES = Kind("image", packed, _good, _embed, _start, halves, _heavy, _tokens)


def slices(images: list[Any]) -> list[tuple[int, list[Any]]]:
    """(Number of the first image, images)."""
    return [(start, images[start:start + SLICE]) for start in range(0, len(images), SLICE)]
