"""Similarity of vectors: cosine, dot product, and negative distances."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..checks import one_of, refuse
from ..errors import InvalidArgument
from ..host.resources import typed
from ..names import SIMILARITIES
from ..tasks.embedding_results import refuse_results

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Metric = Literal["cosine", "dot", "euclidean", "manhattan"]
_SHAPES = "an array of numbers of shape (n, d) or (d,)"
#: What to do with vectors of bytes, and with int8 vectors beside floats.
_BYTES = ("Compare float vectors. The Hamming distance of packed bits (precision='ubinary') is "
          "np.unpackbits(query ^ corpus, axis=-1).sum(axis=-1); convert other numbers with astype(np.float32)")
_LEVELS = ("Compare float vectors. With precision='int8', each request has its own range for each component; if your "
           "int8 vectors are the floats times one factor, convert them with astype(np.float32)")
#: Maximum number of components of a vector in the core; csrc/python/type_search.c refuses longer ones, too.
_MAX_DIMENSIONS = 1 << 20
#: Maximum number of components in one block of differences of a euclidean or manhattan comparison.
_BLOCK = 1 << 22


@typed
def similarity(a: ArrayLike, b: ArrayLike, *, metric: Metric = "cosine",
               pairwise: bool = False) -> NDArray[np.floating]:
    """Computes the similarity of every vector of ``a`` to every vector of ``b``; higher values are more similar.

    int8 vectors are compared as numbers. Bits of ``precision="binary"`` are int8, too: embed with ``"ubinary"``, which
    this function refuses, and see the guide for their Hamming distance.

    Args:
        a: array of n vectors, shape ``(n, d)``, or one vector, shape ``(d,)``.
        b: array of m vectors, shape ``(m, d)``, or one vector, shape ``(d,)``.
        metric: ``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"manhattan"``; the last two are negative distances, as in
            sentence-transformers. The cosine similarity of a zero vector to any vector is 0.
        pairwise: True: compare only row i of ``a`` with row i of ``b``.

    Returns:
        Array of shape ``(n, m)``, or ``(n,)`` with ``pairwise``; float32, or float64 if an input is float64. An input
        of shape ``(d,)`` contributes no axis: two single vectors give a 0-d array, which can be used as a float. NumPy
        computes the products, so the last bits of a value may depend on n and m. Scores of :func:`semantic_search` do
        not depend on the other vectors.

    Raises:
        InvalidArgument: the shapes do not match, an input is not numeric or has bytes (uint8), one input is int8 and
            the other has floats, or the metric is unknown.

    Example:
        >>> mpool.similarity([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0]).tolist()
        [1.0, 0.0]
    """
    one_of("metric", metric, SIMILARITIES)
    if not isinstance(pairwise, bool):
        refuse("pairwise", pairwise, "True or False")
    left, right = vectors_of("a", a), vectors_of("b", b)
    refuse_mixed("a", left, "b", right)
    left, right = _floats(left), _floats(right)
    if left.shape[-1] != right.shape[-1]:
        raise InvalidArgument(param="b", got=f"vectors of {right.shape[-1]:,} components",
                              allowed=f"vectors of {left.shape[-1]:,} components, like a")
    dtype = np.result_type(left, right)
    x, y = np.atleast_2d(left).astype(dtype, copy=False), np.atleast_2d(right).astype(dtype, copy=False)
    if metric == "cosine":
        x, y = _unit(x), _unit(y)
    if pairwise:
        if left.shape != right.shape:
            raise InvalidArgument(param="b", got=f"an array of shape {right.shape}",
                                  allowed=f"an array of shape {left.shape}, like a, with pairwise=True")
        return _pairs(x, y, metric).reshape(left.shape[:-1])
    return _all(x, y, metric).reshape(left.shape[:-1] + right.shape[:-1])


def cosines(left: NDArray[Any], right: NDArray[Any]) -> list[float]:
    """Return the cosine of row i of ``left``, or of its only row, to row i of ``right``, shape ``(n, d)``.

    The bytes of a cosine do not depend on the other rows, as they would in a product of matrices.
    """
    return similarity(np.broadcast_to(left, right.shape), right, pairwise=True).tolist()


def vectors_of(name: str, value: Any, allowed: str = _SHAPES, axes: tuple[int, ...] = (1, 2)) -> NDArray[Any]:
    """Check an argument that holds vectors and return it as an array of its own dtype, without a copy if it is one.

    Args:
        name: parameter name.
        value: argument of the caller.
        allowed: allowed values, for the message.
        axes: allowed numbers of axes; the last axis has the components of a vector, at least one.

    Raises:
        InvalidArgument: the value is not an array of real numbers with such axes, or its numbers are bytes (uint8).
    """
    refuse_results(name, value, allowed)
    array = array_of(name, value, allowed)
    if array.ndim not in axes or array.shape[-1] == 0 or array.dtype.kind not in "fiu":
        if array.dtype.kind in "US":
            raise InvalidArgument(param=name, got="text" if array.ndim == 0 else "texts", allowed=allowed,
                                  hint="Embed texts first: mpool.embed(texts)")
        raise InvalidArgument(param=name, got=f"shape {array.shape} and dtype {array.dtype}", allowed=allowed)
    if array.dtype == np.uint8:
        raise InvalidArgument(param=name, got=f"shape {array.shape} and dtype uint8", hint=_BYTES,
                              allowed=f"{allowed}, which are not packed bits or levels from 0 to 255")
    return array


def refuse_mixed(first: str, a: NDArray[Any], second: str, b: NDArray[Any]) -> None:
    """Raise InvalidArgument if one array is int8 and the other has floats.

    Args:
        first, second: parameter names.
        a, b: arrays of both parameters.
    """
    for name, array, other_name, other in ((first, a, second, b), (second, b, first, a)):
        if array.dtype == np.int8 and other.dtype.kind == "f":
            raise InvalidArgument(param=name, got=f"int8 vectors, while `{other_name}` has floats", hint=_LEVELS,
                                  allowed=f"an array of floats, like {other_name}")


def array_of(name: str, value: Any, allowed: str) -> NDArray[Any]:
    """Return a caller's value as an array.

    Args:
        name: parameter name.
        value: argument of the caller.
        allowed: allowed values, for the message.

    Raises:
        InvalidArgument: NumPy cannot convert the value: its rows differ in length, or it is a tensor of torch with
            gradients, in bfloat16, sparse, or not on the CPU.
    """
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InvalidArgument(param=name, got="vectors of different lengths", allowed=allowed) from error
    except (TypeError, RuntimeError) as error:
        got = f"a value that NumPy cannot convert ({str(error)[:200]})"
        raise InvalidArgument(param=name, got=got, allowed=allowed,
                              hint="Convert tensors first: tensor.detach().float().cpu().numpy()") from error


def refuse_wide(name: str, dimensions: int) -> None:
    """Raise InvalidArgument if vectors have more components than the core takes. ``name``: parameter name."""
    if dimensions > _MAX_DIMENSIONS:
        raise InvalidArgument(param=name, got=f"vectors of {dimensions:,} components",
                              allowed=f"vectors of at most {_MAX_DIMENSIONS:,} components")


def _floats(array: NDArray[Any]) -> NDArray[Any]:
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _unit(x: NDArray[Any]) -> NDArray[Any]:
    """Return the rows scaled to length 1; zero rows stay zero."""
    # Divide by the largest component first: the squares of 1e30 and 1e-30 are outside the range of float32.
    largest = np.abs(x).max(axis=1, keepdims=True)
    x = x / np.where(largest > 0, largest, 1).astype(x.dtype)
    length = np.linalg.norm(x, axis=1, keepdims=True)  # 1 to sqrt(d), or 0
    return x / np.where(length > 0, length, 1).astype(x.dtype)


def _pairs(x: NDArray[Any], y: NDArray[Any], metric: str) -> NDArray[Any]:
    """Return the similarity of row i of ``x`` to row i of ``y``, shape ``(n,)``."""
    if metric in ("cosine", "dot"):
        return np.einsum("ij,ij->i", x, y)
    return -np.linalg.norm(x - y, ord=2 if metric == "euclidean" else 1, axis=1)


def _all(x: NDArray[Any], y: NDArray[Any], metric: str) -> NDArray[Any]:
    """Return the similarity of every row of ``x`` to every row of ``y``, shape ``(n, m)``."""
    if metric in ("cosine", "dot"):
        return x @ y.T
    # Subtract the vectors: the expansion into dot products cancels the digits that distinguish near neighbours.
    order = 2 if metric == "euclidean" else 1
    out = np.empty((len(x), len(y)), dtype=x.dtype)
    rows = max(1, _BLOCK // max(1, y.size))
    for start in range(0, len(x), rows):
        out[start:start + rows] = -np.linalg.norm(x[start:start + rows, None] - y[None], ord=order, axis=2)
    return out
