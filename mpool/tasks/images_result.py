"""Results of image generation."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..checks import check_path, refuse, shown
from ..errors import InvalidArgument
from ..host.lazy import cached_property
from ..host.resources import typed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image


def _png(image: Image, parameters: Mapping[str, Any]) -> bytes:
    """Return an image as a PNG file with the parameters in an ``iTXt`` chunk."""
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_itxt("mpool", json.dumps(dict(parameters), ensure_ascii=False))
    out = io.BytesIO()
    image.save(out, format="PNG", pnginfo=info)
    return out.getvalue()


def to_image(array: NDArray[Any]) -> Image:
    """Return an array ``(height, width, 3)``, floats from 0 to 1 or uint8, as a PIL image."""
    import numpy as np
    from PIL import Image

    if array.dtype != np.uint8:
        array = (array * 255).round().astype(np.uint8)
    return Image.fromarray(array, "RGB")


@dataclass(frozen=True, eq=False)
class GeneratedImage:
    """A generated image, which notebooks display. Images with the same pixels, latents and parameters are equal.

    Attributes:
        array: pixels, float32 ``(height, width, 3)``, RGB from 0 to 1.
        latents: input of the decoder, float32 ``(channels, latent height, latent width)``.
        parameters: model, prompts, seed, size, number of steps, guidance scale, compute type, ``n``, index of this
            image, and origin of the initial latents. PNG files contain them as JSON under the key ``mpool``.
    """

    array: NDArray[np.float32] = field(repr=False)
    latents: NDArray[np.float32] = field(repr=False)
    parameters: Mapping[str, Any]

    @cached_property
    @typed
    def image(self) -> Image:
        """The image as a PIL image, RGB."""
        return to_image(self.array)

    @typed
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the image to a file.

        Args:
            path: path of the file. ``.png`` files contain ``parameters``; for all other extensions, Pillow chooses the
                format.

        Raises:
            FileError: the file cannot be written.
            InvalidArgument: ``path`` is not a path, or its extension names no format in which Pillow writes RGB images.
        """
        if not isinstance(path, (str, os.PathLike)):
            refuse("path", path, "a path")
        check_path("path", path)
        if os.fspath(path).lower().endswith(".png"):
            with open(path, "wb") as out:
                out.write(self._repr_png_())
            return
        try:
            self.image.save(path)
        except (ValueError, KeyError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:  # the file, not the format
                raise
            raise InvalidArgument(param="path", got=shown(os.fspath(path)), allowed="a path whose extension names a "
                                  "format in which Pillow writes RGB images, such as .png, .jpg or .webp") from error

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
    """Return True if two arrays have the same shape and elements."""
    return one.shape == other.shape and bool((one == other).all())


@dataclass(frozen=True)
class GeneratedImages:
    """Result of :func:`mpool.generate_image`: ``n`` images. Notebooks display the first one.

    ``image``, ``array``, ``latents``, ``parameters`` and ``save`` refer to the first image.

    Attributes:
        results: all generated images.
        seed: seed that was used; the same request with this seed gives the same images.
        model: key of the model.
    """

    results: tuple[GeneratedImage, ...]
    seed: int
    model: str

    @property
    def image(self) -> Image:
        """The first image as a PIL image, RGB."""
        return self.results[0].image

    @property
    def array(self) -> NDArray[np.float32]:
        """Pixels of the first image, float32 ``(height, width, 3)``, RGB from 0 to 1."""
        return self.results[0].array

    @property
    def latents(self) -> NDArray[np.float32]:
        """Latents of the first image (input of the decoder), float32 ``(channels, latent height, latent width)``."""
        return self.results[0].latents

    @property
    def images(self) -> list[Image]:
        """All images as PIL images, RGB."""
        return [one.image for one in self.results]

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters of the first image."""
        return self.results[0].parameters

    @typed
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the first image to a file. ``path`` and errors: as for
        :meth:`mpool.results.GeneratedImage.save`."""
        self.results[0].save(path)

    def _repr_png_(self) -> bytes:
        return self.results[0]._repr_png_()


@dataclass(frozen=True)
class ImageStep:
    """A denoising step in a stream.

    Attributes:
        step: number of steps done, over all images of the request, starting at 1.
        steps: total number of steps of the request.
        index: index of the image that the step belongs to, starting at 0.
        preview: current state of the image as a PIL image every ``preview_every`` steps; else None.
    """

    step: int
    steps: int
    index: int
    preview: Image | None = field(default=None, repr=False)

    @property
    def progress(self) -> float:
        """Fraction of the steps that are done, above 0 and at most 1."""
        return self.step / self.steps


__all__ = ["GeneratedImage", "ImageStep", "GeneratedImages", "to_image"]
