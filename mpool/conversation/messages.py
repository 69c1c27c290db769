"""Validates messages in OpenAI's shape and converts them to the plain dicts that a chat template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..checks import real, refuse, shown
from ..errors import InvalidArgument, Unsupported
from ..host.resources import items_of_caller, list_of_caller
from ..images.base64_text import is_data_url
from ..tokenizers.limits import MAX_CHARS
from . import turns
from .template import each_string
from .tools import check_calls

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAPE = 'A message is a dict such as {"role": "user", "content": "Hello"}'
#: Types of message parts that are images.
IMAGE_PARTS = ("image", "image_url", "input_image")
#: Types of message parts that no model of mpool reads.
_OTHER_PARTS = ("input_audio", "audio", "video", "video_url", "input_video", "file")
#: Values of ``detail`` of an image that select a number of tokens.
DETAILS = ("low", "high", "original")
#: Maximum number of frames of a video.
MAX_FRAMES = 768
_FRAMES = ('Pass the frames of the video: {"type": "video", "video": [frame, ...], "fps": 2}, or "timestamps" '
           '(seconds) instead of "fps"')
#: Placeholder characters for an image while the chat template is rendered.
_PLACEHOLDERS = "\ufdd8\ufdd9\ufdda\ufddb"


def check_messages(messages: Any, images: list[Any] | None = None) -> list[dict[str, Any]]:
    """Validate messages and convert them to plain dicts.

    Args:
        messages: the caller's messages; a text stands for one message of the user.
        images: None for a language model: the text parts of each message are joined to one string. For a vision model,
            a list to which the images of the messages are appended, as :class:`NamedImage`: each content becomes a list
            of ``{"type": "image"}`` and ``{"type": "text", "text": ...}``.

    Raises:
        InvalidArgument: a message is malformed, or the messages have too many characters in total.
        Unsupported: a message has a part that the model does not support.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if isinstance(messages, (bytes, Mapping)) or not isinstance(messages, Sequence):
        refuse("messages", messages, "a list of messages", hint=_SHAPE)
    messages = list_of_caller(messages)
    if not messages:
        raise InvalidArgument(param="messages", got="an empty list", allowed="a list of at least one message",
                              hint=_SHAPE)
    checked, chars = [], 0
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message, Mapping):
            refuse(where, message, "a message", hint=_SHAPE)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            refuse(f"{where}.role", role, "one of " + ", ".join(ROLES), hint=_SHAPE)
        if _is_set(message.get("images")) and images is None:
            raise Unsupported(f"`{where}` has images; this model supports text only", param=f"{where}.images",
                              hint="Use a vision model, or remove the images")
        content = _content(where, message, role, images)
        one = {**{name: value for name, value in message.items() if name != "images" or images is None},
               "content": content}
        calls = one.pop("tool_calls", None)
        if _is_set(calls):
            if role != "assistant":
                raise InvalidArgument(param=f"{where}.role", got=f"{role!r} with tool_calls",
                                      allowed="'assistant' when the message has tool_calls")

            one["tool_calls"] = check_calls(where, calls)
        if role == "tool":
            for name in ("tool_call_id", "name", "tool_name"):
                if not isinstance(one.get(name), str | None):
                    refuse(f"{where}.{name}", one[name], "a string")
        checked.append(one)
        chars += sum(len(part.get("text", "")) for part in content) if isinstance(content, list) \
            else len(content or "")
        chars += sum(_characters(value) for name, value in one.items() if name not in ("role", "content", "images"))
    if chars > MAX_CHARS:
        raise InvalidArgument(param="messages", got=f"{chars:,} characters",
                              allowed=f"at most {MAX_CHARS:,} characters in all messages",
                              hint="Remove the oldest messages")
    return checked


def joined(messages: Any, checked: list[dict[str, Any]], images: list[Any]) -> list[dict[str, Any]]:
    """Return checked messages for a language model: the text parts of each are joined to one string.

    Args:
        messages: the caller's messages.
        checked: result of :func:`check_messages` for a vision model.
        images: its images.

    Raises:
        Unsupported: the messages have images.
    """
    found = []
    for message, one in zip([{"content": messages}] if isinstance(messages, str) else messages, checked):
        if images:
            return check_messages(messages)  # raises the error of a language model
        content = None if message.get("content") is None and one.get("tool_calls") else \
            "".join(part["text"] for part in one["content"])
        found.append({**one, "content": content})
    return found


def _characters(value: Any) -> int:
    """Count the characters of the strings and keys in nested plain data, and one for each other value, which a chat
    template writes with one character at least. Without recursion: a client chooses how deep arguments are nested."""
    found, parts = 0, [value]
    while parts:
        part = parts.pop()
        if isinstance(part, str):
            found += len(part)
        elif isinstance(part, Mapping):
            found += 1
            parts += part.keys()
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            found += 1
            parts += part
        elif part is not None:
            found += 1
    return found


def developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the role ``system`` instead of ``developer``, for chat templates that do not know the
    latter. A developer message after a system message becomes part of it: many templates allow only one at the start.
    """
    groups: list[list[dict[str, Any]]] = []  # each becomes one message
    for message in messages:
        if message["role"] == "developer" and groups and groups[-1][0]["role"] in ("system", "developer"):
            groups[-1].append(message)
        else:
            groups.append([message])
    return [{**turns.joined(group), "role": "system"} if group[-1]["role"] == "developer" else group[0]
            for group in groups]


def _is_set(value: Any) -> bool:
    """Return True unless the value is None or an empty list. ``if value`` would raise for an array."""
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
            if kind in IMAGE_PARTS or kind in _OTHER_PARTS:
                given = part.get("image")
                name = given.name if isinstance(given, NamedImage) else f"{where}.content[{at}]"
                raise Unsupported(f"`{name}` is of type {kind}; this model supports text only", param=name)
            text = _text_of(part, kind, role)
            if not isinstance(text, str):
                refuse(f"{where}.content[{at}]", part, 'a string or {"type": "text", "text": ...}')
            parts.append(text)
        content = "".join(parts)
    if content is None and role == "assistant":  # a turn without text, as in the protocols of OpenAI and Ollama
        return None if message.get("tool_calls") else ""
    if not isinstance(content, str):
        refuse(f"{where}.content", content, "a string, or a list of text parts")
    return content


def _text_of(part: Any, kind: Any, role: str) -> Any:
    """Return the text of a message part, or the part itself if it is not of text."""
    if kind == "refusal" and role == "assistant":  # another model's answer
        return part.get("refusal")
    return part.get("text") if kind in ("text", "input_text", "output_text") else part


def _parts(where: str, message: Mapping[str, Any], role: str, images: list[Any]) -> list[dict[str, Any]]:
    """Return the parts of a message to a vision model. The images of Ollama's ``images`` key come first."""
    content, own = message.get("content"), message.get("images")
    parts: list[dict[str, Any]] = []
    if _is_set(own):
        if isinstance(own, (str, bytes, Mapping)) or not isinstance(own, Sequence):
            refuse(f"{where}.images", own, "a list of images")
        images += [_named(image, f"{where}.images[{at}]") for at, image in enumerate(own)]
        parts += [{"type": "image"} for _ in own]
    if isinstance(content, str):
        content = [content] if content else []
    if content is None and (parts or role == "assistant"):
        content = []
    if not isinstance(content, (list, tuple)):
        refuse(f"{where}.content", content, "a string, or a list of text and image parts")
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in IMAGE_PARTS:
            image = _named(image_from_part(part, f"{where}.content[{at}]"), f"{where}.content[{at}]")
            url = part.get("image_url")
            images.append(replace(image, detail=url.get("detail") if isinstance(url, Mapping) else part.get("detail")))
            parts.append({"type": "image"})
            continue
        if kind == "video":
            images.append(video_from_part(part, f"{where}.content[{at}]"))
            parts.append({"type": "video"})
            continue
        if kind in _OTHER_PARTS:
            raise Unsupported(f"`{where}.content[{at}]` is of type {kind}; this model supports text and images only",
                              param=f"{where}.content[{at}]", hint=_FRAMES if "video" in kind else None)
        text = _text_of(part, kind, role)
        if not isinstance(text, str):
            refuse(f"{where}.content[{at}]", part,
                   'a string, {"type": "text", "text": ...} or {"type": "image", "image": ...}')
        parts.append({"type": "text", "text": text})
    return parts


# ---- images of a message ---------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image, and the name of the argument or field that has it, for error messages.

    The name cannot be derived from the position of the image: the server inserts, joins and drops messages.

    Attributes:
        image: the image.
        name: its name.
        detail: ``detail`` of OpenAI's API, which selects the number of tokens if the model has a choice: ``"low"``,
            ``"high"`` or ``"original"``; others select the usual number.
        tokens: the usual number of tokens, if it is not the model's.
    """

    image: Any
    name: str
    detail: Any = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class NamedVideo:
    """The frames of a video, with the time of each in seconds.

    Attributes:
        frames: the frames.
        times: their times.
        name: name of the argument that has the video.
        fps: number of frames per second, if the caller stated it.
    """

    frames: tuple[NamedImage, ...]
    times: tuple[float, ...]
    name: str
    fps: float | None = None

    @property
    def name_of_times(self) -> str:
        """Name of the argument that has the times."""
        return self.name.removesuffix("video") + ("timestamps" if self.fps is None else "fps")


def video_from_part(part: Mapping[str, Any], where: str) -> NamedVideo:
    """Return the video of a message part: images under ``video``, and their times: ``fps``, the number of
    frames per second, or ``timestamps``, the time of each frame in seconds.

    Raises:
        InvalidArgument: the part has no frames or too many, or no valid times.
    """
    name = f"{where}.video"
    given: Any = part.get("video")
    if isinstance(given, (str, bytes, bytearray, Mapping)) or not hasattr(given, "__iter__") or \
            hasattr(given, "__next__"):  # an iterator is used up if the request is prepared again
        refuse(name, given, "a list of images, the frames of the video", hint=_FRAMES)
    frames = [frame for frame, _ in zip(items_of_caller(given), range(MAX_FRAMES + 1))]
    if not 2 <= len(frames) <= MAX_FRAMES:
        raise InvalidArgument(param=name, got=f"{len(frames)} frames" if len(frames) <= MAX_FRAMES else "more frames",
                              allowed=f"2 to {MAX_FRAMES} frames", hint="Pass fewer frames per second"
                              if len(frames) > MAX_FRAMES else "Pass a single frame as an image")
    rate, fps, stamps = None, part.get("fps"), part.get("timestamps")
    if (fps is None) == (stamps is None):
        raise InvalidArgument(param=where, got="both fps and timestamps" if fps is not None else "no times",
                              allowed="fps or timestamps", hint=_FRAMES)
    if stamps is None:
        rate = real(fps)
        if rate is None or not 0 < rate < float("inf"):
            refuse(f"{where}.fps", fps, "a number of frames per second above 0")
        times = [at / rate for at in range(len(frames))]
    else:
        found = [real(one) for one in stamps] if isinstance(stamps, (list, tuple)) else []
        times = [one for one in found if one is not None and 0 <= one < 1e6]
        if len(times) != len(frames) or times != sorted(times):
            raise InvalidArgument(param=f"{where}.timestamps", got=f"{len(found)} values" if len(found) != len(frames)
                                  and isinstance(stamps, (list, tuple)) else shown(stamps),
                                  allowed=f"{len(frames)} ascending numbers of seconds, one per frame")
    return NamedVideo(tuple(_named(frame, f"{name}[{at}]") for at, frame in enumerate(frames)), tuple(times), name,
                      rate)


def _named(image: Any, name: str) -> NamedImage:
    return image if isinstance(image, NamedImage) else NamedImage(image, name)


def image_from_part(part: Mapping[str, Any], where: str) -> Any:
    """Return the image of a message part: any value that :func:`mpool.embed_image` accepts.

    OpenAI's ``{"type": "image_url", "image_url": {"url": ...}}`` accepts ``data:`` URLs, and http and https URLs if
    ``allow_urls`` is set. ``{"type": "image", ...}`` holds the image under ``image``, ``url``, ``path``, ``base64`` or
    ``data``, or under ``source`` as a dict with ``data`` or ``url``.

    Raises:
        InvalidArgument: the part has no image or several, or ``image_url`` is not a URL.
    """
    kind = part.get("type")
    value: Any = part.get("image_url") if kind in ("image_url", "input_image") else None
    if kind == "image":
        given = [part[name] for name in ("image", "url", "path", "base64", "data", "source")
                 if part.get(name) is not None]
        if len(given) != 1:
            raise InvalidArgument(param=where, got=f"{len(given)} images",
                                  allowed="one image, under image, url, path or base64",
                                  hint='For example {"type": "image", "image": "photo.jpg"}')
        value = given[0]
        if isinstance(value, Mapping):
            value = value.get("data", value.get("url"))
        return _text_or_base64(part, value)
    if isinstance(value, Mapping):
        value = value.get("url")
    if not isinstance(value, str) or not is_data_url(value) and not value[:8].lower().startswith(("http:", "https:")):
        refuse(f"{where}.image_url", value, "a data: URL, or an http or https URL with allow_urls=True",
               hint='For files, use {"type": "image", "path": ...}')
    return value


def _text_or_base64(part: Mapping[str, Any], value: Any) -> Any:
    """Prefix base64 text with ``data:``, so that it is not taken for a path: it may begin with any characters."""
    if isinstance(value, str) and not is_data_url(value) and (
            part.get("base64") is not None or part.get("data") is not None or isinstance(part.get("source"), Mapping)):
        return f"data:image/png;base64,{value}"
    return value


def placeholder_char(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a noncharacter that occurs in no string of a conversation.

    Raises:
        InvalidArgument: all four candidates occur.
    """
    texts: list[str] = []
    with suppress(RecursionError):  # the template refuses messages that are nested so deeply
        each_string(list(messages), texts.append, texts.append)
    found = next((char for char in _PLACEHOLDERS if not any(char in text for text in texts)), None)
    if found is None:
        raise InvalidArgument(param="messages", got="text with all of U+FDD8 to U+FDDB",
                              allowed="text without these noncharacters")
    return found
