"""Vocabularies of GGUF files: reads and validates the ``tokenizer.ggml.*`` keys.

A file contains tokens, their types and scores, merges and a few flags. All other rules are conventions of llama.cpp
(``src/llama-vocab.cpp``, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer). Every value is validated
before use, since a file may be damaged or malicious. :mod:`mpool.tokenizers.gguf_build` builds a HF tokenizer from the
vocabulary.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError, LimitError, Unsupported
from ..host.lazy import cached_property
from ..models.formats.byte_pairs import byte_alphabet
from ..models.json_strict import shorten
from ..models.spec import TokenTable
from . import limits
from .pretokenizers import PRE_TOKENIZERS, PreTokenizer
from .specials import BY_TEXT, CALL_MARKS, END_OF_GENERATION, SHOWN, check_sizes

if TYPE_CHECKING:
    from .. import _core

_GGML = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class _Kind:
    """A tokenizer model named by ``tokenizer.ggml.model``, with llama.cpp's defaults for missing keys."""

    name: str
    defaults: Mapping[str, int] = field(default_factory=dict)
    add_bos: bool = False
    add_eos: bool = False
    add_space_prefix: bool = False


_KINDS = {
    "gpt2": _Kind("bpe", {"bos": 11, "eos": 11}),
    "gemma4": _Kind("bpe"),
    "llama": _Kind("spm", {"bos": 1, "eos": 2, "unk": 0}, add_bos=True, add_space_prefix=True),
    "t5": _Kind("unigram", {"eos": 1, "unk": 2, "pad": 0}, add_eos=True),
    "bert": _Kind("wordpiece", {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103}),
}
_UNSUPPORTED_KINDS = ("rwkv", "plamo2", "hybriddna", "whitespace", "no_vocab", "none", "replit")

#: Short name -> keys in the file. All keys but the first are older spellings, or misspellings of other writers.
_SPECIAL_KEYS = {
    "bos": ("bos_token_id",), "eos": ("eos_token_id",), "eot": ("eot_token_id",), "eom": ("eom_token_id",),
    "unk": ("unknown_token_id",), "sep": ("seperator_token_id", "separator_token_id"), "pad": ("padding_token_id",),
    "cls": ("cls_token_id",), "mask": ("mask_token_id",), "fim_pre": ("fim_pre_token_id", "prefix_token_id"),
    "fim_suf": ("fim_suf_token_id", "suffix_token_id"), "fim_mid": ("fim_mid_token_id", "middle_token_id"),
    "fim_pad": ("fim_pad_token_id",), "fim_rep": ("fim_rep_token_id",), "fim_sep": ("fim_sep_token_id",),
}

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def unmatchable(token: int) -> str:
    """Return a name that no text matches. It begins with a space, which all vocabularies replace in their tokens."""
    return f" \0{token}"


class GGUFVocab:
    """A validated vocabulary.

    Attributes:
        kind: ``bpe``, ``spm``, ``unigram`` or ``wordpiece``.
        texts: text of every token, as in the file. Tokens that are not UTF-8 have an unmatchable name.
        types: :class:`TokenType` of every token, after llama.cpp's corrections by text.
        scores: score of every token (``spm`` and ``unigram``), else empty.
        ids: text -> id.
        core_bpe: the core's index of tokens and merges; None unless the vocabulary is valid BPE from a file.
        special: ``bos``, ``eos``, ``unk``, ``sep``, ``pad``, ``cls``, ``mask``, ``eot``, ``eom``, ``fim_*`` -> id.
        prefix, suffix: ids that ``add_special`` puts before and after a text.
        eog: ids of tokens that end a generation, ascending.
        shown: ids of control tokens that are part of a completion's text: the markers of Harmony messages and of tool
            calls.
        pre: the pre-tokenizer (``bpe``), else None.
        lstrip, rstrip: ids of tokens that remove the white space before or after them.
        file: path for error messages, or None.
    """

    def __init__(self, kv: Mapping[str, Any], *, file: str | None = None) -> None:
        """Read the keys ``tokenizer.ggml.*`` (and ``general.name`` if present) of ``kv``.

        Args:
            kv: the metadata of the file. Strings may be ``str`` or ``bytes``; arrays may be lists, tuples or NumPy
                arrays.
            file: path for error messages.

        Raises:
            FormatError: a key is missing, has a wrong type or length, or is out of range.
            LimitError: the vocabulary has more tokens, or longer ones, than :mod:`mpool.tokenizers.limits` allows.
            Unsupported: llama.cpp supports the tokenizer model and mpool does not.
        """
        self._kv = kv
        self.file = file
        model = self._string("model")
        if model is None:
            raise self._bad("model", "nothing", f"one of {', '.join(_KINDS)}")
        if model in _UNSUPPORTED_KINDS:
            raise Unsupported(f"{file or 'the GGUF file'}: tokenizer model {model!r} is not supported",
                              hint=f"Supported are {', '.join(_KINDS)}")
        if model not in _KINDS:
            raise self._bad("model", _quoted(model), f"one of {', '.join(_KINDS)}")
        self._kind = _KINDS[model]
        self.kind = self._kind.name
        self._read_tokens()
        self._read_types()
        self._read_scores()
        self.pre = self._read_pre(model)
        self._read_specials()
        self._correct_by_text()
        defined = [self.texts[token] for token in self.user_defined]
        # texts that mpool normalises are split at user-defined tokens as at control tokens
        check_sizes(defined, [*(self.texts[token] for token in self.control), *(() if self.pre else defined)],
                    file=file or "the GGUF file", field=_GGML + "tokens",
                    kind="control" if self.pre else "control or user-defined")
        self._read_flags()
        self._read_strips()

    # Reading

    def _bad(self, key: str, got: object, allowed: object, hint: str | None = None) -> FormatError:
        return FormatError(file=self.file or "the GGUF file", field=_GGML + key, got=got, allowed=allowed, hint=hint)

    def _string(self, key: str) -> str | None:
        value = self._kv.get(_GGML + key)
        if isinstance(value, bytes):
            try:
                value = value.decode()
            except UnicodeDecodeError:
                raise self._bad(key, _quoted(value), "UTF-8") from None
        if value is not None and not isinstance(value, str):
            raise self._bad(key, _kind_of(value), "a string")
        return value

    def _flag(self, key: str, default: bool) -> bool:
        value = self._kv.get(_GGML + key)
        if value is None:
            return default
        if not isinstance(value, (bool, np.bool_)):
            raise self._bad(key, _kind_of(value), "a boolean")
        return bool(value)

    def _array(self, key: str, of: str) -> Sequence[Any] | None:
        value = self._kv.get(_GGML + key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple, np.ndarray)) or (isinstance(value, np.ndarray) and value.ndim != 1):
            raise self._bad(key, _kind_of(value), f"an array of {of}")
        return value  # type: ignore[return-value]

    def _read_tokens(self) -> None:
        raw = self._array("tokens", "strings")
        if raw is None or len(raw) == 0:
            raise self._bad("tokens", "nothing" if raw is None else "an empty array", "at least one token")
        if len(raw) > limits.max_vocab_tokens:
            raise LimitError(f"{self.file or 'the GGUF file'}: {_GGML}tokens has {len(raw):,} tokens, "
                             f"the limit is {limits.max_vocab_tokens:,}",
                             hint="Raise mpool.tokenizers.limits.max_vocab_tokens")
        texts, self._raw = self._decode("tokens", raw)
        longest = max(map(len, raw))
        if longest > limits.max_token_bytes:
            raise LimitError(f"{self.file or 'the GGUF file'}: {_GGML}tokens has a token of {longest:,} bytes, "
                             f"the limit is {limits.max_token_bytes:,}",
                             hint="Raise mpool.tokenizers.limits.max_token_bytes")
        if "" in texts:
            for token, text in enumerate(texts):
                if not text:
                    self._raw[token] = b""
            texts = [text or unmatchable(token) for token, text in enumerate(texts)]
        self.texts = texts
        header = getattr(self._kv, "header", None)
        self.core_bpe: _core.Bpe | None = None
        if header is not None and self.kind == "bpe" and not self._raw:
            self.core_bpe = header.bpe()
        if self.core_bpe is not None:
            self.ids: Mapping[str, int] = _CoreIds(texts, self.core_bpe)
            return
        self.ids = dict(zip(texts, range(len(texts))))
        if len(self.ids) != len(texts):
            second = next(token for token, text in enumerate(texts) if self.ids[text] != token)
            again = self.ids[texts[second]]
            raise self._bad("tokens", f"{_quoted(texts[second])} as token {second} and again as {again}",
                            "unique tokens")

    def _decode(self, key: str, raw: Sequence[Any]) -> tuple[list[str], dict[int, bytes]]:
        """Return the texts of an array of strings, and the bytes of those that are not UTF-8, by index. The latter get
        an unmatchable name as text."""
        kinds = set(map(type, raw))
        if kinds == {str}:
            texts = raw if isinstance(raw, list) else list(raw)
            try:
                "".join(texts).encode()
                return texts, {}
            except UnicodeEncodeError:  # the reader decoded bytes with surrogateescape
                raw = [text.encode("utf-8", "surrogateescape") for text in texts]
        elif kinds != {bytes}:
            raise self._bad(key, f"elements of type {', '.join(sorted(kind.__name__ for kind in kinds))}", "strings")
        # Decode all strings at once, joined by a byte that never occurs in UTF-8: three times as fast as one by one.
        joined = b"\xff".join(raw).decode("utf-8", "surrogateescape")
        texts = joined.split("\udcff")
        try:
            joined.replace("\udcff", "").encode()
            if len(texts) == len(raw):
                return texts, {}
        except UnicodeEncodeError:
            pass
        texts, not_utf8 = [], {}
        for index, data in enumerate(raw):
            try:
                texts.append(data.decode())
            except UnicodeDecodeError:
                texts.append(unmatchable(index))
                not_utf8[index] = data
        return texts, not_utf8

    def _read_types(self) -> None:
        types = self._array("token_type", "integers")
        if types is None:
            self.types = [int(TokenType.NORMAL)] * len(self.texts)
            return
        if len(types) != len(self.texts):
            raise self._bad("token_type", f"{len(types)} elements", f"{len(self.texts)}, one for every token")
        values = types.tolist() if isinstance(types, np.ndarray) else list(types)
        if set(map(type, values)) != {int}:
            raise self._bad("token_type", f"elements of type {_kinds_of(values)}", "integers")
        kinds = set(values)
        if not kinds <= set(TokenType):
            wrong = next(value for value in values if value not in set(TokenType))
            raise self._bad("token_type", wrong, "0 (undefined) to 6 (byte)")
        self.types = values
        if TokenType.BYTE in kinds:
            for token, kind in enumerate(values):
                if kind == TokenType.BYTE and not _BYTE_TOKEN.fullmatch(self.texts[token]):
                    raise self._bad("tokens", f"byte token {token} with text {_quoted(self.texts[token])}",
                                    "<0x00> to <0xFF> with upper-case digits")

    def _read_scores(self) -> None:
        self.scores: list[float] = []
        scores = self._array("scores", "numbers")
        if scores is None:
            if self.kind in ("spm", "unigram"):
                raise self._bad("scores", "nothing", "a score for every token")
            return
        if len(scores) != len(self.texts):
            raise self._bad("scores", f"{len(scores)} elements", f"{len(self.texts)}, one for every token")
        values = scores.tolist() if isinstance(scores, np.ndarray) else list(scores)
        if not set(map(type, values)) <= {int, float}:
            raise self._bad("scores", f"elements of type {_kinds_of(values)}", "numbers")
        if not all(map(math.isfinite, values)):
            raise self._bad("scores", "NaN or infinity", "finite numbers")
        if self.kind in ("spm", "unigram"):
            self.scores = list(map(float, values))

    def _read_pre(self, model: str) -> PreTokenizer | None:
        if self.kind != "bpe":
            return None
        name = "gemma4" if model == "gemma4" else self._string("pre") or "default"
        pre = PRE_TOKENIZERS.get(name)
        if pre is None:
            raise self._bad("pre", _quoted(name), f"one of {', '.join(sorted(PRE_TOKENIZERS))}",
                            "Use the model's tokenizer.json, or request support for this pre-tokenizer")
        return pre

    def _read_specials(self) -> None:
        self.special: dict[str, int] = {}
        for name, keys in _SPECIAL_KEYS.items():
            for key in keys:
                value = self._kv.get(_GGML + key)
                if value is None:
                    continue
                if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
                    raise self._bad(key, _kind_of(value), "an integer")
                if not 0 <= value < len(self.texts):
                    raise self._bad(key, int(value), f"0 to {len(self.texts) - 1}")
                self.special.setdefault(name, int(value))
        if self.kind == "wordpiece" and "bos" not in self.special and "cls" in self.special:
            self.special["bos"] = self.special["cls"]
        for name, value in self._kind.defaults.items():
            if name in self.special or (name == "bos" and self.pre is not None and not self.pre.default_bos):
                continue
            if value >= len(self.texts):
                raise self._bad(_SPECIAL_KEYS[name][0], f"nothing, so {value} by default",
                                f"0 to {len(self.texts) - 1}", "Add the key, or the missing tokens, to the file")
            self.special[name] = value

    def _correct_by_text(self) -> None:
        """Find special tokens by their texts, determine which of them end a generation, and correct their types."""
        ids, types, special = self.ids, self.types, self.special
        for name, texts in BY_TEXT.items():
            if name not in special:
                found = next((ids[text] for text in texts if text in ids), None)
                if found is not None:
                    special[name] = found
                    types[found] = TokenType.CONTROL
        eog = {special[name] for name in ("fim_pad", "fim_rep", "fim_sep") if name in special}
        for text in filter(ids.__contains__, END_OF_GENERATION):
            eog.add(ids[text])
            types[ids[text]] = TokenType.CONTROL
        # llama.cpp makes these user-defined tokens, so that they are shown; but then ordinary text becomes one, too
        self.shown = {ids[text] for text in SHOWN if text in ids}
        for token in self.shown:
            types[token] = TokenType.CONTROL
        eog |= {special[name] for name in ("eos", "eot", "eom") if name in special}
        self.shown |= {ids[text] for text in CALL_MARKS if text in ids and types[ids[text]] == TokenType.CONTROL} - eog
        ends = {self.texts[token] for token in eog}
        # Harmony and Solar-Open use <|end|> between the messages of one completion
        if "<|end|>" in ends and (ends >= {"<|return|>", "<|call|>"} or
                                  ("<|flush|>" in ends and ends & {"<|call|>", "<|calls|>"})):
            eog.discard(ids["<|end|>"])
            self.shown.add(ids["<|end|>"])
        # for Gemma 4 and PLaMo, </s> is ordinary text
        if "</s>" in ends and ends & {"<|tool_response>", "<|plamo:eos|>"}:
            eog.discard(ids["</s>"])
            types[ids["</s>"]] = TokenType.NORMAL
        self.eog = tuple(sorted(eog))

    def _read_flags(self) -> None:
        pre = self.pre
        add_bos = self._flag("add_bos_token", pre.add_bos if pre else self._kind.add_bos)
        add_eos = self._flag("add_eos_token", self._kind.add_eos)
        self._flag("add_sep_token", False)
        self.add_space_prefix = self._flag("add_space_prefix", self._kind.add_space_prefix)
        self.remove_extra_whitespaces = self._flag("remove_extra_whitespaces", False)
        self.lowercase = self._flag("normalizer.lowercase", True)
        self.strip_accents = self._flag("normalizer.strip_accents", self.lowercase)
        if self.kind == "wordpiece":
            self.prefix, self.suffix = [self.special["bos"]], [self.special["sep"]]
            return
        if pre is not None and pre.whole_newlines:
            add_bos = True  # Gemma 4's files state false by mistake
        for wanted, name in ((add_bos, "bos"), (add_eos, "eos")):
            if wanted and name not in self.special:
                raise self._bad(f"{name}_token_id", "nothing", f"an id, since add_{name}_token is true")
        self.prefix = [self.special["bos"]] if add_bos else []
        self.suffix = [self.special["eos"]] if add_eos else []

    def _read_strips(self) -> None:
        lstrip = self.pre.lstrip if self.pre else ()
        self.lstrip = {self.ids[text] for text in lstrip if text in self.ids}
        self.rstrip: set[int] = set()
        name = self._kv.get("general.name")
        if isinstance(name, bytes):
            name = name.decode("utf-8", "replace")
        if isinstance(name, str) and re.search("phi-?3", name.lower()):
            keep = {"<unk>", "<s>", "<|endoftext|>"}
            self.rstrip = {token for token in (*self.control, *self.user_defined) if self.texts[token] not in keep}

    # Reading on demand

    def merges(self) -> list[tuple[str, str]]:
        """Return the merges of a BPE vocabulary in order of rank, without duplicates.

        This method does not check that their parts are tokens.
        """
        raw = self._array("merges", "strings")
        if raw is None:
            raise self._bad("merges", "nothing", "an array of strings")
        if len(raw) == 0:
            return []
        texts, not_utf8 = self._decode("merges", raw)
        if not_utf8:
            raise self._bad("merges", _quoted(next(iter(not_utf8.values()))), "UTF-8")
        if set(map(str.count, texts, repeat(" "))) == {1}:
            parts = " ".join(texts).split(" ")
            pairs = list(zip(parts[::2], parts[1::2]))
        else:
            parts = [""]
            pairs = [tuple(text.split(" ", 1)) for text in texts]  # type: ignore[misc]
        if "" in parts and not all(len(pair) == 2 and all(pair) for pair in pairs):
            wrong = next(text for text, pair in zip(texts, pairs) if len(pair) != 2 or not all(pair))
            raise self._bad("merges", _quoted(wrong), "two tokens with a space between them")
        if len(set(texts)) != len(texts):
            pairs = list(dict.fromkeys(pairs))
        return pairs

    def charsmap(self) -> bytes | None:
        """Return the precompiled character map of a unigram vocabulary, or None."""
        value = self._kv.get(_GGML + "precompiled_charsmap")
        if value is None or isinstance(value, (bytes, bytearray)):
            return value if value is None else bytes(value)
        values = self._array("precompiled_charsmap", "bytes")
        try:
            if values is not None and len(values) and isinstance(values[0], str):  # base64, as in Ollama's files
                return base64.b64decode("".join(values), validate=True)
            return (np.asarray(values) & 0xFF).astype(np.uint8).tobytes()
        except ValueError:
            raise self._bad("precompiled_charsmap", "strings that are not base64", "bytes") from None
        except TypeError:
            raise self._bad("precompiled_charsmap", f"elements of type {_kinds_of(values or [])}", "bytes") from None

    def release(self) -> None:
        """Drop the references to the file's values. Nothing can be read on demand afterwards."""
        self._kv = {}

    # Views

    def _of_types(self, *types: TokenType) -> list[int]:
        kinds, found = bytes(self.types), []
        for kind in types:  # find() per type: 30 times as fast as a Python loop over all tokens if they are rare
            token = kinds.find(kind)
            while token >= 0:
                found.append(token)
                token = kinds.find(kind, token + 1)
        return sorted(found)

    @property
    def control(self) -> list[int]:
        """Ids of the tokens that are found in text only with ``parse_special``."""
        return self._of_types(TokenType.CONTROL, TokenType.UNKNOWN)

    @property
    def user_defined(self) -> list[int]:
        """Ids of the tokens that are found in text before any other step."""
        return self._of_types(TokenType.USER_DEFINED)

    @property
    def byte_level(self) -> bool:
        """True if tokens are written in GPT-2's byte alphabet."""
        return self.pre is not None and self.pre.byte_level

    @cached_property
    def token_table(self) -> TokenTable:
        """The bytes that each token adds to a text."""
        hidden = bytearray(len(self.texts))
        own = dict(self._raw)  # tokens whose bytes are not their decoded text
        for token in self._of_types(*(kind for kind in TokenType if kind != TokenType.NORMAL)):
            kind = self.types[token]
            if kind == TokenType.USER_DEFINED or token in self.shown:
                own.setdefault(token, self.texts[token].encode())
            elif kind == TokenType.BYTE:
                own[token] = bytes((int(self.texts[token][3:5], 16),))
            else:
                own[token] = b""
                hidden[token] = 1
        decode = _byte_level_bytes if self.byte_level else _escaped_bytes
        data, sizes = bytearray(), np.empty(len(self.texts), dtype=np.int64)
        start = 0
        for end in (*sorted(own), len(self.texts)):
            run = self.texts[start:end]
            if run:
                decoded, sizes[start:end] = decode(run)
                data += decoded
            if end in own:
                data += own[end]
                sizes[end] = len(own[end])
            start = end + 1
        offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        return TokenTable(data=bytes(data), offsets=offsets, control=bytes(hidden), eog=self.eog)


class _CoreIds(Mapping[str, int]):
    """Text -> id, looked up in the core. A dict of the vocabulary takes 20 ms to fill, for about a hundred lookups."""

    def __init__(self, texts: list[str], bpe: _core.Bpe) -> None:
        self._texts, self._bpe = texts, bpe

    def __getitem__(self, text: str) -> int:
        try:
            found = self._bpe.find(text)
        except UnicodeEncodeError:  # a lone surrogate
            found = None
        if found is None:
            raise KeyError(text)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


def _byte_level_bytes(texts: list[str]) -> tuple[bytes, Any]:
    """Return the bytes of texts in GPT-2's alphabet, and the size of each. Other characters are encoded as UTF-8."""
    alphabet = byte_alphabet()
    table = np.full(1 << 16, -1, dtype=np.int16)
    table[[ord(char) for char in alphabet.values()]] = list(alphabet)
    codes = np.frombuffer("".join(texts).encode("utf-16-le", "surrogatepass"), dtype="<u2")
    data = table[codes]
    if data.size == 0 or int(data.min()) >= 0:
        return data.astype(np.uint8).tobytes(), list(map(len, texts))
    known = {char: bytes((byte,)) for byte, char in alphabet.items()}
    parts = [b"".join([known.get(char) or char.encode() for char in text]) for text in texts]
    return b"".join(parts), list(map(len, parts))


def _escaped_bytes(texts: list[str]) -> tuple[bytes, Any]:
    """Return the bytes of texts in which ``▁`` represents a space, and the size of each."""
    parts = [text.replace("▁", " ").encode() for text in texts]
    return b"".join(parts), list(map(len, parts))


def _kind_of(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}"
    if isinstance(value, (list, tuple)):
        return "an array"
    if isinstance(value, (bool, int, float, str)):
        return f"{_quoted(value) if isinstance(value, str) else repr(value)} ({type(value).__name__})"
    return type(value).__name__


def _quoted(value: str | bytes) -> str:
    """Return the start of a value as one line of text, for an error message."""
    return shorten(repr(value[:100]))


def _kinds_of(values: Iterable[Any]) -> str:
    return ", ".join(sorted({type(value).__name__ for value in values}))
