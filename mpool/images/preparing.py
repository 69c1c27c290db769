"""Resizes and crops images. The result equals that of transformers' Pillow-based image processors, bit for bit."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from ..models import ImageSettings

#: Maximum side after a resize: enlarging the shorter side of a narrow image makes the longer side very long.
MAX_SIDE = 1 << 14


def prepare(image: Image, settings: ImageSettings, name: str = "image") -> NDArray[np.uint8]:
    """Prepare an image for the core.

    Args:
        image: an RGB image.
        settings: the model's image settings.
        name: name of the image, for error messages.

    Returns:
        Pixels, uint8 ``[height, width, 3]``.

    Raises:
        InvalidArgument: the image would become too large or too small.
    """
    resize = settings.resize
    if settings.pad_square is not None:
        image = square(image, settings.pad_square)
    if resize is not None:
        width, height = image.size
        if len(resize) == 3:
            height, width = resize[1], resize[2]
        elif width <= height:
            width, height = resize[1], int(resize[1] * height / width)
        else:
            width, height = int(resize[1] * width / height), resize[1]
        if max(width, height) > MAX_SIDE:
            raise InvalidArgument(param=name, got=f"an image that the model resizes to {width:,} x {height:,}",
                                  allowed=f"at most {MAX_SIDE:,} pixels per side after resizing",
                                  hint="Crop the image first")
        image = image.resize((width, height), resample=settings.resample)  # type: ignore[arg-type]
    pixels = np.asarray(image)
    if settings.crop is not None:
        pixels = crop(pixels, *settings.crop)
    if min(pixels.shape[:2]) < settings.patch_size:
        raise InvalidArgument(param=name, got=f"{pixels.shape[1]} x {pixels.shape[0]} pixels",
                              allowed=f"at least {settings.patch_size} pixels per side")
    return pixels if settings.any_size else whole_patches(pixels, settings.patch_size)


def whole_patches(pixels: NDArray[Any], patch: int) -> NDArray[Any]:
    """Crop an image ``[h, w, c]`` to whole patches. The model ignores incomplete patches at the right and bottom:
    SigLIP's 384 pixels per side are 27 patches of 14."""
    height, width = pixels.shape[:2]
    return pixels[:height // patch * patch, :width // patch * patch]


def square(image: Image, colour: tuple[int, int, int]) -> Image:
    """Pad an image to a square with one colour; the image stays centred."""
    from PIL import Image

    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    made = Image.new("RGB", (side, side), colour)
    made.paste(image, ((side - width) // 2, (side - height) // 2))
    return made


def crop(pixels: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Crop the centre of an image ``[h, w, c]``. Sides that are too short are padded with black."""
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    if top >= 0 and left >= 0:
        return pixels[top:top + height, left:left + width]
    # like the reference: pad short sides up to the crop size, then crop
    tall, wide = max(height, pixels.shape[0]), max(width, pixels.shape[1])
    above, before = ceil((tall - pixels.shape[0]) / 2), ceil((wide - pixels.shape[1]) / 2)
    padded = np.zeros((tall, wide, pixels.shape[2]), dtype=pixels.dtype)
    padded[above:above + pixels.shape[0], before:before + pixels.shape[1]] = pixels
    top, left = top + above, left + before
    return padded[max(0, top):top + height, max(0, left):left + width]
