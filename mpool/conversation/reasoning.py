"""Splits completions into the model's reasoning and the response.

Two formats are supported, recognised by the markers in the model's chat template:

* ``<think>`` ... ``</think>`` before the response (Qwen3, DeepSeek-R1, SmolLM3), or another pair of markers (see
  :data:`THINK_MARKERS`). The prompt may already end with the first marker; then the completion begins inside the
  reasoning. Granite 3.3 writes ``<response>`` and ``</response>`` around its response; they are dropped.
* Harmony (GPT-OSS, https://cookbook.openai.com/articles/openai-harmony). A completion is several messages, each with a
  header that names its channel. The channel ``final`` is the response, and so is a message of the channel
  ``commentary`` without a recipient: a preamble to function calls. All other messages are not for the user.

A splitter is fed the text of a completion in chunks of any size. It buffers text that may begin a marker, so no output
contains part of a marker, and the result does not depend on how the text was split into chunks.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from .json_extent import JsonExtent

#: Variables of chat templates that turn thinking off and on -> their values for both (Qwen3, GLM, Nemotron 3 and
#: others; DeepSeek V3.1 and Granite; Command A; Seed-OSS).
SWITCHES: Mapping[str, tuple[Any, Any]] = {
    "enable_thinking": (False, True), "thinking": (False, True), "reasoning": (False, True), "thinking_budget": (0, -1)}
#: Words of the system message that turn thinking off and on in templates without such a variable (Nemotron Nano 2).
WORDS = ("/no_think", "/think")
#: Markers before and after the reasoning. The first pair of which the chat template contains a marker is the model's.
THINK_MARKERS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
                 ("<reasoning>", "</reasoning>"), ("<thought>", "</thought>"),
                 ("<|START_THINKING|>", "<|END_THINKING|>"), ("<|channel>thought\n", "<channel|>"),
                 ("Here is my thought process:", "Here is my response:"))
#: Tags around the response in Granite 3.3, behind the reasoning.
_RESPONSE_TAGS = ("<response>", "</response>")
THINK_ENDS = tuple(close for _, close in THINK_MARKERS)
_START, _CHANNEL, _MESSAGE, _END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
#: Markers that end a Harmony message. Those that also end the completion appear in the text only if the tokenizer
#: decodes them.
_BREAKS = (_END, _START, _CHANNEL, "<|return|>", "<|call|>")
_BREAK = re.compile("|".join(map(re.escape, _BREAKS)))
#: Headers of messages to the user. GPT-OSS may name the type of the content before ``<|message|>``.
_RESPONSES = tuple(_CHANNEL + header + _MESSAGE for header in (
    "final", "final json", "final <|constrain|>json", "final<|constrain|>json", "commentary"))
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s)to=([^\s<]*)")
_FUNCTION = re.compile(r"(?:^|\s)to=functions\.([^\s<]+)")
#: Start of a message to a function, as :class:`HarmonyCallSplitter` writes it; the function name and ``<|message|>``
#: follow.
CALL_HEADER = "<|channel|>commentary to=functions."


def is_harmony(source: str) -> bool:
    """Return True if the chat template uses the Harmony format."""
    return _CHANNEL in source and _MESSAGE in source


def of_template(source: str, prompt: str, calls: bool = False) -> type[Splitter] | None:
    """Return the class of splitters for completions of a prompt, or None if the model writes no reasoning.

    Args:
        source: the chat template.
        prompt: the rendered prompt.
        calls: True if the request has tools. Harmony messages to functions are then part of the response.
    """
    if is_harmony(source):
        return HarmonyCallSplitter if calls else HarmonySplitter
    for markers in THINK_MARKERS:
        if any(marker in source for marker in markers):
            return think_splitter(markers, prompt.rstrip().endswith(markers[0].rstrip()), _RESPONSE_TAGS[0] in source)
    return None


def switches(source: str, variables: Collection[str]) -> tuple[str, ...]:
    """Return the options with which a caller turns thinking on and off.

    Args:
        source: the chat template.
        variables: names of the variables that it reads.
    """
    found = tuple(name for name in SWITCHES if name in variables)
    return found or ("enable_thinking",) * (WORDS[False] in source)


def is_off(splitter: type[Splitter], prompt: str, variables: Mapping[str, Any]) -> bool:
    """Return True if the caller turned thinking off: the prompt closes the reasoning or continues a message, or a
    switch of the chat template is False.

    Args:
        splitter: the class that :func:`of_template` returned.
        prompt: the rendered prompt.
        variables: the caller's variables of the chat template.
    """
    if splitter.inside:
        return False
    if variables.get("continue_final_message") or not issubclass(splitter, ThinkSplitter):
        return bool(variables.get("continue_final_message"))
    return prompt.rstrip().endswith(splitter.close) or any(
        name in variables and variables[name] == off for name, (off, _) in SWITCHES.items())


class Borders(NamedTuple):
    """Texts around the parts of a completion that stop strings do not end.

    Attributes:
        starts: reasoning begins with them at the start of a completion, after white space.
        ends: the first of them ends reasoning, or a part that one of ``calls`` began.
        calls: a tool call, or another part that is not for the user, begins with them in the response. One that is also
            among ``ends`` is the whole part.
    """

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


def borders(splitter: type[Splitter] | None) -> Borders:
    """Return the texts around the reasoning. Messages of Harmony may alternate: each end of a message is one of
    ``calls``."""
    if splitter is None:
        return Borders()
    if issubclass(splitter, ThinkSplitter):
        tags = _RESPONSE_TAGS[:1] if splitter.tagged else ()
        return Borders((splitter.open,), (splitter.close, *tags), tags)
    return Borders((_CHANNEL, _START), _RESPONSES,
                   () if issubclass(splitter, HarmonyFormatSplitter) else (_END, _START, _CHANNEL))


class Splitter:
    """Splits one completion.

    Attributes:
        inside: the completion begins inside the reasoning.
    """

    inside = False

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """Feed a chunk. Returns the new reasoning and the new response text.

        Args:
            text: the chunk.
            last: True if the completion ends with this chunk.
        """
        raise NotImplementedError


def split(make: Callable[[], Splitter] | None, text: str) -> tuple[str | None, str]:
    """Split a complete completion into (reasoning, response). The reasoning is None if there is none."""
    if make is None:
        return None, text
    thoughts, response = make().feed(text, True)
    return thoughts or None, response


def _partial_marker(text: str, markers: Sequence[str]) -> int:
    """Return the number of characters at the end of a text that may begin a marker."""
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0


class CallTrial(Protocol):
    """Checks whether a text that begins with a marker of function calls begins with a call."""

    def begins_with_call(self, text: str, last: bool = False) -> bool | None:
        """Feed a chunk. Returns None if more text is needed. ``last``: the text ends with this chunk."""


class ThinkSplitter(Splitter):
    """Splits completions that consist of ``<think>``, reasoning, ``</think>`` and the response. A completion that does
    not begin with ``<think>`` has no reasoning. Empty lines around the reasoning belong to the format and are dropped.

    A function call ends the reasoning, because models call functions without ``</think>`` before the call.

    Attributes:
        open, close: the markers around the reasoning.
        tagged: tags may be around the response: they are dropped.
        dropped: characters that are dropped between the reasoning and the response.

    Args:
        call_markers: markers of function calls; empty if the request has no tools.
        make_trial: returns a new trial of a text that begins with one of them.
    """

    open, close = THINK_MARKERS[0]
    tagged = False
    dropped = "\n"

    def __init__(self, call_markers: tuple[str, ...] = (), make_trial: Callable[[], CallTrial] | None = None) -> None:
        self._call_markers, self._make_trial = call_markers, make_trial
        self._ends = re.compile("|".join(map(re.escape, (self.close, *call_markers))))
        self._state = "opening"
        self._text = ""
        self._emitted = self._has_response = False
        self._trial: CallTrial | None = None  # tries the marker after the newlines of the text
        self._tried = 0  # characters of the text that the trial has

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        self._text += text
        thoughts = response = ""
        if self._state == "opening":
            self._open(last)
        if self._state == "thoughts":
            thoughts = self._think(last)
        if self._state == "gap":
            self._begin_response(last)
        if self._state == "tagged":
            response = self._read_tagged(last)
        if self._state == "response":
            response, self._text = response + self._text, ""
        return thoughts, response

    def _begin_response(self, last: bool) -> None:
        self._text = self._text.lstrip(self.dropped)
        tag = _RESPONSE_TAGS[0]
        if self.tagged and self._text.startswith(tag):
            self._text, self._state = self._text[len(tag):], "tagged"
        elif self._text and (last or not self.tagged or not tag.startswith(self._text)):
            self._state = "response"

    def _read_tagged(self, last: bool) -> str:
        """Return the response up to the tag that ends it. Newlines inside the tags belong to the format."""
        if not self._has_response:
            self._text = self._text.lstrip("\n")
            self._has_response = bool(self._text)
        kept, end, rest = self._text.partition(_RESPONSE_TAGS[1])
        if end:
            self._text, self._state = rest, "response"
            return kept.rstrip("\n")
        size = 0 if last else _partial_marker(self._text, _RESPONSE_TAGS[1:])
        kept = self._text[:len(self._text) - size]
        kept = kept if last else kept.rstrip("\n")
        self._text = self._text[len(kept):]
        return kept

    def _open(self, last: bool) -> None:
        body = self._text.lstrip()
        if body.startswith(self.open):
            self._text, self._state = body[len(self.open):], "thoughts"
        elif last or not self.open.startswith(body):
            self._state = "thoughts" if self.inside else "response"

    def _think(self, last: bool) -> str:
        thoughts = ""
        while self._state == "thoughts":
            if not self._emitted and self._trial is None:
                self._text = self._text.lstrip("\n")
            begin = 0  # markers are searched from here
            if self._trial is not None:
                is_call = self._trial.begins_with_call(self._text[self._tried:], last)
                self._tried = len(self._text)
                if is_call:
                    self._state, self._text = "response", self._text.lstrip("\n")
                    break
                if is_call is None and not last:
                    break
                self._trial, begin = None, 1 + len(self._text) - len(self._text.lstrip("\n"))
                if is_call is None:  # no call follows: the text of an unfinished call contains none
                    self._ends = re.compile(re.escape(self.close))
            found = self._ends.search(self._text, begin)
            if found is not None:
                kept = self._text[:found.start()].rstrip("\n")
                rest = self._text[found.end():]
                if found[0] == self.close:
                    self._state = "gap"
                else:
                    assert self._make_trial is not None
                    rest = self._text[len(kept):]
                    self._trial, self._tried = self._make_trial(), found.start() - len(kept)
            else:
                size = 0 if last else _partial_marker(self._text[begin:], (self.close, *self._call_markers))
                # newlines are kept back: they are dropped if the reasoning ends after them
                kept = self._text[:len(self._text) - size].rstrip("\n")
                rest = "" if last else self._text[len(kept):]
            thoughts, self._text = thoughts + kept, rest
            self._emitted = self._emitted or bool(kept)
            if found is None:
                break
        return thoughts


class OpenedThinkSplitter(ThinkSplitter):
    """Splits completions whose prompt ends with ``<think>``."""

    inside = True


@functools.lru_cache(maxsize=8 * len(THINK_MARKERS))
def think_splitter(markers: tuple[str, str], inside: bool, tagged: bool = False,
                   dropped: str = "\n") -> type[ThinkSplitter]:
    """Return the class that splits at these markers.

    Args:
        markers: texts around the reasoning.
        inside: the prompt ends with the first of them.
        tagged, dropped: see :class:`ThinkSplitter`.
    """
    kind = OpenedThinkSplitter if inside else ThinkSplitter
    if (markers, tagged, dropped) == (THINK_MARKERS[0], False, kind.dropped):
        return kind
    return type(kind.__name__, (kind,), {"open": markers[0], "close": markers[1], "tagged": tagged, "dropped": dropped})


def of_format(splitter: type[Splitter], newline: bool) -> type[Splitter]:
    """Return the class that splits completions whose response has a format: its response is exactly what the format
    allows.

    Args:
        splitter: class that splits completions without a format.
        newline: the response may begin with a newline. Then none precedes it.
    """
    if issubclass(splitter, HarmonySplitter):
        return HarmonyFormatSplitter
    assert issubclass(splitter, ThinkSplitter)
    return think_splitter((splitter.open, splitter.close), splitter.inside, False, "" if newline else splitter.dropped)


class HarmonySplitter(Splitter):
    """Splits Harmony messages: ``<|channel|>`` name ``<|message|>`` content ``<|end|>``, then ``<|start|>`` role before
    the next. A completion that does not begin with a header is one message of the response."""

    def __init__(self) -> None:
        self._text = ""
        self._in_header: bool = True
        self._first = True
        self._is_response = False  # the current message belongs to the response
        self._emitted = [False, False]  # reasoning, response
        self._separate = False  # write a newline between this message and the previous one of the same kind

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        self._text += text
        out = ["", ""]
        while self._text and (self._read_header(last) if self._in_header else self._read_body(out, last)):
            pass
        return out[0], out[1]

    def _read_header(self, last: bool) -> bool:
        """Parse a header. Returns True while more buffered text can be processed."""
        head, marker, rest = self._text.partition(_MESSAGE)
        if self._first and not self._may_begin_header(head, bool(marker), last):
            self._open(True)
            return True
        if not marker:
            if last and head.strip() and "<|" not in head:  # text without a header: part of the response
                self._open(True)
                return True
            if last:
                self._text = ""  # an incomplete header
            return False
        self._text = rest
        self._classify(head)
        return True

    def _classify(self, head: str) -> None:
        """Assign the message with this header to the reasoning or the response."""
        *_, name = (None, *_CHANNEL_NAME.findall(head))  # "commentary to=assistant<|channel|>final" is final
        to = set(_RECIPIENT.findall(head)) - ({"assistant", "user"} if name == "final" else set())
        self._open(name in (None, "final", "commentary") and not to)

    def _may_begin_header(self, head: str, whole: bool, last: bool) -> bool:
        """Return True if the start of the completion is a header, or may become one."""
        head = head.lstrip()
        known = (_CHANNEL, _START, "to=")
        if whole and not head or head.startswith(known):
            return not (last and not whole and head.startswith("to="))
        return not whole and not last and any(begin.startswith(head) for begin in (*known, _MESSAGE))

    def _open(self, is_response: bool) -> None:
        self._in_header, self._first, self._is_response = False, False, is_response
        self._separate = self._emitted[is_response]

    def _read_body(self, out: list[str], last: bool) -> bool:
        found = _BREAK.search(self._text)
        end = found.start() if found else len(self._text) - (0 if last else _partial_marker(self._text, _BREAKS))
        body = self._text[:end]
        if body:
            out[self._is_response] += "\n" * self._separate + body
            self._separate, self._emitted[self._is_response] = False, True
        if found is None:
            self._text = self._text[end:]
            return False
        self._in_header = True
        self._text = self._text[end:] if found[0] == _CHANNEL else self._text[found.end():]
        return True


class HarmonyCallSplitter(HarmonySplitter):
    """Like :class:`HarmonySplitter`, but messages to functions are part of the response. They are written as
    :data:`CALL_HEADER`, function name, ``<|message|>``, content, ``<|call|>``. No other message can contain these
    markers, since they end a message."""

    def __init__(self) -> None:
        super().__init__()
        self._start = ""  # header of a function call whose content has not begun
        self._in_call = False
        self._extent: JsonExtent | None = None  # inside the JSON of arguments, markers are plain text

    def _classify(self, head: str) -> None:
        to = _FUNCTION.search(head)
        if to is None:
            super()._classify(head)
            return
        self._open(True)
        self._start, self._in_call, self._extent = CALL_HEADER + to[1] + _MESSAGE, True, JsonExtent(0)

    def _read_body(self, out: list[str], last: bool) -> bool:
        if self._start:
            self._text = self._text.lstrip()
            if not self._text:
                return False
            out[1] += "\n" * self._separate + self._start
            self._start, self._separate, self._emitted[1] = "", False, True
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
        if self._in_header and self._in_call:
            out[1] += "<|call|>"
            self._in_call = False
        return more


class HarmonyFormatSplitter(HarmonyCallSplitter):
    """Like :class:`HarmonyCallSplitter`, for completions with a response format: the response message is the last one,
    and markers inside it are plain text."""

    def _read_body(self, out: list[str], last: bool) -> bool:
        if not self._is_response or self._in_call:
            return super()._read_body(out, last)
        out[1] += self._text
        self._text = ""
        return False
