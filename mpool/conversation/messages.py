"""Messages in OpenAI's shape: checked, and made plain dicts that a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..checks import refuse
from ..errors import InvalidArgument, Unsupported
from ..tokenizers.limits import MAX_CHARS
from .template import each_string

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAPE = 'A message is a dict such as {"role": "user", "content": "Hello"}'
#: Kinds of parts of a message that are images.
IMAGE_PARTS = ("image", "image_url", "input_image")
#: Placeholder characters for an image while the chat template is rendered.
_STAND_INS = "\ufdd8\ufdd9\ufdda\ufddb"


def check_messages(messages: Any, images: list[Any] | None = None) -> list[dict[str, Any]]:
    """Messages as plain dicts: the parts of a message's text joined; or, with ``images``, to which those of the
    messages are added, a list of ``{"type": "image"}`` and ``{"type": "text", "text": ...}``.

    Raises:
        InvalidArgument: see :func:`prompt_ids`.
        Unsupported: the model does not support a part of a message.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        refuse("messages", messages, "a list of messages", hint=_SHAPE)
    if not messages:
        raise InvalidArgument(param="messages", got="empty", allowed="a list of at least one message", hint=_SHAPE)
    checked, chars = [], 0
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message, Mapping):
            refuse(where, message, "a message", hint=_SHAPE)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            refuse(f"{where}.role", role, "one of " + ", ".join(ROLES), hint=_SHAPE)
        if _given(message.get("images")) and images is None:
            raise Unsupported(f"`{where}` has images; this model supports text only", param=f"{where}.images")
        content = _content(where, message, role, images)
        chars += sum(len(part.get("text", "")) for part in content) if isinstance(content, list) \
            else len(content or "")
        one = {**{name: value for name, value in message.items() if name != "images" or images is None},
               "content": content}
        calls = one.pop("tool_calls", None)
        if _given(calls):
            if role != "assistant":
                raise InvalidArgument(param=f"{where}.role", got=f"{role!r} with tool_calls",
                                      allowed="'assistant' when the message has tool_calls")
            from .tools import check_calls

            one["tool_calls"] = check_calls(where, calls)
        checked.append(one)
    if chars > MAX_CHARS:
        raise InvalidArgument(param="messages", got=f"{chars:,} characters",
                              allowed=f"at most {MAX_CHARS:,} characters together",
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
                raise Unsupported(f"`{where}.content[{at}]` is of type {kind}; this model supports text only",
                                  param=f"{where}.content[{at}]")
            text = part.get("text") if kind in ("text", "input_text") else part
            if not isinstance(text, str):
                refuse(f"{where}.content[{at}]", part, 'a text or {"type": "text", "text": ...}')
            parts.append(text)
        content = "".join(parts)
    if content is None and role == "assistant" and message.get("tool_calls"):
        return None
    if not isinstance(content, str):
        refuse(f"{where}.content", content, "text, or a list of parts of text")
    return content


def _parts(where: str, message: Mapping[str, Any], role: str, images: list[Any]) -> list[dict[str, Any]]:
    """Parts of a message to a model that reads images; Ollama's ``images`` come first."""
    content, own = message.get("content"), message.get("images")
    parts: list[dict[str, Any]] = []
    if _given(own):
        if isinstance(own, (str, bytes, Mapping)) or not isinstance(own, Sequence):
            refuse(f"{where}.images", own, "a list of images")
        images += own
        parts += [{"type": "image"} for _ in own]
    if isinstance(content, str):
        content = [content] if content else []
    if content is None and (parts or role == "assistant"):
        content = []
    if not isinstance(content, (list, tuple)):
        refuse(f"{where}.content", content, "text, or a list of parts of text and images")
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in IMAGE_PARTS:
            images.append(image_of(part, f"{where}.content[{at}]"))
            parts.append({"type": "image"})
            continue
        if kind in ("input_audio", "audio", "video", "file"):
            raise Unsupported(f"`{where}.content[{at}]` is of type {kind}; this model supports text and images only",
                              param=f"{where}.content[{at}]")
        text = part.get("text") if kind in ("text", "input_text") else part
        if not isinstance(text, str):
            refuse(f"{where}.content[{at}]", part,
                   'a text, {"type": "text", "text": ...} or {"type": "image", "image": ...}')
        parts.append({"type": "text", "text": text})
    return parts


# ---- images of a message ---------------------------------------------------------------------------------------------

def image_of(part: Mapping[str, Any], where: str) -> Any:
    """The image of a message part: anything that :func:`mpool.embed_image` takes.

    OpenAI's ``{"type": "image_url", "image_url": {"url": ...}}`` takes ``data:`` URLs, and others if allowed;
    ``{"type": "image", ...}`` has it under ``image``, ``url``, ``path``, ``base64`` or ``data``, or ``source`` with
    ``data``.

    Raises:
        InvalidArgument: there is none, or a URL that is none.
    """
    kind = part.get("type")
    value: Any = part.get("image_url") if kind in ("image_url", "input_image") else None
    if kind == "image":
        given = [part[name] for name in ("image", "url", "path", "base64", "data", "source")
                 if part.get(name) is not None]
        if len(given) != 1:
            raise InvalidArgument(param=where, got=f"{len(given)} images",
                                  allowed="one image, under image, url, path or base64",
                                  hint='Such as {"type": "image", "image": "photo.jpg"}')
        value = given[0]
        if isinstance(value, Mapping):
            value = value.get("data", value.get("url"))
        return _text_or_base64(part, value)
    if isinstance(value, Mapping):
        value = value.get("url")
    if not isinstance(value, str) or not value[:8].lower().startswith(("data:", "http:", "https:")):
        refuse(f"{where}.image_url", value, "a data: URL, or http and https with allow_urls=True",
               hint='For files: {"type": "image", "path": ...}')
    return value


def _text_or_base64(part: Mapping[str, Any], value: Any) -> Any:
    """base64 text is marked as such: its first characters need not be those of an image."""
    if isinstance(value, str) and value[:5].lower() != "data:" and (
            part.get("base64") is not None or part.get("data") is not None or isinstance(part.get("source"), Mapping)):
        return f"data:image/png;base64,{value}"
    return value


def stand_in(messages: Sequence[Mapping[str, Any]]) -> str:
    """A character that no text of a conversation holds.

    Raises:
        InvalidArgument: they hold all that could be.
    """
    texts: list[str] = []
    each_string(list(messages), texts.append, texts.append)
    found = next((char for char in _STAND_INS if not any(char in text for text in texts)), None)
    if found is None:
        raise InvalidArgument(param="messages", got="text with all of U+FDD8 to U+FDDB",
                              allowed="text without these noncharacters")
    return found
