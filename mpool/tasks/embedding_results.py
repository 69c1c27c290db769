"""Results of text embedding that are not one array: sparse vectors, and one vector per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import refuse
from ..errors import Unsupported

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SparseVectors:
    """Sparse vectors of n texts as a matrix in CSR form. Supports ``len()``, indexing and iteration.

    ``vectors[i]`` is the sparse vector of text i: its token ids and their weights.

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

    def __getitem__(self, at: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        at = range(len(self))[at]
        part = slice(self.indptr[at], self.indptr[at + 1])
        return self.indices[part], self.values[part]

    def __iter__(self) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float32]]]:
        return (self[at] for at in range(len(self)))

    def decoded(self, top_k: int | None = None) -> list[list[tuple[str, float]]]:
        """Return the tokens and weights of each text, the largest weights first.

        Args:
            top_k: maximum number of tokens of a text; None: all.

        Raises:
            InvalidArgument: ``top_k`` is not an integer of at least 1.
        """
        if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
            refuse("top_k", top_k, "1 or more, or None")
        found = []
        for ids, values in self:
            order = np.argsort(-values, kind="stable")[:top_k]
            found.append([(self._token_text(int(ids[i])), float(values[i])) for i in order])
        return found

    def to_scipy(self) -> Any:
        """Return a ``scipy.sparse.csr_matrix`` over the same memory.

        Raises:
            Unsupported: SciPy is not installed.
        """
        try:
            from scipy.sparse import csr_matrix
        except ImportError:
            raise Unsupported("to_scipy() needs SciPy, which is not installed",
                              hint="pip install scipy, or use indptr, indices and values") from None
        return csr_matrix((self.values, self.indices, self.indptr), shape=self.shape)

    def dot(self, other: SparseVectors) -> NDArray[np.float32]:
        """Return the dot product of each of these vectors with each of ``other``, float32 ``(n, m)``.

        The memory that it takes beside the result is one dense vector.

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


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """Vectors of the tokens of n texts. Supports ``len()``, indexing and iteration.

    ``vectors[i]`` is the float32 matrix ``(tokens, d)`` of text i.

    Attributes:
        values: vectors of all tokens, float32 ``(tokens, d)``.
        offsets: where each text begins in ``values``, int64 ``(n + 1,)``.
    """

    values: NDArray[np.float32]
    offsets: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, at: int) -> NDArray[np.float32]:
        at = range(len(self))[at]
        return self.values[self.offsets[at]:self.offsets[at + 1]]

    def __iter__(self) -> Iterator[NDArray[np.float32]]:
        return (self[at] for at in range(len(self)))


@dataclass(frozen=True, slots=True)
class TextEmbeddings:
    """All outputs that a model has for n texts, computed in one pass.

    Attributes:
        dense: vectors, float32 ``(n, d)``; None: the model has none.
        sparse: sparse vectors, or None.
        tokens: vectors of tokens, or None.
    """

    dense: NDArray[np.float32] | None
    sparse: SparseVectors | None
    tokens: TokenVectors | None
