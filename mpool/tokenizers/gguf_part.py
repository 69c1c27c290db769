"""Partial tokenizers: built for given texts, from the part of a vocabulary that these texts can need.

Building the whole tokenizer of a large vocabulary takes 0.25 s, which is most of the time to the first token of a model
in the page cache. Byte-pair encoding processes one word at a time, and uses only tokens that are substrings of the word
and merges that produce them. A tokenizer with only those tokens and merges yields the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, models

from .gguf_build import word_splitter
from .gguf_vocab import GGUFVocab
from .native import call

if TYPE_CHECKING:
    import tokenizers

    from .. import _core

#: Minimum number of tokens of a vocabulary for which partial tokenizers are faster than the whole one.
MIN_TOKENS = 16_384

#: Maximum number of characters of the texts, and of lookups of their substrings. Within both limits, building a
#: tokenizer takes a few milliseconds.
MAX_CHARS, MAX_LOOKUPS = 32_768, 200_000


class PartialTokenizers:
    """Builds tokenizers for given texts. Thread-safe."""

    def __init__(self, vocab: GGUFVocab, bpe: _core.Bpe) -> None:
        assert vocab.pre is not None
        self._bpe, self._ignore_merges = bpe, vocab.pre.ignore_merges
        self._splitter = word_splitter(vocab.pre)
        self._control = frozenset(vocab.control)
        self._user_defined = [vocab.texts[token] for token in vocab.user_defined]

    @staticmethod
    def for_vocab(vocab: GGUFVocab) -> PartialTokenizers | None:
        """Create the builder for a vocabulary.

        Returns:
            The builder; None if the vocabulary is not byte-level BPE, has fewer than ``MIN_TOKENS`` tokens, or is
            invalid: then building the whole tokenizer reports the error.
        """
        if vocab.kind != "bpe" or not vocab.byte_level or len(vocab.texts) < MIN_TOKENS:
            return None
        return None if vocab.core_bpe is None else PartialTokenizers(vocab, vocab.core_bpe)

    def tokenizer(self, texts: Sequence[str]) -> tokenizers.Tokenizer | None:
        """Build a tokenizer that encodes these texts like the whole one; None if they need the whole one."""
        if sum(map(len, texts)) > MAX_CHARS:
            return None
        # HF finds user-defined tokens before it splits words, so the words below would be wrong
        if any(token in text for token in self._user_defined for text in texts):
            return None
        words = {word for text in texts for word, _ in call(self._splitter.pre_tokenize_str, text)}
        part = self._bpe.part(words, MAX_LOOKUPS)
        if part is None:
            return None
        ids, merges = part
        # control tokens need the whole tokenizer: it renames them so that no text matches, except those in merges
        if not self._control.isdisjoint(ids.values()):
            return None
        model = models.BPE(vocab=ids, merges=list(dict.fromkeys(merges)), ignore_merges=self._ignore_merges)
        found = Tokenizer(model)
        found.pre_tokenizer = self._splitter
        return found
