"""The vocabulary of Kimi's models: ``tiktoken.model``, the ranks of byte-pair encoding in tiktoken's file format
(https://github.com/openai/tiktoken/blob/main/tiktoken/load.py), with the special tokens of tokenizer_config.json.

The file has a line per token: its bytes in base64, a space, and its rank, which is its id. The rest is defined by
Python code beside the file, ``tokenization_kimi.py``, which mpool does not run: 256 special tokens follow the ranks.
``added_tokens_decoder`` in tokenizer_config.json names some of them, the others are ``<|reserved_token_ID|>``.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import NamedTuple

from ...errors import FormatError, LimitError
from ..fields import Fields
from ..files import read_small
from .byte_pairs import byte_alphabet, check_splitting, splits

#: Name in ``tokenizer.ggml.pre`` of the expression that splits texts into words.
PRE_TOKENIZER = "kimi-k2"
#: Limits of the file in bytes, tokens, and bytes of a token. Kimi K2 has 3 MB, 163,584 and 128.
MAX_BYTES, MAX_TOKENS, MAX_TOKEN_BYTES = 64 << 20, 1 << 20, 4096
_SPECIAL_TOKENS = 256
_LINE = re.compile(rb"([A-Za-z0-9+/]{4,}|[A-Za-z0-9+/]{2,}={1,2}) (\d{1,7})\r?")


class Ranks(NamedTuple):
    """Such a vocabulary.

    Attributes:
        texts: the tokens by rank, in GPT-2's alphabet of bytes.
        special: texts of the tokens that follow them, and True for each that is a control token.
    """

    texts: list[str]
    special: list[tuple[str, bool]]

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges that the ranks imply, best first."""
        return splits(self.texts, set(self.texts))


def read(path: str, config: Fields) -> Ranks:
    """Read a ``tiktoken.model``.

    Args:
        path: path of the file.
        config: content of tokenizer_config.json beside it.

    Raises:
        FormatError: a file is malformed, a rank is missing or given twice, a byte has no token, or two tokens are
            equal.
        LimitError: the file has more or longer tokens than the constants of this module allow, or so many long ones
            that finding their merges takes too long.
        FileError: the file cannot be read.
    """
    tokens = _tokens(path)
    table = {byte: ord(char) for byte, char in byte_alphabet().items()}
    texts = [token.decode("latin-1").translate(table) for token in tokens]
    known = set(texts)
    if len(known) < len(texts):
        raise FormatError(file=path, field="tokens", got=f"{len(texts) - len(known)} that occur twice",
                          allowed="different tokens")
    missing = next((byte for byte, char in byte_alphabet().items() if char not in known), None)
    if missing is not None:
        raise FormatError(file=path, field="tokens", got=f"none for the byte 0x{missing:02x}",
                          allowed="a token for each byte")
    check_splitting(texts, path, "the file")
    special = _special(config, len(texts))
    names = {text for text, _ in special}
    if len(names) < len(special) or not known.isdisjoint(names):
        config.fail("added_tokens_decoder", "a text that another token has", "different tokens")
    return Ranks(texts, special)


def _tokens(path: str) -> list[bytes]:
    lines = read_small(path, MAX_BYTES).removesuffix(b"\n").split(b"\n")
    if len(lines) > MAX_TOKENS:
        raise LimitError(f"{path}: {len(lines):,} tokens, the limit is {MAX_TOKENS:,}",
                         hint="The file is damaged: download it again")
    tokens = [b""] * len(lines)
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1]) if match is not None else b""
        except binascii.Error:
            token = b""
        if match is None or not token:
            raise FormatError(file=path, field=f"line {number}", got=repr(line[:80])[2:-1],
                              allowed="a token in base64, a space, and its rank")
        if len(token) > MAX_TOKEN_BYTES:
            raise LimitError(f"{path}: the token in line {number} has {len(token):,} bytes, the limit is "
                             f"{MAX_TOKEN_BYTES:,}", hint="The file is damaged: download it again")
        rank = int(match[2])
        if rank >= len(lines) or tokens[rank]:
            raise FormatError(file=path, field=f"rank in line {number}",
                              got=rank if rank >= len(lines) else f"{rank}, the rank of an earlier line",
                              allowed=f"each rank from 0 to {len(lines) - 1} once")
        tokens[rank] = token
    return tokens


def _special(config: Fields, first: int) -> list[tuple[str, bool]]:
    """Return the tokens that follow the ranks, from the id ``first``."""
    tokens = [(f"<|reserved_token_{token}|>", True) for token in range(first, first + _SPECIAL_TOKENS)]
    decoder = config.section("added_tokens_decoder", None)
    for key in decoder if decoder is not None else ():
        token = decoder.section(key)
        if not re.fullmatch("[0-9]{1,10}", key) or not first <= int(key) < first + _SPECIAL_TOKENS:
            decoder.fail(key[:80], "an id of another token",
                         f"the ids that follow the ranks, {first} to {first + _SPECIAL_TOKENS - 1}")
        for name in ("single_word", "lstrip", "rstrip", "normalized"):
            if token.bool(name, False):
                token.fail(name, "true", "false")
        tokens[int(key) - first] = (token.str("content"), token.bool("special", False))
    return tokens
