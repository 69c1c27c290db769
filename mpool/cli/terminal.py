"""A terminal: colours, word wrap, a spinner, keys that are pressed during a reply. Pipes and files get plain text."""

from __future__ import annotations

import os
import select
import shutil
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from .common import for_output
from .layout import text_width

_FRAMES, _PLAIN_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
#: Seconds between two frames of the spinner.
_PERIOD = 0.1
#: Start of the first and last line of a block of code, in Markdown.
_FENCES = ("```", "~~~")


def is_screen(stream: TextIO) -> bool:
    """Return True for a terminal whose cursor can be moved."""
    return stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown")


def has_colours(stream: TextIO) -> bool:
    """Return True for a terminal with colours, unless ``NO_COLOR`` is set (https://no-color.org)."""
    return is_screen(stream) and not os.environ.get("NO_COLOR")


def dim(text: str, stream: TextIO) -> str:
    """Return a text in a fainter colour, if the stream has colours."""
    return f"\x1b[2m{text}\x1b[0m" if text and has_colours(stream) else text


def columns() -> int:
    """Return the width of the terminal."""
    return max(shutil.get_terminal_size().columns, 1)


class Wrapped:
    """Writes a text to a terminal as it arrives, and breaks lines between words.

    A word is written when its end is known. Blocks of code are written as they are.

    Args:
        stream: where to write. Text for anything but a terminal is written as it is.
        faint: write in a fainter colour.
        wrap: break lines.
        indent: start of each line.
    """

    def __init__(self, stream: TextIO, faint: bool = False, wrap: bool = True, indent: str = "") -> None:
        self._stream, self._faint, self._wrap, self._indent = stream, faint, wrap and is_screen(stream), indent
        self._column, self._word, self._line, self._in_code = len(indent), "", "", False
        self._put(indent)

    def write(self, text: str) -> None:
        """Write a part of the text. Its last word may wait for the next part."""
        text = for_output(text, self._stream)
        if not self._wrap:
            self._put(text.replace("\n", f"\n{self._indent}"))
        else:
            for one in text:
                self._add(one)
        self._stream.flush()

    def end(self) -> None:
        """Write the last word."""
        self._end_word()
        self._stream.flush()

    def _add(self, one: str) -> None:
        if one == "\n":
            self._end_word()
            self._in_code ^= self._line.lstrip().startswith(_FENCES)
            self._line = ""
            self._begin_line()
            return
        self._line += one
        if self._in_code:
            self._put(one)
        elif one in " \t":
            self._end_word()
            if self._column < columns() - 1:
                self._put(one)
            self._column += 1 if one == " " else 8 - self._column % 8
        else:
            if text_width(one) == 2:  # a line may break before and after such a character
                self._end_word()
            self._word += one
            if text_width(one) == 2:
                self._end_word()

    def _end_word(self) -> None:
        width = text_width(self._word)
        if self._word and self._column > len(self._indent) and self._column + width > columns():
            self._begin_line()
        self._put(self._word)
        self._column, self._word = self._column + width, ""
        if width > columns():  # the terminal itself breaks a word that is wider
            self._column %= columns()

    def _begin_line(self) -> None:
        self._put(f"\n{self._indent}")
        self._column = len(self._indent)

    def _put(self, text: str) -> None:
        self._stream.write(dim(text, self._stream) if self._faint and text.strip() else text)


class Spinner:
    """A line of a terminal that shows that the program works, until it is stopped. Other streams show nothing.

    Args:
        stream: the terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._label, self._text, self._thread = stream, "", "", threading.Thread()
        self._stopped = threading.Event()

    def start(self, label: str = "", text: str = "") -> None:
        """Show the spinner, a label, and the end of a text. A second call changes both."""
        self._label = label
        self._text = " ".join(for_output(text, self._stream).split())
        if is_screen(self._stream) and not self._thread.is_alive():
            self._stopped = threading.Event()
            self._thread = threading.Thread(target=self._run, args=(self._stopped,), name="mpool-spinner", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Remove the line."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, stopped: threading.Event) -> None:
        unicode = (getattr(self._stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
        frames, at = _FRAMES if unicode else _PLAIN_FRAMES, 0
        try:
            while not stopped.is_set():
                text = self._text
                while text and text_width(self._label + text) > columns() - 4:
                    text = text[1 + len(text) // 64:]
                text = dim(f"{self._label} {text}".rstrip(), self._stream)
                self._stream.write(f"\r\x1b[K{frames[at % len(frames)]} {text}")
                self._stream.flush()
                at += 1
                stopped.wait(_PERIOD)
            self._stream.write("\r\x1b[K")
            self._stream.flush()
        except (OSError, ValueError):  # the terminal is gone
            pass


@contextmanager
def spinner(label: str = "", text: str = "") -> Iterator[Spinner]:
    """Show a spinner, a label, and the end of a text on standard output inside a ``with`` block."""
    made = Spinner(sys.stdout)
    made.start(label, text)
    try:
        yield made
    finally:
        made.stop()


class Keys:
    """Keeps what is typed or pasted inside a ``with`` block, without showing it: it is no message yet. Ctrl-C still
    interrupts.

    Attributes:
        text: characters that were typed, available after the block.
    """

    def __init__(self) -> None:
        self.text = ""

    def __enter__(self) -> Keys:
        self._file = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._file)
        quiet = termios.tcgetattr(self._file)
        quiet[3] &= ~(termios.ECHO | termios.ICANON)
        quiet[3] |= termios.NOFLSH  # Ctrl-C keeps what was typed before it
        termios.tcsetattr(self._file, termios.TCSANOW, quiet)
        return self

    def __exit__(self, *_: object) -> None:
        found = b""
        while select.select([self._file], [], [], 0)[0] and (read := os.read(self._file, 4096)):
            found += read
        termios.tcsetattr(self._file, termios.TCSANOW, self._before)
        text = found.decode(errors="replace").replace("\r", "\n")
        self.text = "".join(one for one in text if one.isprintable() or one in "\n\t").rstrip("\n")


__all__ = ["Keys", "Spinner", "Wrapped", "columns", "dim", "has_colours", "is_screen", "spinner"]
