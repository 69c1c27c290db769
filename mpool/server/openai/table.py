"""The operations of OpenAI's protocol."""

from __future__ import annotations

from ..operations import Operation
from . import chat, completions, fill_in_middle, images, responses, vectors

OPERATIONS: tuple[Operation, ...] = (*vectors.OPERATIONS, *completions.OPERATIONS, *fill_in_middle.OPERATIONS,
                                     *chat.OPERATIONS, *responses.OPERATIONS, *images.OPERATIONS)

__all__ = ["OPERATIONS"]
