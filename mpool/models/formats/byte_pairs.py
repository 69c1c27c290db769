"""Byte-pair vocabularies: the alphabet of byte-level ones, and the merges of those that rank their tokens."""

from __future__ import annotations

from collections.abc import Container, Iterable

from ...errors import LimitError

#: Maximum sum of the squares of the lengths of the tokens of a SentencePiece vocabulary, in characters. Such a
#: vocabulary has scores instead of merges, so readers and writers try every split of every token into two tokens. The
#: sum bounds this work, and the size of the merges. 262,144 tokens of 16 characters have a quarter of the maximum.
MAX_SPLITTING = 1 << 28


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
