"""Worker processes compute the same bytes as threads; they may be killed, stopped or fail to start."""

from __future__ import annotations

import multiprocessing.spawn
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpool
from mpool.runtime import isolation as _isolated
from mpool.runtime import logs
from pooloptions import wide as wide
from poolstates import LONG, TEXT, row_of
from isolated import children, pool_of, processes, signal_all
from waiting import together, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="process isolation is for Linux")
FATAL = [signal.SIGKILL, signal.SIGSEGV]
#: Reasons of the deaths in the metrics. SIGKILL comes from another program, such as the system's OOM killer.
WHY = {signal.SIGKILL: "killed", signal.SIGSEGV: "crashed"}


@pytest.fixture
def pool() -> Iterator[mpool.Pool]:
    with pool_of() as made:
        yield made
    assert children() == []


def running(pool: mpool.Pool, model: Path) -> mpool.Job:
    """Start a text request and return it when it has generated tokens and is far from complete, or has failed."""
    job = pool.submit("text_to_text", model=pool.load(model), **LONG)
    until(lambda: job.done() or row_of(pool).running)
    served = pool.metrics()["steps"]
    # after prefill, each step generates one token per choice
    until(lambda: job.done() or pool.metrics()["steps"] >= served + 2)
    return job


def kill_in_steps(pool: mpool.Pool, model: Path, number: int) -> mpool.MpoolError:
    """Send a signal to worker processes until two of them hit a step of the same text request.

    A signal between two steps affects no request.

    Returns:
        Error of the request.
    """
    for _ in range(20):
        try:
            job = running(pool, model)
            while not job.done():
                before = signal_all(pool, number)
                until(lambda: job.done() or (processes(pool) and set(processes(pool)).isdisjoint(before)))
            job.result()
        except mpool.NoWorkers:
            pool.load(model)  # makes a model available again after too many worker deaths
        except mpool.MpoolError as error:
            return error
    raise AssertionError("no request was hit in two steps")


# ---- the same bytes

def test_completions_are_the_same(llama: Path, pool: mpool.Pool) -> None:
    requests: list[dict[str, Any]] = [
        dict(temperature=0, max_tokens=40), dict(seed=5, max_tokens=40, temperature=1.3),
        dict(seed=5, n=3, max_tokens=20),
        dict(temperature=0, max_tokens=20, logprobs=5), dict(seed=1, max_tokens=60, stop=["e", "the"]),
        dict(seed=2, max_tokens=30, repetition_penalty=1.3, logit_bias={5: 4.0}, min_tokens=10)]
    prompts = ["a", "a b c " * 60, "a b c " * 60 + "and more"]
    with mpool.Pool() as here:
        for prompt in prompts:
            for request in requests:
                expected, found = (one.generate(prompt, llama, **request) for one in (here, pool))
                for a, b in zip(expected.choices, found.choices):
                    assert (a.text, a.finish_reason, a.logprobs) == (b.text, b.finish_reason, b.logprobs)
    assert pool.generate("a b c " * 60, llama, **TEXT).usage.cached_tokens > 0


# ---- killed and stopped workers

@pytest.mark.parametrize("number", FATAL)
def test_request_is_retried_if_its_worker_is_killed_before_a_result(wide: Path, pool: mpool.Pool, number: int) -> None:
    expected = pool.embed("a text " * 20, wide)
    signal_all(pool, signal.SIGSTOP)  # the request cannot end before the kill
    job = pool.submit("text_embedding", inputs="another text " * 30, model=pool.get(wide))
    until(lambda: row_of(pool).running)
    before = signal_all(pool, number)
    for pid in before:
        os.kill(pid, signal.SIGCONT)  # takes the pending signal; a process that SIGKILL ended is a zombie
    assert np.array_equal(job.result(), pool.embed("another text " * 30, wide))
    assert set(processes(pool)).isdisjoint(before)
    assert np.array_equal(pool.embed("a text " * 20, wide), expected)


def deaths(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, str]]]:
    """Return level and parts of the records about workers that died."""
    logs.wait_for_events(60.0)
    form = re.compile(r"Worker (?P<worker>\d+) for (?P<model>.+) died; requests retried: (?P<retried>\d+), "
                      r"failed: (?P<failed>\d+); cause: (?P<cause>.+)")
    found = [(record.levelname, form.fullmatch(record.getMessage())) for record in caplog.records]
    return [(level, match.groupdict()) for level, match in found if match is not None]


@pytest.mark.parametrize("number", FATAL)
def test_a_death_is_one_warning(wide: Path, pool: mpool.Pool, number: int, caplog: pytest.LogCaptureFixture) -> None:
    """Row 57: the model, the cause, and the requests retried, whether the worker computed a request or had none."""
    caplog.set_level("WARNING", "mpool.pool")
    pool.embed("a text " * 20, wide)
    signal_all(pool, signal.SIGSTOP)
    job = pool.submit("text_embedding", inputs="another text " * 30, model=pool.get(wide))
    until(lambda: row_of(pool).running)
    before = signal_all(pool, number)
    for pid in before:
        os.kill(pid, signal.SIGCONT)
    job.result()
    until(lambda: len(deaths(caplog)) == len(before))
    found = deaths(caplog)
    key = row_of(pool).model
    assert {(level, row["model"], row["failed"]) for level, row in found} == {("WARNING", key, "0")}
    assert sum(int(row["retried"]) for _, row in found) == 1
    assert all(f"signal {number:d}" in row["cause"] for _, row in found)
    assert len({row["worker"] for _, row in found}) == len(before) == pool.health().models[key].deaths


def test_a_stalled_worker_dies_with_one_warning(wide: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its requests are not retried."""
    caplog.set_level("WARNING", "mpool.pool")
    with mpool.Pool(mpool.PoolConfig(chaos="stall=1", stall_timeout=0.2, max_workers_per_model=1)) as pool:
        with pytest.raises(mpool.RecvError):
            pool.embed("a text", wide)
        until(lambda: deaths(caplog))
        (level, row), = deaths(caplog)
        assert (level, row["model"], row["retried"], row["failed"]) == ("WARNING", row_of(pool).model, "0", "1")


@pytest.mark.parametrize("number", FATAL)
def test_generation_continues_if_its_worker_is_killed(llama: Path, pool: mpool.Pool, number: int) -> None:
    call: dict[str, Any] = dict(prompt="a b c", n=16, max_tokens=250, seed=3, ignore_eos=True, logprobs=2)
    with mpool.Pool() as here:
        expected = here.generate(model=llama, **call)
    attempts = 0
    while pool.metrics()["retries"] == 0:  # on a busy machine, a request may complete before the kill
        assert (attempts := attempts + 1) <= 10
        model, steps = pool.load(llama), pool.metrics()["steps"]
        job = pool.submit("text_to_text", model=model, **call)
        until(lambda: job.done() or pool.metrics()["steps"] >= steps + 40)
        before = signal_all(pool, signal.SIGSTOP)
        for sent in (*(() if job.done() else (number,)), signal.SIGCONT):
            for pid in before:
                with suppress(ProcessLookupError):
                    os.kill(pid, sent)
        found = job.result()
    for one, other in zip(expected.choices, found.choices):
        assert (one.text, one.finish_reason, one.logprobs) == (other.text, other.finish_reason, other.logprobs)
    assert expected.usage.completion_tokens == found.usage.completion_tokens
    assert set(processes(pool)).isdisjoint(before)
    metrics = pool.metrics()  # the retry does not count as a preemption
    assert (metrics["retries"], metrics["preemptions"], metrics["errors"], metrics["completed"]) == \
        (1, 0, 0, attempts)
    reason, model = WHY[number], metrics["models"][str(llama)]
    assert model["retries"][reason] == 1 == sum(model["retries"].values())
    assert {why for why, count in model["worker_deaths"].items() if count} == {reason}


def test_request_fails_if_two_of_its_workers_are_killed(llama: Path, pool: mpool.Pool) -> None:
    error = kill_in_steps(pool, llama, signal.SIGKILL)
    assert isinstance(error, mpool.RecvError)
    assert re.search(r"worker process \d+ was killed by signal 9 ", str(error))
    assert pool.generate("b", llama, **TEXT).text  # a new worker serves
    job = running(pool, llama)  # an external kill quarantines no request
    assert not job.done()
    job.cancel()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_continue_after_a_fault(llama: Path, number: int) -> None:
    call: dict[str, Any] = dict(seed=3, max_tokens=400, ignore_eos=True, stop=["never there"])
    with mpool.Pool() as here:
        expected = here.generate("a b", llama, **call).text
    with pool_of(stall_timeout=1.5) as pool:
        parts = []
        for chunk in pool.generate("a b", llama, stream=True, **call):
            parts.append(chunk.text)
            if len(parts) == 3:
                signal_all(pool, number)
        assert "".join(parts) == expected
        assert pool.metrics()["completed"] == 1


@pytest.mark.parametrize("number", FATAL)
def test_killed_idle_worker_is_replaced(bert: Path, pool: mpool.Pool, number: int) -> None:
    expected = pool.embed("a", bert)
    before = signal_all(pool, number)
    assert np.array_equal(pool.embed("a", bert), expected)
    assert set(processes(pool)).isdisjoint(before)
    assert pool.metrics()["errors"] == 0


def test_worker_stopped_in_a_step(llama: Path) -> None:
    with pool_of(stall_timeout=1.5) as pool:
        error = kill_in_steps(pool, llama, signal.SIGSTOP)
        assert "without a heartbeat or response" in str(error)
        deaths = pool.metrics()["models"][str(llama)]["worker_deaths"]
        assert {reason for reason, count in deaths.items() if count} == {"stalled"}
        assert pool.generate("b", llama, **TEXT).text
    assert children() == []


def test_stopped_idle_worker(bert: Path) -> None:
    with pool_of(stall_timeout=1.5) as pool:
        expected = pool.embed("a", bert)
        before = signal_all(pool, signal.SIGSTOP)
        assert np.array_equal(pool.embed("a", bert), expected)
        assert set(processes(pool)).isdisjoint(before)
    assert children() == []


def test_close_does_not_wait_for_a_stopped_worker(llama: Path) -> None:
    pool = pool_of(shutdown_grace=0.1, stall_timeout=600.0)
    job = running(pool, llama)
    signal_all(pool, signal.SIGSTOP)
    together([pool.close], 60)
    with pytest.raises(mpool.PoolError):
        job.result()
    until(lambda: not children(), state=children)  # on a busy machine, after the grace period: the thread ends later


def test_close_during_a_request(llama: Path) -> None:
    pool = pool_of(shutdown_grace=0.1)
    job = running(pool, llama)
    pool.close()
    with pytest.raises(mpool.ShuttingDown):
        job.result()
    assert children() == []


def crash(pool: mpool.Pool, bert: Path, number: int) -> None:
    """Embed a text, then end the worker processes with a signal."""
    pool.embed("a", bert)
    signal_all(pool, number)
    until(lambda: not processes(pool))


def test_a_crash_loop_ends(bert: Path, pool: mpool.Pool) -> None:
    with pytest.raises(mpool.NoWorkers):
        for _ in range(12):
            crash(pool, bert, signal.SIGSEGV)
    assert pool.load(bert).embed("a").shape == (32,)  # load() makes the model available again


@pytest.mark.slow
def test_kills_from_outside_take_no_model_down(bert: Path, pool: mpool.Pool) -> None:
    """Row 44 of tests/FAULTS.md: a SIGKILL from outside, as by the OOM killer; restarts after a growing backoff."""
    for _ in range(6):  # a sixth crash would take the model down
        crash(pool, bert, signal.SIGKILL)
    assert pool.embed("a", bert).shape == (32,)


def test_a_request_that_crashes_two_workers_is_quarantined(llama: Path, pool: mpool.Pool) -> None:
    errors = []
    while not errors or isinstance(errors[-1], mpool.RecvError) and len(errors) < 4:
        # a crash between two steps is attributed to no request
        errors.append(kill_in_steps(pool, llama, signal.SIGSEGV))
    assert isinstance(errors[-1], mpool.ModelError) and "made workers fail 2 times" in str(errors[-1])
    assert pool.generate("harmless", llama, **TEXT).text


# ---- requests that end early

def test_cancellation(llama: Path, pool: mpool.Pool) -> None:
    job = running(pool, llama)
    before = processes(pool)
    job.cancel()
    with pytest.raises(mpool.Cancelled):
        job.result(timeout=30)
    until(lambda: not row_of(pool).running)
    assert pool.metrics()["steps"] < LONG["max_tokens"]  # the process did not compute all tokens
    assert pool.generate("b", llama, **TEXT).text and processes(pool) == before


def test_timeout(llama: Path, pool: mpool.Pool) -> None:
    pool.load(llama)
    before = processes(pool)
    with pytest.raises(mpool.Timeout):
        pool.generate(LONG["prompt"], llama, max_tokens=1900, n=64, ignore_eos=True, timeout=0.3)
    until(lambda: not row_of(pool).running)
    assert pool.metrics()["steps"] < 1900  # the process did not compute all tokens
    assert pool.generate("b", llama, **TEXT).text and processes(pool) == before


def test_memory_of_a_process_is_bounded(llama: Path) -> None:
    with pool_of(process_memory=3_000_000) as pool:
        assert pool.generate("a", llama, **TEXT).text
        before = processes(pool)
        with pytest.raises(mpool.MemoryExhausted):
            pool.generate("a", llama, max_tokens=1900, n=128, ignore_eos=True)
        assert pool.generate("a", llama, **TEXT).text and processes(pool) == before


# ---- starting

@pytest.mark.parametrize("command, error, why", [
    (("/nowhere/python",), mpool.SpawnFailed, "/nowhere/python"),
    ((sys.executable, "-c", "raise SystemExit(3)"), mpool.SpawnFailed, "ended with code 3"),
    ((sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"), mpool.SpawnFailed, "killed by signal 11"),
    ((sys.executable, "-c", "import time; time.sleep(100)"), mpool.SpawnTimeout, "without a heartbeat or response")])
def test_worker_that_does_not_start(bert: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...],
                                 error: type[mpool.MpoolError], why: str) -> None:
    monkeypatch.setattr(_isolated, "command", lambda: command)
    # 3/4 of it is the limit of a silent process, which has to end before the limit of a load without progress
    timeout = 6.0 if error is mpool.SpawnTimeout else 30.0
    with pool_of(load_timeout=timeout) as pool, pytest.raises(error, match=why):
        pool.embed("a", bert)
    assert children() == []


@pytest.mark.parametrize("options, errors", [
    (dict(request_timeout=0.001), (mpool.Timeout,)), (dict(request_timeout=0.02), (mpool.Timeout,)),
    (dict(load_timeout=0.01), (mpool.SpawnTimeout,)),
    (dict(load_timeout=0.01, request_timeout=0.001), (mpool.SpawnTimeout, mpool.Timeout)),
    (dict(stall_timeout=0.01), (mpool.RecvError, mpool.ModelError, mpool.NoWorkers)),
    (dict(stall_timeout=0.01, request_timeout=0.001, shutdown_grace=0.0),
     (mpool.RecvError, mpool.ModelError, mpool.NoWorkers))])
def test_tiny_timeouts(bert: Path, llama: Path, options: dict[str, Any],
                       errors: tuple[type[mpool.MpoolError], ...]) -> None:
    with pool_of() as pool:
        pool.embed("a", bert)  # the first request opens descriptors that the process keeps
    files = len(os.listdir("/proc/self/fd"))
    with pool_of(**options) as pool:
        for number in range(8):
            for call in (lambda: pool.embed(f"a {number} " * 50, bert),
                         lambda: pool.generate("a", llama, max_tokens=30),
                         lambda: pool.embed("b", bert, timeout=0.001)):
                try:
                    call()
                except mpool.MpoolError as error:
                    assert isinstance(error, (*errors, mpool.Timeout)), error
                    assert "after 0 s" not in str(error) and "0.0 s" not in str(error)
        if "load_timeout" not in options and "stall_timeout" not in options:
            # The worker starts in the meantime and serves requests, of which some still wait for too long.
            until(lambda: served(pool, bert), 60)
    until(lambda: not children() and len(os.listdir("/proc/self/fd")) <= files)  # abandoned workers end too


def served(pool: mpool.Pool, bert: Path) -> bool:
    """Return True if a request succeeds, False if it waited for too long."""
    try:
        return pool.embed("a", bert, timeout=60).shape == (32,)
    except mpool.Timeout:
        return False


def test_worker_of_another_build(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the package is replaced while the parent runs, the worker is refused with an error."""
    command = _isolated.command()
    code = command[4].replace("sys.exit(", "import mmap; page = mmap.mmap(3, 4096); page[0] ^= 1; sys.exit(")
    monkeypatch.setattr(_isolated, "command", lambda: (*command[:4], code, *command[5:]))
    with pool_of() as pool, pytest.raises(mpool.SpawnFailed, match="another build of mpool"):
        pool.embed("a", bert)
    assert children() == []


def runs_as(monkeypatch: pytest.MonkeyPatch, executable: str, frozen: bool = False) -> None:
    """Pretend that the program was started with this executable."""
    monkeypatch.setattr(sys, "executable", executable)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(executable))
    if frozen:
        monkeypatch.setattr(sys, "frozen", True, raising=False)


@pytest.mark.parametrize("name, frozen, why", [("app", True, "is frozen"), ("python3", True, "is frozen"),
                                               ("uwsgi", False, "does not look like a Python")])
def test_an_application_is_not_started_again(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                             frozen: bool, why: str, pool: mpool.Pool) -> None:
    python, started = sys.executable, tmp_path / "started"
    application = tmp_path / name
    application.write_text(f"#!/bin/sh\ntouch {started}\n")
    application.chmod(0o755)
    runs_as(monkeypatch, str(application), frozen)
    with pytest.raises(mpool.SpawnFailed, match=why) as caught:
        pool.embed("a", bert)
    assert "set_executable" in str(caught.value) and str(application) in str(caught.value)
    assert not started.exists()
    multiprocessing.set_executable(python)  # runs_as restores the earlier value after the test
    assert pool.embed("a", bert).shape == (32,)
    assert Path(f"/proc/{processes(pool)[0]}/exe").resolve() == Path(python).resolve()


def test_options_of_models(bert: Path, llama: Path, tmp_path: Path) -> None:
    with mpool.Pool(mpool.PoolConfig(threads=1, max_workers_per_model=1)) as pool:
        model = pool.load(bert, isolation="process")
        expected = model.embed("a")
        assert row_of(pool).isolation == "process" and len(row_of(pool).processes) == 1
        assert row_of(pool).policy == "p2c" and "processes" in repr(pool.ps())
        pool.load(bert, isolation="thread")
        assert np.array_equal(pool.embed("a", bert), expected)
        until(lambda: row_of(pool).isolation == "thread" and not row_of(pool).processes)
        named = pool.register("own", llama, isolation="process")
        assert named.generate("a", **TEXT).text
        assert [row.isolation for row in pool.ps() if row.model == "own"] == ["process"]
        import pickle

        again = pickle.loads(pickle.dumps(named))
        assert again == named and again._entry.loading.isolation == "process"
        for bad in ("fork", 1, ""):
            with pytest.raises(mpool.InvalidArgument, match="`isolation` must be one of thread, process, got"):
                pool.load(bert, isolation=bad)  # type: ignore[arg-type]
            with pytest.raises(mpool.InvalidArgument, match="isolation"):
                mpool.PoolConfig(isolation=bad)  # type: ignore[arg-type]
    assert children() == []


def test_limits_and_descriptors(bert: Path, pool: mpool.Pool) -> None:
    pool.embed("a", bert)
    (pid,) = processes(pool)
    limits = {line[:26].strip(): line[26:].split()[0] for line in Path(f"/proc/{pid}/limits").read_text().splitlines()}
    assert limits["Max core file size"] == "0" and int(limits["Max open files"]) <= 4352
    assert int(limits["Max data size"]) < 2 * 10**9
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    assert status["NoNewPrivs"].strip() == "1"
    assert int(status["RssAnon"].split()[0]) * 1024 < 16 << 20  # within the allowance for the process itself
    assert int(status["SigIgn"], 16) >> (signal.SIGINT - 1) & 1  # only the parent handles Ctrl-C
    names = {number: os.readlink(f"/proc/{pid}/fd/{number}") for number in os.listdir(f"/proc/{pid}/fd")}
    # a mapped file keeps its descriptor (csrc/files/file_map.h)
    weights = os.path.realpath(bert / "model.safetensors")
    assert all(name in ("/dev/null", weights) or "memfd:mpool" in name for name in names.values()), names
    # weights are mapped read-only, and are in memory once
    maps = [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "mpool-weights" in line]
    assert maps and all(line.split()[1] == "r--s" for line in maps)
    own = [line for line in Path("/proc/self/maps").read_text().splitlines() if "mpool-weights" in line]
    assert own and all(line.split()[1] == "r--s" for line in own)
    assert {line.split()[4] for line in maps} <= {line.split()[4] for line in own}  # the same inode


@pytest.mark.parametrize("threads, stack", [(64, None), (24, 64 << 20)])
def test_the_limit_covers_all_threads(bert: Path, threads: int, stack: int | None) -> None:
    """With more threads than CPUs, or large stacks, all threads start and the engine keeps its memory allowance."""
    code = textwrap.dedent("""
        import resource, sys, mpool
        from pathlib import Path
        model, threads, stack = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        if stack:
            resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.getrlimit(resource.RLIMIT_STACK)[1]))
        config = mpool.PoolConfig(isolation="process", threads=threads, max_workers_per_model=1,
                                  process_memory=100_000_000)
        with mpool.Pool(config) as pool:
            pool.embed([f"text {number} " * 30 for number in range(threads * 8)], model)
            ((pid,),) = (row.processes for row in pool.ps())
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            limits = Path(f"/proc/{pid}/limits").read_text().splitlines()
            (limit,) = (int(line.split()[3]) for line in limits if line.startswith("Max data size"))
            print(status["Threads"], int(status["VmData"].split()[0]) * 1024, limit)
    """)
    done = subprocess.run([sys.executable, "-c", code, str(bert), str(threads), str(stack or 0)], capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    started, used, limit = map(int, done.stdout.split())
    assert started == threads and limit - used > 100_000_000


def test_no_descriptor_leaks(bert: Path, pool: mpool.Pool) -> None:
    pool.embed("a", bert)
    pool.unload(bert)
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(50):
        pool.embed("a", bert)
        pool.unload(bert)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1 and threading.active_count() <= threads)
    assert children() == []


# ---- parent process

def test_no_child_outlives_its_parent(bert: Path, llama: Path) -> None:
    code = textwrap.dedent("""
        import sys, threading, mpool
        pool = mpool.Pool(mpool.PoolConfig(isolation="process", threads=1, max_workers_per_model=1))
        pool.embed("a", sys.argv[1])
        job = pool.submit("text_to_text", model=pool.load(sys.argv[2]), prompt="a", max_tokens=1900, n=64,
                          ignore_eos=True)
        print(*(pid for row in pool.ps() for pid in row.processes), flush=True)
        threading.Event().wait()
    """)
    parent = subprocess.Popen([sys.executable, "-c", code, str(bert), str(llama)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    found = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(found) == 2
    parent.kill()
    parent.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in found), 10)
    parent.stdout.close()


def test_fork(bert: Path, pool: mpool.Pool) -> None:
    expected = pool.embed("a", bert)
    before = processes(pool)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            same = np.array_equal(pool.embed("a", bert), expected)
            own = processes(pool)
            pool.close()
            code = 0 if same and own and set(own).isdisjoint(before) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(pool.embed("b", bert), pool.embed("b", bert))
    assert processes(pool) == before  # the fork did not affect the workers of the parent


def test_ignored_sigchld(bert: Path) -> None:
    """With SIGCHLD ignored, the kernel reaps the children and waitpid() finds none."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pool_of() as pool:
            pool.embed("a", bert)
            killed = signal_all(pool, signal.SIGKILL)
            assert pool.embed("a", bert).shape == (32,)
            assert set(processes(pool)).isdisjoint(killed)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert children() == []
