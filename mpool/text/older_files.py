"""Tokenizers in the files that transformers wrote before there was ``tokenizer.json``: BERT's WordPiece, and CLIP's
byte-pair encoding with an end-of-word mark (https://github.com/openai/CLIP/blob/main/clip/simple_tokenizer.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mpool.catalog import json_strict
from mpool.catalog.files import read_small
from mpool.errors import FormatError
from mpool.text import limits

if TYPE_CHECKING:
    import tokenizers

#: Files whose path stands for such a tokenizer.
CLIP, WORDPIECE = "merges.txt", "vocab.txt"

_START, END = "<|startoftext|>", "<|endoftext|>"
#: Words of CLIP: special tokens, English endings, letters, single digits, runs of anything else.
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
#: Special tokens of BERT, by their names in tokenizer_config.json.
_BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
         "mask_token": "[MASK]"}


def _text(path: str) -> str:
    return json_strict.decode_utf8(read_small(path, limits.max_tokenizer_json_bytes), file=path, field="text")


def clip(folder: str, pad: str) -> tokenizers.Tokenizer:
    """CLIP's, of ``vocab.json`` and ``merges.txt``; ``pad``: the token that fills up.

    Raises:
        FormatError: a file is malformed.
        FileError: one is gone.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    path = os.path.join(folder, "vocab.json")
    vocab: Any = json_strict.loads(read_small(path, limits.max_tokenizer_json_bytes), file=path,
                                   max_bytes=limits.max_tokenizer_json_bytes)
    if not isinstance(vocab, dict) or not all(type(token) is int and token >= 0 for token in vocab.values()):
        raise FormatError(file=path, field="JSON", got="something else", allowed="an object, token -> id")
    for token in (_START, END, pad):
        if token not in vocab:
            raise FormatError(file=path, field=token, got="missing", allowed="an id")
    merges_path = os.path.join(folder, "merges.txt")
    text = _text(merges_path)
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
                                    fuse_unk=False, unk_token=END))
    except Exception as error:  # what tokenizers raises has no class of its own
        raise FormatError(file=merges_path, field="merges", got=str(error)[:200],
                          allowed="merges of tokens of vocab.json") from error
    made.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "),
                                            normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_WORDS), behavior="removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.add_special_tokens(list(dict.fromkeys([_START, END, pad])))
    made.post_processor = processors.RobertaProcessing((END, vocab[END]), (_START, vocab[_START]), False, False)
    made.decoder = decoders.ByteLevel()
    return made


def wordpiece(path: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """BERT's, of ``vocab.txt``: a token a line; ``config``: tokenizer_config.json.

    Raises:
        FormatError: the file is malformed, or a special token is not in it.
        FileError: it is gone.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    lines = _text(path).split("\n")
    vocab = {line.rstrip("\r"): at for at, line in enumerate(lines[:-1] if lines[-1] == "" else lines)}
    names = {name: str(config.get(name) or default) for name, default in _BERT.items()}
    for name in ("unk_token", "cls_token", "sep_token"):
        if names[name] not in vocab:
            raise FormatError(file=path, field=name, got=f"{names[name][:80]}, missing", allowed="a line")
    strip = config.get("strip_accents")  # None: where case is lowered
    lowers, apart = (config.get(name) is not False for name in ("do_lower_case", "tokenize_chinese_chars"))
    made = Tokenizer(models.WordPiece(vocab, unk_token=names["unk_token"], max_input_chars_per_word=100))
    made.normalizer = normalizers.BertNormalizer(True, apart, None if strip is None else strip is True, lowers)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens([token for token in dict.fromkeys(names.values()) if token in vocab])
    cls, sep = names["cls_token"], names["sep_token"]
    made.post_processor = processors.BertProcessing((sep, vocab[sep]), (cls, vocab[cls]))
    made.decoder = decoders.WordPiece(prefix="##")
    return made
