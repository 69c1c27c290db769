"""Image embedding before the core: plans, reading and preprocessing of images, slicing.

vectors.py contains the part that is shared with text embedding.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import integer, refuse
from ..conversation.messages import NamedImage
from ..errors import MemoryExhausted, MpoolError, Overloaded, Timeout
from ..host import native_calls
from ..images.loading import check_image, convert_image
from ..images.loading import images_of as images_of
from ..images.preparing import prepare
from ..runtime import deadlines as _deadlines
from .options import ImageOptions as Options
from .vectors import Kind, VectorPlan, plan_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..models import ImageSettings
    from ..runtime.entry import Entry
    from .options import Call

#: Number of images in a slice. Decoding a slice of photographs takes about 100 ms.
SLICE = 16


@dataclass(frozen=True, slots=True)
class ImagePlan(VectorPlan):
    """Settings of an image request, derived from the options and the model.

    Attributes:
        settings: preprocessing settings of the model.
        allow_urls: option ``allow_urls``.
    """

    settings: ImageSettings
    allow_urls: bool


def plan(entry: Entry, options: Options) -> ImagePlan:
    """Return the plan for the options of a request.

    On the first use of a model this reads its files and makes the core load its weights.

    Raises:
        InvalidArgument: an option is invalid for this model.
    """
    return plan_of(entry, options, (options.dimensions, options.normalize, options.allow_urls), _make_plan)


def _make_plan(entry: Entry, options: Options) -> ImagePlan:
    """Validate the options and build a plan; :func:`plan_of` caches it."""
    settings = entry.describe().image
    assert settings is not None, "the caller has checked the capability"
    width = settings.output_size
    dimensions = integer(width if options.dimensions is None else options.dimensions)
    if dimensions is None or not 1 <= dimensions <= width:
        refuse("dimensions", options.dimensions, f"an integer from 1 to {width}", key=entry.key)
    return ImagePlan(entry=entry, registry=entry.pool.registry, core_key=entry.core_key(options.compute),
                     settings=settings, dimensions=0 if dimensions == width else dimensions, width=dimensions,
                     normalize=-1 if options.normalize is None else int(options.normalize),
                     null=options.on_error == "null", precision=options.precision, allow_urls=options.allow_urls)


def check_images(images: list[Any], single: bool, allow_urls: bool, call: Call) -> None:
    """Check the images of a request before its model is known: those that are read first as far as reading them, all
    others by their types and paths.

    Raises:
        InvalidArgument, FileError: an image cannot be read.
    """
    with native_calls.limited(call.deadline):
        for at, image in enumerate(images):
            check_image(image, "images" if single else f"images[{at}]", allow_urls, read=at < SLICE)


@dataclass(frozen=True, slots=True)
class ImagePack:
    """Images of a slice in the form that the core accepts.

    Attributes:
        pixels: pixels of all valid images, concatenated, uint8.
        sizes: height and width of each valid image, int32 ``(2 * valid images,)``.
        count: number of images, including invalid ones.
        faults: index in the slice and error of each invalid image.
    """

    pixels: NDArray[np.uint8]
    sizes: NDArray[np.int32]
    count: int
    faults: tuple[tuple[int, MpoolError], ...] = ()


def pack(plan: ImagePlan, images: list[Any], start: int = 0, single: bool = False,
         call: Call | None = None) -> ImagePack:
    """Read the images of a slice on this thread; decode and preprocess them on threads for native calls.

    Args:
        plan: plan of the request.
        images: images of the slice.
        start: index of the first image in the request.
        single: True if the image is the whole request and not in a list.
        call: options of the request; its deadline limits the download of URLs and the decoders.

    Raises:
        MpoolError: an image cannot be read, and ``plan.null`` is False.
    """
    parts: list[NDArray[np.uint8]] = []
    sizes: list[int] = []
    faults: list[tuple[int, MpoolError]] = []
    for at, image in enumerate(images):
        name = "images" if single else f"images[{start + at}]"
        if isinstance(image, NamedImage):
            image, name = image.image, image.name
        try:
            limit = None if call is None else _deadlines.remaining(call.deadline, plan.entry.key)
            pixels = convert_image(image, name, partial(prepare, settings=plan.settings, name=name),
                                   allow_urls=plan.allow_urls, timeout=limit)
        except MpoolError as error:
            error.key = error.key or plan.entry.key
            if not plan.null or of_request(error, call):
                raise
            faults.append((at, error))
            continue
        parts.append(pixels.reshape(-1))
        sizes += pixels.shape[:2]
    flat = np.concatenate(parts) if len(parts) > 1 else parts[0] if parts else np.empty(0, dtype=np.uint8)
    return ImagePack(np.ascontiguousarray(flat), np.array(sizes, dtype=np.int32), len(images), tuple(faults))


def of_request(error: MpoolError, call: Call | None) -> bool:
    """Return True if an error concerns the request and not one image: the deadline, or a lack of threads or memory."""
    if isinstance(error, Timeout):
        return call is not None and call.deadline is not None and time.monotonic() >= call.deadline
    return isinstance(error, (Overloaded, MemoryExhausted))


def packed(plan: ImagePlan, images: list[Any], start: int, single: bool, call: Call) -> ImagePack:
    """Pack images within the deadline of the request."""
    with native_calls.limited(call.deadline):
        return pack(plan, images, start, single, call)


def halves(pack: ImagePack) -> tuple[ImagePack, ...]:
    """Split the valid images of a pack into two packs; empty if there is only one image."""
    images = len(pack.sizes) // 2
    middle = images // 2
    if not middle:
        return ()
    sizes = pack.sizes.reshape(-1, 2).astype(np.int64)
    edge = int(sizes[:middle].prod(axis=1).sum()) * 3
    return (ImagePack(pack.pixels[:edge], pack.sizes[:2 * middle], middle),
            ImagePack(pack.pixels[edge:], pack.sizes[2 * middle:], images - middle))


def _valid(pack: ImagePack) -> int:
    return len(pack.sizes) // 2


def _embed(plan: ImagePlan, pack: ImagePack, **keywords: Any) -> NDArray[np.float32]:
    return plan.registry.embed_images(plan.core_key, pack.pixels, pack.sizes, **keywords)


def _start(plan: ImagePlan, pack: ImagePack, **keywords: Any) -> _core.Ticket:
    return plan.registry.submit_images(plan.core_key, pack.pixels, pack.sizes, **keywords)


def _heavy(plan: ImagePlan, images: list[Any]) -> bool:
    return True  # reading and decoding files always takes long


def _tokens(pack: ImagePack) -> int:
    return 0  # images have no tokens


IMAGES = Kind("image", packed, _valid, _embed, _start, halves, _heavy, _tokens, native_calls.IMAGE_REQUESTS)


def slices(images: list[Any]) -> list[tuple[int, list[Any]]]:
    """Cut a list of images into slices; returns the index of each slice's first image, and its images."""
    return [(start, images[start:start + SLICE]) for start in range(0, len(images), SLICE)]
