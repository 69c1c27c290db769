"""Precompiled character maps of GGUF vocabularies: what they replace, and hostile ones. Reading a map from a file is
tested in test_text_tokenizer.py.
"""

import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "parity" / "text"))

import make_vocabs  # noqa: E402

from mpool.errors import FormatError  # noqa: E402
from mpool.tokenizers.charsmap import CharsMap  # noqa: E402


def test_charsmap_replaces_the_longest_sequence() -> None:
    convert = CharsMap(make_vocabs.charsmap(make_vocabs.CHARSMAP))
    assert convert("e\u0302\u0301 e\u0302 e\u0301e x\u0301") == "ế ê ée x\u0301"
    assert convert("\u1112\u1161\u11ab\u1112\u1161 ｶﾞｶ ﬁ①\u200b…\t") == "한하 ガカ fi1... "
    assert convert("") == "" and convert("\0\u0301") == "\0\u0301"
    for key, value in make_vocabs.CHARSMAP.items():
        assert convert("z" + key + "z") == "z" + value + "z"


def chain(count: int, loop: bool) -> bytes:
    """A character map without rows. Each of ``count`` states has one child, for "a"; a loop leads back to the root."""
    states = 256 * np.arange(1, count + 2)
    units = np.zeros(int(states[-1]) + 256, dtype="<u4")
    units[0] = states[0] << 10
    children = states[:-1] ^ 97
    units[children] = 97 | (children ^ np.where(loop, states[0], states[1:])) << 10
    return (4 * units.size).to_bytes(4, "little") + units.tobytes() + b"x\0"


def test_charsmap_with_a_loop_takes_linear_time() -> None:
    convert, text = CharsMap(chain(1, loop=True)), "a" * 20_000
    began = time.process_time()
    assert convert(text) == text and time.process_time() - began < 10


def test_charsmap_with_long_rows() -> None:
    assert CharsMap(chain(32, loop=False))("aab") == "aab"
    with pytest.raises(FormatError, match="a longer sequence of characters"):
        CharsMap(chain(33, loop=False))
    made = make_vocabs.charsmap({"ab" * 16: "c"})
    assert CharsMap(made)("ab" * 17) == "cab"
