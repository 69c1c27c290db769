"""Options of a load, deadlines, and counts of tokens: values at every limit, and which of two options wins."""

from __future__ import annotations

import math
import os
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.runtime import deadlines, tally
from mpool.runtime.load_options import AS_CONFIGURED, MAX_ADAPTERS, LoadOptions

FULL = LoadOptions("process", "mapped", "int8", "draft", (("a", "/a"),))
OTHER = LoadOptions("thread", "packed", "auto", "other", (("b", "/b"),))


# ---- options of a load ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [field.name for field in fields(LoadOptions)])
def test_an_option_of_the_call_wins_over_the_present_one(name: str) -> None:
    assert FULL.over(OTHER) == FULL and AS_CONFIGURED.over(OTHER) == OTHER and FULL.over(AS_CONFIGURED) == FULL
    one = LoadOptions(**{name: getattr(FULL, name)})
    assert one.over(OTHER) == LoadOptions(**{**vars(OTHER), name: getattr(FULL, name)})
    assert OTHER.over(one) == OTHER


def test_no_draft_and_no_adapters_win_as_well() -> None:
    found = LoadOptions(draft=False, adapters=()).over(OTHER)
    assert (found.draft, found.adapters, found.weights) == (False, (), "packed")


def test_the_arguments_keep_their_places(tmp_path: Path) -> None:
    place = str(tmp_path / "x")
    found = LoadOptions.checked("process", "mapped", "int8", "draft", {"b": place, "a": Path(place)})
    assert found == LoadOptions("process", "mapped", "int8", "draft", (("a", place), ("b", place)))
    assert LoadOptions.checked(None, None, None, None) == AS_CONFIGURED
    assert LoadOptions.checked(None, None, None, False, {}) == LoadOptions(draft=False, adapters=())


@pytest.mark.parametrize("place, name, allowed", [
    (0, "isolation", "thread, process"), (1, "weights", "auto, mapped, packed"), (2, "kv_dtype", "auto, int8")])
@pytest.mark.parametrize("bad", ["other", "", 0, False])
def test_wrong_options_name_their_parameter(place: int, name: str, allowed: str, bad: Any) -> None:
    with pytest.raises(mpool.InvalidArgument) as caught:
        LoadOptions.checked(*[bad if at == place else None for at in range(4)])  # type: ignore[arg-type]
    assert (caught.value.param, caught.value.got, caught.value.allowed) == (name, repr(bad), f"one of {allowed}")


@pytest.mark.parametrize("name, is_valid", [
    ("a", True), ("A", True), ("7", True), ("a._+-9", True), ("a" * 128, True), ("a" * 129, False), ("", False),
    (".a", False), ("-a", False), ("a b", False), ("a/b", False), ("ä", False), ("a:b", False), (1, False)])
def test_names_of_adapters(name: Any, is_valid: bool) -> None:
    if is_valid:
        assert LoadOptions.checked(None, None, None, None, {name: "/x"}).adapters == ((name, "/x"),)
        return
    with pytest.raises(mpool.InvalidArgument, match="1 to 128 letters, digits") as caught:
        LoadOptions.checked(None, None, None, None, {name: "/x"})
    assert (caught.value.param, caught.value.got) == ("adapters", repr(name) if len(str(name)) < 58
                                                      else repr(name)[:57] + "...")


def test_the_number_of_adapters_is_limited() -> None:
    given = {f"a{number}": "/x" for number in range(MAX_ADAPTERS)}
    assert len(LoadOptions.checked(None, None, None, None, given).adapters or ()) == 64
    with pytest.raises(mpool.InvalidArgument, match="a dict with at most 64 adapters, got 65"):
        LoadOptions.checked(None, None, None, None, given | {"one": "/x"})
    for bad in (["a"], "a", 1, True):
        with pytest.raises(mpool.InvalidArgument, match="`adapters` must be a dict from name to path, or None"):
            LoadOptions.checked(None, None, None, None, bad)


def test_places_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "here").touch()

    def place(given: Any) -> str:
        (found,) = LoadOptions.checked(None, None, None, None, {"a": given}).adapters or ()
        return found[1]

    assert place("owner/away") == place(" owner/away ") == "owner/away"  # a repository of the hub
    assert place("owner/here") == place(Path("owner/here")) == str(tmp_path / "owner" / "here")
    assert place(Path("owner/away")) == str(tmp_path / "owner" / "away")
    assert place("away") == place("./away") == str(tmp_path / "away")
    for bad in (None, 7, b"x", "", {}):
        with pytest.raises(mpool.InvalidArgument) as caught:
            place(bad)
        assert caught.value.param == "adapters['a']" and "owner/name" in (caught.value.allowed or "")
    assert os.path.isabs(place(os.curdir))


# ---- deadlines -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("given, seconds", [
    (None, None), (1, 1.0), (0.25, 0.25), (np.float32(0.5), 0.5), (np.int64(3), 3.0), (1e9, 1e9), (1.1e9, None),
    (math.inf, None), (10**12, None), (5e-324, 5e-324)])
def test_timeouts(given: Any, seconds: float | None) -> None:
    assert deadlines.seconds_of(given) == deadlines.seconds_of(given, zero=True) == seconds


@pytest.mark.parametrize("given", [0, 0.0, -1, -0.5, math.nan, -math.inf, True, "1", [], 10**400])
def test_wrong_timeouts(given: Any) -> None:
    with pytest.raises(mpool.InvalidArgument, match="`timeout` must be a number of seconds above 0, or None"):
        deadlines.deadline_of(given)
    if given in (0, 0.0) and given is not True:
        assert deadlines.seconds_of(given, zero=True) == 0.0
    else:
        with pytest.raises(mpool.InvalidArgument, match="`timeout` must be a number of seconds from 0, or None"):
            deadlines.seconds_of(given, zero=True)


def test_a_deadline_is_the_time_and_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "time", SimpleNamespace(monotonic=lambda: 100.0))
    assert deadlines.deadline_of(2.5) == 102.5 and deadlines.deadline_of(None) is None
    assert deadlines.remaining(102.5) == 2.5 and deadlines.remaining(None) is None
    for passed in (100.0, 99.0):
        with pytest.raises(mpool.Timeout, match="did not complete within its timeout") as caught:
            deadlines.remaining(passed, "m")
        assert caught.value.key == "m" and caught.value.hint == "Raise `timeout`"


# ---- counts of tokens ----------------------------------------------------------------------------------------------

def test_tokens_of_a_context() -> None:
    ticket: Any = SimpleNamespace(usage=lambda: (3, 40))
    for without in (lambda: tally.begin("vision"), lambda: tally.add_ticket(ticket), lambda: tally.add_tokens(9)):
        without()  # no tally: nothing is counted
    counts = tally.Tally()
    token = tally.current.set(counts)
    try:
        assert (counts.capability, counts.tokens()) == (None, (0, 0))
        tally.add_ticket(ticket)
        assert counts.tickets == []  # no request has begun
        tally.begin("vision")
        tally.begin("text_embedding")
        assert counts.capability == "vision"
        tally.add_tokens(100)
        tally.add_tokens(2000)
        tally.add_ticket(ticket)
        tally.add_ticket(SimpleNamespace(usage=lambda: (5, 60)))  # type: ignore[arg-type]
        assert counts.tokens() == counts.tokens() == (2108, 100)
        for capability, count in (("text_to_text", 1), ("text_embedding", 0), ("image_embedding", 0)):
            counts.capability, counts.tickets = capability, []
            tally.add_ticket(ticket)
            assert len(counts.tickets) == count
    finally:
        tally.current.reset(token)
