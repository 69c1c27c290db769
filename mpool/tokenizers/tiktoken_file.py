"""The tokenizer of Kimi's models, whose vocabulary is in ``tiktoken.model``; see
:mod:`mpool.models.formats.tiktoken_ranks`.

Unlike the authors' code, mpool does not cut a run of more than 25,000 characters without white space.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models

from ..models.formats import tiktoken_ranks
from .gguf_build import without_gc, word_splitter
from .growth import Growth
from .older_files import CONFIG, fields_of
from .patterns import cost
from .pretokenizers import PRE_TOKENIZERS
from .specials import check_sizes

if TYPE_CHECKING:
    import tokenizers

_WORDS = PRE_TOKENIZERS[tiktoken_ranks.PRE_TOKENIZER]
#: Bounds of the tokenizer: a character has up to four bytes, and each becomes a character.
GROWTH = Growth(pre_tokenizer=4, cost=max(map(cost, _WORDS.patterns)))


def build(path: str) -> tokenizers.Tokenizer:
    """Build the tokenizer of a ``tiktoken.model``, whose folder holds tokenizer_config.json.

    Raises:
        FormatError, LimitError, FileError: as :func:`mpool.models.formats.tiktoken_ranks.read`.
    """
    ranks = tiktoken_ranks.read(path, fields_of(os.path.dirname(path), CONFIG))
    check_sizes((text for text, _ in ranks.special), (text for text, special in ranks.special if special),
                file=os.path.join(os.path.dirname(path), CONFIG), field="added_tokens_decoder")
    with without_gc():
        ids = dict(zip(ranks.texts, range(len(ranks.texts))))
        tokenizer = Tokenizer(models.BPE(ids, ranks.merges(), ignore_merges=True))
    tokenizer.pre_tokenizer = word_splitter(_WORDS)
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text, special in ranks.special])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
