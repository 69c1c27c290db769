"""``/v1/responses``."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from starlette.responses import Response

from ... import aio
from ...completions import Chunk, ToolCallDelta
from ...host import native_calls
from .. import formats, response_memory, thinking
from ..errors import Refusal
from ..image_urls import with_images
from ..operations import LONG, Context, Operation, json_response
from ..sampling import image_tokens, sampling
from ..streaming import EVENTS, MergedStreams, StreamedResponse, event
from . import namespaces
from .response_input import messages_of
from .response_structs import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseObject,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from .text import encode

if TYPE_CHECKING:
    from ...completions import Chunk, Completion
    from ..models import ServedModel


#: Code of an error -> code of the error of a failed response; others are ``server_error``.
_ERRORS = {"overloaded": "rate_limit_exceeded"}


async def responses(context: Context, body: ResponsesRequest) -> Response:
    """Respond to an input."""
    served = await context.model(body.model)
    for name in ("background", "conversation", "prompt"):
        if getattr(body, name) not in (None, False):
            raise Refusal("unsupported_parameter", f"`{name}` is not supported.", name)
    memory, kept = context.state.responses, None
    if body.previous_response_id is not None:
        kept = memory.get(body.previous_response_id)
        if kept is None:
            raise Refusal("previous_response_not_found", param="previous_response_id")
        context.memory.add(len(kept))
        context.long = context.long or len(kept) >= LONG

    def convert() -> tuple[list[dict[str, Any]], dict[str, Any], namespaces.Origins]:
        return messages_of(context, body.input, response_memory.decoded(kept)), *_options(context, body)

    messages, more, origins = await context.converted(convert)
    messages = await with_images(context, messages)
    more |= await thinking.openai_options(served, None if body.reasoning is None else body.reasoning.effort,
                                          "reasoning.effort")
    more |= await image_tokens(context, served, body.image_tokens, messages=messages)
    options = sampling(context, served, body, body.max_output_tokens) | more
    system = [] if body.instructions is None else [
        {"role": "system", "content": context.check_text(body.instructions, "instructions")}]
    stream = aio.chat(served.with_system([*system, *messages]), served.model, stream=True, pool=context.state.pool,
                      **options)
    response = _response(body, options)

    async def complete(done: Completion, output: list[OutputItem]) -> None:
        response.output, response.usage = output, await _usage(served, done)
        response.status = _status(done)
        if response.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        elif done.finish_reason == "tool_calls" and done.stop is not None:  # completed, so that clients run the calls
            response.incomplete_details = {"reason": str(done.stop)}
        if response.store:
            reply = {**done.message, "content": done.text or None} if done.tool_calls else done.message
            memory.put(response.id, await context.converted(lambda: response_memory.encoded([*messages, reply])))

    if not body.stream:
        try:
            done = await stream.result()
        finally:
            await stream.aclose()
        await complete(done, _output(done, response.id, origins))
        return json_response(response)
    chunks = MergedStreams(context.state, [stream])
    await chunks.start()
    events = _Events(response.id, origins)

    async def encoded() -> AsyncIterator[bytes]:
        yield events.make("response.created", response=response)
        yield events.make("response.in_progress", response=response)
        async for _, chunk in chunks:
            if found := events.of(chunk):
                yield found
        done = await stream.result()
        last = events.close(_status(done))
        await complete(done, events.output)
        yield last + events.make(f"response.{response.status}", response=response)

    def failed(refusal: Refusal) -> bytes:
        """Return the events of a failure: OpenAI's clients read ``error``, Codex reads ``response.failed``.

        The response has the items that were sent. The open one gets no events that mark it as done: clients run a
        function call when it is done.
        """
        events.end_item("incomplete")
        response.output = events.output
        response.status, response.error = "failed", {"code": _ERRORS.get(refusal.code, "server_error"),
                                                     "message": refusal.message}
        return events.make("error", code=refusal.code, message=refusal.message, param=refusal.param) + events.make(
            "response.failed", response=response)

    return StreamedResponse(context, encoded(), failed, EVENTS, chunks.close)


def _options(context: Context, body: ResponsesRequest) -> tuple[dict[str, Any], namespaces.Origins]:
    """Convert the tools and the response format to options of the library.

    Returns:
        The options, and the origins of the functions that belong to namespaces.
    """
    found: dict[str, Any] = {}
    if body.text is not None and body.text.format is not None:
        found |= formats.openai_format(body.text.format, "text.format", flat=True)
    functions, origins = namespaces.functions_of(context, body.tools)
    tools, choice = formats.allowed_tools(functions, namespaces.joined_choice(body.tool_choice, functions, origins))
    if isinstance(choice, dict):
        if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
            raise Refusal("invalid_value", "`tool_choice` must be auto, none, required or {\"type\": \"function\", "
                                           "\"name\": ...}.", "tool_choice")
        choice = {"type": "function", "function": {"name": choice["name"]}}
    if not tools and choice not in (None, "none", "auto"):
        raise Refusal("unsupported_parameter", "`tool_choice` requires `tools`.", "tool_choice")
    found |= formats.tool_options(tools, choice, body.parallel_tool_calls, formats.FLAT_TOOL)
    return found, origins


def _response(body: ResponsesRequest, options: dict[str, Any]) -> ResponseObject:
    text = {} if body.text is None else msgspec.to_builtins(body.text)
    reasoning = {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None}
    return ResponseObject(
        id=f"resp_{secrets.token_hex(16)}",  # random: a client that knows the id may continue the conversation
        created_at=int(time.time()), model=body.model, output=[], status="in_progress", instructions=body.instructions,
        previous_response_id=body.previous_response_id, max_output_tokens=body.max_output_tokens,
        temperature=options.get("temperature"), top_p=options.get("top_p"),
        parallel_tool_calls=body.parallel_tool_calls is not False, tool_choice=body.tool_choice or "auto",
        tools=namespaces.shown_tools(body.tools, set(map(formats.name_of, options.get("tools", ())))),
        text={**text, "format": text.get("format") or {"type": "text"}},
        reasoning=reasoning, metadata=body.metadata or {}, store=body.store is not False)


def _status(done: Completion) -> Status:
    return "incomplete" if done.finish_reason == "length" else "completed"


def _output(done: Completion, id: str, origins: namespaces.Origins) -> list[OutputItem]:
    """Return the items of a completion: those that its stream would have."""
    events = _Events(id, origins)
    if done.reasoning:
        events.of(Chunk("", reasoning=done.reasoning))
    if done.text:
        events.of(Chunk(done.text))
    for at, call in enumerate(done.tool_calls):
        events.of(Chunk("", tool_calls=(ToolCallDelta(at, call.id, call.name, call.raw),)))
    events.close(_status(done))
    return events.output


async def _usage(served: ServedModel, done: Completion) -> ResponseUsage:
    used, thoughts = done.usage, 0
    if done.reasoning:
        text = done.reasoning
        thoughts = len(await native_calls.REQUESTS.arun(lambda: served.model.tokenize(text, add_special=False)))
    return ResponseUsage(used.prompt_tokens, used.completion_tokens, used.total_tokens,
                         {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
                         {"reasoning_tokens": min(thoughts, used.completion_tokens)})


class _Events:
    """Encodes the chunks of a completion as events, and collects its output items. At most one item is open at a time.

    Attributes:
        output: Items. The last one is incomplete while it is open.
    """

    def __init__(self, id: str, origins: namespaces.Origins) -> None:
        self.output: list[Any] = []
        self._id, self._count, self._open, self._text = id.removeprefix("resp_"), 0, False, ""
        self._origins = origins

    def make(self, kind: str, **fields: Any) -> bytes:
        """Encode an event with the next sequence number."""
        self._count += 1
        return event(encode({"type": kind, "sequence_number": self._count - 1, **fields}), kind)

    def of(self, chunk: Chunk) -> bytes:
        """Return the events of a chunk; empty if the chunk adds nothing."""
        found = b""
        if chunk.reasoning:
            found += self._begin(OutputReasoning("rs_", [], "in_progress"))
            found += self._delta("response.reasoning_text.delta", chunk.reasoning, content_index=0)
        if chunk.text:
            found += self._begin(OutputMessage("msg_", [], "in_progress"))
            found += self._delta("response.output_text.delta", chunk.text, content_index=0, logprobs=[])
        for call in chunk.tool_calls:
            if call.id is not None:
                namespace, name = self._origins.get(call.name or "", (UNSET, call.name or ""))
                found += self.close() + self._begin(OutputCall("fc_", call.id, name, "", "in_progress", namespace))
            if call.arguments:
                found += self._delta("response.function_call_arguments.delta", call.arguments)
        return found

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1].id, "output_index": len(self.output) - 1}

    def _begin(self, item: OutputMessage | OutputCall | OutputReasoning) -> bytes:
        """Begin an item, unless one of the same type is open. ``item``: its ``id`` is the prefix of the id."""
        if self._open and type(self.output[-1]) is type(item):
            return b""
        found = self.close()
        item.id += f"{self._id}_{len(self.output)}"
        self.output.append(item)
        self._open, self._text = True, ""
        found += self.make("response.output_item.added", output_index=len(self.output) - 1, item=item)
        if not isinstance(item, OutputCall):
            part = OutputText("") if isinstance(item, OutputMessage) else ReasoningText("")
            found += self.make("response.content_part.added", **self._place(), content_index=0, part=part)
        return found

    def _delta(self, kind: str, text: str, **fields: Any) -> bytes:
        self._text += text
        return self.make(kind, **self._place(), delta=text, **fields)

    def close(self, status: Status = "completed") -> bytes:
        """Return the events that end the open item; empty if none is open."""
        item = self.end_item(status)
        if item is None:
            return b""
        if isinstance(item, OutputCall):
            found = self.make("response.function_call_arguments.done", **self._place(), name=item.name,
                              arguments=self._text)
        elif isinstance(item, OutputMessage):
            found = self.make("response.output_text.done", **self._place(), content_index=0, text=self._text,
                              logprobs=[])
        else:
            found = self.make("response.reasoning_text.done", **self._place(), content_index=0, text=self._text)
        if not isinstance(item, OutputCall):
            found += self.make("response.content_part.done", **self._place(), content_index=0, part=item.content[0])
        return found + self.make("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def end_item(self, status: Status) -> Any:
        """Complete the open item, and return it; None if none is open."""
        if not self._open:
            return None
        item, self._open = self.output[-1], False
        item.status = status
        if isinstance(item, OutputCall):
            item.arguments = self._text
        else:
            item.content = [OutputText(self._text) if isinstance(item, OutputMessage) else ReasoningText(self._text)]
        return item


OPERATIONS = (
    Operation("POST", "/v1/responses", responses, ResponsesRequest, ResponseObject, "Respond to an input", EVENTS,
              "responses", names={"response_format": "text.format"}),
)

__all__ = ["OPERATIONS"]
