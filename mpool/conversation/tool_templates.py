"""How a chat template takes tools and the calls of earlier turns, detected by rendering a small conversation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import LimitError, TemplateError
from .tool_formats import DEEPSEEK_V3, DEEPSEEK_V31, ToolFormat, of_template

if TYPE_CHECKING:
    from .template import ChatTemplate

_TOOL, _KEY, _TEXT = "mpool_probe", "mpool_key", "mpool_content"
_PROBE = {"type": "function", "function": {
    "name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}}}}
_OTHER = {"type": "function", "function": {"name": "other", "description": "", "parameters": {"type": "object",
                                                                                              "properties": {}}}}


class ToolUse(NamedTuple):
    """How a template uses tools.

    Attributes:
        tools: ``"variable"``: it reads ``tools``; ``"message"``: the system message's ``tools``, a text; ``"text"``: it
            does neither, and its authors want them described in the system message; None: it knows of none.
        calls: of earlier turns: arguments are a ``"dict"`` or ``"text"``; ``"content"``: it knows of none, so that they
            have to stand in the content.
        empty: the content of a message that only calls.
    """

    tools: str | None
    calls: str
    empty: str | None


def use_of(template: ChatTemplate) -> ToolUse:
    """Tool use of a template, cached."""
    found: ToolUse | None = getattr(template, "_tool_use", None)
    if found is None:
        found = ToolUse(_tools(template), *_calls(template))
        template._tool_use = found  # type: ignore[attr-defined]
    return found


def with_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]],
               described: ToolFormat | None = None) -> list[dict[str, Any]]:
    """The conversation with tools in its system message; with ``described``, in its text, and how they are called."""
    if described is not None:
        text = _described(tools, described)
        if messages and messages[0].get("role") == "system":
            said = messages[0].get("content") or ""
            text = "\n\n" * bool(said) + text
            joined = [*said, {"type": "text", "text": text}] if isinstance(said, list) else said + text
            return [{**messages[0], "content": joined}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def _described(tools: list[dict[str, Any]], form: ToolFormat) -> str:
    """As the authors of DeepSeek V3.1 describe tools: https://huggingface.co/deepseek-ai/DeepSeek-V3.1"""
    parts = ["## Tools", "You have access to the following tools:"]
    for tool in tools:
        function = tool["function"]
        parts.append(f"### {function['name']}\nDescription: {function['description']}\n\n"
                     f"Parameters: {json.dumps(function['parameters'], ensure_ascii=False)}")
    before, after = form.around("tool_call_name")
    parts.append("IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
                 f"{form.prefix}{before}tool_call_arguments{after}{form.close}{form.end}")
    parts.append("Where `tool_call_name` must be an exact match to one of the available tools, and "
                 "`tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema.")
    return "\n\n".join(parts)


def with_calls(messages: list[dict[str, Any]], use: ToolUse, form: ToolFormat | None) -> list[dict[str, Any]]:
    """The conversation with its calls as the template reads them; arguments are dicts before."""
    if form is not None and form.numbered:
        messages = _numbered(messages)
    return [_with_calls(message, use, form) if message.get("tool_calls") else message for message in messages]


def _numbered(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with ids that contain the function's name: some templates write the id in its place."""
    ids: dict[str, str] = {}
    found = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            ids[call["id"]] = f"functions.{call['function']['name']}:{len(ids)}"
            calls.append({**call, "id": ids[call["id"]]})
        told = {"tool_call_id": ids[message["tool_call_id"]]} if message.get("tool_call_id") in ids else {}
        found.append({**message, **({"tool_calls": calls} if calls else {}), **told})
    return found


def _with_calls(message: dict[str, Any], use: ToolUse, form: ToolFormat | None) -> dict[str, Any]:
    calls = message["tool_calls"]
    if use.calls == "content" and form is not None:
        written = form.written([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        said = message.get("content") or ""
        if isinstance(said, list):
            return {**rest, "content": [*said, {"type": "text", "text": written}]}
        return {**rest, "content": said + written}
    if use.calls == "text":
        calls = [{**call, "function": {**call["function"],
                                       "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
                 for call in calls]
    return {**message, "content": message.get("content") or use.empty, "tool_calls": calls}


def _tools(template: ChatTemplate) -> str | None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": _TEXT}]
    for given in ([{"role": "system", "content": _TEXT}, *messages], messages):
        text = _rendered(template, given, [_PROBE])
        if _TOOL in text and _KEY in text:
            return "variable"
        if _TOOL in _rendered(template, with_tools(given, [_PROBE]), None):
            return "message"
    return "text" if of_template(template.source) in (DEEPSEEK_V3, DEEPSEEK_V31) else None


def _calls(template: ChatTemplate) -> tuple[str, str | None]:
    for empty in (None, ""):
        for arguments in ({_KEY: "1"}, json.dumps({_KEY: "1"})):
            call = {"id": "abcdefghi", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": _TEXT}, {"role": "assistant", "content": empty, "tool_calls": [call]},
                {"role": "tool", "content": _TEXT, "tool_call_id": "abcdefghi", "name": _TOOL}]
            text = _rendered(template, messages, None) or _rendered(template, messages, [_OTHER])
            right = f'"{_KEY}"' in text or f"<parameter={_KEY}>" in text
            if right and (_TOOL in text or "abcdefghi" in text) and "None" not in text:
                return ("dict" if isinstance(arguments, dict) else "text"), empty
    return "content", ""


def _rendered(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    try:
        return template.render(messages, tools=tools, add_generation_prompt=True)
    except (TemplateError, LimitError):
        return ""
