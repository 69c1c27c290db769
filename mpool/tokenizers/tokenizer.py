"""Text to token ids and back, whatever file the tokenizer came in.

:class:`Tokenizer` wraps a HF ``tokenizers`` tokenizer, read from a ``tokenizer.json`` or built from a GGUF vocabulary,
and adds what mpool needs: packed arrays for the C core, truncation that keeps special tokens, control tokens that only
a chat template can write, and the bytes of every token for streaming.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from ..errors import ContextOverflow, FormatError, InternalError, InvalidArgument, MpoolError
from ..models.spec import TokenizerSource, TokenTable

if TYPE_CHECKING:
    import tokenizers

    from .gguf_vocab import GGUFVocab

#: Characters from which on a single text is worth handing over the GIL for.
_LONG_TEXT = 2048

#: Characters per token to look at when only the first tokens of a long text are wanted.
_HEAD_CHARS_PER_TOKEN = 12

#: Characters that stand in a rendered prompt where a control token's text was cut in two (see
#: mpool.conversation.template). They are noncharacters, which no exchanged text may hold.
MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3"

#: Special tokens that transformers' files and chat templates have names for.
CONFIG_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Packed(NamedTuple):
    """Several texts in one array: those of text ``i`` are ``ids[offsets[i]:offsets[i + 1]]``.

    Attributes:
        ids: token ids, int32 ``[total]``, C-contiguous.
        offsets: int64 ``[texts + 1]``.
    """

    ids: np.ndarray
    offsets: np.ndarray


class Pairs(NamedTuple):
    """As :class:`Packed`, of pairs of texts; ``second[i]`` (int32 ``[pairs]``) is the place within pair ``i`` at which
    its second text begins."""

    ids: np.ndarray
    offsets: np.ndarray
    second: np.ndarray


class Tokenizer:
    """A tokenizer. :meth:`from_source` makes one; safe to use from any number of threads.

    Attributes:
        vocab_size: number of ids, the highest id plus one.
        special: name -> id of the special tokens the model has: ``bos``, ``eos``, ``unk``, ``sep``, ``pad``, ``cls``,
            ``mask`` (GGUF also ``eot``, ``eom``, ``fim_*``).
        prefix_ids, suffix_ids: what ``add_special`` puts around a text.
        eog_ids: ids that end a generation, ascending.
        control_texts: texts of the control tokens.
    """

    vocab_size: int
    special: Mapping[str, int]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    eog_ids: tuple[int, ...]
    control_texts: tuple[str, ...]

    #: Opens a source; :mod:`mpool.tokenizers.opening`, which knows the subclasses, sets it.
    _open: ClassVar[Callable[[TokenizerSource, GGUFVocab | None], Tokenizer]]

    @staticmethod
    def from_source(source: TokenizerSource, vocab: GGUFVocab | None = None) -> Tokenizer:
        """Reads a tokenizer; see :func:`mpool.tokenizers.opening.open_tokenizer`."""
        return Tokenizer._open(source, vocab)

    @property
    def kind(self) -> str:
        """``bpe``, ``spm``, ``unigram``, ``wordpiece`` or ``wordlevel``."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """The tokenizer is fully built; no part is deferred."""
        return True

    def finish(self) -> None:
        """Builds the deferred part now; takes up to 0.5 s."""

    def finish_later(self) -> None:
        """Runs :meth:`finish` on another thread if a part is deferred and more than one text came."""

    # implemented by the two subclasses

    def _plain(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Ids of texts in which control tokens are plain text, without special tokens around them."""
        raise NotImplementedError

    def _parsed(self, text: str, mark: str | None) -> list[int]:
        """Ids of a text in which control tokens are control tokens; ``mark`` is dropped wherever it stands."""
        raise NotImplementedError

    def token_table(self) -> TokenTable:
        """Bytes that each token adds to a text, for streaming out of C.

        ``data`` is bytes, ``offsets`` int64 ``[vocab_size + 1]``, ``control`` one byte per token.
        """
        raise NotImplementedError

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``; ``skip_special=False`` shows control tokens by their names.

        Bytes that are not UTF-8 (a character cut in two) become U+FFFD.

        Raises:
            InvalidArgument: an id is not in the vocabulary.
        """
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        """Text that the vocabulary has for ``token``: ``"Ġthe"``, ``"<|im_end|>"``."""
        raise NotImplementedError

    def token_id(self, text: str) -> int | None:
        """Id of the token with exactly this text in the vocabulary, or ``None``."""
        raise NotImplementedError

    # shared by the subclasses

    _truncate_left = False
    _words_apart = False  # a text's first words have the same ids whatever follows them

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> np.ndarray:
        """Token ids of ``text``, int32 ``[tokens]``.

        A text of 2,048 characters or more is encoded without the GIL; a short one takes less than handing it over.

        Args:
            text: any string, the empty one included.
            add_special: put :attr:`prefix_ids` and :attr:`suffix_ids` around it.
            parse_special: take texts of control tokens (``"<|im_end|>"``) for those tokens. Leave it off for text
                that comes from a user: it is then plain text.

        Raises:
            InvalidArgument: ``text`` is not a string, or holds half of a surrogate pair.
        """
        ids = self._one(text, parse_special)
        if add_special and (self.prefix_ids or self.suffix_ids):
            ids = [*self.prefix_ids, *ids, *self.suffix_ids]
        return np.array(ids, dtype=np.int32)

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = False,
                     max_tokens: int | None = None, truncate: bool = True) -> Packed:
        """Token ids of many texts, packed for the C core.

        Args:
            texts: strings.
            add_special, parse_special: as for :meth:`encode`.
            max_tokens: longest allowed, special tokens included; ``None`` for no limit.
            truncate: cut what is longer, keeping the special tokens around it; else it is an error.

        Raises:
            InvalidArgument: a text is not a string or holds half of a surrogate pair (the message says which), or
                ``max_tokens`` leaves no room beside the special tokens.
            ContextOverflow: ``truncate`` is off and a text is longer than ``max_tokens``.
        """
        if isinstance(texts, str):
            raise InvalidArgument(param="texts", got="one str", allowed="a list of strings")
        texts = list(texts)
        prefix, suffix = (self.prefix_ids, self.suffix_ids) if add_special else ((), ())
        around = len(prefix) + len(suffix)
        room = None if max_tokens is None else max_tokens - around
        if room is not None and room < 0:
            raise InvalidArgument(param="max_tokens", got=str(max_tokens),
                                  allowed=f"{around} or more, the number of special tokens",
                                  hint="Raise max_tokens, or set add_special=False")
        if parse_special:
            bodies: list[Sequence[int]] = [self._one(text, True, at) for at, text in enumerate(texts)]
        else:
            bodies = self._many(texts, room if truncate else None)
        if room is not None:
            for at, body in enumerate(bodies):
                if len(body) > room:
                    if not truncate:
                        raise ContextOverflow(f"text {at} has {len(body) + around} tokens, the limit is {max_tokens}",
                                              tokens=len(body) + around, limit=max_tokens,
                                              hint="Shorten it, or set truncate=True")
                    bodies[at] = body[len(body) - room:] if self._truncate_left else body[:room]
        offsets = np.zeros(len(bodies) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, bodies), dtype=np.int64, count=len(bodies)) + around, out=offsets[1:])
        pieces: Iterator[Sequence[int]]
        if around:
            pieces = chain.from_iterable((prefix, body, suffix) for body in bodies)
        else:
            pieces = iter(bodies)
        ids = np.fromiter(chain.from_iterable(pieces), dtype=np.int32, count=int(offsets[-1]))
        return Packed(ids, offsets)

    @property
    def pair_ids(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Ids before, between and behind the two texts of a pair.

        Raises:
            FormatError: the tokenizer's file does not say.
        """
        raise NotImplementedError

    def encode_pairs(self, first: str, others: Sequence[str], *, max_tokens: int, truncate: bool = True) -> Pairs:
        """Token ids of pairs of one text with each of others, packed for the C core.

        Args:
            max_tokens: longest pair allowed, special tokens included.
            truncate: cut what is longer, from the longer of the two texts as long as it is the longer one (the strategy
                ``longest_first`` of HF tokenizers); else it is an error.

        Raises:
            InvalidArgument: a text is not a string or holds half of a surrogate pair, or ``max_tokens`` leaves no room
                beside the special tokens.
            ContextOverflow: ``truncate`` is off and a pair is longer than ``max_tokens``.
        """
        before, between, behind = self.pair_ids
        around = len(before) + len(between) + len(behind)
        room = max_tokens - around
        if room < 2:
            raise InvalidArgument(param="max_tokens", got=str(max_tokens),
                                  allowed=f"{around + 2} or more: {around} special tokens and one of each text")
        head = self._many([first], None)[0]
        ids: list[int] = []
        offsets, second = [0], []
        for at, body in enumerate(self._many(list(others), None)):
            a, b = len(head), len(body)
            if a + b > room:
                if not truncate:
                    raise ContextOverflow(f"document {at} with the query has {a + b + around} tokens, the limit is "
                                          f"{max_tokens}", tokens=a + b + around, limit=max_tokens,
                                          hint="Shorten it, or set truncate=True")
                a, b = _longest_first(a, b, room)
            ids += [*before, *self._cut(head, a), *between]
            second.append(len(ids) - offsets[-1])
            ids += [*self._cut(body, b), *behind]
            offsets.append(len(ids))
        return Pairs(np.array(ids, np.int32), np.array(offsets, np.int64), np.array(second, np.int32))

    def _cut(self, ids: Sequence[int], room: int) -> Sequence[int]:
        if len(ids) <= room:
            return ids
        return ids[len(ids) - room:] if self._truncate_left else ids[:room]

    def count(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> int:
        """Number of tokens of ``text``, as :meth:`encode` would give."""
        around = len(self.prefix_ids) + len(self.suffix_ids) if add_special else 0
        return len(self._one(text, parse_special)) + around

    def encode_marked(self, text: str, mark: str | None, stand_in: str | None = None) -> np.ndarray:
        """Ids of a rendered chat prompt, int32 ``[tokens]``, without special tokens around it.

        Control tokens are parsed, except where ``mark`` (one of :data:`MARKS`) stands within their text; the marks
        themselves are not part of the text. ``stand_in``: a character that is cut out as control tokens are, and
        becomes -1.
        """
        try:
            pieces = [_checked(text, None)] if stand_in is None else _checked(text, None).split(stand_in)
            ids = list(self._parsed(pieces[0], mark))
            for piece in pieces[1:]:
                ids += -1, *self._parsed(piece, mark)
            return np.array(ids, dtype=np.int32)
        except (UnicodeEncodeError, TypeError):
            raise _bad_text(text, None) from None

    def fit(self, rows: int, *, file: str | None = None) -> None:
        """Fits the tokenizer to a model whose embedding has ``rows`` rows. Spare rows are allowed. Control tokens
        beyond them are allowed unless they begin or end a text: Gemma 3's text models list one for images. A request
        for such a token is refused.

        Raises:
            FormatError: other tokens have no row.
        """
        if self.vocab_size > rows and not self._leaves_out(rows):
            raise FormatError(file=file or "the model", field="token ids", got=f"0 to {self.vocab_size - 1}",
                              allowed=f"0 to {rows - 1}, the rows of the embedding",
                              hint="The tokenizer belongs to another model")

    def _leaves_out(self, rows: int) -> bool:
        """Leave tokens from ``rows`` on out, or say that they cannot be spared."""
        return False

    def special_texts(self) -> dict[str, str]:
        """Texts of the special tokens under the names chat templates use: ``bos_token``, ``eos_token``, ..."""
        return {f"{name}_token": self.token_text(self.special[name]) for name in CONFIG_TOKENS
                if name in self.special}

    def _one(self, text: str, parse_special: bool, at: int | None = None) -> Sequence[int]:
        _checked(text, at)
        try:
            return self._parsed(text, None) if parse_special else self._plain([text])[0]
        except MpoolError:
            raise
        except (UnicodeEncodeError, TypeError):
            raise _bad_text(text, at) from None

    def _many(self, texts: list[str], room: int | None) -> list[Sequence[int]]:
        try:
            if room is not None and self._words_apart and not self._truncate_left:
                return self._heads(texts, room)
            return self._plain(texts)
        except MpoolError:
            raise
        except (UnicodeEncodeError, TypeError):
            for at, text in enumerate(texts):
                _checked(text, at)
                try:
                    text.encode()
                except UnicodeEncodeError:
                    raise _bad_text(text, at) from None
            raise

    def _heads(self, texts: list[str], room: int) -> list[Sequence[int]]:
        """At least the first ``room`` ids of each text, without going through all of a long one."""
        reach = _HEAD_CHARS_PER_TOKEN * (room + 8)
        cuts = [text.rfind(" ", 0, reach) if isinstance(text, str) and len(text) > 2 * reach else -1
                for text in texts]
        bodies = self._plain([text if cut < 0 else text[:cut] for text, cut in zip(texts, cuts)])
        short = [at for at, cut in enumerate(cuts) if cut >= 0 and len(bodies[at]) < room]
        for at, body in zip(short, self._plain([texts[at] for at in short])):
            bodies[at] = body
        return bodies

    def _run(self, hf: tokenizers.Tokenizer, texts: Sequence[str]) -> list[Sequence[int]]:
        try:
            if len(texts) == 1 and len(texts[0]) < _LONG_TEXT:
                return [hf.encode(texts[0], add_special_tokens=False).ids]
            # these let go of the GIL
            run = getattr(hf, "encode_batch_fast", hf.encode_batch)
            return [encoding.ids for encoding in run(list(texts), add_special_tokens=False)]
        except BaseException as error:
            if type(error).__name__ == "PanicException":  # raised by the Rust side, not an Exception
                raise InternalError(f"the tokenizer failed: {error}") from None
            raise


def _longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """Lengths of two texts that are together too long for ``room``, as HF tokenizers cut them."""
    short, long = min(a, b), max(a, b)
    long = max(short, room - short) if short <= room else short
    if short + long > room:
        short, long = room // 2, room // 2 + room % 2
    return (short, long) if a <= b else (long, short)


def _checked(text: str, at: int | None) -> str:
    if not isinstance(text, str):
        which = "text" if at is None else f"texts[{at}]"
        raise InvalidArgument(param=which, got=type(text).__name__, allowed="str")
    return text


def _bad_text(text: str, at: int | None) -> InvalidArgument:
    which = "text" if at is None else f"texts[{at}]"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return InvalidArgument(param=which,
                               got=f"half of a surrogate pair (U+{ord(text[error.start]):04X}) at character "
                                   f"{error.start}",
                               allowed="Unicode text", hint="text.encode('utf-8', 'replace').decode() makes it valid")
    return InvalidArgument(f"`{which}` cannot be encoded", param=which)


def check_ids(ids: Iterable[int], size: int) -> list[int]:
    ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if ids and not (0 <= min(ids) and max(ids) < size):
        wrong = next(token for token in ids if not 0 <= token < size)
        raise InvalidArgument(param="ids", got=f"{wrong}, which is not in the vocabulary",
                              allowed=f"token ids from 0 to {size - 1}")
    return ids
