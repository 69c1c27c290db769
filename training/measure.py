"""What the trained models can do on images that they were not trained on, computed by mpool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import mpool

from . import digits


def zero_shot(model: str, prompts: Sequence[str] = digits.PROMPTS, **options: Any) -> float:
    """Share of the 500 images held out whose nearest prompt is the right one."""
    _, held = digits.load()
    images = mpool.embed_image(list(held.images), model, **options)
    texts = mpool.embed(list(prompts), model, **options)
    return float((mpool.similarity(images, texts).argmax(axis=1) == held.labels).mean())


def clip(model: str) -> dict[str, float]:
    """Zero-shot accuracy: with the prompts, as a figure, and in words that no caption had."""
    return {"a handwritten seven": zero_shot(model),
            "the digit 7": zero_shot(model, [f"the digit {n}" for n in range(10)]),
            "an image of the number seven": zero_shot(model, [f"an image of the number {n}" for n in digits.NAMES])}


def drawn(model: str, each: int, **options: Any) -> list[int]:
    """Of so many pictures of each digit, how many the judge recognises: it was trained on real digits only."""
    judge = digits.classifier(digits.load()[0])
    found = []
    for digit, prompt in enumerate(digits.PROMPTS):
        made = mpool.generate_image(prompt, model, n=each, seed=digit, **options)
        images = np.stack([np.asarray(image) for image in made.images])
        found.append(int((judge.predict(digits.cells_of(images)) == digit).sum()))
    return found


def sd3(model: str) -> dict[str, int]:
    """Of 100 pictures, how many are recognised: as by default, with little guidance, and in few steps."""
    return {"28 steps, guidance 7": sum(drawn(model, 10)),
            "28 steps, guidance 2": sum(drawn(model, 10, guidance_scale=2)),
            "8 steps, guidance 4": sum(drawn(model, 10, guidance_scale=4, num_inference_steps=8))}
