"""The process of a tokenizer: what a call may take, what its error says, and how texts are divided into calls."""

import json
import re
from array import array
from types import SimpleNamespace
from typing import Any

import pytest

import mpool
from mpool.host.child_processes import Limits
from mpool.tokenizers import isolated, limits, native
from mpool.tokenizers.growth import Growth
from mpool.tokenizers.isolated import IsolatedTokenizer
from mpool.tokenizers.patterns import Cost

pytest.importorskip("tokenizers")

SOURCE = json.dumps({"version": "1.0", "added_tokens": [], "model": {
    "type": "WordLevel", "vocab": {"a": 0, "b": 1, "[UNK]": 2}, "unk_token": "[UNK]"},
    "pre_tokenizer": {"type": "WhitespaceSplit"}})


def numbers(*values: int) -> bytes:
    return array("I", values).tobytes()


@pytest.fixture()
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of processes; each responds with one token for each text."""
    found: list[tuple[Any, ...]] = []

    def run(self: Any, request: Any, allowed: Limits, source: Any, deadline: float) -> tuple[str, bytes]:
        found.append((request, allowed, source.text, deadline))
        count = len(request[3])
        return "ids", numbers(*[1] * count, *range(count * (3 if request[2] else 1)))

    monkeypatch.setattr(isolated.Children, "run", run)
    monkeypatch.setattr(isolated, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    monkeypatch.setattr(limits, "max_tokenizing_seconds", 7.0)
    return found


def test_the_process_gets_what_the_error_names(calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, seconds and a response of one GiB; a deadline of three times the CPU time, and of a minute more while the
    tokenizer is not loaded."""
    made = IsolatedTokenizer(SOURCE, True)
    assert made.encode(["a", "b"], False) == ([[0], [1]], [[], []])
    assert made.encode(["a", "b"], True, True) == ([[0], [1]], [[(2, 4)], [(3, 5)]])
    (request, allowed, source, deadline), (second, _, _, later) = calls
    assert request == (True, False, False, ["a", "b"]) and second == (True, True, True, ["a", "b"])
    assert source == SOURCE and (deadline, later) == (1000.0 + 3 * 7.0 + 60.0, 1000.0 + 3 * 7.0)
    assert allowed._replace(memory=0) == Limits(7.0, 60.0, 0, 1 << 30)
    monkeypatch.setattr(isolated.Children, "run", lambda *given: ("memory", b""))
    with pytest.raises(mpool.LimitError) as caught:
        made.encode(["a"], False)
    shown = re.search(r"more than 7 seconds or (\d+) GiB", str(caught.value))
    assert shown is not None and int(shown[1]) * 2**30 == allowed.memory == 4 * 2**30 and caught.value.param == "text"


def test_a_call_that_needs_more_memory_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated, "_MEMORY", 24 << 20)
    made = IsolatedTokenizer(SOURCE, False)
    assert made.encode(["a b"], False)[0] == [[0, 1]]
    with pytest.raises(mpool.LimitError, match="for this text"):
        made.encode(["a " * 2_000_000], False)
    assert made.encode(["b"], False)[0] == [[1]]  # in another process


@pytest.mark.parametrize("places", [False, True])
@pytest.mark.parametrize("texts, data", [
    (["a", "b"], (2, 1, 5, 6, 7)), (["a"], (0,)), ([], ()), (["a", "b", "c"], (0, 2, 1, 5, 6, 7))])
def test_ids_and_places_are_divided_by_text(monkeypatch: pytest.MonkeyPatch, places: bool, texts: list[str],
                                            data: tuple[int, ...]) -> None:
    counts, ids = data[:len(texts)], list(data[len(texts):])
    extra = [*(at * 10 for at in ids), *(at * 10 + 9 for at in ids)] if places else []
    monkeypatch.setattr(isolated.Children, "run", lambda *given: ("ids", numbers(*data, *extra)))
    found, pairs = IsolatedTokenizer(SOURCE, False).encode(texts, False, places)
    assert [len(one) for one in found] == list(counts) and sum(found, []) == ids
    assert pairs == [[(at * 10, at * 10 + 9) for at in one] if places else [] for one in found]


@pytest.mark.parametrize("places, data", [(False, (1, 5, 6)), (False, (2, 5)), (True, (1, 5)), (True, (1, 5, 6)),
                                          (True, (1, 5, 6, 7, 8))])
def test_a_response_of_another_length_is_refused(monkeypatch: pytest.MonkeyPatch, places: bool,
                                                 data: tuple[int, ...]) -> None:
    monkeypatch.setattr(isolated.Children, "run", lambda *given: ("ids", numbers(*data)))
    with pytest.raises(mpool.LimitError):
        IsolatedTokenizer(SOURCE, False).encode(["a"], False, places)


# ---- texts of a call -----------------------------------------------------------------------------------------------

class Recorder:
    """A tokenizer that notes how it is called."""

    normalizer = None
    encode_special_tokens = False

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.calls.append([len(text) for text in texts])
        return [type("Encoding", (), {"ids": [len(text), int(add_special_tokens)], "offsets": [(0, len(text))]})
                for text in texts]

    encode_batch_fast = encode_batch

    def to_str(self) -> str:
        return SOURCE


@pytest.fixture()
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Lengths of the texts of calls of a process of its own."""
    found: list[list[int]] = []

    def encode(self: IsolatedTokenizer, texts: list[str], special: bool, places: bool) -> Any:
        found.append([len(text) for text in texts])
        return [[len(text), int(special)] for text in texts], [[(0, len(text))] if places else [] for text in texts]

    monkeypatch.setattr(IsolatedTokenizer, "encode", encode)
    return found


@pytest.mark.parametrize("cost, lengths, here, apart", [
    (Cost.CONSTANT, [100], [[100]], []),
    (Cost.CONSTANT, [60, 40], [[60, 40]], []),
    (Cost.CONSTANT, [60, 41], [[60], [41]], []),
    (Cost.CONSTANT, [50, 50, 100, 1, 99, 1], [[50, 50], [100], [1, 99], [1]], []),
    (Cost.LINEAR, [30], [[30]], []),
    (Cost.LINEAR, [31], [], [[31]]),
    (Cost.LINEAR, [30, 30, 30], [[30, 30, 30]], []),
    (Cost.LINEAR, [30, 31, 30], [], [[30, 31, 30]]),
    (Cost.LINEAR, [90, 30, 30], [[30, 30]], [[90]]),
    (Cost.UNKNOWN, [1], [], [[1]]),
    (Cost.UNKNOWN, [60, 60], [], [[60], [60]])])
@pytest.mark.parametrize("spans", [False, True])
def test_texts_of_a_call(in_process: list[list[int]], monkeypatch: pytest.MonkeyPatch, cost: Cost, lengths: list[int],
                         here: list[list[int]], apart: list[list[int]], spans: bool) -> None:
    """Texts within the limit go together. Texts that may take long leave the process."""
    monkeypatch.setattr(limits, "max_normalized_chars", 100)
    monkeypatch.setattr(native, "MAX_SQUARED", 30)
    recorder: Any = Recorder()
    tokenizer = native.Native(recorder, Growth(cost=cost))
    texts = ["x" * length for length in lengths]
    if spans:
        assert tokenizer.spans(texts) == [native.Spans([length, 0], [(0, length)]) for length in lengths]
    else:
        assert tokenizer.encode(texts, True) == [[length, 1] for length in lengths]
        assert [list(one) for one in tokenizer.encode(texts)] == [[length, 0] for length in lengths]
    assert (recorder.calls, in_process) == ((here, apart) if spans else (here * 2, apart * 2))


def test_growth_counts_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A normalizer that doubles a text and a pre-tokenizer that makes four of a character, or one of ASCII."""
    monkeypatch.setattr(limits, "max_normalized_chars", 800)
    recorder: Any = Recorder()
    recorder.normalizer = type("Doubling", (), {"normalize_str": staticmethod(lambda text: text * 2)})
    tokenizer = native.Native(recorder, Growth(2, 2, 4, 1))
    tokenizer.encode(["ä" * 100])
    with pytest.raises(mpool.LimitError, match="a text of 101 characters has more than 800 characters after") as caught:
        tokenizer.encode(["ä" * 101])
    assert caught.value.param == "text"
    tokenizer.encode(["a" * 400])  # ASCII
    with pytest.raises(mpool.LimitError, match="a text of 401 characters"):
        tokenizer.encode(["a" * 401])
    recorder.calls.clear()
    tokenizer.encode(["a" * 300, "a" * 100, "a"])
    assert recorder.calls == [[300, 100], [1]]
    recorder.normalizer = None
    tokenizer.encode(["ä" * 200])  # measured: the normalizer is gone
    with pytest.raises(mpool.LimitError):
        tokenizer.encode(["ä" * 201])


def test_pairs_of_unknown_cost_are_short() -> None:
    recorder: Any = Recorder()
    recorder.encode = lambda first, second, add_special_tokens: (first, second, add_special_tokens)
    tokenizer = native.Native(recorder, Growth(cost=Cost.UNKNOWN))
    assert tokenizer.encode_pair("a" * 6, "b" * 6) == ("a" * 6, "b" * 6, True)
    with pytest.raises(mpool.Unsupported, match="too complex for pairs"):
        tokenizer.encode_pair("a" * 6, "b" * 7)
    assert native.Native(recorder, Growth(cost=Cost.LINEAR)).encode_pair("a" * 6, "b" * 7)
