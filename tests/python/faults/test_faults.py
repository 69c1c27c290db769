"""Faults of files, memory, clocks, callers and callbacks, with tiny models. tests/FAULTS.md has the table of faults
whose rows are named here."""

import asyncio
import gc
import json
import logging
import os
import random
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from processes import script_result
from waiting import idle, together, until

ROOT = Path(__file__).resolve().parents[3]
LONG: dict[str, Any] = dict(max_tokens=16000, ignore_eos=True, temperature=0)


@pytest.fixture
def own_bert(bert: Path, tmp_path: Path) -> Path:
    """A copy of the small BERT that a test may corrupt."""
    return Path(shutil.copytree(bert, tmp_path / "own"))


# ---- memory ----------------------------------------------------------------------------------------------------------

def test_python_allocations_that_fail(bert: Path) -> None:
    """Row 2: each Python allocation inside a call of the extension fails in turn."""
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi, whose set_nomemory makes allocations fail")
    script = """
import gc, _testcapi
from mpool.runtime import logs as _logging
pool = mpool.Pool(mpool.PoolConfig(threads=1))
_logging.stop()  # allocations fail in every thread; another test covers the log thread
key = pool.get(bert)._entry.core_key("auto")
registry = pool.registry
registry.load(key)
ids, offsets = np.array([2, 9, 10, 11, 3], np.int32), np.array([0, 5], np.int64)
want = registry.embed(key, ids, offsets).tobytes()
def whole():
    ticket = registry.submit_embed(key, ids, offsets)
    ticket.wait(30.0)
    return ticket.vectors()
calls = {
    "embed": lambda: registry.embed(key, ids, offsets),
    "ticket": whole,
    "entries": lambda: registry.entries() and None,
    "stats": lambda: registry.stats() and None,
}
counts = {}
def sweep():
    for name, call in calls.items():
        failed = 0
        for n in range(400):
            result = None
            _testcapi.set_nomemory(n, n + 1)
            try:
                result = call()
                good = True
            except MemoryError:
                good = False
            finally:
                _testcapi.remove_mem_hooks()
            failed += not good
            if result is not None and result.tobytes() != want:
                raise SystemExit(f"{name}: the result differs when allocation {n} fails")
        counts[name] = failed
def request_bytes():
    return registry.stats()["bytes_by_tag"]["request"]
def measure():
    sweep()
    registry.embed(key, ids, offsets)
    # The worker drops its share of a request a moment after the caller has the result.
    end = time.monotonic() + 5
    while time.monotonic() < end and request_bytes():
        time.sleep(0.01)
    gc.collect()
    return sys.getallocatedblocks(), request_bytes()
seen = [measure() for _ in range(5)][1:]
good = registry.embed(key, ids, offsets).tobytes() == want
print(json.dumps([counts, [row[0] for row in seen], [row[1] for row in seen], good, idle()]))
"""
    counts, blocks, requests, good, idle = script_result(script, bert, bert)
    assert all(count > 0 for count in counts.values()), f"no allocation failed: {counts}"
    assert requests == [0, 0, 0, 0]
    assert min(blocks[2:]) - min(blocks[:2]) < 60, f"each sweep leaks: {blocks}"
    assert good and idle


def test_the_log_thread_survives_a_failed_allocation(bert: Path) -> None:
    """Row 2: the thread that drains the log and runs callbacks continues after one of its own allocations fails."""
    script = """
from mpool.runtime import logs as _logging
threading.excepthook = lambda *_: None
mpool.embed("x", bert)
from mpool import _core
real, calls = _core.drain_log, [0]
def failing():
    calls[0] += 1
    if calls[0] == 1:
        raise MemoryError
    return real()
_core.drain_log = failing
for _ in range(3000):
    if calls[0] > 1:
        break
    time.sleep(0.01)
print(json.dumps([calls[0], _logging._drain.thread.is_alive()]))
"""
    calls, alive = script_result(script, bert, bert)
    assert calls > 1 and alive


# ---- files -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("left", [0, 0.5])
def test_a_file_that_shrinks_under_load(own_bert: Path, llama: Path, left: float) -> None:
    """Row 5: requests fail with a typed error, the process survives, the model is not used again, others serve."""
    file = own_bert / "model.safetensors"
    whole = file.read_bytes()
    with mpool.Pool(mpool.PoolConfig(breaker_threshold=0)) as pool:
        texts = [f"{word} {number}" for number in range(20) for word in ("A cat", "the dog", "über", "fox")]
        model = pool.load(own_bert)  # a handle looks no name up: its requests meet the model that is loaded
        want = model.embed(texts)
        text = pool.generate("A cat", llama, max_tokens=8, temperature=0).token_ids
        wrong: list[str] = []
        failed, shrunk, over = threading.Event(), threading.Event(), threading.Event()

        def caller() -> None:
            while not over.is_set():
                before = not shrunk.is_set()
                try:
                    got = model.embed(texts)
                except (mpool.errors.IntegrityError, mpool.errors.FileError, mpool.errors.FormatError) as error:
                    if before and not shrunk.is_set():
                        wrong.append(f"failed before the file shrank: {error}")
                    failed.set()
                    time.sleep(0.01)
                except mpool.MpoolError as error:
                    wrong.append(repr(error))
                else:
                    if before and not shrunk.is_set() and got.tobytes() != want.tobytes():
                        wrong.append("the result of the intact file differs")

        def shrinker() -> None:
            time.sleep(0.1)
            shrunk.set()
            os.truncate(file, int(len(whole) * left))
            failed.wait(20)
            time.sleep(0.2)
            over.set()

        def other() -> None:
            while not over.is_set():
                if pool.generate("A cat", llama, max_tokens=8, temperature=0).token_ids != text:
                    wrong.append("the completion of the other model changed")

        together([caller, caller, shrinker, other])
        assert failed.is_set() and wrong == []

        def state() -> str:
            return next(row["state"] for row in pool.registry.entries() if row["capability"] == "text_embedding")

        until(lambda: state() in ("failed", "cold"), 10, state)  # every worker ends, busy or idle
        for call in (model.embed, lambda texts: pool.embed(texts, own_bert)):
            with pytest.raises(mpool.errors.FormatError, match="model.safetensors"):
                call(texts)
        file.write_bytes(whole)  # the file is restored
        assert model.embed(texts).tobytes() == want.tobytes() == pool.embed(texts, own_bert).tobytes()


def test_a_file_that_is_rewritten_in_place(own_bert: Path, llama: Path) -> None:
    """Row 6: path, inode and size stay the same and numbers change. The modification time reveals it before the file is
    used again."""
    file = own_bert / "model.safetensors"
    data = bytearray(file.read_bytes())
    (header,) = struct.unpack_from("<Q", data)
    with mpool.Pool(mpool.PoolConfig(breaker_threshold=0)) as pool:
        model = pool.load(own_bert)
        before = model.embed("A cat sat.")
        for at in range(8 + header, len(data) - 7, 8):  # the sign of every second number
            data[at + 3] ^= 0x80
        with open(file, "r+b") as open_file:
            open_file.write(data)
        with pytest.raises(mpool.errors.IntegrityError):
            model.embed("A cat sat.")
        assert len(pool.generate("A cat", llama, max_tokens=3, temperature=0, ignore_eos=True).token_ids) == 3
        after = model.embed("A cat sat.")  # loads the files of now
        assert after.shape == before.shape and after.tobytes() != before.tobytes()
        assert pool.embed("A cat sat.", own_bert).tobytes() == after.tobytes()


# ---- logs ------------------------------------------------------------------------------------------------------------

@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_logs_on_a_full_disk(bert: Path, llama: Path) -> None:
    """Row 8: every write of the log and to standard error fails, and requests are unaffected."""
    script = """
import logging
full = logging.FileHandler("/dev/full")
failures = []
full.handleError = lambda record: failures.append(record.levelname)
logging.getLogger("mpool").addHandler(full)
logging.getLogger("mpool.pool").addHandler(logging.FileHandler("/dev/full"))  # this one prints to standard error
logging.getLogger("mpool").setLevel("DEBUG")
kept = os.dup(2)
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
want = mpool.embed("x", bert)
good = True
for _ in range(5):
    good &= np.array_equal(mpool.embed("x", bert), want)
    mpool.unload(bert)
    good &= len(mpool.generate("The", llama, max_tokens=3, ignore_eos=True).token_ids) == 3
    time.sleep(0.1)
time.sleep(0.4)
from mpool.runtime import logs as _logging
alive = _logging._drain.thread.is_alive()
sys.stderr = open(os.devnull, "w")
os.dup2(kept, 2)
logging.raiseExceptions = False
for name in ("mpool", "mpool.pool"):
    for handler in list(logging.getLogger(name).handlers):
        logging.getLogger(name).removeHandler(handler)
print(json.dumps([bool(good), len(failures), alive]), flush=True)
os._exit(0)
"""
    good, failures, alive = script_result(script, bert, llama)
    assert good and failures > 0 and alive


# ---- clocks ----------------------------------------------------------------------------------------------------------

def test_wall_clock_changes_move_no_deadline(bert: Path, llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 11: the wall clock moves by an hour, forward and back."""
    real, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + jump[0])
    monkeypatch.setattr(time, "time_ns", lambda: int((real() + jump[0]) * 1e9))
    with mpool.Pool() as pool:
        pool.generate("The", llama, max_tokens=1)  # on a busy machine, reading the files takes longer than the limit
        for seconds in (3600.0, -3600.0, 0.0):
            start = time.monotonic()
            job = pool.submit("text_to_text", prompt="The", model=llama, timeout=1.0, **LONG)
            jump[0] = seconds
            assert pool.embed("A cat", bert, timeout=30).shape == (32,)
            with pytest.raises(mpool.Timeout):
                job.result(timeout=20)
            assert 0.9 < time.monotonic() - start < 60
        idle(pool, 10)


def test_nothing_reads_the_wall_clock() -> None:
    """Row 11: the sources read the wall clock only for dates in prompts, notes and protocol responses."""
    if not (ROOT / "csrc").is_dir():
        pytest.skip("needs the C sources")
    wall = re.compile(r"CLOCK_REALTIME|\bgettimeofday\b|[^_.\w]time\(NULL\)|\btime\.time(_ns)?\(|datetime\.now")
    found = [f"{path.relative_to(ROOT)}:{number}" for folder, ending in (("csrc", "*.[ch]"), ("mpool", "*.py"))
             for path in sorted((ROOT / folder).rglob(ending))
             for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1) if wall.search(line)]
    # Dates may occur in prompts, in notes about verified files, and in responses and records with the time of an event.
    dated = ("mpool/conversation/", "mpool/models/store.py", "mpool/server/openai/", "mpool/server/ollama.py",
             "mpool/server/models.py", "mpool/server/scoring.py", "mpool/server/request_history.py",
             "mpool/server/classifying.py", "mpool/server/pooling.py", "mpool/server/series.py",
             "mpool/server/event_list.py", "mpool/integrations/llama_cpp.py", "mpool/runtime/history.py")
    assert [place for place in found if not place.startswith(dated)] == []


# ---- callbacks -------------------------------------------------------------------------------------------------------

class NotAnException(BaseException):
    """Not an `Exception`, so that `except Exception` does not catch it."""


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit, NotAnException])
def test_a_progress_function_that_raises(bert: Path, error: type[BaseException]) -> None:
    """Row 17: only the caller gets the error, and the worker survives."""
    texts = [f"text {number}" for number in range(3000)]

    def progress(done: int, total: int | None) -> None:
        raise error("from the callback")

    with mpool.Pool() as pool:
        want = pool.embed(texts[:5], bert)
        with pytest.raises(error):
            pool.embed(texts, bert, progress=progress)
        with pytest.raises(error):
            for _ in pool.embed_iter(iter(texts), bert, progress=progress):
                pass
        idle(pool, 10)
        assert pool.embed(texts[:5], bert).tobytes() == want.tobytes()
        assert all(row.errors == 0 for row in pool.ps())


def test_a_progress_function_that_calls_the_pool(bert: Path) -> None:
    """Row 18: a callback may call the pool without a deadlock."""
    seen: list[tuple[int, ...]] = []
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        def progress(done: int, total: int | None) -> None:
            if len(seen) < 3:
                seen.append(pool.embed(f"from within {done}", bert).shape)

        texts = [f"text {number}" for number in range(2000)]
        together([lambda: _discard(pool.embed(texts, bert, progress=progress))], 60)
        assert seen and set(seen) == {(32,)}


def _discard(_: Any) -> None:
    pass


EVENTS = ("spawn", "ready", "evict", "fail", "request_start", "request_complete", "request_fail")


@pytest.fixture
def listening() -> Iterator[mpool.Pool]:
    with mpool.Pool() as made:
        yield made


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit, NotAnException])
def test_a_lifecycle_callback_that_raises(listening: mpool.Pool, bert: Path, error: type[BaseException],
                                          caplog: pytest.LogCaptureFixture) -> None:
    """Row 17: other callbacks still run, requests are served, workers survive."""
    received: list[str] = []

    def raises(*_: Any) -> None:
        raise error("from the callback")

    with caplog.at_level(logging.CRITICAL + 1):
        for event in EVENTS:
            listening.on(event, raises)
            listening.on(event, lambda *_, event=event: received.append(event))
        for _ in range(3):
            assert listening.embed("A cat", bert).shape == (32,)
            listening.unload(bert)
        expected = {"spawn", "ready", "evict", "request_start", "request_complete"}
        until(lambda: expected <= set(received), 10, lambda: received)


def test_a_lifecycle_callback_that_re_enters(listening: mpool.Pool, bert: Path) -> None:
    """Row 18: a callback can submit requests. Closing the pool in a callback succeeds or raises, and does not hang."""
    shapes: list[tuple[int, ...]] = []
    ended: list[str] = []

    def again(*_: Any) -> None:
        if not shapes:
            shapes.append(())
            shapes.append(listening.submit("text_embedding", inputs="from within", model=bert).result(20).shape)

    def closes(*_: Any) -> None:
        try:
            listening.close()
            ended.append("closed")
        except (mpool.MpoolError, RuntimeError) as error:
            ended.append(type(error).__name__)

    listening.on("request_complete", again)
    listening.embed("A cat", bert)
    until(lambda: (32,) in shapes, 10, lambda: shapes)
    listening.on("evict", closes)
    together([lambda: listening.unload(bert)], 30)
    until(lambda: ended, 10)


def test_a_lifecycle_callback_that_blocks(listening: mpool.Pool, bert: Path) -> None:
    """Row 17: requests are served while a callback blocks."""
    over = threading.Event()
    listening.on("request_start", lambda *_: over.wait(30) and None)
    try:
        together([lambda: _discard([listening.embed(f"A cat {number}", bert) for number in range(50)])], 20)
    finally:
        over.set()


# ---- slow and absent readers -----------------------------------------------------------------------------------------

def test_a_stream_that_is_never_read(llama: Path) -> None:
    """Row 22: `max_tokens` bounds the memory of the stream. It ends at its deadline, and its slot is freed."""
    with mpool.Pool(mpool.PoolConfig(threads=1, request_timeout=None)) as pool:
        streams = [pool.generate("The", llama, stream=True, timeout=0.5, **LONG) for _ in range(4)]
        assert len(pool.generate("A cat", llama, max_tokens=5, temperature=0, ignore_eos=True).token_ids) == 5
        idle(pool, 20)
        held = pool.registry.stats()["bytes_by_tag"]["request"]
        assert held < 64 << 20
        for stream in streams:
            with pytest.raises(mpool.Timeout):
                for _ in stream:
                    pass
        del streams, stream
        gc.collect()
        assert pool.registry.stats()["bytes_by_tag"]["request"] < held


LEAVE: dict[str, Callable[[mpool.Stream], None]] = {
    "del": lambda stream: None,
    "close": lambda stream: stream.close(),
    "started": lambda stream: _discard(next(iter(stream))),
    "break": lambda stream: next((None for _ in stream), None),
    "with": lambda stream: stream.__exit__(None, None, None),
}


@pytest.mark.parametrize("leave", LEAVE)
def test_abandoned_streams_free_their_slots(llama: Path, leave: str) -> None:
    """Row 23: also streams that were never started, for which a generator would not run its `finally` clause."""
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        pool.generate("A cat", llama, max_tokens=2)
        for _ in range(20):
            stream = pool.generate("The", llama, stream=True, **LONG)
            LEAVE[leave](stream)
            del stream
            idle(pool, 30)  # a request that is not cancelled completes, and is counted below
        stats = pool.registry.stats()
        assert stats["cancelled"] == 20 and stats["completed"] == 1


def test_asynchronous_streams_that_are_dropped(llama: Path) -> None:
    """Row 23: streams whose task is cancelled, leaves the loop, or never starts to read."""
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        async def reader() -> None:
            async for _ in mpool.aio.generate("The", llama, pool=pool, stream=True, **LONG):
                await asyncio.sleep(0)

        async def breaker() -> None:
            async for _ in mpool.aio.generate("The", llama, pool=pool, stream=True, **LONG):
                break

        async def main() -> None:
            tasks = [asyncio.create_task(reader()) for _ in range(10)]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(breaker() for _ in range(10)))
            for _ in range(10):
                mpool.aio.generate("The", llama, pool=pool, stream=True, **LONG)
            gc.collect()

        asyncio.run(main())
        idle(pool, 10)


# ---- many callers at once --------------------------------------------------------------------------------------------

def test_a_thousand_callers_of_a_cold_model_cause_one_load(bert: Path) -> None:
    """Row 24: 500 threads and 500 tasks cause one load and at most two workers, and get the same result."""
    with mpool.Pool(mpool.PoolConfig(embed_queue_capacity=100)) as pool:
        gate = threading.Event()
        results: set[bytes] = set()
        count: list[int] = []

        def thread() -> None:
            gate.wait(30)
            results.add(pool.embed("A cat", bert).tobytes())
            count.append(1)

        def loop() -> None:
            async def one() -> None:
                results.add((await mpool.aio.embed("A cat", bert, pool=pool)).tobytes())
                count.append(1)

            async def main() -> None:
                await asyncio.gather(*(one() for _ in range(500)))

            gate.wait(30)
            asyncio.run(main())

        threading.Timer(0.3, gate.set).start()
        together([*([thread] * 500), loop], 100)
        stats = pool.registry.stats()
        assert len(count) == 1000 and len(results) == 1
        assert stats["loads"] == 1 and stats["load_failures"] == 0 and stats["workers_spawned"] <= 2


# ---- closing ---------------------------------------------------------------------------------------------------------

def test_closing_twice_and_from_the_garbage_collector(bert: Path, llama: Path) -> None:
    """Row 31: close() called twice, by several threads, and by the finaliser of a reference cycle during requests."""
    class Owner:
        def __init__(self) -> None:
            self.pool = mpool.Pool(mpool.PoolConfig(threads=1, shutdown_grace=0.1))
            self.me = self

        def __del__(self) -> None:
            self.pool.close()
            self.pool.close()

    for _ in range(5):
        owner = Owner()
        job = owner.pool.submit("text_to_text", prompt="The", model=llama, **LONG)
        del owner
        gc.collect()
        with pytest.raises((mpool.ShuttingDown, mpool.Cancelled)):
            job.result(20)
    pool = mpool.Pool(mpool.PoolConfig(threads=1))
    pool.embed("A cat", bert)
    together([pool.close] * 8, 30)
    pool.close()
    with pytest.raises(mpool.ShuttingDown):
        pool.embed("A cat", bert)


# ---- weights that are NaN or infinite --------------------------------------------------------------------------------

def _patch(folder: Path, name: str, row: int | None, value: float) -> None:
    """Fill a row of a float32 tensor of a checkpoint with a number, or the whole tensor if `row` is None."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    entry = json.loads(data[8:8 + length])[name]
    assert entry["dtype"] == "F32"
    begin, end = (8 + length + at for at in entry["data_offsets"])
    if row is not None:
        width = entry["shape"][1] * 4
        begin, end = begin + row * width, begin + (row + 1) * width
    data[begin:end] = struct.pack("<f", value) * ((end - begin) // 4)
    file.write_bytes(data)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_only_texts_with_nan_weights_fail(own_bert: Path, value: float) -> None:
    """Rows 36 and 37: one token's embedding is NaN or infinite; texts without that token have unchanged bits."""
    clean = ["A cat sat on the mat", "the dog barked", "twice"]
    with mpool.Pool() as pool:
        want = [pool.embed(text, own_bert) for text in clean]
        token = pool.tokenize("fox", own_bert, add_special=False)[0]
        pool.unload(own_bert)
        _patch(own_bert, "embeddings.word_embeddings.weight", token, value)
        pool.unload(own_bert)
        with pytest.raises(mpool.NumericError) as caught:
            pool.embed("the quick fox", own_bert)
        assert own_bert.name in str(caught.value)
        with pytest.raises(mpool.NumericError):
            pool.embed([*clean, "the quick fox"], own_bert)
        rows = pool.embed([*clean, "the quick fox"], own_bert, on_error="null")
        assert np.isnan(rows[3]).all()
        for at, vector in enumerate(want):
            assert rows[at].tobytes() == vector.tobytes()
            assert pool.embed(clean[at], own_bert).tobytes() == vector.tobytes()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_token_is_sampled_from_nan(llama: Path, tmp_path: Path, value: float, temperature: float) -> None:
    """Row 36: with a NaN or infinite final norm, a request raises an error and a stream yields no text."""
    corrupted = Path(shutil.copytree(llama, tmp_path / "corrupted"))
    _patch(corrupted, "model.norm.weight", None, value)
    with mpool.Pool(mpool.PoolConfig(breaker_threshold=0)) as pool:
        with pytest.raises(mpool.NumericError):
            pool.generate("A cat", corrupted, max_tokens=5, temperature=temperature, ignore_eos=True)
        stream = pool.generate("A cat", corrupted, max_tokens=5, temperature=temperature, ignore_eos=True, stream=True)
        chunks = []
        with pytest.raises(mpool.NumericError):
            for chunk in stream:
                chunks.append(str(chunk))
        assert "".join(chunks) == ""
        assert len(pool.generate("A cat", llama, max_tokens=5, temperature=0, ignore_eos=True).token_ids) == 5


# ---- deadlines in a batch --------------------------------------------------------------------------------------------

def test_expired_requests_do_not_change_the_rest_of_their_batch(bert: Path, llama: Path) -> None:
    """Row 37: some requests of a batch expire; the others have the same bits as alone."""
    rng = random.Random(5)
    with mpool.Pool(mpool.PoolConfig(threads=1, embed_queue_capacity=1000, prompt_queue_capacity=1000)) as pool:
        texts = [f"text {number} " * rng.randint(1, 8) for number in range(60)]
        alone = [pool.embed(text, bert).tobytes() for text in texts]
        want = pool.generate("A cat", llama, max_tokens=30, temperature=1.0, seed=3, ignore_eos=True).token_ids
        ended = {"ok": 0, "late": 0}
        for _ in range(5):
            doomed = []
            for _ in range(6):
                try:
                    doomed.append(pool.submit("text_to_text", prompt="The", model=llama,
                                              timeout=rng.uniform(0.005, 0.08), **LONG))
                except mpool.Timeout:  # refused at once because the deadline cannot be met
                    pass
            mate = pool.submit("text_to_text", prompt="A cat", model=llama, max_tokens=30, temperature=1.0, seed=3,
                               ignore_eos=True)
            jobs = []
            for at, text in enumerate(texts):
                limit = rng.uniform(0.0005, 0.02) if at % 2 else None
                try:
                    jobs.append((at, pool.submit("text_embedding", inputs=text, model=bert, timeout=limit)))
                except mpool.Timeout:
                    ended["late"] += 1
            for at, job in jobs:
                try:
                    assert job.result(60).tobytes() == alone[at]
                    ended["ok"] += 1
                except mpool.Timeout:
                    assert at % 2
                    ended["late"] += 1
            assert mate.result(60).token_ids == want
            for job in doomed:
                with pytest.raises(mpool.Timeout):
                    job.result(60)
        assert ended["ok"] >= 150 and sum(ended.values()) == 300
        idle(pool, 10)
