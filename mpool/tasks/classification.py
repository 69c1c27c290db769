"""Classification of texts and pairs of texts, also with labels that the request names (zero-shot).

Requests are computed like those for text embedding; the logits of a text are its vector.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from ..checks import integer, is_same, items_of, refuse, surrogate_of
from ..errors import ContextOverflow, InvalidArgument, LimitError, WrongCapability
from ..host import native_calls
from ..host.resources import aitems_of_caller, items_of_caller
from . import text_embedding as embedding
from .options import ACTIVATIONS, TEMPLATE
from .steps import Cutter, IterRequest, Rebatch, VectorRequest
from .vectors import Bar, Kind, activate, check_choice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..models.spec import ClassifierSettings
    from ..runtime.entry import Entry
    from ..tokenizers import Tokenizer
    from .options import Call, ClassifyOptions
    from .text_embedding import Pack, Plan

#: Placeholder of the label in ``template``, the hypothesis of a zero-shot request.
_SLOT = "{}"


# ---- results -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class LabelScore:
    """A label of a text with its score. ``str()`` returns the label.

    Attributes:
        index: index of the label in ``labels`` of the result.
        label: name of the label.
        score: score of the label, or value of a regression.
    """

    index: int
    label: str
    score: float

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """The labels of a text. Supports iteration, indexing and ``len()`` over ``results``.

    Attributes:
        scores: scores of all labels, float32 ``(labels,)``, in the order of ``labels``.
        labels: names of all labels.
        model: key of the model that computed the scores.
        top_k: number of labels in ``results``; None: all.
        logits: values before the function that makes scores, which rounds high ones to the same score: they order the
            labels. None: the scores do.
    """

    scores: NDArray[np.float32]
    labels: tuple[str, ...]
    model: str
    top_k: int | None = None
    logits: NDArray[np.float32] | None = field(default=None, repr=False)

    @property
    def label(self) -> str:
        """Name of the best label, the first one of equal ones."""
        return self.labels[int(self._ranks.argmax())]

    @property
    def _ranks(self) -> NDArray[np.float32]:
        return self.scores if self.logits is None else self.logits

    @property
    def score(self) -> float:
        """Highest score, or the highest value of a regression."""
        return float(self.scores.max())

    @property
    def results(self) -> tuple[LabelScore, ...]:
        """The best ``top_k`` labels, or all of them, best first. Equal ones keep their order."""
        order = np.argsort(-self._ranks, kind="stable")[:self.top_k].tolist()
        return tuple(LabelScore(at, self.labels[at], float(self.scores[at])) for at in order)

    def __iter__(self) -> Iterator[LabelScore]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.labels) if self.top_k is None else min(self.top_k, len(self.labels))

    def __getitem__(self, at: int) -> LabelScore:
        return self.results[at]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Classification):
            return NotImplemented
        return self._key() == other._key() and np.array_equal(self.scores, other.scores)

    def __hash__(self) -> int:
        return hash((*self._key(), self.scores.tobytes()))

    def _key(self) -> tuple[Any, ...]:
        return self.labels, self.model, self.top_k

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, slots=True, eq=False)
class Classifications(Sequence[Classification]):
    """The labels of a list of texts: a sequence with a :class:`mpool.results.Classification` per text.

    Attributes:
        scores: scores of all labels, float32 ``(texts, labels)``.
        labels: names of all labels.
        model: key of the model that computed the scores.
        top_k: number of labels in ``results`` of each text; None: all.
        logits: as for :class:`mpool.results.Classification`, ``(texts, labels)``.
    """

    scores: NDArray[np.float32]
    labels: tuple[str, ...]
    model: str
    top_k: int | None = None
    logits: NDArray[np.float32] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.scores)

    @overload
    def __getitem__(self, at: int) -> Classification: ...

    @overload
    def __getitem__(self, at: slice) -> Classifications: ...

    def __getitem__(self, at: int | slice) -> Classification | Classifications:
        kind = Classifications if isinstance(at, slice) else Classification
        return kind(self.scores[at], self.labels, self.model, self.top_k,
                    None if self.logits is None else self.logits[at])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Classifications):
            return NotImplemented
        return (self.labels, self.model, self.top_k) == (other.labels, other.model, other.top_k) \
            and np.array_equal(self.scores, other.scores)

    __hash__ = None  # type: ignore[assignment]  # like a list


# ---- arguments -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class Checked:
    """Validated arguments of :func:`mpool.classify` that do not depend on the model.

    Attributes:
        texts: the texts, or the pairs.
        single: True if the caller passed one text and no list.
        pairs: True if the inputs are pairs.
        labels: for zero-shot classification, the labels of the request; else empty.
        hypotheses: the hypothesis of each label.
    """

    texts: list[Any]
    single: bool
    pairs: bool
    labels: tuple[str, ...] = ()
    hypotheses: tuple[str, ...] = ()

    @property
    def is_long(self) -> bool:
        """True if tokenizing the hypotheses would block an event loop for too long."""
        return sum(map(len, self.hypotheses)) >= native_calls.LONG_ON_LOOP


def check(texts: Any, options: ClassifyOptions, most: int) -> Checked:
    """Validate the arguments of :func:`mpool.classify` that do not depend on the model.

    Args:
        texts: argument of the caller.
        options: options of the request.
        most: maximum number of texts, or of texts times labels.

    Raises:
        InvalidArgument: an argument is invalid.
        LimitError: there are too many texts or labels, or the hypotheses are too long together.
    """
    single = isinstance(texts, str)
    given = [texts] if single else embedding.texts_of(texts, most, "texts")
    pairs = bool(given) and isinstance(given[0], (tuple, list))
    if pairs:
        given = [_pair(pair, at) for at, pair in enumerate(given)]
    labels, hypotheses = _check_options(options, most)
    if not labels:
        return Checked(given, single, pairs)
    if pairs:
        refuse("texts", "pairs", "single texts with labels: each label makes the second text of a pair")
    for at, text in enumerate(given):
        _check_text(text, f"texts[{at}]")
    if len(given) * len(labels) > most:
        raise LimitError(f"`labels` must make at most {most:,} pairs with the texts, got {len(given):,} texts times "
                         f"{len(labels):,} labels", param="labels",
                         hint="max_inputs= or PoolConfig.max_embed_inputs raises the limit")
    return Checked(given, single, False, labels, hypotheses)


def check_texts(checked: Checked, full: bool) -> None:
    """Check the texts, or the texts of pairs, before the model is known. ``full``: see
    :func:`mpool.tasks.text_embedding.check_inputs`."""
    if not checked.pairs:
        embedding.check_inputs(checked.texts, "texts", checked.single, full=full)
    for at, pair in enumerate(checked.texts if checked.pairs and full else ()):
        embedding.check_inputs(pair, f"texts[{at}]", full=True)


def _check_options(options: ClassifyOptions, most: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Validate the options. Returns the labels of a zero-shot request and their hypotheses; both are empty for others.

    Raises:
        InvalidArgument: an option is invalid.
        LimitError: there are more than ``most`` labels, or the hypotheses are too long together.
    """
    check_choice("multi_label", options.multi_label, (True, False))
    check_choice("function_to_apply", options.function_to_apply, (None, *ACTIVATIONS))
    count = integer(options.top_k)
    if options.top_k is not None and (count is None or count < 1):
        refuse("top_k", options.top_k, "an integer of 1 or more, or None for all labels")
    if options.labels is None:
        for name, default in (("template", TEMPLATE), ("multi_label", False)):
            if not is_same(getattr(options, name), default):
                refuse(name, getattr(options, name), f"{default!r} without labels",
                       hint="Pass labels=[...] for zero-shot classification")
        return (), ()
    labels = _labels(options.labels, most)
    if options.function_to_apply is not None:
        refuse("function_to_apply", options.function_to_apply, "None with labels")
    return labels, _hypotheses(options.template, labels)


def _check_text(text: Any, name: str) -> None:
    """Raise the error for a text that is not a str or too long. ``name``: its name in errors."""
    fault = embedding.fault_of(text, name, 0)
    if fault is not None:
        raise fault


def _pair(pair: Any, at: int) -> tuple[str, str]:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = f"{len(pair)} texts" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise InvalidArgument(param=f"texts[{at}]", got=got, allowed="a pair of texts, as the first one")
    for part, text in enumerate(pair):
        _check_text(text, f"texts[{at}][{part}]")
    return pair[0], pair[1]


def _labels(labels: Any, most: int) -> tuple[str, ...]:
    """Return the labels of a zero-shot request."""
    allowed = "a list of at least one str"
    if isinstance(labels, str):
        refuse("labels", labels, allowed, hint="Split it: labels.split(',')")
    labels = items_of("labels", labels, allowed)
    if not hasattr(labels, "__len__") or not len(labels):
        refuse("labels", labels, allowed)
    if len(labels) > most:
        raise LimitError(f"`labels` must hold at most {most:,} labels, got {len(labels):,}", param="labels")
    seen: set[str] = set()
    for at, label in enumerate(labels):
        fault = embedding.fault_of(label, f"labels[{at}]")
        fault = fault or surrogate_of(label, f"labels[{at}]")
        if fault is not None:
            fault.hint = None
            raise fault
        if label in seen:
            refuse(f"labels[{at}]", label, "a label that is not in the list yet")
        seen.add(label)
    return tuple(map(str, labels))


def _hypotheses(template: Any, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the hypothesis of each label. Only ``{}`` is replaced: the template is not a format string."""
    fault = embedding.fault_of(template, "template")
    fault = fault or surrogate_of(template, "template")
    if fault is not None:
        fault.hint = None
        raise fault
    rest = template.replace(_SLOT, "", 1)
    if rest == template or "{" in rest or "}" in rest:
        refuse("template", template if len(template) <= 100 else f"{len(template):,} characters",
               "a text with {} once, for the label, and without other braces")
    total = (len(template) - len(_SLOT)) * len(labels) + sum(map(len, labels))
    if total > embedding.MAX_CHARS:
        raise LimitError(f"`template` with all labels must have at most {embedding.MAX_CHARS:,} characters, got "
                         f"{total:,}", param="template", hint="Shorten it, or pass fewer labels")
    return tuple(template.replace(_SLOT, label) for label in labels)


# ---- requests ------------------------------------------------------------------------------------------------------

def request(plan: Plan, checked: Checked, options: ClassifyOptions, call: Call) -> VectorRequest:
    """Return the request for a model.

    Raises:
        WrongCapability: the request names labels, and the model has no label for entailment.
        ContextOverflow: a hypothesis leaves no room for a text.
    """
    if checked.labels:
        return _zero_shot(plan, checked, options, call)
    classifier = _classifier(plan)
    function, top_k = options.function_to_apply or classifier.activation, options.top_k

    def finish(rows: NDArray[np.float32]) -> Classification | Classifications:
        return _result(_scored(rows, function), classifier.labels, plan, top_k, checked.single)

    kind = _PAIRS if checked.pairs else embedding.TEXTS.called(inputs="texts")
    slices = _slices_of_pairs if checked.pairs else embedding.slices
    return VectorRequest(kind, plan, checked.texts, slices, checked.single, options.progress, call, finish)


def _classifier(plan: Plan) -> ClassifierSettings:
    settings = plan.entry.describe().embedding
    classifier = None if settings is None else settings.classifier
    assert classifier is not None, "the plan has checked the output"
    return classifier


def _scored(logits: NDArray[np.float32], function: str) -> NDArray[np.float32]:
    """Return the scores of logits ``(texts, labels)`` with the logits: ``(2, texts, labels)``."""
    return np.stack([activate(logits, function), logits])


def _result(found: NDArray[np.float32], labels: tuple[str, ...], plan: Plan, top_k: int | None,
            single: bool) -> Classification | Classifications:
    """Return the result of scores with their logits, as :func:`_scored` returns them."""
    found.flags.writeable = False
    scores, logits = found
    key = plan.entry.key
    return Classification(scores[0], labels, key, top_k, logits[0]) if single \
        else Classifications(scores, labels, key, top_k, logits)


# ---- zero-shot -----------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class _Entailment:
    """How the logits of a text with each hypothesis become the scores of its labels.

    As in transformers, the scores are the softmax over the logits for entailment of all labels; with ``multi_label`` or
    one label, the softmax over the logits for contradiction and entailment of each label.

    Attributes:
        contradiction: index of the label for contradiction in the model.
        entailment: index of the label for entailment in the model.
        count: number of labels of the request.
        multi_label: True if the score of each label is computed on its own.
    """

    contradiction: int
    entailment: int
    count: int
    multi_label: bool

    @staticmethod
    def of(plan: Plan, checked: Checked, options: ClassifyOptions) -> _Entailment:
        """Return the rule of a request.

        Raises:
            WrongCapability: the model has no label for entailment.
        """
        classifier = _classifier(plan)
        at, last = classifier.entailment, len(classifier.labels) - 1
        if at is None or not last:
            raise WrongCapability("has no label whose name begins with \"entail\", which zero-shot classification "
                                  "needs", key=plan.entry.key,
                                  hint="Use a model of natural language inference, or omit labels")
        return _Entailment(last if at == 0 else 0, at, len(checked.labels), options.multi_label)

    def scores(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scores of texts, as :func:`_scored` does, from the logits of their pairs."""
        if self.multi_label or self.count == 1:
            found = activate(logits[:, [self.contradiction, self.entailment]], "softmax")[:, 1]
            by = logits[:, self.entailment] - logits[:, self.contradiction]  # the softmax grows with the difference
            return np.stack([found, by]).reshape(2, -1, self.count)
        return _scored(logits[:, self.entailment].reshape(-1, self.count), "softmax")


def _zero_shot(plan: Plan, checked: Checked, options: ClassifyOptions, call: Call) -> VectorRequest:
    """Return the request that scores the pair of each text and each hypothesis."""
    rule = _Entailment.of(plan, checked, options)
    inputs = [(text, label) for text in checked.texts for label in range(rule.count)]

    def finish(rows: NDArray[np.float32]) -> Classification | Classifications:
        return _result(rule.scores(rows), checked.labels, plan, options.top_k, checked.single)

    return VectorRequest(_zero_shot_kind(plan, checked, call), plan, inputs, _slices_of_zero_shot, False,
                         options.progress, call, finish)


def _zero_shot_kind(plan: Plan, checked: Checked, call: Call) -> Kind:
    """Return the :class:`Kind` whose inputs are pairs of a text and the index of a label.

    Raises:
        ContextOverflow: a hypothesis leaves no room for a text.
    """
    return replace(embedding.TEXTS, pack=partial(_pack_zero_shot, _encoded_hypotheses(plan, checked, call)),
                   heavy=lambda plan, inputs: native_calls.are_many(inputs))


def _encoded_hypotheses(plan: Plan, checked: Checked, call: Call) -> list[Sequence[int]]:
    """Tokenize the hypothesis of each label once for all texts; check that each leaves room for a text."""
    hypotheses = checked.hypotheses
    encoded: list[Sequence[int]] = native_calls.tokenized(
        sum(map(len, hypotheses)), plan.tokenizer.encode_parts, hypotheses, plan.parse_special, deadline=call.deadline)
    room = plan.max_tokens - sum(map(len, plan.tokenizer.pair_ids))
    for at, ids in enumerate(encoded):
        if len(ids) >= room:
            raise ContextOverflow(f"`labels[{at}]` has a hypothesis of {len(ids)} tokens, which leaves no room for a "
                                  f"text: the model accepts {room} tokens of both", tokens=len(ids), limit=room - 1,
                                  param=f"labels[{at}]", key=plan.entry.key, hint="Shorten the label or the template")
    return encoded


# ---- many texts ----------------------------------------------------------------------------------------------------

@dataclass(slots=True)
class LabelsIterRequest(IterRequest):
    """A request for the labels of an iterable of texts or pairs.

    Attributes:
        function: function that turns logits into scores.
        labels: names of all labels.
        top_k: number of labels in ``results`` of each text; None: all.
    """

    function: str = "softmax"
    labels: tuple[str, ...] = ()
    top_k: int | None = None

    def _regrouped(self) -> Rebatch:
        return Rebatch(self.batch_size, self._joined, self._singles)

    def _singles(self, rows: Any) -> Iterator[Any]:
        for row in rows:
            yield _result(row.copy()[:, None], self.labels, self.plan, self.top_k, True)

    def _joined(self, parts: list[Any]) -> Any:
        found = np.ascontiguousarray(np.concatenate(parts).swapaxes(0, 1))
        return _result(found, self.labels, self.plan, self.top_k, False)

    def _finished(self, rows: Any) -> Any:
        return _scored(rows, self.function).swapaxes(0, 1)


@dataclass(slots=True)
class ZeroShotIterRequest(LabelsIterRequest):
    """A request for the scores that zero-shot classification gives to an iterable of texts.

    The inputs of a slice are pairs of a text and the index of a label, so a slice may end within a text.

    Attributes:
        rule: how logits become scores; never None.
        logits: logits of the pairs of a text that is not complete.
    """

    rule: _Entailment | None = None
    logits: NDArray[np.float32] | None = None

    def _finished(self, rows: Any) -> Any:
        assert self.rule is not None
        if self.logits is not None:
            rows = np.concatenate([self.logits, rows])
        whole = len(rows) - len(rows) % self.rule.count
        self.logits = rows[whole:].copy()
        return self.rule.scores(rows[:whole]).swapaxes(0, 1)


def check_items(items: list[Any], null: bool) -> None:
    """Check the items of a list for :func:`mpool.embed_iter`, texts or pairs, before its model is known.

    Raises:
        InvalidArgument: as :func:`check` and :func:`check_texts`.
    """
    pairs = bool(items) and isinstance(items[0], (tuple, list))
    check_texts(Checked([_pair(pair, at) for at, pair in enumerate(items)] if pairs else items, False, pairs), True)


def iter_check(options: ClassifyOptions, most: int) -> Checked:
    """Validate the options for an iterable. ``most``: maximum number of labels.

    Raises:
        InvalidArgument: an option is invalid.
        LimitError: there are too many labels, or the hypotheses are too long together.
    """
    labels, hypotheses = _check_options(options, most)
    return Checked([], False, False, labels, hypotheses)


def iter_plan(entry: Entry, options: ClassifyOptions, checked: Checked) -> Plan:
    """Return the plan for an iterable. Raises as :func:`mpool.tasks.text_embedding.plan`."""
    return embedding.plan(entry, options)


def iter_request(plan: Plan, items: Any, batch_size: int | None, bar: Bar, options: ClassifyOptions,
                 checked: Checked, call: Call) -> LabelsIterRequest:
    """Return the request for the labels of an iterable. Its items are like the first one: all texts, or all pairs.

    Raises:
        WrongCapability: the request names labels, and the model has no label for entailment.
        ContextOverflow: a hypothesis leaves no room for a text.
    """
    if checked.labels:
        return _zero_shot_iter(plan, items, batch_size, bar, options, checked, call)
    classifier = _classifier(plan)
    pairs = False

    def packed(plan: Plan, texts: list[Any], start: int, single: bool, call: Call) -> Pack:
        nonlocal pairs
        if start == 0:
            pairs = isinstance(texts[0], (tuple, list))
        if not pairs:
            return embedding.TEXTS.pack(plan, texts, start, single, call)
        return _pack_pairs(plan, [_pair(pair, at) for at, pair in enumerate(texts, start)], start, single, call)

    cutter = embedding.cutter(_PairCutter)

    def heavy(plan: Plan, inputs: list[Any]) -> bool:
        return plan.template is not None or native_calls.are_many(inputs)

    kind = replace(embedding.TEXTS, pack=packed, heavy=heavy)
    return LabelsIterRequest(kind, plan, items, cutter, batch_size, bar, call,
                             function=options.function_to_apply or classifier.activation,
                             labels=classifier.labels, top_k=options.top_k)


def _zero_shot_iter(plan: Plan, items: Any, batch_size: int | None, bar: Bar, options: ClassifyOptions,
                    checked: Checked, call: Call) -> ZeroShotIterRequest:
    """Return the request for zero-shot classification of an iterable of texts. Raises as :func:`iter_request`."""
    rule = _Entailment.of(plan, checked, options)
    kind = _zero_shot_kind(plan, checked, call)

    def packed(plan: Plan, inputs: list[Any], start: int, single: bool, call: Call) -> Pack:
        for at, (text, label) in enumerate(inputs, start):
            if isinstance(text, (tuple, list)):
                refuse(f"texts[{at // rule.count}]", text, "a single text with labels: each label makes the second "
                       "text of a pair", key=plan.entry.key)
            if label == 0 or at == start:
                _check_text(text, f"texts[{at // rule.count}]")
        made: Pack = kind.pack(plan, inputs, start, single, call)
        return made

    expand = _aeach_label if isinstance(items, AsyncIterable) else _each_label
    return ZeroShotIterRequest(replace(kind, pack=packed), plan, expand(items, rule.count),
                               embedding.cutter(_LabelCutter), batch_size, bar, call, labels=checked.labels,
                               top_k=options.top_k, rule=rule)


def _each_label(texts: Iterable[Any], count: int) -> Iterator[tuple[Any, int]]:
    """Yield each text with the index of each of ``count`` labels."""
    for text in items_of_caller(texts):
        for label in range(count):
            yield text, label


async def _aeach_label(texts: AsyncIterable[Any], count: int) -> AsyncIterator[tuple[Any, int]]:
    """As :func:`_each_label`, for an asynchronous iterable."""
    async for text in aitems_of_caller(texts):
        for label in range(count):
            yield text, label


# ---- slices --------------------------------------------------------------------------------------------------------

class _PairCutter(Cutter):
    """Cuts a sequence of texts or pairs of texts into slices of bounded characters and count."""

    def size_of(self, item: Any) -> int:
        if isinstance(item, (tuple, list)) and len(item) == 2:
            return sum(len(text) for text in item if isinstance(text, str))
        return super().size_of(item)


class _LabelCutter(Cutter):
    """Cuts a sequence of texts with indices of labels into slices of bounded characters and count.

    A text counts once in a slice, because it is tokenized once.
    """

    def add(self, item: Any) -> tuple[int, list[Any]] | None:
        if self.held and len(self.held) < self.most_texts and self.held[-1][0] is item[0]:
            self.held.append(item)
            return None
        return super().add(item)

    def size_of(self, item: Any) -> int:
        return super().size_of(item[0])


# ---- pairs ---------------------------------------------------------------------------------------------------------

def _slices_of_pairs(pairs: list[tuple[str, str]]) -> Iterator[tuple[int, list[Any]]]:
    """Cut a list of pairs into slices."""
    return embedding.slices(pairs, _PairCutter)


def _slices_of_zero_shot(inputs: list[tuple[str, int]]) -> Iterator[tuple[int, list[Any]]]:
    """Cut a list of texts and indices of labels into slices."""
    return embedding.slices(inputs, _LabelCutter)


def _chars_of(inputs: list[Any]) -> int:
    """Return the number of characters that are tokenized for pairs or for texts with indices of labels."""
    texts = {text for one in inputs for text in one if isinstance(text, str)}
    return sum(map(len, texts))


def _pack_pairs(plan: Plan, pairs: list[Any], start: int, single: bool, call: Call) -> Pack:
    """Tokenize pairs of texts."""
    def made() -> Pack:
        parts = _encoded(plan, [text for pair in pairs for text in pair], None,
                         lambda at: f"texts[{start + at // 2}][{at % 2}]")
        joined = plan.tokenizer.join_pairs([(parts[first], parts[second]) for first, second in pairs],
                                           max_tokens=plan.max_tokens, truncate=plan.truncate,
                                           name=lambda at: f"texts[{start + at}]", partner="")
        return embedding.Pack(joined.ids, joined.offsets, None, len(pairs), (), joined.second)

    return native_calls.tokenized(_chars_of(pairs), made, deadline=call.deadline)


def _pack_zero_shot(hypotheses: list[Sequence[int]], plan: Plan, inputs: list[Any], start: int, single: bool,
                    call: Call) -> Pack:
    """Tokenize texts, and join each with the hypothesis of its label."""
    def made() -> Pack:
        def name(at: int) -> str:
            return f"texts[{(start + at) // len(hypotheses)}]"

        parts = _encoded(plan, [text for text, _ in inputs], plan.max_tokens if plan.truncate else None, name)
        joined = plan.tokenizer.join_pairs([(parts[text], hypotheses[label]) for text, label in inputs],
                                           max_tokens=plan.max_tokens, truncate=plan.truncate, keep_second=True,
                                           name=name, partner=" with its hypothesis")
        return embedding.Pack(joined.ids, joined.offsets, None, len(inputs), (), joined.second)

    return native_calls.tokenized(_chars_of(inputs), made, deadline=call.deadline)


def _encoded(plan: Plan, texts: list[str], room: int | None, name: Callable[[int], str]) -> dict[str, Sequence[int]]:
    """Return the ids of each distinct text.

    Args:
        plan: plan of the request.
        texts: the texts.
        room: number of ids of a text that are needed; None: all.
        name: function from the index of a text to its name in errors.
    """
    distinct = list(dict.fromkeys(texts))
    tokenizer: Tokenizer = plan.tokenizer
    try:
        return dict(zip(distinct, tokenizer.encode_parts(distinct, plan.parse_special, room)))
    except InvalidArgument as error:
        faults = (surrogate_of(text, name(at)) for at, text in enumerate(texts))
        found = next((fault for fault in faults if fault is not None), error)
        found.key = found.key or plan.entry.key
        raise found from None


_PAIRS = replace(embedding.TEXTS, pack=_pack_pairs,
                 heavy=lambda plan, inputs: native_calls.are_many(inputs))
