"""Detects how a chat template handles tools and function calls of earlier turns, by rendering a small conversation."""

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


class ToolSupport(NamedTuple):
    """How a chat template handles tools.

    Attributes:
        tools: ``"variable"``: the template reads the variable ``tools``. ``"message"``: it reads ``tools``, a string,
            from the system message. ``"text"``: it does neither, and the model's authors describe tools in the system
            message's text. None: the template does not support tools.
        calls: calls of earlier turns. ``"dict"`` or ``"text"``: the template reads ``tool_calls``, with arguments of
            this type. ``"content"``: it does not read them, so the content must contain the calls.
        empty: content of a message that has only calls.
    """

    tools: str | None
    calls: str
    empty: str | None


def tool_support(template: ChatTemplate) -> ToolSupport:
    """Return how a template handles tools; cached on the template."""
    found: ToolSupport | None = getattr(template, "_tool_support", None)
    if found is None:
        found = ToolSupport(_tools(template), *_calls(template))
        template._tool_support = found  # type: ignore[attr-defined]
    return found


def with_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]],
               format: ToolFormat | None = None) -> list[dict[str, Any]]:
    """Return the conversation with the tools in its system message.

    Args:
        messages: the conversation.
        tools: the tools, in OpenAI's format.
        format: if given, the system message's text describes the tools and this tool-call format; if None, the system
            message gets the key ``tools``.
    """
    if format is not None:
        text = _describe_tools(tools, format)
        if messages and messages[0].get("role") == "system":
            content = messages[0].get("content") or ""
            text = "\n\n" * bool(content) + text
            joined = [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
            return [{**messages[0], "content": joined}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]
    text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
    if messages and messages[0].get("role") == "system":
        return [{**messages[0], "tools": text}, *messages[1:]]
    return [{"role": "system", "content": "", "tools": text}, *messages]


def _describe_tools(tools: list[dict[str, Any]], format: ToolFormat) -> str:
    """Describe tools as the authors of DeepSeek V3.1 do: https://huggingface.co/deepseek-ai/DeepSeek-V3.1"""
    parts = ["## Tools", "You have access to the following tools:"]
    for tool in tools:
        function = tool["function"]
        parts.append(f"### {function['name']}\nDescription: {function.get('description', '')}\n\n"
                     f"Parameters: {json.dumps(function['parameters'], ensure_ascii=False)}")
    before, after = format.around_arguments("tool_call_name")
    parts.append("IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
                 f"{format.prefix}{before}tool_call_arguments{after}{format.close}{format.end}")
    parts.append("Where `tool_call_name` must be an exact match to one of the available tools, and "
                 "`tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema.")
    return "\n\n".join(parts)


def with_calls(messages: list[dict[str, Any]], support: ToolSupport, format: ToolFormat | None) -> list[dict[str, Any]]:
    """Return the conversation with its function calls as the template reads them.

    Args:
        messages: the conversation; the arguments of its calls are dicts.
        support: how the template handles tools.
        format: the model's tool-call format; None if it is not supported.
    """
    if format is not None and format.numbered:
        messages = _with_numbered_ids(messages)
    return [_with_calls(message, support, format) if message.get("tool_calls") else message for message in messages]


def _with_numbered_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the conversation with call ids that contain the function's name: some templates write only the id."""
    ids: dict[str, str] = {}
    found = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            ids[call["id"]] = f"functions.{call['function']['name']}:{len(ids)}"
            calls.append({**call, "id": ids[call["id"]]})
        result = {"tool_call_id": ids[message["tool_call_id"]]} if message.get("tool_call_id") in ids else {}
        found.append({**message, **({"tool_calls": calls} if calls else {}), **result})
    return found


def _with_calls(message: dict[str, Any], support: ToolSupport, format: ToolFormat | None) -> dict[str, Any]:
    calls = message["tool_calls"]
    if support.calls == "content" and format is not None:
        text = format.render([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        rest = {name: value for name, value in message.items() if name != "tool_calls"}
        content = message.get("content") or ""
        if isinstance(content, list):
            return {**rest, "content": [*content, {"type": "text", "text": text}]}
        return {**rest, "content": content + text}
    if support.calls == "text":
        calls = [{**call, "function": {**call["function"],
                                       "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}
                 for call in calls]
    return {**message, "content": message.get("content") or support.empty, "tool_calls": calls}


def _tools(template: ChatTemplate) -> str | None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": _TEXT}]
    for conversation in ([{"role": "system", "content": _TEXT}, *messages], messages):
        text = _try_render(template, conversation, [_PROBE])
        if _TOOL in text and _KEY in text:
            return "variable"
        if _TOOL in _try_render(template, with_tools(conversation, [_PROBE]), None):
            return "message"
    return "text" if of_template(template.source) in (DEEPSEEK_V3, DEEPSEEK_V31) else None


def _calls(template: ChatTemplate) -> tuple[str, str | None]:
    for empty in (None, ""):
        for arguments in ({_KEY: "1"}, json.dumps({_KEY: "1"})):
            call = {"id": "abcdefghi", "type": "function", "function": {"name": _TOOL, "arguments": arguments}}
            messages: list[dict[str, Any]] = [
                {"role": "user", "content": _TEXT}, {"role": "assistant", "content": empty, "tool_calls": [call]},
                {"role": "tool", "content": _TEXT, "tool_call_id": "abcdefghi", "name": _TOOL}]
            for tools in (None, [_OTHER]):
                text = _try_render(template, messages, tools)
                right = any(written in text for written in (
                    f'"{_KEY}"', f"<parameter={_KEY}>", f"<arg_key>{_KEY}<", f"({_KEY}=", f"{{{_KEY}:"))
                if right and (_TOOL in text or "abcdefghi" in text) and "None" not in text:
                    return ("dict" if isinstance(arguments, dict) else "text"), empty
    return "content", ""


def _try_render(template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    try:
        return template.render(messages, tools=tools, add_generation_prompt=True)
    except (TemplateError, LimitError):
        if template.exceeded:  # each further probe would take as long
            raise
        return ""
