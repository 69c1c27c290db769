"""Texts of errors."""

from __future__ import annotations

import pytest

from mpool.checks import refuse, unknown_option
from mpool.errors import InvalidArgument, sentence


@pytest.mark.parametrize(("value", "text"), [
    (0, "`top_k` must be 1 or more, got 0. Omit it"),
    ("x" * 80, "`top_k` must be 1 or more, got '" + "x" * 56 + "... Omit it")])
def test_hint_follows_as_a_sentence(value: object, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        refuse("top_k", value, "1 or more", hint="Omit it")
    assert str(caught.value) == text


def test_question_ends_without_a_full_stop() -> None:
    error = unknown_option("topk", ["top_k", "seed"], of="generate")
    assert error.message == "`topk` is not an option of generate; did you mean `top_k`?"
    assert str(error) == error.message + " Options: top_k, seed"
    assert sentence(error.message) == error.message
