"""``suffix`` of OpenAI's and Ollama's completions: the model fills in the middle between the prompt and the suffix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..host import native_calls
from .errors import Refusal
from .models import is_missing

if TYPE_CHECKING:
    from .models import ServedModel


async def prompt_ids(served: ServedModel, prompt: str, suffix: str) -> list[int]:
    """Return the token ids of a prompt whose completion belongs between ``prompt`` and ``suffix``.

    Names of control tokens in both texts are plain text.

    Raises:
        Refusal: The vocabulary of the model has no tokens for this.
    """
    if is_missing(served):  # the library will refuse the request
        return [0]

    def make() -> list[int]:
        first, second = (served.model.tokenize(text, add_special=False) for text in (prompt, suffix))
        ids = served.model.tokenizer.fill_in_prompt(first, second)
        if ids is None:
            raise Refusal("unsupported_parameter", "`suffix` requires a model whose vocabulary has tokens to fill in "
                                                   "the middle.", "suffix")
        return ids

    return await native_calls.REQUESTS.arun(make)


async def stop_ids(served: ServedModel) -> list[int]:
    """Return the ids of the tokens that end a completion in the middle: those that begin another text or file."""
    if is_missing(served):
        return []
    return await native_calls.REQUESTS.arun(lambda: list(served.model.tokenizer.fill_in_ends()))


__all__ = ["prompt_ids", "stop_ids"]
