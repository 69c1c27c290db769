"""The 8-bit KV cache: its memory, its results, its errors, and the handles that carry the setting."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from corelib import greedy, logits
from realmodels import real_path

import mpool
from mpool.debug.show import ModelRow


@pytest.fixture(scope="module")
def model() -> str:
    return str(real_path("smollm2"))


TOKENS = np.arange(100, 400, dtype=np.int32)


def load(pool: mpool.Pool, model: str, kv_dtype: str | None, expected: str) -> ModelRow:
    """Load the model and return its row."""
    pool.load(model, kv_dtype=kv_dtype)  # type: ignore[arg-type]
    assert pool.ps()[0].kv_dtype == expected
    return pool.ps()[0]


@pytest.mark.slow
def test_memory_results_and_table(model: str) -> None:
    with mpool.Pool() as pool:
        before, rows = load(pool, model, None, "int16"), logits(pool, model, TOKENS)
        after, others = load(pool, model, "int8", "int8"), logits(pool, model, TOKENS)
        # 30 layers of 3 heads with keys and values of 64 components, each with a scale; bytes have two multipliers
        assert before.facts["kv_token_bytes"] == 30 * 3 * 2 * (2 * 64 + 4)
        assert after.facts["kv_token_bytes"] == 30 * 3 * 2 * (64 + 4 + 2)
        assert "int8" in repr(pool.ps())
        assert 0 < np.abs(rows - others).mean() < 0.03 * np.abs(rows).mean()
        load(pool, model, None, "int8")  # unchanged
        load(pool, model, "auto", "int16")
        assert (logits(pool, model, TOKENS) == rows).all()


def test_two_names_and_a_process_give_the_same_bytes(model: str) -> None:
    with mpool.Pool() as pool:
        pool.register("here", model, kv_dtype="int8")
        pool.register("there", model, kv_dtype="int8", isolation="process")
        ends = [greedy(pool, name, TOKENS, 8) for name in ("here", "there", "here")]
        assert (ends[0] == ends[1]).all() and (ends[0] == ends[2]).all()
        assert {row.model: row.kv_dtype for row in pool.ps()} == {"here": "int8", "there": "int8"}
        with mpool.Pool() as other:
            handle = pickle.loads(pickle.dumps(pool.get("here")))
            entry = other._restore(*handle.__reduce__()[1][1:])._entry
            assert entry.loading.kv_dtype == "int8"


@pytest.mark.parametrize("value", ["int4", "", 8, True])
def test_other_values_are_refused(value: object, model: str) -> None:
    with mpool.Pool() as pool:
        for call in (lambda: pool.load(model, kv_dtype=value), lambda: pool.register("x", model, kv_dtype=value)):
            with pytest.raises(mpool.errors.InvalidArgument) as caught:
                call()
            assert caught.value.param == "kv_dtype" and "auto, int8" in str(caught.value)


def test_models_without_a_cache_refuse_it() -> None:
    folder = str(Path(real_path("minilm")))
    with mpool.Pool() as pool:
        with pytest.raises(mpool.errors.InvalidArgument, match="no KV cache"):
            pool.load(folder, kv_dtype="int8")
        pool.load(folder, kv_dtype="auto")
        assert pool.ps()[0].kv_dtype is None
