"""What ``/v1/completions`` and ``/v1/chat/completions`` have in common."""

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
#: What a log probability is at least: JSON has no word for minus infinity.
LOWEST = -9999.0

_DONE = event("[DONE]")
#: Fields of a request -> options of the library, which have the same names.
_OPTIONS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "n")


def sampling(context: Context, body: TextRequest, most: int | None) -> dict[str, Any]:
    """Options of the library. What is left out is as the model's authors say.

    Args:
        context: of the request.
        body: the request.
        most: tokens that it asks for; None: until the model ends or its context is full.

    Raises:
        Refusal: more answers than the server gives.
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
    """Raises Refusal for more answers than the server gives to one request."""
    if count > most:
        raise Refusal("invalid_value", f"n: {count} answers in all, allowed: {most}.", "n")


def usage_of(done: list[Completion]) -> Usage:
    """Counts of all calls of a request."""
    prompt = sum(one.usage.prompt_tokens for one in done)
    written = sum(one.usage.completion_tokens for one in done)
    return Usage(prompt, written, prompt + written, {"cached_tokens": sum(one.usage.cached_tokens for one in done)})


def finish(reason: str | None) -> Literal["stop", "length"] | None:
    """Why an answer ended. One that was cut off has no reason: an error follows."""
    return "stop" if reason == "stop" else "length" if reason == "length" else None


async def together(calls: list[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    """Results of calls that run at the same time; the first that fails ends the others."""
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
    """Events of an answer that is being written.

    Args:
        context: of the request.
        streams: of the library, not started.
        first: what is sent before the first piece.
        piece: the event's data for a piece of a stream, by the stream's number.
        last: the data with the counts; None: nobody asked for them.
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
