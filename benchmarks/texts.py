"""Texts for the benchmarks, made of common words by a fixed seed: every run measures the same texts.

The speed of a model depends on a text's length and not on its content. ``mixed`` has the lengths of natural sentences:
from 3 words to 150, 31 tokens on average in BERT's vocabulary.
"""

import math
import random

WORDS = """\
the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which one
you were all her she there would their we him been has when who will more no if out so said what up its about into
than them can only other new some could time these two may then do first any my now such like our over man me even
most made after also did many before must through back years where much your way well down should because each just
those people state how too little good very make world still own see men work long get here between both life being
under never day same another know while last might us great old year off come since against go came right used take
three small house water river mountain winter summer letter number question answer reason history science energy
music garden window
""".split()


def words(count: int, chance: random.Random) -> str:
    """Return a text of ``count`` words, with a full stop."""
    return " ".join(chance.choices(WORDS, k=count)).capitalize() + "."


def mixed(count: int, turn: int = 0) -> list[str]:
    """Return ``count`` sentences of natural length, different in each turn."""
    chance = random.Random(1 + 1000 * turn)
    return [words(max(3, min(150, round(math.exp(chance.gauss(3.11, 0.65))))), chance) for _ in range(count)]


def same(count: int, length: int, turn: int = 0) -> list[str]:
    """Return ``count`` texts of ``length`` words, different in each turn."""
    chance = random.Random(length + 1000 * turn)
    return [words(length, chance) for _ in range(count)]


def prose(count: int) -> str:
    """Return one text of ``count`` words, in sentences."""
    chance = random.Random(2)
    parts = []
    while count > 0:
        length = min(count, chance.randint(6, 20))
        parts.append(words(length, chance))
        count -= length
    return " ".join(parts)
