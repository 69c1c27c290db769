"""Sampling options: every name, range, alias and default of the table, without a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpool.checks import nearest
from mpool.tasks import sampling
from mpool.errors import InvalidArgument

VOCAB = 100


def resolve(**options: Any) -> sampling.Sampling:
    return sampling.resolve(options, {}, VOCAB)


def test_defaults_are_pinned() -> None:
    found = resolve(seed=1)
    assert found == sampling.Sampling(
        temperature=0.7, top_k=40, top_p=0.95, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, max_tokens=512, min_tokens=0, n=1, seed=1, ignore_eos=False, logprobs=-1, stop=(),
        stop_ids=(), bias=())


def test_defaults_of_the_model_disable_all_other_filters() -> None:
    found = sampling.resolve({"top_k": 7}, {"temperature": 0.3, "top_p": 0.8}, VOCAB)
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.3, 0.8, 7, 0.0)
    assert sampling.resolve({}, {"temperature": 0.3}, VOCAB).top_k == 0


def test_a_random_seed_is_chosen_by_default() -> None:
    seeds = {resolve().seed for _ in range(20)}
    assert len(seeds) > 15 and all(0 <= seed < 2**32 for seed in seeds)


def test_minus_one_means_no_limit() -> None:
    assert resolve(max_tokens=None).max_tokens is None
    assert resolve(max_tokens=-1).max_tokens is None
    with pytest.raises(InvalidArgument, match=r"`max_tokens` must be an integer from 1 to 2\*\*31 - 1, or .*, got -2"):
        resolve(max_tokens=-2)


@pytest.mark.parametrize("name", ("top_k", "max_tokens"))
def test_values_beyond_an_integer_of_32_bits(name: str) -> None:
    """``sys.maxsize``, which callers pass for "no limit", is refused: the message names the largest value."""
    assert getattr(resolve(**{name: 2**31 - 1}), name) == 2**31 - 1
    allowed = r"an integer from 1 to 2\*\*31 - 1, or .*"
    with pytest.raises(InvalidArgument, match=f"`{name}` must be {allowed}, got 2147483648"):
        resolve(**{name: 2**31})


@pytest.mark.parametrize(("name", "other"), [("temprature", "temperature"), ("topp", "top_p"), ("stops", "stop"),
                                           ("max_token", "max_tokens")])
def test_unknown_names_get_the_nearest(name: str, other: str) -> None:
    text = f"`{name}` is not an option of sampling; did you mean `{other}`"
    with pytest.raises(InvalidArgument, match=text) as caught:
        resolve(**{name: 1})
    assert caught.value.param == name


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_the_number_of_similar_names_is_limited(count: int) -> None:
    """Names that are similar come first, then those that contain the name, in alphabetic order."""
    known = [*(f"a_long_prefix_of_top_k_{at}" for at in range(4, 0, -1)), "top_p", "TOP_K", "other"]
    found = nearest("top_k", known, count)
    assert found == ["TOP_K", "top_p", *(f"a_long_prefix_of_top_k_{at}" for at in range(1, 5))][:count]


@pytest.mark.parametrize("name", sampling.TABLE)
@pytest.mark.parametrize("value", [float("nan"), "1", [], b"1", float("inf"), -float("inf"), 1j])
def test_non_numbers_are_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"^`{name}` must be .*, got ") as caught:
        resolve(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", [name for name, row in sampling.TABLE.items() if row.kind is not bool])
def test_a_bool_is_no_number(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^`{name}` must be .*, got True"):
        resolve(**{name: True})


def test_a_number_is_no_bool() -> None:
    with pytest.raises(InvalidArgument, match="`ignore_eos` must be True or False, got 1"):
        resolve(ignore_eos=1)


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, row in sampling.TABLE.items() if row.kind is not bool])
def test_ranges(name: str, row: sampling.Row) -> None:
    for value in (row.low, row.high):
        if name not in ("min_tokens", "max_tokens"):
            resolve(**{name: row.kind(value)})
    for value in (row.low - 1, row.high + 1 if row.high < 1e9 else row.high * 2 + 2):
        with pytest.raises(InvalidArgument, match=f"^`{name}` must be "):
            resolve(**{name: row.kind(value)})


@pytest.mark.parametrize("value", [0.5, 3.0, np.float32(3)])
def test_whole_numbers_only(value: object) -> None:
    with pytest.raises(InvalidArgument):
        resolve(max_tokens=value)


def test_numpy_numbers_are_numbers() -> None:
    found = resolve(max_tokens=np.int64(5), temperature=np.float32(0.5), top_k=np.int32(-1))
    assert (found.max_tokens, found.temperature, found.top_k) == (5, 0.5, 0)
    assert type(found.max_tokens) is int and type(found.temperature) is float


def test_min_above_max() -> None:
    message = "`min_tokens` must be an integer from 0 to max_tokens, which is 3, got 9"
    with pytest.raises(InvalidArgument, match=message):
        resolve(min_tokens=9, max_tokens=3)


def test_stop() -> None:
    assert resolve(stop="a").stop == ("a",)
    assert resolve(stop=["a", "bc"]).stop == ("a", "bc")
    for bad in ("", [""], [1], 5, ["a"] * 65, ["x" * 1025], ["\ud800"], {"a": 1}):
        with pytest.raises(InvalidArgument, match=r"^`stop(\[0\])?` must be ") as caught:
            resolve(stop=bad)
        assert caught.value.param in ("stop", "stop[0]")


def test_ten_thousand_stops_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="`stop` must be .* at most 64 strings, got 10,000 strings"):
        resolve(stop=["s"] * 10_000)


def test_stop_ids() -> None:
    assert resolve(stop_token_ids=[1, 99]).stop_ids == (1, 99)
    for bad in ([100], [-1], [True], "12", 3, [1.0], [0] * 4097):
        with pytest.raises(InvalidArgument, match=r"^`stop_token_ids(\[0\])?` must be "):
            resolve(stop_token_ids=bad)


def test_logit_bias() -> None:
    assert resolve(logit_bias={3: 1, "4": -2.5}).bias == ((3, 1.0), (4, -2.5))
    for bad in ({100: 1}, {-1: 1}, {True: 1}, {"x": 1}, {1: 101}, {1: float("nan")}, {1: True}, {1: "2"}, [1],
                {1.0: 1}):
        with pytest.raises(InvalidArgument, match=r"^`logit_bias(\[.*\])?` must be ") as caught:
            resolve(logit_bias=bad)
        assert str(caught.value.param).startswith("logit_bias")


def test_logprobs() -> None:
    assert [resolve(logprobs=value).logprobs for value in (None, False, True, 0, 5)] == [-1, -1, 0, 0, 5]
    assert resolve(top_logprobs=3).logprobs == 3
    assert resolve(logprobs=True, top_logprobs=3).logprobs == 3
    assert resolve(logprobs=False, top_logprobs=0).logprobs == -1
    for bad in ({"logprobs": 21}, {"top_logprobs": 21}, {"top_logprobs": -1}, {"logprobs": "yes"},
                {"logprobs": False, "top_logprobs": 2}, {"top_logprobs": True}):
        with pytest.raises(InvalidArgument, match="logprobs` must be "):
            resolve(**bad)
