"""Text to token ids and back, for all tokenizer file formats.

:class:`Tokenizer` wraps a HF ``tokenizers`` tokenizer that was read from a ``tokenizer.json`` or built from a GGUF
vocabulary. It adds packed arrays for the C core, truncation that keeps special tokens, control tokens that only a chat
template can write, and the bytes of every token for streaming.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from ..errors import ContextOverflow, FormatError, InvalidArgument, MpoolError
from ..host import native_calls
from ..host.resources import list_of_caller
from ..models.spec import TokenizerSource, TokenTable
from .specials import BY_TEXT, compile_trie

if TYPE_CHECKING:
    from .gguf_vocab import GGUFVocab
    from .native import Spans

T = TypeVar("T")

#: Characters per token to encode when only the first tokens of a long text are needed.
_HEAD_CHARS_PER_TOKEN = 12

#: Characters that are inserted into texts of control tokens in a rendered prompt, so that they stay plain text (see
#: mpool.conversation.template). They are noncharacters, which text for interchange must not contain.
MARKS = "\ufdd0\ufdd1\ufdd2\ufdd3"

#: Special tokens that have a key in transformers' files and a name in chat templates.
CONFIG_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Packed(NamedTuple):
    """Several texts in one array. The ids of text ``i`` are ``ids[offsets[i]:offsets[i + 1]]``.

    Attributes:
        ids: token ids, int32 ``[total]``, C-contiguous.
        offsets: int64 ``[texts + 1]``.
    """

    ids: np.ndarray
    offsets: np.ndarray


class Pairs(NamedTuple):
    """Pairs of texts, packed as in :class:`Packed`.

    Attributes:
        ids: token ids, int32 ``[total]``.
        offsets: int64 ``[pairs + 1]``.
        second: int32 ``[pairs]``; index within pair ``i`` from which its tokens have the type of the second text, and
            1 or more; None: all tokens have the type of the first text.
    """

    ids: np.ndarray
    offsets: np.ndarray
    second: np.ndarray | None


class Tokenizer:
    """A tokenizer, created by :meth:`from_source`. Thread-safe.

    Attributes:
        vocab_size: number of ids: the highest id plus one.
        special: name -> id of the model's special tokens: ``bos``, ``eos``, ``unk``, ``sep``, ``pad``, ``cls``,
            ``mask`` (GGUF also ``eot``, ``eom``, ``fim_*``).
        prefix_ids, suffix_ids: ids that ``add_special`` puts before and after a text.
        eog_ids: ids of tokens that end a generation, ascending.
        control_texts: texts of the control tokens.
    """

    vocab_size: int
    special: Mapping[str, int]
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    eog_ids: tuple[int, ...]
    control_texts: tuple[str, ...]

    #: Opens a source. Set by :mod:`mpool.tokenizers.opening`, which imports the subclasses.
    _open: ClassVar[Callable[[TokenizerSource, GGUFVocab | None], Tokenizer]]

    @staticmethod
    def from_source(source: TokenizerSource, vocab: GGUFVocab | None = None) -> Tokenizer:
        """Open a tokenizer; see :func:`mpool.tokenizers.opening.open_tokenizer`."""
        return Tokenizer._open(source, vocab)

    @property
    def kind(self) -> str:
        """``bpe``, ``spm``, ``unigram``, ``wordpiece`` or ``wordlevel``."""
        raise NotImplementedError

    @property
    def complete(self) -> bool:
        """True if the tokenizer is fully built and no part is deferred."""
        return True

    def finish(self) -> None:
        """Build the deferred part now. Takes up to 0.5 s."""

    def finish_later(self) -> None:
        """Run :meth:`finish` on another thread if a part is deferred and more than one text was encoded."""

    # implemented by the two subclasses

    def _encode_plain(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Encode texts, with control tokens as plain text and without special tokens around a text."""
        raise NotImplementedError

    def _encode_parsed(self, text: str, mark: str | None) -> list[int]:
        """Encode a text and recognise control tokens in it. ``mark`` is removed from the text."""
        raise NotImplementedError

    def _encode_spans(self, texts: Sequence[str], parse_special: bool) -> list[Spans]:
        """Encode texts without special tokens around them, with the places of the tokens."""
        raise NotImplementedError

    def join_tokens(self, tokens: Sequence[str]) -> str:
        """Join texts of tokens to a text, as the decoder of the tokenizer does."""
        raise NotImplementedError

    @property
    def marks_subwords(self) -> bool:
        """True if a token that continues a word has a prefix in the vocabulary, such as ``##`` of WordPiece."""
        raise NotImplementedError

    def token_table(self) -> TokenTable:
        """Return the bytes that each token adds to a text, for streaming in the core.

        ``data`` is bytes, ``offsets`` int64 ``[vocab_size + 1]``, ``control`` one byte per token.
        """
        raise NotImplementedError

    def text_bytes(self, ids: Sequence[int], *, skip_special: bool = True) -> int:
        """Return the number of bytes of the text of ``ids``, without decoding them. Ids that are not in the vocabulary
        count as 0; ``skip_special`` is that of :meth:`decode`."""
        table = self.token_table()
        tokens, counts = np.unique(np.asarray(ids, dtype=np.int64), return_counts=True)
        known = (tokens >= 0) & (tokens < self.vocab_size)
        tokens, counts = tokens[known], counts[known]
        sizes = np.asarray(table.offsets)[tokens + 1] - np.asarray(table.offsets)[tokens]
        if not skip_special:
            for at in np.flatnonzero(np.frombuffer(table.control, np.uint8)[tokens]):
                sizes[at] = len(self.token_text(int(tokens[at])).encode())
        return int(sizes @ counts)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decode ``ids`` to text.

        Bytes that are not UTF-8 (part of a character) become U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave out control tokens; False: include their texts.

        Raises:
            InvalidArgument: an id is not in the vocabulary.
        """
        raise NotImplementedError

    def token_text(self, token: int) -> str:
        """Return the text of ``token`` in the vocabulary: ``"Ġthe"``, ``"<|im_end|>"``."""
        raise NotImplementedError

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that ``token`` adds to a text, which may be part of a UTF-8 character."""
        table = self.token_table()
        return bytes(table.data[table.offsets[token]:table.offsets[token + 1]])

    def token_id(self, text: str) -> int | None:
        """Return the id of the token with exactly this text in the vocabulary, or None."""
        raise NotImplementedError

    def median_length(self) -> int:
        """Return the median length of the vocabulary's tokens in characters, rounded down, at least 1."""
        raise NotImplementedError

    # shared by the subclasses

    def fill_in_tokens(self) -> tuple[int, int, int] | None:
        """Return the ids of the tokens before the prefix, before the suffix and before the middle of a text to fill in;
        None if the vocabulary lacks one of them."""
        before, between, after = (self._special_id(name) for name in ("fim_pre", "fim_suf", "fim_mid"))
        return None if before is None or between is None or after is None else (before, between, after)

    def fill_in_prompt(self, before: Iterable[int], after: Iterable[int]) -> list[int] | None:
        """Return the prompt whose completion belongs between two texts, given as token ids without the special tokens
        around a text; None if the vocabulary has no tokens for this."""
        tokens = self.fill_in_tokens()
        if tokens is None:
            return None
        prefix, suffix, middle = tokens
        return [*self.prefix_ids, prefix, *before, suffix, *after, middle]

    def fill_in_ends(self) -> tuple[int, ...]:
        """Return the ids of the tokens that end a middle, because they begin another part, text or file."""
        return tuple(token for name in BY_TEXT if name.startswith("fim_") and name != "fim_pad"
                     and (token := self._special_id(name)) is not None)

    def _special_id(self, name: str) -> int | None:
        """Return the id of a token of :data:`mpool.tokenizers.specials.BY_TEXT`, or None."""
        if name in self.special:
            return self.special[name]
        return next((token for text in BY_TEXT[name] if (token := self.token_id(text)) is not None), None)

    @property
    def truncates_left(self) -> bool:
        """True if truncation removes the beginning of a text."""
        return self._truncate_left

    _truncate_left = False
    _longest: int | None = None  # characters of a text that one token has at most; 0: any number
    _controls: re.Pattern[str] | None = None  # finds texts of control tokens
    _words_independent = False  # the ids of a text's first words do not depend on the words after them

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> np.ndarray:
        """Encode ``text`` to token ids, int32 ``[tokens]``.

        A text of 2,048 characters or more is encoded without the GIL; for shorter texts, releasing it costs more.

        Args:
            text: any string, including the empty one.
            add_special: put :attr:`prefix_ids` and :attr:`suffix_ids` around the ids.
            parse_special: encode texts of control tokens (``"<|im_end|>"``) as those tokens. Leave this off for text
                from users: control tokens are then plain text.

        Raises:
            InvalidArgument: ``text`` is not a string, or contains a lone surrogate.
        """
        ids = self._encode_one(text, parse_special)
        if add_special and (self.prefix_ids or self.suffix_ids):
            ids = [*self.prefix_ids, *ids, *self.suffix_ids]
        return np.array(ids, dtype=np.int32)

    def encode_batch(self, texts: Sequence[str], *, add_special: bool = True, parse_special: bool = False,
                     max_tokens: int | None = None, truncate: bool = True) -> Packed:
        """Encode many texts, packed for the C core.

        Args:
            texts: strings.
            add_special, parse_special: as in :meth:`encode`.
            max_tokens: maximum number of ids of a text, including special tokens; None: no limit.
            truncate: truncate longer texts, and keep the special tokens around them; False: raise an error.

        Raises:
            InvalidArgument: a text is not a string or contains a lone surrogate (the message names its index), or
                ``max_tokens`` is smaller than the number of special tokens.
            ContextOverflow: ``truncate`` is off and a text is longer than ``max_tokens``.
        """
        if isinstance(texts, str):
            raise InvalidArgument(param="texts", got="a single string", allowed="a list of strings")
        texts = list_of_caller(texts)
        prefix, suffix = (self.prefix_ids, self.suffix_ids) if add_special else ((), ())
        around = len(prefix) + len(suffix)
        room = None if max_tokens is None else max_tokens - around
        if room is not None and room < 0:
            raise InvalidArgument(param="max_tokens", got=str(max_tokens),
                                  allowed=f"{around} or more, the number of special tokens",
                                  hint="Raise max_tokens, or set add_special=False")
        if parse_special:
            bodies: list[Sequence[int]] = [self._encode_one(text, True, at) for at, text in enumerate(texts)]
        else:
            bodies = self._encode_many(texts, room if truncate else None)
        lengths = np.fromiter(map(len, bodies), dtype=np.int64, count=len(bodies))
        if room is not None:
            for at in np.flatnonzero(lengths > room).tolist():
                body = bodies[at]
                if not truncate:
                    raise ContextOverflow(f"`texts[{at}]` has {len(body) + around} tokens, the limit is {max_tokens}",
                                          tokens=len(body) + around, limit=max_tokens, param=f"texts[{at}]",
                                          hint="Shorten it, or set truncate=True")
                bodies[at] = body[len(body) - room:] if self._truncate_left else body[:room]
                lengths[at] = room
        offsets = np.zeros(len(bodies) + 1, dtype=np.int64)
        np.cumsum(lengths + around, out=offsets[1:])
        parts = chain.from_iterable((prefix, body, suffix) for body in bodies) if around else bodies
        ids = np.fromiter(chain.from_iterable(parts), dtype=np.int32, count=int(offsets[-1]))
        return Packed(ids, offsets)

    def encode_spans(self, texts: Sequence[str], parse_special: bool = False, room: int | None = None) -> list[Spans]:
        """Encode texts without special tokens around them, with the places of the tokens in the texts.

        The places are indices of characters of the given text, not of the normalised one.

        Args:
            texts: strings.
            parse_special: as in :meth:`encode`.
            room: number of tokens of a text that are needed; the others may be missing. None: all.

        Raises:
            InvalidArgument: a text is not a string or contains a lone surrogate; the message names its index.
        """
        texts = list_of_caller(texts)
        if room is None or parse_special or not self._words_independent or self._truncate_left:
            return self._typed(self._encode_spans, texts, parse_special)
        return self._typed(self._encode_heads, texts, room, lambda parts: self._encode_spans(parts, False),
                           lambda one: len(one.ids))

    @property
    def pair_ids(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Ids before, between and after the two texts of a pair.

        Raises:
            FormatError: the post-processor in the tokenizer's file does more than add tokens.
        """
        raise NotImplementedError

    @property
    def pair_types(self) -> bool:
        """True if the second text of a pair and the tokens after it have their own token type, as in BERT."""
        return True

    def encode_pairs(self, first: str, others: Sequence[str], *, max_tokens: int, truncate: bool = True,
                     parse_special: bool = False) -> Pairs:
        """Encode pairs of one text with each of several others, packed for the C core.

        Args:
            first: first text of every pair.
            others: second texts of the pairs.
            max_tokens: maximum number of ids of a pair, including special tokens.
            truncate: truncate longer pairs: remove ids from the longer text until both have the same length, then from
                both (strategy ``longest_first`` of HF tokenizers). False: raise an error.
            parse_special: as in :meth:`encode`.

        Raises:
            InvalidArgument: a text is not a string or contains a lone surrogate, or ``max_tokens`` leaves less than one
                id for each text.
            ContextOverflow: ``truncate`` is off and a pair is longer than ``max_tokens``.
        """
        encoded = self.encode_parts([first], parse_special) + self.encode_parts(others, parse_special)
        return self.join_pairs([(encoded[0], body) for body in encoded[1:]], max_tokens=max_tokens, truncate=truncate)

    def encode_parts(self, texts: Sequence[str], parse_special: bool = False,
                     room: int | None = None) -> list[Sequence[int]]:
        """Encode texts without special tokens around them, to join them by :meth:`join_pairs`.

        Args:
            texts: strings.
            parse_special: as in :meth:`encode`.
            room: number of leading ids that the caller needs of each text; later ids may be missing. None: all.

        Raises:
            InvalidArgument: a text is not a string or contains a lone surrogate.
        """
        if parse_special:
            return [self._encode_one(text, True) for text in texts]
        return self._encode_many(list_of_caller(texts), room)

    def join_pairs(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], *, max_tokens: int,
                   truncate: bool = True, keep_second: bool = False,
                   name: Callable[[int], str] = "documents[{}]".format, partner: str = " with the query") -> Pairs:
        """Put special tokens around pairs of encoded texts, and pack them for the C core.

        Args:
            pairs: ids of the two texts of each pair, from :meth:`encode_parts`.
            max_tokens, truncate: as in :meth:`encode_pairs`.
            keep_second: True: truncate only the first text of a pair (strategy ``only_first`` of HF tokenizers).
            name: function from the index of a pair to the name of its text in errors.
            partner: words about the other text of a pair, for errors.

        Raises:
            InvalidArgument: ``max_tokens`` leaves less than one id for each text.
            ContextOverflow: ``truncate`` is off and a pair is longer than ``max_tokens``, or the second text leaves no
                room for the first.
        """
        before, between, behind = self.pair_ids
        around = len(before) + len(between) + len(behind)
        room = max_tokens - around
        if room < 2:
            raise InvalidArgument(param="max_tokens", got=str(max_tokens),
                                  allowed=f"{around + 2} or more: {around} special tokens and one token of each text")
        ids: list[int] = []
        offsets, second = [0], []
        for at, (head, body) in enumerate(pairs):
            a, b = len(head), len(body)
            if a + b > room:
                fits = truncate and (not keep_second or b < room)
                if not fits:
                    tokens = a + b + around
                    raise ContextOverflow(f"`{name(at)}`{partner} has {tokens} tokens, the limit is {max_tokens}",
                                          tokens=tokens, limit=max_tokens, param=name(at),
                                          hint="Shorten the second text, which is not truncated" if truncate else
                                          "Shorten it, or set truncate=True")
                a, b = (room - b, b) if keep_second else _longest_first(a, b, room)
            ids += [*before, *self._cut(head, a), *between]
            second.append(len(ids) - offsets[-1])
            ids += [*self._cut(body, b), *behind]
            offsets.append(len(ids))
        return Pairs(np.array(ids, np.int32), np.array(offsets, np.int64),
                     np.array(second, np.int32) if self.pair_types else None)

    def _cut(self, ids: Sequence[int], room: int) -> Sequence[int]:
        if len(ids) <= room:
            return ids
        return ids[len(ids) - room:] if self._truncate_left else ids[:room]

    def count(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> int:
        """Return the number of ids that :meth:`encode` would return."""
        around = len(self.prefix_ids) + len(self.suffix_ids) if add_special else 0
        return len(self._encode_one(text, parse_special)) + around

    def encode_marked(self, text: str, mark: str | None, placeholder: str | None = None) -> np.ndarray:
        """Encode a rendered chat prompt to ids, int32 ``[tokens]``, without special tokens around it.

        A long prompt is encoded on a thread for native calls.

        Args:
            text: the prompt. Control tokens are parsed, except where ``mark`` interrupts their text.
            mark: one of :data:`MARKS`, which is removed from the text; None: the text contains no marks.
            placeholder: a character that is encoded as -1; None: the text contains no placeholders.

        Raises:
            InvalidArgument: ``text`` contains a lone surrogate.
            Timeout, Overloaded: see :meth:`mpool.host.native_calls.ThreadGroup.run`.
        """
        return native_calls.tokenized(len(text), self._encode_marked, text, mark, placeholder)

    def _encode_marked(self, text: str, mark: str | None, placeholder: str | None) -> np.ndarray:
        try:
            parts = [_checked(text, None)] if placeholder is None else _checked(text, None).split(placeholder)
            ids = list(self._encode_parsed(parts[0], mark))
            for part in parts[1:]:
                ids += -1, *self._encode_parsed(part, mark)
            return np.array(ids, dtype=np.int32)
        except (UnicodeEncodeError, TypeError):
            raise _bad_text(text, None) from None

    def least_tokens(self, text: str, parse_special: bool) -> int:
        """Return a number of tokens that a text certainly has, without encoding it, to refuse texts that cannot fit.

        Args:
            text: the text.
            parse_special: True if texts of control tokens are encoded as those tokens.
        """
        found = 0
        if parse_special and self.control_texts:
            if self._controls is None:
                self._controls = compile_trie(self.control_texts)
            found = sum(1 for _ in self._controls.finditer(text))
        if self._longest is None:
            shrinks = self._shrinks()
            table = self.token_table() if shrinks else None
            self._longest = 0 if table is None else shrinks * max((
                int(np.diff(table.offsets).max(initial=1)), *(len(control.encode()) for control in self.control_texts)))
        # control tokens may take the white space around them
        return max(found, len("".join(text.split())) // self._longest) if self._longest else found

    def _shrinks(self) -> int:
        """Return how many characters of a text may become one before they become tokens; 0: any number. White space
        does not count."""
        return 0

    def fit(self, rows: int, *, file: str | None = None) -> None:
        """Check that every token has a row in the model's embedding.

        The embedding may have spare rows. Control tokens that are not special tokens (BOS, EOS, ...) may lack a row,
        and so may the padding token: the tokenizer of Gemma 3's language models has a control token for images without
        a row. Requests with such a token fail.

        Args:
            rows: number of rows of the embedding.
            file: path for error messages.

        Raises:
            FormatError: another token has no row.
        """
        if self.vocab_size > rows and not self._drop_tokens_from(rows):
            raise FormatError(file=file or "the model", field="token ids", got=f"0 to {self.vocab_size - 1}",
                              allowed=f"0 to {rows - 1}, the rows of the embedding",
                              hint="The tokenizer belongs to another model")

    def _drop_tokens_from(self, rows: int) -> bool:
        """Remove the tokens from id ``rows`` on. Returns False and removes none if one of them is needed."""
        return False

    def special_texts(self) -> dict[str, str]:
        """Return the texts of the special tokens by the names that chat templates use (``bos_token``, ...)."""
        return {f"{name}_token": self.token_text(self.special[name]) for name in CONFIG_TOKENS
                if name in self.special}

    def _encode_one(self, text: str, parse_special: bool, at: int | None = None) -> Sequence[int]:
        _checked(text, at)
        try:
            return self._encode_parsed(text, None) if parse_special else self._encode_plain([text])[0]
        except MpoolError:
            raise
        except (UnicodeEncodeError, TypeError):
            raise _bad_text(text, at) from None

    def _encode_many(self, texts: list[str], room: int | None) -> list[Sequence[int]]:
        if room is not None and self._words_independent and not self._truncate_left:
            return self._typed(self._encode_heads, texts, room, self._encode_plain, len)
        return self._typed(self._encode_plain, texts)

    def _typed(self, encode: Callable[..., T], texts: list[str], *more: Any) -> T:
        """Encode texts. If one is not a string or not Unicode text, the error names its index."""
        try:
            return encode(texts, *more)
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

    def _encode_heads(self, texts: list[str], room: int, encode: Callable[[list[str]], list[T]],
                      count: Callable[[T], int]) -> list[T]:
        """Encode at least the first ``room`` ids of each text, without encoding all of a long text.

        Args:
            texts: strings.
            room: number of leading ids that the caller needs of each text.
            encode: function that encodes texts.
            count: function that returns the number of ids in a result of ``encode``.
        """
        reach = _HEAD_CHARS_PER_TOKEN * (room + 8)
        cuts = {at: cut for at, text in enumerate(texts) if isinstance(text, str) and len(text) > 2 * reach
                and (cut := text.rfind(" ", 0, reach)) >= 0}
        if not cuts:
            return encode(texts)
        bodies = encode([text[:cuts[at]] if at in cuts else text for at, text in enumerate(texts)])
        short = [at for at in cuts if count(bodies[at]) < room]
        for at, body in zip(short, encode([texts[at] for at in short])):
            bodies[at] = body
        return bodies


def _longest_first(a: int, b: int, room: int) -> tuple[int, int]:
    """Return the lengths to which HF tokenizers cut two texts that together exceed ``room``."""
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
                               allowed="Unicode text",
                               hint="text.encode('utf-8', 'replace').decode() replaces lone surrogates")
    return InvalidArgument(f"`{which}` cannot be encoded", param=which)


def check_ids(ids: Iterable[int], size: int) -> list[int]:
    ids = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    if ids and not (0 <= min(ids) and max(ids) < size):
        wrong = next(token for token in ids if not 0 <= token < size)
        raise InvalidArgument(param="ids", got=f"{wrong}, which is not in the vocabulary",
                              allowed=f"token ids from 0 to {size - 1}")
    return ids
