"""Results of embed_sparse, embed_tokens and embed_all as values: equality, slices, pickles."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from mpool import LabelledSpan, LabelScore, RankedDocument, SparseVectors, TextEmbeddings, TokenVectors


class Tokenizer:
    """A tokenizer that no pickle may contain."""

    def token_text(self, token: int) -> str:
        return f"t{token}"

    def __reduce__(self) -> Any:
        raise AssertionError("the tokenizer is pickled")


def sparse() -> SparseVectors:
    return SparseVectors(np.array([0, 2, 2, 3, 6]), np.array([1, 4, 0, 2, 3, 4], np.int32),
                         np.arange(1, 7).astype(np.float32), (4, 5), Tokenizer().token_text)


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
