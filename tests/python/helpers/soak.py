"""Soak of all five capabilities at once, in a process of its own: ``python soak.py FOLDER SECONDS MEMORY [CHAOS]``.

FOLDER holds the tiny models `bert`, `isolated`, `llama` and `qwen2`, the folders `adapters` (of `bert`) and
`llama-adapters` with `one` and `two`, and the models of `OUTPUTS`, named after their fixtures; the other models are the
demo models of the package. MEMORY is ``"some"`` (room for about half of the models) or ``"one"`` (room for the largest
model alone, so that nearly every request waits for an eviction and a load). CHAOS is ``PoolConfig.chaos``: requests may
then end with the errors of workers. Threads, asyncio tasks and jobs send
requests of every kind, short and long, of several tenants, each with a deadline, and cancel some of them. A thread
loads and unloads models; a thread swaps the names of `VERSIONS`. Prints one line of JSON at the end; see `main`.
"""

import asyncio
import collections
import ctypes
import faulthandler
import gc
import itertools
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
ALLOWED: tuple[type[mpool.MpoolError], ...] = (mpool.Timeout, mpool.Cancelled, mpool.Overloaded, mpool.MemoryExhausted)
CHAOS = sys.argv[4] if len(sys.argv) > 4 else None
if CHAOS:
    ALLOWED += (mpool.ModelError, mpool.InternalError, mpool.RecvError, mpool.CircuitOpen, mpool.NoWorkers)
TEXTS = ["the quick brown fox " * n + str(n) for n in range(1, 9)]
#: Rows of :data:`outputcalls.OUTPUTS` beside dense vectors.
OUTPUTS = ("sparse", "tokens", "all", "labels", "spans", "scores")
#: Arguments of :meth:`mpool.Pool.swap` for the two versions of each name that is swapped. The adapters stay.
VERSIONS: dict[str, list[dict[str, Any]]] = {
    "swapped-bert": [dict(ref="bert", pooling="cls"), dict(ref="bert", pooling="max")],
    "swapped-llama": [dict(ref="llama"), dict(ref="qwen2")]}
#: One text of 1 MB, 2,000 texts, and prompts that fill nearly the whole context of `llama` and of `qwen2`.
LONG_TEXT = "the quick brown fox " * 50_000
MANY_TEXTS = [f"the quick brown fox {number}" for number in range(2000)]
LONG_PROMPTS = {"llama": "A cat sat on the mat. " * 1350, "swapped-llama": "A cat sat on the mat. " * 80}
TENANTS = [None, None, "alice", "bob", 7]


class Kind:
    """One kind of request: its capability, model and arguments, and the result of every version of the model."""

    def __init__(self, capability: str, verb: str, model: str, subject: str, value: Any, options: dict[str, Any],
                 reduced: Callable[[Any], Any]) -> None:
        self.capability, self.verb, self.model, self.reduced = capability, verb, model, reduced
        self.arguments = {subject: value, **options}
        self.wants: list[Any] = []

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
    """All kinds of requests: several of every capability and of every output of text encoders, long ones, requests with
    adapters, models that are swapped, and one model with process isolation."""
    llama = str(folder / "llama")
    images = sorted(Path(mpool.__file__).parent.joinpath("demo_models/images").glob("*.png"))

    def vector(found: Any) -> bytes:
        return found.tobytes()

    def tokens(found: Any) -> tuple[int, ...]:
        return tuple(found.token_ids)

    def image(found: Any) -> bytes:
        return found.images[0].tobytes()

    made = [Kind("text_embedding", "embed", model, "inputs", text, {"adapter": adapter}, vector)
            for model in ("bert", "isolated", "swapped-bert")
            for text, adapter in (*itertools.product((*TEXTS, TEXTS), (None, "one", "two")),
                                  (LONG_TEXT, "one"), (MANY_TEXTS, None))]
    made += [OutputKind(output, str(folder / output.model), texts)
             for output in map(outputcalls.OUTPUTS.__getitem__, OUTPUTS) for texts in (TEXTS[:1], TEXTS[1:3], TEXTS)]
    made += [Kind("text_to_text", "generate", llama, "prompt", "A cat " * (1 + seed),
                  dict(max_tokens=3 + 4 * seed, seed=seed, temperature=1.0, ignore_eos=True), tokens)
             for seed in range(8)]
    made += [Kind("text_to_text", "generate", "swapped-llama", "prompt", prompt,
                  dict(max_tokens=8, temperature=0.0, ignore_eos=True, adapter=adapter), tokens)
             for prompt in ("A cat ", LONG_PROMPTS["swapped-llama"]) for adapter in (None, "one", "two")]
    made.append(Kind("text_to_text", "generate", llama, "prompt", LONG_PROMPTS["llama"],
                     dict(max_tokens=8, temperature=0.0, ignore_eos=True), tokens))
    made += [Kind("image_embedding", "embed_image", "digits-clip", "images", given, {}, vector)
             for given in (*images[:4], images)]
    made += [Kind("vision", "vision", "digits-llava", "images", image,
                  dict(prompt="Which digit is this?", max_tokens=6, temperature=0.0), tokens)
             for image in images[:4]]
    made += [Kind("text_to_image", "generate_image", "digits-sd3", "prompt", f"a {word}",
                  dict(seed=1, num_inference_steps=4), image)
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

    def __init__(self, pool: mpool.Pool, folder: Path, kinds: list[Kind], seconds: float) -> None:
        self.pool, self.folder, self.kinds, self.seconds = pool, folder, kinds, seconds
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
        self.swaps: collections.Counter[str] = collections.Counter()  # by the error they ended with
        self.marks: list[tuple[float, int]] = []
        self.end_at = time.monotonic() + seconds

    def choose(self, rng: random.Random) -> tuple[Kind, dict[str, Any]]:
        """A kind of request, with every model equally often, and its options."""
        kind = rng.choice(self.groups[rng.choice(sorted(self.groups))])
        options: dict[str, Any] = {"timeout": rng.choice(TIMEOUTS), "tenant": rng.choice(TENANTS)}
        if kind.in_one_step and rng.random() < 0.2:
            options["timeout"] = None
        if rng.random() < 0.5:
            options["priority"] = rng.choice(["critical", "high", "normal", "low", "batch"])
        with self.lock:
            self.started[kind.capability] += 1
        return kind, options

    def over(self, kind: Kind, way: str, limit_at: float, found: Any = None, error: BaseException | None = None,
             version: int | None = None) -> None:
        """Record the one outcome of a request. `limit_at` is when it must have ended; `version` is the version of its
        model that must have computed it, None: any."""
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
            wants = kind.wants if version is None else kind.wants[version:version + 1]
            if error is None and kind.reduced(found) not in wants and len(self.wrong) < 5:
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

    def load(self) -> None:
        """Load and unload models that are in use."""
        rng = random.Random(7)
        models = sorted({kind.model for kind in self.kinds})
        while time.monotonic() < self.end_at:
            time.sleep(rng.uniform(0.1, 0.6))
            try:
                if rng.random() < 0.5:
                    self.pool.load(rng.choice(models), timeout=5)
                else:
                    self.pool.unload(rng.choice(models), timeout=5)
            except ALLOWED:
                pass

    def swap(self) -> None:
        """Swap names that are in use. A request that begins after a swap is computed by the new version."""
        rng = random.Random(8)
        now = dict.fromkeys(VERSIONS, 0)
        while time.monotonic() < self.end_at:
            time.sleep(rng.uniform(0.1, 0.6))
            name = rng.choice(sorted(VERSIONS))
            how = "completed"
            try:
                swap(self.pool, self.folder, name, 1 - now[name], timeout=5)
                now[name] = 1 - now[name]
            except BaseException as caught:
                how = type(caught).__name__
                if not isinstance(caught, ALLOWED):
                    self.wrong.append(f"swap of {name}: {caught!r}")
            self.swaps[how] += 1
            kind = rng.choice([kind for kind in self.kinds if kind.model == name])
            found, error = None, None
            with self.lock:
                self.started[kind.capability] += 1
            limit_at = limit_of({"timeout": None})
            try:
                found = kind.call(self.pool, timeout=2 * PATIENCE)
            except BaseException as caught:
                error = caught
            self.over(kind, "swapped", limit_at, found, error, now[name])

    def watch(self) -> None:
        """Record the memory that the process holds. The C library keeps freed memory for the threads that freed it: its
        free blocks are returned to the system before."""
        begun = time.monotonic()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda size: None)
        while time.monotonic() < self.end_at:
            time.sleep(min(1.0, self.seconds / 400))
            trim(0)
            self.marks.append(((time.monotonic() - begun) / self.seconds, resident()))

    def run(self) -> int:
        """Run everything. Returns the number of threads that hang."""
        bodies = [*(lambda n=n: self.thread(n) for n in range(THREADS)),
                  *(lambda n=n: self.jobs(n) for n in range(JOBS)), self.loop, self.load, self.swap,
                  self.watch]
        threads = [threading.Thread(target=body, daemon=True) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self.seconds + 60)
        return sum(thread.is_alive() for thread in threads)


def opened(folder: Path, **options: Any) -> mpool.Pool:
    """A pool in which `bert`, `isolated` and the names of `VERSIONS` have adapters, and `isolated` runs in processes of
    its own."""
    pool = mpool.Pool(mpool.PoolConfig(**options))
    adapters = {name: folder / "adapters" / name for name in ("one", "two")}
    for name in ("bert", "isolated"):
        pool.register(name, folder / name, isolation="process" if name == "isolated" else "thread", adapters=adapters)
    for name, place in (("bert", "adapters"), ("llama", "llama-adapters")):
        first = dict(VERSIONS["swapped-" + name][0])
        pool.register("swapped-" + name, folder / first.pop("ref"), **first,
                      adapters={adapter: folder / place / adapter for adapter in ("one", "two")})
    return pool


def swap(pool: mpool.Pool, folder: Path, name: str, version: int, **options: Any) -> None:
    """Replace the model of a name of `VERSIONS`."""
    settings = dict(VERSIONS[name][version])
    pool.swap(name, folder / settings.pop("ref"), **settings, **options)


def alone(folder: Path, kinds: list[Kind]) -> dict[str, int]:
    """Run every kind of request alone: sets `wants`. Returns the bytes that each loaded model needs."""
    needs: dict[str, int] = {}
    with opened(folder, threads=1) as pool:
        for kind in kinds:
            kind.wants.append(kind.reduced(kind.call(pool)))
        for name in VERSIONS:
            swap(pool, folder, name, 1)
        for kind in kinds:
            if kind.model in VERSIONS:
                kind.wants.append(kind.reduced(kind.call(pool)))
                assert kind.wants[0] != kind.wants[1], "the versions must differ"
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
    faults: dict[str, Any] = {"chaos": CHAOS, "stall_timeout": 1.0, "breaker_rest": 0.2} if CHAOS else {}
    pool = opened(folder, memory_bytes=limit, maintenance_interval=0.05, keep_alive=0.5, request_timeout=PATIENCE,
                  **faults)
    meter = subprocess.Popen([sys.executable, "-c", LATENESS], stdout=subprocess.PIPE, text=True)
    soak = Soak(pool, folder, kinds, seconds)
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
        # Medians of the quarters of the run: peaks depend on which models happen to be loaded together.
        "resident": [int(statistics.median([size for at, size in soak.marks if part <= 4 * at < part + 1] or [0]))
                     for part in range(4)],
        # Bytes of the core after the pool has closed.
        "left": sum(after["bytes_by_tag"].values()), "swaps": soak.swaps,
        "total": stats["total_requests"], "sum": sum(sums), "illegal": stats["illegal_transitions"],
        "dead": stats["workers_dead"], "chaos": stats["chaos_faults"], "loads": stats["loads"],
        "evictions": stats["evictions"],
        "threads": after["threads_created"] - after["threads_joined"]}))


if __name__ == "__main__":
    main()
