"""The option ``weights``: the results have the same bytes, and mapped weights take no memory of the pool."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import tinymodels

import mpool


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.cached(tmp_path_factory, "bert")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.cached(tmp_path_factory, "llama")


TEXTS = ["fox jumps over lazy dog", "brown fox", "quick numbers signs over main"]


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("compute", ["float32", "int8"])
def test_vectors_have_the_same_bytes(bert: Path, isolation: str, compute: str) -> None:
    found = {}
    for weights in ("auto", "mapped", "packed"):
        with mpool.Pool(mpool.PoolConfig(threads=1, weights=weights, isolation=isolation)) as pool:
            found[weights] = pool.embed(TEXTS, bert, compute=compute).tobytes()
            row, = pool.ps()
            assert row.weights == ("mapped" if weights == "mapped" else "packed")
            if weights == "mapped":
                assert "mapped" in repr(pool.ps())
                mapped = row.model_bytes
            else:
                packed = row.model_bytes
    assert found["auto"] == found["mapped"] == found["packed"]
    assert mapped < packed  # mapped: norms, biases and fixed slack


def test_texts_have_the_same_bytes(llama: Path) -> None:
    found = []
    for weights in ("auto", "mapped", "packed"):
        with mpool.Pool(mpool.PoolConfig(threads=1, weights=weights)) as pool:
            found.append(pool.generate("one two", llama, max_tokens=12, temperature=0).text)
            assert pool.ps()[0].weights == ("mapped" if weights == "mapped" else "packed")
    assert found[0] == found[1] == found[2]


def test_load_overrides_the_pool(bert: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        before = pool.embed(TEXTS, bert)
        model = pool.load(bert, weights="mapped")  # loads again
        assert pool.ps()[0].weights == "mapped"
        assert model.embed(TEXTS).tobytes() == before.tobytes()
        pool.load(bert)  # None: unchanged
        assert pool.ps()[0].weights == "mapped"
        pool.load(bert, weights="packed")
        assert pool.ps()[0].weights == "packed"
        assert model.embed(TEXTS).tobytes() == before.tobytes()


def test_a_pickled_model_keeps_its_weights(bert: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool, mpool.Pool(mpool.PoolConfig(threads=1)) as other:
        data = pickle.dumps(pool.load(bert, weights="mapped"))
        pool.close()
        model = pickle.loads(data)
        other.load(model)
        assert other.ps()[0].weights == "mapped"


def test_registered_names_have_weights_of_their_own(bert: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        models = [pool.register(name, bert, weights=name) for name in ("mapped", "packed")]  # type: ignore[arg-type]
        found = [model.embed(TEXTS).tobytes() for model in models]
        assert found[0] == found[1]
        assert {row.model: row.weights for row in pool.ps()} == {"mapped": "mapped", "packed": "packed"}
        with pytest.raises(mpool.InvalidArgument, match="`weights` must be one of auto, mapped, packed"):
            pool.register("never", bert, weights="never")  # type: ignore[arg-type]


def test_other_values_are_refused(bert: Path) -> None:
    with pytest.raises(mpool.InvalidArgument, match="`weights` must be one of auto, mapped, packed") as caught:
        mpool.load(bert, weights="never")  # type: ignore[arg-type]
    assert caught.value.param == "weights" and caught.value.got == "'never'"
    with pytest.raises(mpool.InvalidArgument, match="weights"):
        mpool.PoolConfig(weights="Mapped")
