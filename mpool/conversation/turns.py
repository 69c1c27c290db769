"""Joins messages of a conversation, for chat templates that refuse several ones of a role in a row (Mistral, Gemma),
messages of the system after the first (Qwen3.5), or all of them (Gemma 2, Mixtral 8x7B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Keys under which messages have reasoning.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: Text between the texts of joined messages.
_BETWEEN = "\n\n"


def merged(messages: Sequence[dict[str, Any]], system: bool = True) -> list[dict[str, Any]]:
    """Return a conversation in which no two messages in a row have the same role, and only the first is the system's:
    later ones become the user's; without ``system``, the first, too. Results of tools stay apart: each belongs to its
    own call."""
    groups: list[list[dict[str, Any]]] = []
    for at, message in enumerate(messages):
        if message.get("role") == "system" and (at or not system):
            message = {**message, "role": "user"}
        if groups and groups[-1][0].get("role") == message.get("role") != "tool":
            groups[-1].append(message)
        else:
            groups.append([message])
    return [group[0] if len(group) == 1 else joined(group) for group in groups]


def joined(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join messages of one role to one, with a blank line between their texts."""
    found = {**group[0], "content": _contents([message.get("content") for message in group])}
    for name in REASONING:
        texts = [message[name] for message in group if isinstance(message.get(name), str)]
        if texts:
            found[name] = _BETWEEN.join(texts)
    calls = [call for message in group for call in message.get("tool_calls") or ()]
    return {**found, "tool_calls": calls} if calls else found


def _contents(contents: Sequence[Any]) -> Any:
    """Join contents: texts to a text, and lists of parts to a list of parts. Empty ones add nothing."""
    given = [content for content in contents if content]
    if all(isinstance(content, str) for content in given):
        return _BETWEEN.join(given) if given else contents[0]
    parts: list[Any] = []
    for content in given:
        parts += [{"type": "text", "text": _BETWEEN}] * bool(parts)
        parts += content if isinstance(content, (list, tuple)) else [{"type": "text", "text": content}]
    return parts


__all__ = ["REASONING", "joined", "merged"]
