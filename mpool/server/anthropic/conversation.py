"""Conversion of the conversation, the tools and the reasoning options of a request to those of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...checks import shown
from ...conversation.tool_schemas import ToolFields
from .. import formats, thinking
from ..errors import Refusal
from ..sampling import image_tokens
from .structs import (
    AnthropicMessage,
    Base64Source,
    Content,
    ConversationRequest,
    DocumentBlock,
    ImageBlock,
    SearchResultBlock,
    TextBlock,
    TextSource,
    ThinkingBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)

if TYPE_CHECKING:
    from ..models import ServedModel
    from ..operations import Context

#: Start of a line of the system prompt that Claude Code changes with every request.
_BILLING = "x-anthropic-billing-header:"
#: Type of ``tool_choice`` -> value of the library. The type "tool" is not listed: its value contains the tool's name.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
#: Names of the fields of a tool.
_TOOL = ToolFields("", "input_schema")
#: Text inserted between consecutive messages of the same role, which become one turn.
_SEPARATOR = {"type": "text", "text": "\n\n"}


async def options_of(context: Context, served: ServedModel, body: ConversationRequest) -> dict[str, Any]:
    """Convert the tools, the response format and the reasoning options of a request. A last message of the assistant is
    continued.

    Raises:
        Refusal: A tool, the tool choice or the schema is not valid.
    """
    config, wanted = body.output_config, body.thinking

    def convert() -> dict[str, Any]:
        found = _tool_options(_custom(context, body.tools), body.tool_choice)
        if config is not None and config.format is not None:
            if body.output_format is not None:
                raise Refusal("invalid_value", "A request has one format, got `output_config.format` and "
                                               "`output_format`.", "output_format")
            found |= formats.anthropic_format(config.format, "output_config.format")
        elif body.output_format is not None:
            context.names["response_format"] = "output_format"
            found |= formats.anthropic_format(body.output_format, "output_format")
        return found

    found = await context.converted(convert)
    found |= await thinking.anthropic_options(
        served, None if wanted is None else wanted.type != "disabled", None if wanted is None else wanted.budget_tokens,
        None if config is None else config.effort)
    found |= await image_tokens(context, served, body.image_tokens)
    if body.turns[-1].role == "assistant":
        found["template_options"] = {**found.get("template_options", {}), "continue_final_message": True}
    return found


def _custom(context: Context, tools: list[Tool] | None) -> list[Tool]:
    """Return the tools of the client. Tools of other types are ignored.

    Raises:
        Refusal: A tool of the client has no schema, or a tool has another type and the server is strict.
    """
    found = []
    for at, tool in enumerate(tools or ()):
        if tool.type not in (None, "custom"):
            context.ignore(f"tools[].{tool.type}", f"`tools[{at}].type` must be custom, got {shown(tool.type)}.",
                           f"tools[{at}].type")
        elif tool.input_schema is None:
            raise Refusal("invalid_value", f"`tools[{at}].input_schema` is required.", f"tools[{at}].input_schema")
        else:
            found.append(tool)
    return found


def _tool_options(tools: list[Tool], choice: ToolChoice | None) -> dict[str, Any]:
    chosen: str | dict[str, Any] | None = None
    parallel: bool | None = None
    if choice is not None and choice.type == "tool":
        if not choice.name:
            raise Refusal("invalid_value", "`tool_choice.name` is required with the type tool.", "tool_choice.name")
        chosen, parallel = {"type": "function", "function": {"name": choice.name}}, False
    elif choice is not None:
        chosen = _CHOICES[choice.type]
        parallel = None if choice.disable_parallel_tool_use is None else not choice.disable_parallel_tool_use
    if not tools:
        if choice is not None and choice.type in ("any", "tool"):
            raise Refusal("invalid_value", f"`tool_choice` {choice.type} requires `tools`.", "tool_choice")
        return {}
    found = [{"type": "function", "function": {"name": tool.name, "description": tool.description,
                                               "parameters": tool.input_schema}} for tool in tools]
    return formats.tool_options(found, chosen, parallel, _TOOL)


def messages_of(context: Context, body: ConversationRequest) -> list[dict[str, Any]]:
    """Convert a conversation to messages of the library.

    A user message with tool results becomes one message per result and one with the other blocks.

    Raises:
        Refusal: A text is too long, an image is not valid, a tool result has no tool call, or two tool calls have the
            same id.
    """
    found = _Conversation(context)
    if body.system is not None:
        texts = [("system", body.system)] if isinstance(body.system, str) else \
            [(f"system[{at}].text", block.text) for at, block in enumerate(body.system)]
        parts = [{"type": "text", "text": text} for name, given in texts
                 if (text := _without_billing(context.check_text(given, name)))]
        if parts:
            found.messages.append({"role": "system", "content": parts})
    for at, message in enumerate(body.turns):
        found.add(message, f"messages[{at}]")
    final, where = found.messages[-1], f"messages[{len(body.turns) - 1}].content"
    if final["role"] == "assistant" and (final.get("tool_calls") or not any(part["text"] for part in final["content"])):
        raise Refusal("invalid_value", f"`{where}` must be a text without tool calls, because the response continues "
                                       "it.", where)
    for made in found.messages:
        if "reasoning_content" in made:
            made["reasoning_content"] = "".join(made["reasoning_content"])
        if made.get("tool_calls"):
            made["content"] = made["content"] or None
    return found.messages


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING) else text


class _Conversation:
    """Collects the messages of a conversation."""

    def __init__(self, context: Context) -> None:
        self.messages: list[dict[str, Any]] = []
        self._context = context
        self._ids: set[str] = set()  # ids of all tool calls
        self._open: set[str] = set()  # ids of the tool calls that have no result yet

    def add(self, message: AnthropicMessage, where: str) -> None:
        content = message.content
        blocks: list[Content] = [TextBlock(text=content)] if isinstance(content, str) else content
        parts: list[dict[str, Any]] = []
        thoughts, calls = [], []
        for at, block in enumerate(blocks):
            name = where + ".content" if isinstance(content, str) else f"{where}.content[{at}]"
            if isinstance(block, TextBlock):
                parts.append({"type": "text", "text": self._context.check_text(block.text, name)})
            elif isinstance(block, ImageBlock):
                self._require(message, "user", block, name)
                parts.append(_image(self._context, block, name))
            elif isinstance(block, DocumentBlock | SearchResultBlock):
                self._require(message, "user", block, name)
                parts.append({"type": "text", "text": self._context.check_text(_text_of(block), name)})
            elif isinstance(block, ToolResultBlock):
                self._require(message, "user", block, name)
                self._flush(message.role, parts)
                parts = self._add_result(block, name)
            elif isinstance(block, ToolUseBlock):
                self._require(message, "assistant", block, name)
                calls.append(self._call(block, name))
            elif isinstance(block, ThinkingBlock):
                self._require(message, "assistant", block, name)
                thoughts.append(self._context.check_text(block.thinking, name))
            else:
                self._require(message, "assistant", block, name)
        if message.role == "assistant":
            self._add_assistant(parts, thoughts, calls)
        else:
            self._flush(message.role, parts, not blocks)

    def _require(self, message: AnthropicMessage, role: str, block: Content, name: str) -> None:
        if message.role != role:
            kind = block.__struct_config__.tag
            raise Refusal("invalid_value", f"`{name}` must not be of type {kind} in a message of the role "
                                           f"{message.role}.", name)

    def _flush(self, role: str, parts: list[dict[str, Any]], empty: bool = False) -> None:
        """Add the parts as a message, or to the last message if that has the same role."""
        if not parts and not empty:
            return
        last = self.messages[-1] if self.messages else None
        if last is not None and last["role"] == role == "user":
            last["content"] += [_SEPARATOR, *parts]
        else:
            self.messages.append({"role": role, "content": list(parts)})

    def _add_assistant(self, parts: list[dict[str, Any]], thoughts: list[str], calls: list[dict[str, Any]]) -> None:
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant":
            self.messages.append(last := {"role": "assistant", "content": []})
        elif parts and last["content"]:
            last["content"].append(_SEPARATOR)
        last["content"] += parts
        if thoughts:
            last.setdefault("reasoning_content", []).extend(thoughts)  # `messages_of` joins them
        if calls:
            last.setdefault("tool_calls", []).extend(calls)

    def _call(self, block: ToolUseBlock, name: str) -> dict[str, Any]:
        if block.id in self._ids:
            raise Refusal("invalid_value", f"`{name}.id` must be unique among the tool calls.", f"{name}.id")
        self._ids.add(block.id)
        self._open.add(block.id)
        return {"id": block.id, "function": {"name": block.name, "arguments": block.input}}

    def _add_result(self, block: ToolResultBlock, name: str) -> list[dict[str, Any]]:
        """Add a tool result. Returns its images, which belong to the next message of the user."""
        if block.tool_use_id not in self._open:
            state = "without a result" if block.tool_use_id in self._ids else "of an earlier message"
            raise Refusal("invalid_value", f"`{name}.tool_use_id` must be the id of a tool call {state}.",
                          f"{name}.tool_use_id")
        self._open.remove(block.tool_use_id)
        texts, images = [], []
        if isinstance(block.content, str):
            texts.append(self._context.check_text(block.content, f"{name}.content"))
        for at, part in enumerate(block.content or () if not isinstance(block.content, str) else ()):
            if isinstance(part, TextBlock):
                texts.append(self._context.check_text(part.text, f"{name}.content[{at}]"))
            elif isinstance(part, DocumentBlock | SearchResultBlock):
                texts.append(self._context.check_text(_text_of(part), f"{name}.content[{at}]"))
            else:
                images.append(_image(self._context, part, f"{name}.content[{at}]"))
        self.messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": "".join(texts)})
        return images


def _text_of(block: DocumentBlock | SearchResultBlock) -> str:
    """Return a document or a search result as text: a line per field, then the text."""
    if isinstance(block, SearchResultBlock):
        return "\n".join([block.title, block.source, *(part.text for part in block.content)])
    source = block.source
    body = source.data if isinstance(source, TextSource) else source.content
    texts = [body] if isinstance(body, str) else [part.text for part in body]
    return "\n".join([*filter(None, (block.title, block.context)), *texts])


def _image(context: Context, block: ImageBlock, name: str) -> dict[str, Any]:
    source = block.source
    if isinstance(source, Base64Source):
        return {"type": "image", "image": context.image_file(source.data, f"{name}.source.data")}
    return {"type": "image", "image": context.image(source.url, f"{name}.source.url")}


__all__ = ["messages_of", "options_of"]
