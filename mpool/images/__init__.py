"""Reads images and prepares them for a model. Pillow is imported on first use."""

from __future__ import annotations

from .loading import ImageInput, convert_image, images_of, read_image
from .preparing import prepare

__all__ = ["ImageInput", "convert_image", "images_of", "prepare", "read_image"]
