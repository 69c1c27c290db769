"""Log records are counted, not timed: one for each load, eviction and shutdown, none for a call or a token."""

from __future__ import annotations

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import mpool

#: Start of a record -> records of this kind. Every other record fails the test.
KINDS = ("Loaded", "Unloaded", "Spawned worker", "Evicted worker", "Worker", "Graceful shutdown complete")
ALONE: dict[str, Any] = {"threads": 1, "max_workers_per_model": 1, "maintenance_interval": 3600.0}


def counted(caplog: pytest.LogCaptureFixture, level: int) -> Counter[str]:
    """Return the number of records of this level by kind."""
    found = [record.getMessage() for record in caplog.records
             if record.name.startswith("mpool") and record.levelno == level]
    return Counter(next((kind for kind in KINDS if text.startswith(kind)), text) for text in found)


@pytest.mark.parametrize("tokens, calls", [(1, 1), (300, 40)])
def test_records_count_loads_and_not_calls(bert: Path, llama: Path, caplog: pytest.LogCaptureFixture, tokens: int,
                                           calls: int) -> None:
    """However much is computed between loads and unloads, the records at INFO are the same. At DEBUG, a request has
    two: its worker starts and ends its work."""
    with caplog.at_level(logging.DEBUG, "mpool"):
        with mpool.Pool(mpool.PoolConfig(**ALONE)) as pool:
            for number in range(calls):
                pool.embed(f"{number}", bert)
            pool.embed([f"{number}" for number in range(20 * calls)], bert)
            pool.unload(bert)
            pool.embed("again", bert)
            pool.generate("a", llama, max_tokens=tokens, ignore_eos=True)
            for _ in pool.generate("a", llama, max_tokens=tokens, ignore_eos=True, stream=True):
                pass
            requests = pool.metrics()["total_requests"]
    # Three loads, each with one worker: spawning, loading, ready, and at its end evicting.
    assert counted(caplog, logging.INFO) == {"Loaded": 3, "Unloaded": 3, "Spawned worker": 3, "Evicted worker": 3,
                                             "Worker": 9, "Graceful shutdown complete": 1}
    steps = counted(caplog, logging.DEBUG)
    assert requests == calls + 4 and set(steps) == {"Worker"} and steps["Worker"] <= 2 * requests


def test_each_eviction_has_one_record(llama: Path, qwen2: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A model that fits only without the other one evicts it, three times: one record each."""
    with mpool.Pool(mpool.PoolConfig(**ALONE, memory_bytes=1)) as pool:
        with pytest.raises(mpool.MemoryExhausted, match=r"needs [\d.]+ MB") as caught:
            pool.load(qwen2)
    needed = re.search(r"needs ([\d.]+) MB", str(caught.value))
    assert needed is not None
    limit = int(float(needed[1]) * 1e6) + 50_000  # the message is rounded; the weights of the other model have 360,000
    with caplog.at_level(logging.INFO, "mpool"):
        with mpool.Pool(mpool.PoolConfig(**ALONE, memory_bytes=limit)) as pool:
            for _ in range(3):
                pool.generate("a", llama, max_tokens=1)
                pool.load(qwen2)
                pool.unload(qwen2)
            assert pool.metrics()["loads"] == 6
    texts = [record.getMessage() for record in caplog.records if record.name.startswith("mpool")]
    assert [text for text in texts if "to make room" in text] == 3 * [f"{llama}: evicted to make room for other models"]
    assert sum(text.startswith("Loaded") for text in texts) == sum(text.startswith("Unloaded") for text in texts) == 6
