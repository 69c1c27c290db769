"""OpenAI's protocol, and ``/v1/rerank`` as Jina and Cohere have it: what clients of these know, spoken by the pool."""

from __future__ import annotations

from ..operations import Operation
from . import chat, completions, pictures, vectors

OPERATIONS: tuple[Operation, ...] = (*vectors.OPERATIONS, *completions.OPERATIONS, *chat.OPERATIONS,
                                     *pictures.OPERATIONS)

__all__ = ["OPERATIONS"]
