"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from msgspec import UNSET
from starlette.responses import Response

from ... import aio
from ...checks import shown
from .. import formats, thinking
from ..errors import Refusal
from ..image_urls import with_images
from ..operations import Context, Operation, check_logprobs, json_response
from ..sampling import image_tokens, sampling
from ..streaming import EVENTS
from .structs import (
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatRequest,
    ChatResponse,
    ChatToken,
    Delta,
    FunctionCall,
    FunctionDelta,
    ImagePart,
    Message,
    MessageToolCall,
    RefusalPart,
    ResponseMessage,
    TopToken,
    Usage,
    VideoPart,
    VideoURLPart,
    turns_of,
)
from .text import LOWEST, encode, finish, streamed, usage_of

if TYPE_CHECKING:
    from ...completions import Choice, Chunk, TokenLogprob, ToolCallDelta
    from ..models import ServedModel


#: Variables of chat templates that ``chat_template_kwargs`` must not contain: they are fields of requests, or belong to
#: the chat template.
_RESERVED = ("add_generation_prompt", "continue_final_message", "messages", "tools", "documents", "tokenizer",
             "images", "deadline", "merge_turns")


async def chat(context: Context, body: ChatRequest) -> Response:
    """Complete a conversation."""
    served = await context.model(body.model)

    def convert() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        messages = [message_of(context, message, f"messages[{at}]")
                    for at, message in enumerate(turns_of(body.messages))]
        options = sampling(context, served, body, body.max_completion_tokens or body.max_tokens)
        options |= formats.constraint(context, body)
        tools, choice = formats.allowed_tools(formats.functions_of(context, body.tools), body.tool_choice)
        _check(body, tools, choice)
        return messages, options | formats.tool_options(tools, choice, body.parallel_tool_calls)

    messages, options = await context.converted(convert)
    messages = served.with_system(await with_images(context, messages))
    options |= await thinking.openai_options(served, body.reasoning_effort)
    options |= await image_tokens(context, served, *await context.converted(lambda: tokens_per_image(context, body)),
                                  messages)
    variables = {**template_variables(body.chat_template_kwargs or {}), **prompt_end(body)}
    if variables:
        options["template_options"] = {**options.get("template_options", {}), **variables}
    if body.logprobs:
        options |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    pool, name, created = context.state.pool, f"chatcmpl-{context.id}", int(time.time())
    if body.stream:
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        no_usage = None if include_usage else UNSET

        def choice_event(index: int, delta: Delta, chunk: Chunk | None = None) -> bytes:
            logprobs, reason = (None, None) if chunk is None else (chunk.logprobs, chunk.finish_reason)
            return encode(ChatChunk(name, created, body.model, [ChatChunkChoice(
                index, delta, _logprobs(served, logprobs), _finish(reason), _limit(chunk))], no_usage))

        def chunk_event(at: int, chunk: Chunk) -> bytes:
            delta = Delta(content=chunk.text or None, reasoning_content=chunk.reasoning or None,
                          tool_calls=_deltas(chunk.tool_calls) or None)
            return choice_event(chunk.index, delta, chunk)

        def usage_event(usage: Usage) -> bytes:
            return encode(ChatChunk(name, created, body.model, [], usage))

        first = [choice_event(index, Delta("assistant", "")) for index in range(body.n or 1)]
        stream = aio.chat(messages, served.model, stream=True, pool=pool, **options)
        return await streamed(context, [stream], first, chunk_event, usage_event if include_usage else None)
    done = await aio.chat(messages, served.model, pool=pool, **options)
    check_logprobs((one.logprobs for one in done.choices), served.model.tokenizer.token_bytes)
    choices = [ChatChoice(one.index, _response_message(one), _logprobs(served, one.logprobs),
                          _finish(one.finish_reason) or "stop", _limit(one)) for one in done.choices]
    return json_response(ChatResponse(name, created, body.model, choices, usage_of([done])))


def tokens_per_image(context: Context, body: Any) -> tuple[int | None, str]:
    """Return the number of tokens per image and the field that has it: ``image_tokens``, or that of vLLM."""
    name = "mm_processor_kwargs"
    for key in body.mm_processor_kwargs or ():
        if key != "max_soft_tokens":
            context.ignore(f"{name}.{key}", f"`{name}` must have `max_soft_tokens` only, got {shown(key)}.", name)
    given = (body.mm_processor_kwargs or {}).get("max_soft_tokens")
    if given is None:
        return body.image_tokens, "image_tokens"
    name = f"{name}.max_soft_tokens"
    if body.image_tokens is not None:
        raise Refusal("invalid_value", f"`image_tokens` and `{name}` exclude each other.", "image_tokens")
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    if type(given) is not int or given < 1:
        raise Refusal("invalid_value", f"`{name}` must be an integer of at least 1, got {shown(given)}.", name)
    return given, name


def _finish(reason: str | None) -> Literal["stop", "length", "tool_calls"] | None:
    return "tool_calls" if reason == "tool_calls" else finish(reason)


def _limit(found: Choice | Chunk | None) -> Any:
    """Return the limit of tool calls that ended a choice; UNSET if none did."""
    return UNSET if found is None or found.finish_reason != "tool_calls" or found.stop is None else found.stop


def _deltas(parts: Sequence[ToolCallDelta]) -> list[CallDelta]:
    """Return one delta per tool call: instructor, for example, reads only the first delta of a stream chunk."""
    by_call: dict[int, list[ToolCallDelta]] = {}
    for one in parts:
        by_call.setdefault(one.index, []).append(one)
    return [CallDelta(at, found[0].id, None if found[0].id is None else "function",
                      FunctionDelta(found[0].name, "".join(one.arguments for one in found)))
            for at, found in by_call.items()]


def _response_message(one: Choice) -> ResponseMessage:
    calls = [MessageToolCall(call.id, FunctionCall(call.name, call.raw)) for call in one.tool_calls]
    return ResponseMessage(one.text if one.text or not calls else None,
                         reasoning_content=UNSET if one.reasoning is None else one.reasoning,
                         tool_calls=calls or UNSET)


def _check(body: ChatRequest, tools: list[dict[str, Any]], choice: Any) -> None:
    if not tools and choice not in (None, "none", "auto"):
        raise Refusal("unsupported_parameter", "`tool_choice` requires `tools`.", "tool_choice")
    if body.top_logprobs and not body.logprobs:
        raise Refusal("invalid_value", "`top_logprobs` requires `logprobs`.", "top_logprobs")


def message_of(context: Context, message: Message, where: str) -> dict[str, Any]:
    """Convert a message to the format of the library. ``where``: field of the request, for error messages."""
    content: Any = message.content
    if isinstance(content, str):
        context.check_text(content, where)
    elif content is not None:
        content = [_part(context, part, f"{where}.content[{at}]") for at, part in enumerate(content)]
    elif message.role not in ("assistant", "tool"):
        raise Refusal("invalid_value", f"`{where}.content` is required.", where)
    elif not message.tool_calls:
        content = context.check_text(message.refusal or "", f"{where}.refusal")
    found: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    if reasoning is not None:
        found["reasoning_content"] = reasoning
    for at, call in enumerate(message.tool_calls or ()):
        arguments = formats.earlier_arguments(context, call.function.arguments,
                                              f"{where}.tool_calls[{at}].function.arguments")
        found.setdefault("tool_calls", []).append(
            {"id": call.id, "function": {"name": call.function.name, "arguments": arguments}})
    return found


def template_variables(given: dict[str, Any]) -> dict[str, Any]:
    """Check ``chat_template_kwargs`` of a request and return a copy.

    Raises:
        Refusal: A name belongs to a field of the request or to the chat template itself.
    """
    for name in _RESERVED:
        if name in given:
            raise Refusal("invalid_value", f"`chat_template_kwargs` must not contain `{name}`.", "chat_template_kwargs")
    return dict(given)


def prompt_end(body: Any) -> dict[str, bool]:
    """Return the options of the chat template that decide how the prompt ends.

    Raises:
        Refusal: The last message is continued, and another one begins.
    """
    if body.add_generation_prompt and body.continue_final_message:
        raise Refusal("invalid_value", "`add_generation_prompt` and `continue_final_message` exclude each other.",
                      "continue_final_message")
    return {name: value for name in ("add_generation_prompt", "continue_final_message")
            if (value := getattr(body, name)) is not None}


def _part(context: Context, part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, ImagePart):
        given = part.image_url
        url, name = (given, "image_url") if isinstance(given, str) else (given.url, "image_url.url")
        return {"type": "image", "image": context.image(url, f"{where}.{name}"),
                "detail": None if isinstance(given, str) else given.detail}
    if isinstance(part, VideoURLPart):
        raise Refusal("unsupported_parameter", f"`{where}` must not be a video file. Send the frames of the video: "
                                               '{"type": "video", "video": ["data:image/jpeg;base64,...", ...], '
                                               '"fps": 2}.', where)
    if isinstance(part, VideoPart):
        frames = [context.image_file(frame, f"{where}.video[{at}]") for at, frame in enumerate(part.video)]
        return {"type": "video", "video": frames, "fps": part.fps, "timestamps": part.timestamps}
    return {"type": "text", "text": context.check_text(part.refusal if isinstance(part, RefusalPart) else part.text,
                                                       where)}


def _logprobs(served: ServedModel, found: tuple[TokenLogprob, ...] | None) -> ChatLogprobs | None:
    if found is None:
        return None
    bytes_of = served.model.tokenizer.token_bytes
    return ChatLogprobs([
        ChatToken(token.token, max(token.logprob, LOWEST), list(bytes_of(token.token_id)),
                  [TopToken(other.token, max(other.logprob, LOWEST), list(bytes_of(other.token_id)))
                   for other in token.top]) for token in found])


OPERATIONS = (
    Operation("POST", "/v1/chat/completions", chat, ChatRequest, ChatResponse, "Complete a conversation", EVENTS,
              "chat_completions"),
)

__all__ = ["OPERATIONS", "message_of", "prompt_end", "template_variables", "tokens_per_image"]
