"""Threads that do not start, and memory that runs out in the Python layer; tiny models, processes of their own.

Row numbers refer to the table in tests/FAULTS.md.
"""

import importlib
from pathlib import Path
from typing import Any

import pytest

import mpool
from mpool.tasks import options
from processes import process, script_result

#: Makes the starts of threads whose names begin with a prefix fail, the first `count` times.
NO_THREAD = """
real, refused = threading.Thread.start, []
def refuse(prefix, count):
    def start(self):
        if self.name.startswith(prefix) and len(refused) < count:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        return real(self)
    threading.Thread.start = start
"""


@pytest.mark.parametrize("failures", [1, 4])
def test_the_event_thread_starts_at_the_next_need(bert: Path, failures: int) -> None:
    """Row 42: the thread of log records and events cannot start at first. Later requests start it; no event is lost."""
    script = NO_THREAD + f"""
import logging
records = []
class Kept(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())
logging.getLogger("mpool.pool").addHandler(Kept())
logging.getLogger("mpool.pool").setLevel("INFO")
refuse("mpool-log", {failures})
pool, seen = mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)), []
for kind in ("spawn", "ready", "request_start", "request_complete"):
    pool.on(kind, lambda event: seen.append(event.event))
for text in "abcdef":
    pool.embed(text, bert)
end = time.monotonic() + 20
while len(seen) < 14 and time.monotonic() < end:
    time.sleep(0.01)
loaded = [text for text in records if text.startswith("Loaded ")]
print(json.dumps([len(refused), sorted((kind, seen.count(kind)) for kind in set(seen)), len(loaded),
                  sum("could not start" in text for text in records)]))
"""
    refused, counts, loaded, warned = script_result(script, bert, bert)
    assert refused == failures
    assert counts == [["ready", 1], ["request_complete", 6], ["request_start", 6], ["spawn", 1]]
    assert loaded == 1 and warned == 1  # one warning, however often the thread could not start


def test_events_are_delivered_at_exit_without_a_thread(bert: Path) -> None:
    """Row 42: the thread never starts. Requests succeed; the exit delivers the events and writes nothing to stderr."""
    script = NO_THREAD + """
refuse("mpool-log", 10**9)
pool = mpool.Pool(mpool.PoolConfig(threads=1))
pool.on("request_complete", lambda event: print(event.event, flush=True))
print(pool.embed("a", bert).shape, flush=True)
"""
    status, out, err = process(script, bert, bert)
    assert (status, err) == (0, "")
    assert out.splitlines()[1:] == ["request_complete"]


def test_the_event_thread_outlives_failures_of_its_own_loop(bert: Path) -> None:
    """Row 42: whatever fails on the thread, at any line, the thread serves on or is started again."""
    script = """
from mpool.runtime import logs as _logging
threading.excepthook = lambda *_: None
pool, seen = mpool.Pool(mpool.PoolConfig(threads=1)), []
pool.on("request_complete", lambda event: seen.append(event.event))
pool.embed("a", bert)
drain, kinds = _logging._drain, [MemoryError, RuntimeError, OSError, SystemExit]
real_wait, raised = drain.stopping.wait, []
def wait(seconds=None):
    if kinds:
        raised.append(kinds[0])
        raise kinds.pop(0)("planted")
    return real_wait(seconds)
drain.stopping.wait = wait
end = time.monotonic() + 20
while kinds and time.monotonic() < end:
    pool.embed("b", bert)
    time.sleep(0.02)
pool.embed("c", bert)
count = 0
while time.monotonic() < end and count != pool.metrics()["completed"]:
    count = len(seen)
    time.sleep(0.05)
print(json.dumps([len(raised), count == pool.metrics()["completed"]]))
"""
    assert script_result(script, bert, bert) == [4, True]


@pytest.mark.sample(3)
@pytest.mark.parametrize("thread, call", [
    ("mpool-capture", 'pool.generate("a", llama, max_tokens=2, capture=mpool.debug.capture())'),
    ("mpool-masks", 'pool.generate("a", llama, max_tokens=2, response_format={"type": "json_object"})'),
    ("mpool-texts", 'pool.embed("word " * 20000, bert)'),
    ("mpool-requests", 'asyncio.run(mpool.aio.embed("a", bert, pool=pool))'),
    ("mpool-requests", 'asyncio.run(mpool.aio.load(bert, pool=pool))'),
    ("mpool-requests", 'asyncio.run(mpool.aio.generate("a", llama, pool=pool, max_tokens=2))')])
def test_calls_whose_thread_does_not_start(bert: Path, llama: Path, thread: str, call: str) -> None:
    """Row 42: a call whose thread cannot start gets its result or one error of mpool; the next call succeeds."""
    script = NO_THREAD + f"""
import asyncio
import mpool.aio
refuse("{thread}", 1)
pool, found = mpool.Pool(mpool.PoolConfig(threads=1)), []
for _ in range(3):
    try:
        {call}
        found.append("ok")
    except Exception as error:
        found.append([isinstance(error, mpool.SpawnFailed), repr(error.__cause__)])
print(json.dumps([len(refused), found]))
"""
    refused, found = script_result(script, bert, llama)
    assert refused == 1 and found[1:] == ["ok", "ok"]
    assert found[0] in ("ok", [True, 'RuntimeError("can\'t start new thread")']), found


def test_address_space_that_runs_out(bert: Path, llama: Path) -> None:
    """Row 42: without address space for threads and for the libraries that the first request imports, the request
    raises one error of mpool.

    Children of one process inherit the imported package. Their limits, in MiB above what they use, are too low for the
    shared library of ``tokenizers`` (inside that library, a failed allocation aborts the process), but not below 3 MiB:
    ``Thread.start`` waits forever if the new thread cannot allocate its first object (python/cpython#140746)."""
    script = """
import asyncio, resource
from mpool import aio
def verdict(error):
    kind = type(error).__name__
    return kind if isinstance(error, mpool.MpoolError) else "BARE " + repr(error)[:300]
async def awaited():
    try:
        await aio.embed("a cat", bert)
        return "ok"
    except BaseException as error:
        return verdict(error)
def child(step, kind):
    pages = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    loop = asyncio.new_event_loop()
    resource.setrlimit(resource.RLIMIT_AS, (pages + step, resource.RLIM_INFINITY))
    try:
        if kind == "aio":
            said = loop.run_until_complete(awaited())
        else:
            said = "ok"
            mpool.embed("a cat", bert) if kind == "embed" else mpool.generate("a cat", llama, max_tokens=2)
    except BaseException as error:
        said = verdict(error)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return said
found = []
for kind in ("embed", "generate", "aio"):
    for step in (3, 5):
        here, there = os.pipe()
        pid = os.fork()
        if not pid:
            signal.alarm(30)
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                os.write(there, child(step << 20, kind).encode())
            finally:
                os._exit(0)
        os.close(there)
        said = b"".join(iter(lambda: os.read(here, 1000), b"")).decode()
        os.close(here)
        found.append([kind, step, os.waitpid(pid, 0)[1], said])
print(json.dumps(found))
"""
    found: list[list[Any]] = script_result(script, bert, llama)
    wrong = [row for row in found if row[2] != 0 or row[3] != "ok" and not hasattr(mpool.errors, row[3])]
    assert not wrong, wrong
    assert {row[3] for row in found} <= {"MemoryExhausted", "SpawnFailed"}, found


def test_a_closed_pool_takes_no_callback() -> None:
    pool = mpool.Pool(mpool.PoolConfig(threads=1))
    pool.on("ready", print)()
    pool.close()
    with pytest.raises(mpool.ShuttingDown, match="closed"):
        pool.on("ready", print)
    begun = mpool.Pool(mpool.PoolConfig(threads=1))
    begun.begin_shutdown()
    with pytest.raises(mpool.ShuttingDown):
        begun.on("request_fail", print)
    begun.close()


@pytest.mark.parametrize(("module", "name", "call"), [
    ("mpool.config", "seconds_of", lambda: mpool.PoolConfig(threads=1)),
    ("mpool.tasks.options", "seconds_of", lambda: options.CallOptions(keep_alive="5m")),
], ids=["PoolConfig", "CallOptions"])
def test_options_without_memory(monkeypatch: pytest.MonkeyPatch, module: str, name: str, call: Any) -> None:
    """The checks of options raise an error of mpool, too."""
    def without_memory(*args: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(importlib.import_module(module), name, without_memory)
    with pytest.raises(mpool.MemoryExhausted, match="planted") as raised:
        call()
    assert isinstance(raised.value.__cause__, MemoryError)


def test_a_tokenizer_without_address_space_is_no_damaged_file(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def require(count: int, user: str) -> None:
        raise MemoryError(f"{user} needs {count} bytes of address space")

    monkeypatch.setattr("mpool.tokenizers.native.require_if_limited", require)
    with mpool.Pool() as pool, pytest.raises(mpool.MemoryExhausted, match="the tokenizer needs"):
        pool.tokenize("a", bert)
