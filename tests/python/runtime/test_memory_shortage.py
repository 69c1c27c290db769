"""Which models a short memory unloads, what waits for memory, what is refused before anything is loaded, and how much a
load asks for."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
import imagemodels
from mpool import aio
from mpool.runtime import watching
from shortages import LARGE, MOST, full
from tinymodels import cached
from waiting import until

#: Bytes for one tiny model and not for two: its load asks for 5.8 MB, and for 24.7 MB with a worker process.
ONE = {"thread": 6_000_000, "process": 32 << 20}
PHOTO = imagemodels.image(5, 60, 90)
NAMES = ["one", "two", "three"]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cached(tmp_path_factory, "llama")


def short_pool(folder: Path, isolation: str = "thread") -> mpool.Pool:
    """A pool with three names of a tiny model."""
    pool = mpool.Pool(mpool.PoolConfig(offline=True, memory_bytes=ONE[isolation], isolation=isolation))
    for name in NAMES:
        pool.register(name, str(folder))
    return pool


def loaded(pool: mpool.Pool) -> list[str]:
    """The names of models in memory or being loaded."""
    return sorted(row["key"] for row in pool.registry.entries() if row["state"] not in ("cold", "failed", "evicting"))


def test_an_idle_model_is_evicted_however_it_was_loaded(folder: Path) -> None:
    with short_pool(folder) as pool:
        pool.load("one")
        pool.generate("a", "two", max_tokens=1)  # `one` was never used
        assert loaded(pool) == ["two"]
        for name in ("one", "two", "one"):  # explicit loads that evict each other succeed in turn
            pool.load(name)
            assert loaded(pool) == [name]


def test_a_pinned_model_stays_and_the_error_names_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "mpool"), short_pool(folder) as pool:
        pool.load("one", pin=True)
        with pytest.raises(mpool.MemoryExhausted) as caught:
            pool.generate("a", "two", max_tokens=1)
        assert loaded(pool) == ["one"]
    message = str(caught.value)
    assert "two needs" in message and "are free" in message
    held = message.partition("In memory: ")[2]
    assert held.startswith("one ") and "(pinned)" in held and "MB" in held
    warnings = [record.getMessage() for record in caplog.records if "In memory: one" in record.getMessage()]
    assert len(warnings) == 1 and {record.levelname for record in caplog.records} == {"WARNING"}


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_no_request_is_refused_while_models_take_turns(folder: Path, isolation: str) -> None:
    refused: list[str] = []

    def work(pool: mpool.Pool, seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(12 if isolation == "thread" else 5):
            try:
                pool.generate("Hello", choose.choice(NAMES), max_tokens=2)
                if choose.random() < 0.3:
                    pool.load(choose.choice(NAMES))
                if choose.random() < 0.3:
                    pool.ps()
            except mpool.MemoryExhausted as error:
                refused.append(str(error))

    with short_pool(folder, isolation) as pool:
        threads = [threading.Thread(target=work, args=(pool, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not refused


def test_requests_wait_for_models_that_wait_for_memory(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A request of a loaded model finds no byte free while another model loads; that is no reason to refuse either."""
    refused: list[str] = []

    def work(pool: mpool.Pool, seed: int) -> None:
        choose = random.Random(seed)
        calls: list[Callable[[], object]] = [
            lambda: pool.embed("A cat sat.", "bert"), lambda: pool.embed(["A cat sat.", "B"] * 8, "bert"),
            lambda: pool.vision(PHOTO, "what", "digits-llava", max_tokens=4), lambda: pool.load(choose.choice(NAMES)),
            lambda: pool.embed_image(PHOTO, "digits-clip"), lambda: pool.unload(choose.choice(NAMES)),
            lambda: pool.generate("Hello", choose.choice(NAMES), max_tokens=4),
            lambda: asyncio.run(mpool.aio.generate("Hello", choose.choice(NAMES), max_tokens=4, pool=pool)),
            lambda: pool.submit("text_to_text", prompt="a", model=choose.choice(NAMES), max_tokens=4).result(),
            lambda: list(pool.generate("Hello", choose.choice(NAMES), max_tokens=4, stream=True))]
        for _ in range(15):
            try:
                choose.choice(calls)()
            except mpool.MemoryExhausted as error:
                refused.append(str(error))

    config = mpool.PoolConfig(offline=True, memory_bytes=44 << 20, isolation="process")
    with mpool.Pool(config) as pool:
        for name in NAMES:
            pool.register(name, str(folder))
        pool.register("bert", str(cached(tmp_path_factory, "bert")))
        threads = [threading.Thread(target=work, args=(pool, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not refused


# ---- requests that wait for memory of other requests ----------------------------------------------------------------

async def _text(stream: Any) -> Any:
    return "".join([chunk.text async for chunk in stream])


async def _iterated(vectors: Any) -> Any:
    return [row.tolist() async for row in vectors]


#: A request of a model that stays loaded. It needs more memory than `full` leaves.
PINNED: dict[str, Any] = LARGE | {"model": "pinned", "prompt": "Hello", "max_tokens": MOST}
#: Requests of each capability on an event loop, and how to read their results.
ASYNC_REQUESTS: dict[str, Callable[[mpool.Pool], Any]] = {
    "generate": lambda pool: aio.generate("Hello", "one", max_tokens=4, seed=1, pool=pool),
    "pinned": lambda pool: aio.generate(**PINNED, stop=list("aeiou "), seed=1, pool=pool),
    "chat": lambda pool: aio.chat("Hello", "two", max_tokens=4, seed=1, logprobs=2, n=2, pool=pool),
    "stream": lambda pool: _text(aio.generate("Hello", "one", max_tokens=4, seed=1, stream=True, pool=pool)),
    "embed": lambda pool: aio.embed("A cat sat.", "bert", pool=pool),
    "embed many": lambda pool: aio.embed(["A cat sat.", "B"] * 8, "bert", pool=pool),
    "embed_iter": lambda pool: _iterated(aio.embed_iter(["A cat sat."] * 3, "bert", pool=pool)),
    "vision": lambda pool: aio.vision(PHOTO, "what", "digits-llava", max_tokens=4, seed=1, pool=pool),
    "embed_image": lambda pool: aio.embed_image([PHOTO] * 2, "digits-clip", pool=pool),
    "generate_image": lambda pool: aio.generate_image("seven", "digits-sd3", num_inference_steps=1, seed=1, pool=pool)}


def _plain(result: Any) -> Any:
    """The part of a result that two equal requests have in common."""
    if isinstance(result, mpool.Completion):
        return [choice.token_ids for choice in result.choices]
    if hasattr(result, "images"):
        result = [np.asarray(image) for image in result.images]
    return np.asarray(result).tolist()


@pytest.fixture(params=["thread", "process"])
def filled(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A pool with models of each capability, whose memory one request can fill."""
    config = mpool.PoolConfig(offline=True, memory_bytes=128 << 20, isolation=request.param, max_workers_per_model=1,
                              request_timeout=200)
    with mpool.Pool(config) as pool:
        for name in ("one", "two", "filler", "pinned"):
            pool.register(name, str(folder))
        pool.register("bert", str(cached(tmp_path_factory, "bert")))
        yield pool


def test_coroutines_wait_for_memory_that_requests_hold(filled: mpool.Pool) -> None:
    """The loop runs on meanwhile, and one whose memory cannot become free fails at once."""
    async def run() -> None:
        filled.load("pinned", pin=True)
        expected = [_plain(await make(filled)) for make in ASYNC_REQUESTS.values()]
        with full(filled, "filler"):
            with pytest.raises(mpool.MemoryExhausted):
                await aio.generate("a", "filler", n=128, max_tokens=16000, logprobs=20, pool=filled)
            tasks = [asyncio.ensure_future(make(filled)) for make in ASYNC_REQUESTS.values()]
            for _ in range(30):
                await asyncio.sleep(0.01)
                assert not [task for task in tasks if task.done()]
            assert sum(line.length for line in watching.watcher()._lines.values()) == 1
            with pytest.raises(mpool.Timeout):
                await aio.generate("Hello", "one", max_tokens=4, timeout=0.1, pool=filled)
            for refused in (lambda: filled.submit("text_to_text", **PINNED),
                            lambda: filled.generate(**PINNED, fail_fast=True)):
                with pytest.raises(mpool.Overloaded):
                    refused()
            cancelled = asyncio.ensure_future(aio.generate("Hello", "one", pool=filled))
            await asyncio.sleep(0.05)
            cancelled.cancel()
            assert isinstance((await asyncio.gather(cancelled, return_exceptions=True))[0], asyncio.CancelledError)
        assert [_plain(result) for result in await asyncio.gather(*tasks)] == expected
        assert not watching.watcher()._lines

    asyncio.run(run())


def test_a_load_waits_for_the_requests_of_another_model(folder: Path) -> None:
    """Their own bytes become free with them, in addition to those of the model."""
    with short_pool(folder) as pool:
        with pool.generate("a", "two", stream=True, max_tokens=15000, ignore_eos=True) as stream:
            next(stream)
            with pytest.raises(mpool.Timeout, match="continues"):
                pool.load("one", timeout=0.1)
        until(lambda: loaded(pool) == ["one"], 20, lambda: pool.registry.entries())


def test_a_refused_request_loads_nothing(folder: Path, tmp_path: Path,
                                         tmp_path_factory: pytest.TempPathFactory) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    for file in folder.iterdir():
        if file.name == "tokenizer_config.json":
            (plain / file.name).write_text("{}")
        elif "template" not in file.name:
            (plain / file.name).symlink_to(file)
    (tmp_path / "bert").symlink_to(cached(tmp_path_factory, "bert"))
    bert = str(tmp_path / "bert")
    say = [{"role": "user", "content": "a"}]
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        pool.register("two", str(folder))
        for call in (lambda: pool.chat(say, str(plain)),
                     lambda: pool.generate("a", "two", temperature=-1.0),
                     lambda: pool.generate([1] * 20000, "two"),
                     lambda: pool.generate("a", "two", adapter="none"),
                     lambda: pool.generate("a", "two", response_format={"type": "regex", "pattern": "("}),
                     lambda: pool.chat([{"role": "nobody"}], "two"),
                     lambda: pool.embed("a", bert, dimensions=10000),
                     lambda: pool.embed("a", bert, prompt_name="none"),
                     lambda: pool.rerank("a", ["b"], bert)):
            with pytest.raises(mpool.MpoolError):
                call()
            assert loaded(pool) == []


def _asked_and_peak(ref: str, run: Callable[[mpool.Pool, str], object], isolation: Any) -> tuple[int, int]:
    """Return the bytes that the load of a model and its worker asks for, and the peak of the bytes in use."""
    config = mpool.PoolConfig(memory_bytes=2 << 30, isolation=isolation, max_workers_per_model=1)
    with mpool.Pool(config) as pool:
        peak, over = [0], threading.Event()

        def watch() -> None:
            while not over.is_set():
                peak[0] = max(peak[0], pool.registry.stats()["memory_used"])
                time.sleep(0.001)

        thread = threading.Thread(target=watch)
        thread.start()
        for _ in range(20):  # on a busy machine the thread may not run while the memory is in use
            run(pool, ref)
            peak[0] = max(peak[0], pool.registry.stats()["memory_used"])
            (row,) = (row for row in pool.registry.entries() if row["worker"])
            asked = row["predicted_bytes"] + row["worker"][0]["predicted_bytes"]
            if asked <= 1.15 * peak[0]:
                break
        over.set()
        thread.join()
        return asked, peak[0]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_load_asks_for_what_it_and_a_first_request_take(isolation: str) -> None:
    """The prediction is at least the peak, and at most 15 % above it."""
    from defaultmodels import MINILM, SMOLLM2, use_default_models

    use_default_models()
    default = mpool.api.functions.default_pool()
    for key, run in ((MINILM, lambda pool, ref: pool.embed("A sentence.", ref)),
                     (SMOLLM2, lambda pool, ref: pool.generate("Hello", ref, max_tokens=8))):
        ref = default._names.by_key[key].ref if key in default._names.by_key else key
        asked, peak = _asked_and_peak(ref, run, isolation)
        assert peak <= asked <= 1.15 * peak, (key, asked, peak)


#: Sizes of an image network with the proportions of a published one.
SIZES = {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "image_size": 224, "patch_size": 16}


def _with_images_of_224(folder: Path, steps: dict[str, Any]) -> str:
    (folder / "preprocessor_config.json").write_text(json.dumps({
        **steps, "size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}}))
    return str(folder)


def _clip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    imagemodels.save(imagemodels.make("clip", 12, **SIZES), "clip", folder)
    return _with_images_of_224(folder, imagemodels.PROCESSORS["clip"])


def _llava(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    import visionmodels

    text = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
    monkeypatch.setattr(visionmodels, "_VISION", {**visionmodels._VISION, **SIZES})
    monkeypatch.setattr(visionmodels, "_TEXT", {**visionmodels._TEXT, **text})
    visionmodels.save(visionmodels.make("llava", 8, 12), "llava", folder)
    return _with_images_of_224(folder, visionmodels.PROCESSORS["llava"])


#: Image models, and their first requests.
IMAGE_MODELS: dict[str, tuple[Callable[[Path, pytest.MonkeyPatch], str], Callable[[mpool.Pool, str], object]]] = {
    "clip": (_clip, lambda pool, ref: pool.embed_image(PHOTO, ref)),
    "llava": (_llava, lambda pool, ref: pool.vision(PHOTO, "w5 w6 w7", ref, max_tokens=8, ignore_eos=True)),
    "sd3": (lambda folder, patch: "digits-sd3",
            lambda pool, ref: pool.generate_image("seven", ref, num_inference_steps=1))}


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("kind", IMAGE_MODELS)
def test_a_load_of_an_image_model_asks_for_what_it_and_a_first_image_take(
        kind: str, isolation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, run = IMAGE_MODELS[kind]
    asked, peak = _asked_and_peak(write(tmp_path, monkeypatch), run, isolation)
    assert peak <= asked <= 1.15 * peak, (asked, peak)
