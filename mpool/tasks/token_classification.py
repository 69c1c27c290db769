"""Requests for labels of tokens: validation, windows of long texts, and the spans of a slice.

Requests run like those for token vectors (outputs.py): the logits of a token are its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..checks import integer, refuse, surrogate_of
from ..errors import InvalidArgument, LimitError
from ..host import native_calls
from . import outputs
from . import text_embedding as embedding
from .options import AGGREGATIONS
from .outputs import ROWS, OutputPlan, OutputsIterRequest, OutputsRequest, Part, Sizes
from .text_embedding import Pack, Plan
from .token_labels import (
    LabelledSpan,
    LabelTable,
    Rules,
    TokenClassification,
    TokenClassifications,
    Tokens,
    count_windows,
    merged,
    spans_of,
    windows,
)
from .vectors import Bar, activate, check_choice, tenant_of

if TYPE_CHECKING:
    from .. import _core
    from ..runtime.entry import Entry
    from .options import Call, ClassifyTokensOptions, TokenScoresOptions

#: Maximum number of labels to ignore.
_MAX_IGNORED = 1 << 16


# ---- plans ---------------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class Budget:
    """The number of windows that a request may still compute.

    Attributes:
        most: number at the start.
        left: number that is left.
        setting: options that raise the number, for error messages.
    """

    most: int
    left: int
    setting: str = "max_inputs= or PoolConfig.max_embed_inputs"


@dataclass(frozen=True, slots=True)
class SpanPack(Pack):
    """Windows of the texts of a slice. ``count`` is the number of texts.

    Attributes:
        tokens: tokens of each window.
        owner: index in the slice of the text that each window is a part of.
    """

    tokens: tuple[Tokens, ...] = ()
    owner: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SpanPlan(OutputPlan):
    """A plan with the rules of a request.

    Attributes:
        table: labels of the model.
        rules: how labels become spans; None in the cached plan.
        stride: number of tokens that neighbouring windows of a long text have in common; None: the text is truncated.
        budget: windows that the request may still compute.
    """

    parameter: ClassVar[str] = "texts"

    table: LabelTable = field(default_factory=lambda: LabelTable.of(()))
    rules: Rules | None = None
    stride: int | None = None
    budget: Budget = field(default_factory=lambda: Budget(0, 0), compare=False)

    @property
    def row_size(self) -> int:
        return len(self.table.names)

    def part(self, pack: Pack, ticket: _core.Ticket | None) -> Part:
        """Return the spans of the texts of a finished ticket."""
        assert isinstance(pack, SpanPack) and self.rules is not None
        found: list[list[LabelledSpan]] = [[] for _ in range(pack.count)]
        if ticket is not None:
            rows = ticket.rows()
            for at, tokens in enumerate(pack.tokens):
                first = int(pack.offsets[at]) + tokens.first
                scores = activate(rows[first:first + len(tokens.words)], "softmax")
                found[pack.owner[at]] += spans_of(tokens, scores, self.rules)
        counts = np.bincount(np.array(pack.owner, dtype=np.int64), minlength=pack.count)
        return Part(spans=[tuple(merged(one) if count > 1 else one) for one, count in zip(found, counts)])


def _plan(entry: Entry, options: ClassifyTokensOptions) -> SpanPlan:
    """Return the plan for the options of a request, without its rules.

    Raises:
        InvalidArgument: an option is invalid for this model.
        WrongCapability: the model is not a token classifier.
    """
    found = embedding.plan(entry, options)
    key = "spans", tenant_of(options), found
    made = entry.plans.get(key)
    if made is None:
        settings = entry.describe().embedding
        assert settings is not None
        values = {name: getattr(found, name) for name in Plan.__dataclass_fields__}
        made = SpanPlan(**values, mask=ROWS, table=LabelTable.of(settings.token_labels))
        entry.keep_plan(key, made)
    return made


# ---- arguments -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Checked:
    """Validated arguments of :func:`mpool.classify_tokens` that do not depend on the model.

    Attributes:
        texts: the texts.
        single: True if the caller passed one text and no list.
        most: maximum number of texts and windows.
        ignored: names of labels without spans.
        stride: tokens that neighbouring windows have in common; None: texts are truncated.
    """

    texts: list[Any]
    single: bool
    most: int
    ignored: frozenset[str]
    stride: int | None


def check(texts: Any, options: ClassifyTokensOptions, most: int) -> Checked:
    """Validate the arguments of :func:`mpool.classify_tokens` that do not depend on the model.

    Args:
        texts: argument of the caller.
        options: options of the request.
        most: maximum number of texts.

    Raises:
        InvalidArgument: an argument is invalid.
        LimitError: there are too many texts.
    """
    single = isinstance(texts, str)
    given = [texts] if single else embedding.texts_of(texts, most, "texts")
    check_choice("aggregation", options.aggregation, AGGREGATIONS)
    stride = integer(options.stride)
    if options.stride is not None:
        if stride is None or stride < 0:
            refuse("stride", options.stride, "an integer of 0 or more tokens, or None")
        if options.aggregation == "none":
            refuse("stride", options.stride, "None with aggregation=\"none\"",
                   hint="Overlapping windows are merged by their spans: use aggregation=\"simple\"")
        if not options.truncate:
            refuse("truncate", False, "True with stride, which omits no part of a text")
    return Checked(given, single, most, _ignored(options.ignore_labels), stride)


def _ignored(names: Any) -> frozenset[str]:
    if isinstance(names, (str, bytes, Mapping)) or not hasattr(names, "__len__") or not hasattr(names, "__iter__"):
        refuse("ignore_labels", names, "a list of str",
               hint=f"Pass [{names!r}]" if isinstance(names, str) and len(names) <= 100 else None)
    if len(names) > _MAX_IGNORED:
        raise LimitError(f"`ignore_labels` must hold at most {_MAX_IGNORED:,} labels, got {len(names):,}",
                         param="ignore_labels")
    for at, name in enumerate(names):
        if not isinstance(name, str):
            refuse(f"ignore_labels[{at}]", name, "a str")
    return frozenset(names)


def request(entry: Entry, checked: Checked, options: ClassifyTokensOptions, call: Call) -> OutputsRequest:
    """Return the request for a model.

    Raises:
        InvalidArgument: an option is invalid for this model.
        WrongCapability: the model is not a token classifier.
    """
    made = iter_plan(entry, options, checked)

    def finish(plan: OutputPlan, parts: list[Part]) -> TokenClassification | TokenClassifications:
        found = _joined(made, parts)
        return found[0] if checked.single else found

    return OutputsRequest(made, checked.texts, options.progress, call, finish, kind=TEXTS)


def check_items(items: list[Any], null: bool) -> None:
    """Check the items of a list for :func:`mpool.embed_iter` before its model is known. Raises as :func:`check`."""
    embedding.check_inputs(items, "texts", full=True)


def iter_check(options: ClassifyTokensOptions, most: int) -> Checked:
    """Validate the options for an iterable. Raises as :func:`check`."""
    return check([], options, most)


def iter_plan(entry: Entry, options: ClassifyTokensOptions, checked: Checked) -> SpanPlan:
    """Return the plan for the options of a request, with its rules. Raises as :func:`request`."""
    made = _plan(entry, options)
    if checked.stride is not None and checked.stride >= _room(made):
        refuse("stride", checked.stride, f"less than {_room(made)}, the number of tokens of a window of this model",
               key=entry.key)
    rules = Rules(made.table, options.aggregation, checked.ignored, made.tokenizer.join_tokens)
    return replace(made, rules=rules, stride=checked.stride, budget=Budget(checked.most, checked.most))


def _joined(plan: OutputPlan, parts: list[Part]) -> TokenClassifications:
    """Join the spans of slices."""
    assert isinstance(plan, SpanPlan) and plan.rules is not None
    facts = plan.table.names, plan.entry.key, plan.rules.aggregation
    return TokenClassifications(tuple(TokenClassification(spans, *facts) for part in parts
                                      for spans in part.spans or ()), *facts)


def iter_request(plan: SpanPlan, items: Any, batch_size: int | None, bar: Bar, options: ClassifyTokensOptions,
                 checked: Checked, call: Call) -> OutputsIterRequest:
    """Return the request for the spans of an iterable. The budget of windows of the plan is that of each slice."""
    def packed(plan: SpanPlan, texts: list[Any], start: int, single: bool, call: Call) -> SpanPack:
        fresh = replace(plan, budget=Budget(plan.budget.most, plan.budget.most, "PoolConfig.max_embed_inputs"))
        return _packed(fresh, texts, start, single, call)

    return OutputsIterRequest(replace(TEXTS, pack=packed), plan, items, outputs.cutter(plan), batch_size, bar, call,
                              finish=_joined)


@dataclass(frozen=True, slots=True)
class ScoresPlan(OutputPlan):
    """A plan for the scores of all labels for each token, also for special ones.

    Attributes:
        labels: number of labels.
        function: function that turns logits into scores.
    """

    labels: int = 0
    function: str = "softmax"

    @property
    def row_size(self) -> int:
        return self.labels

    def part(self, pack: Pack, ticket: _core.Ticket | None) -> Part:
        """Return the scores of a finished ticket."""
        assert ticket is not None, "every text has tokens"
        return Part(tokens=(activate(ticket.rows(), self.function), pack.offsets))


def scores_plan(entry: Entry, options: TokenScoresOptions) -> ScoresPlan:
    """Return the plan for the scores of all labels for each token.

    Raises:
        InvalidArgument: an option is invalid for this model.
        WrongCapability: the model is not a token classifier.
    """
    check_choice("function_to_apply", options.function_to_apply, ("softmax", "none"))
    found = embedding.plan(entry, options)
    settings = entry.describe().embedding
    assert settings is not None
    values = {name: getattr(found, name) for name in Plan.__dataclass_fields__}
    return ScoresPlan(**values, mask=ROWS, labels=len(settings.token_labels), function=options.function_to_apply)


# ---- packs ---------------------------------------------------------------------------------------------------------

def _room(plan: Plan) -> int:
    """Return the number of tokens of a window beside special tokens."""
    return plan.max_tokens - len(plan.tokenizer.prefix_ids) - len(plan.tokenizer.suffix_ids)


def _packed(plan: SpanPlan, texts: list[Any], start: int, single: bool, call: Call) -> SpanPack:
    """Tokenize texts, and cut or truncate those that are too long. Long texts are tokenized on threads for native
    calls.

    Raises:
        InvalidArgument: a text is not a str, too long or not Unicode.
        ContextOverflow: a text has more tokens than the model accepts, and ``plan.truncate`` is False.
        LimitError: the texts have too many windows, or their logits need too much memory.
    """
    for at, text in enumerate(texts, start):
        fault = embedding.fault_of(text, f"texts[{at}]", 0)
        if fault is not None:
            fault.key = plan.entry.key
            raise fault
    chars = sum(map(len, texts))
    return native_calls.tokenized(chars, _windows, plan, texts, start, deadline=call.deadline)


def _windows(plan: SpanPlan, texts: list[str], start: int) -> SpanPack:
    tokenizer, room = plan.tokenizer, _room(plan)
    try:
        encoded = tokenizer.encode_spans(texts, plan.parse_special,
                                         room if plan.truncate and plan.stride is None else None)
    except InvalidArgument as error:
        faults = (surrogate_of(text, f"texts[{at}]") for at, text in enumerate(texts, start))
        found = next((fault for fault in faults if fault is not None), error)
        found.key = found.key or plan.entry.key
        raise found from None
    if not plan.truncate:
        for at, one in enumerate(encoded, start):
            if len(one.ids) > room:
                tokens = len(one.ids) + plan.max_tokens - room
                raise embedding.too_long(f"texts[{at}]", tokens, plan,
                                         "Shorten it, set truncate=True, or pass a stride")
    _spend(plan, [len(one.ids) for one in encoded], room)
    rows: list[Any] = []
    tokens_of: list[Tokens] = []
    owner: list[int] = []
    for at, (text, one) in enumerate(zip(texts, encoded)):
        for first, end in _cuts(plan, len(one.ids), room):
            part, places = one.ids[first:end], one.offsets[first:end]
            rows.append([*tokenizer.prefix_ids, *part, *tokenizer.suffix_ids])
            tokens_of.append(Tokens(*_words(plan, text, part, places), first=len(tokenizer.prefix_ids)))
            owner.append(at)
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    ids = np.concatenate([np.array(row, dtype=np.int32) for row in rows]) if rows else np.zeros(0, dtype=np.int32)
    return SpanPack(ids, offsets, None, len(texts), tokens=tuple(tokens_of), owner=tuple(owner))


def _cuts(plan: SpanPlan, tokens: int, room: int) -> list[tuple[int, int]]:
    """Return the range of tokens (first, end) of each window of a text; none for a text without tokens."""
    if not tokens:
        return []
    cuts = windows(tokens, room, plan.stride or 0, plan.tokenizer.truncates_left)
    return cuts if plan.stride is not None else cuts[:1]


def _spend(plan: SpanPlan, lengths: list[int], room: int) -> None:
    """Check the number of windows and the memory of the logits of a slice before they are made."""
    needed = total = 0  # number of windows; their tokens, special ones included
    for tokens in lengths:
        count = 1 if plan.stride is None else count_windows(tokens, room, plan.stride)
        needed += count * bool(tokens)
        total += count * min(tokens + plan.max_tokens - room, plan.max_tokens)
    plan.budget.left -= needed
    if plan.budget.left < 0:
        raise LimitError(f"`texts` must have at most {plan.budget.most:,} windows of {plan.max_tokens} tokens, got "
                         "more", param="texts", key=plan.entry.key,
                         hint=f"Use a smaller stride, or fewer or shorter texts; {plan.budget.setting} raises the "
                              "limit")
    Sizes(plan).expect_rows(total)


def _words(plan: SpanPlan, text: str, ids: Sequence[int],
           places: Sequence[tuple[int, int]]) -> tuple[list[str], Sequence[tuple[int, int]], list[bool]]:
    """Return the text of each token, its place, and True for each token that continues a word.

    A token of WordPiece continues a word if its text in the vocabulary, with ``##``, has another length than its part
    of the text. In other vocabularies, a token continues a word unless it begins with a space or follows one.
    """
    tokenizer = plan.tokenizer
    marked, unknown = tokenizer.marks_subwords, tokenizer.special.get("unk")
    texts = {token: tokenizer.token_text(token) for token in set(ids)}
    words: list[str] = []
    continues: list[bool] = []
    for token, (first, end) in zip(ids, places):
        if token == unknown:
            words.append(text[first:end])
            continues.append(False)
            continue
        word = texts[token]
        words.append(word)
        continues.append(len(word) != end - first if marked else first > 0 and " " not in text[first - 1:first + 1])
    return words, places, continues


def _heavy(plan: Plan, inputs: list[Any]) -> bool:
    return native_calls.are_many(inputs)


TEXTS = replace(outputs.TEXTS, pack=_packed, heavy=_heavy)

__all__ = ["check", "iter_check", "iter_plan", "iter_request", "request", "scores_plan"]
