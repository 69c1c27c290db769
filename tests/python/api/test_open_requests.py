"""Requests that ended leave nothing behind: neither success, error, timeout nor cancellation keeps an entry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool import aio
from mpool.conversation import grammar
from openrequests import check_all_ended, opened

CHAT = [{"role": "user", "content": "Hello"}]
LONG: dict[str, Any] = {"max_tokens": 4000, "ignore_eos": True, "temperature": 0}
SHORT: dict[str, Any] = {"max_tokens": 3, "temperature": 0}


async def cancelled(request: Any) -> None:
    """Start a request and cancel it, normally while it runs."""
    task = asyncio.ensure_future(request)
    await asyncio.sleep(0.02)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def closed(stream: Any) -> None:
    next(stream)
    stream.close()


def timed_out(pool: mpool.Pool, model: Path) -> None:
    with suppress(mpool.Timeout):  # a fast machine may complete the request
        pool.generate("The", model, timeout=0.02, **LONG)


def refused(pool: mpool.Pool, bert: Path, llama: Path) -> None:
    with pytest.raises(mpool.InvalidArgument):
        pool.chat([{"role": "user"}], llama)
    with pytest.raises(mpool.InvalidArgument):
        asyncio.run(aio.embed(["a"], bert, pool=pool, dimensions=0))


CASES: dict[str, Callable[[mpool.Pool, Path, Path], object]] = {
    "embed": lambda pool, bert, llama: pool.embed(["a", "b"], bert),
    "embed_async": lambda pool, bert, llama: asyncio.run(aio.embed(["a", "b"], bert, pool=pool)),
    "embed_cancelled": lambda pool, bert, llama: asyncio.run(cancelled(aio.embed(["word " * 300] * 3000, bert,
                                                                                 pool=pool))),
    "chat": lambda pool, bert, llama: pool.chat(CHAT, llama, **SHORT),
    "chat_async": lambda pool, bert, llama: asyncio.run(aio.chat(CHAT, llama, pool=pool, **SHORT)),
    "chat_cancelled": lambda pool, bert, llama: asyncio.run(cancelled(aio.chat(CHAT, llama, pool=pool, **LONG))),
    "stream": lambda pool, bert, llama: list(pool.chat(CHAT, llama, stream=True, **SHORT)),
    "stream_closed": lambda pool, bert, llama: closed(pool.chat(CHAT, llama, stream=True, **LONG)),
    "timeout": lambda pool, bert, llama: timed_out(pool, llama),
    "refused": refused,
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_stays_open(pool: mpool.Pool, bert: Path, llama: Path, case: str) -> None:
    before = opened()
    CASES[case](pool, bert, llama)
    check_all_ended(before)


@pytest.mark.parametrize("how", ["success", "error", "closed", "timeout"])
def test_no_mask_stays_open(pool: mpool.Pool, llama: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    pytest.importorskip("llguidance")
    before = opened()

    def broken(self: grammar._MaskedRequest, choice: int) -> None:
        raise mpool.LimitError("too complex")

    options: dict[str, Any] = {"response_format": {"type": "regex", "regex": "[a-z]+"}, "max_tokens": 2000, "seed": 1}
    if how == "success":
        pool.generate("Once", llama, **{**options, "max_tokens": 5, "n": 2})
    elif how == "error":
        monkeypatch.setattr(grammar._MaskedRequest, "_advance", broken)
        with pytest.raises(mpool.LimitError):
            pool.generate("Once", llama, **options)
    elif how == "closed":
        closed(pool.generate("Once", llama, stream=True, **{**options, "logit_bias": {2: -100}}))
    else:
        with suppress(mpool.Timeout):
            pool.generate("Once", llama, timeout=0.02, **{**options, "logit_bias": {2: -100}})
    check_all_ended(before)
