"""Tokenizers in the file formats that transformers used before ``tokenizer.json``: BERT's WordPiece, and CLIP's
byte-pair encoding with an end-of-word suffix (https://github.com/openai/CLIP/blob/main/clip/simple_tokenizer.py)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ..errors import FormatError, LimitError
from ..models import json_strict
from ..models.fields import Fields
from ..models.files import MAX_LONG_JSON_VALUES, read_small
from . import limits
from .specials import check_sizes

if TYPE_CHECKING:
    import tokenizers

#: Names of the files that identify such a tokenizer.
CLIP, WORDPIECE = "merges.txt", "vocab.txt"
#: Files that list added tokens.
CONFIG, _SPECIAL, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
#: All files that this module reads.
NAMES = ("vocab.json", CLIP, WORDPIECE, CONFIG, _SPECIAL, _ADDED)

_START, END = "<|startoftext|>", "<|endoftext|>"
#: Words of CLIP: special tokens, English contractions, runs of letters, single digits, runs of other characters.
WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
#: Default special tokens of BERT, by their keys in tokenizer_config.json.
_BERT = {"unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]",
         "mask_token": "[MASK]"}


def _lines(path: str) -> list[str]:
    """Return the lines of a file with a token or a merge per line, without the end of the last one.

    Raises:
        LimitError: the file has more lines than a vocabulary has tokens.
    """
    data = read_small(path, limits.max_tokenizer_json_bytes)
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    if lines > limits.max_vocab_tokens:
        raise LimitError(f"{path}: {lines:,} lines, the limit is {limits.max_vocab_tokens:,}",
                         hint="Raise mpool.tokenizers.limits.max_vocab_tokens")
    text = json_strict.decode_utf8(data, file=path, field="text")
    return [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]


def fields_of(folder: str, name: str) -> Fields:
    """Read a JSON object; empty if the file does not exist."""
    path = os.path.join(folder, name)
    if not os.path.lexists(path):
        return Fields({}, file=path)
    data = read_small(path, limits.max_tokenizer_json_bytes)
    return Fields.of(json_strict.loads(data, file=path, max_bytes=limits.max_tokenizer_json_bytes,
                                        max_values=MAX_LONG_JSON_VALUES, wide_ints=True), file=path)


def _text_of(fields: Fields, key: str) -> str | None:
    """Return a token's text; the value is a string or an object with the key ``content``."""
    value = fields.get(key)
    return Fields(value, file=fields.file, at=key).str("content") if isinstance(value, dict) else \
        value if isinstance(value, str) else None


def _add_tokens(tokenizer: tokenizers.Tokenizer, folder: str, known: Iterable[str]) -> None:
    """Add the tokens that are not in the vocabulary, as transformers does: those in ``added_tokens_decoder`` of
    tokenizer_config.json, or else those in added_tokens.json.

    Args:
        tokenizer: the tokenizer to add to.
        folder: the model's folder.
        known: texts of special tokens that no file needs to list.

    Raises:
        FormatError: a file is malformed, a token would not get its stated id, or a special token has no id.
        LimitError: the tokens have more characters than :mod:`mpool.tokenizers.limits` allows.
    """
    config, special = fields_of(folder, CONFIG), fields_of(folder, _SPECIAL)
    named = {*known, *(_text_of(fields, key) for fields in (config, special)
                       for key in fields if key.endswith("_token"))}
    extra: dict[str, tuple[Fields, str]] = {}
    for fields in (config, special):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            among = fields.get(key)
            items = Fields(among if isinstance(among, dict) else {str(i): token for i, token in
                                                                  enumerate(fields.list(key, []))},
                           file=fields.file, at=key)
            extra.update({text: (fields, key) for at in items if (text := _text_of(items, at)) is not None})
    stated = []
    decoder = config.section("added_tokens_decoder", None)
    if decoder is not None:
        for key in decoder:
            if not key.isdecimal() or len(key) > 10:
                decoder.fail(key[:80], "a name", "token ids as keys")
            token = decoder.section(key)
            text, is_special = token.str("content"), token.bool("special", False)
            stated.append((int(key), text, AddedToken(
                text, special=is_special or text in named, normalized=token.bool("normalized", not is_special),
                **{name: token.bool(name, False) for name in ("single_word", "lstrip", "rstrip")}), config.file))
    else:
        added = fields_of(folder, _ADDED)
        for text in added:
            is_special = text in named or text in extra
            stated.append((added.int(text, low=0), text,
                           AddedToken(text, special=is_special, normalized=not is_special), added.file))
    if stated:
        check_sizes((text for _, text, _, _ in stated), (text for _, text, entry, _ in stated if entry.special),
                    file=stated[0][3], field="added_tokens_decoder" if decoder is not None else "JSON")
    stated.sort(key=lambda item: item[0])
    tokenizer.add_tokens([entry for _, _, entry, _ in stated])
    for token, text, _, file in stated:
        if tokenizer.token_to_id(text) != token:
            raise FormatError(file=file, field=f"id of added token {text[:80]!r}", got=token,
                              allowed=f"{tokenizer.token_to_id(text)}, its id in the vocabulary")
    for text, (fields, key) in extra.items():
        if tokenizer.token_to_id(text) is None:
            fields.fail(key, f"{text[:80]!r}, which has no id", f"tokens with an id in the vocabulary or in {_ADDED}")


def clip(folder: str, pad: str) -> tokenizers.Tokenizer:
    """Read CLIP's tokenizer from ``vocab.json`` and ``merges.txt``.

    Args:
        folder: the folder of the files.
        pad: text of the padding token.

    Raises:
        FormatError: a file is malformed, or an added token would not get its stated id.
        LimitError: a file has more lines or tokens than :mod:`mpool.tokenizers.limits` allows.
        FileError: a file cannot be read.
    """
    path = os.path.join(folder, "vocab.json")
    vocab: Any = json_strict.loads(read_small(path, limits.max_tokenizer_json_bytes), file=path,
                                   max_bytes=limits.max_tokenizer_json_bytes,
                                   max_values=limits.max_vocab_tokens + 1)
    if not isinstance(vocab, dict) or not all(type(token) is int and token >= 0 for token in vocab.values()):
        raise FormatError(file=path, field="JSON", got="something else",
                          allowed="an object that maps tokens to ids of 0 or more")
    for token in (_START, END, pad):
        if token not in vocab:
            raise FormatError(file=path, field=token, got="no entry", allowed="an id")
    merges_path = os.path.join(folder, "merges.txt")
    merges = []
    for number, line in enumerate(_lines(merges_path)):
        if not line or (number == 0 and line.startswith("#version")):
            continue
        pair = line.split(" ", 2)
        if len(pair) != 2:
            raise FormatError(file=merges_path, field=f"line {number + 1}", got=line[:80],
                              allowed="two tokens separated by a space")
        merges.append((pair[0], pair[1]))
    try:
        tokenizer = Tokenizer(models.BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix="</w>",
                                         fuse_unk=False, unk_token=END))
    except MemoryError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise FormatError(file=merges_path, field="merges", got=str(error)[:200],
                          allowed="merges of tokens of vocab.json") from error
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "),
                                            normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), behavior="removed", invert=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    _add_tokens(tokenizer, folder, (_START, END, pad))
    tokenizer.add_special_tokens(list(dict.fromkeys([_START, END, pad])))
    tokenizer.post_processor = processors.RobertaProcessing((END, vocab[END]), (_START, vocab[_START]), False, False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def wordpiece(path: str, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Read BERT's tokenizer from ``vocab.txt``, which has one token per line.

    Args:
        path: path of ``vocab.txt``.
        config: content of tokenizer_config.json.

    Raises:
        FormatError: a file is malformed, a special token is missing, or an added token would not get its stated id.
        LimitError: a file has more lines or tokens than :mod:`mpool.tokenizers.limits` allows.
        FileError: a file cannot be read.
    """
    vocab = {line: at for at, line in enumerate(_lines(path))}
    names = {name: str(config.get(name) or default) for name, default in _BERT.items()}
    for name in ("unk_token", "cls_token", "sep_token"):
        if names[name] not in vocab:
            raise FormatError(file=path, field=name, got=f"{names[name][:80]}, which has no line",
                              allowed="a token of the vocabulary")
    strip = config.get("strip_accents")  # None: strip accents if the text is lowercased
    lowers, chinese = (config.get(name) is not False for name in ("do_lower_case", "tokenize_chinese_chars"))
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=names["unk_token"], max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(True, chinese, None if strip is None else strip is True, lowers)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    _add_tokens(tokenizer, os.path.dirname(path), names.values())
    tokenizer.add_special_tokens([token for token in dict.fromkeys(names.values()) if token in vocab])
    cls, sep = names["cls_token"], names["sep_token"]
    tokenizer.post_processor = processors.BertProcessing((sep, vocab[sep]), (cls, vocab[cls]))
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer
