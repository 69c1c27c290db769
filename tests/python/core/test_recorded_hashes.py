"""Results of the default models, of the demo models and of quantisation have the recorded bytes.

``recorded_hashes.json`` has the SHA-256 of each result. It was recorded with an extension compiled by gcc.
``tools/wheels.py check`` runs these tests on the wheels, which another compiler makes, so the hashes show that both
compilers give the same bits. They are the same on every CPU (csrc/kernels/kernels.h), except those in bfloat16, which
are recorded for each instruction set.

``python tests/python/core/test_recorded_hashes.py`` records them again after a change of the arithmetic on purpose;
with MPOOL_CPU=avx2 or another instruction set that the CPU has, also those in bfloat16 for this set.
"""

import hashlib
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1] / "helpers"))

import mpool  # noqa: E402
from mpool import _core  # noqa: E402
from mpool.models.sources import bundled  # noqa: E402
from realmodels import real_path  # noqa: E402

FILE = Path(__file__).with_name("recorded_hashes.json")
TEXTS = ["The cat is asleep on the warm roof.", "Bread rises because of yeast.", "x", "one two three four five " * 40]
DIGITS = [str(Path(bundled.ROOT) / "images" / f"{digit}.png") for digit in (0, 4, 7)]
#: Types that the core quantises to.
STORED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


def _tokens(done: mpool.Completion) -> list[np.ndarray]:
    """Return token ids and log probabilities, also of the alternatives."""
    rows = done.logprobs or ()
    return [np.array(done.token_ids, np.int64), np.array([row.logprob for row in rows], np.float32),
            np.array([[one.logprob for one in row.top] for row in rows], np.float32)]


def _embed(pool: mpool.Pool, compute: Any) -> list[np.ndarray]:
    return [pool.embed(TEXTS, real_path("minilm"), compute=compute)]


def _generate(pool: mpool.Pool, compute: Any) -> list[np.ndarray]:
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "logprobs": 3, "compute": compute}
    return [array for temperature in (0, 1)
            for array in _tokens(pool.generate(TEXTS[3][:200], real_path("smollm2"), temperature=temperature, seed=5,
                                               **options))]


def _embed_images(pool: mpool.Pool, compute: Any) -> list[np.ndarray]:
    return [pool.embed_image(DIGITS, "digits-clip", compute=compute),
            pool.embed(["a handwritten seven", "x"], "digits-clip", compute=compute)]


def _describe(pool: mpool.Pool, compute: Any) -> list[np.ndarray]:
    return _tokens(pool.vision(DIGITS[:2], "Which digits are these?", "digits-llava", temperature=0, max_tokens=8,
                               ignore_eos=True, logprobs=3, compute=compute))


def _generate_image(pool: mpool.Pool, compute: Any) -> list[np.ndarray]:
    return [np.asarray(pool.generate_image("a handwritten seven", "digits-sd3", seed=3, num_inference_steps=2,
                                           compute=compute).image)]


def _quantise(pool: mpool.Pool, compute: Any) -> list[np.ndarray]:
    """Return 2,048 values in every stored type, and the values that are read back."""
    values = np.random.default_rng(11).standard_normal(2048).astype(np.float32)
    rows = [_core.quantize(stored, "F32", values.tobytes(), len(values)) for stored in STORED]
    return [np.concatenate([np.frombuffer(row, np.uint8), _core.dequantize(stored, row, len(values)).view(np.uint8)])
            for stored, row in zip(STORED, rows)]


#: Name -> function, and compute types.
CASES: dict[str, tuple[Callable[[mpool.Pool, Any], list[np.ndarray]], tuple[str, ...]]] = {
    "all-MiniLM-L6-v2": (_embed, ("float32", "int8", "bfloat16")),
    "SmolLM2-135M-Instruct": (_generate, ("auto", "float32", "bfloat16")),
    "digits-clip": (_embed_images, ("float32", "int8", "bfloat16")),
    "digits-llava": (_describe, ("float32", "int8", "bfloat16")),
    "digits-sd3": (_generate_image, ("float32", "bfloat16")),
    "quantize": (_quantise, ("auto",)),
}
PAIRS = [(name, compute) for name, (_, computes) in CASES.items() for compute in computes]


def key_of(name: str, compute: str) -> str:
    """Return the name of a hash in the file. A name in bfloat16 has the instruction set."""
    level = mpool.show_config("dicts")["cpu"]["level"]
    return f"{name}, {compute}" + (f", {level}" if compute == "bfloat16" else "")


def hash_of(arrays: list[np.ndarray]) -> str:
    """Return the SHA-256 of the types, shapes and bytes of arrays."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize(("name", "compute"), PAIRS)
def test_bytes_are_the_recorded_ones(pool: mpool.Pool, name: str, compute: str) -> None:
    key, recorded = key_of(name, compute), json.loads(FILE.read_text("utf-8"))
    if compute == "bfloat16" and key not in recorded:
        pytest.skip(f"no hash is recorded for {key}")
    assert hash_of(CASES[name][0](pool, compute)) == recorded[key], f"{key}; compiled by {_core.config()['compiler']}"


def test_every_hash_has_a_case() -> None:
    cases = {f"{name}, {compute}" for name, compute in PAIRS}
    recorded = json.loads(FILE.read_text("utf-8"))
    assert {", ".join(key.split(", ")[:2]) for key in recorded} == cases
    assert len(set(recorded.values())) >= len(cases)


def hashes() -> dict[str, str]:
    """Return the hashes of all cases."""
    with mpool.Pool() as made:
        return {key_of(name, compute): hash_of(CASES[name][0](made, compute)) for name, compute in PAIRS}


if __name__ == "__main__":
    before = json.loads(FILE.read_text("utf-8")) if FILE.exists() else {}
    print(_core.config()["compiler"], platform.machine())
    FILE.write_text(json.dumps(dict(sorted({**before, **hashes()}.items())), indent=1) + "\n", "utf-8")
