"""Tokenizers built from the vocabulary of a GGUF file."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from ..host import native_calls
from ..models.formats.byte_pairs import BYTE_TEXTS, byte_alphabet
from ..models.spec import TokenTable
from .gguf_build import build, growth_of, newline_joiner
from .gguf_part import PartialTokenizers
from .gguf_vocab import GGUFVocab
from .native import Native
from .specials import compile_trie
from .tokenizer import Tokenizer, check_ids

_ASCII_SPACES = " \t\n\v\f\r"

#: Maximum number of calls that partial tokenizers encode before the whole tokenizer is built in the background.
MAX_PARTIAL_USES = 4

_building = threading.Lock()


class GGUFTokenizer(Tokenizer):
    """A tokenizer built from a GGUF vocabulary.

    The whole tokenizer of a large vocabulary is built when a text needs it, or by :meth:`finish`. Until then, partial
    tokenizers encode texts (:mod:`mpool.tokenizers.gguf_part`).
    """

    def __init__(self, vocab: GGUFVocab) -> None:
        self._vocab = vocab
        self._whole: Native | None = None
        self._prepare: Callable[[str], str] | None = None
        self._join_newlines: Callable[[Sequence[int]], Sequence[int]] | None = None
        self._growth = growth_of(vocab)
        self._partial = PartialTokenizers.for_vocab(vocab)
        self._partial_uses = 0
        self._finish_queued = False  # another thread will call finish()
        if self._partial is None:
            self.finish()
        self.vocab_size = len(vocab.texts)
        self.special = dict(vocab.special)
        self.prefix_ids, self.suffix_ids = tuple(vocab.prefix), tuple(vocab.suffix)
        self.eog_ids = vocab.eog
        self._words_independent = vocab.kind == "wordpiece" and not vocab.user_defined
        control = vocab.control
        self.control_texts = tuple(vocab.texts[token] for token in control)
        self._parsed_ids = {vocab.texts[token]: token for token in control}
        self._split_control: re.Pattern[str] | None = None
        # HF finds user-defined tokens itself, but text that self._prepare normalises must be split at them before that
        always: tuple[int, ...] = () if self._prepare is None else tuple(vocab.user_defined)
        self._always_ids = {vocab.texts[token]: token for token in always}
        self._split_always = compile_trie(self._always_ids, group=True) if self._always_ids else None

    @property
    def pair_ids(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Ids before, between and after two texts. SentencePiece models like RoBERTa's add a separator in between."""
        again = (self.special.get("sep", self.special.get("eos", 0)),) if self._vocab.kind == "unigram" else ()
        return self.prefix_ids, (*self.suffix_ids, *again), self.suffix_ids

    @property
    def kind(self) -> str:
        return self._vocab.kind

    @property
    def complete(self) -> bool:
        return self._whole is not None

    def _shrinks(self) -> int:
        vocab = self._vocab
        if vocab.kind not in ("bpe", "spm"):  # the others may drop text, or map a run of it to the unknown token
            return 0
        byte_level = vocab.pre is not None and vocab.pre.byte_level
        unusable = {None, *vocab.control}
        return int(all(vocab.ids.get(text) not in unusable
                       for text in (byte_alphabet().values() if byte_level else BYTE_TEXTS)))

    def finish_later(self) -> None:
        if self._whole is None and self._partial_uses > 1 and not self._finish_queued:
            self._finish_queued = True
            native_calls.TEXTS.later(self.finish)

    def finish(self) -> None:
        if self._whole is None:
            with _building:
                if self._whole is None:
                    whole, self._prepare = build(self._vocab)
                    self._join_newlines = newline_joiner(self._vocab, whole)
                    self._whole = Native(whole, self._growth)
                    self._vocab.release()
                    self._partial = None

    def _ids(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Encode prepared texts."""
        partial = self._partial
        part = partial.tokenizer(texts) if partial is not None else None
        if part is None:
            self.finish()
            assert self._whole is not None
            found = self._whole.encode(texts)
            return found if self._join_newlines is None else list(map(self._join_newlines, found))
        self._partial_uses += 1
        if self._partial_uses > MAX_PARTIAL_USES:
            self.finish_later()
        return Native(part, self._growth).encode(texts)

    def _encode_plain(self, texts: Sequence[str]) -> list[Sequence[int]]:
        if self._split_always is not None:
            return [self._encode_split(text, self._split_always, self._always_ids, None) for text in texts]
        if self._prepare is not None:
            texts = list(map(self._prepare, texts))
        return self._ids(texts)

    def _encode_parsed(self, text: str, mark: str | None) -> list[int]:
        if self._split_control is None:
            self._parsed_ids = self._always_ids | self._parsed_ids
            self._split_control = compile_trie(self._parsed_ids, group=True)
        return self._encode_split(text, self._split_control, self._parsed_ids, mark)

    def _encode_split(self, text: str, split: re.Pattern[str], known: Mapping[str, int], mark: str | None) -> list[int]:
        """Split ``text`` at the tokens of ``known``, encode the text between them, and join the ids."""
        parts = split.split(text)  # alternates between text and tokens; begins and ends with text
        lstrip, rstrip = self._vocab.lstrip, self._vocab.rstrip
        if lstrip or rstrip:
            for at in range(1, len(parts), 2):
                if known[parts[at]] in lstrip:
                    parts[at - 1] = parts[at - 1].rstrip(_ASCII_SPACES)
                if known[parts[at]] in rstrip:
                    parts[at + 1] = parts[at + 1].lstrip(_ASCII_SPACES)
        plain = parts[::2]
        if mark is not None:
            plain = [part.replace(mark, "") for part in plain]
        wanted = [part for part in plain if part]
        if self._prepare is not None:
            wanted = list(map(self._prepare, wanted))
        bodies = iter(self._ids(wanted) if wanted else ())
        ids: list[int] = []
        for at, part in enumerate(plain):
            if part:
                ids += next(bodies)
            if 2 * at + 1 < len(parts):
                ids.append(known[parts[2 * at + 1]])
        return ids

    def token_table(self) -> TokenTable:
        return self._vocab.token_table

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        ids = check_ids(ids, self.vocab_size)
        table = self.token_table()
        data, offsets = table.data, table.offsets
        if skip_special:
            parts = [data[offsets[token]:offsets[token + 1]] for token in ids]
        else:
            parts = [self._vocab.texts[token].encode() if table.control[token] else
                     data[offsets[token]:offsets[token + 1]] for token in ids]
        text = b"".join(parts).decode("utf-8", "replace")
        # drop the space that the tokenizer puts before the first word
        return text[1:] if self._leading_space and text.startswith(" ") else text

    @property
    def _leading_space(self) -> bool:
        vocab = self._vocab
        return vocab.add_space_prefix or vocab.remove_extra_whitespaces or vocab.kind == "wordpiece"

    def token_text(self, token: int) -> str:
        check_ids((token,), self.vocab_size)
        return self._vocab.texts[token]

    def token_id(self, text: str) -> int | None:
        return self._vocab.ids.get(text)


def _after_fork_in_child() -> None:
    global _building
    _building = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)
