"""Forward log records of the core to Python's ``logging``.

The core writes records into a bounded ring and never to a file descriptor. One daemon thread moves them to the logger
``mpool.pool``; it starts with the first pool and is joined at exit. If it cannot start, records and events stay in
their rings, and every request tries again. To see the records, call ``logging.basicConfig(level="INFO")``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from ..errors import MpoolError
from ..host.resources import start_thread
from ..records import logger

#: Poll interval of the ring in seconds: the usual one, and the one while events have callbacks.
PERIOD, HURRIED = 0.25, 0.02

for _name in ("mpool", "mpool.pool", "mpool.models"):
    logging.getLogger(_name).addHandler(logging.NullHandler())

log = logger("mpool")
pool_log = logger("mpool.pool")

#: Function that calls the callbacks of events; set when the first callback is added.
deliver: Callable[[], None] | None = None


class _Drain:
    """The thread that moves records and events from the rings, and its state."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.thread: threading.Thread | None = None
        self.missing = False  # True: the thread could not start, or ended
        self.level, self.period = -1, PERIOD
        self.hurried = threading.Event()
        self.rounds, self.ended = 0, threading.Condition()  # rounds so far; notified at the end of each

    def start(self) -> None:
        """Start the thread unless it runs or the interpreter exits. A thread that cannot start is not an error."""
        with self.lock:
            if self.thread is not None or self.stopping.is_set():
                return
            warned, self.missing = self.missing, True
            try:
                self.update_level()
                self.thread = start_thread(self.run, "mpool-log")
                self.missing = False
            except (MpoolError, MemoryError, ImportError) as error:
                if not warned:
                    pool_log.warning("The thread that delivers log records and events could not start; the next "
                                     "requests try again: %s", error)

    def update_level(self) -> None:
        """Pass the logger's level to the core, which writes no records below it."""
        from .. import _core

        level = pool_log.getEffectiveLevel()
        if level != self.level:
            _core.set_log_level(level)
            self.level = level

    def run(self) -> None:
        with self.lock:
            if self.thread not in (None, threading.current_thread()):
                return
            if not self.stopping.is_set():
                # again: a signal may have interrupted start() after the thread existed
                self.thread, self.missing = threading.current_thread(), False
        try:
            while not self.stopping.is_set():
                try:
                    self.round()
                except Exception:  # after a MemoryError, for example, the next round may have memory
                    time.sleep(HURRIED)
        finally:  # also after an exception such as SystemExit: the next request starts another thread
            if not self.stopping.is_set():
                self.thread, self.missing = None, True
            self.end_round()

    def round(self) -> None:
        """Wait for the end of a period, then deliver what the rings hold."""
        if self.period == HURRIED:
            self.stopping.wait(HURRIED)
        elif self.hurried.wait(PERIOD):
            self.hurried.clear()
        self.update_level()
        self.flush()
        self.deliver()
        self.end_round()

    def end_round(self) -> None:
        with self.ended:
            self.rounds += 1
            self.ended.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until the thread has delivered what the rings hold now. On the thread itself, return at once."""
        thread, rounds = self.thread, self.rounds
        if thread is not None and thread is not threading.current_thread():
            with self.ended:  # the round that runs now may have read the rings before the last record was written
                self.ended.wait_for(lambda: self.thread is not thread or self.rounds >= rounds + 2, seconds)

    def deliver(self) -> None:
        # Import nothing here: a dataclass that is defined while the interpreter exits discards a pending Ctrl-C.
        if deliver is not None:
            try:
                deliver()
            except Exception:
                pool_log.exception("Events were lost")

    def flush(self) -> None:
        from .. import _core

        for level, text in _core.drain_log():
            try:
                pool_log.log(level, "%s", text)
            except Exception:  # a handler of the program failed; go on with the other records
                pass

    def stop(self) -> None:
        with self.lock:
            thread, self.thread = self.thread, None
            self.stopping.set()
            self.hurried.set()
            self.missing = False
        if thread is not None:
            thread.join(5.0)
        self.flush()
        if thread is None or not thread.is_alive():
            self.deliver()


_drain = _Drain()


def start() -> None:
    """Start the thread unless it is running. If it cannot start, :func:`start_again` tries again."""
    if _drain.thread is None:
        _drain.start()


def update_level() -> None:
    """Pass the logger's level to the core now. The thread does it in each round, which may be too late for a new pool's
    first records."""
    _drain.update_level()


def start_again() -> None:
    """Start the thread if an earlier start failed or if it ended. Every request calls this."""
    if _drain.missing:
        _drain.start()


def hurry(on: bool) -> None:
    """Poll more often from now on (``on``), or at the usual rate again."""
    _drain.period = HURRIED if on else PERIOD
    _drain.hurried.set()


def flush() -> None:
    """Log the records that are in the ring now. Without a thread, deliver the events, too."""
    _drain.flush()
    if _drain.missing:
        _drain.deliver()


def wait_for_events(seconds: float) -> None:
    """Wait until the callbacks of all events so far have returned. Called by a callback, return at once."""
    _drain.wait(seconds)


def stop() -> None:
    """Drain the ring a last time and join the thread."""
    _drain.stop()


def _after_fork_in_child() -> None:
    global _drain
    _drain = _Drain()


os.register_at_fork(after_in_child=_after_fork_in_child)
