"""Shared code of ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from starlette.responses import Response

from ..errors import Refusal, openai_error
from ..streaming import EVENTS, Pieces, Streamed, event
from .structs import TextRequest, Usage

if TYPE_CHECKING:
    from ...aio import AsyncStream
    from ...results import Chunk, Completion
    from ..operations import Context

encode = msgspec.json.Encoder().encode
#: Lowest log probability in a response: JSON has no minus infinity.
LOWEST = -9999.0

_DONE = event("[DONE]")
#: Fields of a request that are options of the library with the same names.
_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "n")


def sampling(context: Context, body: TextRequest, most: int | None) -> dict[str, Any]:
    """Options of the library. An option that is left out has the default of the model's authors.

    Args:
        context: of the request.
        body: the request.
        most: maximum number of tokens; None: until the model stops or its context is full.

    Raises:
        Refusal: the request asks for more completions than the server allows.
    """
    limits = context.state.settings
    found = {name: value for name in _OPTIONS if (value := getattr(body, name)) is not None}
    check_count(body.n or 1, limits.max_n)
    found["max_tokens"] = limits.max_tokens if most is None else min(most, limits.max_tokens)
    if "min_tokens" in found:
        found["min_tokens"] = min(found["min_tokens"], found["max_tokens"])
    if body.seed is not None:
        found["seed"] = body.seed % 2**64
    return found


def check_count(count: int, most: int) -> None:
    """Raise Refusal if a request asks for more completions than the server allows."""
    if count > most:
        raise Refusal("invalid_value", f"`n` must make {most} completions or fewer in all, got {count}.", "n")


def usage_of(done: list[Completion]) -> Usage:
    """Token counts of all completions of a request."""
    prompt = sum(one.usage.prompt_tokens for one in done)
    written = sum(one.usage.completion_tokens for one in done)
    return Usage(prompt, written, prompt + written, {"cached_tokens": sum(one.usage.cached_tokens for one in done)})


def finish(reason: str | None) -> Literal["stop", "length"] | None:
    """The finish reason. A completion that was cut off has none: an error follows."""
    return "stop" if reason == "stop" else "length" if reason == "length" else None


async def together(calls: list[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    """Run completions concurrently. The first that fails cancels the others."""
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def streamed(context: Context, streams: list[AsyncStream], first: list[bytes],
                   piece: Callable[[int, Chunk], bytes], last: Callable[[Usage], bytes] | None) -> Response:
    """Stream completions as server-sent events.

    Args:
        context: of the request.
        streams: of the library, not started.
        first: data of the events before the first stream chunk.
        piece: makes the data of an event from a stream's number and its chunk.
        last: makes the data of the last event, with the token counts; None: the client did not ask for them.
    """
    pieces = Pieces(context.state, streams)
    await pieces.begin()

    async def events() -> AsyncIterator[bytes]:
        yield b"".join(map(event, first))
        async for at, chunk in pieces:
            yield event(piece(at, chunk))
        if last is not None:
            yield event(last(usage_of([await stream.result() for stream in streams])))

    return Streamed(context.state, context.id, events(), lambda refusal: event(openai_error(refusal)), EVENTS,
                    pieces.close, _DONE)


__all__ = ["LOWEST", "check_count", "encode", "finish", "sampling", "streamed", "together", "usage_of"]
