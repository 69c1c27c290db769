"""Replaced models are freed at once: no cycle waits for a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import shutil
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import aio
from mpool.runtime.entry import Entry

IMAGE = np.zeros((32, 32, 3), np.uint8)
MESSAGES = [{"role": "user", "content": "Hello"}]
FEW: dict[str, Any] = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
JSON = {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "object", "properties": {
    "a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}}}

#: Fixture with the model -> requests of its capabilities, by name.
USES: dict[str, dict[str, Callable[[mpool.Pool], object]]] = {
    "bert": {
        "embed": lambda pool: pool.embed(["a", "b"], "m"),
        "options": lambda pool: pool.embed(["a", "b"], "m", dimensions=4, precision="int8"),
        "submit": lambda pool: pool.submit("text_embedding", inputs=["a"], model="m").result(),
        "null": lambda pool: pool.embed(["a", None], "m", on_error="null"),  # type: ignore[list-item]
        "aio": lambda pool: asyncio.run(aio.embed("a", "m", pool=pool)),
        "refused": lambda pool: _refused(lambda: pool.embed("a", "m", dimensions=10_000)),
    },
    "ranker": {"rerank": lambda pool: pool.rerank("a", ["b", "c"], "m")},
    "sentiment": {"classify": lambda pool: pool.classify("a", "m")},
    "tagger": {"label": lambda pool: pool.classify_tokens("a b", "m")},
    "m3": {"outputs": lambda pool: (pool.embed_sparse(["a"], "m"), pool.embed_tokens(["a"], "m"))},
    "llama": {
        "generate": lambda pool: pool.generate("Once", "m", **FEW),
        "chat": lambda pool: pool.chat(MESSAGES, "m", **FEW),
        "stream": lambda pool: list(pool.chat(MESSAGES, "m", stream=True, **FEW)),
        "left": lambda pool: next(iter(pool.chat(MESSAGES, "m", stream=True, **{**FEW, "max_tokens": 50}))),
        "json": lambda pool: pool.chat(MESSAGES, "m", response_format=JSON, max_tokens=30),
        "aio": lambda pool: asyncio.run(aio.chat(MESSAGES, "m", pool=pool, **FEW)),
        "refused": lambda pool: _refused(lambda: pool.generate("Once", "m", adapter="none")),
    },
    "mpool:digits-clip": {"image": lambda pool: (pool.embed_image(IMAGE, "m"), pool.embed("seven", "m"))},
    "dino": {"image": lambda pool: pool.embed_image(IMAGE, "m")},
    "llava": {"describe": lambda pool: pool.vision([IMAGE], "What?", "m", **FEW)},
    "mpool:digits-sd3": {"draw": lambda pool: pool.generate_image("seven", "m", num_inference_steps=1)},
}


def _refused(call: Callable[[], object]) -> None:
    with pytest.raises(mpool.MpoolError):
        call()


@pytest.fixture
def frozen() -> Iterator[None]:
    """Without garbage collections."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _held(pool: mpool.Pool) -> list[weakref.ref[Any]]:
    """Return weak references to what a name leads to: its entries and the large objects that belong to them."""
    entry = pool.get("m")._entry
    found = [one for part in entry.known_parts() for one in (
        part, part.files._tokenizer, part.files._template, part.files._description, *part.plans.values())
        if one is not None]
    return [weakref.ref(one) for one in found if hasattr(type(one), "__weakref__")]


@pytest.mark.parametrize("model", USES)
def test_twenty_replaced_models(model: str, request: pytest.FixtureRequest, frozen: None) -> None:
    """swap() and register(replace=True), after requests of every kind, and with handles that are not used meanwhile."""
    ref = model if ":" in model else request.getfixturevalue(model)
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        handles = [pool.register("m", ref)]
        held: list[weakref.ref[Any]] = []
        sizes = []
        tracemalloc.start()
        try:
            for turn in range(20):
                for use in USES[model].values():
                    use(pool)
                held += _held(pool)
                handles.append(pool.get("m"))
                if turn % 2:
                    handles.append(pool.swap("m", ref))
                else:
                    pool.register("m", ref, replace=True)
                assert not [one() for one in held if one() is not None]
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        # The interpreter keeps freed tuples for new ones, 70 kB here. A cycle per model was 290 kB or more.
        assert held and sizes[-1] - sizes[4] < 200_000, sizes
        assert len({handle.ref for handle in handles}) == 1


def test_a_plan_that_is_made_during_a_swap(bert: Path, frozen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request's plan belongs to the old model, and is finished after the new one has the name."""
    from mpool.tasks import text_embedding

    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.register("m", bert)
        pool.embed("a", "m")
        make, held = text_embedding._make_plan, _held(pool)

        def late(*args: Any) -> Any:
            made = make(*args)
            monkeypatch.undo()
            pool.swap("m", bert)
            return made

        monkeypatch.setattr(text_embedding, "_make_plan", late)
        pool.embed("a", "m", normalize=False)
        assert not [one() for one in held if one() is not None]


def test_a_model_that_is_read_again(bert: Path, tmp_path: Path, frozen: None) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bert, folder)
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        handle = pool.register("m", folder)
        for renew in (pool.load, pool.unload) * 2:
            assert len(list(pool.embed_iter(iter(["a", "b"]), "m"))) == 2
            held = _held(pool)
            (folder / "new").write_bytes((folder / "model.safetensors").read_bytes())
            (folder / "new").replace(folder / "model.safetensors")
            renew("m")
            assert not [one() for one in held if one() is not None]
        assert handle.embed("a").any()


@pytest.mark.parametrize("model", ["bert", "llama", "mpool:digits-clip", "llava", "mpool:digits-sd3"])
def test_a_closed_pool(model: str, request: pytest.FixtureRequest, frozen: None) -> None:
    """Its names still exist, and its handles read the files again."""
    ref = model if ":" in model else request.getfixturevalue(model)
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        handle = pool.register("m", ref)
        for use in USES[model].values():
            use(pool)
        held = [one for one in _held(pool) if not isinstance(one(), Entry)]
        description = handle.description
    assert held and handle.description is not description and handle.description.networks == description.networks
    del description
    assert not [one() for one in held if one() is not None]
    with pytest.raises(mpool.ShuttingDown):
        list(USES[model].values())[0](pool)
