"""A worker dies under a call: before the first token it is tried once more, after it the caller gets a typed error."""

from __future__ import annotations

import collections
import sys
from pathlib import Path
from typing import Any

import pytest

import mpool

TOKENS = 4
CALL: dict[str, Any] = dict(temperature=0, max_tokens=TOKENS, ignore_eos=True)
HERE = pytest.param("thread", id="thread")
THERE = pytest.param("process", id="process",
                     marks=pytest.mark.skipif(sys.platform != "linux", reason="process isolation is for Linux"))


def under_chaos(llama: Path, seed: int, isolation: str, stream: bool) -> tuple[str, str, dict[str, Any]]:
    """What was given of one call, how it ended, and the pool's metrics."""
    given, end = "", "ok"
    # a key of its own, since chaos is drawn from it: no name of a folder changes what comes
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1, isolation=isolation, breaker_threshold=0,
                                     chaos=f"seed={seed},die=0.25")) as pool:
        model = pool.register("second-tries", llama)
        try:
            if stream:
                for chunk in model.generate("a b", stream=True, **CALL):
                    given += chunk.text
            else:
                given = model.generate("a b", **CALL).text
        except mpool.MpoolError as error:
            end = type(error).__name__
        return given, end, pool.metrics()


@pytest.mark.parametrize("isolation, seeds", [(*HERE.values, 80), pytest.param(*THERE.values, 30, marks=THERE.marks)])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tried_once_before_the_first_token_only(llama: Path, isolation: str, seeds: int, stream: bool) -> None:
    with mpool.Pool() as calm:
        expected = calm.generate("a b", llama, **CALL).text
    ways: collections.Counter[tuple[str, int]] = collections.Counter()
    for seed in range(seeds):
        given, end, metrics = under_chaos(llama, seed, isolation, stream)
        deaths, retries = metrics["chaos_faults"], metrics["retries"]
        ways[end, retries] += 1
        assert retries <= 1, f"seed {seed}: tried more than once"
        if end == "ok":
            assert given == expected and deaths == retries, f"seed {seed}"
        else:
            assert end == "InternalError" and deaths == retries + 1, f"seed {seed}: {end}"
            assert expected.startswith(given), f"seed {seed}: {given!r} is no part of the answer"
    # each way was met: nothing happened; a second try that went well; one that did not; none, for tokens had come
    assert set(ways) == {("ok", 0), ("ok", 1), ("InternalError", 0), ("InternalError", 1)}, ways


def test_what_was_given_stays_given(llama: Path) -> None:
    """A stream that ends in an error has given the beginning of the answer, and is not tried again."""
    with mpool.Pool() as calm:
        expected = calm.generate("a b", llama, **CALL).text
    partial, again = 0, []
    for seed in range(60):
        given, end, metrics = under_chaos(llama, seed, "thread", True)
        if end == "InternalError" and given:
            partial += 1
            assert given != expected and expected.startswith(given)
            assert metrics["retries"] == metrics["chaos_faults"] - 1
        if end == "ok" and metrics["retries"]:
            again.append(seed)
    assert partial > 5 and again
    for seed in again * 10:  # whoever reads between the two tries must not take the first one's end for the call's
        assert under_chaos(llama, seed, "thread", True)[:2] == (expected, "ok")
