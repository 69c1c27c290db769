"""Tokenizers of image-generation pipelines: prompts are truncated or padded to a fixed number of tokens.

CLIP's tokenizer is byte-pair encoding with an end-of-word suffix, stored as ``vocab.json`` and ``merges.txt`` in older
folders; T5's is a unigram model in ``tokenizer.json``.
"""

from __future__ import annotations

import functools
import os

from ..errors import FormatError
from ..models.files import Stamp, stamp
from . import json_tokenizer, older_files
from .native import Native


def load(folder: str, pad: str, clip: bool) -> Native:
    """Return the tokenizer of a folder, cached. Truncation and padding stated in the file are disabled.

    Args:
        folder: folder with ``tokenizer.json``; if ``clip``, ``vocab.json`` and ``merges.txt`` are also accepted.
        pad: text of the padding token. In a prompt, this text becomes the padding token, as in transformers.
        clip: True for CLIP's tokenizer.

    Raises:
        FormatError: a file is malformed.
        FileError: a file cannot be read.
    """
    names = ("tokenizer.json", *older_files.NAMES)
    return _load(folder, pad, clip, tuple(stamp(os.path.join(folder, name)) for name in names))


@functools.lru_cache(maxsize=16)
def _load(folder: str, pad: str, clip: bool, stamps: tuple[Stamp, ...]) -> Native:
    path = os.path.join(folder, "tokenizer.json")
    return json_tokenizer.load(path) if not clip or os.path.lexists(path) else \
        json_tokenizer.wrap_older(older_files.clip(folder, pad))


def id_of(folder: str, token: str, clip: bool) -> int:
    """Return the id of the padding token ``token``.

    Raises:
        FormatError: the tokenizer does not have the token.
    """
    found = load(folder, token, clip).hf.token_to_id(token)
    if found is None:
        raise FormatError(file=folder, field="pad_token", got=token, allowed="a token of the tokenizer")
    return int(found)


def encode(folder: str, text: str, length: int, pad: str, clip: bool) -> tuple[list[int], str]:
    """Encode a text to exactly ``length`` ids.

    If the text is truncated, its last id is still the end-of-text token.

    Returns:
        The ids, and the text that was cut off (empty: nothing was).
    """
    tokenizer = load(folder, pad, clip)
    ids = list(tokenizer.encode([text], True)[0])
    if len(ids) <= length:
        return ids + [id_of(folder, pad, clip)] * (length - len(ids)), ""
    removed = tokenizer.decode(ids[length - 1:-1]).replace("</w>", " ").strip()
    return ids[:length - 1] + ids[-1:], removed or "..."
