"""Handwritten digits: the images of scikit-learn's ``load_digits``, their one division, captions, and augmentation.

All that is trained or measured here uses the same division: 1,297 images to train on and 500 held out, each digit with
its share. The 8x8 images become 32x32 ones, dark ink on white paper, by Pillow's bicubic filter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SIDE = 32
HELD_OUT = 500
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
#: What captions to train on say; ``{}`` is the digit, as a word or a figure.
CAPTIONS = ("a handwritten {}", "the digit {}", "a handwritten digit {}", "the number {}", "a picture of the number {}",
            "a photo of a handwritten {}", "a drawing of the digit {}", "the number {}, written by hand", "{}")
#: One prompt a digit: what pictures are made from, and what images are compared with.
PROMPTS = tuple(f"a handwritten {name}" for name in NAMES)


@dataclass(frozen=True)
class Digits:
    """``images``: uint8 (n, 32, 32), 255 is paper; ``labels``: (n,), 0 to 9; ``cells``: float32 (n, 64), the 8x8 counts
    of ink, 0 to 16, that the images were made from."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]
    cells: NDArray[np.float32]


def load() -> tuple[Digits, Digits]:
    """(to train on, held out)."""
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
    """All captions of a digit."""
    return [caption.format(word) for caption in CAPTIONS for word in (NAMES[digit], str(digit))]


def called(digit: int) -> str:
    """A digit in a sentence."""
    return ("an " if digit == 8 else "a ") + NAMES[digit]


def cells_of(images: NDArray[Any]) -> NDArray[np.float32]:
    """Images (n, 32, 32) or (n, 32, 32, 3), from 0 to 255, as what the classifier takes: ink in 8x8 cells, 0 to 16."""
    grey = np.asarray(images, dtype=np.float32)
    if grey.ndim == 4:
        grey = grey.mean(axis=3)
    return ((255 - grey).reshape(-1, 8, 4, 8, 4).mean(axis=(2, 4)) * (16 / 255)).reshape(-1, 64)


def classifier(train: Digits) -> Any:
    """An independent judge: a support vector machine on 8x8 cells, that knows nothing of the models."""
    from sklearn.svm import SVC

    return SVC(kernel="rbf", gamma=0.001, C=10.0).fit(cells_of(train.images), train.labels)


def augment(images: Any, generator: Any, strength: float = 1.0) -> Any:
    """A turn of up to 10 degrees, a slant, another size, another place, fainter ink: of a batch (n, 1, 32, 32) of
    floats from 0 (ink) to 1 (paper). ``strength``: how much of each."""
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
