"""Results of text embedding that are not one array: sparse vectors, and one vector per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..checks import integer, refuse
from ..errors import InvalidArgument, Unsupported
from ..host.resources import install_hint, typed

if TYPE_CHECKING:
    from numpy.typing import NDArray


def rows_at(offsets: NDArray[np.int64], at: slice) -> tuple[NDArray[np.int64], Any]:
    """Return the offsets of a slice of texts, and the index that selects their elements: a slice object for step 1, so
    that the result is a view."""
    texts = range(len(offsets) - 1)[at]
    if texts.step == 1:
        first, end = texts.start, max(texts.stop, texts.start)
        return offsets[first:end + 1] - offsets[first], slice(offsets[first], offsets[end])
    parts = [np.arange(offsets[text], offsets[text + 1]) for text in texts]
    ends = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return ends, np.concatenate(parts) if parts else slice(0, 0)


def _text_at(at: int, texts: int, kind: str) -> int:
    """Return the number of a text, from 0, for an index of the caller, which may be negative.

    Args:
        at: index.
        texts: number of texts.
        kind: name of the class, for the error.

    Raises:
        IndexError: the index is out of range.
        TypeError: it is not an integer.
    """
    try:
        return range(texts)[at]
    except IndexError:
        count = f"{texts:,} text{'s' * (texts != 1)}"
        raise IndexError(f"index {at} is out of range: these {kind} are of {count}") from None
    except TypeError:
        raise TypeError(f"an index of {kind} must be an integer or a slice, not {type(at).__name__}") from None


def _same(a: Any, b: Any) -> bool:
    return a is None and b is None if a is None or b is None else np.array_equal(a, b)


def _row(name: str, value: Any, kinds: str, allowed: str) -> NDArray[Any]:
    """Return an argument as an array of one dimension whose numbers are of one of these kinds of NumPy."""
    try:
        found = np.asarray(value)
    except (TypeError, RuntimeError, ValueError):  # lists of different lengths, or a tensor that NumPy cannot convert
        refuse(name, value, allowed)
    if found.ndim != 1 or found.size and found.dtype.kind not in kinds:
        refuse(name, value, allowed)
    return found


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

    Raises:
        InvalidArgument: the arrays are not such a matrix.
    """

    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    values: NDArray[np.float32]
    shape: tuple[int, int]
    _token_text: Callable[[int], str] = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check the arrays: callers make vectors from files. Arrays of the documented types are not copied."""
        sizes = list(map(integer, self.shape)) if isinstance(self.shape, (tuple, list, np.ndarray)) else []
        if len(sizes) != 2 or any(size is None or not 0 <= size < 2**31 for size in sizes):
            refuse("shape", self.shape, "(n, vocabulary), two integers from 0")
        texts, vocab = int(sizes[0] or 0), int(sizes[1] or 0)
        indptr = _row("indptr", self.indptr, "iu", "an array of integers of shape (n + 1,)")
        indices = _row("indices", self.indices, "iu", "an array of token ids, one for each value")
        values = _row("values", self.values, "fiu", "an array of numbers of one dimension")
        if len(indices) != len(values):
            raise InvalidArgument(param="indices", got=f"{len(indices):,} token ids",
                                  allowed=f"one token id for each of the {len(values):,} values")
        if len(indptr) != texts + 1 or indptr[0] != 0 or indptr[-1] != len(values) or (indptr[1:] < indptr[:-1]).any():
            got = f"{len(indptr):,} positions" if len(indptr) != texts + 1 \
                else f"positions that go from {indptr[0]:,} to {indptr[-1]:,}"
            raise InvalidArgument(param="indptr", got=got, allowed=f"{texts + 1:,} positions that ascend from 0 to "
                                                                   f"{len(values):,}, the number of values")
        if len(indices) and not (0 <= indices.min() and indices.max() < vocab):
            raise InvalidArgument(param="indices", got=f"ids from {indices.min():,} to {indices.max():,}",
                                  allowed=f"token ids below {vocab:,}, the size of the vocabulary in shape")
        falls = np.flatnonzero(indices[1:] <= indices[:-1]) + 1
        falls = falls[indptr[np.searchsorted(indptr, falls)] != falls]  # a text may begin with a smaller id
        if len(falls):
            text = int(np.searchsorted(indptr, falls[0], "right")) - 1
            raise InvalidArgument(param="indices", got=f"{indices[falls[0]]:,} after {indices[falls[0] - 1]:,} in text "
                                  f"{text:,}", allowed="token ids that ascend within a text, each once")
        if not callable(self._token_text):
            refuse("_token_text", self._token_text, "a function that returns the text of a token id, such as str")
        for name, found in (("indptr", indptr.astype(np.int64, copy=False)), ("shape", (texts, vocab)),
                            ("indices", indices.astype(np.int32, copy=False)),
                            ("values", values.astype(np.float32, copy=False))):
            object.__setattr__(self, name, found)

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
        at = _text_at(at, len(self), "SparseVectors")
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
            refuse("top_k", top_k, "an integer of 1 or more, or None")
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
        except ModuleNotFoundError:
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
        if not isinstance(other, SparseVectors):
            refuse("other", other, f"SparseVectors over {self.shape[1]:,} tokens")
        if other.shape[1] != self.shape[1]:
            raise InvalidArgument(param="other", got=f"vectors over {other.shape[1]:,} tokens",
                                  allowed=f"SparseVectors over {self.shape[1]:,} tokens, like this object")
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
        at = _text_at(at, len(self), "TokenVectors")
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
