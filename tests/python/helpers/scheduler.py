"""A seeded scheduler of Python threads: one thread runs at a time, and may change at every line of ``mpool/``.

The counterpart, for the Python layer, of the simulator of the C registry. ``sys.settrace`` calls the scheduler before
each line of the package. A seed decides there which thread continues, by releasing its semaphore; all other threads
wait on theirs. The locks of the package are replaced during a run: a thread that finds a lock taken gives its turn to
another. A thread that blocks elsewhere (in the core, in an import, in asyncio) loses its turn after :data:`STUCK`
seconds without a traced line, and takes part again at its next line. The failing seed is part of each error.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

import mpool

ROOT = os.path.dirname(os.path.abspath(mpool.__file__)) + os.sep
#: Seconds without a line of the running thread after which it counts as blocked.
STUCK = 0.03
#: Seconds after which a scenario counts as deadlocked.
LIMIT = 20.0


_local = threading.local()


class Lock:
    """A lock whose waiting threads give their turn away. ``reentrant``: as ``threading.RLock``."""

    def __init__(self, reentrant: bool = False) -> None:
        self._real: Any = threading.RLock() if reentrant else threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        found = getattr(_local, "worker", None)
        if found is None or not blocking:
            return bool(self._real.acquire(blocking, timeout))
        scheduler, worker = found
        while not self._real.acquire(False):
            scheduler.give_way(worker)
        return True

    def release(self) -> None:
        self._real.release()

    def locked(self) -> bool:
        return bool(self._real.locked())

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class _Threading(ModuleType):
    """The module ``threading`` with the locks above, for the modules of the package."""

    Lock = Lock

    @staticmethod
    def RLock() -> Lock:
        return Lock(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class cooperative:
    """Replace the locks of the package inside a ``with`` block: those of its modules, and those of objects that it
    creates there. Modules that are imported later keep their own."""

    def __enter__(self) -> None:
        self._changed: list[tuple[ModuleType, str, Any]] = []
        kinds = (type(threading.Lock()), type(threading.RLock()))
        proxy = _Threading("threading")
        for name, module in list(sys.modules.items()):
            if module is None or not (name == "mpool" or name.startswith("mpool.")):
                continue
            for key, value in list(vars(module).items()):
                if value is threading or isinstance(value, kinds):
                    self._changed.append((module, key, value))
                    setattr(module, key, proxy if value is threading else Lock(isinstance(value, kinds[1])))

    def __exit__(self, *error: object) -> None:
        for module, key, value in self._changed:
            setattr(module, key, value)


class Deadlock(AssertionError):
    """Threads of a scenario did not end."""


class _Worker:
    def __init__(self, number: int) -> None:
        self.number, self.turn = number, threading.Semaphore(0)
        self.waiting = self.done = False


class Scheduler:
    """Runs functions on threads of their own, in the order that a seed decides.

    Args:
        seed: the number that decides.
        switch: probability of a switch at a line.

    Attributes:
        trace: (thread, file, line) of the last lines before each switch.
    """

    def __init__(self, seed: int, switch: float = 0.2) -> None:
        self.seed, self._random, self._switch = seed, random.Random(seed), switch
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._running: _Worker | None = None
        self._steps = 0
        self.trace: list[tuple[int, str, int]] = []

    def run(self, *functions: Callable[[], Any]) -> list[Any]:
        """Run functions concurrently. Returns the result of each, or the exception that it raised.

        Raises:
            Deadlock: a function did not return within :data:`LIMIT` seconds; the message has the seed and the stacks.
        """
        results: list[Any] = [None] * len(functions)
        self._workers = [_Worker(number) for number in range(len(functions))]
        threads = []
        for worker, function in zip(self._workers, functions):
            thread = threading.Thread(target=self._body, args=(worker, function, results), daemon=True,
                                      name=f"schedule-{self.seed}-{worker.number}")
            threads.append(thread)
            thread.start()
        while not all(worker.waiting for worker in self._workers):
            time.sleep(0)
        self._hand_over(None)
        end, steps = time.monotonic() + LIMIT, -1
        while any(thread.is_alive() for thread in threads):
            next(thread for thread in threads if thread.is_alive()).join(STUCK)
            if time.monotonic() > end:
                raise Deadlock(self._report(threads))
            with self._lock:
                stuck, steps = self._steps == steps, self._steps
                if stuck:  # the running thread is in a blocking call: another one continues
                    self._pick(None)
        return results

    def _body(self, worker: _Worker, function: Callable[[], Any], results: list[Any]) -> None:
        worker.waiting = True
        worker.turn.acquire()
        _local.worker = self, worker
        sys.settrace(lambda frame, event, argument: self._enter(worker, frame))
        try:
            results[worker.number] = function()
        except BaseException as error:
            results[worker.number] = error
        finally:
            sys.settrace(None)
            with self._lock:
                worker.done, worker.waiting = True, False
                if self._running is worker or self._running is None:
                    self._pick(None)

    def _enter(self, worker: _Worker, frame: FrameType) -> Any:
        if not frame.f_code.co_filename.startswith(ROOT):
            return None

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                self._yield(worker, frame)
            return line

        return line

    def _yield(self, worker: _Worker, frame: FrameType) -> None:
        with self._lock:
            self._steps += 1
            mine = self._running is worker
            if mine and self._random.random() >= self._switch:
                return
            self.trace = [*self.trace[-30:], (worker.number, frame.f_code.co_filename[len(ROOT):], frame.f_lineno)]
            worker.waiting = True
            if mine or self._running is None:
                self._pick(worker)
        worker.turn.acquire()

    def give_way(self, worker: _Worker) -> None:
        """Give the turn to another thread, if one can run; else wait a moment."""
        with self._lock:
            self._steps += 1
            others = [one for one in self._workers if one.waiting and not one.done]
            mine = self._running is worker
            if mine and others:
                worker.waiting = True
                self._running = self._random.choice(others)
                self._running.waiting = False
                self._running.turn.release()
            elif not mine:
                worker.waiting = True
        if mine and not others:
            time.sleep(0.001)
        else:
            worker.turn.acquire()

    def _pick(self, asking: _Worker | None) -> None:
        """Give the turn to a waiting thread. Must hold the lock."""
        ready = [worker for worker in self._workers if worker.waiting and not worker.done]
        self._running = self._random.choice(ready) if ready else None
        if self._running is not None:
            self._running.waiting = False
            self._running.turn.release()

    def _hand_over(self, worker: _Worker | None) -> None:
        with self._lock:
            self._pick(worker)

    def _report(self, threads: Sequence[threading.Thread]) -> str:
        import traceback

        frames = sys._current_frames()
        stacks = ["".join(traceback.format_stack(frames[thread.ident])[-6:]) for thread in threads
                  if thread.ident in frames and thread.is_alive()]
        return f"seed {self.seed}: threads did not end within {LIMIT} s\n" + "\n---\n".join(stacks)


def explore(seeds: Sequence[int], scenario: Callable[[Scheduler], None], switch: float = 0.2) -> None:
    """Run a scenario once per seed. An error names its seed.

    ``MPOOL_SCHEDULE_SEED`` replaces the seeds by one number, to repeat a failure.
    """
    only = os.environ.get("MPOOL_SCHEDULE_SEED")
    for seed in [int(only)] if only else seeds:
        scheduler = Scheduler(seed, switch)
        try:
            scenario(scheduler)
        except BaseException as error:
            error.add_note(f"repeat with MPOOL_SCHEDULE_SEED={seed}; last switches: {scheduler.trace[-8:]}") \
                if hasattr(error, "add_note") else None
            raise


def answered(result: Any, *allowed: type[BaseException]) -> bool:
    """Return True if a call ended with a result, or with one of the allowed errors of mpool."""
    return not isinstance(result, BaseException) or isinstance(result, (mpool.MpoolError, *allowed))
