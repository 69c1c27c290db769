"""Reads images and prepares them for a model. Pillow is imported on first use."""

from __future__ import annotations

from .loading import ImageInput, images_of, read_image
from .preparing import prepare

__all__ = ["ImageInput", "images_of", "prepare", "read_image"]
