"""Renders messages, tools and images to a prompt with the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import integer, refuse
from ..conversation import reasoning, tool_formats, tool_templates, turns
from ..conversation.messages import check_messages, developer_as_system, joined, placeholder_char
from ..conversation.template import ImageTexts, check_arguments
from ..conversation.tools import complete_results, of_options, read_options
from ..errors import InvalidArgument, MpoolError, Unsupported
from ..host import native_calls
from . import vision

if TYPE_CHECKING:
    from ..conversation.template import ChatPrompt
    from ..conversation.tools import ToolOptions, Tools
    from ..images.tiling import TiledImage
    from ..runtime.entry import Entry
    from .options import Call
    from .vision import Images


#: Arguments of :meth:`mpool.conversation.template.ChatTemplate.prompt` that :func:`prompt_of` sets.
_ARGUMENTS = ("messages", "tokenizer", "tools", "images", "merge_turns", "deadline", "check_length")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Arguments of a chat that were checked before its model is known.

    Attributes:
        messages: the conversation, as for :func:`mpool.chat`.
        checked: its messages as plain dicts, each with a list of parts.
        images: its images.
        variables: option ``template_options``.
        tools: options of function calls, or None.
        allow_urls: option ``allow_urls``.
        image_tokens: option ``image_tokens``.
    """

    messages: Any
    checked: list[dict[str, Any]]
    images: list[Any]
    variables: Mapping[str, Any]
    tools: ToolOptions | None
    allow_urls: bool
    image_tokens: int | None


def check(messages: Any, options: dict[str, Any]) -> Conversation:
    """Check the arguments of a chat that need no model.

    Args:
        messages: the conversation, as for :func:`mpool.chat`.
        options: options of the request; those that concern the prompt are removed from it.

    Raises:
        InvalidArgument: messages, tools or another option do not have the shape described in :func:`mpool.chat`.
        Unsupported: a message has a part that no model supports.
    """
    if options.pop("parse_special", False) is not False:
        raise InvalidArgument("`parse_special` must not be used in a chat: only the chat template writes control "
                              "tokens, and messages are plain text", param="parse_special",
                              hint="Use it with generate")
    variables = options.pop("template_options", None)
    variables = {} if variables is None else variables
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        refuse("template_options", variables, "a dict of names and plain values")
    for name in variables:
        if name in _ARGUMENTS:
            raise InvalidArgument(f"`template_options` must not contain the reserved name {name}",
                                  param="template_options")
    allow_urls = options.pop("allow_urls", False)
    if not isinstance(allow_urls, bool):
        refuse("allow_urls", allow_urls, "True or False")
    image_tokens = options.pop("image_tokens", None)
    if image_tokens is not None and (integer(image_tokens) is None or image_tokens < 1):
        refuse("image_tokens", image_tokens, "a number that the model supports, or None")
    images: list[Any] = []
    checked = native_calls.converted(messages, check_messages, messages, images)
    tools = None
    if any(options.get(name) is not None for name in ("tools", "tool_choice", "parallel_tool_calls")):
        tools = read_options(options)
    for name in ("tools", "tool_choice", "parallel_tool_calls"):
        options.pop(name, None)
    return Conversation(messages, checked, images, variables, tools, allow_urls, image_tokens)


def check_content(conversation: Conversation, call: Call | None = None) -> None:
    """Check what :func:`prompt_of` reads of a conversation without its model: texts, values and images.

    Raises:
        InvalidArgument, LimitError, FileError: as :func:`prompt_of`.
    """
    vision.check_images(conversation.images, conversation.allow_urls, call)
    messages, tools = conversation.messages, conversation.tools
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    for given in (messages, conversation.checked):  # the latter also have the values of JSON texts
        native_calls.converted(given, check_arguments, given, None if tools is None else tools.definitions,
                               conversation.variables)


def prompt_of(entry: Entry, conversation: Conversation, call: Call | None = None,
              check_length: Callable[[int], object] | None = None) -> tuple[ChatPrompt, Images | None, Tools | None]:
    """Render the prompt of a conversation.

    Args:
        entry: the model.
        conversation: the checked arguments of the chat.
        call: the request, for its deadline.
        check_length: see :meth:`mpool.conversation.template.ChatTemplate.prompt`.

    Returns:
        the prompt, its images or None, and the tools that a completion may call or None.

    Raises:
        Unsupported: the messages have images and the model supports text only, tools are given and the chat template
            does not support them, or the model has no chat template.
        TemplateError: the template rejects the conversation.
    """
    variables = conversation.variables
    try:
        checked = conversation.checked
        if entry.capability != "vision":
            checked = joined(conversation.messages, checked, conversation.images)
        if any(message["role"] == "developer" for message in checked) and "developer" not in entry.template().source:
            checked = developer_as_system(checked)
        tools = None
        if conversation.tools is not None:
            tools = of_options(entry.template, entry.key, conversation.tools)
        checked = _with_switch(entry, checked, variables)
        checked, template_tools = _with_tools(entry, checked, tools)
        if entry.capability == "vision":
            return *_with_images(entry, checked, conversation, call, template_tools, check_length), tools
        if conversation.image_tokens is not None:
            refuse("image_tokens", conversation.image_tokens, "None for a model that does not see")
        prompt = entry.template().prompt(checked, entry.tokenizer(), tools=template_tools, images=None,
                                         merge_turns=True, deadline=None if call is None else call.deadline,
                                         check_length=check_length, **variables)
        return prompt, None, tools
    except MpoolError as error:
        error.key = error.key or entry.key
        raise


def _with_switch(entry: Entry, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages with the word that turns thinking on or off, if the template has no variable for it."""
    on, template = variables.get("enable_thinking"), entry.template()
    if not isinstance(on, bool) or reasoning.WORDS[0] not in template.source or \
            "enable_thinking" in template.variables():
        return messages
    first = messages[:1] if messages[0]["role"] == "system" else []
    return [turns.joined([*first, {"role": "system", "content": reasoning.WORDS[on]}]), *messages[len(first):]]


def _with_tools(entry: Entry, messages: list[dict[str, Any]],
                tools: Tools | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return the messages with function calls in the shape that the template expects, and the value of the template's
    variable ``tools``. The variable is None if there are no tools, or if they are described in the messages."""
    if tools is None and not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return messages, None

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


def _with_images(entry: Entry, messages: list[dict[str, Any]], conversation: Conversation, call: Call | None,
                 tools: list[dict[str, Any]] | None,
                 check_length: Callable[[int], object] | None) -> tuple[ChatPrompt, Images | None]:
    deadline = None if call is None else call.deadline
    cuts = vision.read_images(entry, conversation.images, conversation.allow_urls, deadline, conversation.image_tokens)
    return place_images(entry, messages, cuts, deadline, tools=tools, merge_turns=True, check_length=check_length,
                        **conversation.variables)


def place_images(entry: Entry, messages: list[dict[str, Any]], cuts: list[TiledImage], deadline: float | None,
                 probe: bool = True, check_context: bool = True, **options: Any) -> tuple[ChatPrompt, Images | None]:
    """Render the prompt of messages with images.

    Args:
        entry: the model.
        messages: checked messages.
        cuts: their images, prepared for the model.
        deadline: ``time.monotonic()`` at which the rendering ends; None: no deadline.
        probe: True: ask the template whether it accepts parts of a message of the user; if not, each image becomes a
            line of the text. False: the template accepts parts.
        check_context: False: the caller truncates the prompt, so it may be longer than the context.
        options: arguments of :meth:`mpool.conversation.template.ChatTemplate.prompt`.

    Returns:
        the prompt, and its images or None.
    """
    settings, tokenizer, template = entry.describe().vision, entry.tokenizer(), entry.template()
    assert settings is not None
    token = tokenizer.token_text(settings.image_token_id) if settings.image_token_id >= 0 else None
    mark = token if settings.mark_token_id is None else tokenizer.token_text(settings.mark_token_id)
    char = None if token else placeholder_char(messages)
    if settings.video is not None and settings.video.mark_token_id is None:
        messages = [{**message, "content": _as_images(message["content"])} for message in messages]
    if mark is None or probe and not template.accepts_image_parts(mark):
        # the template supports text only: each image becomes a line of the text
        mark = placeholder_char(messages)
        messages = [{**message, "content": _join_parts(message["content"], mark + "\n")} for message in messages]
    marks, own = [mark], None if settings.video is None else settings.video.mark_token_id
    if own is not None and any(cut.is_video for cut in cuts):
        marks.append(tokenizer.token_text(own))
    kinds = [len(marks) - 1 if cut.is_video else 0 for cut in cuts]
    shown = ImageTexts(marks, kinds, [cut.text(token or char or "") for cut in cuts], char)
    prompt = template.prompt(messages, tokenizer, images=shown, deadline=deadline, **options)
    ids, prefix = prompt.ids, tokenizer.prefix_ids
    # templates may leave out the BOS token; the processors of transformers add it too
    if prefix and ids[:len(prefix)].tolist() != list(prefix):
        ids = np.concatenate([np.array(prefix, dtype=np.int32), ids])
    ids, prompt_images = vision.expand(entry, ids, cuts, check_context)
    return prompt._replace(ids=ids), prompt_images


def _as_images(content: Any) -> Any:
    """Return the parts of a message's content with an image for each video. A template of SmolVLM writes a space before
    a content that begins with a text or a video, and none before an image: the empty text yields the space."""
    if not isinstance(content, list):
        return content
    return [made for part in content for made in (
        [{"type": "text", "text": ""}, {"type": "image"}] if part["type"] == "video" else [part])]


def _join_parts(content: Any, image: str) -> Any:
    """Join the parts of a message's content to one text, with ``image`` in place of each image."""
    if not isinstance(content, list):
        return content
    if any(part["type"] == "video" for part in content):
        raise Unsupported("the chat template of this model takes no videos", param="messages")
    return "".join(image if part["type"] == "image" else part["text"] for part in content)
