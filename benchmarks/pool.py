"""``python -m benchmarks pool``: overhead and throughput of the pool.

Measures submit-to-start and refusal times; one-text embeddings of 8 and 64 threads; 8 concurrent chats compared with
one; memory of the second worker; a cold start with 1,000 waiting callers; a stream and 8 threads of embeddings at the
same time. Each part runs in a process of its own. Prints a table, with the load average: the figures mean nothing on a
machine that others use.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .options import add_threads, found_here, parser_of
from .timing import percentile, together

ROOT = Path(__file__).resolve().parents[1]
WORDS = "the quick brown fox jumps over a lazy dog and barks twice at its own shadow in the rain".split()


def texts(count: int, start: int = 0) -> list[str]:
    """Return texts of about ten words, all different: no result comes from a cache."""
    return [f"{number} " + " ".join(WORDS[(number * 7 + word * 3) % len(WORDS)] for word in range(9))
            for number in range(start, start + count)]


def resident() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def part_calls(embedding: str, text: str, threads: int, quick: bool) -> dict[str, float]:
    """Measure the latency of calls one after the other, and of refusals."""
    import mpool

    found: dict[str, float] = {}
    with mpool.Pool(mpool.PoolConfig(threads=threads, embed_queue_capacity=4)) as pool:
        pool.embed("warm", embedding)
        for name, pause in (("spinning", 0.0), ("parked", 0.005)):
            starts, waits = [], []
            for one in texts(40 if quick else 400):
                time.sleep(pause)
                begin = time.perf_counter()
                job = pool.submit("text_embedding", inputs=f"{name} {one}", model=embedding)
                job.result()
                waits.append(time.perf_counter() - begin)
                submitted, started, _ = job._ticket.times()  # type: ignore[union-attr]
                starts.append(started - submitted)
            found[f"submit to start, {name}, p50 us"] = percentile(starts, 0.5) * 1e6
            found[f"one-text embed, {name}, p50 us"] = percentile(waits, 0.5) * 1e6
    with mpool.Pool(mpool.PoolConfig(threads=threads, prompt_queue_capacity=2, policy="sequential",
                                     max_workers_per_model=1)) as pool:
        pool.generate("warm", text, max_tokens=1)
        jobs, refused = [], 0
        while refused < 20:  # the worker takes the first request in the meantime
            try:
                jobs.append(pool.submit("text_to_text", prompt="The", model=text, max_tokens=1500, ignore_eos=True))
            except mpool.Overloaded:
                refused += 1
                time.sleep(0.005)
        took = []
        for _ in range(200 if quick else 2000):
            begin = time.perf_counter()
            try:
                # kept: a request that ended meanwhile has left room, which a dropped job would leave again
                jobs.append(pool.submit("text_to_text", prompt="The", model=text, max_tokens=1500, ignore_eos=True))
            except mpool.Overloaded:
                took.append(time.perf_counter() - begin)
        for job in jobs:
            job.cancel()
        found["refusal when full, p50 us"] = percentile(took, 0.5) * 1e6
        found["refusal when full, p99 us"] = percentile(took, 0.99) * 1e6
        found["refusals measured"] = len(took)
    return found


def part_threads(embedding: str, text: str, threads: int, quick: bool) -> dict[str, float]:
    """Measure one-text embeddings of many threads, and concurrent chats."""
    import mpool

    found: dict[str, float] = {}
    with mpool.Pool(mpool.PoolConfig(threads=threads)) as pool:
        pool.embed(texts(64), embedding)
        at = 1000
        for count in (1, 8, 64):
            each = max(1, (64 if quick else 256) // count)
            work = [texts(each, at + number * each) for number in range(count)]
            at += 256
            seconds = together(count, lambda number: [pool.embed(one, embedding) for one in work[number]] and None)
            found[f"one-text embeds of {count} threads, texts/s"] = count * each / seconds
        options: dict[str, Any] = dict(max_tokens=48, temperature=0, ignore_eos=True)
        pool.generate("Once upon a time", text, **options)
        begin = time.perf_counter()
        pool.generate("A story of number 100:", text, **options)
        alone = 48 / (time.perf_counter() - begin)
        seconds = together(8, lambda number: pool.generate(f"A story of number {number}:", text, **options) and None)
        found["one chat, tokens/s"] = alone
        found["eight chats at once, tokens/s"] = 8 * 48 / seconds
        found["eight chats at once / one chat, ratio of tokens/s"] = 8 * 48 / seconds / alone
    return found


def part_memory(embedding: str, text: str, threads: int, quick: bool) -> dict[str, float]:
    """Measure the memory of the second worker: bytes counted by mpool, and resident bytes."""

    found: dict[str, float] = {}
    for kind, model in (("embedding", embedding), ("text", text)):
        figures = []
        for workers in (1, 2):
            code = f"""
import os, sys, time, json
sys.path.append({str(ROOT)!r})
import mpool
from benchmarks.pool import resident
pool = mpool.Pool(mpool.PoolConfig(threads={threads}, max_workers_per_model={workers}))
pool.load({model!r})
end = time.monotonic() + 10
while sum(row["workers"] for row in pool.registry.entries()) < {workers} and time.monotonic() < end:
    time.sleep(0.01)
time.sleep(0.2)
row = pool.registry.entries()[0]
stats = pool.registry.stats()
print(json.dumps([row["workers"], row["model_bytes"], stats["bytes_by_tag"], resident()]))
"""
            run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=True)
            figures.append(json.loads(run.stdout.splitlines()[-1]))
        (one, model_bytes, before, rss_before), (two, _, after, rss_after) = figures
        if (one, two) != (1, 2):
            raise RuntimeError(f"{kind}: {two} workers started, expected 2")
        found[f"second {kind} worker: bytes counted, MB"] = (sum(after.values()) - sum(before.values())) / 1e6
        for tag in after:
            if abs(after[tag] - before[tag]) >= 1000:
                found[f"second {kind} worker: of kind {tag}, MB"] = (after[tag] - before[tag]) / 1e6
        found[f"second {kind} worker: resident, MB"] = (rss_after - rss_before) / 1e6
        found[f"second {kind} worker: bytes counted, % of the model's bytes"] = (
            100 * (sum(after.values()) - sum(before.values())) / max(1, model_bytes))
    return found


def part_cold(embedding: str, text: str, threads: int, quick: bool) -> dict[str, float]:
    """Measure a cold start with a thousand callers."""
    import mpool

    with mpool.Pool(mpool.PoolConfig(threads=threads)) as pool:
        begin = time.perf_counter()
        pool.embed("alone", embedding)
        alone = time.perf_counter() - begin
    with mpool.Pool(mpool.PoolConfig(threads=threads)) as pool:
        firsts: list[float] = []
        begin = time.perf_counter()

        def one(number: int) -> None:
            pool.embed(f"caller {number}", embedding)
            firsts.append(time.perf_counter())

        seconds = together(1000, one)
        stats = pool.registry.stats()
        return {"cold start: one caller, s": alone, "cold start: 1,000 callers, first result, s": min(firsts) - begin,
                "cold start: 1,000 callers, all results, s": seconds, "cold start: loads": stats["loads"],
                "cold start: workers spawned": stats["workers_spawned"]}


def part_beside(embedding: str, text: str, threads: int, quick: bool) -> dict[str, float]:
    """Measure a stream that prefills and decodes all the time, and 8 threads of one-text calls: each alone, then both
    together.
    """
    import mpool

    period = 0.5 if quick else 4.0
    serial = itertools.count(1)

    def write(pool: mpool.Pool, over: threading.Event, gaps: list[float]) -> int:
        count = 0
        while not over.is_set():
            last = None
            prompt = f"{next(serial)} " + " ".join(texts(8, next(serial)))
            for _ in pool.generate(prompt, text, max_tokens=64, temperature=0, ignore_eos=True, stream=True):
                now = time.perf_counter()
                if last is not None:
                    gaps.append(now - last)
                last, count = now, count + 1
                if over.is_set():
                    break
        return count

    def both(pool: mpool.Pool, writers: int, embedders: int) -> tuple[float, float, list[float]]:
        over = threading.Event()
        written, done, gaps = [0], [0] * 8, []

        def body(number: int) -> None:
            if number >= writers + embedders:
                time.sleep(period)
                over.set()
            elif number < writers:
                written[0] = write(pool, over, gaps)
            else:
                while not over.is_set():
                    pool.embed(texts(1, 1000 * next(serial))[0], embedding)
                    done[number - writers] += 1

        seconds = together(writers + embedders + 1, body)
        return written[0] / seconds, sum(done) / seconds, gaps

    with mpool.Pool(mpool.PoolConfig(threads=threads)) as pool:
        pool.embed("warm", embedding)
        pool.generate("warm", text, max_tokens=4)
        alone, (_, embeds, _) = both(pool, 1, 0), both(pool, 0, 8)
        beside = both(pool, 1, 8)
    return {"beside: a stream alone, tokens/s": alone[0], "beside: 8 threads alone, texts/s": embeds,
            "beside: the stream, of its rate alone, %": 100 * beside[0] / alone[0],
            "beside: the texts, of their rate alone, %": 100 * beside[1] / embeds,
            "beside: longest wait for a token alone, ms": 1e3 * max(alone[2]),
            "beside: longest wait for a token, ms": 1e3 * max(beside[2])}


PARTS: dict[str, Callable[[str, str, int, bool], dict[str, float]]] = {
    "calls": part_calls, "threads": part_threads, "memory": part_memory, "cold": part_cold, "beside": part_beside}


def main() -> int:
    """Run the command line."""
    parser = parser_of("pool", __doc__)
    parser.add_argument("--embedding-model", type=found_here, help="key or path; default: the catalogue's")
    parser.add_argument("--text-model", type=found_here, help="key or path; default: the catalogue's")
    add_threads(parser)
    parser.add_argument("--quick", action="store_true", help="few calls: shows that the command runs, measures nothing")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS),
                        help="parts to run (default: all)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](args.embedding_model, args.text_model, args.threads, args.quick)))
        return 0
    from .compare import weights

    models = (weights(args.embedding_model, "text_embedding"), weights(args.text_model, "text_to_text"))
    before = os.getloadavg()[0]
    found: dict[str, float] = {}
    for part in args.parts:
        command = [sys.executable, "-m", "benchmarks.pool", "--part", part, "--embedding-model", models[0],
                   "--text-model", models[1], "--threads", str(args.threads), *["--quick"] * args.quick]
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, cwd="/")
        if run.returncode != 0:
            print(f"{part} failed:\n{run.stderr}", file=sys.stderr)
            return 1
        found |= json.loads(run.stdout.splitlines()[-1])
    print("| what | value |\n|---|---|")
    for name, value in found.items():
        print(f"| {name} | {value:,.4g} |" if abs(value) < 1000 else f"| {name} | {value:,.0f} |")
    print(f"\nThreads {args.threads}; load average {before:.2f} before, {os.getloadavg()[0]:.2f} after.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
