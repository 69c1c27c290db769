"""Byte-pair vocabularies: the alphabet of byte-level ones, merges of ranked tokens, and how DeepSeek splits words."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ...errors import LimitError

#: Maximum sum of the squares of the lengths of the tokens of a SentencePiece vocabulary, in characters. Such a
#: vocabulary has scores instead of merges, so readers and writers try every split of every token into two tokens. The
#: sum bounds this work, and the size of the merges. 262,144 tokens of 16 characters have a quarter of the maximum.
MAX_SPLITTING = 1 << 28


#: Texts of the tokens of single bytes in vocabularies like SentencePiece's.
BYTE_TEXTS = tuple(f"<0x{byte:02X}>" for byte in range(256))


def check_splitting(texts: Iterable[str], file: str, field: str) -> None:
    """Raise LimitError if trying all splits of the tokens in ``field`` of ``file`` takes too long."""
    work = sum(len(text) ** 2 for text in texts)
    if work > MAX_SPLITTING:
        raise LimitError(f"{file}: {field} has long tokens: the squares of their lengths add up to {work:,}, the limit "
                         f"is {MAX_SPLITTING:,}", hint="The file is damaged: download it again")


def byte_alphabet() -> dict[int, str]:
    """Return GPT-2's alphabet: byte -> the printable character that represents it in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in alphabet:
            alphabet[byte] = chr(0x100 + len(alphabet) - len(printable))
    return alphabet


def splits(ranked: Iterable[str], known: Container[str]) -> list[tuple[str, str]]:
    """Return merges that join the neighbours whose joint text ranks best.

    Every split of a token into two tokens is a merge; merges of a better token come first. Two splits of the same
    token compete only where they overlap (``ab a ba`` becomes ``aba ba`` or ``ab aba``). The leftmost must win: the
    split whose right part is the left part of the other.

    Args:
        ranked: the tokens, best first.
        known: the same tokens.
    """
    merges: list[tuple[str, str]] = []
    for text in ranked:
        cuts = [cut for cut in range(len(text) - 1, 0, -1) if text[:cut] in known and text[cut:] in known]
        if len(cuts) > 1:
            cuts = leftmost_first(text, cuts)
        merges += [(text[:cut], text[cut:]) for cut in cuts]
    return merges


def leftmost_first(text: str, cuts: list[int]) -> list[int]:
    """Return the places of the splits of a token, in the order of their merges; see :func:`splits`."""
    size, place = len(text), {cut: at for at, cut in enumerate(cuts)}
    for short in cuts:
        long = size - short
        if short < long and long in place and text[short:] == text[:long] and text[long:] != text[:short]:
            a, b = place[short], place[long]
            if b < a:
                place[short], place[long] = b, a
    return sorted(place, key=place.__getitem__)


# ---- expressions by which DeepSeek's tokenizers split texts into words, in the order in which they are applied ------

#: DeepSeek's letters: all letters that have a case. Written as escapes, since Unicode normalisation would change some.
DEEPSEEK_LETTERS = (
    "\\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]+")
HAN_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
#: DeepSeek-LLM and DeepSeek-V2. Single digits follow.
DEEPSEEK_V2 = (
    r"[\r\n]", DEEPSEEK_LETTERS, "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
#: DeepSeek-V3.
DEEPSEEK_V3 = (
    r"\p{N}{1,3}", HAN_KANA,
    PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+")
