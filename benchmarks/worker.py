"""Program of an engine's own process: read a task as JSON from standard input, print its result as the last line.

A rate is that of the median repetition. The program runs by path, so that only installed packages are imported.
"""

import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import texts
from own_process import rss, run_task
from timing import percentile, seconds_of, together

P99 = "8 threads p99 ms"
#: Tokens of the first prompt.
FIRST = 512


def make(task: dict[str, Any], kind: str) -> Any:
    """Return the engine of a task, with its library imported."""
    import engines

    engine = engines.make(kind, task["engine"], task.get("folder", ""))
    engine.imports()
    return engine


def prepare(task: dict[str, Any]) -> dict[str, Any]:
    """Convert the weights for an engine, before it is measured."""
    engine = make(task, "embed")
    if hasattr(engine, "prepare"):
        os.makedirs(engine.folder, exist_ok=True)
        engine.prepare(task["path"])
    return {}


def embed(task: dict[str, Any]) -> dict[str, Any]:
    """Measure texts/s of lists, milliseconds of one text, and calls/s and the 99th percentile of 8 threads.

    No text comes twice: mpool's cache of recent results must not count.
    """
    engine = make(task, "embed")
    engine.load(task["path"], task["threads"])
    count, repeat = task["texts"], task["repeat"]
    lists: dict[str, Callable[[int], list[str]]] = {
        "mixed": lambda turn: texts.mixed(count, turn), "short": lambda turn: texts.same(count, 10, turn),
        "long": lambda turn: texts.same(count // 3, 90, turn)}
    first = engine.embed(texts.mixed(count)[:64])
    found: dict[str, Any] = {}
    rates: dict[str, list[float]] = {}
    for name, batch_of in lists.items():
        engine.embed(batch_of(repeat + 1)[:32])
        batches = [batch_of(turn + 1) for turn in range(repeat)]
        rates[f"{name} texts/s"] = [len(batch) / seconds_of(lambda: engine.embed(batch)) for batch in batches]
        found[f"{name} texts/s"] = statistics.median(rates[f"{name} texts/s"])
    for text in texts.same(20, 9):
        engine.embed([text])
    single = texts.same(240, 9, 1)
    found["one text ms"] = statistics.median(seconds_of(lambda: engine.embed([text])) for text in single) * 1e3
    found |= many_threads(engine, texts.same(task["calls"], 9, 2))
    return {"measures": found, "counts": {"one text ms": len(single), P99: task["calls"]}, "samples": rates,
            "vectors": first.tolist(), "rss MB": rss(), "compute": getattr(engine, "used", None)}


def many_threads(engine: Any, single: list[str]) -> dict[str, float]:
    """Measure calls of one text each from 8 threads."""
    times: list[float] = []

    def work(number: int) -> None:
        times.extend([seconds_of(lambda: engine.embed([text])) for text in single[number::8]])

    seconds = together(8, work)
    return {"8 threads calls/s": len(single) / seconds, P99: percentile(times, 0.99) * 1e3}


def generate(task: dict[str, Any]) -> dict[str, Any]:
    """Measure tokens/s of prefill and decode, and of several sequences at once unless ``streams`` is 0. All engines get
    the same ids. The first prompt has a rate of its own, because mpool packs experts during it; the programs of
    ik_llama.cpp too compute a prompt before each measurement.
    """
    engine = make(task, "generate")
    if hasattr(engine, "measures"):
        return engine.measures(task)
    ids, written = task["ids"], task["write"]
    engine.weights = task.get("weights", "auto")  # only mpool reads it
    engine.load(task["path"], task["threads"], max([*task["prompts"], *task["depths"]]) + written + FIRST)
    rates = {f"first pp{FIRST} tokens/s": [FIRST / seconds_of(lambda: engine.generate(ids[-FIRST:], 1))]}
    first, _ = engine.generate(ids[:32], 32)
    shift = 0

    def prompt_of(length: int) -> list[int]:
        nonlocal shift
        shift += 1  # a new prompt in every repetition: a prefix cache does not help
        if shift + length > len(ids):
            raise ValueError(f"a prompt of {length} tokens needs a longer text: it has {len(ids)}")
        return ids[shift:shift + length]

    def repeated(name: str, rate: Callable[[], float]) -> None:
        rates[f"{name} tokens/s"] = [rate() for _ in range(task["repeat"])]

    for length in task["prompts"]:
        repeated(f"pp{length}", lambda: length / seconds_of(lambda: engine.generate(prompt_of(length), 1)))
    for depth in task["depths"]:
        repeated(f"tg@{depth}", lambda: written / engine.generate(prompt_of(depth), written + 1)[1])
    streams, each = task["streams"], task["depths"][0]
    if streams:
        repeated(f"{streams} streams", lambda: streams * written / engine.together(
            [prompt_of(each) for _ in range(streams)], written + 1))
    return {"measures": {name: statistics.median(values) for name, values in rates.items()}, "samples": rates,
            "first": first, "rss MB": rss(), "compute": getattr(engine, "used", None),
            "memory": engine.memory() if hasattr(engine, "memory") else None}


def cold(task: dict[str, Any]) -> dict[str, Any]:
    """Measure the time from process start to the first vector or token. ``started`` is the clock when the process was
    started.
    """
    engine = make(task, task["kind"])
    imported = time.monotonic()
    if task["kind"] == "embed":
        engine.load(task["path"], task["threads"])
        engine.embed(["The quick brown fox jumps over the lazy dog."])
        what = "vector"
    else:
        engine.load(task["path"], task["threads"], 512)
        engine.generate(task["ids"][:8], 1)
        what = "token"
    done = time.monotonic()
    return {"measures": {f"load to first {what} s": done - imported,
                         f"start of Python to first {what} s": done - task["started"]}, "rss MB": rss()}


def imports(task: dict[str, Any]) -> dict[str, Any]:
    """Measure the import statement of the library alone."""
    return {"measures": {"import ms": seconds_of(lambda: __import__(task["module"])) * 1e3}, "rss MB": rss()}


def ids(task: dict[str, Any]) -> dict[str, Any]:
    """Return the token ids of a text, for all engines."""
    engine = make({"engine": "mpool"}, "generate")
    engine.load(task["path"], task["threads"], 0)
    found = engine.tokens(texts.prose(task["words"]))
    return {"ids": found, "sha256": hashlib.sha256(json.dumps(found).encode()).hexdigest()}


if __name__ == "__main__":
    run_task({"embed": embed, "generate": generate, "cold": cold, "import": imports, "ids": ids, "prepare": prepare},
           by="topic")
