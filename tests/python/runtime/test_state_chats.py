"""Models whose layers have states: their prefixes are reused without a different byte."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpool

import statechats
import tinymodels
import toolmodels

#: Seeded checkpoints with a state.
MODELS = ["lfm2"]


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return statechats.write_template(getattr(tinymodels, request.param)(tmp_path / request.param), toolmodels.HERMES)


def test_sixty_turns(folder: Path) -> None:
    """A chat of sixty turns with tools, edited in its middle five times, has the bytes of a run without any cache."""
    with mpool.Pool(mpool.PoolConfig(offline=True)) as pool:
        played = list(statechats.play(pool, str(folder), 3, 60, (11, 22, 33, 44, 55)))
    turns = [turn for turn, _ in played]
    assert [statechats.result(completion) for _, completion in played] == statechats.without_cache(folder, turns)
    prompts, cached = (sum(getattr(completion.usage, name) for _, completion in played)
                       for name in ("prompt_tokens", "cached_tokens"))
    assert cached > 0.8 * prompts
