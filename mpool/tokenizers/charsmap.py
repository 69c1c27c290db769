"""SentencePiece's precompiled character map: the text normalisation of a unigram vocabulary.

The blob (GGUF key ``tokenizer.ggml.precompiled_charsmap``) is a little-endian length, a double-array trie of that many
bytes, and NUL-terminated replacements. A unit of the trie has 32 bits, as in Darts-clone
(https://github.com/s-yata/darts-clone). HF ``tokenizers`` applies such a map per grapheme. This module replaces the
longest matching prefix, as SentencePiece and llama.cpp do: the vocabularies were trained with that rule.

The map of T5 and XLM-R has 225,000 rows, nearly all of them a letter followed by combining marks. They are never
enumerated: a single character is looked up once and cached in the table of ``str.translate``. Sequences are looked up
in the trie only at characters whose successor can continue a sequence.
"""

from __future__ import annotations

import re

import numpy as np

from ..errors import FormatError

_FIELD = "tokenizer.ggml.precompiled_charsmap"
_LEAF, _LABEL, _VALUE = 0x100, 0x800000FF, 0x7FFFFFFF
_CACHED_SEQUENCES = 1 << 14
#: Maximum number of characters of a row. Rows of published maps have a few.
_MAX_ROW = 32
#: States whose children are looked up at a time, and maximum number of unfinished characters at a time.
_STATES, _MAX_UNFINISHED = 1 << 12, 1 << 20


class CharsMap:
    """A character map. Replaces, at every position, the longest sequence that has a row; other characters stay.

    Thread-safe. The constructor follows every pointer of the trie once, so that calls need no bounds checks.

    Args:
        blob: the precompiled map.
        file: path for error messages.

    Raises:
        FormatError: the blob is truncated, a pointer leaves it, or a row is too long.
    """

    def __init__(self, blob: bytes, *, file: str | None = None) -> None:
        units, self._root, self._strings = _parsed(blob, file, _FIELD)
        self._units = units.tolist()
        self._single = _Singles(self)
        later = _later_characters(units, self._root, file)
        self._sequence = re.compile("(?s:.[" + "".join(map(re.escape, later)) + "]+)") if later else None
        self._sequences: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if self._sequence is None:
            return text.translate(self._single)
        parts, start = [], 0
        for match in self._sequence.finditer(text):
            parts.append(text[start:match.start()].translate(self._single))
            parts.append(self._replace(match[0]))
            start = match.end()
        parts.append(text[start:].translate(self._single))
        return "".join(parts)

    def _replace(self, sequence: str) -> str:
        known = self._sequences.get(sequence)
        if known is None:
            data, at, out = sequence.encode(), 0, bytearray()
            while at < len(data):
                length, replacement = self._longest(data, at)
                if length == 0:
                    length = _utf8_length(data[at])
                    replacement = data[at:at + length]
                out += replacement
                at += length
            known = out.decode("utf-8", "replace")
            if len(self._sequences) < _CACHED_SEQUENCES and len(sequence) < 16:
                self._sequences[sequence] = known
        return known

    def _longest(self, data: bytes, at: int) -> tuple[int, bytes]:
        """Return the length of the longest row that matches at ``data[at]`` (0: none), and its replacement.

        The search ends at the first byte that continues no row: after a few steps in published maps. A malformed trie
        may contain itself, so there are at most ``4 * _MAX_ROW`` steps; a text then takes time linear in its length.
        """
        units, node, length, value = self._units, self._root, 0, -1
        for position in range(at, min(at + 4 * _MAX_ROW, len(data))):
            byte = data[position]
            if byte == 0:
                break
            node ^= byte
            unit = units[node]
            if unit & _LABEL != byte:
                break
            node ^= (unit >> 10) << ((unit & 0x200) >> 6)
            if unit & _LEAF:
                length, value = position - at + 1, units[node] & _VALUE
        if value < 0:
            return 0, b""
        return length, self._strings[value:self._strings.index(b"\0", value)]


class _Singles(dict[int, "int | str"]):
    """Table for ``str.translate`` that computes and caches entries on first use."""

    def __init__(self, charsmap: CharsMap) -> None:
        super().__init__()
        self._map = charsmap

    def __missing__(self, code_point: int) -> int | str:
        data = chr(code_point).encode()
        length, replacement = self._map._longest(data, 0)
        self[code_point] = value = replacement.decode("utf-8", "replace") if length == len(data) else code_point
        return value


def check(blob: bytes, *, file: str, field: str) -> None:
    """Check a precompiled map for HF tokenizers, which follows its pointers without a check.

    Raises:
        FormatError: the blob is truncated, a pointer leaves it, or the replacements are not UTF-8.
    """
    _, _, strings = _parsed(blob, file, field)
    try:
        strings.decode()
    except UnicodeDecodeError as error:
        raise _bad(f"replacements that are not UTF-8 at byte {error.start}", "UTF-8", file, field) from None


def _parsed(blob: bytes, file: str | None, field: str) -> tuple[np.ndarray, int, bytes]:
    """Return the units of the trie, the index of its root, and the replacements."""
    if len(blob) < 4:
        raise _bad(f"{len(blob)} bytes", "a length of 4 bytes, a trie and replacements", file, field)
    size = int.from_bytes(blob[:4], "little")
    if size == 0 or size % 4 or size + 4 >= len(blob):
        raise _bad(f"a trie of {size} bytes in {len(blob)} bytes",
                   "a multiple of 4 bytes, followed by the replacements", file, field)
    units = np.frombuffer(blob, dtype="<u4", count=size // 4, offset=4).astype(np.int64)
    strings = blob[4 + size:]
    if strings[-1] != 0:
        raise _bad("replacements that do not end in NUL", "NUL-terminated replacements", file, field)
    root = int(_jump(units[:1])[0])
    if not _every_unit_is_sound(units, strings):  # units that no text reaches may be anything
        _check(units, root, strings, file, field)
    return units, root, strings


def _bad(got: str, allowed: str, file: str | None, field: str) -> FormatError:
    return FormatError(file=file, field=field, got=got, allowed=allowed,
                       hint="The file is damaged: download it again")


def _utf8_length(first: int) -> int:
    return 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4


def _jump(units: np.ndarray) -> np.ndarray:
    return (units >> 10) << ((units & 0x200) >> 6)


def _children(units: np.ndarray, states: np.ndarray, labels: np.ndarray,
              most: int | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return, for each child of ``states``: the index of its parent in ``states``, its label, and its unit's index.

    Args:
        units: the trie.
        states: indices of states.
        labels: labels to look for.
        most: maximum number of children; beyond it, those found so far are returned, so that memory has a bound.
    """
    found, count = [], 0
    for start in range(0, max(states.size, 1), _STATES):
        child = states[start:start + _STATES, None] ^ labels
        parent, column = np.nonzero((units[child] & _LABEL) == labels)
        count += parent.size
        found.append((parent + start, labels[column], child[parent, column]))
        if most is not None and count > most:
            break
    parents, bytes_, children = map(np.concatenate, zip(*found))
    return parents, bytes_, children


def _inside(strings: bytes) -> np.ndarray:
    """Return, for each byte, whether it is inside a character of UTF-8."""
    return (np.frombuffer(strings, dtype=np.uint8) & 0xC0) == 0x80


def _every_unit_is_sound(units: np.ndarray, strings: bytes) -> bool:
    """Return True if no unit points outside the trie or the replacements, whether a text reaches it or not.

    This holds for published maps, and takes a hundredth of the time of :func:`_check`.
    """
    nodes = np.union1d([0], np.flatnonzero(units <= _VALUE))  # unit 0 is the root; others with the top bit are values
    states = nodes ^ _jump(units[nodes])
    if int((states | 255).max(initial=0)) >= units.size:
        return False
    values = units[states[units[nodes] & _LEAF != 0]] & _VALUE
    return int(values.max(initial=0)) < len(strings) and not _inside(strings)[values].any()


def _check(units: np.ndarray, root: int, strings: bytes, file: str | None, field: str) -> None:
    """Follow every pointer of the trie. Raises FormatError if one leaves the trie or the replacements, or if a row is
    too long."""
    seen = np.zeros(units.size, dtype=bool)
    inside = _inside(strings)
    labels = np.arange(1, 256, dtype=np.int64)
    states = np.array([root], dtype=np.int64)
    size = 0
    while states.size:
        if size > 4 * _MAX_ROW:
            raise _bad("a longer sequence of bytes", f"sequences of at most {4 * _MAX_ROW} bytes", file, field)
        size += 1
        # the children of a state are the units (state ^ label), all within the aligned block of 256 units around it
        if int((states | 255).max()) >= units.size:
            raise _bad(f"a trie that points to unit {int((states | 255).max())} of {units.size}",
                       "pointers within the trie", file, field)
        seen[states] = True
        _, _, index = _children(units, states, labels)
        unit = units[index]
        states = np.unique(index ^ _jump(unit))
        if states.size and int(states.max()) >= units.size:
            raise _bad(f"a trie that points to unit {int(states.max())} of {units.size}",
                       "pointers within the trie", file, field)
        values = units[(index ^ _jump(unit))[unit & _LEAF != 0]] & _VALUE
        if values.size and int(values.max()) >= len(strings):
            raise _bad(f"a replacement at byte {int(values.max())} of {len(strings)}",
                       "an offset within the replacements", file, field)
        if inside[values].any():
            raise _bad(f"a replacement at byte {int(values[inside[values]][0])}, inside a character",
                       "an offset at the start of a character", file, field)
        states = states[~seen[states]]


def _later_characters(units: np.ndarray, root: int, file: str | None) -> list[str]:
    """Return the characters that occur in any row after the first character.

    Raises:
        FormatError: a row is too long, or the trie has too many sequences for a published map.
    """
    later: set[str] = set()
    heads = np.array([root], dtype=np.int64)
    seen: set[int] = set()
    for place in range(_MAX_ROW + 1):
        # walk one character from every state in `heads`: `states` and the bytes of the character so far
        states, prefixes, ends = heads, [b""] * heads.size, []
        for _ in range(4):
            parent, label, index = _children(units, states, np.arange(1, 256, dtype=np.int64), _MAX_UNFINISHED)
            if parent.size > _MAX_UNFINISHED:
                raise _bad("a trie with more sequences of bytes", f"at most {_MAX_UNFINISHED:,}", file, _FIELD)
            target = index ^ _jump(units[index])
            grown: dict[tuple[int, bytes], None] = {}
            for row, byte, state in zip(parent.tolist(), label.tolist(), target.tolist()):
                prefix = prefixes[row] + bytes((byte,))
                if len(prefix) == _utf8_length(prefix[0]):
                    ends.append(state)
                    if place > 0:
                        later.add(prefix.decode("utf-8", "replace"))
                else:
                    grown[(state, prefix)] = None
            states = np.array([state for state, _ in grown], dtype=np.int64)
            prefixes = [prefix for _, prefix in grown]
        fresh = set(ends) - seen
        if not fresh:
            break
        if place == _MAX_ROW:
            raise _bad("a longer sequence of characters", f"sequences of at most {_MAX_ROW} characters", file, _FIELD)
        seen |= fresh
        heads = np.array(sorted(fresh), dtype=np.int64)
    later.discard("\ufffd")
    return sorted(later)
