"""Shared code of ``/v1/completions`` and ``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
from starlette.responses import Response

from ..errors import openai_error
from ..streaming import EVENTS, MergedStreams, StreamedResponse, event
from .structs import Usage

if TYPE_CHECKING:
    from ...aio import AsyncStream
    from ...completions import Chunk, Completion
    from ..operations import Context

T = TypeVar("T")
encode = msgspec.json.Encoder().encode
#: Minimum log probability in a response: JSON cannot represent minus infinity.
LOWEST = -9999.0

_DONE = event("[DONE]")


def usage_of(done: list[Completion]) -> Usage:
    """Return the token counts of a request, summed over its prompts."""
    prompt = sum(one.usage.prompt_tokens for one in done)
    written = sum(one.usage.completion_tokens for one in done)
    return Usage(prompt, written, prompt + written, {"cached_tokens": sum(one.usage.cached_tokens for one in done)})


def finish(reason: str | None) -> Literal["stop", "length"] | None:
    """Convert a finish reason. A completion that fails has none: an error follows."""
    return "stop" if reason == "stop" else "length" if reason == "length" else None


async def run_concurrently(requests: list[Coroutine[Any, Any, T]]) -> list[T]:
    """Run requests concurrently. The first failure cancels the others."""
    if len(requests) == 1:
        return [await requests[0]]
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def streamed(context: Context, streams: list[AsyncStream], first_events: list[bytes],
                   encode_chunk: Callable[[int, Chunk], bytes],
                   encode_usage: Callable[[Usage], bytes] | None) -> Response:
    """Stream completions as server-sent events.

    Args:
        context: Context of the request.
        streams: Streams of the library that were not started yet.
        first_events: Data of the events before the first stream chunk.
        encode_chunk: Function that returns the data of an event, given the index of a stream and its chunk.
        encode_usage: Function that returns the data of the last event, given the token counts; None: the client did
            not request token counts.
    """
    chunks = MergedStreams(context.state, streams)
    await chunks.start()

    async def events() -> AsyncIterator[bytes]:
        yield b"".join(map(event, first_events))
        async for at, chunk in chunks:
            yield event(encode_chunk(at, chunk))
        if encode_usage is not None:
            yield event(encode_usage(usage_of([await stream.result() for stream in streams])))

    return StreamedResponse(context, events(), lambda refusal: event(openai_error(refusal)), EVENTS, chunks.close,
                            _DONE)


__all__ = ["LOWEST", "encode", "finish", "run_concurrently", "streamed", "usage_of"]
