"""Handwritten digits: the images of scikit-learn's ``load_digits``, one fixed split, captions and augmentation.

All training and all measures use the same split: 1,297 training images and 500 held-out images, stratified by digit.
Pillow's bicubic filter enlarges the 8x8 images to 32x32, dark ink on white paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 32
HELD_OUT = 500
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
#: Captions for training; ``{}`` is the digit, as a word or a figure.
CAPTIONS = ("a handwritten {}", "the digit {}", "a handwritten digit {}", "the number {}", "a picture of the number {}",
            "a photo of a handwritten {}", "a drawing of the digit {}", "the number {}, written by hand", "{}")
#: One prompt per digit, for image generation and zero-shot classification.
PROMPTS = tuple(f"a handwritten {name}" for name in NAMES)


@dataclass(frozen=True)
class Digits:
    """``images``: uint8 (n, 32, 32), 255 is paper; ``labels``: (n,), 0 to 9; ``cells``: float32 (n, 64), the 8x8 ink
    counts, 0 to 16, from which the images were made.
    """

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    cells: NDArray[np.float32]


def load() -> tuple[Digits, Digits]:
    """Return (training data, held-out data)."""
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    large = np.stack([np.asarray(Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
                      for small in np.round(255 - found.images * 255 / 16).astype(np.uint8)])
    train, held = train_test_split(np.arange(len(large)), test_size=HELD_OUT, stratify=found.target, random_state=0)
    train, held = np.sort(train), np.sort(held)
    return tuple(Digits(large[part], found.target[part].astype(np.int64), found.data[part].astype(np.float32))
                 for part in (train, held))


def captions(digit: int) -> list[str]:
    """Return all captions of a digit."""
    return [caption.format(word) for caption in CAPTIONS for word in (NAMES[digit], str(digit))]


def called(digit: int) -> str:
    """Return the name of a digit with its article, for a sentence."""
    return ("an " if digit == 8 else "a ") + NAMES[digit]


def cells_of(images: NDArray[Any]) -> NDArray[np.float32]:
    """Convert images (n, 32, 32) or (n, 32, 32, 3), 0 to 255, to the classifier's input: ink in 8x8 cells, 0 to 16."""
    grey = np.asarray(images, dtype=np.float32)
    if grey.ndim == 4:
        grey = grey.mean(axis=3)
    return ((255 - grey).reshape(-1, 8, 4, 8, 4).mean(axis=(2, 4)) * (16 / 255)).reshape(-1, 64)


def classifier(train: Digits) -> Any:
    """Train an independent judge, a support vector machine on 8x8 cells. It uses none of the models."""
    from sklearn.svm import SVC

    return SVC(kernel="rbf", gamma=0.001, C=10.0).fit(cells_of(train.images), train.labels)


def augment(images: Any, generator: Any, strength: float = 1.0) -> Any:
    """Augment a batch (n, 1, 32, 32) of floats from 0 (ink) to 1 (paper): rotate by up to 10 degrees, shear, scale,
    shift, and fade the ink. ``strength`` scales all of them.
    """
    import torch

    n = len(images)

    def between(low: float, high: float) -> Any:
        return low + (high - low) * torch.rand(n, generator=generator)

    s = strength
    turn, slant, size = between(-0.17 * s, 0.17 * s), between(-0.15 * s, 0.15 * s), between(1 - 0.1 * s, 1 + 0.12 * s)
    cos, sin = torch.cos(turn) * size, torch.sin(turn) * size
    x, y = between(-0.12 * s, 0.12 * s), between(-0.12 * s, 0.12 * s)
    matrix = torch.stack([cos, slant - sin, x, sin, cos, y], dim=1).reshape(n, 2, 3)
    grid = torch.nn.functional.affine_grid(matrix, [n, 1, SIDE, SIDE], align_corners=False)
    ink = torch.nn.functional.grid_sample(1 - images, grid, padding_mode="zeros", align_corners=False)
    return 1 - ink * between(1 - 0.2 * s, 1.0).reshape(n, 1, 1, 1)
