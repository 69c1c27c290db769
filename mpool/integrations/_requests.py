"""Requests of the adapters for vector stores and retrieval libraries, to a model of any pool: lists of texts in, arrays
out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .. import aio
from .._functions import pool_of
from ..errors import InvalidArgument
from ..model import Model

if TYPE_CHECKING:
    from numpy.typing import NDArray

Task = Literal["query", "document"]
#: Maximum number of documents per reranking request: the pool has a limit, and serves other callers between requests.
SLICE = 1000


def embed(model: Any, texts: Sequence[str], task: Task, options: dict[str, Any]) -> NDArray[Any]:
    """Return the vectors of texts, ``(n, d)``, with the model's prompt for the task unless the options name another."""
    found: NDArray[Any] = pool_of(model).embed(**_embed_arguments(model, texts, task, options))
    return found


async def aembed(model: Any, texts: Sequence[str], task: Task, options: dict[str, Any]) -> NDArray[Any]:
    """Asynchronous form of :func:`embed`."""
    return await aio.embed(pool=pool_of(model), **_embed_arguments(model, texts, task, options))


def _embed_arguments(model: Any, texts: Sequence[str], task: Task, options: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": list(texts), "model": model, "task": task, "max_inputs": max(len(texts), 1), **options}


def scores(model: Any, query: str, documents: Sequence[str], options: dict[str, Any]) -> NDArray[np.float32]:
    """Return the relevance of each document to a query, float32 ``(n,)``, in requests of at most :data:`SLICE`
    documents."""
    pool = pool_of(model)
    return _joined([pool.rerank(query, documents[start:start + SLICE], model, **options).scores
                    for start in range(0, len(documents), SLICE)])


async def ascores(model: Any, query: str, documents: Sequence[str], options: dict[str, Any]) -> NDArray[np.float32]:
    """Asynchronous form of :func:`scores`."""
    pool = pool_of(model)
    return _joined([(await aio.rerank(query, documents[start:start + SLICE], model, pool=pool, **options)).scores
                    for start in range(0, len(documents), SLICE)])


def _joined(parts: list[tuple[float, ...]]) -> NDArray[np.float32]:
    return np.concatenate([np.empty(0, np.float32), *(np.asarray(part, np.float32) for part in parts)])


def best(found: NDArray[np.float32], count: int | None) -> list[int]:
    """Return the indices of the ``count`` highest scores, the highest first; equal scores keep their order."""
    return [int(at) for at in np.argsort(-found, kind="stable")[:count]]


def name_of(model: Any) -> str | None:
    """Return the name of a model for records of other libraries; None: the default model."""
    return model.key if isinstance(model, Model) else None if model is None else str(model)


def stored_name(model: Any, where: str) -> str | None:
    """Return the model name that another library stores, and from which another process recreates the adapter.

    Raises:
        InvalidArgument: the model is a :class:`mpool.Model`, whose pool exists in this process only.
    """
    if isinstance(model, Model):
        raise InvalidArgument(param="model", got=f"the mpool.Model {model.key}",
                              allowed=f"a key, a path or a reference: {where} stores it",
                              hint=f"Pass {model.ref!r}, or a name that you register in every process: "
                                   "mpool.register(name, ref)")
    return name_of(model)
