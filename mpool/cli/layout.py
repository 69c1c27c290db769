"""Text that fits the width of a terminal: tables, and lines that break between words."""

from __future__ import annotations

import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TextIO

from ..records import one_line


def fit(text: str, stream: TextIO) -> str:
    """Break lines between words if the stream is a terminal. Other streams get the text as it is."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(line if text_width(line) <= width else textwrap.fill(
        line, max(width, 20), subsequent_indent=line[:len(line) - len(line.lstrip())], break_long_words=False,
        break_on_hyphens=False) for line in text.split("\n"))


def text_width(text: str) -> int:
    """Return the number of columns that a text takes in a terminal."""
    return sum(0 if unicodedata.combining(one) else 1 + (unicodedata.east_asian_width(one) in "WF") for one in text)


def screen_width() -> int | None:
    """Return the number of columns of the terminal on standard output; None: it is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(head: Sequence[str], rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Format rows as a table with aligned columns.

    Args:
        head: names of the columns.
        rows: cells of the rows.
        width: maximum width of a line. Names in the first column are never cut: one that does not fit beside the other
            cells has lines of its own. None: no limit.
    """
    lines = [tuple(map(one_line, line)) for line in (head, *rows)]
    widths = [max(text_width(line[at]) for line in lines) for at in range(len(head))]
    others = sum(widths[1:]) + 2 * (len(head) - 1)
    if width is not None:
        widths[0] = min(widths[0], max(text_width(head[0]), width - others))
    found = []
    for name, *cells in lines:
        if width is not None and text_width(name) > widths[0]:
            found += _cut(name, width)
            name = ""
        found.append("  ".join(cell + " " * (columns - text_width(cell))
                               for cell, columns in zip((name, *cells), widths)).rstrip())
    return "\n".join(found)


def _cut(text: str, width: int) -> list[str]:
    """Cut a text into lines of at most ``width`` columns."""
    lines, used = [""], 0
    for one in text:
        used += text_width(one)
        if used > width:
            lines.append("")
            used = text_width(one)
        lines[-1] += one
    return lines


__all__ = ["fit", "screen_width", "table", "text_width"]
