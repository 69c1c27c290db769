"""A pool whose memory requests hold that compute nothing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("llguidance")

import mpool  # noqa: E402
from mpool.conversation.grammar import Format  # noqa: E402
from waiting import until  # noqa: E402

#: Options of a request that reserves much memory for its results, and those of one that reserves little.
_LARGE: tuple[dict[str, Any], ...] = ({"logprobs": 20, "n": 8}, {})


def _fill(pool: mpool.Pool, model: str, options: dict[str, Any], streams: list[mpool.Stream]) -> None:
    """Add requests until no memory is left for one."""
    tokens = 8192
    while tokens:
        try:
            streams.append(pool.generate("a", model, stream=True, fail_fast=True, max_tokens=tokens,
                                         response_format={"type": "regex", "regex": "[a-z]+"}, **options))
        except (mpool.Overloaded, mpool.MemoryExhausted):
            tokens //= 2
        until(lambda: any(row.running for row in pool.ps()), 30, pool.ps)  # it got memory for its keys


@contextmanager
def full(pool: mpool.Pool, model: str) -> Iterator[None]:
    """Let requests of a language model hold all memory of a pool inside a ``with`` block. Unloads all other models.
    The pool's queue must have room for some hundred requests.

    The requests wait for masks that no thread computes, and are cancelled at the end of the block.
    """
    streams: list[mpool.Stream] = []
    for row in pool.ps():
        pool.unload(row.model)
    pool.load(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Format, "compute_masks", lambda *arguments: None)
        try:
            passes = 0
            while passes < 3:  # a request that begins late frees caches
                before = len(streams)
                for options in _LARGE:
                    _fill(pool, model, options, streams)
                passes = passes + 1 if len(streams) == before else 0
                time.sleep(0.3)
            yield
        finally:
            for stream in streams:
                stream.close()
