"""Requests that the adapters of other libraries make (mpool/integrations/_requests.py), recorded by a pool."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.integrations import _requests as adapters


class Recorder:
    """A pool that records requests. The score of a document is its number."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def embed(self, **options: Any) -> Any:
        self.calls.append(options)
        return np.zeros((len(options["inputs"]), 2), np.float32)

    def rerank(self, query: str, documents: list[str], model: Any, **options: Any) -> Any:
        self.calls.append((query, len(documents), model, options))
        return SimpleNamespace(scores=tuple(map(float, documents)), model="m")

    def get(self, model: Any) -> Any:
        return SimpleNamespace(description=SimpleNamespace(embedding=SimpleNamespace(score_activation="sigmoid")))


@pytest.fixture()
def pool(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()

    async def embed(pool: Any, **options: Any) -> Any:
        return pool.embed(**options)

    async def rerank(query: str, documents: list[str], model: Any, pool: Any, **options: Any) -> Any:
        return pool.rerank(query, documents, model, **options)

    monkeypatch.setattr(adapters, "pool_of", lambda model: made)
    monkeypatch.setattr(adapters.aio, "embed", embed)
    monkeypatch.setattr(adapters.aio, "rerank", rerank)
    return made


@pytest.mark.parametrize("texts, most", [((), 1), (("x",), 1), (("x", "y"), 2)])
@pytest.mark.parametrize("more", [{}, {"task": None}, {"max_inputs": 5, "prompt": "p"}])
def test_embed(pool: Recorder, texts: tuple[str, ...], most: int, more: dict[str, Any]) -> None:
    """No number of texts is too large, and the options of the adapter come before its own."""
    assert len(adapters.embed("m", texts, "document", more)) == len(texts)
    assert len(asyncio.run(adapters.aembed("m", texts, "document", more))) == len(texts)
    assert pool.calls == [{"inputs": list(texts), "model": "m", "task": "document", "max_inputs": most, **more}] * 2


@pytest.mark.parametrize("count, slices", [(0, []), (1, [1]), (1000, [1000]), (1001, [1000, 1]), (2000, [1000, 1000])])
def test_scores(pool: Recorder, count: int, slices: list[int]) -> None:
    """A request has at most 1,000 documents, and the scores are those of all requests in order."""
    documents = list(map(str, range(count)))
    for found in (adapters.scores("m", "q", documents, {"top_k": None}),
                  asyncio.run(adapters.ascores("m", "q", documents, {"top_k": None}))):
        assert found.logits.dtype == found.values.dtype == np.float32
        assert found.logits.tolist() == list(range(count))
        assert np.allclose(found.values, 1 / (1 + np.exp(-found.logits)))
    assert pool.calls == [("q", size, "m", {"top_k": None, "function_to_apply": "none"}) for size in slices] * 2
    assert not count or adapters.scores("m", "q", documents, {"function_to_apply": "none"}).values[-1] == count - 1


@pytest.mark.parametrize("count, best", [(None, [1, 3, 0, 2, 4]), (0, []), (1, [1]), (3, [1, 3, 0]),
                                         (9, [1, 3, 0, 2, 4])])
def test_best(count: int | None, best: list[int]) -> None:
    """Equal logits keep their order."""
    assert adapters.Scores(np.ones(5, np.float32), np.array([1, 5, 1, 2, 1], np.float32)).best(count) == best


def test_names(llama: Any) -> None:
    """A model has its key; a model of this process cannot be stored."""
    model = mpool.Model(mpool.load(llama)._entry, "auto")
    assert (adapters.name_of(None), adapters.name_of("a/b"), adapters.name_of(model)) == (None, "a/b", model.key)
    assert (adapters.stored_name(None, "x"), adapters.stored_name("a/b", "x")) == (None, "a/b")
    with pytest.raises(mpool.InvalidArgument) as caught:
        adapters.stored_name(model, "Chroma")
    assert (caught.value.param, caught.value.got, caught.value.allowed) == (
        "model", f"the mpool.Model {model.key}", "a key, a path or a reference: Chroma stores it")
    assert caught.value.hint is not None and repr(model.ref) in caught.value.hint
