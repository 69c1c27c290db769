"""``/v1/embeddings`` and ``/v1/rerank``."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from ...tasks.running import counted
from ...tasks.verbs import EMBED, RERANK
from ..errors import Refusal
from ..operations import Context, Operation, json_response, large_response
from .structs import (
    Document,
    Embedding,
    EmbeddingsRequest,
    EmbeddingsResponse,
    InputUsage,
    RankedResult,
    RerankRequest,
    RerankResponse,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


async def embeddings(context: Context, body: EmbeddingsRequest) -> Response:
    """Embed texts or token ids."""
    served = await context.model(body.model)
    inputs = texts_or_ids(context, body.input)
    vectors, tokens = await counted(EMBED, context.state.pool, {
        "inputs": inputs, "model": served.model, "task": body.task, "dimensions": body.dimensions,
        "allow_token_ids": bool(body.allow_token_ids or context.state.settings.allow_token_ids)})
    rows = vectors if vectors.ndim == 2 else vectors[None]

    def made() -> EmbeddingsResponse:
        data = [Embedding(at, value) for at, value in enumerate(encoded(rows, body.encoding_format))]
        return EmbeddingsResponse(data, body.model, InputUsage(tokens, tokens))

    return await large_response(made, rows.size)


def texts_or_ids(context: Context, given: str | list[Any], name: str = "input",
                 most: int | None = None) -> str | list[Any]:
    """Check a field that is a text, a list of texts, a list of token ids, or a list of such lists.

    Args:
        context: Context of the request.
        given: Value of the field.
        name: Name of the field.
        most: Maximum number of texts or lists of token ids; None: ``PoolConfig.max_embed_inputs``.

    Returns:
        The value; a single list of token ids is wrapped in a list.

    Raises:
        Refusal: The value contains texts and token ids, there are too many, or a text is too long.
    """
    if isinstance(given, str):
        return context.check_text(given, name)
    if given and not isinstance(given[0], int):
        context.check_inputs(given, name, context.state.pool.config.max_embed_inputs if most is None else most)
    kinds = {type(part) for part in given}
    if len(kinds) > 1:
        raise Refusal("invalid_value", f"`{name}` must be texts or token ids, got a list with both.", name)
    if kinds == {int}:
        return [given]
    return given


def encoded(rows: NDArray[Any], encoding: str) -> list[Any]:
    """Encode the rows of a (rows, size) array as lists of numbers, or as base64 of little-endian float32."""
    if encoding == "base64":
        data = rows.astype("<f4", copy=False)
        return [base64.b64encode(row.tobytes()).decode() for row in data]
    found: list[Any] = rows.tolist()
    return found


async def rerank(context: Context, body: RerankRequest) -> Response:
    """Rank documents by relevance to a query."""
    served = await context.model(body.model)
    texts = [context.check_text(part.text if isinstance(part, Document) else part, f"documents[{at}]")
             for at, part in enumerate(body.documents)]
    context.check_text(body.query, "query")
    ranking, tokens = await counted(RERANK, context.state.pool, {
        "query": body.query, "documents": texts, "model": served.model, "top_k": body.top_n,
        **({} if body.prompt is None else {"prompt": context.check_text(body.prompt, "prompt")})})
    results = [RankedResult(found.index, found.score, Document(found.text) if body.return_documents else None)
               for found in ranking.results]
    return json_response(RerankResponse(f"rerank-{context.id}", body.model, results, {"total_tokens": tokens}))


OPERATIONS = (
    Operation("POST", "/v1/embeddings", embeddings, EmbeddingsRequest, EmbeddingsResponse, "Embed texts or token ids",
              name="embeddings"),
    Operation("POST", "/v1/rerank", rerank, RerankRequest, RerankResponse, "Rank documents by relevance to a query",
              name="rerank"),
)

__all__ = ["OPERATIONS", "encoded", "texts_or_ids"]
