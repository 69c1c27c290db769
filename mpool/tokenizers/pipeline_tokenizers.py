"""Tokenizers of image-generation pipelines: a fixed number of tokens, what is too long cut off, the rest filled up.

CLIP's is byte-pair encoding with an end-of-word mark, which older folders hold as ``vocab.json`` and ``merges.txt``;
T5's is a unigram model in ``tokenizer.json``.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from ..errors import FormatError
from ..models.files import Stamp, stamp
from . import json_tokenizer, older_files

if TYPE_CHECKING:
    import tokenizers


def load(folder: str, pad: str, clip: bool) -> tokenizers.Tokenizer:
    """The tokenizer of a folder, its own truncation and padding switched off.

    Args:
        folder: with ``tokenizer.json``, or, if ``clip``, with ``vocab.json`` and ``merges.txt``.
        pad: the token that fills up; in a text it stands for itself, as in transformers.
        clip: see there.

    Raises:
        FormatError: a file is malformed.
        FileError: one is gone.
    """
    names = ("tokenizer.json", *older_files.NAMES)
    return _load(folder, pad, clip, tuple(stamp(os.path.join(folder, name)) for name in names))


@functools.lru_cache(maxsize=16)
def _load(folder: str, pad: str, clip: bool, stamps: tuple[Stamp, ...]) -> tokenizers.Tokenizer:
    path = os.path.join(folder, "tokenizer.json")
    found = json_tokenizer._load(path) if not clip or os.path.lexists(path) else older_files.clip(folder, pad)
    found.no_truncation()
    found.no_padding()
    return found


def id_of(folder: str, token: str, clip: bool) -> int:
    """Id of the token that fills up.

    Raises:
        FormatError: the tokenizer does not have it.
    """
    found = load(folder, token, clip).token_to_id(token)
    if found is None:
        raise FormatError(file=folder, field="pad_token", got=token, allowed="a token of the tokenizer")
    return int(found)


def encode(folder: str, text: str, length: int, pad: str, clip: bool) -> tuple[list[int], str]:
    """Exactly ``length`` ids, and the text that had no room (empty: all had).

    The last id of a text that is cut is the one that ends every text.
    """
    tokenizer = load(folder, pad, clip)
    ids = tokenizer.encode(text).ids
    if len(ids) <= length:
        return ids + [id_of(folder, pad, clip)] * (length - len(ids)), ""
    removed = tokenizer.decode(ids[length - 1:-1]).replace("</w>", " ").strip()
    return ids[:length - 1] + ids[-1:], removed or "..."
