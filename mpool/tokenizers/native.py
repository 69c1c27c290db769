"""The one place that calls the tokenizers library to encode and decode.

The calls of the library have no limits: a text can grow in the normalizer, and a regular expression can take hours. A
panic of its Rust code prints a backtrace and raises an error that is not an ``Exception``. :class:`Native` bounds the
text of a call before the call, and moves tokenizers whose expressions may panic into a process of their own
(:mod:`mpool.tokenizers.isolated`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tokenizers import Tokenizer

from ..errors import InvalidArgument, LimitError, Unsupported
from ..host.address_space import require_if_limited
from . import limits
from .growth import MAX_SQUARED, Growth
from .patterns import Cost

if TYPE_CHECKING:
    import tokenizers

    from .isolated import IsolatedTokenizer

T = TypeVar("T")

#: Minimum number of characters of a single text that is encoded without the GIL. For shorter texts, releasing the GIL
#: costs more than it gains.
LONG_TEXT = 2048
#: Characters that any expression can process in negligible time.
_MAX_PROBE = 12
#: Bounds of a tokenizer that neither adds text nor has an expression with backtracking.
_HARMLESS = Growth()
#: Hint for a regular expression that gives up.
_SHORTEN = "Shorten or split the text: a regular expression of the tokenizer takes too many steps for it"
#: Address space that must be free for a call: texts of a call that are not sent to a process take less.
_SPACE = 32 << 20
#: Characters that are normalised at a time when the length of a normalised text is measured.
_SLICE = 1 << 19


class Spans(NamedTuple):
    """The tokens of a text with their places.

    Attributes:
        ids: token ids.
        offsets: index of the first character of each token in the text, and of the character after its last one.
    """

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]]


def call(function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call a function of the tokenizers library.

    Raises:
        InvalidArgument: the function failed, or panicked: the tokenizer cannot process its input.
        MemoryError: there is too little address space; the library would abort the process.
    """
    require_if_limited(_SPACE, "the tokenizer")
    try:
        return function(*args, **keywords)
    except BaseException as error:
        if type(error).__name__ == "PanicException":  # it is not a subclass of Exception
            raise _failed(str(error)) from error
        if type(error) is Exception:  # the class of all other errors of the library's Rust code
            raise _failed(str(error), "The model's tokenizer is incomplete: download it again") from error
        raise


def _failed(reason: str, hint: str = _SHORTEN) -> InvalidArgument:
    return InvalidArgument(f"the tokenizer of the model cannot process this text: {' '.join(reason.split())[:200]}",
                           param="text", hint=hint)


class Native:
    """A tokenizer of the library with bounds. Thread-safe.

    Args:
        hf: the tokenizer.
        growth: its bounds.
    """

    def __init__(self, hf: tokenizers.Tokenizer, growth: Growth = _HARMLESS) -> None:
        self.hf, self._growth = hf, growth
        self._isolated: IsolatedTokenizer | None = None
        # texts up to this number of characters in one call need no further check
        self._free = limits.max_normalized_chars // (growth.normalizer * growth.pre_tokenizer)
        if growth.cost is Cost.LINEAR:
            self._free = min(self._free, MAX_SQUARED // growth.squared)
        elif growth.cost is Cost.UNKNOWN:
            self._free = 0

    def with_slow_model(self) -> Native:
        """Return the tokenizer with the bounds of a model that takes more than a constant time for a character."""
        return Native(self.hf, self._growth.with_slow_model())

    def variant(self, change: Callable[[tokenizers.Tokenizer], object]) -> Native:
        """Return a changed copy of the tokenizer with the same bounds."""
        copy = Tokenizer.from_str(self.hf.to_str())
        change(copy)
        return Native(copy, self._growth)

    def encode(self, texts: Sequence[str], add_special: bool = False) -> list[Sequence[int]]:
        """Encode texts.

        Args:
            texts: the texts.
            add_special: True if the tokenizer's post-processor adds special tokens.

        Raises:
            InvalidArgument: an expression of the tokenizer gives up on a text.
            LimitError: a text is too long after the normalizer, or takes too long.
            UnicodeEncodeError, TypeError: a text contains a lone surrogate, or is not a string.
        """
        if len(texts) == 1 and len(texts[0]) < LONG_TEXT and len(texts[0]) <= self._free:
            return [call(self.hf.encode, texts[0], add_special_tokens=add_special).ids]
        if sum(map(len, texts)) <= self._free:
            return self._batch(texts, add_special)
        return [ids for part in self._parts(texts) for ids in self._bounded(part, add_special)]

    def spans(self, texts: Sequence[str]) -> list[Spans]:
        """Encode texts without special tokens around them. Returns the places of the tokens as well.

        Raises:
            InvalidArgument, LimitError, UnicodeEncodeError, TypeError: as for :meth:`encode`.
        """
        if sum(map(len, texts)) <= self._free:
            return self._batch_spans(texts)
        return [one for part in self._parts(texts) for one in (
            self._batch_spans(part) if self._is_bounded(part) else self._in_process(part, False, True))]

    def encode_pair(self, first: str, second: str) -> tokenizers.Encoding:
        """Encode a pair of short texts with special tokens, to find out what the post-processor does.

        Raises:
            Unsupported: the texts can grow, and an expression may need exponential time for the result.
        """
        if self._growth.cost is Cost.UNKNOWN and self._growth.of(first + second) > _MAX_PROBE:
            raise Unsupported("the normalizer and the regular expressions of the tokenizer are too complex for pairs")
        return call(self.hf.encode, first, second, add_special_tokens=True)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Decode token ids.

        Raises:
            InvalidArgument: the tokenizer fails on these ids.
        """
        return call(self.hf.decode, ids, skip_special_tokens=skip_special)

    def _batch(self, texts: Sequence[str], add_special: bool) -> list[Sequence[int]]:
        # the batch functions release the GIL
        run = getattr(self.hf, "encode_batch_fast", self.hf.encode_batch)
        return [encoding.ids for encoding in call(run, list(texts), add_special_tokens=add_special)]

    def _batch_spans(self, texts: Sequence[str]) -> list[Spans]:
        # encode_batch_fast computes no offsets
        return [Spans(encoding.ids, encoding.offsets)
                for encoding in call(self.hf.encode_batch, list(texts), add_special_tokens=False)]

    def _is_bounded(self, texts: Sequence[str]) -> bool:
        """Return True if the steps of the tokenizer take a bounded time on these texts."""
        cost = self._growth.cost
        return cost is Cost.CONSTANT or \
            cost is Cost.LINEAR and max(map(len, texts)) * self._growth.squared <= MAX_SQUARED

    def _bounded(self, texts: Sequence[str], add_special: bool) -> list[Sequence[int]]:
        if self._is_bounded(texts):
            return self._batch(texts, add_special)
        return [one.ids for one in self._in_process(texts, add_special, False)]

    def _in_process(self, texts: Sequence[str], add_special: bool, places: bool) -> list[Spans]:
        """Encode texts in a process of its own. Without ``places``, the offsets are empty."""
        from .isolated import IsolatedTokenizer  # child processes, which few tokenizers need

        if self._isolated is None:
            self._isolated = IsolatedTokenizer(self.hf.to_str(), self.hf.encode_special_tokens)
        try:
            ids, offsets = self._isolated.encode(texts, add_special, places)
        except IsolatedTokenizer.Failed as error:
            raise _failed(str(error)) from None
        return [Spans(*one) for one in zip(ids, offsets)]

    def _parts(self, texts: Sequence[str]) -> Iterator[list[str]]:
        """Split the texts of a call so that each part stays within the limit after normalisation."""
        part: list[str] = []
        total = 0
        for text in texts:
            size = self._growth.of(text)
            if size > limits.max_normalized_chars and self._growth.cost is Cost.CONSTANT:
                size = self._measured(text)
            if part and total + size > limits.max_normalized_chars:
                yield part
                part, total = [], 0
            part.append(text)
            total += size
        if part:
            yield part

    def _measured(self, text: str) -> int:
        """Return the length of a text after normalisation, measured slice by slice, times the other factors.

        Raises:
            LimitError: it exceeds the limit.
        """
        growth, normalizer, total = self._growth, self.hf.normalizer, 0
        after = growth.ascii_pre_tokenizer if text.isascii() else growth.pre_tokenizer
        step = max(1, min(_SLICE, limits.max_normalized_chars // growth.normalizer // 4))
        for at in range(0, len(text), step):
            part = text[at:at + step]
            total += after * (len(part) if normalizer is None else len(call(normalizer.normalize_str, part)))
            if total > limits.max_normalized_chars:
                raise LimitError(f"a text of {len(text):,} characters has more than {limits.max_normalized_chars:,} "
                                 "characters after the normalizer of the tokenizer", param="text",
                                 hint="Shorten the text, or raise mpool.tokenizers.limits.max_normalized_chars")
        return total


__all__ = ["LONG_TEXT", "Native", "Spans", "call"]
