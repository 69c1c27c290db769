"""Answers taken apart: text for the reader, and calls of tools.

A parser is fed an answer as it is decided, in pieces of any size, thoughts taken off
(:mod:`mpool.conversation.reasoning`).
Text that may begin a marker is buffered, and so are spaces before it; the result does not depend on how the text was
split. Text that only starts like a call, or calls an unknown function, stays text.

Where a grammar keeps the answer to its form (``sure``), the arguments of a call are given as they are written; else a
call is given when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .json_extent import JsonExtent
from .tool_formats import ToolFormat
from .tool_grammar import BARE_LEADS, LEADS, is_text, may_be_null

_PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s*")
_NAME = r"[^\s<>\[\]{}\"'`]{1,64}"
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({_NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_PLAIN = re.compile(rf"\s*(?P<name>{_NAME})\s*(\[CALL_ID\]\s*(?P<id>\w{{1,64}})\s*)?")
_NUMBERED = re.compile(rf"\s*(?P<id>(?P<name>{_NAME}?):\d{{1,6}})\s*")
#: Maximum length of a name with the text before its arguments.
_LONGEST = 256


class Piece(NamedTuple):
    """New part of a function call: the first one of each call has ``id`` and ``name``; ``arguments`` is JSON text."""

    number: int
    id: str | None
    name: str | None
    arguments: str


class Call(NamedTuple):
    """A call; ``raw``: its arguments, as JSON text; ``complete``: they are all here."""

    id: str
    name: str
    raw: str
    complete: bool


class _Wait(Exception):
    """The buffered text may begin the expected text."""


class _Never(Exception):
    """The buffered text differs from the expected text."""


class Calls:
    """Takes one answer apart.

    Args:
        form: of the model's calls.
        functions: name -> JSON schema of its arguments.
        sure: a grammar keeps the answer to the form.
        make_id: makes an id for the call of a number, where the model writes none.
        framed: an answer is calls from its beginning on, or all of it is text. The grammar sees to it.
    """

    def __init__(self, form: ToolFormat, functions: Mapping[str, Mapping[str, Any]], sure: bool,
                 make_id: Callable[[int], str], framed: bool = False) -> None:
        self._form, self._functions, self._sure, self._make_id = form, functions, sure, make_id
        self._step: Callable[[], bool] = \
            self._beginning if framed and not form.leads else \
            self._leading if form.leads or form.bare else self._reading
        self._text = ""  # text not returned yet; for an uncertain call, all of it
        self._gap = ""  # spaces before it
        self._bared = False  # calls have no marks, though the form has
        self._last = False
        self._out: list[str] = []
        self._pieces: list[Piece] = []
        self._found: list[tuple[str, str, list[str]]] = []  # id, name, arguments in pieces
        self._complete = True  # the last of them
        self._said = self._spoken = False  # text since the last call, and ever
        self._extent: JsonExtent | None = None
        self._value = self._scanned = 0  # where a value begins that is not complete, and where nothing ended it

    def feed(self, text: str, last: bool = False) -> tuple[str, list[Piece]]:
        """New (text, parts of calls). ``last``: nothing follows."""
        self._text += text
        self._last, self._out, self._pieces = last, [], []
        more = True
        while more:
            try:
                more = self._step()
            except _Wait:
                more = False
                if last:
                    self._give_up()
            except _Never:
                self._is_text()
        return "".join(self._out), self._pieces

    @property
    def calls(self) -> tuple[Call, ...]:
        """All so far."""
        return tuple(Call(id, name, "".join(parts), self._complete or at + 1 < len(self._found))
                     for at, (id, name, parts) in enumerate(self._found))

    # ---- text --------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        if self._found and not self._said:
            text = text.lstrip()
        if text:
            self._out.append("\n" * (self._spoken and not self._said) + text)
            self._said = self._spoken = True

    def _beginning(self) -> bool:
        """Parses up to the first marker, or the rest as text."""
        text, mark = self._text.lstrip(), self._form.mark
        if text.startswith(mark):
            self._text = text
            return self._to(self._opening)
        if not self._last and mark.startswith(text):
            raise _Wait
        return self._to(self._speaking)

    def _speaking(self) -> bool:
        """Parses the rest as text."""
        self._say(self._text)
        self._text = ""
        return False

    def _leading(self) -> bool:
        """Parses the start of a completion whose calls have no marker."""
        squeezed, leads = "".join(self._text.split()), LEADS if self._form.leads else BARE_LEADS
        if not squeezed.startswith(leads):
            if not self._last and any(lead.startswith(squeezed) for lead in leads):
                raise _Wait
            self._step = self._reading
            return True
        if self._form.leads:
            return self._to(self._opening)
        return self._to(self._bare)

    def _bare(self) -> bool:
        """The first of calls that have no marks, though the form has."""
        at = self._expect(0, "```") if self._text.lstrip().startswith("`") else 0
        if self._text.startswith("json", at):
            at += 4
        self._bared = True
        return self._call(at)

    def _another(self) -> bool:
        """A further one, or the end of the fence around them."""
        at = _SPACE.match(self._text).end()  # type: ignore[union-attr]
        if self._text.startswith("{", at):
            return self._call(at)
        at = self._expect(at, "```")
        self._bared = False
        return self._to(self._reading, at)

    def _reading(self) -> bool:
        mark, text = self._form.mark, self._text
        at = text.find(mark) if mark else -1
        if at >= 0:
            before = text[:at].rstrip()
            self._say(before)
            self._gap, self._text = text[len(before):at], text[at:]
            return self._to(self._opening)
        end = len(text)
        if not self._last:
            end -= next((size for size in range(min(len(mark) - 1, end), 0, -1) if mark.startswith(text[-size:])), 0)
            end = len(text[:end].rstrip())
        self._say(text[:end])
        self._text = text[end:]
        return False

    def _to(self, step: Callable[[], bool], start: int = 0) -> bool:
        """Continues with a step after the text parsed so far."""
        self._step, self._text, self._extent, self._value = step, self._text[start:], None, 0
        return True

    def _is_text(self) -> None:
        """Treats the text parsed as a call as plain text."""
        if self._step == self._opening:
            size = len(self._form.mark)
            self._say(self._gap + self._text[:size])
            self._text = self._text[size:]
        self._bared = False
        self._to(self._reading)

    def _give_up(self) -> None:
        """The completion ends before the expected text: the started call is text, or an incomplete call."""
        if not self._sure and self._step in (self._opening, self._next, self._beginning, self._leading,
                                               self._bare, self._another):
            self._say(self._gap + self._text if self._step == self._opening else self._text)
        self._text = ""

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _expect(self, at: int, words: str) -> int:
        """Behind these words, between which there may be other spaces."""
        for word in words.split():
            at = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]
            if not self._text.startswith(word, at):
                if word.startswith(self._text[at:]):
                    raise _Wait
                raise _Never
            at += len(word)
        return at

    def _opening(self) -> bool:
        """Parses the text before the first call, and the start of the call."""
        at = self._expect(0, self._form.section) if self._form.section else 0
        return self._call(self._expect(at, "[") if self._form.listed else at)

    def _next(self) -> bool:
        """Parses another call, or the end of the calls."""
        form, text = self._form, self._text
        at = _SPACE.match(text).end()  # type: ignore[union-attr]
        if form.listed:
            if text[at:at + 1] == "]":
                return self._to(self._ending, at + 1)
            return self._call(self._expect(at, ","))
        if text.startswith(form.end, at):
            return self._to(self._ending, at)
        if form.end.startswith(text[at:]) and not self._last:
            raise _Wait
        return self._call(at)

    def _ending(self) -> bool:
        try:
            at = self._expect(0, self._form.end)
        except _Never:
            at = 0
        return self._to(self._reading, at)

    def _call(self, at: int) -> bool:
        """A call from its beginning, all of which stays in the text until it is certain to be one."""
        form = self._form
        if not self._bared:
            at = self._expect(at, form.open)
        if form.leads and self._text[at:].lstrip().startswith(_PYTHON_TAG):
            at = self._expect(at, _PYTHON_TAG)
        if form.body == "json":
            at = self._expect(at, "{") - 1
            head = _HEAD.match(self._text, at) if self._sure else None
            if head is not None:
                return self._begin(head[1], None, head.end())
            end = self._end(at)
            found = self._loads(at, end)
            name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
            return self._take(name, None, arguments, end)
        name, id, at = self._named(at, ">" if form.body == "xml" else form.middle.strip())
        if form.body == "xml":
            arguments, end = self._tagged(name, at)
            return self._take(name, id, arguments, end)
        at = self._expect(at, "{") - 1
        if self._sure:
            return self._begin(name, id, at)
        end = self._end(at)
        return self._take(name, id, self._loads(at, end), end)

    def _named(self, at: int, middle: str) -> tuple[str, str | None, int]:
        """The name, the id if present, and the index after ``middle``."""
        end = self._text.find(middle, at, at + _LONGEST)
        if end < 0:
            if len(self._text) >= at + _LONGEST:
                raise _Never
            raise _Wait
        found = (_NUMBERED if self._form.numbered else _PLAIN).fullmatch(self._text, at, end)
        if found is None:
            raise _Never
        id = found["id"]
        return found["name"], f"functions.{id}" if self._form.numbered else id, end + len(middle)

    def _end(self, at: int) -> int:
        if self._extent is None:
            self._extent = JsonExtent(at)
        end = self._extent.end(self._text)
        if end < 0:
            raise _Wait
        return end

    def _loads(self, at: int, end: int) -> dict[str, Any]:
        try:
            found = json.loads(self._text[at:end], strict=False, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            raise _Never from None
        return found if isinstance(found, dict) else {}

    def _tagged(self, name: str, at: int) -> tuple[dict[str, Any], int]:
        """Arguments in tags, and where ``</function>`` is. A value can hold any words but the one that ends it."""
        properties = self._functions.get(name, {}).get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        close = "\n</parameter>\n" if self._sure else "</parameter>"
        found: dict[str, Any] = {}
        while True:
            at = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]
            if self._text.startswith("</function>", at):
                return found, at
            tag = "<parameter="
            if not self._text.startswith(tag, at):
                if any(word.startswith(self._text[at:at + len(tag)]) for word in (tag, "</function>")):
                    raise _Wait
                raise _Never
            at += len(tag)
            start = self._text.find(">", at, at + _LONGEST) + 1
            if not start:
                if len(self._text) < at + _LONGEST:
                    raise _Wait
                raise _Never
            key = self._text[at:start - 1]
            start += self._text.startswith("\n", start)
            end = self._text.find(close, max(start, self._scanned - len(close)) if self._value == start else start)
            if end < 0:
                self._value, self._scanned = start, len(self._text)
                raise _Wait
            value = self._text[start:end] if self._sure else self._text[start:end].removesuffix("\n")
            found[key], at = _value(value, properties.get(key)), end + len(close)

    def _take(self, name: Any, id: str | None, arguments: Any, end: int) -> bool:
        """A whole call."""
        if isinstance(arguments, str):  # written twice over
            try:
                arguments = json.loads(arguments, strict=False, parse_constant=_no_constant)
            except (ValueError, RecursionError):
                raise _Never from None
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise _Never
        self._add(name, id, _unicode(json.dumps(arguments, ensure_ascii=False)))
        return self._to(self._closing, end)

    def _begin(self, name: str, id: str | None, at: int) -> bool:
        """Parses a call whose arguments are streamed."""
        self._add(name, id, "")
        self._complete = False
        self._to(self._arguments, at)
        self._extent = JsonExtent(0)
        return True

    def _add(self, name: Any, id: str | None, arguments: str) -> None:
        if not isinstance(name, str) or name not in self._functions:
            raise _Never
        at = len(self._found)
        id = id or self._make_id(at)
        self._found.append((id, name, [arguments]))
        self._pieces.append(Piece(at, id, name, arguments))
        self._said, self._gap = False, ""

    def _arguments(self) -> bool:
        assert self._extent is not None
        end = self._extent.end(self._text)
        new = self._text if end < 0 else self._text[:end]
        if new:
            self._found[-1][2].append(new)
            self._pieces.append(Piece(len(self._found) - 1, None, None, new))
        if end < 0:
            self._extent.at -= len(new)
            self._text = ""
            return False
        self._complete = True
        return self._to(self._brace if self._form.body == "json" else self._closing, end)

    def _brace(self) -> bool:
        """Parses the end of an object whose arguments were streamed."""
        return self._to(self._closing, self._expect(0, "}"))

    def _closing(self) -> bool:
        """Parses the end of a call, which may be missing."""
        if self._bared:
            return self._to(self._another)
        try:
            at = self._expect(0, self._form.close)
        except _Never:
            at = 0
        return self._to(self._next if self._form.section else self._reading, at)


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _unicode(text: str) -> str:
    """Removes halves of surrogate pairs, which JSON escapes can produce."""
    return text.encode("utf-8", "replace").decode()


def arguments_of(raw: str) -> dict[str, Any]:
    """Arguments, of the text of a complete call."""
    found: dict[str, Any] = json.loads(raw)
    text = json.dumps(found, ensure_ascii=False)
    if not text.isascii() and _unicode(text) != text:
        found = json.loads(_unicode(text))
    return found


def _value(text: str, schema: Any) -> Any:
    """An argument that stood between tags."""
    if is_text(schema) and not (text == "null" and may_be_null(schema)):
        return text
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text
