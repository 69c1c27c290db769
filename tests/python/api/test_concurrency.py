"""Concurrent requests from threads and asyncio: each result has the same bytes as that of a single request."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import mpool
import tinymodels
from realmodels import find_real, real_path
from waiting import together

THREADS, TASKS = 8, 100

Call = tuple[str, Any, dict[str, Any]]


@pytest.fixture(params=["tiny", "real"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    if request.param == "real":
        return real_path("minilm"), real_path("smollm2")
    return tinymodels.cached(tmp_path_factory, "bert"), tinymodels.cached(tmp_path_factory, "llama")


def calls(count: int, seed: int, short: bool) -> list[Call]:
    """Return random requests: embeddings of one or many texts, and completions, some of them sampled."""
    rng = random.Random(seed)
    words = "the quick brown fox jumps over a lazy dog and barks twice at its own shadow".split()
    made: list[Call] = []
    for _ in range(count):
        text = " ".join(rng.choices(words, k=rng.randint(1, 30)))
        kind = rng.choice(["embed", "embed", "batch", "generate", "stream"])
        if kind == "embed":
            made.append((kind, text, {}))
        elif kind == "batch":
            made.append((kind, [f"{text} {number}" for number in range(rng.randint(1, 20))], {}))
        else:
            made.append((kind, text, {"max_tokens": rng.randint(1, 6 if short else 25), "seed": rng.randint(0, 99),
                                      "temperature": rng.choice([0.0, 1.0])}))
    return made


def result_of(pool: mpool.Pool, models: tuple[Path, Path], call: Call) -> bytes:
    kind, value, options = call
    if kind in ("embed", "batch"):
        return pool.embed(value, models[0]).tobytes()
    if kind == "generate":
        return repr(pool.generate(value, models[1], **options).token_ids).encode()
    return "".join(map(str, pool.generate(value, models[1], stream=True, **options))).encode()


async def result_of_async(pool: mpool.Pool, models: tuple[Path, Path], call: Call) -> bytes:
    kind, value, options = call
    if kind in ("embed", "batch"):
        return (await mpool.aio.embed(value, models[0], pool=pool)).tobytes()
    if kind == "generate":
        return repr((await mpool.aio.generate(value, models[1], pool=pool, **options)).token_ids).encode()
    stream = mpool.aio.generate(value, models[1], pool=pool, stream=True, **options)
    return "".join([str(chunk) async for chunk in stream]).encode()


def test_results_of_threads_and_tasks_are_never_mixed_up(models: tuple[Path, Path]) -> None:
    real = find_real("minilm") is not None and models[0] == find_real("minilm")
    per_thread, distinct = (3, 40) if real else (12, 120)
    mix = calls(distinct, 1, real)
    with mpool.Pool() as pool:
        alone = [result_of(pool, models, call) for call in mix]
        wrong: list[int] = []

        def thread(number: int) -> None:
            rng = random.Random(number)
            for at in rng.sample(range(distinct), per_thread):
                if result_of(pool, models, mix[at]) != alone[at]:
                    wrong.append(at)

        async def task(at: int) -> None:
            if await result_of_async(pool, models, mix[at]) != alone[at]:
                wrong.append(at)

        async def tasks() -> None:
            rng = random.Random(99)
            await asyncio.gather(*(task(rng.randrange(distinct)) for _ in range(TASKS)))

        together([*(lambda number=number: thread(number) for number in range(THREADS)), lambda: asyncio.run(tasks())],
                 240)
        assert wrong == []
        assert not any(row.running or row.queued or row.errors for row in pool.ps())


def test_concurrent_first_requests_load_once(models: tuple[Path, Path]) -> None:
    """No model is loaded when the requests arrive. The files are read once and each model is loaded once."""
    with mpool.Pool() as pool:
        described: list[str] = []
        from mpool.runtime import model_files
        original = model_files.describe

        def counted(*args: Any, **options: Any) -> Any:
            described.append(str(args[0]))
            return original(*args, **options)

        model_files.describe = counted
        try:
            found: list[bytes] = []
            vector: Call = ("embed", "a cat", {})
            text: Call = ("generate", "a cat", {"max_tokens": 3, "seed": 1})
            together([lambda call=call: found.append(result_of(pool, models, call)) for call in [vector, text] * 12],
                     240)
        finally:
            model_files.describe = original
        assert len(found) == 24 and len(set(found)) == 2
        assert sorted(described) == sorted(map(str, models))
        assert len(pool.ps()) == 2


def test_cancellations_do_not_affect_other_requests(models: tuple[Path, Path]) -> None:
    mix = calls(20, 3, True)
    with mpool.Pool() as pool:
        alone = [result_of(pool, models, call) for call in mix]
        over = threading.Event()

        def leaver() -> None:
            while not over.is_set():
                stream = pool.generate("a cat", models[1], max_tokens=16000, ignore_eos=True, stream=True)
                next(stream)
                del stream
                pool.submit("text_embedding", inputs=["some text"] * 50, model=models[0]).cancel()
                time.sleep(0.002)

        def worker() -> None:
            try:
                assert [result_of(pool, models, call) for call in mix] == alone
            finally:
                over.set()

        together([leaver, leaver, worker], 240)


def test_unloading_under_load(models: tuple[Path, Path]) -> None:
    with mpool.Pool() as pool:
        want = result_of(pool, models, ("batch", ["a cat", "a dog"], {}))
        over = threading.Event()

        def unloader() -> None:
            for _ in range(10):
                pool.unload(models[0])
                time.sleep(0.005)
            over.set()

        def worker() -> None:
            while not over.is_set():
                assert result_of(pool, models, ("batch", ["a cat", "a dog"], {})) == want

        together([unloader, worker, worker], 240)
