"""``/v1/completions``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from starlette.responses import Response

from ... import aio
from .. import fill_in, formats
from ..errors import Refusal
from ..operations import Context, Operation, check_logprobs, json_response
from ..sampling import check_count, sampling
from ..streaming import EVENTS
from .structs import CompletionChoice, CompletionLogprobs, CompletionRequest, CompletionResponse, Usage
from .text import LOWEST, encode, finish, run_concurrently, streamed, usage_of
from .vectors import texts_or_ids

if TYPE_CHECKING:
    from ...completions import Chunk, TokenLogprob

#: OpenAI's default of `max_tokens`.
_TOKENS = 16


async def completions(context: Context, body: CompletionRequest) -> Response:
    """Complete one or more prompts."""
    served = await context.model(body.model)
    n, most = body.n or 1, context.state.settings.max_n
    single = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
    check_count(n if single else len(body.prompt) * n, most)
    given = texts_or_ids(context, body.prompt, "prompt", most)
    prompts: list[Any] = [given] if isinstance(given, str) else given
    _check(body, prompts)
    options = sampling(context, served, body,
                       served.defaults.get("max_tokens", _TOKENS) if body.max_tokens is None else body.max_tokens)
    options |= await context.converted(lambda: formats.constraint(context, body))
    if body.logprobs is not None:
        options |= {"logprobs": True, "top_logprobs": body.logprobs}
    inputs: list[Any] = prompts
    if body.suffix:
        suffix = context.check_text(body.suffix, "suffix")
        inputs = [await fill_in.prompt_ids(served, prompt, suffix) for prompt in prompts]
        options["stop_token_ids"] = [*options.get("stop_token_ids", ()), *await fill_in.stop_ids(served)]
    pool, name, created = context.state.pool, f"cmpl-{context.id}", int(time.time())
    offsets = [0] * (len(prompts) * n)

    def choice(at: int, index: int, text: str, reason: str | None, logprobs: Any) -> CompletionChoice:
        number = at * n + index
        if body.echo and offsets[number] == 0:
            text, offsets[number] = prompts[at] + text, len(prompts[at])
        return CompletionChoice(text, number, _logprobs(logprobs, offsets, number), finish(reason))

    if body.stream:
        def chunk_event(at: int, chunk: Chunk) -> bytes:
            return encode(CompletionResponse(name, created, body.model, [
                choice(at, chunk.index, chunk.text, chunk.finish_reason, chunk.logprobs)], no_usage))

        def usage_event(usage: Usage) -> bytes:
            return encode(CompletionResponse(name, created, body.model, [], usage))

        include_usage = body.stream_options is not None and body.stream_options.include_usage
        no_usage = None if include_usage else UNSET
        streams = [aio.generate(prompt, served.model, stream=True, pool=pool, **options) for prompt in inputs]
        return await streamed(context, streams, [], chunk_event, usage_event if include_usage else None)
    done = await run_concurrently([aio.generate(prompt, served.model, pool=pool, **options)  # type: ignore[misc]
                                   for prompt in inputs])
    check_logprobs((one.logprobs for result in done for one in result.choices), None)
    choices = [choice(at, one.index, one.text, one.finish_reason, one.logprobs)
               for at, result in enumerate(done) for one in result.choices]
    return json_response(CompletionResponse(name, created, body.model, choices, usage_of(done)))


def _check(body: CompletionRequest, prompts: list[Any]) -> None:
    if body.suffix and not isinstance(prompts[0], str):
        raise Refusal("invalid_value", "`suffix` requires text prompts.", "suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise Refusal("unsupported_parameter", f"`best_of` must be equal to `n`, got {body.best_of}.", "best_of")
    if body.echo and (body.logprobs is not None or not isinstance(prompts[0], str)):
        raise Refusal("unsupported_parameter", "`echo` requires text prompts, and cannot be used with `logprobs`.",
                      "echo")


def _logprobs(found: tuple[TokenLogprob, ...] | None, offsets: list[int], number: int) -> CompletionLogprobs | None:
    if found is None:
        return None
    where = []
    for token in found:
        where.append(offsets[number])
        offsets[number] += len(token.token)
    top = [{other.token: max(other.logprob, LOWEST) for other in token.top} for token in found]
    return CompletionLogprobs([token.token for token in found], [max(token.logprob, LOWEST) for token in found],
                              top if any(top) else None, where)


OPERATIONS = (
    Operation("POST", "/v1/completions", completions, CompletionRequest, CompletionResponse, "Continue a text",
              EVENTS, "completions", names={"prompt": "prompt"}),
)

__all__ = ["OPERATIONS"]
