"""Labels of tokens: the results, and how labels of tokens become labels of spans.

The rules are those of transformers' TokenClassificationPipeline
(https://huggingface.co/docs/transformers/main_classes/pipelines), so that a model gives the same spans in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


#: Memory in bytes of a span without its word, and of a character of a word.
_SPAN_BYTES, _CHAR_BYTES = 256, 4


# ---- results -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class LabelledSpan:
    """A part of a text with its label. ``str()`` returns the word.

    Attributes:
        label: name of the label; with an aggregation, without its prefix ``B-`` or ``I-``.
        score: score of the label, 0 to 1; with an aggregation, the mean over the tokens or words of the span.
        start, end: ``text[start:end]`` is the span in the text of the caller. Indices of characters (code points), as
            Python counts them.
        word: the tokens of the span as the tokenizer joins them: normalised, such as in lower case.
        index: index of the token in the sequence of the model, which counts special tokens; None with an aggregation.
    """

    label: str
    score: float
    start: int
    end: int
    word: str
    index: int | None = None

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True, slots=True)
class TokenClassification(Sequence[LabelledSpan]):
    """The labelled spans of a text: a sequence of :class:`LabelledSpan`, in the order of the text.

    Attributes:
        spans: the spans.
        labels: names of all labels of the model.
        model: key of the model that computed the labels.
        aggregation: how labels of tokens became spans.
    """

    spans: tuple[LabelledSpan, ...]
    labels: tuple[str, ...]
    model: str
    aggregation: str

    def __len__(self) -> int:
        return len(self.spans)

    @overload
    def __getitem__(self, at: int) -> LabelledSpan: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[LabelledSpan, ...]: ...

    def __getitem__(self, at: int | slice) -> LabelledSpan | tuple[LabelledSpan, ...]:
        return self.spans[at]

    def __iter__(self) -> Iterator[LabelledSpan]:
        return iter(self.spans)


@dataclass(frozen=True, slots=True)
class TokenClassifications(Sequence[TokenClassification]):
    """The labelled spans of a list of texts: a sequence with a :class:`mpool.results.TokenClassification`
    per text.

    Attributes:
        results: the spans of each text.
        labels: names of all labels of the model.
        model: key of the model that computed the labels.
        aggregation: how labels of tokens became spans.
    """

    results: tuple[TokenClassification, ...]
    labels: tuple[str, ...]
    model: str
    aggregation: str

    def __len__(self) -> int:
        return len(self.results)

    @overload
    def __getitem__(self, at: int) -> TokenClassification: ...

    @overload
    def __getitem__(self, at: slice) -> TokenClassifications: ...

    def __getitem__(self, at: int | slice) -> TokenClassification | TokenClassifications:
        if isinstance(at, slice):
            return TokenClassifications(self.results[at], self.labels, self.model, self.aggregation)
        return self.results[at]

    def __iter__(self) -> Iterator[TokenClassification]:
        return iter(self.results)


# ---- labels --------------------------------------------------------------------------------------------------------

@dataclass(frozen=True, slots=True)
class LabelTable:
    """The names of a model's labels, taken apart.

    Attributes:
        names: the names.
        tags: the names without the prefix ``B-`` or ``I-``: neighbours with the same tag belong together.
        begins: True for names with the prefix ``B-``, which begin a span.
        groups: the name of a span with this label: all after the first hyphen.
    """

    names: tuple[str, ...]
    tags: tuple[str, ...]
    begins: tuple[bool, ...]
    groups: tuple[str, ...]

    @staticmethod
    def of(names: tuple[str, ...]) -> LabelTable:
        """Return the table of a model's labels."""
        return LabelTable(names, tuple(name[2:] if name.startswith(("B-", "I-")) else name for name in names),
                          tuple(name.startswith("B-") for name in names),
                          tuple(name.split("-", 1)[-1] for name in names))


@dataclass(frozen=True, slots=True)
class Rules:
    """How labels of tokens become spans.

    Attributes:
        table: the labels.
        aggregation: ``"none"``, ``"simple"``, ``"first"``, ``"average"`` or ``"max"``.
        ignored: names of labels without spans; with an aggregation, names of groups.
        join: function that joins texts of tokens, of the tokenizer.
    """

    table: LabelTable
    aggregation: str
    ignored: frozenset[str]
    join: Callable[[Sequence[str]], str]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of a window of a text, without special tokens.

    Attributes:
        words: text of each token in the vocabulary; for an unknown token, its part of the input text.
        places: half-open range (start, end) of each token, in characters of the input text.
        continues: True for tokens that continue a word.
        first: index of the first token in the sequence of the model.
    """

    words: Sequence[str]
    places: Sequence[tuple[int, int]]
    continues: Sequence[bool]
    first: int


def spans_of(tokens: Tokens, scores: NDArray[np.float32], rules: Rules) -> list[LabelledSpan]:
    """Return the labelled spans of a window.

    Args:
        tokens: its tokens.
        scores: score of each label for each token, float32 ``(tokens, labels)``.
        rules: how labels become spans.
    """
    if rules.aggregation in ("none", "simple"):
        best = scores.argmax(axis=1) if len(scores) else np.zeros(0, np.int64)
        top = np.take_along_axis(scores, best[:, None], axis=1)[:, 0]
        if rules.aggregation == "none":
            return _singles(tokens, best.tolist(), top.tolist(), rules)
        units = [(at, at + 1) for at in range(len(best))]
        return _grouped(tokens, units, best.tolist(), top, rules)
    starts = [at for at, continues in enumerate(tokens.continues) if not continues or at == 0]
    units = list(zip(starts, [*starts[1:], len(tokens.words)]))
    chosen = [_label_of_word(scores[first:end], rules.aggregation) for first, end in units]
    return _grouped(tokens, units, [label for label, _ in chosen],
                    np.array([score for _, score in chosen], dtype=np.float32), rules)


def _label_of_word(scores: NDArray[np.float32], aggregation: str) -> tuple[int, float]:
    """Return the label of a word and its score; ``scores``: of its tokens, float32 ``(tokens, labels)``."""
    if aggregation == "average":
        row = scores.mean(axis=0)
    else:
        row = scores[0 if aggregation == "first" else int(scores.max(axis=1).argmax())]
    label = int(row.argmax())
    return label, row[label]


def _singles(tokens: Tokens, best: list[int], top: list[float], rules: Rules) -> list[LabelledSpan]:
    names = rules.table.names
    return [LabelledSpan(names[label], top[at], *tokens.places[at], tokens.words[at], tokens.first + at)
            for at, label in enumerate(best) if names[label] not in rules.ignored]


def _grouped(tokens: Tokens, units: Sequence[tuple[int, int]], best: Sequence[int], top: NDArray[np.float32],
             rules: Rules) -> list[LabelledSpan]:
    """Join neighbours with the same tag to spans.

    Args:
        tokens: tokens of the window.
        units: first token of each word, and the token after its last one. Without words, each token is a unit.
        best, top: label of each unit, and its score.
        rules: how labels become spans.
    """
    table, words = rules.table, rules.aggregation != "simple"
    found: list[LabelledSpan] = []
    begin = 0
    for end in range(1, len(units) + 1):
        if end < len(units) and table.tags[best[end]] == table.tags[best[end - 1]] and not table.begins[best[end]]:
            continue
        name = table.groups[best[begin]]
        if name not in rules.ignored:
            parts = [tokens.words[first:last] for first, last in units[begin:end]]
            texts = [rules.join(part) if words else part[0] for part in parts]
            found.append(LabelledSpan(name, float(top[begin:end].mean()), tokens.places[units[begin][0]][0],
                                      tokens.places[units[end - 1][1] - 1][1], rules.join(texts)))
        begin = end
    return found


def merged(spans: Iterable[LabelledSpan]) -> list[LabelledSpan]:
    """Return the spans of all windows of a text. Among spans that overlap, the longest one stays; among equally long
    ones, the one with the highest score."""
    found: list[LabelledSpan] = []
    for span in sorted(spans, key=lambda one: one.start):
        last = found[-1] if found else None
        if last is None or not last.start <= span.start < last.end:
            found.append(span)
        elif (span.end - span.start, span.score) > (last.end - last.start, last.score):
            found[-1] = span
    return found


def size_of(spans: Iterable[LabelledSpan]) -> int:
    """Return the memory of spans in bytes."""
    return sum(_SPAN_BYTES + _CHAR_BYTES * len(span.word) for span in spans)


# ---- windows -------------------------------------------------------------------------------------------------------

def count_windows(tokens: int, room: int, stride: int) -> int:
    """Return the number of windows of a text; arguments as for :func:`windows`."""
    return 1 if tokens <= room else 1 + -(-(tokens - room) // (room - stride))


def windows(tokens: int, room: int, stride: int, left: bool) -> list[tuple[int, int]]:
    """Return the range of tokens (first, end) of each of the overlapping windows into which HF tokenizers cut a text.

    Args:
        tokens: number of tokens of the text.
        room: maximum number of tokens of a window.
        stride: number of tokens that neighbours have in common, less than ``room``.
        left: True if the first window is at the end of the text (``truncation_side`` is left).
    """
    step = room - stride
    found = [(at * step, min(at * step + room, tokens)) for at in range(count_windows(tokens, room, stride))]
    return [(tokens - end, tokens - first) for first, end in found] if left else found


__all__ = ["LabelTable", "LabelledSpan", "Rules", "TokenClassification", "TokenClassifications", "Tokens",
           "count_windows", "merged", "size_of", "spans_of", "windows"]
