"""The number of tokens that a text has at least (``Tokenizer.least_tokens``) never exceeds the number that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import mpool

TEXTS = ["", "a", "a" * 50_000, " " * 50_000, "\n\t \u3000" * 9000, "e\u0301\u0323" * 20_000, "\u1f82" * 5000,
         "\U0001f600\u200d" * 5000, "the cat " * 8000, "<|im_start|> <|im_end|>  \n" * 2000,
         "".join(map(chr, range(1, 0xd800))), "\u00e4\u4e2d" * 9000]


@pytest.mark.parametrize("name", ["llama", "qwen2", "bert"])
def test_never_more_than_the_tokens_of_a_text(name: str, request: pytest.FixtureRequest, pool: mpool.Pool) -> None:
    folder: Path = request.getfixturevalue(name)
    capability: Any = "text_embedding" if name == "bert" else "text_to_text"
    tokenizer = pool._find(str(folder), capability).tokenizer()
    texts = [*TEXTS, "".join(control * 50 for control in tokenizer.control_texts) + "x y"]
    for text in texts:
        for special in (False, True):
            ids = tokenizer.encode(text, add_special=False, parse_special=special)
            assert tokenizer.least_tokens(text, special) <= len(ids), (name, text[:20])
    if name != "bert":
        assert tokenizer.least_tokens("a" * 50_000, False) >= 50_000 // 100
        control = tokenizer.control_texts[0]
        assert tokenizer.least_tokens(control * 1000, True) >= 1000 > tokenizer.least_tokens(control * 10, False)
