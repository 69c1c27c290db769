"""Requests of the adapters for vector stores and retrieval libraries, to a model of any pool: lists of texts in, arrays
out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .. import aio
from ..api.functions import pool_of
from ..checks import items_of
from ..errors import InvalidArgument
from ..model import Model
from ..tasks.rerank import function_of
from ..tasks.vectors import activate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..tasks.rerank import Ranking

Task = Literal["query", "document"]
#: Maximum number of documents per reranking request: the pool has a limit, and serves other callers between requests.
SLICE = 1000
_LOGITS = {"function_to_apply": "none"}


def embed(model: Any, texts: Sequence[str], task: Task, options: dict[str, Any]) -> NDArray[Any]:
    """Return the vectors of texts, ``(n, d)``, with the model's prompt for the task unless the options name another."""
    found: NDArray[Any] = pool_of(model).embed(**_embed_arguments(model, texts, task, options))
    return found


async def aembed(model: Any, texts: Sequence[str], task: Task, options: dict[str, Any]) -> NDArray[Any]:
    """Asynchronous form of :func:`embed`."""
    return await aio.embed(pool=pool_of(model), **_embed_arguments(model, texts, task, options))


def _embed_arguments(model: Any, texts: Sequence[str], task: Task, options: dict[str, Any]) -> dict[str, Any]:
    given = list(items_of("texts", texts, "a list of str"))
    return {"inputs": given, "model": model, "task": task, "max_inputs": max(len(given), 1), **options}


class Scores(NamedTuple):
    """Scores of documents, with the logits that they are made of: a sigmoid rounds high logits to the same score.

    Attributes:
        values: scores, float32 ``(n,)``.
        logits: logits, float32 ``(n,)``.
    """

    values: NDArray[np.float32]
    logits: NDArray[np.float32]

    def best(self, count: int | None = None) -> list[int]:
        """Return the indices of the ``count`` highest logits, the highest first; equal logits keep their order."""
        return [int(at) for at in np.argsort(-self.logits, kind="stable")[:count]]


def scores(model: Any, query: str, documents: Sequence[str], options: dict[str, Any]) -> Scores:
    """Return the relevance of each document to a query, in requests of at most :data:`SLICE` documents."""
    pool, given = pool_of(model), list(items_of("documents", documents, "a list of str"))
    return _joined(pool, options, [pool.rerank(query, given[start:start + SLICE], model, **options | _LOGITS)
                                   for start in range(0, len(given), SLICE)])


async def ascores(model: Any, query: str, documents: Sequence[str], options: dict[str, Any]) -> Scores:
    """Asynchronous form of :func:`scores`."""
    pool, given = pool_of(model), list(items_of("documents", documents, "a list of str"))
    return _joined(pool, options, [
        await aio.rerank(query, given[start:start + SLICE], model, pool=pool, **options | _LOGITS)
        for start in range(0, len(given), SLICE)])


def _joined(pool: Any, options: Mapping[str, Any], parts: list[Ranking]) -> Scores:
    logits = np.concatenate([np.empty(0, np.float32), *(np.asarray(part.scores, np.float32) for part in parts)])
    function = options.get("function_to_apply")
    if function is None and parts:
        function = function_of(pool.get(parts[0].model).description.embedding)
    return Scores(activate(logits[:, None], function or "none")[:, 0], logits)


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
                                   "mpool.register(name, model)")
    return name_of(model)
