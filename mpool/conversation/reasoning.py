"""Answers taken apart: the reasoning of a model before its answer, and the answer.

Two forms are known, by the words of the model's chat template. ``<think>`` ... ``</think>`` before the answer
(Qwen3, DeepSeek-R1, SmolLM3); a template may write the first of the two itself, then an answer begins with thoughts.
And harmony (GPT-OSS, https://cookbook.openai.com/articles/openai-harmony): an answer is several messages, each with a
header that names its channel; ``final`` is the answer, all others are not for its reader.

A splitter is fed an answer as it is decided, in pieces of any size. Text that may begin a marker is buffered: no chunk
holds part of a marker, and the result does not depend on how the text was split.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .json_extent import JsonExtent

_OPEN, _CLOSE = "<think>", "</think>"
_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
#: End markers of a Harmony message. Those that also end the completion are in its text only if the tokenizer shows
#: them.
_BREAKS = (_END, _START, _CHANNEL, "<|return|>", "<|call|>")
_BREAK = re.compile("|".join(map(re.escape, _BREAKS)))
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_FUNCTION = re.compile(r"(?:^|\s)to=functions\.([^\s<]+)")
#: Start of a message to a function, as :class:`HarmonyCalls` writes it; the name and ``<|message|>`` follow.
CALL = "<|channel|>commentary to=functions."


def is_harmony(source: str) -> bool:
    """The chat template uses the Harmony format."""
    return _CHANNEL in source and _MESSAGE in source


def of_template(source: str, prompt: str, calls: bool = False) -> Callable[[], Splitter] | None:
    """The factory of splitters for completions of a prompt; None if they have one part.

    Args:
        source: the chat template.
        prompt: the rendered prompt.
        calls: the model was given functions: messages to them belong to the answer.
    """
    if is_harmony(source):
        return HarmonyCalls if calls else Harmony
    if _OPEN in source or _CLOSE in source:
        return OpenThoughts if prompt.rstrip().endswith(_OPEN) else Thoughts
    return None


class Splitter:
    """Takes one answer apart."""

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """New text of (reasoning, answer). ``last``: nothing follows."""
        raise NotImplementedError


def split(make: Callable[[], Splitter] | None, text: str) -> tuple[str | None, str]:
    """A whole answer as (thoughts, answer); thoughts are None where there are none."""
    if make is None:
        return None, text
    thoughts, answer = make().feed(text, True)
    return thoughts or None, answer


def _held(text: str, markers: Sequence[str]) -> int:
    """Number of characters at the end of a text that may begin a marker."""
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


class Thoughts(Splitter):
    """``<think>`` thoughts ``</think>`` answer. An answer that begins otherwise has no thoughts; empty lines around the
    thoughts belong to the form."""

    _inside = False

    def __init__(self) -> None:
        self._state = "opening"
        self._text = ""
        self._said = False

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        self._text += text
        thoughts = answer = ""
        if self._state == "opening":
            self._open(last)
        if self._state == "thoughts":
            thoughts = self._think(last)
        if self._state == "gap":
            self._text = self._text.lstrip("\n")
            if self._text:
                self._state = "answer"
        if self._state == "answer":
            answer, self._text = self._text, ""
        return thoughts, answer

    def _open(self, last: bool) -> None:
        body = self._text.lstrip()
        if body.startswith(_OPEN):
            self._text, self._state = body[len(_OPEN):], "thoughts"
        elif last or not _OPEN.startswith(body):
            self._state = "thoughts" if self._inside else "answer"

    def _think(self, last: bool) -> str:
        if not self._said:
            self._text = self._text.lstrip("\n")
        found, mark, rest = self._text.partition(_CLOSE)
        if mark:
            self._state, self._text = "gap", rest
            found = found.rstrip("\n")
        else:
            keep = 0 if last else _held(found, (_CLOSE,))
            found = found[:len(found) - keep]
            found = found.rstrip("\n")  # text before the end is decided only when more text follows
            self._text = "" if last else self._text[len(found):]
        self._said = self._said or bool(found)
        return found


class OpenThoughts(Thoughts):
    """The same where the prompt has opened the thoughts."""

    _inside = True


class Harmony(Splitter):
    """Messages of ``<|channel|>`` name ``<|message|>`` content ``<|end|>``, the next after ``<|start|>`` role. Without
    a header at its very beginning, an answer is one message for the reader."""

    def __init__(self) -> None:
        self._text = ""
        self._header: bool = True
        self._first = True
        self._answers = False  # the message at hand is for the reader
        self._said = [False, False]  # thoughts, answer
        self._apart = False  # separates this message from the previous one of the same kind

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        self._text += text
        out = ["", ""]
        while self._text and (self._read_header(last) if self._header else self._read_body(out, last)):
            pass
        return out[0], out[1]

    def _read_header(self, last: bool) -> bool:
        """Parses a header; True while buffered text can be processed."""
        head, mark, rest = self._text.partition(_MESSAGE)
        if self._first and not self._begins(head, bool(mark), last):
            self._open(True)
            return True
        if not mark:
            if last and head.strip() and "<|" not in head:  # no header at all: it is not lost
                self._open(True)
                return True
            if last:
                self._text = ""  # a header that nothing follows
            return False
        self._text = rest
        self._address(head)
        return True

    def _address(self, head: str) -> None:
        """To whom the message with this header is."""
        name = _CHANNEL_NAME.search(head)
        self._open((name is None or name[1] == "final") and " to=" not in head)

    def _begins(self, head: str, whole: bool, last: bool) -> bool:
        """The start of the completion is a header, or may become one."""
        head = head.lstrip()
        known = (_CHANNEL, _START, "to=")
        if whole and not head or head.startswith(known):
            return not (last and not whole and head.startswith("to="))
        return not whole and not last and any(begin.startswith(head) for begin in (*known, _MESSAGE))

    def _open(self, answers: bool) -> None:
        self._header, self._first, self._answers = False, False, answers
        self._apart = self._said[answers]

    def _read_body(self, out: list[str], last: bool) -> bool:
        found = _BREAK.search(self._text)
        end = found.start() if found else len(self._text) - (0 if last else _held(self._text, _BREAKS))
        body = self._text[:end]
        if body:
            out[self._answers] += "\n" * self._apart + body
            self._apart, self._said[self._answers] = False, True
        if found is None:
            self._text = self._text[end:]
            return False
        self._header = True
        self._text = self._text[end:] if found[0] == _CHANNEL else self._text[found.end():]
        return True


class HarmonyCalls(Harmony):
    """The same, but messages to functions are part of the answer: :data:`CALL`, the function's name, ``<|message|>``,
    content ``<|call|>``. No other message can hold these words, since they would end it."""

    def __init__(self) -> None:
        super().__init__()
        self._start = ""  # header of a call whose content has not begun
        self._calls = False
        self._extent: JsonExtent | None = None  # in arguments, markers end nothing

    def _address(self, head: str) -> None:
        to = _FUNCTION.search(head)
        if to is None:
            super()._address(head)
            return
        self._open(True)
        self._start, self._calls, self._extent = CALL + to[1] + _MESSAGE, True, JsonExtent(0)

    def _read_body(self, out: list[str], last: bool) -> bool:
        if self._start:
            self._text = self._text.lstrip()
            if not self._text:
                return False
            out[1] += "\n" * self._apart + self._start
            self._start, self._apart, self._said[1] = "", False, True
            if self._text[0] != "{":
                self._extent = None
        if self._extent is not None:
            end = self._extent.end(self._text)
            taken = len(self._text) if end < 0 else end
            out[1] += self._text[:taken]
            self._text = self._text[taken:]
            self._extent.at -= taken
            self._extent = None if end >= 0 else self._extent
            return True
        more = super()._read_body(out, last)
        if self._header and self._calls:
            out[1] += "<|call|>"
            self._calls = False
        return more


class HarmonyForm(HarmonyCalls):
    """The same where a grammar keeps the message for the reader to a form: that is the last one, and no word in it ends
    it."""

    def _read_body(self, out: list[str], last: bool) -> bool:
        if not self._answers or self._calls:
            return super()._read_body(out, last)
        out[1] += self._text
        self._text = ""
        return False
