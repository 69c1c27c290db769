"""Limit of the work of splitting the tokens of a SentencePiece vocabulary.

A SentencePiece vocabulary has scores instead of merges. Readers and writers of such vocabularies try every split of
every token into two tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import LimitError

#: Maximum sum of the squares of the lengths of the tokens, in characters: the work of trying all splits of each token,
#: and the size of the merges. 262,144 tokens of 16 characters have a quarter of it.
MAX_SPLITTING = 1 << 28


def check_splitting(texts: Iterable[str], file: str, field: str) -> None:
    """Raise LimitError if trying all splits of the tokens in ``field`` of ``file`` takes too long."""
    work = sum(len(text) ** 2 for text in texts)
    if work > MAX_SPLITTING:
        raise LimitError(f"{file}: {field} has long tokens: the squares of their lengths add up to {work:,}, the limit "
                         f"is {MAX_SPLITTING:,}", hint="The file is damaged: download it again")
