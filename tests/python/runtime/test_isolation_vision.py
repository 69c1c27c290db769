"""Vision in worker processes: the same tokens as in threads, caching of images, and workers that are killed while they
compute an image or generate."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool

import visionmodels
from isolated import children, pool_of, processes, signal_all
from poolstates import row_of
from visionmodels import image, text
from waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process isolation is for Linux")
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "compute": "float32", "ignore_eos": True}
PHOTO, OTHER = image(1, 50, 70), image(2, 40, 40)
SIDE = 512


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return visionmodels.save(visionmodels.randomised("llava"), "llava", tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for images of 16,384 patches with full attention in two layers, which takes half a second."""
    folder = tmp_path_factory.mktemp("qwen")
    visionmodels.save(visionmodels.randomised("qwen2_5_vl", encoder_layers=4), "qwen2_5_vl", folder)
    for name, change in (("config.json", lambda c: c["text_config"].update(max_position_embeddings=8192)),
                         ("config.json", lambda c: c["vision_config"].update(fullatt_block_indexes=[1, 2])),
                         ("preprocessor_config.json", lambda c: c["size"].update(longest_edge=SIDE * SIDE))):
        config = json.loads((folder / name).read_text())
        change(config)
        (folder / name).write_text(json.dumps(config))
    return folder


@pytest.fixture
def pool() -> Iterator[mpool.Pool]:
    with pool_of() as made:
        yield made
    assert children() == []


@pytest.mark.parametrize("family", ["llava", "llava_next", "smolvlm", "pixtral", "qwen2_5_vl", "gemma3", "lfm2_vl"])
def test_tokens_are_the_same(pool: mpool.Pool, tmp_path: Path, family: str) -> None:
    folder = visionmodels.save(visionmodels.randomised(family), family, tmp_path)
    requests: list[dict[str, Any]] = [dict(GREEDY), dict(GREEDY, temperature=1.2, seed=4, n=2, logprobs=3)]
    with mpool.Pool() as here:
        for images in ([PHOTO], [OTHER, PHOTO], [PHOTO, PHOTO]):
            for request in requests:
                expected, found = (one.vision(images, text(1, 9), folder, **request) for one in (here, pool))
                for a, b in zip(expected.choices, found.choices):
                    assert (a.text, a.token_ids, a.logprobs) == (b.text, b.token_ids, b.logprobs)
    assert pool.metrics()["worker_faults"] == 0


def test_images_are_cached_by_content(pool: mpool.Pool, model: Path, large: Path) -> None:
    """The prefix cache has the rows of images at the start of a prompt; encoder output is cached for any position."""
    images = [image(seed, 40, 40) for seed in range(6)]
    first = pool.vision(images[:4], text(1, 9), model, **GREEDY)
    again = pool.vision([one.copy() for one in images[:4]], text(2, 30), model, **GREEDY)
    assert first.usage.cached_tokens == 0 and again.usage.cached_tokens == 64
    other = pool.vision([images[5], *images[1:4]], text(1, 9), model, **GREEDY)
    assert other.usage.cached_tokens == 0 and other.token_ids != first.token_ids
    steps = []
    for prompt, seed in (("w29", 2), ("w30", 3), ("w31", 3)):  # the first request measures the speed
        before, photo = pool.metrics()["steps"], image(seed, SIDE // 2, SIDE // 2)
        messages = [{"role": "system", "content": prompt}, {"role": "user", "content": "w32", "images": [photo]}]
        assert pool.chat(messages, large, **{**GREEDY, "timeout": 60}).usage.cached_tokens == 0
        steps.append(pool.metrics()["steps"] - before)
    assert steps[2] < steps[1]


@pytest.mark.slow
def test_request_is_retried_if_its_worker_is_killed_in_an_image(pool: mpool.Pool, large: Path) -> None:
    photo = image(3, SIDE, SIDE)
    with mpool.Pool() as here:
        expected = here.vision(photo, text(1, 9), large, **GREEDY).token_ids
    pool.load(large)
    steps = pool.metrics()["steps"]
    job = pool.submit("vision", images=photo, prompt=text(1, 9), model=pool.get(large), **GREEDY)
    # The first step prefills the tokens before the image, the next one computes the image.
    until(lambda: pool.metrics()["steps"] > steps)
    before = signal_all(pool, signal.SIGKILL)
    assert job.result().token_ids == expected
    assert set(processes(pool)).isdisjoint(before) and pool.metrics()["retries"] == 1


@pytest.mark.slow
def test_images_of_a_retried_and_a_concurrent_request_do_not_mix(large: Path) -> None:
    """A retried request runs in steps of its own, so its image and that of another request are computed alternately."""
    images = [image(seed, SIDE, SIDE) for seed in (3, 4)]
    with mpool.Pool() as here:
        expected = [here.vision(one, text(1, 9), large, **GREEDY).token_ids for one in images]
    with pool_of(max_workers_per_model=1) as pool:
        pool.vision(PHOTO, text(1, 9), large, **GREEDY)
        steps = pool.metrics()["steps"]
        jobs = [pool.submit("vision", images=images[0], prompt=text(1, 9), model=pool.get(large), **GREEDY)]
        until(lambda: pool.metrics()["steps"] > steps + 1)
        before = signal_all(pool, signal.SIGKILL)
        until(lambda: processes(pool) and set(processes(pool)).isdisjoint(before))
        jobs.append(pool.submit("vision", images=images[1], prompt=text(1, 9), model=pool.get(large), timeout=60,
                                **GREEDY))
        assert [job.result().token_ids for job in jobs] == expected
        assert pool.metrics()["retries"] == 1


def test_images_do_not_mix_after_a_fault(model: Path) -> None:
    """A request that continues on another worker (a thread here) takes its image numbers along. A later request with
    the same numbers for other images must not use the cached ones."""
    seen = [[image(seed, 40, 40) for seed in range(first, first + 4)] for first in (0, 10)]
    call: dict[str, Any] = dict(GREEDY, prompt=text(1, 9))
    with mpool.Pool() as here:
        expected = [here.vision(images, model=model, **call).token_ids for images in seen]
    for seed in range(45, 110):
        config = mpool.PoolConfig(threads=1, max_workers_per_model=1, breaker_threshold=0,
                                  chaos=f"seed={seed},die=0.15")
        with mpool.Pool(config) as pool:
            entry = pool.register("mix", model)
            try:
                first = entry.vision(seen[0], **call)
                continued = pool.metrics()["retries"]
                second = entry.vision(seen[1], **call)
            except mpool.InternalError:  # a second fault
                continue
            assert [first.token_ids, second.token_ids] == expected, f"seed {seed}"
        if continued:
            return
    raise AssertionError("no request continued after a fault")


def test_process_survives_the_end_of_a_request_in_an_image(pool: mpool.Pool, large: Path) -> None:
    question, photo = text(1, 9), image(5, SIDE, SIDE)
    pool.vision(OTHER, question, large, **GREEDY)
    before = processes(pool)
    with pytest.raises(mpool.Timeout):
        pool.vision(photo, question, large, **{**GREEDY, "timeout": 0.15})
    steps = pool.metrics()["steps"]
    job = pool.submit("vision", images=photo, prompt=question, model=pool.get(large), **GREEDY)
    until(lambda: pool.metrics()["steps"] > steps)
    job.cancel()
    with pytest.raises(mpool.Cancelled):
        job.result()
    until(lambda: not row_of(pool).running)
    assert len(pool.vision(OTHER, question, large, **GREEDY).token_ids) == 6 and processes(pool) == before


def test_image_that_exceeds_the_memory_of_a_process(model: Path, large: Path) -> None:
    with pool_of(process_memory=6_000_000) as pool:
        assert pool.vision(PHOTO, text(1, 9), large, **GREEDY).token_ids
        before = processes(pool)
        with pytest.raises(mpool.MemoryExhausted, match=r"limit \(process_memory of PoolConfig, memory_bytes"):
            pool.vision(image(5, SIDE, SIDE), text(1, 9), large, **GREEDY)
        assert pool.vision(PHOTO, text(1, 9), large, **GREEDY).token_ids and processes(pool) == before
    assert children() == []
