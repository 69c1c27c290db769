"""Requests, responses and stream events of Anthropic's protocol.

The docstrings list the fields that are accepted without effect. They are the descriptions in the OpenAPI document.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from ..fields import Fields, ImageTokens, MaxTokens, Name, SamplingFields, Stops, Text

Effort = Literal["low", "medium", "high", "xhigh", "max"]


class Block(Fields, tag_field="type", kw_only=True):
    """Base of the blocks of a message. ``cache_control`` is ignored: the prefix cache needs no marks."""

    #: Types of further blocks, which are ignored: those of tools that Anthropic's servers run, and compaction.
    OTHERS: ClassVar[re.Pattern[str]] = re.compile(
        r"(server|mcp)_tool_use|\w+_tool_result|compaction\w*")
    cache_control: dict[str, Any] | None = None


# ---- requests --------------------------------------------------------------------------------------------------------

class TextBlock(Block, tag="text", kw_only=True):
    """A text. ``citations`` is ignored."""

    text: str
    citations: Any = None


class Base64Source(Fields, tag_field="type", tag="base64"):
    """An image file as base64."""

    data: str
    media_type: str | None = None


class URLSource(Fields, tag_field="type", tag="url"):
    """The URL of an image: a ``data:`` URL, or an https URL if the server runs with ``--allow-image-urls``."""

    url: str


class ImageBlock(Block, tag="image", kw_only=True):
    """An image."""

    source: Base64Source | URLSource


class TextSource(Fields, tag_field="type", tag="text"):
    """The text of a document. ``media_type`` is ignored."""

    data: str
    media_type: str | None = None


class ContentSource(Fields, tag_field="type", tag="content"):
    """The text of a document, as blocks."""

    content: str | Annotated[list[TextBlock], Meta(max_length=10_000)]


class DocumentBlock(Block, tag="document", kw_only=True):
    """A document. Its title, ``context`` and text become text of the message. ``citations`` is ignored."""

    source: TextSource | ContentSource
    title: str | None = None
    context: str | None = None
    citations: Any = None


class SearchResultBlock(Block, tag="search_result", kw_only=True):
    """A search result. Its title, ``source`` and text become text of the message. ``citations`` is ignored."""

    content: Annotated[list[TextBlock], Meta(max_length=10_000)]
    title: str
    source: str
    citations: Any = None


class ToolUseBlock(Block, tag="tool_use", kw_only=True):
    """A tool call of the assistant. ``caller`` is ignored."""

    id: Annotated[str, Meta(min_length=1, max_length=256)]
    name: Text
    input: dict[str, Any]
    caller: Any = None


class ToolResultBlock(Block, tag="tool_result", kw_only=True):
    """The result of the tool call ``tool_use_id`` of an earlier message. Its images follow it in the conversation.
    ``is_error`` is ignored: the content says what failed."""

    tool_use_id: str
    content: str | Annotated[list[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock],
                             Meta(max_length=10_000)] | None = None
    is_error: bool | None = None


class ThinkingBlock(Block, tag="thinking", kw_only=True):
    """Reasoning of the assistant in an earlier response. ``signature`` is ignored."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Block, tag="redacted_thinking", kw_only=True):
    """Encrypted reasoning of another server. It is ignored."""

    data: str


Content = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolUseBlock | ToolResultBlock \
    | ThinkingBlock | RedactedThinkingBlock
Blocks = Annotated[list[Content], Meta(max_length=10_000)]
System = str | Annotated[list[TextBlock], Meta(max_length=10_000)]


class AnthropicMessage(Fields):
    """A message. Consecutive messages of the same role are one turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class Tool(Fields, kw_only=True):
    """A tool of the client. ``strict``, ``cache_control``, ``input_examples``, ``defer_loading``,
    ``eager_input_streaming`` and ``allowed_callers`` are ignored: arguments always match ``input_schema``. Tools of
    other types than ``custom``, which Anthropic's servers run or whose schema only Anthropic's models know, are ignored
    as unknown fields are."""

    name: str = ""
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    input_examples: Any = None
    defer_loading: Any = None
    eager_input_streaming: Any = None
    allowed_callers: Any = None


class ToolChoice(Fields):
    """Use of the tools: the model decides (auto), calls at least one (any), calls ``name`` (tool), or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Fields):
    """Reasoning of the model. ``disabled`` turns it off, the other types turn it on, as far as the chat template of the
    model supports it. ``budget_tokens`` selects the reasoning level of models that have levels: low
    below 4,096, high from 16,384 on. With ``display`` omitted, the thinking blocks of the response are empty."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Fields):
    """``format``, ``{"type": "json_schema", "schema": ...}``, constrains the text of the response. ``effort`` selects
    the reasoning level of models that have levels (``xhigh`` and ``max`` count as high)."""

    format: dict[str, Any] | None = None
    effort: Effort | None = None


class ConversationRequest(SamplingFields, kw_only=True):
    """Fields of the requests with a conversation. ``output_format`` is the older name of ``output_config.format``.
    ``messages`` may be a text (an extension), which is one message of the user. ``image_tokens`` (an extension) is the
    maximum number of tokens per image, for models that have a choice (Gemma 4)."""

    model: Name
    messages: Text | Annotated[list[AnthropicMessage], Meta(min_length=1, max_length=10_000)]
    system: System | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    cache_control: Any = None
    image_tokens: ImageTokens | None = None

    @property
    def turns(self) -> list[AnthropicMessage]:
        """``messages``; a text is one message of the user."""
        return [AnthropicMessage("user", self.messages)] if isinstance(self.messages, str) else self.messages


class CountTokensRequest(ConversationRequest, kw_only=True):
    """A conversation whose tokens are counted. ``cache_control`` and the sampling options are ignored."""


class MessagesRequest(ConversationRequest, kw_only=True):
    """A conversation to complete. If the last message is one of the assistant, the response continues it.

    ``system`` is one or more texts. A first line that begins with ``x-anthropic-billing-header:`` is left out: Claude
    Code changes it with every request, so the prefix cache would never apply. ``seed``, ``min_p``, the penalties,
    ``logit_bias``, ``stop_token_ids``, ``min_tokens`` and ``ignore_eos`` are extensions of Anthropic's API.
    ``metadata``, ``service_tier``, ``container``, ``inference_geo``, ``speed``, ``context_management`` and
    ``cache_control`` are ignored."""

    max_tokens: MaxTokens
    stop_sequences: Stops | None = None
    stream: bool | None = None
    metadata: Any = None
    service_tier: Any = None
    container: Any = None
    inference_geo: Any = None
    speed: Any = None
    context_management: Any = None


# ---- responses -------------------------------------------------------------------------------------------------------

class AnthropicUsage(Struct):
    """Token counts. The prompt has the sum of ``input_tokens`` and ``cache_read_input_tokens``."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class TextContent(Struct, tag_field="type", tag="text"):
    """A text of the response."""

    text: str


class ThinkingContent(Struct, tag_field="type", tag="thinking"):
    """Reasoning of the model, if its chat template separates the reasoning from the text. ``signature`` has no
    meaning."""

    thinking: str
    signature: str


class ToolUseContent(Struct, tag_field="type", tag="tool_use"):
    """A tool call."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextContent | ThinkingContent | ToolUseContent
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageResponse(Struct):
    """The completion of a conversation."""

    id: str
    model: str
    content: list[ContentBlock]
    usage: AnthropicUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class CountTokensResponse(Struct):
    """Number of tokens of a conversation."""

    input_tokens: int


class AnthropicModel(Struct):
    """A model. ``max_input_tokens``: length of the context of the model, prompt and completion together."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | None = None
    type: Literal["model"] = "model"
    lifecycle: Literal["active"] = "active"


class AnthropicModels(Struct):
    """A page of the models that clients can use, for requests with the header ``anthropic-version``."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


# ---- stream events ---------------------------------------------------------------------------------------------------

class MessageStart(Struct, tag_field="type", tag="message_start"):
    """The first event: a message without content."""

    message: MessageResponse


class BlockStart(Struct, tag_field="type", tag="content_block_start"):
    """The start of a content block, which is empty."""

    index: int
    content_block: ContentBlock


class TextDelta(Struct, tag_field="type", tag="text_delta"):
    """The next part of a text."""

    text: str


class ThinkingDelta(Struct, tag_field="type", tag="thinking_delta"):
    """The next part of the reasoning."""

    thinking: str


class SignatureDelta(Struct, tag_field="type", tag="signature_delta"):
    """The signature, at the end of the reasoning."""

    signature: str


class InputDelta(Struct, tag_field="type", tag="input_json_delta"):
    """The next part of the JSON of a tool call's input."""

    partial_json: str


class BlockDelta(Struct, tag_field="type", tag="content_block_delta"):
    """The next part of a content block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, tag_field="type", tag="content_block_stop"):
    """The end of a content block."""

    index: int


class StopDelta(Struct):
    """The reason why the message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag_field="type", tag="message_delta"):
    """The end of the content, with the token counts of the whole message."""

    delta: StopDelta
    usage: AnthropicUsage


class MessageStop(Struct, tag_field="type", tag="message_stop"):
    """The last event."""


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, Struct)]
