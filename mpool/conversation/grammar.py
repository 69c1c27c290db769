"""Constrained decoding: JSON, a JSON schema, a regular expression or a grammar (``response_format=``).

Before each token, llguidance computes a mask, one bit per token. The core samples only from allowed tokens, so the
completion matches for every model, seed and temperature. At most four threads per process compute masks, outside the
core: after each sampled token, a thread advances the matcher and passes the next mask to the core, which computes the
token's row meanwhile. A completion with a late mask waits alone.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import select
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..checks import refuse, shown
from ..errors import InternalError, InvalidArgument, LimitError, MpoolError, Unsupported
from ..tokenizers.specials import CALL_MARKS, SHOWN, compile_trie
from .running_text import RunningText
from .tool_grammar import BLANKS, Answer

if TYPE_CHECKING:
    import llguidance

    from .. import _core
    from ..tokenizers import Tokenizer
    from .tool_grammar import Grammar

#: Bounds of the caller's format; llguidance limits the compiled grammar itself.
MAX_CHARS, MAX_DEPTH = 65536, 64
_ALLOWED = ('{"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": {...}}}, {"type": "regex", '
            '"regex": "..."}, {"type": "grammar", "grammar": "..."}, a JSON schema, or a pydantic class')
#: Compiled formats kept per tokenizer; maximum number of threads that compute masks.
_KEPT, _THREADS = 32, 4
#: Token sets that llguidance checks as a whole: a set that the format allows entirely needs no check per token. These
#: sets for words follow llguidance's own for JSON strings; a token belongs to the first set that matches.
_WORDS = ("[a-z]{1,20}", "[A-Za-z ]{1,20}")


class Ending(Protocol):
    """The sampling options that decide when a completion ends."""

    @property
    def ignore_eos(self) -> bool:
        """Generate past the end-of-text token."""

    @property
    def min_tokens(self) -> int:
        """Tokens before which the completion cannot end."""


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """A compiled format that every completion of a request must match.

    Attributes:
        first: mask for the first token.
        matcher: at the beginning of an answer.
        is_json: the text can be parsed.
        model: the pydantic class that was given, if one was.
        running: creates the tracker of one completion that may be text; it tells where the previous mask is still
            valid.
        tokenizer: the tokenizer, held for the matcher, which keeps only a weak reference.
        param: name of the option that wants it.
    """

    first: bytes
    matcher: llguidance.LLMatcher
    is_json: bool
    model: Any
    running: Callable[[], RunningText] | None = None
    tokenizer: Tokenizer | None = None
    param: str = "response_format"
    _faults: dict[int, MpoolError] = field(default_factory=dict)  # by identity of the ticket, while it is held

    def follow(self, ticket: _core.Ticket, n: int, key: str) -> None:
        """Computes the masks of a request that was submitted with :attr:`first`."""
        matchers = [self.matcher.deep_copy() for _ in range(n)]
        running = [None if self.running is None else self.running() for _ in matchers]
        _follow(_Followed(ticket, self, matchers, key, running))

    def hold(self, ticket: _core.Ticket, reader: object) -> None:
        """Cancels the ticket once the reader, which its caller holds, is gone: the thread holds the ticket, too."""
        weakref.finalize(reader, _dropped, ticket, self._faults).atexit = False

    def fault(self, ticket: _core.Ticket) -> MpoolError | None:
        """Why the masks of a call ended, if they did before it."""
        return self._faults.get(id(ticket))

    def parse(self, text: str) -> Any:
        """Parses a complete completion; None if it is not JSON, or the pydantic class refuses it."""
        if not self.is_json:
            return None
        try:
            return json.loads(text) if self.model is None else self.model.model_validate_json(text)
        except ValueError:  # pydantic's is one
            return None


def _dropped(ticket: _core.Ticket, faults: dict[int, MpoolError]) -> None:
    ticket.cancel()
    faults.pop(id(ticket), None)


# ---- the caller's format --------------------------------------------------------------------------------------------

def prepare(wanted: Any, tokenizer: Tokenizer, sampling: Ending) -> Format | None:
    """Reads a ``response_format``; None for ``{"type": "text"}``.

    Raises:
        InvalidArgument: it is none, or is not well formed, or an option beside it keeps answers from ending.
        LimitError: it is too large or too deep.
        Unsupported: llguidance is not installed.
    """
    kind, source, model = _read(wanted)
    if kind == "text":
        return None
    _check_ends("a response_format", sampling)
    try:
        made = _made(tokenizer)
    except ImportError:
        raise Unsupported("response_format needs the package llguidance",
                          hint='pip install "mpool[grammar]" installs it') from None
    first, matcher = made.compiled(kind, source)
    return Format(first, matcher, kind == "schema", model, tokenizer=tokenizer)


def answer_of(wanted: Any) -> tuple[Answer | None, Any]:
    """A ``response_format`` beside tools, and the pydantic class; None for ``{"type": "text"}``.

    Raises:
        InvalidArgument, LimitError: as :func:`prepare`; it is a grammar, which cannot stand beside another.
    """
    kind, source, model = _read(wanted)
    if kind == "text":
        return None, None
    if kind == "schema" or kind == "regex":
        return Answer("schema" if kind == "schema" else "regex", source), model
    raise InvalidArgument("`response_format` must be JSON or a regex when tools are given, got a grammar",
                          param="response_format", got="a grammar", allowed="JSON or a regex",
                          hint='tool_choice="none" leaves the tools out')


def installed() -> bool:
    """llguidance, which computes masks, is installed."""
    return importlib.util.find_spec("llguidance") is not None


def of_calls(wanted: Grammar, tokenizer: Tokenizer, sampling: Ending, is_json: bool = False,
             model: Any = None) -> Format:
    """The format for completions with function calls, and with text before or instead of them
    (:mod:`mpool.conversation.tool_grammar`). ``is_json``, ``model``: of what is said instead, as of :class:`Format`.

    Raises:
        InvalidArgument: a schema cannot be used, or an option beside tools keeps answers from ending.
    """
    _check_ends("tools", sampling)
    made = _made(tokenizer)
    first, matcher = made.compiled("tools", wanted.lark)
    running = None
    if wanted.marks is not None:
        running = partial(RunningText, tuple(mark.encode() for mark in wanted.marks), wanted.leads,
                          made.tokens.__getitem__)
    return Format(first, matcher, is_json, model, running, tokenizer, "tools")


def _check_ends(what: str, sampling: Ending) -> None:
    for name, value in (("ignore_eos", sampling.ignore_eos), ("min_tokens", sampling.min_tokens)):
        if value:
            raise InvalidArgument(f"`{name}` cannot be set together with {what}: the format decides when a completion "
                                  "ends", param=name, got=shown(value), allowed="unset")


def check(wanted: Any) -> None:
    """Checks the shape and the bounds of a ``response_format``; :func:`prepare` checks the rest.

    Raises:
        InvalidArgument, LimitError: as :func:`prepare`.
    """
    _read(wanted)


def _refused(kind: str, why: str) -> InvalidArgument:
    subject = {"schema": "the JSON schema", "regex": "the regular expression", "grammar": "the grammar",
               "tools": "a schema"}[kind]
    param = "tools" if kind == "tools" else "response_format"
    return InvalidArgument(f"`{param}`: {subject} cannot be used: {' '.join(why.split())[:300]}", param=param)


def _read(wanted: Any) -> tuple[str, str, Any]:
    """``text``, ``schema``, ``regex`` or ``grammar``; its text, and the pydantic class."""
    if isinstance(wanted, type) and hasattr(wanted, "model_json_schema"):
        return "schema", _schema(wanted.model_json_schema()), wanted
    if not isinstance(wanted, Mapping):
        refuse("response_format", wanted, _ALLOWED)
    kind = wanted.get("type")
    if kind == "text" and len(wanted) == 1:
        return "text", "", None
    if kind == "json_object":
        return "schema", '{"type": "object"}', None
    if kind in ("regex", "grammar"):
        source = wanted.get(kind)
        if not isinstance(source, str) or not source:
            refuse(f"response_format.{kind}", source, "text")
        _bound(f"response_format.{kind}", len(source), _brackets(source))
        try:
            source.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(param=f"response_format.{kind}", got="half of a surrogate pair",
                                  allowed="Unicode text") from None
        return kind, source, None
    if kind == "json_schema":
        outer = wanted.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, Mapping) else wanted.get("schema")
        if not isinstance(schema, (Mapping, bool)):
            refuse("response_format.json_schema.schema", schema, "a JSON schema")
        return "schema", _schema(schema), None
    if not wanted or kind is not None and kind not in _TYPES and not isinstance(kind, (list, tuple)):
        refuse("response_format.type", kind, "one of those in " + _ALLOWED)
    return "schema", _schema(wanted), None


_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")


def _schema(schema: Any) -> str:
    _bound("the JSON schema", 0, _depth(schema))
    try:
        text = json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(param="response_format", got=f"a schema that is not JSON: {error}",
                              allowed="a JSON schema") from None
    _bound("the JSON schema", len(text), 0)
    return text


def _bound(what: str, chars: int, depth: int) -> None:
    if chars > MAX_CHARS:
        raise LimitError(f"{what} has {chars:,} characters, the limit is {MAX_CHARS:,}", param="response_format",
                         got=f"{chars:,} characters", allowed=f"at most {MAX_CHARS:,} characters")
    if depth > MAX_DEPTH:
        raise LimitError(f"{what} is nested more than {MAX_DEPTH} deep", param="response_format",
                         allowed=f"nested at most {MAX_DEPTH} deep")


def _depth(value: Any) -> int:
    """Nesting depth, counted up to one above the limit, also for self-containing values."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        level = [inner for outer in level if isinstance(outer, (Mapping, list, tuple))
                 for inner in (outer.values() if isinstance(outer, Mapping) else outer)]
        if len(level) > MAX_CHARS:
            raise LimitError(f"the JSON schema has more than {MAX_CHARS:,} parts", param="response_format",
                             allowed=f"at most {MAX_CHARS:,} parts")
        depth += 1
    return depth


def _brackets(text: str) -> int:
    depth = most = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        most = max(most, depth)
    return most


# ---- the tokenizer, as llguidance knows it ---------------------------------------------------------------------------

class _Tokens:
    """The tokenizer interface of llguidance."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        table = tokenizer.token_table()
        data, offsets = bytes(table.data), [int(offset) for offset in table.offsets]
        control = bytes(table.control)
        self.tokens = [data[offsets[i]:offsets[i + 1]] for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, is_control in enumerate(control) if is_control]
        for i in {*self.special_token_ids, *tokenizer.eog_ids}:
            self.tokens[i] = b"<|%d|>" % i  # any name: none of them is text
        self.special_token_ids = sorted({*self.special_token_ids, *tokenizer.eog_ids})
        self.eos_token_id, self.bos_token_id = tokenizer.eog_ids[0], None
        self._tokenizer = weakref.proxy(tokenizer)  # llguidance holds this where no collector of cycles sees it
        found = ((word, tokenizer.token_id(word)) for word in (*CALL_MARKS, *SHOWN))
        self._marks = {word: token for word, token in found
                       if token is not None and self.tokens[token] == word.encode()}
        self._mark = compile_trie(self._marks, group=True)

    def __call__(self, text: bytes) -> list[int]:
        """Tokens of a text that a format wants, as models write it: marks are one token, also those of control."""
        ids: list[int] = []
        for part in self._mark.split(text.decode(errors="replace")):
            if part in self._marks:
                ids.append(self._marks[part])
            elif part:
                ids += map(int, self._tokenizer.encode(part, add_special=False))
        return ids


class _Made:
    """llguidance's tokenizer, built once per tokenizer in 0.2 s, and the formats compiled last with it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        import llguidance

        if not tokenizer.eog_ids:
            raise InvalidArgument("`response_format` needs a model that can end a completion; this model's tokenizer "
                                  "names no end-of-text token", param="response_format")
        blanks, *others = llguidance.LLTokenizer.general_slices()
        tokens = _Tokens(tokenizer)
        self.tokens = tokens.tokens
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(tokens), n_vocab=tokenizer.vocab_size,
            eos_token=list(tokenizer.eog_ids), slices=[blanks, *_WORDS, *others])
        self._formats: OrderedDict[tuple[str, str], tuple[bytes, llguidance.LLMatcher]] = OrderedDict()

    def compiled(self, kind: str, source: str) -> tuple[bytes, llguidance.LLMatcher]:
        """Mask of the first token, and a matcher at the start of a completion, which is only copied.

        Raises:
            InvalidArgument: llguidance cannot use it.
        """
        with _lock:
            found = self._formats.get((kind, source))
            if found is not None:
                self._formats.move_to_end((kind, source))
                return found
        found = self._compile(kind, source)
        with _lock:
            self._formats[kind, source] = found
            while len(self._formats) > _KEPT:
                self._formats.popitem(last=False)
        return found

    def _compile(self, kind: str, source: str) -> tuple[bytes, llguidance.LLMatcher]:
        import llguidance

        make = llguidance.LLMatcher
        try:
            if kind == "regex":
                grammar = make.grammar_from_regex(source)
            elif kind in ("grammar", "tools"):
                grammar = make.grammar_from_lark(source)
            else:
                grammar = make.grammar_from_json_schema(source, overrides={"whitespace_pattern": BLANKS})
        except ValueError as error:
            raise _refused(kind, str(error)) from None
        limits = llguidance.LLParserLimits(verbose_errors=False)  # they would carry the schema and the text into logs
        matcher = make(self._tokenizer, grammar, log_level=0, limits=limits)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(kind, matcher.get_error())
        return first, matcher


_lock, _making = threading.Lock(), threading.Lock()
_tokenizers: weakref.WeakKeyDictionary[Tokenizer, _Made] = weakref.WeakKeyDictionary()


def _made(tokenizer: Tokenizer) -> _Made:
    """Made once for each."""
    import llguidance  # noqa: F401

    with _making:
        made = _tokenizers.get(tokenizer)
        if made is None:
            made = _tokenizers[tokenizer] = _Made(tokenizer)
        return made


# ---- masks ----------------------------------------------------------------------------------------------------------

class _Followed:
    """A request whose masks a thread computes. Only that thread uses it after construction."""

    def __init__(self, ticket: _core.Ticket, form: Format, matchers: list[llguidance.LLMatcher], key: str,
                 running: list[RunningText | None] | None = None) -> None:
        self.ticket, self._form, self._matchers, self._key = ticket, form, matchers, key
        self._counts, self._ended = [0] * len(matchers), [False] * len(matchers)
        self._running = running or [None] * len(matchers)

    def advance(self) -> bool:
        """Computes masks for the tokens sampled since the last time. False: the request needs no more masks."""
        try:
            for choice, ended in enumerate(self._ended):
                if not ended:
                    self._advance(choice)
        except Exception as error:
            fault = error if isinstance(error, MpoolError) else InternalError(f"a mask could not be made: {error!r}")
            fault.key = self._key
            self._form._faults[id(self.ticket)] = fault
            self.ticket.cancel()
            return False
        return not (all(self._ended) or self.ticket.done())

    def _advance(self, choice: int) -> None:
        ids, self._ended[choice] = self.ticket.sampled_ids(choice, self._counts[choice])
        if not ids or self._ended[choice]:
            return
        matcher, running = self._matchers[choice], self._running[choice]
        known = None if running is None else running.known(ids)
        mask = b"" if not matcher.consume_tokens(ids) else known or matcher.compute_bitmask()
        if running is not None and known is None:
            running.keep(mask)
        if matcher.is_error():  # by its limits: every sampled token was allowed
            raise LimitError(f"{self._form.param} became too complex at token {self._counts[choice]}: "
                             f"{' '.join(matcher.get_error().split())[:200]}")
        self._counts[choice] += len(ids)
        self.ticket.mask(choice, self._counts[choice], mask)


class _Filler:
    """A thread that computes masks. It sleeps until one of its requests has sampled a token, then serves the requests
    in turn, one mask per completion.

    Attributes:
        calls: that it follows, by number.
    """

    def __init__(self) -> None:
        from .. import _core

        self._notifier = _core.Notifier()
        self._numbers = itertools.count(1)
        self.calls: dict[int, _Followed] = {}
        threading.Thread(target=self._run, name="mpool-masks", daemon=True).start()

    def follow(self, call: _Followed) -> None:
        """Serves a request from now until it ends, including tokens sampled before."""
        number = next(self._numbers)
        self.calls[number] = call
        call.ticket.bind(self._notifier, number)

    def busy(self) -> int:
        """Number of unfinished requests. It may count finished ones whose notification is still due."""
        return sum(not call.ticket.done() for call in list(self.calls.values()))

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._notifier.fileno(), select.POLLIN)
        while True:
            poll.poll()
            for number in self._notifier.take():
                call = self.calls.get(number)
                if call is not None and not call.advance():
                    self.calls.pop(number, None)
                del call  # or it would live until the next one moves


_fillers: list[_Filler] = []


def _follow(call: _Followed) -> None:
    """Assigns a request to the thread with the fewest requests: a costly one then delays only those beside it. Starts
    another thread if all are busy, up to the number of compute threads."""
    from .. import _core

    with _lock:
        found = min(_fillers, key=_Filler.busy, default=None)
        if found is None or found.busy() and len(_fillers) < min(_THREADS, _core.config()["compute_threads"]):
            found = _Filler()
            _fillers.append(found)
        found.follow(call)


def _after_fork_in_child() -> None:
    global _lock, _making
    _lock, _making = threading.Lock(), threading.Lock()
    _fillers.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["Format", "check", "prepare"]
