"""Text generation: prompts, requests, chunks and completions."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..checks import integer, one_of, refuse, surrogate_of
from ..completions import (
    Choice,
    Chunk,
    Completion,
    FinishReason,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    Usage,
)
from ..conversation import reasoning
from ..errors import Cancelled, ContextOverflow, InvalidArgument, MemoryExhausted, MpoolError
from ..host import native_calls
from ..names import COMPUTE
from ..runtime import tally
from ..runtime.logs import log
from . import sampling
from .options import PLAIN
from .sampling import Sampling
from .vectors import MAX_CHARS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .. import _core
    from ..conversation.grammar import Format
    from ..conversation.reasoning import Splitter
    from ..conversation.tool_calls import ToolCallParser
    from ..conversation.tools import ToolOptions, Tools
    from ..runtime.entry import Entry
    from ..tokenizers import Tokenizer
    from .captures import CaptureJob
    from .options import Call
    from .vision import Images

#: ``finish_reason`` for each value of the core's enum; None: not finished.
_FINISH: tuple[FinishReason | None, ...] = (None, "stop", "length", "stop", "cancelled")
#: Maximum number of parts of schemas that one log record names.
_NAMED = 16
#: Options of a request that are not sampling options.
_OWN = ("response_format", "capture", "context_length", "adapter")
_IDS_TYPES = "token ids as a list or an integer array of shape (n,)"
_PROMPT_TYPES = f"a text, or {_IDS_TYPES}"


@dataclass(frozen=True, slots=True)
class Request:
    """A validated text generation request.

    Attributes:
        entry: the model.
        registry: the core's registry, which accepts the request.
        core_key: key of the core's model.
        tokenizer: the model's tokenizer.
        prompt: token ids, int32 ``[tokens]``.
        sampling: sampling options.
        max_tokens: maximum number of generated tokens per choice.
        splitter: class of the parser that separates reasoning from text (:mod:`mpool.conversation.reasoning`); None:
            the completion is text only.
        images: images of the prompt, or None.
        vision: True if the model supports images.
        format: grammar that completions must match (:mod:`mpool.conversation.grammar`); None: any text.
        capture: destination of the layers' capture records, or None.
        tools: functions that the model may call, or None.
        adapter: id of the adapter in the core; 0: none.
    """

    entry: Entry
    registry: _core.Registry
    core_key: str
    tokenizer: Tokenizer
    prompt: NDArray[np.int32]
    sampling: Sampling
    max_tokens: int
    splitter: type[Splitter] | None
    images: Images | None
    vision: bool
    format: Format | None
    capture: CaptureJob | None
    tools: Tools | None
    adapter: int

    def submit(self, call: Call | None, fail_fast: bool | None = None, uncounted: bool = False) -> _core.Ticket:
        """Submit the request; ``fail_fast`` and ``uncounted`` are those of :meth:`Call.keywords`."""
        s, keywords = self.sampling, (call or PLAIN).keywords(self.entry, fail_fast, uncounted)
        capture = self.capture if self.capture is not None and self.capture.begins() else None
        if self.adapter:
            keywords["adapter"] = self.adapter
        if capture is not None:
            keywords |= {"capture_values": capture.capture.values, "capture_records": capture.capture.limit}
        try:
            ticket = self.registry.submit_text(
                self.core_key, self.prompt, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p,
                repetition_penalty=s.repetition_penalty, presence_penalty=s.presence_penalty,
                frequency_penalty=s.frequency_penalty, seed=s.seed, max_tokens=self.max_tokens,
                min_tokens=min(s.min_tokens, self.max_tokens), logprobs=s.logprobs, ignore_eos=s.ignore_eos, n=s.n,
                stop=[text.encode() for text in s.stop], stop_ids=s.stop_ids, **self._reasoning(),
                bias_ids=[token for token, _ in s.bias], bias=[bias for _, bias in s.bias], vision=self.vision,
                images=None if self.images is None else self.images.arrays(),
                mask=None if self.format is None else self.format.first, **keywords)
        except MemoryExhausted as error:
            self.entry.pool._name_idle(error, self.core_key)
            raise
        if self.format is not None:
            limited = self.tools is not None and not self.tools.single and self.format.first is not None
            try:
                self.format.compute_masks(ticket, s.n, self.entry.key, _CallLimits(self) if limited else None)
            except BaseException:
                ticket.cancel()
                raise
        if capture is not None:
            capture.follow(ticket)
        return ticket

    def _reasoning(self) -> dict[str, Any]:
        """Return the options that keep stop strings from ending the reasoning and the tool calls."""
        splitter, borders = self.splitter, [reasoning.Borders()]
        if self.sampling.stop or self.sampling.stop_ids:
            borders.append(reasoning.borders(splitter))
            if self.tools is not None and (splitter is None or issubclass(splitter, reasoning.ThinkSplitter)):
                borders += self.tools.borders(self.sampling.stop)
        starts, ends, calls = ([text.encode() for texts in part for text in texts] for part in zip(*borders))
        return {"reasoning_starts": starts, "reasoning_ends": ends, "call_starts": calls,
                "in_reasoning": bool(ends) and splitter is not None and splitter.inside}

    def reader(self, ticket: _core.Ticket) -> Reader:
        """Return a reader for the ticket of this request."""
        return Reader(self, ticket)

    def splitters(self) -> Callable[[], Splitter] | None:
        """Return a factory of splitters for choices; None if a completion is text only. A tool call ends reasoning."""
        kind, tools = self.splitter, self.tools
        if tools is None or not isinstance(kind, type) or not issubclass(kind, reasoning.ThinkSplitter):
            return kind
        return lambda: tools.splitter(kind)

    def parser(self, choice: int) -> ToolCallParser | None:
        """Return a tool-call parser for the choice with this index; None if the request has no tools."""
        if self.tools is None:
            return None
        seed = b"%b %d %d" % (self.prompt.tobytes(), self.sampling.seed, choice)
        return self.tools.parser(seed)


class _CallLimits:
    """Ends a completion that reached a limit of tool calls: the mask of its next token then allows only end tokens.

    A mask thread parses the text, because the caller may read a completion only after its end.
    """

    def __init__(self, request: Request) -> None:
        n = request.sampling.n
        self._bytes = [0] * n
        make = request.splitters()
        self._splitters = None if make is None else [make() for _ in range(n)]
        self._parsers = [request.parser(choice) for choice in range(n)]
        settings, format = request.entry.describe().generation, request.format
        assert settings is not None and format is not None
        mask = bytearray(len(format.first))
        for token in {*request.tokenizer.token_table().eog, *settings.eog_token_ids}:
            mask[token // 8] |= 1 << token % 8
        self.mask = bytes(mask)

    def ends(self, ticket: _core.Ticket, choice: int) -> bool:
        """See :class:`mpool.conversation.grammar.EndCheck`."""
        parser = self._parsers[choice]
        assert parser is not None
        data = ticket.text(choice, self._bytes[choice])[0]
        self._bytes[choice] += len(data)
        text = data.decode()
        if self._splitters is not None:
            _, text = self._splitters[choice].feed(text, False)
        parser.feed(text)
        return parser.ended


@contextmanager
def errors_with_key(entry: Entry) -> Iterator[None]:
    """Add the model's key to errors raised inside the ``with`` block."""
    try:
        yield
    except MpoolError as error:
        error.key = error.key or entry.key
        raise


def prepare(entry: Entry, ids: NDArray[np.int32], compute: str, options: Mapping[str, Any],
            splitter: type[Splitter] | None = None, images: Images | None = None, tools: Tools | None = None,
            thinking_off: bool = False) -> Request:
    """Make a request from a tokenized prompt.

    Args:
        entry: the model.
        ids: token ids of the prompt, int32 ``[tokens]``.
        compute: compute type.
        options: sampling options, ``response_format``, ``capture``, ``context_length`` and ``adapter``.
        splitter, images, tools: see :class:`Request`.
        thinking_off: True if the caller turned thinking off: a ``response_format`` then allows no reasoning.

    Raises:
        InvalidArgument: an option is unknown or out of range.
        ContextOverflow: the prompt leaves no space for a completion.
    """
    settings = entry.describe().generation
    assert settings is not None, "the entry must have the right capability"
    tokenizer = entry.tokenizer()
    with errors_with_key(entry):
        wanted = options.get("response_format")
        capture = None
        if options.get("capture") is not None:
            from .captures import job_of

            capture = job_of(options["capture"])
        most = settings.context_length
        if options.get("context_length") is not None:
            given = integer(options["context_length"])
            if given is None or given < 2:
                refuse("context_length", options["context_length"], "an integer of 2 or more, or None")
            most = min(most, given)
        rest = {name: value for name, value in options.items()
                if name not in _OWN}
        is_text = wanted is None or isinstance(wanted, Mapping) and wanted.get("type") == "text"
        if thinking_off and tools is None and not is_text:
            splitter = None
        chosen = sampling.resolve(rest, settings.defaults, tokenizer.vocab_size, splitter is not None)
        if capture is not None and chosen.n > 1:
            refuse("n", chosen.n, "1 with `capture`")
        format, schema, model = None, None, None
        left_out: tuple[str, ...] = ()
        if wanted is not None:
            from ..conversation import grammar

            if tools is None:
                format = grammar.prepare(wanted, tokenizer, chosen, splitter)
            else:
                schema, model, left_out = grammar.completion_format(wanted)
            if splitter is not None and (format or schema and issubclass(splitter, reasoning.HarmonySplitter)):
                splitter = reasoning.of_format(splitter, format is not None and format.newline)
        if tools is not None:
            format = tools.constrain(tokenizer, entry.key, chosen, splitter, schema, model)
            tools = replace(tools, constrained=format is not None, calls_or_format=schema is not None)
            if format is None and not tools.single and not chosen.ignore_eos and not chosen.min_tokens:
                format = tools.free_format(tokenizer)
        left_out += () if format is None else format.left_out
    if left_out:
        tally.add_left_out(left_out)
        log.warning("%s: completions are not constrained by %s, which a grammar cannot enforce", entry.key,
                    ", ".join(left_out[:_NAMED]) + f" and {len(left_out) - _NAMED} more" * (len(left_out) > _NAMED))
    space = most - len(ids)
    if space < 1:
        raise _overflow(entry, len(ids), most, settings.context_length)
    max_tokens = space if chosen.max_tokens is None else min(chosen.max_tokens, space)
    adapter = 0 if options.get("adapter") is None else entry.setup.adapter_id(options["adapter"])
    return Request(entry, entry.pool.registry, entry.core_key(compute), tokenizer, ids, chosen, max_tokens, splitter,
                   images, entry.capability == "vision", format, capture, tools, adapter)


def _overflow(entry: Entry, tokens: int, most: int, context: int, least: str = "") -> ContextOverflow:
    limit, param = most - 1, None if most == context else "context_length"
    has, most_tokens = f"the prompt has {least}{tokens} tokens", f"at most {limit} plus one generated token"
    return ContextOverflow(f"{has}, but the model supports {most_tokens}" if param is None else
                           f"`{param}` allows {most_tokens}, but {has}", tokens=tokens, limit=limit, param=param,
                           hint="Shorten the prompt", key=entry.key)


def check_length(entry: Entry, least: int, context_length: Any) -> None:
    """Refuse a prompt before it is tokenized, if it cannot fit.

    Args:
        entry: the model.
        least: number of tokens that the prompt has at least.
        context_length: option of the request; an invalid one counts as none, :func:`prepare` refuses it.

    Raises:
        ContextOverflow: the prompt leaves no space for a completion. ``tokens`` is ``least``.
    """
    settings = entry.describe().generation
    assert settings is not None, "the entry must have the right capability"
    given = integer(context_length)
    most = settings.context_length if given is None or given < 2 else min(settings.context_length, given)
    if least >= most:
        raise _overflow(entry, least, most, settings.context_length, "at least ")


def check_options(options: Mapping[str, Any], full: bool = False, tools: ToolOptions | None = None) -> None:
    """Check the options of a request before its model is known.

    Args:
        options: options of :func:`prepare`, and ``compute``.
        full: True: compile formats and schemas without the model. False: :func:`prepare` compiles them for the model.
        tools: options of function calls, or None.

    Raises:
        InvalidArgument, LimitError: an option is unknown, or has a value that no model allows.
        Unsupported: an option needs a package that is not installed.
    """
    if not options and tools is None:
        return
    one_of("compute", options.get("compute", "auto"), COMPUTE)
    context, adapter = options.get("context_length"), options.get("adapter")
    if context is not None and (integer(context) or 0) < 2:
        refuse("context_length", context, "an integer of 2 or more, or None")
    if adapter is not None and (not isinstance(adapter, str) or not adapter):
        refuse("adapter", adapter, "a name, or None")
    if options.get("capture") is not None:
        from .captures import check_capture

        check_capture(options["capture"])
    given = sampling.check({name: value for name, value in options.items() if name not in (*_OWN, "compute")})
    if options.get("capture") is not None and given.get("n", 1) > 1:
        refuse("n", given["n"], "1 with `capture`")
    wanted, calls = options.get("response_format"), tools is not None and bool(tools.definitions)
    if wanted is not None and not full:
        from ..conversation import response_formats

        response_formats.read(wanted)
    elif wanted is not None:
        from ..conversation import grammar

        grammar.check_whole(wanted, given, calls)
    if tools is not None and calls and full:
        tools.check_schemas(given)


def check_prompt(prompt: Any, parse_special: Any) -> None:
    """Check a raw prompt before its model is known.

    Args:
        prompt: a text, or token ids.
        parse_special: option of the request.

    Raises:
        InvalidArgument: the prompt is neither a text nor token ids, is empty, too long or not valid Unicode, or has an
            id below 0; or ``parse_special`` is not a bool.
    """
    _check_bool("parse_special", parse_special)
    if isinstance(prompt, str):
        if not 1 <= len(prompt) <= MAX_CHARS:
            raise InvalidArgument(param="prompt", got=f"{len(prompt):,} characters",
                                  allowed=f"a text of 1 to {MAX_CHARS:,} characters")
        fault = surrogate_of(prompt, "prompt")
        if fault is not None:
            raise fault
        return
    if isinstance(prompt, np.ndarray) and prompt.ndim == 0:
        raise InvalidArgument(param="prompt", got=f"a 0-d array of dtype {prompt.dtype}", allowed=_PROMPT_TYPES)
    if isinstance(prompt, (list, tuple, np.ndarray)) and not len(prompt):
        raise InvalidArgument(param="prompt", got="an empty list", allowed="a text or at least one token id")
    if not isinstance(prompt, (list, tuple, np.ndarray)) or isinstance(prompt[0], str):
        hint = "For several prompts, call generate once for each; for several completions of one prompt, use n="
        refuse("prompt", prompt, _PROMPT_TYPES, hint=hint if isinstance(prompt, (list, tuple)) else None)
    if isinstance(prompt, np.ndarray):
        if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
            raise InvalidArgument(param="prompt", got=f"an array of shape {prompt.shape} and dtype {prompt.dtype}",
                                  allowed=_PROMPT_TYPES)
        prompt = prompt.tolist()
    if all(type(token) is int and 0 <= token < sampling.MAX_VOCAB for token in prompt):
        return
    for at, token in enumerate(prompt):
        sampling.check_id(f"prompt[{at}]", token, sampling.MAX_VOCAB)


def prompt_ids(entry: Entry, prompt: Any, parse_special: bool, context_length: Any = None) -> NDArray[np.int32]:
    """Return the token ids of a raw prompt that :func:`check_prompt` accepted, int32 ``[tokens]``.

    Args:
        entry: the model.
        prompt: a text, which gets the model's BOS token if the model uses one, or token ids, which stay unchanged.
        parse_special: True: the text may contain control tokens.
        context_length: as for :func:`check_length`.

    Raises:
        ContextOverflow: the prompt cannot fit: see :func:`check_length`.
        InvalidArgument: an id is outside the vocabulary.
    """
    if isinstance(prompt, str):
        tokenizer = entry.tokenizer()
        if len(prompt) >= native_calls.LONG:
            check_length(entry, tokenizer.least_tokens(prompt, parse_special), context_length)
        ids = native_calls.tokenized(len(prompt), _encode, tokenizer, prompt, parse_special)
        return np.array([*tokenizer.prefix_ids, *ids.tolist()], dtype=np.int32) if tokenizer.prefix_ids else ids
    vocab = entry.tokenizer().vocab_size
    check_length(entry, len(prompt), context_length)
    with errors_with_key(entry):
        return native_calls.converted(prompt, lambda: np.array(
            [sampling.check_id(f"prompt[{at}]", token, vocab) for at, token in enumerate(prompt)], dtype=np.int32))


def _check_bool(name: str, value: Any, key: str | None = None) -> None:
    if not isinstance(value, bool):
        refuse(name, value, "True or False", key=key)


def _encode(tokenizer: Tokenizer, text: str, parse_special: bool) -> NDArray[np.int32]:
    return tokenizer.encode(text, add_special=False, parse_special=parse_special)


class Reader:
    """Converts the progress of a ticket to chunks, and a finished ticket to a completion. Not thread-safe."""

    def __init__(self, request: Request, ticket: _core.Ticket) -> None:
        self.request, self.ticket = request, ticket
        n = request.sampling.n
        self._bytes, self._tokens, self._ended = [0] * n, [0] * n, [False] * n
        if request.format is not None:
            request.format.cancel_with(ticket, self)
        if request.capture is not None:  # the capture thread holds the ticket too: cancel it explicitly
            weakref.finalize(self, ticket.cancel).atexit = False
        make = request.splitters()
        self._splitters = None if make is None else [make() for _ in range(n)]
        self._parsers = [request.parser(index) for index in range(n)]
        self._reported: set[int] = set()  # choices whose limit of tool calls was logged

    def take(self) -> list[Chunk]:
        """Return chunks with the text that was generated since the last call, for all choices."""
        chunks = []
        for index, ended in enumerate(self._ended):
            if ended:
                continue
            data, _, finish, at = self.ticket.text(index, self._bytes[index])
            if not data and not finish:
                continue
            self._bytes[index] += len(data)
            self._ended[index] = bool(finish)
            if finish:  # deferred to the end of a request: the first tokens of a process do not wait for it
                self.request.tokenizer.finish_later()
            text, thinking = data.decode(), ""
            if self._splitters is not None:
                thinking, text = self._splitters[index].feed(text, bool(finish))
            parser, calls = self._parsers[index], ()  # type: Any, tuple[ToolCallDelta, ...]
            if parser is not None:
                text, new = parser.feed(text, bool(finish))
                calls = tuple(ToolCallDelta(*delta) for delta in new)
            if not finish and not text and not thinking and not calls:
                continue
            reason, stop = self._end(index, _FINISH[finish], self.stop(finish, at), parser)
            chunks.append(Chunk(text, index, reason, stop,
                                self._new_logprobs(index, bool(finish)), thinking, calls))
        return chunks

    def check(self) -> None:
        """Raise the error of a finished ticket, if it has one."""
        try:
            self.ticket.check()
        except Cancelled:
            fault = None if self.request.format is None else self.request.format.error(self.ticket)
            if fault is not None:
                raise fault from None
            raise
        except MemoryExhausted as error:
            self.request.entry.pool._name_idle(error, self.request.core_key)
            raise

    @property
    def ended(self) -> bool:
        """True once the last chunk of every choice was returned."""
        return all(self._ended)

    def stop(self, finish: int, at: int) -> str | int | None:
        """Return the stop string or token id that ended a choice; None: another cause.

        Args:
            finish: the core's finish reason, an index into :data:`_FINISH`.
            at: index of the stop string or token id among those of the request.
        """
        stops, ids = self.request.sampling.stop, self.request.sampling.stop_ids
        if finish != 1 or at < 0:
            return None
        return stops[at] if at < len(stops) else ids[at - len(stops)]

    def _new_logprobs(self, index: int, last: bool) -> tuple[TokenLogprob, ...] | None:
        """Return log probabilities of the tokens whose text was returned; at the end (``last``), of all remaining
        tokens."""
        if self.request.sampling.logprobs < 0:
            return None
        start = self._tokens[index]
        ids, logprobs, ends = self.ticket.tokens(index, start)
        count = len(ids) if last else int(np.searchsorted(ends, self._bytes[index], side="right"))
        self._tokens[index] = start + count
        return self._logprobs(index, start, ids[:count], logprobs[:count])

    def _logprobs(self, index: int, start: int, ids: Any, logprobs: Any) -> tuple[TokenLogprob, ...]:
        """Return log probabilities of the given tokens, the first of which has the index ``start``."""
        top = self.ticket.top_logprobs(index, start)
        tokenizer = self.request.tokenizer

        def text(token: int) -> str:
            return tokenizer.token_bytes(token).decode(errors="replace")

        found = []
        for at, (token, logprob) in enumerate(zip(ids.tolist(), logprobs.tolist())):
            likeliest: tuple[TopLogprob, ...] = ()
            if top is not None:
                likeliest = tuple(TopLogprob(id, text(id), value) for id, value in
                                  zip(top[0][at].tolist(), top[1][at].tolist()) if id >= 0)
            found.append(TokenLogprob(token, text(token), logprob, likeliest))
        return tuple(found)

    def completion(self) -> Completion:
        """Return the completion of a finished ticket, or the text generated so far of a cancelled one."""
        choices = []
        for index in range(self.request.sampling.n):
            data, count, finish, at = self.ticket.text(index, 0)
            ids, logprobs, _ = self.ticket.tokens(index)
            ids, logprobs = ids[:count], logprobs[:count]
            details = None
            if self.request.sampling.logprobs >= 0:
                details = self._logprobs(index, 0, ids, logprobs)
            thinking, text = reasoning.split(self.request.splitters(), data.decode())
            parser = self.request.parser(index)
            calls: tuple[ToolCall, ...] = ()
            if parser is not None:
                text, _ = parser.feed(text, True)
                calls = parser.results()
            reason, stop = self._end(index, _FINISH[finish] or "cancelled", self.stop(finish, at), parser)
            parsed = None
            if self.request.format is not None and reason == "stop" and stop is None:
                parsed = self.request.format.parse(text)
            choices.append(Choice(index, text, reason, stop, tuple(ids.tolist()), details, thinking, parsed,
                                  calls))
        self.request.tokenizer.finish_later()
        prompt, _, cached, queued, prefill, generation = self.ticket.usage()
        first = choices[0]
        return Completion(
            text=first.text, finish_reason=first.finish_reason, stop=first.stop, token_ids=first.token_ids,
            logprobs=first.logprobs, usage=Usage(prompt, sum(len(choice.token_ids) for choice in choices), cached),
            timings=Timings(queued, prefill, generation, self._total()), model=self.request.entry.key,
            seed=self.request.sampling.seed, choices=tuple(choices), reasoning=first.reasoning, parsed=first.parsed,
            tool_calls=first.tool_calls)

    def _end(self, index: int, reason: FinishReason | None, stop: str | int | None,
             parser: ToolCallParser | None) -> tuple[Any, str | int | None]:
        """Return ``finish_reason`` and ``stop`` of a choice for those of the core: ``"tool_calls"`` if an end token
        ended a text with tool calls, or if their limit did."""
        if reason not in ("stop", "length") or stop is not None or parser is None or not parser.calls:
            return reason, stop
        if parser.limit is None:
            return "tool_calls" if reason == "stop" else reason, None
        if index not in self._reported:
            self._reported.add(index)
            log.warning("%s: a completion was ended after %s (%s)", self.request.entry.key, parser.reached,
                        parser.limit)
        return "tool_calls", parser.limit

    def _total(self) -> float:
        submitted, _, finished = self.ticket.times()
        return max(0.0, finished - submitted) if finished else 0.0


def cancelled_completion() -> Completion:
    """Return a completion of a stream that was closed before its request was submitted. Model and seed are unknown."""
    return Completion(text="", finish_reason="cancelled", stop=None, token_ids=(), logprobs=None, usage=Usage(0, 0),
                      timings=Timings(0.0, 0.0, 0.0, 0.0), model="", seed=0, choices=(Choice(0, "", "cancelled"),))


def check_text(text: Any, add_special: Any, parse_special: Any) -> None:
    """Check the arguments of :func:`mpool.tokenize` that need no model.

    Raises:
        InvalidArgument: an argument is not allowed.
    """
    if not isinstance(text, str):
        refuse("text", text, "a str")
    if len(text) > MAX_CHARS:
        raise InvalidArgument(param="text", got=f"{len(text):,} characters",
                              allowed=f"at most {MAX_CHARS:,} characters long", hint="Split it")
    _check_bool("add_special", add_special)
    _check_bool("parse_special", parse_special)
    fault = surrogate_of(text, "text")
    if fault is not None:
        raise fault


def tokenize(entry: Entry, text: str, add_special: bool, parse_special: bool) -> list[int]:
    """See :func:`mpool.tokenize`. The arguments must have passed :func:`check_text`."""
    tokenizer = entry.tokenizer()
    with errors_with_key(entry):
        return native_calls.tokenized(
            len(text), lambda: tokenizer.encode(text, add_special=add_special,
                                                parse_special=parse_special)).tolist()


def check_ids(ids: Any, skip_special: Any) -> None:
    """Check the arguments of :func:`mpool.detokenize` that need no model.

    Raises:
        InvalidArgument: an argument is not allowed.
    """
    if isinstance(ids, (str, bytes)) or not isinstance(ids, (Sequence, np.ndarray)):
        refuse("ids", ids, _IDS_TYPES)
    if isinstance(ids, np.ndarray) and (ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu")):
        raise InvalidArgument(param="ids", got=f"an array of shape {ids.shape} and dtype {ids.dtype}",
                              allowed=_IDS_TYPES)
    _check_bool("skip_special", skip_special)
    for at, token in enumerate(ids):
        sampling.check_id(f"ids[{at}]", token, sampling.MAX_VOCAB)


def detokenize(entry: Entry, ids: Sequence[int] | NDArray[np.integer], skip_special: bool) -> str:
    """See :func:`mpool.detokenize`. The arguments must have passed :func:`check_ids`."""
    tokenizer = entry.tokenizer()
    with errors_with_key(entry):
        checked = [sampling.check_id(f"ids[{at}]", token, tokenizer.vocab_size) for at, token in enumerate(ids)]
    return tokenizer.decode(checked, skip_special=skip_special)
