"""Requests and responses of ``/v1/responses``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from ..fields import Fields, ImageTokens, MaxTokens, Name, SamplingFields, Text

CallId = Annotated[str, Meta(min_length=1, max_length=256)]


# ---- input items -----------------------------------------------------------------------------------------------------

class InputText(Fields, tag_field="type", tag="input_text"):
    """A text. ``prompt_cache_breakpoint`` is ignored."""

    text: str
    prompt_cache_breakpoint: Any = None


class InputImage(Fields, tag_field="type", tag="input_image"):
    """An image as ``data:image/png;base64,...``, or at an https URL if the server runs with ``--allow-image-urls``.
    With a model that has a choice of tokens per image, ``detail`` selects the smallest number (``low``), the one above
    the usual number (``high``) or the largest one (``original``); it is ignored otherwise. ``prompt_cache_breakpoint``
    is ignored."""

    image_url: str
    detail: str | None = None
    prompt_cache_breakpoint: Any = None


class OutputText(Fields, tag_field="type", tag="output_text"):
    """A text of the assistant. ``annotations`` and ``logprobs`` are always empty."""

    text: str
    annotations: list[Any] = []
    logprobs: list[Any] | None = []


class Refused(Fields, tag_field="type", tag="refusal"):
    """A refusal of the assistant. It counts as text."""

    refusal: str


class ReasoningText(Fields, tag_field="type", tag="reasoning_text"):
    """Reasoning of the model."""

    text: str


class InputMessage(Fields, tag_field="type", tag="message", kw_only=True):
    """A message. ``id``, ``status`` and ``phase`` are ignored."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[InputText | InputImage | OutputText | Refused], Meta(max_length=10_000)]
    id: Any = None
    status: Any = None
    phase: Any = None


class InputCall(Fields, tag_field="type", tag="function_call", kw_only=True):
    """A function call of the assistant. ``namespace``: the namespace of the function. ``id`` and ``status`` are
    ignored."""

    call_id: CallId
    name: Text
    arguments: str
    namespace: str | None = None
    id: Any = None
    status: Any = None


class InputCallOutput(Fields, tag_field="type", tag="function_call_output", kw_only=True):
    """The result of the function call ``call_id``. Its images follow it in the conversation, in a message of the user.
    ``id`` and ``status`` are ignored."""

    call_id: CallId
    output: str | Annotated[list[InputText | InputImage], Meta(max_length=10_000)]
    id: Any = None
    status: Any = None


class InputReasoning(Fields, tag_field="type", tag="reasoning", kw_only=True):
    """Reasoning before the next message or function call of the assistant. Without one, it is a message without text.
    ``summary``, ``encrypted_content``, ``id`` and ``status`` are ignored."""

    content: list[ReasoningText] | None = None
    summary: Any = None
    encrypted_content: Any = None
    id: Any = None
    status: Any = None


InputItem = InputMessage | InputCall | InputCallOutput | InputReasoning


# ---- requests --------------------------------------------------------------------------------------------------------

class TextConfig(Fields):
    """``format`` is text, json_object or json_schema with ``name`` and ``schema``. ``verbosity`` is ignored."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(Fields):
    """``effort`` as ``reasoning_effort`` of chat completions. ``summary`` and ``generate_summary`` are ignored."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """An input to respond to: a text, or messages, function calls and their results.

    ``previous_response_id`` continues a conversation. The server keeps the latest conversations in memory, unless
    ``store`` is false. ``tools`` are functions, and namespaces of functions. ``image_tokens`` (an extension) is the
    maximum number of tokens per image, for models that have a choice (Gemma 4). ``background``, ``conversation`` and
    ``prompt`` are refused. ``include``, ``metadata``, ``truncation``, ``service_tier``, ``user``,
    ``safety_identifier``, ``max_tool_calls``, ``stream_options``, ``prompt_cache_key``, ``prompt_cache_retention`` and
    ``prompt_cache_options`` are ignored."""

    model: Name
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=10_000)]
    instructions: str | None = None
    previous_response_id: Annotated[str, Meta(max_length=256)] | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=128)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    store: bool | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    include: Any = None
    truncation: Any = None
    service_tier: Any = None
    user: Any = None
    safety_identifier: Any = None
    max_tool_calls: Any = None
    stream_options: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    image_tokens: ImageTokens | None = None


# ---- responses -------------------------------------------------------------------------------------------------------

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputMessage(Struct, tag_field="type", tag="message"):
    """The text of a response."""

    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A function call. ``namespace``: the namespace of the function, if it has one."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | UnsetType = UNSET


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """Reasoning of the model, if its chat template separates it from the text."""

    id: str
    content: list[ReasoningText]
    status: Status
    summary: list[Any] = []


OutputItem = OutputMessage | OutputCall | OutputReasoning


class ResponseUsage(Struct):
    """Token counts."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens_details: dict[str, int]


class ResponseObject(Struct, kw_only=True):
    """A response. ``incomplete_details`` has the reason why it is incomplete, or the limit of tool calls
    that ended it, ``error`` the reason why it failed."""

    id: str
    created_at: int
    model: str
    output: list[OutputItem]
    status: Status
    usage: ResponseUsage | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, Any]
    store: bool
    error: dict[str, str] | None = None
    truncation: Literal["disabled"] = "disabled"
    object: Literal["response"] = "response"


__all__ = [name for name, value in list(globals().items()) if isinstance(value, type) and issubclass(value, Struct)]
