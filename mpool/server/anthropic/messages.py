"""``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from ... import aio
from ...tasks.running import chat_ids
from ..errors import Refusal, anthropic_error
from ..image_urls import with_images
from ..operations import Context, Operation, json_response
from ..sampling import sampling
from ..streaming import EVENTS, MergedStreams, StreamedResponse, event
from .conversation import messages_of, options_of
from .structs import (
    AnthropicUsage,
    BlockDelta,
    BlockStart,
    BlockStop,
    ContentBlock,
    CountTokensRequest,
    CountTokensResponse,
    InputDelta,
    MessageDelta,
    MessageResponse,
    MessagesRequest,
    MessageStart,
    MessageStop,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)

if TYPE_CHECKING:
    from ...completions import Chunk, Completion

_encode = msgspec.json.Encoder().encode
#: Signature of all reasoning. Some clients leave out reasoning without a signature when they send it back.
_SIGNATURE = "unsigned"
#: Maximum length of a stop string of the library in bytes.
_MAX_STOP = 1024


async def messages(context: Context, body: MessagesRequest) -> Response:
    """Complete a conversation."""
    served = await context.model(body.model)
    found = await context.converted(lambda: messages_of(context, body))
    conversation = served.with_system(await with_images(context, found))
    options = sampling(context, served, body, body.max_tokens) | await options_of(context, served, body)
    if body.stop_sequences:
        options["stop"] = _stops(body.stop_sequences)
    most = options["max_tokens"]
    hidden = body.thinking is not None and body.thinking.display == "omitted"
    response = MessageResponse(f"msg_{context.id}", body.model, [], AnthropicUsage(0, 0))
    stream = aio.chat(conversation, served.model, stream=True, pool=context.state.pool, **options)
    if not body.stream:
        try:
            done = await stream.result()
        finally:
            await stream.aclose()
        response.content, response.usage = _content(done, hidden), _usage(done)
        response.stop_reason, response.stop_sequence = _stop_reason(done, most), _stop_sequence(done)
        return json_response(response)
    chunks = MergedStreams(context.state, [stream])
    await chunks.start()
    response.usage.input_tokens = stream.prompt_tokens or 0

    async def events() -> AsyncIterator[bytes]:
        yield _event(MessageStart(response))
        blocks = _Blocks(hidden)
        async for _, chunk in chunks:
            if found := blocks.events(chunk):
                yield found
        done = await stream.result()
        stop = StopDelta(_stop_reason(done, most), _stop_sequence(done))
        yield blocks.close() + _event(MessageDelta(stop, _usage(done))) + _event(MessageStop())

    return StreamedResponse(context, events(), lambda refusal: event(anthropic_error(refusal), "error"), EVENTS,
                            chunks.close)


async def count_tokens(context: Context, body: CountTokensRequest) -> Response:
    """Count the tokens of a conversation: those of the prompt that ``/v1/messages`` would process."""
    served = await context.model(body.model)
    found = await context.converted(lambda: messages_of(context, body))
    conversation = served.with_system(await with_images(context, found))
    options = await options_of(context, served, body)
    options.pop("response_format", None)  # constrains the completion only
    return json_response(CountTokensResponse(
        len(await chat_ids(context.state.pool, conversation, served.model, options))))


# ---- responses -------------------------------------------------------------------------------------------------------

def _stops(texts: list[str]) -> list[str]:
    for at, text in enumerate(texts):
        size = len(text.encode())
        if size > _MAX_STOP:
            raise Refusal("invalid_value", f"`stop_sequences[{at}]` must have at most {_MAX_STOP:,} bytes, got "
                                           f"{size:,}.", f"stop_sequences[{at}]")
    return texts


def _content(done: Completion, hidden: bool) -> list[ContentBlock]:
    found: list[ContentBlock] = []
    if done.reasoning:
        found.append(ThinkingContent("" if hidden else done.reasoning, _SIGNATURE))
    if done.text:
        found.append(TextContent(done.text))
    found += [ToolUseContent(call.id, call.name, call.arguments) for call in done.tool_calls
              if call.arguments is not None]
    return found


def _usage(done: Completion) -> AnthropicUsage:
    used = done.usage
    return AnthropicUsage(used.prompt_tokens - used.cached_tokens, used.completion_tokens, used.cached_tokens)


def _stop_reason(done: Completion, most: int) -> StopReason:
    """Return the reason why a message ended. ``most``: maximum number of tokens of the request."""
    if done.finish_reason == "tool_calls":
        return "tool_use"
    if done.finish_reason == "length":
        return "max_tokens" if done.usage.completion_tokens >= most else "model_context_window_exceeded"
    return "end_turn" if _stop_sequence(done) is None else "stop_sequence"


def _stop_sequence(done: Completion) -> str | None:
    return done.stop if isinstance(done.stop, str) else None


# ---- stream events ---------------------------------------------------------------------------------------------------

def _event(value: msgspec.Struct) -> bytes:
    return event(_encode(value), value.__struct_config__.tag)  # type: ignore[arg-type]


class _Blocks:
    """Encodes the chunks of a completion as the events of content blocks. At most one block is open at a time.

    Args:
        hidden: The thinking blocks are empty.
    """

    def __init__(self, hidden: bool) -> None:
        self._hidden = hidden
        self._index, self._open = -1, ""  # number of the last block; its type while it is open

    def events(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk; empty if the chunk adds nothing."""
        found = b""
        if chunk.reasoning:
            found += self._begin("thinking", ThinkingContent("", ""))
            if not self._hidden:
                found += self._delta(ThinkingDelta(chunk.reasoning))
        if chunk.text:
            found += self._begin("text", TextContent("")) + self._delta(TextDelta(chunk.text))
        for call in chunk.tool_calls:
            if call.id is not None:
                found += self.close() + self._begin("tool_use", ToolUseContent(call.id, call.name or "", {}))
            if call.arguments:
                found += self._delta(InputDelta(call.arguments))
        return found

    def close(self) -> bytes:
        """Return the events that end the open block; empty if none is open."""
        if not self._open:
            return b""
        found = self._delta(SignatureDelta(_SIGNATURE)) if self._open == "thinking" else b""
        self._open = ""
        return found + _event(BlockStop(self._index))

    def _begin(self, kind: str, block: ContentBlock) -> bytes:
        if self._open == kind and kind != "tool_use":
            return b""
        found = self.close()
        self._index, self._open = self._index + 1, kind
        return found + _event(BlockStart(self._index, block))

    def _delta(self, delta: Any) -> bytes:
        return _event(BlockDelta(self._index, delta))


OPERATIONS = (
    Operation("POST", "/v1/messages", messages, MessagesRequest, MessageResponse, "Complete a conversation", EVENTS,
              "messages", names={"response_format": "output_config.format"}),
    Operation("POST", "/v1/messages/count_tokens", count_tokens, CountTokensRequest, CountTokensResponse,
              "Count the tokens of a conversation", name="count_tokens"),
)

__all__ = ["OPERATIONS"]
