"""A pool whose memory requests hold that compute nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("llguidance")

import mpool  # noqa: E402
from mpool import _core  # noqa: E402
from mpool.conversation.grammar import Format  # noqa: E402
from waiting import until  # noqa: E402

#: Bytes that stay free at most, by isolation: a worker process reports its memory in steps of 1 MiB.
ROOM = {"thread": 1 << 16, "process": 2 << 20}
#: Options of a request that reserves much memory, and tokens of results for which one reserves memory at most.
LARGE: dict[str, Any] = {"n": 8, "logprobs": 20}
MOST = 8192


class _Holders:
    """Requests of a language model that have one token of each completion, and wait for masks."""

    def __init__(self, pool: mpool.Pool, model: str) -> None:
        self.pool = pool
        self.model = model
        self.streams: list[mpool.Stream] = []
        self.tickets: list[tuple[_core.Ticket, int]] = []  # in the same order, with the number of completions

    def free(self) -> int:
        """Return the bytes that are free in the pool."""
        stats = self.pool.registry.stats()
        return int(stats["memory_limit"] - stats["memory_used"])

    def add(self, tokens: int, n: int) -> int:
        """Add a request, wait until it has begun, and return the bytes that it holds: more with more tokens."""
        before = self.free()
        self.streams.append(self.pool.generate("a", self.model, stream=True, fail_fast=True, max_tokens=tokens,
                                               response_format={"type": "regex", "regex": "[a-z]+"},
                                               **LARGE | {"n": n}))
        ticket, n = self.tickets[-1]
        until(lambda: all(ticket.text(choice)[1] for choice in range(n)), 30, self.pool.ps)
        return before - self.free()

    def fill(self) -> None:
        """Add requests until at most ``ROOM`` bytes are free."""
        room = ROOM[self.pool.config.isolation]
        costs = [(n, self.add(2, n) + room // 4, -(-self.add(MOST, n) // MOST)) for n in (LARGE["n"], 1)]
        for n, least, each in costs:
            while (tokens := (self.free() - least) // each) >= 2:
                self.add(min(tokens, MOST), n)
        assert self.free() <= room, self.free()


@contextmanager
def full(pool: mpool.Pool, model: str) -> Iterator[None]:
    """Let requests of a language model hold all memory of a pool but ``ROOM`` inside a ``with`` block. Unloads other
    models that are not pinned. A request of a model that is not loaded needs only memory for its inputs until then.

    All these requests have begun, because those that are queued hold no memory when others need it. They wait for
    masks that no thread computes, and are cancelled at the end of the block.
    """
    for row in pool.ps():
        if not row.pinned:
            pool.unload(row.model)
    pool.load(model)
    holders = _Holders(pool, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Format, "compute_masks", lambda self, ticket, n, *rest: holders.tickets.append((ticket, n)))
        try:
            holders.fill()
            yield
        finally:
            for stream in holders.streams:
                stream.close()
