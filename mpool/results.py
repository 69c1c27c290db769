"""Results of text generation: frozen dataclasses, safe to share between threads and to pickle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: Why a text ended. ``"stop"``: the model ended it, or a stop string or token did (see ``stop``); ``"length"``:
#: ``max_tokens`` or the context was full; ``"tool_calls"``: the model ended it, and wants tools to be called;
#: ``"cancelled"``: the stream was left early.
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
        """Prompt and completion together."""
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
    """An alternative at one place: its id, the text it would have added, its log probability (natural)."""

    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token.

    Attributes:
        token_id: its id.
        token: the text it adds; bytes that are part of a character only show as U+FFFD.
        logprob: its natural log probability under the model, before temperature, penalties and filters.
        top: the likeliest tokens at this place, likeliest first; as many as ``top_logprobs`` asked for.
    """

    token_id: int
    token: str
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model asks for.

    Attributes:
        id: the message with its result names it, as ``tool_call_id``.
        name: of the tool.
        arguments: by name; None if the answer was cut before they were complete.
        raw: the arguments as JSON text.
    """

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The part of a function call in a stream chunk.

    Attributes:
        index: which of the answer's calls, from 0.
        id, name: as in :class:`ToolCall`, in the first piece of a call, else None.
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
        index: which, from 0.
        text: the answer, without the stop string.
        finish_reason: see :data:`FinishReason`.
        stop: the stop string (str) or stop token (int) that ended it; None if the model ended the completion, or its
            length did.
        token_ids: ids of the generated tokens, without the one that ended it.
        logprobs: one an id, if asked for.
        reasoning: for a chat, the model's reasoning before its answer, if its format separates the two; else
            None. Its tokens are among ``token_ids``.
        parsed: with a ``response_format`` of JSON, the parsed text: an instance of the pydantic class that was
            given, else dicts, lists and so on. None if the text was cut (``finish_reason`` ``"length"``, a stop
            string), or the class has validators of its own that refuse it: its ``model_validate_json(text)`` says why.
        tool_calls: of a chat with ``tools``, the calls that the model asks for, in order.
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


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer. ``str()`` of it is its text.

    Attributes:
        text, finish_reason, stop, token_ids, logprobs, reasoning, parsed, tool_calls: those of the first choice (see
            :class:`Choice`).
        usage: counts of tokens.
        timings: where the time went.
        model: key of the model that wrote it.
        seed: the seed in use; passing it again with the same request gives the same tokens.
        choices: all ``n`` answers.
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
        """The answer as a chat message, ready to be appended to ``messages``: with its ``reasoning``, if there is one,
        which :func:`mpool.chat` hands to templates under the names that they read it by, and with its complete
        ``tool_calls``, in OpenAI's shape."""
        found: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            found["reasoning"] = self.reasoning
        calls = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
                 for call in self.tool_calls if call.arguments is not None]
        return {**found, "tool_calls": calls} if calls else found

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a stream. ``str()`` of it is its text.

    Attributes:
        text: what was added; whole characters, never part of a possible stop string. Empty in a last
            piece that adds nothing, and in pieces of ``reasoning``.
        index: which of the ``n`` choices it continues.
        finish_reason: set in the last piece of a choice, else None.
        stop: as in :class:`Choice`, in the last piece.
        logprobs: of the tokens decided since the piece before, if asked for.
        reasoning: new text of the choice's ``reasoning``, which comes before its text.
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


__all__ = ["Choice", "Chunk", "Completion", "FinishReason", "Timings", "TokenLogprob", "ToolCall", "ToolCallDelta",
           "TopLogprob", "Usage"]
