"""Program of a child process that tokenizes for :mod:`mpool.tokenizers.isolated`.

``child_main.py`` runs it outside the package; it imports the standard library and tokenizers only.
"""

from __future__ import annotations

import os
from array import array
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer  # noqa: E402


def load(source: str, plain: bool, special: bool, places: bool, texts: list[str]) -> Any:
    """Return the tokenizer of a ``tokenizer.json``; special tokens in texts are plain text if ``plain``."""
    made = Tokenizer.from_str(source)
    made.no_truncation()
    made.no_padding()
    made.encode_special_tokens = plain
    return made


def handle(tokenizer: Any, plain: bool, special: bool, places: bool, texts: list[str]) -> tuple[str, bytes]:
    """Return the numbers of tokens, then the tokens of all texts, as unsigned integers of C; with ``places``, then
    where each token begins, and where each ends."""
    ids, counts, starts, ends = array("I"), array("I"), array("I"), array("I")
    try:
        for text in texts:
            found = tokenizer.encode(text, add_special_tokens=special)
            counts.append(len(found.ids))
            ids.extend(found.ids)
            if places:
                starts.extend(first for first, _ in found.offsets)
                ends.extend(end for _, end in found.offsets)
    except MemoryError:
        raise
    except BaseException as error:  # a panic is no Exception
        return "failed", str(error)[:300].encode("utf-8", "replace")
    return "ids", (counts + ids + starts + ends).tobytes()
