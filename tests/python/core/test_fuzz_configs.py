"""Configurations of pipelines and image processors with wrong values, missing or additional keys, or truncated files.

Each is refused with an MpoolError, or the model works; there is no other exception and no numpy warning. The changes
are seeded: the message of a failure has the trial number that reproduces it.
"""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.tasks import text_to_image as image_generation
from mpool.models import describing
from mpool.errors import MpoolError
from mpool.images.loading import read_image
from mpool.images.preparing import prepare

import imagemodels
import pipelinemodels

VALUES: list[Any] = [None, True, False, 0, 1, -1, 2, 3, 7, 255, 10**6, 2**31 - 1, 2**31, 2**62, 2**63 - 1, -2**63, 0.0,
                     -0.0, 1e-300, 5e-324, 1e300, -1e300, 0.5, 0.999999, 1.0, "", "x", "silu", "linear", "0",
                     "a" * 5000, "../..", "\ud83d\ude00", [], [0], [None], [1, 2, 3], [2**62] * 3,
                     ["diffusers", None], [[]], {},
                     {"height": 0, "width": 1}, {"shortest_edge": 2**62}, {"a": {}}]
TRIALS = int(os.environ.get("MPOOL_FUZZ_TRIALS", "20"))  # per file


def broken(text: str, rng: random.Random) -> str:
    """Return a configuration with one or two wrong entries."""
    values = json.loads(text)
    for _ in range(rng.choice((1, 1, 2))):
        kind, keys = rng.random(), list(values)
        key = rng.choice(keys) if keys else "x"
        if kind < 0.7:
            values[key] = rng.choice(VALUES)
        elif kind < 0.8:
            values.pop(key, None)
        elif kind < 0.85:
            values[rng.choice(("size", "shift", "steps", "", "$schema"))] = rng.choice(VALUES)
        elif isinstance(values.get(key), list) and values[key]:
            values[key] = [*values[key][1:], rng.choice(VALUES)]
    made = json.dumps(values)
    return made[:rng.randrange(len(made))] if rng.random() < 0.05 else made


def each(folder: Path, seed: int, files: list[str]) -> Iterator[str]:
    """Corrupt each file ``TRIALS`` times. Yield a description of each corruption."""
    assert files
    for file in files:
        path = folder / file
        whole = path.read_text()
        try:
            for trial in range(TRIALS):
                path.write_text(broken(whole, random.Random(f"{seed} {file} {trial}")))
                yield f"{file}, trial {trial}: {path.read_text()[:2000]}"
        finally:
            path.write_text(whole)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_pipelines(family: str, tmp_path: Path) -> None:
    if family == "flux":
        pipelinemodels.flux(tmp_path, layers=1, singles=1, dynamic=True)
    else:
        pipelinemodels.sd3(tmp_path, layers=2)
    files = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*config.json"))
    refused = worked = 0
    for what in each(tmp_path, 1, ["model_index.json", *files, *["scheduler/scheduler_config.json"] * 2]):
        with warnings.catch_warnings(), mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
            warnings.simplefilter("error", RuntimeWarning)
            try:
                settings = describing.describe(tmp_path).pipeline
                assert settings is not None
                for steps, rows in ((1, 1), (4, 24), (50, 1 << 18)):
                    image_generation.schedule(settings, steps, rows)
                pool.generate_image("", tmp_path, width=2 * settings.scale, height=2 * settings.scale,
                                    num_inference_steps=1, max_sequence_length=2)
                worked += 1
            except MpoolError as error:
                assert "internal" not in str(error), what
                refused += 1
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error}; {what}") from error
    assert refused > 100 and worked > 20


@pytest.mark.parametrize("family", ["clip", "siglip", "dinov2"])
def test_image_processors(family: str, tmp_path: Path) -> None:
    imagemodels.save(imagemodels.make(family, 1), family, tmp_path)
    images = [read_image(imagemodels.image(1, *size)) for size in ((40, 40), (14, 300), (70, 20))]
    refused = worked = 0
    for what in each(tmp_path, 2, ["preprocessor_config.json"] * 2 + ["config.json"]):
        try:
            settings = describing.describe(tmp_path).image
            assert settings is not None
            for image in images:
                pixels = prepare(image, settings)
                assert pixels.ndim == 3 and pixels.size > 0, what
            worked += 1
        except MpoolError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}; {what}") from error
    assert refused > 20 and worked > 5
