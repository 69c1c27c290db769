"""Parts of the choices of a completion in OpenAI's format, which the adapters for chat libraries return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..completions import Choice, Chunk, Completion, TokenLogprob


def logprobs_of(tokens: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
    """Return the dict ``logprobs`` of a choice; None: the request did not ask for log probabilities."""
    if tokens is None:
        return None
    return {"content": [{**_row(one), "top_logprobs": [_row(top) for top in one.top]} for one in tokens],
            "refusal": None}


def call_limit(done: Completion | Choice | Chunk) -> dict[str, Any]:
    """Return ``stop_reason``, the limit of tool calls that ended a choice, as the server does; else an empty dict."""
    return {"stop_reason": done.stop} if done.finish_reason == "tool_calls" and done.stop is not None else {}


def _row(one: Any) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": None}


__all__ = ["call_limit", "logprobs_of"]
