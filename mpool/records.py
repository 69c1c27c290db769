"""Loggers of mpool, whose records contain no character that ends a line or controls a terminal.

Names, paths, headers, texts of clients and values of model files come from outside. A line break in one of them would
forge a record (CWE-117), an escape sequence would control the operator's terminal, and a bidirectional control would
reorder the line. The filter of a logger changes the record before any handler gets it, so this also holds for programs
that configure ``logging`` themselves.
"""

from __future__ import annotations

import logging
import re
import traceback
from types import TracebackType

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


def to_standard_error(level: int = logging.WARNING) -> None:
    """Write the records of this process from ``level`` on to standard error, unless its logging is configured already.

    mpool's loggers have a handler that drops records (:mod:`mpool.runtime.logs`), so Python itself shows none of them.
    """
    logging.basicConfig(level=level, format=_FORMAT)


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


__all__ = ["logger", "one_line", "one_line_each", "to_standard_error"]
