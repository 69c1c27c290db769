"""Model-based test of the pool: Hypothesis compares it with a simple model under random sequences of operations.

The model stores whether each of three checkpoints must be loaded, may be loaded, or must not be; the result of every
request, computed alone beforehand; and the open jobs. The search is the same in every run unless
``MPOOL_HYPOTHESIS_SEED`` is set.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpool

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, seed, settings, strategies as st  # noqa: E402
from hypothesis.stateful import (Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple,  # noqa: E402
                                 precondition, rule, run_state_machine_as_test)

TEXTS = ["a cat", "the dog barked at it twice", "", "ä" * 40, "fox " * 30]
LONG: dict[str, Any] = dict(max_tokens=400, ignore_eos=True)

#: Folders, and the result of each request computed alone. Set before the machine runs.
FOLDERS: dict[str, Path] = {}
VECTORS: dict[tuple[str, str], bytes] = {}
TOKENS: dict[tuple[int, int], tuple[int, ...]] = {}


def expect_vector(pool: mpool.Pool, name: str, text: str, call: Callable[[], Any]) -> None:
    """Check that `call` returns the embedding that was computed alone."""
    assert call().tobytes() == VECTORS[name, text]


class PoolMachine(RuleBasedStateMachine):
    """Random operations on one pool."""

    jobs = Bundle("jobs")

    @initialize(workers=st.integers(1, 3), policy=st.sampled_from([None, "shared", "pack", "p2c", "sequential"]))
    def open(self, workers: int, policy: str | None) -> None:
        self.pool = mpool.Pool(mpool.PoolConfig(threads=2, max_workers_per_model=workers, policy=policy,
                                                shutdown_grace=0.5, maintenance_interval=0.01, keep_alive=-1))
        self.closed = False
        self.loaded: dict[str, bool | None] = {}  # by model: True, False, or None if unknown
        self.brief: set[str] = set()  # models with a short keep_alive
        self.calls = 0

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()
            stats = self.pool.registry.stats() if self.calls else None
            if stats is not None:
                assert stats["illegal_transitions"] == 0 and stats["workers_dead"] == 0
                assert stats["total_requests"] == sum(stats[name] for name in (
                    "completed", "errors", "timeouts", "cancelled", "queue_full_rejections"))

    def expect_loaded(self, name: str) -> None:
        """Record that a request to the model completed."""
        self.loaded[name] = None if name in self.brief else True

    # ---- requests --------------------------------------------------------------------------------------------------

    def guarded(self, call: Callable[[], Any]) -> bool:
        """Return True if the pool is open; otherwise check that the request is refused."""
        if not self.closed:
            self.calls += 1
            return True
        with pytest.raises(mpool.ShuttingDown):
            call()
        return False

    @rule(name=st.sampled_from(["bert", "mine"]), text=st.sampled_from(TEXTS))
    def embed(self, name: str, text: str) -> None:
        def call() -> Any:
            return self.pool.embed(text, FOLDERS[name])

        if self.guarded(call):
            expect_vector(self.pool, name, text, call)
            self.expect_loaded(name)

    @rule(name=st.sampled_from(["bert", "mine"]), texts=st.lists(st.sampled_from(TEXTS), max_size=12))
    def embed_many(self, name: str, texts: list[str]) -> None:
        if not self.closed:
            self.calls += 1
            rows = self.pool.embed(texts, FOLDERS[name])
            assert rows.shape[0] == len(texts)
            assert [row.tobytes() for row in rows] == [VECTORS[name, text] for text in texts]
            if texts:
                self.expect_loaded(name)
            else:
                self.loaded[name] = None

    @rule(number=st.integers(0, 3), tokens=st.integers(1, 6), stream=st.booleans())
    def generate(self, number: int, tokens: int, stream: bool) -> None:
        options: dict[str, Any] = dict(max_tokens=tokens, seed=number, temperature=1.0, ignore_eos=True)
        if not self.guarded(lambda: self.pool.generate("A cat", FOLDERS["llama"], **options)):
            return
        if stream:
            chunks = self.pool.generate("A cat", FOLDERS["llama"], stream=True, **options)
            text = "".join(map(str, chunks))
            got = chunks.result()
            assert got.text == text
        else:
            got = self.pool.generate("A cat", FOLDERS["llama"], **options)
        assert tuple(got.token_ids) == TOKENS[number, tokens]
        self.expect_loaded("llama")

    @rule(target=jobs, name=st.sampled_from(["bert", "mine"]), text=st.sampled_from([t for t in TEXTS if t]))
    def submit_embedding(self, name: str, text: str) -> Any:
        def call() -> Any:
            return self.pool.submit("text_embedding", inputs=text, model=FOLDERS[name])

        if not self.guarded(call):
            return multiple()
        self.loaded[name] = None
        return [call(), "vector", (name, text)]

    @rule(target=jobs, number=st.integers(0, 3), tokens=st.integers(1, 6))
    def submit_text(self, number: int, tokens: int) -> Any:
        def call() -> Any:
            return self.pool.submit("text_to_text", prompt="A cat", model=FOLDERS["llama"], max_tokens=tokens,
                                    seed=number, temperature=1.0, ignore_eos=True)

        if not self.guarded(call):
            return multiple()
        self.loaded["llama"] = None
        return [call(), "tokens", (number, tokens)]

    @rule(target=jobs)
    def submit_long(self) -> Any:
        def call() -> Any:
            return self.pool.submit("text_to_text", prompt="The", model=FOLDERS["llama"], **LONG)

        if not self.guarded(call):
            return multiple()
        self.loaded["llama"] = None
        return [call(), "long", None]

    # ---- jobs ------------------------------------------------------------------------------------------------------

    @rule(job=jobs)
    def cancel(self, job: list[Any]) -> None:
        done = job[0].done()
        cancelled = job[0].cancel()
        assert not (done and cancelled)
        if cancelled:
            job[1] = "cancelled"

    @rule(job=jobs)
    def poll(self, job: list[Any]) -> None:
        position = job[0].position()
        assert position >= -1
        if job[0].done():
            assert job[0].position() == -1 and not job[0].cancel()
        else:
            with _end_allowed():
                job[0].result(0)

    @rule(job=consumes(jobs))
    def result(self, job: list[Any]) -> None:
        handle, kind, what = job
        try:
            got = handle.result(20)
            assert kind != "cancelled"
        except mpool.ShuttingDown:
            assert self.closed
            return
        except mpool.Cancelled:
            assert kind == "cancelled" or self.closed
            return
        if what is None:
            assert len(got.token_ids) == LONG["max_tokens"]
        elif isinstance(what[0], str):
            assert got.tobytes() == VECTORS[what]
        else:
            assert tuple(got.token_ids) == TOKENS[what]
        assert handle.done() and handle.result(0) is not None

    @rule(job=consumes(jobs))
    def drop(self, job: list[Any]) -> None:
        job.clear()

    # ---- models ----------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(["bert", "mine", "llama"]), pin=st.booleans())
    def load(self, name: str, pin: bool) -> None:
        def call() -> Any:
            return self.pool.load(FOLDERS[name], pin=pin, timeout=60)

        if self.guarded(call):
            call()
            self.expect_loaded(name)

    @precondition(lambda self: not self.closed)
    @rule(name=st.sampled_from(["bert", "mine", "llama"]))
    def unload(self, name: str) -> None:
        try:
            self.pool.unload(FOLDERS[name], timeout=0.2)
            self.loaded[name] = None if self.loaded.get(name, False) is None else False
        except mpool.Timeout:  # long jobs run; the unload continues in the background
            assert name == "llama"
            self.loaded[name] = None

    @precondition(lambda self: not self.closed and "mine" in self.loaded)
    @rule()
    def replace(self) -> None:
        """Replace the model file by a copy, with an unload before and after it."""
        file = FOLDERS["mine"] / "model.safetensors"
        fresh = file.with_suffix(".fresh")
        shutil.copyfile(file, fresh)
        self.pool.unload(FOLDERS["mine"], timeout=60)
        os.replace(fresh, file)
        self.pool.unload(FOLDERS["mine"], timeout=60)
        self.loaded["mine"] = False

    @precondition(lambda self: not self.closed and self.calls > 0)
    @rule(name=st.sampled_from(["bert", "mine", "llama"]), seconds=st.sampled_from([0.0, 0.02, -1.0, 300.0]))
    def keep_alive(self, name: str, seconds: float) -> None:
        for key in self.pool.get(FOLDERS[name])._entry.core_keys():
            self.pool.registry.keep_alive(key, 1e9 if seconds < 0 else seconds)
        (self.brief.add if 0 <= seconds < 1 else self.brief.discard)(name)
        self.loaded[name] = None

    @rule(begin=st.booleans())
    @precondition(lambda self: self.calls > 12)
    def close(self, begin: bool) -> None:
        if begin:
            self.pool.begin_shutdown()
        self.pool.close()
        self.pool.close()
        self.closed = True

    # ---- always ----------------------------------------------------------------------------------------------------

    @invariant()
    def rows_fit_the_model(self) -> None:
        if not hasattr(self, "pool") or self.closed or not self.calls:
            return
        rows = {row["key"]: row for row in self.pool.registry.entries()}
        for name, loaded in self.loaded.items():
            keys = self.pool.get(FOLDERS[name])._entry.core_keys() if loaded is not None else []
            states = {rows[key]["state"] for key in keys if key in rows}
            if loaded is True:
                assert states & {"ready", "busy", "loading"}, (name, states)
            if loaded is False:
                assert states <= {"cold"}, (name, states)
        stats = self.pool.registry.stats()
        assert stats["memory_used"] <= stats["memory_limit"]
        assert stats["compute_threads_leased"] <= stats["compute_threads"]

    @invariant()
    def no_request_waits_while_a_worker_is_idle(self) -> None:
        if not hasattr(self, "pool") or self.closed or not self.calls:
            return
        end = time.monotonic() + 30
        while True:
            stuck = [row for row in self.pool.registry.entries()
                     if row["queued"] and row["workers"] > row["busy"] and row["state"] != "loading"]
            if not stuck:
                return
            assert time.monotonic() < end, stuck
            time.sleep(0.002)


class _end_allowed:
    """Suppress the errors of a job that may not be done, or may be cancelled."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        return isinstance(error, (mpool.Timeout, mpool.Cancelled, mpool.ShuttingDown))


def test_the_pool_behaves_like_its_model(bert: Path, llama: Path, tmp_path: Path) -> None:
    mine = Path(shutil.copytree(bert, tmp_path / "mine"))
    FOLDERS.update(bert=bert, llama=llama, mine=mine)
    with mpool.Pool() as pool:
        for name in ("bert", "mine"):
            for text in TEXTS:
                VECTORS[name, text] = pool.embed(text, FOLDERS[name]).tobytes()
        for number in range(4):
            for tokens in range(1, 7):
                TOKENS[number, tokens] = tuple(pool.generate("A cat", llama, max_tokens=tokens, seed=number,
                                                             temperature=1.0, ignore_eos=True).token_ids)
    given = os.environ.get("MPOOL_HYPOTHESIS_SEED")
    machine: Any = seed(int(given))(PoolMachine) if given else PoolMachine
    run_state_machine_as_test(machine, settings=settings(
        max_examples=int(os.environ.get("MPOOL_HYPOTHESIS_EXAMPLES", "80")), stateful_step_count=40, deadline=None,
        derandomize=not given, database=None, suppress_health_check=list(HealthCheck)))
