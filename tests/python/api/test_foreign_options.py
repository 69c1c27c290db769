"""Options under the names of other libraries work, or the error says what to do."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool

TEXTS = ["one text", "another"]


def test_names_of_sentence_transformers(pool: mpool.Pool, bert: Path) -> None:
    """The aliases have the effect of mpool's own names."""
    seen: list[tuple[int, int]] = []
    given = pool.embed(TEXTS, bert, normalize_embeddings=True, truncate_dim=4,
                       show_progress_bar=lambda done, total: seen.append((done, total)))
    assert given.shape == (2, 4) and np.allclose(np.linalg.norm(given, axis=1), 1, atol=1e-6) and seen[-1] == (2, 2)
    assert (given == pool.embed(TEXTS, bert, normalize=True, dimensions=4)).all()
    raw = pool.embed(TEXTS, bert, normalize_embeddings=False)
    assert not np.allclose(np.linalg.norm(raw, axis=1), 1, atol=1e-3)
    with pytest.raises(mpool.InvalidArgument, match="twice"):
        pool.embed(TEXTS, bert, normalize_embeddings=True, normalize=False)


@pytest.mark.parametrize("name, advice", [
    ("device", "on the CPU"), ("convert_to_tensor", "torch.from_numpy"), ("batch_size", "leave it out"),
    ("trust_remote_code", "no code of model files"), ("n_threads", "PoolConfig"), ("num_ctx", "`context_length`"),
    ("quantization", "mpool quantize"), ("lora_path", "adapters="), ("options", "an argument of its own"),
])
def test_other_names_say_what_to_do(pool: mpool.Pool, bert: Path, name: str, advice: str) -> None:
    with pytest.raises(mpool.InvalidArgument, match=f"`{name}` is not an option of embed; .*{advice}"):
        pool.embed(TEXTS, bert, **{name: 1})


@pytest.mark.parametrize("call, of", [
    (lambda options: mpool.Pool(**options), "Pool"), (lambda options: mpool.PoolConfig(**options), "PoolConfig"),
    (lambda options: mpool.load("x", **options), "load"),
    (lambda options: mpool.register("x", "y", **options), "register"),
])
def test_unknown_options_of_pools_and_loads(call: Any, of: str) -> None:
    """The error is not a TypeError, and says what to do or names the nearest option."""
    with pytest.raises(mpool.InvalidArgument, match=f"`n_ctx` is not an option of {of}; the context is the model's"):
        call({"n_ctx": 4096})
    with pytest.raises(mpool.InvalidArgument, match=f"`colour` is not an option of {of}"):
        call({"colour": 1})


def test_configurations_are_still_copied_and_pickled() -> None:
    config = mpool.PoolConfig(threads=1, keep_alive="10m")
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
