"""Reads messages: with prompt_toolkit in a terminal that can move its cursor, else line by line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..models.store import cache_dir
from .common import say
from .terminal import has_colours, is_screen

if TYPE_CHECKING:
    from .chatting import Conversation

_PROMPT, _MORE = "> ", ". "
_QUOTES = '"""'
_PLACEHOLDER = "Send a message (/? for help)"
#: Commands that Tab completes.
_WORDS = ("/set ", "/show ", "/save ", "/load ", "/clear", "/help", "/exit")


def reader(talk: Conversation) -> Callable[[], str | None]:
    """Return the function that reads the next message of a conversation; it returns None at the end of the input."""
    if talk.interactive and is_screen(sys.stdout):
        return _screen_reader(talk)
    return lambda: _message(lambda prompt: _line(prompt, talk.interactive))


# ---- line by line ----------------------------------------------------------------------------------------------------

def _line(prompt: str, interactive: bool) -> str | None:
    """Read a line; None at the end of the input."""
    if interactive:
        try:
            return input(prompt)
        except EOFError:
            say()
            return None
    line = sys.stdin.readline()
    return line.rstrip("\r\n") if line else None


def _message(line: Callable[[str], str | None]) -> str | None:
    """Read a message: a line, or several lines between triple quotes. None at the end of the input."""
    text = line(_PROMPT)
    if text is None or not text.lstrip().startswith(_QUOTES):
        return text
    while not _is_complete(text):
        more = line(_MORE)
        if more is None:
            break
        text += "\n" + more
    return _unquoted(text)


def _is_complete(text: str) -> bool:
    """Return False for a text that begins with triple quotes and has no end yet."""
    text = text.strip()
    return not text.startswith(_QUOTES) or len(text) >= 2 * len(_QUOTES) and text.endswith(_QUOTES)


def _unquoted(text: str) -> str:
    """Return a message without the triple quotes around it."""
    if not text.lstrip().startswith(_QUOTES):
        return text
    text = text.lstrip()[len(_QUOTES):]
    return text.rstrip()[:-len(_QUOTES)] if text.rstrip().endswith(_QUOTES) else text


# ---- prompt_toolkit --------------------------------------------------------------------------------------------------

def _screen_reader(talk: Conversation) -> Callable[[], str | None]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.enums import DEFAULT_BUFFER
    from prompt_toolkit.filters import has_focus
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import ColorDepth

    keys, coloured = KeyBindings(), has_colours(sys.stdout)

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def enter(event: Any) -> None:
        """Send the message, unless its triple quotes are open."""
        buffer = event.current_buffer
        buffer.validate_and_handle() if _is_complete(buffer.text) else buffer.insert_text("\n")

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=has_focus(DEFAULT_BUFFER))
    def interrupt(event: Any) -> None:
        """Delete the text that is typed; without one, interrupt."""
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt())

    session: PromptSession[str] = PromptSession(
        history=_history(talk), key_bindings=keys, multiline=True, prompt_continuation=_MORE,
        completer=WordCompleter(_WORDS, sentence=True), complete_while_typing=False, reserve_space_for_menu=3,
        placeholder=lambda: FormattedText([("fg:ansibrightblack", "" if get_app().is_done else _PLACEHOLDER)]),
        color_depth=None if coloured else ColorDepth.DEPTH_1_BIT)

    def read() -> str | None:
        typed, talk.typed = talk.typed, ""
        try:
            return _unquoted(session.prompt(_PROMPT, default=typed).rstrip("\n"))
        except EOFError:
            return None

    return read


def _history(talk: Conversation) -> Any:
    """Return the history of messages, kept in a file that only the user can read. A message that cannot be written is
    kept until the program ends."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = os.path.join(cache_dir(), "chat-history")
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError:
        return InMemoryHistory()

    class History(FileHistory):
        def store_string(self, string: str) -> None:
            if talk.switches["history"]:
                try:
                    super().store_string(string)
                except OSError:
                    pass

    return History(path)


__all__ = ["reader"]
