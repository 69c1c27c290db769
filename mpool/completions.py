"""Results of text generation: frozen dataclasses, safe to share between threads and to pickle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from .checks import missing_attribute

#: Why a completion ended. ``"stop"``: at the model's end token, or at a stop string or stop token (see ``stop``);
#: ``"length"``: at ``max_tokens`` or at the end of the context; ``"tool_calls"``: at the model's end token, with tool
#: calls, or at a limit of tool calls (see ``stop``); ``"cancelled"``: the stream was closed early.
FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens.

    Attributes:
        prompt_tokens: tokens of the prompt, including BOS and the chat template.
        completion_tokens: generated tokens of all choices together.
        cached_tokens: prompt tokens taken from the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Sum of prompt tokens and completion tokens."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of a request, in seconds.

    Attributes:
        queued: from submission to the first step, including model loading.
        prompt: prompt processing, up to the first token.
        generation: from the first token to the last.
        total: from submission to the end.
    """

    queued: float
    prompt: float
    generation: float
    total: float


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """A likely token at one position: its id, the text that it would add, and its natural log probability."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token.

    Attributes:
        token_id: id of the token.
        token: text that the token adds; bytes of an incomplete character appear as U+FFFD.
        logprob: natural log probability under the model, before temperature, penalties and filters.
        top: the ``top_logprobs`` most likely tokens at this position, most likely first.
    """

    token_id: int
    token: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the model requests.

    Attributes:
        id: identifier of the call; the message with the tool's result refers to it as ``tool_call_id``.
        name: name of the tool.
        arguments: arguments by name; None if the completion was cut before they were complete.
        raw: arguments as JSON text.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The part of a tool call in a stream chunk.

    Attributes:
        index: number of the tool call within the completion, from 0.
        id, name: as in :class:`ToolCall`, in the first chunk of a tool call; None in later chunks.
        arguments: new text of the JSON arguments.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the ``n`` completions of a prompt.

    Attributes:
        index: number of the choice, from 0.
        text: generated text, without the stop string.
        finish_reason: reason why it ended; see :data:`FinishReason`.
        stop: the stop string (str) or stop token (int) that ended it; None if an end token of the model or a length
            limit ended it. With ``finish_reason`` ``"tool_calls"``, the limit of tool calls that ended it, if one did:
            ``"max_tool_calls"`` (32 calls) or ``"repeated_tool_calls"`` (8 equal calls in a row).
        token_ids: ids of the generated tokens, without the one that ended it.
        logprobs: one :class:`TokenLogprob` per id, if requested.
        reasoning: for a chat, the model's reasoning before its answer, if the chat format separates the two; else
            None. Its tokens are included in ``token_ids``.
        parsed: the text parsed as JSON, if ``response_format`` is a JSON format: an instance of the pydantic class
            that was given, else dicts, lists and so on. None if the text was cut (``finish_reason`` ``"length"``, a
            stop string), or if a validator of the class rejects it: ``model_validate_json(text)`` raises the reason.
        tool_calls: for a chat with ``tools``, the tool calls that the model requests, in order.
    """

    index: int
    text: str
    finish_reason: FinishReason
    stop: str | int | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str | None = None
    parsed: Any = None
    tool_calls: tuple[ToolCall, ...] = ()

    if not TYPE_CHECKING:  # a type checker still reports unknown attributes
        __getattr__ = missing_attribute


@dataclass(frozen=True, slots=True)
class Completion:
    """Result of a text generation request. ``str()`` returns its text.

    Attributes:
        text, finish_reason, stop, token_ids, logprobs, reasoning, parsed, tool_calls: those of the first choice (see
            :class:`mpool.results.Choice`).
        usage: counts of tokens.
        timings: durations of the phases of the request.
        model: key of the model.
        seed: the seed in use; the same request with this seed generates the same tokens.
        choices: all ``n`` choices.
    """

    text: str
    finish_reason: FinishReason
    stop: str | int | None
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    usage: Usage
    timings: Timings
    model: str
    seed: int
    choices: tuple[Choice, ...]
    reasoning: str | None = None
    parsed: Any = None
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The completion as a chat message, ready to be appended to ``messages``.

        It has ``reasoning``, if there is any, which :func:`mpool.chat` passes to chat templates under the names that
        they use. It has the complete ``tool_calls``, in OpenAI's format.
        """
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            found["reasoning"] = self.reasoning
        calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
                 for call in self.tool_calls if call.arguments is not None]
        return {**found, "tool_calls": calls} if calls else found

    def __str__(self) -> str:
        return self.text

    if not TYPE_CHECKING:  # a type checker still reports unknown attributes
        __getattr__ = missing_attribute

        def __getitem__(self, key):
            raise TypeError("a Completion is not a dict: use its attributes `text`, `message`, `choices`, `usage` and "
                            "`finish_reason`")

        __iter__ = None  # else Python iterates by __getitem__


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk of a stream. ``str()`` returns its text.

    Attributes:
        text: new text, as whole characters, never part of a possible stop string. Empty in a last chunk that adds
            nothing and in chunks with ``reasoning``.
        index: number of the choice that it continues, from 0.
        finish_reason: reason why the choice ended, in its last chunk; else None.
        stop: as in :class:`mpool.results.Choice`, in the last chunk.
        logprobs: log probabilities of the tokens since the previous chunk, if requested.
        reasoning: new text of the choice's ``reasoning``, which precedes its text.
        tool_calls: new parts of the choice's ``tool_calls``.
    """

    text: str
    index: int = 0
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __str__(self) -> str:
        return self.text

    if not TYPE_CHECKING:  # a type checker still reports unknown attributes
        __getattr__ = missing_attribute


__all__ = ["Choice", "Chunk", "Completion", "FinishReason", "Timings", "TokenLogprob", "ToolCall", "ToolCallDelta",
           "TopLogprob", "Usage"]
