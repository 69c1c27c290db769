"""Builds HF tokenizers from GGUF vocabularies.

Control tokens and the unknown token are added to the HF model under names that no text can contain, so that text never
becomes a control token. With ``parse_special``, :class:`mpool.tokenizers.tokenizer.Tokenizer` finds control tokens
itself. User-defined tokens become HF added tokens, which are found before any other step, as in llama.cpp.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from ..errors import FormatError, LimitError
from ..models.formats.byte_pairs import check_splitting, splits
from ..models.json_strict import shorten
from . import limits
from .charsmap import CharsMap
from .gguf_vocab import GGUFVocab, TokenType, unmatchable
from .growth import MAX_QUICK_TOKEN, Growth, longest_string
from .patterns import Cost, cost
from .pretokenizers import PreTokenizer

if TYPE_CHECKING:
    import tokenizers

    from .charsmap import CharsMap

#: BERT's tokenizer maps longer words to the unknown token.
_MAX_WORD_CHARS = 100

_builds_without_gc = 0  # number of running builds that disabled the garbage collector


@contextmanager
def without_gc() -> Iterator[None]:
    """Disables the garbage collector: a build makes hundreds of thousands of tuples, which would trigger it repeatedly,
    and none of them is garbage."""
    global _builds_without_gc
    if not gc.isenabled() and not _builds_without_gc:
        yield
        return
    _builds_without_gc += 1
    gc.disable()
    try:
        yield
    finally:
        _builds_without_gc -= 1
        if not _builds_without_gc:
            gc.enable()


def _after_fork_in_child() -> None:
    """Enable the garbage collector: the thread that disabled it does not exist in the child."""
    global _builds_without_gc
    if _builds_without_gc:
        _builds_without_gc = 0
        gc.enable()


os.register_at_fork(after_in_child=_after_fork_in_child)


def growth_of(vocab: GGUFVocab) -> Growth:
    """Return the bounds of the tokenizer of a vocabulary."""
    patterns = vocab.pre.patterns if vocab.kind == "bpe" and vocab.pre is not None else ()
    growth = Growth(cost=max(map(cost, patterns), default=Cost.CONSTANT))
    slow = vocab.kind == "unigram" and max(map(len, vocab.texts)) > MAX_QUICK_TOKEN
    return growth.with_slow_model() if slow else growth


def build(vocab: GGUFVocab) -> tuple[tokenizers.Tokenizer, Callable[[str], str] | None]:
    """Build the HF tokenizer of a vocabulary. It adds no special tokens around a text.

    Returns:
        The tokenizer, and a function that normalises text before the tokenizer encodes it, or ``None``.

    Raises:
        FormatError: a merge or the character map is invalid.
    """
    names = vocab.texts
    hidden = vocab.control
    if hidden:
        names = list(names)
        for token in hidden:
            names[token] = unmatchable(token)
    make = {"bpe": _bpe, "spm": _spm, "unigram": _unigram, "wordpiece": _wordpiece}[vocab.kind]
    with without_gc():
        return make(vocab, names)  # type: ignore[operator]


def _bpe(vocab: GGUFVocab, names: list[str]) -> tuple[tokenizers.Tokenizer, None]:
    pre = vocab.pre
    assert pre is not None
    merges = vocab.merges()
    ids = dict(zip(vocab.texts, range(len(vocab.texts))))
    kept = _tokens_in_merges(vocab, merges)
    for token in vocab.control:
        if token in kept:
            names[token] = vocab.texts[token]
        else:
            del ids[vocab.texts[token]]
            ids[names[token]] = token
    options: dict[str, Any] = {"ignore_merges": pre.ignore_merges}
    if not pre.byte_level:
        options |= {"byte_fallback": True, "fuse_unk": True, "unk_token": _unk_name(vocab, names)}
    try:
        model = models.BPE(vocab=ids, merges=merges, **options)
    except MemoryError:
        raise
    except Exception as error:
        raise _bad_merge(vocab, merges, error) from None
    tokenizer = Tokenizer(model)
    if not pre.byte_level:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = word_splitter(pre)
    _add_user_defined(tokenizer, vocab)
    return tokenizer, None


def newline_joiner(vocab: GGUFVocab, built: tokenizers.Tokenizer) -> Callable[[Sequence[int]], Sequence[int]] | None:
    """Return a function that replaces the ids of each run of newlines by its token, if the vocabulary has one.

    None if runs need not be joined, or merges make all tokens of newlines anyway, as in the files of Gemma 4.
    """
    if vocab.pre is None or not vocab.pre.whole_newlines:
        return None
    lengths = {token: len(text) for token, (text, kind) in enumerate(zip(vocab.texts, vocab.types))
               if kind == TokenType.NORMAL and text and not text.strip("\n")}
    if all([part.id for part in built.model.tokenize("\n" * count)] == [token] for token, count in lengths.items()):
        return None
    tokens = {count: token for token, count in lengths.items()}

    def join(ids: Sequence[int]) -> list[int]:
        joined: list[int] = []
        for is_run, group in groupby(ids, lengths.__contains__):
            run = list(group)
            whole = tokens.get(sum(map(lengths.__getitem__, run))) if is_run else None
            joined += run if whole is None else [whole]
        return joined

    return join


def word_splitter(pre: PreTokenizer) -> tokenizers.pre_tokenizers.PreTokenizer:
    """Return the pre-tokenizer that splits a text into the words for byte-pair encoding."""
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    if pre.byte_level:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return pre_tokenizers.Sequence(steps)


def _tokens_in_merges(vocab: GGUFVocab, merges: list[tuple[str, str]]) -> set[int]:
    """Return the control tokens that are part or result of a merge; these keep their names.

    They are tokens that llama.cpp classifies as control tokens by their text alone, such as ``</s>`` in Qwen's files.
    """
    control = {vocab.texts[token]: token for token in vocab.control}
    if not control:
        return set()
    used = {text for left, right in merges for text in (left, right, left + right)}
    return {control[text] for text in control.keys() & used}


def _bad_merge(vocab: GGUFVocab, merges: list[tuple[str, str]], error: Exception) -> FormatError:
    for left, right in merges:
        for part in (left, right, left + right):
            if part not in vocab.ids:
                return FormatError(file=vocab.file or "the GGUF file", field="tokenizer.ggml.merges",
                                   got=f"{shorten(left + ' ' + right)!r}, where {shorten(part)!r} is not a token",
                                   allowed="two tokens whose concatenation is a token")
    return FormatError(file=vocab.file or "the GGUF file", field="tokenizer.ggml.merges", got=str(error),
                       allowed="two tokens whose concatenation is a token")


def _spm(vocab: GGUFVocab, names: list[str]) -> tuple[tokenizers.Tokenizer, None]:
    model = models.BPE(vocab=dict(zip(names, range(len(names)))), merges=score_merges(vocab), byte_fallback=True,
                       fuse_unk=True, unk_token=_unk_name(vocab, names))
    tokenizer = Tokenizer(model)
    escape = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (normalizers.Sequence([normalizers.Prepend("▁"), escape]) if vocab.add_space_prefix
                            else escape)
    _add_user_defined(tokenizer, vocab)
    return tokenizer, None


def score_merges(vocab: GGUFVocab) -> list[tuple[str, str]]:
    """Return merges that have the effect of SentencePiece's scores, which are the ranks of the tokens."""
    usable = {TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNDEFINED}
    types, scores = vocab.types, vocab.scores
    texts = {text: token for token, text in enumerate(vocab.texts) if types[token] in usable}
    check_splitting(texts, vocab.file or "the GGUF file", "tokenizer.ggml.tokens")
    return splits(sorted(texts, key=lambda text: (-scores[texts[text]], texts[text])), texts)


def _unigram(vocab: GGUFVocab, names: list[str]) -> tuple[tokenizers.Tokenizer, Callable[[str], str]]:

    scores = [0.0 if kind in (TokenType.USER_DEFINED, TokenType.CONTROL, TokenType.UNKNOWN) else score
              for kind, score in zip(vocab.types, vocab.scores)]
    if TokenType.BYTE in vocab.types or TokenType.UNDEFINED in vocab.types:
        names = [unmatchable(token) if kind in (TokenType.BYTE, TokenType.UNDEFINED) else name
                 for token, (name, kind) in enumerate(zip(names, vocab.types))]
    model = models.Unigram(list(zip(names, scores)), vocab.special["unk"], False)
    blob = vocab.charsmap()
    return Tokenizer(model), _UnigramText(vocab, None if blob is None else CharsMap(blob, file=vocab.file),
                                          1 if blob is None else longest_string(blob))


class _UnigramText:
    """SentencePiece's normalisation of text before tokenization."""

    def __init__(self, vocab: GGUFVocab, charsmap: CharsMap | None, factor: int) -> None:
        self._map, self._factor = charsmap, factor
        self._merge_spaces = vocab.remove_extra_whitespaces
        self._prefix = vocab.add_space_prefix

    def __call__(self, text: str) -> str:
        if self._map is not None:
            if len(text) * self._factor > limits.max_normalized_chars:
                self._measure(text)
            text = self._map(text)
        if self._merge_spaces:
            return "".join(["▁" + word for word in text.split(" ") if word])
        words = text.lstrip(" ")
        if self._prefix and words:
            text = " " * (len(text) - len(words) + 1) + words
        return text.replace(" ", "▁")

    def _measure(self, text: str) -> None:
        """Check the length of a text after the character map, slice by slice: the map can replace a character by a text
        of any length."""
        assert self._map is not None
        step, total = max(1, limits.max_normalized_chars // self._factor), 0
        for at in range(0, len(text), step):
            total += len(self._map(text[at:at + step]))
            if total > limits.max_normalized_chars:
                raise LimitError(f"a text of {len(text):,} characters has more than {limits.max_normalized_chars:,} "
                                 "characters after the character map of the tokenizer", param="text",
                                 hint="Shorten the text, or raise mpool.tokenizers.limits.max_normalized_chars")


def _wordpiece(vocab: GGUFVocab, names: list[str]) -> tuple[tokenizers.Tokenizer, None]:
    # GGUF marks the start of a word ("▁word", "ing"), HF marks its continuation ("word", "##ing").
    texts = []
    for token, (name, kind) in enumerate(zip(names, vocab.types)):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            texts.append(name)
        elif not name.startswith("▁"):
            texts.append("##" + name)
        elif name == "▁" or name.startswith("▁##"):
            texts.append(unmatchable(token))  # text never matches it: BERT splits text at each "#"
        else:
            texts.append(name[1:])
    model = models.WordPiece(vocab=dict(zip(texts, range(len(texts)))), unk_token=texts[vocab.special["unk"]],
                             max_input_chars_per_word=_MAX_WORD_CHARS)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True,
                                                      strip_accents=vocab.strip_accents, lowercase=vocab.lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _add_user_defined(tokenizer, vocab)
    return tokenizer, None


def _unk_name(vocab: GGUFVocab, names: list[str]) -> str | None:
    unk = vocab.special.get("unk")
    return None if unk is None else names[unk]


def _add_user_defined(tokenizer: tokenizers.Tokenizer, vocab: GGUFVocab) -> None:
    tokens = vocab.user_defined
    if tokens:
        tokenizer.add_tokens([AddedToken(vocab.texts[token], normalized=False, special=False,
                                         lstrip=token in vocab.lstrip, rstrip=token in vocab.rstrip)
                              for token in tokens])
