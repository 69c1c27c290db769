"""Results of embed_sparse, embed_tokens and embed_all as values: equality, slices, pickles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from mpool import InvalidArgument
from mpool.results import LabelledSpan, LabelScore, RankedDocument, SparseVectors, TextEmbeddings, TokenVectors


class Tokenizer:
    """A tokenizer that no pickle may contain."""

    def token_text(self, token: int) -> str:
        return f"t{token}"

    def __reduce__(self) -> Any:
        raise AssertionError("the tokenizer is pickled")


def sparse() -> SparseVectors:
    return SparseVectors(np.array([0, 2, 2, 3, 6]), np.array([1, 4, 0, 2, 3, 4], np.int32),
                         np.arange(1, 7).astype(np.float32), (4, 5), Tokenizer().token_text)


def test_indices_out_of_range_name_the_number_of_texts() -> None:
    tokens = TokenVectors(np.ones((3, 2), np.float32), np.array([0, 3]))
    for value, at, message in ((tokens, 5, "index 5 is out of range: these TokenVectors are of 1 text$"),
                               (sparse(), -5, "index -5 is out of range: these SparseVectors are of 4 texts$")):
        with pytest.raises(IndexError, match=message):
            value[at]
        with pytest.raises(TypeError, match="an index of .*Vectors must be an integer or a slice, not str"):
            value["a"]  # type: ignore[call-overload]
    assert (tokens[-1] == tokens[0]).all() and (tokens[np.int64(0)] == tokens[0]).all()


@pytest.mark.parametrize(("name", "value", "message"), [
    ("indptr", [0, 2, 2, 3], "`indptr` must be 5 positions that ascend from 0 to 6, the number of values, got 4 pos"),
    ("indptr", [0, 2, 2, 3, 7], "`indptr` must be 5 positions .* got positions that go from 0 to 7"),
    ("indptr", [1, 2, 2, 3, 6], "`indptr` must be 5 positions .* got positions that go from 1 to 6"),
    ("indptr", [0, 3, 2, 3, 6], "`indptr` must be 5 positions that ascend"),
    ("indptr", [0, 2, 2, 3, 6.5], r"`indptr` must be an array of integers of shape \(n \+ 1,\), got list"),
    ("indptr", None, "`indptr` must be an array of integers"), ("indptr", [[0], [1, 2]], "`indptr` must be an array"),
    ("indices", [1, 4, 0], "`indices` must be one token id for each of the 6 values, got 3 token ids"),
    ("indices", [1, 5, 0, 2, 3, 4], "`indices` must be token ids below 5, the size of the vocabulary in shape, got i"),
    ("indices", [-1, 4, 0, 2, 3, 4], "`indices` must be token ids below 5.* got ids from -1 to 4"),
    ("indices", [2**32 + 1, 4, 0, 2, 3, 4], "`indices` must be token ids below 5"),
    ("indices", [1, 4, 0, 2, 4, 4], "`indices` must be token ids that ascend within a text, each once, got 4 after "),
    ("indices", [4, 1, 0, 2, 3, 4], "`indices` must be token ids that ascend .* got 1 after 4 in text 0"),
    ("values", ["a"] * 6, "`values` must be an array of numbers of one dimension"), ("values", [[1.0] * 6], "`values`"),
    ("shape", (5, 5), "`indptr` must be 6 positions"), ("shape", None, r"`shape` must be \(n, vocabulary\)"),
    ("shape", (4, 5, 1), "`shape` must be"), ("shape", (4, -1), "`shape` must be"), ("shape", (4, 2.5), "`shape` must"),
    ("_token_text", "x", "`_token_text` must be a function")])
def test_arrays_that_are_no_matrix(name: str, value: Any, message: str) -> None:
    """Vectors are also made from the arrays of a file, which may be damaged, or belong to another file."""
    given = {"indptr": [0, 2, 2, 3, 6], "indices": [1, 4, 0, 2, 3, 4], "values": [1, 2, 3, 4, 5, 6], "shape": [4, 5],
             "_token_text": str}
    made = SparseVectors(**given)  # type: ignore[arg-type]
    assert made == sparse() and made.shape == (4, 5)
    assert [getattr(made, one).dtype for one in ("indptr", "indices", "values")] == [np.int64, np.int32, np.float32]
    assert made.decoded()[3] == [("4", 6.0), ("3", 5.0), ("2", 4.0)]
    with pytest.raises(InvalidArgument, match=message):
        SparseVectors(**{**given, name: value})


def test_arrays_of_a_matrix_are_not_copied() -> None:
    """Vectors without texts or values are valid, and arrays of the documented types are used as they are."""
    whole = sparse()
    part = SparseVectors(whole.indptr, whole.indices, whole.values, whole.shape, str)
    assert part.indptr is whole.indptr and part.indices is whole.indices and part.values is whole.values
    assert len(SparseVectors([0], [], [], (0, 5), str)) == 0  # type: ignore[arg-type]
    assert SparseVectors([0, 0, 0], [], [], (2, 0), str).decoded() == [[], []]  # type: ignore[arg-type]


def tokens() -> TokenVectors:
    return TokenVectors(np.arange(12, dtype=np.float32).reshape(6, 2), np.array([0, 2, 2, 3, 6]))


def both() -> TextEmbeddings:
    return TextEmbeddings(np.ones((4, 3), np.float32), sparse(), tokens())


@pytest.mark.parametrize("make", (sparse, tokens, both))
def test_equality(make: Any) -> None:
    one, other = make(), make()
    assert one == other and not one != other and one != 5
    if make is both:
        assert one != TextEmbeddings(one.dense, None, one.tokens)
        assert one != TextEmbeddings(None, one.sparse, one.tokens)
        one.dense[2] = 7
    else:
        one.values[2] = 7
    assert one != other
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)


@pytest.mark.parametrize("at", (slice(None), slice(1, 3), slice(2, None), slice(3, 1), slice(None, None, -1),
                                slice(None, None, 2), slice(3, 0, -2), slice(9, 12), slice(1, 1, 3)), ids=str)
def test_slices(at: slice) -> None:
    for whole in (sparse(), tokens()):
        part = whole[at]
        expected = list(whole)[at]
        assert type(part) is type(whole) and len(part) == len(expected)
        for one, other in zip(part, expected):
            assert all(map(np.array_equal, one, other)) if isinstance(one, tuple) else np.array_equal(one, other)
        if isinstance(part, SparseVectors) and isinstance(whole, SparseVectors):
            assert part.shape == (len(expected), 5) and part.decoded() == whole.decoded()[at]
            assert part.indptr[0] == 0 and part.indptr[-1] == len(part.indices) == len(part.values)


@pytest.mark.parametrize("make", (sparse, tokens, both))
def test_pickles(make: Any) -> None:
    whole = make()
    for found in (pickle.loads(pickle.dumps(whole)), copy.deepcopy(whole), copy.copy(whole),
                  pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(whole))))):
        assert found == whole
        if make is sparse:
            assert found.decoded() == whole.decoded() == [[("t4", 2.0), ("t1", 1.0)], [], [("t0", 3.0)],
                                                          [("t4", 6.0), ("t3", 5.0), ("t2", 4.0)]]
            assert found.decoded(np.int64(1)) == whole.decoded(1)


@pytest.mark.parametrize("result, text", [
    (LabelScore(1, "red", 0.5), "red"), (RankedDocument(0, 0.5, "a cat"), "a cat"),
    (LabelledSpan("PER", 0.5, 3, 6, "Ada"), "Ada")], ids=lambda value: type(value).__name__)
def test_texts_of_results(result: Any, text: str) -> None:
    assert str(result) == text == f"{result}"
