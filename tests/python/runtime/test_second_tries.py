"""Retries after worker deaths: after the first, generation continues; after the second, the request raises an error."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
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
    """Run one request under chaos. Return its text, its error or ``"ok"``, and the pool's metrics."""
    given, end = "", "ok"
    # a fixed key, because chaos depends on it: the name of the folder must not change the faults
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


@pytest.mark.sample(4)
@pytest.mark.parametrize("isolation, seeds", [(*HERE.values, 50), pytest.param(*THERE.values, 30, marks=THERE.marks)])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_one_retry(llama: Path, isolation: str, seeds: int, stream: bool) -> None:
    with mpool.Pool() as calm:
        expected = calm.generate("a b", llama, **CALL).text
    ways: collections.Counter[tuple[str, int]] = collections.Counter()
    for seed in range(seeds):
        given, end, metrics = under_chaos(llama, seed, isolation, stream)
        deaths, retries = metrics["chaos_faults"], metrics["retries"]
        ways[end, retries] += 1
        assert retries <= 1, f"seed {seed}: retried more than once"
        if end == "ok":
            assert given == expected and deaths == retries, f"seed {seed}"
        else:
            assert end == "InternalError" and deaths == 2 and retries == 1, f"seed {seed}: {end}"
            assert expected.startswith(given), f"seed {seed}: {given!r} is not a prefix of the completion"
    # all three cases occurred: no fault, a retry that succeeded, a retry that failed
    assert set(ways) == {("ok", 0), ("ok", 1), ("InternalError", 1)}, ways


@pytest.mark.slow
def test_streamed_text_is_never_repeated(llama: Path) -> None:
    """A stream that fails has yielded a prefix of the completion; a stream that continues yields every chunk once."""
    with mpool.Pool() as calm:
        expected = calm.generate("a b", llama, **CALL).text
    partial, again = 0, []
    for seed in range(40):
        given, end, metrics = under_chaos(llama, seed, "thread", True)
        if end == "InternalError" and given:
            partial += 1
            assert given != expected and expected.startswith(given)
        if end == "ok" and metrics["retries"]:
            again.append(seed)
    assert partial > 2 and again
    for seed in (again * 10)[:60]:  # a reader must not see the failed attempt as the end of the request
        assert under_chaos(llama, seed, "thread", True)[:2] == (expected, "ok")


PROMPT = "a b c " * 60
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0), "sampled": dict(seed=5, temperature=1.3), "several": dict(seed=5, n=3),
    "logprobs": dict(temperature=0, logprobs=5), "stops": dict(seed=1, stop=["t e", "ae", "th"], n=4),
    "penalties": dict(seed=2, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={5: 4.0}, min_tokens=10)}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("isolation", [HERE, THERE])
def test_continued_completions_are_the_same(llama: Path, isolation: str, name: str) -> None:
    """Log probabilities, stop strings that a fault splits, token counts and times are the same, too."""
    request = dict(max_tokens=24, ignore_eos=name != "stops", **OPTIONS[name])
    continued = 0
    with mpool.Pool() as calm:
        expected = calm.generate(PROMPT, llama, **request)
    for seed in range(8 if isolation == "process" else 15):
        config = mpool.PoolConfig(threads=1, max_workers_per_model=1, isolation=isolation, breaker_threshold=0,
                                  chaos=f"seed={seed},die=0.06")
        with mpool.Pool(config) as pool:
            model = pool.register("goes-on", llama)
            try:
                found = model.generate(PROMPT, **request)
            except mpool.InternalError:
                continue
            continued += pool.metrics()["retries"]
            for one, other in zip(expected.choices, found.choices, strict=True):
                assert (one.text, one.finish_reason, one.logprobs) == (other.text, other.finish_reason, other.logprobs)
            usage, times = found.usage, found.timings
            assert (usage.prompt_tokens, usage.completion_tokens) == (expected.usage.prompt_tokens,
                                                                      expected.usage.completion_tokens)
            assert usage.cached_tokens <= usage.prompt_tokens
            assert min(times.queued, times.prompt, times.generation) >= 0
    assert continued >= 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("isolation", [HERE, THERE])
def test_captures_continue(llama: Path, isolation: str) -> None:
    def records(chaos: str | None) -> tuple[list[Any], int]:
        config = mpool.PoolConfig(threads=1, max_workers_per_model=1, breaker_threshold=0, chaos=chaos,
                                  isolation=isolation)
        with mpool.Pool(config) as pool, mpool.debug.capture() as capture:
            pool.register("captured", llama).generate("a b", temperature=0, max_tokens=12, ignore_eos=True,
                                                      capture=capture)
            return capture.records(), int(pool.metrics()["retries"])

    expected, _ = records(None)
    assert len(expected) >= 12 * 4
    assert_continues(lambda seed: records(f"seed={seed},die=0.08"), expected)


@pytest.mark.sample(2)
@pytest.mark.parametrize("isolation", [HERE, THERE])
def test_constrained_completions_continue(llama: Path, isolation: str) -> None:
    pytest.importorskip("llguidance")
    response_format = {"type": "regex", "regex": "[a-z]{3,8}( [a-z]{3,8}){4}"}

    def completions(chaos: str | None) -> tuple[list[tuple[str, Any]], int]:
        config = mpool.PoolConfig(threads=1, max_workers_per_model=1, breaker_threshold=0, chaos=chaos,
                                  isolation=isolation)
        with mpool.Pool(config) as pool:
            done = pool.register("masked", llama).generate("a b", seed=3, n=2, max_tokens=60,
                                                           response_format=response_format)
            return [(choice.text, choice.finish_reason) for choice in done.choices], int(pool.metrics()["retries"])

    expected, _ = completions(None)
    assert {finish for _, finish in expected} == {"stop"}
    assert_continues(lambda seed: completions(f"seed={seed},die=0.04"), expected)


def assert_continues(run: Callable[[int], tuple[Any, int]], expected: Any) -> None:
    """Assert that results after a fault equal the results without one, for four requests that were retried."""
    continued = 0
    for seed in range(30):
        try:
            found, retries = run(seed)
        except mpool.InternalError:  # a second fault
            continue
        assert found == expected, f"seed {seed}"
        continued += retries
        if continued == 4:
            return
    raise AssertionError(f"only {continued} requests continued")
