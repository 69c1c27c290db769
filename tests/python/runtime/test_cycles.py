"""Models that were replaced or unloaded, and closed pools, are freed at once: no cycle waits for a garbage collection."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool import aio

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
        "iterate": lambda pool: list(pool.embed_iter(iter(["a", "b"]), "m")),
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
    "mpool:digits-sd3": {"draw": lambda pool: pool.generate_image("seven", "m", steps=1)},
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
    found = [one for part in (entry, *entry._networks.values()) for one in (
        part, part._tokenizer, part._template, part._description, *part.plans.values()) if one is not None]
    return [weakref.ref(one) for one in found if hasattr(type(one), "__weakref__")]


@pytest.mark.parametrize(("model", "use"), [(model, use) for model, uses in USES.items() for use in uses])
def test_a_replaced_model(model: str, use: str, request: pytest.FixtureRequest, frozen: None) -> None:
    ref = model if ":" in model else request.getfixturevalue(model)
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.register("m", ref)
        for replace in (lambda: pool.swap("m", ref), lambda: pool.register("m", ref, replace=True)):
            for _ in range(2):
                USES[model][use](pool)
                held = _held(pool)
                replace()
                assert not [one() for one in held if one() is not None]
