"""Conversion of the input of ``/v1/responses`` to messages of the library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...checks import shown
from .. import bodies, formats
from ..errors import Refusal
from .namespaces import joined_name
from .response_structs import (
    InputCall,
    InputCallOutput,
    InputImage,
    InputItem,
    InputMessage,
    InputReasoning,
    InputText,
    Refused,
)

if TYPE_CHECKING:
    from ..operations import Context

#: Types of items that are read. Others belong to tools that OpenAI's servers run, or to their stores; they are ignored.
_TYPES = tuple(str(kind.__struct_config__.tag) for kind in (InputMessage, InputCall, InputCallOutput, InputReasoning))


def messages_of(context: Context, given: str | list[dict[str, Any]],
                earlier: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert an input to messages of the library, and append them to those of the earlier conversation.

    Sessions that began at another service have items of its own tools (``web_search_call``, ``custom_tool_call``) or of
    its stores (``compaction``, ``item_reference``). They are ignored.

    Raises:
        Refusal: An item is not valid, no item is left, a result has no function call, or two function calls have the
            same id.
    """
    if isinstance(given, str):
        return [*earlier, {"role": "user", "content": context.check_text(given, "input")}]
    found = _Conversation(context, earlier)
    for at, item in enumerate(given):
        where, kind = f"input[{at}]", _type_of(item)
        if kind not in _TYPES and not ("role" in item and "content" in item):  # an unknown type of messages is an error
            context.ignore(f"input[].{kind}", f"`{where}.type` must be one of {', '.join(_TYPES)}, got {shown(kind)}.",
                           f"{where}.type")
            continue
        item = {"type": "message", **item}  # clients may leave out the type of a message
        found.add(bodies.parse_part(item, InputItem, where, context.ignored), where)
    found.end()
    if not found.messages:
        raise Refusal("invalid_value", "`input` must have a message, a function call or its result.", "input")
    return found.messages


def _type_of(item: dict[str, Any]) -> str:
    """Return the type of an item. Clients may leave it out of a message and of a reference to a stored item."""
    kind = item.get("type")
    if isinstance(kind, str):
        return kind
    return "message" if kind is not None or "content" in item or "id" not in item else "item_reference"


class _Conversation:
    """Builds the messages of a conversation from its items.

    Attributes:
        messages: Messages. Images of the last results, and reasoning of the assistant, are missing until :meth:`end`.
    """

    def __init__(self, context: Context, earlier: list[dict[str, Any]]) -> None:
        self.messages = list(earlier)
        self._kept = len(earlier)  # leading messages of a stored conversation, which must not change
        self._context = context
        self._thoughts: list[str] = []  # joined once: adding 10,000 texts to a string copies it 10,000 times
        calls = [call["id"] for message in earlier for call in message.get("tool_calls", ())]
        self._ids = set(calls)
        self._open = self._ids - {message.get("tool_call_id") for message in earlier}
        self._images: list[dict[str, Any]] = []  # images of the last results

    def add(self, item: Any, where: str) -> None:
        """Add an item."""
        check = self._context.check_text
        if not isinstance(item, InputCallOutput):
            self.flush()
        if isinstance(item, InputReasoning):
            self._thoughts += [text for part in item.content or () if (text := check(part.text, where))]
        elif isinstance(item, InputMessage):
            if item.role != "assistant":
                self._end_reasoning()
            content: Any = check(item.content, f"{where}.content") if isinstance(item.content, str) else [
                self._part(part, f"{where}.content[{at}]") for at, part in enumerate(item.content)]
            self.messages.append({"role": item.role, "content": content, **self._reasoning(item.role)})
        elif isinstance(item, InputCall):
            self._add_call(item, where)
        else:
            if item.call_id not in self._open:
                raise Refusal("invalid_value", f"`{where}.call_id` must be the id of an earlier function call without "
                                               "a result.", f"{where}.call_id")
            self._open.remove(item.call_id)
            parts = [] if isinstance(item.output, str) else item.output
            text = item.output if isinstance(item.output, str) else "".join(
                part.text for part in parts if isinstance(part, InputText))
            self.messages.append({"role": "tool", "tool_call_id": item.call_id, "content": check(text, where)})
            self._images += [self._part(part, f"{where}.output[{at}]") for at, part in enumerate(parts)
                             if isinstance(part, InputImage)]

    def end(self) -> None:
        """Add the pending images and the pending reasoning: no further item follows."""
        self.flush()
        self._end_reasoning()

    def _end_reasoning(self) -> None:
        """Add reasoning that neither a message nor a function call follows, such as that of an incomplete response.

        If the message before it is one of the assistant in this input, that message gets the reasoning, because
        templates may refuse two messages of the assistant in a row. Otherwise the reasoning becomes a message.
        """
        reasoning = self._reasoning("assistant")
        if not reasoning:
            return
        last = self.messages[-1] if len(self.messages) > self._kept else None
        if last is not None and last["role"] == "assistant":
            last["reasoning_content"] = last.get("reasoning_content", "") + reasoning["reasoning_content"]
        else:
            self.messages.append({"role": "assistant", "content": "", **reasoning})

    def flush(self) -> None:
        """Add the images of the last results as a message of the user: chat templates have no images in results."""
        if self._images:
            self.messages.append({"role": "user", "content": self._images})
            self._images = []

    def _reasoning(self, role: str) -> dict[str, str]:
        if role != "assistant" or not self._thoughts:
            return {}
        found, self._thoughts = {"reasoning_content": "".join(self._thoughts)}, []
        return found

    def _part(self, part: Any, where: str) -> dict[str, Any]:
        if isinstance(part, InputImage):
            return {"type": "image", "image": self._context.image(part.image_url, f"{where}.image_url"),
                    "detail": part.detail}
        text = part.refusal if isinstance(part, Refused) else part.text
        return {"type": "text", "text": self._context.check_text(text, where)}

    def _add_call(self, item: InputCall, where: str) -> None:
        if item.call_id in self._ids:
            raise Refusal("invalid_value", f"`{where}.call_id` must be unique among the function calls.",
                          f"{where}.call_id")
        self._ids.add(item.call_id)
        self._open.add(item.call_id)
        arguments = formats.earlier_arguments(self._context, item.arguments, f"{where}.arguments")
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or self._thoughts:
            last = {"role": "assistant", "content": None, "tool_calls": [], **self._reasoning("assistant")}
            self.messages.append(last)
        elif len(self.messages) <= self._kept:
            self._kept = len(self.messages) - 1
            last = self.messages[-1] = {**last, "tool_calls": list(last.get("tool_calls", ()))}
        last.setdefault("tool_calls", []).append({"id": item.call_id, "function": {
            "name": joined_name(item.namespace, item.name), "arguments": arguments}})


__all__ = ["messages_of"]
