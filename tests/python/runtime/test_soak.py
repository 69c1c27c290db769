"""Soak test: 16 threads and 200 tasks with all kinds of requests, cancellations, deadlines and evictions.

Runs once without faults, and once with chaos (``PoolConfig.chaos``), where requests may raise the errors of workers. It
takes ten seconds by default, a minute with ``--slow``, or any time: ``MPOOL_SOAK=3600 pytest test_soak.py``. No request
may be lost, completed twice or hang; every result equals that of the request run alone; memory use stays constant.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tinymodels
from processes import HEAD

SCRIPT = r"""
import asyncio, collections, gc, inspect, random, statistics
faulthandler.cancel_dump_traceback_later()
seconds = float(sys.argv[3])
faulthandler.dump_traceback_later(seconds + 90, exit=True)
other, chaos = sys.argv[4], sys.argv[5] or None

THREADS, TASKS = 16, 200
HAS_PRIORITY = "priority" in inspect.signature(mpool.Pool.embed).parameters or "options" in inspect.signature(
    mpool.Pool.embed).parameters
PRIORITIES = ["critical", "high", "normal", "low", "batch"]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

# the memory limit has room for any two of the three models, and for some requests
probe = mpool.Pool(mpool.PoolConfig(threads=1))
needs = []
for model in (bert, other):
    probe.embed("x", model)
probe.generate("x", llama, max_tokens=1)
for row in probe.registry.entries():
    needs.append(row["model_bytes"] + sum(worker["predicted_bytes"] for worker in row["worker"]))
TEXTS = ["the quick brown fox " * n + str(n) for n in range(1, 13)]
alone_bert = {text: probe.embed(text, bert).tobytes() for text in TEXTS}
alone_other = {text: probe.embed(text, other).tobytes() for text in TEXTS}
SEEDS = range(12)
def sampled(seed):
    return dict(max_tokens=3 + seed, seed=seed, temperature=1.0 if seed % 2 else 0.0, ignore_eos=True)
alone_llama = {seed: tuple(probe.generate("A cat " * (1 + seed), llama, **sampled(seed)).token_ids) for seed in SEEDS}
lone_text = {seed: probe.generate("A cat " * (1 + seed), llama, **sampled(seed)).text for seed in SEEDS}
probe.close()
pool = mpool.Pool(mpool.PoolConfig(memory_bytes=sum(needs) - min(needs) // 2 + (8 << 20), maintenance_interval=0.05,
                                   keep_alive=0.2, request_timeout=30.0, embed_queue_capacity=50,
                                   batch_queue_capacity=50, prompt_queue_capacity=50, chaos=chaos,
                                   **(dict(stall_timeout=1.0, breaker_rest=0.2) if chaos else {})))

ALLOWED = (mpool.Timeout, mpool.Cancelled, mpool.Overloaded, mpool.MemoryExhausted)
if chaos:  # errors that worker faults cause
    ALLOWED += (mpool.ModelError, mpool.InternalError, mpool.RecvError, mpool.CircuitOpen, mpool.NoWorkers)
lock = threading.Lock()
started, ended, wrong = collections.Counter(), collections.Counter(), []
end_at = time.monotonic() + seconds
marks = []

def begin(kind):
    with lock:
        started[kind] += 1

def over(kind, how):
    with lock:
        ended[kind] += 1
        ended["= " + how] += 1

def expect(kind, good, what):
    if not good and len(wrong) < 5:
        wrong.append(f"{kind}: {what}")

def extras(rng):
    given = {}
    if rng.random() < 0.3:
        given["timeout"] = rng.choice([0.002, 0.02, 0.2, 5.0])
    if HAS_PRIORITY and rng.random() < 0.5:
        given["priority"] = rng.choice(PRIORITIES)
    return given

KINDS = ["embed", "embed", "batch", "other", "generate", "stream", "job", "cancelled", "abandoned"]

def call(rng):
    kind = rng.choice(KINDS)
    text, seed, given = rng.choice(TEXTS), rng.choice(SEEDS), extras(rng)
    begin(kind)
    try:
        if kind == "embed":
            expect(kind, pool.embed(text, bert, **given).tobytes() == alone_bert[text], "another vector")
        elif kind == "other":
            expect(kind, pool.embed(text, other, **given).tobytes() == alone_other[text], "another vector")
        elif kind == "batch":
            chosen = rng.sample(TEXTS, rng.randint(2, len(TEXTS)))
            rows = pool.embed(chosen, bert, **given)
            expect(kind, [row.tobytes() for row in rows] == [alone_bert[text] for text in chosen], "other vectors")
        elif kind == "generate":
            got = pool.generate("A cat " * (1 + seed), llama, **sampled(seed), **given)
            expect(kind, tuple(got.token_ids) == alone_llama[seed], "another text")
        elif kind == "stream":
            got = "".join(str(c) for c in pool.generate("A cat " * (1 + seed), llama, stream=True, **sampled(seed),
                                                        **given))
            expect(kind, got == lone_text[seed], f"the chunks {got!r} are not {lone_text[seed]!r}")
        elif kind == "job":
            job = pool.submit("text_to_text", prompt="A cat " * (1 + seed), model=llama, **sampled(seed), **given)
            expect(kind, tuple(job.result(60).token_ids) == alone_llama[seed], "another text")
            expect(kind, job.result(0) is not None and job.done(), "not done after its result")
        elif kind == "cancelled":
            job = pool.submit("text_to_text", prompt="The", model=llama, max_tokens=16000, ignore_eos=True, **given)
            if rng.random() < 0.5:
                time.sleep(rng.uniform(0, 0.01))
            in_time = job.cancel()  # False if the job is already done, on a slow machine
            try:
                job.result(60)
                expect(kind, not in_time, "a cancelled job has a result")
            except mpool.Cancelled:
                pass
        else:
            stream = pool.generate("The", llama, max_tokens=16000, ignore_eos=True, stream=True, **given)
            if rng.random() < 0.5:
                next(iter(stream))
            del stream
        over(kind, "completed")
    except ALLOWED as error:
        if isinstance(error, mpool.Timeout) and "no progress for 30" in str(error):
            expect(kind, False, f"hung: {error}")
        over(kind, type(error).__name__)
    except BaseException as error:
        expect(kind, False, repr(error))
        over(kind, "wrong")

async def acall(rng):
    kind = rng.choice(["embed", "batch", "other", "generate", "stream", "cancelled"])
    text, seed, given = rng.choice(TEXTS), rng.choice(SEEDS), extras(rng)
    begin("async " + kind)
    try:
        if kind in ("embed", "other"):
            model, want = (bert, alone_bert) if kind == "embed" else (other, alone_other)
            got = await mpool.aio.embed(text, model, pool=pool, **given)
            expect(kind, got.tobytes() == want[text], "another vector")
        elif kind == "batch":
            chosen = rng.sample(TEXTS, rng.randint(2, len(TEXTS)))
            rows = await mpool.aio.embed(chosen, bert, pool=pool, **given)
            expect(kind, [row.tobytes() for row in rows] == [alone_bert[text] for text in chosen], "other vectors")
        elif kind == "generate":
            got = await mpool.aio.generate("A cat " * (1 + seed), llama, pool=pool, **sampled(seed), **given)
            expect(kind, tuple(got.token_ids) == alone_llama[seed], "another text")
        elif kind == "stream":
            got = ""
            async for chunk in mpool.aio.generate("A cat " * (1 + seed), llama, pool=pool, stream=True,
                                                  **sampled(seed), **given):
                got += str(chunk)
            expect(kind, got == lone_text[seed], "other chunks")
        else:
            task = asyncio.ensure_future(mpool.aio.generate("The", llama, pool=pool, max_tokens=16000,
                                                            ignore_eos=True, **given))
            await asyncio.sleep(rng.uniform(0, 0.02))
            in_time = task.cancel()
            try:
                await task
                expect(kind, not in_time, "a cancelled task has a result")
            except asyncio.CancelledError:
                pass
        over("async " + kind, "completed")
    except ALLOWED as error:
        if isinstance(error, mpool.Timeout) and "no progress for 30" in str(error):
            expect(kind, False, f"hung: {error}")
        over("async " + kind, type(error).__name__)
    except BaseException as error:
        expect(kind, False, repr(error))
        over("async " + kind, "wrong")

def thread(number):
    rng = random.Random(number)
    while time.monotonic() < end_at:
        call(rng)

def loop():
    async def task(number):
        rng = random.Random(1000 + number)
        while time.monotonic() < end_at:
            await acall(rng)
            await asyncio.sleep(rng.uniform(0, 0.2))
    async def main():
        await asyncio.gather(*(task(number) for number in range(TASKS)))
    asyncio.run(main())

def evict():
    rng = random.Random(7)
    while time.monotonic() < end_at:
        time.sleep(rng.uniform(0.05, 0.3))
        try:
            pool.unload(rng.choice([bert, llama, other]), timeout=5)
        except mpool.Timeout:
            pass
        for model in (bert, llama, other) if chaos else ():
            try:
                pool.load(model, timeout=5)  # makes a model available again after many worker deaths
            except (mpool.Timeout, mpool.MemoryExhausted):
                pass

def watch():
    begun = time.monotonic()
    while time.monotonic() < end_at:
        time.sleep(min(0.1, seconds / 1000))  # often: memory depends on which models are loaded together
        marks.append(((time.monotonic() - begun) / seconds, resident()))

bodies = [*((lambda n=n: thread(n)) for n in range(THREADS)), loop, evict, watch]
threads = [threading.Thread(target=body, daemon=True) for body in bodies]
for t in threads:
    t.start()
for t in threads:
    t.join(seconds + 60)
hung = sum(t.is_alive() for t in threads)
still = 0
for _ in range(1000):
    rows = pool.registry.entries()
    still = sum(row["running"] + row["queued"] for row in rows)
    if not still:
        break
    time.sleep(0.01)
gc.collect()
stats = pool.registry.stats()
middle = [bytes for at, bytes in marks if 0.2 <= at < 0.6]
last = [bytes for at, bytes in marks if at >= 0.8]
sums = [stats[name] for name in ("completed", "errors", "timeouts", "cancelled", "queue_full_rejections")]
pool.close()
after = pool.registry.stats()
print(json.dumps({
    "started": sum(started.values()), "ended": sum(n for kind, n in ended.items() if kind[0] != "="),
    "how": {kind[2:]: n for kind, n in ended.items() if kind[0] == "="}, "wrong": wrong, "hung": hung, "still": still,
    "middle": statistics.median(middle or [0]), "last": statistics.median(last or [0]),
    "total": stats["total_requests"], "sum": sum(sums),
    "rejected": stats["circuit_rejections"], "illegal": stats["illegal_transitions"], "dead": stats["workers_dead"],
    "chaos": stats["chaos_faults"],
    "loads": stats["loads"], "evictions": stats["evictions"], "priority": HAS_PRIORITY,
    "threads": after["threads_created"] - after["threads_joined"]}))
"""


def lengths() -> list[object]:
    """Return the durations of the test in seconds."""
    asked = os.environ.get("MPOOL_SOAK")
    if asked:
        return [float(asked)]
    return [10.0, pytest.param(60.0, marks=pytest.mark.slow)]


@pytest.mark.sample(4)
@pytest.mark.builds
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("chaos", ["", "seed=7,fail=0.005,stall=0.0003,die=0.0003,slow=0.01,memory=0.005"],
                         ids=["calm", "chaos"])
@pytest.mark.parametrize("seconds", lengths())
def test_soak(bert: Path, llama: Path, tmp_path: Path, seconds: float, chaos: str) -> None:
    other = tinymodels.bert(tmp_path / "other", normalize=False)
    script = tmp_path / "soak.py"
    script.write_text(HEAD + SCRIPT, encoding="utf-8")
    run = subprocess.run([sys.executable, str(script), str(bert), str(llama), str(seconds), str(other), chaos],
                         capture_output=True, text=True, timeout=seconds + 150, cwd=tmp_path)
    assert run.returncode == 0, f"{run.stdout[-2000:]}\n{run.stderr[-6000:]}"
    found = json.loads(run.stdout.splitlines()[-1])
    print(found)
    assert found["wrong"] == [] and found["hung"] == 0 and found["still"] == 0, found
    assert found["started"] == found["ended"] > 100, found  # no request was lost or completed twice
    assert found["total"] == found["sum"], found
    assert found["illegal"] == 0 and found["threads"] == 0, found
    assert found["evictions"] > 2, found
    if chaos:
        assert found["chaos"] > 20 and found["how"]["completed"] > found["started"] / 10, found
    else:
        assert found["chaos"] == 0 and found["dead"] == 0 and found["how"]["completed"] > found["started"] / 4, found
    assert found["last"] <= found["middle"] * 1.05 + (8 << 20), found
