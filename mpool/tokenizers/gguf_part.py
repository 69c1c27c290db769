"""A tokenizer for a few texts, made of the part of a vocabulary that they can need.

Making the whole tokenizer of a large vocabulary takes a quarter of a second, most of the time that a model in the page
cache needs to its first token. Byte-pair encoding takes one word after another, and of the vocabulary it looks only at
tokens that are pieces of the word and at merges that make one: a tokenizer with those alone gives the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .gguf_vocab import GGUFVocab

if TYPE_CHECKING:
    import tokenizers

    from .. import _core

#: Tokens from which on a vocabulary is worth it.
MIN_TOKENS = 16_384

#: Characters of the texts, and look-ups of their pieces, up to which it takes a few milliseconds.
MAX_CHARS, MAX_LOOKUPS = 32_768, 200_000


class Parts:
    """Builder of tokenizers for given texts. Thread-safe."""

    def __init__(self, vocab: GGUFVocab, bpe: _core.Bpe) -> None:
        from .gguf_build import word_splitter

        assert vocab.pre is not None
        self._bpe, self._ignore_merges = bpe, vocab.pre.ignore_merges
        self._splitter = word_splitter(vocab.pre)
        self._control = frozenset(vocab.control)
        self._found_first = [vocab.texts[token] for token in vocab.user_defined]

    @staticmethod
    def of(vocab: GGUFVocab) -> Parts | None:
        """None for a vocabulary of another kind, too small, or with something wrong in it that building it will say."""
        if vocab.kind != "bpe" or not vocab.byte_level or len(vocab.texts) < MIN_TOKENS:
            return None
        return None if vocab.searchable is None else Parts(vocab, vocab.searchable)

    def tokenizer(self, texts: Sequence[str]) -> tokenizers.Tokenizer | None:
        """A tokenizer that gives these texts the ids that the whole one gives; None: that takes the whole one."""
        from tokenizers import Tokenizer, models

        if sum(map(len, texts)) > MAX_CHARS:
            return None
        # HF looks for these before it splits words, so that words would be others
        if any(token in text for token in self._found_first for text in texts):
            return None
        words = {word for text in texts for word, _ in self._splitter.pre_tokenize_str(text)}
        part = self._bpe.part(words, MAX_LOOKUPS)
        if part is None:
            return None
        ids, merges = part
        if not self._control.isdisjoint(ids.values()):  # hidden under other names, but for those that merges use
            return None
        model = models.BPE(vocab=ids, merges=list(dict.fromkeys(merges)), ignore_merges=self._ignore_merges)
        found = Tokenizer(model)
        found.pre_tokenizer = self._splitter
        return found
