"""OpenAI's protocol, and ``/v1/rerank`` in the format of Jina and Cohere."""

from __future__ import annotations

from ..operations import Operation
from . import chat, completions, images, responses, vectors

OPERATIONS: tuple[Operation, ...] = (*vectors.OPERATIONS, *completions.OPERATIONS, *chat.OPERATIONS,
                                     *responses.OPERATIONS, *images.OPERATIONS)

__all__ = ["OPERATIONS"]
