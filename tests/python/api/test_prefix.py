"""Prefix reuse: common prefixes of prompts are computed once, and results do not change."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tinymodels

import mpool

BLOCK = 64  # tokens of a KV block
SYSTEM = "This is a long system prompt that every question shares. " * 12
OPTIONS: dict[str, Any] = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": 11, "max_tokens": 24, "logprobs": True,
                           "top_logprobs": 5, "ignore_eos": True}


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tinymodels.cached(tmp_path_factory, "llama")


@pytest.fixture
def pool() -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(threads=2)) as made:
        yield made


def ask(question: str, *earlier: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, *earlier, {"role": "user", "content": question}]


def without(messages: list[dict[str, str]], llama: Path, **options: Any) -> mpool.Completion:
    """Return the completion of a new pool, which has no cached prefix."""
    with mpool.Pool(mpool.PoolConfig(threads=1)) as fresh:
        done = fresh.chat(messages, llama, **{**OPTIONS, **options})
    assert done.usage.cached_tokens == 0
    return done


def same(one: mpool.Completion, other: mpool.Completion) -> bool:
    """Return True if text, ids and all log probabilities are equal; repr shows all digits of a float."""
    return repr(one.choices) == repr(other.choices) and one.choices[0].logprobs is not None


@pytest.mark.parametrize("compute", ["auto", "float32"])
def test_same_system_prompt(pool: mpool.Pool, llama: Path, compute: str) -> None:
    options = {**OPTIONS, "compute": compute}
    first = pool.chat(ask("What is this?"), llama, **options)
    second = pool.chat(ask("And what is that?"), llama, **options)
    assert first.usage.cached_tokens == 0
    system = len(pool.tokenize(SYSTEM, llama))
    assert system > 2 * BLOCK
    assert system - BLOCK < second.usage.cached_tokens < second.usage.prompt_tokens
    assert second.usage.cached_tokens % BLOCK == 0
    assert same(first, without(ask("What is this?"), llama, compute=compute))
    assert same(second, without(ask("And what is that?"), llama, compute=compute))


def test_same_prompt_again(pool: mpool.Pool, llama: Path) -> None:
    prompt = ask("Once more?")
    want, many = without(prompt, llama), without(prompt, llama, n=3)
    for times in range(3):
        done = pool.chat(prompt, llama, **OPTIONS)
        whole = (done.usage.prompt_tokens - 1) // BLOCK * BLOCK
        assert done.usage.cached_tokens == (whole if times else 0)
        assert same(done, want)
    done = pool.chat(prompt, llama, **OPTIONS, n=3)
    assert done.usage.cached_tokens == whole
    assert same(done, many)
    stream = pool.chat(prompt, llama, **OPTIONS, stream=True)
    assert "".join(chunk.text for chunk in stream) == want.text
    assert stream.result().usage.cached_tokens == whole


def test_prompt_of_a_whole_number_of_blocks(pool: mpool.Pool, llama: Path) -> None:
    ids = (pool.tokenize(SYSTEM, llama) * 2)[:2 * BLOCK]
    first, second = (pool.generate(ids, llama, **OPTIONS) for _ in range(2))
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, BLOCK)  # the last token is always computed
    assert same(first, second)


def test_a_continued_chat_reuses_the_generated_tokens(pool: mpool.Pool, llama: Path) -> None:
    """Generated tokens are found in the cache too, if the next prompt contains the same token ids."""
    ids = list(pool.tokenize(SYSTEM, llama))[:100]
    options = {**OPTIONS, "max_tokens": 120}
    done = pool.generate(ids, llama, **options)
    history = [*ids, *done.token_ids, *pool.tokenize("And then?", llama)]
    again = pool.generate(history, llama, **options)
    assert again.usage.cached_tokens == (len(ids) + len(done.token_ids) - 1) // BLOCK * BLOCK > len(ids)
    with mpool.Pool() as fresh:
        want = fresh.generate(history, llama, **options)
    assert want.usage.cached_tokens == 0
    assert same(again, want)


def test_concurrent_requests_share_a_prefix(pool: mpool.Pool, llama: Path) -> None:
    prompts = [ask(f"Question {number}?") for number in range(12)]
    want = [without(prompt, llama) for prompt in prompts]
    with ThreadPoolExecutor(12) as threads:
        for _ in range(3):
            done = list(threads.map(lambda prompt: pool.chat(prompt, llama, **OPTIONS), prompts))
            assert all(map(same, done, want))
    assert all(one.usage.cached_tokens > BLOCK for one in done)


def test_tenants_do_not_share(pool: mpool.Pool, llama: Path) -> None:
    prompt = ask("Whose is this?")
    want = without(prompt, llama)
    calls: list[dict[str, Any]] = [{}, {"tenant": "one"}, {"tenant": "two"}, {}, {"tenant": "one"}, {"tenant": "two"}]
    done = [pool.chat(prompt, llama, **OPTIONS, **tenant) for tenant in calls]
    assert [one.usage.cached_tokens > 0 for one in done] == [False] * 3 + [True] * 3
    assert all(same(one, want) for one in done)


PROGRAM = """
import sys
import mpool
options = dict(temperature=0, max_tokens=8, ignore_eos=True)
with mpool.Pool(mpool.PoolConfig(threads=1, memory_bytes=200_000_000)) as pool:
    cached = kept = 0
    for number in range(60):
        text = f"{number} is where this one starts, and so on. " * 15
        for _ in range(2):
            cached = pool.generate(text, sys.argv[1], **options).usage.cached_tokens
            kept = max(kept, pool.registry.stats()["bytes_by_tag"]["kv"])
    pool.unload(sys.argv[1])
    print(cached, kept, pool.registry.stats()["bytes_by_tag"]["kv"])
"""


@pytest.mark.parametrize("percent", [0, 1, 25])
def test_memory_is_bounded(llama: Path, percent: int) -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(llama)], capture_output=True, text=True, timeout=120,
                         env={**os.environ, "MPOOL_PREFIX_PERCENT": str(percent)})
    assert run.returncode == 0, run.stderr[-2000:]
    cached, kept, left = map(int, run.stdout.split())
    assert (cached > 0) == (percent > 0)
    assert left == 0
    # In addition to the idle blocks: the blocks of one request, and tables.
    assert kept < 200_000_000 * percent // 100 + 400_000
    if percent == 25:
        assert kept > 3_000_000  # all 60 texts are cached, so the limit of 1 % had an effect
