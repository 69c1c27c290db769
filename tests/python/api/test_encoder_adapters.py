"""Adapters of encoders: each text of a batch may have another adapter, and its bytes are those of the text alone. No
vector of one adapter is ever returned for another one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapterfiles import matrices, save_peft
from rerankers import make_reranker

import mpool
from mpool import aio
from mpool.errors import FormatError, InvalidArgument, Unsupported

TARGETS = ("query", "key", "value", "dense")
TEXTS = ["a cat", "The quick brown fox jumps over the lazy dog.", "dog " * 40, "x", "Numbers 0 1 2 3", "noch ein Satz"]
NAMES = (None, "one", "two", "three")


@pytest.fixture(scope="module")
def adapters(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of all layers, of some, and one that differs from the first in its scale only."""
    folder = tmp_path_factory.mktemp("adapters")
    all_, some = matrices(bert, 8, 1, TARGETS), matrices(bert, 3, 2, ("value", "key"))
    return {"one": save_peft(folder / "one", all_, 16.0), "two": save_peft(folder / "two", some, 9.0),
            "three": save_peft(folder / "three", all_, 8.0)}


@pytest.fixture(params=["thread", "process"])
def pool(request: pytest.FixtureRequest, bert: Path, adapters: dict[str, Path]) -> Iterator[mpool.Pool]:
    config = mpool.PoolConfig(threads=2, max_workers_per_model=1, isolation=request.param)
    with mpool.Pool(config) as made:
        made.load(bert, adapters=adapters)
        yield made


def alone(bert: Path, adapters: dict[str, Path], texts: Sequence[Any]) -> dict[str | None, np.ndarray]:
    """Return the vectors of each text, computed alone with a copy of the model that has one adapter."""
    found = {}
    for name in NAMES:
        with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
            pool.load(bert, adapters={} if name is None else {name: adapters[name]})
            found[name] = np.stack([pool.embed([text], bert, adapter=name)[0] for text in texts])
    return found


@pytest.fixture(scope="module")
def expected(bert: Path, adapters: dict[str, Path]) -> dict[str | None, np.ndarray]:
    """The vectors of TEXTS by adapter."""
    found = alone(bert, adapters, TEXTS)
    for a in NAMES:
        for b in NAMES:
            assert a == b or (np.abs(found[a] - found[b]).max(axis=1) > 1e-3).all(), (a, b)
    return found


def test_batches_of_each_adapter(pool: mpool.Pool, bert: Path, expected: dict[str | None, np.ndarray]) -> None:
    for name in (*NAMES, *NAMES):
        assert np.array_equal(pool.embed(TEXTS, bert, adapter=name), expected[name]), name


def test_requests_of_all_adapters_share_passes(pool: mpool.Pool, bert: Path,
                                               expected: dict[str | None, np.ndarray]) -> None:
    """Many requests at once, with equal texts under different adapters: no text gets the vector of another adapter."""
    chosen = [NAMES[at * 7 % 4] for at in range(120)]
    for repeat in range(3):
        jobs = [pool.submit("text_embedding", inputs=TEXTS if at % 3 else TEXTS[at % 6], model=bert, adapter=name)
                for at, name in enumerate(chosen)]
        for at, (name, job) in enumerate(zip(chosen, jobs)):
            wanted = expected[name] if at % 3 else expected[name][at % 6]
            assert np.array_equal(job.result(), wanted), (repeat, at, name)


def test_recent_vectors_belong_to_their_adapter(pool: mpool.Pool, bert: Path,
                                                expected: dict[str | None, np.ndarray]) -> None:
    """The same text with one adapter after the other, within the time for which vectors are kept."""
    for at in range(40):
        name = NAMES[at % 4]
        assert np.array_equal(pool.embed(TEXTS[1], bert, adapter=name), expected[name][1]), (at, name)


def test_other_verbs(pool: mpool.Pool, bert: Path, expected: dict[str | None, np.ndarray]) -> None:
    tokens = {name: pool.embed_tokens(TEXTS, bert, adapter=name) for name in NAMES}
    assert len({tokens[name].values.tobytes() for name in NAMES}) == len(NAMES)
    both = pool.embed_all(TEXTS, bert, adapter="one")
    assert np.array_equal(both.dense, expected["one"])
    for name in NAMES:
        assert np.array_equal(np.stack(list(pool.embed_iter(TEXTS, bert, adapter=name))), expected[name])
        assert np.array_equal(pool.embed_tokens([TEXTS[2]], bert, adapter=name)[0], tokens[name][2])


def test_aio_and_handles(pool: mpool.Pool, bert: Path, expected: dict[str | None, np.ndarray]) -> None:
    handle = pool.get(bert)
    assert np.array_equal(handle.embed(TEXTS, adapter="two"), expected["two"])

    async def run() -> list[np.ndarray]:
        return await asyncio.gather(*(aio.embed(TEXTS, bert, adapter=name, pool=pool) for name in NAMES))

    for name, found in zip(NAMES, asyncio.run(run())):
        assert np.array_equal(found, expected[name]), name


def test_cls_pooling_computes_the_last_layer_of_one_row(bert: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    """With CLS pooling, the last layer computes other rows in one pass than alone: rows keep their adapters."""
    import json
    import shutil

    folder = Path(shutil.copytree(bert, tmp_path / "cls"))
    (folder / "1_Pooling/config.json").write_text(json.dumps(
        {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    with mpool.Pool(mpool.PoolConfig(threads=2, max_workers_per_model=1)) as pool:
        pool.load(folder, adapters=adapters)
        states = {name: pool.embed_tokens(TEXTS, folder, adapter=name, compute="float32") for name in NAMES}
        jobs = [(name, at, pool.submit("text_embedding", inputs=TEXTS[at], model=folder, adapter=name,
                                       compute="float32", normalize=False)) for at in range(6) for name in NAMES]
        for name, at, job in jobs:
            assert np.array_equal(job.result(), states[name][at][0]), (name, at)


def test_adapters_come_and_go(bert: Path, adapters: dict[str, Path], expected: dict[str | None, np.ndarray]) -> None:
    with mpool.Pool() as pool:
        before = pool.embed(TEXTS, bert)
        size = pool.ps()[0].model_bytes
        assert np.array_equal(before, expected[None])
        pool.load(bert, adapters={"it": adapters["one"]})
        assert np.array_equal(pool.embed(TEXTS, bert, adapter="it"), expected["one"])
        row = pool.ps()[0]
        assert row.model_bytes > size and row.adapters == ("it",) and ", 1 adapter " in repr(pool.ps())
        pool.load(bert, adapters={"it": adapters["two"]})  # another adapter of the same name
        assert np.array_equal(pool.embed(TEXTS, bert, adapter="it"), expected["two"])
        pool.unload(bert)
        assert np.array_equal(pool.embed(TEXTS, bert, adapter="it"), expected["two"])
        pool.load(bert, adapters={})
        assert np.array_equal(pool.embed(TEXTS, bert), before)  # the first request takes the table of recent vectors
        assert pool.ps()[0].model_bytes == size and pool.ps()[0].adapters == ()
        with pytest.raises(InvalidArgument, match="the model has no adapters"):
            pool.embed(TEXTS, bert, adapter="it")


@pytest.mark.parametrize("name", [7, "", "four", "ONE", True, ["one"]])
def test_unknown_names_are_refused(bert: Path, adapters: dict[str, Path], name: Any) -> None:
    with mpool.Pool() as pool:
        pool.load(bert, adapters=adapters)
        for call in (pool.embed, pool.embed_tokens, pool.embed_all):
            with pytest.raises(InvalidArgument, match="or None, got|one, three, two or None") as caught:
                call("x", bert, adapter=name)
            assert caught.value.param == "adapter"


def test_rerankers_and_classifiers(tmp_path: Path) -> None:
    documents = ["a cat sat on the mat", "the dog", "numbers 0 1 2 3"]
    with mpool.Pool(mpool.PoolConfig(threads=2)) as pool:
        for labels, call in ((1, lambda path, **more: pool.rerank("the dog", documents, path, **more).scores),
                             (3, lambda path, **more: [row.tolist() for row in pool.classify(documents, path,
                                                                                             **more).scores])):
            folder = make_reranker(tmp_path / f"base{labels}", "bert", labels)
            found = {name: pair for name, pair in matrices(folder, 4, 1, TARGETS).items() if ".layer." in name}
            pool.load(folder, adapters={"one": save_peft(tmp_path / f"one{labels}", found, 8.0, task_type="SEQ_CLS"),
                                        "two": save_peft(tmp_path / f"two{labels}", found, 1.0, task_type="SEQ_CLS")})
            results = [call(folder, adapter=name) for name in (None, "one", "two", None, "one", "two")]
            assert results[:3] == results[3:] and results[0] != results[1] != results[2] != results[0]
            save_peft(tmp_path / f"head{labels}", found, 8.0, task_type="SEQ_CLS", modules_to_save=["classifier"])
            with pytest.raises(Unsupported, match="modules_to_save"):
                pool.load(folder, adapters={"head": tmp_path / f"head{labels}"})


def test_two_modules_of_one_layer_are_refused(tmp_path: Path) -> None:
    """ModernBERT has one matrix for queries, keys and values; other files of GTE have one or three."""
    from encodermodels import ENCODERS, built

    model = built("gte", 1)
    folder = ENCODERS["gte"].write(model, tmp_path / "base")
    found = matrices(model, 4, 1, ("q_proj",))
    (name, (a, b)), = found.items()
    fused = {"encoder.layer.0.attention.qkv_proj": (a, np.concatenate([b, b, b]))}
    with mpool.Pool() as pool:
        pool.load(folder, adapters={"one": save_peft(tmp_path / "part", found, 4.0)})
        pool.load(folder, adapters={"one": save_peft(tmp_path / "whole", fused, 4.0)})
        with pytest.raises(FormatError, match=f"{name}.*qkv_proj|qkv_proj.*{name}"):
            pool.load(folder, adapters={"one": save_peft(tmp_path / "both", {**found, **fused}, 4.0)})


def test_static_embeddings_have_no_adapters(adapters: dict[str, Path], tmp_path: Path) -> None:
    import staticmodels

    folder = staticmodels.write(tmp_path / "static", *next(iter(staticmodels.VARIANTS.values())))
    with mpool.Pool() as pool:
        with pytest.raises(Unsupported, match="adapters of static_embedding models"):
            pool.load(folder, adapters={"one": adapters["one"]})
        with pytest.raises(InvalidArgument, match="the model has no adapters"):
            pool.embed("x", folder, adapter="one")


# ---- iterators -----------------------------------------------------------------------------------------------------
