"""The C extension with tiny models: requests, tickets, waiting, signals, shutdown."""

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinymodels
from corelib import SAMPLING

import mpool
from mpool import _core
from waiting import until

DONE = 2**64 - 1
IDS = np.array([2, 9, 10, 11, 3, 2, 12, 3], np.int32)
OFFSETS = np.array([0, 5, 8], np.int64)
PROMPT = np.array([5, 6, 7], np.int32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tinymodels.cached(tmp_path_factory, "bert"), tinymodels.cached(tmp_path_factory, "llama")


@pytest.fixture
def pool(folders: tuple[Path, Path]) -> Iterator[mpool.Pool]:
    with mpool.Pool(mpool.PoolConfig(threads=1)) as made:
        yield made


def key_of(pool: mpool.Pool, folder: Path) -> tuple[_core.Registry, str]:
    # not public: the key in the core's registry
    key = pool.get(str(folder))._entry.core_key("auto")
    pool.registry.load(key, timeout=60)
    return pool.registry, key


@pytest.fixture
def bert(pool: mpool.Pool, folders: tuple[Path, Path]) -> tuple[_core.Registry, str]:
    return key_of(pool, folders[0])


@pytest.fixture
def llama(pool: mpool.Pool, folders: tuple[Path, Path]) -> tuple[_core.Registry, str]:
    return key_of(pool, folders[1])


def long_request(llama: tuple[_core.Registry, str], **options: Any) -> _core.Ticket:
    """Submit a request that takes several seconds."""
    registry, key = llama
    return registry.submit_text(key, PROMPT, **{**SAMPLING, "max_tokens": 2000, "n": 64, **options})


# --- embedding ---


def test_vectors_are_views_of_the_request(bert: tuple[_core.Registry, str]) -> None:
    registry, key = bert
    vectors = registry.embed(key, IDS, OFFSETS)
    assert vectors.shape == (2, 32) and vectors.dtype == np.float32 and vectors.flags.writeable
    assert type(vectors.base).__name__ == "PyCapsule" and vectors.ctypes.data % 64 == 0
    ticket = registry.submit_embed(key, IDS, OFFSETS)
    assert ticket.wait(30) and ticket.texts_done() == 2
    again = ticket.vectors()
    assert again.ctypes.data == ticket.vectors().ctypes.data
    assert again.tobytes() == vectors.tobytes()
    gc.collect()
    held = registry.stats()["bytes_by_tag"]["request"]
    del ticket, again
    gc.collect()
    assert registry.stats()["bytes_by_tag"]["request"] < held
    ticket = registry.submit_embed(key, IDS, OFFSETS, outputs=3)
    assert ticket.wait(30) and ticket.states().shape == (8, 32) and ticket.vectors().tobytes() == vectors.tobytes()
    for other in (ticket.rows, ticket.sparse):
        with pytest.raises(mpool.InvalidArgument, match="not ask for this output: `outputs` must have bit [48], got 3"):
            other()
    with pytest.raises(mpool.MpoolError, match="has no sparse vectors, it has: vectors of texts, hidden states"):
        registry.submit_embed(key, IDS, OFFSETS, outputs=8)
    assert registry.embed(key, IDS, OFFSETS, dimensions=4).shape == (2, 4)
    skipped = registry.embed(key, IDS, OFFSETS, np.array([1, 0], np.int32))
    assert skipped[0].tobytes() != vectors[0].tobytes() and skipped[1].tobytes() == vectors[1].tobytes()


def test_errors_carry_the_key_and_the_lengths(bert: tuple[_core.Registry, str],
                                              llama: tuple[_core.Registry, str]) -> None:
    registry, key = bert
    with pytest.raises(mpool.UnknownModel) as unknown:
        registry.embed("none", IDS, OFFSETS)
    assert unknown.value.key == "none" and isinstance(unknown.value, LookupError)
    with pytest.raises(mpool.WrongCapability) as wrong:
        registry.embed(llama[1], IDS, OFFSETS)
    assert wrong.value.key == llama[1] and "text_to_text" in str(wrong.value)
    with pytest.raises(mpool.ContextOverflow) as long:
        registry.embed(key, np.full(100, 9, np.int32), np.array([0, 100]))
    assert (long.value.tokens, long.value.limit, long.value.key) == (100, 64, key)
    with pytest.raises(TypeError):
        registry.submit_text(llama[1], PROMPT, temperature=0.0)


def test_waiting_releases_the_gil(llama: tuple[_core.Registry, str]) -> None:
    ticket = long_request(llama)
    turns, stop = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1
            time.sleep(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    moved, before = 0, sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # Python never switches threads by itself: the other one runs during the wait only
    try:
        for _ in range(40):
            seen = turns
            assert not ticket.wait(0.05)
            moved += turns - seen
            if moved > 20:
                break
    finally:
        stop.set()
        sys.setswitchinterval(before)
        thread.join()
    assert moved > 20


# --- tickets ---


def test_progress_of_a_ticket(llama: tuple[_core.Registry, str]) -> None:
    registry, key = llama
    before = time.monotonic()
    ticket = registry.submit_text(key, PROMPT, **{**SAMPLING, "max_tokens": 30, "logprobs": 2, "n": 2})
    with pytest.raises(mpool.InvalidArgument, match="choice"):
        ticket.text(2)
    with pytest.raises(mpool.WrongCapability):
        ticket.vectors()
    seen, texts = 0, [b"", b""]
    while seen != DONE:
        step = ticket.wait_progress(seen, 30)
        assert step > seen
        seen = step
        for choice in (0, 1):
            more, _, _, _ = ticket.text(choice, len(texts[choice]))
            texts[choice] += more
    ticket.check()
    assert ticket.done() and ticket.wait(0) and ticket.wait_progress(DONE - 1) == DONE and ticket.position() == -1
    submitted, started, finished = ticket.times()
    assert before <= submitted <= started <= finished <= time.monotonic()
    for choice in (0, 1):
        text, count, finish, stop_index = ticket.text(choice)
        ids, logprobs, ends = ticket.tokens(choice)
        assert (text, count, finish, stop_index) == (texts[choice], 30, 2, -1)
        assert len(ids) == len(logprobs) == len(ends) == 30 and ends[-1] == len(text) and (np.diff(ends) >= 0).all()
        top_ids, top_logprobs = ticket.top_logprobs(choice)
        assert top_ids.shape == top_logprobs.shape == (30, 2)
        may_end = top_ids[:, 0] != 2  # ignore_eos excludes the end token from sampling, not from the log probabilities
        assert may_end.any() and (top_ids[may_end, 0] == ids[may_end]).all()
        assert np.allclose(top_logprobs[may_end, 0], logprobs[may_end])
        for start in (1, 29, 30, 31, 2**32 - 1):
            for some, whole in zip(ticket.tokens(choice, start), (ids, logprobs, ends), strict=True):
                assert np.array_equal(some, whole[start:])
            for some, whole in zip(ticket.top_logprobs(choice, start), (top_ids, top_logprobs), strict=True):
                assert some.shape[1] == 2 and np.array_equal(some, whole[start:])
        for start in (0, 1, 29, 30, 31):
            assert ticket.sampled_ids(choice, start) == (ids[start:].tolist(), True)
        with pytest.raises(mpool.InvalidArgument, match="start"):
            ticket.text(choice, len(text) + 1)
    prompt, generated, cached, queued, prompt_time, generation = ticket.usage()
    assert (prompt, generated) == (3, 60) and cached >= 0
    assert queued >= 0 and prompt_time > 0 and generation > 0 and queued + prompt_time + generation < 60
    with pytest.raises(mpool.InvalidArgument, match="prompt_logits"):
        ticket.prompt_logits()


def test_prompt_logits_have_the_models_width(llama: tuple[_core.Registry, str]) -> None:
    registry, key = llama
    vocab = registry.entries()[0]["facts"]["vocab"]
    ticket = registry.submit_text(key, PROMPT, prompt_logits=True, **SAMPLING)
    ticket.wait(30)
    logits = ticket.prompt_logits()
    assert logits.shape == (3, vocab) and np.isfinite(logits).all()
    assert int(logits[-1].argmax()) == int(ticket.tokens(0)[0][0])


def test_cancel_and_abandon(llama: tuple[_core.Registry, str]) -> None:
    registry, _ = llama
    ticket = long_request(llama)
    ticket.wait_progress(0, 30)
    with pytest.raises(mpool.InvalidArgument, match="not done"):
        ticket.check()
    ticket.cancel()
    assert ticket.wait(10)
    with pytest.raises(mpool.Cancelled):
        ticket.check()
    assert len(ticket.text(0)[0]) > 0  # the generated text stays available
    cancelled = registry.stats()["cancelled"]
    ticket = long_request(llama)
    del ticket
    until(lambda: registry.stats()["cancelled"] > cancelled, 10)
    assert registry.stats()["cancelled"] == cancelled + 1


def test_timeouts(llama: tuple[_core.Registry, str]) -> None:
    ticket = long_request(llama, timeout=0.1)
    assert ticket.wait(10)
    submitted, _, ended = ticket.times()
    assert ended - submitted >= 0.1
    with pytest.raises(mpool.Timeout) as late:
        ticket.check()
    assert isinstance(late.value, TimeoutError) and late.value.key == llama[1]
    with pytest.raises(mpool.Timeout):
        long_request(llama, timeout=0.0)
    long_request(llama, timeout=float("inf")).cancel()


# --- signals (pytest runs tests in the main thread) ---


class Alarm(Exception):
    pass


@pytest.fixture
def alarm() -> Iterator[None]:
    def raise_alarm(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, raise_alarm)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def until_alarm(call: Any) -> None:
    """Run a function until an alarm raises."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(Alarm):
        call()


def test_a_signal_ends_every_wait(llama: tuple[_core.Registry, str], alarm: None) -> None:
    """A wait that ignored the signal would last until the request is complete."""
    registry, key = llama
    for wait in (lambda: ticket.wait(), lambda: [ticket.wait_progress(DONE - 1) for _ in range(99)]):
        ticket = long_request(llama)
        until_alarm(wait)
        assert ticket.wait(10)
        with pytest.raises(mpool.Cancelled):
            ticket.check()
    # other requests continue
    other = registry.submit_text(key, PROMPT, **{**SAMPLING, "max_tokens": 3})
    assert other.wait(30)
    other.check()


# --- entries ---


def test_waits_for_entries_observe_their_timeout(llama: tuple[_core.Registry, str]) -> None:
    registry, key = llama
    ticket = long_request(llama)
    ticket.wait_progress(0, 30)
    with pytest.raises(mpool.Timeout, match=r"the deadline \(active requests: 1\); it continues in the background"):
        registry.evict(key, timeout=0.1)
    ticket.cancel()
    registry.evict(key, timeout=30)
    registry.load(key)
    ticket = long_request(llama)
    ticket.wait_progress(0, 30)
    with pytest.raises(mpool.Timeout):
        registry.remove(key, timeout=0.12)
    with pytest.raises(mpool.UnknownModel):
        registry.load(key)
    ticket.cancel()
    registry.remove(key, timeout=30)


# --- shutdown ---


def test_close_is_idempotent_and_final(folders: tuple[Path, Path]) -> None:
    pool = mpool.Pool(mpool.PoolConfig(threads=1))
    before = pool.registry.stats()["memory_used"]  # total of the process: other registries may have loaded models
    registry, key = key_of(pool, folders[0])
    ticket = registry.submit_embed(key, IDS, OFFSETS)
    registry.begin_shutdown()
    with pytest.raises(mpool.ShuttingDown):
        registry.embed(key, IDS, OFFSETS)
    closers = [threading.Thread(target=registry.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in closers:
        thread.join()
    registry.close()
    assert ticket.done() and ticket.vectors().shape == (2, 32)
    assert registry.entries() == [] and registry.stats()["memory_used"] <= before
    with pytest.raises(mpool.ShuttingDown):
        registry.load(key)
    pool.close()


def test_a_ticket_keeps_its_registry_alive(folders: tuple[Path, Path]) -> None:
    pool = mpool.Pool(mpool.PoolConfig(threads=1))
    _, key = key_of(pool, folders[1])
    registry = _core.Registry(threads=1)
    table = pool.get(str(folders[1]))._entry
    description = table.describe()
    spec = _core.Spec(description.spec.architecture)
    for path in description.spec.files:
        spec.add_file(path)
    for name, value in description.spec.kv.items():
        spec.set(name, value)
    for tensor in description.spec.tensors:
        spec.add_tensor(tensor.name, tensor.dtype, tensor.shape, tensor.file, tensor.offset, tensor.nbytes)
    tokens = table.files.token_table()
    spec.set_tokens(tokens.data, np.ascontiguousarray(tokens.offsets, dtype=np.int64), tokens.control,
                    sorted(tokens.eog))
    registry.add("own", spec)
    ticket = registry.submit_text("own", PROMPT, **{**SAMPLING, "max_tokens": 5})
    del registry, spec
    gc.collect()
    assert ticket.wait(30)
    ticket.check()
    assert len(ticket.tokens(0)[0]) == 5
    del ticket  # also frees the registry, which joins its threads
    gc.collect()
    pool.close()


PROGRAM = """
import sys, threading
import numpy as np
sys.path.insert(0, {here!r})
import mpool
from corelib import SAMPLING
pool = mpool.Pool(mpool.PoolConfig(threads=1, shutdown_grace=0.2))
key = pool.get({folder!r})._entry.core_key("auto")
registry = pool.registry
registry.load(key)
def call():
    try:
        ticket = registry.submit_text(key, np.array([5, 6], np.int32), **{{**SAMPLING, "max_tokens": 2000, "n": 64}})
        ticket.wait()
    except mpool.MpoolError:
        pass
for _ in range(4):
    threading.Thread(target=call, daemon=True).start()
ticket = registry.submit_text(key, np.array([5, 6], np.int32), **{{**SAMPLING, "max_tokens": 2000, "n": 64}})
ticket.wait_progress(0)
{end}
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "del pool, registry, ticket", "registry.begin_shutdown()",
                                 "sys.modules.pop('mpool._core'); import gc; gc.collect()"])
def test_exit_without_close(folders: tuple[Path, Path], end: str) -> None:
    program = PROGRAM.format(here=str(Path(__file__).parents[1] / "helpers"), folder=str(folders[1]), end=end)
    run = subprocess.run([sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "Error" not in run.stderr, run.stderr
