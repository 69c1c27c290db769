"""``python -m benchmarks isolation``: cost of worker processes, compared with worker threads.

Measures the time to load with one worker, the memory of a worker process by kind, the latency of one-text embeddings
one after the other, and tokens/s of one completion. One text is one step, so the difference in latency is the cost of a
step. Prints a table, with the load average: the figures mean nothing on a machine that others use.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from .options import add_threads, parser_of
from .pool import texts
from .timing import percentile


def memory_of(pid: int) -> dict[str, float]:
    """Return the resident megabytes of a process: anonymous, of files, and shared (the weights)."""
    found = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {name: int(found[name].split()[0]) * 1024 / 1e6 for name in ("RssAnon", "RssFile", "RssShmem")}


def measure(isolation: str, embedding: str, text: str, threads: int, count: int) -> dict[str, float]:
    """Measure one isolation mode; return figures by name."""
    import mpool

    found: dict[str, float] = {}
    config: dict[str, Any] = dict(threads=threads, max_workers_per_model=1, isolation=isolation)
    with mpool.Pool(mpool.PoolConfig(**config)) as pool:
        pool.load(embedding)
        loads = []
        for _ in range(5):
            pool.unload(embedding)
            began = time.perf_counter()
            pool.load(embedding)
            loads.append(time.perf_counter() - began)
        found["load again, ms"] = percentile(loads, 0.5) * 1e3
        calls = []
        for one in texts(count):
            began = time.perf_counter()
            pool.embed(one, embedding)
            calls.append(time.perf_counter() - began)
        found["embed one text p50, us"] = percentile(calls, 0.5) * 1e6
        found["embed one text p99, us"] = percentile(calls, 0.99) * 1e6
        began = time.perf_counter()
        completion = pool.generate("Once upon a time", text, temperature=0, max_tokens=count, ignore_eos=True)
        spent = time.perf_counter() - began
        found["tokens a second"] = completion.usage.completion_tokens / spent
        for row in pool.ps():
            for pid in row.processes[:1]:
                for name, size in memory_of(pid).items():
                    found[f"{row.capability} {name}, MB"] = size
    return found


def main() -> int:
    """Run the command line."""
    parser = parser_of("isolation", __doc__)
    parser.add_argument("--embedding", default="all-MiniLM-L6-v2", help="embedding model (default: %(default)s)")
    parser.add_argument("--text", default="SmolLM2-135M-Instruct", help="language model (default: %(default)s)")
    add_threads(parser)
    parser.add_argument("--count", type=int, default=500, help="number of texts, and of tokens (default: %(default)s)")
    args = parser.parse_args()
    found = {isolation: measure(isolation, args.embedding, args.text, args.threads, args.count)
             for isolation in ("thread", "process")}
    print(f"load average {os.getloadavg()[0]:.2f}")
    print(f"{'':32}{'thread':>12}{'process':>12}")
    for name in found["process"]:
        cells = (f"{found[isolation][name]:12.1f}" if name in found[isolation] else f"{'':12}" for isolation in found)
        print(f"{name:32}" + "".join(cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
