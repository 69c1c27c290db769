"""Results of image generation."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


def _png(image: Image, parameters: Mapping[str, Any]) -> bytes:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt("mpool", json.dumps(dict(parameters), ensure_ascii=False))
    out = io.BytesIO()
    image.save(out, format="PNG", pnginfo=info)
    return out.getvalue()


def to_image(array: NDArray[Any]) -> Image:
    """A PIL image of (height, width, 3): float from 0 to 1, or uint8."""
    import numpy as np
    from PIL import Image

    if array.dtype != np.uint8:
        array = (array * 255).round().astype(np.uint8)
    return Image.fromarray(array, "RGB")


@dataclass(frozen=True, eq=False)
class GeneratedImage:
    """One picture. In a notebook it shows itself. Those with the same pixels, latents and parameters are equal.

    Attributes:
        array: float32 (height, width, 3), RGB from 0 to 1.
        latents: float32 (channels, high, wide), what the decoder was given.
        parameters: model, prompt, seed, size, steps, guidance, compute, ``n`` and which of them
            it is, whether latents were given; they are written into PNG files, as JSON under the key ``mpool``.
    """

    array: NDArray[np.float32] = field(repr=False)
    latents: NDArray[np.float32] = field(repr=False)
    parameters: Mapping[str, Any]

    @cached_property
    def image(self) -> Image:
        """A PIL image, RGB."""
        return to_image(self.array)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a PNG file with the parameters in it; by another ending, what Pillow makes of that."""
        if os.fspath(path).lower().endswith(".png"):
            with open(path, "wb") as out:
                out.write(self._repr_png_())
        else:
            self.image.save(path)

    def _repr_png_(self) -> bytes:
        return _png(self.image, self.parameters)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GeneratedImage):
            return NotImplemented
        return self is other or (dict(self.parameters) == dict(other.parameters) and _same(self.array, other.array)
                                 and _same(self.latents, other.latents))

    def __hash__(self) -> int:
        return hash(json.dumps(dict(self.parameters), sort_keys=True))


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.shape == other.shape and bool((one == other).all())


@dataclass(frozen=True)
class GeneratedImages:
    """The result of a call: one picture, or ``n``. What a picture has, it has of the first.

    Attributes:
        pictures: all of them.
        seed: the one in use; the same with the same request gives the same pictures.
        model: key of the model.
    """

    pictures: tuple[GeneratedImage, ...]
    seed: int
    model: str

    @property
    def image(self) -> Image:
        """A PIL image of the first, RGB."""
        return self.pictures[0].image

    @property
    def array(self) -> NDArray[np.float32]:
        """Pixels of the first image: float32 (height, width, 3), RGB from 0 to 1."""
        return self.pictures[0].array

    @property
    def latents(self) -> NDArray[np.float32]:
        """Latents of the first image, the input of the decoder: float32 (channels, high, wide)."""
        return self.pictures[0].latents

    @property
    def images(self) -> list[Image]:
        """PIL images of all."""
        return [picture.image for picture in self.pictures]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters of the first image."""
        return self.pictures[0].parameters

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the first; see :meth:`GeneratedImage.save`."""
        self.pictures[0].save(path)

    def _repr_png_(self) -> bytes:
        return self.pictures[0]._repr_png_()


@dataclass(frozen=True)
class ImageStep:
    """A step of a stream.

    Attributes:
        step: steps done, of all pictures together, from 1 on.
        steps: how many there are.
        picture: which of the ``n`` pictures it belongs to, from 0.
        preview: the image so far, as a PIL image, in steps that ``preview_every`` asks for; else None.
    """

    step: int
    steps: int
    picture: int
    preview: Image | None = field(default=None, repr=False)

    @property
    def progress(self) -> float:
        """Share of the steps that are done, up to 1."""
        return self.step / self.steps


__all__ = ["GeneratedImage", "ImageStep", "GeneratedImages", "to_image"]


def __getattr__(name: str) -> Any:
    from .._renamed import of_module

    return of_module(__name__, name)
