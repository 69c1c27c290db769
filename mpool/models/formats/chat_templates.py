"""Reading of chat templates from model files, and the end tokens of the Harmony format."""

from __future__ import annotations

from typing import Any

from ...errors import FormatError, LimitError
from ...records import logger
from ..fields import Fields, describe

log = logger("mpool.models")

#: Largest chat template, in characters.
MAX_TEMPLATE = 1 << 20
#: File of a folder with the template that chats with tools use.
TOOL_USE = "additional_chat_templates/tool_use.jinja"
#: End tokens of the Harmony format. A Harmony completion has several messages, so the end of a message does not end it.
HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})


def template(value: Any, *, file: str, field: str, tool_use: Any = None) -> str | None:
    """Return a chat template from a model file.

    Args:
        value: the stored value: the template's text, or a list of objects with the keys ``name`` and ``template``. In
            a list, the template called ``default`` is used, else the only one. With one called ``tool_use``, which
            chats with tools use as in transformers, both become one template.
        file, field: path of the file and name of the field, for messages.
        tool_use: the template of chats with tools, if it is stored elsewhere.

    Returns:
        The template, or None if ``value`` is None or a list of several templates without a ``default``.

    Raises:
        LimitError: the template has more than 1,048,576 characters.
        FormatError: ``value`` is neither text nor a list of named templates.
    """
    if value is None:
        return None
    if isinstance(value, list):
        named: dict[str, str] = {}
        for i, item in enumerate(value):
            entry = Fields.of(item, file=file, at=f"{field}[{i}]")
            named[entry.str("name")] = entry.str("template", limit=1 << 30)
        value = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
        tool_use = named.get("tool_use")
        if value is None:
            log.info("%s: the file has %d chat templates and none is named default; mpool uses no template", file,
                     len(named))
            return None
    if not isinstance(value, str):
        raise FormatError(file=file, field=field, got=describe(value), allowed="text")
    if isinstance(tool_use, str) and tool_use != value:
        parts = (text.removesuffix("\n") for text in (tool_use, value))
        value = "{% if tools +%}" + "{%+ else +%}".join(parts) + "{%+ endif %}"
    if len(value) > MAX_TEMPLATE:
        raise LimitError(f"{file}: {field} has {len(value):,} characters, the limit is {MAX_TEMPLATE:,}")
    return value
