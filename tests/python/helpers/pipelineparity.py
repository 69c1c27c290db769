"""Comparison of image generation in mpool and diffusers."""

from pathlib import Path
from typing import Any

import numpy as np
from pipelinemodels import torch

import mpool
from mpool.tasks import text_to_image

TOLERANCE = 1e-4
PROMPT = "a red cat, on the moon! of s3a 42"
TOKENS = 20
STEPS = 4


def near(got: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """Check that the largest difference, relative to the largest expected number, is at most ``tolerance``."""
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape
    assert np.abs(got - expected).max() <= tolerance * np.abs(expected).max()


def latents_of(width: int, height: int, n: int = 1) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((n, 4, height // 4, width // 4)).astype(np.float32)


def reference(pipeline: Any, width: int, height: int, **options: Any) -> dict[str, Any]:
    """Return the results of diffusers: text embeddings, pooled embeddings, latents after each step, and the image."""
    flux = "Flux" in type(pipeline).__name__
    history: list[Any] = []
    start = torch.tensor(latents_of(width, height))

    def keep(_: Any, step: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        history.append(values["latents"].clone())
        return values

    with torch.no_grad():
        if flux:
            texts, pooled, _ = pipeline.encode_prompt(PROMPT, max_sequence_length=TOKENS)
            start = pipeline._pack_latents(start, 1, 4, height // 4, width // 4)
        else:
            negative = options.get("negative_prompt")
            texts, away, pooled, pooled_away = pipeline.encode_prompt(
                PROMPT, None, None, negative_prompt=negative, max_sequence_length=TOKENS,
                do_classifier_free_guidance=options.get("guidance_scale", 7.0) > 1)
            if away is not None:
                texts, pooled = torch.cat([texts, away]), torch.cat([pooled, pooled_away])
        image = pipeline(PROMPT, height=height, width=width, num_inference_steps=STEPS, latents=start,
                         output_type="np", callback_on_step_end=keep, max_sequence_length=TOKENS, **options).images[0]
    if flux:
        history = [pipeline._unpack_latents(latents, height, width, 4) for latents in history]
    return {"texts": texts.numpy(), "pooled": pooled.numpy(), "image": image,
            "history": np.stack([latents[0].numpy() for latents in history])}


def ours(model: str | Path, width: int, height: int, compute: str = "float32", **options: Any) -> dict[str, Any]:
    """Return the same results of mpool, and the final latents."""
    with mpool.Pool() as pool:
        entry = pool._find(str(model), "text_to_image")
        request = text_to_image.prepare(entry, PROMPT, text_to_image.GenerateImageOptions(
            width=width, height=height, num_inference_steps=STEPS, latents=latents_of(width, height),
            max_sequence_length=TOKENS, compute=compute, **options), keep=True)
        ticket = request.submit(None)
        ticket.wait()
        found = {name: np.array(array) for name, array in ticket.generated_images().items()}
    return {"texts": found["texts"], "pooled": found["pooled"], "history": found["history"][0],
            "image": found["pixels"][0], "latents": found["latents"][0]}


def compare(got: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in ("texts", "pooled"):
        near(got[name], expected[name])
    for step in range(STEPS):
        near(got["history"][step], expected["history"][step])
    assert np.array_equal(got["history"][-1], got["latents"])
    near(got["image"], expected["image"])
