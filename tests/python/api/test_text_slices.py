"""Slices of texts before the core, with a tokenizer that makes one token of each character: bounds, padding, halves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.tasks import text_embedding
from mpool.tasks.text_embedding import MAX_CHARS, Pack
from mpool.tokenizers import Packed

MAX, VOCAB = 6, 200


class Letters:
    """A token is the code of a character; ``~`` has no token."""

    vocab_size, suffix_ids = VOCAB, ()

    def __init__(self, special: dict[str, int] | None = None) -> None:
        self.special = special or {}
        self.asked: list[dict[str, Any]] = []

    def ids(self, text: str) -> list[int]:
        return [ord(letter) for letter in text if letter != "~"]

    def count(self, text: str, **options: Any) -> int:
        self.asked.append(options)
        return len(self.ids(text))

    def encode_batch(self, texts: list[str], *, max_tokens: int, truncate: bool, **options: Any) -> Packed:
        rows = [self.ids(text) for text in texts]
        if not truncate and any(len(row) > max_tokens for row in rows):
            raise mpool.ContextOverflow("too long")
        rows = [row[:max_tokens] for row in rows]
        return Packed(np.array([token for row in rows for token in row], np.int32),
                      np.cumsum([0, *map(len, rows)], dtype=np.int64))


def plan_with(**changes: Any) -> Any:
    fields: dict[str, Any] = dict(
        tokenizer=Letters(), prompt="", skip=0, max_tokens=MAX, truncate=False, parse_special=False, allow_ids=True,
        padding="", needs_tokens=True, special_tokens=True, most_chars=None, null=False, query=None, template=None,
        entry=SimpleNamespace(key="k", ref="r"))
    return SimpleNamespace(**{**fields, **changes})


def rows_of(pack: Pack) -> list[list[int]]:
    return [part.tolist() for part in np.split(pack.ids, pack.offsets[1:-1])]


def test_a_text_may_fill_the_context() -> None:
    full, longer = "a" * MAX, "a" * (MAX + 1)
    assert rows_of(text_embedding.pack(plan_with(), ["b", full])) == [[98], [97] * MAX]
    with pytest.raises(mpool.ContextOverflow, match=r"`inputs\[8\]` has 7 tokens, .* at most 6") as caught:
        text_embedding.pack(plan_with(), ["b", longer], 7)
    assert (caught.value.tokens, caught.value.limit, caught.value.key) == (MAX + 1, MAX, "k")
    assert rows_of(text_embedding.pack(plan_with(truncate=True), [longer])) == [[97] * MAX]
    with pytest.raises(mpool.ContextOverflow, match="`inputs` has 7 tokens"):
        text_embedding.pack(plan_with(), [longer], single=True)


def test_texts_without_a_result_leave_out_no_other() -> None:
    """With ``on_error="null"``, each fault has its place, and the valid texts keep their order."""
    texts = ["ab", 3, "~", "", "a" * (MAX + 1), "cd", "\ud800"]
    found = text_embedding.pack(plan_with(null=True, prompt="P"), texts, 10)
    assert rows_of(found) == [[80, 97, 98], [80], [80, 99, 100]] and found.count == len(texts)
    faults = {at: type(fault).__name__ for at, fault in found.faults}
    assert faults == {1: "InvalidArgument", 3: "InvalidArgument", 4: "ContextOverflow", 6: "InvalidArgument"}
    assert [at for at, _ in found.faults] == sorted(faults)
    assert "`inputs[14]` has 8 tokens" in str(dict(found.faults)[4])
    bare = text_embedding.pack(plan_with(null=True), texts)
    assert rows_of(bare) == [[97, 98], [99, 100]] and [at for at, _ in bare.faults] == [1, 2, 3, 4, 6]
    with pytest.raises(mpool.InvalidArgument, match=r"inputs\[2\].*without tokens"):
        text_embedding.pack(plan_with(), ["ab", "cd", "~"])
    with pytest.raises(mpool.InvalidArgument, match=r"inputs\[9\]"):
        text_embedding.pack(plan_with(), ["ab", "cd", 3], 7)
    with pytest.raises(mpool.InvalidArgument, match="surrogate"):
        text_embedding.pack(plan_with(), ["ab~", "\ud800~", "~"])


def test_pooling_always_has_a_token() -> None:
    found = text_embedding.pack(plan_with(prompt="abcd", skip=4, truncate=True), ["", "x", "xyz"])
    assert found.skip is not None and found.skip.dtype == np.int32 and found.skip.tolist() == [3, 4, 4]
    assert text_embedding.pack(plan_with(), ["x"]).skip is None


def test_characters_are_cut_before_tokens() -> None:
    assert rows_of(text_embedding.pack(plan_with(most_chars=3, truncate=True), ["~~abc", "abcd"])) == [
        [97], [97, 98, 99]]


@pytest.mark.parametrize(("side", "first"), [("left", [0, 0, 0, 0, 97, 98]), ("right", [97, 98, 0, 0, 0, 0])])
def test_padding(side: str, first: list[int]) -> None:
    found = text_embedding.pack(plan_with(padding=side, tokenizer=Letters({"pad": 0})), ["ab", "abcdef"])
    assert rows_of(found) == [first, [97, 98, 99, 100, 101, 102]]
    assert found.ids.dtype == np.int32 and found.offsets.tolist() == [0, MAX, 2 * MAX]
    with pytest.raises(mpool.errors.FormatError, match="padding token"):
        text_embedding.pack(plan_with(padding=side), ["ab"])


def test_ids_of_tokens() -> None:
    sequences = [[0, VOCAB - 1], [5] * MAX, [7]]
    found = text_embedding.pack_ids(plan_with(), sequences)
    assert rows_of(found) == sequences and found.count == 3
    assert found.ids.dtype == np.int32 and found.offsets.dtype == np.int64
    with pytest.raises(mpool.ContextOverflow, match=rf"`inputs\[5\]` has {MAX + 1} tokens, .* 1 to 6"):
        text_embedding.pack_ids(plan_with(), [[1], [1] * (MAX + 1)], 4)
    with pytest.raises(mpool.InvalidArgument, match=r"`inputs\[5\]` must be a list of at least one token id"):
        text_embedding.pack_ids(plan_with(), [[1], []], 4)
    for token in (VOCAB, -1, 1.5, "a", True):
        with pytest.raises(mpool.InvalidArgument, match=r"inputs\[4\]\[1\]"):
            text_embedding.pack_ids(plan_with(), [[1], [1, token]], 3)  # type: ignore[list-item]
    with pytest.raises(mpool.InvalidArgument, match=r"inputs\[1\].*a list of token ids"):
        text_embedding.pack_ids(plan_with(), [[1], "text"])  # type: ignore[list-item]
    assert [text_embedding.are_token_ids(inputs) for inputs in (
        [[1]], [[1, 2], "a"], [], [[]], ["a"], [["a"]], [(1,)])] == [True, True] + 4 * [False] + [True]


def openai(size: int, **changes: bytes) -> Any:
    """A tokenizer whose vocabulary has the known texts of cl100k_base, and nothing else."""
    texts = [text_embedding._CL100K.get(token, b"?") for token in range(size)]
    for token, text in changes.items():
        texts[int(token[1:])] = text
    table = SimpleNamespace(data=b"".join(texts), offsets=np.cumsum([0, *map(len, texts)]))
    return SimpleNamespace(vocab_size=size, token_table=lambda: table)


def test_ids_of_openai_need_its_vocabulary() -> None:
    last = max(text_embedding._CL100K)
    assert text_embedding._has_openai_ids(openai(last + 1)) and not text_embedding._has_openai_ids(openai(last))
    for token in text_embedding._CL100K:
        assert not text_embedding._has_openai_ids(openai(last + 1, **{f"t{token}": b"other"}))
    with pytest.raises(mpool.InvalidArgument, match="allow_token_ids") as caught:
        text_embedding.pack_ids(plan_with(allow_ids=False), [[1]])
    assert caught.value.param == "input" and caught.value.key == "k"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_halves_have_the_same_texts(count: int) -> None:
    lengths = np.arange(count) % 3 + 1
    pack = Pack(np.arange(lengths.sum(), dtype=np.int32), np.cumsum([0, *lengths]),
                np.arange(count, dtype=np.int32), count, (), np.arange(count, dtype=np.int32) + 10)
    parts = text_embedding.halves(pack)
    if count == 1:
        assert parts == ()
        return
    assert [part.count for part in parts] == [count // 2, count - count // 2]
    assert sum((rows_of(part) for part in parts), []) == rows_of(pack)
    assert all(part.offsets[0] == 0 and part.offsets[-1] == len(part.ids) for part in parts)
    for name in ("skip", "second"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(pack, name).tolist()
    plain = text_embedding.halves(Pack(pack.ids, pack.offsets, None, count))
    assert all(part.skip is None and part.second is None for part in plain)


@pytest.mark.parametrize(("a", "b", "same"), [
    ([1, 2, 3], [9, 2, 3], [2, 3]), ([1, 2], [1, 2], [1, 2]), ([2], [1, 2], [2]), ([1], [2], []), ([], [1], [])])
def test_common_ends(a: list[int], b: list[int], same: list[int]) -> None:
    assert text_embedding.common_end(a, b) == same == text_embedding.common_end(b, a)


def test_lengths_of_texts() -> None:
    for least in (0, 1):
        assert text_embedding.fault_of("a" * MAX_CHARS, "t", least) is None
        assert f"got {MAX_CHARS + 1:,} characters" in str(text_embedding.fault_of("a" * (MAX_CHARS + 1), "t", least))
        assert (text_embedding.fault_of("", "t", least) is None) == (least == 0)
    for value, hint in ((None, "fillna"), (float("nan"), "fillna"), (b"a", "decode"), (1.5, None)):
        fault = text_embedding.fault_of(value, "t")
        assert fault is not None and (hint is None) == (fault.hint is None) and (hint or "") in (fault.hint or "")


def test_dimensions() -> None:
    free, listed, some = (SimpleNamespace(sizes=sizes, dimensions=dimensions) for sizes, dimensions in (
        ((), ()), ((), (8, 16)), ((4,), (8,))))
    for settings, right, wrong in ((free, (1, 32), (0, 33, 1.5, True)), (listed, (8, 16, 32), (4, 1, 33)),
                                   (some, (4, 32), (8, 5))):
        for value in right:
            assert text_embedding.dimensions_of(value, 32, settings, "k") == value  # type: ignore[arg-type]
        for value in wrong:
            with pytest.raises(mpool.InvalidArgument, match="dimensions"):
                text_embedding.dimensions_of(value, 32, settings, "k")  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, text_embedding.SLICE_TEXTS, text_embedding.SLICE_TEXTS + 1])
def test_slices_have_every_text_once(count: int) -> None:
    texts = [f"text {number}" for number in range(count)]
    found = list(text_embedding.slices(iter(texts)))
    assert [text for _, part in found for text in part] == texts
    assert all(1 <= len(part) <= text_embedding.SLICE_TEXTS and texts[first] == part[0] for first, part in found)
    assert len(found) == -(-count // text_embedding.SLICE_TEXTS)
