"""Log records are counted, not timed: one for each load, eviction and shutdown and for each worker that starts, is
ready or ends; none for a call or a token."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import mpool
from mpool.runtime import logs

#: Start of a record -> records of this kind. Every other record fails the test.
KINDS = ("Loaded", "Unloaded", "Worker", "Graceful shutdown complete")
BEGIN = """
import logging, re, sys
logging.basicConfig(level=sys.argv[1], stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
import mpool
bert, llama, qwen2, *numbers = sys.argv[2:]
alone = dict(threads=1, max_workers_per_model=1, maintenance_interval=3600.0)
"""
CALLS = BEGIN + """
calls, tokens = map(int, numbers)
with mpool.Pool(mpool.PoolConfig(**alone)) as pool:
    for number in range(calls):
        pool.embed(f"{number}", bert)
    pool.embed([f"{number}" for number in range(20 * calls)], bert)
    pool.unload(bert)
    pool.embed("again", bert)
    pool.generate("a", llama, max_tokens=tokens, ignore_eos=True)
    for _ in pool.generate("a", llama, max_tokens=tokens, ignore_eos=True, stream=True):
        pass
    assert pool.metrics()["total_requests"] == calls + 4
"""
WORKERS = BEGIN + """
with mpool.Pool(mpool.PoolConfig(threads=2)) as pool:
    pool.load(bert)
    pool.embed("a", bert)
    pool.unload(bert)
"""
@pytest.fixture
def models(bert: Path, llama: Path, qwen2: Path) -> list[str]:
    return [str(bert), str(llama), str(qwen2)]


def records(program: str, level: str, *arguments: str) -> list[tuple[str, str]]:
    """Return level and text of each record of the core in a new process, which delivers all of them before it exits."""
    run = subprocess.run([sys.executable, "-c", program, level, *arguments], capture_output=True, text=True,
                         timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = [row.split(" ", 2) for row in run.stdout.splitlines()]
    return [(row[1], row[2]) for row in rows if row[0] == "mpool.pool"]


def counted(found: list[tuple[str, str]], level: str) -> Counter[str]:
    """Return the number of records of this level by kind."""
    texts = [text for one, text in found if one == level]
    return Counter(next((kind for kind in KINDS if text.startswith(kind)), text) for text in texts)


@pytest.mark.builds
@pytest.mark.parametrize("calls, tokens", [(1, 1), (40, 300)])
def test_records_count_loads_and_not_calls(models: list[str], calls: int, tokens: int) -> None:
    """However much is computed between loads and unloads, the records at INFO are the same. At DEBUG, a request has
    two: its worker starts and ends its work."""
    found = records(CALLS, "DEBUG", *models, str(calls), str(tokens))
    # Three loads, each with one worker: loading, ready, and at its end evicting.
    assert counted(found, "INFO") == {"Loaded": 3, "Unloaded": 3, "Worker": 3 * 3, "Graceful shutdown complete": 1}
    steps = counted(found, "DEBUG")
    assert set(steps) == {"Worker"} and steps["Worker"] <= 2 * (calls + 4)


def test_a_load_an_eviction_and_a_shutdown_have_one_record_each(models: list[str]) -> None:
    """So has each step in the life of a worker, whatever the number of workers of a model; its requests have none."""
    found = records(WORKERS, "INFO", *models)
    texts = [text for _, text in found]
    assert [text.split(" ")[0] for text in texts if not text.startswith("Worker ")] == [
        "Loaded", "Unloaded", "Graceful"], found
    steps: dict[str, list[str]] = {}
    for match in (re.fullmatch(r"Worker (\d+) for .*: \w+ -> (\w+)", text) for text in texts):
        if match is not None:
            steps.setdefault(match[1], []).append(match[2])
    assert steps and all(one == ["loading", "ready", "evicting"] for one in steps.values()), found


def test_records_arrive_while_the_pool_is_open(bert: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A thread delivers them: no call of the pool, and no end of it, is needed."""
    with caplog.at_level("INFO", "mpool.pool"), mpool.Pool() as pool:
        pool.load(bert)
        logs.wait_for_events(60.0)
        assert any(record.getMessage().startswith("Loaded") for record in caplog.records)
