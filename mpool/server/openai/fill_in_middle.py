"""``/v1/fim/completions`` of Mistral's API, with responses in the format of chat completions."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.responses import Response

from ... import aio
from .. import fill_in
from ..operations import Context, Operation, json_response
from ..sampling import sampling
from ..streaming import EVENTS
from .structs import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatResponse,
    Delta,
    FillInRequest,
    ResponseMessage,
    Usage,
)
from .text import encode, finish, streamed, usage_of

if TYPE_CHECKING:
    from ...completions import Chunk


async def fill_in_middle(context: Context, body: FillInRequest) -> Response:
    """Complete the text between a prompt and a suffix."""
    served = await context.model(body.model)
    prompt: str | list[int] = context.check_text(body.prompt, "prompt")
    options = sampling(context, served, body, body.max_completion_tokens or body.max_tokens)
    if body.random_seed is not None:
        options["seed"] = body.random_seed % 2**64
    if body.suffix:
        prompt = await fill_in.prompt_ids(served, body.prompt, context.check_text(body.suffix, "suffix"))
        options["stop_token_ids"] = [*options.get("stop_token_ids", ()), *await fill_in.stop_ids(served)]
    pool, name, created = context.state.pool, f"cmpl-{context.id}", int(time.time())
    if body.stream:
        def chunk_event(at: int, chunk: Chunk) -> bytes:
            return encode(ChatChunk(name, created, body.model, [
                ChatChunkChoice(0, Delta("assistant", chunk.text), None, finish(chunk.finish_reason))]))

        def usage_event(usage: Usage) -> bytes:
            return encode(ChatChunk(name, created, body.model, [], usage))

        stream = aio.generate(prompt, served.model, stream=True, pool=pool, **options)
        return await streamed(context, [stream], [], chunk_event, usage_event)
    done = await aio.generate(prompt, served.model, pool=pool, **options)
    message = ResponseMessage(done.text)
    return json_response(ChatResponse(name, created, body.model, [
        ChatChoice(0, message, None, finish(done.finish_reason) or "stop")], usage_of([done])))


OPERATIONS = (
    Operation("POST", "/v1/fim/completions", fill_in_middle, FillInRequest, ChatResponse, "Fill in the middle",
              EVENTS, "fill_in_middle"),
)

__all__ = ["OPERATIONS"]
