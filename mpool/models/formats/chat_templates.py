"""Chat templates as model files store them, and the tokens that end a turn of the Harmony format."""

from __future__ import annotations

import logging
from typing import Any

from ...errors import FormatError, LimitError
from ..fields import Fields, describe

log = logging.getLogger("mpool.models")

#: Largest chat template, in characters.
MAX_TEMPLATE = 1 << 20
#: End tokens of the Harmony format, whose completion holds several messages: the end of one message does not end it.
HARMONY_ENDS = frozenset({"<|return|>", "<|call|>"})


def template(value: Any, *, file: str, field: str) -> str | None:
    """A chat template as text; a list of named ones gives that called ``default``, or the only one.

    Raises:
        LimitError: longer than 1 MiB.
        FormatError: neither text nor a list of named texts.
    """
    if value is None:
        return None
    if isinstance(value, list):
        named: dict[str, str] = {}
        for i, item in enumerate(value):
            entry = Fields.of(item, file=file, at=f"{field}[{i}]")
            named[entry.str("name")] = entry.str("template", limit=1 << 30)
        value = named.get("default", next(iter(named.values())) if len(named) == 1 else None)
        if value is None:
            log.info("%s: none of the %d chat templates is called default; none is used", file, len(named))
            return None
    if not isinstance(value, str):
        raise FormatError(file=file, field=field, got=describe(value), allowed="text")
    if len(value) > MAX_TEMPLATE:
        raise LimitError(f"{file}: {field} has {len(value)} characters, mpool takes at most {MAX_TEMPLATE}")
    return value
