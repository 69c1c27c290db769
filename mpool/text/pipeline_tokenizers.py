"""Tokenizers of pipelines that make pictures: a fixed number of tokens, what is too long cut off, the rest filled up.

CLIP's is byte-pair encoding with an end-of-word mark, which older folders hold as ``vocab.json`` and ``merges.txt``
(https://github.com/openai/CLIP/blob/main/clip/simple_tokenizer.py); T5's is a unigram model in ``tokenizer.json``.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

from mpool.catalog import json_strict
from mpool.catalog.files import read_small
from mpool.errors import FormatError
from mpool.text import json_tokenizer, limits

if TYPE_CHECKING:
    import tokenizers

_START, _END = "<|startoftext|>", "<|endoftext|>"
#: Words of CLIP: special tokens, English endings, letters, single digits, runs of anything else.
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


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
    names = ("tokenizer.json", "vocab.json", "merges.txt")
    return _load(folder, pad, clip, tuple(_stamp(os.path.join(folder, name)) for name in names))


def _stamp(path: str) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@functools.lru_cache(maxsize=16)
def _load(folder: str, pad: str, clip: bool, stamps: tuple[tuple[int, int], ...]) -> tokenizers.Tokenizer:
    path = os.path.join(folder, "tokenizer.json")
    found = json_tokenizer._load(path) if not clip or os.path.lexists(path) else _clip(folder, pad)
    found.no_truncation()
    found.no_padding()
    return found


def _clip(folder: str, pad: str) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    path = os.path.join(folder, "vocab.json")
    vocab: Any = json_strict.loads(read_small(path, limits.max_tokenizer_json_bytes), file=path,
                                   max_bytes=limits.max_tokenizer_json_bytes)
    if not isinstance(vocab, dict) or not all(type(token) is int and token >= 0 for token in vocab.values()):
        raise FormatError(file=path, field="JSON", got="something else", allowed="an object, token -> id")
    for token in (_START, _END, pad):
        if token not in vocab:
            raise FormatError(file=path, field=token, got="missing", allowed="an id")
    merges_path = os.path.join(folder, "merges.txt")
    text = json_strict.decode_utf8(read_small(merges_path, limits.max_tokenizer_json_bytes), file=merges_path,
                                   field="text")
    merges = []
    for number, line in enumerate(text.splitlines()):
        if not line or (number == 0 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2:
            raise FormatError(file=merges_path, field=f"line {number + 1}", got=line[:80], allowed="two tokens")
        merges.append((pair[0], pair[1]))
    try:
        made = Tokenizer(models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="</w>",
                                    fuse_unk=False, unk_token=_END))
    except Exception as error:  # what tokenizers raises has no class of its own
        raise FormatError(file=merges_path, field="merges", got=str(error)[:200],
                          allowed="merges of tokens of vocab.json") from error
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "),
                                            normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.add_special_tokens(list(dict.fromkeys([_START, _END, pad])))
    made.post_processor = processors.RobertaProcessing((_END, vocab[_END]), (_START, vocab[_START]), False, False)
    made.decoder = decoders.ByteLevel()
    return made


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
