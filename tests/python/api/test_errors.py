"""Texts of errors."""

from __future__ import annotations

import pickle

import pytest

from mpool.checks import refuse, unknown_option
from mpool.errors import ContextOverflow, InvalidArgument, MpoolError, OfflineError, sentence


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


@pytest.mark.parametrize(("names", "param", "text"), [
    ({"inputs": "texts"}, "texts[3]", "`texts[3]` has 9 tokens"),
    ({"inputs[3]": "line 7 of a.txt"}, "line 7 of a.txt", "line 7 of a.txt has 9 tokens"),
    ({"inputs": "--text"}, "--text[3]", "--text[3] has 9 tokens"),
    ({"input": "texts", "inputs[30]": "x"}, "inputs[3]", "`inputs[3]` has 9 tokens")])
def test_the_caller_s_name_replaces_the_parameter(names: dict[str, str], param: str, text: str) -> None:
    """In the field and at the start of the message. Values of the caller stay as they are."""
    error = ContextOverflow("`inputs[3]` has 9 tokens", tokens=9, limit=5, param="inputs[3]",
                            hint="Shorten `inputs[3]`")
    error.rename(names)
    assert (error.param, error.message) == (param, text)
    assert str(error) == text + ". Shorten `inputs[3]`"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    other = InvalidArgument(param="inputs[3]", got="'`inputs[3]`'", allowed="a str")
    other.rename(names)
    assert other.message == text.replace("has 9 tokens", "must be a str, got '`inputs[3]`'")


def test_a_message_about_another_subject_keeps_its_words() -> None:
    error = MpoolError("the prompt with `top_k` is long", param="top_k")
    error.rename({"top_k": "k"})
    assert (error.param, error.message, error.problem) == ("k", "the prompt with `top_k` is long", None)
    without = MpoolError("`top_k` is long")
    without.rename({"top_k": "k"})
    assert (without.param, without.message) == (None, "`top_k` is long")
    error.message = "another text"
    assert error.message == "another text"


def test_an_offline_error_has_its_parts_as_fields() -> None:
    error = OfflineError(missing="no complete copy of a/b", cause="downloads are disabled", hint="Run it")
    assert error.message == "no complete copy of a/b, and downloads are disabled"
    error.addition = "there is no file a either"
    assert error.missing == "no complete copy of a/b"
    assert str(error) == error.message + ". Run it" and error.message.endswith("disabled; there is no file a either")
    assert OfflineError("no copy").missing == "no copy"


# ---- tracebacks ------------------------------------------------------------------------------------------------------
