"""What the trained models can do on images that they were not trained on, computed by mpool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import mpool

from . import digits
from .digits import called


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


def answered(model: str, question: str, answer: Callable[..., str], images: int = 1, **options: Any) -> float:
    """Share of questions about the images held out, one by one or several at a time, whose answer is the right one."""
    _, held = digits.load()
    parts = range(0, digits.HELD_OUT, images)

    def right(at: int) -> bool:
        said = mpool.vision(list(held.images[at:at + images]), question, model, temperature=0, max_tokens=40, **options)
        return said.text == answer(*held.labels[at:at + images])

    with ThreadPoolExecutor(8) as threads:
        return sum(threads.map(right, parts)) / len(parts)


#: Question -> the right answer, by the digits in the images, and how many images it is about.
QUESTIONS: dict[str, tuple[Callable[..., str], int]] = {
    "What digit is this?": (lambda digit: f"This is {called(digit)}.", 1),
    "Describe the image.": (lambda digit: f"A handwritten {digits.NAMES[digit]}, dark ink on white paper.", 1),
    "Is it even or odd?": (lambda digit: f"It is {'odd' if digit % 2 else 'even'}.", 1),
    "Which digits are these?": (lambda one, two: f"The first is {called(one)}, the second is {called(two)}.", 2),
}


def llava(model: str) -> dict[str, float]:
    """Share of right answers, question by question."""
    return {question: answered(model, question, *expected) for question, expected in QUESTIONS.items()}
