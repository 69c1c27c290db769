"""Parses completions: text for the user, and function calls.

A parser is fed the text of a completion in chunks of any size, without the reasoning
(:mod:`mpool.conversation.reasoning`). It buffers text that may begin a marker, and white space before it, so the result
does not depend on how the text was split into chunks. Text that only begins like a call, or that calls an unknown
function, stays text.

If a grammar constrains the completion to the tool-call format (``constrained``), the arguments of a call are emitted
while they are generated. Otherwise a call is emitted once it is complete.

Small models may repeat the same call endlessly. A completion ends after
:data:`~mpool.conversation.tool_grammar.MAX_CALLS` calls, and after
:data:`~mpool.conversation.tool_grammar.MAX_REPEATS` calls in a row with the same function and equal arguments. All
further text is dropped; no call before it is.

Models leave out markers, or write those of another version of their format (``ToolFormat.openings``). The parser
accepts a call without its section, its end markers, or the brackets of its list; several calls between two markers; and
a list of calls where the format has none.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from ..completions import ToolCall
from . import python_calls, quoted_calls
from .json_extent import JsonExtent
from .reasoning import THINK_ENDS
from .tool_formats import TAG, ToolFormat
from .tool_grammar import MARKERLESS_PREFIXES, MAX_CALLS, MAX_REPEATS, OPTIONAL_MARKER_PREFIXES
from .tool_values import properties_of, value_of

_PYTHON_TAG = "<|python_tag|>"
_SPACE = re.compile(r"\s*")
_NAME = r"[^\s<>\[\]{}\"'`]{1,128}"
_HEAD = re.compile(rf'\{{\s*(?:"type"\s*:\s*"function"\s*,\s*|"tool_call_id"\s*:\s*"\d+"\s*,\s*)?'
                   rf'"(?:tool_)?name"\s*:\s*"({_NAME})"\s*,\s*'
                   r'"(?:arguments|parameters)"\s*:\s*(?=\{)')
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


#: Limit that ended a completion: :data:`~mpool.conversation.tool_grammar.MAX_CALLS` calls, or
#: :data:`~mpool.conversation.tool_grammar.MAX_REPEATS` equal ones in a row.
Limit = Literal["max_tool_calls", "repeated_tool_calls"]


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
        self._listed = False  # inside a list of calls
        self._in_object = False  # the arguments that are emitted are part of a call object
        self._close = format.close  # text after each of the current calls
        self._last: bool  # the completion ends with the chunk of this call of feed()
        self._out: list[str] = []
        self._deltas: list[CallDelta] = []
        self._found: list[tuple[str, str, list[str]]] = []  # id, name, parts of the arguments
        self._complete = True  # the last call is complete
        self._text_since_call = self._any_text = False
        self._extent: JsonExtent | python_calls.ArgumentsExtent | quoted_calls.QuotedExtent | None = None
        #: Limit that ended the completion; None: it has not been reached.
        self.limit: Limit | None = None
        self._counted = self._run = 0  # calls compared so far; length of the run of equal ones that the last belongs to
        self._last_call: tuple[str, str] | None = None  # name of the last call, and its arguments in a canonical form
        self._value = self._scanned = 0  # start of an unfinished value between tags; end of its scanned part

    def results(self) -> tuple[ToolCall, ...]:
        """Return the calls of a complete completion."""
        return tuple(ToolCall(call.id, call.name, parse_arguments(call.raw) if call.complete else None, call.raw)
                     for call in self.calls)

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
            calls += self._deltas
            self._deltas = []
            self._count()
        return "".join(self._out), calls

    @property
    def ended(self) -> bool:
        """True once the completion reached a limit of calls."""
        return self.limit is not None

    @property
    def reached(self) -> str:
        """The limit that ended the completion, for messages."""
        return f"{MAX_CALLS} tool calls" if self.limit == "max_tool_calls" else \
            f"{MAX_REPEATS} equal tool calls of {self._found[-1][1]} in a row"

    def begins_with_call(self, text: str, last: bool = False) -> bool | None:
        """Feed a chunk of a text that begins with a marker. Returns True if the text begins with a call, False if it
        does not, and None if more of it is needed. Ends the use of this parser for other purposes."""
        if not self._text:
            self._step = self._opening
        self._text += text
        self._last, self._out, self._deltas = last, [], []
        try:
            self._step()
        except _NeedMoreText:
            return None
        except _Mismatch:
            return False
        return bool(self._found)

    def _count(self) -> None:
        """Compare the calls that are complete with the ones before them, and end the completion at a limit."""
        while self._counted < len(self._found) - (not self._complete):
            _, name, parts = self._found[self._counted]
            call = name, _canonical("".join(parts))
            self._run = self._run + 1 if call == self._last_call else 1
            self._counted, self._last_call = self._counted + 1, call
            if self._run == MAX_REPEATS or self._counted == MAX_CALLS:
                self.limit = "repeated_tool_calls" if self._run == MAX_REPEATS else "max_tool_calls"

    @property
    def calls(self) -> tuple[ParsedCall, ...]:
        """The calls parsed so far; the last one may be incomplete."""
        return tuple(ParsedCall(id, name, "".join(parts), self._complete or at + 1 < len(self._found))
                     for at, (id, name, parts) in enumerate(self._found))

    # ---- text --------------------------------------------------------------------------------------------------------

    def _emit(self, text: str) -> None:
        if self._found and not self._text_since_call:
            text = text.lstrip()
        if text:
            self._out.append("\n" * (self._any_text and not self._text_since_call) + text)
            self._text_since_call = self._any_text = True

    def _beginning(self) -> bool:
        """Parse the first marker; if the completion begins otherwise, all of it is text."""
        text, markers = self._text.lstrip(), self._format.markers
        if text.startswith(markers):
            self._text = text
            return self._to(self._opening)
        if not self._last and any(marker.startswith(text) for marker in markers):
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
        return self._body(at)

    def _next_unmarked(self) -> bool:
        """Parse another call without markers, which a semicolon may precede, or the end of the code fence."""
        at = _SPACE.match(self._text).end()  # type: ignore[union-attr]
        if self._text.startswith(";", at):
            at = _SPACE.match(self._text, at + 1).end()  # type: ignore[union-attr]
        tag = self._text[at:at + len(_PYTHON_TAG)]
        if not tag:
            raise _NeedMoreText
        if tag[0] == "{" or self._format.markerless and _PYTHON_TAG.startswith(tag):
            return self._body(at)
        if self._format.markerless:
            raise _Mismatch
        at = self._expect(at, "```")
        self._unmarked = False
        return self._to(self._reading, at)

    def _reading(self) -> bool:
        """Emit text up to the next marker."""
        if self._found and not self._text_since_call:
            self._skip_think_end()
        text, markers = self._text, self._format.markers
        found = _any_of(markers).search(text)
        if found is not None:
            before = text[:found.start()].rstrip()
            self._emit(before)
            self._gap, self._text = text[len(before):found.start()], text[found.start():]
            return self._to(self._opening)
        end = len(text)
        if not self._last:
            longest = max(map(len, markers), default=1) - 1
            end -= next((size for size in range(min(longest, end), 0, -1)
                         if any(marker.startswith(text[-size:]) for marker in markers)), 0)
            end = len(text[:end].rstrip())
        self._emit(text[:end])
        self._text = text[end:]
        return False

    def _skip_think_end(self) -> None:
        """Drop the end marker of reasoning that follows calls: the calls ended the reasoning."""
        text = self._text.lstrip()
        for marker in THINK_ENDS:
            if text.startswith(marker):
                self._text = text[len(marker):]
            elif text and not self._last and marker.startswith(text):
                raise _NeedMoreText

    def _to(self, step: Callable[[], bool], start: int = 0) -> bool:
        """Continue with ``step`` at index ``start`` of the buffered text."""
        self._step, self._text, self._extent, self._value = step, self._text[start:], None, 0
        return True

    def _treat_as_text(self) -> None:
        """Treat the text that was parsed as a call as plain text."""
        if self._step == self._opening:
            found = _any_of(self._format.markers).match(self._text)
            size = 0 if found is None else found.end()
            self._emit(self._gap + self._text[:size])
            self._text = self._text[size:]
        self._unmarked = self._listed = False
        self._to(self._reading)

    def _give_up(self) -> None:
        """Handle the end of the completion inside a call: the begun call is text, or an incomplete call."""
        if not self._constrained and self._step in (
                self._opening, self._reading, self._next, self._again, self._beginning, self._markerless,
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

    def _skip(self, at: int, words: str) -> int:
        """Return the index after these words, each of which may be missing."""
        for word in words.replace("```", "``` ").split():
            start = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]
            if self._text.startswith(word, start):
                at = start + len(word)
            elif not self._last and word.startswith(self._text[start:]):
                raise _NeedMoreText
        return at

    def _opening(self) -> bool:
        """Parse the text before the first call, and the start of the call."""
        format, text = self._format, self._text
        for opening in (format.section or format.open, *format.openings):
            try:
                at = self._expect(0, opening)
            except _Mismatch:
                continue
            tag = TAG.fullmatch(opening.strip())
            self._close = format.close if tag is None or not format.openings else f"</{tag[1]}>"
            if opening == format.section:
                at = self._skip(at, format.open)
            self._listed = text[:at].endswith("[")
            if format.body != "xml" and not self._listed:
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
                self._listed = text[at:at + 1] == "["
                at += self._listed
            return self._body(at)
        raise _Mismatch

    def _next(self) -> bool:
        """Parse another call, or the end of the calls."""
        format, text = self._format, self._text
        at = _SPACE.match(text).end()  # type: ignore[union-attr]
        if self._listed and text[at:at + 1] == "]":
            return self._to(self._ending, at + 1)
        if format.end and text.startswith(format.end, at):
            return self._to(self._ending, at)
        if format.end and format.end.startswith(text[at:]) and not self._last:
            raise _NeedMoreText
        if self._listed:
            return self._body(at if text.startswith("{", at) else self._expect(at, ","))
        return self._body(self._expect(at, format.open))

    def _ending(self) -> bool:
        at = self._skip(0, self._format.end or self._close)
        self._listed = False
        return self._to(self._reading, at)

    def _again(self) -> bool:
        """Parse another call between the same two markers."""
        return self._body(0)

    def _body(self, at: int) -> bool:
        """Parse a call after its marker. All of it stays in the buffer until it is certain to be a call."""
        format = self._format
        if format.markerless and self._text[at:].lstrip().startswith("<"):
            at = self._expect(at, _PYTHON_TAG)
        if format.body == "json" or format.body != "xml" and self._text[at:].lstrip().startswith("{"):
            at = self._expect(at, "{") - 1
            head = _HEAD.match(self._text, at) if self._constrained else None
            if head is not None:
                return self._add_streamed(head[1], None, head.end(), True)
            end = self._end(at)
            found = self._loads(at, end)
            inner = found.get("function")  # an object of OpenAI's API
            if isinstance(inner, dict) and "arguments" in inner:
                found = inner
            name, arguments = found.get("name", found.get("tool_name")), found.get("arguments", found.get("parameters"))
            return self._add_whole(name, None, arguments, end)
        name, id, at = self._named(at)
        if format.body == "xml":
            arguments, end = self._tagged(name, at)
            return self._add_whole(name, id, arguments, end)
        if format.body in ("python", "quoted"):
            parse, kind = (python_calls.parse, python_calls.ArgumentsExtent) if format.body == "python" else \
                (quoted_calls.parse, quoted_calls.QuotedExtent)  # type: Any, Any
            end = self._end(at, kind)
            try:
                return self._add_whole(name, id, parse(self._text[at:end]), end)
            except ValueError:
                raise _Mismatch from None
        at = self._expect(at, "{") - 1
        if self._constrained:
            return self._add_streamed(name, id, at)
        end = self._end(at)
        return self._add_whole(name, id, self._loads(at, end), end)

    def _named(self, at: int) -> tuple[str, str | None, int]:
        """Return the function's name, the call's id if there is one, and the index of the arguments."""
        format = self._format
        stop = {"xml": format.middle.strip() or "<", "python": "("}.get(format.body, "{")
        end = self._text.find(stop, at, at + _LONGEST)
        if end < 0:
            if len(self._text) >= at + _LONGEST:
                raise _Mismatch
            raise _NeedMoreText
        head = self._text[at:end].strip().removeprefix(format.namespace).removesuffix(format.middle.strip())
        found = (_NUMBERED if format.numbered else _PLAIN).fullmatch(head)
        if found is None:
            raise _Mismatch
        id = found["id"]
        inside = stop in (">", "(") or format.body == "quoted"
        return found["name"], f"functions.{id}" if format.numbered else id, end + inside

    def _end(self, at: int, kind: Callable[[int], JsonExtent | python_calls.ArgumentsExtent |
                                           quoted_calls.QuotedExtent] = JsonExtent) -> int:
        if self._extent is None:
            self._extent = kind(at)
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
        """Parse arguments in tags. Returns them and the index of the tag that ends the call. A value may contain any
        text, also the tag that ends it, unless another argument or the end of the call follows. Without a grammar, the
        start of another argument of the function ends it too."""
        schema = self._functions.get(name, {})
        properties = properties_of(schema)
        before, middle, after = self._format.tags
        ends, ending = tuple(self._close.split()), middle.split()[0].partition(">")[0] + ">"
        close = after if self._constrained else after.strip()
        found: dict[str, Any] = {}
        while True:
            at = _SPACE.match(self._text, at).end()  # type: ignore[union-attr]
            if self._text.startswith(ends, at):
                return found, at
            if any(word.startswith(self._text[at:at + _LONGEST]) for word in ends):
                raise _NeedMoreText
            at = self._expect(at, before)
            end = self._text.find(ending, at, at + _LONGEST)
            if end < 0:
                if len(self._text) < at + _LONGEST:
                    raise _NeedMoreText
                raise _Mismatch
            key, start = self._text[at:end].strip(), self._expect(end, middle.replace("><", "> <"))
            start += middle.endswith("\n") and self._text.startswith("\n", start)
            end = self._value_end(start, close, (before, *ends))
            value, at = self._text[start:end], end + len(close)
            if not self._constrained:
                for another in _start_of_argument(self._format).finditer(value):  # the model left out the tag after it
                    if another[1] != key and another[1] not in found and another[1] in schema.get("properties", ()):
                        value, at = value[:another.start()], start + another.start()
                        break
                value = value.removesuffix("\n" * after.startswith("\n"))
            found[key] = value_of(value, properties.schema(key), schema, _strict_json, self._constrained)

    def _value_end(self, start: int, close: str, follows: tuple[str, ...]) -> int:
        """Return the index of the tag that ends a value: one of ``follows`` is behind it. Scans a growing text once."""
        at = self._scanned if self._value == start else start
        while True:
            end = self._text.find(close, at)
            after = len(self._text) if end < 0 else \
                _SPACE.match(self._text, end + len(close)).end()  # type: ignore[union-attr]
            if end >= 0 and self._text.startswith(follows, after):
                return end
            if any(word.startswith(self._text[after:after + _LONGEST]) for word in follows):
                self._value, self._scanned = start, max(start, len(self._text) - len(close) + 1) if end < 0 else end
                raise _NeedMoreText
            at = end + 1

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

    def _add_streamed(self, name: str, id: str | None, at: int, in_object: bool = False) -> bool:
        """Add a call whose arguments are emitted while they are generated. ``in_object``: as part of a call object."""
        self._add(name, id, "")
        self._complete, self._in_object = False, in_object
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
        return self._to(self._brace if self._in_object else self._closing, end)

    def _brace(self) -> bool:
        """Parse the closing brace of a call object whose arguments were emitted."""
        return self._to(self._closing, self._expect(0, "}"))

    def _closing(self) -> bool:
        """Parse the end of a call, which the model may omit."""
        if self._unmarked or self._format.markerless:
            return self._to(self._next_unmarked)
        if self._listed:
            return self._to(self._next)
        at = self._skip(0, self._close)
        if self._format.section:
            return self._to(self._next, at)
        if not at and self._format.body == "json" and self._text.lstrip().startswith("{"):
            return self._to(self._again)
        return self._to(self._reading, at)


@functools.lru_cache(maxsize=16)
def _start_of_argument(format: ToolFormat) -> re.Pattern[str]:
    """Return a regular expression for the start of an argument in tags, after a value that no tag ends."""
    before, middle, after = format.tags
    start, end = map(re.escape, (before, middle.strip()))
    return re.compile("\n" * after.startswith("\n") + start + r"([^<>\n]{1,256})" + end)


@functools.lru_cache(maxsize=64)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a regular expression that finds the first of these texts; it finds nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)")


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


def _canonical(raw: str) -> str:
    """Return JSON text in a form that is equal for equal values, whatever their white space and order of keys."""
    try:
        return json.dumps(json.loads(raw), sort_keys=True)
    except (ValueError, RecursionError):
        return raw


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
