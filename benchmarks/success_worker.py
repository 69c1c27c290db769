"""A process that measures one part of ``python -m benchmarks success``: see :mod:`benchmarks.own_process`."""

import logging
import statistics
import time
from pathlib import Path
from typing import Any

from own_process import rss, run_task
from timing import together

PROMPT = "Once upon a time"


def anonymous() -> float:
    """Return the resident memory of this process that is not a file's, in units of 10**6 bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith("RssAnon"))


def load(task: dict[str, Any]) -> dict[str, Any]:
    """Load a file, and measure the time until a worker is ready, until the first token, and the memory."""
    import mpool

    path, workers = task["path"], task["workers"]
    with mpool.Pool(mpool.PoolConfig(threads=task["threads"], max_workers_per_model=workers)) as pool:
        began = time.perf_counter()
        pool.load(path)
        ready = time.perf_counter() - began
        states = [pong.state for pong in pool.ping()]
        stream = pool.generate(PROMPT, path, max_tokens=task["tokens"], temperature=0, ignore_eos=True, stream=True)
        next(iter(stream))
        first = time.perf_counter() - began
        for _ in stream:
            pass
        together(workers, lambda number: pool.generate(f"{PROMPT} {number}", path, max_tokens=2, ignore_eos=True))
        (row,) = pool.ps()
        counted = {"workers": row.workers, "ready": sum(state in ("ready", "idle", "processing") for state in states),
                   "model bytes": row.model_bytes, "engine bytes": row.engine_bytes}
        return {"measures": {"ready s": ready, "first output s": first, "memory MB": row.model_bytes / 1e6
                             + row.engine_bytes / 1e6, "anonymous MB": anonymous()},
                "counts": counted, "compute": row.compute, "rss MB": rss()}


def refuse(task: dict[str, Any]) -> dict[str, Any]:
    """Load a file whose last tensor reaches beyond its end: the load must fail."""
    import mpool

    with mpool.Pool(mpool.PoolConfig(threads=task["threads"])) as pool:
        try:
            pool.load(task["path"])
        except mpool.MpoolError as error:
            return {"error": type(error).__name__}
    return {"error": ""}


def decode(task: dict[str, Any]) -> dict[str, Any]:
    """Measure tokens/s of one completion, of eight at once, and of a long prompt: medians of three."""
    import mpool

    path, tokens = task["path"], task["tokens"]
    options: dict[str, Any] = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    with mpool.Pool(mpool.PoolConfig(threads=task["threads"], max_workers_per_model=1)) as pool:
        pool.generate(PROMPT, path, **options)
        one, prompts, eight = [], [], []
        for turn in range(3):
            done = pool.generate(f"{PROMPT} {turn}", path, **options)
            one.append((done.usage.completion_tokens - 1) / done.timings.generation)
            long = pool.generate(f"{turn} " + f"{PROMPT}, there was a word. " * task["words"], path, max_tokens=1)
            prompts.append(long.usage.prompt_tokens / long.timings.prompt)
            seconds = together(8, lambda number: pool.generate(f"{turn} {number} {PROMPT}", path, **options))
            eight.append(8 * tokens / seconds)
        (row,) = pool.ps()
        return {"measures": {"decode tokens/s": statistics.median(one), "prompt tokens/s": statistics.median(prompts),
                             "decode of 8 tokens/s": statistics.median(eight)},
                "counts": {"model bytes": row.model_bytes}, "compute": row.compute, "rss MB": rss()}


class _Records(logging.Handler):
    """Counts log records at INFO and above."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> list[str]:
        """Return the records since the last call. Records arrive on another thread, soon."""
        time.sleep(0.5)
        found, self.texts = self.texts, []
        return found


def logs(task: dict[str, Any]) -> dict[str, Any]:
    """Count the log records at INFO of a load, of requests, of an unload, of the end of a pool and of the life of its
    worker, and the others."""
    import mpool

    records, path, requests = _Records(), task["path"], task["requests"]
    logging.getLogger("mpool").setLevel(logging.INFO)
    logging.getLogger("mpool").addHandler(records)
    pool = mpool.Pool(mpool.PoolConfig(threads=task["threads"], max_workers_per_model=1))
    records.take()
    pool.load(path)
    seen = records.take()
    found = {"load": sum(text.startswith("Loaded ") for text in seen)}
    for number in range(requests):
        for _ in pool.generate(f"{PROMPT} {number}", path, max_tokens=4, ignore_eos=True, stream=True):
            pass
    found["requests"] = len(records.take())
    pool.unload(path)
    evicted = records.take()
    found["eviction"] = sum(text.startswith("Unloaded ") for text in evicted)
    pool.close()
    ended = records.take()
    found["shutdown"] = sum("shutdown" in text for text in ended)
    found["worker"] = sum(text.startswith("Worker ") for text in seen + evicted)
    found["others"] = len(seen + evicted + ended) - sum(
        found[name] for name in ("load", "eviction", "shutdown", "worker"))
    return found


if __name__ == "__main__":
    run_task({"load": load, "refuse": refuse, "decode": decode, "logs": logs})
