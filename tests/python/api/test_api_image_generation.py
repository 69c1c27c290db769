"""generate_image: results, streams, options, errors, and concurrent callers."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import errors
from mpool.tasks import text_to_image

import pipelinemodels

SMALL = {"width": 32, "height": 24, "num_inference_steps": 3, "seed": 5, "max_sequence_length": 8}


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("flux")
    pipelinemodels.flux(folder)
    return str(folder)


@pytest.fixture(scope="module")
def sd3(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sd3")
    pipelinemodels.sd3(folder)
    return str(folder)


@pytest.fixture
def pool() -> Any:
    with mpool.Pool() as pool:
        yield pool


def test_result(pool: mpool.Pool, flux: str, tmp_path: Path) -> None:
    made = pool.generate_image("a cat", flux, **SMALL)
    assert made.array.shape == (24, 32, 3) and made.array.dtype == np.float32
    assert 0 <= made.array.min() < made.array.max() <= 1
    assert made.image.size == (32, 24) and made.image.mode == "RGB"
    assert np.array_equal(np.asarray(made.image), (made.array * 255).round().astype(np.uint8))
    assert made.seed == 5 and made.model == flux and len(made.results) == len(made.images) == 1
    from PIL import Image

    made.save(tmp_path / "cat.png")
    for source in (io.BytesIO(made._repr_png_()), tmp_path / "cat.png"):
        with Image.open(source) as image:
            kept = json.loads(image.text["mpool"])  # type: ignore[attr-defined]
            assert np.array_equal(np.asarray(image), np.asarray(made.image))
        assert kept["prompt"] == "a cat" and kept["seed"] == 5 and kept["num_inference_steps"] == 3
        assert (kept["n"], kept["index"], kept["compute"], kept["latents"]) == (1, 0, "auto", "of the seed")
        assert (kept["width"], kept["height"]) == (32, 24)
    made.save(tmp_path / "cat.webp")
    with Image.open(tmp_path / "cat.webp") as image:
        assert image.format == "WEBP"


@pytest.mark.parametrize("words", [100, 20_000])
def test_a_truncated_prompt_warns_at_the_callers_line(pool: mpool.Pool, flux: str, words: int) -> None:
    """Long prompts are tokenized on another thread; their warning has the same location."""
    with pytest.warns(UserWarning, match="`prompt` is too long for the text encoder CLIP, which supports") as found:
        pool.generate_image("cat " * words, flux, **SMALL)
    assert {warning.filename for warning in found} == {__file__}


def test_seed_decides(pool: mpool.Pool, flux: str) -> None:
    first, again, other = (pool.generate_image("a cat", flux, **{**SMALL, "seed": seed}) for seed in (5, 5, 6))
    assert np.array_equal(first.array, again.array) and not np.array_equal(first.array, other.array)
    random = pool.generate_image("a cat", flux, **{**SMALL, "seed": None})
    assert np.array_equal(random.array, pool.generate_image("a cat", flux, **{**SMALL, "seed": random.seed}).array)


def test_images_of_a_batch_equal_single_images(pool: mpool.Pool, sd3: str) -> None:
    both = pool.generate_image("a cat", sd3, n=2, **SMALL)
    assert len(both.results) == 2 and not np.array_equal(both.results[0].array, both.results[1].array)
    assert both.results[1].parameters["index"] == 1
    assert np.array_equal(both.results[0].array, pool.generate_image("a cat", sd3, **SMALL).array)
    latents = np.random.default_rng(1).standard_normal((2, 4, 6, 8)).astype(np.float32)
    pair = pool.generate_image("a cat", sd3, n=2, latents=latents, **SMALL)
    for i in range(2):
        one = pool.generate_image("a cat", sd3, latents=latents[i:i + 1], **SMALL)
        assert np.array_equal(pair.results[i].array, one.array)


def test_bits_do_not_depend_on_the_number_of_threads(sd3: str, flux: str) -> None:
    for model in (sd3, flux):
        made = []
        for threads in (1, 2):
            with mpool.Pool(mpool.PoolConfig(threads=threads)) as pool:
                made.append(pool.generate_image("a cat", model, **SMALL).array)
        assert np.array_equal(made[0], made[1])


def test_noise_is_normally_distributed() -> None:
    """Mean 0, deviation 1, every twentieth part of the distribution equally often, images independent of each other."""
    size = 3 * 200 * 200
    noise = np.stack([text_to_image.noise(seed, index, (3, 200, 200)).ravel().astype(np.float64)
                      for seed, index in ((5, 0), (5, 1), (6, 0))])
    assert np.abs(noise.mean(1)).max() < 4 / size**0.5 and np.abs(noise.var(1) - 1).max() < 4 * (2 / size) ** 0.5
    edges = [statistics.NormalDist().inv_cdf(part / 20) for part in range(1, 20)]
    for row in noise:
        counts = np.bincount(np.searchsorted(edges, row), minlength=20)
        assert ((counts - size / 20) ** 2 / (size / 20)).sum() < 60  # chi-square with 19 degrees of freedom
    assert np.abs(np.corrcoef(noise) - np.eye(3)).max() < 4 / size**0.5


def test_generation_starts_from_the_noise_of_the_seed(pool: mpool.Pool, flux: str) -> None:
    """The same latents, given by the caller, are compared with diffusers in test_parity_image_generation.py."""
    made = pool.generate_image("a cat", flux, n=2, **SMALL)
    latents = np.stack([text_to_image.noise(SMALL["seed"], index, (4, 6, 8)) for index in range(2)])
    assert np.array_equal(made.array, pool.generate_image("a cat", flux, n=2, latents=latents, **SMALL).array)


def test_packed_latents_of_flux(pool: mpool.Pool, flux: str) -> None:
    latents = np.random.default_rng(1).standard_normal((1, 4, 6, 8)).astype(np.float32)
    packed = latents.reshape(1, 4, 3, 2, 4, 2).transpose(0, 2, 4, 1, 3, 5).reshape(1, 12, 16)
    first, second = (pool.generate_image("a cat", flux, latents=given, **SMALL) for given in (latents, packed))
    assert np.array_equal(first.array, second.array)


def test_latents_of_torch(pool: mpool.Pool, flux: str) -> None:
    """Latents may be torch tensors as in diffusers, also with half precision or with gradients."""
    torch = pytest.importorskip("torch")
    given = torch.randn((1, 4, 6, 8), generator=torch.Generator().manual_seed(1))
    expected = pool.generate_image("a cat", flux, latents=given.numpy(), **SMALL)
    assert expected.parameters["latents"] == "given"
    for made in (given, given.clone().requires_grad_(True), given.double(), given.tolist()):
        assert np.array_equal(pool.generate_image("a cat", flux, latents=made, **SMALL).array, expected.array)
    rounded = given.bfloat16()
    assert np.array_equal(pool.generate_image("a cat", flux, latents=rounded, **SMALL).array,
                          pool.generate_image("a cat", flux, latents=rounded.float().numpy(), **SMALL).array)
    for wrong in (given.to("meta"), given.to(torch.complex64), np.array([["1"]]), np.full((1, 4, 6, 8), 1e300)):
        with pytest.raises(errors.InvalidArgument, match="latents"):
            pool.generate_image("a cat", flux, latents=wrong, **SMALL)


def test_oversized_requests_are_refused_before_noise_is_generated(flux: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise of 64 images of 8192 x 8192 pixels takes gigabytes."""
    monkeypatch.setattr(text_to_image, "noise", lambda *args: pytest.fail("noise was generated"))
    with mpool.Pool(mpool.PoolConfig(memory_bytes=1 << 30)) as pool:
        for options in ({"width": 8192, "height": 8192, "n": 64}, {"width": 8192, "height": 8192, "n": 2}):
            with pytest.raises(errors.MemoryExhausted, match="the request needs .* MB, the limit is .* MB"):
                pool.generate_image("a cat", flux, **{**SMALL, **options})


def test_guidance(pool: mpool.Pool, sd3: str) -> None:
    """Scales of at most 1 disable guidance; a negative prompt changes a guided image."""
    plain, one = (pool.generate_image("a cat", sd3, guidance_scale=scale, **SMALL) for scale in (0, 1))
    assert np.array_equal(plain.array, one.array)
    guided = pool.generate_image("a cat", sd3, guidance_scale=5, **SMALL)
    away = pool.generate_image("a cat", sd3, guidance_scale=5, negative_prompt="a dog", **SMALL)
    empty = pool.generate_image("a cat", sd3, guidance_scale=5, negative_prompt="", **SMALL)
    assert not np.array_equal(plain.array, guided.array) and not np.array_equal(guided.array, away.array)
    assert np.array_equal(guided.array, empty.array)


def test_stream(pool: mpool.Pool, flux: str) -> None:
    options = {**SMALL, "num_inference_steps": 5}
    stream = pool.generate_image("a cat", flux, stream=True, n=2, preview_every=2, **options)
    steps = list(stream)
    assert [(step.step, step.steps, step.index) for step in steps] == \
        [(i + 1, 10, i // 5) for i in range(10)]
    assert [step.preview is not None for step in steps] == [False, True, False, True, False] * 2
    assert steps[-1].progress == 1 and all(step.preview.size == (32, 24) for step in steps if step.preview)
    result = stream.result()
    alone = pool.generate_image("a cat", flux, n=2, **options)
    for made, same in zip(result.results, alone.results):  # previews do not change the result
        assert np.array_equal(made.array, same.array)


def test_previews_are_computed_only_if_steps_are_read(pool: mpool.Pool, flux: str,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Previews cost decoder passes, so requests whose steps cannot be read skip them."""
    requested: list[int] = []
    submit = text_to_image.Request.submit

    def note(self: text_to_image.Request, *args: Any) -> Any:
        requested.append(self.preview_every)
        return submit(self, *args)

    monkeypatch.setattr(text_to_image.Request, "submit", note)
    pool.generate_image("a cat", flux, preview_every=1, **SMALL)
    asyncio.run(mpool.aio.generate_image("a cat", flux, pool=pool, preview_every=1, **SMALL))
    assert requested == [0, 0]
    assert any(step.preview for step in pool.generate_image("a cat", flux, preview_every=1, stream=True, **SMALL))
    job = pool.submit("text_to_image", prompt="a cat", model=flux, preview_every=1, **SMALL)
    assert any(step.preview for step in job)  # type: ignore[attr-defined]


def test_leaving_a_stream_stops_the_work(pool: mpool.Pool, flux: str) -> None:
    for _ in range(3):
        for step in pool.generate_image("a cat", flux, stream=True, **{**SMALL, "num_inference_steps": 1000}):
            assert step.step == 1
            break
    stream = pool.generate_image("a cat", flux, stream=True, **{**SMALL, "num_inference_steps": 1000})
    stream.close()
    assert list(stream) == []
    with pytest.raises(errors.Cancelled):
        stream.result()
    assert pool.generate_image("a cat", flux, **SMALL).array.shape == (24, 32, 3)


def test_job(pool: mpool.Pool, flux: str) -> None:
    job = pool.submit("text_to_image", prompt="a cat", model=flux, **SMALL)
    assert job.capability == "text_to_image" and [step.step for step in job] == [1, 2, 3]  # type: ignore[attr-defined]
    assert np.array_equal(job.result().array, pool.generate_image("a cat", flux, **SMALL).array)
    with pytest.raises(errors.InvalidArgument, match="`prompt` is required"):
        pool.submit("text_to_image", model=flux)


def test_model(flux: str) -> None:
    with mpool.Pool() as pool:
        model = pool.load(flux, name="painter", pin=True)
        assert model.capability == "text_to_image" and pool.ps()[0].state == "ready"
        assert np.array_equal(model.generate_image("a cat", **SMALL).array,
                              pool.generate_image("a cat", "painter", **SMALL).array)
        with pytest.raises(errors.WrongCapability):
            model.context_length  # noqa: B018
        with pytest.raises(errors.WrongCapability):
            model.dimensions  # noqa: B018


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_worker_processes(pool: mpool.Pool, family: str, flux: str, sd3: str) -> None:
    """Images and previews have the same bytes. A killed process is replaced, and its requests continue."""
    model = flux if family == "flux" else sd3
    options = {**SMALL, "num_inference_steps": 5, "n": 2}
    side, count = (192, 200) if family == "flux" else (64, 800)  # at least one second on any CPU
    long = {**SMALL, "num_inference_steps": count, "width": side, "height": side}
    expected = pool.generate_image("a cat", model, **options)
    shown = list(pool.generate_image("a cat", model, stream=True, preview_every=2, **options))
    with mpool.Pool(mpool.PoolConfig(isolation="process")) as apart:
        assert apart.generate_image("a cat", model, **options) == expected
        row = apart.ps()[0]
        assert row.isolation == "process" and row.processes and os.getpid() not in row.processes
        stream = apart.generate_image("a cat", model, stream=True, preview_every=2, **options)
        for step, same in zip(stream, shown, strict=True):
            assert (step.step, step.index, step.preview is None) == (same.step, same.index, same.preview is None)
            assert step.preview is None or np.array_equal(np.asarray(step.preview), np.asarray(same.preview))
        assert stream.result() == expected
        victim = apart.submit("text_to_image", prompt="a dog", model=model, **long)
        waiting = apart.submit("text_to_image", prompt="a cat", model=model, **options)
        steps, killed = [], set()  # killed within a step, a request repeats the step; between two steps, it continues
        for step in victim:  # type: ignore[attr-defined]
            steps.append(step.step)
            if step.step == 3:
                assert not victim.done()
                killed = set(apart.ps()[0].processes)
                for process in killed:
                    os.kill(process, signal.SIGKILL)
        assert steps == list(range(1, count + 1))
        assert victim.result() == pool.generate_image("a dog", model, **long)
        assert waiting.result(timeout=60) == expected
        assert killed and not killed & set(apart.ps()[0].processes)
        with pytest.raises(errors.Unsupported, match="latents of each step are not supported in worker processes"):
            entry = apart.get(model)._entry
            settings = text_to_image.GenerateImageOptions(**SMALL)
            text_to_image.prepare(entry, "a cat", settings, keep=True).submit(None).generated_images()


def test_memory_is_freed(sd3: str) -> None:
    with mpool.Pool(mpool.PoolConfig(max_workers_per_model=1)) as pool:
        before = pool.metrics()["memory_used"]  # counts the whole process: other pools may have loaded models
        first = pool.generate_image("a cat", sd3, **SMALL)
        assert pool.registry.entries()[0]["engine_bytes"] > 0 and pool.metrics()["memory_used"] > before
        pool.unload(sd3)
        assert all(row["engine_bytes"] == 0 for row in pool.registry.entries())
        assert pool.metrics()["memory_used"] <= before
        assert np.array_equal(first.array, pool.generate_image("a cat", sd3, **SMALL).array)
