"""A conversation to the prompt of one model: messages, tools and images through the model's chat template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import refuse
from ..conversation.messages import check_messages, placeholder_char
from ..errors import InvalidArgument, MpoolError
from . import vision

if TYPE_CHECKING:
    from ..conversation.template import ChatPrompt
    from ..conversation.tools import Tools
    from ..runtime.entry import Entry
    from .options import Call
    from .vision import Images


def prompt_of(entry: Entry, messages: Any, options: dict[str, Any],
              call: Call | None = None) -> tuple[ChatPrompt, Images | None, Tools | None]:
    """The rendered prompt of a conversation, its images, and the tools that a completion may call. Removes its own
    options from ``options``.

    Raises:
        InvalidArgument: the messages or the tools are not of the shape described in :func:`mpool.chat`.
        Unsupported: the messages hold images and the model supports text only, tools are given and the chat template
            has no tools, or the model has no chat template.
        TemplateError: the template refuses the conversation.
    """
    if options.pop("parse_special", False) is not False:
        raise InvalidArgument("`parse_special` must be left out of a chat: the text of messages is plain, and the "
                              "template writes the control tokens", param="parse_special", hint="Use it with generate",
                              key=entry.key)
    variables = options.pop("template_options", None)
    variables = {} if variables is None else variables
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        refuse("template_options", variables, "a dict, name -> plain value", key=entry.key)
    allow_urls = options.pop("allow_urls", False)
    sees = entry.capability == "vision"
    try:
        images: list[Any] | None = [] if sees else None
        checked = check_messages(messages, images)
        tools = None
        if any(options.get(name) is not None for name in ("tools", "tool_choice", "parallel_tool_calls")):
            from ..conversation.tools import pop_tools

            tools = pop_tools(entry.template, entry.key, options)
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            options.pop(name, None)
        checked, given = _told(entry, checked, tools)
        if images is not None:
            return *_with_images(entry, checked, images, variables, allow_urls, call, given), tools
        return entry.template().prompt(checked, entry.tokenizer(), tools=given, **variables), None, tools
    except TypeError as error:
        # a variable by the name of one of prompt's own arguments
        raise InvalidArgument(f"`template_options` cannot hold these names: {error}", param="template_options",
                              key=entry.key) from None
    except MpoolError as error:
        error.key = error.key or entry.key
        raise


def _told(entry: Entry, messages: list[dict[str, Any]],
          tools: Tools | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The conversation with function calls as the template reads them, and the tools passed beside it."""
    if tools is None and not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return messages, None
    from ..conversation import tool_formats, tool_templates
    from ..conversation.tools import complete_results

    template = entry.template()
    support = tool_templates.tool_support(template)
    complete_results(messages)
    messages = tool_templates.with_calls(messages, support, tool_formats.of_template(template.source))
    if tools is None:
        return messages, None
    if support.tools == "variable":
        return messages, tools.definitions
    format = tools.format if support.tools == "text" else None
    return tool_templates.with_tools(messages, tools.definitions, format), None


def _with_images(entry: Entry, messages: list[dict[str, Any]], images: list[Any], variables: Mapping[str, Any],
                 allow_urls: Any, call: Call | None,
                 tools: list[dict[str, Any]] | None) -> tuple[ChatPrompt, Images | None]:
    settings, tokenizer, template = entry.describe().vision, entry.tokenizer(), entry.template()
    assert settings is not None
    own = settings.image_token_id >= 0
    token = tokenizer.token_text(settings.image_token_id) if own else None
    places = None
    if token is None or not template.accepts_image_parts(token, tokenizer):
        # a text-only template: each image is a line of the text
        places = placeholder_char(messages), token
        messages = [{**message, "content": _joined(message["content"], places[0] + "\n")} for message in messages]
    cuts = vision.read_images(entry, images, allow_urls, None if call is None else call.deadline)
    made = template.prompt(messages, tokenizer, tools=tools, placeholder=places, **variables)
    ids, first = made.ids, tokenizer.prefix_ids
    if first and ids[:len(first)].tolist() != list(first):  # as processors do, whose templates may leave it out
        ids = np.concatenate([np.array(first, dtype=np.int32), ids])
    ids, found = vision.expand(entry, ids, cuts)
    return made._replace(ids=ids), found


def _joined(content: Any, image: str) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(image if part["type"] == "image" else part["text"] for part in content)
