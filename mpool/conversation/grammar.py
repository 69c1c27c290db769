"""Constrained decoding: JSON, a JSON schema, a regular expression or a grammar (``response_format=``).

llguidance computes a mask before each token, one bit per token of the vocabulary. The core samples only allowed tokens,
so the completion matches the format for every model, seed and temperature. At most four Python threads per process
compute masks, outside the core. After each sampled token, such a thread advances the matcher and passes the next mask
to the core; meanwhile the core computes the logits that the mask applies to. If a mask is late, only the completion
that needs it waits.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import select
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .. import _core, tenants
from ..checks import shown
from ..errors import InternalError, InvalidArgument, LimitError, MpoolError, Overloaded, Unsupported
from ..host import native_calls
from ..host.address_space import require_if_limited
from ..host.resources import error_of, install_hint, of_caller, start_thread
from ..stores import STORES
from ..tokenizers.specials import CALL_MARKS, SHOWN, compile_trie
from . import enforced_schemas, gbnf, grammar_trial, reasoning_grammar, refusals, response_formats
from .reasoning import ThinkSplitter
from .response_formats import check, check_nesting
from .running_text import MaskReuse, ReasoningReuse
from .tool_grammar import BLANKS, ResponseFormat

if TYPE_CHECKING:
    import llguidance

    from .. import _core
    from ..tokenizers import Tokenizer
    from .reasoning import Splitter
    from .tool_grammar import Grammar

#: The option that sets each kind of format, and what error messages call it.
_KINDS = {"schema": ("response_format", "the JSON schema"), "regex": ("response_format", "the regular expression"),
          "grammar": ("response_format", "the grammar"), "tools": ("tools", "a schema")}
#: Number and bytes of compiled formats cached per tokenizer; maximum number of threads that compute masks.
_CACHED_FORMATS, _CACHED_BYTES, _MAX_THREADS = STORES["formats"].entries or 0, STORES["formats"].bytes or 0, 4
#: Address space that must be free for llguidance, and for each token of the vocabulary when its tables are built.
_SPACE, _SPACE_PER_TOKEN = 96 << 20, 400
#: Seconds that the masks after one token may take before their thread is replaced. They usually take 1 to 50 ms.
_STUCK_SECONDS = 5.0
#: CPU seconds that all masks of a request may take: a constant, and more for each sampled token.
_MASK_SECONDS, _MASK_SECONDS_PER_TOKEN = 5.0, 0.1
#: Seconds that a mask thread waits after an exception of its own, such as MemoryError.
_PAUSE = 0.01
#: Token sets that llguidance checks as a whole: if the format allows an entire set, its tokens need no separate check.
#: These sets for words come after llguidance's own sets for JSON strings; a token belongs to the first set that matches
#: it.
_WORDS = ("[a-z]{1,20}", "[A-Za-z ]{1,20}")


class EndOptions(Protocol):
    """Sampling options that decide when a completion ends."""

    @property
    def ignore_eos(self) -> bool:
        """Generate past the end-of-text token."""

    @property
    def min_tokens(self) -> int:
        """Minimum number of tokens before the completion may end."""


class EndCheck(Protocol):
    """Ends completions early. A mask thread calls it for each new token."""

    mask: bytes
    """Mask that allows only the tokens that end a completion."""

    def ends(self, ticket: _core.Ticket, choice: int) -> bool:
        """Return True if the completion with this index must end now."""


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """A compiled format that every completion of a request must match.

    Attributes:
        first: mask of the first token.
        matcher: matcher at the start of a completion; it is copied and never advanced.
        is_json: True if :meth:`parse` can parse the text.
        model: the caller's pydantic class, or None.
        mask_reuse: creates the :class:`MaskReuse` of one completion; None if every mask must be computed.
        tokenizer: the tokenizer. This reference keeps it alive, since the matcher keeps only a weak one.
        param: the option that set the format, for error messages.
        failure: the last error of the tokenizer that the matcher calls; None: its errors are not recorded.
        newline: the text may begin with a newline.
        left_out: parts of the caller's schemas that do not constrain completions, because a grammar cannot enforce
            them, such as ``response_format.properties.age.minimum``.
    """

    first: bytes
    matcher: llguidance.LLMatcher
    is_json: bool
    model: Any
    mask_reuse: Callable[[], MaskReuse] | None = None
    tokenizer: Tokenizer | None = None
    param: str = "response_format"
    failure: _Failure | None = None
    newline: bool = False
    left_out: tuple[str, ...] = ()
    _errors: dict[int, MpoolError] = field(default_factory=dict)  # key: id() of a ticket that is still referenced

    def compute_masks(self, ticket: _core.Ticket, n: int, key: str, end: EndCheck | None = None) -> None:
        """Starts computing the masks of a request that was submitted with :attr:`first`.

        Args:
            ticket: the request's ticket.
            n: number of completions.
            key: the model's key, for error messages.
            end: decides whether a completion must end; None: it ends where the format allows it.
        """
        matchers = [self.matcher.deep_copy() for _ in range(n)]
        reuse = [None if self.mask_reuse is None else self.mask_reuse() for _ in matchers]
        _assign(_MaskedRequest(ticket, self, matchers, key, reuse, end))

    def cancel_with(self, ticket: _core.Ticket, reader: object) -> None:
        """Cancels the ticket when ``reader`` is garbage-collected.

        The mask thread also references the ticket, so dropping the reader alone would not cancel it.
        """
        weakref.finalize(reader, _cancel, ticket, self._errors).atexit = False

    def error(self, ticket: _core.Ticket) -> MpoolError | None:
        """Return the error that stopped the computation of a request's masks, if there was one."""
        return self._errors.get(id(ticket))

    def parse(self, text: str) -> Any:
        """Parse a complete completion. Returns None if the text is not JSON or the pydantic class rejects it."""
        if not self.is_json:
            return None
        try:
            with of_caller():
                return json.loads(text) if self.model is None else self.model.model_validate_json(text)
        except ValueError:  # pydantic.ValidationError is a subclass
            return None


def _cancel(ticket: _core.Ticket, errors: dict[int, MpoolError]) -> None:
    ticket.cancel()
    errors.pop(id(ticket), None)


# ---- the caller's format --------------------------------------------------------------------------------------------

def prepare(response_format: Any, tokenizer: Tokenizer, sampling: EndOptions,
            splitter: type[Splitter] | None = None) -> Format | None:
    """Compile a ``response_format``; None for ``{"type": "text"}``.

    Args:
        response_format: the caller's value.
        tokenizer: the model's tokenizer.
        sampling: the sampling options of the request.
        splitter: class that splits reasoning, which is free, and the response; None: completions have no reasoning.

    Raises:
        InvalidArgument: the value is not a format, is malformed, or ``sampling`` keeps completions from ending.
        LimitError: the format is too large, nested too deeply, or too complex to compile.
        Unsupported: llguidance is not installed.
    """
    kind, source, model, left_out = _enforceable(*response_formats.read(response_format))
    if kind == "text":
        return None
    check_ends("a format", sampling.ignore_eos, sampling.min_tokens)
    try:
        compiler, compiled = _compiled(tokenizer, kind, source, splitter)
    except ModuleNotFoundError:
        raise _not_installed() from None
    reuse = None
    if splitter is not None and issubclass(splitter, ThinkSplitter):
        reuse = partial(ReasoningReuse, b"" if splitter.inside else splitter.open.encode(), splitter.close.encode(),
                        compiler.tokens.__getitem__)
    return Format(compiled.first, compiled.matcher, kind == "schema", model, reuse, tokenizer,
                  failure=compiler.failure, newline=compiled.newline, left_out=_named(left_out))


def check_whole(response_format: Any, given: Mapping[str, Any], with_tools: bool) -> None:
    """Check a ``response_format`` as :func:`prepare` does, but without a model: its tokens are unknown.

    Args:
        response_format: the caller's value.
        given: sampling options that the caller has set.
        with_tools: True if the request also has tools; see :func:`completion_format`.

    Raises:
        InvalidArgument, LimitError, Unsupported: as :func:`prepare` and :func:`completion_format`.
        Timeout, Overloaded, SpawnFailed: see :meth:`mpool.host.native_calls.ThreadGroup.run` and
            :func:`mpool.conversation.grammar_trial.fault`.
    """
    if with_tools:
        completion_format(response_format)
    kind, source, _, _ = _enforceable(*response_formats.read(response_format))
    if kind == "text":
        return
    check_ends("a format", given.get("ignore_eos"), given.get("min_tokens"))
    if not installed():
        raise _not_installed()
    native_calls.GRAMMARS.run(_check_compiles, kind, source)


def _check_compiles(kind: str, source: str) -> None:
    try:
        made = _grammar_of(kind, source, _AnyToken())
        found = grammar_trial.fault(made, with_bytes=kind != "grammar" or "<[" not in made)
    except ValueError as error:
        raise _unusable(kind, str(error)) from None
    except grammar_trial.Refused as error:
        raise _too_large(kind, str(error)) from None
    if found is not None:
        raise _unusable(kind, found)


def _not_installed() -> Unsupported:
    return Unsupported("`response_format` needs the package llguidance", param="response_format",
                       hint=install_hint("grammar"))


def _named(left_out: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"response_format.{path}" if path else "response_format" for path in left_out)


def completion_format(response_format: Any) -> tuple[ResponseFormat | None, Any, tuple[str, ...]]:
    """Read a ``response_format`` that is given together with tools.

    Returns:
        The format of completions without function calls (None for ``{"type": "text"}``), the pydantic class or None,
        and what was left out (:attr:`Format.left_out`).

    Raises:
        InvalidArgument, LimitError: as :func:`prepare`; also for a grammar, which cannot be combined with tools.
    """
    kind, source, model, left_out = _enforceable(*response_formats.read(response_format))
    if kind == "text":
        return None, None, ()
    if kind == "schema" or kind == "regex":
        return ResponseFormat("schema" if kind == "schema" else "regex", source), model, _named(left_out)
    raise InvalidArgument("`response_format` must be JSON or a regex when tools are given, got a grammar",
                          param="response_format", got="a grammar", allowed="JSON or a regex",
                          hint='Set tool_choice="none" to leave out the tools')


def installed() -> bool:
    """Return True if llguidance, which computes the masks, is installed."""
    return importlib.util.find_spec("llguidance") is not None


def tool_call_format(grammar: Grammar, tokenizer: Tokenizer, sampling: EndOptions, is_json: bool = False,
                     model: Any = None) -> Format:
    """Compile the grammar of completions with function calls (:mod:`mpool.conversation.tool_grammar`).

    Args:
        grammar: the grammar.
        tokenizer: the model's tokenizer.
        sampling: the sampling options of the request.
        is_json: True if completions without calls are JSON.
        model: the pydantic class of completions without calls, or None.

    Raises:
        InvalidArgument: a schema cannot be used, or ``sampling`` keeps completions from ending.
    """
    check_ends("tools", sampling.ignore_eos, sampling.min_tokens)
    compiler, compiled = _compiled(tokenizer, "tools", grammar.lark)
    reuse = None
    if grammar.markers is not None:
        reuse = partial(MaskReuse, tuple(marker.encode() for marker in grammar.markers), grammar.prefixes,
                        compiler.tokens.__getitem__, grammar.call_markers)
    return Format(compiled.first, compiled.matcher, is_json, model, reuse, tokenizer, "tools", compiler.failure)


def check_ends(what: str, ignore_eos: Any, min_tokens: Any) -> None:
    """Check that neither sampling option keeps completions from ending. ``what``: what decides when they end.

    Raises:
        InvalidArgument: one does.
    """
    for name, value in (("ignore_eos", ignore_eos), ("min_tokens", min_tokens)):
        if value:
            raise InvalidArgument(f"`{name}` cannot be set together with {what}: the format decides when a completion "
                                  "ends", param=name, got=shown(value), allowed="unset")


def _unusable(kind: str, why: str) -> InvalidArgument:
    """Return the error of a format."""
    param, subject = _KINDS[kind]
    if "NoExtensionBias" in why:  # llguidance's name of its state for a grammar without a finite text
        why = ("a rule refers to itself without an end" if kind == "grammar" else
               "no text matches it" if kind == "regex" else
               "a reference ($ref, $anchor, $id) refers to itself without an end")
    hint = ("Set strict to False in json_schema to leave out keywords that a grammar cannot enforce"
            if kind == "schema" else None)
    return InvalidArgument(f"`{param}`: {subject} cannot be used: {refusals.reason(why, kind)[:300]}", param=param,
                           hint=hint)


def _too_large(kind: str, why: str) -> LimitError:
    param, subject = _KINDS[kind]
    return LimitError(f"`{param}`: {subject} is too complex: {why}", param=param,
                      hint="Use fewer optional, repeated and nested parts")


def _enforceable(kind: str, source: str, model: Any) -> tuple[str, str, Any, tuple[str, ...]]:
    """Turn a schema into one that a grammar enforces, with options for llguidance. A lenient one loses the keywords
    that a grammar cannot enforce: their paths are the last element of the result."""
    if kind not in ("schema", "lenient"):
        return kind, source, model, ()
    schema: Any = json.loads(source)
    left_out: tuple[str, ...] = ()
    if installed():
        try:
            schema, left_out = enforced_schemas.enforce(source, kind == "lenient")
        except ValueError as error:
            raise _unusable("schema", str(error)) from None
        except grammar_trial.Refused as error:
            raise _too_large("schema", str(error)) from None
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": BLANKS,
                                           "json_allowed_escapes": enforced_schemas.ESCAPES}}
    return "schema", json.dumps(schema), model, left_out


# ---- the tokenizer as llguidance sees it -----------------------------------------------------------------------------

class _Failure(threading.local):
    """The error that a call of the adapter raised last, by thread: llguidance reports it as a panic."""

    error: Exception | None = None


class _TokenizerAdapter:
    """Implements the tokenizer interface of llguidance."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.failure = _Failure()
        table = tokenizer.token_table()
        data, offsets = bytes(table.data), [int(offset) for offset in table.offsets]
        control = bytes(table.control)
        self.tokens = [data[offsets[i]:offsets[i + 1]] for i in range(tokenizer.vocab_size)]
        self.special_token_ids = [i for i, is_control in enumerate(control) if is_control]
        for i in {*self.special_token_ids, *tokenizer.eog_ids}:
            self.tokens[i] = b"<|%d|>" % i  # a unique name: these tokens add no text to a completion
        self.special_token_ids = sorted({*self.special_token_ids, *tokenizer.eog_ids})
        self.eos_token_id, self.bos_token_id, self.end_ids = tokenizer.eog_ids[0], None, list(tokenizer.eog_ids)
        # a weak reference: the garbage collector cannot see the reference that llguidance holds to this object
        self._tokenizer = weakref.proxy(tokenizer)
        found = ((word, tokenizer.token_id(word)) for word in (*CALL_MARKS, *SHOWN))
        self._marks = {word: token for word, token in found
                       if token is not None and self.tokens[token] == word.encode()}
        self._mark = compile_trie(self._marks, group=True)

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the token ids of a grammar's literal, as models write it: each marker is one token, control or not."""
        try:
            # llguidance passes bytes; if its first call fails, it passes str in all later calls
            return self._encode(text if isinstance(text, str) else text.decode(errors="replace"))
        except Exception as error:
            self.failure.error = error
            raise

    def token_of(self, text: str) -> int | None:
        """Return the id of the token that a text is, control token or not; None: it is none, or several."""
        found = self._tokenizer.token_id(text)
        if found is None:
            ids = self._tokenizer.encode(text, add_special=False, parse_special=True)
            found = int(ids[0]) if len(ids) == 1 else None
        return found

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._mark.split(text):
            if part in self._marks:
                ids.append(self._marks[part])
            elif part:
                ids += map(int, self._tokenizer.encode(part, add_special=False))
        return ids


class _Compiled(NamedTuple):
    """A compiled format.

    Attributes:
        first: mask of the first token.
        matcher: matcher at the start of a completion. It must be copied before it is advanced.
        memory: bytes that the matcher needs.
        newline: the text may begin with a newline; with reasoning, the text behind it.
    """

    first: bytes
    matcher: llguidance.LLMatcher
    memory: int
    newline: bool


class _Compiler:
    """Compiles formats for one tokenizer.

    Building llguidance's tokenizer takes 0.2 s, so there is one compiler per tokenizer. The last formats are cached,
    each for the tenant that has sent it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        require_if_limited(_SPACE + _SPACE_PER_TOKEN * tokenizer.vocab_size, "llguidance")
        import llguidance

        if not tokenizer.eog_ids:
            raise InvalidArgument("`response_format` requires a tokenizer with an end-of-text token; this model's has "
                                  "none", param="response_format")
        grammar_trial.start()  # while this process builds the tokenizer
        blanks, *others = llguidance.LLTokenizer.general_slices()
        adapter = _TokenizerAdapter(tokenizer)
        self.tokens, self.failure, self._adapter = adapter.tokens, adapter.failure, adapter
        self._newlines = [token for token, data in enumerate(self.tokens) if data[:1] == b"\n"]
        eos, slices = list(tokenizer.eog_ids), [blanks, *_WORDS, *others]
        self._trial = grammar_trial.Trial(adapter.tokens, adapter.special_token_ids, eos, slices)
        self._tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(adapter), n_vocab=tokenizer.vocab_size,
                                                 eos_token=eos, slices=slices)
        self._formats: tenants.TenantCache[tuple[str, str, type[Splitter] | None], _Compiled] = tenants.TenantCache()

    def cached(self, kind: str, source: str, splitter: type[Splitter] | None = None) -> _Compiled | None:
        """Return what :meth:`compiled` returned for this format recently, or None."""
        with _lock:
            found = self._formats.get((kind, source, splitter))
            if found is not None:
                self._formats.move_to_end((kind, source, splitter))
            return found

    def compiled(self, kind: str, source: str, splitter: type[Splitter] | None = None) -> _Compiled:
        """Compile a format, or return the result of an earlier call. With a ``splitter``, reasoning may precede it.

        Raises:
            InvalidArgument: llguidance cannot compile the format.
            LimitError: compiling it needs too much time or memory.
            SpawnFailed: no process could be started for the trial.
        """
        found = self.cached(kind, source, splitter)
        if found is not None:
            return found
        # alone first: only a first mask shows a response without a finite text, and whether it may begin with a newline
        alone = None if splitter is None else self.compiled(kind, source)
        found = self._compile(kind, source, splitter, alone is not None and alone.newline)
        with _lock:
            self._formats[kind, source, splitter] = found
            while len(self._formats) > _CACHED_FORMATS or len(self._formats) > 1 and sum(
                    one.memory for one in self._formats.values()) > _CACHED_BYTES:
                self._formats.popitem(last=False)
        return found

    def _compile(self, kind: str, source: str, splitter: type[Splitter] | None, newline: bool) -> _Compiled:
        import llguidance

        try:
            grammar = _grammar_of(kind, source, self._adapter)
            if splitter is not None:
                grammar = reasoning_grammar.build_grammar(grammar, source if kind == "regex" else None, splitter,
                                                          newline)
            needed = self._trial.compile(grammar)
        except ValueError as error:
            raise _unusable(kind, str(error)) from None
        except grammar_trial.Refused as error:
            raise _too_large(kind, str(error)) from None
        self.failure.error = None
        # verbose errors would put the schema and the completion into logs
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        first = b"" if matcher.is_error() else matcher.compute_bitmask()
        if self.failure.error is not None:  # the tokenizer failed: the format may be valid
            raise self.failure.error
        if matcher.is_error():
            raise _unusable(kind, matcher.get_error())
        if splitter is None:
            newline = any(first[token // 8] >> token % 8 & 1 for token in self._newlines)
        return _Compiled(first, matcher, needed, newline)


class _Vocabulary(Protocol):
    """The tokens that a grammar can refer to."""

    @property
    def tokens(self) -> Sequence[Any]:
        """Bytes of each token."""

    @property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end a completion."""

    def token_of(self, text: str) -> int | None:
        """Return the id of the token that a text is; None: it is none, or several."""


class _AnyToken:
    """The vocabulary of an unknown model: every text may be a token."""

    tokens, end_ids = range(1 << 31), list[int]()

    def token_of(self, text: str) -> int | None:
        return 0


#: The first rule of llama.cpp's grammar language, GBNF.
_GBNF = re.compile(r"^[ \t]*root\s*::=", re.MULTILINE)
#: In Lark's language: comments, texts and regular expressions, and the name of a token, such as ``<think>``.
_LARK_TOKEN = re.compile(r'//[^\n]*|#[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|<([^\s<>\[\]]+)>')


def _grammar_of(kind: str, source: str, tokens: _Vocabulary) -> str:
    """Return a format as a grammar of llguidance.

    Raises:
        ValueError: the format is not valid.
    """
    from llguidance import LLMatcher

    if kind == "regex":
        return str(LLMatcher.grammar_from_regex(source))
    if kind in ("grammar", "tools"):
        return str(LLMatcher.grammar_from_lark(_lark(source, tokens) if kind == "grammar" else source))
    return str(LLMatcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": BLANKS}))


def _lark(source: str, tokens: _Vocabulary) -> str:
    """Return a grammar in Lark's language, with ids in place of the names of tokens. It may be in GBNF.

    Raises:
        ValueError: it is not valid GBNF, or names a token that the model does not have.
    """
    if _GBNF.search(source) is None:
        return _LARK_TOKEN.sub(lambda found: found[0] if found[1] is None else _id_of(found[0], tokens), source)
    try:
        return gbnf.to_lark(source, tokens.token_of, len(tokens.tokens), tokens.end_ids)
    except ValueError as error:
        raise ValueError(f"it is not valid GBNF: {error}") from None


def _id_of(name: str, tokens: _Vocabulary) -> str:
    token = tokens.token_of(name)
    if token is None:
        raise ValueError(f"{name} is not a single token of this model")
    return f"<[{token}]>"


_lock = threading.Lock()
_compilers: weakref.WeakKeyDictionary[Tokenizer, _Compiler] = weakref.WeakKeyDictionary()


def _compiled(tokenizer: Tokenizer, kind: str, source: str,
              splitter: type[Splitter] | None = None) -> tuple[_Compiler, _Compiled]:
    """Return the compiler of a tokenizer, and its result for a format. Both are created on a thread for native calls
    if they are not cached.

    Raises:
        ImportError: llguidance is not installed.
        InvalidArgument, LimitError, SpawnFailed: see :meth:`_Compiler.compiled`.
        Timeout, Overloaded: see :meth:`mpool.host.native_calls.ThreadGroup.run`.
    """
    require_if_limited(_SPACE, "llguidance")
    import llguidance  # noqa: F401

    with _lock:
        compiler = _compilers.get(tokenizer)
    found = None if compiler is None else compiler.cached(kind, source, splitter)
    if compiler is None or found is None:
        compiler, found = native_calls.GRAMMARS.run(_compile, tokenizer, kind, source, splitter)
    return compiler, found


def _compile(tokenizer: Tokenizer, kind: str, source: str,
             splitter: type[Splitter] | None) -> tuple[_Compiler, _Compiled]:
    compiler = _compiler(tokenizer)
    return compiler, compiler.compiled(kind, source, splitter)


def _compiler(tokenizer: Tokenizer) -> _Compiler:
    """Return the compiler of a tokenizer, created on first use."""
    with _lock:
        found = _compilers.get(tokenizer)
    if found is None:
        made = _Compiler(tokenizer)  # without the lock, so that a slow tokenizer delays only its own requests
        with _lock:
            found = _compilers.setdefault(tokenizer, made)
    return found


# ---- masks ----------------------------------------------------------------------------------------------------------

class _MaskedRequest:
    """A request whose masks a thread computes. Only that thread uses it after construction."""

    def __init__(self, ticket: _core.Ticket, format: Format, matchers: list[llguidance.LLMatcher], key: str,
                 reuse: list[MaskReuse | None] | None = None, end: EndCheck | None = None) -> None:
        self.ticket, self._format, self._matchers, self._key = ticket, format, matchers, key
        self._counts, self._ended = [0] * len(matchers), [False] * len(matchers)
        self._reuse, self._end = reuse or [None] * len(matchers), end
        self._seconds = 0.0  # CPU time of the masks so far

    def advance(self) -> bool:
        """Compute masks for the tokens sampled since the last call. Returns False if the request needs no more."""
        try:
            for choice, ended in enumerate(self._ended):
                if not ended:
                    self._advance(choice)
        except Exception as error:
            try:
                failure = error if isinstance(error, MpoolError) else error_of(error) or \
                    InternalError(f"the token mask could not be computed: {error!r}")
                failure.key = self._key
                self._format._errors[id(self.ticket)] = failure
            finally:  # without memory for the error, the request still ends
                self.ticket.cancel()
            return False
        return not (all(self._ended) or self.ticket.done())

    def _advance(self, choice: int) -> None:
        ids, self._ended[choice] = self.ticket.sampled_ids(choice, self._counts[choice])
        if not ids or self._ended[choice]:
            return
        matcher, reuse, failure = self._matchers[choice], self._reuse[choice], self._format.failure
        if failure is not None:
            failure.error = None
        known = None if reuse is None else reuse.lookup(ids)
        begun = time.thread_time()
        mask = b"" if not matcher.consume_tokens(ids) else known or matcher.compute_bitmask()
        self._seconds += time.thread_time() - begun
        if failure is not None and failure.error is not None:  # the tokenizer failed, and therefore the matcher
            raise failure.error
        if matcher.is_error():  # a limit of llguidance was exceeded: the mask allowed every sampled token
            raise LimitError(f"`{self._format.param}`: the grammar became too complex at token {self._counts[choice]}: "
                             f"{' '.join(matcher.get_error().split())[:200]}", param=self._format.param,
                             hint="Use fewer optional, repeated and nested parts")
        if reuse is not None and known is None:
            reuse.store(mask)
        if self._end is not None and self._end.ends(self.ticket, choice):
            mask = self._end.mask
        self._counts[choice] += len(ids)
        tokens = sum(self._counts)
        if self._seconds > _MASK_SECONDS + _MASK_SECONDS_PER_TOKEN * tokens:
            got = f"{self._seconds:.1f} s of CPU time for {tokens} tokens"
            allowed = f"{_MASK_SECONDS:g} s and {_MASK_SECONDS_PER_TOKEN:g} s per token"
            raise LimitError(f"`{self._format.param}`: the token masks of this format are too slow: {got}, the limit "
                             f"is {allowed}", param=self._format.param, got=got, allowed=allowed,
                             hint="Use a format that is less ambiguous")
        self.ticket.mask(choice, self._counts[choice], mask)


class _MaskThread:
    """A thread that computes masks. It sleeps until one of its requests has sampled a token, then serves its requests
    round-robin, one mask per completion.

    Attributes:
        requests: the requests assigned to this thread, by number.
    """

    def __init__(self) -> None:
        self._notifier = _core.Notifier()
        self._numbers = itertools.count(1)
        self.requests: dict[int, _MaskedRequest] = {}
        self._current: tuple[int, float] | None = None  # number of the request whose masks are computed, and since when
        self._poll = select.poll()  # here, and not on the thread: a failure there would end it
        self._poll.register(self._notifier.fileno(), select.POLLIN)
        start_thread(self._run, "mpool-masks")

    def serve(self, request: _MaskedRequest) -> None:
        """Serves a request until it ends. Tokens sampled before this call are served, too."""
        number = next(self._numbers)
        self.requests[number] = request
        request.ticket.bind(self._notifier, number)

    def busy(self) -> int:
        """Return the number of unfinished requests."""
        return sum(not request.ticket.done() for request in list(self.requests.values()))

    def stuck(self) -> bool:
        """Return True if one call of llguidance has run for longer than :data:`_STUCK_SECONDS`."""
        current = self._current
        return current is not None and time.monotonic() - current[1] > _STUCK_SECONDS

    def take_others(self) -> list[_MaskedRequest]:
        """Remove and return the requests of a stuck thread, except the one in which it is stuck."""
        current = self._current
        return [self.requests.pop(number) for number in list(self.requests)
                if current is None or number != current[0]]

    def _run(self) -> None:
        lost = False  # True: an exception such as MemoryError may have lost notifications
        while True:
            try:
                if not lost:
                    self._poll.poll()
                taken = self._notifier.take()
                for number in list(self.requests) if lost else taken:
                    self._advance(number)
                lost = False
            except Exception:
                lost = True
                time.sleep(_PAUSE)

    def _advance(self, number: int) -> None:
        request = self.requests.get(number)
        if request is None:
            return
        self._current = number, time.monotonic()
        try:
            if not request.advance():
                self.requests.pop(number, None)
        finally:
            self._current = None


_mask_threads: list[_MaskThread] = []


def _assign(request: _MaskedRequest) -> None:
    """Assigns a request to the mask thread with the fewest requests, so that a slow format delays few others. If all
    are busy, starts another thread, up to the number of compute threads and at most four. Stuck threads are replaced,
    and their other requests move to the replacement; at most :data:`native_calls.SPARE` are.

    Raises:
        Overloaded: all threads are stuck.
    """
    with _lock:
        able = [thread for thread in _mask_threads if not thread.stuck()]
        stuck = len(_mask_threads) - len(able)
        found = min(able, key=_MaskThread.busy, default=None)
        most = min(_MAX_THREADS, _core.config()["compute_threads"]) + min(stuck, native_calls.SPARE)
        if (found is None or found.busy()) and len(_mask_threads) < most:
            found = _MaskThread()
            _mask_threads.append(found)
        if found is None:
            raise Overloaded(f"completions with a format are refused: all {stuck} threads for token masks are stuck",
                             param="response_format", hint="Try again later; mpool.health() shows native_calls")
        for waiting in [request for thread in _mask_threads if thread.stuck() for request in thread.take_others()]:
            found.serve(waiting)
        found.serve(request)


def _status() -> native_calls.NativeCalls:
    """Return the state of the mask threads for :func:`mpool.health`."""
    threads = list(_mask_threads)
    stuck = sum(thread.stuck() for thread in threads)
    running = sum(thread._current is not None for thread in threads)
    return native_calls.NativeCalls(len(threads), running, 0, stuck, stuck > 0)


native_calls.report("masks", "computations of token masks", _status)


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _mask_threads.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)

__all__ = ["Format", "check", "check_nesting", "prepare"]
