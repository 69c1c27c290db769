"""Measures of the trained models on held-out images, computed by mpool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import mpool

from . import digits
from .digits import called


def zero_shot(model: str, prompts: Sequence[str] = digits.PROMPTS, **options: Any) -> float:
    """Return the share of the 500 held-out images whose nearest prompt is the correct one."""
    _, held = digits.load()
    images = mpool.embed_image(list(held.images), model, **options)
    texts = mpool.embed(list(prompts), model, **options)
    return float((mpool.similarity(images, texts).argmax(axis=1) == held.labels).mean())


def clip(model: str) -> dict[str, float]:
    """Return zero-shot accuracy with three prompts: a training caption, one with the figure, and one with words outside
    all captions.
    """
    return {"a handwritten seven": zero_shot(model),
            "the digit 7": zero_shot(model, [f"the digit {n}" for n in range(10)]),
            "an image of the number seven": zero_shot(model, [f"an image of the number {n}" for n in digits.NAMES])}


def recognised(model: str, each: int, **options: Any) -> list[int]:
    """Generate ``each`` images per digit; return how many of each digit the judge recognises. The judge was trained on
    real digits only.
    """
    judge = digits.classifier(digits.load()[0])
    found = []
    for digit, prompt in enumerate(digits.PROMPTS):
        made = mpool.generate_image(prompt, model, n=each, seed=digit, **options)
        images = np.stack([np.asarray(image) for image in made.images])
        found.append(int((judge.predict(digits.cells_of(images)) == digit).sum()))
    return found


def sd3(model: str) -> dict[str, int]:
    """Return how many of 100 images the judge recognises: with the defaults, with low guidance, and in few steps."""
    return {"28 steps, guidance 7": sum(recognised(model, 10)),
            "28 steps, guidance 2": sum(recognised(model, 10, guidance_scale=2)),
            "8 steps, guidance 4": sum(recognised(model, 10, guidance_scale=4, num_inference_steps=8))}


def answered(model: str, question: str, answer: Callable[..., str], images: int = 1, **options: Any) -> float:
    """Return the share of questions about held-out images that the model answers correctly. A question covers
    ``images`` images.
    """
    _, held = digits.load()
    parts = range(0, digits.HELD_OUT, images)

    def right(at: int) -> bool:
        result = mpool.vision(list(held.images[at:at + images]), question, model, temperature=0, max_tokens=40,
                              **options)
        return result.text == answer(*held.labels[at:at + images])

    with ThreadPoolExecutor(8) as threads:
        return sum(threads.map(right, parts)) / len(parts)


#: Question -> the correct answer for the digits in the images, and the number of images.
QUESTIONS: dict[str, tuple[Callable[..., str], int]] = {
    "What digit is this?": (lambda digit: f"This is {called(digit)}.", 1),
    "Describe the image.": (lambda digit: f"A handwritten {digits.NAMES[digit]}, dark ink on white paper.", 1),
    "Is it even or odd?": (lambda digit: f"It is {'odd' if digit % 2 else 'even'}.", 1),
    "Which digits are these?": (lambda one, two: f"The first is {called(one)}, the second is {called(two)}.", 2),
}


def llava(model: str) -> dict[str, float]:
    """Return the share of correct answers for each question."""
    return {question: answered(model, question, *expected) for question, expected in QUESTIONS.items()}
