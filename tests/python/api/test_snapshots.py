"""Snapshots of the states of recurrent layers: what is reused is counted, what is kept is shown, and 0 % keeps none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.cli.models import facts_of_model
from mpool.models import describing
from mpool.models.catalogue import estimate, state_bytes
from waiting import until

BLOCK = 64
#: A convolution of 3 positions over 64 channels in float32.
STATE = (3 - 1) * 64 * 4
#: Draft rows of a sequence.
LOG = 16 * 64 * 4
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}


def turns(pool: mpool.Pool, model: Path, **options: Any) -> list[mpool.Completion]:
    """Return the completions of a chat of two turns."""
    chat = [{"role": "system", "content": "A long system prompt. " * 40}, {"role": "user", "content": "What is this?"}]
    first = pool.chat(chat, model, **OPTIONS, **options)
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And that?"}]
    return [first, pool.chat(chat, model, **OPTIONS, **options)]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_snapshots_are_counted_and_shown(lfm2: Path, isolation: Any) -> None:
    config = mpool.PoolConfig(threads=1, max_workers_per_model=1, isolation=isolation)
    with mpool.Pool(config) as pool:
        before = pool.metrics()["bytes_by_kind"]["kv"]  # other pools of the process
        stream = pool.generate("text", lfm2, max_tokens=15_000, ignore_eos=True, stream=True)
        next(stream)
        during = pool.ps()[0]
        stream.close()
        until(lambda: pool.ps()[0].running == 0)
        assert during.facts["sequence_state_bytes"] == STATE
        assert during.state_bytes in (STATE, STATE + LOG) and during.snapshots == 0

        first, second = turns(pool, lfm2)
        assert first.usage.cached_tokens == 0
        # the last block border before the last token of the first prompt
        assert second.usage.cached_tokens == (first.usage.prompt_tokens - 1) // BLOCK * BLOCK > 0
        row, counted = pool.ps()[0], pool.metrics()["models"][str(lfm2)]
        assert row.state_bytes == 0 and row.snapshot_bytes == row.snapshots * STATE > 0
        assert row.prefix_tokens == second.usage.cached_tokens and row.engine_bytes > row.snapshot_bytes
        for name in ("state_bytes", "snapshot_bytes", "snapshots", "prefix_tokens"):
            assert counted[name] == getattr(row, name)
        shown = dict(re.findall(r'^mpool_model_(\w+)\{.*\} (\S+)$', pool.metrics("prometheus"), re.MULTILINE))
        assert [float(shown[name]) for name in ("snapshot_bytes", "snapshots", "prefix_tokens_total")] \
            == [row.snapshot_bytes, row.snapshots, row.prefix_tokens]
        pool.unload(lfm2)
        row = pool.ps()[0]
        assert (row.snapshot_bytes, row.snapshots) == (0, 0)
        assert pool.metrics()["bytes_by_kind"]["kv"] <= before


def test_without_snapshots_the_answers_are_the_same(lfm2: Path) -> None:
    program = "import sys, mpool, test_snapshots\nwith mpool.Pool() as pool:\n" \
        "    one, two = test_snapshots.turns(pool, sys.argv[1])\n" \
        "    print(pool.ps()[0].snapshots, two.usage.cached_tokens, [one.token_ids, two.token_ids])"
    run = subprocess.run([sys.executable, "-c", program, str(lfm2)], capture_output=True, text=True, timeout=120,
                         env={**os.environ, "MPOOL_SNAPSHOT_PERCENT": "0", "PYTHONPATH": os.pathsep.join(sys.path)})
    with mpool.Pool() as pool:
        ids = [one.token_ids for one in turns(pool, lfm2)]
    assert run.stdout.strip() == f"0 0 {ids}", run.stderr[-2000:]


def test_the_estimate_counts_a_state(lfm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = describing.describe(lfm2)
    assert state_bytes(described) == STATE == facts_of_model(described)["sequence_state_bytes"]
    assert facts_of_model(described)["snapshots"].startswith("up to 10 % of the memory limit")
    assert facts_of_model(described)["est_memory_allocation_mb"] == estimate(described)  # no row states one
    plain = estimate(described)
    monkeypatch.setattr("mpool.models.catalogue.state_bytes", lambda _: 50_000_000)
    assert estimate(described) == plain + 50
