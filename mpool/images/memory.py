"""Limit of the memory that all decoded images of the process take together."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..host import native_calls
from ..stores import STORES

#: Maximum bytes of the decoded images that exist at a time, unless a single image needs more.
MAX = STORES["images"].bytes or 0
#: Bytes per pixel while an image is decoded, measured with Pillow 13: Pillow stores RGB in four bytes, and conversions
#: and rotations need a source and a destination beside the decoded image; a progressive JPEG also has its coefficients.
BYTES_PER_PIXEL = 13
#: Additional bytes per pixel of an image with transparency: the white background, and the composition.
ALPHA_BYTES = 8
#: Additional bytes per pixel of a WebP: the two canvases of its decoder, which exist until the image is closed.
WEBP_BYTES = 8
#: Interval in seconds at which a waiting thread checks whether its caller has left.
_TICK = 0.1


class _Budget:
    """Bytes in use, and the threads that wait for some."""

    def __init__(self) -> None:
        self.changed, self.used = threading.Condition(), 0


_budget = _Budget()


@contextmanager
def reserved(pixels: int, bytes_per_pixel: int = BYTES_PER_PIXEL) -> Iterator[None]:
    """Reserve the memory for decoding an image of this many pixels; wait until enough is free.

    Raises:
        Timeout: the caller of the native call that this thread runs has left.
    """
    budget, size = _budget, pixels * bytes_per_pixel
    with budget.changed:
        while budget.used and budget.used + size > MAX:
            if budget.changed.wait(_TICK):
                native_calls.progress()  # another image was completed, so the queue moves
            else:
                native_calls.check_caller()
        budget.used += size
    try:
        yield
    finally:
        with budget.changed:
            budget.used -= size
            budget.changed.notify_all()


def _after_fork_in_child() -> None:
    global _budget
    _budget = _Budget()


os.register_at_fork(after_in_child=_after_fork_in_child)
