"""Jobs that are cancelled before they end, also by a thread that loses its CPU in between."""

from collections.abc import Callable
from random import Random
from string import ascii_lowercase

import mpool


def distinct_texts(count: int, seed: int = 0) -> list[str]:
    """Return texts of 62 letters and words such as "w17", which every tokenizer of these tests distinguishes: a model
    computes equal rows once, and words that it does not know are equal."""
    random, words = Random(seed), [f"w{number}" for number in range(100)]
    return [" ".join(random.choice(words if at % 2 else ascii_lowercase) for at in range(62)) for _ in range(count)]


def cancelled_job(submit: Callable[[list[str]], mpool.Job], count: int) -> mpool.Job:
    """Submit ``count`` texts and cancel the job. If it ended first, it keeps its result, and the next one is tried."""
    for seed in range(10):
        job = submit(distinct_texts(count, seed))
        if job.cancel():
            return job
        job.result(0)
    raise AssertionError("ten jobs ended before they were cancelled")
