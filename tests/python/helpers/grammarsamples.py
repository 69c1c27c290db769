"""Texts of a grammar, chosen at random among those that it allows: what a model could write."""

import random
from typing import Any


class _Letters:
    """A token for each byte, and one that ends a text."""

    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    special_token_ids, eos_token_id, bos_token_id = [256], 256, None

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def matcher(source: str) -> Any:
    """Return llguidance's matcher of a grammar, with a token for each byte."""
    import llguidance

    letters = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Letters()), n_vocab=257, eos_token=[256])
    made = llguidance.LLMatcher(letters, source, log_level=0)
    assert not made.is_error(), made.get_error()
    return made


def accepts(source: str, text: str) -> bool:
    """Return True if a grammar allows a text."""
    made, data = matcher(source), list(text.encode())
    return made.try_consume_tokens(data) == len(data) and bool(made.is_accepting())


def samples(source: str, count: int, seed: int = 1, most: int = 400, ends: float = 0.4) -> list[str]:
    """Return texts that a grammar allows.

    Args:
        source: the grammar.
        count: number of attempts.
        seed: seed of the choices.
        most: maximum number of bytes; longer texts are dropped.
        ends: probability to end a text where it may end.
    """
    start, choose, found = matcher(source), random.Random(seed), []
    for _ in range(count):
        made, text = start.deep_copy(), bytearray()
        while len(text) < most:
            mask = made.compute_bitmask()
            allowed = [byte for byte in range(128) if mask[byte // 8] >> byte % 8 & 1]
            if mask[32] & 1 and (not allowed or choose.random() < ends):
                found.append(text.decode())
                break
            if not allowed:
                break
            short = [byte for byte in allowed if byte in b'"}],.:-0129']
            text.append(choose.choice(short if short and choose.random() < 0.4 else allowed))
            assert made.consume_token(text[-1])
    return found
