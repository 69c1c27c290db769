"""Small seeded models with token vectors whose results of PyLate are recorded (tests/parity/libraries)."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from retrievalmodels import write_colbert

QUERIES = ["w1 w2, w3. w4 w9", "w7", "w40 w41 w42 ! w43 w44 w45 w46 w47 w48 w49 w50 w51 w52 w53", "w5 missing w5?"]


def _documents() -> list[str]:
    """Return documents with repeated words and punctuation; the longest has more than 40 tokens."""
    random = np.random.default_rng(2)
    return [" ".join(f"w{word}{mark}" for word, mark in zip(
        random.integers(1, 30, count), random.choice(["", "", "", ".", ",", "!"], count)))
        for count in (1, 5, 19, 33, 60)]


DOCUMENTS = _documents()


class Case(NamedTuple):
    """A model, and how its documents are pooled."""
    kind: str
    dense: list[tuple[int, int]]
    settings: dict[str, Any]
    #: ``pool_factor`` and ``protected_tokens``.
    pooled: tuple[tuple[int, int], ...]


_PREFIXES = {"query_prefix": "[Q] ", "document_prefix": "[D] "}
CASES = {
    "bert": Case("bert", [(48, 40), (40, 20)], {
        **_PREFIXES, "query_length": 12, "document_length": 40, "attend_to_expansion_tokens": False},
        ((2, 1), (3, 1))),
    "modernbert": Case("modernbert", [(48, 12)], {
        "query_prefix": "[unused0]", "document_prefix": "[unused1]", "query_length": 19, "document_length": 31,
        "attend_to_expansion_tokens": True, "skiplist_words": []}, ((2, 0), (3, 2))),
    "unexpanded": Case("bert", [(48, 12)], {
        **_PREFIXES, "query_length": 14, "document_length": 60, "do_query_expansion": False,
        "skiplist_words": ["w5", "."]}, ())}


def write(folder: Path, name: str) -> Path:
    """Write the model of a case in the layout of PyLate."""
    case = CASES[name]
    return write_colbert(folder, case.dense, case.kind, **case.settings)


def inputs(folder: Path) -> str:
    """Return the tokenizer and the texts: recorded results belong to them, as they do to the weights."""
    return json.dumps([json.loads((folder / "tokenizer.json").read_text()), QUERIES, DOCUMENTS])
