"""Conversations: messages in OpenAI's shape, checked, and made a prompt by the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..checks import shown
from ..errors import InvalidArgument, MpoolError, Unsupported
from ..tasks.text_embedding import MAX_CHARS

if TYPE_CHECKING:
    from ..runtime.entry import Entry
    from ..tasks.options import Call
    from ..tasks.vision import Images
    from .template import ChatPrompt, ChatTemplate
    from .tools import Tools

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAPE = 'A message is a dict such as {"role": "user", "content": "Hello"}'


def template_of(entry: Entry) -> ChatTemplate:
    """The model's chat template."""
    from .template import ChatTemplate

    return ChatTemplate.for_model(entry.describe().chat_template, entry.tokenizer(), key=entry.key)


def prompt_of(entry: Entry, messages: Any, options: dict[str, Any],
              call: Call | None = None) -> tuple[ChatPrompt, Images | None, Tools | None]:
    """A conversation, up to where the answer begins, its images, and the tools that the answer may call. Takes its own
    options out of ``options``.

    Raises:
        InvalidArgument: the messages or the tools are not of the shape described in :func:`mpool.chat`.
        Unsupported: they hold images and the model reads text only, tools are given and the model's template knows of
            none, or the model has no template.
        TemplateError: the template refuses the conversation.
    """
    if options.pop("parse_special", False) is not False:
        raise InvalidArgument("parse_special is given for a chat, allowed: in generate",
                              hint="What a message says is plain text; the template writes the control tokens",
                              key=entry.key)
    variables = options.pop("template_options", None)
    variables = {} if variables is None else variables
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise InvalidArgument(f"template_options is {shown(variables)}, allowed: a dict, name -> plain value",
                              key=entry.key)
    allow_urls = options.pop("allow_urls", False)
    sees = entry.capability == "vision"
    try:
        images: list[Any] | None = [] if sees else None
        checked = check_messages(messages, images)
        tools = None
        if any(options.get(name) is not None for name in ("tools", "tool_choice", "parallel_tool_calls")):
            from .tools import take

            tools = take(entry, options)
        for name in ("tools", "tool_choice", "parallel_tool_calls"):
            options.pop(name, None)
        checked, given = _told(entry, checked, tools)
        if images is not None:
            return *_with_images(entry, checked, images, variables, allow_urls, call, given), tools
        return entry.template().prompt(checked, entry.tokenizer(), tools=given, **variables), None, tools
    except TypeError as error:
        # a variable by the name of one of prompt's own arguments
        raise InvalidArgument(f"template_options cannot hold these names: {error}", key=entry.key) from None
    except MpoolError as error:
        error.key = error.key or entry.key
        raise


def _told(entry: Entry, messages: list[dict[str, Any]],
          tools: Tools | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The conversation with its calls as the template reads them, and the tools that it is given beside it."""
    if tools is None and not any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
        return messages, None
    from . import tool_formats, tool_templates
    from .tools import name_results

    template = entry.template()
    use = tool_templates.use_of(template)
    name_results(messages)
    messages = tool_templates.with_calls(messages, use, tool_formats.of_template(template.source))
    if tools is None:
        return messages, None
    if use.tools == "variable":
        return messages, tools.given
    return tool_templates.with_tools(messages, tools.given, tools.form if use.tools == "text" else None), None


def _with_images(entry: Entry, messages: list[dict[str, Any]], images: list[Any], variables: Mapping[str, Any],
                 allow_urls: Any, call: Call | None,
                 tools: list[dict[str, Any]] | None) -> tuple[ChatPrompt, Images | None]:
    import numpy as np

    from ..tasks import vision as seeing

    settings, tokenizer, template = entry.describe().vision, entry.tokenizer(), entry.template()
    assert settings is not None
    own = settings.image_token_id >= 0
    token = tokenizer.token_text(settings.image_token_id) if own else None
    stand_in = None
    if token is None or not template.places_images(token, tokenizer):
        # a template for texts: the images stand in them, as lines of their own
        stand_in = seeing.stand_in(messages), token
        messages = [{**message, "content": _joined(message["content"], stand_in[0] + "\n")} for message in messages]
    cuts = seeing.read_images(entry, images, allow_urls, None if call is None else call.deadline)
    made = template.prompt(messages, tokenizer, tools=tools, stand_in=stand_in, **variables)
    ids, first = made.ids, tokenizer.prefix_ids
    if first and ids[:len(first)].tolist() != list(first):  # as processors do, whose templates may leave it out
        ids = np.concatenate([np.array(first, dtype=np.int32), ids])
    ids, found = seeing.expand(entry, ids, cuts)
    return made._replace(ids=ids), found


def _joined(content: Any, image: str) -> Any:
    if not isinstance(content, list):
        return content
    return "".join(image if part["type"] == "image" else part["text"] for part in content)


def check_messages(messages: Any, images: list[Any] | None = None) -> list[dict[str, Any]]:
    """Messages as plain dicts: the parts of a message's text joined; or, with ``images``, to which those of the
    messages are added, a list of ``{"type": "image"}`` and ``{"type": "text", "text": ...}``.

    Raises:
        InvalidArgument: see :func:`prompt_ids`.
        Unsupported: a part of a message is not what the model reads.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidArgument(f"messages is {shown(messages)}, allowed: a list of messages", hint=_SHAPE)
    if not messages:
        raise InvalidArgument("messages is empty, allowed: at least one message", hint=_SHAPE)
    checked, chars = [], 0
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message, Mapping):
            raise InvalidArgument(f"{where} is {shown(message)}, allowed: a message", hint=_SHAPE)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise InvalidArgument(f"{where} has the role {shown(role)}, allowed: " + ", ".join(ROLES), hint=_SHAPE)
        if _given(message.get("images")) and images is None:
            raise Unsupported(f"{where} has images; this model reads text only")
        content = _content(where, message, role, images)
        chars += sum(len(part.get("text", "")) for part in content) if isinstance(content, list) \
            else len(content or "")
        one = {**{name: value for name, value in message.items() if name != "images" or images is None},
               "content": content}
        calls = one.pop("tool_calls", None)
        if _given(calls):
            if role != "assistant":
                raise InvalidArgument(f"{where} has tool_calls and the role {role}, allowed: the role assistant")
            from .tools import check_calls

            one["tool_calls"] = check_calls(where, calls)
        checked.append(one)
    if chars > MAX_CHARS:
        raise InvalidArgument(f"messages have {chars:,} characters together, allowed: {MAX_CHARS:,}",
                              hint="Leave out the oldest")
    return checked


def _given(value: Any) -> bool:
    """Neither None nor nothing; the truth of an array is an error."""
    return value is not None and not (isinstance(value, (list, tuple)) and not value)


def _content(where: str, message: Mapping[str, Any], role: str,
             images: list[Any] | None) -> str | list[dict[str, Any]] | None:
    content = message.get("content")
    if images is not None:
        return _parts(where, message, role, images)
    if isinstance(content, (list, tuple)):
        parts = []
        for at, part in enumerate(content):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in ("image", "image_url", "input_image", "input_audio", "audio", "video", "file"):
                raise Unsupported(f"{where}.content[{at}] is of type {kind}; this model reads text only")
            text = part.get("text") if kind in ("text", "input_text") else part
            if not isinstance(text, str):
                raise InvalidArgument(f"{where}.content[{at}] is {shown(part)}, allowed: a text or "
                                      '{"type": "text", "text": ...}')
            parts.append(text)
        content = "".join(parts)
    if content is None and role == "assistant" and message.get("tool_calls"):
        return None
    if not isinstance(content, str):
        raise InvalidArgument(f"{where}.content is {shown(content)}, allowed: text, or a list of parts of text")
    return content


def _parts(where: str, message: Mapping[str, Any], role: str, images: list[Any]) -> list[dict[str, Any]]:
    """Parts of a message to a model that reads images; Ollama's ``images`` come first."""
    from ..tasks import vision as seeing

    content, own = message.get("content"), message.get("images")
    parts: list[dict[str, Any]] = []
    if _given(own):
        if isinstance(own, (str, bytes, Mapping)) or not isinstance(own, Sequence):
            raise InvalidArgument(f"{where}.images is {shown(own)}, allowed: a list of images")
        images += own
        parts += [{"type": "image"} for _ in own]
    if isinstance(content, str):
        content = [content] if content else []
    if content is None and (parts or role == "assistant"):
        content = []
    if not isinstance(content, (list, tuple)):
        raise InvalidArgument(f"{where}.content is {shown(content)}, allowed: text, or a list of parts of text and "
                              "images")
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in seeing.IMAGE_PARTS:
            images.append(seeing.image_of(part, f"{where}.content[{at}]"))
            parts.append({"type": "image"})
            continue
        if kind in ("input_audio", "audio", "video", "file"):
            raise Unsupported(f"{where}.content[{at}] is of type {kind}; this model reads text and images only")
        text = part.get("text") if kind in ("text", "input_text") else part
        if not isinstance(text, str):
            raise InvalidArgument(f"{where}.content[{at}] is {shown(part)}, allowed: a text, "
                                  '{"type": "text", "text": ...} or {"type": "image", "image": ...}')
        parts.append({"type": "text", "text": text})
    return parts
