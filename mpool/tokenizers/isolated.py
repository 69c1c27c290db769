"""A tokenizer in a process of its own, for regular expressions that may take exponential time.

The process (:mod:`mpool.host.child_processes`) has limits on memory and on the CPU time of a call, and is killed when a
call exceeds them; the next call starts it again. It ends with the tokenizer, and with the process that started it.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Sequence
from itertools import accumulate

from ..errors import LimitError, Timeout
from ..host.child_processes import Children, Limits, Program, Source
from . import limits

#: The program of the process. A tokenizer is kept for longer than a renderer: loading it again may take seconds.
PROGRAM = Program(file=os.path.join(os.path.dirname(os.path.abspath(__file__)), "isolated_program.py"),
                  packages=("tokenizers",), what="run the tokenizer of the model", most=1, idle=600.0, worn=2 << 30)

#: Memory in bytes, CPU seconds for loading the tokenizer, and bytes of token ids of one call.
_MEMORY, _LOADING, _IDS = 4 << 30, 60.0, 1 << 30
#: Elapsed time of a call for each second of CPU time. It includes the wait for calls of other threads.
_PATIENCE = 3


class IsolatedTokenizer:
    """A tokenizer in a process, which starts at the first call. Thread-safe: calls run one after another.

    Args:
        source: content of a ``tokenizer.json``.
        plain: True if the texts of special tokens are plain text.
    """

    class Failed(Exception):
        """The tokenizer failed on a text; the process is still usable."""

    def __init__(self, source: str, plain: bool) -> None:
        self._source, self._plain = Source(source), plain
        self._children = Children(PROGRAM)
        self._loaded = False

    def encode(self, texts: Sequence[str], add_special: bool,
               places: bool = False) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
        """Encode texts.

        Returns:
            The ids of each text, and the first and last place of each token; without ``places``, lists without places.

        Raises:
            Failed: an expression of the tokenizer gave up on a text.
            LimitError: the call took more than ``limits.max_tokenizing_seconds``, or too much memory.
            SpawnFailed: the process cannot be started.
            UnicodeEncodeError, TypeError: a text contains a lone surrogate, or is not a string.
        """
        for text in texts:
            text.encode()
        seconds = limits.max_tokenizing_seconds
        deadline = time.monotonic() + _PATIENCE * seconds + (0 if self._loaded else _LOADING)
        try:
            status, data = self._children.run((self._plain, add_special, places, list(texts)), Limits(
                seconds, _LOADING, _MEMORY, _IDS), self._source, deadline)
        except Timeout as error:
            raise LimitError("the tokenizer of the model is busy with other texts", param="text",
                             hint="Try again, or tokenize fewer texts at once") from error
        if status == "failed":
            raise self.Failed(data.decode("utf-8", "replace"))
        numbers = array("I")
        if status == "ids" and len(data) % numbers.itemsize == 0:
            numbers.frombytes(data)
            counts, rest = numbers[:len(texts)], numbers[len(texts):]
            total = sum(counts)
            if len(counts) == len(texts) and len(rest) == (3 * total if places else total):
                self._loaded = True
                ids, pairs = rest[:total].tolist(), list(zip(rest[total:2 * total], rest[2 * total:]))
                ends = list(accumulate(counts, initial=0))
                return ([ids[first:end] for first, end in zip(ends, ends[1:])],
                        [pairs[first:end] for first, end in zip(ends, ends[1:])])
        raise LimitError(f"the tokenizer of the model needs more than {seconds:g} seconds or {_MEMORY >> 30} GiB for "
                         "this text", param="text", hint="Its regular expressions take too many steps; "
                         "mpool.tokenizers.limits.max_tokenizing_seconds raises the limit")


__all__ = ["IsolatedTokenizer"]
