"""Reads messages in a terminal with prompt_toolkit: pasted lines stay together, earlier messages can be recalled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.application import get_app
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus, is_searching
from prompt_toolkit.formatted_text import FormattedText
from prompt_toolkit.history import FileHistory, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import ColorDepth

from ..models.store import cache_dir
from ..tasks.sampling import TABLE
from .prompting import MORE, PROMPT, Talk, is_complete, unquoted
from .terminal import has_colours

_PLACEHOLDER = "Send a message (/? for help)"
#: Commands and settings that Tab completes.
_WORDS = ("/set ", "/show ", "/save ", "/load ", "/clear", "/help", "/exit", "/show thinking",
          *(f"/set {name} " for name in (*TABLE, "system", "stats", "think", "fold", "wrap", "history") if name != "n"))


def screen_reader(talk: Talk) -> Callable[[], str | None]:
    """Return the function that reads the next message; it returns None at the end of the input."""
    keys, coloured = KeyBindings(), has_colours(sys.stdout)

    @keys.add("enter", filter=has_focus(DEFAULT_BUFFER))
    def enter(event: Any) -> None:
        """Send the message, unless its triple quotes are open."""
        buffer = event.current_buffer
        buffer.validate_and_handle() if is_complete(buffer.text) else buffer.insert_text("\n")

    @keys.add("escape", "enter", filter=has_focus(DEFAULT_BUFFER))
    def new_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("<sigint>")
    @keys.add("c-c", filter=has_focus(DEFAULT_BUFFER))
    def interrupt(event: Any) -> None:
        """Delete the text that is typed; without one, interrupt. A signal may come after the message was sent."""
        if event.app.is_done:
            return
        if event.current_buffer.text:
            event.current_buffer.reset()
            talk.interrupted = False
        else:
            event.app.exit(exception=KeyboardInterrupt())

    session: PromptSession[str] = PromptSession(
        history=_history(talk), key_bindings=keys, multiline=True, prompt_continuation=MORE,
        completer=WordCompleter(_WORDS, sentence=True), complete_while_typing=False, reserve_space_for_menu=3,
        search_ignore_case=True,
        placeholder=lambda: FormattedText([("fg:ansibrightblack", "" if get_app().is_done or is_searching() else
                                            _PLACEHOLDER)]),
        color_depth=None if coloured else ColorDepth.DEPTH_1_BIT)

    def changed(_: object) -> None:
        talk.interrupted = False

    session.default_buffer.on_text_changed += changed

    def read() -> str | None:
        typed, talk.typed = talk.typed, ""
        try:
            return unquoted(session.prompt(PROMPT, default=typed).rstrip("\n"))
        except EOFError:
            return None

    return read


def _history(talk: Talk) -> Any:
    """Return the history of messages, kept in a file that only the user can read. A message that cannot be written is
    kept until the program ends."""
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


__all__ = ["screen_reader"]
