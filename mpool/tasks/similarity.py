"""How alike two sets of vectors are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Metric = Literal["cosine", "dot", "euclidean", "manhattan"]
_METRICS = ("cosine", "dot", "euclidean", "manhattan")
#: Components that one block of a manhattan comparison may hold.
_BLOCK = 1 << 22


def similarity(a: ArrayLike, b: ArrayLike, *, metric: Metric = "cosine",
               pairwise: bool = False) -> NDArray[np.floating]:
    """Similarity of every vector of ``a`` with every vector of ``b``; higher is more alike.

    Args:
        a: vectors, ``(n, d)``, or one, ``(d,)``.
        b: vectors, ``(m, d)``, or one, ``(d,)``.
        metric: ``"cosine"``, ``"dot"``, ``"euclidean"`` or ``"manhattan"``; the last two are negative distances, as in
            sentence-transformers. A vector of zeros has cosine 0 with everything.
        pairwise: compare row i with row i only.

    Returns:
        float32 (float64 if an input is): ``(n, m)``; a missing axis of an input is missing here too, so two single
        vectors give a 0-d array, which is usable as a float. With ``pairwise``: ``(n,)``.

    Raises:
        InvalidArgument: the shapes do not fit, an input is not numeric, or the metric is unknown.

    Example:
        >>> mpool.similarity([[1.0, 0.0], [0.0, 1.0]], [1.0, 0.0]).tolist()
        [1.0, 0.0]
    """
    if not isinstance(metric, str) or metric not in _METRICS:
        raise InvalidArgument(f"metric is {metric!r}, allowed: " + ", ".join(_METRICS))
    left, right = _vectors("a", a), _vectors("b", b)
    if left.shape[-1] != right.shape[-1]:
        raise InvalidArgument(f"vectors of a have {left.shape[-1]} components, those of b {right.shape[-1]}; allowed: "
                              "the same number")
    dtype = np.result_type(left, right)
    x, y = np.atleast_2d(left).astype(dtype, copy=False), np.atleast_2d(right).astype(dtype, copy=False)
    if metric == "cosine":
        x, y = _unit(x), _unit(y)
    if pairwise:
        if left.shape != right.shape:
            raise InvalidArgument(f"a has shape {left.shape}, b {right.shape}; allowed with pairwise: the same shape")
        return _pairs(x, y, metric).reshape(left.shape[:-1])
    return _all(x, y, metric).reshape(left.shape[:-1] + right.shape[:-1])


def _vectors(name: str, value: Any) -> NDArray[Any]:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise InvalidArgument(f"{name} is ragged: its vectors differ in length") from error
    if array.ndim not in (1, 2) or array.shape[-1] == 0 or array.dtype.kind not in "fiu":
        raise InvalidArgument(f"{name} has shape {array.shape} and dtype {array.dtype}, allowed: numbers of shape "
                              "(n, d) or (d,)")
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def _unit(x: NDArray[Any]) -> NDArray[Any]:
    # by the largest component first: squares of 1e30 or 1e-30 are beyond float32
    largest = np.abs(x).max(axis=1, keepdims=True)
    x = x / np.where(largest > 0, largest, 1).astype(x.dtype)
    length = np.linalg.norm(x, axis=1, keepdims=True)  # 1 to sqrt(d), or 0
    return x / np.where(length > 0, length, 1).astype(x.dtype)


def _pairs(x: NDArray[Any], y: NDArray[Any], metric: str) -> NDArray[Any]:
    if metric in ("cosine", "dot"):
        return np.einsum("ij,ij->i", x, y)
    return -np.linalg.norm(x - y, ord=2 if metric == "euclidean" else 1, axis=1)


def _all(x: NDArray[Any], y: NDArray[Any], metric: str) -> NDArray[Any]:
    if metric in ("cosine", "dot"):
        return x @ y.T
    # by differences: the shortcut through the dot product loses what distinguishes near neighbours
    order = 2 if metric == "euclidean" else 1
    out = np.empty((len(x), len(y)), dtype=x.dtype)
    rows = max(1, _BLOCK // max(1, y.size))
    for start in range(0, len(x), rows):
        out[start:start + rows] = -np.linalg.norm(x[start:start + rows, None] - y[None], ord=order, axis=2)
    return out
