"""Parses completions: text for the user, and function calls.

A parser is fed the text of a completion in chunks of any size, without the reasoning
(:mod:`mpool.conversation.reasoning`). It buffers text that may begin a marker, and white space before it, so the result
does not depend on how the text was split into chunks. Text that only begins like a call, or that calls an unknown
function, stays text.

If a grammar constrains the completion to the tool-call format (``constrained``), the arguments of a call are emitted
while they are generated. Otherwise a call is emitted once it is complete.

Small models may repeat the same call endlessly. A call that repeats an earlier one of the completion (same function,
same arguments), and a call beyond :data:`~mpool.conversation.tool_grammar.MAX_CALLS`, end the completion: they and all
further text are dropped. Arguments are held back while they equal the start of an earlier call's. A repeated call that
differs in white space is kept, because its parts were emitted before its end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .json_extent import JsonExtent
from .tool_formats import ToolFormat
from .tool_grammar import MARKERLESS_PREFIXES, MAX_CALLS, OPTIONAL_MARKER_PREFIXES, is_text, may_be_null

_PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s*")
_NAME = r"[^\s<>\[\]{}\"'`]{1,64}"
_HEAD = re.compile(rf'\{{\s*"name"\s*:\s*"({_NAME})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)')
_PLAIN = re.compile(rf"\s*(?P<name>{_NAME})\s*(\[CALL_ID\]\s*(?P<id>\w{{1,64}})\s*)?")
_NUMBERED = re.compile(rf"\s*(?P<id>(?P<name>{_NAME}?):\d{{1,6}})\s*")
#: Maximum number of characters from the start of a function's name to the start of its arguments.
_LONGEST = 256


class CallDelta(NamedTuple):
    """A new part of a function call. The first part of each call has ``id`` and ``name``; ``arguments`` is part of the
    arguments' JSON text."""

    number: int
    id: str | None
    name: str | None
    arguments: str


class ParsedCall(NamedTuple):
    """A function call. ``raw`` is the JSON text of its arguments; ``complete`` is True once they are all received."""

    id: str
    name: str
    raw: str
    complete: bool


class _NeedMoreText(Exception):
    """The buffered text is only the beginning of the expected text: wait for more."""


class _Mismatch(Exception):
    """The buffered text is not the expected text."""


class ToolCallParser:
    """Parses one completion.

    Args:
        format: the model's tool-call format.
        functions: function name -> JSON schema of its arguments.
        constrained: True if a grammar constrains the completion to the format.
        make_id: returns the id of the call with this number, for calls that the model writes without an id.
        calls_or_format: True if a grammar makes the completion either calls from its first character on, or text
            without calls.
    """

    def __init__(self, format: ToolFormat, functions: Mapping[str, Mapping[str, Any]], constrained: bool,
                 make_id: Callable[[int], str], calls_or_format: bool = False) -> None:
        self._format, self._functions, self._constrained, self._make_id = format, functions, constrained, make_id
        self._step: Callable[[], bool] = \
            self._beginning if calls_or_format and not format.markerless else \
            self._markerless if format.markerless or format.marker_optional else self._reading
        self._text = ""  # text that is not emitted yet; for a call that may turn out to be text, all of it
        self._gap = ""  # white space before it
        self._unmarked = False  # inside calls without markers, in a format that has markers
        self._last: bool  # the completion ends with the chunk of this call of feed()
        self._out: list[str] = []
        self._deltas: list[CallDelta] = []
        self._found: list[tuple[str, str, list[str]]] = []  # id, name, parts of the arguments
        self._complete = True  # the last call is complete
        self._text_since_call = self._any_text = False
        self._extent: JsonExtent | None = None
        self._held: list[CallDelta] = []  # parts of a call that may repeat an earlier one
        self._distinct = -1  # number of the last call known to differ from all earlier ones
        self._kept: int | None = None  # number of calls before the one that ended the completion
        self._value = self._scanned = 0  # start of an unfinished value between tags; end of its scanned part

    def feed(self, text: str, last: bool = False) -> tuple[str, list[CallDelta]]:
        """Feed a chunk. Returns the new text and the new parts of calls.

        Args:
            text: the chunk.
            last: True if the completion ends with this chunk.
        """
        if self.ended:
            return "", []
        self._text += text
        self._last, self._out, self._deltas = last, [], []
        more, calls = True, list[CallDelta]()
        while more and not self.ended:
            try:
                more = self._step()
            except _NeedMoreText:
                more = False
                if last:
                    self._give_up()
            except _Mismatch:
                self._treat_as_text()
            calls += self._without_repeats()
        if last and not self.ended:
            calls += self._held
        return "".join(self._out), calls

    @property
    def ended(self) -> bool:
        """True once a call repeated an earlier one, or exceeded the maximum number of calls."""
        return self._kept is not None

    def _without_repeats(self) -> list[CallDelta]:
        """Take the new parts of calls, except those that may belong to a repeated call."""
        found: list[CallDelta] = []
        new, self._deltas = self._deltas, []
        for delta in new:
            number, name = delta.number, self._found[delta.number][1]
            if number >= MAX_CALLS:
                self._kept = number
                return found
            self._held.append(delta)
            complete = self._complete or number + 1 < len(self._found)
            if complete or number > self._distinct:
                earlier = ["".join(parts) for _, other, parts in self._found[:number] if other == name]
                raw = "".join(self._found[number][2]) if earlier else ""
                if not complete:
                    if any(one.startswith(raw) for one in earlier):
                        continue
                elif number > self._distinct and raw in earlier:
                    self._kept = number
                    return found
                elif any(_same_value(raw, one) for one in earlier):  # other white space, so it was emitted already
                    self._kept = number + 1
                    return found + self._held
            self._distinct = number
            found += self._held
            self._held = []
        return found

    @property
    def calls(self) -> tuple[ParsedCall, ...]:
        """The calls parsed so far; the last one may be incomplete."""
        return tuple(ParsedCall(id, name, "".join(parts), self._complete or at + 1 < len(self._found))
                     for at, (id, name, parts) in enumerate(self._found[:self._kept]))

    # ---- text --------------------------------------------------------------------------------------------------------

    def _emit(self, text: str) -> None:
        if self._found and not self._text_since_call:
            text = text.lstrip()
        if text:
            self._out.append("\n" * (self._any_text and not self._text_since_call) + text)
            self._text_since_call = self._any_text = True

    def _beginning(self) -> bool:
        """Parse the first marker; if the completion begins otherwise, all of it is text."""
        text, marker = self._text.lstrip(), self._format.marker
        if text.startswith(marker):
            self._text = text
            return self._to(self._opening)
        if not self._last and marker.startswith(text):
            raise _NeedMoreText
        return self._to(self._only_text)

    def _only_text(self) -> bool:
        """Emit all further text."""
        self._emit(self._text)
        self._text = ""
        return False

    def _markerless(self) -> bool:
        """Parse the start of a completion whose calls need no marker."""
        squeezed = "".join(self._text.split())
        prefixes = MARKERLESS_PREFIXES if self._format.markerless else OPTIONAL_MARKER_PREFIXES
        if not squeezed.startswith(prefixes):
            if not self._last and any(prefix.startswith(squeezed) for prefix in prefixes):
                raise _NeedMoreText
            self._step = self._reading
            return True
        if self._format.markerless:
            return self._to(self._opening)
        return self._to(self._first_unmarked)

    def _first_unmarked(self) -> bool:
        """Parse the first call without markers, in a format that has markers; it may be inside a code fence."""
        at = self._expect(0, "```") if self._text.lstrip().startswith("`") else 0
        if self._text.startswith("json", at):
            at += 4
        self._unmarked = True
        return self._call(at)

    def _next_unmarked(self) -> bool:
        """Parse another call without markers, or the end of the code fence."""
        at = _SPACE.match(self._text).end()  # type: ignore[union-attr]
        if self._text.startswith("{", at):
            return self._call(at)
        at = self._expect(at, "```")
        self._unmarked = False
        return self._to(self._reading, at)

    def _reading(self) -> bool:
        """Emit text up to the next marker."""
        marker, text = self._format.marker, self._text
        at = text.find(marker) if marker else -1
        if at >= 0:
            before = text[:at].rstrip()
            self._emit(before)
            self._gap, self._text = text[len(before):at], text[at:]
            return self._to(self._opening)
        end = len(text)
        if not self._last:
            end -= next((size for size in range(min(len(marker) - 1, end), 0, -1)
                         if marker.startswith(text[-size:])), 0)
            end = len(text[:end].rstrip())
        self._emit(text[:end])
        self._text = text[end:]
        return False

    def _to(self, step: Callable[[], bool], start: int = 0) -> bool:
        """Continue with ``step`` at index ``start`` of the buffered text."""
        self._step, self._text, self._extent, self._value = step, self._text[start:], None, 0
        return True

    def _treat_as_text(self) -> None:
        """Treat the text that was parsed as a call as plain text."""
        if self._step == self._opening:
            size = len(self._format.marker)
            self._emit(self._gap + self._text[:size])
            self._text = self._text[size:]
        self._unmarked = False
        self._to(self._reading)

    def _give_up(self) -> None:
        """Handle the end of the completion inside a call: the begun call is text, or an incomplete call."""
        if not self._constrained and self._step in (self._opening, self._next, self._beginning, self._markerless,
                                                    self._first_unmarked, self._next_unmarked):
            self._emit(self._gap + self._text if self._step == self._opening else self._text)
        self._text = ""

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _expect(self, at: int, words: str) -> int:
        """Return the index after these words, which any white space may separate."""
        for word in words.split():
            at = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]
            if not self._text.startswith(word, at):
                if word.startswith(self._text[at:]):
                    raise _NeedMoreText
                raise _Mismatch
            at += len(word)
        return at

    def _opening(self) -> bool:
        """Parse the text before the first call, and the start of the call."""
        at = self._expect(0, self._format.section) if self._format.section else 0
        return self._call(self._expect(at, "[") if self._format.listed else at)

    def _next(self) -> bool:
        """Parse another call, or the end of the calls."""
        format, text = self._format, self._text
        at = _SPACE.match(text).end()  # type: ignore[union-attr]
        if format.listed:
            if text[at:at + 1] == "]":
                return self._to(self._ending, at + 1)
            return self._call(self._expect(at, ","))
        if text.startswith(format.end, at):
            return self._to(self._ending, at)
        if format.end.startswith(text[at:]) and not self._last:
            raise _NeedMoreText
        return self._call(at)

    def _ending(self) -> bool:
        try:
            at = self._expect(0, self._format.end)
        except _Mismatch:
            at = 0
        return self._to(self._reading, at)

    def _call(self, at: int) -> bool:
        """Parse a call from its start. All of it stays in the buffer until it is certain to be a call."""
        format = self._format
        if not self._unmarked:
            at = self._expect(at, format.open)
        if format.markerless and self._text[at:].lstrip().startswith(_PYTHON_TAG):
            at = self._expect(at, _PYTHON_TAG)
        if format.body == "json":
            at = self._expect(at, "{") - 1
            head = _HEAD.match(self._text, at) if self._constrained else None
            if head is not None:
                return self._add_streamed(head[1], None, head.end())
            end = self._end(at)
            found = self._loads(at, end)
            name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
            return self._add_whole(name, None, arguments, end)
        name, id, at = self._named(at, ">" if format.body == "xml" else format.middle.strip())
        if format.body == "xml":
            arguments, end = self._tagged(name, at)
            return self._add_whole(name, id, arguments, end)
        at = self._expect(at, "{") - 1
        if self._constrained:
            return self._add_streamed(name, id, at)
        end = self._end(at)
        return self._add_whole(name, id, self._loads(at, end), end)

    def _named(self, at: int, middle: str) -> tuple[str, str | None, int]:
        """Return the function's name, the call's id if there is one, and the index after ``middle``."""
        end = self._text.find(middle, at, at + _LONGEST)
        if end < 0:
            if len(self._text) >= at + _LONGEST:
                raise _Mismatch
            raise _NeedMoreText
        found = (_NUMBERED if self._format.numbered else _PLAIN).fullmatch(self._text, at, end)
        if found is None:
            raise _Mismatch
        id = found["id"]
        return found["name"], f"functions.{id}" if self._format.numbered else id, end + len(middle)

    def _end(self, at: int) -> int:
        if self._extent is None:
            self._extent = JsonExtent(at)
        end = self._extent.end(self._text)
        if end < 0:
            raise _NeedMoreText
        return end

    def _loads(self, at: int, end: int) -> dict[str, Any]:
        try:
            found = _strict_json(self._text[at:end], strict=False)
        except (ValueError, RecursionError):
            raise _Mismatch from None
        return found if isinstance(found, dict) else {}

    def _tagged(self, name: str, at: int) -> tuple[dict[str, Any], int]:
        """Parse arguments in tags. Returns them and the index of ``</function>``. A value may contain any text except
        the tag that ends it."""
        properties = self._functions.get(name, {}).get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        close = "\n</parameter>\n" if self._constrained else "</parameter>"
        found: dict[str, Any] = {}
        while True:
            at = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]
            if self._text.startswith("</function>", at):
                return found, at
            tag = "<parameter="
            if not self._text.startswith(tag, at):
                if any(word.startswith(self._text[at:at + len(tag)]) for word in (tag, "</function>")):
                    raise _NeedMoreText
                raise _Mismatch
            at += len(tag)
            start = self._text.find(">", at, at + _LONGEST) + 1
            if not start:
                if len(self._text) < at + _LONGEST:
                    raise _NeedMoreText
                raise _Mismatch
            key = self._text[at:start - 1]
            start += self._text.startswith("\n", start)
            end = self._text.find(close, max(start, self._scanned - len(close)) if self._value == start else start)
            if end < 0:
                self._value, self._scanned = start, len(self._text)
                raise _NeedMoreText
            value = self._text[start:end] if self._constrained else self._text[start:end].removesuffix("\n")
            found[key], at = _value(value, properties.get(key)), end + len(close)

    def _add_whole(self, name: Any, id: str | None, arguments: Any, end: int) -> bool:
        """Add a complete call."""
        if isinstance(arguments, str):  # JSON text inside a JSON string
            try:
                arguments = _strict_json(arguments, strict=False)
            except (ValueError, RecursionError):
                raise _Mismatch from None
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, dict):
            raise _Mismatch
        self._add(name, id, _unicode(json.dumps(arguments, ensure_ascii=False)))
        return self._to(self._closing, end)

    def _add_streamed(self, name: str, id: str | None, at: int) -> bool:
        """Add a call whose arguments are emitted while they are generated."""
        self._add(name, id, "")
        self._complete = False
        self._to(self._arguments, at)
        self._extent = JsonExtent(0)
        return True

    def _add(self, name: Any, id: str | None, arguments: str) -> None:
        if not isinstance(name, str) or name not in self._functions:
            raise _Mismatch
        at = len(self._found)
        id = id or self._make_id(at)
        self._found.append((id, name, [arguments]))
        self._deltas.append(CallDelta(at, id, name, arguments))
        self._text_since_call, self._gap = False, ""

    def _arguments(self) -> bool:
        """Emit arguments up to their end."""
        assert self._extent is not None
        end = self._extent.end(self._text)
        new = self._text if end < 0 else self._text[:end]
        if new:
            self._found[-1][2].append(new)
            self._deltas.append(CallDelta(len(self._found) - 1, None, None, new))
        if end < 0:
            self._extent.at -= len(new)
            self._text = ""
            return False
        self._complete = True
        return self._to(self._brace if self._format.body == "json" else self._closing, end)

    def _brace(self) -> bool:
        """Parse the closing brace of a call object whose arguments were emitted."""
        return self._to(self._closing, self._expect(0, "}"))

    def _closing(self) -> bool:
        """Parse the end of a call, which the model may omit."""
        if self._unmarked:
            return self._to(self._next_unmarked)
        try:
            at = self._expect(0, self._format.close)
        except _Mismatch:
            at = 0
        return self._to(self._next if self._format.section else self._reading, at)


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # `json.dumps` would write Infinity, which is not JSON
        raise ValueError(text)
    return value


def _strict_json(text: str, strict: bool = True) -> Any:
    """Parse JSON without NaN, Infinity and numbers beyond float64. ``strict``: no control characters in strings."""
    return json.loads(text, strict=strict, parse_constant=_no_constant, parse_float=_finite)


def _same_value(raw: str, other: str) -> bool:
    """Return True if two JSON texts have the same value."""
    try:
        return bool(json.loads(raw) == json.loads(other))
    except (ValueError, RecursionError):
        return False


def _unicode(text: str) -> str:
    """Replace lone surrogates, which JSON escapes can produce, with ``?``."""
    return text.encode("utf-8", "replace").decode()


def parse_arguments(raw: str) -> dict[str, Any]:
    """Parse the JSON text of a complete call's arguments."""
    found: dict[str, Any] = json.loads(raw)
    text = json.dumps(found, ensure_ascii=False)
    if not text.isascii() and _unicode(text) != text:
        found = json.loads(_unicode(text))
    return found


def _value(text: str, schema: Any) -> Any:
    """Return the value of an argument that was written between tags."""
    if is_text(schema) and not (text == "null" and may_be_null(schema)):
        return text
    try:
        return _strict_json(text)
    except (ValueError, RecursionError):
        return text
