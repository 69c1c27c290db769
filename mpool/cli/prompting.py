"""Reads messages line by line: from pipes, files, and terminals that cannot move their cursor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from .common import say

PROMPT, MORE = "> ", ". "
_QUOTES = '"""'


class Talk(Protocol):
    """A conversation whose messages are read.

    Attributes:
        interactive: a person types the messages.
        typed: text that was typed during the last reply; the next message begins with it.
        interrupted: the last key was Ctrl-C, so that another one ends the program.
        switches: ``history`` is True if messages are kept for later conversations.
    """

    interactive: bool
    typed: str
    interrupted: bool
    switches: dict[str, bool]


def line_reader(talk: Talk) -> Callable[[], str | None]:
    """Return the function that reads the next message from lines; it returns None at the end of the input."""
    return lambda: _message(lambda prompt: _line(prompt, talk.interactive))


def _line(prompt: str, interactive: bool) -> str | None:
    """Read a line; None at the end of the input."""
    if interactive and sys.stdout.isatty():
        try:
            return input(prompt)
        except EOFError:
            say()
            return None
    if interactive:
        print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _message(line: Callable[[str], str | None]) -> str | None:
    """Read a message: a line, or several lines between triple quotes. None at the end of the input."""
    text = line(PROMPT)
    if text is None or not text.lstrip().startswith(_QUOTES):
        return text
    while not is_complete(text):
        more = line(MORE)
        if more is None:
            break
        text += "\n" + more
    return unquoted(text)


def is_complete(text: str) -> bool:
    """Return False for a text that begins with triple quotes and has no end yet."""
    text = text.strip()
    return not text.startswith(_QUOTES) or len(text) >= 2 * len(_QUOTES) and text.endswith(_QUOTES)


def unquoted(text: str) -> str:
    """Return a message without the triple quotes around it."""
    if not text.lstrip().startswith(_QUOTES):
        return text
    text = text.lstrip()[len(_QUOTES):]
    return text.rstrip()[:-len(_QUOTES)] if text.rstrip().endswith(_QUOTES) else text


__all__ = ["MORE", "PROMPT", "Talk", "is_complete", "line_reader", "unquoted"]
