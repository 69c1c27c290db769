"""Requests for arrays: run a function of the library, and name the client's field in its errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import MpoolError
from ..tasks.running import counted
from ..tasks.verbs import EMBED_TOKENS
from .operations import MAX_NUMBERS, Context

if TYPE_CHECKING:
    from ..tasks.verbs import Verb

#: Parameters of the library that are texts.
_PARAMETERS = ("inputs", "texts")


async def computed(context: Context, verb: Verb, given: dict[str, Any], field: str,
                   most_bytes: int | None = None) -> tuple[Any, int]:
    """Run a request of the library.

    Args:
        context: Context of the request.
        verb: The function.
        given: Its arguments, which are consumed.
        field: Field of the client that has the texts.
        most_bytes: As for :func:`mpool.tasks.running.counted`.

    Returns:
        The result of the library, and the number of prompt tokens.

    Raises:
        MpoolError: As the function; a message that names the parameter of the texts names the client's field instead.
    """
    others = [name for name in _PARAMETERS if name in given and name != field]  # `counted` empties `given`
    try:
        return await counted(verb, context.state.pool, given, most_bytes)
    except MpoolError as error:
        error.rename(dict.fromkeys(others, field))
        raise


async def token_vectors(context: Context, given: dict[str, Any], field: str) -> tuple[Any, int]:
    """Compute one vector per token. Raises LimitError if the response would be too large; see :func:`computed`."""
    return await computed(context, EMBED_TOKENS, given, field, MAX_NUMBERS)


__all__ = ["computed", "token_vectors"]
