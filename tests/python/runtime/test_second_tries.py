"""A worker dies under a call: once, the answer goes on from where it stands; twice, the caller gets a typed error."""

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


@pytest.mark.parametrize("isolation, seeds", [(*HERE.values, 50), pytest.param(*THERE.values, 30, marks=THERE.marks)])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tried_once_more(llama: Path, isolation: str, seeds: int, stream: bool) -> None:
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
            assert end == "InternalError" and deaths == 2 and retries == 1, f"seed {seed}: {end}"
            assert expected.startswith(given), f"seed {seed}: {given!r} is no part of the answer"
    # each way was met: nothing happened; a second try that went well; one that did not
    assert set(ways) == {("ok", 0), ("ok", 1), ("InternalError", 1)}, ways


def test_what_was_given_stays_given(llama: Path) -> None:
    """A stream that ends in an error has given the beginning of the answer; one that goes on gives each piece once."""
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
    for seed in (again * 10)[:60]:  # who reads between the two tries must not take the first one's end for the call's
        assert under_chaos(llama, seed, "thread", True)[:2] == (expected, "ok")


PROMPT = "a b c " * 60
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": dict(temperature=0), "drawn": dict(seed=5, temperature=1.3), "several": dict(seed=5, n=3),
    "logprobs": dict(temperature=0, logprobs=5), "stops": dict(seed=1, stop=["t e", "ae", "th"], n=4),
    "penalties": dict(seed=2, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={5: 4.0}, min_tokens=10)}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("isolation", [HERE, THERE])
def test_answers_that_go_on_are_the_same(llama: Path, isolation: str, name: str) -> None:
    """Whatever there is beside the tokens: alternatives, stop strings that the fault cuts in two, counts, times."""
    call = dict(max_tokens=24, ignore_eos=name != "stops", **OPTIONS[name])
    went_on = 0
    with mpool.Pool() as calm:
        expected = calm.generate(PROMPT, llama, **call)
    for seed in range(8 if isolation == "process" else 15):
        config = mpool.PoolConfig(threads=1, max_workers_per_model=1, isolation=isolation, breaker_threshold=0,
                                  chaos=f"seed={seed},die=0.06")
        with mpool.Pool(config) as pool:
            model = pool.register("goes-on", llama)
            try:
                found = model.generate(PROMPT, **call)
            except mpool.InternalError:
                continue
            went_on += pool.metrics()["retries"]
            for one, other in zip(expected.choices, found.choices, strict=True):
                assert (one.text, one.finish_reason, one.logprobs) == (other.text, other.finish_reason, other.logprobs)
            usage, times = found.usage, found.timings
            assert (usage.prompt_tokens, usage.completion_tokens) == (expected.usage.prompt_tokens,
                                                                      expected.usage.completion_tokens)
            assert usage.cached_tokens <= usage.prompt_tokens
            assert min(times.queued, times.prompt, times.generation) >= 0
    assert went_on >= 2


@pytest.mark.parametrize("isolation", [HERE, THERE])
def test_captures_go_on(llama: Path, isolation: str) -> None:
    def records(chaos: str | None) -> tuple[list[Any], int]:
        config = mpool.PoolConfig(threads=1, max_workers_per_model=1, breaker_threshold=0, chaos=chaos,
                                  isolation=isolation)
        with mpool.Pool(config) as pool, mpool.capture() as capture:
            pool.register("captured", llama).generate("a b", temperature=0, max_tokens=12, ignore_eos=True,
                                                      capture=capture)
            return capture.records(), int(pool.metrics()["retries"])

    expected, _ = records(None)
    assert len(expected) >= 12 * 4
    assert_goes_on(lambda seed: records(f"seed={seed},die=0.08"), expected)


@pytest.mark.parametrize("isolation", [HERE, THERE])
def test_answers_of_a_form_go_on(llama: Path, isolation: str) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "regex", "regex": "[a-z]{3,8}( [a-z]{3,8}){4}"}

    def answers(chaos: str | None) -> tuple[list[tuple[str, Any]], int]:
        config = mpool.PoolConfig(threads=1, max_workers_per_model=1, breaker_threshold=0, chaos=chaos,
                                  isolation=isolation)
        with mpool.Pool(config) as pool:
            done = pool.register("masked", llama).generate("a b", seed=3, n=2, max_tokens=60, response_format=form)
            return [(choice.text, choice.finish_reason) for choice in done.choices], int(pool.metrics()["retries"])

    expected, _ = answers(None)
    assert {finish for _, finish in expected} == {"stop"}
    assert_goes_on(lambda seed: answers(f"seed={seed},die=0.04"), expected)


def assert_goes_on(run: Callable[[int], tuple[Any, int]], expected: Any) -> None:
    """What came in spite of a fault is what comes without one."""
    went_on = 0
    for seed in range(30):
        try:
            found, retries = run(seed)
        except mpool.InternalError:  # the second one
            continue
        assert found == expected, f"seed {seed}"
        went_on += retries
        if went_on == 4:
            return
    raise AssertionError(f"only {went_on} went on")
