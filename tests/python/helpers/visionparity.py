"""Requests to vision language models, and a measure of differences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import visionmodels
from corelib import SAMPLING

import mpool
from mpool.tasks.requests import vision_request


def relative(got: np.ndarray, wanted: np.ndarray) -> float:
    """Return the largest difference relative to the scale of the activations."""
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max() / max(1.0, np.abs(wanted).max()))


def random_images(sizes: list[tuple[int, int]]) -> list[np.ndarray]:
    return [visionmodels.image(seed, *size) for seed, size in enumerate(sizes)]


def request(pool: mpool.Pool, folder: Path, images: list[np.ndarray], words: int = 20) -> Any:
    return vision_request(pool, images, visionmodels.text(3, words), str(folder), {"compute": "float32"})


def run(pool: mpool.Pool, made: Any, **options: Any) -> Any:
    ticket = pool.registry.submit_text(made.core_key, made.prompt, vision=True, images=made.images.arrays(),
                                       **{**SAMPLING, **options})
    ticket.wait()
    ticket.check()
    return ticket
