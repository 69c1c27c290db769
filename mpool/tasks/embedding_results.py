"""Results of text embedding that are not one array: sparse vectors, and one vector per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..checks import integer, refuse
from ..errors import InvalidArgument, Unsupported
from ..resources import install_hint, typed

if TYPE_CHECKING:
    from numpy.typing import NDArray


def rows_at(offsets: NDArray[np.int64], at: slice) -> tuple[NDArray[np.int64], Any]:
    """Return the offsets of a slice of texts, and the index of their elements, which makes a view for step 1."""
    texts = range(len(offsets) - 1)[at]
    if texts.step == 1:
        first, end = texts.start, max(texts.stop, texts.start)
        return offsets[first:end + 1] - offsets[first], slice(offsets[first], offsets[end])
    parts = [np.arange(offsets[text], offsets[text + 1]) for text in texts]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return ends, np.concatenate(parts) if parts else slice(0, 0)


def _same(a: Any, b: Any) -> bool:
    return a is None and b is None if a is None or b is None else np.array_equal(a, b)


@dataclass(frozen=True, slots=True, eq=False)
class SparseVectors:
    """Sparse vectors of n texts as a matrix in CSR form. Supports ``len()``, indexing and iteration.

    ``vectors[i]`` is the sparse vector of text i: its token ids and their weights. A slice gives the vectors of several
    texts. Vectors with the same indices, values and shape are equal. A pickle contains the texts of the tokens that
    occur, not the tokenizer.

    Attributes:
        indptr: where each text begins in the other two arrays, int64 ``(n + 1,)``.
        indices: token ids, ascending within a text, int32.
        values: weights of these tokens, float32.
        shape: ``(n, vocabulary)``.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]
    shape: tuple[int, int]
    _token_text: Callable[[int], str] = field(repr=False, compare=False)

    def __len__(self) -> int:
        return self.shape[0]

    @overload
    def __getitem__(self, at: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]: ...

    @overload
    def __getitem__(self, at: slice) -> SparseVectors: ...

    def __getitem__(self, at: int | slice) -> tuple[NDArray[np.int32], NDArray[np.float32]] | SparseVectors:
        if isinstance(at, slice):
            indptr, found = rows_at(self.indptr, at)
            return SparseVectors(indptr, self.indices[found], self.values[found], (len(indptr) - 1, self.shape[1]),
                                 self._token_text)
        at = range(len(self))[at]
        part = slice(self.indptr[at], self.indptr[at + 1])
        return self.indices[part], self.values[part]

    def __iter__(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparseVectors):
            return NotImplemented
        return self.shape == other.shape and _same(self.indptr, other.indptr) \
            and _same(self.indices, other.indices) and _same(self.values, other.values)

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __reduce__(self) -> tuple[Any, ...]:
        texts = {token: self._token_text(token) for token in np.unique(self.indices).tolist()}
        return SparseVectors, (self.indptr, self.indices, self.values, self.shape, texts.__getitem__)

    @typed
    def decoded(self, top_k: int | None = None) -> list[list[tuple[str, float]]]:
        """Return the tokens and weights of each text, the largest weights first.

        Args:
            top_k: maximum number of tokens of a text; None: all.

        Raises:
            InvalidArgument: ``top_k`` is not an integer of at least 1.
        """
        count = integer(top_k)
        if top_k is not None and (count is None or count < 1):
            refuse("top_k", top_k, "1 or more, or None")
        found = []
        for ids, values in self:
            order = np.argsort(-values, kind="stable")[:count]
            found.append([(self._token_text(int(ids[i])), float(values[i])) for i in order])
        return found

    @typed
    def to_scipy(self) -> Any:
        """Return a ``scipy.sparse.csr_matrix`` over the same memory.

        Raises:
            Unsupported: SciPy is not installed.
        """
        try:
            from scipy.sparse import csr_matrix
        except ImportError:
            raise Unsupported("to_scipy() needs SciPy, which is not installed",
                              hint=install_hint("scipy") + ", or use indptr, indices and values") from None
        return csr_matrix((self.values, self.indices, self.indptr), shape=self.shape)

    @typed
    def dot(self, other: SparseVectors) -> NDArray[np.float32]:
        """Return the dot product of each of these vectors with each of ``other``, float32 ``(n, m)``.

        In addition to the result, it needs memory for one dense vector.

        Raises:
            InvalidArgument: the vocabularies differ.
        """
        if not isinstance(other, SparseVectors) or other.shape[1] != self.shape[1]:
            got = f"vectors over {other.shape[1]:,} tokens" if isinstance(other, SparseVectors) else other
            refuse("other", got, f"SparseVectors over {self.shape[1]:,} tokens")
        out = np.zeros((len(self), len(other)), dtype=np.float32)
        row = np.zeros(self.shape[1], dtype=np.float32)
        starts = np.minimum(other.indptr[:-1], max(len(other.values) - 1, 0))
        filled = np.diff(other.indptr) > 0
        for at, (ids, values) in enumerate(self):
            if not len(other.values):
                break
            row[ids] = values
            products = other.values * row[other.indices]
            out[at, filled] = np.add.reduceat(products, starts[filled])
            row[ids] = 0
        return out


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectors:
    """Vectors of the tokens of n texts. Supports ``len()``, indexing and iteration.

    ``vectors[i]`` is the float32 matrix ``(tokens, d)`` of text i. A slice gives the vectors of several texts. Vectors
    with the same values and offsets are equal.

    Attributes:
        values: vectors of all tokens, float32 ``(tokens, d)``.
        offsets: where each text begins in ``values``, int64 ``(n + 1,)``.
    """

    values: NDArray[np.float32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, at: int) -> NDArray[np.float32]: ...

    @overload
    def __getitem__(self, at: slice) -> TokenVectors: ...

    def __getitem__(self, at: int | slice) -> NDArray[np.float32] | TokenVectors:
        if isinstance(at, slice):
            offsets, found = rows_at(self.offsets, at)
            return TokenVectors(self.values[found], offsets)
        at = range(len(self))[at]
        return self.values[self.offsets[at]:self.offsets[at + 1]]

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (self[at] for at in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenVectors):
            return NotImplemented
        return _same(self.values, other.values) and _same(self.offsets, other.offsets)

    __hash__ = None  # type: ignore[assignment]  # like a list


@dataclass(frozen=True, slots=True, eq=False)
class TextEmbeddings:
    """All outputs that a model has for n texts, computed in one pass. Equal if each output is equal.

    Attributes:
        dense: vectors, float32 ``(n, d)``; None: the model has none.
        sparse: sparse vectors, or None.
        tokens: token vectors, or None.
    """

    dense: NDArray[np.float32] | None
    sparse: SparseVectors | None
    tokens: TokenVectors | None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TextEmbeddings):
            return NotImplemented
        return _same(self.dense, other.dense) and self.sparse == other.sparse and self.tokens == other.tokens

    __hash__ = None  # type: ignore[assignment]  # it has arrays


def refuse_results(name: str, value: Any, allowed: str) -> None:
    """Raise InvalidArgument for a result of this module in place of an array; the hint names what compares it.

    Args:
        name: parameter name.
        value: argument of the caller.
        allowed: allowed values, for the message.
    """
    hint = "a.dot(b) compares sparse vectors" if isinstance(value, SparseVectors) else \
        "mpool.maxsim(query, documents) compares token vectors" if isinstance(value, TokenVectors) else \
        "Pass one of its outputs, such as its attribute dense" if isinstance(value, TextEmbeddings) else None
    if hint is not None:
        raise InvalidArgument(param=name, got=type(value).__name__, allowed=allowed, hint=hint)
