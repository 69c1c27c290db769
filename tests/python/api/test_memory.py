"""Memory of real models: an unloaded model leaves the process, and a second worker costs almost no memory."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from realmodels import real_path

PROGRAM = """
import gc, json, sys, time
import mpool

embedder, generator, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024

with mpool.Pool(mpool.PoolConfig(max_workers_per_model=workers)) as pool:
    def use():
        pool.generate("Once upon a time", generator, max_tokens=16)
        pool.embed(["A sentence to embed."] * 8 + ["Another one."], embedder)
        until = time.monotonic() + 20
        while sum(row["workers"] for row in pool.registry.entries()) < 2 * workers and time.monotonic() < until:
            time.sleep(0.01)
    def unload():
        pool.unload(generator), pool.unload(embedder)
        gc.collect()
    # The tokenizer would otherwise be completed after the second request.
    use(), pool.get(generator).tokenizer.finish()
    unload()  # libraries and tokenizers stay loaded from here on
    empty = resident()
    use()
    loaded, stats = resident(), pool.registry.stats()
    unload()
    after, rest = resident(), pool.registry.stats()
print(json.dumps({"empty": empty, "loaded": loaded, "after": after, "used": stats["memory_used"],
                  "tags": stats["bytes_by_tag"], "rest": rest["memory_used"], "rest_tags": rest["bytes_by_tag"],
                  "models": stats["loads"], "workers": stats["workers_spawned"]}))
"""


def measure(workers: int) -> dict[str, Any]:
    models = [str(real_path("minilm")), str(real_path("smollm2"))]
    run = subprocess.run([sys.executable, "-c", PROGRAM, *models, str(workers)], capture_output=True, text=True,
                         timeout=180)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return measure(1)


def test_unloaded_models_leave_no_memory_in_the_process(one: dict[str, Any]) -> None:
    grown = one["loaded"] - one["empty"]
    assert grown > 60e6, "two models were loaded"
    assert one["after"] - one["empty"] < 0.1 * grown
    assert one["rest"] == 0 and one["rest_tags"]["weights"] == one["rest_tags"]["kv"] == 0


def test_a_second_worker_shares_the_model(one: dict[str, Any]) -> None:
    two = measure(2)
    assert (one["workers"], two["workers"]) == (4, 8) and one["models"] == two["models"] == 4
    assert two["used"] <= 1.05 * one["used"]
    assert two["tags"]["weights"] == one["tags"]["weights"]
    assert two["loaded"] - two["empty"] < 1.05 * (one["loaded"] - one["empty"]) + 4e6


HEAP = """
import ctypes, sys, time
import mpool

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

def fill():
    # free blocks of the heap, below one in use
    blocks = [libc.malloc(100_000) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 100_000)
    libc.malloc(100_000)
    for block in blocks:
        libc.free(block)

def falls(before):
    until = time.monotonic() + 20
    while resident() > before + 60_000_000 and time.monotonic() < until:
        time.sleep(0.05)
    return resident() <= before + 60_000_000

with mpool.Pool(mpool.PoolConfig(maintenance_interval=0.5)) as pool:
    pool.embed("a", sys.argv[1])
    before = resident()
    for end in (lambda: pool.embed(["word " * 40 + str(at) for at in range(6000)], sys.argv[1]),
                lambda: pool.unload(sys.argv[1])):
        fill()
        assert resident() > before + 150_000_000
        end()
        assert falls(before), (resident(), before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries have no call for it")
def test_large_requests_and_unloaded_models_leave_no_free_blocks_in_the_heap(bert: Path) -> None:
    run = subprocess.run([sys.executable, "-c", HEAP, str(bert)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
