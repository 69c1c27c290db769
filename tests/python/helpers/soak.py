"""Soak of all five capabilities at once, in a process of its own: ``python soak.py FOLDER SECONDS MEMORY``.

FOLDER holds the tiny models `bert`, `isolated` and `llama`, the folder `adapters` with `one` and `two`, and the models
of `OUTPUTS`, named after their fixtures; the other models are the demo models of the package. MEMORY
is ``"some"`` (room for about half of the models) or ``"one"`` (room for the largest model alone, so that nearly every
request waits for an eviction and a load). Threads, asyncio tasks and jobs send requests of every kind, each with a
deadline, and cancel some of them; a thread unloads models. Prints one line of JSON at the end; see `main`.
"""

from __future__ import annotations

import asyncio
import collections
import faulthandler
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpool

import outputcalls
from processes import LATENESS

THREADS, TASKS, JOBS = 10, 40, 4
TIMEOUTS = [0.02, 0.1, 0.4, 1.0, 3.0]
#: Limit of a request without a timeout. Loading its model counts as progress once, so it ends within twice this time.
PATIENCE = 4.0
#: Errors that a request under pressure may end with. Anything else is a fault.
ALLOWED = (mpool.Timeout, mpool.Cancelled, mpool.Overloaded, mpool.MemoryExhausted)
TEXTS = ["the quick brown fox " * n + str(n) for n in range(1, 9)]
#: Rows of :data:`outputcalls.OUTPUTS` beside dense vectors.
OUTPUTS = ("sparse", "tokens", "all", "labels", "spans", "scores")


class Kind:
    """One kind of request: its capability, model and arguments, and the result that it must have."""

    def __init__(self, capability: str, verb: str, model: str, subject: str, value: Any, options: dict[str, Any],
                 reduced: Callable[[Any], Any]) -> None:
        self.capability, self.verb, self.model, self.reduced = capability, verb, model, reduced
        self.arguments = {subject: value, **options}
        self.want: Any = None

    @property
    def in_one_step(self) -> bool:
        """The request makes no progress before its result."""
        return self.capability in ("text_embedding", "image_embedding")

    def call(self, pool: mpool.Pool, **options: Any) -> Any:
        return getattr(pool, self.verb)(**self.arguments, model=self.model, **options)

    def acall(self, pool: mpool.Pool, **options: Any) -> Any:
        return getattr(mpool.aio, self.verb)(**self.arguments, model=self.model, pool=pool, **options)

    def submit(self, pool: mpool.Pool, **options: Any) -> Any:
        return pool.submit(self.capability, **self.arguments, model=self.model, **options)


class OutputKind(Kind):
    """A request for an output of a text encoder."""

    def __init__(self, output: outputcalls.Output, model: str, texts: list[str]) -> None:
        super().__init__("text_embedding", output.function, model, output.parameter, texts, output.options,
                         outputcalls.bytes_of)
        self.output, self.texts = output, texts

    def call(self, pool: mpool.Pool, **options: Any) -> Any:
        return self.output.call(pool, self.texts, self.model, **options)

    def acall(self, pool: mpool.Pool, **options: Any) -> Any:
        return self.output.acall(pool, self.texts, self.model, **options)

    def submit(self, pool: mpool.Pool, **options: Any) -> Any:
        return self.output.job(pool, self.texts, self.model, **options)


def kinds_of(folder: Path) -> list[Kind]:
    """All kinds of requests: several of every capability and of every output of text encoders, requests with adapters,
    and one model with process isolation."""
    llama = str(folder / "llama")
    images = sorted(Path(mpool.__file__).parent.joinpath("demo_models/images").glob("*.png"))

    def vector(found: Any) -> bytes:
        return found.tobytes()

    def tokens(found: Any) -> tuple[int, ...]:
        return tuple(found.token_ids)

    def image(found: Any) -> bytes:
        return found.images[0].tobytes()

    made = [Kind("text_embedding", "embed", model, "inputs", text, {"adapter": adapter}, vector)
            for model in ("bert", "isolated") for text in (*TEXTS, TEXTS) for adapter in (None, "one", "two")]
    made += [OutputKind(output, str(folder / output.model), texts)
             for output in map(outputcalls.OUTPUTS.__getitem__, OUTPUTS) for texts in (TEXTS[:1], TEXTS[1:3], TEXTS)]
    made += [Kind("text_to_text", "generate", llama, "prompt", "A cat " * (1 + seed),
                  dict(max_tokens=3 + 4 * seed, seed=seed, temperature=1.0, ignore_eos=True), tokens)
             for seed in range(8)]
    made += [Kind("image_embedding", "embed_image", "digits-clip", "images", given, {}, vector)
             for given in (*images[:4], images)]
    made += [Kind("vision", "vision", "digits-llava", "images", image,
                  dict(prompt="Which digit is this?", max_tokens=6, temperature=0.0), tokens)
             for image in images[:4]]
    made += [Kind("text_to_image", "generate_image", "digits-sd3", "prompt", f"a {word}", dict(seed=1, steps=4), image)
             for word in ("three", "seven")]
    return made


def limit_of(options: dict[str, Any]) -> float:
    """When a request that starts now must have ended."""
    return time.monotonic() + (2 * PATIENCE if options["timeout"] is None else options["timeout"])


def resident() -> int:
    """Bytes of memory that this process uses."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Soak:
    """The requests of one run and what they found."""

    def __init__(self, pool: mpool.Pool, kinds: list[Kind], seconds: float) -> None:
        self.pool, self.kinds, self.seconds = pool, kinds, seconds
        self.groups: dict[tuple[str, str], list[Kind]] = {}
        for kind in kinds:
            self.groups.setdefault((kind.capability, kind.model), []).append(kind)
        self.lock = threading.Lock()
        self.started: collections.Counter[str] = collections.Counter()
        self.ended: collections.Counter[str] = collections.Counter()
        self.how: collections.Counter[str] = collections.Counter()
        self.answered: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
        self.late: list[tuple[float, str]] = []  # seconds behind the deadline or the cancellation, what
        self.marks: list[tuple[float, int]] = []
        self.end_at = time.monotonic() + seconds

    def choose(self, rng: random.Random) -> tuple[Kind, dict[str, Any]]:
        """A kind of request, with every model equally often, and its options."""
        kind = rng.choice(self.groups[rng.choice(sorted(self.groups))])
        options: dict[str, Any] = {"timeout": rng.choice(TIMEOUTS)}
        if kind.in_one_step and rng.random() < 0.2:
            options["timeout"] = None
        if rng.random() < 0.5:
            options["priority"] = rng.choice(["critical", "high", "normal", "low", "batch"])
        with self.lock:
            self.started[kind.capability] += 1
        return kind, options

    def over(self, kind: Kind, way: str, limit_at: float, found: Any = None,
             error: BaseException | None = None) -> None:
        """Record the one outcome of a request. `limit_at` is when it must have ended."""
        late = time.monotonic() - limit_at
        what = f"{way} {kind.verb} of {Path(kind.model).name}"
        how = "completed" if error is None else type(error).__name__
        with self.lock:
            self.ended[kind.capability] += 1
            self.how[how] += 1
            self.answered[kind.capability] += error is None
            self.late = sorted([*self.late, (late, f"{what}: {how}: {error}")], reverse=True)[:5]
            if error is not None and not isinstance(error, ALLOWED) and len(self.wrong) < 5:
                self.wrong.append(f"{what}: {error!r}")
            if error is None and kind.reduced(found) != kind.want and len(self.wrong) < 5:
                self.wrong.append(f"{what}: another result than alone")
            if error is None and way == "cancelled" and len(self.wrong) < 5:
                self.wrong.append(f"{what}: a result after a cancellation")

    def thread(self, number: int) -> None:
        """Blocking requests."""
        rng = random.Random(number)
        while time.monotonic() < self.end_at:
            kind, options = self.choose(rng)
            limit_at, found, error = limit_of(options), None, None
            try:
                found = kind.call(self.pool, **options)
            except BaseException as caught:
                error = caught
            self.over(kind, "blocking", limit_at, found, error)

    def jobs(self, number: int) -> None:
        """Several jobs at once, some of them cancelled."""
        rng = random.Random(1000 + number)
        while time.monotonic() < self.end_at:
            open_jobs: list[tuple[Kind, float, Any]] = []
            for _ in range(rng.randint(1, 6)):
                kind, options = self.choose(rng)
                limit_at = limit_of(options)
                try:
                    open_jobs.append((kind, limit_at, kind.submit(self.pool, **options)))
                except BaseException as caught:
                    self.over(kind, "refused", limit_at, error=caught)
            rng.shuffle(open_jobs)
            for kind, limit_at, job in open_jobs:
                way, found, error = "submitted", None, None
                if rng.random() < 0.4:
                    time.sleep(rng.uniform(0, 0.02))
                    way = "cancelled" if job.cancel() else "submitted"
                    limit_at = time.monotonic() if way == "cancelled" else max(limit_at, time.monotonic())
                else:  # results of earlier jobs may have taken until now
                    limit_at = max(limit_at, time.monotonic())
                try:
                    found = job.result(60)
                except BaseException as caught:
                    error = caught
                self.over(kind, way, limit_at, found, error)

    def loop(self) -> None:
        """Tasks of an event loop, some of them cancelled."""
        async def one(rng: random.Random) -> None:
            kind, options = self.choose(rng)
            limit_at, way, found, error = limit_of(options), "awaited", None, None
            task = asyncio.ensure_future(kind.acall(self.pool, **options))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.uniform(0, 0.02))
                if task.cancel():
                    way, limit_at = "dropped", time.monotonic()
            try:
                found = await task
            except asyncio.CancelledError:
                error = mpool.Cancelled("the task")
            except BaseException as caught:
                error = caught
            self.over(kind, way, limit_at, found, error)

        async def task(number: int) -> None:
            rng = random.Random(2000 + number)
            while time.monotonic() < self.end_at:
                await one(rng)
                await asyncio.sleep(rng.uniform(0, 0.2))

        async def main() -> None:
            await asyncio.gather(*(task(number) for number in range(TASKS)))

        asyncio.run(main())

    def unload(self) -> None:
        """Unload models that are in use."""
        rng = random.Random(7)
        models = sorted({kind.model for kind in self.kinds})
        while time.monotonic() < self.end_at:
            time.sleep(rng.uniform(0.1, 0.6))
            try:
                self.pool.unload(rng.choice(models), timeout=5)
            except mpool.Timeout:
                pass

    def watch(self) -> None:
        """Record the memory of the process."""
        begun = time.monotonic()
        while time.monotonic() < self.end_at:
            time.sleep(min(1.0, self.seconds / 400))
            self.marks.append(((time.monotonic() - begun) / self.seconds, resident()))

    def run(self) -> int:
        """Run everything. Returns the number of threads that hang."""
        bodies = [*(lambda n=n: self.thread(n) for n in range(THREADS)),
                  *(lambda n=n: self.jobs(n) for n in range(JOBS)), self.loop, self.unload, self.watch]
        threads = [threading.Thread(target=body, daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.seconds + 60)
        return sum(thread.is_alive() for thread in threads)


def opened(folder: Path, **options: Any) -> mpool.Pool:
    """A pool in which `bert` and `isolated` have adapters, and `isolated` runs in processes of its own."""
    pool = mpool.Pool(mpool.PoolConfig(**options))
    adapters = {name: folder / "adapters" / name for name in ("one", "two")}
    for name in ("bert", "isolated"):
        pool.register(name, folder / name, isolation="process" if name == "isolated" else "thread", adapters=adapters)
    return pool


def alone(folder: Path, kinds: list[Kind]) -> dict[str, int]:
    """Run every kind of request alone: sets `want`. Returns the bytes that each loaded model needs."""
    needs: dict[str, int] = {}
    with opened(folder, threads=1) as pool:
        for kind in kinds:
            kind.want = kind.reduced(kind.call(pool))
        for row in pool.registry.entries():
            needs[row["key"]] = row["model_bytes"] + sum(worker["predicted_bytes"] for worker in row["worker"])
    return needs


def main() -> None:
    """Print one JSON object: counts of requests by capability and by ending, results that were wrong, the requests that
    ended last behind their deadline (`late`) beside the delay of an idle process (`machine`), and memory."""
    folder, seconds, memory = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    faulthandler.dump_traceback_later(seconds + 240, exit=True)
    kinds = kinds_of(folder)
    needs = alone(folder, kinds)
    limit = max(needs.values()) + (8 << 20) if memory == "one" else sum(needs.values()) // 2 + (8 << 20)
    pool = opened(folder, memory_bytes=limit, maintenance_interval=0.05, keep_alive=0.5, request_timeout=PATIENCE)
    meter = subprocess.Popen([sys.executable, "-c", LATENESS], stdout=subprocess.PIPE, text=True)
    soak = Soak(pool, kinds, seconds)
    hung = soak.run()
    meter.terminate()
    machine = [float(line) for line in meter.communicate()[0].splitlines()[1:]]
    still = 0
    for _ in range(1000):
        still = sum(row["running"] + row["queued"] for row in pool.registry.entries())
        if not still:
            break
        time.sleep(0.01)
    gc.collect()
    stats = pool.registry.stats()
    sums = [stats[name] for name in ("completed", "errors", "timeouts", "cancelled", "queue_full_rejections")]
    pool.close()
    after = pool.registry.stats()
    print(json.dumps({
        "started": soak.started, "ended": soak.ended, "answered": soak.answered, "how": soak.how, "wrong": soak.wrong,
        "late": soak.late, "machine": max(machine, default=0.0), "hung": hung, "still": still,
        "needs": needs, "limit": limit,
        # Medians: peaks depend on which models happen to be loaded together.
        "middle": statistics.median([size for at, size in soak.marks if 0.4 <= at < 0.6] or [0]),
        "last": statistics.median([size for at, size in soak.marks if at >= 0.8] or [0]),
        "total": stats["total_requests"], "sum": sum(sums), "illegal": stats["illegal_transitions"],
        "dead": stats["workers_dead"], "loads": stats["loads"], "evictions": stats["evictions"],
        "threads": after["threads_created"] - after["threads_joined"]}))


if __name__ == "__main__":
    main()
