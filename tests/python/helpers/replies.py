"""A reply with reasoning, text and two tool calls, whole and as a stream, in place of a model's."""

from collections.abc import Iterator
from typing import Any

from mpool import results

_CALLS = (results.ToolCall("c1", "f", {"a": 1}, '{"a": 1}'), results.ToolCall("c2", "g", {}, "{}"))
_CHOICE = results.Choice(0, "I look.", "tool_calls", reasoning="Hm, hm", tool_calls=_CALLS)
COMPLETION = results.Completion(
    _CHOICE.text, _CHOICE.finish_reason, None, (), None, results.Usage(4, 9), results.Timings(0.0, 0.0, 0.0, 0.0), "m",
    1, (_CHOICE,), reasoning=_CHOICE.reasoning, tool_calls=_CALLS)
CHUNKS = (
    results.Chunk("", reasoning="Hm, "), results.Chunk("", reasoning="hm"), results.Chunk("I "), results.Chunk("look."),
    results.Chunk("", tool_calls=(results.ToolCallDelta(0, "c1", "f", '{"a"'),)),
    results.Chunk("", tool_calls=(results.ToolCallDelta(0, None, None, ": 1}"),
                                  results.ToolCallDelta(1, "c2", "g", "{}"))),
    results.Chunk("", finish_reason="tool_calls"))


class _Stream:
    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __iter__(self) -> Iterator[results.Chunk]:
        return iter(CHUNKS)

    def result(self) -> results.Completion:
        return COMPLETION


def chat(pool: Any, messages: Any, model: Any = None, *, stream: bool = False, **options: Any) -> Any:
    """Stand in for :meth:`mpool.Pool.chat`."""
    return _Stream() if stream else COMPLETION
