"""Requests to vision language models, the results of transformers, and a measure of differences."""

from pathlib import Path
from typing import Any

import numpy as np
import visionmodels
from corelib import SAMPLING
from paritymodels import torch

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


def reference(model: Any, made: Any, images: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the images, with the vectors of the taps behind, and the logits of the prompt."""
    with torch.no_grad():
        given = visionmodels.inputs(model, made.prompt.tolist(), images)
        logits = model(**given).logits[0].numpy()
        given = {name: value for name, value in given.items() if name not in (
            "input_ids", "token_type_ids", "mm_token_type_ids", "attention_mask")}
        found = model.get_image_features(**given)
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return torch.cat([torch.cat([row.reshape(-1, row.shape[-1]) for row in rows]) for rows in parts],
                     dim=1).numpy(), logits


def greedy_reference(model: Any, made: Any, images: list[np.ndarray], count: int) -> list[int]:
    """Return the ``count`` most probable next tokens, one after the other. The end token is not sampled."""
    tokens: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            row = model(**visionmodels.inputs(model, made.prompt.tolist() + tokens, images)).logits[0, -1].clone()
            row[visionmodels.EOS] = -torch.inf
            tokens.append(int(row.argmax()))
    return tokens
