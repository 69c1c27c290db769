"""From an image to the tiles that a model with text looks at, and to what stands for it in the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .preparing import prepare

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from ..catalog import VisionSettings


@dataclass(frozen=True, slots=True)
class Run:
    """Placeholders in a row, for rows of the next ``tiles`` tiles of an image: one after the other, or as ``sources``
    says, where -1 is the learned newline."""

    tiles: int
    rows: int
    sources: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Cut:
    """An image, prepared.

    Attributes:
        tiles: uint8 ``[height, width, 3]`` each.
        pieces: what stands in the prompt: texts of tokens, and runs that take all tiles in their order.
    """

    tiles: list[NDArray[np.uint8]]
    pieces: list[str | Run]


def rows_of(settings: VisionSettings, height: int, width: int) -> int:
    """Rows that a tile of so many pixels becomes."""
    unit = settings.image.patch_size * settings.merge
    return height // unit * (width // unit) + settings.keep_class


def cut(image: Image, settings: VisionSettings, name: str) -> Cut:
    """What becomes of an image.

    Raises:
        InvalidArgument: an image that would become too large or too small.
    """
    tile = prepare(image, settings.image, name)
    return Cut([tile], [Run(1, rows_of(settings, *tile.shape[:2]))])
