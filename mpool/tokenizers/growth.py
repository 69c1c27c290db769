"""How much longer the steps of a ``tokenizer.json`` can make a text, and what its regular expressions cost.

The file is not trusted: a chain of replacements multiplies a text by any number, and Rust aborts the process when no
memory is left. A step with the factor f turns n characters into at most f * n. Text that a step adds once per text, or
once per part of a text, counts as if it were added to every character. The factors of a chain are multiplied.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..errors import FormatError, LimitError
from ..models.json_strict import shorten
from . import charsmap, limits
from .patterns import Cost, cost
from .specials import check_sizes

#: Factors of normalisations, in characters: U+FDFA has 18 in NFKD, U+0390 has 3 in NFD, "İ" has 2 in lower case.
_COMPOSE, _DECOMPOSE, _COMPATIBLE, _LOWER = 3, 4, 18, 2
_NORMALIZERS = {"NFC": _COMPOSE, "NFD": _DECOMPOSE, "NFKC": _COMPATIBLE, "NFKD": _COMPATIBLE, "Lowercase": _LOWER,
                "BertNormalizer": _DECOMPOSE, "ByteLevel": 4, "Nmt": 1, "Strip": 1, "StripAccents": 1}
_UNICODE = ("NFC", "NFD", "NFKC", "NFKD", "StripAccents")
#: A character has up to four bytes, and each becomes a character; a space can be put before every word.
_PRE_TOKENIZERS = {"ByteLevel": 5, "Metaspace": 2}
_LISTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors",
          "decoder": "decoders"}
#: Types of the steps of each section. HF tokenizers also reads steps without a type, with another type, and steps that
#: are lists: it derives the type from the fields. mpool refuses these: it cannot derive their growth, and no published
#: file has them.
_TYPES = {
    "normalizer": {*_NORMALIZERS, "Precompiled", "Prepend", "Replace", "Sequence"},
    "pre_tokenizer": {"BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace",
                      "Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit"},
    "post_processor": {"BertProcessing", "ByteLevel", "RobertaProcessing", "Sequence", "TemplateProcessing"},
    "decoder": {"BPEDecoder", "ByteFallback", "ByteLevel", "CTC", "Fuse", "Metaspace", "Replace", "Sequence", "Strip",
                "WordPiece"},
}
#: Keys of the file that are read before HF tokenizers reads it.
_KEYS = (*_LISTS, "added_tokens")
_SPACE = re.compile(r"[ \t\r\n]*")
#: Characters of a text that may need the square of its length in steps, and still takes negligible time.
MAX_SQUARED = 3000
#: Characters of the longest token of a Unigram model, which tries every token at every character of a text, for which
#: a character takes negligible time: about 50 ns for each character of the token. Published tokens have 16.
MAX_QUICK_TOKEN = 64
#: ASCII letters and underscores written as escapes of JSON, which could hide one of the keys above.
_HIDDEN = re.compile(rb"\\u00[4-7][0-9a-fA-F]")
#: The start of a vocabulary, and an entry of it: a token with its id, or a list of a token and its score.
_VOCABULARY = re.compile(rb'"vocab"\s*:\s*[\[{]')
_ENTRY = re.compile(rb'\s*(?:\[\s*)?"[^"\\]*(?:\\.[^"\\]*)*"\s*[:,][^"\[\]{},]*\]?\s*,?', re.DOTALL)
#: A prefix of a model's tokens that is not empty.
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*"[^"]')


@dataclass(frozen=True)
class Growth:
    """Bounds of one tokenizer.

    Attributes:
        normalizer: factor of the normalizer for any text.
        ascii: factor of the normalizer for ASCII text.
        pre_tokenizer, ascii_pre_tokenizer: the same factors of the pre-tokenizer.
        cost: the highest cost of a step that text passes: a regular expression, a long pattern, or a slow model.
        squared: factor by which a text has grown, at most, when it reaches a step whose cost is not constant.
    """

    normalizer: int = 1
    ascii: int = 1
    pre_tokenizer: int = 1
    ascii_pre_tokenizer: int = 1
    cost: Cost = Cost.CONSTANT
    squared: int = 1

    def with_slow_model(self) -> Growth:
        """Return the bounds for a model that takes more than a constant time for a character."""
        return replace(self, cost=max(self.cost, Cost.LINEAR), squared=self.normalizer * self.pre_tokenizer)

    def of(self, text: str) -> int:
        """Return the maximum number of characters that a text has after all steps."""
        return len(text) * (self.ascii * self.ascii_pre_tokenizer if text.isascii() else
                            self.normalizer * self.pre_tokenizer)


class Examined(NamedTuple):
    """Facts that a ``tokenizer.json`` states.

    Attributes:
        growth: the bounds of the tokenizer.
        added: stated ids of the added tokens, by text. HF tokenizers ignores them.
        highest: field and value of the highest id that the post-processor adds to a text; -1: it adds none.
    """

    growth: Growth
    added: Mapping[str, list[Any]]
    highest: tuple[str, int]


def read(data: bytes, path: str) -> Growth:
    """Return the bounds of a ``tokenizer.json``; see :func:`examine`."""
    return examine(data, path).growth


def examine(data: bytes, path: str) -> Examined:
    """Derive the bounds of a ``tokenizer.json`` before it is loaded.

    Args:
        data: content of the file. HF tokenizers refuses some errors that this function accepts.
        path: path for error messages.

    Raises:
        LimitError: a step makes texts longer than :mod:`mpool.tokenizers.limits` allows, or tokens are longer.
        FormatError: a step has an unknown type, or decodes with a regular expression whose cost is not known; HF
            tokenizers would panic at a step; or a merge does not fit the prefix of the model's tokens.
        ValueError, RecursionError: the file is not valid JSON.
    """
    _check_counts(data, path)
    # The trie of a Unigram model is as deep as its longest token, and the library frees it by recursion, which
    # overflows the stack at about 200,000 bytes. The vocabulary is a list of lists that begin with a token.
    if re.search(rb'\[\s*"(?:[^"\\]|\\.){%d}' % (limits.max_token_bytes + 1), data, re.DOTALL):
        raise LimitError(f"{path}: a token has more than {limits.max_token_bytes:,} bytes",
                         hint="Raise mpool.tokenizers.limits.max_token_bytes")
    hidden = _HIDDEN.search(data) is not None
    model = json.loads(data).get("model") if hidden else None
    _check_vocabulary(data, model, path)
    found = _sections(data, hidden, path)
    walk = _Walk(path)
    factor, plain, pure = walk.normalizer(found.get("normalizer"), "normalizer")
    tokens = [token for token in _items(found.get("added_tokens")) if isinstance(token.get("content"), str)]
    check_sizes((token["content"] for token in tokens),
                (token["content"] for token in tokens if token.get("special") is True), file=path, field="added_tokens")
    # HF tokenizers normalises the added tokens while it reads the file, in this process
    added = sum(len(token["content"]) for token in tokens if token.get("normalized"))
    if added * factor > limits.max_normalized_chars:
        raise LimitError(f"{path}: the added tokens have up to {added * factor:,} characters after the normalizer, the "
                         f"limit is {limits.max_normalized_chars:,}",
                         hint="Raise mpool.tokenizers.limits.max_normalized_chars if you trust the file")
    if walk.cost > Cost.CONSTANT and added * walk.squared > MAX_SQUARED:
        raise LimitError(f"{path}: the added tokens have {added:,} characters, and the normalizer may need the square "
                         f"of that number of steps; the limit is {MAX_SQUARED // walk.squared:,} characters",
                         hint="The file is damaged: download it again")
    before, plain_before = walk.pre_tokenizer(found.get("pre_tokenizer"), "pre_tokenizer", pure, factor)
    walk.post_processor(found.get("post_processor"), "post_processor")
    growth = Growth(factor, plain, before, plain_before, walk.cost, walk.squared)
    walk.decoder(found.get("decoder"), "decoder")
    if hidden or b'"merges"' in data and _PREFIX.search(data):
        _check_merges(model if hidden else json.loads(data).get("model"), path)
    ids: dict[str, list[Any]] = {}
    for token in tokens:
        ids.setdefault(token["content"], []).append(token.get("id"))
    return Examined(growth, ids, walk.highest)


def _check_counts(data: bytes, path: str) -> None:
    """Check the number of values, each of which takes up to 200 bytes while HF tokenizers reads the file.

    Raises:
        LimitError: there are too many commas and brackets. Those in strings count, too; few tokens contain one.
    """
    values = sum(map(data.count, (b",", b"[", b"{")))
    if values > limits.max_tokenizer_json_values:
        raise LimitError(f"{path}: up to {values:,} values, the limit is {limits.max_tokenizer_json_values:,}",
                         hint="Raise mpool.tokenizers.limits.max_tokenizer_json_values if you trust the file")


def _check_vocabulary(data: bytes, model: Any, path: str) -> None:
    """Check the number of tokens.

    Args:
        data: content of the file.
        model: the model, if its keys may be written with escapes, else None.
        path: path for error messages.

    Raises:
        LimitError: the vocabulary has too many tokens.
    """
    most, count = limits.max_vocab_tokens, 0
    if isinstance(model, Mapping):
        vocabulary = model.get("vocab")
        count = len(vocabulary) if isinstance(vocabulary, (list, Mapping)) else 0
    elif data.count(b'"') // 2 > most:  # a smaller file has fewer tokens; counting them takes 0.3 us for each
        for start in _VOCABULARY.finditer(data):
            at = start.end()
            while count <= most and (entry := _ENTRY.match(data, at)) is not None:
                count, at = count + 1, entry.end()
    if count > most:
        raise LimitError(f"{path}: model.vocab has more than {most:,} tokens, the limit",
                         hint="Raise mpool.tokenizers.limits.max_vocab_tokens")


def _check_merges(model: Any, path: str) -> None:
    """Check that the second token of each merge of a BPE model begins with the prefix of such tokens.

    HF tokenizers removes the prefix without a check: as many bytes as the prefix has characters, in some versions.

    Raises:
        FormatError: a token begins with something else, or would be cut inside a character.
    """
    fields = model if isinstance(model, Mapping) else {}
    value = fields.get("continuing_subword_prefix")
    prefix = value if isinstance(value, str) else ""
    skipped = len(prefix)
    for at, merge in enumerate(_list(fields.get("merges")) if skipped else ()):
        parts = merge.split(" ") if isinstance(merge, str) else _list(merge)
        begins = len(parts) == 2 and isinstance(parts[1], str) and parts[1].startswith(prefix)
        second = parts[1].encode("utf-8", "replace") if begins else b""
        if not begins or second[skipped:skipped + 1] and second[skipped] & 0xC0 == 0x80:
            raise FormatError(file=path, field=f"model.merges[{at}]", got=shorten(repr(merge)),
                              allowed="two tokens, the second of which begins with continuing_subword_prefix")


def _sections(data: bytes, hidden: bool, path: str) -> dict[str, Any]:
    """Return the values of :data:`_KEYS`. The model, most of the file, is parsed only if a key can follow it.

    Args:
        data: content of the file.
        hidden: True if a key may be written with escapes.
        path: path for error messages.

    Raises:
        FormatError: a key that is read occurs twice.
    """
    text = data.decode()
    decoder = json.JSONDecoder()
    found: dict[str, Any] = {}
    seen: set[str] = set()
    at = _SPACE.match(text, 0).end()  # type: ignore[union-attr]
    if text[at:at + 1] != "{":
        return {}
    at += 1
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if text[at:at + 1] == "}":
            return found
        key, at = decoder.raw_decode(text, at)
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if text[at:at + 1] != ":" or not isinstance(key, str):
            raise ValueError(f"no key and value at character {at}")
        if key in seen:  # the search below reads the rest of the file for each model
            raise FormatError(file=path, field="tokenizer.json", got=f"an object with two keys {shorten(repr(key))}",
                              allowed="each key once", hint="Remove one of the two keys from the file")
        seen.add(key)
        at = _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
        if key == "model" and not hidden and not _has_keys(data, len(text[:at].encode())):
            return found
        value, at = decoder.raw_decode(text, at)
        if key in _KEYS:
            found[key] = value
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        at += text[at:at + 1] == ","


def _has_keys(data: bytes, start: int) -> bool:
    """Return True if one of the keys may follow position ``start``."""
    return any(data.find(b'"%b"' % key.encode(), start) >= 0 for key in _KEYS)


def _items(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


class _Walk:
    """Walks over the steps of a file.

    Attributes:
        cost: the highest cost of a step so far.
        squared: see :class:`Growth`.
        highest: see :class:`Examined`.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._before = 1  # factor of the steps before the current one
        self._count: dict[str, int] = {}  # section -> number of its steps so far
        self.cost, self.squared = Cost.CONSTANT, 1
        self.highest = "", -1

    def _steps(self, step: Any, name: str) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the steps of a section in order, each with its place in the file.

        Raises:
            FormatError: a step is not an object with a known type.
            LimitError: the section has too many steps, lists of steps among them.
        """
        section = name.partition(".")[0]
        if step is None and name == section:
            return []
        kind = step.get("type") if isinstance(step, Mapping) else None
        if not isinstance(step, Mapping) or not isinstance(kind, str) or kind not in _TYPES[section]:
            raise FormatError(file=self._path, field=f"{name}.type", got=shorten(repr(kind)),
                              allowed=", ".join(sorted(_TYPES[section])))
        self._count[section] = self._count.get(section, 0) + 1
        if self._count[section] > limits.max_tokenizer_steps:
            raise LimitError(f"{self._path}: {section} has more than {limits.max_tokenizer_steps:,} steps",
                             hint="Raise mpool.tokenizers.limits.max_tokenizer_steps if you trust the file")
        if kind != "Sequence":
            return [(name, step)]
        inner = _LISTS[section]
        return [found for at, item in enumerate(_list(step.get(inner)))
                for found in self._steps(item, f"{name}.{inner}[{at}]")]

    def _check(self, factor: int, name: str, step: Mapping[str, Any]) -> None:
        if factor > limits.max_growth:
            raise LimitError(f"{self._path}: {name} ({step['type']}) can make a text {factor:,} times as "
                             f"long, together with the steps before it; the limit is {limits.max_growth:,}",
                             hint="Raise mpool.tokenizers.limits.max_growth if you trust the file")

    def normalizer(self, section: Any, name: str) -> tuple[int, int, bool]:
        """Return the factor for any text and for ASCII text, and whether ASCII text stays ASCII."""
        factor = plain = 1
        unicode, pure = 1, True  # factor of the current run of Unicode normalisations; text is still ASCII
        for place, step in self._steps(section, name):
            kind, self._before = step["type"], factor
            if kind in _UNICODE:  # a normalised text does not grow again
                largest = max(unicode, _NORMALIZERS[kind])
                factor, unicode = factor // unicode * largest, largest
                plain *= 1 if pure else largest
            else:
                if kind != "Lowercase":
                    unicode = 1
                grown = self._normalizer_step(place, step)
                factor *= grown
                plain *= 1 if pure and kind in _NORMALIZERS and kind != "ByteLevel" else grown
                pure = pure and (kind in _NORMALIZERS or _is_ascii(step))
            self._check(factor, place, step)
        return factor, plain, pure

    def _normalizer_step(self, place: str, step: Mapping[str, Any]) -> int:
        kind = step["type"]
        if kind == "Prepend":
            return 1 + _length(step.get("prepend"))
        if kind == "Replace":
            return self._replace(step)
        if kind == "Precompiled":
            return self._longest_replacement(place, step.get("precompiled_charsmap"))
        return _NORMALIZERS[kind]

    def _replace(self, step: Mapping[str, Any]) -> int:
        """Return the factor of a replacement."""
        pattern, content = step.get("pattern"), _length(step.get("content"))
        pattern = pattern if isinstance(pattern, Mapping) else {}
        self._note(pattern)
        if isinstance(pattern.get("String"), str) and pattern["String"]:
            return max(1, -(-content // len(pattern["String"])))
        # an expression that matches the empty string is replaced at every position
        return max(1, 1 + content if _may_be_empty(pattern.get("Regex")) else content)

    def _longest_replacement(self, place: str, encoded: Any) -> int:
        """Check a precompiled character map. Returns the length of its longest replacement, in bytes."""
        field = f"{place}.precompiled_charsmap"
        try:
            blob = base64.b64decode(encoded if isinstance(encoded, str) else "?", validate=True)
        except ValueError:
            raise FormatError(file=self._path, field=field, got=shorten(repr(encoded)), allowed="base64") from None
        charsmap.check(blob, file=self._path, field=field)
        return longest_string(blob)

    def _note(self, pattern: Any) -> None:
        """Record the cost of a pattern. A string is compared at every place of a text, so a long one has a cost."""
        if not isinstance(pattern, Mapping):
            return
        regex, string = pattern.get("Regex"), pattern.get("String")
        found = cost(regex) if isinstance(regex, str) else Cost.CONSTANT
        if _length(string) > _LONG_PATTERN:
            found = max(found, Cost.LINEAR)
        if found > Cost.CONSTANT:
            self.cost, self.squared = max(self.cost, found), max(self.squared, self._before)

    def pre_tokenizer(self, section: Any, name: str, pure: bool, normalizer: int) -> tuple[int, int]:
        """Return the factor for any text and for ASCII text.

        Args:
            section, name: the section and its name.
            pure: True if the normalizer leaves ASCII text ASCII.
            normalizer: factor of the normalizer.
        """
        factor = plain = 1
        for place, step in self._steps(section, name):
            self._before = normalizer * factor
            self._note(step.get("pattern"))
            if step["type"] == "FixedLength" and step.get("length") == 0:  # HF tokenizers panics at each text
                raise FormatError(file=self._path, field=f"{place}.length", got=0, allowed="1 or more")
            grown = _PRE_TOKENIZERS.get(step["type"], 1)
            factor *= grown
            if pure and step["type"] == "ByteLevel":
                grown = 1 if step.get("add_prefix_space") is False else 2
            plain *= grown
            pure = pure and grown == 1 and step["type"] != "ByteLevel"
            self._check(factor, place, step)
        return factor, plain

    def post_processor(self, section: Any, name: str) -> None:
        """Check the number of tokens that the post-processor makes of a token, or adds to a text."""
        factor = 1
        for place, step in self._steps(section, name):
            if step["type"] == "TemplateProcessing":
                factor *= self._template(place, step)
            for side in ("sep", "cls") if step["type"] in ("BertProcessing", "RobertaProcessing") else ():
                self._use(_list(step.get(side))[1:], f"{place}.{side}[1]")
            self._check(factor, place, step)

    def _use(self, ids: list[Any], field: str) -> None:
        """Record the ids that a post-processor adds. HF tokenizers refuses values that are not integers of 32 bits."""
        highest = max((token for token in ids if type(token) is int), default=-1)
        if highest > self.highest[1]:
            self.highest = field, highest

    def _template(self, place: str, step: Mapping[str, Any]) -> int:
        """Return the number of tokens that a template makes of a text of one token."""
        given = step.get("special_tokens")
        special = given if isinstance(given, Mapping) else {}
        for name, entry in special.items():
            if not isinstance(entry, Mapping):  # HF tokenizers would read a list as the values of the three fields
                raise FormatError(file=self._path, field=f"{place}.special_tokens[{shorten(repr(name))}]",
                                  got=shorten(repr(entry)), allowed="an object with id, ids and tokens")
        most = 1
        for part in ("single", "pair"):
            count = 0
            for at, item in enumerate(_items(step.get(part))):
                if "SpecialToken" not in item:
                    count += 1
                    continue
                token = item["SpecialToken"]
                name = token.get("id") if isinstance(token, Mapping) else None
                if not isinstance(name, str) or name not in special:  # HF tokenizers panics at the first text
                    raise FormatError(file=self._path, field=f"{place}.{part}[{at}].SpecialToken.id",
                                      got=shorten(repr(name)), allowed="a key of special_tokens")
                ids = _list(special[name].get("ids"))
                self._use(ids, f"{place}.special_tokens[{shorten(repr(name))}].ids")
                count += 1 + len(ids)
            most = max(most, count)
        return most

    def decoder(self, section: Any, name: str) -> None:
        """Check the decoder, which runs on the tokens of a completion and once on the whole vocabulary."""
        factor = 1
        for place, step in self._steps(section, name):
            if step["type"] == "Strip" and step.get("stop") != 0:
                # HF tokenizers panics at a token that consists of this character, and at the empty token
                raise FormatError(file=self._path, field=f"{place}.stop", got=shorten(repr(step.get("stop"))),
                                  allowed="0: characters are removed only from the start of a token")
            before, self.cost = self.cost, Cost.CONSTANT
            if step["type"] == "Replace":
                factor *= self._replace(step)
            if self.cost > Cost.CONSTANT:
                raise FormatError(file=self._path, field=place,
                                  got="a long string, or a regular expression with backtracking, which can take very "
                                      "long", allowed="a short string, or an expression without backtracking")
            self.cost = before
            if factor > _MAX_DECODED:
                raise LimitError(f"{self._path}: {place} can make a text {factor:,} times as long, together with the "
                                 f"steps before it; the limit is {_MAX_DECODED}")


#: Characters of the longest string for which the search in a text takes negligible time.
_LONG_PATTERN = 256
#: Maximum factor of a decoder. Published decoders have 1.
_MAX_DECODED = 8


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str) else 0


def _is_ascii(step: Mapping[str, Any]) -> bool:
    return all(not isinstance(step.get(key), str) or step[key].isascii() for key in ("prepend", "content")) \
        and step["type"] in ("Prepend", "Replace")


def _may_be_empty(pattern: Any) -> bool:
    """Return True unless an expression certainly consumes a character: a class or escape, perhaps repeated."""
    return not isinstance(pattern, str) or re.fullmatch(r"(?:\[[^\[\]\\^][^\[\]\\]*\]|\\[sdw]|[^\W_]| )"
                                                        r"(?:\+|\{[1-9][0-9]*(?:,[0-9]*)?\})?", pattern) is None


def longest_string(blob: bytes) -> int:
    """Return the length in bytes of the longest NUL-terminated string after the trie of a character map."""
    start = 4 + int.from_bytes(blob[:4], "little")
    return max(map(len, blob[start:].split(b"\0")), default=1) or 1


__all__ = ["MAX_QUICK_TOKEN", "MAX_SQUARED", "Examined", "Growth", "examine", "longest_string", "read"]
