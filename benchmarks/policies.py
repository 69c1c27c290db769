"""Comparison of the dispatch policies: a part of ``python -m benchmarks pool``.

Every round gives each policy one turn, in changing order, each in a new pool whose workers have started. The result is
the median over rounds. Times are of single calls, from the call to its result.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from .texts import words
from .timing import percentile, seconds_of, together

if TYPE_CHECKING:
    import mpool

POLICIES = ("shared", "pack", "p2c", "sequential")


def timed(kept: list[float], call: Callable[[], object]) -> None:
    """Run a call and append its seconds to ``kept``."""
    kept.append(seconds_of(call))


def new_texts() -> Iterator[str]:
    """Yield texts of about ten words, all different: no result comes from a cache."""
    import random

    chance = random.Random(11)
    return (f"{number} {words(9, chance)}" for number in itertools.count())


def embeddings(pool: mpool.Pool, model: str, quick: bool) -> dict[str, float]:
    """Measure one-text calls of 8 and 64 threads, and of 8 threads during a call of 2,000 texts."""
    found: dict[str, float] = {}
    source = new_texts()
    for count in (8, 64):
        work = [[next(source) for _ in range((128 if quick else 1024) // count)] for _ in range(count)]
        took: list[float] = []
        seconds = together(count, lambda number: [timed(took, lambda: pool.embed(text, model))
                                                  for text in work[number]] and None)
        found[f"{count} threads, one text: texts/s"] = len(took) / seconds
        found[f"{count} threads, one text: p50 ms"] = percentile(took, 0.5) * 1e3
        found[f"{count} threads, one text: p99 ms"] = percentile(took, 0.99) * 1e3

    bulk = [next(source) for _ in range(200 if quick else 2000)]
    small = [[next(source) for _ in range(len(bulk))] for _ in range(8)]
    over = threading.Event()
    took, whole = [], []

    def beside(number: int) -> None:
        if number == 8:
            try:
                timed(whole, lambda: pool.embed(bulk, model))
            finally:
                over.set()
            return
        for text in small[number]:
            if over.is_set():
                return
            timed(took, lambda: pool.embed(text, model))

    seconds = together(9, beside)
    found["8 threads during a call of 2,000 texts: p50 ms"] = percentile(took, 0.5) * 1e3
    found["8 threads during a call of 2,000 texts: p99 ms"] = percentile(took, 0.99) * 1e3
    found["8 threads during a call of 2,000 texts: that call, s"] = whole[0]
    found["8 threads during a call of 2,000 texts: all texts/s"] = (len(took) + len(bulk)) / seconds
    return found


def chats(pool: mpool.Pool, model: str, quick: bool) -> dict[str, float]:
    """Measure eight concurrent chats: all of one length, and four long with four short ones."""
    import random

    found: dict[str, float] = {}
    chance, tokens = random.Random(12), 8 if quick else 48

    def run_chat(prompt: str, length: int, first: list[float]) -> None:
        begin = time.perf_counter()
        stream = iter(pool.generate(prompt, model, max_tokens=length, temperature=0, ignore_eos=True, stream=True))
        next(stream)
        first.append(time.perf_counter() - begin)
        for _ in stream:
            pass

    prompts = [words(12, chance) for _ in range(8)]
    first: list[float] = []
    took: list[float] = []
    seconds = together(8, lambda number: timed(took, lambda: run_chat(prompts[number], tokens, first)))
    found["8 chats: tokens/s"] = 8 * tokens / seconds
    found["8 chats: first token, p50 ms"] = percentile(first, 0.5) * 1e3
    found["8 chats: first token, slowest ms"] = max(first) * 1e3
    found["8 chats: slowest completion, s"] = max(took)

    long = [[words(60 if quick else 250, chance)] for _ in range(4)]
    short = [[words(6, chance) for _ in range(2 if quick else 4)] for _ in range(4)]
    firsts: list[list[float]] = [[], []]
    latencies: list[list[float]] = [[], []]
    written = [2 * tokens, tokens // 4]

    def caller(number: int) -> None:
        little = number % 2
        for prompt in (short if little else long)[number // 2]:
            timed(latencies[little], lambda: run_chat(prompt, written[little], firsts[little]))

    seconds = together(8, caller)
    found["4 long and 4 short chats: tokens/s"] = sum(len(latencies[i]) * written[i] for i in (0, 1)) / seconds
    found["4 long and 4 short chats: short first token, p50 ms"] = percentile(firsts[1], 0.5) * 1e3
    found["4 long and 4 short chats: short first token, slowest ms"] = max(firsts[1]) * 1e3
    found["4 long and 4 short chats: short completion, p50 s"] = percentile(latencies[1], 0.5)
    found["4 long and 4 short chats: long completion, slowest s"] = max(latencies[0])
    return found


KINDS: dict[str, Callable[[mpool.Pool, str, bool], dict[str, float]]] = {"embed": embeddings, "text": chats}


def wait_for_workers(pool: mpool.Pool, warm: Callable[[], object]) -> None:
    """Wait until the model has started its initial workers."""
    warm()
    before, end = -1, time.monotonic() + 10
    while time.monotonic() < end:
        workers = sum(row["workers"] for row in pool.registry.entries())
        if workers == before:
            return
        before = workers
        time.sleep(0.2)


def compare(embedding: str, text: str, threads: int, rounds: int, quick: bool) -> dict[str, dict[str, float]]:
    """Return measure -> policy -> the median over rounds."""
    import mpool

    kept: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for place in range(len(POLICIES)):
            policy = POLICIES[(number + place) % len(POLICIES)]
            for kind, model in (("embed", embedding), ("text", text)):
                with mpool.Pool(mpool.PoolConfig(threads=threads, policy=policy)) as pool:
                    wait_for_workers(pool, lambda: pool.embed("warm", model) if kind == "embed"
                                     else pool.generate("warm", model, max_tokens=4))
                    for name, value in KINDS[kind](pool, model, quick).items():
                        kept.setdefault(f"{kind}: {name}", {}).setdefault(policy, []).append(value)
    return {name: {policy: statistics.median(rows[policy]) for policy in POLICIES} for name, rows in kept.items()}


def table(found: dict[str, dict[str, float]]) -> Iterator[str]:
    """Format the comparison. The best policy of a row is marked, unless another one is within 3 %."""
    yield f"| | {' | '.join(POLICIES)} |"
    yield "|---" * (len(POLICIES) + 1) + "|"
    for name, row in found.items():
        order = sorted(row.values(), reverse=name.endswith("/s"))
        clear = max(order[:2]) > 1.03 * min(order[:2])
        yield f"| {name} | " + " | ".join(f"**{row[policy]:,.4g}**" if clear and row[policy] == order[0]
                                          else f"{row[policy]:,.4g}" for policy in POLICIES) + " |"
