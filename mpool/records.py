"""Loggers of mpool, whose records contain no character that ends a line or controls a terminal.

Names, paths, headers, texts of clients and values of model files come from outside. A line break in one of them would
forge a record (CWE-117), an escape sequence would control the operator's terminal, and a bidirectional control would
reorder the line. The filter of a logger changes the record before any handler gets it, so this also holds for programs
that configure ``logging`` themselves.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from datetime import datetime, timezone
from types import TracebackType
from typing import Any

#: Control characters (C0, DEL, C1), line and paragraph separators, bidirectional controls (UAX #9), and surrogates,
#: which cannot be written as UTF-8.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
#: Format of a record on standard error.
_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def one_line(text: str) -> str:
    """Return a text with escapes, such as ``\\n`` and ``\\x1b``, in place of characters that no line may have."""
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def one_line_each(text: str) -> str:
    """Return :func:`one_line` of every line of a text. Only line feeds end a line."""
    return "\n".join(map(one_line, text.split("\n")))


def logger(name: str) -> logging.Logger:
    """Return the logger with this name, whose records have one line and no control characters.

    ``exc_text`` of a record with an exception is set, too: handlers format it only if it is missing.
    """
    found = logging.getLogger(name)
    if _escape not in found.filters:
        found.addFilter(_escape)
    return found


def to_standard_error(verbose: int = 0, form: str = "text") -> None:
    """Write the records of this process to standard error, unless its logging is configured already.

    mpool's loggers have a handler that drops records (:mod:`mpool.runtime.logs`), so Python itself shows none of them.
    A second call changes the level and the format of the first one.

    Args:
        verbose: 0: warnings; 1: also mpool's records at INFO; 2: all records of all libraries.
        form: ``"text"``, or ``"json"``: one JSON object per line.
    """
    root = logging.getLogger()
    if not root.handlers:
        logging.basicConfig()
        _own.append(root.handlers[0])
    for handler in _own:
        handler.setFormatter(_Json() if form == "json" else logging.Formatter(_FORMAT))
    if _own:
        root.setLevel(logging.DEBUG if verbose > 1 else logging.WARNING)
        logging.getLogger("mpool").setLevel(logging.INFO if verbose == 1 else logging.NOTSET)


#: The handler of :func:`to_standard_error`.
_own: list[logging.Handler] = []


def fields(**values: Any) -> dict[str, Any]:
    """Return the argument ``extra`` of a record with fields, which only the JSON format writes apart."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


class _Json(logging.Formatter):
    """Format of one JSON object per line: time (UTC), level, logger and message, then the fields of the record.

    JSON escapes every character outside ASCII, so no text can end the line or control a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        at = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        found = {"time": at.replace("+00:00", "Z"), "level": record.levelname, "logger": record.name,
                 "message": record.getMessage(), **getattr(record, "fields", {})}
        if record.exc_info and record.exc_info[1] is not None:
            found["exception"] = record.exc_text or _of_exception(record.exc_info[1])
        return json.dumps(found, default=str)


def _escape(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    safe = one_line(message)
    if safe != message:
        record.msg, record.args = safe, None
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        record.exc_text = _of_exception(record.exc_info[1])
    return True


def _of_exception(error: BaseException) -> str:
    """Return the traceback of an exception and of its causes. Every line but the headings has the indent of its kind:
    a message is one line, so no text in it can pass for a record."""
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        parts.insert(0, "".join(("Traceback (most recent call last):\n", *_frames(error.__traceback__),
                                 one_line("".join(traceback.format_exception_only(type(error), error)).rstrip()))))
        if error.__cause__ is not None:
            parts.insert(0, "The above exception was the direct cause of the following exception:")
            error = error.__cause__
        elif error.__context__ is not None and not error.__suppress_context__:
            parts.insert(0, "During handling of the above exception, another exception occurred:")
            error = error.__context__
        else:
            break
    return "\n\n".join(parts)


def _frames(trace: TracebackType | None) -> list[str]:
    return [one_line_each(text) for text in traceback.format_tb(trace)]


__all__ = ["fields", "logger", "one_line", "one_line_each", "to_standard_error"]
