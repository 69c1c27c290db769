"""Suggestions for unknown names of models: misspelt names, and other sizes and versions of the same family.

The family of a name is its first word: ``qwen`` of ``qwen3:14b``, ``bge`` of ``bge-m3``, ``e5`` of ``e5``. If a known
model is of the family of a name, models of other families are not suggested: ``llama3.1`` does not suggest TinyLlama.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping

from ..checks import nearest

_FAMILY = re.compile(r"[a-z]{2,}|[a-z]\d+|[a-z]")
_SIZE = re.compile(r"[-:_]?(\d+(?:\.\d+)?)([mb])(?![a-z0-9])")
_NUMBER = re.compile(r"\d+(?:\.\d+)*")
#: Similarity from which a name is a misspelling although a number of it differs.
_MISSPELT = 0.9
#: Words of many families: a name that begins with one of them says nothing about its family.
_GENERIC = frozenset({"base", "chat", "embed", "embedding", "embeddings", "instruct", "large", "mini", "model", "small",
                      "text"})


def suggest(name: str, known: Mapping[str, str], count: int = 3) -> tuple[list[str], bool]:
    """Return the keys that an unknown name may mean, and whether the name is a misspelling or short form of one.

    Args:
        name: of any length.
        known: key of every known name.
        count: maximum number of keys.

    Returns:
        at most ``count`` keys, the most similar first, and False if they are other models of the name's family.
    """
    wanted = _plain(name)
    family = _family(wanted)
    relatives = {other: key for other, key in known.items() if family and _family(_plain(other)) == family}
    if not relatives:
        close = nearest(wanted, known, 3 * count, cutoff=0.6)
        word = _likest_word(family, close)
        return list(dict.fromkeys(known[other] for other in close if word in _words(other)))[:count], True
    ranked = sorted(relatives, key=lambda other: (-_likeness(wanted, _plain(other)), _split(_plain(other))[1] or 0))
    same = list(dict.fromkeys(relatives[other] for other in ranked if _is_spelling(wanted, _plain(other))))
    return (same or list(dict.fromkeys(relatives[other] for other in ranked)))[:count], bool(same)


def question(name: str, known: Mapping[str, str]) -> str:
    """Return the sentence that names the suggested models, or "" if no known model is similar."""
    keys, spelling = suggest(name, known)
    if not keys:
        return ""
    return f"Did you mean {' or '.join(keys)}?" if spelling else f"Known models of its family: {', '.join(keys)}."


def _plain(name: str) -> str:
    """Return a name in lower case, without the organisation, and cut to 200 characters."""
    return name[:200].lower().rpartition("/")[2]


def _family(plain: str) -> str:
    found = _FAMILY.match(plain)
    return found[0] if found is not None else ""


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+", _plain(name))


def _likest_word(family: str, names: list[str]) -> str | None:
    """Return the word of the names that is the most similar to the family of a misspelt name, or None."""
    words = [word for name in names for word in _words(name) if word not in _GENERIC]
    return next(iter(difflib.get_close_matches(family, words, 1, cutoff=0.6)), None)


def _split(plain: str) -> tuple[str, float | None]:
    """Return the part of a name before the number of parameters, and this number in millions."""
    found = _SIZE.search(plain)
    if found is None:
        return plain, None
    return plain[:found.start()], float(found[1]) * (1000 if found[2] == "b" else 1)


def _likeness(wanted: str, other: str) -> float:
    """Return the similarity of two names of a family. A factor of two between the sizes counts as 0.1."""
    (base, size), (other_base, other_size) = _split(wanted), _split(other)
    likeness = difflib.SequenceMatcher(None, base, other_base).ratio()
    if not size:
        return likeness
    return likeness - 0.1 * abs(math.log2(size / other_size)) if other_size else likeness - 0.5


def _is_spelling(wanted: str, other: str) -> bool:
    """Return True if the wanted name is a misspelling or a part of the other name, False for another model."""
    (base, size), (other_base, other_size) = _split(wanted), _split(other)
    likeness = difflib.SequenceMatcher(None, base, other_base).ratio()
    numbers, other_numbers = _NUMBER.findall(base), _NUMBER.findall(other_base)
    if size is not None and size != other_size:
        return False
    others = _words(other)
    if not all(difflib.get_close_matches(word, others, 1, cutoff=0.75) or word in other for word in _words(wanted)):
        return False
    if likeness >= _MISSPELT:
        return numbers[:1] == other_numbers[:1]
    return size is None and set(numbers) <= set(other_numbers) and (likeness >= 0.6 or base in other_base)
