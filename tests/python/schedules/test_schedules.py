"""The Python layer under seeded schedules: every call ends with its result or one error of mpool, and the pool answers
afterwards. helpers/scheduler.py has the scheduler.

``MPOOL_SCHEDULE_SEED=n`` repeats the schedule of a failing seed. ``--slow`` runs a hundred times as many seeds."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scheduler import Scheduler, answered, cooperative, explore

import mpool
from mpool import _core, aio
from mpool.api import functions
from mpool.runtime import logs

SEEDS = range(5)
MANY = range(800)


@pytest.fixture(scope="module", autouse=True)
def expected(bert: Path) -> Iterator[dict[str, bytes]]:
    """Vectors computed alone. Also imports every module that the scenarios use, so that their locks are replaced."""
    with mpool.Pool(mpool.PoolConfig(threads=1)) as pool:
        found = {text: pool.embed(text, bert).tobytes() for text in "abc"}

        async def warm() -> None:
            await aio.embed("a", bert, pool=pool)

        asyncio.run(warm())
        pool.submit("text_embedding", inputs="a", model=bert).result()
        pool.on("ready", print)()
        yield found


def config(**options: Any) -> mpool.PoolConfig:
    return mpool.PoolConfig(threads=1, max_workers_per_model=1, shutdown_grace=2.0, **options)


@pytest.fixture
def locks() -> Iterator[None]:
    with cooperative():
        yield


# ---- scenarios -------------------------------------------------------------------------------------------------------
# Each takes a scheduler and raises AssertionError if a call misbehaves.

def first_use(bert: Path, expected: dict[str, bytes]) -> Callable[[Scheduler], None]:
    """The first requests of a pool come from three threads: one registry, one entry, one key of the core."""
    def scenario(scheduler: Scheduler) -> None:
        made: list[Any] = []
        real = _core.Registry

        def registry(**options: Any) -> Any:
            made.append(real(**options))
            return made[-1]

        with mpool.Pool(config()) as pool, pytest.MonkeyPatch.context() as patch:
            patch.setattr(_core, "Registry", registry)
            results = scheduler.run(*(lambda text=text: pool.embed(text, bert).tobytes() for text in "abc"))
            assert results == [expected[text] for text in "abc"], results
            assert len(made) == 1 and len(pool.ps()) == 1 and len(pool._names.by_key) == 1
            (entry,) = pool._names.by_key.values()
            assert len(entry.core_keys()) == 1
    return scenario


def close_during_use(bert: Path) -> Callable[[Scheduler], None]:
    def scenario(scheduler: Scheduler) -> None:
        pool = mpool.Pool(config())
        stops: list[Any] = []
        results = scheduler.run(lambda: pool.embed("a", bert), pool.close,
                                lambda: stops.append(pool.on("request_complete", print)),
                                lambda: (pool.ps(), pool.health(), pool.metrics()))
        assert all(map(answered, results)), results
        for call in (lambda: pool.embed("b", bert), lambda: pool.on("ready", print)):
            with pytest.raises(mpool.ShuttingDown):
                call()
        pool.close()
    return scenario


def register_and_forget(bert: Path, expected: dict[str, bytes]) -> Callable[[Scheduler], None]:
    """Two threads register one name: one of them succeeds. A third unloads and embeds by path."""
    def scenario(scheduler: Scheduler) -> None:
        with mpool.Pool(config()) as pool:
            def again() -> bytes:
                pool.unload(bert, timeout=10)
                return pool.embed("b", bert).tobytes()

            results = scheduler.run(lambda: pool.register("mine", bert).key, lambda: pool.register("mine", bert).key,
                                    again)
            assert sorted(type(one).__name__ for one in results[:2]) == ["InvalidArgument", "str"], results
            assert results[2] == expected["b"]
            assert pool.embed("a", "mine").tobytes() == expected["a"]
    return scenario


def shared_job(bert: Path) -> Callable[[Scheduler], None]:
    """Three threads wait for one job. No waiter is lost, and none is left."""
    def scenario(scheduler: Scheduler) -> None:
        with mpool.Pool(config()) as pool:
            pool.load(bert)
            ticket = pool.submit("text_embedding", inputs="a", model=bert)._ticket

            def wait() -> bool:
                with ticket.join():
                    return bool(ticket.wait(10))

            assert scheduler.run(wait, wait, wait) == [True] * 3
            assert ticket.waiters() == 0
    return scenario


def drain_start(scheduler: Scheduler) -> None:
    """Threads start, stop and restart the thread of events while a start fails: in the end one thread runs, or none if
    it was stopped."""
    drain, refused, real = logs._Drain(), [], threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "mpool-log" and not refused:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        real(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert scheduler.run(drain.start, drain.start, drain.start) == [None] * 3
        drain.start()
        alive = [thread for thread in threading.enumerate() if getattr(thread, "_target", None) == drain.run]
        assert len(alive) == 1 and drain.thread is alive[0] and not drain.missing
        scheduler.run(drain.stop, drain.start, drain.stop)
        alive[0].join(30)
        assert not alive[0].is_alive() and drain.thread is None


def callbacks(bert: Path) -> Callable[[Scheduler], None]:
    """Callbacks come and go while requests run. A callback that stays gets every event."""
    def scenario(scheduler: Scheduler) -> None:
        seen: list[str] = []
        with mpool.Pool(config()) as pool:
            pool.on("request_complete", lambda event: seen.append(event.event))

            def brief() -> None:
                for _ in range(3):
                    pool.on("request_complete", len)()

            assert not [one for one in scheduler.run(brief, brief, lambda: len(pool.embed("a", bert)),
                                                     lambda: len(pool.embed("b", bert)))
                        if isinstance(one, BaseException)]
            end = threading.Event()
            for _ in range(3000):
                if len(seen) == 2:
                    break
                end.wait(0.01)
            assert len(seen) == 2 and len(pool._callbacks) == 1
    return scenario


def event_loops(bert: Path, expected: dict[str, bytes]) -> Callable[[Scheduler], None]:
    """Two event loops and a thread share a pool; one task is cancelled. The others get their vectors."""
    def scenario(scheduler: Scheduler) -> None:
        with mpool.Pool(config()) as pool:
            async def cancelled() -> bytes:
                task = asyncio.ensure_future(aio.embed("c", bert, pool=pool))
                await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                found: bytes = (await aio.embed("a", bert, pool=pool)).tobytes()
                return found

            async def plain() -> bytes:
                found: bytes = (await aio.embed("b", bert, pool=pool)).tobytes()
                return found

            results = scheduler.run(lambda: asyncio.run(cancelled()), lambda: asyncio.run(plain()),
                                    lambda: pool.embed("c", bert).tobytes())
            assert results == [expected["a"], expected["b"], expected["c"]], results
    return scenario


def default_pool(scheduler: Scheduler) -> None:
    """The process-wide pool is created once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "_default", None)
        results = scheduler.run(*[functions.default_pool] * 4)
        assert len({id(pool) for pool in results}) == 1 and isinstance(results[0], mpool.Pool), results


def catalogue_cache(scheduler: Scheduler) -> None:
    from mpool.models import catalogue

    catalogue.load.cache_clear()
    results = scheduler.run(*[lambda: sorted(catalogue.load().rows)] * 3)
    assert results[0] == results[1] == results[2] and len(results[0]) > 10


def scenarios(bert: Path, expected: dict[str, bytes]) -> dict[str, Callable[[Scheduler], None]]:
    return {"first_use": first_use(bert, expected), "close_during_use": close_during_use(bert),
            "register_and_forget": register_and_forget(bert, expected), "shared_job": shared_job(bert),
            "drain_start": drain_start, "callbacks": callbacks(bert), "event_loops": event_loops(bert, expected),
            "default_pool": default_pool, "catalogue_cache": catalogue_cache}


NAMES = ("first_use", "close_during_use", "register_and_forget", "shared_job", "drain_start", "callbacks",
         "event_loops", "default_pool", "catalogue_cache")


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NAMES)
def test_schedules(name: str, bert: Path, expected: dict[str, bytes], locks: None) -> None:
    explore(SEEDS, scenarios(bert, expected)[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_many_schedules(name: str, bert: Path, expected: dict[str, bytes], locks: None) -> None:
    explore(MANY, scenarios(bert, expected)[name])
