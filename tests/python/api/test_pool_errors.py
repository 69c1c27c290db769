"""Each error in the pool's section of status.def is raised by a real fault and contains the model's key.

SpawnFailed needs a system that refuses threads, and SendError a queue that closes while a caller waits: see C_TESTS.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import _core
from pooloptions import Models, held, load_once, pool_of, raised, texts
from pooloptions import wide as wide
from poolstates import LONG, TEXT
from poolstates import broken as broken

TESTS = Path(__file__).resolve().parents[2]


def no_workers(m: Models) -> mpool.MpoolError:
    """Workers stall in every step: after five dead workers within the window, no more are started."""
    with pool_of(chaos="stall=1", stall_timeout=0.05, breaker_threshold=0) as pool:
        for number in range(12):
            try:
                pool.embed(f"number {number}", m.bert)
            except mpool.RecvError:
                pass
            except mpool.NoWorkers as error:
                return error
    raise AssertionError("NoWorkers was not raised")


def timeout(m: Models) -> mpool.MpoolError:
    with pool_of() as pool, pytest.raises(mpool.Timeout) as caught:
        pool.generate("a", m.llama, max_tokens=1900, n=64, ignore_eos=True, timeout=0.2)
    return caught.value


def recv_error(m: Models) -> mpool.MpoolError:
    with pool_of(chaos="stall=1", stall_timeout=0.05) as pool, pytest.raises(mpool.RecvError) as caught:
        pool.embed("a", m.bert)
    return caught.value


def model_error(m: Models) -> mpool.MpoolError:
    """An equal request has caused the loss of two workers."""
    with pool_of(chaos="stall=1", stall_timeout=0.05, breaker_threshold=0) as pool:
        for _ in range(2):
            with pytest.raises(mpool.RecvError):
                pool.embed("the same", m.bert)
        with pytest.raises(mpool.ModelError) as caught:
            pool.embed("the same", m.bert)
    return caught.value


def shutting_down(m: Models) -> mpool.MpoolError:
    """A running request that is cut off, and a request after the shutdown."""
    pool = pool_of(shutdown_grace=0.0)
    job = held(pool, m.llama)
    pool.close()
    with pytest.raises(mpool.ShuttingDown):
        pool.generate("a", m.llama, **TEXT)
    with pytest.raises(mpool.ShuttingDown) as caught:
        job.result()
    return caught.value


def memory_exhausted(m: Models) -> mpool.MpoolError:
    with pool_of(memory_bytes=1_000_000) as pool, pytest.raises(mpool.MemoryExhausted) as caught:
        pool.embed("a", m.bert)
    assert re.search(r"needs \d+\.\d MB, but the memory limit is 1\.0 MB", str(caught.value))
    return caught.value


def spawn_timeout(m: Models) -> mpool.MpoolError:
    error = raised(mpool.SpawnTimeout, 10, lambda: load_once(m.wide, load_timeout=0.01))
    assert "stage: " in str(error)
    return error


def circuit_open(m: Models) -> mpool.MpoolError:
    with pool_of(breaker_threshold=1) as pool:
        with pytest.raises(mpool.NumericError):
            pool.embed(m.broken[1], m.broken[0])
        with pytest.raises(mpool.CircuitOpen) as caught:
            pool.embed("a", m.broken[0])
    assert re.search(r"\d+(\.\d+)? s", str(caught.value))  # the remaining time
    return caught.value


def overloaded(m: Models) -> mpool.MpoolError:
    with pool_of(policy="sequential", prompt_queue_capacity=1) as pool:
        jobs = [held(pool, m.llama), pool.submit("text_to_text", model=m.llama, **LONG)]
        with pytest.raises(mpool.Overloaded) as caught:
            pool.generate("a", m.llama, fail_fast=True, **TEXT)
        assert pool.metrics()["queue_full_rejections"] == 1
        for job in jobs:
            job.cancel()
    return caught.value


def cancelled(m: Models) -> mpool.MpoolError:
    with pool_of() as pool:
        job = pool.submit("text_embedding", inputs=texts("gone"), model=pool.load(m.wide))
        job.cancel()
        with pytest.raises(mpool.Cancelled) as caught:
            job.result(60)
    return caught.value


ROWS: dict[str, Callable[[Models], mpool.MpoolError]] = {
    "NoWorkers": no_workers, "Timeout": timeout, "RecvError": recv_error, "ModelError": model_error,
    "ShuttingDown": shutting_down, "MemoryExhausted": memory_exhausted, "SpawnTimeout": spawn_timeout,
    "CircuitOpen": circuit_open, "Overloaded": overloaded, "Cancelled": cancelled}
#: Error that Python cannot cause -> the C test that does: file, status.
C_TESTS: dict[str, tuple[str, str]] = {
    "SpawnFailed": ("test_faults_seam.c", "MP_SPAWN_FAILED"),
    "SendError": ("test_registry_workers.c", "MP_SEND")}


def test_every_error_of_the_pool_has_a_row() -> None:
    pool_errors = {row[3] for row in _core.status_table() if 50 <= row[0] < 80}
    assert set(ROWS) | set(C_TESTS) == pool_errors
    for name in pool_errors:
        assert issubclass(getattr(mpool, name), mpool.PoolError)
    if not (TESTS / "c").is_dir():
        return
    for test in C_TESTS.values():
        assert test[1] in (TESTS / "c" / test[0]).read_text()


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ROWS)
def test_an_error_is_raised_with_the_key(name: str, bert: Path, llama: Path, wide: Path, broken: tuple[Path, str],
                                         caplog: pytest.LogCaptureFixture) -> None:
    error: Any = ROWS[name](Models(bert, llama, wide, broken, caplog))
    assert type(error) is getattr(mpool, name) and error.key
    assert error.key.split(" (")[0] in {str(path) for path in (bert, llama, wide, broken[0])}
    assert error.key in str(error) and error.code == getattr(mpool, name).code


def test_file_errors_name_the_model(bert: Path, tmp_path: Path) -> None:
    """Loading fails in the core because the file changed after it was described."""
    folder = tmp_path / "gone"
    shutil.copytree(bert, folder)
    with pool_of() as pool:
        model = pool.get(folder)
        assert model.description.capability == "text_embedding"
        (folder / "model.safetensors").write_bytes(b"")
        with pytest.raises(mpool.MpoolError) as caught:
            model.embed("a")
        assert str(folder) in str(caught.value)
